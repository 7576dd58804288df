package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
)

// sampleConfig chooses the measurement.
type sampleConfig struct {
	sampler graph.SamplerConfig
	batch   int // seeds of a mini-batch
	batches int // mini-batches of a turn
	turns   int
}

// benchSample samples mini-batches of a generated graph on all devices in turns, and audits them:
// edges are the topology's, none twice, as many as they should be, and equal on all devices.
func benchSample(ctx context.Context, b *bench) (err error) {
	var c sampleConfig
	dir := b.String("dataset", "", "sample the graph of the dataset in `DIR`, from its training nodes")
	nodes := b.Int64("nodes", 1_000_000, "else, nodes of a graph with 15 in-neighbours in the mean")
	b.intsVar(&c.sampler.Fanouts, "fanout", "15,10,5",
		"neighbours sampled per hop `F1,F2,…`, the seeds' first")
	b.IntVar(&c.batch, "batch-size", 1024, "seeds of a mini-batch")
	b.IntVar(&c.batches, "batches", 20, "mini-batches of a turn")
	b.IntVar(&c.turns, "turns", leastTurns, "turns of each device")
	if err := b.parse(); err != nil {
		return err
	}
	if min(c.batch, c.batches, c.turns) < 1 || *nodes < 1 {
		return errors.New("-nodes, -batch-size, -batches, -turns: give numbers of at least 1")
	}
	c.sampler.Seed = benchSeed
	t, seeds, done, err := openGraph(*dir, *nodes)
	if err != nil {
		return err
	}
	defer errs.Closing(&err, done)
	var sources []source
	defer errs.Closing(&err, func() (err error) {
		for _, s := range slices.Backward(sources) {
			errs.Closing(&err, s.device.Close)
		}
		return err
	})
	if err := b.open(func(dev cuda.Device) error {
		sources = append(sources, source{dev, t})
		return nil
	}); err != nil {
		return err
	}
	rows, err := measureSampling(ctx, c, sources, seeds, t)
	for i := range rows {
		errs.Closing(&err, func() error { return b.row(&rows[i], rows[i].AuditError) })
	}
	return err
}

// openGraph returns the graph of a dataset and its training nodes, or a generated graph and nodes
// all over it.
func openGraph(dir string, nodes int64) (t *graph.Topology, seeds []int64, done func() error,
	err error) {
	if dir != "" {
		d, err := dataset.Open(dir)
		if err != nil {
			return nil, nil, nil, err
		}
		if t, err = d.Topology(); err == nil {
			seeds, err = d.Split("train")
		}
		if err == nil && len(seeds) == 0 {
			err = fmt.Errorf("dataset %s has no training nodes", dir)
		}
		if err != nil {
			return nil, nil, nil, errors.Join(err, d.Close())
		}
		return t, seeds, d.Close, nil
	}
	if t, err = graph.Synthetic(nodes, 15, false, benchSeed); err != nil {
		return nil, nil, nil, err
	}
	seeds = make([]int64, min(t.NumNodes, 1<<22))
	for i := range seeds {
		seeds[i] = int64(i) * (t.NumNodes / int64(len(seeds)))
	}
	return t, seeds, t.Close, nil
}

// source is a way to sample: a device with a topology.
type source struct {
	device   cuda.Device
	topology *graph.Topology
}

// measureSampling lets the sources sample mini-batches of the seeds in turns and audits each
// against a topology. All sources must give the same mini-batches; a failed audit is no error: the
// row tells it.
func measureSampling(ctx context.Context, c sampleConfig, sources []source, seeds []int64,
	audit *graph.Topology) (rows []sampleRow, err error) {
	var rigs []*sampleRig
	defer errs.Closing(&err, func() (err error) {
		for _, r := range slices.Backward(rigs) {
			errs.Closing(&err, r.close)
		}
		return err
	})
	for _, s := range sources {
		r, err := c.open(s, len(seeds))
		if err != nil {
			return nil, err
		}
		rigs = append(rigs, r)
	}
	order := make([]int64, len(seeds))
	if err := c.measure(ctx, rigs, seeds, order); err != nil {
		return nil, err
	}
	for _, r := range rigs {
		if err := r.audit(ctx, &c, audit, order, rigs[0]); err != nil {
			return nil, err
		}
		rows = append(rows, r.row)
	}
	return rows, nil
}

// sampleRow is a row of results.
type sampleRow struct {
	Nodes      int64   `json:"nodes"`
	Edges      int64   `json:"edges"`
	Device     string  `json:"device"`
	Kernels    string  `json:"kernels"`
	Code       string  `json:"code,omitempty"` // cuda.Info.Code
	Workers    int     `json:"workers"`
	Fanouts    []int   `json:"fanouts"`
	BatchSize  int     `json:"batch_size"`
	Batches    int     `json:"batches"` // of a turn
	Turns      int     `json:"turns"`
	Rate       spread  `json:"edges_per_second"`
	CPUPerEdge float64 `json:"cpu_ns_per_edge"` // of the whole process
	Busy       float64 `json:"busy_share"`      // of the time in turns: a kernel ran
	PerBatch   float64 `json:"edges_per_batch"`
	Distinct   float64 `json:"distinct_fraction"` // new nodes over edges
	Checked    int64   `json:"checked_edges"`     // by the audit
	Digest     string  `json:"digest"`            // of the audited mini-batches
	Audited    bool    `json:"audited"`
	AuditError string  `json:"audit_error,omitempty"`
}

func (r *sampleRow) String() string {
	return fmt.Sprintf(
		"%s %s, %d workers: %s million edges/s, %.3g ns of CPU time an edge, kernels busy %.0f %%",
		r.Device, r.Kernels, r.Workers, r.Rate.by(1e6), r.CPUPerEdge, 100*r.Busy)
}

// sampleRig holds what a row samples with.
type sampleRig struct {
	row      sampleRow
	dev      cuda.Device
	topo     *graph.DeviceTopology
	stream   cuda.Stream
	sampler  *graph.Sampler
	mb       *graph.MiniBatch
	rates    []float64
	seconds  float64
	cpu      float64
	busy     float64
	edges    int64
	nodes    int64
	batches  int64
	counts   uint64 // digest of the numbers of nodes and edges of all batches
	closures []func() error
}

func (r *sampleRig) close() (err error) {
	for _, f := range slices.Backward(r.closures) {
		errs.Closing(&err, f)
	}
	r.closures = nil
	return err
}

// open makes what a source needs beside its device.
func (c *sampleConfig) open(s source, seeds int) (_ *sampleRig, err error) {
	t, info := s.topology, s.device.Info()
	r := &sampleRig{dev: s.device}
	r.row = sampleRow{Nodes: t.NumNodes, Edges: t.NumEdges,
		Device: info.Name, Kernels: info.Kernels, Workers: info.SMs,
		Fanouts: c.sampler.Fanouts, BatchSize: min(c.batch, seeds), Turns: c.turns}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.topo, err = graph.Attach(r.dev, t); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.topo.Close)
	if r.stream, err = r.dev.NewStream(cuda.StreamOptions{Name: "sample"}); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.stream.Close)
	if r.sampler, err = graph.NewSampler(r.dev, r.topo, c.sampler); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.sampler.Close)
	if r.mb, err = r.sampler.NewMiniBatch(); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.mb.Close)
	return r, nil
}

// batchTimeout bounds the sampling of one mini-batch.
const batchTimeout = 10 * time.Minute

// sample makes one mini-batch. It ends when that is done, not when the user interrupts: a kernel
// still writes to what the sampleRig frees.
func (r *sampleRig) sample(ctx context.Context, cfg *graph.SamplerConfig, epoch, index int,
	seeds []int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
	defer cancel()
	if err := r.sampler.Begin(ctx, r.stream, r.mb, epoch, index, seeds); err != nil {
		return err
	}
	for h := range cfg.Fanouts {
		if err := r.sampler.Hop(ctx, r.stream, r.mb, h); err != nil {
			return err
		}
	}
	return nil
}

// turn samples n batches of an epoch and counts them when counted is set.
func (r *sampleRig) turn(ctx context.Context, p *sampleConfig, epoch, n int, order []int64,
	counted bool) error {
	var edges, nodes int64
	start, cpu, busy := time.Now(), cpuTime(), r.stream.Busy()+r.sampler.Busy()
	for i := range n {
		if err := r.sample(ctx, &p.sampler, epoch, i, batchOf(order, i, p.batch)); err != nil {
			return err
		}
		for _, b := range r.mb.Blocks {
			edges += b.NumEdges
		}
		last := r.mb.HopEnd[len(r.mb.HopEnd)-1]
		nodes += last
		r.counts = (r.counts ^ uint64(edges)<<32 ^ uint64(last)) * 0x9E3779B97F4A7C15
	}
	if !counted {
		return nil
	}
	took := time.Since(start).Seconds()
	r.cpu += cpuTime() - cpu
	r.busy += (r.stream.Busy() + r.sampler.Busy() - busy).Seconds()
	r.seconds += took
	r.edges, r.nodes, r.batches = r.edges+edges, r.nodes+nodes, r.batches+int64(n)
	r.rates = append(r.rates, float64(edges)/took)
	return nil
}

// batchOf is the i-th batch of an order that is gone through again and again.
func batchOf(order []int64, i, size int) []int64 {
	size = min(size, len(order))
	per := len(order) / size
	return order[i%per*size:][:size]
}

const (
	auditBatches = 2
	auditBudget  = 20_000_000 // neighbours that are compared per mini-batch
)

// measure lets the rows take turns. The first, uncounted, makes room.
func (p *sampleConfig) measure(ctx context.Context, rigs []*sampleRig, seeds, order []int64) error {
	graph.Shuffle(order, seeds, p.sampler.Seed, 0)
	for _, r := range rigs {
		if err := r.turn(ctx, p, 0, min(p.batches, 3), order, false); err != nil {
			return err
		}
		r.counts = 0
	}
	for turn := range p.turns {
		graph.Shuffle(order, seeds, p.sampler.Seed, turn+1)
		for i := range rigs {
			r := rigs[(turn+i)%len(rigs)]
			if err := r.turn(ctx, p, turn+1, p.batches, order, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// audit samples some batches of the last turn again, compares them with the topology and with what
// the first row got, and fills the row.
func (r *sampleRig) audit(ctx context.Context, p *sampleConfig, t *graph.Topology, order []int64,
	first *sampleRig) error {
	row := &r.row
	row.Rate = spreadOf(r.rates)
	row.CPUPerEdge = r.cpu * 1e9 / float64(max(r.edges, 1))
	row.Busy = r.busy / r.seconds
	row.PerBatch = float64(r.edges) / float64(r.batches)
	row.Distinct = float64(r.nodes-r.batches*int64(row.BatchSize)) / float64(max(r.edges, 1))
	row.Batches, row.Code = p.batches, r.dev.Info().Code
	digest := uint64(0)
	var failure error
	for i := 0; i < auditBatches && failure == nil; i++ {
		seeds := batchOf(order, i, p.batch)
		if err := r.sample(ctx, &p.sampler, p.turns, i, seeds); err != nil {
			return err
		}
		mb, free, err := r.visible(ctx)
		if err != nil {
			return err
		}
		n, d, err := graph.Audit(t, p.sampler, mb, seeds, auditBudget)
		if ferr := free(); ferr != nil {
			return ferr
		}
		row.Checked += n
		digest = (digest ^ d) * 0x9E3779B97F4A7C15
		failure = err
	}
	row.Digest = fmt.Sprintf("%016x", digest)
	if failure == nil && (row.Digest != first.row.Digest || r.counts != first.counts) {
		failure = fmt.Errorf(
			"the mini-batches differ from those of %s, %s with %d workers (digest %s, %s there; of all numbers of nodes and edges %016x, %016x there)",
			first.row.Device, first.row.Kernels, first.row.Workers, row.Digest, first.row.Digest,
			r.counts, first.counts)
	}
	row.Audited = failure == nil
	if failure != nil {
		row.AuditError = failure.Error()
	}
	return nil
}

// visible is the mini-batch where the CPU can read it: a copy, if it is in a GPU's memory.
func (r *sampleRig) visible(ctx context.Context) (_ *graph.MiniBatch, free func() error,
	err error) {
	var copies []cuda.Buffer
	free = func() (err error) {
		for _, b := range copies {
			errs.Closing(&err, b.Free)
		}
		return err
	}
	if onHost(r.dev) {
		return r.mb, free, nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, free())
		}
	}()
	get := func(b cuda.Buffer, bytes int64) cuda.Buffer {
		if err != nil {
			return nil
		}
		var to cuda.Buffer
		if to, err = r.dev.Alloc(cuda.MemPinned, bytes, "audit"); err != nil {
			return nil
		}
		copies = append(copies, to)
		err = r.stream.Copy(to.Ptr(), b.Ptr(), bytes)
		return to
	}
	mb := *r.mb
	mb.Nodes = get(mb.Nodes, 8*mb.HopEnd[len(mb.HopEnd)-1])
	mb.Blocks = slices.Clone(mb.Blocks)
	for i := range mb.Blocks {
		b := &mb.Blocks[i]
		b.Indptr, b.Src = get(b.Indptr, 8*(b.NumDst+1)), get(b.Src, 4*b.NumEdges)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
	defer cancel()
	if serr := r.stream.Synchronize(ctx); err == nil {
		err = serr
	}
	return &mb, free, err
}
