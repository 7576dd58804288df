package htmlreport

import (
	"encoding/json"
	"fmt"
	"strings"
)

// rate is the result of a benchmark of kernels for one case: its value with its range, and the best
// that is possible, 0 where nobody knows.
type rate struct {
	name string
	span
	limit float64
}

// kernelFigure draws one value of the rows of a benchmark.
type kernelFigure struct {
	title, label string
	share        bool
	note         string
	of           func(r *kernelRow) (rate, bool)
}

// kernelRow has the fields of the benchmarks of kernels that figures need.
type kernelRow struct {
	Device   string `json:"device"`
	Workers  int    `json:"workers"`
	Kernels  string `json:"kernels"`
	Topology string `json:"topology"`
	Graph    string `json:"graph"`
	// sample
	Edges    float64 `json:"edges_per_second"`
	EdgesMin float64 `json:"edges_per_second_min"`
	EdgesMax float64 `json:"edges_per_second_max"`
	// compute
	Case      string  `json:"case"`
	Precision string  `json:"precision"`
	FLOPS     float64 `json:"flops_per_second"`
	Peak      float64 `json:"peak_flops_per_second"`
	Floor     float64 `json:"floor_share"`
	Seconds   span    `json:"seconds_per_run"`
	// cache and memory
	Policy  string  `json:"policy"`
	Nodes   float64 `json:"nodes"`
	Lookups span    `json:"lookups_per_second"`
	Limit   *span   `json:"limit_per_second"`
	From    string  `json:"from"`
	Row     float64 `json:"row_bytes"`
	Gather  span    `json:"gather_bytes_per_second"`
	Copy    either  `json:"copy_bytes_per_second"` // of compute one number
}

// either is a span, or one number.
type either struct{ span }

func (e *either) UnmarshalJSON(text []byte) error {
	var v float64
	if json.Unmarshal(text, &v) == nil {
		e.span = span{v, v, v}
		return nil
	}
	return json.Unmarshal(text, &e.span)
}

func (s span) by(unit float64) span { return span{s.Median / unit, s.Min / unit, s.Max / unit} }

func (r *kernelRow) workers() string {
	if strings.HasPrefix(r.Device, "host") {
		if r.Workers == 1 {
			return "1 worker"
		}
		return fmt.Sprintf("%d workers", r.Workers)
	}
	return r.Device
}

// kernelFigures are those of each benchmark of kernels.
var kernelFigures = map[string][]kernelFigure{
	"bench sample": {{title: "Edges sampled a second", label: "million edges/s",
		of: func(r *kernelRow) (rate, bool) {
			words := []string{r.Graph, r.Topology, r.workers(), r.Kernels}
			return rate{name: strings.Join(words, ", "),
				span: span{r.Edges, r.EdgesMin, r.EdgesMax}.by(1e6)}, r.Edges > 0
		}}},
	"bench compute": {
		{title: "Operations a second", label: "GFLOP/s", note: "Marks are the peak.",
			of: func(r *kernelRow) (rate, bool) {
				f := span{r.FLOPS, r.FLOPS, r.FLOPS}
				if m := r.Seconds.Median; m > 0 {
					f.Min, f.Max = r.FLOPS*m/r.Seconds.Max, r.FLOPS*m/r.Seconds.Min
				}
				return rate{r.kernel(), f.by(1e9), r.Peak / 1e9}, r.FLOPS > 0
			}},
		{title: "Share of the floor that is reached", label: "floor / time", share: true,
			note: "The floor is the least time for the operations at the peak and the bytes at a copy's rate.",
			of: func(r *kernelRow) (rate, bool) {
				return rate{name: r.kernel(), span: span{r.Floor, r.Floor, r.Floor}, limit: 1},
					r.Floor > 0
			}}},
	"bench cache": {{title: "Lookups a second", label: "million rows/s",
		note: "Marks show the rate of as many reads of memory at random places.",
		of: func(r *kernelRow) (rate, bool) {
			x := rate{name: fmt.Sprintf("%s, %s nodes, %s", r.Policy, count(r.Nodes), r.workers()),
				span: r.Lookups.by(1e6)}
			if r.Limit != nil {
				x.limit = r.Limit.Median / 1e6
			}
			return x, r.Lookups.Median > 0
		}}},
	"bench memory": {{title: "Gathers of rows", label: "GB/s",
		note: "Marks are plain copies of as many bytes.",
		of: func(r *kernelRow) (rate, bool) {
			name := fmt.Sprintf("%s tier, %g B", r.From, r.Row)
			if !strings.HasPrefix(r.Device, "host") {
				name = r.Device + ", " + name
			}
			return rate{name, r.Gather.by(1e9), r.Copy.Median / 1e9}, r.Gather.Median > 0
		}}},
}

func (r *kernelRow) kernel() string {
	name := r.Case + ", " + r.workers()
	if r.Precision != "" && r.Precision != "fp32" {
		name += ", " + r.Precision
	}
	return name
}

// kernels digests the rows of a benchmark of kernels.
func kernels(s *Source) (section, error) {
	out := other(s)
	var rows []kernelRow
	if err := each(s, "row", func(r kernelRow) { rows = append(rows, r) }); err != nil {
		return section{}, err
	}
	for _, k := range kernelFigures[s.Verb] {
		f := figure{Kind: kindSpans, Title: k.title, Note: k.note,
			X: axis{Label: k.label, Share: k.share}}
		index := map[string]int{}
		var all [][]rate
		for i := range rows {
			r, ok := k.of(&rows[i])
			if !ok {
				continue
			}
			if _, is := index[r.name]; !is {
				index[r.name] = len(all)
				all = append(all, nil)
			}
			all[index[r.name]] = append(all[index[r.name]], r)
		}
		for _, same := range all { // the median over rounds, and the range over all of them
			b := bar{Name: same[0].name, Lo: same[0].Min, Hi: same[0].Max}
			var values, limits []float64
			for _, r := range same {
				values, limits = append(values, r.Median), append(limits, r.limit)
				b.Lo, b.Hi = min(b.Lo, r.Min), max(b.Hi, r.Max)
			}
			_, b.Value, _ = spread(values)
			_, b.Limit, _ = spread(limits)
			f.Bars = append(f.Bars, b)
		}
		if len(f.Bars) > 0 {
			out.Figures = append(out.Figures, f)
		}
	}
	return out, nil
}

func count(v float64) string {
	switch {
	case v >= 1e6:
		return decimal(v/1e6) + " M"
	case v >= 1e4:
		return decimal(v/1e3) + " K"
	}
	return decimal(v)
}
