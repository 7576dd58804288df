package gnn

import (
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// NodeRows is the features of all nodes by their numbers, float32[N, InDim]; zero: none.
type NodeRows struct {
	At cuda.DevicePtr
	N  int64
}

// summer is a kind of model whose layer 0 reads the rows of sources that are no destinations in
// sums alone.
type summer interface{ sumsSources() }

func (sage) sumsSources() {}
func (gcn) sumsSources()  {}
func (gin) sumsSources()  {}

// inPlace is the ending of the host's kernels that sum rows where they are.
const inPlace = "_in_place"

// ReadsInPlace reports whether Step.Rows may be set.
func (m *Model) ReadsInPlace() bool {
	n := m.net
	_, sums := n.arch.(summer)
	return sums && !m.on.gpu && !n.learnsInput() && n.cfg.FeatureDropout == 0
}

// placedParams is the parameter block of kernels that end in inPlace. X has the rows of the
// destinations.
type placedParams struct {
	aggParams
	Nodes cuda.DevicePtr // int64[NumSrc], the sources' numbers
	Rows  NodeRows
}

const _ = -(unsafe.Sizeof(placedParams{}) ^ (unsafe.Sizeof(aggParams{}) + 24))

// rows sets the rows that a sum adds: those of X, or those of all nodes.
func (t *placedParams) rows(p *aggParams, sum *simd.RowSum) {
	if t == nil {
		sum.X = cuda.View[float32](p.X, p.NumSrc*p.Dim)
		return
	}
	sum.X = cuda.View[float32](t.Rows.At, t.Rows.N*p.Dim)
	sum.Map = cuda.View[int64](t.Nodes, p.NumSrc)
}

// aggregate enqueues a sum over layer l's block by the kernel of that name.
func (s *step) aggregate(l int, kernel string, a aggParams) error {
	cfg := s.rowBlocks(a.NumDst, 16, a.Dim)
	if l > 0 || s.set == nil || s.set.Rows.At == 0 {
		return launch(s, kernel, cfg, a)
	}
	return launch(s, kernel+inPlace, cfg,
		placedParams{aggParams: a, Nodes: pointer(s.mb.Nodes), Rows: s.set.Rows})
}

// registerSum registers a sum over a block in both ways.
func registerSum(name string, sum func(b *cuda.Block, p *aggParams, t *placedParams) error) {
	cuda.RegisterHost(name, func(b *cuda.Block, p *aggParams) error { return sum(b, p, nil) })
	cuda.RegisterHost(name+inPlace,
		func(b *cuda.Block, t *placedParams) error { return sum(b, &t.aggParams, t) })
}
