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
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/state"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// closeTimeout bounds the orderly end of controllers, also after Ctrl-C.
const closeTimeout = 30 * time.Second

// ssdFlags choose the SSDs of a verb that uses them.
func ssdFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "ssds", Usage: "use only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
		sqFlag(), faultFlag(),
	}
}

func faultFlag() cli.Flag {
	return &cli.StringFlag{Name: "fault", Usage: "inject `FAULT[;FAULT…]` between the program and its SSDs, such as \"error(op=read,lba=0-99,sct=2,sc=0x81,times=3)\" or \"lost(op=read)\"; list shows them all"}
}

// faultList is the value of --fault that asks for the catalogue instead of injecting anything.
const faultList = "list"

// listFaults prints the faults that have a documented outcome.
func (e *env) listFaults() error {
	rows := [][]string{}
	for _, f := range faultinject.Catalogue() {
		if err := e.ui.Event("fault", map[string]any{"name": f.Name, "during": f.During, "fault": f.Fault, "what": f.What, "outcome": f.Outcome, "class": f.Class}); err != nil {
			return err
		}
		rows = append(rows, []string{f.Fault, string(f.During), string(f.Class), f.What + ": " + f.Outcome})
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

// openSSDs leases and brings up the SSDs that a flag chooses, or all bound ones.
func (e *env) openSSDs(ctx context.Context, flag string) (*ssdSet, error) {
	st, err := e.store.Load()
	if err != nil {
		return nil, err
	}
	want, err := list(flag, e.c.String(flag))
	if err != nil {
		return nil, err
	}
	chosen, err := choose(st, flag, want)
	if err != nil {
		return nil, err
	}
	if len(want) == 0 {
		for _, r := range st.Unfinished {
			e.ui.Note("SSD %s (%s) is left out, for its %s was cut off: %s", r.Name, r.PCI, r.Phase, r.NextStep())
		}
	}
	if len(want) == 0 {
		chosen = e.permitted(chosen)
	} else {
		e.leftOutFlag, e.leftOut = flag, namesExcept(st.SSDs, chosen)
	}
	if err := e.refuseKernelStacks(chosen); err != nil {
		return nil, err
	}
	if len(chosen) == 0 {
		return nil, errs.New(errs.Usage, "no SSD is bound in %s; bind some with \"heliosctl bind-ssds\" (--state DIR chooses another list)", e.store.Dir())
	}
	return e.openThese(ctx, chosen)
}

// permitted leaves out, of all that is bound, the machine's SSDs that this user may not use, where
// others are left.
func (e *env) permitted(all []state.SSD) []state.SSD {
	var may []state.SSD
	var why []error
	for _, d := range all {
		if d.Kind == state.KindVFIO {
			if err := e.store.Machine().Permitted(d.Name); err != nil {
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
		e.ui.Note("left out: %v", err)
	}
	return may
}

// openThese leases and brings up SSDs of the state.
func (e *env) openThese(ctx context.Context, chosen []state.SSD) (_ *ssdSet, err error) {
	s := &ssdSet{bound: chosen}
	if spec := e.c.String("fault"); spec != "" {
		if s.faults, err = faultinject.Parse(spec); err != nil {
			return nil, errs.New(errs.Usage, "--fault: %w", err)
		}
	}
	names := make([]string, len(chosen))
	for i, d := range chosen {
		names[i] = d.Name
	}
	if s.lease, err = e.lease(ctx, names); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for _, d := range chosen {
		c, err := e.openSSD(ctx, s, d)
		if err != nil {
			return nil, err
		}
		ssd := &gpuio.SSD{Ctrl: c, Name: d.Name, BackingPath: d.Path, Backing: d.ID}
		if d.Kind == state.KindVFIO || d.Kind == state.KindComputed {
			ssd.BackingPath = "" // the kernel has no file for it
		}
		s.ssds = append(s.ssds, ssd)
	}
	return s, nil
}

// lease takes SSDs. Who only lists them has them for a moment, which is waited for.
func (e *env) lease(ctx context.Context, names []string) (*state.Lease, error) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(listingTimeout); ; {
		l, err := e.store.Acquire(e.c.Command.HelpName, names...)
		var used *state.InUseError
		if !errors.As(err, &used) || !strings.HasPrefix(used.By, "heliosctl ssds (") || time.Now().After(end) {
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
func (e *env) openSSD(ctx context.Context, s *ssdSet, d state.SSD) (*nvme.Controller, error) {
	sq, err := parseSQ(e.c.String("sq"))
	if err != nil {
		return nil, err
	}
	open := e.proxyBus
	if d.Kind == state.KindVFIO {
		open = func(ctx context.Context, d state.SSD) (nvme.Bus, error) { return e.vfioBus(ctx, s, d) }
	}
	bus, err := open(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("SSD %s: %w", d.Name, err)
	}
	if !s.faults.Empty() {
		bus = faultbus.New(bus, s.faults, faultbus.Options{PollDoorbells: e.pollDoorbells})
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{SQ: sq})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("SSD %s: %w", d.Name, err), bus.Close())
	}
	if err := sameSSD(d, c); err != nil {
		return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// proxyBus opens the bus of a software controller.
func (e *env) proxyBus(ctx context.Context, d state.SSD) (nvme.Bus, error) {
	if d.Kind == state.KindComputed {
		return e.computedBus(ctx, d)
	}
	fi, err := os.Stat(d.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.Device, "its backing %s is gone; bring it back, or \"heliosctl unbind-ssds %s\"", d.Path, d.Name)
	}
	// Another file of that name is refused when it is open.
	if s, ok := sysStat(fi); ok && fi.Mode().IsRegular() && fi.Size() != d.Bytes && (!d.Known() || s.Ino == d.Inode) {
		return nil, errs.New(errs.Device, "its backing %s has %d bytes and had %d; bring the old file back, or unbind it and bind it anew", d.Path, fi.Size(), d.Bytes)
	}
	model, err := e.ssdModel(d)
	if err != nil {
		return nil, err
	}
	bus, err := openBus(ctx, proxy.Config{
		Name: d.Name, Path: d.Path, Bytes: d.Bytes, File: d.ID, LBABytes: d.LBABytes,
		RAM: d.Kind == state.KindRAM, Buffered: d.Buffered, Serial: d.Serial, Model: model, PollDoorbells: e.pollDoorbells,
	})
	var other *proxy.ReplacedError
	if errors.As(err, &other) {
		return nil, fmt.Errorf("%w; bring the old one back, or look at what is there, then \"heliosctl unbind-ssds %s\" and bind it again", err, d.Name)
	}
	if err == nil && !d.Known() {
		e.ui.Note("SSD %s: an older heliosctl bound %s and did not record which file that is, so another one of that name would go unnoticed; \"heliosctl unbind-ssds %s\" and bind it again to record it",
			d.Name, d.Path, d.Name)
	}
	return bus, err
}

// sysStat is what stat(2) says, where there is something.
func sysStat(fi fs.FileInfo) (*syscall.Stat_t, bool) {
	if fi == nil {
		return nil, false
	}
	s, ok := fi.Sys().(*syscall.Stat_t)
	return s, ok
}

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

// faultCounts is how often each injected fault struck, for reports; nil without faults.
func (s *ssdSet) faultCounts() map[string]int64 {
	if s == nil || s.faults == nil {
		return nil
	}
	return s.faults.Counts()
}

// openDataset opens the dataset of the flag or argument.
func (e *env) openDataset() (*dataset.Dataset, error) {
	dir, err := e.dataset()
	if err != nil {
		return nil, err
	}
	d, err := dataset.Open(dir)
	if err == nil {
		e.dataMeta = d.Meta
	}
	if err == nil && !d.Sealed() {
		e.ui.Note("dataset %s is not sealed: it was made by an older version; \"heliosctl verify --seal %s\" seals it after checking what can be checked", dir, dir)
	}
	return d, err
}

// closing runs a deferred close and keeps its error unless there is one already.
func closing(err *error, f func() error) {
	if cerr := f(); *err == nil {
		*err = cerr
	}
}
