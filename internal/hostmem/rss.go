package hostmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/hostcpu"
)

// RSS is the resident memory of this process in bytes, by kind.
type RSS struct {
	Anon    int64 // heap, stacks, anonymous mappings
	File    int64 // pages of mapped files: the page cache, given back under pressure
	Shmem   int64 // shared memory and files in tmpfs
	HugeTLB int64 // explicit huge pages, which the kernel does not count in the others
}

// Counted is the memory that a budget pays for: all but pages of files.
func (r RSS) Counted() int64 { return r.Anon + r.Shmem + r.HugeTLB }

// ReadRSS reads /proc/self/status.
func ReadRSS() (RSS, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return RSS{}, fmt.Errorf("resident memory: %w", err)
	}
	return parseStatus(b)
}

func parseStatus(b []byte) (RSS, error) {
	var r RSS
	seen := 0
	for line := range bytes.Lines(b) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			continue
		}
		var dst *int64
		switch string(name) {
		case "RssAnon":
			dst = &r.Anon
		case "RssFile":
			dst = &r.File
		case "RssShmem":
			dst = &r.Shmem
		case "HugetlbPages":
			dst = &r.HugeTLB
		default:
			continue
		}
		v, err := parseKB(string(rest))
		if err != nil {
			return RSS{}, fmt.Errorf("resident memory: /proc/self/status: %s: %w", name, err)
		}
		*dst = v
		seen++
	}
	if seen < 3 { // HugetlbPages is missing from kernels without them
		return RSS{},
			errors.New(
				"resident memory: /proc/self/status has no Rss lines (Linux 4.5 or later has)")
	}
	return r, nil
}

// parseKB reads "   1234 kB\n" as bytes.
func parseKB(s string) (int64, error) {
	f := strings.Fields(s)
	if len(f) == 0 {
		return 0, errors.New("empty value")
	}
	v, err := strconv.ParseInt(f[0], 10, 64)
	if err != nil {
		return 0, err
	}
	return v << 10, nil
}

// PeakMeter keeps the maximum of RSS.Counted since its start.
type PeakMeter struct {
	mu     sync.Mutex
	peak   int64
	faults int64 // of the process, as of the last sample
	stop   chan struct{}
	done   chan struct{}
	once   sync.Once
}

// StartPeakMeter samples every interval (at least a millisecond) until Stop.
func StartPeakMeter(every time.Duration) *PeakMeter {
	m := &PeakMeter{stop: make(chan struct{}), done: make(chan struct{})}
	m.sample()
	go func() {
		defer close(m.done)
		t := time.NewTicker(max(every, time.Millisecond))
		defer t.Stop()
		for {
			select {
			case <-m.stop:
				return
			case <-t.C:
				m.tick()
			}
		}
	}()
	return m
}

// tick takes a sample if there may be more memory than at the last: memory that counts becomes
// resident by page faults, which the kernel counts, those of its own on the process's behalf
// included. A sample takes a hundred times as long as to ask for those, and most ticks find none.
func (m *PeakMeter) tick() {
	section := hostcpu.Begin()
	if m.faulted() {
		m.sample()
	}
	section.End(hostcpu.Spender{Stage: "reports", Operator: "memory meter"})
}

// faulted reports whether there were page faults since the last call.
func (m *PeakMeter) faulted() bool {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return true
	}
	n := int64(u.Minflt) + int64(u.Majflt)
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.faults
	m.faults = n
	return n != was
}

func (m *PeakMeter) sample() {
	r, err := ReadRSS()
	if err != nil {
		return // the first failure would repeat; Peak then stays at 0, which no process has
	}
	m.mu.Lock()
	m.peak = max(m.peak, r.Counted())
	m.mu.Unlock()
}

// Peak is the maximum so far, the present moment included while the meter runs.
func (m *PeakMeter) Peak() int64 {
	select {
	case <-m.stop:
	default:
		m.sample()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peak
}

// Stop takes a last sample and ends the meter. It may be called more than once.
func (m *PeakMeter) Stop() {
	m.once.Do(func() {
		m.sample()
		close(m.stop)
	})
	<-m.done
}

// TotalBytes is the memory of the machine.
func TotalBytes() (int64, error) { return meminfo("MemTotal") }

// AvailableBytes returns how much more memory this process could take: MemAvailable, or less where
// a control group (version 1 or 2, at any level) limits it. Reserved huge pages are no part of it:
// the kernel keeps them apart, and what Alloc puts there leaves this number as it is.
func AvailableBytes() (int64, error) {
	free, err := meminfo("MemAvailable")
	if err != nil {
		return 0, err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return free, nil //nolint:nilerr // no control groups, so no limit
	}
	return cgroupFree("/sys/fs/cgroup", string(own), free), nil
}

func meminfo(name string) (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("available memory: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return parseKB(rest)
		}
	}
	return 0, fmt.Errorf("available memory: /proc/meminfo has no %s", name)
}

// cgroupFree lowers free to what the control groups named in own (the content of
// /proc/self/cgroup) leave. Limits hold at every level up to the root.
func cgroupFree(root, own string, free int64) int64 {
	for line := range strings.Lines(own) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		dir, limit, used := "", "", ""
		switch {
		case f[0] == "0" && f[1] == "":
			dir, limit, used = root, "memory.max", "memory.current"
		case f[1] == "memory":
			dir, limit, used = filepath.Join(root, "memory"), "memory.limit_in_bytes",
				"memory.usage_in_bytes"
		default:
			continue
		}
		for p := filepath.Clean("/" + f[2]); ; p = filepath.Dir(p) {
			off := filepath.Join(dir, p)
			max, okMax := readNumber(filepath.Join(off, limit))
			cur, okCur := readNumber(filepath.Join(off, used))
			if okMax && okCur {
				// Clean page cache counts as used but goes when it is needed.
				left := max - cur + inactiveFile(filepath.Join(off, "memory.stat"))
				free = min(free, left)
			}
			if p == "/" {
				break
			}
		}
	}
	return max(free, 0)
}

// readNumber fails for a missing file and for "max".
func readNumber(path string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return v, err == nil
}

func inactiveFile(stat string) int64 {
	b, err := os.ReadFile(stat)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "inactive_file "); ok {
			v, err := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
			if err == nil {
				return v
			}
		}
	}
	return 0
}

// PeakRSS is the most memory that the process ever had in use at once, files that it mapped
// included: VmHWM of /proc/self/status.
func PeakRSS() (int64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return parseKB(strings.TrimSpace(v))
		}
	}
	return 0, errors.New("/proc/self/status has no VmHWM")
}

// Scarce reports whether so many bytes are at least a share of the memory that can be had.
func Scarce(bytes int64, share float64) bool {
	free, err := AvailableBytes()
	return err == nil && float64(bytes) >= share*float64(free)
}
