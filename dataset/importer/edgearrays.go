package importer

import (
	"context"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

const (
	edgesPerPart = 1 << 22 // of arrays
	idsPerRead   = 32 << 10
)

// edgeIndex takes the edges of an edge list array.
func (im *edgeSet) edgeIndex(ctx context.Context, a *npy.Array) error {
	sh := a.Header.Shape
	if len(sh) != 2 || sh[0] != 2 && sh[1] != 2 {
		return errs.New(errs.Usage, "%s: edges have shape %s, must be (2, edges) or (edges, 2)",
			a.Name, a.Header.ShapeString())
	}
	// [2, 2] is read as [2, E], which is how PyTorch Geometric and OGB write. An array in
	// Fortran order is its transpose in C order.
	rows := sh[0] == 2
	n := sh[1]
	if !rows {
		n = sh[0]
	}
	if a.Header.Fortran {
		rows = !rows
	}
	per := n // a compressed array is read from its start only
	if a.Seekable() {
		per = edgesPerPart
	}
	nodes := im.m.Nodes
	s := edges.Source{Name: a.Name, Unit: "edges", Total: n,
		Parts: int((n + per - 1) / max(per, 1))}
	if rows {
		s.Read = func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			return readRows(a, nodes, n, int64(part)*per, min(int64(part+1)*per, n), emit, done)
		}
	} else {
		s.Read = func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			return readPairs(a, nodes, int64(part)*per, min(int64(part+1)*per, n), emit, done)
		}
	}
	return im.edgesFrom(ctx, s)
}

// readRows reads edges from..to of an array whose first n ids are the sources.
func readRows(a *npy.Array, nodes, n, from, to int64, emit func(src, dst []int64) error,
	done func(int64)) error {
	rs, err := a.Reader(from)
	if err != nil {
		return err
	}
	defer rs.Close()
	rd, err := a.Reader(n + from)
	if err != nil {
		return err
	}
	defer rd.Close()
	src, dst := make([]int64, idsPerRead), make([]int64, idsPerRead)
	for at := from; at < to; {
		k := min(int64(len(src)), to-at)
		if err := fill(rs, src[:k]); err != nil {
			return err
		}
		if err := fill(rd, dst[:k]); err != nil {
			return err
		}
		for i := range k {
			if uint64(src[i]) >= uint64(nodes) {
				return dataset.BadID(a.Name, at+i, src[i], nodes)
			}
			if uint64(dst[i]) >= uint64(nodes) {
				return dataset.BadID(a.Name, n+at+i, dst[i], nodes)
			}
		}
		if err := emit(src[:k], dst[:k]); err != nil {
			return err
		}
		at += k
		done(k)
	}
	return nil
}

// readPairs reads edges from..to of an array of pairs.
func readPairs(a *npy.Array, nodes, from, to int64, emit func(src, dst []int64) error,
	done func(int64)) error {
	r, err := a.Reader(2 * from)
	if err != nil {
		return err
	}
	defer r.Close()
	both := make([]int64, 2*idsPerRead)
	src, dst := make([]int64, idsPerRead), make([]int64, idsPerRead)
	for at := from; at < to; {
		k := min(int64(len(src)), to-at)
		if err := fill(r, both[:2*k]); err != nil {
			return err
		}
		for i := range 2 * k {
			if uint64(both[i]) >= uint64(nodes) {
				return dataset.BadID(a.Name, 2*at+i, both[i], nodes)
			}
		}
		for i := range k {
			src[i], dst[i] = both[2*i], both[2*i+1]
		}
		if err := emit(src[:k], dst[:k]); err != nil {
			return err
		}
		at += k
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

// cscArrays takes the edges of indptr and indices.
func (im *edgeSet) cscArrays(ctx context.Context, ptr, idx *npy.Array) error {
	nodes := im.m.Nodes
	if len(ptr.Header.Shape) != 1 || ptr.Header.Shape[0] != nodes+1 {
		return errs.New(errs.Usage, "%s has shape %s, the %d nodes need (%d,)", ptr.Name,
			ptr.Header.ShapeString(), nodes, nodes+1)
	}
	if len(idx.Header.Shape) != 1 {
		return errs.New(errs.Usage, "%s has shape %s, must be one-dimensional", idx.Name,
			idx.Header.ShapeString())
	}
	per := int64(1) << 20 // nodes
	if !ptr.Seekable() || !idx.Seekable() {
		per = nodes
	}
	return im.edgesFrom(ctx, edges.Source{Name: idx.Name, Unit: "edges", Total: idx.Header.Shape[0],
		Parts: int((nodes + per - 1) / max(per, 1)),
		Read: func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			return readCSC(ptr, idx, nodes, int64(part)*per, min(int64(part+1)*per, nodes),
				emit, done)
		}})
}

// readCSC reads the edges to the nodes from..to.
func readCSC(ptr, idx *npy.Array, nodes, from, to int64, emit func(src, dst []int64) error,
	done func(int64)) error {
	total := idx.Header.Shape[0]
	rp, err := ptr.Reader(from)
	if err != nil {
		return err
	}
	defer rp.Close()
	bad := func(end, at int64) error {
		return errs.New(errs.Usage,
			"%s: offset %d at position %d does not rise from 0 to the %d entries of %s", ptr.Name,
			end, at, total, idx.Name)
	}
	offs := make([]int64, min(to-from+1, idsPerRead))
	if err := fill(rp, offs[:1]); err != nil {
		return err
	}
	pos := offs[0]
	if from == 0 && pos != 0 || pos < 0 || pos > total {
		return bad(pos, from)
	}
	ri, err := idx.Reader(pos)
	if err != nil {
		return err
	}
	defer ri.Close()
	src, dst := make([]int64, 0, idsPerRead), make([]int64, 0, idsPerRead)
	flush := func() error {
		if err := fill(ri, src); err != nil {
			return err
		}
		first := pos - int64(len(src))
		for i, v := range src {
			if uint64(v) >= uint64(nodes) {
				return dataset.BadID(idx.Name, first+int64(i), v, nodes)
			}
		}
		if err := emit(src, dst); err != nil {
			return err
		}
		done(int64(len(src)))
		src, dst = src[:0], dst[:0]
		return nil
	}
	for v := from; v < to; {
		k := min(to-v, int64(len(offs)))
		if err := fill(rp, offs[:k]); err != nil {
			return err
		}
		for _, end := range offs[:k] {
			if end < pos || end > total {
				return bad(end, v+1)
			}
			for pos < end {
				n := min(end-pos, int64(cap(dst)-len(dst)))
				for range n {
					dst = append(dst, v)
				}
				src = src[:len(dst)]
				if pos += n; len(dst) == cap(dst) {
					if err := flush(); err != nil {
						return err
					}
				}
			}
			v++
		}
	}
	if to == nodes && pos != total {
		return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", ptr.Name, pos,
			idx.Name, total)
	}
	return flush()
}

// partEdges is how many edges a part of an array has: many times a batch, and enough parts for all
// cores. Tests make it small.
var partEdges int64 = 4 << 20

// pairEdges are the edges src[i] → dst[i] of two seekable arrays.
func pairEdges(src, dst *npy.Array, nodes int64) edges.Source {
	n := src.Header.Elements()
	parts := int(max(1, (n+partEdges-1)/partEdges))
	return edges.Source{Name: src.Name, Unit: "edges", Total: n, Parts: parts,
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			from, to := int64(part)*partEdges, min(n, int64(part+1)*partEdges)
			rs, err := src.Reader(from)
			if err != nil {
				return err
			}
			defer rs.Close()
			rd, err := dst.Reader(from)
			if err != nil {
				return err
			}
			defer rd.Close()
			s, d := make([]int64, 32<<10), make([]int64, 32<<10)
			for at := from; at < to; {
				k := int(min(int64(len(s)), to-at))
				if err := fill(rs, s[:k]); err != nil {
					return err
				}
				if err := fill(rd, d[:k]); err != nil {
					return err
				}
				for i := range k {
					if uint64(s[i]) >= uint64(nodes) {
						return dataset.BadID(src.Name, at+int64(i), s[i], nodes)
					}
					if uint64(d[i]) >= uint64(nodes) {
						return dataset.BadID(dst.Name, at+int64(i), d[i], nodes)
					}
				}
				if err := emit(s[:k], d[:k]); err != nil {
					return err
				}
				done(int64(k))
				at += int64(k)
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
			return nil
		}}
}

// offsetEdges are the edges of two seekable arrays: the neighbours of v are idx[ptr[v]:ptr[v+1]],
// which are the sources of edges to v with in, and the destinations of edges from v without. A part
// is a range of nodes.
func offsetEdges(ptr, idx *npy.Array, nodes int64, in bool) edges.Source {
	total := idx.Header.Elements()
	parts := max(1, min((total+partEdges-1)/partEdges, nodes))
	return edges.Source{Name: idx.Name, Unit: "edges", Total: total, Parts: int(parts),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			v, last := nodes/parts*int64(part)+min(int64(part), nodes%parts),
				nodes/parts*int64(part+1)+min(int64(part+1), nodes%parts)
			rp, err := ptr.Reader(v)
			if err != nil {
				return err
			}
			defer rp.Close()
			offs := make([]int64, 16<<10)
			bad := func(at, x int64) error {
				return errs.New(errs.Usage,
					"%s: offset %d at position %d does not rise from 0 to the %d entries of %s",
					ptr.Name, x, at, total, idx.Name)
			}
			if err := fill(rp, offs[:1]); err != nil {
				return err
			}
			pos := offs[0]
			if pos < 0 || pos > total || v == 0 && pos != 0 {
				return bad(v, pos)
			}
			ri, err := idx.Reader(pos)
			if err != nil {
				return err
			}
			defer ri.Close()
			ids, own := make([]int64, 32<<10), make([]int64, 32<<10)
			n := 0 // edges that wait to be emitted
			flush := func() error {
				if n == 0 {
					return nil
				}
				if err := fill(ri, ids[:n]); err != nil {
					return err
				}
				for i, x := range ids[:n] {
					if uint64(x) >= uint64(nodes) {
						return dataset.BadID(idx.Name, pos-int64(n)+int64(i), x, nodes)
					}
				}
				s, d := ids[:n], own[:n]
				if !in {
					s, d = d, s
				}
				if err := emit(s, d); err != nil {
					return err
				}
				done(int64(n))
				n = 0
				return ctx.Err()
			}
			for v < last {
				k := int(min(int64(len(offs)), last-v))
				if err := fill(rp, offs[:k]); err != nil {
					return err
				}
				for _, end := range offs[:k] {
					if end < pos || end > total {
						return bad(v+1, end)
					}
					for ; pos < end; pos++ {
						own[n] = v
						if n++; n == len(own) {
							pos++ // flush names positions from what was taken
							err := flush()
							if pos--; err != nil {
								return err
							}
						}
					}
					v++
				}
			}
			if err := flush(); err != nil {
				return err
			}
			if last == nodes && pos != total {
				return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", ptr.Name, pos,
					idx.Name, total)
			}
			return nil
		}}
}
