package htmlreport

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
)

// verbSuite is the verb whose results hold those of others.
const verbSuite = "bench suite"

// suiteStep is a benchmark of a suite in one round.
type suiteStep struct {
	Step    string            `json:"step"`
	Title   string            `json:"title"`
	Clock   string            `json:"clock"`
	Verb    string            `json:"verb"`
	Round   int               `json:"round"`
	Rounds  int               `json:"rounds"`
	Seconds float64           `json:"seconds"`
	Failed  string            `json:"failed"`
	Lines   []json.RawMessage `json:"lines"`
}

// suiteFigure is a figure beside its floor.
type suiteFigure struct {
	Step    string  `json:"step"`
	What    string  `json:"what"`
	Value   span    `json:"value"`
	Unit    string  `json:"unit"`
	Rounds  int     `json:"rounds"`
	Audited bool    `json:"audited"`
	Floor   float64 `json:"floor"`
	Why     string  `json:"floor_from"`
	Share   float64 `json:"share"`
}

// suiteSections digest a suite: what of the floors was reached, and then each step as its own
// verb's results would be, all rounds together.
func suiteSections(s *Source) (all []section, err error) {
	var steps []suiteStep
	if err := each(s, "step", func(x suiteStep) { steps = append(steps, x) }); err != nil {
		return nil, err
	}
	var figures []suiteFigure
	err = each(s, "figures", func(x struct {
		Figures []suiteFigure `json:"figures"`
	}) {
		figures = x.Figures // the last ones: those of a suite that went on have all
	})
	if err != nil {
		return nil, err
	}
	var order []string
	of := map[string][]suiteStep{}
	took, failed := 0.0, table{Title: "Failed", Head: []string{"step", "clock", "round", "why"}}
	for _, x := range steps {
		if x.Failed != "" {
			failed.Rows = append(failed.Rows, []string{x.Title, x.Clock, fmt.Sprint(x.Round),
				x.Failed})
			continue
		}
		if of[x.Step] == nil {
			order = append(order, x.Step)
		}
		of[x.Step] = append(of[x.Step], x)
		took += x.Seconds
	}
	first := section{Title: "Shares of the floors", Note: "A floor is the best that is possible: bytes by bandwidth, operations by the peak, or reads by IOPS. " +
		"The share is a rate by its floor, or a floor by its time. Figures are medians over the rounds. " +
		"A share above 100 % was measured at another moment than its floor, or is a window's rounding."}
	for _, step := range order {
		first.add(step, of[step][0], figures)
	}
	t := table{Title: "Steps", Head: []string{"step", "clock", "rounds", "seconds"}}
	for _, step := range order {
		x := of[step]
		sum := 0.0
		for _, one := range x {
			sum += one.Seconds
		}
		t.Rows = append(t.Rows, []string{x[0].Title, x[0].Clock, fmt.Sprintf("%d of %d", len(x),
			x[0].Rounds), decimal(sum)})
	}
	t.Rows = append(t.Rows, []string{"all", "", "", decimal(took)})
	first.Tables = append(first.Tables, t)
	if len(failed.Rows) > 0 {
		first.Tables = append(first.Tables, failed)
	}
	all = append(all, first)
	for _, step := range order {
		more, err := ofStep(s, of[step])
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// mostShares bounds the bars of a figure of shares; the table has all.
const mostShares = 24

// add adds the figures of a step to the overview.
func (out *section) add(step string, x suiteStep, figures []suiteFigure) {
	title := x.Title + ", " + x.Clock + " clock"
	t := table{Title: title, Head: []string{"", "median", "least", "most", "unit", "floor", "reached",
		"floor from", "audit"}}
	f := figure{Kind: kindSpans, Title: title, X: axis{Label: "share of the floor", Share: true}}
	for _, v := range figures {
		if v.Step != step {
			continue
		}
		audit, floor, share := "passed", "–", "–"
		if !v.Audited {
			audit = "FAILED"
		}
		if v.Floor > 0 {
			floor, share = decimal(v.Floor), percent(v.Share)
			b := bar{Name: v.What, Value: v.Share, Lo: v.Share, Hi: v.Share, Limit: 1}
			if v.Unit == "s" && v.Value.Min > 0 {
				b.Lo, b.Hi = v.Floor/v.Value.Max, v.Floor/v.Value.Min
			} else if v.Value.Median > 0 {
				b.Lo, b.Hi = v.Value.Min/v.Floor, v.Value.Max/v.Floor
			}
			f.Bars = append(f.Bars, b)
		}
		t.Rows = append(t.Rows, []string{v.What, decimal(v.Value.Median), decimal(v.Value.Min),
			decimal(v.Value.Max), v.Unit, floor, share, v.Why, audit})
	}
	if len(f.Bars) > mostShares {
		f.Note = fmt.Sprintf("The %d that came nearest of %d; the table below has all.", mostShares,
			len(f.Bars))
		slices.SortStableFunc(f.Bars, func(a, b bar) int {
			switch {
			case a.Value > b.Value:
				return -1
			case a.Value < b.Value:
				return 1
			}
			return 0
		})
		f.Bars = f.Bars[:mostShares]
	}
	if len(f.Bars) > 0 {
		out.Figures = append(out.Figures, f)
	}
	if len(t.Rows) > 0 {
		out.Tables = append(out.Tables, t)
	}
}

// ofStep digests the rounds of a step.
func ofStep(s *Source, rounds []suiteStep) (all []section, err error) {
	x := rounds[0]
	one := &Source{Name: x.Title, Verb: x.Verb, Dataset: s.Dataset, Ended: true, Whole: true}
	for _, r := range rounds {
		for _, text := range r.Lines {
			var head struct{ Event, Kind string }
			if err := json.Unmarshal(text, &head); err != nil {
				return nil, err
			}
			event := cmp.Or(head.Event, head.Kind, "row") // benchmarks' had none once
			if err := one.add(event, text); err != nil {
				return nil, err
			}
		}
	}
	all, err = digest([]*Source{one})
	for i := range all {
		all[i].Title = x.Title + ", " + x.Clock + " clock"
		for j := range all[i].Tables { // what the rounds have in common is in the overview
			all[i].Tables[j].Folded = true
		}
	}
	return all, err
}
