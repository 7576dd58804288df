package htmlreport

import (
	"cmp"
	"slices"
	"strings"
)

// epoch is what a figure needs of an event of that name.
type epoch struct {
	Epoch   int                `json:"epoch"`
	Seconds float64            `json:"seconds"`
	Loss    float64            `json:"loss"`
	Train   float64            `json:"train_acc"`
	Val     *float64           `json:"val_acc"`
	RowsGPU float64            `json:"rows_gpu"`
	RowsCPU float64            `json:"rows_cpu"`
	RowsSSD float64            `json:"rows_ssd"`
	Bytes   float64            `json:"bytes_ssd"`
	Stages  map[string]float64 `json:"stage_seconds"`
}

// trained is a run of training.
type trained struct {
	s      *Source
	epochs []epoch
	result trainResult
}

// trainResult is what is told of a run that came to its end.
type trainResult struct {
	Mode   string   `json:"mode"`
	Seed   uint64   `json:"seed"`
	Test   *float64 `json:"test_acc"`
	Params string   `json:"params_sha256"`
	Peak   int64    `json:"peak_memory_bytes"`
}

// experiment holds runs that differ by no more than their seed.
type experiment struct {
	name string
	runs []trained
}

// train digests the runs of training among sources.
func train(sources []*Source) (section, error) {
	var runs []trained
	for _, s := range sources {
		if s.Verb != "train" && !(s.Verb == "" && s.has("epoch")) {
			continue
		}
		t := trained{s: s}
		if err := each(s, "epoch", func(e epoch) { t.epochs = append(t.epochs, e) }); err != nil {
			return section{}, err
		}
		if err := each(s, "result", func(r trainResult) { t.result = r }); err != nil {
			return section{}, err
		}
		runs = append(runs, t)
	}
	if len(runs) == 0 {
		return section{}, nil
	}
	all := experiments(runs)
	out := section{Title: "Training"}
	line := func(title, y string, share bool, of func(e epoch) (float64, bool)) {
		f := figure{Kind: kindLines, Title: title, X: axis{Label: "epoch", Whole: true},
			Y: axis{Label: y, Share: share}}
		for _, x := range all {
			if s := x.byEpoch(of); len(s.Points) > 0 {
				f.Series = append(f.Series, s)
			}
		}
		if len(f.Series) > 0 {
			out.Figures = append(out.Figures, f)
		}
	}
	line("Loss by epoch", "mean loss of training", false,
		func(e epoch) (float64, bool) { return e.Loss, e.Loss != 0 })
	line("Accuracy by epoch", "accuracy of validation", true, func(e epoch) (float64, bool) {
		if e.Val == nil {
			return 0, false
		}
		return *e.Val, true
	})
	line("Time by epoch", "seconds", false, func(e epoch) (float64, bool) { return e.Seconds, true })
	for i := range out.Figures {
		for _, x := range all {
			if len(x.runs) > 1 {
				out.Figures[i].Note = "Lines are medians over the seeds, bands go from the least to the most."
			}
		}
	}
	out.Figures = append(out.Figures, stages(all), rows(all))
	out.Tables = append(out.Tables, trainTable(all))
	return out, nil
}

// experiments groups runs by what their commands have, seeds aside.
func experiments(runs []trained) (all []experiment) {
	at := map[string]int{}
	var options [][]string
	for _, r := range runs {
		o := r.s.options()
		key := r.s.Dataset + "\x00" + r.result.Mode + "\x00" + strings.Join(o, "\x00")
		i, ok := at[key]
		if !ok {
			i = len(all)
			at[key] = i
			all = append(all, experiment{name: r.result.Mode})
			options = append(options, o)
		}
		all[i].runs = append(all[i].runs, r)
	}
	for i := range all {
		for _, o := range options[i] {
			common := !slices.ContainsFunc(options, func(x []string) bool {
				return !slices.Contains(x, o)
			})
			if !common && o != "mode "+all[i].name {
				all[i].name = strings.TrimSpace(all[i].name + " " + o)
			}
		}
		if all[i].name == "" {
			all[i].name = all[i].runs[0].s.Name
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

// later are the epochs that tell how a run goes on: all but the first, where there are more.
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
	t := table{Title: "Runs", Head: []string{"run", "seed", "epochs", "s/epoch", "last loss",
		"best validation", "test", "from SSD/epoch", "peak memory", "parameters"}}
	for _, x := range all {
		for _, r := range x.runs {
			one := experiment{runs: []trained{r}}
			later := one.later()
			var seconds, bytes []float64
			best, loss := "–", "–"
			most := -1.0
			for _, e := range later {
				seconds, bytes = append(seconds, e.Seconds), append(bytes, e.Bytes)
			}
			for _, e := range r.epochs {
				loss = decimal(e.Loss)
				if e.Val != nil && *e.Val > most {
					most = *e.Val
					best = percent(most)
				}
			}
			each, read := "–", "–"
			if len(later) > 0 {
				_, mid, _ := spread(seconds)
				each = decimal(mid)
				_, mid, _ = spread(bytes)
				read = size(mid)
			}
			test := "–"
			if r.result.Test != nil {
				test = percent(*r.result.Test)
			}
			t.Rows = append(t.Rows, []string{x.name, number(float64(r.result.Seed)),
				number(float64(len(r.epochs))), each, loss, best, test, read,
				size(float64(r.result.Peak)), short(r.result.Params)})
		}
	}
	return t
}
