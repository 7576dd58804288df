package outfile

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// asWriter makes the test binary write a file and wait to be killed; asNamed also takes files
// without names from it.
const (
	asWriter = "HELIOS_OUTFILE_TEST"
	asNamed  = "HELIOS_OUTFILE_NAMED"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(asWriter); path != "" {
		alwaysNamed = os.Getenv(asNamed) != ""
		f, err := Create("--out", path, false)
		if err == nil {
			_, err = f.Write([]byte("part"))
		}
		if err != nil {
			panic("the child can't write: " + err.Error())
		}
		_, _ = os.Stdout.WriteString("ready\n")
		select {}
	}
	os.Exit(m.Run())
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func write(t *testing.T, path string, replace bool, text string) error {
	t.Helper()
	f, err := Create("--out", path, replace)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(text))
	return f.Commit(err)
}

// bothWays runs a test with files that have no name until they are whole, and with named ones.
func bothWays(t *testing.T, test func(t *testing.T)) {
	t.Run("nameless", func(t *testing.T) {
		f := File{}
		if err := f.openNameless(t.TempDir()); errors.Is(err, unix.EOPNOTSUPP) {
			t.Skip("the file system of the test's folder has no files without names")
		} else if err != nil {
			t.Fatal(err)
		}
		require.NoError(t, f.Discard())
		test(t)
	})
	t.Run("named", func(t *testing.T) {
		alwaysNamed = true
		defer func() { alwaysNamed = false }()
		test(t)
	})
}

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func TestFileIsThereWholeOrNotAtAll(t *testing.T) { bothWays(t, testWholeOrNotAtAll) }

func testWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	f, err := Create("--out", path, false)
	require.NoError(t, err)
	_, err = f.Write([]byte("1"))
	require.NoError(t, err)
	require.NoFileExists(t, path)
	require.NoError(t, f.Commit(nil))
	require.NoError(t, f.Discard(), "after Commit it does nothing")
	require.Equal(t, "1", text(t, path))

	f, err = Create("--out", path, true)
	require.NoError(t, err)
	require.ErrorContains(t, f.Commit(errors.New("no idea")), "no idea; nothing was kept")
	f, err = Create("--out", path, true)
	require.NoError(t, err)
	require.NoError(t, f.Discard())
	require.Equal(t, "1", text(t, path))
	require.NoError(t, write(t, path, true, "2"))
	require.Equal(t, "2", text(t, path))
	require.Equal(t, []string{"a"}, names(t, dir))
	// The umask decides who may read it.
	mask := unix.Umask(0o27)
	err = write(t, filepath.Join(dir, "b"), false, "3")
	unix.Umask(mask)
	require.NoError(t, err)
	st, err := os.Stat(filepath.Join(dir, "b"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o640), st.Mode())
}

func TestNothingIsReplacedUnasked(t *testing.T) { bothWays(t, testNotReplacedUnasked) }

func testNotReplacedUnasked(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	require.NoError(t, write(t, path, false, "1"))
	for _, name := range []string{path, filepath.Join(dir, ".", "a"), filepath.Join(dir, "link"),
		filepath.Join(dir, "dangling")} {
		switch filepath.Base(name) {
		case "link":
			require.NoError(t, os.Symlink("a", name))
		case "dangling":
			require.NoError(t, os.Symlink("nothing", name))
		}
		err := write(t, name, false, "2")
		require.Equal(t, errs.Refused, errs.ClassOf(err), name)
		exists := (*Exists)(nil)
		require.ErrorAs(t, err, &exists)
	}
	require.NoError(t, write(t, filepath.Join(dir, "link"), true, "3"))
	require.Equal(t, "3", text(t, path), "the link stays, what it names is replaced")
	// A file that comes to be there while another one is being written is kept.
	f, err := Create("--out", filepath.Join(dir, "b"), false)
	require.NoError(t, err)
	require.NoError(t, write(t, filepath.Join(dir, "b"), false, "first"))
	require.ErrorContains(t, f.Commit(nil), "meanwhile")
	require.Equal(t, "first", text(t, filepath.Join(dir, "b")))
	require.Equal(t, []string{"a", "b", "dangling", "link"}, names(t, dir))
}

// A file without a whole line is nobody's lines: it is left as it is, and may be replaced when that
// is asked for.
func TestContinueKeepsWhatIsNoLines(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"notes": "my notes", "empty": "",
		"long": strings.Repeat("x", maxLine+1)} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		s := Set{Replace: true}
		_, err := s.Continue("--results", path, func([]byte) error { return nil })
		require.Equal(t, errs.Refused, errs.ClassOf(err), name)
		require.Equal(t, content, text(t, path), name)
		f, err := s.Create("--results", path)
		require.NoError(t, err, "the refusal has left a claim")
		require.NoError(t, f.Discard())
	}
}

// A file that another run is adding lines to is not replaced.
func TestLinesInWorkAreNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	f, err := Create("--results", path, false)
	require.NoError(t, err)
	l, err := Begin(f, []byte("1\n"))
	require.NoError(t, err)
	require.ErrorContains(t, Check("--results", path, true), "is being written by another run")
	require.NoError(t, l.Close())
	require.NoError(t, Check("--results", path, true))
}

func TestDisksAreNotWrittenOver(t *testing.T) {
	entries, err := os.ReadDir("/dev")
	require.NoError(t, err)
	disk := ""
	for _, e := range entries {
		if e.Type()&os.ModeDevice != 0 && e.Type()&os.ModeCharDevice == 0 {
			disk = filepath.Join("/dev", e.Name())
		}
	}
	if disk == "" {
		disk = filepath.Join(t.TempDir(), "disk")
		if err := unix.Mknod(disk, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 255))); err != nil {
			t.Skipf("no block device is there, and none can be made: %v", err)
		}
	}
	for _, replace := range []bool{false, true} {
		err := Check("--out", disk, replace)
		require.ErrorContains(t, err, "is a disk, which is never written over")
		require.Equal(t, errs.Refused, errs.ClassOf(err))
	}
}

func TestUmaskIsHeeded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	old := unix.Umask(0o077)
	err := write(t, path, false, "1")
	unix.Umask(old)
	require.NoError(t, err)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, st.Mode().Perm())
}

func TestBadTargets(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	for _, path := range []string{"", dir, filepath.Join(dir, "no", "a"),
		filepath.Join(dir, "file", "a"), filepath.Join(dir, "a") + "/"} {
		require.Equal(t, errs.Usage, errs.ClassOf(write(t, path, true, "x")), path)
		require.Equal(t, errs.Usage, errs.ClassOf(Check("--out", path, true)), path)
	}
	require.NoError(t, Check("--out", filepath.Join(dir, "a"), false))
	require.Equal(t, []string{"file"}, names(t, dir))
}

func TestStraightTargets(t *testing.T) {
	require.NoError(t, write(t, "/dev/null", false, "x"))
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	got := make(chan string)
	go func() {
		b, err := os.ReadFile(pipe)
		if err != nil {
			b = []byte(err.Error())
		}
		got <- string(b)
	}()
	require.NoError(t, write(t, pipe, false, "through"))
	require.Equal(t, "through", <-got)
	// A descriptor is written where it stands, whatever file it is.
	f, err := os.Create(filepath.Join(t.TempDir(), "redirected"))
	require.NoError(t, err)
	_, err = f.WriteString("before ")
	require.NoError(t, err)
	require.NoError(t, write(t, "/dev/fd/"+itoa(f.Fd()), false, "after"))
	require.Equal(t, "before after", text(t, f.Name()))
	require.NoError(t, f.Close())
	// The disk is full: an error, not silence.
	require.ErrorContains(t, write(t, "/dev/full", false, "x"), "no space left")
}

func itoa(n uintptr) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + itoa(n%10)
}

func TestSetRefusesOneFileTwice(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	require.NoError(t, os.WriteFile(there, nil, 0o600))
	require.NoError(t, os.Link(there, filepath.Join(dir, "hard")))
	s := &Set{Replace: true}
	require.NoError(t, s.Claim("--trace", filepath.Join(dir, "new")))
	require.NoError(t, s.Claim("--csv", there))
	for _, path := range []string{filepath.Join(dir, "x", "..", "new"),
		filepath.Join(dir, "hard")} {
		_, err := s.Create("--out", path)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	require.NoError(t, os.Symlink(dir, filepath.Join(dir, "same")))
	_, err := s.Create("--out", filepath.Join(dir, "same", "new"))
	require.ErrorContains(t, err, "--trace and --out both name")
	read := filepath.Join(dir, "read")
	require.NoError(t, os.WriteFile(read, []byte("input"), 0o600))
	s.Reads("the trace", read)
	_, err = s.Create("--out", read)
	require.ErrorContains(t, err, "the trace and --out both name", "also where it may be replaced")
	for range 2 {
		f, err := s.Create("--out", "/dev/null")
		require.NoError(t, err, "which any number may name")
		require.NoError(t, f.Commit(nil))
	}
}

// A killed writer leaves nothing; where files have names meanwhile, the next one removes what it
// left, and what a writer still has open is not removed.
func TestLeftoversOfTheDead(t *testing.T) { bothWays(t, testLeftoversOfTheDead) }

func testLeftoversOfTheDead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), asWriter+"="+path)
	if alwaysNamed {
		c.Env = append(c.Env, asNamed+"=1")
	}
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	b := make([]byte, 6)
	_, err = out.Read(b)
	require.NoError(t, err)
	require.Equal(t, "ready\n", string(b))
	left := names(t, dir)
	if alwaysNamed {
		require.Len(t, left, 1)
	} else {
		require.Empty(t, left)
	}
	require.NoError(t, Check("--out", path, false))
	require.Equal(t, left, names(t, dir), "its writer lives")
	require.NoError(t, c.Process.Kill())
	require.Error(t, c.Wait())
	require.Equal(t, left, names(t, dir))
	// Names that are none of ours stay.
	other := []string{".a.partial-1x", ".b.partial-1"}
	for _, n := range other {
		require.NoError(t, os.WriteFile(filepath.Join(dir, n), nil, 0o600))
	}
	require.NoError(t, Check("--out", path, false))
	require.Equal(t, other, names(t, dir))
}

func lines(t *testing.T, path string) (*Lines, []string, error) {
	t.Helper()
	var got []string
	l, err := Continue("--results", path, func(b []byte) error {
		got = append(got, string(b))
		return nil
	})
	return l, got, err
}

func TestLines(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "r")
	f, err := Create("--results", path, false)
	require.NoError(t, err)
	require.NoFileExists(t, path)
	l, err := Begin(f, []byte("1\n"))
	require.NoError(t, err)
	require.Equal(t, "1\n", text(t, path), "there with its first line")
	_, _, err = lines(t, path)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "one writer at a time")
	require.NoError(t, l.Append([]byte("2\n")))
	require.Equal(t, "1\n2\n", text(t, path))
	require.NoError(t, l.Close())
	require.Equal(t, []string{"r"}, names(t, dir))

	// A torn last line goes.
	require.NoError(t, os.WriteFile(path, []byte("1\n2\n{\"torn"), 0o644))
	l, got, err := lines(t, path)
	require.NoError(t, err)
	require.Equal(t, []string{"1", "2"}, got)
	require.NoError(t, l.Append([]byte("3\n")))
	require.NoError(t, l.Close())
	require.Equal(t, "1\n2\n3\n", text(t, path))
	// A file that each refuses is left as it is.
	require.NoError(t, os.WriteFile(path, []byte("not ours\nto"), 0o644))
	_, err = Continue("--results", path, func([]byte) error { return errors.New("no") })
	require.Error(t, err)
	require.Equal(t, "not ours\nto", text(t, path))
}

// Of a line that the disk has no room for nothing stays, and none comes after it.
func TestLinesOnAFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r")
	require.NoError(t, os.WriteFile(path, []byte("1\n"), 0o644))
	c := exec.Command(os.Args[0], "-test.run", "^TestLinesUnderALimit$")
	c.Env = append(os.Environ(), "HELIOS_OUTFILE_LIMIT="+path)
	out, err := c.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, "1\n", text(t, path))
}

// TestLinesUnderALimit is the child of TestLinesOnAFullDisk, which bounds its files' size.
func TestLinesUnderALimit(t *testing.T) {
	path := os.Getenv("HELIOS_OUTFILE_LIMIT")
	if path == "" {
		return
	}
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 10, Max: 10}))
	l, _, err := lines(t, path)
	require.NoError(t, err)
	require.ErrorContains(t, l.Append([]byte(strings.Repeat("x", 20)+"\n")),
		"lacks the lines from here on")
	require.Error(t, l.Append([]byte("2\n")))
	require.Error(t, l.Close())
}

// Errors of a file name it by its own name, not by its folder's or by one of ours.
func TestErrorsNameTheFile(t *testing.T) { bothWays(t, testErrorsNameTheFile) }

func testErrorsNameTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.csv")
	f, err := Create("--csv", path, false)
	require.NoError(t, err)
	require.NoError(t, f.f.Close())
	_, err = f.Write([]byte("x"))
	require.ErrorContains(t, err, "write "+path+":")
	err = f.Commit(nil)
	require.ErrorContains(t, err, "--csv "+path+": write "+path+":")
	require.NotContains(t, err.Error(), "partial")
}

// Inputs are spared: the files of a folder, by any name, also where a descriptor names one.
func TestInputsAreSpared(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in", "deep")
	require.NoError(t, os.MkdirAll(in, 0o700))
	file := filepath.Join(in, "x.npy")
	require.NoError(t, os.WriteFile(file, []byte("input"), 0o600))
	require.NoError(t, os.Link(file, filepath.Join(dir, "hard")))
	require.NoError(t, os.Symlink("hard", filepath.Join(dir, "soft")))
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close() //nolint:errcheck // of a test
	for _, replace := range []bool{false, true} {
		s := &Set{Replace: replace}
		s.Reads("the dataset", filepath.Join(dir, "in"))
		s.Reads("nothing", filepath.Join(dir, "gone"))
		for _, path := range []string{file, filepath.Join(dir, "hard"), filepath.Join(dir, "soft"),
			fmt.Sprintf("/dev/fd/%d", f.Fd()), fmt.Sprintf("/proc/self/fd/%d", f.Fd())} {
			_, err := s.Create("--out", path)
			require.ErrorContains(t, err, "the dataset and --out both name", path)
			require.Equal(t, errs.Refused, errs.ClassOf(err))
			_, err = s.Continue("--out", path, nil)
			require.Equal(t, errs.Refused, errs.ClassOf(err))
			require.Equal(t, errs.Refused, errs.ClassOf(s.Claim("--out", path)))
		}
		other, err := s.Create("--out", filepath.Join(dir, "in", fmt.Sprint("new", replace)))
		require.NoError(t, err)
		require.NoError(t, other.Commit(nil))
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "input", string(text))
}
