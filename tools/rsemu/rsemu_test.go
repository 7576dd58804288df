//go:build linux && (amd64 || arm64) && !nocuda

package rsemu_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/stripe"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// Two of these controllers are opened, loaded, verified, reset and trained from, and give the
// parameters that the software controllers give.
func TestTrain(t *testing.T) {
	needLibrary(t)
	testrig.CheckLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(ctx, build.GenerateOptions{Kind: "sbm", Nodes: 20000,
		AvgDegree: 6, Classes: 5, Dim: 32, Seed: 7, Out: dir}))
	d, err := dataset.Open(dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()

	for _, shift := range []uint32{9, 12} {
		t.Run(fmt.Sprintf("blocks of %d", 1<<shift), func(t *testing.T) {
			trainOn(t, ctx, d, shift)
		})
	}
}

func trainOn(t *testing.T, ctx context.Context, d *dataset.Dataset, shift uint32) {
	const bytes = 8 << 20
	var devices []*device
	var soft []string
	for i := range 2 {
		devices = append(devices, newDevice(t, fmt.Sprintf("R%d", i), bytes, shift))
		soft = append(soft, filepath.Join(testrig.MemoryDir(t), fmt.Sprintf("%d.img", i)))
		require.NoError(t, proxy.Create(soft[i], bytes))
	}
	with := func(o nvme.Options, use func(theirs, ours []*gpuio.SSD)) {
		var theirs, ours []*gpuio.SSD
		for i := range devices {
			b, err := devices[i].open()
			require.NoError(t, err)
			theirs = append(theirs, openSSD(t, b, o))
			p, err := proxy.Open(proxy.Config{Path: soft[i], RAM: true, LBABytes: 1 << shift})
			require.NoError(t, err)
			ours = append(ours, openSSD(t, p, o))
		}
		use(theirs, ours)
		for _, s := range append(theirs, ours...) {
			require.NoError(t, s.Ctrl.Close(ctx))
		}
	}
	with(nvme.Options{}, func(theirs, ours []*gpuio.SSD) {
		for i, s := range theirs {
			id := s.Ctrl.Identity()
			require.Equal(t, devices[i].name, id.Serial())
			require.Equal(t, "RSEMU NVME CONTROLLER", id.Model())
			require.Equal(t, 1<<shift, s.Ctrl.Namespace().LBABytes)
			require.EqualValues(t, bytes>>shift, s.Ctrl.Namespace().Blocks)
		}
		for _, ssds := range [][]*gpuio.SSD{theirs, ours} {
			_, err := stripe.Load(ctx, d, ssds, stripe.LoadOptions{})
			require.NoError(t, err)
		}
		for range 2 {
			r, err := stripe.Verify(ctx, d, theirs, stripe.VerifyOptions{Source: true})
			require.NoError(t, err)
			require.EqualValues(t, 20000, r.RowsCompared)
			require.Zero(t, r.BadCount)
			for _, s := range theirs {
				require.NoError(t, s.Ctrl.Reset(ctx))
			}
		}
		// rsemu refuses a PRP list that does not start a page, which the specification allows
		// (section 4.3 of 1.4): several short ones share a page here.
		_, err := train(ctx, static.ModeHelios, d, theirs)
		require.ErrorContains(t, err, "PRP offset invalid (SCT 0h, SC 13h)")
	})
	with(nvme.Options{MaxTransferBytes: 4096}, func(theirs, ours []*gpuio.SSD) { // no lists
		for _, mode := range []string{static.ModeHelios, "gids", "bam"} {
			want, err := train(ctx, mode, d, ours)
			require.NoError(t, err, mode)
			got, err := train(ctx, mode, d, theirs)
			require.NoError(t, err, mode)
			require.Equal(t, want, got, mode)
		}
	})
	for _, v := range devices {
		require.Zero(t, v.refused(), "the controller reached for memory that is not mapped")
	}
}

// train returns the parameters' sum of an epoch that read from the SSDs.
func train(ctx context.Context, mode string, d *dataset.Dataset, ssds []*gpuio.SSD) (sum string,
	err error) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	res, err := sched.Train(ctx, plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 16},
		Mode:          mode,
		Fanouts:       []int{5, 5},
		Epochs:        1,
		Batch:         512,
		Seed:          1,
	}, prepare.Inputs{Dev: dev, Dataset: d, SSDs: ssds},
		report.Observer{})
	if err != nil {
		return "", err
	}
	if res.Epochs[0].RowsSSD == 0 {
		return "", errors.New("no row came from an SSD")
	}
	return res.ParamsSHA256, nil
}

func openSSD(t *testing.T, b nvme.Bus, o nvme.Options) *gpuio.SSD {
	t.Helper()
	c, err := nvme.Open(t.Context(), b, o)
	require.NoError(t, err)
	return &gpuio.SSD{Ctrl: c, Name: b.Name()}
}
