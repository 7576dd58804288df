package edges

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/work"
)

// Runs are merged by ranges of keys: by the runs' indexes all keys are cut into ranges of
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
	// starts calls fn with the first key of each group, and its size.
	starts(fn func(first Edge, keys int))
	groupKeys() int // of a group at most
	allKeys() int64
	// read appends the keys with lo <= key < hi to dst, which has the room.
	read(dst []uint64, lo, hi Edge, b *mergeBuf) ([]uint64, error)
	// count counts a key.
	count(k Edge, b *mergeBuf) (int64, error)
}

// mergeBuf holds what one range needs.
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

func (r *fileRun) groupKeys() int { return r.group }
func (r *fileRun) allKeys() int64 { return r.keys }

func (r *fileRun) size(g int) int {
	return int(min(int64(r.group), r.keys-int64(g)*int64(r.group)))
}

func (r *fileRun) starts(fn func(Edge, int)) {
	for g := range r.index {
		fn(r.index[g].first, r.size(g))
	}
}

// end returns the offset at which group g begins, or the last one ends.
func (r *fileRun) end(g int) int64 {
	if g == len(r.index) {
		return r.bytes
	}
	return r.index[g].offset
}

// groups decodes all groups that can hold keys of lo <= key < hi.
func (r *fileRun) groups(lo, hi Edge, b *mergeBuf, fn func(keys []uint64)) error {
	// Keys like lo may end the group before the first one that begins with lo.
	g := max(sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(lo) })-1, 0)
	to := sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(hi) })
	for g < to {
		upTo := g + 1
		for upTo < to && r.end(upTo+1)-r.end(g)+8 <= int64(len(b.raw)) {
			upTo++
		}
		n := int(r.end(upTo) - r.end(g))
		if n+8 > len(b.raw) {
			return errs.Errorf("%s: %w; run the import again with {restart}", r.path, errDamagedRun)
		}
		if _, err := r.f.ReadAt(b.raw[:n], r.end(g)); err != nil {
			return errs.Errorf("read back %s: %w; run the import again with {restart}", r.path, err)
		}
		clear(b.raw[n : n+8])
		for raw := b.raw[:n+8]; g < upTo; g++ {
			size := r.size(g)
			used, err := decodeGroup(b.dec[:size], raw, size)
			if err != nil {
				return errs.Errorf("%s, byte %d: %w; run the import again with {restart}", r.path,
					r.end(g), err)
			}
			raw = raw[used:]
			fn(b.dec[:size])
		}
	}
	return nil
}

func (r *fileRun) read(dst []uint64, lo, hi Edge, b *mergeBuf) ([]uint64, error) {
	err := r.groups(lo, hi, b, func(keys []uint64) { dst = append(dst, within(keys, lo, hi)...) })
	return dst, err
}

func (r *fileRun) count(k Edge, b *mergeBuf) (n int64, err error) {
	err = r.groups(k, k.next(), b, func(keys []uint64) {
		n += int64(len(within(keys, k, k.next())))
	})
	return n, err
}

// memRun is a sorted chunk that stayed in memory.
type memRun struct {
	c *chunk
	g int
}

func (r *memRun) groupKeys() int { return r.g }
func (r *memRun) allKeys() int64 { return int64(r.c.n) }

func (r *memRun) starts(fn func(Edge, int)) {
	for i := 0; i < r.c.n; i += r.g {
		fn(edgeOf(r.c.keys[i]), min(r.g, r.c.n-i))
	}
}

func (r *memRun) read(dst []uint64, lo, hi Edge, _ *mergeBuf) ([]uint64, error) {
	return append(dst, within(r.c.keys[:r.c.n], lo, hi)...), nil
}

func (r *memRun) count(k Edge, _ *mergeBuf) (int64, error) {
	return int64(len(within(r.c.keys[:r.c.n], k, k.next()))), nil
}

// selfLoops is one edge from each node to itself.
type selfLoops struct {
	nodes int64
	g     int
}

func (e *Sorter) selfLoops(nodes int64) selfLoops {
	return selfLoops{nodes, max(packKeys, min(maxGroup, e.words/64))}
}

func (s selfLoops) groupKeys() int { return s.g }
func (s selfLoops) allKeys() int64 { return s.nodes }

func (s selfLoops) starts(fn func(Edge, int)) {
	for v := int64(0); v < s.nodes; v += int64(s.g) {
		fn(Edge{uint64(v), uint64(v)}, int(min(int64(s.g), s.nodes-v)))
	}
}

func (s selfLoops) read(dst []uint64, lo, hi Edge, _ *mergeBuf) ([]uint64, error) {
	v := lo.Dst
	if lo.Src > lo.Dst {
		v++
	}
	for ; v < uint64(s.nodes) && (Edge{v, v}).less(hi); v++ {
		dst = append(dst, v<<32|v)
	}
	return dst, nil
}

func (s selfLoops) count(k Edge, _ *mergeBuf) (int64, error) {
	if k.Dst == k.Src && k.Dst < uint64(s.nodes) {
		return 1, nil
	}
	return 0, nil
}

// keyRange is lo <= key < hi; heavy if lo is the only key in it, so often that it need not fit.
type keyRange struct {
	lo, hi Edge
	heavy  bool
}

type merger struct {
	e       *Sorter
	sources []keySource
	bufs    chan *mergeBuf
	target  int // keys of groups that begin in a range
	slack   int // keys of groups that begin before it
}

// mergeRoom returns how many keys a range may have, and how many of them can be of groups that
// begin before it. ok is false when the sources are too many, or too coarse, to be merged at once.
// held says that the chunks' keys stay.
func (e *Sorter) mergeRoom(sources []keySource, held bool) (room, slack int, ok bool) {
	room = e.words // keys of one half
	if held {
		room /= 2
	}
	for _, s := range sources {
		slack += s.groupKeys()
	}
	room = min(room, 2*slack+mergeKeys)
	return room, slack, slack <= room/2
}

// newMerger shares the chunks' memory out among ranges. It returns nil when one merge does not fit.
func (e *Sorter) newMerger(sources []keySource, held bool) *merger {
	room, slack, ok := e.mergeRoom(sources, held)
	if !ok {
		return nil
	}
	m := &merger{e: e, sources: sources, bufs: make(chan *mergeBuf, e.chunks),
		target: room - slack, slack: slack}
	all := unsafe.Slice((*uint64)(unsafe.Pointer(&e.mem[0])), len(e.mem)/8)
	for range e.chunks {
		keys, tmp := all[:e.words], all[e.words:2*e.words]
		all = all[2*e.words:]
		b := &mergeBuf{raw: make([]byte, rawRoom), dec: make([]uint64, maxGroup)}
		if held {
			b.a, b.b = tmp[:room:room], tmp[room:2*room:2*room]
		} else {
			b.a, b.b = keys[:room:room], tmp[:room:room]
		}
		m.bufs <- b
	}
	return m
}

// ranges cuts all keys.
func (m *merger) ranges() []keyRange {
	type start struct {
		first Edge
		keys  int
	}
	var all []start
	for _, s := range m.sources {
		s.starts(func(first Edge, keys int) { all = append(all, start{first, keys}) })
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
	var lo Edge
	cut := func(end Edge, heavy bool) {
		if lo.less(end) {
			out = append(out, keyRange{lo, end, heavy})
			lo = end
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
	keys   []uint64
	times  int64    // of a heavy key
	read   int64    // keys before repeated ones were dropped
	again  int64    // repeated keys that were not; only of a topology
	idx    []byte   // sources of the keys, as uint32
	starts []uint32 // where another destination begins in keys
	err    error
}

func (m *merger) merge(ctx context.Context, r keyRange, b *mergeBuf, csc bool) (out *merged) {
	out = &merged{keyRange: r, buf: b}
	if out.err = ctx.Err(); out.err != nil {
		return out
	}
	if r.heavy {
		out.err = m.count(out, b)
		return out
	}
	keys := b.a[:0]
	for _, s := range m.sources {
		if keys, out.err = s.read(keys, r.lo, r.hi, b); out.err != nil {
			return out
		}
	}
	if len(keys) > 0 && &keys[0] != &b.a[0] {
		// a bug: ranges are cut to fit
		out.err = fmt.Errorf("merge of edges: %d keys in a range for %d", len(keys), len(b.a))
		return out
	}
	if len(m.sources) > 1 {
		sortKeys(keys, b.b[:len(keys)])
	}
	out.read = int64(len(keys))
	if m.e.rules.Dedup {
		keys = slices.Compact(keys)
	}
	out.keys = keys
	if csc && len(keys) > 0 {
		out.divide()
	}
	return out
}

// count counts a heavy key.
func (m *merger) count(out *merged, b *mergeBuf) error {
	for _, s := range m.sources {
		n, err := s.count(out.lo, b)
		if err != nil {
			return err
		}
		out.times += n
	}
	out.read = out.times
	if m.e.rules.Dedup {
		out.times = min(out.times, 1)
	}
	out.again = max(out.times-1, 0)
	return nil
}

// divide takes keys apart into sources and the starts of destinations.
func (out *merged) divide() {
	n := len(out.keys)
	half := wordBytes(out.buf.b)
	out.idx = half[:4*n]
	idx := unsafe.Slice((*uint32)(unsafe.Pointer(&half[0])), n)
	starts := unsafe.Slice((*uint32)(unsafe.Pointer(&half[4*n])), n)
	last, count, again := ^uint64(0), 0, int64(0)
	for i, k := range out.keys {
		idx[i] = uint32(k)
		starts[count] = uint32(i)
		if k>>32 != last>>32 || i == 0 {
			count++
		}
		if k == last {
			again++
		}
		last = k
	}
	out.again, out.starts = again, starts[:count]
}

// each calls fn with every range in order.
func (m *merger) each(ctx context.Context, ranges []keyRange, csc bool,
	fn func(*merged) error) error {
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

func (e *Sorter) openRuns(runs []run) (sources []keySource, closeAll func() error, err error) {
	var files []*os.File
	closeAll = func() error {
		var err error
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return err
	}
	for _, r := range runs {
		path := e.s.Path(runName(r.id))
		f, err := os.Open(path)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll())
		}
		files = append(files, f)
		sources = append(sources, &fileRun{r, f, path})
	}
	return sources, closeAll, nil
}

// fewer merges runs into larger ones until the rest fits one merge.
func (e *Sorter) fewer(ctx context.Context, p work.Progress) error {
	for {
		n := len(e.runs)
		fits := func(n int) bool {
			var s []keySource
			for _, r := range e.runs[:n] {
				s = append(s, &fileRun{run: r})
			}
			if e.rules.AddSelf && n == len(e.runs) {
				s = append(s, e.selfLoops(0))
			}
			_, _, ok := e.mergeRoom(s, false)
			return ok
		}
		if n < 2 || fits(n) {
			return nil
		}
		n = max(sort.Search(n, func(i int) bool { return !fits(i + 1) }), 2)
		if err := e.mergeRuns(ctx, e.runs[:n], p); err != nil {
			return err
		}
	}
}

func (e *Sorter) mergeRuns(ctx context.Context, runs []run, p work.Progress) (err error) {
	sources, closeAll, err := e.openRuns(runs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	m := e.newMerger(sources, false)
	if m == nil {
		return fmt.Errorf("merge of edges: memory for %d runs of groups of %d keys is too small",
			len(runs), runs[0].group)
	}
	total := int64(0)
	for _, r := range runs {
		total += r.keys
	}
	w, err := e.newRun(runs[0].group)
	if err != nil {
		return err
	}
	done := int64(0)
	err = m.each(ctx, m.ranges(), false, func(out *merged) error {
		done += out.read
		p.Report("merge", done, total)
		return w.append(out)
	})
	if err == nil {
		err = w.last()
	}
	if err != nil {
		return errors.Join(err, w.f.Discard())
	}
	r, err := w.close()
	if err != nil {
		return err
	}
	err = e.removeRuns(runs)
	e.runs = append(slices.Clone(e.runs[len(runs):]), r)
	return err
}

// append adds a range to a run, in whole groups.
func (w *runWriter) append(out *merged) error {
	group := w.r.group
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
		part = append(part, keyOf(out.lo))
	}
	for left := out.times; left > 0; {
		n := min(left, int64(group))
		if err := add(part[:n]); err != nil {
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
