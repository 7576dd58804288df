// Package suite holds each figure of "heliosctl bench suite" against its floor: the best that the
// machine allows, from bytes and bandwidth, operations and peak, or reads and IOPS. It measures
// nothing: it reads the rows that other benchmarks have written.
package suite

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"helios/gpuio"
	"helios/internal/bench"
	"helios/internal/units"
)

// Step is one benchmark of the suite with its rows, of all its rounds.
type Step struct {
	Name, Verb string
	Rows       []json.RawMessage // as the verb writes them
	// Apart: its SSDs are not those that training reads.
	Apart bool
}

// Figure is one measurement over all rounds.
type Figure struct {
	Step     string       `json:"step"`
	What     string       `json:"what"`
	Value    bench.Spread `json:"value"`
	Unit     string       `json:"unit"`
	Rounds   int          `json:"rounds"`
	Modelled bool         `json:"modelled"` // all times are the virtual clock's
	Audited  bool         `json:"audited"`
	// Floor is the best that is possible, in Unit: the most of a rate, the least of a time. 0 where
	// nobody knows; Why has its source.
	Floor float64 `json:"floor,omitempty"`
	Why   string  `json:"floor_from,omitempty"`
	// Share is the share of the floor that was reached: a rate by its floor, a floor by its time.
	Share float64 `json:"share,omitempty"`
}

// Units of figures.
const (
	gib       = "GiB/s"
	gflop     = "GFLOP/s"
	perSecond = " million/s"
	seconds   = "s"
)

// known are the figures of the suite so far that floors of others need.
type known struct {
	copyRate float64              // bytes a second that memory moves, each byte once
	reads    map[reader]readLimit // of commands
	lookups  map[lookupOf]float64 // random reads of memory a second
}

// readLimit is the most commands a second: the floor of bench io, or the best that it reached where
// it knows none.
type readLimit struct {
	iops  float64
	known bool
}

// reader has the common part of reads of an epoch and of bench io.
type reader struct {
	modelled bool
	rowBytes int64
}

type lookupOf struct {
	nodes  int64
	device string
}

// maker makes the figures of one step.
type maker func(k *known, s *Step) ([]Figure, error)

// makers are those of each verb.
var makers = map[string]maker{"bench io": ioFigures, "bench sample": sampleFigures,
	"bench cache": cacheFigures, "bench memory": memoryFigures, "bench compute": computeFigures,
	"compare": compareFigures}

// order is that in which the steps' figures are made: floors come from earlier ones.
var order = []string{"bench memory", "bench io", "bench cache", "bench sample", "bench compute",
	"compare"}

// Figures returns the figures of all steps, in the steps' order.
func Figures(steps []Step) ([]Figure, error) {
	k := &known{reads: map[reader]readLimit{},
		lookups: map[lookupOf]float64{}}
	bySteps := make([][]Figure, len(steps))
	for _, verb := range order {
		for i := range steps {
			if steps[i].Verb != verb {
				continue
			}
			f, err := makers[verb](k, &steps[i])
			if err != nil {
				return nil, fmt.Errorf("step %s: %w", steps[i].Name, err)
			}
			bySteps[i] = f
		}
	}
	return slices.Concat(bySteps...), nil
}

// rows decodes the rows of a step that have the given event; those of benchmarks had none once.
func rows[T any](s *Step, event string) (all []T, err error) {
	for _, raw := range s.Rows {
		var head struct{ Event, Kind string }
		if err := json.Unmarshal(raw, &head); err != nil {
			return nil, err
		}
		if cmp.Or(head.Event, head.Kind, "row") != event {
			continue
		}
		var v T
		if err := json.Unmarshal(raw, &v); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// group gathers rows of one name, in the order of their first.
func group[T any](all []T, name func(*T) string) (names []string, of map[string][]T) {
	of = map[string][]T{}
	for i := range all {
		n := name(&all[i])
		if of[n] == nil {
			names = append(names, n)
		}
		of[n] = append(of[n], all[i])
	}
	return names, of
}

// figures makes a figure of the rows of each name, which fill completes from them.
func figures[T any](s *Step, list []T, unit string, name func(*T) string, audited func(*T) bool,
	fill func(f *Figure, mine []T)) (out []Figure) {
	names, of := group(list, name)
	for _, n := range names {
		f := Figure{Step: s.Name, What: n, Unit: unit, Rounds: len(of[n]),
			Audited: all(of[n], audited)}
		fill(&f, of[n])
		out = append(out, f)
	}
	return out
}

// over is the spread of a value over rows.
func over[T any](all []T, of func(*T) float64) bench.Spread {
	v := make([]float64, len(all))
	for i := range all {
		v[i] = of(&all[i])
	}
	return bench.SpreadOf(v)
}

// all reports whether something holds of every row.
func all[T any](rows []T, holds func(*T) bool) bool {
	for i := range rows {
		if !holds(&rows[i]) {
			return false
		}
	}
	return true
}

// rate sets the floor of a rate, floor seconds of which an amount takes.
func (f *Figure) rate(floor float64, why string) {
	if floor > 0 {
		f.Floor, f.Why, f.Share = floor, why, f.Value.Median/floor
	}
}

// time sets the floor of a time.
func (f *Figure) time(floor float64, why string) {
	if floor > 0 && f.Value.Median > 0 {
		f.Floor, f.Why, f.Share = floor, why, floor/f.Value.Median
	}
}

func scaled(s bench.Spread, by float64) bench.Spread {
	return bench.Spread{Median: s.Median * by, Min: s.Min * by, Max: s.Max * by}
}

// ioRow has the fields of a row of "bench io" that figures need.
type ioRow struct {
	SSDs     int     `json:"ssds"`
	Blocks   int     `json:"blocks"`
	RowBytes int64   `json:"row_bytes"`
	Stack    string  `json:"stack"`
	Depth    int     `json:"depth"`
	IOPS     float64 `json:"iops"`
	Bytes    float64 `json:"bytes_per_second"`
	Modelled bool    `json:"modelled"`
	Audited  bool    `json:"audited"`
	OfSSDs   float64 `json:"ssd_bound_iops"`
	Links    float64 `json:"link_bound_iops"`
	InFlight float64 `json:"depth_bound_iops"`
	Serve    float64 `json:"serve_iops"`
}

// floor is the most commands a second, and whose limit that is.
func (r *ioRow) floor() (iops float64, why string) {
	for _, l := range []struct {
		iops float64
		why  string
	}{
		{r.OfSSDs, fmt.Sprintf("IOPS of %d SSDs", r.SSDs)},
		{r.Links, "bandwidth of the link, in reads of " + units.FormatBytes(r.RowBytes)},
		{r.InFlight, fmt.Sprintf("%d reads in flight by an idle SSD's latency", r.Depth*r.SSDs)},
		{r.Serve, "the CPUs that play the SSDs, alone"},
	} {
		if l.iops > 0 && (iops == 0 || l.iops < iops) {
			iops, why = l.iops, fmt.Sprintf("%s: %s/s", l.why, units.FormatCount(l.iops))
		}
	}
	return iops, why
}

// ioNames tells rows apart by what differs between them; the number of SSDs is always told.
func ioNames(list []ioRow) func(r *ioRow) string {
	parts := []func(r *ioRow) string{
		func(r *ioRow) string { return r.Stack },
		func(r *ioRow) string { return units.FormatBytes(r.RowBytes) + " rows" },
		func(r *ioRow) string { return fmt.Sprintf("depth %d", r.Depth) },
		func(r *ioRow) string { return fmt.Sprintf("%d blocks", r.Blocks) },
	}
	parts = slices.DeleteFunc(parts, func(of func(r *ioRow) string) bool {
		return all(list, func(r *ioRow) bool { return of(r) == of(&list[0]) })
	})
	return func(r *ioRow) string {
		text := fmt.Sprintf("%d SSDs", r.SSDs)
		if r.SSDs == 1 {
			text = "1 SSD"
		}
		for _, of := range parts {
			text += ", " + of(r)
		}
		return text
	}
}

func ioFigures(k *known, s *Step) (out []Figure, err error) {
	list, err := rows[ioRow](s, "row")
	if err != nil {
		return nil, err
	}
	audited := func(r *ioRow) bool { return r.Audited }
	return figures(s, list, gib, ioNames(list), audited, func(f *Figure, mine []ioRow) {
		f.Modelled = mine[0].Modelled
		f.Value = scaled(over(mine, func(r *ioRow) float64 { return r.Bytes }), 1.0/(1<<30))
		iops, why := mine[0].floor()
		if iops > 0 && mine[0].IOPS > 0 {
			f.rate(mine[0].Bytes/mine[0].IOPS*iops/(1<<30), why)
		} else if s.Apart {
			f.rate(k.copyRate/(1<<30), "bytes by a copy's bandwidth: the SSDs are memory")
		}
		key := reader{mine[0].Modelled, mine[0].RowBytes}
		limit := readLimit{iops, iops > 0}
		if iops == 0 {
			limit.iops = over(mine, func(r *ioRow) float64 { return r.IOPS }).Median
		}
		was := k.reads[key]
		better := limit.known && !was.known || limit.known == was.known && limit.iops > was.iops
		if better && !s.Apart {
			k.reads[key] = limit
		}
	}), nil
}

// memoryRow has the fields of a row of "bench memory" that figures need.
type memoryRow struct {
	Device   string       `json:"device"`
	From     string       `json:"from"`
	RowBytes int64        `json:"row_bytes"`
	Gather   bench.Spread `json:"gather_bytes_per_second"`
	Copy     bench.Spread `json:"copy_bytes_per_second"`
	Audited  bool         `json:"audited"`
}

func memoryFigures(k *known, s *Step) (out []Figure, err error) {
	list, err := rows[memoryRow](s, "row")
	if err != nil {
		return nil, err
	}
	name := func(r *memoryRow) string {
		return fmt.Sprintf("gather of %s rows from %s memory, %s", units.FormatBytes(r.RowBytes),
			r.From, r.Device)
	}
	audited := func(r *memoryRow) bool { return r.Audited }
	return figures(s, list, gib, name, audited, func(f *Figure, mine []memoryRow) {
		f.Value = scaled(over(mine, func(r *memoryRow) float64 { return r.Gather.Median }),
			1.0/(1<<30))
		rate := over(mine, func(r *memoryRow) float64 { return r.Copy.Median }).Median
		f.rate(rate/(1<<30), "bandwidth: a copy of as many bytes in one piece")
		k.copyRate = max(k.copyRate, rate)
	}), nil
}

// cacheRow has the fields of a row of "bench cache" that figures need.
type cacheRow struct {
	Device  string        `json:"device"`
	Policy  string        `json:"policy"`
	Nodes   int64         `json:"nodes"`
	Workers int           `json:"workers"`
	Lookups bench.Spread  `json:"lookups_per_second"`
	Limit   *bench.Spread `json:"limit_per_second"`
	Audited bool          `json:"audited"`
}

func cacheFigures(k *known, s *Step) (out []Figure, err error) {
	list, err := rows[cacheRow](s, "row")
	if err != nil {
		return nil, err
	}
	for i := range list {
		if r := &list[i]; r.Limit != nil {
			key := lookupOf{r.Nodes, r.Device}
			k.lookups[key] = max(k.lookups[key], r.Limit.Median)
		}
	}
	name := func(r *cacheRow) string {
		return fmt.Sprintf("%s, %s nodes, %d workers", r.Policy,
			units.FormatCount(float64(r.Nodes)), r.Workers)
	}
	audited := func(r *cacheRow) bool { return r.Audited }
	return figures(s, list, "lookups,"+perSecond, name, audited, func(f *Figure, mine []cacheRow) {
		f.Value = scaled(over(mine, func(r *cacheRow) float64 { return r.Lookups.Median }), 1e-6)
		f.rate(k.lookups[lookupOf{mine[0].Nodes, mine[0].Device}]/1e6,
			"one read of memory at a random place for each row")
	}), nil
}

// sampleRow has the fields of a row of "bench sample" that figures need.
type sampleRow struct {
	Graph    string  `json:"graph"`
	Topology string  `json:"topology"`
	Workers  int     `json:"workers"`
	Kernels  string  `json:"kernels"`
	Device   string  `json:"device"`
	Rate     float64 `json:"edges_per_second"`
	Audited  bool    `json:"audited"`
}

// edgeBytes are the least bytes that sampling an edge moves: its neighbour's 32-bit number in, and
// the number out.
const edgeBytes = 8

func sampleFigures(k *known, s *Step) (out []Figure, err error) {
	list, err := rows[sampleRow](s, "row")
	if err != nil {
		return nil, err
	}
	name := func(r *sampleRow) string {
		return fmt.Sprintf("%s graph, topology in %s, %d workers, %s", r.Graph, r.Topology,
			r.Workers, r.Kernels)
	}
	audited := func(r *sampleRow) bool { return r.Audited }
	return figures(s, list, "edges,"+perSecond, name, audited, func(f *Figure, mine []sampleRow) {
		f.Value = scaled(over(mine, func(r *sampleRow) float64 { return r.Rate }), 1e-6)
		f.rate(k.copyRate/edgeBytes/1e6,
			fmt.Sprintf("%d bytes an edge by a copy's bandwidth", edgeBytes))
	}), nil
}

// computeRow has the fields of a row of "bench compute" that figures need.
type computeRow struct {
	Case      string       `json:"case"`
	Device    string       `json:"device"`
	Precision string       `json:"precision"`
	Workers   int          `json:"workers"`
	Seconds   bench.Spread `json:"seconds_per_run"`
	FLOPS     float64      `json:"flops_per_second"`
	Peak      float64      `json:"peak_flops_per_second"`
	Floor     float64      `json:"floor_seconds"`
	OK        bool         `json:"ok"`
}

func computeFigures(_ *known, s *Step) (out []Figure, err error) {
	list, err := rows[computeRow](s, "row")
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(r computeRow) bool { return r.FLOPS == 0 }) // copies
	name := func(r *computeRow) string {
		return fmt.Sprintf("%s, %s, %d workers", r.Case, r.Precision, r.Workers)
	}
	audited := func(r *computeRow) bool { return r.OK }
	return figures(s, list, gflop, name, audited, func(f *Figure, mine []computeRow) {
		f.Value = scaled(over(mine, func(r *computeRow) float64 { return r.FLOPS }), 1e-9)
		// The peak of each round is measured beside it: the median of both, as rounds differ.
		floor := over(mine, func(r *computeRow) float64 {
			if r.Floor == 0 {
				return 0
			}
			return r.FLOPS * r.Seconds.Median / r.Floor
		}).Median
		why := "operations by the peak"
		if peak := over(mine, func(r *computeRow) float64 { return r.Peak }).Median; floor <
			0.99*peak {
			why = "bytes by the bandwidth of a copy"
		}
		f.rate(floor/1e9, why)
	}), nil
}

// compareRow has the fields of a run of "compare" that figures need.
type compareRow struct {
	Variant  string             `json:"variant"`
	Seconds  float64            `json:"epoch_seconds"`
	Commands float64            `json:"ssd_commands"`
	Bytes    float64            `json:"bytes_ssd"`
	Stages   map[string]float64 `json:"stage_seconds"`
	Modelled bool               `json:"modelled"`
	Losses   []float64          `json:"losses"` // none on the virtual clock
	Stack    string             `json:"io_stack"`
}

func compareFigures(k *known, s *Step) (out []Figure, err error) {
	list, err := rows[compareRow](s, "run")
	if err != nil || len(list) == 0 {
		return nil, err
	}
	virtual := all(list, func(r *compareRow) bool { return r.Modelled && len(r.Losses) == 0 })
	name := func(r *compareRow) string { return r.Variant }
	least := 0.0
	_, variants := group(list, name)
	for _, mine := range variants {
		t := over(mine, func(r *compareRow) float64 { return r.Stages["train"] }).Median
		if t > 0 && (least == 0 || t < least) {
			least = t
		}
	}
	audited := func(*compareRow) bool { return true } // one whose losses differ ends with an error
	return figures(s, list, seconds, name, audited, func(f *Figure, mine []compareRow) {
		f.Modelled = virtual
		f.Value = over(mine, func(r *compareRow) float64 { return r.Seconds })
		floor, why := least, "training alone, as the fastest variant does it"
		// In wall time the CPU's stacks read past software controllers, and past what these play.
		if virtual || slices.Contains(gpuio.StackNames(queued), mine[0].Stack) {
			if reads, text := k.readFloor(mine, virtual); reads > floor {
				floor, why = reads, text
			}
		}
		f.time(floor, why)
	}), nil
}

func queued(s *gpuio.Stack) bool { return s.Queued }

// readFloor is the least time of an epoch's reads: at the IOPS of bench io with commands that are
// no larger than the epoch's.
func (k *known) readFloor(mine []compareRow, virtual bool) (least float64, why string) {
	commands := over(mine, func(r *compareRow) float64 { return r.Commands }).Median
	if commands == 0 {
		return 0, ""
	}
	bytes := over(mine, func(r *compareRow) float64 { return r.Bytes }).Median / commands
	sizes := slices.SortedFunc(maps.Keys(k.reads), func(a, b reader) int {
		return cmp.Compare(a.rowBytes, b.rowBytes)
	})
	var best readLimit
	for _, size := range sizes { // the largest commands that are no larger than the epoch's
		if size.modelled == virtual && (best.iops == 0 || float64(size.rowBytes) <= 1.01*bytes) {
			best = k.reads[size]
		}
	}
	if best.iops == 0 {
		return 0, ""
	}
	from := "that bench io reached"
	if best.known {
		from = "that SSDs and link allow"
	}
	return commands / best.iops, fmt.Sprintf("%s reads by the %s/s %s",
		units.FormatCount(commands), units.FormatCount(best.iops), from)
}
