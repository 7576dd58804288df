package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/driver"
	"helios/internal/serve"
	"helios/internal/testing/fakecuda"
)

// A ring on the GPU has the bytes that one in the CPU's memory has, and is what the client asked
// for: the fake libcuda's memory that leaves the process is a file in memory.
func TestServeOnGPU(t *testing.T) {
	lib := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, lib, "reset,mem=1073741824")
	t.Setenv(driver.EnvLibrary, lib)
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	s := serve.New(serve.Config{Backend: serverBackend(t), Memory: 1 << 30})
	options := map[string]any{"mode": "helios", "device": "cuda", "fanout": "3,2",
		"batch-size": 100, "gpu-cache": "16KiB", "cpu-cache": "0", "hotness": "degree"}
	sums := map[string][]uint32{}
	for _, device := range []string{"cpu", "cuda", "auto"} {
		d := openDoor(t, s)
		d.sums = true
		_, err := d.loader(map[string]any{"options": options, "device": device})
		require.NoError(t, err)
		require.Equal(t, device != "cpu", d.device != "", d.device)
		for epoch := range 2 {
			got, err := d.epoch(epoch, 0)
			require.NoError(t, err)
			sums[device] = append(sums[device], got.sums...)
		}
		d.close()
	}
	// Two loaders of a client, one of which evaluates meanwhile, share the GPU.
	one, two := openDoor(t, s), openDoor(t, s)
	for _, d := range []*door{one, two} {
		d.sums = true
		_, err := d.loader(map[string]any{"options": options, "device": "cuda"})
		require.NoError(t, err)
	}
	for _, d := range []*door{two, one} {
		got, err := d.epoch(0, 0)
		require.NoError(t, err)
		require.Equal(t, sums["cpu"][:len(got.sums)], got.sums)
		d.close()
	}
	require.NotEmpty(t, sums["cpu"])
	require.Equal(t, sums["cpu"], sums["cuda"])
	require.Equal(t, sums["cpu"], sums["auto"])
	fakecuda.Control(t, lib, "reset,mem=1073741824,vmm=0")
	d := openDoor(t, s)
	_, err := d.loader(map[string]any{"options": options, "device": "cuda"})
	require.ErrorContains(t, err, "gives no memory to other processes")
	d.close()
	options["device"] = "host"
	d = openDoor(t, s)
	_, err = d.loader(map[string]any{"options": options, "device": "cuda"})
	require.ErrorContains(t, err, "give device cpu")
	d = openDoor(t, s)
	_, err = d.loader(map[string]any{"options": options, "device": "auto"})
	require.NoError(t, err)
	require.Empty(t, d.device)
}
