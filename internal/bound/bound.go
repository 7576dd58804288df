// Package bound brings up the SSDs of the list that "heliosctl bind-ssds" keeps, or files that play
// SSDs, for as long as somebody uses them.
package bound

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/rowtype"
	"helios/internal/ssdmodel"
	"helios/internal/state"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// Opener brings SSDs up.
type Opener struct {
	Store  *state.Store
	User   string // the holder of the lease: a verb, or another program
	Note   func(text string)
	Faults *faultinject.Set // injected between the program and its SSDs; nil: none
	// Model replaces the model that a software controller was bound with.
	Model *ssdmodel.Model
	// PollDoorbells has software controllers look at their doorbells, for a device that writes
	// them and cannot call who serves them.
	PollDoorbells bool
	Machine       *Machine
	// Listing opens SSDs to look at them only: other paths to their namespaces do not matter.
	Listing bool
}

// Set is a number of SSDs in use, with the lease that keeps others off them.
type Set struct {
	SSDs  []*gpuio.SSD
	Bound []state.SSD // none where files were opened
	// Domain is the address space of the controllers that vfio-pci holds; nil: none.
	Domain Domain
	lease  *state.Lease
}

// CloseTimeout bounds the orderly end of controllers, also after Ctrl-C.
const CloseTimeout = 30 * time.Second

// Close shuts the controllers down and ends the lease. It has a deadline of its own, so that it
// also works after an interrupt.
func (s *Set) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	var err error
	for _, d := range s.SSDs {
		if cerr := d.Ctrl.Close(ctx); cerr != nil {
			err = errors.Join(err, fmt.Errorf("SSD %s: %w", d.Name, cerr))
		}
	}
	s.SSDs = nil
	if s.Domain != nil {
		err = errors.Join(err, s.Domain.Close())
		s.Domain = nil
	}
	s.lease.Release()
	s.lease = nil
	return err
}

// Open leases and brings up SSDs of the list.
func (o *Opener) Open(ctx context.Context, chosen []state.SSD) (_ *Set, err error) {
	s := &Set{Bound: chosen}
	names := make([]string, len(chosen))
	for i, d := range chosen {
		names[i] = d.Name
	}
	shared := true // files have leases on them; a controller and memory have one user
	for _, d := range chosen {
		shared = shared && d.Kind == state.KindProxy
	}
	if s.lease, err = o.acquire(ctx, shared, names); err != nil {
		return nil, err
	}
	defer s.closeAfter(&err)
	for _, d := range chosen {
		c, err := o.open(ctx, s, d)
		if err != nil {
			return nil, err
		}
		ssd := &gpuio.SSD{Ctrl: c, Name: d.Name, BackingPath: d.Path, Backing: d.ID}
		if d.Kind == state.KindVFIO || d.Kind == state.KindComputed {
			ssd.BackingPath = "" // the kernel has no file for it
		}
		s.SSDs = append(s.SSDs, ssd)
	}
	if !o.Listing {
		if err := o.CheckPaths(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Permitted leaves out, of all that is bound, the machine's SSDs that this user may not use, where
// others are left.
func (o *Opener) Permitted(all []state.SSD) []state.SSD {
	var may []state.SSD
	var why []error
	for _, d := range all {
		if d.Kind == state.KindVFIO {
			if err := o.Store.Machine().Permitted(d.Name); err != nil {
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
		o.Note("left out: " + err.Error())
	}
	return may
}

// OpenFiles brings up files and block devices as SSDs: as they were bound, where all are in the
// list.
func (o *Opener) OpenFiles(ctx context.Context, files []string) (_ *Set, err error) {
	st, err := o.Store.Load()
	if err != nil {
		return nil, err
	}
	var listed []state.SSD
	for _, f := range files {
		if d, err := st.Find(f); err == nil {
			listed = append(listed, d)
		}
	}
	if len(listed) == len(files) {
		return o.Open(ctx, listed)
	}
	s := &Set{}
	if s.lease, err = o.acquire(ctx, true, nil); err != nil {
		return nil, err
	}
	defer s.closeAfter(&err)
	for _, f := range files {
		bus, err := openBus(ctx, proxy.Config{Name: f, Path: f, PollDoorbells: o.PollDoorbells,
			MDTS: softMDTS})
		if err != nil {
			return nil, fmt.Errorf("SSD file %s: %w", f, err)
		}
		c, err := o.bringUp(ctx, bus)
		if err != nil {
			return nil, fmt.Errorf("SSD file %s: %w", f, err)
		}
		s.SSDs = append(s.SSDs, &gpuio.SSD{Ctrl: c, Name: f, BackingPath: f})
	}
	return s, nil
}

// OpenDataset brings up the files of a dataset as one SSD, which nobody can write. d is open for as
// long as the set.
func (o *Opener) OpenDataset(ctx context.Context, d *dataset.Dataset) (_ *Set, err error) {
	content, err := stripe.NewComputed(ctx, d, stripe.ComputedOptions{Stripes: 1, LBABytes: 512,
		Type: d.Meta.RowType(), NoSums: true})
	if err == nil {
		err = d.CheckRowsOnce()
	}
	if err != nil {
		return nil, err
	}
	s := &Set{}
	if s.lease, err = o.acquire(ctx, true, nil); err != nil {
		return nil, err
	}
	defer s.closeAfter(&err)
	bus, err := proxy.Open(proxy.Config{Name: d.Meta.Name, Path: d.Dir(),
		Content: &noting{ReaderAt: content, note: o.Note}, Bytes: content.Size(),
		Serial: d.UUID().String()[:18], Model: o.Model,
		PollDoorbells: o.PollDoorbells, MDTS: softMDTS})
	if err != nil {
		return nil, err
	}
	c, err := o.bringUp(ctx, bus)
	if err != nil {
		return nil, fmt.Errorf("dataset %s as an SSD: %w", d.Dir(), err)
	}
	s.SSDs = []*gpuio.SSD{{Ctrl: c, Name: d.Meta.Name}}
	return s, nil
}

// noting tells the first error of a reader, since NVMe has no status code for a wrong file.
type noting struct {
	io.ReaderAt
	note func(text string)
	once sync.Once
}

func (n *noting) ReadAt(p []byte, off int64) (int, error) {
	k, err := n.ReaderAt.ReadAt(p, off)
	if err != nil && err != io.EOF {
		n.once.Do(func() { n.note(err.Error()) })
	}
	return k, err
}

// bringUp brings the controller on a bus up, behind the faults that are injected.
func (o *Opener) bringUp(ctx context.Context, bus nvme.Bus) (*nvme.Controller, error) {
	if !o.Faults.Empty() {
		bus = faultbus.New(bus, o.Faults, faultbus.Options{PollDoorbells: o.PollDoorbells})
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		return nil, errors.Join(err, bus.Close())
	}
	return c, nil
}

func (s *Set) closeAfter(err *error) {
	if *err != nil {
		*err = errors.Join(*err, s.Close())
	}
}

const (
	// listingTimeout bounds the listing of one SSD: a controller comes up, is asked, and is shut
	// down.
	listingTimeout = 10 * time.Second
	// DyingTimeout bounds the time for which a killed process may hold a file or an IOMMU group:
	// the kernel ends its io_uring requests, and with them its lock, some time after the process.
	DyingTimeout = 3 * time.Second
)

// Retry calls open again for as long as its error is one that passes, up to a time.
func Retry[T any](ctx context.Context, limit time.Duration, open func() (T, error),
	passes func(error) bool) (T, error) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(limit); ; {
		v, err := open()
		if err == nil || !passes(err) || time.Now().After(end) {
			return v, err
		}
		select {
		case <-ctx.Done():
			return v, err
		case <-tick.C:
		}
	}
}

// acquire takes SSDs. A process that only lists them holds them for a moment, which is waited for.
func (o *Opener) acquire(ctx context.Context, shared bool, names []string) (*state.Lease, error) {
	take := o.Store.Acquire
	if shared {
		take = o.Store.Share
	}
	return Retry(ctx, listingTimeout,
		func() (*state.Lease, error) { return take(o.User, names...) },
		func(err error) bool {
			var used *state.InUseError
			return errors.As(err, &used) && strings.HasPrefix(used.By, "heliosctl ssds (")
		})
}

// open opens the bus of an SSD and brings its controller up. The caller holds the lease.
func (o *Opener) open(ctx context.Context, s *Set, d state.SSD) (*nvme.Controller, error) {
	bus, err := o.bus(ctx, s, d)
	if err != nil {
		return nil, fmt.Errorf("SSD %s: %w", d.Name, err)
	}
	c, err := o.bringUp(ctx, bus)
	if err != nil {
		return nil, fmt.Errorf("SSD %s: %w", d.Name, err)
	}
	if err := sameSSD(d, c); err != nil {
		return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// Unused refuses SSDs that another process or machine uses, although the list does not know of it.
// The caller holds their leases in the list. SSDs that cannot be opened are nobody's.
func (o *Opener) Unused(ctx context.Context, ds []state.SSD) (err error) {
	s := &Set{}
	defer func() { err = errors.Join(err, s.Close()) }()
	for _, d := range ds {
		c, err := o.open(ctx, s, d)
		switch {
		case err == nil:
			s.SSDs = append(s.SSDs, &gpuio.SSD{Ctrl: c, Name: d.Name})
		case errs.ClassOf(err) == errs.Refused || ctx.Err() != nil:
			return err
		}
	}
	return stripe.Unused(ctx, s.SSDs, o.Note)
}

func (o *Opener) bus(ctx context.Context, s *Set, d state.SSD) (nvme.Bus, error) {
	switch d.Kind {
	case state.KindComputed:
		return o.computed(ctx, d)
	case state.KindVFIO:
		return o.controller(ctx, s, d)
	}
	return o.software(ctx, d)
}

// controller opens the bus of a bound controller in the set's one address space.
func (o *Opener) controller(ctx context.Context, s *Set, d state.SSD) (_ nvme.Bus, err error) {
	if _, next, err := o.Machine.StillBound(d); err != nil {
		return nil, fmt.Errorf("at %s: %w: %s", d.PCI, err, next)
	}
	if s.Domain == nil {
		if s.Domain, err = o.Machine.Domain(); err != nil {
			return nil, err
		}
	}
	return OpenController(ctx, s.Domain, d.PCI)
}

// sameSSD refuses a controller that is not the one that was bound: another SSD in the same slot.
func sameSSD(d state.SSD, c *nvme.Controller) error {
	if d.Kind != state.KindVFIO {
		return nil
	}
	ns := c.Namespace()
	if c.Serial() != d.Serial || ns.Bytes() != d.Bytes || ns.LBABytes != d.LBABytes {
		return errs.New(errs.Device,
			"SSD %s: at %s there is now serial %s with %d bytes in blocks of %d, and %s with %d in %d was bound; \"sudo heliosctl unbind-ssds %s\" and bind it anew",
			d.Name, d.PCI, c.Serial(), ns.Bytes(), ns.LBABytes, d.Serial, d.Bytes,
			d.LBABytes, d.Name)
	}
	return nil
}

// software opens the bus of a software controller over a file.
func (o *Opener) software(ctx context.Context, d state.SSD) (nvme.Bus, error) {
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
	model, err := o.ModelOf(d)
	if err != nil {
		return nil, err
	}
	bus, err := openBus(ctx, proxy.Config{
		Name: d.Name, Path: d.Path, Bytes: d.Bytes, File: d.ID, LBABytes: d.LBABytes,
		RAM: d.Kind == state.KindRAM, Shared: d.Kind == state.KindProxy, Buffered: d.Buffered,
		Serial: d.Serial, Model: model,
		PollDoorbells: o.PollDoorbells, MDTS: softMDTS,
	})
	var other *proxy.ReplacedError
	if errors.As(err, &other) {
		return nil,
			fmt.Errorf(
				"%w; bring the old one back, or look at what is there, then \"heliosctl unbind-ssds %s\" and bind it again",
				err, d.Name)
	}
	if err == nil && !d.Known() {
		o.Note(fmt.Sprintf(
			"SSD %s: an older heliosctl bound %s and did not record which file that is, so another one of that name would go unnoticed; \"heliosctl unbind-ssds %s\" and bind it again to record it",
			d.Name, d.Path, d.Name))
	}
	return bus, err
}

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
	return Retry(ctx, DyingTimeout,
		func() (nvme.Bus, error) { return proxy.Open(cfg) },
		func(err error) bool {
			var other *proxy.ReplacedError
			return errs.ClassOf(err) == errs.Refused && !errors.As(err, &other)
		})
}

// computed opens the bus of an SSD that computes its dataset.
func (o *Opener) computed(ctx context.Context, s state.SSD) (nvme.Bus, error) {
	c := s.Computed
	if c == nil {
		return nil, errs.New(errs.Device,
			"the state does not say what it computes; \"heliosctl unbind-ssds %s\" and bind it anew",
			s.Name)
	}
	typ, err := rowtype.Parse(c.RowDType)
	if err != nil {
		return nil, err
	}
	if typ.Scaled() != c.Scales {
		return nil, errs.New(errs.Device,
			"an earlier heliosctl bound it, which had the scales of %s in the rows; \"heliosctl unbind-ssds %s\" and bind it anew",
			typ, s.Name)
	}
	d, err := dataset.Open(s.Path)
	if err != nil {
		return nil, errs.With(errs.Device,
			fmt.Errorf(
				"it computes a dataset that cannot be opened: %w; bring it back, or \"heliosctl unbind-ssds %s\"",
				err, s.Name))
	}
	defer func() { _ = d.Close() }() // its feature function needs no file
	if d.UUID().String() != c.UUID {
		return nil, errs.New(errs.Device,
			"%s is another dataset than when it was bound (%s, it was %s); \"heliosctl unbind-ssds %s\" and bind it anew",
			s.Path, d.UUID(), c.UUID, s.Name)
	}
	content, err := stripe.NewComputed(ctx, d, stripe.ComputedOptions{Stripe: c.Stripe,
		Stripes: c.Stripes, LBABytes: s.LBABytes, Bytes: s.Bytes, Type: typ,
		Sums: &stripe.ComputedSums{Table: c.TableCRC, RowTable: c.RowTableCRC}})
	if err != nil {
		return nil, err
	}
	model, err := o.ModelOf(s)
	if err != nil {
		return nil, err
	}
	return proxy.Open(proxy.Config{Name: s.Name, Path: s.Path, Content: content, Bytes: s.Bytes,
		LBABytes: s.LBABytes, Serial: s.Serial, Model: model, PollDoorbells: o.PollDoorbells})
}

// ModelOf returns the model that a software controller plays, nil for none.
func (o *Opener) ModelOf(d state.SSD) (*ssdmodel.Model, error) {
	if m := o.Model; m != nil {
		if !m.LBAOK(d.LBABytes) {
			return nil, errs.New(errs.Usage,
				"it has blocks of %d bytes, the SSD model %s %v; bind SSDs with %v %d for it",
				d.LBABytes, m.Name, m.LBAs.Bytes, errs.Key("lba"), m.LBAs.Bytes[0])
		}
		return m, nil
	}
	if d.Model == "" {
		return nil, nil
	}
	m, err := ssdmodel.Load(d.Model)
	if err != nil {
		return nil,
			fmt.Errorf("%w; bring the file back, or \"heliosctl unbind-ssds %s\" and bind it anew",
				err, d.Name)
	}
	return m, nil
}
