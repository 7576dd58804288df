package hostmem

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

func TestAllocFreeUsage(t *testing.T) {
	for _, size := range []int64{1, 4095, 4096, 4097, 3 << 20} {
		b, err := Alloc(size, "test rows")
		require.NoError(t, err)
		if int64(len(b)) != size || uintptr(unsafe.Pointer(&b[0]))%PageBytes != 0 {
			t.Fatalf("%d bytes: got %d at %p", size, len(b), &b[0])
		}
		for i := range b {
			if b[i] != 0 {
				t.Fatalf("byte %d of %d is not zero", i, size)
			}
		}
		b[size-1] = 7
		if got := Usage()["test rows"]; got != size {
			t.Fatalf("usage %d, want %d", got, size)
		}
		if err := Free(b[1:]); size > 1 && err == nil {
			t.Fatal("a free in the middle was accepted")
		}
		require.NoError(t, Free(b))
		if err := Free(b); err == nil {
			t.Fatal("a second free was accepted")
		}
		if _, ok := Usage()["test rows"]; ok {
			t.Fatal("usage after free")
		}
	}
}

func TestAllocNothingAndTooMuch(t *testing.T) {
	b, err := Alloc(0, "none")
	if err != nil || b == nil || len(b) != 0 || Free(b) != nil {
		t.Fatalf("empty allocation: %v %v", b, err)
	}
	if _, err := Alloc(-1, "negative"); err == nil {
		t.Fatal("negative size accepted")
	}
	_, err = Alloc(1<<46, "huge table")
	var oom *OutOfMemoryError
	if !errors.As(err, &oom) || oom.Purpose != "huge table" || oom.Want != 1<<46 || oom.Free <= 0 {
		t.Fatalf("got %v", err)
	}
	if errs.ClassOf(err) != errs.Capability {
		t.Fatalf("class %d", errs.ClassOf(err))
	}
}

func TestView(t *testing.T) {
	b, err := Alloc(4096, "view")
	require.NoError(t, err)
	defer func() { _ = Free(b) }()
	v := View[uint32](b)
	if len(v) != 1024 {
		t.Fatalf("%d elements", len(v))
	}
	v[1] = 0x01020304
	if b[4] != 4 || b[7] != 1 {
		t.Fatal("view and bytes differ")
	}
	for name, f := range map[string]func(){
		"length":    func() { View[uint64](b[:12]) },
		"alignment": func() { View[uint64](b[4:12]) },
		"size 0":    func() { View[struct{}](b) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	if View[int64](nil) != nil {
		t.Error("a view of nothing")
	}
}

// The meter looks again when pages have become resident, and only then.
func TestPeakMeterTicks(t *testing.T) {
	m := StartPeakMeter(time.Millisecond)
	defer m.Stop()
	peak := func() int64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.peak
	}
	before := peak()
	const size = 64 << 20
	b, err := Alloc(size, "touched")
	require.NoError(t, err)
	for i := 0; i < len(b); i += PageBytes {
		b[i] = 1
	}
	for end := time.Now().Add(10 * time.Second); peak() < before+size*9/10; {
		if time.Now().After(end) {
			t.Fatalf("a peak of %d bytes after %d were touched beside %d", peak(), size, before)
		}
		time.Sleep(time.Millisecond)
	}
	require.NoError(t, Free(b))
	idle := PeakMeter{}
	if !idle.faulted() {
		t.Fatal("no page fault since the process began")
	}
	for range 100 {
		if !idle.faulted() {
			return
		}
	}
	t.Fatal("a page fault between any two looks")
}

func TestRSSSeesTouchedMemory(t *testing.T) {
	before, err := ReadRSS()
	require.NoError(t, err)
	m := StartPeakMeter(time.Hour) // only the samples that Peak and Stop take
	const size = 64 << 20
	b, err := Alloc(size, "touched")
	require.NoError(t, err)
	for i := 0; i < len(b); i += PageBytes {
		b[i] = 1
	}
	after, err := ReadRSS()
	require.NoError(t, err)
	if got := after.Counted() - before.Counted(); got < size*9/10 {
		t.Errorf("touching %d bytes raised what is resident by %d", size, got)
	}
	if m.Peak() < before.Counted()+size*9/10 {
		t.Error("the meter missed it")
	}
	require.NoError(t, Free(b))
	m.Stop()
	m.Stop()
	if m.Peak() < before.Counted()+size*9/10 {
		t.Error("the peak fell")
	}
	runtime.KeepAlive(b)
}

func TestParseStatusErrors(t *testing.T) {
	if _, err := parseStatus([]byte("Name:\tx\n")); err == nil {
		t.Error("no Rss lines accepted")
	}
	if _, err := parseStatus(
		[]byte("RssAnon:\tx kB\nRssFile: 1 kB\nRssShmem: 1 kB\n")); err == nil {
		t.Error("no number accepted")
	}
	r, err := parseStatus(
		[]byte("RssAnon:\t 3 kB\nRssFile: 5 kB\nRssShmem: 7 kB\nHugetlbPages:\t 2048 kB\n"))
	if err != nil || r.Counted() != (3+7+2048)<<10 || r.File != 5<<10 {
		t.Errorf("%+v %v", r, err)
	}
}

func TestCgroupFree(t *testing.T) {
	root := t.TempDir()
	write := func(path, s string) {
		t.Helper()
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(s), 0o644))
	}
	write("a/memory.max", "1000\n")
	write("a/memory.current", "900\n")
	write("a/memory.stat", "anon 1\ninactive_file 50\n")
	write("a/b/memory.max", "max\n")
	write("a/b/memory.current", "10\n")
	write("memory/j/memory.limit_in_bytes", "70\n")
	write("memory/j/memory.usage_in_bytes", "80\n")
	for _, c := range []struct {
		own  string
		want int64
	}{
		{"0::/a/b\n", 150}, // the limit of the parent, less what is used, plus clean cache
		{"0::/\n", 5000},
		{"", 5000},
		{"4:memory:/j\n", 0},
		{"3:cpu:/a\n", 5000},
	} {
		if got := cgroupFree(root, c.own, 5000); got != c.want {
			t.Errorf("%q: %d, want %d", c.own, got, c.want)
		}
	}
	if free, err := AvailableBytes(); err != nil || free <= 0 {
		t.Errorf("available: %d %v", free, err)
	}
	if total, err := TotalBytes(); err != nil || total <= 0 {
		t.Errorf("total: %d %v", total, err)
	}
}

// Memory over a file shares the file's part with others, and its rest with nobody.
func TestMapFile(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd) //nolint:errcheck // mapped
	require.NoError(t, unix.Ftruncate(fd, 3*PageBytes))
	b, err := MapFile(fd, PageBytes, PageBytes, 4*PageBytes, "test file")
	require.NoError(t, err)
	for i := range b {
		b[i] = 5
	}
	got := make([]byte, 3*PageBytes)
	if _, err := unix.Pread(fd, got, 0); err != nil {
		t.Fatal(err)
	}
	for i, v := range got {
		if want := byte(i / PageBytes % 2 * 5); v != want {
			t.Fatalf("byte %d of the file is %d, not %d", i, v, want)
		}
	}
	if Usage()["test file"] != 4*PageBytes {
		t.Fatalf("usage %d", Usage()["test file"])
	}
	require.NoError(t, Free(b))
	for _, q := range [][3]int64{{1, PageBytes, PageBytes}, {0, 1, PageBytes}, {0, 0, PageBytes},
		{0, 2 * PageBytes, PageBytes}, {-PageBytes, PageBytes, PageBytes}} {
		if _, err := MapFile(fd, q[0], q[1], q[2], "test file"); err == nil {
			t.Fatalf("%v was mapped", q)
		}
	}
}

// A file's huge pages' worth is mapped where a huge page can hold it, and keeps its content.
func TestMapFileOnHugePages(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd) //nolint:errcheck // mapped
	const bytes = 3*HugePageBytes + PageBytes
	require.NoError(t, unix.Ftruncate(fd, bytes))
	if _, err := unix.Pwrite(fd, []byte{7}, HugePageBytes); err != nil {
		t.Fatal(err)
	}
	for _, offset := range []int64{0, PageBytes, HugePageBytes} {
		b, err := MapFile(fd, offset, bytes-offset, bytes, "test file")
		require.NoError(t, err)
		at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
		if at%HugePageBytes != uintptr(offset)%HugePageBytes || b[HugePageBytes-offset] != 7 {
			t.Fatalf("offset %d: at %#x, byte %d", offset, at, b[HugePageBytes-offset])
		}
		b[len(b)-1] = 1 // the rest is there
		require.NoError(t, Free(b))
	}
}
