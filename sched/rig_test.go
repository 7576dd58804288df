package sched

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/stripe"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/units"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/hier"
	hierspec "helios/sched/tiers/hier/spec"
	"helios/sched/tiers/static"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain())
	}
	prepare.FillRows = 100 // so that the tiny tiers take several sets
	code := m.Run()
	for _, dir := range atExit {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// graphSpec is a generated dataset; equal ones are made once per test binary.
type graphSpec struct {
	nodes  int64
	dim    int
	degree float64
	train  float64 // share of the nodes; 0 = the generator's choice
	kind   string  // sbm where empty
	bare   int     // types without rows
}

var (
	// rows of one LBA: read straight to their place
	tiny  = graphSpec{nodes: 1500, dim: 128, degree: 6}
	dense = graphSpec{nodes: 1500, dim: 20, degree: 6} // six rows to an LBA
	// several types of nodes and relations
	types  = graphSpec{nodes: 1500, dim: 36, degree: 6, kind: "typed"}
	tables = graphSpec{nodes: 1500, dim: 36, degree: 6, kind: "typed", bare: 3}
	padded = graphSpec{nodes: 1500, dim: 150, degree: 6} // 600 bytes in two LBAs
)

var made struct {
	sync.Mutex
	dir  map[graphSpec]string
	feat map[graphSpec][]byte
}

// generate makes the dataset once and opens it.
func (g graphSpec) generate(t testing.TB) *dataset.Dataset {
	t.Helper()
	made.Lock()
	defer made.Unlock()
	if made.dir == nil {
		made.dir, made.feat = map[graphSpec]string{}, map[graphSpec][]byte{}
	}
	if made.dir[g] == "" {
		root, err := os.MkdirTemp("", "helios-sched-")
		require.NoError(t, err)
		atExit = append(atExit, root)
		dir := filepath.Join(root, "g")
		require.NoError(t, build.Generate(context.Background(), build.GenerateOptions{
			Kind: cmp.Or(g.kind, "sbm"), Nodes: g.nodes, AvgDegree: g.degree, Classes: 5,
			Dim: g.dim, Seed: 7, Out: dir, TrainFraction: g.train, WithoutRows: g.bare,
		}))
		made.dir[g] = dir
	}
	d, err := dataset.Open(made.dir[g])
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// open is generate, and the features as the source has them.
func (g graphSpec) open(t testing.TB) (*dataset.Dataset, []byte) {
	t.Helper()
	d := g.generate(t)
	made.Lock()
	defer made.Unlock()
	if made.feat[g] == nil {
		b := make([]byte, d.Meta.Rows()*int64(g.dim)*4)
		require.NoError(t, d.ReadRows(0, b))
		made.feat[g] = b
	}
	return d, made.feat[g]
}

var atExit []string

// ssdSet is n RAM-backed SSDs that hold a dataset.
type ssdSet struct {
	file   bool // file-backed, O_DIRECT; else RAM
	poll   bool // for kernels that cannot wake who serves them
	paths  []string
	ssds   []*gpuio.SSD
	faults []*faultinject.Set
}

// bind makes n RAM SSDs and loads the dataset onto them. faults, where not empty, is armed on
// each SSD after loading.
func bind(t testing.TB, d *dataset.Dataset, n int, faults string) *ssdSet {
	t.Helper()
	return bindIn(t, d, n, testrig.MemoryDir(t), false, faults)
}

// bindIn makes the SSDs' files in dir.
func bindIn(t testing.TB, d *dataset.Dataset, n int, dir string, file bool, faults string) *ssdSet {
	t.Helper()
	s := &ssdSet{file: file}
	size := (d.Meta.Nodes*int64(d.Meta.RowBytes())*2/int64(n) + 8<<20) &^ 4095
	for i := range n {
		p := filepath.Join(dir, fmt.Sprintf("ssd%d.img", i))
		require.NoError(t, proxy.Create(p, size))
		s.paths = append(s.paths, p)
	}
	s.power(t, "")
	_, err := stripe.Load(context.Background(), d, s.ssds, stripe.LoadOptions{})
	require.NoError(t, err)
	if faults != "" {
		s.off(t)
		s.power(t, faults)
	}
	t.Cleanup(func() { s.off(t) })
	return s
}

func (s *ssdSet) power(t testing.TB, faults string) {
	t.Helper()
	s.ssds, s.faults = nil, nil
	for _, p := range s.paths {
		f, err := faultinject.Parse(faults)
		require.NoError(t, err)
		ssd, err := openPolled(p, !s.file, s.poll, f)
		require.NoError(t, err)
		s.ssds, s.faults = append(s.ssds, ssd), append(s.faults, f)
	}
}

func openSSD(path string, ram bool, f *faultinject.Set) (*gpuio.SSD, error) {
	return openPolled(path, ram, false, f)
}

func openPolled(path string, ram, poll bool, f *faultinject.Set) (*gpuio.SSD, error) {
	bus, err := proxy.Open(proxy.Config{Path: path, RAM: ram, PollDoorbells: poll})
	if err != nil {
		return nil, err
	}
	var b nvme.Bus = bus
	if !f.Empty() {
		b = faultbus.New(bus, f, faultbus.Options{})
	}
	c, err := nvme.Open(context.Background(), b, nvme.Options{})
	if err != nil {
		return nil, err
	}
	return &gpuio.SSD{Ctrl: c, Name: filepath.Base(path), BackingPath: path}, nil
}

func (s *ssdSet) off(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, x := range s.ssds {
		require.NoError(t, x.Ctrl.Close(ctx))
	}
	s.ssds = nil
}

// record holds what a run showed.
type record struct {
	res    *report.Result
	err    error
	blocks string // hash of every batch's frontier and blocks, in order
	seen   string // hash of every batch's rows, as training got them
	rows   int64  // rows compared with the source
	busy   []time.Duration
}

// trainStopped is train of a run that is interrupted at its step number stop.
func trainStopped(t testing.TB, stop int, cfg plan.Config, d *dataset.Dataset, feat []byte,
	s *ssdSet) record {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	heard := 0
	return train(t, ctx, cfg, d, feat, s, 2, report.Observer{Step: func(string, int, int) {
		if heard++; heard == stop {
			cancel()
		}
	}})
}

// trainInPieces interrupts a run at its step number stop, resumes it, and interrupts it so many
// steps later each time, until it comes to its end. It returns how many runs that took.
func trainInPieces(t testing.TB, stop, later int, cfg plan.Config, d *dataset.Dataset, feat []byte,
	s *ssdSet) (r record, runs int) {
	t.Helper()
	for ; ; stop += later {
		runs++
		if r = trainStopped(t, stop, cfg, d, feat, s); r.err == nil {
			return r, runs
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	}
}

// train runs cfg on a fresh host device and compares gathered rows with the source. It fails the
// test when the run leaves something behind.
func train(t testing.TB, ctx context.Context, cfg plan.Config, d *dataset.Dataset, feat []byte,
	s *ssdSet, workers int, obs report.Observer) record {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers})
	require.NoError(t, err)
	r := trainOn(t, ctx, dev, cfg, d, feat, s, obs)
	r.busy = dev.BusyWorkers()
	return r
}

// readBack is the first n bytes of a buffer wherever it is.
func readBack(t testing.TB, dev cuda.Device, b cuda.Buffer, n int64) []byte {
	t.Helper()
	if n == 0 {
		return nil
	}
	if mem := b.Bytes(); mem != nil {
		return mem[:n]
	}
	var g prepare.Stager
	st, err := dev.NewStream(cuda.StreamOptions{Name: "test"})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	v, err := g.View(ctx, dev, st, b, 0, n)
	require.NoError(t, err)
	v = append([]byte(nil), v...)
	require.NoError(t, g.Close())
	require.NoError(t, st.Close())
	return v
}

// trainOn is train on a device, which it closes.
func trainOn(t testing.TB, ctx context.Context, dev cuda.Device, cfg plan.Config,
	d *dataset.Dataset, feat []byte, s *ssdSet, obs report.Observer) record {
	t.Helper()
	before := hostmem.Usage()
	r := record{}
	if runsOn(cfg, &diskgnn.System) && cfg.PackedDir == "" { // not beside a dataset that other tests use
		cfg.PackedDir = filepath.Join(t.TempDir(), "packed")
	}
	if runsOn(cfg, &hier.System) && cfg.PartedDir == "" {
		cfg.PartedDir = filepath.Join(t.TempDir(), "parted")
	}
	h, seen := sha256.New(), sha256.New()
	onBatch := cfg.OnBatch
	cfg.OnBatch = func(epoch, index int, mb *graph.MiniBatch) {
		_, _ = fmt.Fprintln(h, epoch, index, mb.HopEnd)
		h.Write(readBack(t, dev, mb.Nodes, 8*mb.HopEnd[len(mb.HopEnd)-1]))
		for _, b := range mb.Blocks {
			h.Write(readBack(t, dev, b.Indptr, 8*(b.NumLists()+1)))
			if b.NumEdges > 0 {
				h.Write(readBack(t, dev, b.Src, 4*b.NumEdges))
			}
		}
		if onBatch != nil {
			onBatch(epoch, index, mb)
		}
	}
	rowBytes := d.Meta.RowBytes()
	bad := 0
	cfg.OnRows = func(nodes []int64, rows []float32) {
		seen.Write(unsafe.Slice((*byte)(unsafe.Pointer(&rows[0])), 4*len(rows)))
		for i, v := range nodes { // every row: the graphs are tiny
			got := rows[i*d.Meta.Dim : (i+1)*d.Meta.Dim]
			want := hostmem.View[float32](feat[v*int64(rowBytes):][:rowBytes])
			for k := range got {
				if got[k] != want[k] {
					bad++
					break
				}
			}
			r.rows++
		}
	}
	r.res, r.err = Train(ctx, cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}, obs)
	require.Zero(t, bad, "rows that differ from features.npy")
	r.blocks, r.seen = hex.EncodeToString(h.Sum(nil)), hex.EncodeToString(seen.Sum(nil))
	require.NoError(t, dev.Close(), "streams or buffers were left open")
	after := hostmem.Usage()
	for k, v := range after {
		if strings.HasPrefix(k, "topology") { // the dataset's, until it is closed
			continue
		}
		require.LessOrEqual(t, v, before[k], "hostmem for %q", k)
	}
	return r
}

// small is a configuration that trains the tiny graphs in well under a second.
func small() plan.Config {
	return plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 16, Dropout: 0.1},
		Mode:          static.ModeHelios,
		Fanouts:       []int{4, 3},
		Batch:         128,
		LR:            0.01,
		Seed:          3,
		Epochs:        2,
		Blocks:        4,
		OpTimeout:     time.Minute,
		GPUCache:      plan.NoCache(),
		CPUCache:      plan.NoCache(),
		HotnessDir:    plan.NoFolder,
	}
}

// wholeGraph has a mode of mega-batches train on the whole graph, as every other does: one part and
// no static nodes.
func wholeGraph(c *plan.Config) {
	if runsOn(*c, &hier.System) {
		c.Parts, c.StaticNodes = 1, hierspec.NoShare
	}
}

// percent is a share of the features, none for 0.
func percent(p float64) units.Budget {
	if p == 0 {
		return plan.NoCache()
	}
	return units.Budget{Percent: p}
}

// anyPipeline draws the name of a pipeline, but for one.
func anyPipeline(rng *rand.Rand, but string) string {
	names := plan.PipelineNames(func(p *plan.Pipeline) bool { return p.Name != but })
	return names[rng.IntN(len(names))]
}

// anyWhole draws the name of a pipeline that samples a mini-batch before it looks its rows up.
func anyWhole(rng *rand.Rand) string {
	names := plan.PipelineNames(func(p *plan.Pipeline) bool {
		return !p.PerHop && p.Name != plan.PipelineRunAhead
	})
	return names[rng.IntN(len(names))]
}

// runsOn reports whether a system keeps the rows of a configuration's runs.
func runsOn(c plan.Config, s *plan.System) bool {
	return c.System() == s
}
