package durable

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// HeldError reports that another process holds a folder's lock.
type HeldError struct{ Holder string }

func (e *HeldError) Error() string { return "the folder is in use by " + e.Holder }

// Lock makes a file of dir and locks it until the file is closed, or the process ends. Where
// another process has the lock the error is a HeldError.
func Lock(dir, name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return nil, err
	}
	if err := LockFile(f); err != nil {
		_ = f.Close() // nothing was written
		return nil, err
	}
	return f, nil
}

// LockFile locks a file as Lock does.
func LockFile(f *os.File) error {
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return nil
	}
	holder := "another process"
	if pid := LockHolder(int(f.Fd())); pid > 0 {
		holder = fmt.Sprintf("process %d", pid)
	}
	return &HeldError{holder}
}

// LockHolder returns the process that holds the exclusive flock on the file behind fd, as
// /proc/locks has it: anybody who can write a file can write a false owner into it. It is 0 where
// the lock is gone, or its owner lives in another PID namespace.
func LockHolder(fd int) int {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0
	}
	f, err := os.Open("/proc/locks")
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if pid := parse(sc.Text(), want); pid > 0 {
			return pid
		}
	}
	return 0
}

// parse is the owner that a line of /proc/locks names for a file, or 0.
//
//	1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
func parse(line, file string) int {
	w := strings.Fields(line)
	if len(w) < 6 || w[1] != "FLOCK" || w[5] != file {
		return 0
	}
	pid, err := strconv.Atoi(w[4])
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

// Process holds what the kernel says about a running process.
type Process struct {
	Comm  string // its name, which it chooses itself: at most 15 bytes of anything
	Start string // when it began, in ticks since boot: a number that is used again has another one
}

// Look reads /proc/PID/stat; ok is false where there is no such process, or it may not be seen.
func Look(pid int) (p Process, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, false
	}
	// 4711 (comm, which may hold spaces and brackets) R ppid …; starttime is field 22
	// (proc_pid_stat(5)).
	s := string(b)
	from, to := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if from < 0 || to < from {
		return p, false
	}
	rest := strings.Fields(s[to+1:])
	if len(rest) < 20 {
		return p, false
	}
	return Process{Comm: s[from+1 : to], Start: rest[19]}, true
}
