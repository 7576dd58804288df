package importer

import (
	"context"
	"slices"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

const idsPerRead = 32 << 10

// edgeShape is the layout of an edge list array.
type edgeShape int

const (
	anyShape  edgeShape = iota // as the shape says
	twoRows                    // (2, edges): the sources, then the destinations
	twoColumn                  // (edges, 2): a pair for each edge
)

// rowsOf reports whether an edge list array holds the sources and then the destinations, and not
// pairs.
func (s edgeShape) rowsOf(a *npy.Array, nodes int64) (rows bool, err error) {
	sh := a.Header.Shape
	must := map[edgeShape]string{anyShape: "(2, edges) or (edges, 2)", twoRows: "(2, edges)",
		twoColumn: "(edges, 2)"}[s]
	if len(sh) != 2 || (sh[0] != 2 || s == twoColumn) && (sh[1] != 2 || s == twoRows) {
		return false, errs.New(errs.Usage, "%s: edges have shape %s, must be %s", a.Name,
			a.Header.ShapeString(), must)
	}
	if err := needInts(a); err != nil {
		return false, err
	}
	if s == anyShape && sh[0] == 2 && sh[1] == 2 {
		r, err := a.Reader(0)
		if err != nil {
			return false, err
		}
		defer r.Close()
		v := make([]int64, 4)
		if err := fill(r, v); err != nil {
			return false, err
		}
		if v[1] != v[2] && slices.Min(v) >= 0 && slices.Max(v) < nodes { // else both are wrong
			return false, errs.New(errs.Usage,
				"%s: shape (2, 2) can be two sources and two destinations, or two pairs; save them as two arrays, src and dst",
				a.Name)
		}
	}
	return s == twoRows || s == anyShape && sh[0] == 2, nil
}

// ends are the numbers of nodes that the two ends of an edge may have.
type ends struct{ src, dst int64 }

// ofOne are the ends of edges among nodes of one type.
func ofOne(nodes int64) ends { return ends{nodes, nodes} }

// openIndexEdges opens an edge list array.
func openIndexEdges(path string, n ends, shape edgeShape) (s edges.Source, err error) {
	a, err := npy.Open(path)
	if err != nil {
		return s, err
	}
	return indexEdges(a, n, shape)
}

// indexEdges are the edges of an edge list array.
func indexEdges(a *npy.Array, of ends, shape edgeShape) (s edges.Source, err error) {
	rows, err := shape.rowsOf(a, max(of.src, of.dst))
	if err != nil {
		return s, err
	}
	// An array in Fortran order is its transpose in C order.
	n := a.Header.Elements() / 2
	if a.Header.Fortran {
		rows = !rows
	}
	if rows {
		return columnEdges(column{a, 0}, column{a, n}, n, of), nil
	}
	per, parts := edgeParts(n, a)
	return edges.Source{Name: a.Name, Unit: "edges", Total: n, Parts: parts,
		Read: func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			return readPairs(a, of, int64(part)*per, min(int64(part+1)*per, n), emit, done)
		}}, nil
}

// readPairs reads edges from..to of an array of pairs.
func readPairs(a *npy.Array, of ends, from, to int64, emit func(src, dst []int64) error,
	done func(int64)) error {
	r, err := a.Reader(2 * from)
	if err != nil {
		return err
	}
	defer r.Close()
	both := make([]int64, 2*idsPerRead)
	src, dst := make([]int64, idsPerRead), make([]int64, idsPerRead)
	for pos := from; pos < to; {
		k := min(int64(len(src)), to-pos)
		if err := fill(r, both[:2*k]); err != nil {
			return err
		}
		for i := range k {
			src[i], dst[i] = both[2*i], both[2*i+1]
			if uint64(src[i]) >= uint64(of.src) {
				return dataset.BadID(a.Name, 2*(pos+i), src[i], of.src)
			}
			if uint64(dst[i]) >= uint64(of.dst) {
				return dataset.BadID(a.Name, 2*(pos+i)+1, dst[i], of.dst)
			}
		}
		if err := emit(src[:k], dst[:k]); err != nil {
			return err
		}
		pos += k
		done(k)
	}
	return nil
}

// fill reads as many integers as dst has.
func fill(r *npy.Reader, dst []int64) error {
	for len(dst) > 0 {
		n, err := r.Ints(dst)
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

// partEdges is the number of edges in a part of an array: many times a batch, and enough parts for
// all cores. Tests make it small.
var partEdges int64 = 4 << 20

// edgeParts divides n edges into parts, of which each has per.
func edgeParts(n int64, arrays ...*npy.Array) (per int64, parts int) {
	per = partEdges
	for _, a := range arrays {
		if !a.Seekable() { // a compressed array is read from its start only
			per = max(n, 1)
		}
	}
	return per, int(max(1, (n+per-1)/per))
}

// pairEdges are the edges src[i] → dst[i] of two arrays.
func pairEdges(src, dst *npy.Array, nodes int64) (edges.Source, error) {
	for _, a := range []*npy.Array{src, dst} {
		if err := idArray(a); err != nil {
			return edges.Source{}, err
		}
	}
	n := src.Header.Elements()
	if dst.Header.Elements() != n {
		return edges.Source{}, errs.New(errs.Usage, "%s has %d entries, %s has %d; an edge is one of each",
			src.Name, n, dst.Name, dst.Header.Elements())
	}
	return columnEdges(column{src, 0}, column{dst, 0}, n, ofOne(nodes)), nil
}

// column is the ids of an array from element first on.
type column struct {
	*npy.Array
	first int64
}

// read reads the ids from at on, which must be those of nodes.
func (c column) read(r *npy.Reader, pos int64, ids []int64, nodes int64) error {
	if err := fill(r, ids); err != nil {
		return err
	}
	for i, v := range ids {
		if uint64(v) >= uint64(nodes) {
			return dataset.BadID(c.Name, c.first+pos+int64(i), v, nodes)
		}
	}
	return nil
}

// columnEdges are n edges src[i] → dst[i].
func columnEdges(src, dst column, n int64, of ends) edges.Source {
	per, parts := edgeParts(n, src.Array, dst.Array)
	return edges.Source{Name: src.Name, Unit: "edges", Total: n, Parts: parts,
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			pos, to := int64(part)*per, min(n, int64(part+1)*per)
			rs, err := src.Reader(src.first + pos)
			if err != nil {
				return err
			}
			defer rs.Close()
			rd, err := dst.Reader(dst.first + pos)
			if err != nil {
				return err
			}
			defer rd.Close()
			s, d := make([]int64, idsPerRead), make([]int64, idsPerRead)
			for pos < to {
				k := min(int64(len(s)), to-pos)
				if err := src.read(rs, pos, s[:k], of.src); err != nil {
					return err
				}
				if err := dst.read(rd, pos, d[:k], of.dst); err != nil {
					return err
				}
				if err := emit(s[:k], d[:k]); err != nil {
					return err
				}
				done(k)
				pos += k
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
			return nil
		}}
}

// noteLists names the direction in which lists are read that do not state it.
func (im *importer) noteLists(ptr, idx *npy.Array) {
	im.o.note("%s and %s are read as lists of in-neighbours (CSC); {lists} out reads lists of out-neighbours (CSR)",
		ptr.Name, idx.Name)
}

// needInts refuses an array of other numbers.
func needInts(a *npy.Array) error {
	if k := a.Header.DType.Kind; k != 'i' && k != 'u' {
		return errs.New(errs.Usage, "%s: holds %s, integers are needed; save x.astype(numpy.int64)",
			a.Name, a.Header.DType)
	}
	return nil
}

// idArray refuses an array that is no list of node ids or offsets.
func idArray(a *npy.Array) error {
	if err := needInts(a); err != nil {
		return err
	}
	if sh := a.Header.Shape; len(sh) != 1 && (len(sh) != 2 || sh[1] != 1) {
		return errs.New(errs.Usage, "%s has shape %s, must be one-dimensional; save x.ravel()",
			a.Name, a.Header.ShapeString())
	}
	return nil
}

// offsetEdges are the edges of two arrays: the neighbours of v are idx[ptr[v]:ptr[v+1]], which are
// the sources of edges to v with in, and the destinations of edges from v without. A part is a
// range of nodes.
func offsetEdges(ptr, idx *npy.Array, of ends, in bool) (edges.Source, error) {
	nodes, limit := of.dst, of.src
	if !in {
		nodes, limit = limit, nodes
	}
	for _, a := range []*npy.Array{ptr, idx} {
		if err := idArray(a); err != nil {
			return edges.Source{}, err
		}
	}
	if n := ptr.Header.Elements(); n != nodes+1 {
		return edges.Source{}, errs.New(errs.Usage, "%s has shape %s, the %d nodes need (%d,)",
			ptr.Name, ptr.Header.ShapeString(), nodes, nodes+1)
	}
	total := idx.Header.Elements()
	parts := int64(1) // a compressed array is read from its start only
	if ptr.Seekable() && idx.Seekable() {
		parts = max(1, min((total+partEdges-1)/partEdges, nodes))
	}
	return edges.Source{Name: idx.Name, Unit: "edges", Total: total, Parts: int(parts),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			first := nodes/parts*int64(part) + min(int64(part), nodes%parts)
			end := nodes/parts*int64(part+1) + min(int64(part+1), nodes%parts)
			l := listReader{ctx: ctx, ptr: ptr, idx: idx, nodes: nodes, limit: limit, total: total,
				in: in, emit: emit, done: done}
			return l.read(first, end)
		}}, nil
}

// listReader reads the lists of some nodes.
type listReader struct {
	ctx          context.Context
	ptr, idx     *npy.Array
	nodes, limit int64 // whose lists they are, and who may be in them
	total        int64
	in           bool
	emit         func(src, dst []int64) error
	done         func(int64)

	neighbours *npy.Reader
	pos        int64   // entry of idx that the next edge is
	own        []int64 // the nodes of edges that wait to be emitted
	ids        []int64 // room for their neighbours
}

// read emits the edges of nodes first to end-1.
func (l *listReader) read(first, end int64) error {
	offsets, err := l.ptr.Reader(first)
	if err != nil {
		return err
	}
	defer offsets.Close()
	buf := make([]int64, 16<<10)
	if err := fill(offsets, buf[:1]); err != nil {
		return err
	}
	l.pos = buf[0]
	if l.pos < 0 || l.pos > l.total || first == 0 && l.pos != 0 {
		return l.badOffset(first, l.pos)
	}
	if l.neighbours, err = l.idx.Reader(l.pos); err != nil {
		return err
	}
	defer l.neighbours.Close()
	l.ids, l.own = make([]int64, 32<<10), make([]int64, 0, 32<<10)
	for v := first; v < end; {
		k := int(min(int64(len(buf)), end-v))
		if err := fill(offsets, buf[:k]); err != nil {
			return err
		}
		for _, last := range buf[:k] {
			if err := l.list(v, last); err != nil {
				return err
			}
			v++
		}
	}
	if err := l.flush(); err != nil {
		return err
	}
	if end == l.nodes && l.pos != l.total {
		return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", l.ptr.Name, l.pos,
			l.idx.Name, l.total)
	}
	return nil
}

// list takes the edges of a node, up to entry end.
func (l *listReader) list(v, end int64) error {
	if end < l.pos || end > l.total {
		return l.badOffset(v+1, end)
	}
	for l.pos < end {
		k := min(end-l.pos, int64(cap(l.own)-len(l.own)))
		for range k {
			l.own = append(l.own, v)
		}
		l.pos += k
		if len(l.own) == cap(l.own) {
			if err := l.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *listReader) badOffset(index, offset int64) error {
	return errs.New(errs.Usage,
		"%s: offset %d at position %d does not rise from 0 to the %d entries of %s", l.ptr.Name,
		offset, index, l.total, l.idx.Name)
}

// flush emits the edges that wait, which end before pos.
func (l *listReader) flush() error {
	n := len(l.own)
	if n == 0 {
		return nil
	}
	ids := l.ids[:n]
	if err := fill(l.neighbours, ids); err != nil {
		return err
	}
	for i, x := range ids {
		if uint64(x) >= uint64(l.limit) {
			return dataset.BadID(l.idx.Name, l.pos-int64(n)+int64(i), x, l.limit)
		}
	}
	src, dst := ids, l.own
	if !l.in {
		src, dst = dst, src
	}
	if err := l.emit(src, dst); err != nil {
		return err
	}
	l.done(int64(n))
	l.own = l.own[:0]
	return l.ctx.Err()
}
