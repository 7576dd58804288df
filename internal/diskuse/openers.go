package diskuse

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/pci"
)

// Opener is a process that has a device file open.
type Opener struct {
	PID  int
	Name string // comm
	Node string // the device file
}

// processes lists the process IDs, in order.
func processes(sys pci.Sys) []string {
	es, _ := os.ReadDir(sys.Path("/proc"))
	var ids []int
	for _, e := range es {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			ids = append(ids, n)
		}
	}
	slices.Sort(ids)
	out := make([]string, len(ids))
	for i, n := range ids {
		out[i] = strconv.Itoa(n)
	}
	return out
}

// deviceID is the kind and number of a device file.
type deviceID struct {
	kind         uint16
	major, minor uint32
}

// statDevice does not wait for network file systems.
func statDevice(path string) (deviceID, bool) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE,
		&st); err != nil {
		return deviceID{}, false
	}
	kind := st.Mode & unix.S_IFMT
	return deviceID{kind, st.Rdev_major, st.Rdev_minor}, kind == unix.S_IFBLK ||
		kind == unix.S_IFCHR
}

// Openers lists the processes other than this one that have one of the nodes (as "/dev/vfio/7")
// open, each pair once. The error says that some processes could not be looked at.
func Openers(sys pci.Sys, nodes ...string) ([]Opener, error) {
	want := map[string]string{}
	numbers := map[deviceID]string{}
	for _, n := range nodes {
		want[n] = n
		if sys.Root != "" {
			continue
		}
		// The same device may be open under another name.
		if id, ok := statDevice(n); ok {
			numbers[id] = n
		}
	}
	var out []Opener
	hidden := 0
	self, _ := os.Readlink(sys.Path("/proc/self"))
	for _, pid := range processes(sys) {
		if pid == filepath.Base(self) {
			continue
		}
		dir := sys.Path("/proc", pid, "fd")
		fds, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrPermission) {
			hidden++
		}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(dir, fd.Name()))
			if err != nil || !strings.HasPrefix(to, "/") {
				continue
			}
			node := want[strings.TrimSuffix(to, " (deleted)")]
			if node == "" && len(numbers) > 0 {
				if id, ok := statDevice(filepath.Join(dir, fd.Name())); ok {
					node = numbers[id]
				}
			}
			if node == "" {
				continue
			}
			n, _ := strconv.Atoi(pid)
			comm, _ := os.ReadFile(sys.Path("/proc", pid, "comm"))
			o := Opener{PID: n, Name: strings.TrimSpace(string(comm)), Node: node}
			if !slices.Contains(out, o) {
				out = append(out, o)
			}
		}
	}
	if hidden > 0 {
		return out, fmt.Errorf("what %d processes have open: %w; only root sees it", hidden,
			fs.ErrPermission)
	}
	return out, nil
}

// openersText names those that have a node open, or is "".
func openersText(open []Opener, node string) string {
	var s []string
	for _, o := range open {
		if o.Node == node {
			s = append(s, fmt.Sprintf("%s (process %d)", o.Name, o.PID))
		}
	}
	const most = 3
	if n := len(s) - most; n > 0 {
		s = append(s[:most], fmt.Sprintf("%d more", n))
	}
	return strings.Join(s, ", ")
}

// opens reports the processes that have a device of the stack open.
func (l *look) opens() {
	var files []string
	for _, n := range l.nodes {
		files = append(files, "/dev/"+strings.ReplaceAll(n.name, "!", "/"))
	}
	open, err := Openers(l.sys, files...)
	if err != nil {
		l.missed(err)
	}
	for i, n := range l.nodes {
		if t := openersText(open, files[i]); t != "" {
			l.add(n, Open, true, n.says("open in "+t))
		}
	}
}
