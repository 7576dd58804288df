package sched

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"

	"helios/cache/packed"
	"helios/cuda"
	"helios/dataset/pages"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/outfile"
	"helios/internal/regular"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
)

// Packs are in a folder: one for the sample epochs that training begins with, and one for those of
// each refresh. A pack is a folder with
//
//	samples.*          what was sampled (package samples)
//	plan               where each row of each mini-batch is (package packed)
//	pages, pages.sums  disk caches and chunks (package pages)
//	pack.json          what it was made of and what that took; it is written last
//
// Each part has its name when it is whole. What is not whole is gone on with by the next run of the
// same options.

const (
	packName = "pack.json"
	planName = "plan"
	planPart = "plan.part"
	markName = "pages.mark"
	// packFormat is the version of pack.json.
	packFormat = 1
	mostPack   = 1 << 20 // bytes of it
)

// packKey is all that mini-batches and their layout depend on, by the names of options.
type packKey struct {
	Dataset    string          `json:"dataset"` // UUID
	Sampler    string          `json:"sampler"`
	Fanouts    []int           `json:"fanout"`
	Batch      int             `json:"batch-size"`
	Seed       uint64          `json:"seed"`
	Dependency int             `json:"batch-dependency"`
	First      int             `json:"first sample epoch"`
	Epochs     int             `json:"sample-epochs"` // of the pack
	Degrees    bool            `json:"model"`         // blocks have degrees
	RowType    string          `json:"row-dtype"`
	RowBytes   int64           `json:"row_bytes"`
	Budget     plan.DiskBudget `json:"disk-budget"`
	Segment    int             `json:"segment"`
}

// packFile is pack.json.
type packFile struct {
	Format  int       `json:"format"`
	ID      uuid.UUID `json:"id"`
	Key     packKey   `json:"key"`
	Hot     int64     `json:"rows_in_memory"` // that it was laid out for
	PlanSum uint32    `json:"plan_sum"`
	Whole   bool      `json:"whole"`

	Samples      int64   `json:"samples_bytes"`
	Sampling     float64 `json:"sample_seconds"`
	Planning     float64 `json:"plan_seconds"`
	Packing      float64 `json:"pack_seconds"`
	BytesRead    int64   `json:"bytes_read"`
	BytesWritten int64   `json:"bytes_written"`
}

// packFolder has the packs of a run.
type packFolder struct {
	e    *engine
	dir  string
	open map[int]*openPack // by their first sample epoch
	info report.PackedInfo
}

type openPack struct {
	laidOut
	first  int
	plan   *packed.Plan
	store  *samples.Store
	opened *pages.Opened
}

func openPacks(e *engine) (packSource, error) {
	dir, err := filepath.Abs(e.Config.PackedFolder(e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	p := &packFolder{e: e, dir: dir, open: map[int]*openPack{}}
	p.info = report.PackedInfo{Dir: dir, Reused: true}
	return p, nil
}

// find implements packSource.
func (p *packFolder) find(ctx context.Context, sampleEpoch int) (*laidOut, int, error) {
	c := p.e.Config
	first, end := c.PackEpochs(sampleEpoch)
	o := p.open[first]
	if o == nil {
		var err error
		if o, err = p.take(ctx, first, end); err != nil {
			return nil, 0, err
		}
		p.open[first] = o
	}
	n := o.plan.Batches() / (end - first)
	return &o.laidOut, (sampleEpoch - first) * n, nil
}

// key is that of a pack.
func (p *packFolder) key(first, end int) packKey {
	e := p.e
	c := e.Config
	return packKey{
		Dataset: e.In.Dataset.Meta.UUID, Sampler: c.Sampler, Fanouts: c.Fanouts, Batch: c.Batch,
		Seed: c.Seed, Dependency: c.BatchDependency, First: first, Epochs: end - first,
		Degrees: c.Arch().Degrees(), RowType: e.RowType.String(), RowBytes: e.RowBytes,
		Budget: c.DiskBudget, Segment: c.Segment,
	}
}

// differs names the option in which a pack is another one than is wanted.
func (k packKey) differs(was packKey) (option string, want, have any) {
	text := func(k packKey) (m map[string]json.RawMessage, names []string) {
		b, _ := json.Marshal(k) // of plain values
		_ = json.Unmarshal(b, &m)
		return m, nil
	}
	a, _ := text(k)
	b, _ := text(was)
	for _, name := range []string{"dataset", "sampler", "fanout", "batch-size", "seed",
		"batch-dependency", "sample-epochs", "first sample epoch", "model", "row-dtype", "row_bytes",
		"disk-budget", "segment"} {
		if string(a[name]) != string(b[name]) {
			return name, string(a[name]), string(b[name])
		}
	}
	return "", nil, nil
}

// take opens a pack, and makes it where it is not whole.
func (p *packFolder) take(ctx context.Context, first, end int) (_ *openPack, err error) {
	key := p.key(first, end)
	dir := filepath.Join(p.dir, fmt.Sprintf("pack-%d", p.e.Config.PackNumber(first)))
	f, err := readPack(dir)
	if err != nil {
		return nil, err
	}
	if f != nil {
		if option, want, have := key.differs(f.Key); option != "" {
			return nil, errs.New(errs.Refused,
				"%v %s has mini-batches that were prepared with %v %s, and this run has %s; name another folder, or run with the same",
				errs.Key("packed"), p.dir, errs.Key(option), have, want)
		}
	}
	if f == nil || !f.Whole {
		if f, err = p.make(ctx, dir, key, f); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return nil, stopped
			}
			return nil, err
		}
		p.info.Reused = false
	}
	return p.use(ctx, dir, f)
}

// use opens a pack that is whole.
func (p *packFolder) use(ctx context.Context, dir string, f *packFile) (_ *openPack, err error) {
	o := &openPack{first: f.Key.First}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.close())
		}
	}()
	if o.plan, err = packed.Open(filepath.Join(dir, planName)); err != nil {
		return nil, err
	}
	if o.plan.Sum() != f.PlanSum {
		return nil, errs.New(errs.Device,
			"the plan in %s has checksum %08x, and its pages were made by one with %08x; prepare the packed mini-batches again in another folder",
			dir, o.plan.Sum(), f.PlanSum)
	}
	if o.store, err = samples.Open(dir, p.samplesSpec(f.Key, o.plan.Batches())); err != nil {
		return nil, err
	}
	s := o.plan.Stats()
	o.shape, o.most, o.batch, o.samples = o.plan.Shape(), s.MostReadPages, o.plan.Batch, o.store
	o.pages = &pageStore{}
	if s.Pages > 0 {
		if o.opened, err = pages.OpenFolder(ctx, dir, f.spec(s, o.shape), pages.OpenOptions{
			PollDoorbells: p.e.OnGPU()}); err != nil {
			return nil, err
		}
		o.pages = &pageStore{ssds: o.opened.SSDs, layout: o.opened.Layout, sums: o.opened.Sums,
			options: o.opened.Options}
	}
	if o.hot, err = o.plan.Hot(); err != nil {
		return nil, err
	}
	i := &p.info
	i.SamplesBytes += f.Samples
	i.SampleSeconds += f.Sampling
	i.PlanSeconds += f.Planning
	i.PackSeconds += f.Packing
	i.Seconds = i.SampleSeconds + i.PlanSeconds + i.PackSeconds
	i.BytesRead += f.BytesRead
	i.BytesWritten += f.BytesWritten
	i.Budget = f.Key.Budget.Of(p.e.Rows * p.e.RowBytes)
	i.Add(s, o.shape, f.Key.Epochs, o.plan.Bytes())
	return o, nil
}

func (f *packFile) spec(s packed.Stats, h packed.Shape) pages.Spec {
	return pages.Spec{ID: f.ID, PageBytes: h.PageBytes, Pages: s.Pages}
}

// samplesSpec is of a pack's samples, which do not depend on their layout.
func (p *packFolder) samplesSpec(k packKey, batches int) samples.Spec {
	k.Budget, k.Segment, k.RowType, k.RowBytes = plan.DiskBudget{}, 0, "", 0
	text, _ := json.Marshal(k) // of plain values
	return samples.Spec{Nodes: p.e.Rows, Batches: batches, Key: string(text)}
}

// describe implements packSource.
func (p *packFolder) describe(r *report.PackedInfo) { *r = p.info }

func (o *openPack) close() error {
	var all []error
	if o.opened != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		all = append(all, o.opened.Close(ctx))
	}
	if o.store != nil {
		all = append(all, o.store.Close())
	}
	if o.plan != nil {
		all = append(all, o.plan.Close())
	}
	return errors.Join(all...)
}

func (p *packFolder) close() error {
	var all []error
	for _, o := range p.open {
		all = append(all, o.close())
	}
	p.open = nil
	return errors.Join(all...)
}

// readPack reads pack.json; nil: there is none.
func readPack(dir string) (*packFile, error) {
	path := filepath.Join(dir, packName)
	b, err := regular.Read(path, mostPack)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var f packFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, errs.New(errs.Device, "%s is damaged: %w; prepare again in another folder",
			path, err)
	}
	if f.Format != packFormat {
		return nil, errs.New(errs.Capability,
			"%s has version %d, and this heliosctl reads version %d: use the one that wrote it, or prepare again in another folder",
			path, f.Format, packFormat)
	}
	return &f, nil
}

func (f *packFile) write(dir string) error {
	b, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	to, err := outfile.Create(packName, filepath.Join(dir, packName), true)
	if err != nil {
		return err
	}
	_, err = to.Write(append(b, '\n'))
	return to.Commit(err)
}

// make makes a pack, or what is missing of it.
func (p *packFolder) make(ctx context.Context, dir string, key packKey,
	f *packFile) (_ *packFile, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, errs.New(errs.Usage, "%w; name another folder with %v", err,
			errs.Key("packed"))
	}
	lock, err := checkpoint.LockDir(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()
	if f == nil {
		if f, err = readPack(dir); err != nil { // another process may have been faster
			return nil, err
		}
	}
	if f == nil {
		f = &packFile{Format: packFormat, ID: uuid.New(), Key: key}
		if err := f.write(dir); err != nil {
			return nil, err
		}
	}
	if err := p.sample(ctx, dir, f); err != nil {
		return nil, err
	}
	pl, err := p.plan(ctx, dir, f)
	if err != nil {
		return nil, err
	}
	err = p.pack(ctx, dir, f, pl)
	if err = errors.Join(err, pl.Close()); err != nil {
		return nil, err
	}
	f.Whole, f.PlanSum = true, pl.Sum()
	return f, f.write(dir)
}

// sample samples what is missing of a pack's mini-batches.
func (p *packFolder) sample(ctx context.Context, dir string, f *packFile) (err error) {
	if samples.Whole(dir) {
		return nil
	}
	e := p.e
	train, err := prepare.TrainSplit(e.In)
	if err != nil {
		return err
	}
	began := time.Now()
	n := prepare.Batches(len(train), e.Config.Batch)
	w, err := samples.Write(dir, p.samplesSpec(f.Key, n*f.Key.Epochs))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	var look prepare.Stager
	defer func() { err = errors.Join(err, look.Close()) }()
	order := make([]int64, len(train))
	shuffled := -1
	var adj []byte
	for k := w.Batches(); k < n*f.Key.Epochs; k++ {
		if err := prepare.Interrupted(ctx); err != nil {
			return err
		}
		epoch, i := f.Key.First+k/n, k%n
		if epoch != shuffled {
			graph.Shuffle(order, train, e.Config.Seed, epoch)
			shuffled = epoch
		}
		mb := e.Scratch
		if err := e.SampleWhole(ctx, mb, epoch, i, prepare.SeedsOf(order, i,
			e.Config.Batch)); err != nil {
			return fmt.Errorf("sample epoch %d, batch %d: %w", epoch, i, err)
		}
		op, cancel := e.OperatorContext(ctx)
		view := func(b cuda.Buffer, bytes int64) ([]byte, error) {
			return look.View(op, e.Device, e.Stream, b, 0, bytes)
		}
		var rows int64
		adj, rows, err = mb.Save(adj[:0], view)
		if err == nil {
			var nodes []byte
			if nodes, err = view(mb.Nodes, rows*8); err == nil {
				err = w.Append(hostmem.View[int64](nodes), adj)
			}
		}
		cancel()
		if err != nil {
			return fmt.Errorf("sample epoch %d, batch %d: %w", epoch, i, err)
		}
		e.Observer.TellStep("sample for packing", k+1, n*f.Key.Epochs)
	}
	f.Samples = w.Bytes()
	if err := w.Finish(); err != nil {
		return err
	}
	f.Sampling += time.Since(began).Seconds()
	f.BytesWritten += f.Samples
	e.trace.run("sample for packing", began)
	return f.write(dir)
}

// plan opens a pack's plan, and makes it where there is none.
func (p *packFolder) plan(ctx context.Context, dir string, f *packFile) (*packed.Plan, error) {
	path, part := filepath.Join(dir, planName), filepath.Join(dir, planPart)
	pl, err := packed.Open(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return pl, err
	}
	e, began := p.e, time.Now()
	train, err := prepare.TrainSplit(e.In)
	if err != nil {
		return nil, err
	}
	n := prepare.Batches(len(train), e.Config.Batch)
	from, err := samples.Open(dir, p.samplesSpec(f.Key, n*f.Key.Epochs))
	if err != nil {
		return nil, err
	}
	defer func() { _ = from.Close() }() // only read
	c := e.PackConfig(e.tiers.GPURows+e.tiers.CPURows, 0)
	if f.Hot = c.Hot; f.Key.First > 0 { // tiers hold what the first pack has chosen
		first, _, err := p.find(ctx, 0)
		if err != nil {
			return nil, err
		}
		c.HotRows = first.hot
	}
	to, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	_, err = packed.Build(ctx, from, c, to)
	if err == nil {
		err = to.Sync()
	}
	if err = errors.Join(err, to.Close()); err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		return nil, err
	}
	if pl, err = packed.Open(path); err != nil {
		return nil, err
	}
	f.Planning += time.Since(began).Seconds()
	f.BytesWritten += pl.Bytes()
	e.trace.run("lay out", began)
	return pl, f.write(dir)
}

// pack fills a pack's pages with rows.
func (p *packFolder) pack(ctx context.Context, dir string, f *packFile,
	pl *packed.Plan) (err error) {
	if pl.Pages() == 0 {
		return nil
	}
	e, began := p.e, time.Now()
	to, err := pages.CreateFolder(dir, f.spec(pl.Stats(), pl.Shape()))
	var finished *pages.FinishedError
	if errors.As(err, &finished) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	mark, err := os.OpenFile(filepath.Join(dir, markName), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	defer func() { err = errors.Join(err, mark.Close()) }()
	if err := e.store.turnTo(ctx, nil); err != nil {
		return err
	}
	from := &storedRows{s: &e.store}
	defer func() { err = errors.Join(err, from.close()) }()
	c := packed.PackConfig{Workers: e.packWorkers(), Mark: mark,
		Progress: func(done, total int64) {
			e.Observer.TellStep("pack MiB", int(done>>20), int(max(total>>20, 1)))
		}}
	did, err := packed.Pack(ctx, pl, from, to, c)
	if err != nil {
		return err
	}
	if err := to.Finish(ctx); err != nil {
		return err
	}
	f.Packing += time.Since(began).Seconds()
	f.BytesRead += did.SourceBytes + did.OrderedBytes
	f.BytesWritten += did.WrittenBytes
	e.trace.run("pack", began)
	return os.Remove(mark.Name())
}
