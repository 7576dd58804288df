package planner_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/graph"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
	hierspec "helios/sched/tiers/hier/spec"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
)

// Keys of Plan.Busy.
const (
	resLookup   = "lookup"
	resSSDs     = "ssds"
	resLink     = "link"
	resTraining = "training"
	resCopies   = "copies to other GPUs"
	resNothing  = "nothing overlaps"
)

// closeEnough is the relative error of calibration.
const closeEnough = 0.01

func profile(t testing.TB, name string) *hardware.Profile {
	t.Helper()
	p, err := hardware.Load(name)
	require.NoError(t, err)
	return p
}

func skew(t testing.TB, text string) *planner.Popularity {
	t.Helper()
	p, err := planner.ParsePopularity(text)
	require.NoError(t, err)
	return p
}

// small is a plan that takes milliseconds.
func small(t testing.TB, mode string) planner.Options {
	return planner.Options{Find: tiers.Prediction,
		Config:   plan.Config{Mode: mode, Fanouts: []int{5, 5}, Batch: 32},
		Hardware: cost.Hardware{Profile: profile(t, "a100-p5510x12"), SSDs: 2},
		Graph: planner.Graph{Name: "s", Nodes: 100_000, Edges: 1_500_000, Dim: 128, Classes: 8,
			Train: 0.05},
		Popularity: skew(t, "10%:60%"), Batches: 6,
	}
}

func find(t testing.TB, o planner.Options, vary func(*planner.Options)) *planner.Plan {
	t.Helper()
	p, err := planner.New(known(o), report.Observer{})
	require.NoError(t, err)
	x, err := p.Plan(context.Background(), vary)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	return x
}

// Every mode that has times gives a plan, the same one twice, whose rows are those of an epoch.
func TestModes(t *testing.T) {
	for _, mode := range tiers.Catalog.Names() {
		o := small(t, mode)
		o.Config.Fanouts = []int{3, 3}
		if mode != static.ModeInmem {
			o.Budget = units.Budget{Percent: 10}
		}
		x := find(t, o, nil)
		require.Equal(t, x, find(t, o, nil), mode)
		if c := (plan.Config{Mode: mode}).WithDefaults(); c.System() == &hier.System {
			require.GreaterOrEqual(t, x.Batches, 157, mode)
			require.Greater(t, x.RowsGPU+x.RowsCPU, int64(157*32), mode)
			require.InEpsilon(t, x.Mega.EpochBytes, x.BytesSSD, 0.3, mode)
			require.LessOrEqual(t, x.CPUCacheBytes, hier.LeastBudget, mode)
			require.NotEmpty(t, x.Mega.CutSource, mode)
			continue
		}
		require.Equal(t, 157, x.Batches, mode)
		require.Greater(t, x.Seconds, 0.0, mode)
		require.Contains(t, append(planner.Resources, resNothing), x.Bottleneck, mode)
		rows := x.RowsGPU + x.RowsCPU + x.RowsSSD
		require.Greater(t, rows, int64(157*32), mode)
		require.InDelta(t, 1-float64(x.RowsSSD)/float64(rows), x.HitRatio, 1e-3, mode)
		if mode == static.ModeInmem {
			require.Zero(t, x.BytesSSD)
			continue
		}
		gpu, cpu := plan.Config{Mode: mode}.DefaultTiers()
		require.True(t, gpu || x.GPUCacheBytes == 0, "%s: a budget makes no tier", mode)
		require.True(t, cpu || x.CPUCacheBytes == 0, "%s: a budget makes no tier", mode)
		if gpu != cpu {
			require.Equal(t, int64(10_000), (x.GPUCacheBytes+x.CPUCacheBytes)/x.RowBytes, mode)
		}
		require.GreaterOrEqual(t, x.BytesSSD, x.RowsSSD*x.RowBytes/2, mode)
		require.LessOrEqual(t, x.GPUCacheBytes+x.CPUCacheBytes, 100_000*x.RowBytes/10+8*x.RowBytes,
			mode)
		for _, name := range []string{resSSDs, resLink, resTraining} {
			require.LessOrEqual(t, x.Busy[name], 1.1*x.Seconds, "%s: %s", mode, name)
		}
	}
}

// Beside other GPUs the bound is training where they have much to do for each row, and else the
// rows' way to them.
func TestReplicasAreBoundByCopies(t *testing.T) {
	o := small(t, static.ModeInmem)
	o.Graph.Nodes, o.Graph.Edges, o.Popularity = 10_000_000, 150_000_000, skew(t, "10%:70%")
	o.Config.Hidden, o.Config.Batch, o.Config.Fanouts, o.Batches = 512, 1024, []int{10, 10}, 8
	alone := find(t, o, nil)
	require.Equal(t, resTraining, alone.Bottleneck)
	require.Zero(t, alone.Busy[resCopies])
	o.Config.Replicas = 2
	x := find(t, o, nil)
	require.Equal(t, resCopies, x.Bottleneck)
	require.Greater(t, x.Busy[resCopies], x.Busy[resTraining]/2)
	require.Less(t, x.Busy[resCopies], x.Seconds)
	o.Config.Hidden = 4096
	require.Equal(t, resTraining, find(t, o, nil).Bottleneck)
}

// A share of the rows has the share of the accesses that was asked for, and a static tier of that
// size hits as many.
func TestShareOfAccesses(t *testing.T) {
	o := small(t, static.ModeCPU)
	o.Batches = 12
	o.Config.CPUCache = units.Budget{Percent: 10}
	require.InDelta(t, 0.6, find(t, o, nil).HitRatio, 0.02)
	o.Popularity = skew(t, "10%:95%")
	p, err := planner.New(known(o), report.Observer{})
	require.NoError(t, err)
	_, err = p.Plan(context.Background(), nil)
	require.ErrorContains(t, err, "take at most")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	o.Popularity = skew(t, "zipf:0")
	require.InDelta(t, 0.1, find(t, o, nil).HitRatio, 0.02)
}

// A file of degrees gives nodes and edges, and the hot nodes are those of the highest degree.
func TestDegrees(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	write := func(text string) (*planner.Popularity, error) {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return planner.ReadDegrees(path)
	}
	p, err := write("# degree nodes\n1 900\n91,100\n0 5\n")
	require.NoError(t, err)
	n, m, ok := p.Totals()
	require.True(t, ok)
	require.EqualValues(t, 1005, n)
	require.EqualValues(t, 10000, m)
	hot := 0
	for i := range 1000 {
		r := p.Rank((float64(i)+0.5)/1000, n)
		require.True(t, r >= 0 && r < 1000, "a node without edges is not drawn: %d", r)
		if r < 100 {
			hot++
		}
	}
	require.Equal(t, 910, hot)
	require.InDelta(t, (900*1+100*10)/1005.0, p.DrawnOf(10, 9.95, 1), 1e-9)
	for _, text := range []string{"", "1\n", "a 1\n", "1 -1\n", "0 7\n", "1 2 3\n",
		"1 99999999999999999999\n"} {
		_, err := write(text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%q: %v", text, err)
	}
	_, err = planner.ReadDegrees(filepath.Join(t.TempDir(), "no"))
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

func TestSkewsThatAreRefused(t *testing.T) {
	for _, text := range []string{"", "zipf:", "zipf:-1", "zipf:NaN", "10%", "10:70", "0%:70%",
		"10%:100%", "70%:10%", "10%:NaN%"} {
		_, err := planner.ParsePopularity(text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%q: %v", text, err)
	}
}

// graphOf generates a dataset of R-MAT.
func graphOf(t testing.TB) prepare.Inputs {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(context.Background(), build.GenerateOptions{Kind: "rmat",
		Nodes: 20_000, AvgDegree: 10, Classes: 8, Dim: 128, Seed: 3, FeatureFn: "hash",
		TrainFraction: 0.1, TestFraction: -1, Memory: 64 << 20, Out: dir}))
	ds, err := dataset.Open(dir)
	require.NoError(t, err)
	dev, err := cuda.NewHost(cuda.HostOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, dev.Close())
		require.NoError(t, ds.Close())
	})
	return prepare.Inputs{Dataset: ds, Dev: dev}
}

// ofDataset is a plan of a whole epoch of a dataset's mini-batches.
func ofDataset(t testing.TB, in prepare.Inputs, mode string) planner.Options {
	return planner.Options{Find: tiers.Prediction, Inputs: in, Batches: 100,
		Hardware: cost.Hardware{Profile: profile(t, "a100-p5510x12"), SSDs: 2},
		Config: plan.Config{Mode: mode, Fanouts: []int{5, 5}, Batch: 200,
			HotnessDir: plan.NoFolder},
		Graph: planner.Graph{Name: "g", Nodes: 20_000, Edges: in.Dataset.Meta.Edges, Dim: 128,
			Classes: 8, Train: 0.1}}
}

// played is a run's epoch on the virtual clock, by its number.
func played(t testing.TB, o planner.Options, epoch int) (report.EpochResult,
	*report.ModelledResult) {
	c := o.Config
	c.NoEval, c.Epochs, c.Topology = true, epoch+1, plan.TopologyMemory
	r, err := virtual.Run(context.Background(), tiers.Simulation, c, o.Inputs,
		o.Hardware,
		report.Observer{})
	require.NoError(t, err)
	return r.Epochs[epoch], r
}

// A plan that plays the whole epoch of a dataset agrees with train on the virtual clock, row for
// row, whether hops are read as one set or apart. SSDs draw other latencies in the one than in the
// other, so that times agree on average only.
func TestPlanOfADatasetIsTheVirtualClocks(t *testing.T) {
	in := graphOf(t)
	for _, mode := range []string{static.ModeHelios, static.ModeCPU, static.ModeMmap,
		static.ModeInmem} {
		o := ofDataset(t, in, mode)
		if mode == static.ModeHelios {
			o.Config.GPUCache = units.Budget{Percent: 3}
			o.Config.CPUCache = units.Budget{Percent: 7}
		}
		if mode == static.ModeInmem {
			o.Config.GPUCache = units.Budget{Percent: 3}
		}
		for _, o.Config.CoalesceBytes = range []int{0, -1} {
			clock, planned := 0.0, 0.0
			for o.Config.Seed = 1; o.Config.Seed <= 8; o.Config.Seed++ {
				x := find(t, o, nil)
				e, _ := played(t, o, 0)
				require.Equal(t,
					[]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD, e.BytesSSD, e.SSDCommands},
					[]int64{x.RowsGPU, x.RowsCPU, x.RowsSSD, x.BytesSSD, x.SSDCommands}, mode)
				clock += e.Seconds
				planned += x.Seconds
			}
			require.InEpsilon(t, clock, planned, 0.02, mode)
		}
	}
}

// Mega-batches of a dataset are the virtual clock's own. Made up by degrees and a cut, parts of
// equal size have as many loads and about the bytes, and take about as long.
func TestPlanOfMegaBatches(t *testing.T) {
	in := graphOf(t)
	c, err := plan.Config{Topology: plan.TopologyMemory}.Filled()
	require.NoError(t, err)
	s, err := prepare.Open(context.Background(), c, in, report.Observer{})
	require.NoError(t, err)
	degrees := degreesOf(t, s.Topology)
	cutOf := func(c plan.Config) float64 {
		p, err := partition.Make(context.Background(), s.Topology, partition.Options{
			Parts: c.Parts, Method: hier.Partitioner(&c), Seed: 1})
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close()) }()
		x, err := p.Measure(context.Background(), s.Topology, nil)
		require.NoError(t, err)
		return x.CutShare
	}
	const byChance = hierspec.PartsDispersed // a plan without a dataset knows no labels
	for _, c := range []plan.Config{
		{MegaSettings: hierspec.MegaSettings{Parts: 16, MegaBatch: hierspec.MegaSize{Parts: 4},
			StaticNodes: 5, PartOrder: byChance}, Mode: hier.ModeHier},
		{
			MegaSettings: hierspec.MegaSettings{Parts: 16, MegaBatch: hierspec.MegaSize{Parts: 8},
				PartOrder: hierspec.PartsSequential},
			Mode: hier.ModeMarius,
		},
		{MegaSettings: hierspec.MegaSettings{Parts: 8, MegaBatch: hierspec.MegaSize{Parts: 2},
			Passes: 2, PartOrder: byChance}, Mode: hier.ModeHier},
	} {
		cut := cutOf(c)
		for epoch := range 2 {
			o := ofDataset(t, in, c.Mode)
			c.Fanouts, c.Batch, c.HotnessDir, c.Epochs = o.Config.Fanouts, o.Config.Batch,
				plan.NoFolder, epoch+1
			c.CPUCache = units.Budget{Bytes: 64 << 20}
			o.Config, o.Batches = c, 0
			x := find(t, o, nil)
			e, r := played(t, o, epoch)
			require.Equal(t, []int64{e.RowsGPU, e.RowsCPU, e.RowsSSD, e.BytesSSD, e.SSDCommands},
				[]int64{x.RowsGPU, x.RowsCPU, x.RowsSSD, x.BytesSSD, x.SSDCommands})
			require.Equal(t, e.Batches, x.Batches)
			require.InEpsilon(t, e.Seconds, x.Seconds, 1e-9)
			require.Equal(t, r.Mega.EpochBytes, x.Mega.EpochBytes)
			require.Zero(t, x.Mega.Cut)

			o.Inputs, o.Popularity, o.Cut = prepare.Inputs{}, degrees, &cut
			y := find(t, o, nil)
			require.Equal(t, x.Mega.MegaBatches, y.Mega.MegaBatches)
			require.InEpsilon(t, x.Mega.EpochBytes, y.Mega.EpochBytes, 0.01)
			require.InEpsilon(t, x.BytesSSD, y.BytesSSD, 0.10)
			require.InDelta(t, x.Batches, y.Batches, 2)
			require.InEpsilon(t, x.Seconds, y.Seconds, 0.15)
			require.InEpsilon(t, x.RowsGPU+x.RowsCPU, y.RowsGPU+y.RowsCPU, 0.25)
		}
	}
	require.NoError(t, s.Close())
}

// More SSDs shorten an epoch until something else bounds it, and doubling says so.
func TestSweepAndHalve(t *testing.T) {
	o := small(t, static.ModeHelios)
	o.Graph.Dim, o.Config.Batch, o.Batches = 1024, 256, 8
	o.Config.GPUCache, o.Config.CPUCache = units.Budget{Percent: 1}, plan.NoCache()
	o.Prices = planner.Prices{"machine": 3600, "ssd": 36}
	s, err := planner.ParseSweep("ssds=1..3")
	require.NoError(t, err)
	p, err := planner.New(known(o), report.Observer{})
	require.NoError(t, err)
	var times []float64
	for i, v := range s.Values {
		x, err := p.Point(context.Background(), s, v)
		require.NoError(t, err)
		require.Equal(t, i+1, x.SSDs)
		require.Equal(t, resSSDs, x.Bottleneck)
		require.InEpsilon(t, x.Seconds*(1+0.01*float64(i+1)), x.Cost.Epoch, 1e-9)
		times = append(times, x.Seconds)
	}
	require.InDelta(t, 2, times[0]/times[1], 0.2)
	require.InDelta(t, 3, times[0]/times[2], 0.4)
	base, err := p.Plan(context.Background(), nil)
	require.NoError(t, err)
	h, err := p.Halve(context.Background(), base)
	require.NoError(t, err)
	require.Equal(t, []string{"ssds"}, h.Doubled[0].What)
	require.InDelta(t, 2, h.Doubled[0].Gain, 0.2)
	require.NotEmpty(t, h.Steps)
	require.True(t, h.Halved)
	require.Equal(t, 12., profile(t, "a100-p5510x12").SSDs.Count.Value)
	require.Equal(t, base, find(t, o, nil), "doubling leaves the machine as it was")
}

func TestParseSweep(t *testing.T) {
	s, err := planner.ParseSweep("batch-size=64..4096")
	require.NoError(t, err)
	require.Equal(t, []string{"64", "128", "256", "512", "1024", "2048", "4096"}, s.Values)
	s, err = planner.ParseSweep("cpu-cache=0,5%,1GiB")
	require.NoError(t, err)
	require.Equal(t, []string{"0", "5%", "1GiB"}, s.Values)
	for _, text := range []string{"", "ssds", "ssds=", "ssds=0..3", "ssds=5..2", "ssds=x",
		"hidden=1",
		"cpu-cache=200%", "ssds=1..99999999999999999999"} {
		_, err := planner.ParseSweep(text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%q: %v", text, err)
	}
	for _, text := range []string{"ssd", "ssd=-1", "disk=1", "ssd=1,ssd=2", "ssd=NaN"} {
		_, err := planner.ParsePrices(text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%q: %v", text, err)
	}
}

// Where SSDs are unequal the slowest bounds all, and the plan has the cost of that.
func TestUnequalSSDs(t *testing.T) {
	o := small(t, static.ModeHelios)
	o.Graph.Dim, o.Config.Batch = 1024, 128
	o.Config.GPUCache, o.Config.CPUCache = units.Budget{Percent: 1}, plan.NoCache()
	own := *o.Hardware.Profile
	own.SSDs = hardware.SSDs{Model: "p5510", Count: hardware.Figure{Value: 1},
		More: []hardware.SSDGroup{{Model: "slow", Count: hardware.Figure{Value: 1}}}}
	o.Hardware.Profile = &own
	mixed := find(t, o, nil)
	require.Equal(t, "1 p5510 + 1 slow", mixed.SSDModel)
	require.Contains(t, mixed.Notes[len(mixed.Notes)-1], "slow bounds them")
	fast := find(t, o, func(o *planner.Options) {
		only := own
		only.SSDs.More = nil
		o.Hardware = cost.Hardware{Profile: &only, SSDs: 2}
	})
	require.Greater(t, mixed.Seconds, 5*fast.Seconds)
	require.Equal(t, mixed.RowsSSD, fast.RowsSSD)
}

// Training takes as long as it is told to, or the plan refuses with the reason.
func TestCalibrate(t *testing.T) {
	o := small(t, static.ModeHelios)
	o.Hardware.Profile = profile(t, "host")
	base := find(t, o, nil).Busy[resTraining]
	for _, by := range []float64{0.2, 1, 3} {
		p, err := planner.New(known(o), report.Observer{})
		require.NoError(t, err)
		c, err := p.Calibrate(context.Background(), planner.Measured{Training: by * base,
			Lookup: 1})
		require.NoError(t, err)
		require.Positive(t, c.TensorTFLOPS)
		require.Zero(t, c.LookupNS, "no dynamic tier")
		x, err := p.Plan(context.Background(), nil)
		require.NoError(t, err)
		require.InEpsilon(t, by*base, x.Busy[resTraining], closeEnough)
		require.NoError(t, p.Close())
	}
	require.Equal(t, base, find(t, o, nil).Busy[resTraining], "the profile is as it was")
	for _, bad := range []float64{0, -1, math.NaN(), math.Inf(1), base * 1e-12} {
		p, err := planner.New(known(o), report.Observer{})
		require.NoError(t, err)
		_, err = p.Calibrate(context.Background(), planner.Measured{Training: bad})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v: %v", bad, err)
	}
}

// On the host device all rows in memory are in one tier, as a run has them.
func TestInMemoryOnHost(t *testing.T) {
	o := small(t, static.ModeInmem)
	o.Config.GPUCache, o.Config.GPUCacheAuto = units.Budget{}, true
	require.Positive(t, find(t, o, nil).RowsGPU)
	o.Hardware.Profile = profile(t, "host")
	x := find(t, o, nil)
	require.Zero(t, x.RowsGPU)
	require.Positive(t, x.RowsCPU)
}

// A tier of what the GPU's memory has room for leaves the room that its directory takes.
func TestAutoLeavesDirectory(t *testing.T) {
	o := small(t, dynamic.ModeGIDS)
	o.Config.Policy, o.Config.GPUCache, o.Config.GPUCacheAuto = "s3fifo", units.Budget{}, true
	o.Config.CacheLine = dynamicspec.LineRow
	plans := map[string]*planner.Plan{}
	for _, kind := range policy.Kinds() {
		own := *o.Hardware.Profile
		plans[kind] = find(t, o, func(o *planner.Options) {
			o.Config.Directory = kind
			own.GPU.MemoryGiB.Value = (float64((1 << 30)) + 8<<20) / (1 << 30)
			o.Hardware.Profile = &own
		})
	}
	sets, queues := plans[policy.InSets].GPUMemory, plans[policy.InQueues].GPUMemory
	require.Positive(t, sets["directory"])
	require.NotContains(t, queues, "directory")
	require.Positive(t, sets["rows"])
	require.Less(t, sets["rows"], queues["rows"])
	require.LessOrEqual(t, sets["rows"]+sets["directory"]+sets["mini-batches"], int64(8<<20))
}

// So do lookups in a directory that the CPU keeps.
func TestCalibrateDirectory(t *testing.T) {
	for kind, figure := range map[string]string{policy.InSets: "sets_ns",
		policy.InQueues: "directory_ns"} {
		t.Run(kind, func(t *testing.T) { calibrateDirectory(t, kind, figure) })
	}
}

func calibrateDirectory(t *testing.T, kind, figure string) {
	o := small(t, dynamic.ModeGIDS)
	o.Hardware.Profile, o.Config.Directory = profile(t, "host"), kind
	base := find(t, o, nil).Busy
	require.Positive(t, base[resLookup])
	p, err := planner.New(known(o), report.Observer{})
	require.NoError(t, err)
	c, err := p.Calibrate(context.Background(),
		planner.Measured{Training: 2 * base[resTraining], Lookup: base[resLookup] / 3})
	require.NoError(t, err)
	x, err := p.Plan(context.Background(), nil)
	require.NoError(t, err)
	require.InEpsilon(t, 2*base[resTraining], x.Busy[resTraining], closeEnough)
	require.InEpsilon(t, base[resLookup]/3, x.Busy[resLookup], closeEnough)
	own := o.Hardware.Profile.CPU
	was := map[string]float64{"sets_ns": own.SetsNS.Value, "directory_ns": own.DirectoryNS.Value}
	require.Equal(t, figure, c.Directory)
	require.InEpsilon(t, was[figure]/3, c.LookupNS, 0.05)
	require.InEpsilon(t, own.AnnounceNS.Value/was[figure], c.AnnounceNS/c.LookupNS, 1e-9)
	_, err = p.Calibrate(context.Background(), planner.Measured{Training: base[resTraining],
		Lookup: 1e-12})
	require.ErrorContains(t, err, "cpu."+figure)
	require.NoError(t, p.Close())
}

// Packed mini-batches are planned to the row, and what fills while it runs as it is once it is
// full: a run's second epoch is near.
func TestPlanOfADatasetWhoseTiersFill(t *testing.T) {
	in := graphOf(t)
	for _, x := range []struct {
		mode  string
		epoch int // of the run
		off   float64
	}{{diskgnn.ModeDiskGNN, 0, 0}, {dynamic.ModeGIDS, 1, 0.05}, {dynamic.ModeBaM, 1, 0.05},
		{ginex.ModeGinex, 1, 0.15}} {
		o := ofDataset(t, in, x.mode)
		o.Config.GPUCache = units.Budget{Percent: 5}
		p := find(t, o, nil)
		e, _ := played(t, o, x.epoch)
		for _, n := range [][2]int64{{e.RowsSSD, p.RowsSSD}, {e.BytesSSD, p.BytesSSD},
			{e.SSDCommands, p.SSDCommands}} {
			require.InEpsilon(t, n[0], n[1], x.off+1e-9, "%s: %v", x.mode, n)
		}
		require.InEpsilon(t, e.RowsGPU+e.RowsCPU+e.RowsSSD, p.RowsGPU+p.RowsCPU+p.RowsSSD, 0.03,
			x.mode)
		require.InEpsilon(t, e.Seconds, p.Seconds, x.off+0.001, x.mode)
	}
}

// degreesOf are a topology's nodes by how often they are in-neighbours.
func degreesOf(t testing.TB, topo *graph.Topology) *planner.Popularity {
	count := make([]int64, topo.NumNodes)
	for v := range topo.NumNodes {
		for i := range topo.InDegree(v) {
			count[topo.Neighbor(v, i)]++
		}
	}
	by := map[int64]int64{}
	for _, n := range count {
		by[n]++
	}
	var text []byte
	for d, n := range by {
		text = fmt.Appendf(text, "%d %d\n", d, n)
	}
	path := filepath.Join(t.TempDir(), "out-degrees")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	p, err := planner.ReadDegrees(path)
	require.NoError(t, err)
	return p
}

// known gives options whose configuration knows the modes.
func known(o planner.Options) planner.Options {
	return o
}
