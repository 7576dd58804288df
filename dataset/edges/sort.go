// Package edges sorts any number of edges by destination and source in bounded memory, and writes
// them as a topology (indptr and indices). Readers fill chunks, which are sorted by radix and
// spilled as runs (sort.go, keys.go); runs are merged by ranges of keys (merge.go) into the two
// arrays (csc.go). Where its files lie is the caller's: see Store.
package edges

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/work"
)

// Budget is the budget that a user gave, or one that fits the machine. The result does not depend
// on it.
func Budget(given int64) int64 {
	if given > 0 {
		return given
	}
	given = DefaultMemory
	if free, err := hostmem.AvailableBytes(); err == nil {
		given = min(given, free/2)
	}
	return given
}

// DefaultMemory is the memory that an import may use, where more than twice as much is available.
const DefaultMemory = 2 << 30

const (
	minChunk = 1 << 10 // keys of a chunk
	maxChunk = 32 << 20
	// fixedMemory is the memory that a process which imports holds beside the edges: the program,
	// Go's runtime, and readers' buffers for each core.
	fixedMemory  = 40 << 20
	readerMemory = 6 << 20
)

// Rules say what becomes of the edges of an import.
type Rules struct {
	Dedup    bool // repeated edges are stored once
	NoSelf   bool // self loops are dropped
	AddSelf  bool // each node gets one self loop; those that are there are dropped
	Opposite bool // the opposite of each edge is added, not of self loops
	None     bool // no edge is stored
}

// Counts say what became of the edges: stored = taken + opposite + added - self - duplicates.
type Counts struct {
	Stored     int64 `json:"stored"`
	Taken      int64 `json:"taken"`      // from the source
	Duplicates int64 `json:"duplicates"` // that were dropped
	Repeated   int64 `json:"repeated"`   // that were not
	Self       int64 `json:"self"`       // self loops that were dropped
	Kept       int64 `json:"kept"`       // self loops that were not
	Added      int64 `json:"added"`      // self loops
	Opposite   int64 `json:"opposite"`   // edges
	Nodes      int64 `json:"nodes"`
}

// tally counts edges of the source.
type tally struct {
	maxID, minID             int64
	taken, self, kept, extra int64
}

// run is a sorted spill file.
type run struct {
	tally
	id    int
	keys  int64 // stored
	group int   // keys in a group
	bytes int64 // of all groups
	index []groupStart
}

type groupStart struct {
	first  Edge
	offset int64
}

// chunk is a part of the sorter's memory, with as much beside it to sort into.
type chunk struct {
	keys, tmp []uint64
	n         int // keys in use
	tally
}

func (c *chunk) reset() { c.n, c.tally = 0, tally{maxID: -1, minID: math.MaxInt64} }

// Sorter orders any number of edges by (dst, src) in bounded memory, on all cores: chunks are
// filled by readers of different parts, radix sorted and spilled as runs, and runs are merged by
// ranges of keys.
type Sorter struct {
	s       Store
	rules   Rules
	mem     []byte // behind all chunks, off Go's heap; pages that are not reached are never there
	chunks  int
	words   int         // keys of a chunk
	free    chan *chunk // to fill
	partial []*chunk    // filled in part

	spills sync.WaitGroup
	mu     sync.Mutex
	runs   []run
	seq    int
	err    error // of a spill
	failed atomic.Bool
	done   Counts // of runs
	maxID  int64
	minID  int64
}

// New takes its memory at once: what memory leaves beside everything else.
func New(s Store, memory int64, rules Rules) (*Sorter, error) {
	workers := hostcpu.Count()
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	off := int64(0)
	for _, n := range hostmem.Usage() {
		off += n
	}
	arena := max(memory-fixedMemory-int64(workers)*readerMemory-int64(heap.HeapAlloc)*5/4-off,
		memory/4)
	e := &Sorter{s: s, rules: rules, chunks: workers + 1, maxID: -1, minID: math.MaxInt64}
	e.words = int(min(max(arena/int64(e.chunks)/16, minChunk), maxChunk)) &^ 127
	mem, err := hostmem.Alloc(int64(e.chunks)*int64(e.words)*16, "edge sort")
	if err != nil {
		return nil, fmt.Errorf("memory for sorting edges: %w", err)
	}
	e.mem = mem
	e.free = make(chan *chunk, e.chunks)
	all := hostmem.View[uint64](mem)
	for range e.chunks {
		c := &chunk{keys: all[:e.words:e.words], tmp: all[e.words : 2*e.words : 2*e.words]}
		all = all[2*e.words:]
		c.reset()
		e.free <- c
	}
	return e, nil
}

// count adds up what became of some edges. Call with mu held.
func (e *Sorter) count(t tally) {
	e.done.Taken += t.taken
	e.done.Self += t.self
	e.done.Kept += t.kept
	e.done.Opposite += t.extra
	e.maxID, e.minID = max(e.maxID, t.maxID), min(e.minID, t.minID)
}

// Seen returns the least and the largest id so far, math.MaxInt64 and -1 for none, and the number of
// edges that were taken. Call it between sources.
func (e *Sorter) Seen() (least, largest, taken int64) {
	e.spills.Wait()
	least, largest, taken = e.minID, e.maxID, e.done.Taken
	for _, c := range e.partial {
		least, largest, taken = min(least, c.minID), max(largest, c.maxID), taken+c.taken
	}
	return least, largest, taken
}

// Close gives the memory back. It may be called again.
func (e *Sorter) Close() error {
	e.spills.Wait()
	mem := e.mem
	e.mem = nil
	if mem == nil {
		return nil
	}
	return hostmem.Free(mem)
}

// Read takes all edges of a source.
func (e *Sorter) Read(ctx context.Context, src Source, p work.Progress) error {
	var mu sync.Mutex
	done := int64(0)
	report := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		done += n
		p.Report("edges", done, src.Total)
	}
	report(0)
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(e.chunks-1, src.Parts) {
		g.Go(func() error {
			t := &taker{e: e, ctx: ctx, from: src.Name}
			defer t.leave()
			for part := int(next.Add(1)) - 1; part < src.Parts; part = int(next.Add(1)) - 1 {
				if err := src.Read(ctx, part, t.take, report); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := g.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil { // the cause: readers only saw that they could not go on
		return e.err
	}
	return err
}

// taker puts the edges of one part after the other into chunks.
type taker struct {
	e    *Sorter
	ctx  context.Context
	from string
	c    *chunk
}

var errSpill = errors.New("a spill failed")

// room gets a chunk with room for an edge and its opposite.
func (t *taker) room() error {
	e := t.e
	if e.failed.Load() {
		return errSpill
	}
	if t.c != nil && t.c.n+2 <= len(t.c.keys) {
		return nil
	}
	if t.c != nil {
		e.spill(t.c)
		t.c = nil
	}
	e.mu.Lock()
	if last := len(e.partial) - 1; last >= 0 {
		t.c, e.partial = e.partial[last], e.partial[:last]
	}
	e.mu.Unlock()
	if t.c != nil {
		return t.room()
	}
	select {
	case t.c = <-e.free:
		t.c.reset()
		return nil
	case <-t.ctx.Done():
		return t.ctx.Err()
	}
}

func (t *taker) take(src, dst []int64) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	per := 1
	if t.e.rules.Opposite {
		per = 2
	}
	for len(src) > 0 {
		if err := t.room(); err != nil {
			return err
		}
		c := t.c
		n := min(len(src), (len(c.keys)-c.n)/per)
		for i, s := range src[:n] {
			d := dst[i]
			c.maxID, c.minID = max(c.maxID, s, d), min(c.minID, s, d)
		}
		if c.maxID > math.MaxUint32 {
			return errs.New(errs.Usage, "%s has node %d; a dataset has at most 2^32 nodes", t.from,
				c.maxID)
		}
		c.taken += int64(n)
		c.put(src[:n], dst[:n], t.e.rules)
		src, dst = src[n:], dst[n:]
	}
	return nil
}

// put packs edges for which there is room.
func (c *chunk) put(src, dst []int64, rules Rules) {
	dst = dst[:len(src)]
	k := c.keys[c.n:]
	n := 0
	if rules.None {
		return
	}
	drop := rules.NoSelf || rules.AddSelf
	if !drop && !rules.Opposite {
		k = k[:len(src)]
		self := 0
		for i, s := range src {
			d := dst[i]
			if s == d {
				self++
			}
			k[i] = uint64(d)<<32 | uint64(s)
		}
		c.n += len(src)
		c.kept += int64(self)
		return
	}
	for i, s := range src {
		d := dst[i]
		if s == d {
			if drop {
				c.self++
				continue
			}
			c.kept++
		}
		k[n] = uint64(d)<<32 | uint64(s)
		n++
		if rules.Opposite && s != d {
			k[n] = uint64(s)<<32 | uint64(d)
			n++
			c.extra++
		}
	}
	c.n += n
}

// leave keeps what is in the chunk for the next reader, or the end.
func (t *taker) leave() {
	if t.c == nil {
		return
	}
	t.e.mu.Lock()
	t.e.partial = append(t.e.partial, t.c)
	t.e.mu.Unlock()
	t.c = nil
}

// spill sorts a chunk and writes it as a run, beside the caller; the first error stays in e.err.
func (e *Sorter) spill(c *chunk) {
	e.spills.Add(1)
	go func() {
		defer e.spills.Done()
		if err := e.spillNow(c); err != nil {
			e.mu.Lock()
			if e.err == nil {
				e.err = err
			}
			e.mu.Unlock()
			e.failed.Store(true)
		}
	}()
}

func (e *Sorter) spillNow(c *chunk) error {
	keys, counts := c.sorted(e.rules.Dedup), c.tally
	w, err := e.newRun(e.groupKeys())
	if err == nil {
		if err = w.put(keys, c.tmp); err != nil {
			err = errors.Join(err, w.f.Discard())
		}
	}
	e.free <- c
	if err != nil {
		return err
	}
	r, err := w.close()
	if err != nil {
		return err
	}
	r.tally = counts
	e.mu.Lock()
	defer e.mu.Unlock()
	e.runs = append(e.runs, r)
	e.count(counts)
	return nil
}

// sorted puts a chunk in order.
func (c *chunk) sorted(dedup bool) []uint64 {
	a := c.keys[:c.n]
	sortKeys(a, c.tmp[:c.n])
	if dedup {
		a = slices.Compact(a)
	}
	return a
}

// groupKeys returns how many keys lie between two entries of a run's index.
func (e *Sorter) groupKeys() int {
	return min(max(e.words/4096&^(packKeys-1), packKeys), maxGroup)
}

// RunPrefix begins the name of every run's file.
const RunPrefix = "sort-"

func runName(id int) string { return fmt.Sprintf(RunPrefix+"%d.tmp", id) }

type runWriter struct {
	f    File
	r    run
	buf  []byte
	have int
	held []uint64 // of merges: keys of a group that is not whole
}

func (e *Sorter) newRun(group int) (*runWriter, error) {
	e.mu.Lock()
	e.seq++
	id := e.seq
	e.mu.Unlock()
	f, err := e.s.Create(runName(id))
	if err != nil {
		return nil, err
	}
	return &runWriter{f: f, r: run{id: id, group: group}}, nil
}

// put writes sorted keys, of which all but the last call's are whole groups. tmp is memory to
// encode in; if it is too small for that, some is made.
func (w *runWriter) put(keys, tmp []uint64) error {
	if w.buf == nil {
		if w.buf = wordBytes(tmp); len(w.buf) < 2*groupRoom {
			w.buf = make([]byte, 2*groupRoom)
		} else if len(w.buf) > 1<<20 {
			w.buf = w.buf[:1<<20]
		}
	}
	for len(keys) > 0 {
		part := keys[:min(len(keys), w.r.group)]
		keys = keys[len(part):]
		w.r.index = append(w.r.index, groupStart{edgeOf(part[0]), w.r.bytes})
		n := encodeGroup(w.buf[w.have:], part)
		w.have += n
		w.r.bytes += int64(n)
		w.r.keys += int64(len(part))
		if w.have+groupRoom > len(w.buf) {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return w.flush()
}

func (w *runWriter) flush() error {
	_, err := w.f.Write(w.buf[:w.have])
	w.have = 0
	return err
}

// close ends a run, which need not outlive the process.
func (w *runWriter) close() (run, error) {
	return w.r, errors.Join(w.f.Flush(), w.f.Discard())
}

// finish waits for all spills. Where nothing was spilled, the sorted chunks are returned: the edges
// fit in memory.
func (e *Sorter) finish(spill bool) ([]*chunk, error) {
	e.spills.Wait()
	e.mu.Lock()
	err, parts := e.err, e.partial
	e.partial = nil
	runs := len(e.runs)
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if runs == 0 && !spill {
		var wg sync.WaitGroup
		for _, c := range parts {
			wg.Go(func() { c.n = len(c.sorted(e.rules.Dedup)) })
			e.count(c.tally)
		}
		wg.Wait()
		return parts, nil
	}
	for _, c := range parts {
		e.spill(c)
	}
	e.spills.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	return nil, e.err
}

func (e *Sorter) removeRuns(runs []run) error {
	var err error
	for _, r := range runs {
		if rerr := os.Remove(e.s.Path(runName(r.id))); rerr != nil &&
			!errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// Options are for Sort.
type Options struct {
	Memory   int64 // 0: DefaultMemory, or half of what is available
	Nodes    int64
	Rules    Rules
	Progress work.Progress
}

// Sort reads all edges of a source and writes the topology.
func Sort(ctx context.Context, s Store, src Source, o Options) (c Counts, err error) {
	e, err := New(s, Budget(o.Memory), o.Rules)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := e.Read(ctx, src, o.Progress); err != nil {
		return c, err
	}
	return e.WriteCSC(ctx, o.Nodes, o.Progress)
}
