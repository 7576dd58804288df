package main

import (
	"fmt"
	"path"

	"helios/cuda"
	"helios/dataset"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/serve"
	"helios/internal/simd"
	"helios/sched"
)

// describeTypes adds the types and relations of a typed graph, which has features in files or not.
func describeTypes(info *serve.DatasetInfo, g *dataset.Schema, files bool) {
	for i := range g.NodeTypes {
		t := &g.NodeTypes[i]
		one := serve.NodeType{Name: t.Name, Nodes: t.Nodes, Dim: t.Dim}
		if files && t.Dim > 0 {
			one.Features = path.Join(t.Dir, dataset.FeaturesName)
		}
		info.Types = append(info.Types, one)
	}
	for i := range g.Relations {
		r := &g.Relations[i]
		info.Relations = append(info.Relations, serve.Relation{Src: r.Src, Name: r.Name, Dst: r.Dst,
			Edges: r.Edges, Indptr: path.Join(r.Dir, dataset.IndptrName),
			Indices: path.Join(r.Dir, dataset.IndicesName)})
	}
	info.Target = g.Tasks[0].Type
}

// fillTyped gives a mini-batch of a typed graph its sizes and tensors: rows, numbers and edges of
// each type and relation apart, as PyG has them. The frontier has the nodes of a type in a run for
// each hop, so its rows come together by one copy, which other rows need anyway.
func (l *servedLoader) fillTyped(to *serve.Batch, b *sched.Loaded) {
	to.TypeEnd = make([][]int64, len(l.schema.Types))
	for t := range l.schema.Types {
		n := int64(0)
		for h := range b.TypeEnd {
			lo, hi := b.TypeRange(h, t)
			n += hi - lo
			to.TypeEnd[t] = append(to.TypeEnd[t], n)
		}
		to.Tensors = append(to.Tensors, l.typedRows(b, t, n), l.typedNumbers(b, t, n))
	}
	to.Tensors = append(to.Tensors, l.targets(b))
	if b.Positions != nil {
		to.Tensors = append(to.Tensors, serve.Of("input_id", "int64", b.Positions))
	}
	places := l.placesOf(b)
	for r := range l.schema.Relations {
		dst := to.TypeEnd[l.schema.Relations[r].Dst]
		var drawn []int64
		for h := range b.Blocks {
			k := &b.Blocks[h]
			of := k.Lists[r]
			drawn = append(drawn, of.FirstEdge+of.Edges-k.Indptr[of.First+firstNew(dst, h)])
		}
		to.RelationEdges = append(to.RelationEdges, drawn)
		to.Tensors = append(to.Tensors, typedEdges(b, r, dst, drawn, places))
		if l.blocks {
			to.Tensors = append(to.Tensors, typedBlocks(b, r, places)...)
		}
	}
}

// firstNew is the first of a type's nodes that the hop before h added; of these hop h draws for
// edge_index.
func firstNew(end []int64, h int) int64 {
	if h == 0 {
		return 0
	}
	return end[h-1]
}

// placesOf returns the place of each node of the frontier among those of its type.
func (l *servedLoader) placesOf(b *sched.Loaded) []int64 {
	if n := len(b.Nodes); cap(l.places) < n {
		l.places = make([]int64, n+n/4)
	}
	places := l.places[:len(b.Nodes)]
	for t := range l.schema.Types {
		n := int64(0)
		for h := range b.TypeEnd {
			lo, hi := b.TypeRange(h, t)
			for i := lo; i < hi; i++ {
				places[i] = n
				n++
			}
		}
	}
	return places
}

// typedRows are the features of the n nodes of type t.
func (l *servedLoader) typedRows(b *sched.Loaded, t int, n int64) serve.Tensor {
	dim, stored := int64(l.schema.Types[t].Dim), l.l.RowBytes()
	x := serve.Tensor{Name: fmt.Sprintf("x.%d", t), DType: l.t.String(), Shape: []int64{n, dim},
		Bytes: 4 * n * dim}
	// each calls f with each run of rows, and the bytes of x before it.
	each := func(row int64, f func(lo, hi, offset int64) error) error {
		offset := int64(0)
		for h := range b.TypeEnd {
			lo, hi := b.TypeRange(h, t)
			if lo == hi {
				continue
			}
			if err := f(lo, hi, offset); err != nil {
				return err
			}
			offset += (hi - lo) * row
		}
		return nil
	}
	switch l.t {
	case rowtype.Int8:
		x.DType = rowtype.Float32.String()
		scales := l.l.Scales()
		x.Put = func(to []byte) {
			_ = each(4*dim, func(lo, hi, offset int64) error {
				for i := lo; i < hi; i++ {
					row := hostmem.View[float32](to[offset+4*(i-lo)*dim:][:4*dim])
					l.t.Decode(simd.Generic, row, b.Rows[i*stored:][:stored], scales[b.Nodes[i]])
				}
				return nil
			})
		}
		return x
	case rowtype.Float16, rowtype.BFloat16:
		x.Bytes /= 2
	}
	row := x.Bytes / max(n, 1)
	if l.gpu != nil && l.rowsGoAsTheyAre() && l.equallyWide() {
		x.CopyTo = func(to uint64) error {
			return each(row, func(lo, hi, offset int64) error {
				return l.gpu.stream.Copy(cuda.DevicePtr(to)+cuda.DevicePtr(offset),
					b.RowsAt+cuda.DevicePtr(lo*stored), (hi-lo)*stored)
			})
		}
		return x
	}
	x.Put = func(to []byte) {
		_ = each(row, func(lo, hi, offset int64) error {
			if row == stored {
				copy(to[offset:], b.Rows[lo*stored:hi*stored])
				return nil
			}
			for i := lo; i < hi; i++ {
				copy(to[offset+(i-lo)*row:][:row], b.Rows[i*stored:])
			}
			return nil
		})
	}
	return x
}

// equallyWide reports whether the rows of all types fill those of the SSDs.
func (l *servedLoader) equallyWide() bool {
	if l.schema == nil {
		return true
	}
	for _, t := range l.schema.Types {
		if int64(t.Dim) != l.dim {
			return false
		}
	}
	return true
}

// typedNumbers are those of the n nodes of type t, within the type.
func (l *servedLoader) typedNumbers(b *sched.Loaded, t int, n int64) serve.Tensor {
	first := l.schema.First(t)
	return serve.Tensor{Name: fmt.Sprintf("n_id.%d", t), DType: "int64", Shape: []int64{n},
		Bytes: 8 * n, Put: func(to []byte) {
			ids := hostmem.View[int64](to)[:0]
			for h := range b.TypeEnd {
				lo, hi := b.TypeRange(h, t)
				for _, v := range b.Nodes[lo:hi] {
					ids = append(ids, v-first)
				}
			}
		}}
}

// typedEdges is edge_index of relation r: at each hop the edges of the nodes that the hop before
// added to its destinations, of which end has the number after each hop.
func typedEdges(b *sched.Loaded, r int, end, drawn, places []int64) serve.Tensor {
	edges := int64(0)
	for _, n := range drawn {
		edges += n
	}
	return serve.Tensor{Name: fmt.Sprintf("edge_index.%d", r), DType: "int64",
		Shape: []int64{2, edges}, Bytes: 2 * edges * 8, Put: func(to []byte) {
			pairs, edge := hostmem.View[int64](to), int64(0)
			for h := range b.Blocks {
				k := &b.Blocks[h]
				of := k.Lists[r]
				for d := firstNew(end, h); d < of.N; d++ {
					for _, s := range k.Src[k.Indptr[of.First+d]:k.Indptr[of.First+d+1]] {
						pairs[edge], pairs[edges+edge] = places[s], d
						edge++
					}
				}
			}
		}}
}

// typedBlocks are the lists of relation r that each hop drew, for all of its destinations.
func typedBlocks(b *sched.Loaded, r int, places []int64) (all []serve.Tensor) {
	for h := range b.Blocks {
		k := &b.Blocks[h]
		of := k.Lists[r]
		all = append(all, serve.Tensor{Name: fmt.Sprintf("indptr.%d.%d", h, r), DType: "int64",
			Shape: []int64{of.N + 1}, Bytes: 8 * (of.N + 1), Put: func(to []byte) {
				lists := hostmem.View[int64](to)
				for i := range lists {
					lists[i] = k.Indptr[of.First+int64(i)] - of.FirstEdge
				}
			}}, serve.Tensor{Name: fmt.Sprintf("src.%d.%d", h, r), DType: "int64",
			Shape: []int64{of.Edges}, Bytes: 8 * of.Edges, Put: func(to []byte) {
				for i, s := range k.Src[of.FirstEdge:][:of.Edges] {
					hostmem.View[int64](to)[i] = places[s]
				}
			}})
	}
	return all
}
