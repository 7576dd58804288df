// Package edges sorts any number of edges by destination and source in bounded memory, and writes
// them as a topology (indptr and indices). Readers fill chunks, which are sorted by radix and
// spilled as runs (sort.go, keys.go); runs are merged by ranges of keys (merge.go) into the two
// arrays (csc.go). Where its files lie, and what an interrupted sort resumes, is the caller's:
// see Store and Log.
package edges

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

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
	fixedMemory   = 40 << 20
	readerMemory  = 6 << 20
	wideKeyWords  = 2
	pendingCommit = 2 // runs written and not yet on the disk
)

// Rules say what becomes of the edges of an import.
type Rules struct {
	Dedup    bool // repeated edges are stored once
	NoSelf   bool // self loops are dropped
	AddSelf  bool // each node gets one self loop; those that are there are dropped
	Opposite bool // the opposite of each edge is added, not of self loops
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

// Span is a range of a part's edges, counted as they are emitted.
type Span struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

// Piece holds what a run holds of a part of a source.
type Piece struct {
	Source int `json:"source"`
	Part   int `json:"part"`
	Span
	End   bool  `json:"end,omitempty"` // the part has To edges and Units units
	Units int64 `json:"units,omitempty"`
}

// Run describes a sorted spill file in the journal.
type Run struct {
	ID     int     `json:"id"`
	Keys   int64   `json:"keys"`  // stored
	Wide   bool    `json:"wide"`  // see keys.go
	Group  int     `json:"group"` // keys in a group
	Bytes  int64   `json:"bytes"` // of all groups; the index follows
	MaxID  int64   `json:"max_id"`
	MinID  int64   `json:"min_id"`
	Taken  int64   `json:"taken"`
	Self   int64   `json:"self"`
	Kept   int64   `json:"kept"`
	Extra  int64   `json:"opposite"`
	Pieces []Piece `json:"pieces,omitempty"`

	index []groupStart
}

type groupStart struct {
	first  Edge
	offset int64
}

// chunk is a part of the sorter's memory, with as much beside it to sort into.
type chunk struct {
	keys, tmp []uint64
	n         int // words of keys in use
	wide      bool
	Run       // counts and pieces
}

func (c *chunk) reset(wide bool) {
	c.n, c.wide = 0, wide
	c.Run = Run{MaxID: -1, MinID: math.MaxInt64, Wide: wide, Pieces: c.Pieces[:0]}
}

// Sorter orders any number of edges by (dst, src) in bounded memory, on all cores: chunks are
// filled by readers of different parts, radix sorted and spilled as runs, and runs are merged by
// ranges of keys.
type Sorter struct {
	s       Store
	log     Log // nil: nothing is resumed
	rules   Rules
	mem     []byte // behind all chunks, off Go's heap; pages that are not reached are never there
	chunks  int
	words   int         // of keys in a chunk
	free    chan *chunk // to fill
	partial []*chunk    // filled in part
	wide    atomic.Bool // an id beyond 32 bits was seen
	sources int

	spills sync.WaitGroup
	commit chan struct{} // bounds the runs that wait for the disk
	mu     sync.Mutex
	runs   []Run
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
	debug.FreeOSMemory() // or else the heap of steps before is there beside the arena
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	off := int64(0)
	for _, n := range hostmem.Usage() {
		off += n
	}
	arena := max(memory-fixedMemory-int64(workers)*readerMemory-int64(heap.HeapAlloc)*5/4-off,
		memory/4)
	e := &Sorter{s: s, log: s.Log(), rules: rules, chunks: workers + 1, maxID: -1,
		minID: math.MaxInt64}
	e.words = int(min(max(arena/int64(e.chunks)/16, minChunk), maxChunk)) &^ 127
	mem, err := hostmem.Alloc(int64(e.chunks)*int64(e.words)*16, "edge sort")
	if err != nil {
		return nil, fmt.Errorf("memory for sorting edges: %w", err)
	}
	e.mem = mem
	e.free = make(chan *chunk, e.chunks)
	e.commit = make(chan struct{}, pendingCommit)
	all := hostmem.View[uint64](mem)
	for range e.chunks {
		c := &chunk{keys: all[:e.words:e.words], tmp: all[e.words : 2*e.words : 2*e.words]}
		all = all[2*e.words:]
		c.reset(false)
		e.free <- c
	}
	if e.log != nil {
		runs, last := e.log.Runs()
		for _, r := range runs {
			e.add(r)
			e.wide.Store(e.wide.Load() || r.Wide)
		}
		e.seq = last
	}
	return e, nil
}

// add counts a run in. Call with mu held, or before the sorter is used.
func (e *Sorter) add(r Run) {
	e.runs = append(e.runs, r)
	e.count(&r)
}

func (e *Sorter) count(r *Run) {
	e.done.Taken += r.Taken
	e.done.Self += r.Self
	e.done.Kept += r.Kept
	e.done.Opposite += r.Extra
	e.maxID, e.minID = max(e.maxID, r.MaxID), min(e.minID, r.MinID)
}

// Seen returns the least and the largest id so far, math.MaxInt64 and -1 for none, and the number
// of edges that were taken. Call it between sources.
func (e *Sorter) Seen() (least, largest, taken int64) {
	e.spills.Wait()
	least, largest, taken = e.minID, e.maxID, e.done.Taken
	for _, c := range e.partial {
		least, largest, taken = min(least, c.MinID), max(largest, c.MaxID), taken+c.Taken
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

// read takes all edges of a source, but those that the journal has in runs.
func (e *Sorter) Read(ctx context.Context, src Source, p work.Progress) error {
	id := e.sources
	e.sources++
	var covered map[int]*PartMark
	if e.log != nil {
		if err := e.log.Begin(id, src); err != nil {
			return err
		}
		covered = e.log.Covered(id)
	}
	var mu sync.Mutex
	done, parts := int64(0), []int(nil)
	for part := range src.Parts {
		if c := covered[part]; c != nil && c.Ended() {
			done += c.Units
		} else {
			parts = append(parts, part)
		}
	}
	report := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		done += n
		p.Report("edges", done, src.Total)
	}
	report(0)
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(e.chunks-1, len(parts)) {
		g.Go(func() error {
			t := &taker{e: e, ctx: ctx, source: id}
			defer t.leave()
			for {
				i := int(next.Add(1)) - 1
				if i >= len(parts) {
					return nil
				}
				t.part, t.pos, t.skip = parts[i], 0, nil
				if c := covered[t.part]; c != nil {
					t.skip = c.Spans
				}
				units := int64(0)
				if err := src.Read(ctx, t.part, t.take,
					func(n int64) { units += n; report(n) }); err != nil {
					return err
				}
				if err := t.end(units); err != nil {
					return err
				}
			}
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
	e      *Sorter
	ctx    context.Context
	source int
	part   int
	pos    int64  // edges of the part that were emitted
	skip   []Span // of the part, that runs have
	c      *chunk
}

var errSpill = errors.New("a spill failed")

// chunk gets room for an edge and its opposite.
func (t *taker) room(wide bool) error {
	e := t.e
	if e.failed.Load() {
		return errSpill
	}
	words := wordsOf(wide)
	if t.c != nil && (t.c.wide == wide || t.c.wide) && t.c.n+2*words <= len(t.c.keys) {
		return nil
	}
	if t.c != nil {
		e.spill(t.c)
		t.c = nil
	}
	e.mu.Lock()
	for i, c := range e.partial {
		if c.wide == wide && c.n+2*words <= len(c.keys) {
			t.c = c
			e.partial = append(e.partial[:i], e.partial[i+1:]...)
			break
		}
	}
	if t.c == nil && len(e.partial) > 0 { // of the other width, or full
		c := e.partial[0]
		e.partial = e.partial[1:]
		e.mu.Unlock()
		e.spill(c)
		e.mu.Lock()
	}
	e.mu.Unlock()
	if t.c == nil {
		select {
		case t.c = <-e.free:
			t.c.reset(wide)
		case <-t.ctx.Done():
			return t.ctx.Err()
		}
	}
	return nil
}

func (t *taker) piece(n int64) *Piece {
	ps := t.c.Pieces
	if len(ps) > 0 {
		if l := &ps[len(ps)-1]; l.Source == t.source && l.Part == t.part && l.To == t.pos {
			l.To += n
			return l
		}
	}
	t.c.Pieces = append(ps, Piece{Source: t.source, Part: t.part, Span: Span{t.pos, t.pos + n}})
	return &t.c.Pieces[len(ps)]
}

func (t *taker) take(src, dst []int64) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	for len(src) > 0 {
		n := int64(len(src))
		covered := false
		for _, s := range t.skip {
			switch {
			case t.pos >= s.To:
			case t.pos >= s.From:
				n, covered = min(n, s.To-t.pos), true
			default:
				n = min(n, s.From-t.pos)
			}
		}
		if covered {
			t.pos += n
			src, dst = src[n:], dst[n:]
			continue
		}
		top, low := int64(0), int64(math.MaxInt64)
		for i, s := range src[:n] {
			d := dst[i]
			top, low = max(top, s, d), min(low, s, d)
		}
		if top > math.MaxUint32 {
			t.e.wide.Store(true)
		}
		wide := t.e.wide.Load()
		if err := t.room(wide); err != nil {
			return err
		}
		c := t.c
		per := wordsOf(c.wide)
		if t.e.rules.Opposite {
			per *= 2
		}
		n = min(n, int64((len(c.keys)-c.n)/per))
		t.piece(n)
		// of a little more than is put: the rest follows
		c.MaxID, c.MinID = max(c.MaxID, top), min(c.MinID, low)
		c.Taken += n
		c.put(src[:n], dst[:n], t.e.rules)
		t.pos += n
		src, dst = src[n:], dst[n:]
	}
	return nil
}

// put packs edges for which there is room.
func (c *chunk) put(src, dst []int64, rules Rules) {
	dst = dst[:len(src)]
	drop := rules.NoSelf || rules.AddSelf
	if !c.wide && !drop && !rules.Opposite { // the usual case, without a branch for each
		k, self := c.keys[c.n:][:len(src)], 0
		for i, s := range src {
			d := dst[i]
			if s == d {
				self++
			}
			k[i] = uint64(d)<<32 | uint64(s)
		}
		c.n += len(src)
		c.Kept += int64(self)
		return
	}
	for i, s := range src {
		d := dst[i]
		switch {
		case s != d:
			if c.add(s, d); rules.Opposite {
				c.add(d, s)
				c.Extra++
			}
		case drop:
			c.Self++
		default:
			c.Kept++
			c.add(s, d)
		}
	}
}

// add packs an edge.
func (c *chunk) add(src, dst int64) {
	if c.wide {
		c.keys[c.n], c.keys[c.n+1] = uint64(dst), uint64(src)
	} else {
		c.keys[c.n] = uint64(dst)<<32 | uint64(src)
	}
	c.n += wordsOf(c.wide)
}

// end notes that a part is read to its end.
func (t *taker) end(units int64) error {
	if err := t.room(t.c != nil && t.c.wide); err != nil {
		return err
	}
	p := t.piece(0)
	p.End, p.Units = true, units
	return nil
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
	keys := c.sorted(e.rules.Dedup)
	w, err := e.newRun(c.Run, e.groupKeys())
	if err == nil {
		err = w.put(keys, c.tmp)
	}
	if err == nil {
		w.r.Pieces = append([]Piece(nil), c.Pieces...)
	}
	e.commit <- struct{}{}
	defer func() { <-e.commit }()
	e.free <- c
	if err != nil {
		if w != nil {
			err = errors.Join(err, w.f.Discard())
		}
		return err
	}
	r, err := w.close()
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.log != nil {
		if err := e.log.Ran(r, nil); err != nil {
			return err
		}
	}
	e.add(r)
	return nil
}

// sorted puts a chunk in order.
func (c *chunk) sorted(dedup bool) []uint64 {
	a := c.keys[:c.n]
	sortAny(a, c.tmp[:c.n], c.wide)
	if dedup {
		a = compactAny(a, c.wide)
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

// File is the name of a run's file, and the bytes that it must have.
func (r *Run) File() (name string, size int64) {
	groups := (r.Keys + int64(r.Group) - 1) / int64(r.Group)
	return runName(r.ID), r.Bytes + groups*indexEntry + 4
}

type runWriter struct {
	f    File
	log  Log
	r    Run
	buf  []byte
	have int
	held []uint64 // of merges: keys of a group that is not whole
}

func (e *Sorter) newRun(of Run, group int) (*runWriter, error) {
	e.mu.Lock()
	e.seq++
	of.ID = e.seq
	e.mu.Unlock()
	f, err := e.s.Create(runName(of.ID))
	if err != nil {
		return nil, err
	}
	of.Group, of.Keys, of.Bytes, of.index, of.Pieces = group, 0, 0, nil, nil
	return &runWriter{f: f, log: e.log, r: of}, nil
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
	words := wordsOf(w.r.Wide)
	for len(keys) > 0 {
		part := keys[:min(len(keys), w.r.Group*words)]
		keys = keys[len(part):]
		w.r.index = append(w.r.index, groupStart{firstOf(part, w.r.Wide), w.r.Bytes})
		n := encodeGroup(w.buf[w.have:], part, w.r.Wide)
		w.have += n
		w.r.Bytes += int64(n)
		w.r.Keys += int64(len(part) / words)
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

// close writes the index and, where a journal will name the run, waits for the disk.
func (w *runWriter) close() (Run, error) {
	if w.log == nil {
		if err := w.f.Flush(); err != nil {
			return w.r, errors.Join(err, w.f.Discard())
		}
		return w.r, w.f.Discard() // an import without a journal starts over after a crash
	}
	if _, err := w.f.Write(encodeIndex(w.r.index)); err != nil {
		return w.r, errors.Join(err, w.f.Discard())
	}
	return w.r, w.f.Finish()
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
			e.count(&c.Run)
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

func (e *Sorter) removeRuns(runs []Run) error {
	var err error
	for _, r := range runs {
		if rerr := os.Remove(e.s.Path(runName(r.ID))); rerr != nil &&
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
	Sources  int64 // of a relation, whose sources are numbers of their own; 0: Nodes
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
	return e.WriteRelation(ctx, o.Nodes, cmp.Or(o.Sources, o.Nodes), o.Progress)
}
