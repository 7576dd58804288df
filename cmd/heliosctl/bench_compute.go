package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/cuda"
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
	about := "Measures kernels of the host device and checks what they computed against float64 references.\n" +
		"A row whose error is above what rounding can give is shown as failed.\n" +
		"Products of matrices can run in turns with an OpenBLAS library, opened at run time for this\n" +
		"comparison only: the ratio is its time by ours, the median over the turns and its range.\n" +
		"\"by CPU\" is the same ratio in CPU time. The peak is measured in the same run: fused\n" +
		"multiply-adds on registers, times the workers. The groups of kernels:"
	for _, b := range gnn.Benchmarks {
		about += fmt.Sprintf("\n  %-10s %s", b.Name, b.About)
	}
	return &cli.Command{
		Name:        "compute",
		Usage:       "kernels of the host device, their errors, and OpenBLAS beside them",
		Description: about,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "only", DefaultText: "all", Usage: "groups of kernels `NAME[,NAME…]`: " + strings.Join(computeGroups(), ", ")},
			&cli.StringFlag{Name: "shapes", Value: gnn.DefaultShapes, DefaultText: "usual ones, 100, 602, 47, 1, and a GraphSAGE step's", Usage: "products `[KIND:]MxNxK[,…]`: nn: A·B, nt: A·Bᵀ, tn: Aᵀ·B"},
			&cli.StringFlag{Name: "openblas", Value: "off", Usage: "compare products with OpenBLAS: auto (a usual name), off, or the library's `PATH`"},
			&cli.StringFlag{Name: "workers", DefaultText: "1 and one per CPU", Usage: "worker slots of the host device, and OpenBLAS's threads `N[,N…]`"},
			&cli.Float64Flag{Name: "seconds", Value: 1, Usage: "length of a row's measurement"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the values"},
			kernelsFlag(), resultsFlag(),
		},
		Action: action(0, runBenchCompute),
	}
}

// computePlan is what "bench compute" is asked for.
type computePlan struct {
	cases   []gnn.BenchCase
	workers []int
	level   simd.Level
	cfg     gnn.BenchConfig
	length  time.Duration
}

func (e *env) computePlan() (*computePlan, error) {
	c := e.c
	p := &computePlan{cfg: gnn.BenchConfig{Seed: c.Uint64("seed")}}
	var err error
	if p.level, err = simd.Parse(c.String("kernels")); err != nil {
		return nil, err
	}
	if p.cfg.Shapes, err = gnn.ParseShapes(c.String("shapes")); err != nil {
		return nil, err
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
	only := computeGroups()
	if c.String("only") != "" {
		only = strings.Split(c.String("only"), ",")
	}
	for _, name := range only {
		if !slices.Contains(computeGroups(), name) {
			return nil, errs.New(errs.Usage, "unknown --only %q; %s", name, meant(name, computeGroups(), "choose among "+strings.Join(computeGroups(), ", ")))
		}
	}
	if c.IsSet("shapes") && !slices.Contains(only, "gemm") {
		return nil, errs.New(errs.Usage, "--shapes is for products, which --only %s leaves out; add gemm to it", c.String("only"))
	}
	if path := c.String("openblas"); path != "off" {
		if p.cfg.BLAS, err = openblas.Open(path); err != nil {
			return nil, err
		}
	}
	for _, b := range gnn.Benchmarks {
		if !slices.Contains(only, b.Name) {
			continue
		}
		cases, err := b.Cases(&p.cfg)
		if err != nil {
			return nil, err
		}
		p.cases = append(p.cases, cases...)
	}
	return p, nil
}

func runBenchCompute(ctx context.Context, e *env) (err error) {
	p, err := e.computePlan()
	if err != nil {
		return err
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer closing(&err, out.close)
	if p.cfg.BLAS != nil {
		out.event("openblas", map[string]string{"path": p.cfg.BLAS.Path, "config": p.cfg.BLAS.Config})
		e.ui.Printf("%s (%s)", p.cfg.BLAS.Config, p.cfg.BLAS.Path)
	}
	var rows []gnn.BenchResult
	for _, n := range p.workers {
		got, err := e.computeRows(ctx, p, n, len(rows), out)
		rows = append(rows, got...)
		if err != nil {
			return err
		}
	}
	e.showCompute(rows)
	if err := out.commit(); err != nil {
		return err
	}
	for _, r := range rows {
		if !r.OK {
			return errs.New(errs.Failed, "bench compute: wrong results: %s with %d workers: %s; the list says where", r.Case, r.Workers, r.Where)
		}
	}
	return nil
}

// computeRows measures all cases with some workers.
func (e *env) computeRows(ctx context.Context, p *computePlan, workers, done int, out *results) (rows []gnn.BenchResult, err error) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers, Kernels: p.level})
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	peak, err := gnn.BenchPeak(dev)
	if err != nil {
		return nil, err
	}
	for i := range p.cases {
		e.ui.Progress("bench compute", int64(done+i), int64(len(p.cases)*len(p.workers)))
		r, err := p.cases[i].Measure(ctx, dev, p.cfg.BLAS, peak, p.length)
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
	for _, r := range rows {
		flops, peak, theirs, ratio, cpu, rivalError := "-", "-", "-", "-", "-", "-"
		if r.FLOPS > 0 {
			flops = giga(r.FLOPS)
			if r.Peak > 0 {
				peak = share100(r.PeakShare)
			}
		}
		if r.Ratio != nil {
			theirs, ratio, cpu, rivalError = giga(r.OpenBLASFLOPS), r.Ratio.String(), r.RatioCPU.String(), fmt.Sprintf("%.1e", r.RivalError)
		}
		check := "passed"
		if !r.OK {
			check = "FAILED: " + r.Where
		}
		table = append(table, []string{r.Case, r.Kernels, fmt.Sprint(r.Workers), flops, peak, giga(r.BytesPerSecond), theirs, ratio, cpu,
			fmt.Sprintf("%.1e", r.Error), fmt.Sprintf("%.1e", r.Bound), rivalError, check})
	}
	e.ui.Table([]string{"case", "kernels", "workers", "GFLOP/s", "of peak", "GB/s", "OpenBLAS", "ratio", "by CPU", "error", "bound", "its error", "check"}, table)
}
