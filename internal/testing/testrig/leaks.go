// Package testrig has what the tests of several packages build: the check that a test gives
// everything back, folders in memory, and queue pairs driven entry by entry.
package testrig

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"helios/internal/hostmem"
)

// patience is the time that goroutines get that are ending, and a completion that must come.
var patience = defaultPatience

const defaultPatience = 10 * time.Second

// Resources counts what a process holds and the garbage collector does not give back.
type Resources struct {
	Goroutines, Descriptors int
	Mappings                int // of SSDs' files, shared memory, arrays of datasets and io_uring
	Memory                  map[string]int64
}

// Held counts what the process holds now.
func Held(t testing.TB) Resources {
	t.Helper()
	// The runtime's poller takes two descriptors with the first file that it watches.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = r.Close(), w.Close()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	held := Resources{Goroutines: runtime.NumGoroutine(), Descriptors: len(fds),
		Memory: hostmem.Usage()}
	for l := range strings.Lines(string(maps)) {
		for _, kind := range []string{"io_uring", ".img", "/dev/shm", ".npy"} {
			if strings.Contains(l, kind) {
				held.Mappings++
				break
			}
		}
	}
	return held
}

// more reports whether r exceeds before in what ends on its own time.
func (r *Resources) more(before *Resources) bool {
	return r.Goroutines > before.Goroutines || r.Descriptors > before.Descriptors ||
		r.Mappings > before.Mappings
}

// Leaked fails the test when the process holds more than before. Goroutines that are ending get
// some time. Memory of the kinds in kept may stay, for what is read once and shared.
func (before Resources) Leaked(t testing.TB, kept ...string) {
	t.Helper()
	now := Held(t)
	for end := time.Now().Add(patience); now.more(&before) &&
		time.Now().Before(end); now = Held(t) {
		time.Sleep(time.Millisecond)
	}
	if now.Goroutines > before.Goroutines {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, %d before:\n%s", now.Goroutines, before.Goroutines,
			buf[:runtime.Stack(buf, true)])
	}
	if now.Descriptors > before.Descriptors {
		t.Errorf("%d file descriptors, %d before:\n%s", now.Descriptors, before.Descriptors,
			openFiles())
	}
	if now.Mappings > before.Mappings {
		t.Errorf("%d mappings of files, shared memory and io_uring, %d before", now.Mappings,
			before.Mappings)
	}
	for what, n := range now.Memory {
		if n > before.Memory[what] && !slices.Contains(kept, what) {
			t.Errorf("%d bytes of %s outside Go's heap, %d before", n, what, before.Memory[what])
		}
	}
}

// openFiles lists what the descriptors stand for.
func openFiles() string {
	var out strings.Builder
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, e := range fds {
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		fmt.Fprintf(&out, "%s -> %s\n", e.Name(), to)
	}
	return out.String()
}

var watched sync.Map // names of tests

// CheckLeaks fails the test when it ends with more goroutines, descriptors, mappings or memory
// outside Go's heap than there are now. Cleanups run last first, so call it before anything is
// opened; the first call of a test counts. A test that failed otherwise is not checked.
func CheckLeaks(t testing.TB) {
	t.Helper()
	name := t.Name()
	if _, again := watched.LoadOrStore(name, true); again {
		return
	}
	before := Held(t)
	t.Cleanup(func() {
		watched.Delete(name)
		if !t.Failed() {
			before.Leaked(t)
		}
	})
}
