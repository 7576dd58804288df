package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/simd"
	"helios/internal/units"
	"helios/sched"
)

func benchSampleCommand() *cli.Command {
	return &cli.Command{
		Name:      "sample",
		Usage:     "neighbour sampling: edges a second, audited",
		ArgsUsage: "[DATASET]",
		Description: "Samples mini-batches and does nothing with them. Needs no SSDs. Without a dataset the graph is made in\n" +
			"memory: even (nodes of about the same degree) or skewed (the degrees of R-MAT; the number of nodes is\n" +
			"rounded up to a power of two).\n" +
			"Lists of --workers and --kernels give a row for each combination on the host device, and each GPU of\n" +
			"--device one more (it reads the topology in CPU memory). They take turns: each samples the same\n" +
			"--batches mini-batches, --turns times; a rate is the median over the turns, with its range.\n" +
			"After that each row's audit samples some batches again and compares them with the topology (edges\n" +
			"there, none drawn twice, as many as degree and fanout allow); all rows must give the same bytes.\n" +
			"\"distinct\" is the new nodes over the edges, \"busy\" the share of the time in which kernels ran.\n" +
			"With ssd in --topology each row comes with the neighbour lists left in the dataset's file, too, through a cache of lists\n" +
			"(--neighbor-cache): \"from memory\" is the share of the edges that it had, \"read\" what a mini-batch read. The audit has\n" +
			"the topology in memory all the same.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "dataset", Usage: "sample the topology of this dataset `DIR` from its training nodes; may also be given as an argument"},
			oneOf("graph", "without a dataset", "even", []string{"even", "skewed"}, nil),
			&cli.Int64Flag{Name: "nodes", Value: 1_000_000, Usage: "its nodes"},
			&cli.Float64Flag{Name: "avg-degree", Value: 15, Usage: "its mean number of in-neighbours"},
			&cli.StringFlag{Name: "fanout", Value: "15,10,5", Usage: "neighbours sampled per hop `F1,F2,…`, the seeds' first; -1 takes all"},
			&cli.IntFlag{Name: "batch-size", Value: 1024, Usage: "seeds of a mini-batch"},
			&cli.StringFlag{Name: "topology", Value: sched.TopologyMemory, Usage: "where a dataset's neighbour lists are, `WHERE[,WHERE]`: " + strings.Join(sched.Topologies, ", ")},
			&cli.StringFlag{Name: "neighbor-cache", DefaultText: "10% with --topology ssd", Usage: "`BUDGET` of CPU memory for the lists of hot nodes, a size or a share of the topology"},
			devicesFlag(),
			&cli.StringFlag{Name: "workers", DefaultText: "1 and one per CPU", Usage: "worker slots of the host device `N[,N…]`"},
			&cli.StringFlag{Name: "kernels", Value: "auto", Usage: "instructions `LEVEL[,LEVEL…]`: " + strings.Join(simd.Names(), ", ")},
			&cli.IntFlag{Name: "batches", Value: 20, Usage: "mini-batches of a turn"},
			&cli.Float64Flag{Name: "seconds", DefaultText: "by --batches", Usage: "instead, about how long a row samples in all its turns"},
			&cli.IntFlag{Name: "turns", Value: 5, Usage: "turns of each row"},
			&cli.BoolFlag{Name: "degrees", Usage: "look up the degrees of all nodes too, as GCN needs them"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the graph, of the batches and of the draws"},
			resultsFlag(), overwriteFlag(),
		},
		Action: action(1, runBenchSample),
	}
}

// samplePlan is what "bench sample" is asked for.
type samplePlan struct {
	cfg                   graph.SamplerConfig
	devices               []string
	workers               []int
	levels                []simd.Level
	batch, batches, turns int
	seconds               float64 // 0: by batches
	topologies            []string
	lists                 units.Budget // of a topology on storage
}

func (e *env) samplePlan() (*samplePlan, error) {
	c := e.c
	p := &samplePlan{cfg: graph.SamplerConfig{Seed: c.Uint64("seed"), Degrees: c.Bool("degrees")}}
	var err error
	if p.cfg.Fanouts, err = units.ParseInts(c.String("fanout"), -1); err != nil {
		return nil, errs.New(errs.Usage, "--fanout: %w", err)
	}
	p.workers = []int{1}
	if n := runtime.NumCPU(); n > 1 {
		p.workers = append(p.workers, n)
	}
	if c.IsSet("workers") {
		if p.workers, err = e.numbers("workers"); err != nil {
			return nil, err
		}
	}
	if most := slices.Max(p.workers); most > 4096 {
		return nil, errs.New(errs.Usage, "--workers %d is not between 1 and 4096", most)
	}
	if p.devices, err = e.devices(); err != nil {
		return nil, err
	}
	if gpuOnly(p.devices) && (c.IsSet("workers") || c.IsSet("kernels")) {
		return nil, errs.New(errs.Usage, "--workers and --kernels are for the host device; add host to --device, or leave them out")
	}
	names, err := list("kernels", c.String("kernels"))
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		l, err := simd.Parse(n)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(p.levels, l) {
			p.levels = append(p.levels, l)
		}
	}
	if len(p.levels) == 0 {
		return nil, errs.New(errs.Usage, "--kernels is empty; choose among %s", strings.Join(simd.Names(), ", "))
	}
	for _, n := range []struct {
		flag string
		to   *int
	}{{"batch-size", &p.batch}, {"batches", &p.batches}, {"turns", &p.turns}} {
		if *n.to = c.Int(n.flag); *n.to < 1 || *n.to > 1<<24 {
			return nil, errs.New(errs.Usage, "--%s %d is not between 1 and %d", n.flag, *n.to, 1<<24)
		}
	}
	if c.IsSet("seconds") {
		if c.IsSet("batches") {
			return nil, errs.New(errs.Usage, "--batches and --seconds: give one of them")
		}
		if p.seconds = c.Float64("seconds"); !(p.seconds >= 0.001 && p.seconds <= 86400) {
			return nil, errs.New(errs.Usage, "--seconds %v is not between 0.001 and 86400", p.seconds)
		}
	}
	given := c.IsSet("dataset") || c.NArg() > 0
	if p.topologies, err = list("topology", c.String("topology")); err != nil {
		return nil, err
	}
	for i, t := range p.topologies {
		if !slices.Contains(sched.Topologies, t) || slices.Contains(p.topologies[:i], t) {
			return nil, errs.New(errs.Usage, "--topology %q: choose among %v, each once", c.String("topology"), sched.Topologies)
		}
	}
	switch ssd := slices.Contains(p.topologies, sched.TopologySSD); {
	case len(p.topologies) == 0:
		return nil, errs.New(errs.Usage, "--topology is empty; choose among %v", sched.Topologies)
	case ssd && !given:
		return nil, errs.New(errs.Usage, "--topology %s: a graph made in memory has no file; give a dataset, or leave it out", sched.TopologySSD)
	case !ssd && c.IsSet("neighbor-cache"):
		return nil, errs.New(errs.Usage, "--neighbor-cache: all of the topology is in memory; leave it out, or add --topology %s", sched.TopologySSD)
	}
	if p.lists, err = cacheBudget(c, "neighbor-cache", "10%"); err != nil {
		return nil, err
	}
	for _, f := range []string{"graph", "nodes", "avg-degree"} {
		if given && c.IsSet(f) {
			return nil, errs.New(errs.Usage, "--%s is for a graph made in memory; leave it out, or the dataset", f)
		}
	}
	return p, nil
}

// sampleRow is a row of results.
type sampleRow struct {
	Graph      string  `json:"graph"`
	Topology   string  `json:"topology"`
	Nodes      int64   `json:"nodes"`
	Edges      int64   `json:"edges"`
	Device     string  `json:"device"`
	Kernels    string  `json:"kernels"`
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
}

// sampleRig is what a row samples with.
type sampleRig struct {
	row      sampleRow
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

func (r *sampleRig) close() (err error) {
	for _, f := range slices.Backward(r.closures) {
		closing(&err, f)
	}
	r.closures = nil
	return err
}

// openSampleRig takes the device over, also when it fails.
func openSampleRig(t *graph.Topology, cfg graph.SamplerConfig, dev cuda.Device) (_ *sampleRig, err error) {
	r := &sampleRig{dev: dev, host: t, closures: []func() error{dev.Close}}
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
	if r.sampler, err = graph.NewSampler(r.dev, r.topo, cfg); err != nil {
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

// sample makes one mini-batch. It ends when that is done, not when the user interrupts: a kernel still writes to
// what the rig frees.
func (r *sampleRig) sample(ctx context.Context, cfg *graph.SamplerConfig, epoch, index int, seeds []int64) error {
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
func (r *sampleRig) turn(ctx context.Context, p *samplePlan, epoch, n int, order []int64, counted bool) error {
	var edges, nodes int64
	start, cpu, busy, reads := time.Now(), cpuTime(), r.stream.Busy()+r.sampler.Busy(), r.host.Storage()
	for i := range n {
		if err := r.sample(ctx, &p.cfg, epoch, i, batchOf(order, i, p.batch)); err != nil {
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

// sampleTopology is the graph to sample and the nodes to start from.
func (e *env) sampleTopology() (t *graph.Topology, seeds []int64, name string, d *dataset.Dataset, done func() error, err error) {
	c := e.c
	if c.IsSet("dataset") || c.NArg() > 0 {
		if d, err = e.openDataset(); err != nil {
			return nil, nil, "", nil, nil, err
		}
		if t, err = d.Topology(); err == nil {
			seeds, err = d.Split("train")
		}
		if err != nil {
			return nil, nil, "", nil, nil, errors.Join(err, d.Close())
		}
		name, done = d.Meta.Name, d.Close
		if len(seeds) > 0 {
			return t, seeds, name, d, done, nil
		}
	} else {
		name = c.String("graph")
		if t, err = graph.Synthetic(c.Int64("nodes"), c.Float64("avg-degree"), name == "skewed", c.Uint64("seed")); err != nil {
			return nil, nil, "", nil, nil, err
		}
		done = t.Close
	}
	seeds = make([]int64, min(t.NumNodes, 1<<22)) // all of them, or enough that are spread over the graph
	step := t.NumNodes / int64(len(seeds))
	for i := range seeds {
		seeds[i] = int64(i) * step
	}
	return t, seeds, name, d, done, nil
}

const (
	auditBatches = 2
	auditBudget  = 20_000_000 // neighbours that are compared per mini-batch
)

func runBenchSample(ctx context.Context, e *env) (err error) {
	p, err := e.samplePlan()
	if err != nil {
		return err
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	t, seeds, name, d, done, err := e.sampleTopology()
	if err != nil {
		return err
	}
	defer closing(&err, done)
	where := map[string]*graph.Topology{sched.TopologyMemory: t}
	if slices.Contains(p.topologies, sched.TopologySSD) {
		bytes, err := d.TopologyBytes()
		if err != nil {
			return err
		}
		cache := p.lists.Of(bytes)
		if p.lists.Percent != 0 && cache < graph.LeastNeighborCache(d.Meta.Nodes) {
			cache = 0 // as in training
		}
		far, err := d.TopologyOnSSD(ctx, graph.OutOfCoreOptions{CacheBytes: cache})
		if err != nil {
			return err
		}
		defer closing(&err, far.Close)
		where[sched.TopologySSD] = far
	}
	var rigs []*sampleRig
	open := func(topology string, dev cuda.Device, failure error) error {
		if failure != nil {
			return failure
		}
		r, failure := openSampleRig(where[topology], p.cfg, dev)
		if failure != nil {
			return failure
		}
		info := dev.Info()
		r.row = sampleRow{Graph: name, Topology: topology, Nodes: t.NumNodes, Edges: t.NumEdges, Device: info.Name, Kernels: info.Kernels, Workers: info.SMs,
			Fanouts: p.cfg.Fanouts, BatchSize: min(p.batch, len(seeds)), Turns: p.turns}
		rigs = append(rigs, r)
		return nil
	}
	defer closing(&err, func() (err error) {
		for _, r := range slices.Backward(rigs) {
			closing(&err, r.close)
		}
		return err
	})
	for _, d := range p.devices {
		for _, topology := range p.topologies {
			if d != "host" {
				dev, err := openGPU(d)
				if err := open(topology, dev, err); err != nil {
					return err
				}
				continue
			}
			for _, level := range p.levels {
				for _, workers := range p.workers {
					dev, err := openHost(workers, level)
					if err := open(topology, dev, err); err != nil {
						return err
					}
				}
			}
		}
	}
	order := make([]int64, len(seeds))
	batches := p.batches
	if err := p.measure(ctx, e, rigs, seeds, order, &batches); err != nil {
		return whenStopped(err, "the rows are incomplete: run it again, with fewer --turns or --batches")
	}
	table, failed := [][]string{}, 0
	for _, r := range rigs {
		if err := r.audit(ctx, p, t, order, rigs[0]); err != nil {
			return err
		}
		r.row.Batches = batches
		out.object(r.row)
		audit := "passed"
		if !r.row.Audited {
			failed++
			audit = "FAILED: " + r.row.AuditError
		}
		own := int64(0)
		for purpose, n := range r.row.Memory {
			if !strings.HasPrefix(purpose, "topology") {
				own += n
			}
		}
		table = append(table, []string{
			r.row.Device, r.row.Kernels, strconv.Itoa(r.row.Workers), units.FormatCount(r.row.Rate), units.FormatCount(r.row.Min) + "-" + units.FormatCount(r.row.Max),
			units.FormatCount(r.row.NodeRate), fmt.Sprintf("%.1f", r.row.NSPerEdge), fmt.Sprintf("%.1f", r.row.CPUPerEdge), share100(r.row.Busy), units.FormatCount(r.row.PerBatch),
			fmt.Sprintf("%.2f", r.row.Distinct), units.FormatBytes(own),
		})
		if len(where) > 1 {
			more := []string{r.row.Topology, "", ""}
			if s := r.row.Reads; s != nil {
				more[1] = share100(float64(s.CachedEdges) / float64(max(s.Edges, 1)))
				more[2] = units.FormatBytes(s.Bytes / max(r.batches, 1))
			}
			table[len(table)-1] = append(table[len(table)-1], more...)
		}
		table[len(table)-1] = append(table[len(table)-1], audit)
	}
	e.ui.Printf("%s: %d nodes, %d edges, topology of %s; fanout %s, %d seeds, %d turns of %d batches", name, t.NumNodes, t.NumEdges, units.FormatBytes(t.Bytes()),
		e.c.String("fanout"), rigs[0].row.BatchSize, p.turns, batches)
	if far := where[sched.TopologySSD]; far != nil {
		i := far.StorageInfo()
		e.ui.Printf("on storage: in memory offsets of %s and %d lists of hot nodes in %s", units.FormatBytes(i.OffsetBytes), i.CacheLists, units.FormatBytes(i.CacheBytes))
	}
	head := []string{"device", "kernels", "workers", "edges/s", "range", "nodes/s", "ns/edge", "CPU ns/edge", "busy", "edges/batch", "distinct", "memory"}
	if len(where) > 1 {
		head = append(head, "topology", "from memory", "read")
	}
	e.ui.Table(append(head, "audit"), table)
	if failed > 0 {
		return errs.New(errs.Device, "%d of %d rows failed their audit; the list says why", failed, len(rigs))
	}
	return nil
}

// measure lets the rows take turns. The first, uncounted, makes room and says how long a batch takes.
func (p *samplePlan) measure(ctx context.Context, e *env, rigs []*sampleRig, seeds, order []int64, batches *int) error {
	graph.Shuffle(order, seeds, p.cfg.Seed, 0)
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
	if p.seconds > 0 {
		*batches = min(max(int(p.seconds/float64(p.turns)/slowest), 1), 1<<24)
	}
	for turn := range p.turns {
		graph.Shuffle(order, seeds, p.cfg.Seed, turn+1)
		for i := range rigs {
			e.ui.Progress("bench sample", int64(turn*len(rigs)+i), int64(p.turns*len(rigs)))
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
func (r *sampleRig) audit(ctx context.Context, p *samplePlan, t *graph.Topology, order []int64, first *sampleRig) error {
	slices.Sort(r.rates)
	row := &r.row
	row.Rate, row.Min, row.Max = median(r.rates), r.rates[0], r.rates[len(r.rates)-1]
	row.NodeRate = row.Rate * float64(r.nodes) / float64(max(r.edges, 1))
	row.NSPerEdge, row.CPUPerEdge = 1e9/row.Rate, r.cpu*1e9/float64(max(r.edges, 1))
	row.Busy = r.busy / r.seconds
	row.PerBatch = float64(r.edges) / float64(r.batches)
	row.Distinct = float64(r.nodes-r.batches*int64(row.BatchSize)) / float64(max(r.edges, 1))
	row.Memory = r.dev.MemUsage()
	maps.DeleteFunc(row.Memory, func(purpose string, _ int64) bool { return strings.HasPrefix(purpose, "topology") })
	row.Memory["topology"] = r.host.Bytes()
	if r.host.OnStorage() {
		reads, info := r.reads, r.host.StorageInfo()
		row.Reads, row.Storage = &reads, &info
	}
	digest := r.counts
	var failure error
	for i := 0; i < auditBatches && failure == nil; i++ {
		seeds := batchOf(order, i, p.batch)
		if err := r.sample(ctx, &p.cfg, p.turns, i, seeds); err != nil {
			return err
		}
		mb, free, err := r.visible(ctx)
		if err != nil {
			return err
		}
		n, d, err := graph.Audit(t, p.cfg, mb, seeds, auditBudget)
		if ferr := free(); ferr != nil {
			return ferr
		}
		row.Checked += n
		digest = (digest ^ d) * 0x9E3779B97F4A7C15
		failure = err
	}
	row.Digest = fmt.Sprintf("%016x", digest)
	if failure == nil && row.Digest != first.row.Digest {
		failure = fmt.Errorf("the mini-batches differ from those of %s, %s with %d workers (digest %s, %s there)",
			first.row.Device, first.row.Kernels, first.row.Workers, row.Digest, first.row.Digest)
	}
	row.Audited = failure == nil
	if failure != nil {
		row.AuditError = failure.Error()
	}
	return nil
}

// visible is the mini-batch where the CPU can read it: a copy, if it is in a GPU's memory.
func (r *sampleRig) visible(ctx context.Context) (_ *graph.MiniBatch, free func() error, err error) {
	var copies []cuda.Buffer
	free = func() (err error) {
		for _, b := range copies {
			closing(&err, b.Free)
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

// cpuTime is what all threads have used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0 // it cannot fail for the process itself
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
