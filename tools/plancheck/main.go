// Command plancheck holds plans against runs: it trains on software SSDs that play an SSD model, in
// wall time, plans the same runs, and prints both with their ratio and what bounds each.
//
//	bin/lab/plancheck -heliosctl bin/heliosctl -wall wall.json   # measures
//	bin/lab/plancheck -heliosctl bin/heliosctl -plan wall.json   # plans
//
// Measure on an idle machine. The profile "host" gets two figures from it: how fast it trains, from
// a run of the same model and mini-batches with all rows in memory, and how fast it looks rows up
// in a dynamic tier, from one of bam. These runs are not among those that are compared.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"helios/internal/hardware"
)

// configurations are run and planned.
var configurations = []string{
	"--mode helios --gpu-cache 5%",
	"--mode helios --gpu-cache 1% --cpu-cache 0",
	"--mode helios --gpu-cache 10% --cpu-cache 20%",
	"--mode helios --gpu-cache 5% --fanout 5,5",
	"--mode helios --gpu-cache 5% --fanout 15,10",
	"--mode helios --gpu-cache 5% --batch-size 256",
	"--mode helios --gpu-cache 5% --batch-size 4096",
	"--mode helios --gpu-cache 5% --pipeline intra",
	"--mode helios --gpu-cache 5% --cpu-cache 0 --policy lru",
	"--mode helios --gpu-cache 10% --cpu-cache 0 --policy s3fifo",
	"--mode helios --gpu-cache 5% --hidden 1024",
	"--mode helios --gpu-cache 5% --hidden 512 --model gcn",
	"--mode bam --gpu-cache 5%",
	"--mode bam --gpu-cache 20%",
	"--mode gids --gpu-cache 5%",
	"--mode helios --gpu-cache 90% --hidden 1024",
	"--mode helios --gpu-cache 40% --cpu-cache 60% --hidden 1024 --model gcn",
	"--mode gids --gpu-cache 80% --hidden 2048",
}

// directory is the run whose time of lookups in a dynamic tier is taken.
const directory = "--mode bam --gpu-cache 10%"

// training returns the run whose time of training is taken for a configuration: the same model and
// mini-batches, with all rows in memory.
func training(flags string) string {
	words := strings.Fields(flags)
	run := "--mode inmem --gpu-cache 5%"
	for i, w := range words[:len(words)-1] {
		if slices.Contains([]string{"--model", "--hidden", "--fanout", "--batch-size"}, w) {
			run += " " + w + " " + words[i+1]
		}
	}
	return run
}

// toMeasure are the configurations, and before them what is for their calibration alone.
func toMeasure() (all []string) {
	all = append(all, directory)
	for _, flags := range configurations {
		if run := training(flags); !slices.Contains(all, run) {
			all = append(all, run)
		}
		all = append(all, flags)
	}
	return all
}

// common are the flags of all of them. Hotness is found beforehand, by degree.
var common = []string{"--seed", "1"}

// ssds is the number of software SSDs.
const ssds = 2

type options struct {
	heliosctl, dir, model, wall, plan string
	nodes                             int
	epochs                            int
}

// run holds the measurements of one configuration.
type run struct {
	Flags   string    `json:"flags"`
	Seconds []float64 `json:"seconds"` // of the epochs after the first
	Limit   string    `json:"limit"`
	Train   float64   `json:"train_seconds"` // medians over these epochs, as the next
	Lookup  float64   `json:"lookup_seconds"`
}

func main() {
	var o options
	flag.StringVar(&o.heliosctl, "heliosctl", "bin/heliosctl", "the program")
	flag.StringVar(&o.dir, "dir", "", "folder for the dataset; empty: one that goes")
	flag.StringVar(&o.model, "model", "slow", "SSD model")
	flag.IntVar(&o.nodes, "nodes", 200_000, "nodes of the graph")
	flag.IntVar(&o.epochs, "epochs", 4, "epochs of a run; the first does not count")
	flag.StringVar(&o.wall, "wall", "", "measure alone, into this file")
	flag.StringVar(&o.plan, "plan", "", "plan for what this file has, and compare")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := check(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "plancheck:", err)
		os.Exit(1)
	}
}

func check(ctx context.Context, o options, out io.Writer) (err error) {
	if o.epochs < 2 {
		return errors.New("-epochs: give at least 2, of which the first does not count")
	}
	if o.heliosctl, err = filepath.Abs(o.heliosctl); err != nil {
		return err
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "plancheck-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	}
	graph := filepath.Join(o.dir, "g")
	if _, serr := os.Stat(graph); errors.Is(serr, os.ErrNotExist) {
		if _, err := o.call(ctx, "generate", "--kind", "rmat", "--nodes", fmt.Sprint(o.nodes),
			"--avg-degree", "15", "--classes", "16", "--dim", "128", "--train-fraction", "0.05",
			"--val-fraction", "0.001", "--test-fraction", "0.001", "--seed", "3", "--out",
			graph); err != nil {
			return err
		}
	}
	var runs []run
	if o.plan != "" {
		text, err := os.ReadFile(o.plan)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &runs); err != nil || len(runs) == 0 {
			return fmt.Errorf("%s holds no runs: %w", o.plan, err)
		}
	} else if runs, err = o.measure(ctx, graph); err != nil {
		return err
	}
	if o.wall != "" {
		text, err := json.MarshalIndent(runs, "", " ")
		if err != nil {
			return err
		}
		return os.WriteFile(o.wall, append(text, '\n'), 0o644)
	}
	return o.compare(ctx, graph, runs, out)
}

// call runs heliosctl and returns the last line of its output.
func (o *options) call(ctx context.Context, args ...string) ([]byte, error) {
	c := exec.CommandContext(ctx, o.heliosctl, append(args, "--quiet", "--state",
		filepath.Join(o.dir, "state"))...)
	var told bytes.Buffer
	c.Stderr = &told
	text, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("heliosctl %s: %w: %s", strings.Join(args, " "), err,
			bytes.TrimSpace(told.Bytes()))
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return lines[len(lines)-1], nil
}

// measure trains in every configuration.
func (o *options) measure(ctx context.Context, graph string) (runs []run, err error) {
	if _, err := o.call(ctx, "bind-ssds", "--proxy-ram", fmt.Sprint(ssds), "--size", "256MiB",
		"--ssd-model", o.model); err != nil {
		return nil, err
	}
	defer func() {
		_, uerr := o.call(context.WithoutCancel(ctx), "unbind-ssds", "ssd0", "ssd1",
			"--delete")
		err = errors.Join(err, uerr)
	}()
	if _, err := o.call(ctx, "load", graph); err != nil {
		return nil, err
	}
	for _, flags := range toMeasure() {
		args := slices.Concat([]string{"train", graph, "--no-eval", "--json", "--epochs",
			fmt.Sprint(o.epochs)}, strings.Fields(flags), common)
		text, err := o.call(ctx, args...)
		if err != nil {
			return nil, err
		}
		var r struct {
			Epochs []struct {
				Seconds, Stall, Overlap float64
				Stages                  map[string]float64 `json:"stage_seconds"`
			}
		}
		if err := json.Unmarshal(text, &r); err != nil || len(r.Epochs) < 2 {
			return nil, fmt.Errorf("train %s: its result is not whole: %w", flags, err)
		}
		x := run{Flags: flags}
		var train, lookup []float64
		for _, e := range r.Epochs[1:] {
			x.Seconds = append(x.Seconds, e.Seconds)
			train, lookup = append(train, e.Stages["train"]), append(lookup, e.Stages["lookup"])
		}
		last := r.Epochs[len(r.Epochs)-1]
		x.Limit = limit(last.Stages, last.Seconds, last.Stall)
		x.Train, x.Lookup = median(train), median(lookup)
		runs = append(runs, x)
		fmt.Fprintf(os.Stderr, "%s: %.4g s\n", flags, median(x.Seconds))
	}
	return runs, nil
}

// limit names what bounds a run as a plan does: training, where it hardly waits, else the stage
// that is busy longest.
func limit(stages map[string]float64, seconds, stall float64) string {
	if stall <= 0.1 {
		return "training"
	}
	names := map[string]string{"sample": "sampling", "inspect": "finding changes",
		"lookup": "lookup", "complete": "ssds", "gather": "gather"}
	best, largest := "nothing overlaps", 0.0
	for stage, name := range names {
		if stages[stage] > largest {
			best, largest = name, stages[stage]
		}
	}
	return best
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// planned is a line of "plan".
type planned struct {
	Seconds    float64
	Bottleneck string
	Busy       map[string]float64 `json:"busy_seconds"`
}

func (o *options) planFor(ctx context.Context, graph, profile, flags string) (p planned,
	err error) {
	text, err := o.call(ctx, slices.Concat([]string{"plan", graph, "--json", "--hardware", profile,
		"--ssd-count", fmt.Sprint(ssds)}, strings.Fields(flags), common)...)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	return p, err
}

// faster returns how many times as long profile "host" keeps a resource busy as a run did.
func (o *options) faster(ctx context.Context, graph, flags, resource string, runs []run) (float64,
	error) {
	pos := slices.IndexFunc(runs, func(r run) bool { return r.Flags == flags })
	if pos < 0 {
		return 0, fmt.Errorf("no run %s to calibrate by", flags)
	}
	took := map[string]float64{"training": runs[pos].Train, "lookup": runs[pos].Lookup}[resource]
	p, err := o.planFor(ctx, graph, "host", flags)
	if err != nil {
		return 0, err
	}
	if took <= 0 || p.Busy[resource] <= 0 {
		return 0, fmt.Errorf("the run %s has no time of %s to calibrate by", flags, resource)
	}
	return p.Busy[resource] / took, nil
}

// calibrated writes the profile with speeds of training and of lookups that are so many times its
// own.
func (o *options) calibrated(train, lookup float64) (string, error) {
	host, err := hardware.Load("host")
	if err != nil {
		return "", err
	}
	// The arithmetic and the element-wise kernels alike.
	path := filepath.Join(o.dir, "calibrated.yaml")
	return path, os.WriteFile(path, fmt.Appendf(nil, `base: host
name: calibrated
ssds: {model: %s, count: {value: %d, source: plancheck}}
gpu:
  tensor_tflops: {value: %g, source: "plancheck: training with all rows in memory"}
cpu:
  sets_ns: {value: %g, source: "plancheck: lookups of bam"}
  announce_ns: {value: %g, source: "plancheck: in proportion to them"}
`, o.model, ssds, host.GPU.TensorTFLOPS.Value*train,
		host.CPU.SetsNS.Value/lookup, host.CPU.AnnounceNS.Value/lookup), 0o644)
}

// compare plans and prints.
func (o *options) compare(ctx context.Context, graph string, runs []run, out io.Writer) error {
	lookup, err := o.faster(ctx, graph, directory, "lookup", runs)
	if err != nil {
		return err
	}
	trains := map[string]float64{} // by the run that it is taken from
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "run\twall s (least-most)\tplanned s\tplanned/wall\twall limit\tplanned limit")
	var off []float64
	same := 0
	for _, r := range runs {
		if !slices.Contains(configurations, r.Flags) {
			continue
		}
		from := training(r.Flags)
		if trains[from] == 0 {
			if trains[from], err = o.faster(ctx, graph, from, "training", runs); err != nil {
				return err
			}
		}
		profile, err := o.calibrated(trains[from], lookup)
		if err != nil {
			return err
		}
		p, err := o.planFor(ctx, graph, profile, r.Flags)
		if err != nil {
			return err
		}
		wall := median(r.Seconds)
		fmt.Fprintf(w, "%s\t%.4f (%.4f-%.4f)\t%.4f\t%.3f\t%s\t%s\n", r.Flags, wall,
			slices.Min(r.Seconds), slices.Max(r.Seconds), p.Seconds, p.Seconds/wall, r.Limit,
			p.Bottleneck)
		off = append(off, math.Abs(p.Seconds/wall-1))
		if p.Bottleneck == r.Limit {
			same++
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(off) == 0 {
		return errors.New("none of the runs is one that is planned")
	}
	within := 0
	for _, d := range off {
		if d <= 0.15 {
			within++
		}
	}
	_, err = fmt.Fprintf(out,
		"%d runs: off by %.1f %% in the median, %.1f %% at worst; %d within 15 %%; %d with the same limit\n",
		len(off), 100*median(off), 100*slices.Max(off), within, same)
	return err
}
