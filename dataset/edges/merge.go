package edges

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
	// starts tells the first key of each group, and its size.
	starts(fn func(first Edge, keys int))
	group() int // keys of a group at most
	keys() int64
	// read appends the keys with lo <= key < hi to dst, which has the room, as words of the given
	// width.
	read(dst []uint64, lo, hi Edge, wide bool, b *mergeBuf) ([]uint64, error)
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
	Run
	f    *os.File
	path string
}

func (r *fileRun) group() int  { return r.Group }
func (r *fileRun) keys() int64 { return r.Keys }

func (r *fileRun) size(g int) int {
	return int(min(int64(r.Group), r.Keys-int64(g)*int64(r.Group)))
}

func (r *fileRun) starts(fn func(Edge, int)) {
	for g := range r.index {
		fn(r.index[g].first, r.size(g))
	}
}

// end returns the offset at which group g begins, or the last one ends.
func (r *fileRun) end(g int) int64 {
	if g == len(r.index) {
		return r.Bytes
	}
	return r.index[g].offset
}

// groups decodes all groups that can hold keys of lo <= key < hi.
func (r *fileRun) groups(lo, hi Edge, b *mergeBuf, fn func(keys []uint64)) error {
	// Keys like lo may end the group before the first one that begins with lo.
	g := max(sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(lo) })-1, 0)
	to := sort.Search(len(r.index), func(i int) bool { return !r.index[i].first.less(hi) })
	words := wordsOf(r.Wide)
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
			used, err := decodeGroup(b.dec[:size*words], raw, size, r.Wide)
			if err != nil {
				return errs.Errorf("%s, byte %d: %w; run the import again with {restart}", r.path,
					r.end(g), err)
			}
			raw = raw[used:]
			fn(b.dec[:size*words])
		}
	}
	return nil
}

func (r *fileRun) read(dst []uint64, lo, hi Edge, wide bool, b *mergeBuf) ([]uint64, error) {
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

func (r *fileRun) count(k Edge, b *mergeBuf) (n int64, err error) {
	err = r.groups(k, k.next(), b, func(keys []uint64) {
		n += int64(len(within(keys, r.Wide, k, k.next())) / wordsOf(r.Wide))
	})
	return n, err
}

// memRun is a sorted chunk that stayed in memory.
type memRun struct {
	c *chunk
	g int
}

func (r *memRun) words() int { return wordsOf(r.c.wide) }

func (r *memRun) group() int  { return r.g }
func (r *memRun) keys() int64 { return int64(r.c.n / r.words()) }

func (r *memRun) starts(fn func(Edge, int)) {
	w := r.words()
	for i := 0; i < r.c.n; i += r.g * w {
		fn(firstOf(r.c.keys[i:], r.c.wide), min(r.g, (r.c.n-i)/w))
	}
}

func (r *memRun) read(dst []uint64, lo, hi Edge, wide bool, _ *mergeBuf) ([]uint64, error) {
	keys := within(r.c.keys[:r.c.n], r.c.wide, lo, hi)
	if wide == r.c.wide {
		return append(dst, keys...), nil
	}
	for _, k := range keys {
		dst = append(dst, k>>32, k&math.MaxUint32)
	}
	return dst, nil
}

func (r *memRun) count(k Edge, _ *mergeBuf) (int64, error) {
	return int64(len(within(r.c.keys[:r.c.n], r.c.wide, k, k.next())) / r.words()), nil
}

// selfLoops is one edge from each node to itself.
type selfLoops struct {
	nodes int64
	g     int
}

func (e *Sorter) selfLoops(nodes int64) selfLoops {
	return selfLoops{nodes, max(packKeys, min(maxGroup, e.words/64))}
}

func (s selfLoops) group() int  { return s.g }
func (s selfLoops) keys() int64 { return s.nodes }

func (s selfLoops) starts(fn func(Edge, int)) {
	for v := int64(0); v < s.nodes; v += int64(s.g) {
		fn(Edge{uint64(v), uint64(v)}, int(min(int64(s.g), s.nodes-v)))
	}
}

func (s selfLoops) read(dst []uint64, lo, hi Edge, wide bool, _ *mergeBuf) ([]uint64, error) {
	v := lo.Dst
	if lo.Src > lo.Dst {
		v++
	}
	for ; v < uint64(s.nodes) && (Edge{v, v}).less(hi); v++ {
		if wide {
			dst = append(dst, v, v)
		} else {
			dst = append(dst, v<<32|v)
		}
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
	wide    bool
	bufs    chan *mergeBuf
	target  int // keys of groups that begin in a range
	slack   int // keys of groups that begin before it
}

// mergeRoom returns how many keys a range may have, and how many of them can be of groups that
// begin before it. ok is false when the sources are too many, or too coarse, to be merged at once.
// held says that the chunks' keys stay.
func (e *Sorter) mergeRoom(sources []keySource, wide, held bool) (room, slack int, ok bool) {
	room = e.words // words of one half
	if held {
		room /= 2
	}
	room /= wordsOf(wide)
	for _, s := range sources {
		slack += s.group()
	}
	room = min(room, 2*slack+mergeKeys)
	return room, slack, slack <= room/2
}

// newMerger shares the chunks' memory out among ranges. It returns nil when one merge does not fit.
func (e *Sorter) newMerger(sources []keySource, wide, held bool) *merger {
	room, slack, ok := e.mergeRoom(sources, wide, held)
	if !ok {
		return nil
	}
	m := &merger{e: e, sources: sources, wide: wide, bufs: make(chan *mergeBuf, e.chunks),
		target: room - slack, slack: slack}
	words := room * wordsOf(wide)
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
func (m *merger) ranges(lo Edge) []keyRange {
	type start struct {
		first Edge
		keys  int
	}
	var all []start
	for _, s := range m.sources {
		s.starts(func(first Edge, keys int) {
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
	keys   []uint64 // words
	times  int64    // of a heavy key
	read   int64    // keys before repeated ones were dropped
	again  int64    // repeated keys that were not; only of a topology
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
		out.err = m.count(out, b)
		return out
	}
	keys := b.a[:0]
	for _, s := range m.sources {
		if keys, out.err = s.read(keys, r.lo, r.hi, m.wide, b); out.err != nil {
			return out
		}
	}
	if len(keys) > 0 && &keys[0] != &b.a[0] {
		// a bug: ranges are cut to fit
		out.err = fmt.Errorf("merge of edges: %d keys in a range for %d", len(keys), len(b.a))
		return out
	}
	if len(m.sources) > 1 {
		sortAny(keys, b.b[:len(keys)], m.wide)
	}
	out.read = int64(len(keys) / wordsOf(m.wide))
	if m.e.rules.Dedup {
		keys = compactAny(keys, m.wide)
	}
	out.keys = keys
	switch {
	case !csc || len(keys) == 0:
	case m.wide:
		all := pairs(keys)
		for i, k := range all[1:] {
			if k == all[i] {
				out.again++
			}
		}
	default:
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

// divide takes narrow keys apart into sources and the starts of destinations.
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

func (e *Sorter) openRuns(runs []Run) (sources []keySource, closeAll func() error, err error) {
	var files []*os.File
	closeAll = func() error {
		var err error
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return err
	}
	for _, r := range runs {
		path := e.s.Path(runName(r.ID))
		f, err := os.Open(path)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll())
		}
		files = append(files, f)
		if r.index == nil && r.Keys > 0 {
			if r.index, err = readIndex(f, r); err != nil {
				return nil, nil,
					errors.Join(errs.Errorf("%s: %w; run the import again with {restart}", path,
						err), closeAll())
			}
		}
		sources = append(sources, &fileRun{r, f, path})
	}
	return sources, closeAll, nil
}

// fewer merges runs into larger ones until the rest fits one merge.
func (e *Sorter) fewer(ctx context.Context, wide bool, p work.Progress) error {
	for {
		n := len(e.runs)
		fits := func(n int) bool {
			var s []keySource
			for _, r := range e.runs[:n] {
				s = append(s, &fileRun{Run: r})
			}
			if e.rules.AddSelf && n == len(e.runs) {
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

func (e *Sorter) mergeRuns(ctx context.Context, runs []Run, wide bool,
	p work.Progress) (err error) {
	sources, closeAll, err := e.openRuns(runs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	m := e.newMerger(sources, wide, false)
	if m == nil {
		return fmt.Errorf("merge of edges: memory for %d runs of groups of %d keys is too small",
			len(runs), runs[0].Group)
	}
	sum := Run{Wide: wide, MaxID: -1, MinID: math.MaxInt64}
	total := int64(0)
	for _, r := range runs {
		sum.Taken += r.Taken
		sum.Self += r.Self
		sum.Kept += r.Kept
		sum.Extra += r.Extra
		sum.MaxID, sum.MinID = max(sum.MaxID, r.MaxID), min(sum.MinID, r.MinID)
		total += r.Keys
	}
	w, err := e.newRun(sum, runs[0].Group)
	if err != nil {
		return err
	}
	done := int64(0)
	err = m.each(ctx, m.ranges(Edge{}), false, func(out *merged) error {
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
	var gone []int
	for _, old := range runs {
		gone = append(gone, old.ID)
	}
	if e.log != nil {
		if err := e.log.Ran(r, gone); err != nil {
			return err
		}
	}
	err = e.removeRuns(runs)
	e.runs = append(append([]Run(nil), e.runs[len(runs):]...), r)
	return err
}

// append adds a range to a run, in whole groups.
func (w *runWriter) append(out *merged) error {
	words := wordsOf(w.r.Wide)
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
			part = append(part, out.lo.Dst, out.lo.Src)
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
		b = binary.LittleEndian.AppendUint64(b, g.first.Dst)
		b = binary.LittleEndian.AppendUint64(b, g.first.Src)
		b = binary.LittleEndian.AppendUint64(b, uint64(g.offset))
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, crcTable))
}

func readIndex(f *os.File, r Run) ([]groupStart, error) {
	n := (r.Keys + int64(r.Group) - 1) / int64(r.Group)
	b := make([]byte, n*indexEntry+4)
	if _, err := f.ReadAt(b, r.Bytes); err != nil {
		return nil, err
	}
	end := len(b) - 4
	if crc32.Checksum(b[:end], crcTable) != binary.LittleEndian.Uint32(b[end:]) {
		return nil, errDamagedRun
	}
	index := make([]groupStart, n)
	for i := range index {
		e := b[i*indexEntry:]
		index[i] = groupStart{Edge{binary.LittleEndian.Uint64(e),
			binary.LittleEndian.Uint64(e[8:])}, int64(binary.LittleEndian.Uint64(e[16:]))}
	}
	return index, nil
}
