package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/gpuio"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/ssdmodel"
	"helios/internal/state"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// closeTimeout bounds the orderly end of controllers, also after Ctrl-C.
const closeTimeout = 30 * time.Second

// ssdArgs choose the SSDs of a verb that uses them, and how it uses them.
type ssdArgs struct {
	names  []string // none: all that are bound
	queues nvme.SQPlace
	faults *faultinject.Set
}

func ssdOptions() hcli.Options[ssdArgs] {
	return append(hcli.Options[ssdArgs]{
		ssdNames("use only `SSD[,SSD…]`, by name, path or serial (default: all bound)"),
		queuesOption(),
	}, faultOption())
}

func ssdNames(usage string) hcli.Option[ssdArgs] {
	return hcli.List(&cli.StringFlag{Name: "ssds", Usage: usage},
		func(a *ssdArgs) *[]string { return &a.names }).Setting()
}

// queuesOption says where submission queues are.
func queuesOption() hcli.Option[ssdArgs] {
	return hcli.Parsed(&cli.StringFlag{
		Name: "sq", Value: "host",
		Usage: "where submission queues are: host (memory of this machine), cmb (the controller's memory buffer), or auto (cmb where the controller offers room)",
	}, func(a *ssdArgs) *nvme.SQPlace { return &a.queues }, func(s string) (nvme.SQPlace, error) {
		p, err := nvme.ParseSQPlace(s)
		if err != nil {
			return p, errs.New(errs.Usage, "--sq %q is none of host, cmb, auto", s)
		}
		return p, nil
	})
}

func faultOption() hcli.Option[ssdArgs] {
	return hcli.Parsed(&cli.StringFlag{Name: "fault",
		Usage: "inject `FAULT[;FAULT…]` between the program and its SSDs, such as \"error(op=read,lba=0-99,sct=2,sc=0x81,times=3)\" or \"lost(op=read)\"; list shows them all"},
		func(a *ssdArgs) **faultinject.Set { return &a.faults },
		func(s string) (*faultinject.Set, error) {
			if s == "list" {
				return nil, errListFaults
			}
			if s == "" {
				return nil, nil
			}
			set, err := faultinject.Parse(s)
			if err != nil {
				return nil, errs.New(errs.Usage, "--fault: %w", err)
			}
			return set, nil
		})
}

// errListFaults ends a verb that has --fault list: the catalogue is printed and the verb does
// nothing.
var errListFaults = errors.New("the faults are listed")

// faultLine is a fault that can be injected.
type faultLine struct {
	Name    string `json:"name"`
	During  string `json:"during"`
	Fault   string `json:"fault"` // what --fault takes
	What    string `json:"what"`
	Outcome string `json:"outcome"`
	Class   string `json:"class"`
}

// listFaults prints the faults that have a documented outcome.
func listFaults(e *env) error {
	rows := [][]string{}
	for _, f := range faultinject.Catalogue() {
		if err := e.ui.Event("fault", faultLine{f.Name, string(f.During), f.Fault, f.What, f.Outcome,
			string(f.Class)}); err != nil {
			return err
		}
		rows = append(rows, []string{f.Fault, string(f.During), string(f.Class),
			f.What + ": " + f.Outcome})
	}
	e.ui.Table([]string{"--fault", "while", "class", "what happens: outcome"}, rows)
	return nil
}

// ssdSet is the SSDs that a verb has opened, with the lease that keeps others off them.
type ssdSet struct {
	ssds   []*gpuio.SSD
	bound  []state.SSD
	faults *faultinject.Set
	lease  *state.Lease
	domain domain // of the controllers that vfio-pci holds; nil without any
}

// ssdOpener brings bound SSDs up for a verb.
type ssdOpener struct {
	*env
	ssdArgs
	// stacks are the I/O stacks that will read the SSDs, and of which flag that follows; with
	// stackFlag "mode" they are modes.
	stacks    []string
	stackFlag string
	// listing opens SSDs to look at them only: other paths to their namespaces do not matter.
	listing bool
	// playModel replaces the model that a software controller was bound with.
	playModel *ssdmodel.Model
	// pollDoorbells has software controllers look at their doorbells, for a device that writes
	// them and cannot call who serves them.
	pollDoorbells bool
}

// open leases and brings up the SSDs that were chosen, or all bound ones.
func (o *ssdOpener) open(ctx context.Context) (*ssdSet, error) {
	st, err := o.store.Load()
	if err != nil {
		return nil, err
	}
	chosen, err := choose(st, o.names)
	if err != nil {
		return nil, err
	}
	if len(o.names) == 0 {
		for _, r := range st.Unfinished {
			o.ui.Note("SSD %s (%s) is left out, for its %s was cut off: %s", r.Name, r.PCI, r.Phase,
				r.NextStep())
		}
	}
	if len(o.names) == 0 {
		chosen = o.permitted(chosen)
	} else {
		o.leftOut = namesExcept(st.SSDs, chosen)
	}
	if err := o.refuseKernelStacks(chosen); err != nil {
		return nil, err
	}
	if len(chosen) == 0 {
		return nil, errs.New(errs.Usage,
			"no SSD is bound in %s; bind some with \"heliosctl bind-ssds\" (--state DIR chooses another list)",
			o.store.Dir())
	}
	return o.openThese(ctx, chosen)
}

// permitted leaves out, of all that is bound, the machine's SSDs that this user may not use, where
// others are left.
func (o *ssdOpener) permitted(all []state.SSD) []state.SSD {
	var may []state.SSD
	var why []error
	for _, d := range all {
		if d.Kind == state.KindVFIO {
			if err := o.store.Machine().Permitted(d.Name); err != nil {
				why = append(why, err)
				continue
			}
		}
		may = append(may, d)
	}
	if len(may) == 0 {
		return all
	}
	for _, err := range why {
		o.note(fmt.Sprintf("left out: %v", err))
	}
	return may
}

// openThese leases and brings up SSDs of the state.
func (o *ssdOpener) openThese(ctx context.Context, chosen []state.SSD) (_ *ssdSet, err error) {
	s := &ssdSet{bound: chosen, faults: o.faults}
	names := make([]string, len(chosen))
	for i, d := range chosen {
		names[i] = d.Name
	}
	if s.lease, err = o.lease(ctx, names); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for _, d := range chosen {
		c, err := o.openSSD(ctx, s, d)
		if err != nil {
			return nil, err
		}
		ssd := &gpuio.SSD{Ctrl: c, Name: d.Name, BackingPath: d.Path, Backing: d.ID}
		if d.Kind == state.KindVFIO || d.Kind == state.KindComputed {
			ssd.BackingPath = "" // the kernel has no file for it
		}
		s.ssds = append(s.ssds, ssd)
	}
	if !o.listing {
		if err := o.checkPaths(s); err != nil {
			return nil, err
		}
	}
	o.tookSSDs = chosen
	return s, nil
}

// lease takes SSDs. Who only lists them has them for a moment, which is waited for.
func (o *ssdOpener) lease(ctx context.Context, names []string) (*state.Lease, error) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(listingTimeout); ; {
		l, err := o.store.Acquire(o.c.Command.HelpName, names...)
		var used *state.InUseError
		if !errors.As(err, &used) || !strings.HasPrefix(used.By, "heliosctl ssds (") ||
			time.Now().After(end) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-tick.C:
		}
	}
}

// listingTimeout is how long one SSD may take to be listed: a controller comes up, is asked, and is
// shut down.
const listingTimeout = 10 * time.Second

// dyingTimeout is how long openSSD waits for a file that a killed process still holds: the
// kernel ends its io_uring requests, and with them its lock, some time after the process.
const dyingTimeout = 3 * time.Second

// openSSD opens the bus of a bound SSD and brings its controller up. The caller holds the lease.
func (o *ssdOpener) openSSD(ctx context.Context, s *ssdSet, d state.SSD) (*nvme.Controller, error) {
	open := o.proxyBus
	if d.Kind == state.KindVFIO {
		open = func(ctx context.Context, d state.SSD) (nvme.Bus,
			error) {
			return o.vfioBus(ctx, s, d)
		}
	}
	bus, err := open(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("SSD %s: %w", d.Name, err)
	}
	if !s.faults.Empty() {
		bus = faultbus.New(bus, s.faults, faultbus.Options{PollDoorbells: o.pollDoorbells})
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{SQ: o.queues})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("SSD %s: %w", d.Name, err), bus.Close())
	}
	if err := sameSSD(d, c); err != nil {
		return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// proxyBus opens the bus of a software controller.
func (o *ssdOpener) proxyBus(ctx context.Context, d state.SSD) (nvme.Bus, error) {
	if d.Kind == state.KindComputed {
		return o.computedBus(ctx, d)
	}
	fi, err := os.Stat(d.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.Device,
			"its backing %s is gone; bring it back, or \"heliosctl unbind-ssds %s\"",
			d.Path, d.Name)
	}
	// Another file of that name is refused when it is open.
	if s, ok := sysStat(fi); ok && fi.Mode().IsRegular() && fi.Size() != d.Bytes &&
		(!d.Known() || s.Ino == d.Inode) {
		return nil, errs.New(errs.Device,
			"its backing %s has %d bytes and had %d; bring the old file back, or unbind it and bind it anew",
			d.Path, fi.Size(), d.Bytes)
	}
	model, err := o.ssdModel(d)
	if err != nil {
		return nil, err
	}
	bus, err := openBus(ctx, proxy.Config{
		Name: d.Name, Path: d.Path, Bytes: d.Bytes, File: d.ID, LBABytes: d.LBABytes,
		RAM: d.Kind == state.KindRAM, Buffered: d.Buffered, Serial: d.Serial, Model: model,
		PollDoorbells: o.pollDoorbells, MDTS: softMDTS,
	})
	var other *proxy.ReplacedError
	if errors.As(err, &other) {
		return nil,
			fmt.Errorf(
				"%w; bring the old one back, or look at what is there, then \"heliosctl unbind-ssds %s\" and bind it again",
				err, d.Name)
	}
	if err == nil && !d.Known() {
		o.ui.Note(
			"SSD %s: an older heliosctl bound %s and did not record which file that is, so another one of that name would go unnoticed; \"heliosctl unbind-ssds %s\" and bind it again to record it",
			d.Name, d.Path, d.Name)
	}
	return bus, err
}

// sysStat returns what stat(2) says, where there is something.
func sysStat(fi fs.FileInfo) (*syscall.Stat_t, bool) {
	if fi == nil {
		return nil, false
	}
	s, ok := fi.Sys().(*syscall.Stat_t)
	return s, ok
}

// softMDTS lets a command of a software SSD move 1 MiB, as nvme.Options does: runs of pages are
// read in long commands.
const softMDTS = 8

func openBus(ctx context.Context, cfg proxy.Config) (nvme.Bus, error) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(dyingTimeout); ; {
		bus, err := proxy.Open(cfg)
		var other *proxy.ReplacedError
		if errs.ClassOf(err) != errs.Refused || errors.As(err, &other) || time.Now().After(end) {
			return bus, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-tick.C:
		}
	}
}

// close shuts the controllers down and ends the lease. It has a deadline of its own, so that it
// also works when the verb was interrupted.
func (s *ssdSet) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	var err error
	for _, d := range s.ssds {
		if cerr := d.Ctrl.Close(ctx); cerr != nil {
			err = errors.Join(err, fmt.Errorf("SSD %s: %w", d.Name, cerr))
		}
	}
	s.ssds = nil
	if s.domain != nil {
		if cerr := s.domain.Close(); cerr != nil {
			err = errors.Join(err, cerr)
		}
		s.domain = nil
	}
	s.lease.Release()
	s.lease = nil
	return err
}

// faultCounts returns how often each injected fault struck, for reports; nil without faults.
func (s *ssdSet) faultCounts() map[string]int64 {
	if s == nil || s.faults == nil {
		return nil
	}
	return s.faults.Counts()
}

// open opens the dataset of the flag or argument.
func (a *datasetArgs) open(e *env) (*dataset.Dataset, error) {
	dir, err := a.dir(e)
	if err != nil {
		return nil, err
	}
	d, err := dataset.Open(dir)
	if err == nil {
		e.dataMeta = d.Meta
	}
	if err == nil && !d.Sealed() {
		e.ui.Note(
			"dataset %s is not sealed: it was made by an older version; \"heliosctl verify --seal %s\" seals it after checking what can be checked",
			dir, dir)
	}
	return d, err
}

// closing runs a deferred close and keeps its error unless there is one already.
func closing(err *error, f func() error) {
	if cerr := f(); *err == nil {
		*err = cerr
	}
}
