package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/openblas"
	"helios/internal/simd"
	"helios/internal/units"
)

func computeGroups() []string {
	var names []string
	for _, b := range gnn.Benchmarks {
		names = append(names, b.Name)
	}
	return names
}

func benchComputeCommand() *cli.Command {
	about := "Measures kernels and checks what they computed against float64 references.\n" +
		"A row whose error is above what rounding can give is shown as failed.\n" +
		"Products of matrices can run in turns with a library that is opened at run time for this comparison:\n" +
		"on the host device OpenBLAS, on a GPU cuBLAS, where --precision takes each. The ratio is its time by\n" +
		"ours, the median over the turns and its range; \"by CPU\" is the same ratio in CPU time.\n" +
		"The host device's peak is measured in the same run: fused multiply-adds on registers, times the\n" +
		"workers. That of a GPU is its highest clock, its SMs, and what an SM of its compute capability does\n" +
		"in a clock. \"of copy\" is against a copy within the GPU's memory, measured in the same run. \"of floor\"\n" +
		"is the least time for the operations at the peak and the bytes at the copy's rate, the longer of the\n" +
		"two (of a whole step their sum), as a share of the time taken. The groups of kernels:"
	for _, b := range gnn.Benchmarks {
		about += fmt.Sprintf("\n  %-10s %s", b.Name, b.About)
	}
	return &cli.Command{
		Name:        "compute",
		Usage:       "kernels of a model, their errors, and OpenBLAS or cuBLAS beside them",
		Description: about,
		Flags: []cli.Flag{
			devicesFlag(),
			&cli.StringFlag{Name: "only", DefaultText: "all; step: on a GPU", Usage: "groups of kernels `NAME[,NAME…]`: " + strings.Join(computeGroups(), ", ")},
			&cli.StringFlag{Name: "shapes", DefaultText: "usual ones, 100, 602, 47, 1, and a GraphSAGE step's", Usage: "products `[KIND:]MxNxK[,…]`: nn: A·B, nt: A·Bᵀ, tn: Aᵀ·B"},
			&cli.Int64Flag{Name: "rows", Value: 65536, Usage: "destinations of the aggregates; other matrices of that group grow with it"},
			&cli.StringFlag{Name: "precision", Value: "fp32,tf32,bf16", Usage: "of products and steps on a GPU `NAME[,NAME…]`: " + strings.Join(cuda.Precisions(), ", ")},
			&cli.StringFlag{Name: "openblas", Value: "off", Usage: "compare products of the host device with OpenBLAS: auto (a usual name), off, or the library's `PATH`"},
			&cli.StringFlag{Name: "blas", Value: "auto", Usage: "compare products and steps of a GPU with cuBLAS: auto (when it is installed), off, or the library's `PATH`"},
			&cli.StringFlag{Name: "workers", DefaultText: "1 and one per CPU", Usage: "worker slots of the host device, and OpenBLAS's threads `N[,N…]`"},
			&cli.Float64Flag{Name: "seconds", Value: 1, Usage: "length of a row's measurement"},
			&cli.Int64Flag{Name: "nodes", Value: 1_000_000, Usage: "nodes of the steps' graph"},
			&cli.Float64Flag{Name: "avg-degree", Value: 15, Usage: "its mean number of in-neighbours"},
			&cli.IntFlag{Name: "batch-size", Value: 8000, Usage: "seeds of a step"},
			&cli.StringFlag{Name: "fanout", Value: "25,10", Usage: "neighbours sampled per hop of a step `F1,F2,…`, the seeds' first"},
			&cli.IntFlag{Name: "dim", Value: 1024, Usage: "features of a step"},
			&cli.IntFlag{Name: "hidden", Value: 256, Usage: "hidden units of a step"},
			&cli.IntFlag{Name: "classes", Value: 47, Usage: "classes of a step"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the values"},
			kernelsFlag(), resultsFlag(), overwriteFlag(),
		},
		Action: action(0, runBenchCompute),
	}
}

// computePlan is what "bench compute" is asked for.
type computePlan struct {
	devices []string
	only    []string // empty: what is usual for a device
	workers []int
	level   simd.Level
	cfg     gnn.BenchConfig
	shapes  string
	length  time.Duration
	prec    []cuda.Precision
}

func (e *env) computePlan() (*computePlan, error) {
	c := e.c
	p := &computePlan{cfg: gnn.BenchConfig{Seed: c.Uint64("seed"), Rows: c.Int64("rows")}, shapes: c.String("shapes")}
	var err error
	if p.devices, err = e.devices(); err != nil {
		return nil, err
	}
	if gpuOnly(p.devices) {
		for _, f := range []string{"workers", "kernels", "openblas"} {
			if c.IsSet(f) {
				return nil, errs.New(errs.Usage, "--%s is for the host device; add host to --device, or leave it out", f)
			}
		}
	}
	if slices.Equal(p.devices, []string{"host"}) {
		for _, f := range []string{"precision", "blas"} {
			if c.IsSet(f) {
				return nil, errs.New(errs.Usage, "--%s is for GPUs; add cuda to --device, or leave it out", f)
			}
		}
	}
	if p.level, err = simd.Parse(c.String("kernels")); err != nil {
		return nil, err
	}
	if p.shapes != "" {
		if _, err = gnn.ParseShapes(p.shapes); err != nil {
			return nil, err
		}
	}
	if p.cfg.Rows < 1 || p.cfg.Rows > 1<<24 {
		return nil, errs.New(errs.Usage, "--rows %d is not between 1 and %d", p.cfg.Rows, 1<<24)
	}
	seconds := c.Float64("seconds")
	if !(seconds > 0 && seconds <= 3600) {
		return nil, errs.New(errs.Usage, "--seconds %v: give a length above 0, up to 3600", seconds)
	}
	p.length = time.Duration(seconds * float64(time.Second))
	p.workers = []int{1}
	if n := runtime.NumCPU(); n > 1 {
		p.workers = append(p.workers, n)
	}
	if w := c.String("workers"); w != "" {
		if p.workers, err = units.ParseInts(w, 1); err != nil {
			return nil, errs.New(errs.Usage, "--workers: %w", err)
		}
	}
	if most := slices.Max(p.workers); most > 4096 {
		return nil, errs.New(errs.Usage, "--workers %d is not between 1 and 4096", most)
	}
	if p.prec, err = parsePrecisions(c.String("precision")); err != nil {
		return nil, err
	}
	if p.only, err = list("only", c.String("only")); err != nil {
		return nil, err
	}
	for _, name := range p.only {
		if !slices.Contains(computeGroups(), name) {
			return nil, errs.New(errs.Usage, "unknown --only %q; %s", name, meant(name, computeGroups(), "choose among "+strings.Join(computeGroups(), ", ")))
		}
	}
	if c.IsSet("shapes") && len(p.only) > 0 && !slices.Contains(p.only, "gemm") {
		return nil, errs.New(errs.Usage, "--shapes is for products, which --only %s leaves out; add gemm to it", c.String("only"))
	}
	return p, e.stepPlan(p)
}

func parsePrecisions(text string) ([]cuda.Precision, error) {
	names, err := list("precision", text)
	if err != nil {
		return nil, err
	}
	var out []cuda.Precision
	for _, n := range names {
		i := slices.Index(cuda.Precisions(), n)
		if i < 0 {
			return nil, errs.New(errs.Usage, "unknown --precision %q; %s", n, meant(n, cuda.Precisions(), "choose among "+strings.Join(cuda.Precisions(), ", ")))
		}
		if !slices.Contains(out, cuda.Precision(i)) {
			out = append(out, cuda.Precision(i))
		}
	}
	if len(out) == 0 {
		return nil, errs.New(errs.Usage, "--precision is empty; choose among %s", strings.Join(cuda.Precisions(), ", "))
	}
	return out, nil
}

// stepPlan reads the flags of the group step.
func (e *env) stepPlan(p *computePlan) (err error) {
	c := e.c
	s := &p.cfg.Step
	if s.Fanouts, err = units.ParseInts(c.String("fanout"), -1); err != nil {
		return errs.New(errs.Usage, "--fanout: %w", err)
	}
	s.Nodes, s.AvgDegree = c.Int64("nodes"), c.Float64("avg-degree")
	for _, n := range []struct {
		flag string
		to   *int
	}{{"batch-size", &s.Batch}, {"dim", &s.Dim}, {"hidden", &s.Hidden}, {"classes", &s.Classes}} {
		if *n.to = c.Int(n.flag); *n.to < 1 || *n.to > 1<<20 {
			return errs.New(errs.Usage, "--%s %d is not between 1 and %d", n.flag, *n.to, 1<<20)
		}
	}
	for _, f := range []string{"nodes", "avg-degree", "batch-size", "fanout", "dim", "hidden", "classes"} {
		if c.IsSet(f) && !slices.Contains(p.only, "step") && (len(p.only) > 0 || slices.Equal(p.devices, []string{"host"})) {
			return errs.New(errs.Usage, "--%s is for the group step; add it to --only", f)
		}
	}
	return nil
}

// cases are those of a device.
func (p *computePlan) cases(cfg *gnn.BenchConfig, gpu bool) ([]gnn.BenchCase, error) {
	var out []gnn.BenchCase
	for _, b := range gnn.Benchmarks {
		if len(p.only) > 0 && !slices.Contains(p.only, b.Name) || len(p.only) == 0 && b.GPU && !gpu {
			continue
		}
		cases, err := b.Cases(cfg)
		if err != nil {
			return nil, err
		}
		out = append(out, cases...)
	}
	return out, nil
}

func runBenchCompute(ctx context.Context, e *env) (err error) {
	p, err := e.computePlan()
	if err != nil {
		return err
	}
	if path := e.c.String("openblas"); path != "off" {
		if p.cfg.BLAS, err = openblas.Open(path); err != nil {
			return err
		}
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	if p.cfg.BLAS != nil {
		out.event("openblas", map[string]string{"path": p.cfg.BLAS.Path, "config": p.cfg.BLAS.Config})
		e.ui.Printf("%s (%s)", p.cfg.BLAS.Config, p.cfg.BLAS.Path)
	}
	var rows []gnn.BenchResult
	done := func(got []gnn.BenchResult, err error) error {
		rows = append(rows, got...)
		return err
	}
	for _, d := range p.devices {
		if d != "host" {
			if err := done(e.computeGPU(ctx, p, d, out)); err != nil {
				return err
			}
			continue
		}
		for _, n := range p.workers {
			if err := done(e.computeHost(ctx, p, n, out)); err != nil {
				return err
			}
		}
	}
	e.showCompute(rows)
	for _, r := range rows {
		if !r.OK {
			return errs.New(errs.Failed, "bench compute: wrong results: %s in %s on %s with %d workers: %s; the list says where", r.Case, r.Precision, r.Device, r.Workers, r.Where)
		}
	}
	return nil
}

// computeHost measures all cases with some workers.
func (e *env) computeHost(ctx context.Context, p *computePlan, workers int, out *results) (rows []gnn.BenchResult, err error) {
	dev, err := openHost(workers, p.level)
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	cfg := p.cfg
	return e.computeRows(ctx, p, dev, &cfg, gnn.DefaultShapes, [3]float64{}, out)
}

// computeGPU measures all cases on a GPU, beside cuBLAS where that is installed.
func (e *env) computeGPU(ctx context.Context, p *computePlan, name string, out *results) (rows []gnn.BenchResult, err error) {
	dev, err := openGPU(name)
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	cfg := p.cfg
	cfg.Precisions = p.prec
	if want := e.c.String("blas"); want != "off" {
		if cfg.Vendor, err = openVendor(dev, want); err != nil {
			if want != "auto" {
				return nil, err
			}
			e.ui.Note("cuBLAS is not compared with: %v", err)
		} else {
			defer closing(&err, cfg.Vendor.Close)
			e.ui.Note("compared with %s", cfg.Vendor.Name())
		}
	}
	peak, how := gpuPeak(dev)
	out.event("peak", map[string]any{"device": dev.Info().Name, "flops": map[string]float64{"fp32": peak[cuda.FP32], "tf32": peak[cuda.TF32], "bf16": peak[cuda.BF16]}, "how": how})
	e.ui.Printf("%s: peak %s", dev.Info().Name, how)
	return e.computeRows(ctx, p, dev, &cfg, gnn.GPUShapes, peak, out)
}

func openVendor(dev cuda.Device, library string) (cuda.BLAS, error) {
	o, ok := dev.(cuda.BLASOpener)
	if !ok {
		return nil, errs.New(errs.Capability, "device %s has none", dev.Info().Name)
	}
	if library == "auto" {
		library = ""
	}
	return o.OpenBLAS(library)
}

// gpuPeak is what a GPU can compute in a second by its clock, and how that was found. Operations of an SM in a clock are those
// of the CUDA programming guide (throughput of native arithmetic instructions: lanes of float32, two operations each) and of
// NVIDIA's architecture papers (dense tensor cores, sums in float32).
func gpuPeak(dev cuda.Device) (peak [3]float64, how string) {
	d, ok := dev.(interface{ Capabilities() driver.Capabilities })
	if !ok {
		return peak, "not known"
	}
	c := d.Capabilities()
	rates := map[int][3]float64{ // fp32, tf32, bf16
		70: {128, 0, 0}, 72: {128, 0, 0}, 75: {128, 0, 0},
		80: {128, 1024, 2048}, 86: {256, 512, 1024}, 87: {256, 512, 1024}, 89: {256, 512, 1024}, 90: {256, 2048, 4096},
		100: {256, 4096, 8192}, 103: {256, 4096, 8192}, 120: {256, 512, 1024},
	}
	rate, ok := rates[c.ComputeCapability]
	if !ok || c.ClockKHz == 0 {
		return peak, fmt.Sprintf("not known (compute capability %d.%d, clock %d kHz)", c.ComputeCapability/10, c.ComputeCapability%10, c.ClockKHz)
	}
	sms := dev.Info().SMs
	words := fmt.Sprintf("by %d SMs at %.0f MHz", sms, float64(c.ClockKHz)/1e3)
	for i, r := range rate {
		if peak[i] = r * float64(sms) * float64(c.ClockKHz) * 1e3; r > 0 {
			words += fmt.Sprintf(", %s %.4g TFLOP/s (%.0f in a clock)", cuda.Precision(i), peak[i]/1e12, r)
		}
	}
	return peak, words
}

// computeRows measures all cases on a device.
func (e *env) computeRows(ctx context.Context, p *computePlan, dev cuda.Device, cfg *gnn.BenchConfig, shapes string, peak [3]float64, out *results) (rows []gnn.BenchResult, err error) {
	defer closing(&err, cfg.Close)
	if p.shapes != "" {
		shapes = p.shapes
	}
	if cfg.Shapes, err = gnn.ParseShapes(shapes); err != nil {
		return nil, err
	}
	cases, err := p.cases(cfg, dev.Info().Backend != "host")
	if err != nil {
		return nil, err
	}
	most, err := gnn.BenchLimits(ctx, dev, cfg, peak)
	if err != nil {
		return nil, err
	}
	for i := range cases {
		e.ui.Progress("bench compute", int64(i), int64(len(cases)))
		r, err := cases[i].Measure(ctx, dev, cfg, most, p.length)
		var full *cuda.OutOfMemoryError
		if errors.As(err, &full) && dev.Info().Backend != "host" {
			err = fmt.Errorf("%w; give smaller sizes (--shapes, --rows, --batch-size)", err)
		}
		if err != nil {
			return rows, err
		}
		out.object(r)
		rows = append(rows, r)
	}
	return rows, nil
}

func (e *env) showCompute(rows []gnn.BenchResult) {
	var table [][]string
	giga := func(v float64) string { return fmt.Sprintf("%.3g", v/1e9) }
	share := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return share100(v)
	}
	for _, r := range rows {
		flops, theirs, ratio, cpu, rivalError := "-", "-", "-", "-", "-"
		if r.FLOPS > 0 {
			flops = giga(r.FLOPS)
		}
		if r.Ratio != nil {
			theirs, ratio, rivalError = giga(r.RivalFLOPS), r.Ratio.String(), fmt.Sprintf("%.1e", r.RivalError)
		}
		if r.RatioCPU != nil {
			cpu = r.RatioCPU.String()
		}
		check := "passed"
		if !r.OK {
			check = "FAILED: " + r.Where
		}
		kernels := r.Kernels
		if kernels == "ptx" {
			kernels += " " + r.Precision
		}
		table = append(table, []string{r.Case, kernels, fmt.Sprint(r.Workers), fmt.Sprintf("%.4g", r.Seconds.Median*1e3), flops, share(r.PeakShare), giga(r.BytesPerSecond), share(r.CopyShare),
			share(r.FloorShare), dash(r.Rival), theirs, ratio, cpu, fmt.Sprintf("%.1e", r.Error), fmt.Sprintf("%.1e", r.Bound), rivalError, check})
	}
	e.ui.Table([]string{"case", "kernels", "workers", "ms", "GFLOP/s", "of peak", "GB/s", "of copy", "of floor", "rival", "GFLOP/s", "ratio", "by CPU", "error", "bound", "its error", "check"}, table)
}
