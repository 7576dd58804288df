package diskuse

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/signatures"
	"helios/internal/units"
)

// node is a block device that is the disk, a partition of it, or stands on one of them.
type node struct {
	name string // nvme0n1p1, dm-0
	dev  string // major:minor
	base string // the disk or partition that it is or stands on
	via  string // "" for the disk and its partitions; "LVM volume vg0/data (dm-0)"
}

// says completes a text about the node for Use.Text.
func (n node) says(what string) string {
	if n.via == "" {
		return "is " + what
	}
	return "carries " + n.via + ", which is " + what
}

// look is one look at one disk.
type look struct {
	sys    pci.Sys
	disk   string
	nodes  []node
	uses   []Use
	unseen []error
	excl   func(path string) error // opens exclusively and closes
}

func (l *look) add(n node, k Kind, live bool, text string) {
	l.uses = append(l.uses, Use{Kind: k, Device: n.base, Text: text, Live: live})
}

func (l *look) missed(err error) { l.unseen = append(l.unseen, err) }

func (l *look) text(path string) string {
	b, _ := os.ReadFile(l.sys.Path(path))
	return strings.TrimSpace(string(b))
}

func (l *look) list(path string) []string {
	es, _ := os.ReadDir(l.sys.Path(path))
	out := make([]string, len(es))
	for i, e := range es {
		out[i] = e.Name()
	}
	return out
}

// Of says who uses a block device such as "nvme0n1" or "/dev/nvme0n1", and its partitions, also by
// way of devices stacked on them. It changes nothing and opens the device only to read. Where
// something could not be looked at (only root may read a disk or see what processes have open), the
// error says so and the uses are those found so far: who wants to take the disk must then refuse.
// A file that a process has open only for a moment, as udev does after any change, does not count.
func Of(sys pci.Sys, dev string) ([]Use, error) { return of(sys, dev, openExclusive) }

// A use that may pass is looked at several times.
const looks = 8

var lookAgain = 150 * time.Millisecond

func of(sys pci.Sys, dev string, excl func(string) error) ([]Use, error) {
	for i := 1; ; i++ {
		us, err := ofOnce(sys, dev, excl)
		passing := slices.ContainsFunc(us,
			func(u Use) bool { return u.Kind == Open || u.Kind == Busy })
		lasting := slices.ContainsFunc(us,
			func(u Use) bool { return u.Live && u.Kind != Open && u.Kind != Busy })
		if !passing || lasting || i == looks {
			return us, err
		}
		time.Sleep(lookAgain)
	}
}

func ofOnce(sys pci.Sys, dev string, excl func(string) error) ([]Use, error) {
	name := dev
	if strings.HasPrefix(dev, "/") {
		real, err := sys.Resolve(dev)
		if err != nil {
			return nil, errs.New(errs.Usage, "block device %s: %w", dev, err)
		}
		name = filepath.Base(real)
	}
	if _, err := os.Stat(sys.Path("/sys/class/block", name)); err != nil {
		return nil, errs.New(errs.Usage, "block device %s: %w", dev, err)
	}
	l := &look{sys: sys, disk: name, excl: excl}
	l.stack()
	mounts := l.mounts()
	l.swaps()
	l.targets()
	l.opens()
	marks := l.contents()
	l.exclusive(marks)
	l.boot(mounts, marks)
	l.partitions(marks)
	return l.uses, errors.Join(l.unseen...)
}

// stack collects the disk, its partitions and what stands on them, and reports the holders.
func (l *look) stack() {
	loops := map[string][]string{} // backing device → loop devices
	for _, b := range l.list("/sys/class/block") {
		if f := l.text("/sys/class/block/" + b + "/loop/backing_file"); f != "" {
			d := l.deviceOf(f)
			loops[d] = append(loops[d], b)
		}
	}
	seen := map[string]bool{}
	var visit func(name, base, via string)
	visit = func(name, base, via string) {
		if seen[name] {
			return
		}
		seen[name] = true
		dir := "/sys/class/block/" + name
		n := node{name: name, dev: l.text(dir + "/dev"), base: base, via: via}
		l.nodes = append(l.nodes, n)
		for _, h := range append(l.list(dir+"/holders"), loops[name]...) {
			kind, what := l.holder(h)
			if via == "" { // what stands on the holder is told by what it is used for
				l.add(n, kind, true, "belongs to "+what)
			}
			visit(h, base, what)
		}
		for _, p := range l.list(dir) {
			if _, err := os.Stat(l.sys.Path(dir, p, "partition")); err != nil {
				continue
			}
			if via == "" {
				visit(p, p, "")
			} else {
				visit(p, base, via+", partition "+p)
			}
		}
	}
	visit(l.disk, l.disk, "")
}

// deviceOf is the kernel's name for a device file: dm-0 for /dev/mapper/vg-data; "" for none.
func (l *look) deviceOf(file string) string {
	if !strings.HasPrefix(file, "/dev/") {
		return ""
	}
	if real, err := l.sys.Resolve(file); err == nil {
		file = real
	} else if name, ok := strings.CutPrefix(file, "/dev/mapper/"); ok { // no udev, no link
		for _, b := range l.list("/sys/class/block") {
			if l.text("/sys/class/block/"+b+"/dm/name") == name {
				return b
			}
		}
	}
	return strings.ReplaceAll(strings.TrimPrefix(file, "/dev/"), "/", "!")
}

// holder names a block device that stands on another.
func (l *look) holder(name string) (Kind, string) {
	dir := "/sys/class/block/" + name
	if dm := l.text(dir + "/dm/name"); dm != "" {
		uuid := l.text(dir + "/dm/uuid")
		switch {
		case strings.HasPrefix(uuid, "LVM-"):
			return LVM, fmt.Sprintf("LVM volume %s (%s)", lvmName(dm), name)
		case strings.HasPrefix(uuid, "CRYPT-"):
			return Crypt, fmt.Sprintf("encrypted volume %s (%s)", dm, name)
		case strings.HasPrefix(uuid, "mpath-"), strings.Contains(uuid, "-mpath-"):
			return Multipath, fmt.Sprintf("multipath device %s (%s)", dm, name)
		}
		return Mapper, fmt.Sprintf("device-mapper device %s (%s)", dm, name)
	}
	if _, err := os.Stat(l.sys.Path(dir, "md")); err == nil {
		level := l.text(dir + "/md/level")
		if level == "" {
			level = l.text(dir + "/md/array_state")
		}
		return RAID, strings.TrimSuffix(fmt.Sprintf("RAID array %s (%s)", name, level), " ()")
	}
	if _, err := os.Stat(l.sys.Path(dir, "loop")); err == nil {
		return Loop, "loop device " + name
	}
	return Holder, "block device " + name
}

// lvmName turns device-mapper's name of a volume into GROUP/VOLUME: a hyphen parts the two, and
// stands twice where it is part of a name.
func lvmName(dm string) string {
	for i := 0; i < len(dm); i++ {
		if dm[i] != '-' {
			continue
		}
		if i+1 < len(dm) && dm[i+1] == '-' {
			i++
			continue
		}
		unescape := func(s string) string { return strings.ReplaceAll(s, "--", "-") }
		return unescape(dm[:i]) + "/" + unescape(dm[i+1:])
	}
	return dm
}

// swaps reads what is swapped to.
func (l *look) swaps() {
	b, err := os.ReadFile(l.sys.Path("/proc/swaps"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // without CONFIG_SWAP there is none
		l.missed(fmt.Errorf("swap space: %w", err))
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 2 || f[1] != "partition" { // a file is on a mounted file system
			continue
		}
		name := l.deviceOf(strings.TrimSuffix(unescape(f[0]), " (deleted)"))
		for _, n := range l.nodes {
			if n.name == name {
				l.add(n, Swap, true, n.says("in use as swap space"))
			}
		}
	}
}

// targets reads what the kernel's NVMe target exports; it opens disks without a claim.
func (l *look) targets() {
	const dir = "/sys/kernel/config/nvmet/subsystems"
	for _, sub := range l.list(dir) {
		for _, ns := range l.list(dir + "/" + sub + "/namespaces") {
			off := dir + "/" + sub + "/namespaces/" + ns
			name := l.deviceOf(l.text(off + "/device_path"))
			for _, n := range l.nodes {
				if n.name == name && l.text(off+"/enable") == "1" {
					l.add(n, Target, true, n.says("exported over NVMe-oF as namespace "+ns+
						" of "+sub))
				}
			}
		}
	}
}

// passthrough reports that the kernel's NVMe target exports a whole controller; no process has it
// open then, and no disk is claimed.
func passthrough(sys pci.Sys, node string) (us []Use) {
	const dir = "/sys/kernel/config/nvmet/subsystems"
	l := &look{sys: sys}
	for _, sub := range l.list(dir) {
		off := dir + "/" + sub + "/passthru"
		dev := l.text(off + "/device_path")
		if real, err := sys.Resolve(dev); err == nil {
			dev = real
		}
		if dev == node && l.text(off+"/enable") == "1" {
			us = append(us, Use{Kind: Target, Device: strings.TrimPrefix(node, "/dev/"), Live: true,
				Text: "is exported over NVMe-oF as " + sub})
		}
	}
	return us
}

// content holds what was read of one block device.
type content struct {
	node
	bytes int64
	marks []string
	head  []byte
}

// contents reads the signatures of the disk and its partitions.
func (l *look) contents() []content {
	var out []content
	for _, n := range l.nodes {
		if n.via != "" {
			continue
		}
		c := content{node: n}
		if s, err := strconv.ParseInt(l.text("/sys/class/block/"+n.name+"/size"), 10,
			64); err == nil {
			c.bytes = s * 512
		}
		if c.bytes > 0 {
			head, tail, err := readEnds(l.sys.Path("/dev", strings.ReplaceAll(n.name, "!", "/")),
				c.bytes)
			if err != nil {
				l.missed(fmt.Errorf("what is on /dev/%s: %w", n.name, err))
			} else {
				c.head, c.marks = head, signatures.All(head, tail, c.bytes)
			}
		}
		out = append(out, c)
	}
	return out
}

// readWait bounds the reading of a disk's two ends.
var readWait = 20 * time.Second

func readEnds(path string, size int64) (head, tail []byte, err error) {
	type got struct {
		head, tail []byte
		err        error
	}
	done := make(chan got, 1)
	go func() {
		var g got
		defer func() { done <- g }()
		f, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err != nil {
			g.err = err
			return
		}
		defer f.Close() //nolint:errcheck // only read
		n := min(int64(signatures.ProbeBytes), size)
		g.head, g.tail = make([]byte, n), make([]byte, n)
		if _, err := io.ReadFull(io.NewSectionReader(f, 0, n), g.head); err != nil {
			g.err = fmt.Errorf("reading the first %d bytes: %w", n, err)
			return
		}
		if _, err := io.ReadFull(io.NewSectionReader(f, size-n, n), g.tail); err != nil {
			g.err = fmt.Errorf("reading the last %d bytes: %w", n, err)
		}
	}()
	t := time.NewTimer(readWait)
	defer t.Stop()
	select {
	case g := <-done:
		return g.head, g.tail, g.err
	case <-t.C:
		return nil, nil, fmt.Errorf("no answer to a read within %v", readWait)
	}
}

// openExclusive asks the kernel for a claim and gives it back at once. EBUSY: the disk or one of
// its partitions is mounted, swapped to, or claimed by another driver or process.
func openExclusive(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open exclusively", Path: path, Err: err}
	}
	return unix.Close(fd)
}

// exclusive finds the holders that only the kernel knows of, ZFS among them.
func (l *look) exclusive(cs []content) {
	err := l.excl(l.sys.Path("/dev", strings.ReplaceAll(l.disk, "!", "/")))
	busy := errors.Is(err, unix.EBUSY)
	if err != nil && !busy {
		l.missed(fmt.Errorf("whether /dev/%s is held: %w", l.disk, err))
	}
	explained := slices.ContainsFunc(l.uses,
		func(u Use) bool { return u.Live && u.Kind != Open && u.Kind != Loop && u.Kind != Target })
	for i, c := range cs {
		if !slices.Contains(c.marks, zfsMark) {
			continue
		}
		pool := zfsPool(c.head)
		imported := busy && !explained
		if pool != "" {
			if _, err := os.Stat(l.sys.Path("/proc/spl/kstat/zfs", pool)); err == nil {
				imported = true
			}
		}
		what := strings.TrimSuffix("ZFS pool "+pool, " ")
		if imported {
			l.add(c.node, ZFS, true, "is a member of the imported "+what)
			explained = true
			cs[i].marks = slices.DeleteFunc(c.marks, func(m string) bool { return m == zfsMark })
		} else if pool != "" {
			cs[i].marks[slices.Index(c.marks, zfsMark)] = zfsMark + " (" + pool + ", not imported)"
		}
	}
	if busy && !explained && !slices.ContainsFunc(l.uses,
		func(u Use) bool { return u.Kind == Open }) {
		l.add(l.nodes[0], Busy, true,
			"is held exclusively by something in the kernel that does not say its name, such as a file system that was unmounted lazily")
	}
}

// partitions reports content: what would be lost.
func (l *look) partitions(cs []content) {
	var parts []string
	for _, c := range cs {
		if c.name == l.disk {
			for _, m := range c.marks {
				l.add(c.node, Signature, false, "holds "+m)
			}
			continue
		}
		s := c.name + " (" + strings.Join(append([]string{units.FormatBytes(c.bytes)}, c.marks...),
			", ") + ")"
		parts = append(parts, s)
	}
	if len(parts) == 1 {
		l.add(l.nodes[0], Partitions, false, "has the partition "+parts[0])
	} else if len(parts) > 1 {
		l.add(l.nodes[0], Partitions, false, fmt.Sprintf("has %d partitions: %s", len(parts),
			strings.Join(parts, ", ")))
	}
}

// OfController joins the uses of all namespaces of the controller at a PCI address, and of its
// character devices. A controller without the kernel's nvme driver has none. Errors are as Of's.
func OfController(sys pci.Sys, addr string) ([]Use, error) {
	return ofController(sys, addr, openExclusive)
}

// LookAt is OfController for who only wants to know: it opens nothing exclusively, which would
// stand in the way of somebody's mount for a moment, so holders that only the kernel knows of do
// not show.
func LookAt(sys pci.Sys, addr string) ([]Use, error) {
	return ofController(sys, addr, func(string) error { return nil })
}

func ofController(sys pci.Sys, addr string, excl func(string) error) ([]Use, error) {
	d, err := sys.Device(addr)
	if err != nil {
		return nil, err
	}
	us, unseen := functions(sys, d, excl)
	c, err := sys.NVMe(d.Addr)
	if errors.Is(err, pci.ErrNotFound) {
		return us, errors.Join(unseen...)
	}
	if err != nil {
		return us, errors.Join(append(unseen, err)...)
	}
	all, err := sys.Namespaces()
	if err != nil {
		unseen = append(unseen, err)
	}
	nodes := []string{"/dev/" + c.Name}
	for _, ns := range c.Namespaces {
		u, err := of(sys, ns.Name, excl)
		us = append(us, u...)
		if err != nil {
			unseen = append(unseen, err)
		}
		for _, p := range OtherPaths(all, ns, c.Name) {
			us = append(us, Use{Kind: Multipath, Device: ns.Name, Text: p, Live: true})
		}
		if ns.Generic != "" {
			nodes = append(nodes, "/dev/"+ns.Generic)
		}
	}
	us = append(us, passthrough(sys, nodes[0])...)
	// udev and the like let go soon.
	var open []Opener
	for range looks {
		if open, err = Openers(sys, nodes...); len(open) == 0 {
			break
		}
		time.Sleep(lookAgain)
	}
	if err != nil && len(unseen) == 0 { // else said already
		unseen = append(unseen, err)
	}
	for _, n := range nodes {
		if t := openersText(open, n); t != "" {
			us = append(us, Use{Kind: Open, Device: strings.TrimPrefix(n, "/dev/"),
				Text: "is open in " + t, Live: true})
		}
	}
	return us, errors.Join(unseen...)
}

// OtherPaths says by which controllers other than ctrl the kernel reaches a namespace, and by which
// block devices. all are the namespaces that the kernel has; of a bound one only the ID is known.
// Without native multipath one namespace is a block device for each of its controllers, and what is
// done to one of them the others do not know.
func OtherPaths(all []pci.Namespace, ns pci.Namespace, ctrl string) []string {
	var out []string
	for _, o := range all {
		others := slices.DeleteFunc(slices.Clone(o.Paths),
			func(p string) bool { return p == ctrl })
		if len(others) > 0 && (o.Name == ns.Name || o.ID.Same(ns.ID)) {
			out = append(out, fmt.Sprintf(
				"is the namespace that the kernel reaches through %s as well (/dev/%s)",
				strings.Join(others, ", "), o.Name))
		}
	}
	return out
}

// functions reports what SR-IOV makes of a controller: the virtual functions that it has, and the
// use of the physical function whose virtual one it is. A reset of that takes its virtual functions
// along, and their namespaces may be its own.
func functions(sys pci.Sys, d pci.Device, excl func(string) error) (us []Use, unseen []error) {
	if d.VFs > 0 {
		us = append(us, Use{Kind: VFs, Live: true, Text: fmt.Sprintf(
			"%s has %d virtual functions, which would vanish; write 0 to its sriov_numvfs first",
			d.Addr, d.VFs)})
	}
	if d.PF == "" || d.PF == d.Addr {
		return us, nil
	}
	pf, err := sys.Device(d.PF)
	if err != nil {
		return us, []error{fmt.Errorf("the physical function of %s: %w", d.Addr, err)}
	}
	of := d.Addr + " is a virtual function of " + pf.Addr + ", "
	if pf.Driver != "" && pf.Driver != "nvme" {
		return append(us, Use{Kind: PF, Live: true, Text: of + "which driver " + pf.Driver +
			" has"}), nil
	}
	of += "which is in use: "
	uses, err := ofController(sys, pf.Addr, excl)
	if err != nil {
		unseen = append(unseen, err)
	}
	for _, u := range uses {
		// That it has virtual functions, and shares namespaces with them, is no use.
		if u.Live && u.Kind != VFs && u.Kind != Multipath {
			us = append(us, Use{Kind: PF, Live: true, Text: of + u.String()})
		}
	}
	return us, unseen
}
