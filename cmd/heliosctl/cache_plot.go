package main

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/cache/replay"
	"helios/internal/units"
)

// chart is a line chart as the page draws it.
type chart struct {
	Title  string
	W, H   int
	Ticks  []tick
	Series []series
}

type tick struct {
	X1, Y1, X2, Y2, TX, TY float64
	Anchor, Text           string
}

type series struct {
	Name, Colour, Dash, Points string
	Dots                       []dot
	LY                         int // of its line in the legend
}

type dot struct {
	X, Y float64
	Text string
}

// Eight colours that those who see few can tell apart (Okabe and Ito).
var plotColours = []string{"#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
	"#000000", "#b8a500"}

// replayPlot draws hit ratio and reads by size as a page of its own.
func replayPlot(w io.Writer, res *replay.Result) error {
	charts := []chart{
		plotChart(res, "Rows that need no SSD, %",
			func(p replay.Play) float64 { return 100 * p.Total.HitRatio },
			func(v float64) string { return fmt.Sprintf("%.2f %%", v) }),
		plotChart(res, "Bytes from SSDs, GiB",
			func(p replay.Play) float64 { return float64(p.Total.BytesSSD) / float64(units.GiB) },
			func(v float64) string { return fmt.Sprintf("%.4g GiB", v) }),
		plotChart(res, "Hits below the optimum, points",
			func(p replay.Play) float64 { return p.Total.GapPoints },
			func(v float64) string { return fmt.Sprintf("%.2f points", v) }),
	}
	type line struct{ Cells []string }
	var table []line
	for _, p := range res.Plays {
		table = append(table, line{[]string{p.Policy, lookAheadText(p), lineText(p),
			fmt.Sprintf("%.3g %%", 100*p.Share), strconv.FormatInt(p.Lines, 10),
			fmt.Sprintf("%.2f %%", 100*p.Total.HitRatio),
			fmt.Sprintf("%.2f %%", 100*p.Total.GPUHitRatio), units.FormatBytes(p.Total.BytesSSD),
			fmt.Sprintf("%.2f", p.Total.GapPoints), fmt.Sprintf("%.3f", p.Total.ReadsOverOptimum)}})
	}
	return writePage(w, plotPage, map[string]any{"Result": res, "Charts": charts, "Table": table,
		"Notes": gapNotes(res)})
}

func plotChart(res *replay.Result, title string, value func(replay.Play) float64,
	text func(float64) string) chart {
	const left, top, width, height, legend = 60, 40, 560, 300, 230
	c := chart{Title: title, W: left + width + legend, H: top + height + 50}
	name := func(p replay.Play) string {
		s := p.Policy
		if p.RowsPerLine > 1 {
			s += ", lines of " + strconv.FormatInt(p.LineBytes, 10)
		}
		if p.Superbatch > 0 {
			s += " of " + strconv.Itoa(p.Superbatch)
		}
		if p.Window > 0 {
			s += ", window " + strconv.Itoa(p.Window)
		}
		return s
	}
	var names []string
	lo, hi, most := math.Inf(1), 0.0, 0.0
	for _, p := range res.Plays {
		if !slices.Contains(names, name(p)) {
			names = append(names, name(p))
		}
		if p.Share > 0 {
			lo = min(lo, p.Share)
		}
		hi, most = max(hi, p.Share), max(most, value(p))
	}
	if math.IsInf(lo, 1) || lo == hi {
		lo = hi / 2
	}
	if hi == 0 {
		lo, hi = 0.5, 1
	}
	step := niceStep(max(most, 1e-9) / 5)
	most = step * math.Ceil(max(most, 1e-9)/step)
	// Sizes stand by their logarithm: what is asked is mostly doublings.
	x := func(share float64) float64 {
		return left + width*(math.Log(max(share, lo))-math.Log(lo))/(math.Log(hi)-math.Log(lo))
	}
	y := func(v float64) float64 { return top + height*(1-max(v, 0)/most) }
	for v := 0.0; v <= most*1.0001; v += step {
		c.Ticks = append(c.Ticks, tick{left, y(v), left + width, y(v), left - 6, y(v) + 4, "end",
			strconv.FormatFloat(v, 'g', 4, 64)})
	}
	var shares []float64
	for _, p := range res.Plays {
		if !slices.ContainsFunc(shares,
			func(s float64) bool { return math.Abs(x(s)-x(p.Share)) < 30 }) {
			shares = append(shares, p.Share)
			c.Ticks = append(c.Ticks, tick{x(p.Share), top, x(p.Share), top + height, x(p.Share),
				top + height + 18, "middle", fmt.Sprintf("%.3g %%", 100*p.Share)})
		}
	}
	for i, n := range names {
		s := series{Name: n, Colour: plotColours[i%len(plotColours)], LY: top + 18*i}
		if i >= len(plotColours) {
			s.Dash = "5 3"
		}
		plays := slices.DeleteFunc(slices.Clone(res.Plays),
			func(p replay.Play) bool { return name(p) != n })
		slices.SortStableFunc(plays, func(a, b replay.Play) int { return int(a.Lines - b.Lines) })
		var points []string
		for _, p := range plays {
			px, py := math.Round(10*x(p.Share))/10, math.Round(10*y(value(p)))/10
			points = append(points, fmt.Sprintf("%g,%g", px, py))
			s.Dots = append(s.Dots, dot{px, py, fmt.Sprintf("%s, %.3g %% (%s): %s", n, 100*p.Share,
				units.FormatBytes(p.CacheBytes), text(value(p)))})
		}
		s.Points = strings.Join(points, " ")
		c.Series = append(c.Series, s)
	}
	c.H = max(c.H, top+18*len(names)+20)
	return c
}

// niceStep is 1, 2 or 5 times a power of ten, at least v.
func niceStep(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*p >= v*0.9999 {
			return m * p
		}
	}
	return 10 * p
}

var plotPage = template.Must(template.New("plot").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>cache replay: {{.Result.Header.Name}}</title>
<style>body{font:14px sans-serif;margin:2em;color:#222}svg text{font:12px sans-serif;fill:#222}table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}</style>
<h1>Cache replay: {{.Result.Header.Name}}</h1>
<p>{{.Result.Trace}}: {{.Result.Header.Rows}} rows of {{.Result.Header.RowBytes}} bytes on {{.Result.Header.SSDs}} SSDs; {{.Result.Totals.Batches}} mini-batches with {{.Result.Totals.Rows}} row accesses, recorded in mode {{.Result.Header.Mode}} with policy {{.Result.Header.Policy}}. Constant CPU buffer: {{.Result.CPURows}} rows.{{range .Notes}}<br>{{.}}.{{end}}</p>
{{range .Charts}}<h2>{{.Title}}</h2>
<svg width="{{.W}}" height="{{.H}}" role="img" aria-label="{{.Title}} by size of the GPU tier">
{{range .Ticks}}<line x1="{{.X1}}" y1="{{.Y1}}" x2="{{.X2}}" y2="{{.Y2}}" stroke="#ddd"/><text x="{{.TX}}" y="{{.TY}}" text-anchor="{{.Anchor}}">{{.Text}}</text>
{{end}}<text x="340" y="385" text-anchor="middle">GPU tier, share of the features</text>
{{range .Series}}{{$s := .}}<polyline points="{{.Points}}" fill="none" stroke="{{.Colour}}" stroke-width="2" stroke-dasharray="{{.Dash}}"/>
{{range .Dots}}<circle cx="{{.X}}" cy="{{.Y}}" r="3.5" fill="{{$s.Colour}}"><title>{{.Text}}</title></circle>
{{end}}<line x1="635" x2="660" y1="{{.LY}}" y2="{{.LY}}" stroke="{{.Colour}}" stroke-width="2" stroke-dasharray="{{.Dash}}"/><text x="667" y="{{.LY}}" dy="4">{{.Name}}</text>
{{end}}</svg>
{{end}}<h2>Figures</h2>
<table><tr><th>policy</th><th>window</th><th>line</th><th>size</th><th>lines</th><th>hits</th><th>in GPU</th><th>from SSDs</th><th>gap (points)</th><th>reads/optimum</th></tr>
{{range .Table}}<tr>{{range .Cells}}<td>{{.}}</td>{{end}}</tr>
{{end}}</table></html>
`))
