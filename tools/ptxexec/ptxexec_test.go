//go:build linux && (amd64 || arm64) && !nocuda

package ptxexec

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/kernels"
	"helios/internal/testing/conformance"
	"helios/internal/testing/fakecuda"
	"helios/tools/ptxrun"
)

// device is a GPU of a fake library that runs the committed PTX.
type device struct {
	*testing.T
	*driver.Device
	library string
	st      cuda.Stream
	words   cuda.Buffer
}

func open(t *testing.T, env ...string) *device {
	t.Helper()
	for i := 0; i < len(env); i += 2 {
		t.Setenv(env[i], env[i+1])
	}
	d := &device{T: t, library: fakecuda.Build(t, fakecuda.Private())}
	var err error
	d.Device, err = driver.Open(driver.Options{Library: d.library})
	require.NoError(t, err)
	t.Cleanup(func() { d.Close() }) // a kernel that failed has taken the context along
	d.st, err = d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	d.words, err = d.Alloc(cuda.MemPinned, 32, "words")
	require.NoError(t, err)
	return d
}

// run launches conf_affine and waits. A kernel that fails may do so before Launch has ended.
func (d *device) run(blocks, threads int, start cuda.DevicePtr, add uint64) error {
	d.Helper()
	k, err := d.Kernel("conf_affine")
	require.NoError(d, err)
	err = cuda.Launch(d.st, k, cuda.LaunchConfig{Blocks: blocks, Threads: threads},
		conformance.Affine(start, 1, 3, add))
	if err != nil {
		return err
	}
	return d.wait()
}

func (d *device) wait() error {
	ctx, cancel := context.WithTimeout(d.Context(), time.Minute)
	defer cancel()
	return d.st.Synchronize(ctx)
}

// Launches on a library that a test builds are counted for other processes to read; the fake names
// the line of the PTX at which a kernel failed.
func TestKernelsRunFromPTX(t *testing.T) {
	dir := t.TempDir()
	t.Run("launches", func(t *testing.T) {
		d := open(t, EnvExecuted, dir)
		require.NoError(t, d.run(2, 64, d.words.Ptr(), 7))
		require.NoError(t, d.run(1, 32, d.words.Ptr(), 11))
		require.Empty(t, fakecuda.Control(t, d.library, "error"))
		require.ErrorContains(t, d.run(1, 32, d.words.Ptr()+4, 11), "MISALIGNED")
		require.Contains(t, fakecuda.Control(t, d.library, "error"), "ptx line")
	})
	all, err := ReadExecuted(dir)
	require.NoError(t, err)
	e := all["conf_affine"]
	if len(all) != 1 || e.Launches != 3 || e.Instructions == 0 || e.Lanes < e.Instructions ||
		e.Most > e.Instructions || e.Counts[0] != 6 { // 4 warps, 1 and 1
		t.Errorf("executed: %+v", all)
	}
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// A planted change changes the result of a kernel, and a launch ends at the limit of instructions.
func TestPlant(t *testing.T) {
	conf, err := module("conf")
	require.NoError(t, err)
	m, err := ptxrun.Parse([]byte(conf.PTX))
	require.NoError(t, err)
	k, _ := m.Kernel("conf_affine")
	plant := Plant{Kernel: k.Name, Index: -1, Mutation: ptxrun.Mutation{Drop: true}}
	for i := range k.Instructions() {
		if strings.HasPrefix(k.Instr(i).Opcode, "st.global") {
			plant.Index = i
		}
	}
	text, err := json.Marshal(plant)
	require.NoError(t, err)
	d := open(t, EnvPlant, string(text), EnvSteps, "5000")
	require.NoError(t, d.run(1, 32, d.words.Ptr(), 7))
	require.Equal(t, make([]byte, 8), d.words.Bytes()[:8], "the store is left out")
	gate, err := d.Kernel("conf_gate")
	require.NoError(t, err)
	p := d.words.Ptr()
	err = cuda.Launch(d.st, gate, cuda.LaunchConfig{Blocks: 1, Threads: 32},
		conformance.GateParams{Gate: p, Arrived: p + 8, Left: p + 16, Late: p + 24, Step: 1,
			LimitNS: 1 << 60})
	if err == nil { // else it has ended before Launch has
		err = d.wait()
	}
	require.ErrorContains(t, err, "LAUNCH_FAILED")
	require.Contains(t, fakecuda.Control(t, d.library, "error"), "MaxInstructions")
}

// module finds a module of the binary.
func module(name string) (m kernels.Module, err error) {
	all, err := kernels.Modules()
	for _, x := range all {
		if x.Name == name {
			m = x
		}
	}
	return m, err
}
