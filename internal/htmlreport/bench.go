package htmlreport

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// ioRow is a measurement of "bench io".
type ioRow struct {
	SSDs      float64 `json:"ssds"`
	Blocks    float64 `json:"blocks"`
	RowBytes  float64 `json:"row_bytes"`
	Stack     string  `json:"stack"`
	Device    string  `json:"device"`
	Depth     float64 `json:"depth"`
	IOPS      float64 `json:"iops"`
	Bytes     float64 `json:"bytes_per_second"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	P999      float64 `json:"p999_us"`
	Errors    int64   `json:"errors"`
	Audited   bool    `json:"audited"`
	Modelled  bool    `json:"modelled"`
	Played    bool    `json:"ssds_modelled"`
	Coalesce  float64 `json:"coalesce_bytes"`
	Bound     float64 `json:"bound_iops"`
	OfSSDs    float64 `json:"ssd_bound_iops"`
	Links     float64 `json:"link_bound_iops"`
	InFlight  float64 `json:"depth_bound_iops"`
	Serve     float64 `json:"serve_iops"`
	Histogram []struct {
		UpTo  float64 `json:"up_to_us"`
		Count float64 `json:"count"`
	} `json:"latency_histogram"`
}

// parameter is a setting by which measurements may differ.
type parameter struct {
	name string
	unit string
	of   func(r *ioRow) float64
}

// parameters are in the order in which they are taken for the axis of a figure.
var parameters = []parameter{
	{"SSDs", "", func(r *ioRow) float64 { return r.SSDs }},
	{"row bytes", "B", func(r *ioRow) float64 { return r.RowBytes }},
	{"reads in flight per SSD", "in flight", func(r *ioRow) float64 { return r.Depth }},
	{"thread blocks of the I/O kernels", "blocks", func(r *ioRow) float64 { return r.Blocks }},
}

// limit is a bound of the commands a second.
type limit struct {
	name string
	of   func(r *ioRow) float64
}

// limits are those that "bench io" tells.
var limits = []limit{
	{"limit of the SSDs", func(r *ioRow) float64 { return r.OfSSDs }},
	{"limit of the link", func(r *ioRow) float64 { return r.Links }},
	{"limit of SSDs and link", func(r *ioRow) float64 { // older files have only both together
		if r.OfSSDs > 0 || r.Links > 0 {
			return 0
		}
		return r.Bound
	}},
	{"limit of the reads in flight", func(r *ioRow) float64 { return r.InFlight }},
	{"limit of the CPUs that play SSDs", func(r *ioRow) float64 { return r.Serve }},
}

// bound is the lowest limit, 0 where none is known.
func (r *ioRow) bound() (least float64) {
	for _, l := range limits {
		if v := l.of(r); v > 0 && (least == 0 || v < least) {
			least = v
		}
	}
	return least
}

// farAbove is the multiple of all results above which a limit is named but not drawn: it would
// press them to the floor of the figure.
const farAbove = 4

// addLimits draws the limits of a figure's y values, which of makes of a row.
func (f *figure) addLimits(all []ioRow, x parameter, of func(r *ioRow) float64) {
	largest := 0.0
	for i := range all {
		largest = max(largest, of(&all[i]))
	}
	rowSizes := distinct(all, func(r *ioRow) float64 { return r.RowBytes })
	var far []string
	for _, l := range limits {
		name := func(r *ioRow) string {
			if rowSizes > 1 && x.unit != "B" {
				return fmt.Sprintf("%s, %g B", l.name, r.RowBytes)
			}
			return l.name
		}
		for _, s := range lines(all, name, x.of, func(r *ioRow) float64 {
			if l.of(r) == 0 || r.IOPS == 0 {
				return math.NaN()
			}
			return of(r) * l.of(r) / r.IOPS
		}) {
			least := slices.MinFunc(s.Points, func(a, b point) int { return cmp.Compare(a.Y, b.Y) })
			if s.Limit = true; least.Y > farAbove*largest {
				far = append(far, fmt.Sprintf("%s (%s %s)", s.Name, f.Y.text(least.Y), f.Y.Label))
				continue
			}
			for i := range s.Points { // one line: repeats differ by what was measured, not by it
				s.Points[i] = single(s.Points[i].X, s.Points[i].Y)
			}
			f.Series = append(f.Series, s)
		}
	}
	if len(far) > 0 {
		f.Note = strings.TrimSpace(f.Note + " Far above and not drawn: " + strings.Join(far, ", ") + ".")
	}
}

// benchIO digests the measurements of one file.
func benchIO(s *Source) (section, error) {
	out := section{Title: "Reads: " + s.Name}
	var all []ioRow
	err := each(s, "row", func(r ioRow) { all = append(all, r) })
	if err != nil || len(all) == 0 {
		return section{}, err
	}
	x := sweptBy(all)
	name := func(r *ioRow) string { return lineName(all, x, r) }
	alone := distinct(all, x.of) == 1 // nothing is swept: names are all that tells rows apart
	by := func(title, label string, of func(r *ioRow) float64) {
		if alone {
			out.Figures = append(out.Figures, soleFigure(all, strings.TrimSuffix(title, " by "+x.name),
				label, name, of))
			return
		}
		f := figure{Kind: kindLines, Title: title, X: axis{Label: x.name, Whole: x.unit == "",
			Log: x.unit != ""}, Y: axis{Label: label}}
		f.Series = lines(all, name, x.of, of)
		if label != "µs" {
			f.addLimits(all, x, of)
		}
		out.Figures = append(out.Figures, f)
	}
	by("Throughput by "+x.name, "GiB/s", func(r *ioRow) float64 { return r.Bytes / (1 << 30) })
	by("Reads a second by "+x.name, "million reads/s", func(r *ioRow) float64 { return r.IOPS / 1e6 })
	by("Median latency by "+x.name, "µs", func(r *ioRow) float64 { return r.P50 })
	by("99th percentile of latency by "+x.name, "µs", func(r *ioRow) float64 { return r.P99 })
	if f := histograms(all, x, name); len(f.Series) > 0 {
		out.Figures = append(out.Figures, f)
	}
	out.Tables = append(out.Tables, measurements(all))
	if slices.ContainsFunc(all, func(r ioRow) bool { return r.Modelled }) {
		out.Note = "Modelled: the virtual clock gave the times, no SSD was measured."
	} else if slices.ContainsFunc(all, func(r ioRow) bool { return r.Played }) {
		out.Note = "Software SSDs played a model: the times are no measurement of real SSDs."
	}
	return out, nil
}

// sweptBy returns the parameter with the most values.
func sweptBy(all []ioRow) parameter {
	x := slices.MaxFunc(parameters, func(a, b parameter) int {
		return cmp.Compare(distinct(all, a.of), distinct(all, b.of))
	})
	if distinct(all, x.of) == distinct(all, parameters[0].of) {
		return parameters[0]
	}
	return x
}

// lineName names the line of a row: one for each combination of the parameters beside x.
func lineName(all []ioRow, x parameter, r *ioRow) string {
	words := []string{r.Stack}
	for _, p := range parameters {
		if p.name != x.name && distinct(all, p.of) > 1 {
			words = append(words, fmt.Sprintf("%g %s", p.of(r), cmp.Or(p.unit, p.name)))
		}
	}
	return strings.Join(words, ", ")
}

// measurements lists the rows.
func measurements(all []ioRow) table {
	t := table{Title: "Measurements", Head: []string{"stack", "SSDs", "row bytes", "depth", "blocks",
		"GiB/s", "million reads/s", "of the limit", "p50 µs", "p99 µs", "p999 µs", "audit"}}
	for i := range all {
		r := &all[i]
		audit, bound := "passed", "–"
		if !r.Audited || r.Errors > 0 {
			audit = "FAILED"
		}
		if b := r.bound(); b > 0 {
			bound = percent(r.IOPS / b)
		}
		t.Rows = append(t.Rows, []string{r.Stack, number(r.SSDs), number(r.RowBytes),
			number(r.Depth), number(r.Blocks), decimal(r.Bytes / (1 << 30)), decimal(r.IOPS / 1e6),
			bound, decimal(r.P50), decimal(r.P99), decimal(r.P999), audit})
	}
	return t
}

// soleFigure draws rows that are swept by nothing as bars, each with its lowest limit.
func soleFigure(all []ioRow, title, label string, name func(*ioRow) string,
	of func(*ioRow) float64) figure {
	f := figure{Kind: kindSpans, Title: title, X: axis{Label: label}}
	zero := func(*ioRow) float64 { return 0 }
	for _, s := range lines(all, name, zero, of) {
		b := bar{Name: s.Name, Value: s.Points[0].Y, Lo: s.Points[0].Lo, Hi: s.Points[0].Hi}
		for i := range all {
			if r := &all[i]; label != "µs" && name(r) == s.Name && r.bound() > 0 && r.IOPS > 0 {
				b.Limit = of(r) * r.bound() / r.IOPS
			}
		}
		f.Bars = append(f.Bars, b)
	}
	return f
}

func distinct[T any](all []T, of func(*T) float64) int {
	seen := map[float64]bool{}
	for i := range all {
		seen[of(&all[i])] = true
	}
	return len(seen)
}

// lines makes a series for each name, of the median where several values have one x. Values that
// are no numbers are left out.
func lines[T any](all []T, name func(*T) string, x, y func(*T) float64) (out []series) {
	index := map[string]int{}
	var values []map[float64][]float64
	for i := range all {
		r := &all[i]
		if math.IsNaN(y(r)) {
			continue
		}
		n := name(r)
		if _, ok := index[n]; !ok {
			index[n] = len(out)
			out = append(out, series{Name: n})
			values = append(values, map[float64][]float64{})
		}
		v := values[index[n]]
		v[x(r)] = append(v[x(r)], y(r))
	}
	for i := range out {
		for x, v := range values[i] {
			lo, mid, hi := spread(v)
			out[i].Points = append(out[i].Points, point{x, mid, lo, hi})
		}
		slices.SortFunc(out[i].Points, func(a, b point) int { return cmp.Compare(a.X, b.X) })
	}
	return out
}

// mostHistograms bounds the lines of the figure of latencies.
const mostHistograms = 6

// histograms draws, for each name, the latencies of the measurement with the most of x.
func histograms(all []ioRow, x parameter, name func(*ioRow) string) figure {
	f := figure{Kind: kindLines, Title: "Latencies",
		X: axis{Label: "latency, µs", Log: true}, Y: axis{Label: "share of the reads up to it",
			Share: true}}
	last := map[string]*ioRow{}
	var names []string
	for i := range all {
		r := &all[i]
		n := name(r)
		if last[n] == nil {
			names = append(names, n)
		}
		if last[n] == nil || x.of(r) >= x.of(last[n]) {
			last[n] = r
		}
	}
	for _, n := range names[:min(len(names), mostHistograms)] {
		r := last[n]
		s := series{Name: fmt.Sprintf("%s, %g %s", n, x.of(r), x.name)}
		sum, total := 0.0, 0.0
		for _, b := range r.Histogram {
			total += b.Count
		}
		for _, b := range r.Histogram {
			sum += b.Count
			s.Points = append(s.Points, single(b.UpTo, sum/total))
		}
		if len(s.Points) > 0 {
			f.Series = append(f.Series, s)
		}
	}
	return f
}
