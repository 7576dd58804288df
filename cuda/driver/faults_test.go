//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/kernels"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/conformance"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// workload uses every part of a device once, in two streams of which one has a budget, and reports
// the first error. Its results are checked: either a call fails, or the numbers are right. It
// leaves nothing behind, whatever fails.
func workload(lib string) (err error) {
	const n = 512
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	d, err := driver.Open(driver.Options{Library: lib})
	if err != nil {
		return err
	}
	closers := []func() error{d.Close}
	defer func() {
		for _, f := range slices.Backward(closers) {
			err = errors.Join(err, f())
		}
	}()
	later := func(f func() error) { closers = append(closers, f) }

	mem, err := hostmem.Alloc(n*8, "workload")
	if err != nil {
		return err
	}
	later(func() error { return hostmem.Free(mem) })
	reg, err := d.Register(mem, "registered")
	if err != nil {
		return err
	}
	later(reg.Free)
	dev, err := d.Alloc(cuda.MemDevice, n*8, "device")
	if err != nil {
		return err
	}
	later(dev.Free)
	out, err := d.Alloc(cuda.MemPinned, n*8, "pinned")
	if err != nil {
		return err
	}
	later(out.Free)
	grow, err := d.Reserve(1<<20, "growing")
	if err != nil {
		return err
	}
	later(grow.Free)
	a, err := d.NewStream(cuda.StreamOptions{Name: "a"})
	if err != nil {
		return err
	}
	later(a.Close)
	b, err := d.NewStream(cuda.StreamOptions{Name: "b", SMs: 2, Priority: 1})
	if err != nil {
		return err
	}
	later(b.Close)
	e, err := d.NewTimer()
	if err != nil {
		return err
	}
	later(e.Close)
	f, err := d.NewTimer()
	if err != nil {
		return err
	}
	later(f.Close)
	k, err := d.Kernel("conf_affine")
	if err != nil {
		return err
	}
	affine := func(st cuda.Stream, p cuda.DevicePtr, mul, add uint64) func() error {
		return func() error {
			return cuda.Launch(st, k, cuda.LaunchConfig{Blocks: 3, Threads: 64},
				conformance.Affine(p, n, mul, add))
		}
	}
	var q cuda.Steps
	steps := func() error { // three launches that come to x*1+0
		q.Reset()
		for _, p := range []conformance.AffineParams{conformance.Affine(grow.Ptr(), n, 1, 1),
			conformance.Affine(grow.Ptr(), n, 1, 2), conformance.Affine(grow.Ptr(), n, 1,
				^uint64(2))} {
			cuda.Add(&q, k, cuda.LaunchConfig{Blocks: 2, Threads: 64}, p)
		}
		return cuda.LaunchSteps(a, &q)
	}
	for _, step := range []func() error{
		func() error { return a.Fill(dev.Ptr(), 1, n*8) },
		func() error { return grow.Grow(n * 8) },
		func() error { return a.Copy(grow.Ptr(), dev.Ptr(), n*8) },
		steps, steps, steps,
		func() error { return a.Copy(dev.Ptr(), grow.Ptr(), n*8) },
		func() error { return grow.Grow(200_000) },
		func() error { return a.Fill(grow.Ptr(), 0, 200_000) },
		affine(a, dev.Ptr(), 3, 1),
		func() error { return a.Record(e) },
		func() error { return b.Wait(e) },
		affine(b, dev.Ptr(), 5, 2),
		func() error { return b.Copy(reg.Ptr(), dev.Ptr(), n*8) },
		affine(b, reg.Ptr(), 7, 3),
		func() error { return b.Record(f) },
		func() error { return a.Wait(f) },
		func() error { return a.Copy(out.Ptr(), reg.Ptr(), n*8) },
		func() error { return f.Synchronize(ctx) },
		func() error { return a.Synchronize(ctx) },
		func() error { return b.Synchronize(ctx) },
		func() error { _, err := f.Since(e); return err },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	const want = ((0x0101010101010101*3+1)*5+2)*7 + 3
	for i, v := range hostmem.View[uint64](out.Bytes()) {
		if v != want%(1<<64) {
			return fmt.Errorf("%w: word %d is %#x", errWrongData, i, v)
		}
	}
	return nil
}

var errWrongData = errors.New("wrong data without an error")

const sweepKnobs = "reset,mem=67108864,sms=6,cc=8.0,sm_min=2,sm_step=2,threads_per_sm=512"

// Each call into the driver fails once, at each of its first times: the program gets an error that
// names the call, or did not need it and has the right data. It does not hang or crash, and the
// next program finds the driver as it was.
func TestEveryCallFails(t *testing.T) {
	lib := fakecuda.Build(t)
	fakecuda.Control(t, lib, sweepKnobs)
	if err := workload(lib); err != nil {
		t.Fatal(err)
	}
	empty(t, lib)
	// Calls that a device can do without: they ask for or return something, and a failure does no
	// harm.
	harmless := map[string]bool{
		"cuGetErrorName": true, "cuGetErrorString": true, "cuDeviceGetAttribute": true,
		"cuDeviceGetPCIBusId": true, "cuDeviceGetName": true,
		"cuMemGetInfo_v2": true, "cuFuncGetAttribute": true, "cuFuncGetParamInfo": true,
		"cuDriverGetVersion":     true,
		"cuDeviceGetDevResource": true, "cuDevSmResourceSplitByCount": true,
		"cuStreamDestroy_v2": true, "cuEventDestroy_v2": true, "cuModuleUnload": true,
		"cuLibraryUnload": true,
		"cuMemFree_v2":    true, "cuMemHostUnregister": true, "cuCtxSetCurrent": true,
		"cuStreamQuery":      true,
		"cuModuleLoadDataEx": true, // without a cubin there is the PTX
		// Without a graph there are launches.
		"cuGraphCreate": true, "cuGraphAddKernelNode_v2": true, "cuGraphInstantiateWithFlags": true,
		"cuGraphExecKernelNodeSetParams_v2": true, "cuGraphLaunch": true,
	}
	limit := 6
	if wide.Lean() {
		limit = 2
	}
	surfaced := 0
	var sites []string
	for _, line := range strings.Split(strings.TrimSpace(fakecuda.Control(t, lib, "sites")), "\n") {
		name, count, _ := strings.Cut(line, " ")
		calls, err := strconv.Atoi(count)
		if err != nil {
			t.Fatal(line)
		}
		switch name {
		case "cuDevicePrimaryCtxRelease_v2", "cuGreenCtxDestroy", "cuMemUnmap", "cuMemAddressFree",
			"cuMemRelease", "cuGraphDestroy", "cuGraphExecDestroy":
			continue // its failure leaves something alive, so it comes last
		}
		sites = append(sites, fmt.Sprintf("%s:%d", name, calls))
		for n := 1; n <= min(calls, limit); n++ {
			fakecuda.Control(t, lib, fmt.Sprintf("%s,fail=%s:%d", sweepKnobs, name, n))
			err := workload(lib)
			// some calls depend on who is faster
			fired := fakecuda.Control(t, lib, "failed="+name) != "0\n"
			switch {
			case errors.Is(err, errWrongData):
				t.Errorf("%s, call %d: %v", name, n, err)
			case err != nil:
				surfaced++
				stem, _, _ := strings.Cut(name, "_v")
				if oom := (*cuda.OutOfMemoryError)(nil); !strings.Contains(err.Error(), stem) &&
					!errors.As(err, &oom) {
					t.Errorf("%s, call %d: the error does not name it: %v", name, n, err)
				}
			case fired && !harmless[name]:
				t.Errorf("%s, call %d: no error", name, n)
			}
			empty(t, lib)
			if t.Failed() {
				return
			}
		}
	}
	if surfaced < 20 {
		t.Errorf("%d failures surfaced", surfaced)
	}
	// Several at one time: what fails while a failure is cleaned up.
	const seed = 7
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := range 20 * limit {
		knobs := sweepKnobs
		for range 3 {
			name, calls, _ := strings.Cut(sites[rng.IntN(len(sites))], ":")
			n, err := strconv.Atoi(calls)
			if err != nil {
				t.Fatal(err)
			}
			knobs += fmt.Sprintf(",fail=%s:%d:999:%d", name, 1+rng.IntN(n), 1+rng.IntN(3))
		}
		fakecuda.Control(t, lib, knobs)
		if err := workload(lib); errors.Is(err, errWrongData) {
			t.Errorf("seed %d, round %d, %s: %v", seed, round, knobs, err)
		}
		if empty(t, lib); t.Failed() {
			t.Fatalf("seed %d, round %d: %s", seed, round, knobs)
		}
	}
	for _, call := range []string{"cuMemUnmap", "cuMemAddressFree", "cuMemRelease"} {
		fakecuda.Control(t, lib, sweepKnobs+",fail="+call+":1")
		if err := workload(lib); err == nil || !strings.Contains(err.Error(), call) {
			t.Errorf("%s failed: %v", call, err)
		}
	}
	for _, call := range []string{"cuGraphDestroy", "cuGraphExecDestroy"} {
		fakecuda.Control(t, lib, sweepKnobs+",fail="+call+":1")
		if err := workload(lib); err != nil {
			t.Errorf("%s failed: %v", call, err)
		}
	}
	fakecuda.Control(t, lib, sweepKnobs+",fail=cuGreenCtxDestroy:1")
	if err := workload(lib); err != nil && !strings.Contains(err.Error(), "cuGreenCtxDestroy") {
		t.Errorf("a green context could not be destroyed: %v", err)
	}
	fakecuda.Control(t, lib, sweepKnobs+",fail=cuDevicePrimaryCtxRelease_v2:1")
	if err := workload(lib); err == nil || !strings.Contains(err.Error(),
		"cuDevicePrimaryCtxRelease") {
		t.Errorf("the context could not be released: %v", err)
	}
}

// The GPU dies at each launch in turn. The error has the class of a failed device and names what
// happened, and the next device works.
func TestLossAtEveryLaunch(t *testing.T) {
	lib := fakecuda.Build(t)
	for n := 1; n <= 3; n++ {
		for _, code := range []int{719, 700, 214, 702} {
			fakecuda.Control(t, lib, fmt.Sprintf("%s,crash=%d:%d", sweepKnobs, n, code))
			err := workload(lib)
			if errs.ClassOf(err) != errs.Device || !strings.Contains(err.Error(),
				strconv.Itoa(code)) {
				t.Errorf("launch %d, code %d: class %d: %v", n, code, errs.ClassOf(err), err)
			}
			var lost *driver.LostError
			if !errors.As(err, &lost) {
				t.Errorf("launch %d, code %d: no LostError: %v", n, code, err)
			}
			empty(t, lib)
			if err := workload(lib); err != nil {
				t.Fatalf("after code %d at launch %d: %v", code, n, err)
			}
			empty(t, lib)
		}
	}
}

// The texts that are committed all load on the oldest GPU and driver that they name, and take what
// the shim's kernels take.
func TestAllKernelsLoad(t *testing.T) {
	lib := fakecuda.Build(t)
	modules, err := kernels.Modules()
	if err != nil {
		t.Fatal(err)
	}
	// From PTX, then from each architecture's cubins.
	for _, cc := range []int{70, 87, 80, 90, 100} {
		fakecuda.Control(t, lib, fmt.Sprintf("reset,cc=%d.%d,driver=12020", cc/10, cc%10))
		d := openDevice(t, lib)
		for _, m := range modules {
			for _, k := range m.Kernels {
				got, err := d.Kernel(k.Name)
				switch {
				case m.SM > cc:
					if errs.ClassOf(err) != errs.Capability || !strings.Contains(err.Error(),
						"compute capability") {
						t.Errorf("kernel %s of module %s on a GPU that is too old for it: %v",
							k.Name, m.Name, err)
					}
				case err != nil:
					t.Error(err)
				case int(got.ParamSize()) != k.ParamBytes:
					t.Errorf("kernel %s takes %d bytes, its PTX %d", k.Name, got.ParamSize(),
						k.ParamBytes)
				}
			}
		}
		want := "PTX, no cubins for compute capability " + fmt.Sprintf("%d.%d", cc/10, cc%10)
		if arch := kernels.CubinArch(cc); arch != "" {
			want = "cubin " + arch
		}
		if code := d.Info().Code; code != want {
			t.Errorf("compute capability %d: the kernels are from %q, want %q", cc, code, want)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		empty(t, lib)
	}
}
