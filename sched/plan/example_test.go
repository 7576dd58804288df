package plan_test

import (
	"fmt"
	"log"

	"helios/sched/plan"
	"helios/sched/tiers/dynamic"
	"helios/sched/tiers/static"
)

// A mode is a choice of parts; Filled shows what it chooses. A part that is set stays.
func ExampleConfig_Filled() {
	for _, c := range []plan.Config{{Mode: static.ModeHelios}, {Mode: dynamic.ModeGIDS},
		{Mode: dynamic.ModeGIDS, Policy: "lru"}} {
		f, err := c.Filled()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(f.Mode, f.IOStack, f.Pipeline, f.Policy, f.Window)
	}
	// Output:
	// helios async deep static 0
	// gids sync run-ahead random 8
	// gids sync run-ahead lru 8
}

// The operators of a mini-batch of one layer, and what each waits for.
func ExampleConfig_Operators() {
	c, err := plan.Config{Fanouts: []int{10}, Pipeline: plan.PipelineNone}.Filled()
	if err != nil {
		log.Fatal(err)
	}
	for _, op := range c.Operators(true).Ops {
		fmt.Println(op.Name, op.After)
	}
	// Output:
	// S1 []
	// L1 [S1]
	// I1 [L1]
	// C1 [I1]
	// G1 [C1]
	// T [G1]
}
