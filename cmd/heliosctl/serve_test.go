package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/serve"
	"helios/internal/ui"
)

// loaderOf opens a loader as a client's session does.
func loaderOf(t testing.TB, b *serveBackend, q serve.LoaderRequest,
	open serve.OpenRequest) (serve.Loader, error) {
	t.Helper()
	open.Dataset, _ = filepath.Abs("g")
	d, err := b.Open(context.Background(), open)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, d.Close())
		require.Empty(t, b.sets, "SSDs stay open")
	})
	l, err := d.Loader(context.Background(), q)
	if err == nil {
		t.Cleanup(func() { require.NoError(t, l.Close()) })
	}
	return l, err
}

func TestServeOptions(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	for key, want := range map[string]string{"hidden": "option hidden is of training",
		"no-such": "unknown option no-such", "mode": "mode", "fanout": "fanout"} {
		_, err := loaderOf(t, serverBackend(t), serve.LoaderRequest{Split: "train", World: 1,
			Options: map[string]string{key: "x"}}, serve.OpenRequest{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	file, err := filepath.Abs("a.img")
	require.NoError(t, err)
	for _, open := range []serve.OpenRequest{{}, {SSDFile: []string{file}}} {
		l, err := loaderOf(t, serverBackend(t),
			serve.LoaderRequest{Split: "train", Shuffle: true, World: 1,
				Options: map[string]string{"batch-size": "100", "fanout": "3,2", "seed": "5"}}, open)
		require.NoError(t, err)
		n := 0
		require.NoError(t, l.Epoch(context.Background(), 0, 0, func(b *serve.Batch) error {
			require.Equal(t, n, b.Index)
			n++
			require.Equal(t, []string{"x", "n_id", "y"}, []string{b.Tensors[0].Name,
				b.Tensors[1].Name, b.Tensors[2].Name})
			require.Equal(t, []int64{b.HopEnd[2], 16}, b.Tensors[0].Shape)
			return nil
		}))
		require.Equal(t, l.Batches(), n)
		require.NoError(t, l.Close())
	}
}

func serverBackend(t testing.TB) *serveBackend {
	t.Helper()
	e := &env{ui: ui.New(os.Stderr, os.Stderr), machine: thisMachine()}
	var b *serveBackend
	app := newApp(os.Stderr, os.Stderr)
	app.Metadata = map[string]any{envKey: e}
	for _, c := range app.Commands {
		if c.Name == "serve" {
			c.Action = action(0, func(_ context.Context, e *env) error {
				b = &serveBackend{env: e, sets: map[string]*sharedSSDs{}}
				return nil
			})
		}
	}
	require.NoError(t, app.Run([]string{"heliosctl", "serve"}))
	return b
}

func TestServeRefuses(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	fails(t, hc(t, "serve", "--inherit", "9", "--group"), 2, "serve", "leave --group out")
	f, err := os.Create("plain")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	fails(t, hc(t, "serve", "--socket", "plain"), 4, "serve", "no socket is there")
	l, err := net.Listen("unix", "live")
	require.NoError(t, err)
	fails(t, hc(t, "serve", "--socket", "live"), 4, "serve", "a daemon listens there")
	require.NoError(t, l.Close())
	fails(t, hc(t, "serve", "--socket", "no/such/folder"), 2, "serve", "no/such/folder")
	fails(t, hc(t, "serve", "--memory", "x"), 2, "serve", "--memory")
}

const serveChildEnv = "HELIOS_SERVE_TEST"

// TestServeChild is a daemon in a process of its own.
func TestServeChild(t *testing.T) {
	if os.Getenv(serveChildEnv) == "" {
		t.Log("a child of TestServeProcess alone has work here")
		return
	}
	ctx, stop := interruptible()
	defer stop()
	args := []string{"serve"}
	if path := os.Getenv(serveChildEnv); path != "activated" {
		args = append(args, "--socket", path)
	} else {
		require.NoError(t, os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid())))
	}
	os.Exit(run(ctx, args, os.Stdout, os.Stderr))
}

// A daemon takes its socket from systemd, takes the place of a dead one, and ends with Ctrl-C.
func TestServeProcess(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	for _, how := range []string{"activated", path} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestServeChild$")
		cmd.Env = append(os.Environ(), serveChildEnv+"="+how, "LISTEN_FDS=1",
			"HELIOS_STATE="+filepath.Join(dir, "state"))
		cmd.Stderr = os.Stderr
		if how == "activated" {
			f, err := l.File()
			require.NoError(t, err)
			cmd.ExtraFiles = []*os.File{f}
			defer f.Close() //nolint:errcheck // closed already
		} else {
			require.NoError(t, l.Close())
			_, err := os.Stat(path)
			require.NoError(t, err, "a dead daemon's socket is there")
		}
		require.NoError(t, cmd.Start())
		for _, f := range cmd.ExtraFiles {
			require.NoError(t, f.Close())
		}
		var c net.Conn
		for range 2000 {
			if c, err = net.Dial("unix", path); err == nil {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		require.NoError(t, err)
		body := `{"type":"hello","protocol":1}`
		_, err = c.Write(append([]byte{byte(len(body)), 0, 0, 0}, body...))
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		got := make([]byte, 4096)
		n, err := c.Read(got)
		require.NoError(t, err)
		require.Contains(t, string(got[4:n]), `"welcome"`)
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		require.NoError(t, cmd.Wait(), "it ends with 0")
		require.NoError(t, c.Close())
	}
	_, err = os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist, "the daemon removes its socket")
}

// BenchmarkDoor measures an epoch through the daemon's socket and ring beside one of the same
// loader in this process, in turns: with --mode inmem, where the door is the largest share.
func BenchmarkDoor(b *testing.B) {
	b.Chdir(b.TempDir())
	b.Setenv("HELIOS_STATE", "state")
	for _, args := range [][]string{{"generate", "--nodes", "50000", "--dim", "128", "--out", "g"},
		{"bind-ssds", "--proxy", "a.img", "--size", "128MiB"}, {"load", "g"}} {
		require.Zero(b, run(context.Background(), append(args, "--quiet"), io.Discard, os.Stderr))
	}
	options := map[string]string{"mode": "inmem", "fanout": "10,10", "batch-size": "256"}
	backend := serverBackend(b)
	l, err := loaderOf(b, backend, serve.LoaderRequest{Split: "train", Shuffle: true, World: 1,
		Options: options}, serve.OpenRequest{})
	require.NoError(b, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(b, err)
	ours := os.NewFile(uintptr(pair[1]), "client")
	theirs, err := inheritedConn(pair[0])
	require.NoError(b, err)
	done := make(chan error, 1)
	go func() {
		done <- serve.New(serve.Config{Backend: backend, Memory: 1 << 30}).ServeConn(
			context.Background(), theirs)
	}()
	send := func(m map[string]any) {
		body, err := json.Marshal(m)
		require.NoError(b, err)
		_, err = ours.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))),
			body...))
		require.NoError(b, err)
	}
	next := func() (m struct {
		Type, Message string
		Slot          int
	}) {
		head := make([]byte, 4)
		_, err := io.ReadFull(ours, head)
		require.NoError(b, err)
		body := make([]byte, binary.LittleEndian.Uint32(head))
		_, err = io.ReadFull(ours, body)
		require.NoError(b, err)
		require.NoError(b, json.Unmarshal(body, &m))
		require.NotEqual(b, "error", m.Type, m.Message)
		return m
	}
	folder, err := filepath.Abs("g")
	require.NoError(b, err)
	for _, m := range []map[string]any{{"type": "hello", "protocol": 1},
		{"type": "open", "dataset": folder}, {"type": "loader", "handle": 1, "split": "train",
			"shuffle": true, "options": options}} {
		send(m)
		next()
	}
	var here, through time.Duration
	batches := 0
	for epoch := 0; b.Loop(); epoch++ {
		begin := time.Now()
		require.NoError(b, l.Epoch(context.Background(), epoch, 0, func(*serve.Batch) error {
			batches++
			return nil
		}))
		here += time.Since(begin)
		begin = time.Now()
		send(map[string]any{"type": "epoch", "id": 1, "epoch": epoch})
		for m := next(); m.Type != "epoch_end"; m = next() {
			if m.Type == "batch" {
				send(map[string]any{"type": "release", "id": 1, "slot": m.Slot})
			}
		}
		through += time.Since(begin)
	}
	b.ReportMetric(here.Seconds()*1e6/float64(batches), "us-here/batch")
	b.ReportMetric(through.Seconds()*1e6/float64(batches), "us-door/batch")
	b.ReportMetric(through.Seconds()/here.Seconds(), "door/here")
	require.NoError(b, ours.Close())
	require.NoError(b, <-done)
}
