package htmlreport

import (
	"fmt"
	"strings"

	"helios/internal/units"
)

// span is a figure over the repeats of a comparison.
type span struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func (s span) text() string {
	if s.Min == s.Max {
		return decimal(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", decimal(s.Median), decimal(s.Min), decimal(s.Max))
}

// variant is a data path of a comparison.
type variant struct {
	Name       string  `json:"name"`
	IOStack    string  `json:"io_stack"`
	Pipeline   string  `json:"pipeline"`
	Seconds    span    `json:"epoch_seconds"`
	Ratio      span    `json:"ratio"`
	Bytes      span    `json:"bytes_ssd"`
	CPU        span    `json:"cpu_seconds"`
	Stall      span    `json:"stall"`
	Overlap    span    `json:"overlap"`
	RowsGPU    float64 `json:"rows_gpu"`
	RowsCPU    float64 `json:"rows_cpu"`
	RowsSSD    float64 `json:"rows_ssd"`
	Peak       float64 `json:"peak_memory_bytes"`
	Bottleneck string  `json:"bottleneck"`
}

// comparison is the event at the end of "compare".
type comparison struct {
	Dataset  string    `json:"dataset"`
	Device   string    `json:"device"`
	Base     string    `json:"base"`
	Modelled bool      `json:"modelled"`
	Hardware string    `json:"hardware"`
	Variants []variant `json:"variants"`
	Notes    []string  `json:"notes"`
}

// comparedRun is one run of it.
type comparedRun struct {
	Variant string             `json:"variant"`
	Stages  map[string]float64 `json:"stage_seconds"`
	Losses  []float64          `json:"losses"`
}

// compare digests one comparison.
func compare(s *Source) (section, error) {
	out := section{Title: "Comparison: " + s.Name}
	runs := map[string][]comparedRun{}
	if err := each(s, "run", func(r comparedRun) {
		runs[r.Variant] = append(runs[r.Variant], r)
	}); err != nil {
		return out, err
	}
	err := each(s, "compare", func(c comparison) {
		times := figure{Kind: kindSpans, Title: "Time of an epoch",
			X: axis{Label: "seconds"}}
		busy := figure{Kind: kindStacks, Title: "Busy time of the stages in an epoch",
			Note: "Mean over the repeats. Stages overlap: a bar may be longer than the epoch took.",
			X:    axis{Label: "seconds"}}
		from := figure{Kind: kindStacks, Title: "Where an epoch's rows come from",
			X: axis{Label: "share of the rows", Share: true}}
		loss := figure{Kind: kindLines, Title: "Loss by epoch", X: axis{Label: "epoch", Whole: true},
			Y: axis{Label: "mean loss of training"}}
		t := table{Title: "Data paths of " + c.Dataset + " on " + c.Device, Head: []string{"",
			"epoch", "× " + c.Base, "from SSD", "CPU time", "stall", "overlap", "peak memory",
			"stack, pipeline", "bottleneck"}}
		for _, v := range c.Variants {
			times.Bars = append(times.Bars, bar{Name: v.Name, Value: v.Seconds.Median,
				Lo: v.Seconds.Min, Hi: v.Seconds.Max})
			if v.Seconds.Min != v.Seconds.Max {
				times.Note = "Bars are medians, whiskers go from the least to the most of the repeats."
			}
			mine := runs[v.Name]
			busy.Bars = append(busy.Bars, bar{Name: v.Name, Parts: stageParts(mine,
				func(r comparedRun) map[string]float64 { return r.Stages })})
			from.Bars = append(from.Bars, bar{Name: v.Name, Parts: tiers(v.RowsGPU, v.RowsCPU,
				v.RowsSSD)})
			if len(mine) > 0 && len(mine[0].Losses) > 1 {
				l := series{Name: v.Name}
				for e, y := range mine[0].Losses {
					l.Points = append(l.Points, single(float64(e+1), y))
				}
				loss.Series = append(loss.Series, l)
			}
			t.Rows = append(t.Rows, []string{v.Name, units.FormatSeconds(v.Seconds.Median),
				v.Ratio.text(), size(v.Bytes.Median), units.FormatSeconds(v.CPU.Median),
				percent(v.Stall.Median),
				decimal(v.Overlap.Median), size(v.Peak), v.IOStack + ", " + v.Pipeline,
				v.Bottleneck})
		}
		out.Figures = append(out.Figures, times, busy, from)
		if len(loss.Series) > 0 {
			out.Figures = append(out.Figures, loss)
		}
		out.Tables = append(out.Tables, t)
		switch {
		case c.Hardware != "":
			out.Note = "Modelled: all times are those of hardware profile " + c.Hardware + "."
		case c.Modelled:
			out.Note = "Software SSDs played a model: the times are no measurement of real SSDs."
		}
		for _, n := range c.Notes {
			if n != "" {
				out.Note += " " + strings.ToUpper(n[:1]) + strings.TrimSuffix(n[1:], ".") + "."
			}
		}
	})
	return out, err
}
