package htmlreport

import (
	"fmt"
	"slices"
	"strconv"

	"helios/internal/units"
)

const verbPlan = "plan"

// planned is an epoch that "plan" foresees: an event "plan", or "point" of a sweep, which has the
// setting that is swept and its value.
type planned struct {
	Key        string             `json:"key"`
	Value      string             `json:"value"`
	Mode       string             `json:"mode"`
	Pipeline   string             `json:"pipeline"`
	Hardware   string             `json:"hardware"`
	SSDs       float64            `json:"ssd_count"`
	Seconds    float64            `json:"seconds"`
	Bottleneck string             `json:"bottleneck"`
	Stall      float64            `json:"stall"`
	Overlap    float64            `json:"overlap"`
	Busy       map[string]float64 `json:"busy_seconds"`
	RowsGPU    float64            `json:"rows_gpu"`
	RowsCPU    float64            `json:"rows_cpu"`
	RowsSSD    float64            `json:"rows_ssd"`
	Bytes      float64            `json:"bytes_ssd"`
	Rate       float64            `json:"ssd_bytes_per_second"`
	Prepare    map[string]float64 `json:"preparation_seconds"`
	Disk       map[string]float64 `json:"disk_bytes"`
	GPU        map[string]float64 `json:"gpu_memory_bytes"`
	CPU        map[string]float64 `json:"cpu_memory_bytes"`
	Cost       *struct {
		Epoch float64 `json:"epoch"`
	} `json:"cost"`
	Notes []string `json:"notes"`
	Graph struct {
		Name string `json:"name"`
	} `json:"graph"`
	Halving *struct {
		Doubled []doubled `json:"doubled"`
		Steps   []doubled `json:"steps"`
	} `json:"halving"`
}

// doubled is an epoch with some of the machine doubled.
type doubled struct {
	What       []string `json:"what"`
	Seconds    float64  `json:"seconds"`
	Gain       float64  `json:"gain"`
	Bottleneck string   `json:"bottleneck"`
}

// name tells an epoch from others of its file.
func (p *planned) name() string {
	if p.Key != "" {
		return p.Key + " " + p.Value
	}
	return fmt.Sprintf("%s on %s, %g SSDs", p.Mode, p.Hardware, p.SSDs)
}

// together joins files of one plan each, of the same graph, so that figures compare their epochs.
func together(sources []*Source) (out []*Source) {
	into, there := map[string]*Source{}, map[string]bool{} // by graph; by graph and epoch
	for _, s := range sources {
		var all []planned
		if s.Verb == verbPlan && !s.has("point") {
			_ = each(s, "plan", func(p planned) { all = append(all, p) }) // plans refuses what is wrong
		}
		if len(all) != 1 {
			out = append(out, s)
			continue
		}
		graph := all[0].Graph.Name
		key := graph + " " + all[0].name()
		if to := into[graph]; to != nil && !there[key] {
			to.Name += ", " + s.Name
			to.lines = append(slices.Clone(to.lines), s.lines...)
		} else {
			joined := *s
			into[graph] = &joined
			out = append(out, &joined)
		}
		there[key] = true
	}
	return out
}

// plans digests a plan, or a sweep of plans.
func plans(s *Source) (out section, err error) {
	out = section{Title: "Plan: " + s.Name, Note: "Modelled: no epoch was run."}
	var all []planned
	for _, event := range []string{"plan", "point"} {
		if err := each(s, event, func(p planned) { all = append(all, p) }); err != nil {
			return section{}, err
		}
	}
	if len(all) == 0 {
		return section{}, nil
	}
	out.Figures = append(out.Figures, plannedTime(all))
	busy := figure{Kind: kindStacks, Title: "Busy time in an epoch",
		Note: "Parts of the machine work side by side: a bar may be longer than the epoch takes.",
		X:    axis{Label: "seconds"}}
	from := figure{Kind: kindStacks, Title: "Where an epoch's rows come from",
		X: axis{Label: "share of the rows", Share: true}}
	t := table{Title: "Epochs", Head: []string{"", "epoch s", "limit", "stall", "overlap", "from SSDs",
		"GB/s of SSDs", "preparation s", "disk", "GPU memory", "CPU memory", "cost of an epoch"}}
	var notes []string
	for i := range all {
		p := &all[i]
		busy.Bars = append(busy.Bars, bar{Name: p.name(), Parts: stageParts([]planned{*p},
			func(p planned) map[string]float64 { return p.Busy })})
		from.Bars = append(from.Bars, bar{Name: p.name(), Parts: tiers(p.RowsGPU, p.RowsCPU,
			p.RowsSSD)})
		cost := "–"
		if p.Cost != nil {
			cost = decimal(p.Cost.Epoch)
		}
		t.Rows = append(t.Rows, []string{p.name(), decimal(p.Seconds), p.Bottleneck,
			percent(p.Stall), decimal(p.Overlap),
			size(p.Bytes), decimal(p.Rate / 1e9), decimal(sum(p.Prepare)),
			size(sum(p.Disk)), size(sum(p.GPU)), size(sum(p.CPU)), cost})
		for _, n := range p.Notes {
			if !slices.Contains(notes, n) {
				notes = append(notes, n)
				out.Note += " " + n + "."
			}
		}
		if h := p.Halving; h != nil {
			of := ""
			if len(all) > 1 {
				of = ": " + p.name()
			}
			out.halving(of, h.Doubled, h.Steps)
		}
	}
	out.Figures = append(out.Figures, busy, from)
	out.Tables = append([]table{t}, out.Tables...)
	return out, nil
}

// halving describes the gain from doubling each part of the machine, and the parts that halve the
// epoch.
func (out *section) halving(of string, each, steps []doubled) {
	f := figure{Kind: kindSpans, Title: "Twice as much of each" + of,
		X: axis{Label: "times as fast"}}
	t := table{Title: "Ways to halve the epoch" + of, Head: []string{"doubled", "epoch s", "times as fast",
		"limit then"}}
	row := func(d doubled) []string {
		name := ""
		for i, w := range d.What {
			if i > 0 {
				name += ", "
			}
			name += w
		}
		return []string{name, decimal(d.Seconds), decimal(d.Gain), d.Bottleneck}
	}
	for _, d := range each {
		f.Bars = append(f.Bars, bar{Name: row(d)[0], Value: d.Gain, Lo: d.Gain, Hi: d.Gain})
		t.Rows = append(t.Rows, row(d))
	}
	for i, d := range steps {
		x := row(d)
		x[0] = fmt.Sprintf("step %d: %s", i+1, x[0])
		t.Rows = append(t.Rows, x)
	}
	if len(f.Bars) > 0 {
		out.Figures = append(out.Figures, f)
	}
	out.Tables = append(out.Tables, t)
}

// plannedTime draws the times of epochs: lines by the bottleneck over the values of a sweep, where
// these are numbers, and else bars.
func plannedTime(all []planned) figure {
	xs := make([]float64, len(all))
	for i := range all {
		x, err := strconv.ParseFloat(all[i].Value, 64)
		if err != nil {
			var n int64
			n, err = units.ParseBytes(all[i].Value)
			x = float64(n) / (1 << 20)
		}
		if all[i].Key == "" || err != nil {
			f := figure{Kind: kindSpans, Title: "Time of an epoch", X: axis{Label: "seconds"}}
			for j := range all {
				p := &all[j]
				f.Bars = append(f.Bars, bar{Name: p.name(), Value: p.Seconds, Lo: p.Seconds,
					Hi: p.Seconds})
			}
			return f
		}
		xs[i] = x
	}
	label := all[0].Key
	if _, err := strconv.ParseFloat(all[0].Value, 64); err != nil {
		label += ", MiB"
	}
	f := figure{Kind: kindLines, Title: "Time of an epoch by " + all[0].Key,
		Note: "Marks tell the bottleneck; the line goes through all.",
		X:    axis{Label: label, Whole: true}, Y: axis{Label: "seconds"}}
	line := series{Name: "epoch"}
	index := map[string]int{}
	var marks []series
	for i := range all {
		p := single(xs[i], all[i].Seconds)
		line.Points = append(line.Points, p)
		b := all[i].Bottleneck
		if _, is := index[b]; !is {
			index[b] = len(marks)
			marks = append(marks, series{Name: "limit: " + b, Marks: true})
		}
		marks[index[b]].Points = append(marks[index[b]].Points, p)
	}
	slices.SortFunc(line.Points, func(a, b point) int {
		switch {
		case a.X < b.X:
			return -1
		case a.X > b.X:
			return 1
		}
		return 0
	})
	f.Series = append([]series{line}, marks...)
	return f
}

func sum(m map[string]float64) (all float64) {
	for _, v := range m {
		all += v
	}
	return all
}
