package iobench

import (
	"fmt"

	"helios/internal/units"
)

// OverlapShare is the share of the best throughput that GIDS asks for (its equation 1).
const OverlapShare = 0.95

// Overlap holds what a sweep over the size of sets shows: how many reads have to be out together
// until the time before the first and after the last read of a set no longer matters.
type Overlap struct {
	Kind     string  `json:"kind"` // "overlap", in a stream of rows
	Modelled bool    `json:"modelled"`
	SSDs     int     `json:"ssds"`
	RowBytes int     `json:"row_bytes"`
	Depth    int     `json:"depth"`
	Blocks   int     `json:"blocks"`
	Stack    string  `json:"stack"`
	Sets     int     `json:"sets_in_flight"`
	BestIOPS float64 `json:"best_iops"`
	// the smallest sets that reach OverlapShare of BestIOPS
	Rows95 int `json:"rows_at_95_percent"`
	// Formula is GIDS's N = n·a·IOPS·(T_i + T_t) / (1 − a) with the modelled machine's n·IOPS,
	// launch and teardown times; 0 on the wall clock, where nobody knows them.
	Formula float64 `json:"formula_rows,omitempty"`
	// The factors of the formula.
	PeakIOPS   float64 `json:"formula_iops,omitempty"`
	LaunchUS   float64 `json:"formula_launch_us,omitempty"`
	TeardownUS float64 `json:"formula_teardown_us,omitempty"`
}

func (o Overlap) String() string {
	what := ""
	if o.Modelled {
		what = "modelled: "
	}
	s := fmt.Sprintf(
		"%s%s, %d SSDs, rows of %d bytes, depth %d, %d blocks, %d sets at a time: best %s IOPS; %.0f %% of it with sets of %d rows",
		what, o.Stack, o.SSDs, o.RowBytes, o.Depth, o.Blocks, o.Sets, units.FormatCount(o.BestIOPS),
		100*OverlapShare, o.Rows95)
	if o.Formula > 0 {
		s += fmt.Sprintf(
			"; N = n·a·IOPS·(T_i+T_t)/(1-a) says %.0f (n·IOPS %s, a %.2f, T_i %.4g us, T_t %.4g us)",
			o.Formula, units.FormatCount(o.PeakIOPS), OverlapShare, o.LaunchUS, o.TeardownUS)
	}
	return s
}

// Overlaps finds rows that differ only in the size of their sets. Only rows that passed their audit
// count.
func Overlaps(rows []Row) []Overlap {
	type key struct {
		ssds, rowBytes, depth, blocks, threads, sets, coalesce int
		stack                                                  string
		rate                                                   float64
	}
	groups := map[key][]Row{}
	var order []key
	for _, r := range rows {
		k := key{r.SSDs, r.RowBytes, r.Depth, r.Blocks, r.Threads, r.Sets, r.CoalesceBytes, r.Stack,
			r.rate()}
		if !r.Audited || k.rate > 0 {
			continue
		}
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], r)
	}
	var out []Overlap
	for _, k := range order {
		g := groups[k]
		if len(g) < 2 {
			continue
		}
		o := Overlap{Kind: "overlap", Modelled: g[0].Modelled, SSDs: k.ssds, RowBytes: k.rowBytes,
			Depth: k.depth, Blocks: k.blocks, Stack: k.stack, Sets: k.sets}
		for _, r := range g {
			o.BestIOPS = max(o.BestIOPS, r.IOPS)
		}
		for _, r := range g {
			if r.IOPS >= OverlapShare*o.BestIOPS && (o.Rows95 == 0 || r.SetRows < o.Rows95) {
				o.Rows95 = r.SetRows
			}
		}
		if o.Modelled {
			o.PeakIOPS, o.LaunchUS, o.TeardownUS = g[0].BoundIOPS, g[0].LaunchUS, g[0].TeardownUS
			o.Formula = OverlapShare * o.PeakIOPS * (o.LaunchUS + o.TeardownUS) / 1e6 / (1 -
				OverlapShare)
		}
		out = append(out, o)
	}
	return out
}

// rate is the open loop's, 0 for a closed loop.
func (r *Row) rate() float64 {
	if r.Open == nil {
		return 0
	}
	return r.Open.Rate
}
