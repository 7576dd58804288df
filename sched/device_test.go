package sched

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
)

// gpuLike is a host device that says it is none.
type gpuLike struct{ cuda.Device }

func (gpuLike) Info() cuda.Info {
	return cuda.Info{Name: "cuda:0 (test)", Backend: "driver", SMs: 4, MemTotal: 1 << 30}
}

// A device without the model's kernels is refused before a checkpoint folder is made or an SSD is
// touched.
func TestDeviceWithoutModelKernels(t *testing.T) {
	d, _ := tiny.open(t)
	h, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, h.Close()) }()
	in := Inputs{Dev: gpuLike{h}, Dataset: d}
	cfg := small()
	cfg.CheckpointDir = filepath.Join(t.TempDir(), "ck")
	_, err = Train(context.Background(), cfg, in, Observer{})
	require.Equal(t, errs.Capability, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "cuda:0 (test)")
	require.ErrorContains(t, err, "no CUDA version yet")
	require.NoDirExists(t, cfg.CheckpointDir)
	require.Empty(t, h.MemUsage())
}
