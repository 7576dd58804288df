package dataset

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"slices"
	"sort"
	"time"
	"unsafe"

	"helios/dataset/npy"
)

// Runs are merged by ranges of keys: the runs' indexes tell how to cut all keys into ranges of
// about mergeKeys; a core reads the part of each run that lies in a range, sorts what it has
// (which, within a cache, is faster than a tournament of runs) and drops repeated keys; and the
// results are written in order. One pass suffices until a range of each run's smallest part does
// not fit: 512 runs and more for a budget of 1 GiB.
const (
	mergeKeys = 1 << 20
	rawRoom   = 512 << 10 // bytes of a run read at once
)

// keySource is sorted keys that can be read by ranges, from several goroutines.
type keySource interface {
	// starts tells the first key of each group, and its size.
	starts(fn func(first edge, keys int))
	group() int // keys of a group at most
	keys() int64
	// read appends the keys with lo <= key < hi to dst, which has the room, as words of the given width.
	read(dst []uint64, lo, hi edge, wide bool, b *mergeBuf) ([]uint64, error)
	// count counts a key.
	count(k edge, b *mergeBuf) (int64, error)
}

// mergeBuf is what one range needs.
type mergeBuf struct {
	a, b []uint64
	raw  []byte
	dec  []uint64
}

// fileRun is a spilled run.
type fileRun struct {
	run
	f    *os.File
	path string
}

func (r *fileRun) group() int  { return r.Group }
func (r *fileRun) keys() int64 { return r.Keys }

func (r *fileRun) size(g int) int {
	return int(min(int64(r.Group), r.Keys-int64(g)*int64(r.Group)))
}

func (r *fileRun) starts(fn func(edge, int)) {
	for g := range r.index {
		fn(r.index[g].first, r.size(g))
	}
}

// end is where group g begins, or the last one ends.
func (r *fileRun) end(g int) int64 {
	if g == len(r.index) {
		return r.Bytes
	}
	return r.index[g].at
}

// groups decodes all groups that can hold keys of lo <= key < hi.
func (r *fileRun) groups(lo, hi edge, b *mergeBuf, fn func(keys []uint64)) error {
	// Keys like lo may end the group before the first one that begins with lo.
	g := max(sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(lo) })-1, 0)
	to := sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(hi) })
	words := 1
	if r.Wide {
		words = wideKeyWords
	}
	for g < to {
		upTo := g + 1
		for upTo < to && r.end(upTo+1)-r.end(g)+8 <= int64(len(b.raw)) {
			upTo++
		}
		n := int(r.end(upTo) - r.end(g))
		if n+8 > len(b.raw) {
			return fmt.Errorf("%s: %w; run the import again with --restart", r.path, errDamagedRun)
		}
		if _, err := r.f.ReadAt(b.raw[:n], r.end(g)); err != nil {
			return fmt.Errorf("read back %s: %w; run the import again with --restart", r.path, err)
		}
		clear(b.raw[n : n+8])
		for raw := b.raw[:n+8]; g < upTo; g++ {
			size := r.size(g)
			used, err := decodeGroup(b.dec[:size*words], raw, size, r.Wide)
			if err != nil {
				return fmt.Errorf("%s, byte %d: %w; run the import again with --restart", r.path, r.end(g), err)
			}
			raw = raw[used:]
			fn(b.dec[:size*words])
		}
	}
	return nil
}

func (r *fileRun) read(dst []uint64, lo, hi edge, wide bool, b *mergeBuf) ([]uint64, error) {
	err := r.groups(lo, hi, b, func(keys []uint64) {
		keys = within(keys, r.Wide, lo, hi)
		if wide == r.Wide {
			dst = append(dst, keys...)
			return
		}
		for _, k := range keys {
			dst = append(dst, k>>32, k&math.MaxUint32)
		}
	})
	return dst, err
}

func (r *fileRun) count(k edge, b *mergeBuf) (n int64, err error) {
	err = r.groups(k, k.next(), b, func(keys []uint64) {
		if m := within(keys, r.Wide, k, k.next()); r.Wide {
			n += int64(len(m) / wideKeyWords)
		} else {
			n += int64(len(m))
		}
	})
	return n, err
}

// memRun is a sorted chunk that stayed in memory.
type memRun struct {
	c *chunk
	g int
}

func (r *memRun) words() int {
	if r.c.wide {
		return wideKeyWords
	}
	return 1
}

func (r *memRun) group() int  { return r.g }
func (r *memRun) keys() int64 { return int64(r.c.n / r.words()) }

func (r *memRun) starts(fn func(edge, int)) {
	w := r.words()
	for i := 0; i < r.c.n; i += r.g * w {
		first := edge{}
		if r.c.wide {
			first = pairs(r.c.keys[i:])[0]
		} else {
			first = edgeOf(r.c.keys[i])
		}
		fn(first, min(r.g, (r.c.n-i)/w))
	}
}

func (r *memRun) read(dst []uint64, lo, hi edge, wide bool, _ *mergeBuf) ([]uint64, error) {
	keys := within(r.c.keys[:r.c.n], r.c.wide, lo, hi)
	if wide == r.c.wide {
		return append(dst, keys...), nil
	}
	for _, k := range keys {
		dst = append(dst, k>>32, k&math.MaxUint32)
	}
	return dst, nil
}

func (r *memRun) count(k edge, _ *mergeBuf) (int64, error) {
	return int64(len(within(r.c.keys[:r.c.n], r.c.wide, k, k.next())) / r.words()), nil
}

// selfLoops is one edge from each node to itself.
type selfLoops struct {
	nodes int64
	g     int
}

func (e *edgeSorter) selfLoops(nodes int64) selfLoops {
	return selfLoops{nodes, max(packKeys, min(maxGroup, e.words/64))}
}

func (s selfLoops) group() int  { return s.g }
func (s selfLoops) keys() int64 { return s.nodes }

func (s selfLoops) starts(fn func(edge, int)) {
	for v := int64(0); v < s.nodes; v += int64(s.g) {
		fn(edge{uint64(v), uint64(v)}, int(min(int64(s.g), s.nodes-v)))
	}
}

func (s selfLoops) read(dst []uint64, lo, hi edge, wide bool, _ *mergeBuf) ([]uint64, error) {
	v := lo.dst
	if lo.src > lo.dst {
		v++
	}
	for ; v < uint64(s.nodes) && (edge{v, v}).less(hi); v++ {
		if wide {
			dst = append(dst, v, v)
		} else {
			dst = append(dst, v<<32|v)
		}
	}
	return dst, nil
}

func (s selfLoops) count(k edge, _ *mergeBuf) (int64, error) {
	if k.dst == k.src && k.dst < uint64(s.nodes) {
		return 1, nil
	}
	return 0, nil
}

// keyRange is lo <= key < hi; heavy if lo is the only key in it, so often that it need not fit.
type keyRange struct {
	lo, hi edge
	heavy  bool
}

type merger struct {
	e       *edgeSorter
	sources []keySource
	wide    bool
	bufs    chan *mergeBuf
	target  int // keys of groups that begin in a range
	slack   int // keys of groups that begin before it
}

// mergeRoom is how many keys a range may have, and how many of them can be of groups that begin
// before it. ok is false when the sources are too many, or too coarse, to be merged at once.
// held says that the chunks' keys stay.
func (e *edgeSorter) mergeRoom(sources []keySource, wide, held bool) (room, slack int, ok bool) {
	room = e.words // words of one half
	if held {
		room /= 2
	}
	if wide {
		room /= wideKeyWords
	}
	for _, s := range sources {
		slack += s.group()
	}
	room = min(room, 2*slack+mergeKeys)
	return room, slack, slack <= room/2
}

// newMerger shares the chunks' memory out among ranges. It returns nil when one merge does not fit.
func (e *edgeSorter) newMerger(sources []keySource, wide, held bool) *merger {
	room, slack, ok := e.mergeRoom(sources, wide, held)
	if !ok {
		return nil
	}
	m := &merger{e: e, sources: sources, wide: wide, bufs: make(chan *mergeBuf, e.chunks), target: room - slack, slack: slack}
	words := room
	if wide {
		words *= wideKeyWords
	}
	all := unsafe.Slice((*uint64)(unsafe.Pointer(&e.mem[0])), len(e.mem)/8)
	for range e.chunks {
		keys, tmp := all[:e.words], all[e.words:2*e.words]
		all = all[2*e.words:]
		b := &mergeBuf{raw: make([]byte, rawRoom), dec: make([]uint64, wideKeyWords*maxGroup)}
		if held {
			b.a, b.b = tmp[:words:words], tmp[words:2*words:2*words]
		} else {
			b.a, b.b = keys[:words:words], tmp[:words:words]
		}
		m.bufs <- b
	}
	return m
}

// ranges cuts all keys from lo on.
func (m *merger) ranges(lo edge) []keyRange {
	type start struct {
		first edge
		keys  int
	}
	var all []start
	for _, s := range m.sources {
		s.starts(func(first edge, keys int) {
			if !first.less(lo) {
				all = append(all, start{first, keys})
			}
		})
	}
	slices.SortFunc(all, func(a, b start) int {
		switch {
		case a.first.less(b.first):
			return -1
		case b.first.less(a.first):
			return 1
		}
		return 0
	})
	var out []keyRange
	cut := func(at edge, heavy bool) {
		if lo.less(at) {
			out = append(out, keyRange{lo, at, heavy})
			lo = at
		}
	}
	have := 0
	for i := 0; i < len(all); {
		k, n := all[i].first, 0
		for ; i < len(all) && all[i].first == k; i++ {
			n += all[i].keys
		}
		if n > m.target/2 {
			cut(k, false)
			cut(k.next(), true)
			have = min(n, m.slack) // of groups that begin with it and end with other keys
			continue
		}
		if have+n > m.target {
			cut(k, false)
			have = 0
		}
		have += n
	}
	cut(lastEdge, false)
	return out
}

// merged is a range in order.
type merged struct {
	keyRange
	buf    *mergeBuf
	keys   []uint64 // words
	times  int64    // of a heavy key
	read   int64    // keys before repeated ones were dropped
	idx    []byte   // sources of narrow keys, as uint32
	starts []uint32 // where another destination begins in keys
	err    error
}

func (m *merger) merge(ctx context.Context, r keyRange, b *mergeBuf, csc bool) (out *merged) {
	out = &merged{keyRange: r, buf: b}
	if out.err = ctx.Err(); out.err != nil {
		return out
	}
	if r.heavy {
		for _, s := range m.sources {
			n, err := s.count(r.lo, b)
			if err != nil {
				out.err = err
				return out
			}
			out.times += n
		}
		out.read = out.times
		if m.e.rules.dedup {
			out.times = min(out.times, 1)
		}
		return out
	}
	keys := b.a[:0]
	for _, s := range m.sources {
		if keys, out.err = s.read(keys, r.lo, r.hi, m.wide, b); out.err != nil {
			return out
		}
	}
	if len(keys) > 0 && &keys[0] != &b.a[0] {
		out.err = fmt.Errorf("merge of edges: %d keys in a range for %d", len(keys), len(b.a)) // a bug: ranges are cut to fit
		return out
	}
	if len(m.sources) > 1 {
		sortAny(keys, b.b[:len(keys)], m.wide)
	}
	out.read = int64(len(keys))
	if m.wide {
		out.read /= wideKeyWords
	}
	if m.e.rules.dedup {
		keys = compactAny(keys, m.wide)
	}
	out.keys = keys
	if !csc || m.wide || len(keys) == 0 {
		return out
	}
	n := len(keys)
	half := wordBytes(b.b)
	out.idx = half[:4*n]
	idx := unsafe.Slice((*uint32)(unsafe.Pointer(&half[0])), n)
	starts := unsafe.Slice((*uint32)(unsafe.Pointer(&half[4*n])), n)
	last, at := ^uint64(0), 0
	for i, k := range keys {
		idx[i] = uint32(k)
		starts[at] = uint32(i)
		if k>>32 != last {
			last = k >> 32
			at++
		}
	}
	out.starts = starts[:at]
	return out
}

// each calls fn with every range in order.
func (m *merger) each(ctx context.Context, ranges []keyRange, csc bool, fn func(*merged) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := make(chan chan *merged, m.e.chunks)
	go func() {
		defer close(queue)
		for _, r := range ranges {
			select {
			case b := <-m.bufs:
				res := make(chan *merged, 1)
				queue <- res // never full: there are as many buffers
				go func() { res <- m.merge(ctx, r, b, csc) }()
			case <-ctx.Done():
				return
			}
		}
	}()
	n := 0
	var err error
	for res := range queue {
		out := <-res
		if err == nil {
			if err = out.err; err == nil {
				err = fn(out)
			}
			if err != nil {
				cancel()
			}
		}
		m.bufs <- out.buf
		n++
	}
	if err == nil && n < len(ranges) {
		err = ctx.Err()
	}
	return err
}

func wordBytes(a []uint64) []byte {
	if len(a) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&a[0])), 8*len(a))
}

func (e *edgeSorter) openRuns(runs []run) (sources []keySource, closeAll func() error, err error) {
	var files []*os.File
	closeAll = func() error {
		var err error
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return err
	}
	for _, r := range runs {
		path := e.s.runPath(r.ID)
		f, err := os.Open(path)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll())
		}
		files = append(files, f)
		if r.index == nil && r.Keys > 0 {
			if r.index, err = readIndex(f, r); err != nil {
				return nil, nil, errors.Join(fmt.Errorf("%s: %w; run the import again with --restart", path, err), closeAll())
			}
		}
		sources = append(sources, &fileRun{r, f, path})
	}
	return sources, closeAll, nil
}

// fewer merges runs into larger ones until the rest fits one merge.
func (e *edgeSorter) fewer(ctx context.Context, wide bool, p Progress) error {
	for {
		n := len(e.runs)
		fits := func(n int) bool {
			var s []keySource
			for _, r := range e.runs[:n] {
				s = append(s, &fileRun{run: r})
			}
			if e.rules.addSelf && n == len(e.runs) {
				s = append(s, e.selfLoops(0))
			}
			_, _, ok := e.mergeRoom(s, wide, false)
			return ok
		}
		if n < 2 || fits(n) {
			return nil
		}
		n = max(sort.Search(n, func(i int) bool { return !fits(i + 1) }), 2)
		if err := e.mergeRuns(ctx, e.runs[:n], wide, p); err != nil {
			return err
		}
	}
}

func (e *edgeSorter) mergeRuns(ctx context.Context, runs []run, wide bool, p Progress) (err error) {
	sources, closeAll, err := e.openRuns(runs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	m := e.newMerger(sources, wide, false)
	if m == nil {
		return fmt.Errorf("merge of edges: memory for %d runs of groups of %d keys is too small", len(runs), runs[0].Group)
	}
	sum := run{Wide: wide, MaxID: -1}
	total := int64(0)
	for _, r := range runs {
		sum.Taken += r.Taken
		sum.Self += r.Self
		sum.Kept += r.Kept
		sum.Extra += r.Extra
		sum.MaxID = max(sum.MaxID, r.MaxID)
		total += r.Keys
	}
	w, err := e.newRun(sum, runs[0].Group)
	if err != nil {
		return err
	}
	done := int64(0)
	err = m.each(ctx, m.ranges(edge{}), false, func(out *merged) error {
		done += out.read
		p.report("merge", done, total)
		return w.append(out)
	})
	if err == nil {
		err = w.last()
	}
	if err != nil {
		return errors.Join(err, w.f.discard())
	}
	r, err := w.close()
	if err != nil {
		return err
	}
	var gone []int
	for _, old := range runs {
		gone = append(gone, old.ID)
	}
	if j := e.s.journal; j != nil {
		if err := j.ran(r, gone); err != nil {
			return err
		}
	}
	err = e.removeRuns(runs)
	e.runs = append(append([]run(nil), e.runs[len(runs):]...), r)
	return err
}

// append adds a range to a run, in whole groups.
func (w *runWriter) append(out *merged) error {
	words := 1
	if w.r.Wide {
		words = wideKeyWords
	}
	group := w.r.Group * words
	add := func(keys []uint64) error {
		if len(w.held) > 0 {
			n := min(group-len(w.held), len(keys))
			w.held = append(w.held, keys[:n]...)
			keys = keys[n:]
			if len(w.held) < group {
				return nil
			}
			if err := w.put(w.held, nil); err != nil {
				return err
			}
			w.held = w.held[:0]
		}
		whole := len(keys) / group * group
		w.held = append(w.held, keys[whole:]...)
		return w.put(keys[:whole], nil)
	}
	if !out.heavy {
		return add(out.keys)
	}
	part := make([]uint64, 0, group)
	for len(part) < group {
		if w.r.Wide {
			part = append(part, out.lo.dst, out.lo.src)
		} else {
			part = append(part, narrowKey(out.lo))
		}
	}
	for left := out.times; left > 0; {
		n := min(left, int64(w.r.Group))
		if err := add(part[:n*int64(words)]); err != nil {
			return err
		}
		left -= n
	}
	return nil
}

func (w *runWriter) last() error {
	err := w.put(w.held, nil)
	w.held = nil
	return err
}

const indexEntry = 24

func encodeIndex(index []groupStart) []byte {
	b := make([]byte, 0, len(index)*indexEntry+4)
	for _, g := range index {
		b = binary.LittleEndian.AppendUint64(b, g.first.dst)
		b = binary.LittleEndian.AppendUint64(b, g.first.src)
		b = binary.LittleEndian.AppendUint64(b, uint64(g.at))
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func readIndex(f *os.File, r run) ([]groupStart, error) {
	n := (r.Keys + int64(r.Group) - 1) / int64(r.Group)
	b := make([]byte, n*indexEntry+4)
	if _, err := f.ReadAt(b, r.Bytes); err != nil {
		return nil, err
	}
	end := len(b) - 4
	if crc32.Checksum(b[:end], castagnoli) != binary.LittleEndian.Uint32(b[end:]) {
		return nil, errDamagedRun
	}
	index := make([]groupStart, n)
	for i := range index {
		e := b[i*indexEntry:]
		index[i] = groupStart{edge{binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint64(e[8:])}, int64(binary.LittleEndian.Uint64(e[16:]))}
	}
	return index, nil
}

// cscWriter writes indptr.npy and indices.npy from edges that come in (dst, src) order.
type cscWriter struct {
	indptr, indices *arrayOut
	nodes           int64
	wide            bool
	next            int64 // nodes whose start is written
	edges           int64
	idx, ptr        []byte
}

// wideFrom is the number of nodes from which ids need 64 bits; a variable for tests.
var wideFrom int64 = 1 << 32

func (s *staging) csc(nodes int64) (*cscWriter, error) { return s.cscFrom(nodes, nil) }

// cscMark is a cscWriter on the disk.
type cscMark struct {
	Indptr  arrayMark `json:"indptr"`
	Indices arrayMark `json:"indices"`
	Next    int64     `json:"next"`
	Edges   int64     `json:"edges"`
}

// cscFrom goes on at a mark, or begins where that is nil.
func (s *staging) cscFrom(nodes int64, at *cscMark) (*cscWriter, error) {
	w := &cscWriter{nodes: nodes, wide: nodes > wideFrom}
	dt := npy.Uint32
	if w.wide {
		dt = npy.Int64
	}
	var ptr, idx *arrayMark
	if at != nil {
		ptr, idx, w.next, w.edges = &at.Indptr, &at.Indices, at.Next, at.Edges
	}
	var err error
	if w.indptr, err = s.arrayFrom("indptr", npy.Int64, 0, ptr); err != nil {
		return nil, err
	}
	if w.indices, err = s.arrayFrom("indices", dt, 0, idx); err != nil {
		return nil, errors.Join(err, w.indptr.discard())
	}
	return w, nil
}

func (w *cscWriter) put(x edge) error {
	if err := w.startUpTo(int64(x.dst), w.edges); err != nil {
		return err
	}
	if w.wide {
		w.idx = binary.LittleEndian.AppendUint64(w.idx, x.src)
	} else {
		w.idx = binary.LittleEndian.AppendUint32(w.idx, uint32(x.src))
	}
	w.edges++
	if len(w.idx) >= 64<<10 {
		return w.flush()
	}
	return nil
}

// putMerged writes a range.
func (w *cscWriter) putMerged(m *merged, wideKeys bool) error {
	switch {
	case m.heavy:
		for range m.times {
			if err := w.put(m.lo); err != nil {
				return err
			}
		}
		return nil
	case wideKeys:
		for _, x := range pairs(m.keys) {
			if err := w.put(x); err != nil {
				return err
			}
		}
		return nil
	case w.wide:
		for _, k := range m.keys {
			if err := w.put(edgeOf(k)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := w.flush(); err != nil {
		return err
	}
	for _, at := range m.starts {
		if err := w.startUpTo(int64(m.keys[at]>>32), w.edges+int64(at)); err != nil {
			return err
		}
	}
	w.edges += int64(len(m.keys))
	_, err := w.indices.Write(m.idx)
	return err
}

func (w *cscWriter) flush() error {
	_, err := w.indices.Write(w.idx)
	w.idx = w.idx[:0]
	return err
}

// startUpTo writes the offsets of all nodes up to v, whose edges begin at edge number at.
func (w *cscWriter) startUpTo(v, at int64) error {
	for ; w.next <= v; w.next++ {
		w.ptr = binary.LittleEndian.AppendUint64(w.ptr, uint64(at))
		if len(w.ptr) >= 64<<10 {
			if err := w.flushPtr(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *cscWriter) flushPtr() error {
	_, err := w.indptr.Write(w.ptr)
	w.ptr = w.ptr[:0]
	return err
}

// mark puts all that was written on the disk.
func (w *cscWriter) mark() (m cscMark, err error) {
	if err := errors.Join(w.flush(), w.flushPtr()); err != nil {
		return m, err
	}
	m.Next, m.Edges = w.next, w.edges
	if m.Indptr, err = w.indptr.mark(); err == nil {
		m.Indices, err = w.indices.mark()
	}
	return m, err
}

func (w *cscWriter) close() error {
	err := w.startUpTo(w.nodes, w.edges)
	if err == nil {
		err = errors.Join(w.flushPtr(), w.flush())
	}
	if err != nil {
		return errors.Join(err, w.discard())
	}
	return errors.Join(w.indptr.close(), w.indices.close())
}

func (w *cscWriter) discard() error { return errors.Join(w.indptr.discard(), w.indices.discard()) }

// writeCSC merges what the sorter has into the topology files. nodes 0 takes the largest id, plus 1.
func (s *staging) writeCSC(ctx context.Context, e *edgeSorter, nodes int64, p Progress) (c edgeCounts, err error) {
	held, err := e.finish(false)
	if err != nil {
		return c, err
	}
	if nodes == 0 {
		nodes = e.maxID + 1
	}
	if e.maxID >= nodes {
		return c, fmt.Errorf("edges of %d nodes with the id %d: the reader should have refused it", nodes, e.maxID)
	}
	wide := e.wide.Load() || e.rules.addSelf && nodes > math.MaxUint32
	var sources []keySource
	for _, c := range held {
		if c.n > 0 {
			sources = append(sources, &memRun{c, max(packKeys, c.n/4096)})
		}
	}
	addSelf := func() {
		if e.rules.addSelf {
			sources = append(sources, e.selfLoops(nodes))
		}
	}
	addSelf()
	var m *merger
	if len(sources) > 0 && len(e.runs) == 0 {
		if m = e.newMerger(sources, wide, true); m == nil { // only where the budget is tiny
			e.done, e.partial = edgeCounts{}, held
			if _, err := e.finish(true); err != nil {
				return c, err
			}
		}
	}
	if len(e.runs) > 0 {
		if err := e.fewer(ctx, wide, p); err != nil {
			return c, err
		}
		var closeAll func() error
		if sources, closeAll, err = e.openRuns(e.runs); err != nil {
			return c, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		addSelf()
		m = e.newMerger(sources, wide, false)
	}
	total := int64(0)
	for _, k := range sources {
		total += k.keys()
	}
	var at *cscMark
	from, done := edge{}, int64(0)
	if j := s.journal; j != nil && j.merged != nil {
		at, from, done = &j.merged.CSC, j.merged.from(), j.merged.Done
	}
	w, err := s.cscFrom(nodes, at)
	if err != nil {
		return c, err
	}
	p.report("topology", done, total)
	if m != nil {
		t := newMarkTimer()
		err = m.each(ctx, m.ranges(from), true, func(out *merged) error {
			if err := w.putMerged(out, wide); err != nil {
				return err
			}
			done += out.read
			p.report("topology", done, total)
			if j := s.journal; j != nil && len(e.runs) > 0 && t.due() {
				return t.mark(func() error {
					csc, err := w.mark()
					if err != nil {
						return err
					}
					return j.mergedTo(out.hi, done, total, csc)
				})
			}
			return ctx.Err()
		})
	}
	if err != nil {
		return c, errors.Join(err, w.discard())
	}
	c = e.done
	c.Stored, c.Nodes = w.edges, nodes
	if e.rules.addSelf {
		c.Added = nodes
	}
	if e.rules.none {
		c = edgeCounts{Taken: c.Taken, Nodes: nodes}
		c.Stored = w.edges
	} else {
		c.Duplicates = c.Taken + c.Opposite + c.Added - c.Self - c.Stored
	}
	if err := w.close(); err != nil {
		return c, err
	}
	if j := s.journal; j != nil {
		if err := j.topologyDone(c, s); err != nil {
			return c, err
		}
	}
	return c, e.removeRuns(e.runs)
}

// markTimer spaces marks so that waiting for the disk stays a small part of the time.
type markTimer struct {
	last  time.Time
	every time.Duration
}

// syncEvery is the least time between two marks within a file; a variable for tests.
var syncEvery = 10 * time.Second

func newMarkTimer() *markTimer { return &markTimer{last: time.Now(), every: syncEvery} }

func (t *markTimer) due() bool { return time.Since(t.last) >= t.every }

func (t *markTimer) mark(fn func() error) error {
	from := time.Now()
	err := fn()
	t.last = time.Now()
	if syncEvery > 0 {
		t.every = max(syncEvery, 10*t.last.Sub(from))
	}
	return err
}

// sortOptions are for sortEdges.
type sortOptions struct {
	Memory   int64 // 0: DefaultMemory, or half of what is available
	Nodes    int64
	Rules    edgeRules
	Progress Progress
}

// sortEdges reads all edges of a source and writes the topology.
func (s *staging) sortEdges(ctx context.Context, src edgeSource, o sortOptions) (c edgeCounts, err error) {
	e, err := newEdgeSorter(s, memoryBudget(o.Memory), o.Rules)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	if err := e.read(ctx, src, o.Progress); err != nil {
		return c, err
	}
	return s.writeCSC(ctx, e, o.Nodes, o.Progress)
}
