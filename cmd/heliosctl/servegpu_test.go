package main

import (
	"cmp"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/driver"
	"helios/internal/errs"
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

// A client's numbers of GPUs are translated into the daemon's, by number or UUID, or refused.
func TestServeClientsNumbersOfGPUs(t *testing.T) {
	lib := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, lib, "reset,sms=2,mem=268435456,devices=4")
	t.Setenv(driver.EnvLibrary, lib)
	uuid := func(n byte) string { return fmt.Sprintf("GPU-68656c69-6f73-2d66-616b-652d677075%02x", n) }
	uuids, err := driver.UUIDs(driver.Options{})
	require.NoError(t, err)
	require.Equal(t, []string{uuid(0), uuid(1), uuid(2), uuid(3)}, uuids)
	const unset = "unset"
	for _, c := range []struct{ theirs, ours, device, want string }{
		{unset, unset, "cuda:3", "cuda:3"}, {unset, unset, "auto", "auto 0"},
		{"2", unset, "auto", "auto 2"}, {"2", unset, "", "auto 2"}, {"2", unset, "cuda", "cuda:2"},
		{"3,1", unset, "cuda:1", "cuda:1"}, {" 3, 01", unset, "cuda:1", "cuda:1"},
		{"3", unset, "host", "host"}, {"3", unset, "cuda:1", "refused"},
		{"", unset, "auto", "host"}, {"-1", unset, "auto", "host"}, {"-1", unset, "cuda", "refused"},
		{"", unset, "cuda:0", "refused"}, {"1,1", unset, "cuda", "refused"},
		{"1,-1,2", unset, "cuda:1", "refused"}, {"7", unset, "auto", "host"},
		{"7,0", unset, "cuda:1", "refused"}, {"MIG-1", unset, "cuda", "refused"},
		{uuid(2) + "," + uuid(0), unset, "cuda:1", "cuda:0"}, {uuid(3), unset, "auto", "auto 3"},
		{"GPU-7", unset, "auto", "host"}, {uuid(1) + ",2", unset, "cuda:1", "refused"},
		// A daemon that was started to see some GPUs: the fake does not heed that.
		{"2,3", "2,3", "cuda:1", "cuda:1"}, {"3", "2,3", "cuda", "cuda:1"},
		{"1,3", "2,3", "cuda:1", "cuda:1"}, {"1", "2,3", "cuda", "refused"},
		{"1", "2,3", "auto", "host"}, {unset, "2,3", "auto", "auto 0"},
		{unset, "2,3", "cuda", "cuda"}, {unset, "2,3", "cuda:2", "cuda:0"},
		{unset, "2,3", "cuda:0", "refused"}, {"0", uuid(1), "cuda", "refused"},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			t.Setenv(visibleVar, c.ours) // restored behind the test
			if c.ours == unset {
				require.NoError(t, os.Unsetenv(visibleVar))
			}
			var theirs *string
			if c.theirs != unset {
				theirs = &c.theirs
			}
			a := deviceArgs{device: c.device}
			err := a.countAs(theirs, func(errs.Text) {})
			if c.want == "refused" {
				require.ErrorContains(t, err, "no GPU of the daemon's")
				require.Equal(t, errs.Capability, errs.ClassOf(err))
				return
			}
			require.NoError(t, err)
			got := cmp.Or(a.device, "auto")
			if got == "auto" {
				got = fmt.Sprint(got, " ", a.auto)
			}
			require.Equal(t, c.want, got)
		})
	}
}
