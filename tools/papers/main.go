// Command papers plays the experiments of the Helios and GIDS papers on the virtual clock and
// prints what it found next to what they report:
//
//	bin/lab/papers -dir /tmp/papers -md papers.md
//	bin/lab/papers -only window -json -
//	bin/lab/papers -selftest
//
// The graph is R-MAT with computed features (none are stored), by default 10 M nodes; samples,
// caches and row numbers are real, every time is modelled: hardware profiles of internal/hardware,
// SSD models of internal/ssdmodel. The papers' graphs are 11 to 560 times as large; batches and
// caches are scaled where a figure depends on their ratio to the graph, which each table says. The
// dataset is generated once and found again in -dir. Equal flags give equal figures.
//
// With -selftest a graph of a few thousand nodes goes through every experiment in seconds and the
// directions of the effects that do not depend on size are checked.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/virtual"
)

type options struct {
	dir      string
	nodes    int64
	degree   float64
	only     string
	md, json string
	selftest bool
}

func main() {
	var o options
	flag.StringVar(&o.dir, "dir", filepath.Join(os.TempDir(), "helios-papers"),
		"folder of the dataset, generated where it is not there")
	flag.Int64Var(&o.nodes, "nodes", 10_000_000, "nodes of the graph")
	flag.Float64Var(&o.degree, "avg-degree", 16, "in-neighbours of a node, in the mean")
	flag.StringVar(&o.only, "only", "", "experiments whose name matches this expression")
	flag.StringVar(&o.md, "md", "-", "tables in Markdown to this file, \"-\" for standard output")
	flag.StringVar(&o.json, "json", "",
		"all figures as JSON to this file, \"-\" for standard output")
	flag.BoolVar(&o.selftest, "selftest", false, "a small graph, every experiment, a few seconds")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "papers:", err)
		os.Exit(1)
	}
}

// size holds what an experiment's scale is made of.
type size struct {
	nodes   int64
	degree  float64
	batch   int // of the Helios experiments
	batches int // played
	gids    int // batch of the GIDS experiments where it is scaled (there 4,096)
	warm    int // batches that fill a dynamic tier first
}

// paperNodes is the graph that scaled figures are scaled from: IGB-full, 269 M nodes.
const paperNodes = 269e6

func (o *options) size() size {
	if o.selftest {
		return size{nodes: 20_000, degree: 12, batch: 64, batches: 3, gids: 16, warm: 8}
	}
	return size{nodes: o.nodes, degree: o.degree, batch: 8000, batches: 5,
		gids: max(int(4096*float64(o.nodes)/paperNodes), 16), warm: 150}
}

func run(ctx context.Context, o options) (err error) {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	if o.selftest {
		o.md, o.json = "", ""
		if o.dir, err = os.MkdirTemp("", "papers-selftest"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	}
	l := &lab{ctx: ctx, size: o.size(), dir: o.dir, started: time.Now(),
		runs: map[string]report.EpochResult{}, profiles: map[string]*hardware.Profile{}}
	if err := l.open(o); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	out, err := create(o.md)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := fmt.Fprintf(out, "R-MAT, %d nodes, %d edges; every time is modelled.\n",
		l.ds.Meta.Nodes, l.ds.Meta.Edges); err != nil {
		return err
	}
	var tables []table
	for _, x := range experiments {
		if !only.MatchString(x.name) {
			continue
		}
		from := time.Now()
		t := table{Name: x.name, Title: x.title, Paper: x.paper, Setting: x.setting,
			Remark: x.remark}
		if err := x.play(l, &t); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		fmt.Fprintf(os.Stderr, "%s: %.0f s, %d runs so far\n", x.name, time.Since(from).Seconds(),
			l.played)
		tables = append(tables, t)
		if err := t.markdown(out); err != nil {
			return err
		}
		if o.selftest {
			if err := t.check(x); err != nil {
				return fmt.Errorf("%s: %w", x.name, err)
			}
		}
	}
	if len(tables) == 0 {
		return fmt.Errorf("-only %q matches no experiment; there are %s", o.only,
			strings.Join(names(), ", "))
	}
	if o.selftest {
		fmt.Printf("selftest: %d experiments, %d runs: ok\n", len(tables), l.played)
		return nil
	}
	fmt.Fprintf(os.Stderr, "%d runs in %.0f s\n", l.played, time.Since(l.started).Seconds())
	w, err := create(o.json)
	if err != nil {
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return errors.Join(e.Encode(map[string]any{"modelled": true, "nodes": l.ds.Meta.Nodes,
		"edges": l.ds.Meta.Edges, "tables": tables}), w.Close())
}

// create opens a file for writing, or standard output for "-"; what goes to "" is lost.
func create(path string) (io.WriteCloser, error) {
	switch path {
	case "":
		return nowhere{io.Discard}, nil
	case "-":
		return nowhere{os.Stdout}, nil
	}
	return os.Create(path)
}

// nowhere is a writer that is not to be closed.
type nowhere struct{ io.Writer }

func (nowhere) Close() error { return nil }

// lab holds what all experiments share.
type lab struct {
	ctx      context.Context
	size     size
	dir      string
	dev      cuda.Device
	ds       *dataset.Dataset
	profiles map[string]*hardware.Profile
	runs     map[string]report.EpochResult
	played   int
	started  time.Time
}

// open generates the dataset where it is not there, and opens it.
func (l *lab) open(o options) (err error) {
	pos := filepath.Join(o.dir, fmt.Sprintf("rmat-%d-%g", l.size.nodes, l.size.degree))
	if _, serr := os.Stat(pos); errors.Is(serr, os.ErrNotExist) {
		if err := os.MkdirAll(o.dir, 0o755); err != nil {
			return err
		}
		train := 0.01 // as the papers' runs have it
		if o.selftest {
			train = 0.1
		}
		from := time.Now()
		g := build.GenerateOptions{
			Kind: "rmat", Nodes: l.size.nodes, AvgDegree: l.size.degree, Classes: 64, Dim: 1024,
			Seed: 1, FeatureFn: "hash",
			TrainFraction: train, TestFraction: -1, Memory: 2 << 30, Out: pos,
		}
		if err := build.Generate(l.ctx, g); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "generated %s: %.0f s\n", pos, time.Since(from).Seconds())
	}
	if l.ds, err = dataset.Open(pos); err != nil {
		return err
	}
	l.dev, err = cuda.NewHost(cuda.HostOptions{})
	return err
}

func (l *lab) close() error { return errors.Join(l.dev.Close(), l.ds.Close()) }

func (l *lab) profile(name string) (*hardware.Profile, error) {
	if p := l.profiles[name]; p != nil {
		return p, nil
	}
	p, err := hardware.Load(name)
	if err == nil {
		l.profiles[name] = p
	}
	return p, err
}

// setup is one run.
type setup struct {
	cfg      plan.Config
	hardware string // a100-p5510x12
	ssds     int    // the profile's
	dim      int    // 1024
	warm     int
	batches  int // the size's
}

// play is the epoch of a run, played once for equal setups.
func (l *lab) play(s setup) (report.EpochResult, error) {
	none := report.EpochResult{}
	if s.hardware == "" {
		s.hardware = "a100-p5510x12"
	}
	if s.dim == 0 {
		s.dim = 1024
	}
	if s.batches == 0 {
		s.batches = l.size.batches
	}
	c := &s.cfg
	c.NoEval, c.Epochs = true, 1
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.HotnessDir == "" {
		c.HotnessDir = filepath.Join(l.dir, "hotness")
	}
	if c.Presample == 0 && (c.Hotness == "" || c.Hotness == plan.HotnessPresample) {
		c.Presample = 2
	}
	key := fmt.Sprintf("%+v", s)
	if r, ok := l.runs[key]; ok {
		return r, nil
	}
	p, err := l.profile(s.hardware)
	if err != nil {
		return none, err
	}
	l.ds.Meta.Dim = s.dim
	res, err := virtual.Run(l.ctx, tiers.Simulation, *c, prepare.Inputs{Dev: l.dev,
		Dataset: l.ds},
		cost.Hardware{Profile: p, SSDs: s.ssds, Warm: s.warm, Batches: s.batches},
		report.Observer{})
	if err != nil {
		return none, err
	}
	l.played++
	e := res.Epochs[0]
	l.runs[key] = e
	return e, nil
}

// ms is a run's time for a batch.
func ms(e report.EpochResult) float64 { return e.Seconds / float64(max(e.Batches, 1)) * 1e3 }

// hits is the share of rows that the GPU tier had, of those that the CPU tier had not.
func hits(e report.EpochResult) float64 {
	return float64(e.RowsGPU) / float64(max(e.RowsGPU+e.RowsSSD, 1))
}

// fetching is the seconds that a serial run spent on rows: looked up, read and gathered.
func fetching(e report.EpochResult) float64 {
	s := e.StageSeconds
	return s.Lookup + s.Submit + s.Complete + s.Gather
}

// ingress is the data rate into the GPU, in GB/s: what came from SSDs and from the CPU tier.
func ingress(e report.EpochResult, rowBytes int64) float64 {
	return float64(e.BytesSSD+e.RowsCPU*rowBytes) / e.Seconds / 1e9
}

// share is a share of the features, none for 0.
func share(percent float64) units.Budget {
	if percent == 0 {
		return plan.NoCache()
	}
	return units.Budget{Percent: percent}
}

// table is an experiment's outcome.
type table struct {
	Name    string     `json:"name"`
	Title   string     `json:"title"`
	Setting string     `json:"setting"`
	Paper   string     `json:"paper"`
	Columns []string   `json:"columns"`
	Rows    [][]string `json:"rows"`
	Ours    string     `json:"ours"`
	// Factors hold what Ours sums up.
	Factors []float64 `json:"factors"`
	Remark  string    `json:"remark"`
}

func (t *table) add(cells ...any) {
	var row []string
	for _, c := range cells {
		switch x := c.(type) {
		case float64:
			row = append(row, fmt.Sprintf("%.3g", x))
		default:
			row = append(row, fmt.Sprint(x))
		}
	}
	t.Rows = append(t.Rows, row)
}

func (t *table) factor(f float64) float64 {
	t.Factors = append(t.Factors, f)
	return f
}

func (t *table) markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n**%s** %s\n\n", t.Title, t.Setting)
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(t.Columns, " | "),
		strings.Repeat("---|", len(t.Columns)))
	for _, r := range t.Rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r, " | "))
	}
	fmt.Fprintf(&b, "\nPaper: %s. Here: %s. %s\n", t.Paper, t.Ours, t.Remark)
	_, err := io.WriteString(w, b.String())
	return err
}

// check holds a selftest's factors against what an effect must be at any size.
func (t *table) check(x experiment) error {
	if len(t.Rows) == 0 || len(t.Factors) == 0 || t.Ours == "" {
		return errors.New("the experiment gave no figures")
	}
	for _, r := range t.Rows {
		if len(r) != len(t.Columns) {
			return fmt.Errorf("a line of %d cells under %d columns: %v", len(r), len(t.Columns), r)
		}
	}
	for _, f := range t.Factors {
		if !(f >= x.least) {
			return fmt.Errorf("a factor of %.3g, but at any size it is at least %.3g: %v", f,
				x.least, t.Factors)
		}
	}
	return nil
}
