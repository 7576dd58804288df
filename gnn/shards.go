package gnn

import (
	"fmt"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/shardtree"
)

// A step of the optimiser may cover several mini-batches, its shards. Gradient leaves each one's
// weighted gradient in a buffer, the buffers are added in the order of package shardtree, and Apply
// has Adam take the sum. Averages that a normalisation keeps travel with the gradients, in the
// places behind those that Adam changes.

// Shard is a mini-batch's place in an optimiser step.
type Shard struct {
	Index, Of int // the shard's number, from 0, and how many the step has
	// Weight is the share of the step's labelled seeds that the shard has.
	Weight float32
}

// shardSums are the sums of the shards that are there: neighbours in the order of their numbers.
type shardSums struct {
	buf   cuda.Buffer // float32[room, floats]
	room  int
	nodes []shardtree.Node
	of    int // shards of the step that they are of
	// given is set once the sum over the whole step came from outside (SetSum). It has all that was
	// added here, so no shard of the step is added again.
	given bool
}

// shardParams is the parameter block of shard_sum: Out = Weight · X, and + Y where there is one.
// Each operation is rounded by itself. Out may be X or Y.
type shardParams struct {
	Out, X, Y cuda.DevicePtr // float32[N]
	N         int64
	Weight    float32
	_         uint32
}

const (
	_ = uint(unsafe.Sizeof(shardParams{}) - 40)
	_ = uint(40 - unsafe.Sizeof(shardParams{}))
)

func init() { cuda.RegisterHost("shard_sum", shardSum) }

// next returns the shard that comes next, which at must be, or the last one that is there.
func (g *shardSums) next(shard Shard) (next int, err error) {
	next = shard.Index
	if g.given && shard.Of == g.of {
		return next + 1, nil
	}
	if n := len(g.nodes); n > 0 {
		next = g.nodes[n-1].End()
	}
	switch {
	case len(g.nodes) > 0 && shard.Of != g.of || shard.Index != next && shard.Index != next-1:
		return 0, errs.New(errs.Failed, "shard %d of %d comes behind shard %d of %d", shard.Index,
			shard.Of, next-1, g.of)
	case shard.Index == next && len(g.nodes) == g.room:
		return 0, errs.New(errs.Failed, "shard %d of %d: there is room for %d sums", shard.Index,
			shard.Of, g.room)
	}
	return next, nil
}

func shardSum(b *cuda.Block, p *shardParams) error {
	lo, hi := b.Range(p.N)
	out, x := view(p.Out, p.N)[lo:hi], view(p.X, p.N)[lo:hi]
	if p.Y == 0 {
		for i, v := range x {
			out[i] = v * p.Weight
		}
		return nil
	}
	y := view(p.Y, p.N)[lo:hi]
	for i, v := range x {
		out[i] = y[i] + float32(v*p.Weight)
	}
	return nil
}

// OpenShards makes room for the sums of shards, most of them at a time (shardtree.Room), and for so
// many gradients that Leaf leaves. A model without it has Train alone.
func (m *Model) OpenShards(room, leaves int) (err error) {
	m.sums.room = room
	m.sums.buf, err = m.params.dev.Alloc(cuda.MemDevice, int64(room+leaves)*m.GradientBytes(),
		"gradients of shards")
	return err
}

// GradientBytes is the size of a gradient: of each Root.
func (m *Model) GradientBytes() int64 { return m.params.n * 4 }

// Root is a sum of shards' gradients where the device has it: GradientBytes, all floats of it.
type Root struct {
	shardtree.Node
	At cuda.DevicePtr
}

func (m *Model) root(i int) cuda.DevicePtr {
	return m.sums.buf.Ptr() + cuda.DevicePtr(int64(i)*m.GradientBytes())
}

// Roots lists the sums of this step's shards so far, as few as the tree allows. They are there when
// the stream of Gradient has come to its end.
func (m *Model) Roots() (roots []Root) {
	for i, n := range m.sums.nodes {
		roots = append(roots, Root{n, m.root(i)})
	}
	return roots
}

// SetSum notes that the first of Roots now holds the sum over all n shards of a step, which others
// have added to. Where this model had none of them it still has room for the sum; SetSum returns
// its place. Until Apply the model takes a shard of this step for one that is there, whichever it
// is: an Apply that found no memory is tried again from its rank's last shard on.
func (m *Model) SetSum(n int) cuda.DevicePtr {
	m.sums.nodes, m.sums.of = append(m.sums.nodes[:0], shardtree.Node{Count: n}), n
	m.sums.given = true
	return m.root(0)
}

// Forget drops the shards of a step that will not be applied.
func (m *Model) Forget() { m.sums.nodes, m.sums.given = m.sums.nodes[:0], false }

// Gradient enqueues forward and backward pass of a shard and adds its gradient to those of the
// step's shards before it, which come in order. Arguments are as for Train; no parameter changes.
//
// After an *cuda.OutOfMemoryError it can be done again, as Train can: what was added stays added,
// and is not added twice.
func (m *Model) Gradient(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr,
	st Step, shard Shard) error {
	err := m.Push(stream, shard, func(to cuda.DevicePtr) error {
		return m.leaf(stream, mb, x, labels, st, shard.Weight, to)
	})
	if err != nil {
		return fmt.Errorf("gradient of batch %d of epoch %d: %w", st.Batch, st.Epoch, err)
	}
	return nil
}

// join adds neighbours that make a subtree, one launch at a time, so that each is known to be on
// its way, or not.
func (m *Model) join(stream cuda.Stream) error {
	g := &m.sums
	for range shardtree.Joins(g.nodes, g.of) {
		k := len(g.nodes) - 1
		if err := m.Add(stream, m.root(k-1), m.root(k-1), m.root(k)); err != nil {
			return err
		}
		g.nodes[k-1].Count += g.nodes[k].Count
		g.nodes = g.nodes[:k]
	}
	return nil
}

// Leaf enqueues a shard's weighted gradient into one of the places behind the sums (OpenShards) and
// returns where that is. It can be done again.
func (m *Model) Leaf(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr, st Step,
	weight float32, place int) (cuda.DevicePtr, error) {
	to := m.root(m.sums.room + place)
	err := m.leaf(stream, mb, x, labels, st, weight, to)
	if err != nil {
		err = fmt.Errorf("gradient of batch %d of epoch %d: %w", st.Batch, st.Epoch, err)
	}
	return to, err
}

// Push takes the gradient of a step's next shard in: put enqueues it, as Leaf left it, to its place
// on the stream. A shard that is there is not put again.
func (m *Model) Push(stream cuda.Stream, shard Shard, put func(to cuda.DevicePtr) error) error {
	g := &m.sums
	next, err := g.next(shard)
	if err != nil {
		return err
	}
	if shard.Index == next {
		if err := put(m.root(len(g.nodes))); err != nil {
			return err
		}
		g.nodes, g.of = append(g.nodes, shardtree.Node{First: shard.Index, Count: 1}), shard.Of
	}
	return m.join(stream)
}

// leaf enqueues a shard's weighted gradient.
func (m *Model) leaf(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr, st Step,
	weight float32, to cuda.DevicePtr) error {
	if labels == 0 {
		return errs.New(errs.Failed, "no labels")
	}
	s, err := m.begin(stream, mb, &st)
	if err != nil {
		return err
	}
	last, err := s.forward(x, labels, m.outcomeAt())
	if err == nil {
		err = s.backward(x)
	}
	if err == nil {
		err = s.finishNorms(Norm.leave)
	}
	if err == nil {
		err = m.weigh(&s.stepSink, to, s.grad(0), 0, weight)
	}
	if err = s.end(err); err == nil {
		m.mem.last = last
	}
	return err
}

// Add enqueues out = left + right, each a gradient in this device's memory. out may be one of them.
func (m *Model) Add(stream cuda.Stream, out, left, right cuda.DevicePtr) error {
	return m.weigh(&stepSink{stream: stream}, out, right, left, 1)
}

// weigh puts out = weight · x + y over all floats of a gradient into a step.
func (m *Model) weigh(q *stepSink, out, x, y cuda.DevicePtr, weight float32) error {
	n := m.params.n
	k, err := m.on.kernel("shard_sum")
	if err != nil {
		return err
	}
	return put(q, k, m.on.blocks(n, 4096, n/gpuItems),
		shardParams{Out: out, X: x, Y: y, N: n, Weight: weight})
}

// Apply enqueues an Adam step with the sum over all shards of a step, and forgets them. St is that
// of Train; errors name the step by its Epoch and Batch.
func (m *Model) Apply(stream cuda.Stream, st Step) error {
	g := &m.sums
	if len(g.nodes) != 1 || g.nodes[0] != (shardtree.Node{Count: g.of}) {
		return errs.New(errs.Failed,
			"apply at batch %d of epoch %d: the sum over %d shards is not there: %v", st.Batch,
			st.Epoch, g.of, g.nodes)
	}
	s := &step{network: m.net, parameters: &m.params, grid: m.on.grid, on: m.on, set: &st,
		stepSink: m.on.sink(stream), sum: m.root(0), turn: m.turn}
	err := s.finishNorms(Norm.take)
	if err == nil {
		err = s.adam(s.sum)
	}
	if err = s.end(err); err != nil {
		return fmt.Errorf("apply at batch %d of epoch %d: %w", st.Batch, st.Epoch, err)
	}
	m.params.adamStep++
	m.Forget()
	return nil
}
