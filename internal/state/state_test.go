package state

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func TestMain(m *testing.M) {
	// As a child: hold the lease of ssd0 until killed.
	if dir := os.Getenv("STATE_TEST_HOLD"); dir != "" {
		s, err := Open(dir)
		if err == nil {
			_, err = s.Acquire("heliosctl train", "ssd0")
		}
		fmt.Println("held", err)
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestUpdateAndLoad(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "deep", "state"))
	require.NoError(t, err)
	st, err := s.Load()
	require.NoError(t, err)
	require.Empty(t, st.SSDs)

	want := SSD{Name: "ssd0", Kind: KindProxy, Path: "/x/a.img", Serial: "S1", Bytes: 1 << 20,
		LBABytes: 512, Created: true}
	require.NoError(t,
		s.Update(t.Context(),
			func(st *State) error { st.SSDs = append(st.SSDs, want); return nil }))
	st, err = s.Load()
	require.NoError(t, err)
	require.Equal(t, []SSD{want}, st.SSDs)
	require.Equal(t, "ssd1", st.NextName())

	// A change that fails leaves the file as it was, and no temporary file.
	require.Error(t,
		s.Update(t.Context(), func(st *State) error { st.SSDs = nil; return os.ErrInvalid }))
	st, err = s.Load()
	require.NoError(t, err)
	require.Len(t, st.SSDs, 1)
	left, err := filepath.Glob(filepath.Join(s.Dir(), ".state-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Many updates at once lose none of them: the lock covers load, change and write.
func TestUpdatesDoNotGetLost(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			s, err := Open(dir)
			if err == nil {
				err = s.Update(t.Context(), func(st *State) error {
					st.SSDs = append(st.SSDs, SSD{Name: st.NextName()})
					return nil
				})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	s, _ := Open(dir)
	st, err := s.Load()
	require.NoError(t, err)
	require.Len(t, st.SSDs, 16)
	require.Equal(t, "ssd16", st.NextName())
}

func TestUpdateWaitIsBounded(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	f, err := lockFile(t.Context(), filepath.Join(s.Dir(), "lock"))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Update(ctx, func(*State) error { return nil }), context.DeadlineExceeded)
	require.NoError(t, f.Close())
	require.NoError(t, s.Update(t.Context(), func(*State) error { return nil }))
}

func TestFind(t *testing.T) {
	st := &State{SSDs: []SSD{
		{Name: "ssd0", Path: "/x/a.img", Serial: "S0"}, {Name: "ssd1", Path: "/y/a.img",
			Serial: "S1"}, {Name: "ssd2", Path: "/y/b.img"},
	}}
	for in, want := range map[string]string{"ssd1": "ssd1", "S0": "ssd0", "/y/a.img": "ssd1",
		"b.img": "ssd2", "proxy:/x/a.img": "ssd0"} {
		d, err := st.Find(in)
		require.NoError(t, err, in)
		require.Equal(t, want, d.Name, in)
	}
	for _, in := range []string{"a.img", "ssd9", ""} {
		_, err := st.Find(in)
		require.Equal(t, errs.Usage, errs.ClassOf(err), in)
	}
}

func TestDamagedAndNewerFiles(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.file(), []byte(`{"version":1,"ssds":[{"na`), 0o644))
	_, err = s.Load()
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, s.file())
	require.NoError(t, os.WriteFile(s.file(), []byte(`{"version":7}`), 0o644))
	_, err = s.Load()
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.Error(t, s.Update(t.Context(), func(*State) error { return nil }),
		"a newer file is never overwritten")
}

func TestLease(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	l, err := s.Acquire("heliosctl load", "ssd0", "ssd1")
	require.NoError(t, err)
	_, err = s.Acquire("heliosctl train", "ssd2", "ssd1")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.ErrorContains(t, err, "heliosctl load")
	// All or nothing: the failed one gave ssd2 back.
	l2, err := s.Acquire("heliosctl train", "ssd2")
	require.NoError(t, err)
	l2.Release()
	l.Release()
	l.Release()
	l, err = s.Acquire("heliosctl verify", "ssd0", "ssd1")
	require.NoError(t, err)
	l.Release()
}

// A lease ends with its holder, also when that is killed.
func TestLeaseDiesWithProcess(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, os.Args[0])
	c.Env = append(os.Environ(), "STATE_TEST_HOLD="+dir)
	in, err := c.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "held <nil>\n", line)

	s, err := Open(dir)
	require.NoError(t, err)
	_, err = s.Acquire("heliosctl train", "ssd0")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.True(t, strings.Contains(err.Error(), fmt.Sprint(c.Process.Pid)), err)

	require.NoError(t, c.Process.Kill())
	require.Error(t, c.Wait())
	l, err := s.Acquire("heliosctl train", "ssd0")
	require.NoError(t, err)
	l.Release()
}

func TestDefaultDir(t *testing.T) {
	t.Setenv(EnvDir, "/a/b")
	d, err := DefaultDir()
	require.NoError(t, err)
	require.Equal(t, "/a/b", d)
	t.Setenv(EnvDir, "")
	t.Setenv("XDG_STATE_HOME", "/s")
	d, err = DefaultDir()
	require.NoError(t, err)
	require.Equal(t, "/s/heliosctl", d)
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("HOME", "")
	_, err = DefaultDir()
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}
