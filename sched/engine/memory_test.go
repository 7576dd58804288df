package engine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// An error takes from the GPU tier the bytes that were missing and some slack, at most all of it.
func TestShrunk(t *testing.T) {
	h, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, h.Close()) }()
	slack := deviceSlack(8 << 30)
	require.EqualValues(t, 256<<20, slack)
	oom := func(want, free int64) error {
		return fmt.Errorf("batch 3: %w",
			errs.With(errs.Capability, &cuda.OutOfMemoryError{Device: "d", Purpose: "p", Want: want,
				Free: free}))
	}
	plan.Use(&plan.Catalog{Modes: []*plan.Mode{{Name: "some"}, {Name: "all", InMemory: true}}})
	e := &Engine{
		Sampling: &prepare.Sampling{Config: plan.Config{Mode: "some"}, Device: gpuLike{h},
			Rows: 10 << 20, RowBytes: 1024},
		Sizes: plan.TierSizes{GPURows: 4 << 20, CPURows: 1 << 20},
		Tiers: loose{},
	}
	b, err := e.shrunk(oom(300<<20, 44<<20))
	require.NoError(t, err)
	require.Equal(t, plan.TierSizes{GPURows: 4<<20 - (256<<20+slack)/1024, CPURows: 1 << 20}, b)
	b, err = e.shrunk(oom(16<<30, 0))
	require.NoError(t, err)
	require.Zero(t, b.GPURows)
	e.Config.Mode, e.Sizes = "all", plan.TierSizes{GPURows: 1 << 10,
		CPURows: 10<<20 - 1<<10}
	b, err = e.shrunk(oom(1, 0))
	require.NoError(t, err)
	require.Equal(t, plan.TierSizes{CPURows: 10 << 20}, b, "in CPU memory then")
	for name, cause := range map[string]error{"another error": errs.New(errs.Device, "x"),
		"no tier yet": Untiered(oom(1, 0)), "a step that is under way": fmt.Errorf("batch 3: %w",
			Applied(oom(1, 0)))} {
		_, err = e.shrunk(cause)
		require.ErrorContains(t, err, cause.Error(), name)
	}
	e.Sizes = plan.TierSizes{GPURows: 4 << 20}
	_, err = e.shrunk(Applied(oom(1, 0)))
	require.ErrorContains(t, err, "cannot be done again",
		"the parameters may have it already, though the tier could shrink")
	e.Sizes = plan.TierSizes{}
	_, err = e.shrunk(oom(1, 0))
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "lower option batch-size")
	e.Device = h
	_, err = e.shrunk(oom(1, 0))
	require.ErrorContains(t, err, "out of memory for p")
}

// gpuLike is a host device that says it is none.
type gpuLike struct{ cuda.Device }

func (gpuLike) Info() cuda.Info {
	return cuda.Info{Name: "cuda:0 (test)", Backend: "driver", SMs: 4, MemTotal: 8 << 30}
}

// loose are tiers that give rows back.
type loose struct{ Tiers }

func (loose) Fixed() bool { return false }
