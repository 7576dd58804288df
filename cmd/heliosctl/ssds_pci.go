package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/state"
	"helios/nvme"
)

// Kinds of "ssds" besides those of bound SSDs.
const (
	kindKernel = "kernel" // the kernel's nvme driver has it
	kindOther  = "other"  // another driver, or vfio-pci for somebody else
	kindNone   = "none"   // no driver
)

// place has the slot and the users of a controller, in a line of "ssds".
type place struct {
	Driver   string   `json:"driver,omitempty"`     // that has it now
	Device   string   `json:"controller,omitempty"` // nvme0
	Disks    []string `json:"disks,omitempty"`      // nvme0n1
	HeldBy   []string `json:"held_by,omitempty"`
	NUMANode *int     `json:"numa_node,omitempty"`
	Link     string   `json:"link,omitempty"`
	Phase    string   `json:"phase,omitempty"` // of a bind or unbind that was cut off
	Next     string   `json:"next,omitempty"`  // what to do about it
}

func placeOf(c *controller) place {
	p := place{Driver: c.Driver, Device: c.Kernel.Name, Disks: c.disks(), Link: c.link()}
	if c.NUMANode >= 0 {
		p.NUMANode = &c.NUMANode
	}
	return p
}

// listed splits what "ssds" was asked for into bound SSDs and other controllers of the machine;
// nothing asked for is all there is.
func (i *inspector) listed(want []string) (bound []state.SSD, others []controller, err error) {
	st, err := i.store.Load()
	if err != nil {
		return nil, nil, err
	}
	records, err := i.store.Machine().Records()
	if err != nil {
		return nil, nil, err
	}
	if len(want) == 0 {
		all, err := i.machine.controllers(records)
		if err != nil {
			return nil, nil, err
		}
		for _, c := range all {
			if c.Record == nil || c.Record.Phase != state.Bound {
				others = append(others, c)
			}
		}
		return st.SSDs, others, nil
	}
	for _, w := range want {
		one, err := choose(st, []string{w})
		if err == nil {
			bound = append(bound, one...)
			continue
		}
		c, cerr := i.machine.choose([]string{w}, records)
		if errors.Is(cerr, pci.ErrNotFound) {
			return nil, nil, err
		}
		if cerr != nil {
			return nil, nil, cerr
		}
		others = append(others, c...)
	}
	return bound, others, nil
}

// inspectController fills in the place of a bound controller, and what is wrong with it.
func (i *inspector) inspectController(d state.SSD, r *ssdReport) error {
	dev, next, gone := i.machine.StillBound(d)
	defer func() { r.Next = next }()
	if gone != nil && dev.Addr == "" {
		return gone
	}
	records, err := i.store.Machine().Records()
	if err != nil {
		return err
	}
	c, err := i.machine.look(dev, records)
	if err != nil {
		return err
	}
	r.place = placeOf(&c)
	if c.Record != nil {
		r.Model, r.Firmware = c.Record.Controller, c.Record.Firmware
	}
	return gone
}

// strayText is said of a controller at vfio-pci of which there is no record.
const strayText = "bound by another program, or our record of it was lost"

func strayNext(addr string) string {
	return fmt.Sprintf(
		"if no other program uses it, \"sudo heliosctl bind-ssds %s\" takes it and \"sudo heliosctl unbind-ssds %s\" gives it back to the kernel",
		addr, addr)
}

// describe returns the report on a controller that we do not have.
func (i *inspector) describe(ctx context.Context, c *controller) ssdReport {
	group := c.Group
	r := ssdReport{place: placeOf(c), Model: c.model(), Firmware: c.Kernel.Firmware,
		Health: "unknown", Content: "unknown", SSD: state.SSD{
			Name: c.Kernel.Name, Path: "/sys/bus/pci/devices/" + c.Addr, Serial: c.serial(),
			Bytes: c.bytes(), LBABytes: c.lbaBytes(), PCI: c.Addr,
		}}
	if group >= 0 {
		r.Group = &group
	}
	if r.Name == "" {
		r.Name = c.Addr
	}
	switch {
	case c.Driver == "":
		r.Kind = kindNone
	case c.Kernel.Name != "":
		r.Kind = kindKernel
	default:
		r.Kind = kindOther
	}
	if rec := c.Record; rec != nil {
		r.Name, r.Kind, r.SSD.Driver, r.Firmware = rec.Name, state.KindVFIO, rec.Driver,
			rec.Firmware
		r.Phase, r.Next = string(rec.Phase), rec.NextStep()
	}
	if c.Driver == vfioDriver && c.Record == nil {
		r.HeldBy, r.Next = append(r.HeldBy, strayText), strayText+"; "+strayNext(c.Addr)
	}
	if c.Kernel.Name == "" {
		return r
	}
	uses, err := i.machine.Seen(c.Addr)
	for _, u := range uses {
		r.HeldBy = append(r.HeldBy, u.String())
	}
	r.HeldBy = append(r.HeldBy, c.Others...)
	switch {
	case err == nil:
	case i.machine.Root():
		r.HeldBy = append(r.HeldBy, "could not look everywhere: "+err.Error())
	default:
		r.HeldBy = append(r.HeldBy, "needs root to see all")
	}
	log, err := smartOf(i.machine.Sys.Path("/dev", c.Kernel.Name))
	switch {
	case errors.Is(err, fs.ErrPermission):
		r.Health = "needs root"
	case err != nil:
		r.Health = "unknown: " + err.Error()
	default:
		r.SMART, r.Health = smart(log), health(log, false)
	}
	if !i.describeUnfit(c, &r) {
		i.describeContent(ctx, c, &r)
	}
	return r
}

// describeUnfit shows a namespace that cannot be used as what it is. The kernel shows some as disks
// of no bytes, in blocks of 512.
func (i *inspector) describeUnfit(c *controller, r *ssdReport) bool {
	why := i.machine.unfit(c)
	if why == "" {
		return false
	}
	r.Content = "unusable: " + why
	ns, there := c.Kernel.First()
	if !there || ns.Bytes > 0 {
		return true
	}
	if id, err := i.machine.identify(c.Kernel.Name, ns.NSID); err == nil {
		if f := id.Format(); f.LBADS >= 9 && f.LBADS < 31 && id.NSZE < 1<<31 {
			r.LBABytes, r.Bytes = 1<<f.LBADS, int64(id.NSZE)<<f.LBADS
		}
	}
	return true
}

// describeContent looks for our superblock on a disk that the kernel has.
func (i *inspector) describeContent(ctx context.Context, c *controller, r *ssdReport) {
	ns, _ := c.Kernel.First()
	f, err := os.Open(i.machine.Sys.Path("/dev", ns.Name))
	if errors.Is(err, fs.ErrPermission) {
		r.Content = "needs root"
		return
	}
	if err != nil || ns.LBABytes == 0 {
		return // unknown
	}
	defer f.Close() //nolint:errcheck // only read
	all, free, err := stripe.ContentsFrom(ctx, ns.Name, f, ns.LBABytes,
		uint64(ns.Bytes/int64(ns.LBABytes)))
	if err != nil && !errors.Is(err, stripe.ErrNoSuperblock) {
		r.Content = "unknown: " + err.Error()
		return
	}
	r.content(all, free)
}

// adminIoctl is NVME_IOCTL_ADMIN_CMD, _IOWR('N', 0x41, struct nvme_admin_cmd) (linux/nvme_ioctl.h).
const adminIoctl = 0xC0484E41

// adminCommand is struct nvme_passthru_cmd.
type adminCommand struct {
	opcode, flags          uint8
	_                      uint16
	nsid, cdw2, cdw3       uint32
	metadata, addr         uint64
	metadataBytes, bytes   uint32
	cdw10, cdw11, cdw12    uint32
	cdw13, cdw14, cdw15    uint32
	timeoutMS, resultDword uint32
}

const _ = uint(unsafe.Sizeof(adminCommand{})-72) + uint(72-unsafe.Sizeof(adminCommand{}))

// smartOf asks the kernel's driver for a controller's SMART log (Get Log Page, 02h).
func smartOf(node string) (nvme.SMARTLog, error) {
	const logBytes = 512
	const retainEvent = 1 << 15 // RAE: events are the kernel's to acknowledge
	b, err := adminRead(node, "SMART log", adminCommand{opcode: nvme.AdminGetLogPage,
		nsid: nvme.NSIDAll, bytes: logBytes, cdw10: nvme.LogSMART | retainEvent | (logBytes/4-
			1)<<16})
	if err != nil {
		return nvme.SMARTLog{}, err
	}
	return nvme.DecodeSMARTLog(b)
}

// identifyOf asks the kernel's driver for a namespace's Identify data (CNS 00h).
func identifyOf(node string, nsid uint32) (nvme.IdentifyNamespace, error) {
	b, err := adminRead(node, "Identify", adminCommand{opcode: nvme.AdminIdentify, nsid: nsid,
		bytes: nvme.IdentifyBytes, cdw10: nvme.CNSNamespace})
	if err != nil {
		return nvme.IdentifyNamespace{}, err
	}
	return nvme.DecodeIdentifyNamespace(b)
}

// adminRead sends an admin command that returns cmd.bytes through the kernel's driver.
func adminRead(node, what string, cmd adminCommand) ([]byte, error) {
	f, err := os.Open(node)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	buf := make([]byte, cmd.bytes)
	var pin runtime.Pinner // the kernel gets its address as a number
	defer pin.Unpin()
	pin.Pin(&buf[0])
	cmd.addr, cmd.timeoutMS = uint64(uintptr(unsafe.Pointer(&buf[0]))), 5000
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), adminIoctl,
		uintptr(unsafe.Pointer(&cmd)))
	switch {
	case errno == unix.EACCES || errno == unix.EPERM:
		return nil, fs.ErrPermission
	case errno != 0:
		return nil, fmt.Errorf("%s of %s: %w", what, node, errno)
	case status != 0:
		return nil, errs.New(errs.Device, "%s of %s: %v", what, node, nvme.Status(status))
	}
	return buf, nil
}

// controllerRow is the line of a controller in the table of the machine's NVMe devices.
func controllerRow(r ssdReport) []string {
	device := dash(strings.Join(r.Disks, ","))
	if r.Kind == state.KindVFIO {
		device = r.Name
	}
	group, numa := "none", "-"
	if r.Group != nil {
		group = strconv.Itoa(*r.Group)
	}
	if r.NUMANode != nil {
		numa = strconv.Itoa(*r.NUMANode)
	}
	held := strings.Join(r.HeldBy, ", ")
	if r.Phase != "" {
		held = strings.TrimPrefix(held+", "+r.Phase+" was cut off", ", ")
	}
	return []string{r.PCI, device, dash(r.place.Driver), dash(r.Model), dash(r.Serial),
		sizeText(r.Bytes), dash(numberText(r.LBABytes)), r.Health, r.Content, dash(held), group,
		numa, dash(r.Link)}
}
