package sched

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/stripe"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/rowtype"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// computedInputs is a dataset with a feature function on SSDs that compute it.
func computedInputs(t *testing.T, typ rowtype.Type, faults string) prepare.Inputs {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return computedOn(t, dev, 3000, typ, faults)
}

// computedOn is computedInputs on a device and with so many nodes.
func computedOn(t *testing.T, dev cuda.Device, nodes int64, typ rowtype.Type,
	faults string) prepare.Inputs {
	t.Helper()
	ctx := context.Background()
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, build.Generate(ctx, build.GenerateOptions{Nodes: nodes, Dim: 33, Classes: 4,
		AvgDegree: 6, Seed: 3, FeatureFn: "hash", Out: out}))
	d, err := dataset.Open(out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	in := prepare.Inputs{Dataset: d, Dev: dev}
	for i := range 2 {
		m, err := stripe.NewComputed(ctx, d, stripe.ComputedOptions{Stripe: i, Stripes: 2,
			LBABytes: 512, Type: typ})
		require.NoError(t, err)
		var bus nvme.Bus
		bus, err = proxy.Open(proxy.Config{Name: fmt.Sprintf("c%d", i),
			Serial: fmt.Sprintf("C%d", i), Content: m, Bytes: m.Size(),
			PollDoorbells: dev.Info().Backend != "host"})
		require.NoError(t, err)
		if f, err := faultinject.Parse(faults); faults != "" {
			require.NoError(t, err)
			bus = faultbus.New(bus, f, faultbus.Options{})
		}
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close(ctx)) })
		in.SSDs = append(in.SSDs, &gpuio.SSD{Ctrl: c, Name: fmt.Sprintf("c%d", i)})
	}
	return in
}

// TestVerifyRows: every gathered row is held against the function, from SSD and from the tiers, of
// every type; and a wrong one is found.
func TestVerifyRows(t *testing.T) {
	cfg := plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 8},
		Fanouts:       []int{3, 3},
		Batch:         128,
		VerifyRows:    true,
		Presample:     1,
		CPUCache:      units.Budget{Percent: 20},
		GPUCache:      units.Budget{Percent: 10},
	}
	for _, typ := range rowtype.Types() {
		if wide.Lean() && typ != rowtype.Int8 {
			continue
		}
		in := computedInputs(t, typ, "")
		res, err := Train(context.Background(), cfg, in, report.Observer{})
		require.NoError(t, err)
		require.Equal(t, typ.String(), res.RowDType)
		e := res.Epochs[0]
		require.NotNil(t, res.RowsVerified)
		// those of validation, too
		require.Greater(t, *res.RowsVerified, e.RowsGPU+e.RowsCPU+e.RowsSSD)
		require.NotZero(t, e.RowsGPU)
		require.NotZero(t, e.RowsCPU)
		require.NotZero(t, e.RowsSSD)
	}
	// A bit that flips on its way is not seen by the SSD, nor by checksums that nobody asks for.
	// Of several: a flip may hit a row of the LBA that nobody asked for.
	in := computedInputs(t, rowtype.Float32, "flip(op=read,byte=9,bit=3,after=30,times=50)")
	_, err := Train(context.Background(), cfg, in, report.Observer{})
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "row of node ")
	require.ErrorContains(t, err, "hash:3")
}

func TestVerifyRowsNeedsAFunction(t *testing.T) {
	in := computedInputs(t, rowtype.Float32, "")
	in.Dataset.Meta.FeatureFn = ""
	_, err := Train(context.Background(), plan.Config{VerifyRows: true}, in, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "feature-fn hash")
}
