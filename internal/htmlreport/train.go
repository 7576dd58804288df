package htmlreport

import (
	"cmp"
	"slices"
	"strings"

	"helios/internal/metrics"
	"helios/internal/units"
)

// epoch holds the fields of an event of that name that a figure needs.
type epoch struct {
	Epoch   int                `json:"epoch"`
	Seconds float64            `json:"seconds"`
	Loss    float64            `json:"loss"`
	Train   float64            `json:"train_acc"`
	Val     *float64           `json:"val_acc"`
	ValLoss *float64           `json:"val_loss"`
	LR      float64            `json:"lr"`
	Norm    *float64           `json:"grad_norm"`
	Metrics *metrics.Summary   `json:"val_metrics"`
	RowsGPU float64            `json:"rows_gpu"`
	RowsCPU float64            `json:"rows_cpu"`
	RowsSSD float64            `json:"rows_ssd"`
	Bytes   float64            `json:"bytes_ssd"`
	Stages  map[string]float64 `json:"stage_seconds"`
	CPU     *cpuUse            `json:"cpu"`
	// Of the best epoch, by whose parameters the run was tested.
	test        *float64
	testMetrics *metrics.Report
}

// cpuUse is the processor time of an epoch, where the run accounted for it.
type cpuUse struct {
	Batches int     `json:"batches"`
	Seconds float64 `json:"seconds"`
	Parts   []struct {
		Stage    string  `json:"stage"`
		Operator string  `json:"operator"`
		Seconds  float64 `json:"seconds"`
	} `json:"parts"`
	Unaccounted float64 `json:"unaccounted_seconds"`
	Idle        float64 `json:"idle_seconds"`
}

// trained is a run of training.
type trained struct {
	s      *Source
	epochs []epoch
	result trainResult
}

// trainResult is the result of a run that came to its end.
type trainResult struct {
	Epochs  []epoch  `json:"epochs"`
	Mode    string   `json:"mode"`
	Model   string   `json:"model"`
	Dataset string   `json:"dataset"`
	Seed    uint64   `json:"seed"`
	Metric  string   `json:"metric"`
	Best    int      `json:"best_epoch"`
	Test    *float64 `json:"test_acc"`
	Params  string   `json:"params_sha256"`
	Peak    int64    `json:"peak_memory_bytes"`
	// Metrics are those of the test.
	Metrics *metrics.Report `json:"test_metrics"`
}

// experiment holds runs that differ by no more than their seed.
type experiment struct {
	name string
	runs []trained
}

// readRuns reads the runs of training among sources.
func readRuns(sources []*Source) (runs []trained, err error) {
	for _, s := range sources {
		if s.Verb != "train" {
			continue
		}
		t := trained{s: s, result: s.settings}
		err := each(s, "epoch", func(e epoch) { t.epochs = append(t.epochs, e) })
		if s.has("seed") {
			err = each(s, "seed", func(r trainResult) { runs = append(runs, trained{s, r.Epochs, r}) })
		} else if err == nil {
			err = each(s, "result", func(r trainResult) { t.result = r })
			runs = append(runs, t)
		}
		if err != nil {
			return nil, err
		}
	}
	for _, r := range runs {
		r.s.Dataset = cmp.Or(r.s.Dataset, r.result.Dataset)
		for i := range r.epochs {
			if e := &r.epochs[i]; e.Epoch == r.result.Best {
				e.test, e.testMetrics = r.result.Test, r.result.Metrics
			}
		}
	}
	return runs, nil
}

// train digests the runs of training: how they went, and how they were tested.
func train(sources []*Source) (how, tested section, err error) {
	runs, err := readRuns(sources)
	if err != nil || len(runs) == 0 {
		return how, tested, err
	}
	all := experiments(runs)
	out := section{Title: "Training"}
	if on := runs[0].s.Dataset; on != "" && !slices.ContainsFunc(runs, func(r trained) bool {
		return r.s.Dataset != on
	}) {
		out.Title += " on " + on
	}
	out.curves(all, runs)
	out.Figures = append(out.Figures, stages(all), rows(all), processors(all))
	out.Tables = append(out.Tables, trainTable(all))
	out.Tables = append(out.Tables, processorTables(all)...)
	return out, tests(all), nil
}

// Values of epochs in training, in validation and in the test; nil functions have none.
type splits [3]func(e epoch) (float64, bool)

var splitNames = [3]string{"training", "validation", "test"}

// curves draws figures over the epochs: an experiment has a colour, a split a dash.
func (out *section) curves(all []experiment, runs []trained) {
	line := func(title, y string, share bool, of splits) {
		f := figure{Kind: kindLines, Title: title, X: axis{Label: "epoch", Whole: true},
			Y: axis{Label: y, Share: share}}
		for k, value := range of {
			if value != nil {
				f.addSplit(all, k, of[1] != nil, value)
			}
		}
		if len(f.Series) == 0 {
			return
		}
		for _, x := range all {
			if len(x.runs) > 1 {
				f.Note = "Lines are medians over the seeds, bands go from the least to the most."
			}
		}
		out.Figures = append(out.Figures, f)
	}
	line("Loss by epoch", "mean loss", false, splits{
		func(e epoch) (float64, bool) { return e.Loss, e.Loss != 0 },
		func(e epoch) (float64, bool) { return given(e.ValLoss) }})
	line("Accuracy by epoch", "accuracy", true, splits{
		func(e epoch) (float64, bool) { return e.Train, e.Train != 0 },
		func(e epoch) (float64, bool) { return given(e.Val) },
		func(e epoch) (float64, bool) { return given(e.test) }})
	for _, m := range metrics.All[1:] {
		if !slices.ContainsFunc(runs, func(r trained) bool { return r.result.Metric == m.Name }) {
			continue
		}
		line(m.Name+" by epoch", m.Name, false, splits{nil, func(e epoch) (float64, bool) {
			if e.Metrics == nil {
				return 0, false
			}
			return given(m.Of(e.Metrics))
		}, func(e epoch) (float64, bool) {
			if e.testMetrics == nil {
				return 0, false
			}
			return given(m.Of(&e.testMetrics.Summary))
		}})
	}
	if rates := epochsOf(runs); slices.ContainsFunc(rates, func(e epoch) bool {
		return e.LR != rates[0].LR
	}) {
		line("Learning rate by epoch", "learning rate of the last step", false,
			splits{func(e epoch) (float64, bool) { return e.LR, e.LR != 0 }})
	}
	line("Gradients by epoch", "mean norm of a step's gradient", false,
		splits{func(e epoch) (float64, bool) { return given(e.Norm) }})
	line("Time by epoch", "seconds", false,
		splits{func(e epoch) (float64, bool) { return e.Seconds, true }})
}

// given is a figure that may be absent.
func given(x *float64) (float64, bool) {
	if x == nil {
		return 0, false
	}
	return *x, true
}

func epochsOf(runs []trained) (all []epoch) {
	for _, r := range runs {
		all = append(all, r.epochs...)
	}
	return all
}

// addSplit adds a line for each experiment that has values of a split; the test's are marks alone.
func (f *figure) addSplit(all []experiment, split int, named bool,
	value func(e epoch) (float64, bool)) {
	for i, x := range all {
		s := x.byEpoch(value)
		if len(s.Points) == 0 {
			continue
		}
		if s.Hue, s.Dash, s.Marks = i, split, split == 2; len(all) == 1 {
			s.Hue = split
		}
		if named {
			s.Name += ", " + splitNames[split]
		}
		f.Series = append(f.Series, s)
	}
}

// experiments groups runs by what their commands have, seeds aside.
func experiments(runs []trained) (all []experiment) {
	index := map[string]int{}
	var options [][]string
	for _, r := range runs {
		o := r.s.options()
		key := r.s.Dataset + "\x00" + r.result.Mode + "\x00" + strings.Join(o, "\x00")
		i, ok := index[key]
		if !ok {
			i = len(all)
			index[key] = i
			all = append(all, experiment{name: strings.TrimSpace(r.result.Model + " " + r.result.Mode)})
			options = append(options, o)
		}
		all[i].runs = append(all[i].runs, r)
	}
	for i := range all {
		of := all[i].runs[0]
		named := []string{"mode " + of.result.Mode, "model " + of.result.Model}
		for _, o := range options[i] {
			common := !slices.ContainsFunc(options, func(x []string) bool {
				return !slices.Contains(x, o)
			})
			if !common && !slices.Contains(named, o) {
				all[i].name = strings.TrimSpace(all[i].name + " " + o)
			}
		}
		if all[i].name == "" {
			all[i].name = of.s.Name
		}
	}
	return all
}

// byEpoch is the median of a value over the runs, by epoch.
func (x *experiment) byEpoch(of func(e epoch) (float64, bool)) series {
	values := map[int][]float64{}
	for _, r := range x.runs {
		for _, e := range r.epochs {
			if v, ok := of(e); ok {
				values[e.Epoch] = append(values[e.Epoch], v)
			}
		}
	}
	s := series{Name: x.name}
	for e, v := range values {
		lo, mid, hi := spread(v)
		s.Points = append(s.Points, point{float64(e), mid, lo, hi})
	}
	slices.SortFunc(s.Points, func(a, b point) int { return cmp.Compare(a.X, b.X) })
	return s
}

// spread is the least, the median and the most of values.
func spread(v []float64) (lo, mid, hi float64) {
	s := slices.Clone(v)
	slices.Sort(s)
	n := len(s)
	mid = s[n/2]
	if n%2 == 0 {
		mid = (s[n/2-1] + s[n/2]) / 2
	}
	return s[0], mid, s[n-1]
}

// later are all epochs but the first, where there are more: the first also warms up.
func (x *experiment) later() (all []epoch) {
	for _, r := range x.runs {
		e := r.epochs
		if len(e) > 1 {
			e = e[1:]
		}
		all = append(all, e...)
	}
	return all
}

// stageNames are the stages in the order in which a mini-batch passes them.
var stageNames = []string{"sample", "topology", "inspect", "lookup", "submit", "complete", "gather",
	"train"}

func stages(all []experiment) figure {
	f := figure{Kind: kindStacks, Title: "Busy time of the stages in an epoch",
		Note: "Mean over the epochs but the first. Stages overlap: a bar may be longer than the epoch took.",
		X:    axis{Label: "seconds"}}
	for _, x := range all {
		f.Bars = append(f.Bars, bar{Name: x.name, Parts: stageParts(x.later(),
			func(e epoch) map[string]float64 { return e.Stages })})
	}
	return f
}

// processorTime is the processor time of a mini-batch, in microseconds by operator, then
// unaccounted and idle: means over the epochs that accounted for it.
func (x *experiment) processorTime() (all [][2]string, us map[[2]string]float64) {
	us = map[[2]string]float64{}
	n := 0.0
	for _, e := range x.later() {
		if e.CPU == nil || e.CPU.Batches == 0 {
			continue
		}
		n++
		each := 1e6 / float64(e.CPU.Batches)
		for _, p := range e.CPU.Parts {
			us[[2]string{p.Stage, p.Operator}] += each * p.Seconds
		}
		us[unaccounted] += each * e.CPU.Unaccounted
		us[idle] += each * e.CPU.Idle
	}
	for k, v := range us {
		us[k] = v / n
		if k != unaccounted && k != idle {
			all = append(all, k)
		}
	}
	slices.SortFunc(all, func(a, b [2]string) int {
		return cmp.Or(cmp.Compare(us[b], us[a]), cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1]))
	})
	if n > 0 {
		all = append(all, unaccounted, idle)
	}
	return all, us
}

// Names of what no operator has.
var (
	unaccounted = [2]string{"unaccounted", "Go's scheduler, launches, the rest"}
	idle        = [2]string{"idle", "of the processors that the process may use"}
)

func processors(all []experiment) figure {
	f := figure{Kind: kindStacks, Title: "Processor time of a mini-batch",
		Note: "Mean over the epochs but the first, of runs that accounted for it.",
		X:    axis{Label: "ms of all processors"}}
	for _, x := range all {
		names, us := x.processorTime()
		b := bar{Name: x.name}
		for _, k := range names {
			i := slices.IndexFunc(b.Parts, func(p part) bool { return p.Name == k[0] })
			if i < 0 {
				i = len(b.Parts)
				b.Parts = append(b.Parts, part{Name: k[0]})
			}
			b.Parts[i].Value += us[k] / 1e3
		}
		if len(b.Parts) > 0 {
			f.Bars = append(f.Bars, b)
		}
	}
	return f
}

// processorTables tell each experiment's processor time by operator.
func processorTables(all []experiment) (out []table) {
	for _, x := range all {
		names, us := x.processorTime()
		if len(names) == 0 {
			continue
		}
		whole := 0.0
		for _, k := range names {
			if k != idle {
				whole += us[k]
			}
		}
		t := table{Title: "Processor time of a mini-batch: " + x.name, Folded: true,
			Head: []string{"stage", "operator", "us", "share"}}
		for _, k := range names {
			share := "–"
			if k != idle && whole > 0 {
				share = percent(us[k] / whole)
			}
			t.Rows = append(t.Rows, []string{k[0], k[1], decimal(us[k]), share})
		}
		out = append(out, t)
	}
	return out
}

// stageParts are the means of stages, those of no time left out.
func stageParts[E any](all []E, of func(E) map[string]float64) (parts []part) {
	sum := map[string]float64{}
	names := slices.Clone(stageNames)
	for _, e := range all {
		for k, v := range of(e) {
			sum[k] += v / float64(len(all))
			if !slices.Contains(names, k) {
				names = append(names, k)
			}
		}
	}
	slices.Sort(names[len(stageNames):])
	for _, n := range names {
		if sum[n] > 0 {
			parts = append(parts, part{n, sum[n]})
		}
	}
	return parts
}

func rows(all []experiment) figure {
	f := figure{Kind: kindStacks, Title: "Where an epoch's rows come from",
		X: axis{Label: "share of the rows", Share: true}}
	for _, x := range all {
		var gpu, cpu, ssd float64
		for _, e := range x.later() {
			gpu, cpu, ssd = gpu+e.RowsGPU, cpu+e.RowsCPU, ssd+e.RowsSSD
		}
		f.Bars = append(f.Bars, bar{Name: x.name, Parts: tiers(gpu, cpu, ssd)})
	}
	return f
}

func tiers(gpu, cpu, ssd float64) []part {
	sum := gpu + cpu + ssd
	if sum == 0 {
		return nil
	}
	return []part{{"GPU tier", gpu / sum}, {"CPU tier", cpu / sum}, {"SSDs", ssd / sum}}
}

func trainTable(all []experiment) table {
	t := table{Title: "Runs", Head: []string{"run", "seed", "epochs", "time of one", "last loss",
		"best validation", "test", "from SSD/epoch", "peak memory", "parameters"}}
	for _, x := range all {
		for _, r := range x.runs {
			one := experiment{runs: []trained{r}}
			later := one.later()
			var seconds, bytes []float64
			best, loss := "–", "–"
			highest := -1.0
			for _, e := range later {
				seconds, bytes = append(seconds, e.Seconds), append(bytes, e.Bytes)
			}
			for _, e := range r.epochs {
				loss = decimal(e.Loss)
				if e.Val != nil && *e.Val > highest {
					highest = *e.Val
					best = percent(highest)
				}
			}
			each, read := "–", "–"
			if len(later) > 0 {
				_, mid, _ := spread(seconds)
				each = units.FormatSeconds(mid)
				_, mid, _ = spread(bytes)
				read = size(mid)
			}
			test := "–"
			if r.result.Test != nil {
				test = percent(*r.result.Test)
			}
			t.Rows = append(t.Rows, []string{x.name, number(float64(r.result.Seed)),
				number(float64(len(r.epochs))), each, loss, best, test, read,
				size(float64(r.result.Peak)), cmp.Or(short(r.result.Params), "–")})
		}
	}
	return t
}
