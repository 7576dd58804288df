package graph

import (
	"context"
	"encoding/binary"
	"math"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// A mini-batch can be kept outside of the device and brought back: a superbatch is sampled before
// the first of its mini-batches trains (Ginex, VLDB 2022, section 4.2). The frontier's node numbers
// are kept apart from the rest, as a plan of caches needs them alone.

// A saved mini-batch begins with the numbers of seeds and hops and the flags of its parts
// (savedHeader), and for each hop NumDst, NumSrc and NumEdges. Of a typed graph there follow for
// each hop its Lists, and TypeEnd; and where not all types have rows, the frontier.
const (
	savedHeader = 3 * 8

	savedTyped   = 1 << 40
	savedNodes   = 1 << 41
	savedDegrees = 1 << 0
	savedWeights = 1 << 1 // of the first hop; the next bits are of the next hops
)

// Save appends a mini-batch without its rows (RowNumbers) to b, and returns b and their number.
// view gives the first bytes of a buffer where the CPU sees them, until the next call. The work
// that fills mb is done. Block offsets take 4 bytes here.
func (mb *MiniBatch) Save(b []byte, view func(buf cuda.Buffer, bytes int64) ([]byte, error)) (
	saved []byte, rows int64, err error) {
	le := binary.LittleEndian
	if len(mb.HopEnd) != len(mb.Blocks)+1 || len(mb.Blocks) == 0 || len(mb.Blocks) > 32 {
		return nil, 0, errs.New(errs.Failed, "mini-batch %d has %d blocks and cannot be kept",
			mb.Index, len(mb.Blocks))
	}
	last := len(mb.Blocks)
	nodes := mb.HopEnd[last]
	if b, err = mb.saveHeader(b); err != nil {
		return nil, 0, err
	}
	raw := func(buf cuda.Buffer, bytes int64) error {
		if bytes == 0 {
			return nil
		}
		from, err := view(buf, bytes)
		b = append(b, from...)
		return err
	}
	if mb.rowEnd != nil {
		if err := raw(mb.Nodes, nodes*8); err != nil {
			return nil, 0, err
		}
	}
	for h := range mb.Blocks {
		x := &mb.Blocks[h]
		indptr, err := view(x.Indptr, (x.NumLists()+1)*8)
		if err != nil {
			return nil, 0, err
		}
		for _, offset := range hostmem.View[int64](indptr) {
			b = le.AppendUint32(b, uint32(offset))
		}
		if err := raw(x.Src, x.NumEdges*4); err != nil {
			return nil, 0, err
		}
		if x.Weights != nil {
			if err := raw(x.Weights, x.NumSrc*4); err != nil {
				return nil, 0, err
			}
		}
	}
	if mb.Degrees != nil {
		if err := raw(mb.Degrees, nodes*4); err != nil {
			return nil, 0, err
		}
	}
	return b, mb.RowCount(last), nil
}

// saveHeader appends the sizes of a mini-batch's parts.
func (mb *MiniBatch) saveHeader(b []byte) ([]byte, error) {
	le := binary.LittleEndian
	has := uint64(0)
	if mb.Degrees != nil {
		has = savedDegrees
	}
	for h := range mb.Blocks {
		if mb.Blocks[h].Weights != nil {
			has |= savedWeights << h
		}
	}
	if mb.TypeEnd != nil {
		has |= savedTyped
	}
	if mb.rowEnd != nil {
		has |= savedNodes
	}
	b = le.AppendUint64(b, uint64(mb.NumSeeds))
	b = le.AppendUint64(b, uint64(len(mb.Blocks)))
	b = le.AppendUint64(b, has)
	for h := range mb.Blocks {
		x := &mb.Blocks[h]
		if x.NumEdges >= math.MaxUint32 || x.NumSrc >= math.MaxUint32 {
			return nil, errs.New(errs.Capability,
				"mini-batch %d: hop %d has %d edges, and a superbatch keeps below 2^32; lower %v or %v",
				mb.Index, h+1, x.NumEdges, errs.Key("batch-size"), errs.Key("fanout"))
		}
		for _, n := range []int64{x.NumDst, x.NumSrc, x.NumEdges} {
			b = le.AppendUint64(b, uint64(n))
		}
	}
	for h := range mb.Blocks {
		for _, l := range mb.Blocks[h].Lists {
			b = le.AppendUint64(le.AppendUint64(b, uint64(l.First)), uint64(l.N))
		}
	}
	for _, ends := range mb.TypeEnd {
		for _, end := range ends {
			b = le.AppendUint64(b, uint64(end))
		}
	}
	return b, nil
}

// Restore makes mb what Save was given, with its rows. The saved bytes are checked as
// far as kernels rely on them, so that none reads beyond a block; other changes are for their
// keeper to find. Work of mb's previous batch must be done, and stage, which grows as needed,
// belongs to the call.
func (s *Sampler) Restore(ctx context.Context, stream cuda.Stream, mb *MiniBatch, epoch, index int,
	rows []int64, saved []byte, stage *Stage) error {
	broken := func(fault string) error {
		return errs.New(errs.Device,
			"the kept samples of mini-batch %d of epoch %d have %s; have them sampled anew", index, epoch,
			fault)
	}
	le := binary.LittleEndian
	if len(saved) < savedHeader {
		return broken("no header")
	}
	hops, has := le.Uint64(saved[8:]), le.Uint64(saved[16:])
	if hops != uint64(len(s.cfg.Fanouts)) || len(saved) < savedHeader+int(hops)*24 {
		return broken("another number of hops")
	}
	if err := mb.freeRetired(); err != nil {
		return err
	}
	mb.Epoch, mb.Index, mb.NumSeeds = epoch, index, int(le.Uint64(saved))
	mb.HopEnd, mb.Blocks = append(mb.HopEnd[:0], int64(mb.NumSeeds)), mb.Blocks[:hops]
	sizes, rest := saved[savedHeader:savedHeader+hops*24], saved[savedHeader+hops*24:]
	schema := s.topo.Host.Schema
	if (schema != nil) != (has&savedTyped != 0) {
		return broken("other types")
	}
	rest, typed := mb.restoreTypes(schema, rest)
	if !typed {
		return broken("lists of other relations")
	}
	nodes, rest := mb.restoreNodes(schema, rows, rest, has)
	if mb.NumSeeds < 1 || mb.NumSeeds > len(nodes) {
		return broken("another number of seeds")
	}
	need, ok := mb.restoreSizes(sizes, len(nodes), len(saved), has)
	if !ok {
		return broken("a block of another size")
	}
	if mb.HopEnd[hops] != int64(len(nodes)) || need != int64(len(rest)) ||
		has&savedDegrees != 0 != s.cfg.Degrees {
		return broken("another length")
	}
	for _, v := range nodes {
		if uint64(v) >= uint64(s.topo.Host.NumNodes) {
			return broken("a node that the graph has not")
		}
	}
	if schema != nil && !mb.validTypes(schema, nodes) {
		return broken("nodes or lists of other types")
	}
	list := mb.pieces(nodes, rest, has)
	if list == nil {
		return broken("a block that is none")
	}
	if err := mb.upload(ctx, stream, stage, list); err != nil || has&savedNodes == 0 {
		return err
	}
	same, err := s.restoreRows(ctx, stream, mb, nodes, rows)
	if err == nil && !same {
		err = broken("other rows")
	}
	return err
}

// restoreNodes returns the frontier, which are the rows where all types have some, and the bytes
// behind it; nil: there is none.
func (mb *MiniBatch) restoreNodes(schema *Schema, rows []int64, b []byte,
	has uint64) (nodes []int64, rest []byte) {
	hidden := schema != nil && schema.rowTypes() < len(schema.Types)
	switch {
	case hidden != (has&savedNodes != 0):
		return nil, nil
	case !hidden:
		return rows, b
	}
	n := uint64(mb.TypeEnd[len(mb.Blocks)][len(schema.Types)-1])
	if n > uint64(len(b)/8) {
		return nil, nil
	}
	for range n {
		nodes = append(nodes, int64(binary.LittleEndian.Uint64(b)))
		b = b[8:]
	}
	return nodes, b
}

// restoreSizes reads the sizes of mb's blocks, and returns the bytes that the blocks need. They
// have to fit so many nodes and bytes.
func (mb *MiniBatch) restoreSizes(sizes []byte, nodes, bytes int, has uint64) (need int64,
	ok bool) {
	le := binary.LittleEndian
	dst := int64(mb.NumSeeds)
	for h := range mb.Blocks {
		x := &mb.Blocks[h]
		x.NumDst, x.NumSrc = int64(le.Uint64(sizes[h*24:])), int64(le.Uint64(sizes[h*24+8:]))
		x.NumEdges = int64(le.Uint64(sizes[h*24+16:]))
		if x.NumDst != dst || x.NumSrc < dst || x.NumSrc > int64(nodes) ||
			uint64(x.NumEdges) > uint64(bytes) ||
			x.Weights != nil && has&(savedWeights<<h) == 0 {
			return 0, false
		}
		dst = x.NumSrc
		mb.HopEnd = append(mb.HopEnd, dst)
		need += (x.NumLists()+1)*4 + x.NumEdges*4
		if has&(savedWeights<<h) != 0 {
			need += x.NumSrc * 4
		}
	}
	if has&savedDegrees != 0 {
		need += dst * 4
	}
	return need, true
}

// restoreTypes reads what a mini-batch of a typed graph has beside its sizes, and returns the bytes
// behind it; false: they end before.
func (mb *MiniBatch) restoreTypes(schema *Schema, b []byte) (rest []byte, ok bool) {
	if schema == nil {
		return b, true
	}
	hops, relations, types := len(mb.Blocks), len(schema.Relations), len(schema.Types)
	if len(b) < 8*(2*hops*relations+(hops+1)*types) {
		return nil, false
	}
	next := func() int64 {
		n := int64(binary.LittleEndian.Uint64(b))
		b = b[8:]
		return n
	}
	for h := range mb.Blocks {
		x := &mb.Blocks[h]
		if len(x.Lists) != relations {
			x.Lists = make([]ListRange, relations)
		}
		for r := range x.Lists {
			x.Lists[r].First = next()
			x.Lists[r].N = next()
		}
	}
	mb.TypeEnd = mb.TypeEnd[:0]
	for range hops + 1 {
		ends := mb.nextTypeEnd(types)
		for t := range ends {
			ends[t] = next()
		}
	}
	return b, true
}

// validTypes reports whether the nodes of a restored mini-batch are of the types that TypeEnd says,
// and its lists theirs, each relation's behind those before it.
func (mb *MiniBatch) validTypes(schema *Schema, nodes []int64) bool {
	count := make([]int64, len(schema.Types))
	for h, ends := range mb.TypeEnd {
		if h > 0 {
			next := int64(0)
			for _, r := range schema.bySource() {
				n := count[schema.Relations[r].Dst]
				if l := mb.Blocks[h-1].Lists[r]; l.First != next || l.N != n {
					return false
				}
				next += n
			}
		}
		for t := range ends {
			lo, hi := mb.TypeRange(h, t)
			if hi < lo || hi > int64(len(nodes)) {
				return false
			}
			count[t] += hi - lo
			first := uint64(schema.First(t))
			for _, v := range nodes[lo:hi] {
				if uint64(v)-first >= uint64(schema.Types[t].Nodes) {
					return false
				}
			}
		}
		if ends[len(ends)-1] != mb.HopEnd[h] {
			return false
		}
	}
	return true
}

// pieces divides the bytes of a mini-batch's blocks; nil: a block refers beyond its sources.
func (mb *MiniBatch) pieces(nodes []int64, rest []byte, has uint64) []piece {
	take := func(n int64) []byte {
		b := rest[:n]
		rest = rest[n:]
		return b
	}
	list := []piece{{to: &mb.Nodes, data: hostmem.Bytes(nodes), purpose: "frontier"}}
	for h := range mb.Blocks {
		x := &mb.Blocks[h]
		offsets, src := take((x.NumLists()+1)*4), take(x.NumEdges*4)
		if !validBlock(offsets, src, uint32(x.NumSrc)) {
			return nil
		}
		for r := range x.Lists {
			l := &x.Lists[r]
			l.FirstEdge = int64(binary.LittleEndian.Uint32(offsets[4*l.First:]))
			l.Edges = int64(binary.LittleEndian.Uint32(offsets[4*(l.First+l.N):])) - l.FirstEdge
		}
		list = append(list,
			piece{to: &x.Indptr, data: offsets, widen: true, purpose: "block offsets"},
			piece{to: &x.Src, data: src, purpose: "block sources"})
		if has&(savedWeights<<h) != 0 {
			list = append(list, piece{to: &x.Weights, data: take(x.NumSrc * 4),
				purpose: "block weights"})
		}
	}
	if has&savedDegrees != 0 {
		list = append(list, piece{to: &mb.Degrees, data: take(int64(len(nodes)) * 4),
			purpose: "frontier degrees"})
	}
	return list
}

// validBlock reports whether offsets go from 0 to the number of sources, which are all below n.
func validBlock(offsets, src []byte, n uint32) bool {
	le, last, largest := binary.LittleEndian, uint32(0), uint32(0)
	if le.Uint32(offsets) != 0 {
		return false
	}
	for ; len(offsets) > 0; offsets = offsets[4:] {
		offset := le.Uint32(offsets)
		if offset < last {
			return false
		}
		last = offset
	}
	edges := len(src) / 4
	for ; len(src) >= 4; src = src[4:] {
		largest = max(largest, le.Uint32(src))
	}
	return int(last) == edges && (edges == 0 || largest < n)
}

// Stage is pinned memory for data on its way to a device.
type Stage struct{ buf cuda.Buffer }

// Close frees the memory. Nothing may be on its way.
func (g *Stage) Close() error { return free(&g.buf) }

// piece is part of a mini-batch on its way to the device.
type piece struct {
	to      *cuda.Buffer
	data    []byte
	offset  int64 // in to
	widen   bool  // data are uint32, in to they are int64
	purpose string
}

// bytes returns the size of a piece on the device.
func (p *piece) bytes() int64 {
	if p.widen {
		return 2 * int64(len(p.data))
	}
	return int64(len(p.data))
}

// write writes a piece as the device has it.
func (p *piece) write(mem []byte) {
	if !p.widen {
		copy(mem, p.data)
		return
	}
	to := hostmem.View[int64](mem[:p.bytes()])
	for i := range to {
		to[i] = int64(binary.LittleEndian.Uint32(p.data[4*i:]))
	}
}

// upload copies pieces to the device and waits for that. Memory that the CPU sees is written in
// place.
func (mb *MiniBatch) upload(ctx context.Context, stream cuda.Stream, stage *Stage,
	list []piece) error {
	total := int64(0)
	for i := range list {
		p := &list[i]
		// Also for nothing at all: kernels are given the address.
		if err := mb.grow(stream, p.to, cuda.MemDevice, max(p.offset+p.bytes(), 16), p.offset,
			p.purpose); err != nil {
			return err
		}
		if (*p.to).Bytes() == nil {
			total += (p.bytes() + 15) &^ 15
		}
	}
	if total > 0 && (stage.buf == nil || stage.buf.Size() < total) {
		if err := stage.Close(); err != nil {
			return err
		}
		var err error
		if stage.buf, err = mb.dev.Alloc(cuda.MemPinned, total+total/4+4096,
			"blocks on their way to the device"); err != nil {
			return err
		}
	}
	// Copies by grow, and earlier uses of the buffers, come first.
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	offset := int64(0)
	for i := range list {
		p := &list[i]
		if len(p.data) == 0 {
			continue
		}
		if mem := (*p.to).Bytes(); mem != nil {
			p.write(mem[p.offset:])
			continue
		}
		mem := stage.buf.Bytes()
		if mem == nil {
			return errs.New(errs.Capability,
				"pinned memory of %s can't be written by the CPU, which brings it mini-batches",
				mb.dev.Info().Name)
		}
		p.write(mem[offset:])
		if err := stream.Copy((*p.to).Ptr()+cuda.DevicePtr(p.offset),
			stage.buf.Ptr()+cuda.DevicePtr(offset), p.bytes()); err != nil {
			return err
		}
		offset += (p.bytes() + 15) &^ 15
	}
	return stream.Synchronize(ctx)
}
