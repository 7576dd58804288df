package hostcpu

import (
	"os"
	"path/filepath"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is the processor time of the process so far.
type Usage struct {
	At      time.Time
	Process time.Duration // by getrusage: all threads, those that the kernel lends it included
	Spent   map[Spender]time.Duration
	// Idle is the idle time of the machine's processors, of which there are Processors. While
	// nobody meters, and where /proc does not tell, both are 0.
	Idle       time.Duration
	Processors int
}

// Lookups are those that the CPU does, whichever goroutines of a directory take part in them.
var Lookups = Spender{"lookup", "directory on the CPU"}

// Spenders that no section measures.
var (
	// Garbage is the collector's time, which Go's runtime reports at the end of a collection.
	Garbage = Spender{"Go's runtime", "garbage collection"}
	// Workers are the threads to which the kernel hands operations of io_uring that would block.
	Workers = Spender{"io_uring", "worker threads of the kernel"}
)

// Now returns the usage so far. While nobody meters, Spent is empty.
func Now() Usage {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // fails for bad arguments only
	now := Usage{At: time.Now(), Process: time.Duration(u.Utime.Nano() + u.Stime.Nano())}
	if Metering() {
		now.Spent = Spent()
		now.Spent[Garbage] = garbage()
		now.Spent[Workers] = workers("/proc/self/task")
		now.Idle, now.Processors = idle("/proc/stat")
	}
	return now
}

// Since returns what each spender took since was, those that took nothing left out, and their sum.
func (u Usage) Since(was Usage) (by map[Spender]time.Duration, sum time.Duration) {
	by = map[Spender]time.Duration{}
	for k, t := range u.Spent {
		if t -= was.Spent[k]; t > 0 {
			by[k] = t
			sum += t
		}
	}
	return by, sum
}

// garbage is the processor time of collections, without the assists that goroutines' own sections
// have. Pauses are left out: Go counts them as if all processors had worked.
func garbage() time.Duration {
	s := []metrics.Sample{{Name: "/cpu/classes/gc/mark/dedicated:cpu-seconds"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindFloat64 {
		return 0
	}
	return time.Duration(s[0].Value.Float64() * float64(time.Second))
}

// idle reads a machine's idle time, and the number of its processors, from a file as /proc/stat is.
func idle(path string) (sum time.Duration, processors int) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[0], "cpu") {
			break
		}
		if f[0] == "cpu" {
			continue // of all
		}
		for _, ticks := range f[4:6] { // idle, and idle while a disk works
			n, _ := strconv.ParseInt(ticks, 10, 64)       // else 0
			sum += time.Duration(n) * (time.Second / 100) // USER_HZ
		}
		processors++
	}
	return sum, processors
}

// workers adds up the threads that the kernel names so. One that is not needed for seconds ends,
// and its time is no longer told.
func workers(tasks string) (sum time.Duration) {
	dirs, err := filepath.Glob(filepath.Join(tasks, "*"))
	if err != nil {
		return 0
	}
	for _, d := range dirs {
		name, err := os.ReadFile(filepath.Join(d, "comm"))
		if err != nil || !strings.HasPrefix(string(name), "iou-") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(d, "schedstat"))
		if f := strings.Fields(string(b)); err == nil && len(f) > 0 {
			ns, _ := strconv.ParseInt(f[0], 10, 64) // else 0
			sum += time.Duration(ns)
		}
	}
	return sum
}
