package packs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/sched/samples"
)

// The files of a pack beside those of its samples and its pages.
const (
	planName     = "plan"
	planPartName = "plan.part"
	markName     = "pack.mark"
)

// Entry describes a pack.
type Entry struct {
	First int       `json:"first"` // sample epochs First to End-1
	End   int       `json:"end"`
	ID    uuid.UUID `json:"id"`
	// Whole: samples, plan and pages are there. Until then the others are of the phases that are.
	Whole bool `json:"whole"`
	// Seconds are sums over all runs that have worked on it.
	SampleSeconds float64 `json:"sample_seconds"`
	PlanSeconds   float64 `json:"plan_seconds"`
	PackSeconds   float64 `json:"pack_seconds"`
	SamplesBytes  int64   `json:"samples_bytes"`
	PlanBytes     int64   `json:"plan_bytes"`
	PagesBytes    int64   `json:"pages_bytes"`
	// Planned is the plan's checksum, once there is one; nil: there is none yet.
	Planned      *uint32 `json:"planned,omitempty"`
	BytesRead    int64   `json:"bytes_read"`    // of the features
	BytesWritten int64   `json:"bytes_written"` // of pages
	// Found has the figures by which planning chose the length of segments.
	Found packed.Found `json:"found"`
}

// Seconds is the time of all phases.
func (e *Entry) Seconds() float64 { return e.SampleSeconds + e.PlanSeconds + e.PackSeconds }

// DiskBytes is the size of the pack.
func (e *Entry) DiskBytes() int64 { return e.SamplesBytes + e.PlanBytes + e.PagesBytes }

// name is that of the pack's folder.
func (e *Entry) name() string { return fmt.Sprintf("epochs-%d-%d", e.First, e.End-1) }

// The phases of preparing, as Work.Progress names them.
const (
	PhaseSample = "sample for packing"
	PhasePlan   = "plan"
	PhasePack   = "pack MiB"
)

// Work has all that making a pack takes.
type Work struct {
	Nodes   int64 // of the graph
	Batches int   // mini-batches in an epoch
	// Sample samples the mini-batches of sample epochs first to end-1 that to does not have.
	Sample func(ctx context.Context, first, end int, to *samples.Writer,
		report func(done, total int)) error
	// Source opens the rows of the features, in the type of the key, and closes them.
	Source func() (packed.Source, func() error, error)
	// Hot counts the rows that stay in memory. HotRows names them, where it is not nil.
	Hot     int64
	HotRows []int64
	Memory  int64 // that packing may take; 0: its default
	Workers int
	// Progress hears what is under way, in whatever unit the phase counts.
	Progress func(phase string, done, total int64)
}

// Pack is a pack that is whole.
type Pack struct {
	Entry   Entry
	Reused  bool // all of it was there before
	Dir     string
	Samples *samples.Store
	Plan    *packed.Plan
	Pages   pages.Spec // of no pages where memory holds all rows
}

// Close closes its files.
func (p *Pack) Close() error { return errors.Join(p.Samples.Close(), p.Plan.Close()) }

// Has reports whether a pack is whole.
func (f *Folder) Has(first, end int) bool {
	e := f.entry(first, end)
	return e != nil && e.Whole
}

// Make opens the pack of sample epochs first to end-1. Missing files of it are made: after
// an interrupt, a crash or an error the next call goes on where that was. Only one Make of a folder
// may run at a time.
func (f *Folder) Make(ctx context.Context, first, end int, w Work) (_ *Pack, err error) {
	e := f.entry(first, end)
	p := &Pack{Reused: e != nil && e.Whole}
	if e == nil {
		f.m.Packs = append(f.m.Packs, Entry{First: first, End: end, ID: uuid.New()})
		slices.SortFunc(f.m.Packs, func(a, b Entry) int { return a.First - b.First })
		if err := f.save(); err != nil {
			return nil, err
		}
		e = f.entry(first, end)
	}
	p.Dir = filepath.Join(f.dir, e.name())
	if !e.Whole {
		if err := os.Mkdir(p.Dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, unusable(err)
		}
		if err := durable.Sync(f.dir); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil && p.Samples != nil {
			err = errors.Join(err, p.Samples.Close())
		}
		if err != nil && p.Plan != nil {
			err = errors.Join(err, p.Plan.Close())
		}
	}()
	if err := f.sample(ctx, p, e, w); err != nil {
		return nil, err
	}
	if err := f.plan(ctx, p, e, w); err != nil {
		return nil, err
	}
	if err := f.pack(ctx, p, e, w); err != nil {
		return nil, err
	}
	p.Entry = *e
	return p, nil
}

// phase runs a part of the work, and keeps what it took, also where it was cut off by an error.
func (f *Folder) phase(seconds *float64, run func() error) error {
	began := time.Now()
	err := run()
	*seconds += time.Since(began).Seconds()
	return errors.Join(err, f.save())
}

// sample opens the samples, or makes them first.
func (f *Folder) sample(ctx context.Context, p *Pack, e *Entry, w Work) (err error) {
	spec := samples.Spec{Nodes: w.Nodes, Batches: w.Batches * (e.End - e.First),
		Key: f.m.Key.samples(e.First, e.End)}
	if !samples.Whole(p.Dir) {
		if e.Whole {
			return f.gone(p.Dir, "its samples are")
		}
		if err := f.phase(&e.SampleSeconds, func() error {
			to, err := samples.Write(p.Dir, spec)
			if err != nil {
				return err
			}
			err = w.Sample(ctx, e.First, e.End, to, func(done, total int) {
				w.tell(PhaseSample, int64(done), int64(total))
			})
			if err == nil {
				e.SamplesBytes = to.Bytes()
				err = to.Finish()
			}
			return errors.Join(err, to.Close())
		}); err != nil {
			return err
		}
	}
	p.Samples, err = samples.Open(p.Dir, spec)
	if err == nil {
		e.SamplesBytes = p.Samples.Bytes()
	}
	return err
}

// gone is the error of a pack of which something is no longer there, though it was.
func (f *Folder) gone(dir, what string) error {
	return errs.New(errs.Device,
		"the packed mini-batches in %s are damaged: %s gone; remove the folder %s and prepare again, or name another with %v",
		dir, what, f.dir, errs.Key("packed"))
}

// plan opens the plan, or makes it first.
func (f *Folder) plan(ctx context.Context, p *Pack, e *Entry, w Work) (err error) {
	path := filepath.Join(p.Dir, planName)
	_, err = os.Stat(path)
	if err != nil && (e.Whole || !errors.Is(err, os.ErrNotExist)) {
		return f.gone(p.Dir, fmt.Sprintf("its plan (%v) is", err))
	}
	if err != nil {
		if err := f.phase(&e.PlanSeconds, func() error {
			k := &f.m.Key
			return durably(p.Dir, planPartName, planName, func(to *os.File) error {
				r, err := packed.Build(ctx, p.Samples, packed.Config{
					Rows: w.Nodes, RowBytes: k.RowBytes, LBABytes: k.LBABytes, Hot: w.Hot,
					HotRows: w.HotRows, Budget: f.budget(e, w.Nodes),
					Segment: k.Segment, Seed: k.Seed,
					Workers: w.Workers, Progress: func(step string, done, of int) {
						w.tell(PhasePlan+": "+step, int64(done), int64(of))
					}}, to)
				if err == nil {
					e.Found, e.PlanBytes, e.Planned = r.Found, r.Bytes, nil
				}
				return err
			})
		}); err != nil {
			return err
		}
	}
	if p.Plan, err = packed.Open(path); err != nil {
		return err
	}
	h := p.Plan.Header()
	if h.Rows != w.Nodes || h.Shape.RowBytes != f.m.Key.RowBytes ||
		h.Stats.Batches != int64(p.Samples.Batches()) {
		return errs.New(errs.Device,
			"%s describes %d mini-batches, %d rows of %d bytes, and the samples beside it do not; remove the folder %s and prepare again",
			path, h.Stats.Batches, h.Rows, h.Shape.RowBytes, p.Dir)
	}
	// The pages are this plan's and no other's.
	if sum := p.Plan.Sum(); e.Planned != nil && *e.Planned != sum {
		return f.gone(p.Dir, "the plan that its pages were filled by is")
	} else if e.Planned == nil {
		e.Planned = &sum
		if err := f.save(); err != nil {
			return err
		}
	}
	p.Pages = pages.Spec{ID: e.ID, PageBytes: h.Shape.PageBytes, Pages: h.Stats.Pages}
	return nil
}

// budget is the room for a pack's pages.
func (f *Folder) budget(e *Entry, rows int64) int64 {
	k := &f.m.Key
	return Budget(k.Budget, e.End-e.First, k.SampleEpochs, rows*k.RowBytes)
}

// Budget is the room for the pages of a pack of so many sample epochs, where those of all may take
// budget (0: what they need) and the features are so many bytes. A refresh has its share of it, or
// what one copy of all rows takes where that is more: the rows that an epoch needs do not become
// fewer with their number of epochs.
func Budget(budget int64, epochs, all int, features int64) int64 {
	if budget == 0 || epochs >= all {
		return budget
	}
	copyOf := features + features/16 // pages are not full to the last byte
	return max(budget/int64(all)*int64(epochs), min(budget, copyOf), 1)
}

// pack fills the pages, unless they are whole.
func (f *Folder) pack(ctx context.Context, p *Pack, e *Entry, w Work) error {
	if e.Whole {
		return nil
	}
	e.PagesBytes = p.Pages.Bytes()
	if p.Pages.Pages > 0 {
		err := f.phase(&e.PackSeconds, func() error { return f.fill(ctx, p, e, w) })
		if err != nil {
			return err
		}
	}
	e.Whole = true
	if err := f.save(); err != nil {
		return err
	}
	err := os.Remove(filepath.Join(p.Dir, markName))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return err
}

// fill is pack for pages that there are.
func (f *Folder) fill(ctx context.Context, p *Pack, e *Entry, w Work) (err error) {
	to, err := f.place.Create(ctx, p.Dir, p.Pages)
	var finished *pages.FinishedError
	if errors.As(err, &finished) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close(ctx)) }()
	mark, err := os.OpenFile(filepath.Join(p.Dir, markName),
		os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return unusable(err)
	}
	defer func() { err = errors.Join(err, mark.Close()) }()
	if !to.Resumed() { // the mark is of pages that are gone
		if err := mark.Truncate(0); err != nil {
			return err
		}
	}
	src, closeSource, err := w.Source()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeSource()) }()
	did, err := packed.Pack(ctx, p.Plan, src, to, packed.PackConfig{Memory: w.Memory,
		Workers: w.Workers, Mark: mark, Progress: func(done, total int64) {
			w.tell(PhasePack, done, total)
		}})
	if err != nil {
		return err
	}
	e.BytesRead += did.SourceBytes
	e.BytesWritten += did.WrittenBytes
	return to.Finish(ctx)
}

func (w *Work) tell(phase string, done, total int64) {
	if w.Progress != nil {
		w.Progress(phase, done, total)
	}
}

// OpenPages opens the pages of a pack that is whole.
func (f *Folder) OpenPages(ctx context.Context, p *Pack) (*pages.Opened, error) {
	o, err := f.place.Open(ctx, p.Dir, p.Pages)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w; where they are gone or damaged remove the folder %s, too, which takes them for whole, and prepare it again",
			err, f.dir)
	}
	return o, err
}

// Remove removes the packs that were made for sample epochs below first and are no longer needed;
// those of the folder's first sample epochs stay for later runs.
func (f *Folder) Remove(ctx context.Context, first int) error {
	for {
		i := slices.IndexFunc(f.m.Packs, func(e Entry) bool {
			return e.First > 0 && e.End <= first
		})
		if i < 0 {
			return nil
		}
		// A removal that is cut off leaves a pack that is resumed, or none.
		f.m.Packs[i].Whole = false
		if err := f.save(); err != nil {
			return err
		}
		e := f.m.Packs[i]
		if err := f.place.Remove(ctx, filepath.Join(f.dir, e.name()), e.ID); err != nil {
			return err
		}
		f.m.Packs = slices.Delete(f.m.Packs, i, i+1)
		if err := f.save(); err != nil {
			return err
		}
		if err := removePack(filepath.Join(f.dir, e.name())); err != nil {
			return err
		}
	}
}
