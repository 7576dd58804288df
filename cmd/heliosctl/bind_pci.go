package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/bound"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/state"
	"helios/internal/units"
	"helios/nvme"
)

// candidate is a controller that is to be bound, with what speaks against it.
type candidate struct {
	controller
	live    []string // uses that no --force ends
	unfit   []string // why it cannot be used at all
	content []string // what load would overwrite: --force SERIAL gives it up
	done    bool     // bound already
}

// barred reports whether it is refused, whatever --force says.
func (c *candidate) barred() bool { return len(c.live)+len(c.unfit) > 0 }

// unseen reports whether nobody could look at its content yet: the kernel's NVMe driver does not
// have it.
func (c *candidate) unseen() bool { return !c.done && c.Kernel.Name == "" }

// forced reports whether --force, or what was typed, gives its content up.
func (c *candidate) forced(force []string) bool {
	return slices.Contains(force, contentKey(c.serial(), c.Addr))
}

// contentKey returns what gives the content of an SSD up: its serial number, or the PCI address of
// one that has none.
func contentKey(serial, addr string) string {
	if serial == "" {
		return addr
	}
	return serial
}

func keyName(serial string) string {
	if serial == "" {
		return "PCI address"
	}
	return "serial number"
}

// foreign candidates have been at vfio-pci before us.
func (c *candidate) foreign() bool { return c.Driver == vfioDriver && c.Record == nil }

// candidateReport is a line of "bind-ssds --json" about a controller that was asked for.
type candidateReport struct {
	PCI      string   `json:"pci"`
	Device   string   `json:"controller,omitempty"`
	Disks    []string `json:"disks,omitempty"`
	Driver   string   `json:"driver"`
	Model    string   `json:"model,omitempty"`
	Serial   string   `json:"serial,omitempty"`
	Bytes    int64    `json:"bytes"`
	LBABytes int      `json:"lba_bytes"`
	Group    int      `json:"iommu_group"`
	NUMANode int      `json:"numa_node"`
	HeldBy   []string `json:"held_by"`
	Plan     string   `json:"plan"`
}

// bindControllers is bind-ssds for controllers of the machine: those that args name, or with
// --all-unused all that nobody uses.
func (b *binder) bindControllers(ctx context.Context, args []string) error {
	force, dry, unused := b.force, b.dryRun, b.allUnused
	gid, alone, err := b.nodeGroup()
	if err != nil {
		return err
	}
	m, recs := b.machine, b.store.Machine()
	plan, err := b.candidates(args, unused)
	if err != nil {
		return err
	}
	lacks := m.ready(plan)
	if lacks != nil && !dry {
		return lacks
	}
	if !dry {
		unlock, err := lockMachine(ctx, recs)
		if err != nil {
			return err
		}
		defer unlock()
		if plan, err = b.candidates(args, unused); err != nil { // another bind may have just ended
			return err
		}
	}
	if err := forcesChosen(plan, force); err != nil {
		return err
	}
	if plan, err = b.judge(plan, force, unused); err != nil {
		return err
	}
	if err := b.showCandidates(plan, force); err != nil {
		return err
	}
	if plan, force, err = b.agree(ctx, args, plan); err != nil {
		return err
	}
	if dry {
		if !m.Root() {
			b.ui.Note(
				"only root sees what is on the SSDs and which processes have them open; with sudo the answer is whole")
		}
		if lacks != nil {
			b.ui.Printf("it cannot be done as things are: %s", lacks)
		}
		b.ui.Printf("dry run: nothing was changed")
		return nil
	}
	if gid < 0 {
		b.ui.Note(
			"only root will be able to use these SSDs, for %s; \"sudo heliosctl vfio-setup setup\" makes group helios, --group NAME names another",
			alone)
	}
	return b.bindGroups(ctx, plan, gid, force)
}

// forcesChosen refuses a --force that names none of the candidates.
func forcesChosen(plan []candidate, force []string) error {
	for _, s := range force {
		// The serial number of one that the kernel's driver does not have shows later.
		if !slices.ContainsFunc(plan, func(c candidate) bool {
			return contentKey(c.serial(), c.Addr) == s || c.unseen() && c.serial() == ""
		}) {
			return errs.New(errs.Usage,
				"{force} %s: none of the chosen SSDs has that serial number", s)
		}
	}
	return nil
}

// agree settles the candidates until nobody has to be asked, and returns them with all serial
// numbers that give content up.
func (b *binder) agree(ctx context.Context, args []string, plan []candidate) ([]candidate,
	[]string, error) {
	force := b.force
	for {
		typed, err := b.settle(ctx, plan, force, b.dryRun)
		if err != nil || len(typed) == 0 {
			return plan, force, err
		}
		// Whoever was asked may have taken minutes, in which disks get other names and users.
		force = append(force, typed...)
		if plan, err = b.candidates(args, b.allUnused); err != nil {
			return nil, nil, err
		}
		if plan, err = b.judge(plan, force, b.allUnused); err != nil {
			return nil, nil, err
		}
	}
}

// lockTimeout bounds the wait of a bind for another bind or unbind of the machine.
const lockTimeout = time.Minute

// lockMachine keeps other binds and unbinds out.
func lockMachine(ctx context.Context, recs *state.Machine) (unlock func(), err error) {
	wait, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	unlock, err = recs.Lock(wait)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil, errs.New(errs.Refused,
			"another bind-ssds or unbind-ssds has been at work for %v; wait until it ends",
			lockTimeout)
	}
	return unlock, err
}

// candidates finds the controllers that were asked for.
func (b *binder) candidates(args []string, unused bool) ([]candidate, error) {
	records, err := b.store.Machine().Records()
	if err != nil {
		return nil, err
	}
	var found []controller
	if unused {
		if found, err = b.machine.controllers(records); err == nil && len(found) == 0 {
			err = errs.New(errs.Capability,
				"this machine shows no NVMe controller on its PCI bus; for files and block devices use {proxy} PATH")
		}
	} else {
		found, err = b.machine.choose(args, records)
	}
	if err != nil {
		return nil, err
	}
	var out []candidate
	for _, c := range found {
		out = append(out, candidate{controller: c, done: c.Record != nil &&
			c.Record.Phase == state.Bound && c.Driver == vfioDriver})
	}
	return out, nil
}

// judge finds out what speaks against each candidate. With unused it leaves out, with a note, those
// that anything speaks against.
func (b *binder) judge(plan []candidate, force []string, unused bool) ([]candidate, error) {
	for i := range plan {
		if !plan[i].done {
			b.judgeOne(&plan[i], unused)
		}
	}
	if err := b.judgeGroups(plan, unused); err != nil {
		return nil, err
	}
	if !unused {
		return plan, nil
	}
	return b.leaveOut(plan, force)
}

// judgeOne finds out what speaks against a candidate by itself.
func (b *binder) judgeOne(c *candidate, unused bool) {
	uses, err := b.machine.uses(c.Addr)
	for _, u := range uses {
		if u.Live {
			c.live = append(c.live, u.String())
		} else {
			c.content = append(c.content, u.String())
		}
	}
	if err != nil && b.machine.Root() {
		c.live = append(c.live, "it could not be found out who uses it: "+err.Error())
	}
	c.live = append(c.live, c.Others...)
	if c.Busy {
		c.live = append(c.live, "the kernel is still binding or unbinding it")
	}
	if why := b.machine.unfit(&c.controller); why != "" {
		c.unfit = append(c.unfit, why)
	}
	switch {
	// SPDK's uio, a vendor's VFIO driver, …
	case c.Driver != "" && c.Driver != kernelDriver && c.Driver != vfioDriver:
		c.live = append(c.live, "driver "+c.Driver+
			" has it, and who uses it by that cannot be seen")
	case c.Driver == vfioDriver && c.Group >= 0 && b.machine.busy(c.Group):
		c.live = append(c.live,
			fmt.Sprintf("another process has its IOMMU group %d open (a virtual machine?)",
				c.Group))
	case unused && c.Driver == "" && c.Record == nil:
		c.live = append(c.live,
			"no driver has it, so its content is not known; name it to take it")
	case unused && c.foreign():
		c.live = append(c.live, "vfio-pci has it for somebody else; name it to take it")
	}
}

// leaveOut leaves out, with a note, the candidates that anything speaks against.
func (b *binder) leaveOut(plan []candidate, force []string) (out []candidate, err error) {
	var left []string
	for _, c := range plan {
		against := slices.Concat(c.live, c.unfit)
		if !c.forced(force) {
			against = append(against, c.content...)
		}
		if len(against) == 0 {
			out = append(out, c)
			continue
		}
		left = append(left, c.text()+": "+strings.Join(against, ", "))
	}
	if len(out) == 0 {
		return nil, errs.New(errs.Refused, "no NVMe device of this machine is unused: %s",
			strings.Join(left, "; "))
	}
	for _, l := range left {
		b.ui.Note("left out: %s", l)
	}
	return out, nil
}

// judgeGroups looks at what else is in the candidates' IOMMU groups: the kernel gives a group to
// one process or to none.
func (b *binder) judgeGroups(plan []candidate, unused bool) error {
	for again := true; again; { // leaving one out may leave out the others of its group
		again = false
		for i := range plan {
			c := &plan[i]
			if c.done || c.Group < 0 || unused && c.barred() {
				continue
			}
			members, err := b.machine.Sys.GroupMembers(c.Group)
			if err != nil {
				return err
			}
			var other []string
			for _, d := range members {
				chosen := slices.ContainsFunc(plan,
					func(o candidate) bool { return o.Addr == d.Addr && !(unused && o.barred()) })
				if chosen || d.Driver == "" || d.Driver == vfioDriver {
					continue
				}
				what := d.Addr + " (driver " + d.Driver
				if k, err := b.machine.Sys.NVMe(d.Addr); err == nil {
					what += ", /dev/" + k.Name
				}
				other = append(other, what+")")
			}
			if len(other) > 0 {
				c.live = append(c.live,
					fmt.Sprintf(
						"its IOMMU group %d also holds %s, and a group can only be taken whole: name all its devices, or take one in another slot",
						c.Group, strings.Join(other, ", ")))
				again = unused
			}
		}
	}
	return nil
}

// showCandidates lists what was asked for before anything is touched.
func (b *binder) showCandidates(plan []candidate, force []string) error {
	var rows [][]string
	for _, c := range plan {
		held := append([]string{}, slices.Concat(c.live, c.unfit, c.content)...)
		todo := "bind"
		switch {
		case c.done:
			todo = "nothing: bound already as " + c.Record.Name
		case c.Record != nil && c.Record.Phase == state.Bound:
			todo = "bind again: it left " + vfioDriver
		case c.Record != nil:
			todo = "finish: " + string(c.Record.Phase) + " was cut off"
		case c.foreign():
			todo = "take over from whoever bound it to " + vfioDriver
		}
		if c.barred() {
			todo = "refused"
		} else if len(c.content) > 0 && !c.forced(force) {
			todo = "refused without --force " + contentKey(c.serial(), c.Addr)
		} else if c.unseen() {
			todo += ", unless it holds data"
		}
		err := b.ui.Event("candidate", candidateReport{
			PCI: c.Addr, Device: c.Kernel.Name, Disks: c.disks(), Driver: c.Driver,
			Model: c.model(), Serial: c.serial(), Bytes: c.bytes(),
			LBABytes: c.lbaBytes(), Group: c.Group, NUMANode: c.NUMANode, HeldBy: held, Plan: todo,
		})
		if err != nil {
			return err
		}
		if len(held) == 0 {
			held = []string{"nobody"}
			if c.unseen() {
				held[0] = "nobody; what is on it shows once it is bound"
			}
		}
		rows = append(rows, []string{c.Addr, dash(strings.Join(c.disks(), ",")), dash(c.model()),
			dash(c.serial()), sizeText(c.bytes()), dash(numberText(c.lbaBytes())),
			groupText(c.Group), dash(c.Driver), strings.Join(held, ", "), todo})
	}
	b.ui.Table([]string{"PCI", "disk", "model", "serial", "size", "LBA", "IOMMU group", "driver",
		"held by", "to do"}, rows)
	return nil
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func sizeText(n int64) string {
	if n == 0 {
		return "-"
	}
	return units.FormatBytes(n)
}

func numberText(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func groupText(n int) string {
	if n < 0 {
		return "none"
	}
	return strconv.Itoa(n)
}

// settle refuses what is in use, and asks for the serial numbers of what holds somebody's data; it
// returns those that were typed.
func (b *binder) settle(ctx context.Context, plan []candidate, force []string,
	dry bool) (typed []string, err error) {
	if why := against(plan, func(c *candidate) []string { return c.unfit }); why != "" {
		return nil, errs.New(errs.Capability, "nothing was changed: %s; choose other SSDs", why)
	}
	if why := against(plan, func(c *candidate) []string { return c.live }); why != "" {
		return nil, errs.New(errs.Refused,
			"nothing was changed: %s; end that use first, or choose other SSDs", why)
	}
	var ask []candidate
	for _, c := range plan {
		if len(c.content) > 0 && !c.forced(force) {
			ask = append(ask, c)
		}
	}
	if len(ask) == 0 {
		return nil, nil
	}
	in := b.machine.typed()
	if dry || in == nil || b.ui.JSON {
		var serials []string
		for _, c := range ask {
			serials = append(serials, contentKey(c.serial(), c.Addr))
		}
		return nil, errs.New(errs.Refused,
			"nothing was changed: %s; to give up what is there, add {force} %s",
			against(ask, func(c *candidate) []string { return c.content }),
			strings.Join(serials, ","))
	}
	return b.askSerials(ctx, ask, bufio.NewReader(in))
}

// against lists candidates with the reasons against them, "" where there are none.
func against(plan []candidate, reasons func(*candidate) []string) string {
	var all []string
	for i := range plan {
		if why := reasons(&plan[i]); len(why) > 0 {
			all = append(all, plan[i].text()+": "+strings.Join(why, ", "))
		}
	}
	return strings.Join(all, "; ")
}

// askSerials asks for the serial number of each candidate.
func (b *binder) askSerials(ctx context.Context, ask []candidate,
	in *bufio.Reader) (typed []string, err error) {
	for _, c := range ask {
		key, what := contentKey(c.serial(), c.Addr), keyName(c.serial())
		b.ui.Note("%s, %s, serial %s: %s. Type its %s to give that up:", c.text(), c.model(),
			dash(c.serial()), strings.Join(c.content, ", "), what)
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w; nothing was changed", ctx.Err())
		case got := <-readLine(in):
			if got != key {
				return nil, errs.New(errs.Refused, "nothing was changed: %s: %q is not its %s",
					c.text(), got, what)
			}
			typed = append(typed, got)
		}
	}
	return typed, nil
}

// bindGroups binds what is left to bind, an IOMMU group at a time: a group works as a whole or not
// at all. A group that failed was given back; one that succeeded stays.
func (b *binder) bindGroups(ctx context.Context, plan []candidate, gid int,
	force []string) (err error) {
	var taken, already []state.Record
	var failed []error
	var order []int
	var dom bound.Domain
	byGroup := map[int][]candidate{}
	for _, c := range plan {
		if c.done {
			if err := b.shareAgain(ctx, c.Record, gid); err != nil {
				return err
			}
			already = append(already, *c.Record)
			continue
		}
		if byGroup[c.Group] == nil {
			order = append(order, c.Group)
		}
		byGroup[c.Group] = append(byGroup[c.Group], c)
	}
	if len(order) > 0 { // what this lacks is better known before any driver is touched
		if dom, err = b.machine.Domain(); err != nil {
			return err
		}
		defer closing(&err, dom.Close)
	}
	for i, g := range order {
		err := ctx.Err()
		if err == nil {
			b.ui.Progress("bind", int64(i), int64(len(order)))
			var now []state.Record
			now, err = b.bindGroup(ctx, dom, byGroup[g], gid, force)
			taken = append(taken, now...)
		}
		if err != nil {
			failed = append(failed, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if err := b.showBound(taken, already); err != nil {
		return err
	}
	return notBound(ctx.Err(), failed, len(taken), len(already), len(plan))
}

// notBound is the error of a bind of so many SSDs that failed or was stopped; nil where all that
// were asked for are bound.
func notBound(stopped error, failed []error, bound, already, all int) error {
	left := all - already - bound
	if stopped != nil {
		if left == 0 && len(failed) == 0 { // it came too late to stop anything
			return nil
		}
		if !errors.Is(errors.Join(failed...), stopped) { // it came between two groups
			failed = append(failed, stopped)
		}
		next := "run the same command again to bind them"
		if bound > 0 {
			next = "run the same command again to bind the rest, or \"sudo heliosctl unbind-ssds\" to give all back"
		}
		return fmt.Errorf("%w: %d SSDs are bound, %d are not; %s", errors.Join(failed...),
			bound+already, left, next)
	}
	if len(failed) == 0 {
		return nil
	}
	err := errors.Join(failed...)
	if bound > 0 {
		return errs.New(errs.ClassOf(failed[0]),
			"%d of %d SSDs are bound, the others are not: %w", bound, all-already, err)
	}
	return errs.With(errs.ClassOf(failed[0]), err)
}

// showBound lists the bound controllers.
func (b *binder) showBound(bound, already []state.Record) error {
	var rows [][]string
	for i, r := range slices.Concat(bound, already) {
		what := "bound"
		if i >= len(bound) {
			what = "bound already"
		}
		rows = append(rows, []string{r.Name, r.PCI, r.Controller, r.Serial,
			units.FormatBytes(r.Bytes), strconv.Itoa(r.LBABytes), numberOf(r.Group),
			dash(r.Driver), what})
		if err := b.ui.Event("bound", r); err != nil {
			return err
		}
	}
	if len(rows) > 0 {
		b.ui.Table([]string{"SSD", "PCI", "model", "serial", "size", "LBA", "IOMMU group",
			"former driver", "state"}, rows)
	}
	return nil
}

func numberOf(n *int) string {
	if n == nil {
		return "-"
	}
	return strconv.Itoa(*n)
}

// bindGroup binds candidates that share an IOMMU group, or gives all of them back.
func (b *binder) bindGroup(ctx context.Context, dom bound.Domain, cs []candidate, gid int,
	force []string) (done []state.Record, err error) {
	recs := b.store.Machine()
	taken := make([]state.Record, 0, len(cs))
	defer func() {
		if err == nil {
			return
		}
		done = nil
		for i, r := range taken {
			if cs[i].foreign() {
				err = errors.Join(err, recs.Remove(r.Name)) // nothing was done to it
			} else {
				err = b.giveBack(r, err)
			}
		}
	}()
	var addrs []string
	for _, c := range cs {
		r, err := b.take(c)
		if r != nil {
			taken = append(taken, *r)
		}
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, c.Addr)
	}
	nodes, err := b.waitNodes(ctx, cs[0].Group, addrs)
	if err != nil {
		return nil, err
	}
	if err := b.holdNodes(cs, nodes); err != nil {
		return nil, err
	}
	for i := range taken {
		if err := b.prove(ctx, dom, &cs[i], &taken[i], force); err != nil {
			return nil, err
		}
		if err := recs.Put(&taken[i]); err != nil { // the next one may be the same namespace
			return nil, err
		}
	}
	return taken, b.handOver(ctx, cs[0].Group, addrs, gid, taken)
}

// take moves a candidate to vfio-pci. A record that it returns is written: a kill from then on
// leaves it behind.
func (b *binder) take(c candidate) (*state.Record, error) {
	r, err := b.newRecord(c)
	if err != nil {
		return nil, err
	}
	release, err := b.machine.claim(c.Kernel.Namespaces)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := b.store.Machine().Put(&r); err != nil {
		return nil, err
	}
	if c.foreign() {
		return &r, nil
	}
	return &r, b.machine.bind(c.Addr, vfioDriver)
}

// handOver gives the nodes and leases of a group's SSDs to the users' group and marks them bound.
func (b *binder) handOver(ctx context.Context, group int, addrs []string, gid int,
	taken []state.Record) error {
	recs := b.store.Machine()
	gid, err := b.onlyOurs(group, gid, addrs...)
	if err != nil {
		return err
	}
	// udev may have begun only now, and its rules would have the last word.
	nodes, err := b.waitNodes(ctx, group, addrs)
	if err != nil {
		return err
	}
	if err := b.giveNodes(nodes, gid); err != nil {
		return err
	}
	for _, r := range taken {
		if err := recs.Share(r.Name, gid); err != nil {
			return err
		}
	}
	for i := range taken {
		taken[i].Phase = state.Bound
		if err := recs.Put(&taken[i]); err != nil {
			return err
		}
	}
	return nil
}

// newRecord is the record of a controller whose driver is about to change.
func (b *binder) newRecord(c candidate) (state.Record, error) {
	records, err := b.store.Machine().Records()
	if err != nil {
		return state.Record{}, err
	}
	group := c.Group
	r := state.Record{Phase: state.Binding, Controller: c.model(), Firmware: c.Kernel.Firmware,
		Disks: c.disks(), Node: groupNode(group), SSD: state.SSD{
			Name: state.NextMachineName(records), Kind: state.KindVFIO,
			Path: "/sys/bus/pci/devices/" +
				c.Addr, Serial: c.serial(), Bytes: c.bytes(), LBABytes: c.lbaBytes(),
			PCI: c.Addr, Group: &group, Driver: c.Driver,
			Bound: time.Now().UTC().Truncate(time.Second),
		}}
	switch r.Driver {
	case vfioDriver:
		r.Driver = "" // somebody else's bind: the kernel will choose
	case "":
		r.Driver = pci.NoDriver
	}
	if old := c.Record; old != nil { // one that was cut off
		r.Name = old.Name
		if r.Driver == "" || r.Driver == pci.NoDriver {
			r.Driver, r.Disks, r.Firmware = old.Driver, old.Disks, old.Firmware
		}
	}
	return r, nil
}

// giveBack undoes a bind that failed, as far as it came, and adds to the error where the controller
// is now.
func (b *binder) giveBack(r state.Record, why error) error {
	m := b.machine
	d, err := m.Sys.Device(r.PCI)
	if errors.Is(err, pci.ErrNotFound) {
		return errors.Join(why, b.store.Machine().Remove(r.Name)) // unplugged
	}
	if err == nil && (d.Taken() || d.Driver != r.Driver) {
		err = m.restore(r.PCI, r.Driver)
	}
	if err != nil {
		return errs.New(errs.ClassOf(why),
			"%w; giving %s back failed too: %w; it is half bound as %s: %s", why, r.PCI, err,
			r.Name, r.NextStep())
	}
	if err := b.store.Machine().Remove(r.Name); err != nil {
		return errors.Join(why, err)
	}
	to := "no driver"
	if d, err := m.Sys.Device(r.PCI); err == nil && d.Driver != "" {
		to = "driver " + d.Driver
	}
	return fmt.Errorf("%w; %s is back with %s", why, r.PCI, to)
}

// prove brings a controller up once through our own queues, notes its identity, and shuts it
// down again. It looks for content where the kernel's driver could not be asked.
func (b *binder) prove(ctx context.Context, dom bound.Domain, cand *candidate, r *state.Record,
	force []string) (err error) {
	bus, err := bound.OpenController(ctx, dom, r.PCI)
	if err != nil {
		return err
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		return errors.Join(err, bus.Close())
	}
	defer closing(&err, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), bound.CloseTimeout)
		defer cancel()
		return c.Close(ctx)
	})
	if r.Serial != "" && r.Serial != c.Serial() {
		return errs.New(errs.Device,
			"%s: the kernel said serial number %s, the controller says %s; do not use this SSD",
			r.PCI, r.Serial, c.Serial())
	}
	// A controller without a driver tells only now whose namespace it reaches.
	id, ns := c.NamespaceID(), c.Namespace()
	records, err := b.store.Machine().Records()
	if err != nil {
		return err
	}
	if err := b.machine.SoleOwner(id, r.PCI, records); err != nil {
		return err
	}
	r.Namespace = &id
	r.Serial, r.Controller, r.Firmware, r.Bytes, r.LBABytes = c.Serial(), c.Model(), c.Firmware(),
		ns.Bytes(), ns.LBABytes
	if n := len(c.Namespaces()); n > 1 {
		b.ui.Note("%s has %d namespaces; the first one is used", r.PCI, n)
	}
	if !cand.unseen() || slices.Contains(force, contentKey(r.Serial, r.PCI)) {
		return nil
	}
	marks, err := stripe.ForeignContent(ctx, &gpuio.SSD{Ctrl: c, Name: r.PCI})
	if err != nil {
		return err
	}
	if len(marks) > 0 {
		return errs.New(errs.Refused, "%s holds %s; to give up what is there, add {force} %s",
			r.PCI, strings.Join(marks, ", "), contentKey(r.Serial, r.PCI))
	}
	return nil
}
