package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/gnn"
	"helios/graph"
	"helios/internal/hostcpu"
	"helios/internal/philox"
	"helios/internal/simd"
)

// stepShape is a training step to measure.
type stepShape struct {
	model   string // one of gnn.Archs
	nodes   int64  // of the generated graph
	batch   int
	fanouts []int
	dim     int
	hidden  int
	classes int
}

// stepDegree is the mean number of in-neighbours in the generated graph.
const stepDegree = 15

// benchStep measures whole training steps on sampled mini-batches of a generated graph.
func benchStep(ctx context.Context, b *bench) error {
	c := &kernelConfig{}
	s := &c.step
	b.StringVar(&s.model, "model", gnn.DefaultArch, strings.Join(gnn.Archs(), ", "))
	b.Int64Var(&s.nodes, "nodes", 1_000_000, "nodes of the graph")
	b.IntVar(&s.batch, "batch-size", 8000, "seeds of a step")
	b.intsVar(&s.fanouts, "fanout", "25,10", "neighbours sampled per hop `F1,F2,…`, the seeds' first")
	b.IntVar(&s.dim, "dim", 1024, "features")
	b.IntVar(&s.hidden, "hidden", 256, "hidden units")
	b.IntVar(&s.classes, "classes", 47, "classes")
	c.productFlags(b)
	return b.measureKernels(ctx, c, func(c *kernelConfig, _ bool) ([]kernelCase, error) {
		return stepCases(c)
	})
}

func (s *stepShape) String() string {
	f := make([]string, len(s.fanouts))
	for i, n := range s.fanouts {
		f[i] = fmt.Sprint(n)
	}
	return fmt.Sprintf("step:%s %dx%dx%d batch %d fanout %s", s.model, s.dim, s.hidden, s.classes,
		s.batch, strings.Join(f, ","))
}

func stepCases(c *kernelConfig) ([]kernelCase, error) {
	s := &c.step
	if _, err := s.network(); err != nil {
		return nil, err
	}
	if s.batch < 1 || int64(s.batch) > s.nodes {
		return nil, fmt.Errorf(
			"a batch of %d from %d nodes: give 1 to as many as there are nodes", s.batch, s.nodes)
	}
	var out []kernelCase
	for _, prec := range c.precisions {
		out = append(out, kernelCase{
			Name: s.String(), Kernel: "step", Precision: prec, Sum: true,
			Open: func(dev cuda.Device) (*kernelRun, error) { return s.open(dev, c, prec) },
		})
	}
	return out, nil
}

// stepPattern is the number of rows of features that are drawn; x repeats them.
const stepPattern = 4096

// stepData is a sampled mini-batch with features and labels on a device.
type stepData struct {
	made   []func() error // closes of its parts
	mb     *graph.MiniBatch
	mem    *buffers
	stream cuda.Stream
	x      cuda.DevicePtr
	labels cuda.DevicePtr
	rows   []float32 // stepPattern × Dim
}

// close frees everything, the last one made first.
func (d *stepData) close() (err error) {
	for _, c := range slices.Backward(d.made) {
		err = errors.Join(err, c())
	}
	return err
}

// data samples a batch of so many seeds and fills what it trains on: the same on every device.
func (s *stepShape) data(dev cuda.Device, cfg *kernelConfig, batch int) (_ *stepData, err error) {
	if cfg.topo == nil {
		if cfg.topo, err = graph.Synthetic(s.nodes, stepDegree, false, benchSeed); err != nil {
			return nil, err
		}
	}
	arch, err := gnn.ArchOf(s.model)
	if err != nil {
		return nil, err
	}
	d := &stepData{mem: &buffers{dev: dev}}
	d.made = append(d.made, d.mem.close)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	if err := s.sample(ctx, dev, d, cfg, arch.Degrees(), batch); err != nil {
		return nil, err
	}
	frontier, row := d.mb.HopEnd[len(s.fanouts)], int64(s.dim)*4
	pattern, labels := d.mem.floats(stepPattern*int64(s.dim)), d.mem.floats(int64(batch))
	d.x, d.labels, d.rows = d.mem.alloc(cuda.MemDevice, frontier*row), labels.p, pattern.v
	if err = d.mem.err; err != nil {
		return nil, err
	}
	fill(pattern.v, 6)
	key := philox.Key(benchSeed, philox.StreamBench)
	classes := view32[int32](labels)
	for i := range classes {
		classes[i] = int32(philox.Block(key,
			[4]uint32{uint32(i), 0, 7, 0xc0})[0] % uint32(s.classes))
	}
	if err = d.mem.move(ctx, d.stream, true, pattern, labels); err != nil {
		return nil, err
	}
	// The pattern once, and then what is there, again and again.
	done := min(stepPattern, frontier) * row
	if err = d.stream.Copy(d.x, pattern.p, done); err != nil {
		return nil, err
	}
	for done < frontier*row {
		n := min(done, frontier*row-done)
		if err = d.stream.Copy(d.x+cuda.DevicePtr(done), d.x, n); err != nil {
			return nil, err
		}
		done += n
	}
	return d, d.stream.Synchronize(ctx)
}

// sample draws the mini-batch.
func (s *stepShape) sample(ctx context.Context, dev cuda.Device, d *stepData, cfg *kernelConfig,
	degrees bool, batch int) error {
	topo, err := graph.Attach(dev, cfg.topo)
	if err != nil {
		return err
	}
	d.made = append(d.made, topo.Close)
	smp, err := graph.NewSampler(dev, topo, graph.SamplerConfig{Fanouts: s.fanouts,
		Seed: benchSeed, Degrees: degrees})
	if err != nil {
		return err
	}
	d.made = append(d.made, smp.Close)
	if d.mb, err = smp.NewMiniBatch(); err != nil {
		return err
	}
	d.made = append(d.made, d.mb.Close)
	if d.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench"}); err != nil {
		return err
	}
	d.made = append(d.made, d.stream.Close)
	ids := make([]int64, cfg.topo.NumNodes)
	for i := range ids {
		ids[i] = int64(i)
	}
	seeds := make([]int64, len(ids))
	graph.Shuffle(seeds, ids, benchSeed, 0)
	if err := smp.Begin(ctx, d.stream, d.mb, 0, 0, seeds[:batch]); err != nil {
		return err
	}
	for h := range s.fanouts {
		if err := smp.Hop(ctx, d.stream, d.mb, h); err != nil {
			return err
		}
	}
	return nil
}

// work returns the operations and bytes of a step, as the models of time count them, and those of
// Adam: parameter, gradient and two moments in, three out.
func (s *stepShape) work(mb *graph.MiniBatch) (flops, bytes float64) {
	net, err := s.network()
	if err != nil {
		return 0, 0
	}
	params := 0.0
	for l := range s.fanouts {
		b := mb.Blocks[len(s.fanouts)-1-l]
		shape := gnn.BlockShape{Dst: b.NumDst, Src: b.NumSrc, Edges: b.NumEdges}
		for _, w := range append(net.LayerForward(l, shape), net.LayerBackward(l, shape)...) {
			flops += w.Flops
			bytes += float64(w.Bytes)
		}
		params += float64(net.LayerFloats(l))
	}
	return flops + 12*params, bytes + 4*7*params
}

// network is the model with the defaults of its kind.
func (s *stepShape) network() (gnn.ModelConfig, error) {
	net := gnn.ModelConfig{
		ModelSettings: gnn.ModelSettings{Model: s.model, Hidden: s.hidden},
		InDim:         s.dim,
		Classes:       s.classes,
		Layers:        len(s.fanouts),
	}
	arch, err := gnn.ArchOf(s.model)
	if err != nil {
		return net, err
	}
	arch.Default(&net.ModelSettings)
	return net, arch.Check(&net)
}

func (s *stepShape) newModel(dev cuda.Device, prec cuda.Precision, blas cuda.BLAS,
	seed uint64) (*gnn.Model, error) {
	net, err := s.network()
	if err != nil {
		return nil, err
	}
	net.Seed, net.Precision, net.BLAS = seed, prec, blas
	return gnn.NewModel(dev, net)
}

func (s *stepShape) open(dev cuda.Device, cfg *kernelConfig, prec cuda.Precision) (_ *kernelRun,
	err error) {
	d, err := s.data(dev, cfg, s.batch)
	if err != nil {
		return nil, err
	}
	var models []*gnn.Model
	closeAll := func() error {
		var list []error
		for _, m := range slices.Backward(models) {
			list = append(list, m.Close())
		}
		return errors.Join(append(list, d.close())...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll())
		}
	}()
	add := func(blas cuda.BLAS) (*gnn.Model, error) {
		m, err := s.newModel(dev, prec, blas, benchSeed)
		if err == nil {
			models = append(models, m)
		}
		return m, err
	}
	train := func(m *gnn.Model) func(cuda.Stream) error {
		return func(st cuda.Stream) error {
			return m.Train(st, d.mb, d.x, d.labels, gnn.Step{LR: 1e-4})
		}
	}
	own, err := add(nil)
	if err != nil {
		return nil, err
	}
	run := &kernelRun{Launch: train(own), Close: closeAll}
	run.Flops, run.Bytes = s.work(d.mb)
	for _, b := range slices.Backward(d.mb.Blocks) {
		run.Blocks = append(run.Blocks, block{b.NumDst, b.NumSrc, b.NumEdges})
	}
	if cfg.vendor != nil && !onHost(dev) {
		rival, err := add(cfg.vendor)
		if err != nil {
			return nil, err
		}
		run.Rival, run.RivalName = train(rival), cfg.vendor.Name()
	}
	run.Check = func(ctx context.Context, _ cuda.Stream) (out checked, err error) {
		return out, s.twin(ctx, dev, cfg, prec, &out)
	}
	return run, nil
}

// floatsOf copies n floats from the device.
func floatsOf(ctx context.Context, mem *buffers, st cuda.Stream, p cuda.DevicePtr,
	n int64) ([]float32, error) {
	raw, err := mem.read(ctx, st, p, n*4)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&raw[0])), n), nil
}

// twinSeeds is the batch of the step that both devices do.
const twinSeeds = 32

// twinTolerance bounds the distance of loss and gradients from the host device's: of the loss as a
// share of it, of a gradient as a share of the largest in its tensor. Rounded factors open some
// ReLUs and close others.
var twinTolerance = [...]float64{cuda.FP32: 1e-5, cuda.TF32: 1e-2, cuda.BF16: 6e-2}

// stepResult holds the loss and the gradients of a step, by tensor.
type stepResult struct {
	loss  float64
	grads [][]float32
}

// once does one step of a small batch on a device.
func (s *stepShape) once(ctx context.Context, dev cuda.Device, cfg *kernelConfig,
	prec cuda.Precision) (r stepResult, err error) {
	d, err := s.data(dev, cfg, min(twinSeeds, s.batch))
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	m, err := s.newModel(dev, prec, nil, benchSeed)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err = m.Train(d.stream, d.mb, d.x, d.labels, gnn.Step{LR: 1e-4}); err != nil {
		return r, err
	}
	if r.loss, _, _, err = m.Outcome(ctx, d.stream); err != nil {
		return r, err
	}
	for _, p := range m.Params() {
		// After one step Adam's first moment is the gradient times 1 - Beta1.
		g, err := floatsOf(ctx, d.mem, d.stream, p.M.Ptr(), int64(p.Rows)*int64(p.Cols))
		if err != nil {
			return r, err
		}
		r.grads = append(r.grads, g)
	}
	return r, nil
}

// twin does one step of a small batch of the same kind here and on the host device, and compares
// losses and gradients. The host device itself is held against its kernels in Go, without vectors,
// in the same precision; gnn's tests hold those against float64.
func (s *stepShape) twin(ctx context.Context, dev cuda.Device, cfg *kernelConfig,
	prec cuda.Precision, out *checked) error {
	level, hostPrec := simd.Auto, cuda.FP32
	if onHost(dev) {
		level, hostPrec = simd.Generic, prec
	}
	host, err := cuda.NewHost(cuda.HostOptions{SMs: hostcpu.Count(), Kernels: level})
	if err != nil {
		return err
	}
	want, err := s.once(ctx, host, cfg, hostPrec)
	if err = errors.Join(err, host.Close()); err != nil {
		return err
	}
	got, err := s.once(ctx, dev, cfg, prec)
	if err != nil {
		return err
	}
	tolerance := twinTolerance[prec]
	if hostPrec == prec {
		tolerance = twinTolerance[cuda.FP32]
	}
	if d := math.Abs(got.loss - want.loss); !(d <= tolerance*math.Abs(want.loss)) {
		out.wrong("the loss of a batch of %d is %v, on the host device %v",
			min(twinSeeds, s.batch), got.loss, want.loss)
	}
	for i, g := range got.grads {
		largest, worst := 0.0, 0.0
		for j := range g {
			largest = max(largest, math.Abs(float64(want.grads[i][j])))
			worst = max(worst, math.Abs(float64(g[j])-float64(want.grads[i][j])))
			out.Elements++
		}
		if !(worst <= tolerance*largest) {
			out.wrong("a gradient of tensor %d differs by %.2g from the host device's, of which"+
				" the largest is %.2g", i, worst, largest)
		}
	}
	return nil
}
