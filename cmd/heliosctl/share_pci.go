package main

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"helios/internal/errs"
	"helios/internal/state"
)

// A VFIO node gives whoever opens it every device of its IOMMU group. So a group of users gets the
// nodes of IOMMU groups that hold SSDs which heliosctl bound, and nothing else but bridges.

// nodeGroup is the group that will use the bound SSDs: --group, what vfio-setup.sh was told,
// helios, or the private group of the user who called sudo. gid -1: root alone, and why says for
// what reason.
func (b *binder) nodeGroup() (gid int, why string, err error) {
	name := b.bindArgs.group
	if name == "" {
		for _, l := range strings.Split(b.machine.attr("/etc/heliosctl/vfio-setup.record"), "\n") {
			if g, ok := strings.CutPrefix(strings.TrimSpace(l), "group "); ok {
				name = strings.TrimSpace(g)
			}
		}
	}
	given := name != ""
	if !given {
		name = "helios"
	}
	if g, err := user.LookupGroup(name); err == nil {
		if gid, err = strconv.Atoi(g.Gid); err == nil {
			return gid, "", nil
		}
	}
	if given {
		if n, err := strconv.ParseUint(name, 10, 31); err == nil {
			return int(n), "", nil
		}
		return -1, "", errs.New(errs.Usage,
			"there is no group %s; make it (\"sudo heliosctl vfio-setup setup\" makes helios), or name another with {group}",
			name)
	}
	gid, why = privateGroup(b.machine.attr("/etc/passwd"), b.machine.attr("/etc/group"),
		os.Getenv("SUDO_UID"), os.Getenv("SUDO_GID"))
	return gid, why, nil
}

// privateGroup is the group of the user who called sudo, where nobody else is in it. A group that
// passwd(5) and group(5) do not list counts as shared.
func privateGroup(passwd, groups, uid, gid string) (int, string) {
	const none = "there is no group helios"
	n, err := strconv.ParseUint(gid, 10, 31)
	if err != nil || n == 0 {
		return -1, none
	}
	name, there, members := gid, false, []string{}
	for l := range strings.Lines(groups) {
		if f := strings.Split(strings.TrimSpace(l), ":"); len(f) >= 4 && f[2] == gid {
			name, there = f[0], true
			members = append(members,
				strings.FieldsFunc(f[3], func(r rune) bool { return r == ',' })...)
		}
	}
	caller := ""
	for l := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimSpace(l), ":")
		switch {
		case len(f) < 4:
		case f[2] == uid:
			caller = f[0]
		case f[3] == gid:
			members = append(members, f[0])
		}
	}
	if !there || caller == "" || slices.ContainsFunc(members,
		func(m string) bool { return m != caller }) {
		return -1, none + ", and group " + name + " of the user who called sudo is not his alone"
	}
	return int(n), ""
}

// onlyOurs is gid where an IOMMU group holds SSDs that heliosctl bound and bridges alone, else -1
// with a note that lists its other devices. The SSDs at proved are as good as bound: only their
// records are unfinished yet.
func (b *binder) onlyOurs(group, gid int, proved ...string) (int, error) {
	if gid < 0 {
		return gid, nil
	}
	members, err := b.machine.Sys.GroupMembers(group)
	if err != nil {
		return -1, err
	}
	records, err := b.store.Machine().Records()
	if err != nil {
		return -1, err
	}
	for _, d := range members {
		var what string
		i := slices.IndexFunc(records, func(r state.Record) bool { return r.PCI == d.Addr })
		switch {
		case !d.NVMe():
			what = fmt.Sprintf("%s, which is no SSD (class %06x)", d.Addr, d.Class)
		case i < 0:
			what = d.Addr + ", which heliosctl did not bind"
		case d.Driver != vfioDriver:
			what = fmt.Sprintf("%s, which vfio-pci has no more (%s is a stale record)", d.Addr,
				records[i].Name)
		case records[i].Phase != state.Bound && !slices.Contains(proved, d.Addr):
			what = fmt.Sprintf("%s, whose %s was cut off (%s)", d.Addr, records[i].Phase,
				records[i].Name)
		default:
			continue
		}
		b.ui.Note("%s stays root's: its IOMMU group also holds %s", groupNode(group), what)
		return -1, nil
	}
	return gid, nil
}

// udevTimeout bounds the wait for udev to be done with a new device node, nodeTimeout that for the
// node.
const (
	udevTimeout = 10 * time.Second
	nodeTimeout = 5 * time.Second
)

// vfioNodes are the device nodes of an IOMMU group: the group's own, and those that iommufd uses of
// the devices at addrs. Kernels have the one, the other, or both.
func (m *machine) vfioNodes(group int, addrs []string) []string {
	out := []string{groupNode(group)}
	for _, a := range addrs {
		// none without iommufd
		names, _ := os.ReadDir(m.Sys.Path("/sys/bus/pci/devices", a, "vfio-dev"))
		for _, n := range names {
			// Kernels from 6.1 on list the device here; one with CONFIG_VFIO_DEVICE_CDEV gives it a
			// number and a node.
			if m.attr(path.Join("/sys/bus/pci/devices", a, "vfio-dev", n.Name(), "dev")) == "" {
				continue
			}
			out = append(out, path.Join("/dev/vfio/devices", n.Name()))
		}
	}
	return out
}

// waitNodes waits for the device nodes of an IOMMU group. udev, where it runs, sets owner and mode
// of a new node by its own rules, so this waits until it has none left to do.
func (b *binder) waitNodes(ctx context.Context, group int, addrs []string) ([]string, error) {
	m := b.machine
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); ; {
		var there []string
		var missing error
		all := m.vfioNodes(group, addrs)
		for _, n := range all {
			if _, err := os.Stat(m.Sys.Path(n)); err == nil {
				there = append(there, n)
			} else if n != groupNode(group) || len(all) == 1 {
				missing = err
			}
		}
		_, queue := os.Stat(m.Sys.Path("/run/udev/queue")) // there while udev works on events
		if missing == nil && (queue != nil || time.Since(begin) > udevTimeout) {
			return there, nil
		}
		if missing != nil && time.Since(begin) > nodeTimeout {
			return nil, errs.New(errs.Device,
				"the device nodes did not appear after the bind: %w; see the kernel's log (dmesg)",
				missing)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

// holdNodes keeps the nodes of candidates that are being bound root's until prove has looked at
// what is on them, whatever udev's rules say. Nodes that another program's device shares are left
// to that program.
func (b *binder) holdNodes(cs []candidate, nodes []string) error {
	if cs[0].Group < 0 {
		return nil
	}
	members, err := b.machine.Sys.GroupMembers(cs[0].Group)
	if err != nil {
		return err
	}
	for _, d := range members {
		ours := slices.ContainsFunc(cs,
			func(c candidate) bool { return c.Addr == d.Addr && !c.foreign() })
		if d.Driver == vfioDriver && !ours {
			return nil
		}
	}
	for _, n := range nodes {
		if err := os.Chmod(b.machine.Sys.Path(n), 0o600); err != nil {
			return errs.New(errs.Capability, "mode of %s: %w", n, err)
		}
	}
	return nil
}

// giveNodes lets a group use device nodes. With gid -1 they stay as they are.
func (b *binder) giveNodes(nodes []string, gid int) error {
	if gid < 0 {
		return nil
	}
	for _, n := range nodes {
		if err := os.Chown(b.machine.Sys.Path(n), -1, gid); err != nil {
			return errs.New(errs.Capability, "group of %s: %w", n, err)
		}
		if err := os.Chmod(b.machine.Sys.Path(n), 0o660); err != nil {
			return errs.New(errs.Capability, "mode of %s: %w", n, err)
		}
	}
	return nil
}

// shareAgain gives an SSD that is bound already to a group: one that is named now, or the first
// one, where only root could use it so far.
func (b *binder) shareAgain(ctx context.Context, r *state.Record, gid int) error {
	if r.Group == nil || gid < 0 {
		return nil // nothing to share, or nobody to share it with
	}
	node := b.machine.vfioNodes(*r.Group, []string{r.PCI})
	fi, err := os.Stat(b.machine.Sys.Path(node[0]))
	if err != nil && len(node) > 1 {
		fi, err = os.Stat(b.machine.Sys.Path(node[1]))
	}
	if err != nil {
		return nil
	}
	if s, ok := fi.Sys().(*syscall.Stat_t); !ok || s.Gid != 0 && b.given(&b.bindArgs.group) == "" {
		return nil
	}
	if gid, err = b.onlyOurs(*r.Group, gid); err != nil || gid < 0 {
		return err
	}
	nodes, err := b.waitNodes(ctx, *r.Group, []string{r.PCI})
	if err != nil {
		return err
	}
	if err := b.giveNodes(nodes, gid); err != nil {
		return err
	}
	return b.store.Machine().Share(r.Name, gid)
}
