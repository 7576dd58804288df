//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/testing/fakecuda"
	"helios/internal/ui"
)

// fakeGPU isolates the test and returns what makes a fake libcuda with some knobs the one that
// heliosctl opens.
func fakeGPU(t *testing.T) func(knobs string) {
	t.Helper()
	lib := fakecuda.Build(t, fakecuda.Private())
	isolate(t)
	return func(knobs string) {
		t.Helper()
		fakecuda.Control(t, lib, "reset,"+knobs)
		t.Setenv(driver.EnvLibrary, lib)
	}
}

func bindSSDs(t *testing.T) {
	t.Helper()
	for _, f := range []string{"a", "b"} {
		require.NoError(t, os.WriteFile(f, make([]byte, 8<<20), 0o644))
	}
	ok(t, "bind-ssds", "--proxy", "a,b")
}

var shortBench = []string{"bench", "io", "--io-blocks", "1", "--depth", "8", "--seconds", "0.05",
	"--json", "--device"}

// Replicas take the GPUs from --device on, or those of a list.
func TestReplicasTakeGPUs(t *testing.T) {
	fake := fakeGPU(t)
	loaded(t, 1)
	fake("sms=2,devices=3,mem=268435456")
	args := func(extra ...string) []string {
		return append([]string{"train", "g", "--fanout", "3", "--hidden", "4", "--batch-size",
			"400", "--no-eval", "--mode", "inmem", "--json", "--quiet"}, extra...)
	}
	more := func(extra ...string) any {
		return last(t, ok(t, args(extra...)...))["more_devices"]
	}
	require.Equal(t, []any{"cuda:1 (Fake GPU (CPU shim))"}, more("--replicas", "2"))
	require.Equal(t, []any{"cuda:2 (Fake GPU (CPU shim))"}, more("--replicas", "2", "--device",
		"cuda:1"))
	require.Equal(t, []any{"cuda:0 (Fake GPU (CPU shim))"}, more("--replicas", "2", "--device",
		"cuda:2,cuda:0"))
	fails(t, hc(t, args("--replicas", "4")...), 3, "train", "--replicas 4", "no CUDA device 3")
	fails(t, hc(t, "eval", "g", "--checkpoint", "c", "--device", "cuda:0,cuda:1"), 2, "eval",
		"train's --replicas")
}

// Each rank of a machine takes GPUs of its own, by its number there.
func TestRanksTakeGPUs(t *testing.T) {
	fake := fakeGPU(t)
	fake("sms=2,devices=4,mem=268435456")
	e := &env{ui: ui.New(io.Discard, io.Discard), given: func(...any) string { return "" },
		c: cli.NewContext(cli.NewApp(), nil, nil)}
	for _, c := range []struct {
		device          string
		local, replicas int
		want            string // the devices' numbers
		says            string
	}{
		{"auto", 0, 1, "0", ""}, {"auto", 3, 1, "3", ""}, {"", 1, 2, "2 3", ""},
		{"auto", -1, 1, "0", ""}, {"cuda", 1, 1, "1", ""}, {"cuda", 1, 2, "2 3", ""},
		{"cuda:2", 1, 1, "2", ""}, {"cuda:3,cuda:0", 0, 2, "3 0", ""},
		{"cuda:3,cuda:0", -1, 2, "3 0", ""},
		{"cuda:3,cuda:0", 1, 2, "", "all ranks of this machine would take the same GPUs"},
		{"auto", 4, 1, "", "--device auto takes GPU 4, as there are other ranks"},
	} {
		a := deviceArgs{device: c.device}
		err := a.takeLocal(c.local, c.replicas)
		var all []cuda.Device
		if err == nil {
			all, err = a.openAll(e, 2, c.replicas)
		}
		if c.says != "" {
			require.Error(t, err)
			require.Contains(t, errs.Spell(err, errs.Key.Flag), c.says)
			continue
		}
		require.NoError(t, err, "%+v", c)
		var got []string
		for _, dev := range all {
			got = append(got, strings.TrimSuffix(strings.TrimPrefix(dev.Info().Name, "cuda:"),
				" (Fake GPU (CPU shim))"))
			require.NoError(t, dev.Close())
		}
		require.Equal(t, c.want, strings.Join(got, " "), "%+v", c)
	}
	fake("devices=0")
	a := deviceArgs{}
	require.NoError(t, a.takeLocal(1, 1))
	dev, err := a.open(e, 2, "")
	require.NoError(t, err, "the host device, as the machine's first rank does")
	require.Equal(t, "host", dev.Info().Backend)
	require.NoError(t, dev.Close())
}

// auto takes the GPU that can, else the host device with a line with the reason.
func TestDeviceAuto(t *testing.T) {
	fake := fakeGPU(t)
	bindSSDs(t)
	r := hc(t, append(shortBench, "auto")...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Equal(t, "device: host (no GPU; see heliosctl doctor)\n", r.errOut)
	r = hc(t, append(shortBench, "host")...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Empty(t, r.errOut)

	fake("sms=2,mem=268435456")
	for _, dev := range []string{"auto", "cuda", "cuda:0"} {
		r = hc(t, append(shortBench, dev)...)
		require.Equal(t, 0, r.code, r.errOut)
		if dev == "auto" {
			require.Equal(t, "device: cuda:0 (Fake GPU (CPU shim))\n", r.errOut)
		} else {
			require.Empty(t, r.errOut)
		}
		require.Contains(t, r.out, `"audited":true`)
	}

	// A GPU that is there and cannot: auto goes on, cuda does not.
	for knobs, why := range map[string]string{
		"cc=5.2":       "too old: it has compute capability 5.2",
		"driver=12000": "its driver is too old: it supports CUDA 12.0",
		"devices=0":    "finds no GPU",
	} {
		fake(knobs)
		r = hc(t, append(shortBench, "auto")...)
		require.Equal(t, 0, r.code, r.errOut)
		require.Contains(t, r.errOut, why)
		require.True(t, strings.HasPrefix(r.errOut, "device: host (no usable GPU: "), r.errOut)
		fails(t, hc(t, append(shortBench, "cuda")...), 3, "bench io", "--device cuda: ", why)
	}
	fake("devices=2,mem=67108864")
	fails(t, hc(t, append(shortBench, "cuda:2")...), 3, "bench io", "no CUDA device 2",
		"this machine has 2, cuda:0 to cuda:1")
	require.Equal(t, 0, hc(t, append(shortBench, "cuda:1")...).code)
}

// findings of doctor, by part and name.
func findings(t *testing.T) map[string]map[string]any {
	t.Helper()
	out := map[string]map[string]any{}
	for _, l := range strings.Split(strings.TrimSpace(hcOK(t, "doctor", "--json")), "\n") {
		var f map[string]any
		require.NoError(t, json.Unmarshal([]byte(l), &f), l)
		out[f["part"].(string)+"/"+f["name"].(string)] = f
	}
	return out
}

func hcOK(t *testing.T, args ...string) string {
	t.Helper()
	r := hc(t, args...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Empty(t, r.errOut)
	return r.out
}

func TestDoctor(t *testing.T) {
	fake := fakeGPU(t)
	before, err := filepath.Glob("*")
	require.NoError(t, err)
	f := findings(t)
	require.Equal(t, "there", f["host/host device"]["answer"])
	require.Equal(t, "there", f["host/software SSDs"]["answer"])
	require.Equal(t, "not there", f["cuda/driver"]["answer"])
	require.Contains(t, f["cuda/driver"]["detail"], "install")
	require.Contains(t, hcOK(t, "doctor"), "not there")

	fake("devices=2,sms=16,cc=9.0")
	f = findings(t)
	require.Equal(t, "there", f["cuda/driver"]["answer"])
	require.Contains(t, f["cuda/driver"]["detail"], "2 devices")
	require.Contains(t, f["cuda:1/GPU"]["detail"], "16 SMs")
	require.Equal(t, "there", f["cuda:0/kernels load"]["answer"])
	require.Contains(t, f["cuda:0/kernels load"]["detail"], "steps of 8 SMs")
	require.Contains(t, f["cuda:0/kernels load"]["detail"], "kernels from cubin sm_90;")
	require.Equal(t, "there", f["cuda:0/machine code"]["answer"])
	require.Equal(t, "could not tell", f["cuda:0/doorbells from kernels"]["answer"])
	require.Equal(t, "there", f["cuda:0/memory for SSDs' DMA"]["answer"])
	require.Contains(t, f["cuda:0/memory for SSDs' DMA"]["detail"], "mapped by dma-buf")
	fake("dmabuf=0")
	f = findings(t)
	require.Equal(t, "not there", f["cuda:0/memory for SSDs' DMA"]["answer"])
	require.Contains(t, f["cuda:0/memory for SSDs' DMA"]["detail"],
		"gdrdrv: the GPU has no GPUDirect RDMA")

	fake("cc=5.2,dmabuf=0,green=0")
	f = findings(t)
	require.Equal(t, "not there", f["cuda:0/runs the kernels"]["answer"])
	require.Equal(t, "not there", f["cuda:0/context"]["answer"])
	require.Equal(t, "not there", f["cuda:0/dma-buf export"]["answer"])
	require.NotEmpty(t, f["cuda:0/dma-buf export"]["next"])
	fake("cc=8.0")
	t.Setenv("CUDA_FORCE_PTX_JIT", "1")
	f = findings(t)
	require.Equal(t, "not there", f["cuda:0/machine code"]["answer"])
	require.Equal(t, "unset CUDA_FORCE_PTX_JIT", f["cuda:0/machine code"]["next"])
	require.Contains(t, f["cuda:0/kernels load"]["detail"], "kernels from PTX, CUDA_FORCE_PTX_JIT=1;")
	t.Setenv("CUDA_FORCE_PTX_JIT", "")
	// A driver that breaks is not one that lacks something.
	fake("fail=cuModuleLoadDataEx:1:999")
	f = findings(t)
	require.Contains(t, f["cuda:0/kernels load"]["detail"], "context is lost")

	after, err := filepath.Glob("*")
	require.NoError(t, err)
	require.Equal(t, before, after, "doctor leaves files")
}

func TestNoDriver(t *testing.T) {
	runBad(t, []badCase{
		{"no CUDA driver", func(t *testing.T) { t.Setenv(driver.EnvLibrary, "no-such-libcuda.so") },
			"bench io --device cuda --results r.json", 3,
			[]string{"--device cuda", "no CUDA driver", "no-such-libcuda.so", "install"}, "r.json"},
	})
}
