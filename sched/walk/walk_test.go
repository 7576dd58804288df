package walk

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/gpuio"
	"helios/internal/des"
	"helios/internal/options"
	"helios/sched/plan"
)

// batch is a mini-batch of fake operators.
type batch struct{ index int }

// fake are operators that note what they do; on the virtual clock each takes time.
type fake struct {
	t      *testing.T
	graph  *plan.OpGraph
	run    *Processes // nil: the wall clock
	mu     sync.Mutex
	done   map[string]bool // operators by name and mini-batch
	order  []string
	flying int
	most   int // mini-batches under way at one time
	group  int // mini-batches of a set
	fails  string
	early  bool   // T returns before it has ended
	stop   func() // called when T of the second mini-batch has begun
	begun  int    // mini-batches whose T has
	behind int    // of those, the ones whose T began before the end of the one before
}

// note notes an operator, before which those must have ended that the graph names.
func (f *fake) note(b *batch, letter string, hop int) error {
	name := letter
	if letter != "T" {
		name = plan.OperatorName(letter, hop)
	}
	if f.run != nil {
		f.run.Sleep(f.run.sim.Now() + int64(len(letter)*7+hop*13+b.index%3*5))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	key := fmt.Sprintf("%s of %d", name, b.index)
	if key == f.fails {
		return errors.New(key)
	}
	op := f.graph.Op(name)
	for _, before := range op.After {
		if f.graph.Op(before) != nil {
			require.True(f.t, f.done[fmt.Sprintf("%s of %d", before, b.index)],
				"%s before %s", key, before)
		}
	}
	f.done[key] = true
	f.order = append(f.order, key)
	return nil
}

func (f *fake) Begin(i int) (*batch, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flying++
	f.most = max(f.most, f.flying)
	return &batch{i}, nil
}

func (f *fake) Sample(b *batch, h int) error { return f.note(b, "S", h) }
func (f *fake) Reach(*batch, int) error      { return nil }
func (f *fake) Announce(b *batch) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order = append(f.order, fmt.Sprintf("announce %d", b.index))
	return nil
}
func (f *fake) Lookup(b *batch, h int) error { return f.note(b, "L", h) }
func (f *fake) Closes(s *Set[*batch]) bool {
	return s.Newest().Last && s.Newest().Batch.index%f.group == f.group-1
}

func (f *fake) Gather(b *batch, h int) error { return f.note(b, "G", h) }
func (f *fake) Place(*batch) error           { return nil }
func (f *fake) Train(b *batch) (end func() error, err error) {
	if !f.early {
		return nil, f.note(b, "T", 0)
	}
	if key := fmt.Sprintf("begin of %d", b.index); key == f.fails {
		return nil, errors.New(key)
	}
	f.begun++
	require.LessOrEqual(f.t, f.begun-f.trained(), 2)
	f.behind += f.begun - f.trained() - 1
	if f.begun == 2 && f.stop != nil {
		f.stop()
	}
	return func() error { return f.note(b, "T", 0) }, nil
}

// trained counts the mini-batches whose T has ended.
func (f *fake) trained() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.done {
		if key[0] == 'T' {
			n++
		}
	}
	return n
}

func (f *fake) Waited(ns int64) { require.GreaterOrEqual(f.t, ns, int64(0)) }

func (f *fake) Submit(s *Set[*batch]) error { return f.each(s, "I") }

func (f *fake) Complete(s *Set[*batch]) error { return f.each(s, "C") }

func (f *fake) each(s *Set[*batch], letter string) error {
	for _, p := range s.Parts {
		if err := f.note(p.Batch, letter, p.Hop); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) Release(b *batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	require.True(f.t, f.done[fmt.Sprintf("T of %d", b.index)])
	f.flying--
}

// walked takes n mini-batches through a configuration's graph on one of the clocks.
func walked(t *testing.T, c plan.Config, n int, virtual bool, fails string) (*fake,
	*Walk[*batch]) {
	f := &fake{t: t, graph: c.Operators(true), done: map[string]bool{}, group: 3, fails: fails}
	w := &Walk[*batch]{Operators: f, Graph: f.graph, To: n, End: n, Samples: f.graph.Samples}
	if virtual {
		sim := des.New()
		f.run = NewProcesses(sim)
		w.Executor = f.run
		w.Start()
		f.run.Go(w.Train)
		sim.Run()
		f.run.Close()
		return f, w
	}
	x := NewGoroutines()
	w.Executor = x
	w.Start()
	w.Train()
	x.Wait()
	return f, w
}

// modes have static tiers, and lines that come and go.
var modes = plan.Catalog{
	Modes: []*plan.Mode{{Name: plan.DefaultMode}, {Name: "lines", Fill: func(c *plan.Config) {
		c.AutoGPUTier()
		plan.OrText(&c.IOStack, gpuio.StackSync)
		plan.OrText(&c.Policy, policy.Random)
	}}},
	Systems: []*plan.System{{
		Runs: func(c *plan.Config) bool { return c.Policy == policy.Random },
		Traits: func(*plan.Config) plan.Traits {
			return plan.Traits{Staged: true, LateTensor: true}
		},
	}, {Runs: func(*plan.Config) bool { return true }}},
}

var _ = plan.Use(&modes) && options.Define("modes", modes.Names)

// Each pipeline takes all mini-batches through the edges of its graph and within its credits, the
// lookups and announcements of a dynamic tier in the same order on both clocks.
func TestWalkKeepsTheGraph(t *testing.T) {
	const n = 12
	for _, set := range []func(*plan.Config){
		func(*plan.Config) {},
		func(c *plan.Config) { c.Mode, c.Window = "lines", 2 },
		func(c *plan.Config) { c.Mode, c.Window, c.Accumulate = "lines", 2, 0.9 },
	} {
		for _, pipe := range plan.PipelineNames(nil) {
			c := plan.Config{Fanouts: []int{4, 3}, Batch: 8, Pipeline: pipe}
			set(&c)
			c, err := c.Filled()
			if err != nil { // not of this tier
				continue
			}
			var tiers [][]string
			for _, virtual := range []bool{false, true} {
				name := fmt.Sprintf("%s %s %v", c.Mode, pipe, virtual)
				f, w := walked(t, c, n, virtual, "")
				require.NoError(t, w.Failure(), name)
				require.Equal(t, n, w.Passed(), name)
				require.Empty(t, w.Left(), name)
				limit := f.graph.Samples
				if c.Accumulate > 0 {
					limit = f.group + 1 + c.Window + f.graph.Credits
				}
				require.LessOrEqual(t, f.most, limit, name)
				require.Zero(t, f.flying, name)
				var trained, seen []string
				for _, x := range f.order {
					if x[0] == 'T' {
						trained = append(trained, x)
					}
					if x[0] == 'L' || x[0] == 'a' {
						seen = append(seen, x)
					}
				}
				require.Len(t, trained, n, name)
				require.True(t, slices.IsSortedFunc(trained, func(a, b string) int {
					return len(a) - len(b)
				}), name)
				tiers = append(tiers, seen)
			}
			require.Equal(t, tiers[0], tiers[1], "%s %s", c.Mode, pipe)
		}
	}
}

// An operator that fails ends the walk on either clock.
func TestWalkFails(t *testing.T) {
	c, err := plan.Config{Fanouts: []int{4, 3}, Batch: 8}.Filled()
	require.NoError(t, err)
	for _, fails := range []string{"S2 of 3", "L1 of 3", "I0 of 3", "C1 of 3", "G2 of 3", "T of 3"} {
		for _, virtual := range []bool{false, true} {
			_, w := walked(t, c, 12, virtual, fails)
			require.EqualError(t, w.Failure(), fails)
			require.LessOrEqual(t, w.Passed(), 3)
		}
	}
}

// A GPU gets a mini-batch that is whole before the end of the one before it is waited for, and what
// it has been given comes to its end whatever fails behind it. One slot is enough.
func TestTrainsBehind(t *testing.T) {
	const n = 12
	for _, v := range []struct {
		pipeline, fails string
		passed          int
	}{
		{"deep", "", n}, {"intra", "", n}, {"deep", "begin of 5", 5}, {"deep", "T of 5", 5},
		{"intra", "T of 5", 5}, {"deep", "", 2},
	} {
		c, err := plan.Config{Fanouts: []int{4, 3}, Batch: 8, Pipeline: v.pipeline}.Filled()
		require.NoError(t, err)
		f := &fake{t: t, graph: c.Operators(true), done: map[string]bool{}, fails: v.fails,
			early: true}
		x := NewGoroutines()
		w := &Walk[*batch]{Operators: f, Graph: f.graph, To: n, End: n, Samples: f.graph.Samples,
			Executor: x}
		if v.passed == 2 {
			f.stop = x.Stop
		}
		w.Start()
		if f.graph.Credits > 1 { // training takes longest
			w.Whole(f.graph.Credits - 1)
		}
		w.Train()
		x.Stop()
		x.Wait()
		if v.fails == "" {
			require.NoError(t, w.Failure())
		} else {
			require.EqualError(t, w.Failure(), v.fails)
		}
		require.Equal(t, v.passed, w.Passed(), v)
		require.Equal(t, v.passed, f.trained(), v)
		require.Equal(t, f.graph.Credits > 1, f.behind > 0, v)
	}
}
