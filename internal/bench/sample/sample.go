// Package sample measures neighbour sampling, several ways in turns, and audits what was sampled.
package sample

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// Config chooses the measurement.
type Config struct {
	Sampler graph.SamplerConfig
	Graph   string  // its name
	Batch   int     `option:"batch-size" default:"1024" usage:"seeds of a mini-batch"` // seeds of a mini-batch
	Batches int     `option:"batches" default:"20" usage:"mini-batches of a turn"`     // of a turn
	Turns   int     `option:"turns" default:"5" usage:"turns of each row"`
	Seconds float64 // how long each source samples in all its turns, about; 0: by Batches

	Progress func(done, of int) // may be nil
}

// Source is a way to sample: a device with a topology.
type Source struct {
	Device   cuda.Device
	Topology *graph.Topology
	Place    string // where the topology's lists are
}

// Check refuses what cannot be measured.
func (c *Config) Check() error {
	for _, n := range []struct {
		key errs.Key
		n   int
	}{{"batch-size", c.Batch}, {"batches", c.Batches}, {"turns", c.Turns}} {
		if n.n < 1 || n.n > 1<<24 {
			return errs.New(errs.Usage, "%v %d is not between 1 and %d", n.key, n.n, 1<<24)
		}
	}
	if c.Seconds != 0 && !(c.Seconds >= 0.001 && c.Seconds <= 86400) {
		return errs.New(errs.Usage, "%v %v is not between 0.001 and 86400", errs.Key("seconds"),
			c.Seconds)
	}
	return nil
}

// Measure lets the sources sample mini-batches of the seeds in turns and audits each against a
// topology in memory. All sources must give the same mini-batches; a failed audit is no error: the
// row tells it.
func Measure(ctx context.Context, c Config, sources []Source, seeds []int64,
	audit *graph.Topology) (rows []Row, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	var rigs []*rig
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
		r.row.Batches, r.row.Sampled = c.Batches, r.batches
		r.row.Code = r.dev.Info().Code
		rows = append(rows, r.row)
	}
	return rows, nil
}

// Row is a row of results.
type Row struct {
	Graph      string  `json:"graph"`
	Topology   string  `json:"topology"`
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
	Rate       float64 `json:"edges_per_second"` // the median over the turns
	Min        float64 `json:"edges_per_second_min"`
	Max        float64 `json:"edges_per_second_max"`
	NodeRate   float64 `json:"nodes_per_second"` // of frontiers
	NSPerEdge  float64 `json:"ns_per_edge"`
	CPUPerEdge float64 `json:"cpu_ns_per_edge"` // of the whole process
	Busy       float64 `json:"busy_share"`      // of the time in turns: a kernel ran
	PerBatch   float64 `json:"edges_per_batch"`
	Distinct   float64 `json:"distinct_fraction"` // new nodes over edges
	// Bytes by purpose, the topology included.
	Memory map[string]int64 `json:"memory"`
	// Of a topology on storage: what was read in the turns, and how it is held.
	Reads      *graph.StorageStats `json:"topology_reads,omitempty"`
	Storage    *graph.StorageInfo  `json:"topology_storage,omitempty"`
	Checked    int64               `json:"checked_edges"` // by the audit
	Digest     string              `json:"digest"`        // of the audited mini-batches
	Audited    bool                `json:"audited"`
	AuditError string              `json:"audit_error,omitempty"`

	Sampled int64 `json:"-"` // mini-batches in all turns
}

// rig holds what a row samples with.
type rig struct {
	row      Row
	dev      cuda.Device
	host     *graph.Topology
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
	reads    graph.StorageStats
	counts   uint64 // digest of the numbers of nodes and edges of all batches
	closures []func() error
}

func (r *rig) close() (err error) {
	for _, f := range slices.Backward(r.closures) {
		errs.Closing(&err, f)
	}
	r.closures = nil
	return err
}

// open makes what a source needs beside its device.
func (c *Config) open(s Source, seeds int) (_ *rig, err error) {
	t, info := s.Topology, s.Device.Info()
	r := &rig{dev: s.Device, host: t}
	r.row = Row{Graph: c.Graph, Topology: s.Place, Nodes: t.NumNodes, Edges: t.NumEdges,
		Device: info.Name, Kernels: info.Kernels, Workers: info.SMs,
		Fanouts: c.Sampler.Fanouts, BatchSize: min(c.Batch, seeds), Turns: c.Turns}
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
	if r.sampler, err = graph.NewSampler(r.dev, r.topo, c.Sampler); err != nil {
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
// still writes to what the rig frees.
func (r *rig) sample(ctx context.Context, cfg *graph.SamplerConfig, epoch, index int,
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
func (r *rig) turn(ctx context.Context, p *Config, epoch, n int, order []int64,
	counted bool) error {
	var edges, nodes int64
	start, cpu, busy, reads := time.Now(), cpuTime(), r.stream.Busy()+r.sampler.Busy(),
		r.host.Storage()
	for i := range n {
		if err := r.sample(ctx, &p.Sampler, epoch, i, batchOf(order, i, p.Batch)); err != nil {
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
	r.cpu += (cpuTime() - cpu).Seconds()
	r.busy += (r.stream.Busy() + r.sampler.Busy() - busy).Seconds()
	r.reads = r.reads.Add(r.host.Storage().Sub(reads))
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

// measure lets the rows take turns. The first, uncounted, makes room and gives the time of a
// batch.
func (p *Config) measure(ctx context.Context, rigs []*rig, seeds, order []int64) error {
	batches := &p.Batches
	graph.Shuffle(order, seeds, p.Sampler.Seed, 0)
	slowest := 0.0
	for _, r := range rigs {
		warm := min(*batches, 3)
		if err := r.turn(ctx, p, 0, warm, order, false); err != nil {
			return err
		}
		start := time.Now()
		if err := r.turn(ctx, p, 0, warm, order, false); err != nil {
			return err
		}
		slowest = max(slowest, time.Since(start).Seconds()/float64(warm))
		r.counts = 0
	}
	if p.Seconds > 0 {
		*batches = min(max(int(p.Seconds/float64(p.Turns)/slowest), 1), 1<<24)
	}
	for turn := range p.Turns {
		graph.Shuffle(order, seeds, p.Sampler.Seed, turn+1)
		for i := range rigs {
			if p.Progress != nil {
				p.Progress(turn*len(rigs)+i, p.Turns*len(rigs))
			}
			r := rigs[(turn+i)%len(rigs)]
			if err := r.turn(ctx, p, turn+1, *batches, order, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// audit samples some batches of the last turn again, compares them with the topology and with what
// the first row got, and fills the row.
func (r *rig) audit(ctx context.Context, p *Config, t *graph.Topology, order []int64,
	first *rig) error {
	slices.Sort(r.rates)
	row := &r.row
	row.Rate, row.Min, row.Max = median(r.rates), r.rates[0], r.rates[len(r.rates)-1]
	row.NodeRate = row.Rate * float64(r.nodes) / float64(max(r.edges, 1))
	row.NSPerEdge, row.CPUPerEdge = 1e9/row.Rate, r.cpu*1e9/float64(max(r.edges, 1))
	row.Busy = r.busy / r.seconds
	row.PerBatch = float64(r.edges) / float64(r.batches)
	row.Distinct = float64(r.nodes-r.batches*int64(row.BatchSize)) / float64(max(r.edges, 1))
	row.Memory = r.dev.MemUsage()
	maps.DeleteFunc(row.Memory,
		func(purpose string, _ int64) bool { return strings.HasPrefix(purpose, "topology") })
	row.Memory["topology"] = r.host.Bytes()
	if r.host.OnStorage() {
		reads, info := r.reads, r.host.StorageInfo()
		row.Reads, row.Storage = &reads, &info
	}
	digest := uint64(0)
	var failure error
	for i := 0; i < auditBatches && failure == nil; i++ {
		seeds := batchOf(order, i, p.Batch)
		if err := r.sample(ctx, &p.Sampler, p.Turns, i, seeds); err != nil {
			return err
		}
		mb, free, err := r.visible(ctx)
		if err != nil {
			return err
		}
		n, d, err := graph.Audit(t, p.Sampler, mb, seeds, auditBudget)
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
func (r *rig) visible(ctx context.Context) (_ *graph.MiniBatch, free func() error, err error) {
	var copies []cuda.Buffer
	free = func() (err error) {
		for _, b := range copies {
			errs.Closing(&err, b.Free)
		}
		return err
	}
	if r.dev.Info().Backend == "host" {
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

// median of sorted values.
func median(v []float64) float64 { return (v[(len(v)-1)/2] + v[len(v)/2]) / 2 }

// cpuTime returns what all threads have used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0 // it cannot fail for the process itself
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
