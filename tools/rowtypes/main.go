// Command rowtypes says what each type of stored rows costs and gives: it trains the same model on
// the same data with rows of float32, float16, bfloat16 and int8, in turn for each seed, and prints
// bytes, epoch times and the differences in test accuracy to float32 of the same seed.
//
//	go run ./tools/rowtypes                      # the Debian packages that this machine's apt knows
//	go run ./tools/rowtypes -dataset DIR -seeds 5 -epochs 8
//
// The SSDs are software ones over files in -dir, read with O_DIRECT.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/importer"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

type options struct {
	dataset, dir  string
	seeds, epochs int
	ssds          int
	fanout        string
	hops          []int
	budget        float64
	asJSON        bool
}

// run is one training.
type run struct {
	RowDType string    `json:"row_dtype"`
	Seed     uint64    `json:"seed"`
	RowBytes int64     `json:"row_bytes"`
	Disk     int64     `json:"data_bytes"`
	Read     int64     `json:"bytes_ssd"` // an epoch, the mean
	RowsSSD  int64     `json:"rows_ssd"`
	Seconds  []float64 `json:"epoch_seconds"`
	// of the whole run: on a busy machine it tells more than wall time
	CPU     float64 `json:"cpu_seconds"`
	Loss    float64 `json:"loss"`
	TestAcc float64 `json:"test_acc"`
}

func main() {
	var o options
	flag.StringVar(&o.dataset, "dataset", "",
		"dataset `DIR` (default: import Debian's package index)")
	flag.StringVar(&o.dir, "dir", "",
		"`DIR` for SSD files and the imported dataset (default: a temporary one)")
	flag.IntVar(&o.seeds, "seeds", 5, "paired runs")
	flag.IntVar(&o.epochs, "epochs", 8, "epochs of each run")
	flag.StringVar(&o.fanout, "fanout", "10,10", "neighbours sampled per hop")
	flag.IntVar(&o.ssds, "ssds", 2, "software SSDs")
	flag.Float64Var(&o.budget, "cpu-cache", 10,
		"CPU tier in percent of the stored features; the GPU tier takes half of it")
	flag.BoolVar(&o.asJSON, "json", false, "also print each run as a line of JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := compare(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "rowtypes:", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, o options) (err error) {
	if o.hops, err = units.ParseInts(o.fanout, -1); err != nil {
		return fmt.Errorf("-fanout: %w", err)
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "helios-rowtypes-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	}
	if o.dataset == "" {
		o.dataset = filepath.Join(o.dir, "debian")
		r, err := importer.Debian(ctx,
			importer.DebianOptions{Output: importer.Output{Out: o.dataset}})
		if err != nil {
			return err
		}
		fmt.Printf("%d packages, %d dependencies, %d sections, %d words\n", r.Packages,
			r.Dependencies, r.Sections, r.Words)
	}
	d, err := dataset.Open(o.dataset)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	loads := map[rowtype.Type]stripe.LoadReport{}
	ssds := map[rowtype.Type][]*gpuio.SSD{}
	for _, t := range rowtype.Types() {
		if ssds[t], err = open(ctx, d, o, t); err != nil {
			return err
		}
		if loads[t], err = stripe.Load(ctx, d, ssds[t],
			stripe.LoadOptions{RowType: t.String()}); err != nil {
			return err
		}
	}
	fmt.Printf(
		"%s: %d nodes, %d edges, %d features of %s; %d seeds, %d epochs, fanout %s, hidden 128, batch 1024\n",
		d.Meta.Name, d.Meta.Nodes, d.Meta.Edges, d.Meta.Dim, d.Meta.RowType(), o.seeds, o.epochs,
		o.fanout)
	all := map[rowtype.Type][]run{}
	for seed := 1; seed <= o.seeds; seed++ {
		order := slices.Clone(rowtype.Types())
		if seed%2 == 0 { // neither end is always the warm one
			slices.Reverse(order)
		}
		for _, t := range order {
			r, err := train(ctx, d, ssds[t], o, uint64(seed))
			if err != nil {
				err = fmt.Errorf("%s, seed %d: %w", t, seed, err)
				if seed > 1 { // the seeds before are whole
					for _, t := range order {
						all[t] = all[t][:seed-1]
					}
					err = errors.Join(err, show(all))
				}
				return err
			}
			r.Disk = loads[t].DataBytes
			all[t] = append(all[t], r)
			if o.asJSON {
				if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
					return err
				}
			}
		}
	}
	return show(all)
}

// open makes the SSDs of a type.
func open(ctx context.Context, d *dataset.Dataset, o options, t rowtype.Type) ([]*gpuio.SSD,
	error) {
	var out []*gpuio.SSD
	size := (d.Meta.Nodes*int64(t.RowBytes(d.Meta.Dim))*2/int64(o.ssds) + 8<<20) &^ 4095
	for i := range o.ssds {
		path := filepath.Join(o.dir, fmt.Sprintf("%s-%d.img", t, i))
		if err := proxy.Create(path, size); err != nil {
			return nil, err
		}
		bus, err := proxy.Open(proxy.Config{Path: path})
		if err != nil {
			return nil, err
		}
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		if err != nil {
			return nil, err
		}
		out = append(out, &gpuio.SSD{Ctrl: c, Name: filepath.Base(path), BackingPath: path})
	}
	return out, nil
}

func train(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, o options,
	seed uint64) (r run, err error) {
	dev, err := cuda.NewHost(cuda.HostOptions{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	cpu := cpuSeconds()
	res, err := sched.Train(ctx, plan.Config{
		Fanouts: o.hops, Batch: 1024, Hidden: 128, Epochs: o.epochs, Seed: seed, Dropout: 0.3,
		GPUCache: units.Budget{Percent: o.budget / 2}, CPUCache: units.Budget{Percent: o.budget},
	}, prepare.Inputs{Dev: dev, Dataset: d, SSDs: ssds}, report.Observer{})
	if err != nil {
		return r, err
	}
	if res.TestAcc == nil {
		return r, errors.New("the dataset has no test nodes")
	}
	r = run{RowDType: res.RowDType, Seed: seed, RowBytes: res.RowBytes, TestAcc: *res.TestAcc,
		CPU: cpuSeconds() - cpu}
	for _, e := range res.Epochs {
		r.Read += e.BytesSSD
		r.RowsSSD += e.RowsSSD
		r.Seconds = append(r.Seconds, e.Seconds)
		r.Loss = e.Loss
	}
	r.Read /= int64(len(res.Epochs))
	r.RowsSSD /= int64(len(res.Epochs))
	return r, nil
}

func show(all map[rowtype.Type][]run) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w,
		"rows\trow bytes\ton SSDs\tread an epoch\tof float32\tepoch s (median)\tof float32\tCPU of float32\ttest acc\tdifference to float32 (mean ± sd, points)")
	base := all[rowtype.Float32]
	for _, t := range rowtype.Types() {
		runs := all[t]
		var acc, diff, ratio, cpu []float64
		for i, r := range runs {
			acc = append(acc, 100*r.TestAcc)
			diff = append(diff, 100*(r.TestAcc-base[i].TestAcc))
			ratio = append(ratio, median(r.Seconds)/median(base[i].Seconds))
			cpu = append(cpu, r.CPU/base[i].CPU)
		}
		m, sd := spread(acc)
		dm, dsd := spread(diff)
		rm, rsd := spread(ratio)
		cm, csd := spread(cpu)
		fmt.Fprintf(w,
			"%s\t%d\t%s\t%s\t%.3f\t%.3f\t%.3f ± %.3f\t%.3f ± %.3f\t%.2f ± %.2f\t%+.3f ± %.3f\n", t,
			runs[0].RowBytes, units.FormatBytes(runs[0].Disk), units.FormatBytes(runs[0].Read),
			float64(runs[0].Read)/float64(base[0].Read), median(seconds(runs)), rm, rsd, cm, csd, m,
			sd, dm, dsd)
	}
	fmt.Fprintf(w, "%s\n", time.Now().UTC().Format(time.DateOnly))
	return w.Flush()
}

func cpuSeconds() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

func seconds(runs []run) (all []float64) {
	for _, r := range runs {
		all = append(all, r.Seconds...)
	}
	return all
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[len(s)/2] + s[(len(s)-1)/2]) / 2
}

// spread is mean and standard deviation of a sample.
func spread(v []float64) (mean, sd float64) {
	for _, x := range v {
		mean += x / float64(len(v))
	}
	if len(v) < 2 {
		return mean, 0
	}
	for _, x := range v {
		sd += (x - mean) * (x - mean)
	}
	return mean, math.Sqrt(sd / float64(len(v)-1))
}
