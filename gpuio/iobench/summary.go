package iobench

import (
	"fmt"

	"helios/gpuio"
	"helios/internal/units"
)

// Plateau is the share of the best throughput that counts as having reached it.
const Plateau = 0.98

// Summary holds what a sweep over blocks shows for one number of SSDs, row size and depth. Only
// rows that passed their audit count.
type Summary struct {
	Kind     string `json:"kind"` // "summary", in a stream of rows
	Modelled bool   `json:"modelled"`
	SSDs     int    `json:"ssds"`
	RowBytes int    `json:"row_bytes"`
	Depth    int    `json:"depth"`
	Stack    string `json:"stack"`
	// The best throughput over all blocks, and the fewest that reach Plateau of it.
	BestIOPS      float64 `json:"best_iops"`
	PlateauBlocks int     `json:"plateau_blocks"`
	// Of stack async, where sync was measured as well: async's throughput over sync's, at equal
	// blocks or as training has both.
	Ratios []Ratio `json:"async_over_sync,omitempty"`
}

// Ratio compares two stacks at equal blocks, or as training has them.
type Ratio struct {
	Blocks    int     `json:"blocks"` // of the first
	AsTrained bool    `json:"as_trained"`
	Ratio     float64 `json:"ratio"`
}

func (s Summary) String() string {
	what := ""
	if s.Modelled {
		what = "modelled: "
	}
	out := fmt.Sprintf(
		"%s%s, %d SSDs, rows of %d bytes, depth %d: best %s IOPS; %.0f %% of it with %d blocks",
		what, s.Stack, s.SSDs, s.RowBytes, s.Depth, units.FormatCount(s.BestIOPS), 100*Plateau,
		s.PlateauBlocks)
	for i, r := range s.Ratios {
		sep := ","
		if i == 0 {
			sep = "; async/sync"
		}
		if r.AsTrained {
			out += fmt.Sprintf("%s %.2f as training has both", sep, r.Ratio)
			continue
		}
		out += fmt.Sprintf("%s %.2f at %d", sep, r.Ratio, r.Blocks)
	}
	return out
}

// Summarise makes the summaries of rows that belong together, in the order of their first rows:
// one where there is more than one number of blocks, or both stacks.
func Summarise(rows []Row) []Summary {
	type key struct {
		ssds, rowBytes, depth, coalesce int
		stack                           string
	}
	groups := map[key][]Row{}
	var order []key
	for _, r := range rows {
		if k, err := gpuio.FindStack(r.Stack); err != nil || !k.Queued || !r.Audited {
			continue
		}
		k := key{r.SSDs, r.RowBytes, r.Depth, r.CoalesceBytes, r.Stack}
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], r)
	}
	var out []Summary
	for _, k := range order {
		s := Summary{Kind: "summary", Modelled: groups[k][0].Modelled, SSDs: k.ssds,
			RowBytes: k.rowBytes, Depth: k.depth, Stack: k.stack}
		g := groups[k]
		for _, r := range g {
			s.BestIOPS = max(s.BestIOPS, r.IOPS)
		}
		for _, r := range g {
			if r.IOPS >= Plateau*s.BestIOPS &&
				(s.PlateauBlocks == 0 || r.Blocks < s.PlateauBlocks) {
				s.PlateauBlocks = r.Blocks
			}
		}
		if k.stack == gpuio.StackAsync {
			for _, r := range g {
				sync := k
				sync.stack = gpuio.StackSync
				for _, q := range groups[sync] {
					if (q.Blocks == r.Blocks || r.AsTrained) && q.AsTrained == r.AsTrained &&
						q.IOPS > 0 {
						s.Ratios = append(s.Ratios, Ratio{r.Blocks, r.AsTrained, r.IOPS / q.IOPS})
					}
				}
			}
		}
		blocks := map[int]bool{}
		for _, r := range g {
			blocks[r.Blocks] = true
		}
		if len(blocks) > 1 || len(s.Ratios) > 0 {
			out = append(out, s)
		}
	}
	return out
}
