//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/fakecuda"
)

// stub is a module that the shim does not have. The executor of these tests reads its one line.
const stub = `.version 8.3
.target sm_70
.address_size 64
.visible .entry KERNEL(.param .align 8 .b8 p0[24], .param .align 8 .b8 p1[16])
{
	ret;
}
`

func (l *lib) module(kernel string) uintptr {
	l.Helper()
	m, f := l.slot(), l.slot()
	text := strings.Replace(stub, "KERNEL", kernel, 1)
	l.want(ok, "cuModuleLoadData", m.at(), l.text(text).at())
	l.want(ok, "cuModuleGetFunction", f.at(), m.get(), l.text(kernel).at())
	return f.get()
}

// follow puts launches into an executor and ends it with the test.
func (l *lib) follow(run fakecuda.Executor) {
	l.Helper()
	if err := fakecuda.Execute(l.path, run); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		if err := fakecuda.Execute(l.path, nil); err != nil {
			l.Error(err)
		}
	})
}

func word(l *fakecuda.Launch, i int) uint64 { return binary.LittleEndian.Uint64(l.Params[8*i:]) }

func at(p uint64) *uint64 { return *(**uint64)(unsafe.Pointer(&p)) }

// A launch reaches the executor with module, grid, parameters and memory, in its stream's order,
// also for kernels that the shim does not have and beside another stream's.
func TestExecutorGetsLaunches(t *testing.T) {
	l := started(t, "seed=5")
	buf := l.alloc(4096)
	late := make(chan uint64, 1)
	var mu sync.Mutex
	var seen []string
	l.follow(func(x *fakecuda.Launch) error {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprint(x.Kernel, " ", x.Grid, x.Block,
			x.SharedBytes, " ", len(x.Params), " ", strings.Contains(x.PTX, "entry "+x.Kernel), x.Lost()))
		in := false
		for i, r := range x.Ranges {
			in = in || r.Addr <= word(x, 0) && word(x, 0)+24 <= r.Addr+r.Size
			if i > 0 && r.Addr < x.Ranges[i-1].Addr+x.Ranges[i-1].Size {
				return fmt.Errorf("ranges overlap or lack order: %v", x.Ranges)
			}
		}
		if !in {
			return errors.New("the buffer is not among the ranges")
		}
		if x.Kernel == "late" { // memory that comes while the grid runs
			p := <-late
			if r, there := x.Find(p + 5); !there || r.Addr != p || r.Size != 512 {
				return fmt.Errorf("%#x: found %v, %v", p, r, there)
			}
			if r, there := x.Find(1); there {
				return fmt.Errorf("address 1 is in %v", r)
			}
		}
		*at(word(x, 0)) = word(x, 0)*3 + word(x, 1) + uint64(len(seen))
		return nil
	})
	one, two := l.module("not_of_the_shim"), l.module("late")
	st := l.stream()
	l.launch(ok, one, 7, 64, st, uint64(buf), 100, 0)
	l.want(ok, "cuStreamSynchronize", st)
	if got := l.read(buf, 1)[0]; got != uint64(buf)*3+101 {
		t.Errorf("the buffer holds %d", got)
	}
	l.launch(ok, two, 1, 1024, st, uint64(buf), 200, 0)
	late <- uint64(l.alloc(512))
	l.want(ok, "cuStreamSynchronize", st)
	if got := l.read(buf, 1)[0]; got != uint64(buf)*3+202 {
		t.Errorf("the buffer holds %d", got)
	}
	want := "[not_of_the_shim [7 1 1] [64 1 1] 0 40 true false late [1 1 1] [1024 1 1] 0 40 true false]"
	if fmt.Sprint(seen) != want {
		t.Errorf("launches %v, want %s", seen, want)
	}
	// Back at the shim a kernel that it does not have cannot run.
	require.NoError(t, fakecuda.Execute(l.path, nil))
	l.launch(ok, one, 7, 64, st, uint64(buf), 100, 0)
	l.want(715, "cuStreamSynchronize", st)
}

// The error of an executor becomes the context's, with the code that a GPU would give.
func TestExecutorFailures(t *testing.T) {
	for name, c := range map[string]struct {
		run  fakecuda.Executor
		code int32
		said string
	}{
		"code": {func(*fakecuda.Launch) error {
			return &fakecuda.LaunchError{Result: misaligned, Err: errors.New("odd")}
		}, misaligned, "kernel failing: odd"},
		"plain": {func(*fakecuda.Launch) error { return errors.New("no code") }, launchFailed,
			"kernel failing: no code"},
		"fault": {func(*fakecuda.Launch) error { *at(0x1230) = 1; return nil }, illegalAddress,
			"memory fault at 0x1230"},
		"panic": {func(*fakecuda.Launch) error { panic("lost its way") }, launchFailed,
			"the executor panics: lost its way"},
		"timeout": {func(*fakecuda.Launch) error {
			return &fakecuda.LaunchError{Result: fakecuda.LaunchTimeout,
				Err: errors.New("too long")}
		}, 702, "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			l := started(t, "")
			l.follow(c.run)
			st := l.stream()
			l.launch(ok, l.module("failing"), 1, 32, st, 0, 0, 0)
			l.want(c.code, "cuStreamSynchronize", st)
			if said := l.control("error"); !strings.Contains(said, c.said) {
				t.Errorf("the fake says %q", said)
			}
		})
	}
}

// The knobs for launches hold for an executor's too, and each library has an executor of its own.
func TestExecutorKnobs(t *testing.T) {
	l := started(t, "")
	n := 0
	l.follow(func(*fakecuda.Launch) error { n++; return nil })
	st := l.stream()
	f := l.module("counted")
	l.control("crash=2:719")
	l.launch(ok, f, 1, 32, st, 0, 0, 0)
	l.want(ok, "cuStreamSynchronize", st)
	l.launch(ok, f, 1, 32, st, 0, 0, 0)
	l.want(launchFailed, "cuStreamSynchronize", st)
	if n != 1 {
		t.Errorf("%d launches reached the executor, want 1", n)
	}
	other := fakecuda.Build(t, fakecuda.Private())
	m := 0
	err := fakecuda.Execute(other, func(*fakecuda.Launch) error { m++; return nil })
	require.NoError(t, err)
	l.want(launchFailed, "cuStreamSynchronize", st)
	if m != 0 {
		t.Error("an executor of another library was called")
	}
	if err := fakecuda.Execute(t.TempDir()+"/none.so", nil); err == nil {
		t.Error("a library that is not there took an executor")
	}
}
