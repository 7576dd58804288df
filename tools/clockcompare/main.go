// Command clockcompare runs the same measurements in wall time and in virtual time and prints what
// each reached and their ratio.
//
//	bin/lab/clockcompare -check
//
// In wall time it makes software SSDs in RAM that play an SSD model which this CPU can keep up
// with, and measures them as "bench io" does; in virtual time the profile "host" plays the same
// model. Where they differ by more than 10 %, one of the two is wrong, or the machine was busy with
// something else: then the medians agree and the 99th percentiles are milliseconds apart, as
// threads wait for a core. "chrt -r 1 clockcompare" keeps others off for the time of the runs.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
	"helios/internal/units"
	"helios/nvme"
	"helios/nvme/proxy"
)

type options struct {
	model, hardware string
	stacks          []string
	ssds, depths    []int
	rows            []int
	seconds         float64
	runs            int
	mib             int64
	allowed         float64
	jsonOut, check  bool
}

// result is one configuration in both clocks; the wall figures are of the median run by IOPS.
type result struct {
	Stack    string  `json:"stack"`
	SSDs     int     `json:"ssds"`
	Depth    int     `json:"depth"`
	RowBytes int     `json:"row_bytes"`
	Wall     float64 `json:"wall_iops"`
	WallLow  float64 `json:"wall_iops_least"`
	WallHigh float64 `json:"wall_iops_most"`
	Virtual  float64 `json:"virtual_iops"`
	Ratio    float64 `json:"wall_over_virtual"`
	WallP50  float64 `json:"wall_p50_us"`
	VirtP50  float64 `json:"virtual_p50_us"`
	WallP99  float64 `json:"wall_p99_us"`
	VirtP99  float64 `json:"virtual_p99_us"`
	CPU      float64 `json:"wall_cpus"` // that the wall run used, of those there are
}

func main() {
	var o options
	stacks := flag.String("stacks", "async,sync", "I/O stacks")
	ssds := flag.String("ssds", "1,2", "numbers of SSDs")
	depths := flag.String("depths", "8,32,256", "reads outstanding per SSD")
	rows := flag.String("rows", "512,4096", "bytes of a row")
	flag.StringVar(&o.model, "model", "slow", "SSD model, by name or file")
	flag.StringVar(&o.hardware, "hardware", "host", "hardware profile of the virtual clock")
	flag.Float64Var(&o.seconds, "seconds", 0.5, "length of a run in either clock")
	flag.IntVar(&o.runs, "runs", 3, "wall runs of each configuration")
	flag.Int64Var(&o.mib, "size", 64, "size of an SSD in MiB")
	flag.Float64Var(&o.allowed, "allowed", 0.1, "difference of the IOPS that -check allows")
	flag.BoolVar(&o.jsonOut, "json", false, "print each configuration as a JSON object")
	flag.BoolVar(&o.check, "check", false, "fail when a configuration differs by more")
	flag.Parse()
	o.stacks = strings.Split(*stacks, ",")
	var err error
	for _, l := range []struct {
		name string
		text string
		to   *[]int
	}{{"ssds", *ssds, &o.ssds}, {"depths", *depths, &o.depths}, {"rows", *rows, &o.rows}} {
		if *l.to, err = units.ParseInts(l.text, 1); err != nil {
			fmt.Fprintf(os.Stderr, "clockcompare: -%s: %v\n", l.name, err)
			os.Exit(2)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "clockcompare:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	p, err := hardware.Load(o.hardware)
	if err != nil {
		return err
	}
	m, err := ssdmodel.Load(o.model)
	if err != nil {
		return err
	}
	dev, err := cuda.NewHost(cuda.HostOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	disks, done, err := open(ctx, slices.Max(o.ssds), o.mib<<20, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	var results []result
	for _, stack := range o.stacks {
		for _, n := range o.ssds {
			for _, row := range o.rows {
				for _, depth := range o.depths {
					cfg := iobench.Config{Stack: stack, RowBytes: row, Depth: depth, Coalesce: -1,
						Duration: time.Duration(o.seconds * float64(time.Second)), Seed: 1}
					r, err := compare(ctx, cfg, o.runs, dev, disks[:n], p, m)
					if err != nil {
						return err
					}
					results = append(results, r)
					if o.jsonOut {
						if err := json.NewEncoder(out).Encode(r); err != nil {
							return err
						}
					}
				}
			}
		}
	}
	return report(o, results, out)
}

// open makes software SSDs in RAM that play a model.
func open(ctx context.Context, n int, bytes int64, m *ssdmodel.Model) (disks []*gpuio.SSD,
	done func() error, err error) {
	dir, err := os.MkdirTemp("/dev/shm", "clockcompare-")
	if err != nil {
		return nil, nil, err
	}
	done = func() error {
		var err error
		for _, d := range disks {
			err = errors.Join(err, d.Ctrl.Close(context.WithoutCancel(ctx)))
		}
		return errors.Join(err, os.RemoveAll(dir))
	}
	for i := range n {
		path := filepath.Join(dir, fmt.Sprintf("%d.img", i))
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return nil, nil, errors.Join(err, done())
		}
		if err := os.Truncate(path, bytes); err != nil {
			return nil, nil, errors.Join(err, done())
		}
		bus, err := proxy.Open(proxy.Config{Path: path, RAM: true, Model: m})
		if err != nil {
			return nil, nil, errors.Join(err, done())
		}
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		if err != nil {
			return nil, nil, errors.Join(err, bus.Close(), done())
		}
		disks = append(disks, &gpuio.SSD{Ctrl: c, Name: fmt.Sprintf("ssd%d", i), BackingPath: path})
	}
	return disks, done, nil
}

func compare(ctx context.Context, cfg iobench.Config, runs int, dev cuda.Device, disks []*gpuio.SSD,
	p *hardware.Profile, m *ssdmodel.Model) (result, error) {
	virtual := cfg
	virtual.Hardware, virtual.SSDCount, virtual.Model = p, len(disks), m
	v, err := iobench.Run(ctx, virtual)
	if err == nil && !v.Audited {
		err = errors.New(v.AuditError)
	}
	if err != nil {
		return result{}, err
	}
	var rows []iobench.Row
	for range max(runs, 1) {
		wall := cfg
		wall.Dev, wall.SSDs = dev, disks
		w, err := iobench.Run(ctx, wall)
		if err == nil && !w.Audited {
			err = fmt.Errorf("%s, %d SSDs, depth %d: failed its audit: %s", cfg.Stack, len(disks),
				cfg.Depth, w.AuditError)
		}
		if err != nil {
			return result{}, err
		}
		rows = append(rows, w)
	}
	slices.SortFunc(rows,
		func(a, b iobench.Row) int { return int(math.Copysign(1, a.IOPS-b.IOPS)) })
	w := rows[len(rows)/2]
	return result{
		Stack: cfg.Stack, SSDs: len(disks), Depth: cfg.Depth, RowBytes: cfg.RowBytes,
		Wall: w.IOPS, WallLow: rows[0].IOPS, WallHigh: rows[len(rows)-1].IOPS, Virtual: v.IOPS,
		Ratio:   w.IOPS / v.IOPS,
		WallP50: w.P50, VirtP50: v.P50, WallP99: w.P99, VirtP99: v.P99,
		CPU: w.CPUPerIO * w.IOPS / 1e6,
	}, nil
}

func report(o options, results []result, out io.Writer) error {
	b := bufio.NewWriter(out)
	fmt.Fprintf(b,
		"SSDs in RAM that play %s: wall clock (median of %d, least-most) against modelled (profile %s)\n",
		o.model, o.runs, o.hardware)
	w := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w,
		"stack\tSSDs\tdepth\trow\twall IOPS\tmodelled IOPS\twall/modelled\tp50 us\tmodelled\tp99 us\tmodelled\tCPUs")
	worst, missed := 0.0, 0
	for _, r := range results {
		fmt.Fprintf(w,
			"%s\t%d\t%d\t%d\t%.0f (%.0f-%.0f)\t%.0f\t%.3f\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\n",
			r.Stack, r.SSDs, r.Depth, r.RowBytes, r.Wall, r.WallLow, r.WallHigh, r.Virtual, r.Ratio,
			r.WallP50, r.VirtP50, r.WallP99, r.VirtP99, r.CPU)
		d := math.Abs(r.Ratio - 1)
		worst = max(worst, d)
		if d > o.allowed {
			missed++
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(b, "%d configurations, %d beyond %.0f %%, the worst %.1f %%\n", len(results),
		missed, 100*o.allowed, 100*worst)
	if err := b.Flush(); err != nil {
		return err
	}
	if o.check && missed > 0 {
		return fmt.Errorf("%d of %d configurations differ by more than %.0f %%", missed,
			len(results), 100*o.allowed)
	}
	return nil
}
