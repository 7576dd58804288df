//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The main job on a GPU, which is a fake one: train, go on, evaluate and predict, with the host
// device's losses.
func TestMainJobOnAGPU(t *testing.T) {
	fake := fakeGPU(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "300", "--avg-degree", "5", "--classes", "3",
		"--dim", "16", "--seed", "3", "--train-fraction", "0.25", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "4MiB")
	ok(t, "load", "g")
	args := func(device string, more ...string) []string {
		return append([]string{
			"train", "g", "--device", device, "--fanout", "4,3", "--batch-size", "32", "--hidden",
			"8", "--lr", "0.01", "--json",
			"--io-blocks", "2", "--depth", "32",
		}, more...)
	}
	host := last(t, ok(t, args("host", "--epochs", "1", "--checkpoint", "ck")...))

	fake("sms=2,mem=268435456")
	r := hc(t, args("auto", "--epochs", "2", "--checkpoint", "ck", "--resume", "--gpu-cache", "10%",
		"--cpu-cache", "20%")...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Contains(t, r.errOut, "device: cuda:0 (Fake GPU (CPU shim))\n")
	require.Contains(t, r.errOut, "I/O memory: rung ")
	require.Contains(t, r.errOut, "resumes with a GPU's kernels (ptx), which rounds otherwise")
	gpu := last(t, r.out)
	require.Equal(t, "cuda:0 (Fake GPU (CPU shim))", gpu["device"])
	require.Equal(t, "fp32", gpu["precision"])
	require.Equal(t, "off", gpu["blas"])
	require.EqualValues(t, 0, gpu["gpu_cache_shrunk_bytes"])
	require.Contains(t, []any{"p2p", "pinned", "pinned-cpubell", "proxy"}, gpu["memory_rung"])
	require.Len(t, gpu["epochs"], 2)
	loss := func(r map[string]any, i int) float64 {
		return r["epochs"].([]any)[i].(map[string]any)["loss"].(float64)
	}
	require.Equal(t, loss(host, 0), loss(gpu, 0), "the host's epoch, from the checkpoint")

	whole := last(t, ok(t, args("host", "--epochs", "2")...))
	require.InDelta(t, loss(whole, 1), loss(gpu, 1), 1e-4)

	ev := last(t, ok(t, "eval", "g", "--checkpoint", "ck", "--device", "cuda", "--json", "--quiet"))
	onHost := last(t, ok(t, "eval", "g", "--checkpoint", "ck", "--device", "host", "--json",
		"--quiet"))
	require.InDelta(t, onHost["loss"].(float64), ev["loss"].(float64), 1e-4)
	require.Equal(t, onHost["accuracy"], ev["accuracy"])
	require.Equal(t, gpu["memory_rung"], ev["memory_rung"])

	text := ok(t, "predict", "g", "--checkpoint", "ck", "--device", "cuda", "--nodes", "1,2,3",
		"--embeddings", "e.npy")
	require.Len(t, strings.Split(strings.TrimSpace(text), "\n"), 4)
	require.FileExists(t, "e.npy")

	// Flags of the other device.
	fails(t, hc(t, args("cuda", "--kernels", "generic")...), 2, "train",
		"--kernels generic is for the host device")
	r = hc(t, args("host", "--blas", "auto")...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Contains(t, r.errOut, "--blas is for a GPU")
	// A reason that several rungs share is told once.
	r = hc(t, args("cuda", "--gpu-cache", "10%")...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Equal(t, 1,
		strings.Count(r.errOut,
			"not p2p, pinned or pinned-cpubell: the SSDs are software controllers"), r.errOut)
	fails(t, hc(t, args("cuda", "--gpu-cache", "1TiB")...), 2, "train", "--gpu-cache",
		"device memory has room for")
}
