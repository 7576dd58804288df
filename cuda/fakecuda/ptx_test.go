//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"helios/cuda/fakecuda"
	"helios/cuda/kernels"
	"helios/cuda/ptxrun"
)

// onPTX starts a fake of its own that runs the committed PTX.
func onPTX(t *testing.T, env ...string) *lib {
	t.Helper()
	t.Setenv(fakecuda.EnvKernels, "ptx")
	for i := 0; i < len(env); i += 2 {
		t.Setenv(env[i], env[i+1])
	}
	l := open(t, "", fakecuda.Private())
	ctx := l.slot()
	l.want(ok, "cuInit", 0)
	l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
	l.want(ok, "cuCtxSetCurrent", ctx.get())
	return l
}

// The kernels of a fake that tests build run from their PTX where HELIOS_KERNELS says so, and what
// ran is left for others to read.
func TestKernelsFromPTX(t *testing.T) {
	dir := t.TempDir()
	t.Run("launches", func(t *testing.T) {
		l := onPTX(t, fakecuda.EnvExecuted, dir)
		buf, st := l.alloc(8), l.stream()
		f := l.kernel("conf_affine")
		l.launch(ok, f, 2, 64, st, uint64(buf), 1, 3, 7)
		l.launch(ok, f, 1, 32, st, uint64(buf), 1, 5, 11)
		before := l.control("error")
		l.launch(ok, f, 1, 32, st, uint64(buf)+4, 1, 5, 11)
		l.want(misaligned, "cuStreamSynchronize", st)
		if said := l.control("error"); before != "" || !strings.Contains(said, "ptx line") {
			t.Errorf("the fake says %q, then %q", before, said)
		}
	})
	all, err := fakecuda.ReadExecuted(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := all["conf_affine"]
	if len(all) != 1 || e.Launches != 3 || e.Instructions == 0 || e.Lanes < e.Instructions ||
		e.Most > e.Instructions || e.Counts[0] != 6 { // 4 warps, 1 and 1
		t.Errorf("executed: %+v", all)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}

// A planted change changes what a kernel does, and a launch ends at the limit of instructions.
func TestPlantInPTX(t *testing.T) {
	conf, err := kernels.PTX("conf")
	if err != nil {
		t.Fatal(err)
	}
	m, err := ptxrun.Parse([]byte(conf.PTX))
	if err != nil {
		t.Fatal(err)
	}
	k, _ := m.Kernel("conf_affine")
	plant := fakecuda.Plant{Kernel: k.Name, Index: -1, Mutation: ptxrun.Mutation{Drop: true}}
	for i := range k.Instructions() {
		if strings.HasPrefix(k.Instr(i).Opcode, "st.global") {
			plant.Index = i
		}
	}
	text, err := json.Marshal(plant)
	if err != nil {
		t.Fatal(err)
	}
	l := onPTX(t, fakecuda.EnvPlant, string(text), fakecuda.EnvSteps, "5000")
	buf, st := l.alloc(16), l.stream()
	l.want(ok, "cuMemsetD8Async", buf, 0, 16, st)
	l.launch(ok, l.kernel("conf_affine"), 1, 32, st, uint64(buf), 1, 0, 7)
	l.launch(ok, l.kernel("conf_move"), 1, 32, st, uint64(buf+8), uint64(buf), 1, 5)
	l.want(ok, "cuStreamSynchronize", st)
	if got := l.read(buf, 2); got[0] != 0 || got[1] != 5 {
		t.Errorf("without its store %s left %d, and conf_move %d; want 0 and 5", k.Name, got[0],
			got[1])
	}
	// a gate that nobody opens
	word := uint64(l.alloc(8))
	l.want(ok, "cuMemsetD8Async", uintptr(word), 0, 8, st)
	l.launch(ok, l.kernel("conf_gate"), 1, 32, st, uint64(buf), word, word, word, 1, 1<<60, 0)
	l.want(launchFailed, "cuStreamSynchronize", st)
	if said := l.control("error"); !strings.Contains(said, "MaxInstructions") {
		t.Errorf("the fake says %q", said)
	}
}
