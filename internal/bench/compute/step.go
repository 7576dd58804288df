package compute

import (
	"cmp"
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
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/philox"
	"helios/internal/simd"
)

func init() {
	Groups = append(Groups,
		Group{"step",
			"whole training steps of a model (option model) on sampled mini-batches of a generated graph (option nodes and what follows)",
			true, stepCases})
}

// StepShape is a training step to measure.
type StepShape struct {
	Model     string  `option:"model" use:"setting" oneof:"@models" default:"sage" usage:"model of a step"` // one of gnn.Archs; empty: gnn.DefaultArch
	Nodes     int64   `option:"nodes" default:"1000000" usage:"nodes of the steps' graph"`                  // of the generated graph
	AvgDegree float64 `option:"avg-degree" default:"15" usage:"its mean number of in-neighbours"`
	Batch     int     `option:"batch-size" range:"1..1048576" default:"8000" usage:"seeds of a step"`
	Fanouts   []int   `option:"fanout" ints:"-1" default:"25,10" arg:"F1,F2,…" usage:"neighbours sampled per hop of a step F1,F2,…, the seeds' first"`
	Dim       int     `option:"dim" range:"1..1048576" default:"1024" usage:"features of a step"`
	Hidden    int     `option:"hidden" range:"1..1048576" default:"256" usage:"hidden units of a step"`
	Classes   int     `option:"classes" range:"1..1048576" default:"47" usage:"classes of a step"`
}

func (s *StepShape) String() string {
	f := make([]string, len(s.Fanouts))
	for i, n := range s.Fanouts {
		f[i] = fmt.Sprint(n)
	}
	return fmt.Sprintf("step:%s %dx%dx%d batch %d fanout %s", s.name(), s.Dim, s.Hidden, s.Classes,
		s.Batch, strings.Join(f, ","))
}

func (s *StepShape) name() string { return cmp.Or(s.Model, gnn.DefaultArch) }

func stepCases(c *Config) ([]Case, error) {
	s := &c.Step
	if _, err := s.network(); err != nil {
		return nil, err
	}
	if s.Batch < 1 || int64(s.Batch) > s.Nodes {
		return nil, errs.New(errs.Usage,
			"a batch of %d from %d nodes: give 1 to as many as there are nodes", s.Batch, s.Nodes)
	}
	var out []Case
	for _, prec := range c.precisions() {
		out = append(out, Case{
			Name: s.String(), Kernel: "step", Precision: prec, Sum: true,
			Open: func(dev cuda.Device) (*Run, error) { return s.open(dev, c, prec) },
		})
	}
	return out, nil
}

// stepPattern is the number of rows of features that are drawn; x repeats them.
const stepPattern = 4096

// stepData is a sampled mini-batch with features and labels on a device.
type stepData struct {
	topo   *graph.DeviceTopology
	smp    *graph.Sampler
	mb     *graph.MiniBatch
	mem    *buffers
	stream cuda.Stream
	x      cuda.DevicePtr
	labels cuda.DevicePtr
	rows   []float32 // stepPattern × Dim
}

func (d *stepData) close() (err error) {
	var list []error
	if d.stream != nil {
		list = append(list, d.stream.Close())
	}
	if d.mem != nil {
		list = append(list, d.mem.close())
	}
	if d.mb != nil {
		list = append(list, d.mb.Close())
	}
	if d.smp != nil {
		list = append(list, d.smp.Close())
	}
	if d.topo != nil {
		list = append(list, d.topo.Close())
	}
	return errors.Join(list...)
}

// data samples a batch of so many seeds and fills what it trains on: the same on every device.
func (s *StepShape) data(dev cuda.Device, cfg *Config, batch int) (_ *stepData, err error) {
	if cfg.topo == nil {
		if cfg.topo, err = graph.Synthetic(s.Nodes, s.AvgDegree, false, cfg.Seed); err != nil {
			return nil, err
		}
	}
	arch, err := gnn.ArchOf(s.Model)
	if err != nil {
		return nil, err
	}
	d := &stepData{mem: &buffers{dev: dev}}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.topo, err = graph.Attach(dev, cfg.topo); err != nil {
		return nil, err
	}
	if d.smp, err = graph.NewSampler(dev, d.topo, graph.SamplerConfig{Fanouts: s.Fanouts,
		Seed: cfg.Seed, Degrees: arch.Degrees()}); err != nil {
		return nil, err
	}
	if d.mb, err = d.smp.NewMiniBatch(); err != nil {
		return nil, err
	}
	if d.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench step"}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	ids := make([]int64, cfg.topo.NumNodes)
	for i := range ids {
		ids[i] = int64(i)
	}
	seeds := make([]int64, len(ids))
	graph.Shuffle(seeds, ids, cfg.Seed, 0)
	if err = d.smp.Begin(ctx, d.stream, d.mb, 0, 0, seeds[:batch]); err != nil {
		return nil, err
	}
	for h := range s.Fanouts {
		if err = d.smp.Hop(ctx, d.stream, d.mb, h); err != nil {
			return nil, err
		}
	}
	frontier, row := d.mb.HopEnd[len(s.Fanouts)], int64(s.Dim)*4
	pattern, labels := d.mem.floats(stepPattern*int64(s.Dim)), d.mem.floats(int64(batch))
	d.x, d.labels, d.rows = d.mem.alloc(cuda.MemDevice, frontier*row), labels.p, pattern.v
	if err = d.mem.err; err != nil {
		return nil, err
	}
	cfg.fill(pattern.v, 6)
	key := philox.Key(cfg.Seed, philox.StreamBench)
	classes := view32[int32](labels)
	for i := range classes {
		classes[i] = int32(philox.Block(key,
			[4]uint32{uint32(i), 0, 7, 0xc0})[0] % uint32(s.Classes))
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

// work returns what a step computes and the least that it moves: each operand of a product and each
// row of an aggregate's list once. Of models other than the default, it is what their kernels say
// for models of time.
func (s *StepShape) work(mb *graph.MiniBatch) (flops, bytes float64) {
	L := len(s.Fanouts)
	if s.name() != gnn.DefaultArch {
		net, err := s.network()
		if err != nil {
			return 0, 0
		}
		params := 0.0
		for l := range L {
			b := mb.Blocks[L-1-l]
			shape := gnn.BlockShape{Dst: b.NumDst, Src: b.NumSrc, Edges: b.NumEdges}
			for _, w := range append(net.LayerForward(l, shape), net.LayerBackward(l, shape)...) {
				flops += w.Flops
				bytes += float64(w.Bytes)
			}
			params += float64(net.LayerFloats(l))
		}
		return flops + 12*params, bytes + 4*7*params
	}
	params := 0.0
	for l := range L {
		b := mb.Blocks[L-1-l]
		in, out := float64(s.Dim), float64(s.Hidden)
		if l > 0 {
			in = float64(s.Hidden)
		}
		if l == L-1 {
			out = float64(s.Classes)
		}
		dst, src, edges := float64(b.NumDst), float64(b.NumSrc), float64(b.NumEdges)
		params += (2*in + 1) * out
		product, sum := 2*2*dst*in*out, 2*edges*in
		flops += sum + product // forward
		bytes += 4 * (edges*in + dst*in + edges + 2*dst + 2*dst*in + 2*in*out + dst*out)
		flops += product // gradients of the weights
		bytes += 4 * (2*dst*in + 2*dst*out + 2*in*out + dst*out)
		if l > 0 { // of the inputs
			flops += product + sum
			// by self and by neighbours
			bytes += 4 * (2*dst*out + 2*in*out + 2*dst*in)
			// gathered; lists made and read
			bytes += 4 * (edges*in + dst*in + 2*src*in + 2*edges + src + 2*edges)
		}
	}
	flops += 12 * params
	bytes += 4 * 7 * params // Adam: parameter, gradient and two moments in, three out
	return flops, bytes
}

// network is the model with the defaults of its kind.
func (s *StepShape) network() (gnn.ModelConfig, error) {
	net := gnn.ModelConfig{
		ModelSettings: gnn.ModelSettings{Model: s.name(), Hidden: s.Hidden},
		InDim:         s.Dim,
		Classes:       s.Classes,
		Layers:        len(s.Fanouts),
	}
	arch, err := gnn.ArchOf(s.Model)
	if err != nil {
		return net, err
	}
	arch.Default(&net.ModelSettings)
	return net, arch.Check(&net)
}

func (s *StepShape) model(dev cuda.Device, prec cuda.Precision, blas cuda.BLAS,
	seed uint64) (*gnn.Model, error) {
	net, err := s.network()
	if err != nil {
		return nil, err
	}
	net.Seed, net.Precision, net.BLAS = seed, prec, blas
	return gnn.NewModel(dev, net)
}

func (s *StepShape) open(dev cuda.Device, cfg *Config, prec cuda.Precision) (_ *Run, err error) {
	d, err := s.data(dev, cfg, s.Batch)
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
		m, err := s.model(dev, prec, blas, cfg.Seed)
		if err == nil {
			models = append(models, m)
		}
		return m, err
	}
	train := func(m *gnn.Model) func(st cuda.Stream) error {
		return func(
			st cuda.Stream) error {
			return m.Train(st, d.mb, d.x, d.labels, gnn.Step{LR: 1e-4})
		}
	}
	own, err := add(nil)
	if err != nil {
		return nil, err
	}
	run := &Run{Launch: train(own), Close: closeAll}
	run.Flops, run.Bytes = s.work(d.mb)
	for _, b := range slices.Backward(d.mb.Blocks) {
		run.Blocks = append(run.Blocks, Block{b.NumDst, b.NumSrc, b.NumEdges})
	}
	if cfg.Vendor != nil && dev.Info().Backend != "host" {
		rival, err := add(cfg.Vendor)
		if err != nil {
			return nil, err
		}
		run.Rival, run.RivalName = train(rival), cfg.Vendor.Name()
	}
	run.Check = func(ctx context.Context, st cuda.Stream) (out Checked, err error) {
		// only the default has a reference here; gnn's tests have those of the others
		if s.name() != gnn.DefaultArch {
			return out, s.twin(ctx, dev, cfg, prec, &out)
		}
		if out.Error, out.Bound, err = s.embeddings(ctx, st, own, d, prec, &out); err != nil {
			return out, err
		}
		if len(models) > 1 {
			if out.RivalError, _, err = s.embeddings(ctx, st, models[1], d, prec,
				&out); err != nil {
				return out, err
			}
			out.RivalBound = 2 * out.Bound
		}
		return out, s.twin(ctx, dev, cfg, prec, &out)
	}
	return run, nil
}

// seedsChecked is for how many seeds the embeddings of the whole batch are computed once more.
const seedsChecked = 8

// embeddings compares those of some seeds with float64 ones from the mini-batch's blocks. It
// returns the largest error as a share of the sum of the terms' sizes, and what rounding can give.
func (s *StepShape) embeddings(ctx context.Context, st cuda.Stream, m *gnn.Model, d *stepData,
	prec cuda.Precision, out *Checked) (worst, bound float64, err error) {
	if err := m.Infer(st, d.mb, d.x, d.labels); err != nil {
		return 0, 0, err
	}
	dim := m.EmbeddingDim()
	got := make([]float32, d.mb.NumSeeds*dim)
	if err := m.Embeddings(ctx, st, got); err != nil {
		return 0, 0, err
	}
	L := len(s.Fanouts)
	last := max(0, L-2) // the layer whose outputs these are
	weights := make([][]float32, len(m.Params()))
	for i, p := range m.Params() {
		if weights[i], err = floatsOf(ctx, d.mem, st, p.Value.Ptr(),
			int64(p.Rows)*int64(p.Cols)); err != nil {
			return 0, 0, err
		}
	}
	var indptr [][]int64
	var src [][]uint32
	for l := range last + 1 {
		b := d.mb.Blocks[L-1-l]
		raw, err := d.mem.read(ctx, st, b.Indptr.Ptr(), 8*(b.NumDst+1))
		if err != nil {
			return 0, 0, err
		}
		indptr = append(indptr, unsafe.Slice((*int64)(unsafe.Pointer(&raw[0])), b.NumDst+1))
		if raw, err = d.mem.read(ctx, st, b.Src.Ptr(), max(4, 4*b.NumEdges)); err != nil {
			return 0, 0, err
		}
		src = append(src, unsafe.Slice((*uint32)(unsafe.Pointer(&raw[0])), b.NumEdges))
	}
	var node func(l int, i int64) (v, size []float64)
	node = func(l int, i int64) (v, size []float64) {
		if l < 0 {
			row := d.rows[i%stepPattern*int64(s.Dim):][:s.Dim]
			v, size = make([]float64, s.Dim), make([]float64, s.Dim)
			for c, x := range row {
				v[c], size[c] = float64(x), math.Abs(float64(x))
			}
			return v, size
		}
		list := src[l][indptr[l][i]:indptr[l][i+1]]
		self, selfSize := node(l-1, i)
		mean, meanSize := make([]float64, len(self)), make([]float64, len(self))
		for _, j := range list {
			a, b := node(l-1, int64(j))
			for c := range a {
				mean[c] += a[c] / float64(len(list))
				meanSize[c] += b[c] / float64(len(list))
			}
		}
		width := s.Hidden
		if l == L-1 {
			width = s.Classes
		}
		v, size = make([]float64, width), make([]float64, width)
		ws, wn, bias := weights[3*l], weights[3*l+1], weights[3*l+2]
		for c := range width {
			v[c], size[c] = float64(bias[c]), math.Abs(float64(bias[c]))
			for k := range self {
				a, b := float64(ws[k*width+c]), float64(wn[k*width+c])
				v[c] += self[k]*a + mean[k]*b
				size[c] += selfSize[k]*math.Abs(a) + meanSize[k]*math.Abs(b)
			}
			if l < L-1 {
				v[c] = max(v[c], 0)
			}
		}
		return v, size
	}
	for e := range min(seedsChecked, d.mb.NumSeeds) {
		i := int64(e) * int64(d.mb.NumSeeds) / int64(min(seedsChecked, d.mb.NumSeeds))
		v, size := node(last, i)
		for c := range v {
			x := float64(got[i*int64(dim)+int64(c)])
			if e := math.Abs(x-v[c]) / max(size[c], math.SmallestNonzeroFloat32); e > worst ||
				math.IsNaN(e) {
				worst = e
				if out.Inexact == 0 {
					out.Where = fmt.Sprintf("embedding %d of seed %d is %v, expected %v", c, i,
						x, v[c])
				}
			}
			out.Elements++
		}
	}
	wide := max(s.Dim, s.Hidden)
	sums := float64(2*wide+slices.Max(append([]int{1}, s.Fanouts...))+16) * 0x1p-24
	if prec != cuda.FP32 {
		sums = 4*sums + 2.01*unit(prec)
	}
	return worst, float64(last+1) * sums, nil
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

// twinTolerance is how far loss and gradients may be from the host device's: the loss as a share of
// it, a gradient of the largest in its tensor. Rounded factors open some ReLUs and close others.
var twinTolerance = [...]float64{cuda.FP32: 1e-5, cuda.TF32: 1e-2, cuda.BF16: 6e-2}

// twin does one step of a small batch of the same kind here and on the host device, and compares
// losses and gradients. The host device itself is held against its kernels in Go, without vectors,
// in the same precision.
func (s *StepShape) twin(ctx context.Context, dev cuda.Device, cfg *Config, prec cuda.Precision,
	out *Checked) error {
	level, hostPrec := simd.Auto, cuda.FP32
	if dev.Info().Backend == "host" {
		level, hostPrec = simd.Generic, prec
	}
	host, err := cuda.NewHost(cuda.HostOptions{SMs: hostcpu.Count(), Kernels: level})
	if err != nil {
		return err
	}
	type result struct {
		loss  float64
		grads [][]float32
	}
	do := func(dev cuda.Device, prec cuda.Precision) (r result, err error) {
		d, err := s.data(dev, cfg, min(twinSeeds, s.Batch))
		if err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, d.close()) }()
		m, err := s.model(dev, prec, nil, cfg.Seed)
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
	want, err := do(host, hostPrec)
	if err = errors.Join(err, host.Close()); err != nil {
		return err
	}
	got, err := do(dev, prec)
	if err != nil {
		return err
	}
	most := twinTolerance[prec]
	if hostPrec == prec {
		most = twinTolerance[cuda.FP32]
	}
	if d := math.Abs(got.loss - want.loss); !(d <= most*math.Abs(want.loss)) {
		out.Inexact++
		out.Where = fmt.Sprintf("the loss of a batch of %d is %v, on the host device %v",
			min(twinSeeds, s.Batch), got.loss, want.loss)
	}
	for i, g := range got.grads {
		largest, worst := 0.0, 0.0
		for j := range g {
			largest = max(largest, math.Abs(float64(want.grads[i][j])))
			worst = max(worst, math.Abs(float64(g[j])-float64(want.grads[i][j])))
			out.Elements++
		}
		if !(worst <= most*largest) {
			out.Inexact++
			out.Where = fmt.Sprintf(
				"a gradient of tensor %d differs by %.2g from the host device's, of which the largest is %.2g",
				i, worst, largest)
		}
	}
	return nil
}
