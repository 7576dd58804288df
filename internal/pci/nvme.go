package pci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/internal/errs"
	"helios/internal/nsid"
)

// Controller holds what the kernel's nvme driver says of a controller.
type Controller struct {
	Name       string // nvme0: /dev/nvme0
	State      string // live, new, resetting, connecting, deleting, dead; "" on old kernels
	Serial     string
	Model      string
	Firmware   string
	NQN        string // of the subsystem
	Namespaces []Namespace
}

// Namespace is one namespace of a controller as a block device.
type Namespace struct {
	Name     string // nvme0n1: /dev/nvme0n1
	Hidden   string // nvme0c0n1, the path below a multipath disk; "" without multipath
	Generic  string // ng0n1: the character device; "" where the kernel has none
	Dev      string // major:minor
	NSID     int    // 0 when unknown
	Bytes    int64
	LBABytes int
	Zoned    bool // host-managed or host-aware zones
	// Paths are the names of all controllers that reach it by this block device; more than one is
	// a shared namespace.
	Paths []string
	ID    nsid.ID
}

// First is the namespace that we would use: the one with the lowest namespace ID. ok is false where
// there is none.
func (c Controller) First() (ns Namespace, ok bool) {
	if len(c.Namespaces) == 0 {
		return ns, false
	}
	return slices.MinFunc(c.Namespaces,
		func(a, b Namespace) int { return cmp.Compare(a.NSID, b.NSID) }), true
}

var (
	ctrlName = regexp.MustCompile(`^nvme[0-9]+$`)
	nsName   = regexp.MustCompile(`^nvme[0-9]+n[0-9]+$`)
	hidden   = regexp.MustCompile(`^nvme([0-9]+)c([0-9]+)n([0-9]+)$`)
	generic  = regexp.MustCompile(`^ng([0-9]+n[0-9]+)$`)
	partName = regexp.MustCompile(`^(nvme[0-9]+n[0-9]+)p[0-9]+$`)
)

// NVMe reads the controller at addr, which the kernel's nvme driver must have; else the error wraps
// ErrNotFound. Native multipath gives the namespaces to the subsystem: below the controller there
// are then only hidden paths, named by subsystem, controller and namespace.
func (s Sys) NVMe(addr string) (Controller, error) {
	d, err := s.Device(addr)
	if err != nil {
		return Controller{}, err
	}
	dir := devicesDir + "/" + d.Addr + "/nvme"
	names, err := s.list(dir)
	if err != nil {
		return Controller{}, fmt.Errorf("controller %s: %w", d.Addr, err)
	}
	i := slices.IndexFunc(names, ctrlName.MatchString)
	if i < 0 {
		by := "no driver"
		if d.Driver != "" {
			by = "driver " + d.Driver
		}
		return Controller{}, errs.New(errs.Capability,
			"%s has %s and no kernel NVMe controller: %w", d.Addr, by, ErrNotFound)
	}
	return s.controller(dir + "/" + names[i])
}

// controller reads the controller whose folder is dir.
func (s Sys) controller(dir string) (Controller, error) {
	c := Controller{Name: filepath.Base(dir), State: s.text(dir + "/state"),
		Serial: s.text(dir + "/serial"), Model: s.text(dir + "/model"),
		Firmware: s.text(dir + "/firmware_rev"), NQN: s.text(dir + "/subsysnqn")}
	names, err := s.list(dir)
	if err != nil {
		return Controller{}, fmt.Errorf("controller %s: %w", c.Name, err)
	}
	for _, n := range names {
		var ns Namespace
		switch {
		case nsName.MatchString(n):
			ns = s.namespace(n)
			ns.Paths = []string{c.Name}
		case hidden.MatchString(n):
			ns = s.namespace(headOf(n))
			ns.Hidden = n
			if ns.Paths, err = s.paths(ns.Name); err != nil {
				return Controller{}, fmt.Errorf("paths to %s: %w", ns.Name, err)
			}
			if !slices.Contains(ns.Paths, c.Name) { // it comes or goes just now
				ns.Paths = append(ns.Paths, c.Name)
			}
		default:
			continue
		}
		ns.ID = s.identity(c, ns, dir+"/"+n)
		c.Namespaces = append(c.Namespaces, ns)
	}
	slices.SortFunc(c.Namespaces, func(a, b Namespace) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name))
	})
	return c, nil
}

// madeUpNQN begins the NQN that the kernel gives to the subsystem of a controller that has none, or
// one that it cannot believe (nvme_init_subnqn in drivers/nvme/host/core.c).
const madeUpNQN = "nqn.2014.08.org.nvmexpress:"

// identity reads the kernel's identifiers of a namespace, at its block device or at the hidden path
// below. With native multipath it hides each path that may be one of several.
func (s Sys) identity(c Controller, ns Namespace, path string) nsid.ID {
	id := nsid.ID{NQN: c.NQN, Serial: c.Serial, Model: c.Model, NSID: uint32(max(ns.NSID, 0)),
		Private: ns.Hidden == "" && s.text("/sys/module/nvme_core/parameters/multipath") == "Y"}
	if strings.HasPrefix(id.NQN, madeUpNQN) {
		id.NQN = ""
	}
	for _, dir := range []string{"/sys/class/block/" + ns.Name, path} {
		for _, attr := range []string{"uuid", "nguid", "eui", "wwid"} {
			text := s.text(dir + "/" + attr)
			for _, kind := range []string{"uuid.", "eui."} { // of a wwid
				text = strings.TrimPrefix(text, kind)
			}
			id.AddHex(text)
		}
	}
	return id
}

// Namespaces lists the namespaces that the kernel has, of controllers on PCI Express and over
// fabrics, once for each block device.
func (s Sys) Namespaces() ([]Namespace, error) {
	names, err := s.list("/sys/class/nvme")
	if err != nil {
		return nil, fmt.Errorf("listing NVMe controllers: %w", err)
	}
	var out []Namespace
	for _, n := range names {
		if !ctrlName.MatchString(n) {
			continue
		}
		c, err := s.controller("/sys/class/nvme/" + n)
		if err != nil {
			return nil, err
		}
		for _, ns := range c.Namespaces {
			if !slices.ContainsFunc(out, func(o Namespace) bool { return o.Name == ns.Name }) {
				out = append(out, ns)
			}
		}
	}
	return out, nil
}

// headOf turns the name of a hidden path, nvme0c1n2, into that of its disk, nvme0n2.
func headOf(path string) string {
	m := hidden.FindStringSubmatch(path)
	return "nvme" + m[1] + "n" + m[3]
}

func (s Sys) namespace(name string) Namespace {
	dir := "/sys/class/block/" + name
	ns := Namespace{Name: name, Dev: s.text(dir + "/dev")}
	ns.NSID, _ = strconv.Atoi(s.text(dir + "/nsid"))
	ns.LBABytes, _ = strconv.Atoi(s.text(dir + "/queue/logical_block_size"))
	if z := s.text(dir + "/queue/zoned"); z != "" && z != "none" {
		ns.Zoned = true
	}
	if n, err := strconv.ParseInt(s.text(dir+"/size"), 10, 64); err == nil {
		ns.Bytes = n * 512 // sysfs counts 512 byte sectors whatever the LBA size
	}
	g := "ng" + strings.TrimPrefix(name, "nvme")
	if _, err := os.Stat(s.Path("/sys/class/nvme-generic", g)); err == nil {
		ns.Generic = g
	}
	return ns
}

// paths are the controllers that reach a multipath disk.
func (s Sys) paths(head string) ([]string, error) {
	var out []string
	ctrls, err := s.list("/sys/class/nvme")
	if err != nil {
		return nil, err
	}
	for _, c := range ctrls {
		names, err := s.list("/sys/class/nvme/" + c)
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if hidden.MatchString(n) && headOf(n) == head {
				out = append(out, c)
			}
		}
	}
	return out, nil
}

// Find returns the NVMe controller that name means: a PCI address with or without domain, a device
// file or its name (nvme0, nvme0n1, ng0n1, or a link to one, as below /dev/disk), or the serial
// number of a controller that the kernel drives. Where nothing has that name the error wraps
// ErrNotFound: a controller that another driver has cannot be asked for its serial number here.
func (s Sys) Find(name string) (Device, error) {
	if addr, ok := Address(name); ok {
		d, err := s.Device(addr)
		if err == nil && !d.NVMe() {
			return Device{}, errs.New(errs.Usage,
				"PCI device %s is no NVMe controller (class %06x, %04x:%04x); \"heliosctl ssds\" lists them",
				addr, d.Class, d.Vendor, d.DeviceID)
		}
		return d, err
	}
	base := name
	if strings.HasPrefix(name, "/") {
		real, err := s.Resolve(name)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				err = ErrNotFound
			}
			return Device{}, errs.New(errs.Usage,
				"%s: %w; \"heliosctl ssds\" lists the NVMe controllers", name, err)
		}
		base = filepath.Base(real)
	}
	if m := partName.FindStringSubmatch(base); m != nil {
		disk := "/dev/" + m[1]
		if _, err := s.diskController(m[1]); err != nil {
			return Device{}, err
		}
		return Device{}, errs.New(errs.Refused,
			"%s is a partition of %s; SSDs are taken whole: move its data elsewhere, then name %s",
			name, disk, disk)
	}
	switch m := generic.FindStringSubmatch(base); {
	case ctrlName.MatchString(base):
		return s.controllerDevice(base)
	case m != nil:
		return s.diskController("nvme" + m[1])
	case nsName.MatchString(base):
		return s.diskController(base)
	case hidden.MatchString(base):
		return s.controllerDevice("nvme" + hidden.FindStringSubmatch(base)[2])
	case strings.HasPrefix(name, "/"):
		return Device{}, errs.New(errs.Usage, "%s is no NVMe device; \"heliosctl ssds\" lists them",
			name)
	}
	return s.bySerial(name)
}

// bySerial finds the one kernel-driven controller with a serial number.
func (s Sys) bySerial(serial string) (Device, error) {
	all, err := s.Devices(NVMeClass)
	if err != nil {
		return Device{}, err
	}
	var found []Device
	for _, d := range all {
		if c, err := s.NVMe(d.Addr); err == nil && c.Serial == serial {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 0:
		return Device{}, errs.New(errs.Usage,
			"SSD %q: %w: neither a PCI address, a device file nor the serial number of an NVMe controller; \"heliosctl ssds\" lists them",
			serial, ErrNotFound)
	case 1:
		return found[0], nil
	}
	addrs := make([]string, len(found))
	for i, d := range found {
		addrs[i] = d.Addr
	}
	return Device{}, errs.New(errs.Usage,
		"serial number %s is that of %d controllers: %s; give the PCI address", serial, len(found),
		strings.Join(addrs, ", "))
}

// controllerDevice is the function of nvme0.
func (s Sys) controllerDevice(ctrl string) (Device, error) {
	p, err := filepath.EvalSymlinks(s.Path("/sys/class/nvme", ctrl))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = ErrNotFound
		}
		return Device{}, errs.New(errs.Usage,
			"NVMe controller %s: %w; \"heliosctl ssds\" lists them", ctrl, err)
	}
	// …/0000:00:04.0/nvme/nvme0
	addr, ok := Address(filepath.Base(filepath.Dir(filepath.Dir(p))))
	if !ok {
		how := s.text("/sys/class/nvme/" + ctrl + "/transport")
		if how == "" {
			how = "something else"
		}
		return Device{}, errs.New(errs.Usage,
			"NVMe controller %s is not on PCI Express but reached through %s; only local SSDs can be taken",
			ctrl, how)
	}
	return s.Device(addr)
}

// diskController is the function that a namespace's block device hangs on.
func (s Sys) diskController(disk string) (Device, error) {
	p, err := filepath.EvalSymlinks(s.Path("/sys/class/block", disk))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = ErrNotFound
		}
		return Device{}, errs.New(errs.Usage,
			"/dev/%s: %w; \"heliosctl ssds\" lists the NVMe controllers", disk, err)
	}
	if parent := filepath.Base(filepath.Dir(p)); ctrlName.MatchString(parent) {
		return s.controllerDevice(parent)
	}
	// A multipath disk belongs to its subsystem.
	paths, err := s.paths(disk)
	if err != nil {
		return Device{}, fmt.Errorf("paths to /dev/%s: %w", disk, err)
	}
	switch len(paths) {
	case 0:
		return Device{}, errs.New(errs.Usage, "/dev/%s has no controller any more: %w", disk,
			ErrNotFound)
	case 1:
		return s.controllerDevice(paths[0])
	default:
		return Device{}, errs.New(errs.Refused,
			"/dev/%s is reached through %d controllers (%s); name the one to take, such as /dev/%s",
			disk, len(paths), strings.Join(paths, ", "), paths[0])
	}
}

// Resolve follows the links that path, a file's, ends in, within this view.
func (s Sys) Resolve(path string) (string, error) {
	for range 40 { // as the kernel's limit
		l, err := os.Readlink(s.Path(path))
		if err != nil {
			if _, err := os.Stat(s.Path(path)); err != nil {
				return "", err
			}
			return path, nil
		}
		if !filepath.IsAbs(l) {
			l = filepath.Join(filepath.Dir(path), l)
		}
		path = l
	}
	return "", fmt.Errorf("%s: too many links", path)
}

// WaitNVMe waits, after the nvme driver got the function back, until the controller works and its
// namespaces have been found: the driver brings it up after probing, by itself. A controller that
// shows no namespace a while after it went live has none.
func (s Sys) WaitNVMe(ctx context.Context, addr string) (Controller, error) {
	deadline := time.Now().Add(s.wait())
	const grace = 3 * time.Second
	var live time.Time
	for {
		c, err := s.NVMe(addr)
		switch {
		case err != nil && !errors.Is(err, ErrNotFound):
			return c, err
		case err == nil && c.State == "dead":
			return c, errs.New(errs.Device,
				"controller %s (%s) is dead: the kernel could not bring it up; see its log (dmesg)",
				c.Name, addr)
		case err == nil && (c.State == "live" || c.State == ""):
			if live.IsZero() {
				live = time.Now()
			}
			ready := func(n Namespace) bool { return n.Dev != "" }
			if len(c.Namespaces) > 0 && !slices.ContainsFunc(c.Namespaces,
				func(n Namespace) bool { return !ready(n) }) {
				return c, nil
			}
			if time.Since(live) > grace && len(c.Namespaces) == 0 {
				return c, nil
			}
		}
		if time.Now().After(deadline) {
			if err == nil {
				err = errs.New(errs.Device,
					"controller %s (%s) is %q, not live, after %v; see the kernel's log (dmesg)",
					c.Name, addr, c.State, s.wait())
			}
			return c, err
		}
		select {
		case <-ctx.Done():
			return c, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}
