package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"helios/internal/units"
)

// span3 is a figure over the repeats.
type span3 struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func spanOf(v []float64) span3 {
	if len(v) == 0 {
		return span3{}
	}
	s := slices.Clone(v)
	slices.Sort(s)
	m := s[len(s)/2]
	if len(s)%2 == 0 {
		m = (s[len(s)/2-1] + s[len(s)/2]) / 2
	}
	return span3{m, s[0], s[len(s)-1]}
}

// rangeBy is the least and the most.
func (s span3) rangeBy(format func(float64) string) string {
	return format(s.Min) + "–" + format(s.Max)
}

// comparedVariant is a variant over its repeats.
type comparedVariant struct {
	Name     string `json:"name"`
	Mode     string `json:"mode"`
	IOStack  string `json:"io_stack"`
	Pipeline string `json:"pipeline"`
	Seconds  span3  `json:"epoch_seconds"`
	// Ratio is the epoch's time over that of the first variant in the same repeat.
	Ratio        span3   `json:"ratio"`
	First        span3   `json:"first_epoch_seconds"`
	Setup        span3   `json:"setup_seconds"`
	Prepare      span3   `json:"prepare_seconds"`
	Amortised    span3   `json:"amortised_epoch_seconds"`
	Stall        span3   `json:"stall"`
	Overlap      span3   `json:"overlap"`
	CPUSeconds   span3   `json:"cpu_seconds"`
	ProxySeconds span3   `json:"proxy_cpu_seconds"`
	BytesSSD     span3   `json:"bytes_ssd"`
	DiskBytes    span3   `json:"disk_bytes"`
	Commands     span3   `json:"ssd_commands"`
	RowsGPU      float64 `json:"rows_gpu"`
	RowsCPU      float64 `json:"rows_cpu"`
	RowsSSD      float64 `json:"rows_ssd"`
	PeakMemory   int64   `json:"peak_memory_bytes"`
	// The bounds of the tiers, of both together, and the neighbour lists in memory.
	GPUCache   int64  `json:"gpu_cache_bytes"`
	CPUCache   int64  `json:"cpu_cache_bytes"`
	CacheBytes int64  `json:"cache_bytes"`
	Topology   int64  `json:"topology_bytes"`
	Bottleneck string `json:"bottleneck"` // of the run whose time is nearest to the median
}

// comparisonSummary is the result of compare.
type comparisonSummary struct {
	Dataset  string `json:"dataset"`
	Device   string `json:"device"`
	CPUs     int    `json:"cpus"`
	Base     string `json:"base"`
	Modelled bool   `json:"modelled"` // at least of the SSDs
	// profile: all times are the virtual clock's
	Hardware string            `json:"hardware,omitempty"`
	Variants []comparedVariant `json:"variants"`
	Notes    []string          `json:"notes"`
	// MemoryRule names the memory that is made equal: both tiers together, or each apart.
	// EqualMemory reports that all variants have equal caches.
	MemoryRule  string `json:"memory_rule"`
	EqualMemory bool   `json:"equal_memory"`
	// SameLosses: all that had to agree did; a comparison where they do not ends with an error.
	SameLosses bool          `json:"same_losses"` // false under --clock virtual, which has none
	Runs       []comparedRun `json:"-"`
}

func (r *comparison) summary() comparisonSummary {
	s := comparisonSummary{Dataset: r.dataset, Device: r.device, CPUs: r.cores,
		Notes: append([]string{}, r.notes...), SameLosses: r.hardware == "", Hardware: r.hardware,
		Runs: r.runs, Variants: []comparedVariant{}, MemoryRule: r.memory}
	if len(r.names) == 0 {
		return s
	}
	s.Base = r.names[0]
	base := map[int]float64{}
	for _, x := range r.runs {
		if x.Variant == s.Base {
			base[x.Repeat] = x.Seconds
		}
		s.Modelled = s.Modelled || x.Modelled
	}
	for _, name := range r.names {
		var runs []comparedRun
		var ratios []float64
		for _, x := range r.runs {
			if x.Variant != name {
				continue
			}
			runs = append(runs, x)
			if b := base[x.Repeat]; b > 0 {
				ratios = append(ratios, x.Seconds/b)
			}
		}
		if len(runs) > 0 {
			s.Variants = append(s.Variants, variantOf(name, runs, ratios))
		}
	}
	s.holdMemory()
	return s
}

// variantOf returns the figures of a variant's runs; ratios are of their times to the base's.
func variantOf(name string, mine []comparedRun, ratios []float64) comparedVariant {
	of := func(f func(comparedRun) float64) span3 {
		v := make([]float64, len(mine))
		for i, x := range mine {
			v[i] = f(x)
		}
		return spanOf(v)
	}
	v := comparedVariant{
		Name: name, Mode: mine[0].Mode, IOStack: mine[0].IOStack, Pipeline: mine[0].Pipeline,
		Ratio:        spanOf(ratios),
		Seconds:      of(func(x comparedRun) float64 { return x.Seconds }),
		First:        of(func(x comparedRun) float64 { return x.First }),
		Setup:        of(func(x comparedRun) float64 { return x.Setup }),
		Prepare:      of(func(x comparedRun) float64 { return x.Prepare }),
		Amortised:    of(func(x comparedRun) float64 { return x.Amortised }),
		Stall:        of(func(x comparedRun) float64 { return x.Stall }),
		Overlap:      of(func(x comparedRun) float64 { return x.Overlap }),
		CPUSeconds:   of(func(x comparedRun) float64 { return x.CPUSeconds }),
		ProxySeconds: of(func(x comparedRun) float64 { return x.ProxySeconds }),
		BytesSSD:     of(func(x comparedRun) float64 { return x.BytesSSD }),
		DiskBytes:    of(func(x comparedRun) float64 { return x.DiskBytes }),
		Commands:     of(func(x comparedRun) float64 { return x.Commands }),
		RowsGPU:      of(func(x comparedRun) float64 { return x.RowsGPU }).Median,
		RowsCPU:      of(func(x comparedRun) float64 { return x.RowsCPU }).Median,
		RowsSSD:      of(func(x comparedRun) float64 { return x.RowsSSD }).Median,
		PeakMemory: int64(
			of(func(x comparedRun) float64 { return float64(x.PeakMemory) }).Median),
		GPUCache: mine[0].GPUCache, CPUCache: mine[0].CPUCache,
		CacheBytes: mine[0].GPUCache + mine[0].CPUCache, Topology: mine[0].Topology,
	}
	near := slices.MinFunc(mine, func(a, b comparedRun) int {
		da, db := a.Seconds-v.Seconds.Median, b.Seconds-v.Seconds.Median
		switch {
		case da*da < db*db:
			return -1
		case da*da > db*db:
			return 1
		}
		return 0
	})
	v.Bottleneck = near.Bottleneck
	return v
}

// share3 is the text of the shares of an epoch's rows in GPU tier, CPU tier and SSDs.
func (v comparedVariant) share3() (gpu, cpu, ssd float64) {
	all := v.RowsGPU + v.RowsCPU + v.RowsSSD
	if all == 0 {
		return 0, 0, 0
	}
	return v.RowsGPU / all, v.RowsCPU / all, v.RowsSSD / all
}

// cells are the rows of compareColumns.
func (s comparisonSummary) cells() (t [][]string) {
	for _, v := range s.Variants {
		g, c, d := v.share3()
		t = append(t, []string{
			v.Name, units.FormatSeconds(v.Seconds.Median),
			v.Seconds.rangeBy(units.FormatSeconds), s.beside(v), v.caches(),
			fmt.Sprintf("%.1f%%", 100*d),
			fmt.Sprintf("%.1f / %.1f / %.1f%%", 100*g, 100*c, 100*d),
			units.FormatBytes(int64(v.BytesSSD.Median)), memoryFigure(int64(v.DiskBytes.Median)),
			fmt.Sprintf("%.0f%%", 100*v.Stall.Median),
			fmt.Sprintf("%.2f", v.Overlap.Median),
			figure(v.CPUSeconds.Median), figure(v.ProxySeconds.Median),
			units.FormatSeconds(v.First.Median), units.FormatSeconds(v.Setup.Median),
			memoryFigure(v.PeakMemory), figure(v.Prepare.Median), amortised(v),
		})
	}
	return t
}

func amortised(v comparedVariant) string {
	if v.Prepare.Max == 0 {
		return "–"
	}
	return units.FormatSeconds(v.Amortised.Median)
}

// beside compares the time of a data path with that of the first.
func (s comparisonSummary) beside(v comparedVariant) string {
	if v.Name == s.Base {
		return "–"
	}
	return speed(v.Ratio)
}

// speed says in words which of two is faster, where r is the time of the one over that of the
// other. Repeats that disagree tell of no difference.
func speed(r span3) string {
	switch {
	case r.Median <= 0:
		return "–"
	case r.Min < 1 && r.Max > 1:
		return "no clear difference"
	case r.Median < 0.995:
		return times(1/r.Median) + "× faster"
	case r.Median > 1.005:
		return times(r.Median) + "× slower"
	}
	return "as fast"
}

func times(v float64) string {
	if v >= 99.5 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// byTime are the variants, the fastest first.
func (s comparisonSummary) byTime() []comparedVariant {
	return slices.SortedFunc(slices.Values(s.Variants), func(a, b comparedVariant) int {
		return cmp.Compare(a.Seconds.Median, b.Seconds.Median)
	})
}

// fastest names the fastest data path and its lead over the next.
func (s comparisonSummary) fastest() string {
	if len(s.Variants) < 2 {
		return ""
	}
	v := s.byTime()
	a, b := v[0], v[1]
	if a.Seconds.Median <= 0 {
		return ""
	}
	differ := ""
	if !sameCaches(a, b) {
		differ = fmt.Sprintf(" (caches of %s against %s)", a.caches(), b.caches())
	}
	text := fmt.Sprintf("%s is the fastest: %s an epoch", a.Name,
		units.FormatSeconds(a.Seconds.Median))
	if a.Seconds.Max >= b.Seconds.Min {
		return text + fmt.Sprintf("; %s may be as fast (%s): the ranges of their repeats overlap%s",
			b.Name, units.FormatSeconds(b.Seconds.Median), differ)
	}
	return text + fmt.Sprintf(", %s times as fast as %s, the next%s",
		times(b.Seconds.Median/a.Seconds.Median), b.Name, differ)
}

// figure and memory are a dash for what the virtual clock does not have.
func figure(v float64) string {
	if v == 0 {
		return "–"
	}
	return units.FormatSeconds(v)
}

func memoryFigure(n int64) string {
	if n == 0 {
		return "–"
	}
	return units.FormatBytes(n)
}

// showComparison closes with three lines: the fastest, how far to trust the times, and what bounds
// the fastest. The rest is for --explain.
func (c *comparer) showComparison(s comparisonSummary) {
	c.ui.Columns(compareColumns(s.Base), s.cells())
	v := s.byTime()
	if text := s.fastest(); text != "" {
		c.ui.Printf("%s", text)
	}
	c.ui.Printf("%s", strings.Join(s.claims(), "; "))
	if c.explain {
		for _, v := range s.Variants {
			c.ui.Printf("%s: %s, %s; bottleneck: %s", v.Name, v.IOStack, v.Pipeline, v.Bottleneck)
		}
		for _, n := range s.Notes {
			c.ui.Printf("note: %s", n)
		}
	} else if len(v) > 0 {
		c.ui.Printf("bottleneck of %s: %s (--explain: the others, and %d notes)", v[0].Name,
			v[0].Bottleneck, len(s.Notes))
	}
}

// claims say what the times are worth.
func (s comparisonSummary) claims() (all []string) {
	if s.SameLosses {
		all = append(all, "losses and parameters are the same in all runs that must agree")
	}
	if s.Hardware != "" {
		all = append(all, "all times are modelled, of hardware profile "+s.Hardware)
	} else if s.Modelled {
		all = append(all, "software SSDs played a model: times are no measurement of real SSDs")
	}
	if s.EqualMemory {
		return append(all, "memory is equal")
	}
	return append(all, "UNEQUAL MEMORY: see the caches")
}
