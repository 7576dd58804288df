package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/gnn"
	"helios/internal/bench/compute"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/openblas"
	"helios/internal/options"
	"helios/internal/simd"
	"helios/internal/units"
)

func computeGroups() []string {
	var names []string
	for _, b := range compute.Groups {
		names = append(names, b.Name)
	}
	return names
}

func benchComputeCommand() *cli.Command {
	about := "Measures kernels and checks them: products against float64 sums, the others against the kernels\n" +
		"in plain Go, bit by bit, steps against the host device's (the host's own against plain Go).\n" +
		"A row whose error is above what rounding can give is shown as failed.\n" +
		"Products of matrices can run in turns with a library that is opened at run time for this comparison:\n" +
		"on the host device OpenBLAS in fp32, on a GPU cuBLAS in each --precision. The ratio is its time by\n" +
		"ours, the median over the turns and its range; \"by CPU\" is the same ratio in CPU time.\n" +
		"The host device's peak is measured in the same run: fused multiply-adds on registers (in bf16 those\n" +
		"of pairs, where the CPU has them), times the workers. That of a GPU is its highest clock, its SMs, and\n" +
		"what an SM of its compute capability does in a clock. \"of copy\" is against a copy within the GPU's\n" +
		"memory, measured in the same run. \"of floor\" is the least time for the operations at the peak and the\n" +
		"bytes at the copy's rate, the longer of the two (of a whole step their sum), as a share of the time\n" +
		"taken; on the host device, where copies are not measured, for the operations alone.\n" +
		"The groups of kernels:"
	for _, b := range compute.Groups {
		about += fmt.Sprintf("\n  %-10s %s", b.Name, options.Expand(b.About, hcli.FlagName))
	}
	return verb(&cli.Command{
		Name:        "compute",
		Usage:       "kernels of a model, their errors, and OpenBLAS or cuBLAS beside them",
		Description: about,
	}, 0, hcli.Of[computeBenchArgs](), runBenchCompute)
}

// SetOption reads lists of groups, precisions and workers.
func (a *computeBenchArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "only":
		a.only, err = parseList(name, text, "groups", parseChoice(name, computeGroups()))
	case "precision":
		a.precisions, err = parseList(name, text, "names", parsePrecision)
	case "workers":
		a.slots, err = parseSlotRanges(text)
	default:
		return a.kernelBenchArgs.SetOption(name, text)
	}
	return true, err
}

// computeBenchArgs holds the options of "bench compute".
type computeBenchArgs struct {
	kernelBenchArgs
	only       []string         `option:"only" use:"setting" offers:"@kernel-groups" shown:"all; step: on a GPU" arg:"NAME[,NAME…]" usage:"groups of kernels NAME[,NAME…]: {@kernel-groups}"` // empty: what is usual for a device
	slots      []int            `option:"workers" shown:"1 and one per CPU" arg:"N[,N…]" usage:"worker slots of the host device, and OpenBLAS's threads N[,N…]"`
	shapes     string           `option:"shapes" use:"setting" shown:"usual ones, 100, 602, 47, 1, and a GraphSAGE step's" arg:"[KIND:]MxNxK[,…]" usage:"products [KIND:]MxNxK[,…]: nn: A·B, nt: A·Bᵀ, tn: Aᵀ·B"`
	precisions []cuda.Precision `option:"precision" offers:"@precisions" shown:"on a GPU all, on the host device fp32" arg:"NAME[,NAME…]" usage:"of products and steps NAME[,NAME…]: {@precisions}; tf32 on a GPU only"`
	openblas   string           `option:"openblas" words:"off,auto" default:"off" arg:"PATH" usage:"compare products of the host device with OpenBLAS: auto (a usual name), off, or the library's PATH"`
	blas       string           `option:"blas" words:"off,auto" default:"auto" arg:"PATH" usage:"compare products and steps of a GPU with cuBLAS: auto (when it is installed), off, or the library's PATH"`
	cfg        compute.Config   `options:"in"`
}

// computeBench measures kernels.
type computeBench struct {
	*env
	*computeBenchArgs
	before int // cases that were measured on other devices
}

// usualSlots are the numbers of worker slots that a benchmark takes by itself.
func usualSlots() []int {
	if n := runtime.NumCPU(); n > 1 {
		return []int{1, n}
	}
	return []int{1}
}

// check completes the configuration and refuses what cannot be.
func (a *computeBenchArgs) check(e *env) error {
	if err := a.refuseHostOnly(e, &a.slots, &a.kernels, &a.openblas); err != nil {
		return err
	}
	hostOnly := slices.Equal(a.devices, []string{"host"})
	if f := e.given(&a.blas); f != "" && hostOnly {
		return errs.New(errs.Usage, "%v is for GPUs; add cuda to {device}, or leave it out", errs.Key(f))
	}
	if slices.Contains(a.devices, "host") {
		for _, p := range a.precisions {
			if !slices.Contains(gnn.HostPrecisions(), p) {
				return errs.New(errs.Usage,
					"{precision} %v is for GPUs; leave it out, or give {device} cuda alone", p)
			}
		}
	}
	if a.shapes != "" {
		if _, err := compute.ParseShapes(a.shapes); err != nil {
			return err
		}
	}
	if a.cfg.Rows < 1 || a.cfg.Rows > 1<<24 {
		return errs.New(errs.Usage, "{rows} %d is not between 1 and %d", a.cfg.Rows, 1<<24)
	}
	if e.given(&a.shapes) != "" && len(a.only) > 0 && !slices.Contains(a.only, "gemm") {
		return errs.New(errs.Usage,
			"{shapes} is for products, which {only} %s leaves out; add gemm to it",
			strings.Join(a.only, ","))
	}
	s := &a.cfg.Step
	if f := e.given(&s.Model, &s.Nodes, &s.AvgDegree, &s.Batch, &s.Fanouts, &s.Dim, &s.Hidden,
		&s.Classes); f != "" && !slices.Contains(a.only, "step") && (len(a.only) > 0 || hostOnly) {
		return errs.New(errs.Usage, "%v is for the group step; add it to {only}", errs.Key(f))
	}
	if len(a.slots) == 0 {
		a.slots = usualSlots()
	}
	a.cfg.Seed = a.seed
	return nil
}

func parsePrecision(name string) (cuda.Precision, error) {
	_, err := parseChoice("precision", cuda.Precisions())(name)
	return cuda.Precision(slices.Index(cuda.Precisions(), name)), err
}

// cases are those of a device.
func (b *computeBench) cases(cfg *compute.Config, gpu bool) ([]compute.Case, error) {
	var out []compute.Case
	for _, g := range compute.Groups {
		if len(b.only) > 0 && !slices.Contains(b.only, g.Name) || len(b.only) == 0 &&
			g.GPU && !gpu {
			continue
		}
		cases, err := g.Cases(cfg)
		if err != nil {
			return nil, err
		}
		out = append(out, cases...)
	}
	return out, nil
}

func runBenchCompute(ctx context.Context, e *env, a *computeBenchArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	b := &computeBench{env: e, computeBenchArgs: a}
	if a.openblas != "off" {
		if a.cfg.BLAS, err = openblas.Open(a.openblas); err != nil {
			return err
		}
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	if b.cfg.BLAS != nil {
		out.event("openblas", blasLine{b.cfg.BLAS.Path, b.cfg.BLAS.Config})
		e.ui.Printf("%s (%s)", b.cfg.BLAS.Config, b.cfg.BLAS.Path)
	}
	var rows []compute.Row
	done := func(got []compute.Row, err error) error {
		rows = append(rows, got...)
		return err
	}
	for _, d := range b.devices {
		if d != "host" {
			if err := done(b.measureGPU(ctx, d, out)); err != nil {
				return err
			}
			continue
		}
		for _, n := range b.slots {
			if err := done(b.measureHost(ctx, n, out)); err != nil {
				return err
			}
		}
	}
	b.show(rows)
	for _, r := range rows {
		if !r.OK {
			return errs.New(errs.Failed,
				"bench compute: wrong results: %s in %s on %s with %d workers: %s; see the list",
				r.Case, r.Precision, r.Device, r.Workers, r.Where)
		}
	}
	return nil
}

// blasLine names the library that products are compared with.
type blasLine struct {
	Path   string `json:"path"`
	Config string `json:"config"`
}

// peakLine is the line with the peak rates of a GPU.
type peakLine struct {
	Device string             `json:"device"`
	FLOPS  map[string]float64 `json:"flops"` // a second, by precision
	How    string             `json:"how"`
}

// measureHost measures all cases with some workers.
func (b *computeBench) measureHost(ctx context.Context, workers int,
	out *results) (rows []compute.Row, err error) {
	dev, err := openHost(workers, b.kernels)
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	cfg := b.cfg
	cfg.Precisions = b.precisions
	if l, err := simd.Parse(dev.Info().Kernels); err == nil &&
		slices.Contains(b.precisions, cuda.BF16) {
		b.ui.Printf("bf16 by %s", simd.BF16Way(l))
	}
	return b.measure(ctx, dev, &cfg, compute.DefaultShapes, [3]float64{}, out)
}

// measureGPU measures all cases on a GPU, beside cuBLAS where that is installed.
func (b *computeBench) measureGPU(ctx context.Context, name string,
	out *results) (rows []compute.Row, err error) {
	dev, err := openGPU(name)
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	cfg := b.cfg
	if cfg.Precisions = b.precisions; len(cfg.Precisions) == 0 {
		cfg.Precisions = []cuda.Precision{cuda.FP32, cuda.TF32, cuda.BF16}
	}
	if want := b.blas; want != "off" {
		if cfg.Vendor, err = openVendor(dev, want); err != nil {
			if want != "auto" {
				return nil, err
			}
			b.note(errs.Textf("cuBLAS is not compared with: %v", err))
		} else {
			defer closing(&err, cfg.Vendor.Close)
			b.ui.Note("compared with %s", cfg.Vendor.Name())
		}
	}
	peak, how := gpuPeak(dev)
	out.event("peak", peakLine{dev.Info().Name, map[string]float64{"fp32": peak[cuda.FP32],
		"tf32": peak[cuda.TF32], "bf16": peak[cuda.BF16]}, how})
	b.ui.Printf("%s: peak %s", dev.Info().Name, how)
	return b.measure(ctx, dev, &cfg, compute.GPUShapes, peak, out)
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

// gpuPeak returns what a GPU can compute in a second by its clock, and how that was found.
// Operations of an SM in a clock are those of the CUDA programming guide (throughput of native
// arithmetic instructions: lanes of float32, two operations each) and of NVIDIA's architecture
// papers (dense tensor cores, sums in float32).
func gpuPeak(dev cuda.Device) (peak [3]float64, how string) {
	d, ok := dev.(interface{ Capabilities() driver.Capabilities })
	if !ok {
		return peak, "not known"
	}
	c := d.Capabilities()
	rates := map[int][3]float64{ // fp32, tf32, bf16
		70: {128, 0, 0}, 72: {128, 0, 0}, 75: {128, 0, 0},
		80: {128, 1024, 2048}, 86: {256, 512, 1024}, 87: {256, 512, 1024}, 89: {256, 512, 1024},
		90:  {256, 2048, 4096},
		100: {256, 4096, 8192}, 103: {256, 4096, 8192}, 120: {256, 512, 1024},
	}
	rate, ok := rates[c.ComputeCapability]
	if !ok || c.ClockKHz == 0 {
		return peak, fmt.Sprintf("not known (compute capability %d.%d, clock %d kHz)",
			c.ComputeCapability/10, c.ComputeCapability%10, c.ClockKHz)
	}
	sms := dev.Info().SMs
	words := fmt.Sprintf("by %d SMs at %.0f MHz", sms, float64(c.ClockKHz)/1e3)
	for i, r := range rate {
		if peak[i] = r * float64(sms) * float64(c.ClockKHz) * 1e3; r > 0 {
			words += fmt.Sprintf(", %s %.4g TFLOP/s (%.0f in a clock)", cuda.Precision(i),
				peak[i]/1e12, r)
		}
	}
	return peak, words
}

// measure measures all cases on a device.
func (b *computeBench) measure(ctx context.Context, dev cuda.Device,
	cfg *compute.Config, shapes string, peak [3]float64, out *results) (rows []compute.Row,
	err error) {
	defer closing(&err, cfg.Close)
	if b.shapes != "" {
		shapes = b.shapes
	}
	if cfg.Shapes, err = compute.ParseShapes(shapes); err != nil {
		return nil, err
	}
	cases, err := b.cases(cfg, dev.Info().Backend != "host")
	if err != nil {
		return nil, err
	}
	limits, err := compute.Limits(ctx, dev, cfg, peak)
	if err != nil {
		return nil, err
	}
	for i := range cases {
		b.ui.Progress("bench compute", int64(b.before+i), int64(len(cases)*b.turns()))
		r, err := cases[i].Measure(ctx, dev, cfg, limits, b.length())
		var full *cuda.OutOfMemoryError
		if errors.As(err, &full) && dev.Info().Backend != "host" {
			err = errs.Errorf("%w; give smaller sizes ({shapes}, {rows}, {batch-size})", err)
		}
		if err != nil {
			return rows, err
		}
		out.event("row", r)
		rows = append(rows, r)
	}
	b.before += len(cases)
	return rows, nil
}

// turns counts how often all cases are measured.
func (b *computeBench) turns() (n int) {
	for _, d := range b.devices {
		if n++; d == "host" {
			n += len(b.slots) - 1
		}
	}
	return n
}

func (b *computeBench) show(rows []compute.Row) {
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
			theirs, ratio, rivalError = giga(r.RivalFLOPS), r.Ratio.String(),
				fmt.Sprintf("%.1e", r.RivalError)
		}
		if r.RatioCPU != nil {
			cpu = r.RatioCPU.String()
		}
		check := "passed"
		if !r.OK {
			check = "FAILED: " + r.Where
		}
		kernels := r.Kernels
		if r.Code != "" {
			kernels = codeName(r.Code) + " " + r.Precision
		} else if r.Precision != cuda.FP32.String() {
			kernels += " " + r.Precision
		}
		table = append(table, []string{r.Case, kernels, fmt.Sprint(r.Workers),
			units.FormatSeconds(r.Seconds.Median), flops, share(r.PeakShare),
			giga(r.BytesPerSecond), share(r.CopyShare),
			share(r.FloorShare), dash(r.Rival), theirs, ratio, cpu, fmt.Sprintf("%.1e", r.Error),
			fmt.Sprintf("%.1e", r.Bound), rivalError, check})
	}
	b.ui.Columns(computeColumns, table)
}

// codeName names the form in which a GPU's kernels were loaded (cuda.Info.Code), without the
// reason.
func codeName(code string) string {
	code, _, _ = strings.Cut(code, ",")
	code, _, _ = strings.Cut(code, ";")
	return code
}
