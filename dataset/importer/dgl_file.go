package importer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"helios/dataset/npy"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
)

// The file of dgl.save_graphs, version 2, all little-endian:
//
//	magic u64, version u64, graph type u64, graphs u64, zeros up to 4096
//	start u64 of the first graph, then named tensors that belong to no graph
//	each graph: heterograph, node tensors and edge tensors by type, names of node types and of edge types
//	the starts of the graphs, as a vector in a string; the string's length u64
//
// A heterograph is a metagraph, its relation graphs, and the nodes of each type. A relation graph
// has its own copy of the metagraph for each of the forms COO, CSR and CSC that was saved. Vectors
// and strings have a u64 length before them.
const (
	dglFileMagic  = 0xDD2E4FF046B4A13F
	dglHetero     = 0xDD589FBE35224ABF
	dglMetagraph  = 0xDD3C5FFE20046ABF
	dglUnitGraph  = 0xDD2E60F0F6B4A127
	dglCSRMatrix  = 0xDD6CD31205DFF127
	dglCOOMatrix  = 0xDD61FFD305DFF127
	dglArrayMagic = 0xDD5E40F096B4A13F
	dglHeader     = 4096

	dglCOO, dglCSR, dglCSC = 1, 2, 4 // bits of the forms that were saved
)

// dglForm is a saved form of the edges. a and b are the sources and destinations (COO), or offsets
// and neighbours.
type dglForm struct {
	bit        int64
	rows, cols int64
	a, b       *npy.Array
}

type dglTensor struct {
	name string
	a    *npy.Array
}

// dglGraph holds what is needed of one graph.
type dglGraph struct {
	offset     int64   // in the file
	nodes      []int64 // per type
	relations  int64
	forms      []dglForm // of the first relation
	tensors    []dglTensor
	nodeTypes  []string
	edgeTypes  []string
	edgeData   []string
	nodeGroups int64
}

// dglReader parses a file from any offset. The first error stays, with the offset at which it was
// found.
type dglReader struct {
	path string
	f    *os.File
	size int64
	pos  int64
	err  error
}

func openDGL(path string) (*dglReader, error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(errs.With(errs.Usage, err), f.Close())
	}
	return &dglReader{path: path, f: f, size: st.Size()}, nil
}

func (r *dglReader) close() error { return r.f.Close() }

func (r *dglReader) failAt(offset int64, format string, a ...any) {
	if r.err == nil {
		r.err = errs.New(errs.Usage, "%s: offset %d: "+format, append([]any{r.path, offset}, a...)...)
	}
}

func (r *dglReader) bytes(b []byte, what string) bool {
	if r.err != nil {
		return false
	}
	n, err := r.f.ReadAt(b, r.pos)
	if n < len(b) {
		if errors.Is(err, io.EOF) {
			r.failAt(r.pos, "truncated in %s: the file has %d bytes", what, r.size)
		} else {
			r.err = errs.New(errs.Device, "%s: offset %d: %w", r.path, r.pos, err)
		}
		return false
	}
	r.pos += int64(len(b))
	return true
}

func (r *dglReader) u64(what string) uint64 {
	var b [8]byte
	if !r.bytes(b[:], what) {
		return 0
	}
	return binary.LittleEndian.Uint64(b[:])
}

// dglManyMax bounds the lengths of everything but data: types, tensors.
const dglManyMax = 1 << 16

// few reads a length of no more than dglManyMax, whose elements need at least unit bytes each.
func (r *dglReader) few(what string, unit int64) int64 {
	begin := r.pos
	n := r.count(what, unit)
	if r.err == nil && n > dglManyMax {
		r.failAt(begin, "%s: a length of %d; at most %d are accepted", what, n, dglManyMax)
	}
	if r.err != nil {
		return 0
	}
	return n
}

// count reads a length, whose elements need at least unit bytes each in the rest of the file.
func (r *dglReader) count(what string, unit int64) int64 {
	begin := r.pos
	n := r.u64(what)
	if r.err == nil && n > uint64((r.size-r.pos)/unit) {
		r.failAt(begin, "%s: a length of %d does not fit into the %d bytes that are left", what, n,
			r.size-r.pos)
	}
	if r.err != nil {
		return 0
	}
	return int64(n)
}

func (r *dglReader) magic(want uint64, what string) {
	begin := r.pos
	if got := r.u64(what); r.err == nil && got != want {
		r.failAt(begin,
			"%s begins with %#x, not with %#x; the file is damaged, or of another version of DGL",
			what, got, want)
	}
}

// dglNameMax bounds a name: node types and tensors have short ones.
const dglNameMax = 4096

func (r *dglReader) str(what string) string {
	begin := r.pos
	n := r.count(what, 1)
	if r.err == nil && n > dglNameMax {
		r.failAt(begin, "%s of %d bytes", what, n)
	}
	if r.err != nil {
		return ""
	}
	b := make([]byte, n)
	if !r.bytes(b, what) {
		return ""
	}
	return string(b)
}

func (r *dglReader) strs(what string) []string {
	var out []string
	for n := r.few(what, 8); n > 0 && r.err == nil; n-- {
		out = append(out, r.str(what))
	}
	return out
}

// dglType reads an element type: a byte of kind, one of bits, and two of lanes, which are 1 of
// everything but vectors.
func dglType(b []byte) (npy.DType, bool) {
	d := npy.DType{Size: int(b[1]) / 8}
	switch b[0] {
	case 0:
		d.Kind = 'i'
	case 1:
		d.Kind = 'u'
	case 2:
		d.Kind = 'f'
	case 6:
		d.Kind = 'b'
	default:
		return d, false
	}
	_, err := npy.ParseDType(d.String())
	return d, err == nil && int(b[1]) == 8*d.Size && b[2] == 1 && b[3] == 0
}

// array reads the head of a tensor and skips its data. A type that is no number is left for the
// caller to refuse: its DType has no size.
func (r *dglReader) array(what string) *npy.Array {
	r.magic(dglArrayMagic, what)
	r.u64(what) // reserved
	var b [16]byte
	begin := r.pos
	if !r.bytes(b[:], what) { // device type and number, dimensions, element type
		return nil
	}
	if dev := int32(binary.LittleEndian.Uint32(b[:])); dev != 1 {
		r.failAt(begin, "%s: device type %d; tensors are saved from the CPU (1)", what, dev)
	}
	dims := int32(binary.LittleEndian.Uint32(b[8:]))
	if r.err == nil && (dims < 0 || dims > 8) {
		r.failAt(begin+8, "%s: %d dimensions", what, dims)
	}
	h := npy.Header{Shape: r.shape(what, dims)}
	if r.err != nil {
		return nil
	}
	elems := h.Elements()
	var known bool
	h.DType, known = dglType(b[12:])
	begin = r.pos
	size := r.count(what, 1)
	if r.err != nil {
		return nil
	}
	width := int64(b[13]) / 8 * int64(b[14])
	if width == 0 || size/width != elems || size%width != 0 {
		r.failAt(begin, "%s: %d bytes of data, shape %s of %d bytes each needs another number", what,
			size, h.ShapeString(), width)
		return nil
	}
	data := r.pos
	r.pos += size
	if !known { // complex or vector types: nothing that we read, but skipped
		return &npy.Array{Name: what}
	}
	a, err := npy.Section(fmt.Sprintf("%s: %s at offset %d", r.path, what, data), r.path, data,
		h, false)
	if err != nil && r.err == nil {
		r.err = err
	}
	return a
}

// shape reads the sizes of dimensions, whose product must be a number.
func (r *dglReader) shape(what string, dims int32) (shape []int64) {
	elems := int64(1)
	for i := int32(0); i < dims && r.err == nil; i++ {
		begin := r.pos
		n := r.u64(what)
		if r.err == nil && (n > math.MaxInt64 || n > 0 && elems > math.MaxInt64/int64(n)) {
			r.failAt(begin, "%s: dimension %d has the size %d", what, i, n)
		}
		if r.err == nil {
			shape = append(shape, int64(n))
			elems *= int64(n)
		}
	}
	return shape
}

// tensors reads a vector of named tensors, each with the length of a name and the head of an array.
func (r *dglReader) tensors(what string) []dglTensor {
	var out []dglTensor
	for n := r.few(what, 56); n > 0 && r.err == nil; n-- {
		name := r.str("the name of a tensor in " + what)
		out = append(out, dglTensor{name, r.array(fmt.Sprintf("tensor %.40q", name))})
	}
	return out
}

// matrix reads a matrix: columns before rows, as DGL writes them, two arrays, the ids of edges, and
// flags of what is sorted.
func (r *dglReader) matrix(magic uint64, what, first, second string, flags int) (f dglForm) {
	r.magic(magic, what)
	f.cols, f.rows = int64(r.u64(what)), int64(r.u64(what))
	f.a, f.b = r.array(what+first), r.array(what+second)
	r.array(what + " edge ids")
	r.bytes(make([]byte, flags), what)
	return f
}

func (r *dglReader) csr(what string) dglForm {
	return r.matrix(dglCSRMatrix, what, " offsets", " neighbours", 1)
}

func (r *dglReader) metagraph() {
	r.magic(dglMetagraph, "the metagraph")
	r.csr("the metagraph's")
}

func (r *dglReader) unitGraph() []dglForm {
	r.magic(dglUnitGraph, "a relation graph")
	begin := r.pos
	saved := int64(r.u64("the saved forms"))
	r.u64("the allowed forms")
	if saved>>32 != 0 {
		saved &= 0xffffffff
	} else if saved > 0 && saved <= 3 { // before DGL 0.5: one form by its number
		saved = 1 << (saved - 1)
	}
	if r.err == nil && (saved == 0 || saved&^(dglCOO|dglCSR|dglCSC) != 0) {
		r.failAt(begin,
			"the saved forms have the code %#x; only COO (1), CSR (2) and CSC (4) are known", saved)
	}
	var out []dglForm
	for _, bit := range []int64{dglCOO, dglCSR, dglCSC} {
		if saved&bit == 0 || r.err != nil {
			continue
		}
		r.metagraph()
		var f dglForm
		switch bit {
		case dglCOO:
			f = r.matrix(dglCOOMatrix, "the COO", " sources", " destinations", 2)
		case dglCSR:
			f = r.csr("the CSR")
		default:
			f = r.csr("the CSC")
		}
		f.bit = bit
		out = append(out, f)
	}
	return out
}

func (r *dglReader) graph() (g dglGraph) {
	g.offset = r.pos
	r.magic(dglHetero, "a graph")
	r.metagraph()
	g.relations = r.few("the relation graphs", 24)
	for i := int64(0); i < g.relations && r.err == nil; i++ {
		if forms := r.unitGraph(); i == 0 {
			g.forms = forms
		}
	}
	for n := r.few("the numbers of nodes", 8); n > 0 && r.err == nil; n-- {
		g.nodes = append(g.nodes, int64(r.u64("the numbers of nodes")))
	}
	g.nodeGroups = r.few("the node tensors", 8)
	for i := int64(0); i < g.nodeGroups && r.err == nil; i++ {
		if t := r.tensors("the node tensors"); i == 0 {
			g.tensors = t
		}
	}
	for n := r.few("the edge tensors", 8); n > 0 && r.err == nil; n-- {
		for _, t := range r.tensors("the edge tensors") {
			g.edgeData = append(g.edgeData, t.name)
		}
	}
	g.nodeTypes, g.edgeTypes = r.strs("the names of node types"), r.strs("the names of edge types")
	return g
}

// dglGraphsMax bounds the graphs of a file that are looked at: datasets of many small graphs are
// not for node training.
const dglGraphsMax = 1 << 20

// graphs returns the number of graphs in the file, and the one that was asked for. Those before it
// are skipped, and the place where each begins is compared with the file's own index.
func (r *dglReader) graphs(want int64) (n int64, g dglGraph, err error) {
	if n, err = r.head(want); err != nil {
		return 0, g, err
	}
	want = max(want, 0)
	index := r.index(n)
	start := r.firstGraph(index)
	for i := int64(0); i <= want && r.err == nil; i++ {
		if r.pos = int64(start); i > 0 {
			r.pos = int64(index[i])
		}
		if i < want-1 {
			continue
		}
		// The one before must end where this one begins.
		begin := r.pos
		g = r.graph()
		if next := i + 1; r.err == nil && next < n && uint64(r.pos) != index[next] {
			r.failAt(begin, "graph %d ends at %d, the index says that the next begins at %d", i,
				r.pos, index[next])
		}
	}
	return n, g, r.err
}

// head reads the head of the file, and returns the number of graphs.
func (r *dglReader) head(want int64) (n int64, err error) {
	if head := make([]byte, 8); r.bytes(head, "the magic") &&
		binary.LittleEndian.Uint64(head) != dglFileMagic {
		if binary.BigEndian.Uint64(head) == dglFileMagic {
			return 0, errs.New(errs.Usage,
				"%s: offset 0: big-endian; write it again on a little-endian machine", r.path)
		}
		kind, err := container.FileOf(r.path)
		if err != nil {
			return 0, err
		}
		return 0, errs.New(errs.Usage,
			"%s: offset 0: not a file of dgl.save_graphs (it begins with % x)%s", r.path, head,
			kind.Hint())
	}
	version, kind := r.u64("the version"), r.u64("the graph type")
	if r.err == nil && (version != 2 || kind != 2) {
		r.failAt(8,
			"version %d, graph type %d; only version 2, type 2 can be read: load it with a DGL from 0.5 on and save it again",
			version, kind)
	}
	n = r.count("the number of graphs", 1)
	switch {
	case r.err != nil:
	case n < 1 || n > dglGraphsMax:
		r.failAt(24, "%d graphs, must be from 1 to %d", n, dglGraphsMax)
	case want < 0 && n > 1:
		r.err = errs.New(errs.Usage, "%s has %d graphs; choose one with {graph} 0 to %d",
			r.path, n, n-1)
	case want >= n:
		r.err = errs.New(errs.Usage, "%s has %d graphs; {graph} %d must be from 0 to %d", r.path, n,
			want, n-1)
	}
	return n, r.err
}

// firstGraph reads where the first graph begins, as the index has it too.
func (r *dglReader) firstGraph(index []uint64) uint64 {
	r.pos = dglHeader
	start := r.u64("the start of the first graph")
	if r.err == nil && (len(index) == 0 || start != index[0]) {
		r.failAt(dglHeader, "the first graph begins at %d, the index says %d", start,
			index[:min(1, len(index))])
	}
	if r.err == nil && (start < dglHeader+8 || start > uint64(r.size)) {
		r.failAt(dglHeader, "the first graph begins at %d of %d bytes", start, r.size)
	}
	return start
}

// index reads the starts of the graphs at the end of the file.
func (r *dglReader) index(n int64) []uint64 {
	if r.err != nil {
		return nil
	}
	last := r.size - 8
	if r.pos = last; last < dglHeader {
		r.failAt(r.size, "truncated in the header")
		return nil
	}
	if size := r.u64("the length of the index"); r.err == nil && size != uint64(8+8*n) {
		r.failAt(last, "the index has %d bytes, %d graphs need %d; the file is truncated or damaged",
			size, n, 8+8*n)
	}
	if r.pos = last - 8 - 8*n; r.err == nil && r.pos < dglHeader {
		r.failAt(last, "the index of %d graphs begins before the graphs", n)
	}
	if r.err != nil {
		return nil
	}
	if k := r.u64("the index"); r.err == nil && k != uint64(n) {
		r.failAt(last-8-8*n, "the index has %d entries, the header says %d graphs", k, n)
	}
	out := make([]uint64, n)
	for i := range out {
		begin := r.pos
		if out[i] = r.u64("the index"); r.err == nil &&
			(out[i] < dglHeader || out[i] >= uint64(r.size) || i > 0 && out[i] <= out[i-1]) {
			r.failAt(begin, "graph %d begins at %d, which is outside the file or before graph %d", i,
				out[i], i-1)
		}
	}
	return out
}
