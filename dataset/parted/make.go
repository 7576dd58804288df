package parted

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/graph"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/outfile"
	"helios/internal/rowtype"
	"helios/internal/work"
)

// Options of a layout that is made.
type Options struct {
	Dir string // the folder; it is made where it is not there
	// Partition says the part of each node. nil: the folder keeps one of its own, which is made
	// as PartitionOptions say. That takes memory of its own.
	Partition        *partition.Partition
	PartitionOptions partition.Options
	// StaticShare of all nodes, 0 to 1, are static: those of the highest out-degree.
	StaticShare float64
	RowType     rowtype.Type // of the rows, as they are stored
	Place       pages.Place  // of the pages
	// Source opens the rows as RowType, once a sweep, and returns their end; nil: the
	// dataset's own.
	Source func() (Source, func() error, error)
	// MemoryBytes is the most that Make takes beside the topology, the partition and what Source
	// has; 0: 1 GiB.
	MemoryBytes int64
	Workers     int           // goroutines that write pages; 0: 4
	MarkEvery   time.Duration // at the earliest, of noting how far it is; 0: 10 seconds
	Progress    work.Progress
}

const (
	defaultMemory  = 1 << 30
	defaultWorkers = 4
	defaultEvery   = 10 * time.Second
	mostBlock      = 8 << 20 // of rows that are read at one go
)

// check fills in defaults.
func (o *Options) check(d *dataset.Dataset, topo *graph.Topology) error {
	if !(o.StaticShare >= 0 && o.StaticShare <= 1) {
		return errs.New(errs.Usage, "%g of the nodes as static ones: give a share from 0 to 1",
			o.StaticShare)
	}
	if topo.NumNodes != d.Meta.Nodes {
		return errs.New(errs.Failed, "a topology of %d nodes for a dataset of %d", topo.NumNodes,
			d.Meta.Nodes)
	}
	if o.MemoryBytes <= 0 {
		o.MemoryBytes = defaultMemory
	}
	if o.Workers <= 0 {
		o.Workers = defaultWorkers
	}
	if o.MarkEvery <= 0 {
		o.MarkEvery = defaultEvery
	}
	if o.Source == nil {
		rows, width := d.RowsAs(o.RowType), int64(o.RowType.RowBytes(d.Meta.Dim))
		o.Source = func() (Source, func() error, error) {
			return readRows(func(ctx context.Context, first, n int64, dst []byte) error {
				if err := ctx.Err(); err != nil {
					return err
				}
				return rows.Read(first, dst[:n*width])
			}), func() error { return nil }, nil
		}
	}
	return nil
}

type readRows func(ctx context.Context, first, n int64, dst []byte) error

func (f readRows) ReadRows(ctx context.Context, first, n int64, dst []byte) error {
	return f(ctx, first, n, dst)
}

// key returns the key of the layout; its Sum is set where the partition is given.
func (o *Options) key(d *dataset.Dataset, topo *graph.Topology) (Key, error) {
	k := Key{Dataset: d.Meta.UUID, Nodes: topo.NumNodes, Edges: topo.NumEdges,
		StaticShare: o.StaticShare, RowType: o.RowType.String(),
		RowBytes: int64(o.RowType.RowBytes(d.Meta.Dim)), InFolder: inFolder(o.Place),
		LBABytes: o.Place.LBABytes()}
	if p := o.Partition; p != nil {
		if err := p.BelongsTo(k.Dataset, k.Nodes, k.Edges); err != nil {
			return k, err
		}
		k.Parts, k.Sum = p.Info.Parts, sumOf(p)
	} else {
		a := Asked{o.PartitionOptions.Method, o.PartitionOptions.Seed, o.PartitionOptions.Balance,
			o.PartitionOptions.Passes}
		if a.Method == "" {
			a.Method = partition.Auto
		}
		if a.Balance == 0 {
			a.Balance = partition.DefaultBalance
		}
		if a.Passes == 0 {
			a.Passes = partition.DefaultPasses
		}
		k.Parts, k.Asked = o.PartitionOptions.Parts, &a
		if k.Parts < 1 || int64(k.Parts) > k.Nodes {
			return k, errs.New(errs.Usage, "%v %d: give 1 to %d, the number of nodes",
				errs.Key("parts"), k.Parts, k.Nodes)
		}
	}
	var err error
	k.PageBytes, err = PageBytes(k.RowBytes, k.Nodes, k.Parts)
	return k, err
}

// Make makes the layout of a dataset by parts of its nodes, whose edges are topo, in memory or on
// storage. One that is there and whole is opened; one that was cut off, by an error, an interrupt
// or a crash, is resumed. A folder that holds anything else, that another process makes, or
// that was made with another Key is refused.
//
// It reads the edges once to find the static nodes, where there are any, then edges and features
// once a sweep (Stats), and writes each page once.
func Make(ctx context.Context, d *dataset.Dataset, topo *graph.Topology, o Options) (_ *Layout,
	err error) {
	if err := o.check(d, topo); err != nil {
		return nil, err
	}
	key, err := o.key(d, topo)
	if err != nil {
		return nil, err
	}
	there, err := isOurs(o.Dir)
	if err != nil {
		return nil, err
	}
	if there {
		m, err := readManifest(o.Dir)
		if err != nil {
			return nil, err
		}
		if err := key.same(&m.Key, o.Dir); err != nil {
			return nil, err
		}
		if m.Whole { // nobody writes to it any more
			return Open(o.Dir)
		}
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, unusable(err)
	}
	lock, err := takeLock(o.Dir)
	if err != nil {
		return nil, err
	}
	defer errs.Closing(&err, lock.Close)
	m := &maker{d: d, topo: topo, o: &o}
	if err := m.claim(key); err != nil {
		return nil, err
	}
	if !m.m.Whole {
		if err := m.make(ctx); err != nil {
			return nil, stopped(ctx, err)
		}
	}
	return Open(o.Dir)
}

// stopped is the error of a layout that the user has stopped, where they have.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return errs.New(errs.Interrupted, "layout by part: %w; the same command resumes it",
		context.Cause(ctx))
}

// maker makes a layout in a folder that this process has.
type maker struct {
	d    *dataset.Dataset
	topo *graph.Topology
	o    *Options
	m    manifest
	part *partition.Partition
	l    *Layout
	mem  [][]byte
}

// claim makes the folder one of a layout, or reads what it is. Another process may have done
// something before the lock was taken.
func (k *maker) claim(key Key) error {
	there, err := isOurs(k.o.Dir)
	if err != nil {
		return err
	}
	if !there {
		k.m = manifest{Format: format, ID: uuid.New(), Key: key}
		return k.m.save(k.o.Dir)
	}
	if k.m, err = readManifest(k.o.Dir); err != nil {
		return err
	}
	return key.same(&k.m.Key, k.o.Dir)
}

func (k *maker) alloc(bytes int64) ([]byte, error) {
	b, err := hostmem.Alloc(bytes, "layout by part")
	if err == nil {
		k.mem = append(k.mem, b)
	}
	return b, err
}

// make makes all of it.
func (k *maker) make(ctx context.Context) (err error) {
	began := time.Now()
	defer func() {
		err = errors.Join(err, freeAll(k.mem))
		if k.part != nil && k.part != k.o.Partition {
			err = errors.Join(err, k.part.Close())
		}
	}()
	defer func() {
		k.m.Stats.Seconds += time.Since(began).Seconds()
		err = errors.Join(err, k.m.save(k.o.Dir))
	}()
	if err := k.partition(ctx); err != nil {
		return err
	}
	f, lists, err := k.plan(ctx)
	if err != nil {
		return err
	}
	return k.fill(ctx, f, lists)
}

// partition takes the partition that was given, or the folder's own, which is made first.
func (k *maker) partition(ctx context.Context) (err error) {
	if k.part = k.o.Partition; k.part != nil {
		return nil
	}
	path := filepath.Join(k.o.Dir, partitionName)
	k.part, err = partition.Open(path)
	switch {
	case err == nil:
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w; or remove the folder %s and make the layout again", err, k.o.Dir)
	case k.m.Key.Sum != "":
		return damagedAt(k.o.Dir, "%s is gone", path)
	default:
		if err := k.makePartition(ctx, path); err != nil {
			return err
		}
	}
	key := &k.m.Key
	if err := k.part.BelongsTo(key.Dataset, key.Nodes, key.Edges); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	sum := sumOf(k.part)
	if k.part.Info.Parts != key.Parts || key.Sum != "" && key.Sum != sum {
		return damagedAt(k.o.Dir, "%s is another partition than its pages were made by", path)
	}
	if key.Sum == "" {
		key.Sum = sum
		return k.m.save(k.o.Dir)
	}
	return nil
}

// makePartition makes the folder's own one.
func (k *maker) makePartition(ctx context.Context, path string) error {
	o := k.o.PartitionOptions
	o.Progress = k.o.Progress
	p, err := partition.Make(ctx, k.topo, o)
	if err != nil {
		return err
	}
	k.part = p
	p.Info.Dataset = k.d.Meta.UUID
	f, err := outfile.Create("partition of a layout", path, false)
	if err != nil {
		return err
	}
	return f.Commit(p.Write(f))
}

// plan finds new numbers and writes the tables. The memory is shared out.
func (k *maker) plan(ctx context.Context) (*filler, *listKind, error) {
	newOf, staticEdges, err := k.lay(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := k.saveTables(); err != nil {
		return nil, nil, err
	}
	l := k.l
	f := &filler{l: l, topo: k.topo, of: k.part.Of, newOf: newOf, o: k.o, stats: &k.m.Stats,
		block: max(min(mostBlock, k.o.MemoryBytes/16), l.RowBytes)}
	fixed := 4*l.Nodes + // newOf
		l.Spec.Pages*(scatterBytes+markedBytes) +
		8*(9*int64(l.Parts)+2*int64(len(l.Train))) + // tables, and how far lists are
		2*f.block + scanBytes
	f.pool = k.o.MemoryBytes - fixed
	return f, newListKind(l, k.topo.Indptr, staticEdges), nil
}

// lay finds new numbers and where everything lies.
func (k *maker) lay(ctx context.Context) (newOf []uint32, staticEdges []int64, err error) {
	key := &k.m.Key
	l := &Layout{Dir: k.o.Dir, Key: *key, Parts: key.Parts, Nodes: key.Nodes,
		RowBytes: key.RowBytes}
	k.l = l
	mem, err := k.alloc(4 * l.Nodes)
	if err != nil {
		return nil, nil, err
	}
	newOf = hostmem.View[uint32](mem)
	least, ties, err := k.mostNamed(ctx, newOf)
	if err != nil {
		return nil, nil, err
	}
	staticEdges = k.number(newOf, least, ties)
	for v := range l.Nodes {
		if d := k.topo.InDegree(v); d > math.MaxUint32 {
			return nil, nil, errs.New(errs.Capability,
				"node %d has %d in-edges, and a layout by part keeps below 2^32 of a node", v, d)
		}
	}
	train, err := k.d.Split(dataset.Splits[0])
	if err != nil {
		return nil, nil, err
	}
	l.Train = make([]int64, len(train))
	for i, v := range train {
		l.Train[i] = int64(newOf[v])
	}
	return newOf, staticEdges, l.place(k.m.ID, key.PageBytes)
}

const (
	markedBytes = 8       // a page, while going on from a mark
	scanBytes   = 4 << 20 // of neighbours on their way, and of a topology's scan
)

// mostNamed counts how often each node is an in-neighbour, its out-degree, and finds the least that
// a static node has: nodes of more are static, and the first so many of just as many.
func (k *maker) mostNamed(ctx context.Context, count []uint32) (least uint32, ties int64,
	err error) {
	want := int64(k.o.StaticShare * float64(k.l.Nodes))
	if want == 0 {
		return math.MaxUint32, 0, nil
	}
	k.m.Stats.EdgesRead += k.topo.NumEdges
	if err := k.topo.Scan(ctx, func(first int64, ids []uint32) error {
		for i, id := range ids {
			if int64(id) >= k.l.Nodes {
				return dataset.BadID(dataset.IndicesName, first+int64(i), int64(id), k.l.Nodes)
			}
			if count[id] < math.MaxUint32 {
				count[id]++
			}
		}
		k.o.Progress.Report("count out-degrees", first+int64(len(ids)), k.topo.NumEdges)
		return nil
	}); err != nil {
		return 0, 0, err
	}
	atLeast := func(d uint64) (n int64) {
		for _, c := range count {
			if uint64(c) >= d {
				n++
			}
		}
		return n
	}
	lo, hi := uint64(0), uint64(math.MaxUint32)+1 // atLeast(lo) >= want > atLeast(hi)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; atLeast(mid) >= want {
			lo = mid
		} else {
			hi = mid
		}
	}
	return uint32(lo), want - atLeast(lo+1), nil
}

// number fills Base, Statics and Edges, and turns out-degrees into new numbers. It returns how many
// in-edges the static nodes of each part have.
func (k *maker) number(newOf []uint32, least uint32, ties int64) (staticEdges []int64) {
	l, of := k.l, k.part.Of
	l.Base, l.Statics = make([]int64, l.Parts+1), make([]int64, l.Parts+1)
	l.Edges, staticEdges = make([]int64, l.Parts), make([]int64, l.Parts)
	each := func(see func(v int64, part int, static bool)) {
		left := ties
		for v, d := range newOf {
			static := d > least || d == least && left > 0
			if d == least {
				left--
			}
			see(int64(v), int(of[v]), static)
		}
	}
	each(func(v int64, part int, static bool) {
		l.Base[part+1]++
		d := k.topo.InDegree(v)
		l.Edges[part] += d
		if static {
			l.Statics[part+1]++
			staticEdges[part] += d
			l.StaticEdgeCount += d
		}
	})
	for p := range l.Parts {
		l.Base[p+1] += l.Base[p]
		l.Statics[p+1] += l.Statics[p]
	}
	next := [2][]int64{make([]int64, l.Parts), make([]int64, l.Parts)} // static ones, others
	for p := range l.Parts {
		next[0][p], next[1][p] = l.Base[p], l.Base[p]+l.statics(p)
	}
	each(func(v int64, part int, static bool) {
		to := &next[1][part]
		if static {
			to = &next[0][part]
		}
		newOf[v] = uint32(*to)
		*to++
	})
	return staticEdges
}

// saveTables writes the tables, or checks that those that are there are the same.
func (k *maker) saveTables() error {
	path, data := filepath.Join(k.o.Dir, tablesName), k.l.tables()
	was, err := infile.Read(path, int64(len(data)))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return durably(k.o.Dir, tablesName, data)
	case err != nil:
		return k.l.damaged("%v", err)
	case !bytes.Equal(was, data):
		return k.l.damaged("%s has other tables than its dataset and its partition lead to", path)
	}
	return nil
}

// fill fills the pages, and says that all is whole.
func (k *maker) fill(ctx context.Context, f *filler, lists *listKind) (err error) {
	to, err := k.o.Place.Create(ctx, k.o.Dir, k.l.Spec)
	var finished *pages.FinishedError
	if errors.As(err, &finished) { // the manifest has not heard of it
		return k.whole()
	}
	if err != nil {
		return err
	}
	defer errs.Closing(&err, func() error { return to.Close(ctx) })
	f.to = to
	if to.Resumed() { // else a mark is of pages that are gone
		if f.mark, err = loadMark(k.o.Dir, k.m.ID); err != nil {
			return err
		}
	}
	if err := f.run(ctx, lists, &rowKind{l: k.l}); err != nil {
		return err
	}
	if err := to.Finish(ctx); err != nil {
		return err
	}
	return k.whole()
}

// whole notes that the pages are finished, for which nobody needs a mark any more.
func (k *maker) whole() error {
	if err := removeMark(k.o.Dir); err != nil {
		return err
	}
	k.m.Whole = true
	return k.m.save(k.o.Dir)
}
