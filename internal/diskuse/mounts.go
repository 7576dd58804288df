package diskuse

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/internal/signatures"
)

// mount is one line of a mountinfo, proc(5).
type mount struct {
	dev, root, at, fstype, source string
	where                         string // "" in our own or the first process's namespace
}

// mountTable reads the mounts of every mount namespace that a process shows, each namespace once
// (and twice where it is ours and the first process's).
func (l *look) mountTable() []mount {
	var out []mount
	namespaces := map[string]bool{}
	pids := append([]string{"self", "1"}, processes(l.sys)...)
	hidden := false
	for i, pid := range pids {
		ns, err := os.Readlink(l.sys.Path("/proc", pid, "ns/mnt"))
		// our own root may hide what the first process sees
		if err == nil && namespaces[ns] && i > 1 {
			continue
		}
		if err != nil && i > 1 {
			hidden = hidden || os.IsPermission(err)
			continue
		}
		b, err := os.ReadFile(l.sys.Path("/proc", pid, "mountinfo"))
		if err != nil {
			if pid == "self" {
				l.missed(fmt.Errorf("mounts: %w", err))
			}
			hidden = hidden || os.IsPermission(err)
			continue
		}
		namespaces[ns] = true
		where := ""
		if i > 1 {
			where = fmt.Sprintf("process %s (%s)", pid, l.text("/proc/"+pid+"/comm"))
		}
		for _, line := range strings.Split(string(b), "\n") {
			if m, ok := parseMount(line); ok {
				m.where = where
				out = append(out, m)
			}
		}
	}
	if hidden {
		l.missed(
			fmt.Errorf("the mount namespaces of other users' processes: %w; only root sees them",
				os.ErrPermission))
	}
	return out
}

func parseMount(line string) (mount, bool) {
	before, after, ok := strings.Cut(line, " - ")
	f, g := strings.Fields(before), strings.Fields(after)
	if !ok || len(f) < 6 || len(g) < 2 {
		return mount{}, false
	}
	return mount{dev: f[2], root: unescape(f[3]), at: unescape(f[4]), fstype: g[0],
		source: unescape(g[1])}, true
}

// unescape undoes the octal escapes that /proc has for white space and backslashes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`,
		"#").Replace(s)
}

// mounts reports what is mounted and returns the table. A file system counts once, however many
// bind mounts and namespaces show it.
func (l *look) mounts() []mount {
	table := l.mountTable()
	for _, n := range l.nodes {
		var here, elsewhere []mount
		for _, m := range table {
			if !l.mountOf(m, n) {
				continue
			}
			list := &here
			if m.where != "" {
				list = &elsewhere
			}
			if !slices.ContainsFunc(*list, func(o mount) bool { return o.at == m.at }) {
				*list = append(*list, m)
			}
		}
		in := ""
		if len(here) == 0 && len(elsewhere) > 0 {
			here, in = elsewhere, " in the mount namespace of "+elsewhere[0].where
		}
		if len(here) > 0 {
			// The whole file system before its parts.
			slices.SortStableFunc(here,
				func(a, b mount) int { return strings.Compare(wholeFirst(a), wholeFirst(b)) })
			l.add(n, Mount, true,
				n.says(fmt.Sprintf("mounted at %s (%s)%s", places(here), here[0].fstype, in)))
			continue
		}
		// Btrfs names one of its disks in the table; its own folder names all of them.
		for _, id := range l.list("/sys/fs/btrfs") {
			if slices.Contains(l.list("/sys/fs/btrfs/"+id+"/devices"), n.name) {
				l.add(n, Mount, true, n.says("part of the mounted Btrfs file system "+id))
			}
		}
		for _, id := range l.list("/sys/fs/bcachefs") {
			for _, d := range l.list("/sys/fs/bcachefs/" + id) {
				b, err := os.Readlink(l.sys.Path("/sys/fs/bcachefs", id, d, "block"))
				if err == nil && filepath.Base(b) == n.name {
					l.add(n, Mount, true, n.says("part of the mounted bcachefs file system "+id))
				}
			}
		}
	}
	return table
}

func wholeFirst(m mount) string {
	if m.root == "/" {
		return "0"
	}
	return "1"
}

func places(ms []mount) string {
	const most = 3
	s := make([]string, 0, most)
	for _, m := range ms[:min(len(ms), most)] {
		s = append(s, m.at)
	}
	t := strings.Join(s, ", ")
	if len(ms) > most {
		t += fmt.Sprintf(" and %d more", len(ms)-most)
	}
	return t
}

// mountOf reports whether a mount is of a block device. File systems over several disks have a
// device number of their own (major 0); the source then names one disk, or all with colons.
func (l *look) mountOf(m mount, n node) bool {
	if m.dev == n.dev && n.dev != "" {
		return true
	}
	if !strings.HasPrefix(m.dev, "0:") || !strings.HasPrefix(m.source, "/dev/") {
		return false
	}
	for _, s := range strings.Split(m.source, ":") {
		if l.deviceOf(s) == n.name {
			return true
		}
	}
	return false
}

// bootPlaces show where the parts of a running system are mounted.
var bootPlaces = []string{"/", "/usr", "/boot", "/boot/efi", "/efi"}

// boot reports the disk that the machine runs from: by its mounts, and by the kernel's arguments.
func (l *look) boot(table []mount, cs []content) {
	for _, n := range l.nodes {
		var at []string
		for _, m := range table {
			if m.where == "" && slices.Contains(bootPlaces, m.at) && l.mountOf(m, n) &&
				!slices.Contains(at, m.at) {
				at = append(at, m.at)
			}
		}
		if len(at) > 0 {
			l.add(n, Boot, true, "is a boot disk: the machine runs from it ("+strings.Join(at,
				", ")+")")
		}
	}
	for _, arg := range strings.Fields(l.text("/proc/cmdline")) {
		key, value, _ := strings.Cut(arg, "=")
		if key != "root" && key != "resume" {
			continue
		}
		for _, n := range l.nodes {
			if l.isArgument(value, n, cs) {
				l.add(n, Boot, true, "is a boot disk: the kernel was started with "+arg)
			}
		}
	}
}

// isArgument reports whether the kernel argument value (as of root=) means the node.
func (l *look) isArgument(value string, n node, cs []content) bool {
	value = strings.Trim(value, `"`)
	if value == n.dev {
		return true
	}
	key, id, tagged := strings.Cut(value, "=")
	if !tagged {
		return l.deviceOf(value) == n.name
	}
	if l.deviceOf("/dev/disk/by-"+strings.ToLower(key)+"/"+id) == n.name {
		return true
	}
	switch key { // without udev there are no links
	case "PARTUUID":
		for _, line := range strings.Split(l.text("/sys/class/block/"+n.name+"/uevent"), "\n") {
			if v, ok := strings.CutPrefix(line, "PARTUUID="); ok && strings.EqualFold(v, id) {
				return true
			}
		}
	case "UUID":
		for _, c := range cs {
			if c.name == n.name && slices.ContainsFunc(signatures.UUIDs(c.head),
				func(u string) bool { return strings.EqualFold(u, id) }) {
				return true
			}
		}
	}
	return false
}

// zfsMark is the name of ZFS in package signatures.
const zfsMark = "a ZFS pool"

// zfsPool reads the pool's name from the first label of a ZFS disk: an XDR list of pairs 16 KiB
// into it, each with its encoded length, decoded length, name, type (9: a string) and count.
func zfsPool(head []byte) string {
	const at = 16 << 10
	if len(head) < at+112<<10 {
		return ""
	}
	b := head[at : at+112<<10]
	if b[0] != 1 { // XDR
		return ""
	}
	be := func(p []byte) int { return int(p[0])<<24 | int(p[1])<<16 | int(p[2])<<8 | int(p[3]) }
	for p := b[12:]; len(p) > 24; {
		n := be(p)
		if n < 24 || n > len(p) {
			return ""
		}
		pair := p[:n]
		p = p[n:]
		k := be(pair[8:])
		v := 12 + (k+3)&^3 // type, count, value
		if k < 0 || v+12 > n || string(pair[12:12+k]) != "name" || be(pair[v:]) != 9 {
			continue
		}
		s := be(pair[v+8:])
		if s < 0 || v+12+s > n || bytes.ContainsAny(pair[v+12:v+12+s], "/\x00") {
			return ""
		}
		return string(pair[v+12 : v+12+s])
	}
	return ""
}
