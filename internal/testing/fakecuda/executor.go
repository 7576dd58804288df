//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"

	"helios/internal/dl"
)

// Launch is one grid, as the fake hands it to an Executor. It is good until the executor returns.
type Launch struct {
	Module      uint64 // one number for each text
	PTX         string
	Kernel      string
	Grid, Block [3]uint32
	SharedBytes uint32  // dynamic shared memory
	Resident    uint32  // blocks that the SMs of the stream hold at a time
	Params      []byte  // as .param space has them
	Ranges      []Range // what the grid may touch, by address; what comes later is Find's
	Seed        uint64  // of the fake's choices: knob seed and the launch's number

	lost *int32
	find uintptr
}

// Range is live memory at its address in this process.
type Range struct {
	Addr, Size uint64
	Host       uint64 // 1: the CPU's memory
}

// Find is the live memory that holds addr now.
func (l *Launch) Find(addr uint64) (Range, bool) {
	var r Range
	n, _, _ := purego.SyscallN(l.find, uintptr(addr), uintptr(unsafe.Pointer(&r)))
	return r, int32(n) == 1
}

// Lost reports whether the launch's context was lost in the meantime: nobody waits for the grid.
func (l *Launch) Lost() bool { return atomic.LoadInt32(l.lost) != 0 }

// Executor runs a grid to its end. Its error loses the context, as a failing kernel does on a GPU:
// with the code of a *LaunchError, else with CUDA_ERROR_LAUNCH_FAILED. A fault on a wild address in
// the executor's goroutine is CUDA_ERROR_ILLEGAL_ADDRESS. Executors run concurrently, one for each
// stream that has a kernel, on threads that the fake made.
type Executor func(l *Launch) error

// The results that a kernel which fails gives (cuda.h).
const (
	IllegalAddress     = 700
	LaunchTimeout      = 702
	IllegalInstruction = 715
	MisalignedAddress  = 716
	LaunchFailed       = 719
)

// LaunchError is a kernel's failure with the result that the driver gives for it.
type LaunchError struct {
	Result int32
	Err    error
}

func (e *LaunchError) Error() string { return fmt.Sprintf("CUDA result %d: %v", e.Result, e.Err) }
func (e *LaunchError) Unwrap() error { return e.Err }

// execution is Execution of src/exec.cc.
type execution struct {
	user, module uint64
	ptx          *byte
	ptxSize      uint64
	kernel       *byte
	kernelSize   uint64
	params       *byte
	paramsSize   uint64
	ranges       *Range
	rangeCount   uint64
	seed         uint64
	error        *byte
	errorSize    uint64
	lost         *int32
	grid, block  [3]uint32
	sharedBytes  uint32
	resident     uint32
}

const _ = uint(unsafe.Sizeof(execution{})-144) + uint(144-unsafe.Sizeof(execution{}))

// executed is a library with an executor.
type executed struct {
	run   Executor
	find  uintptr
	mu    sync.Mutex
	texts map[uint64]string
}

// text is a module's, copied once.
func (e *executed) text(x *execution) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, ok := e.texts[x.module]
	if !ok {
		s = string(unsafe.Slice(x.ptx, x.ptxSize))
		e.texts[x.module] = s
	}
	return s
}

var (
	executors    sync.Map // number → *executed
	executorNext atomic.Uint64
	// entry holds what the libraries call: one for all, since purego's callbacks are few and stay.
	entry = sync.OnceValue(func() uintptr { return purego.NewCallback(enter) })
)

func enter(x *execution) uintptr {
	v, ok := executors.Load(x.user)
	if !ok {
		return refuse(x, LaunchFailed, errors.New("the launch's executor is not known"))
	}
	e := v.(*executed)
	l := &Launch{Module: x.module, PTX: e.text(x),
		Kernel: string(unsafe.Slice(x.kernel, x.kernelSize)), Grid: x.grid, Block: x.block,
		SharedBytes: x.sharedBytes, Resident: x.resident,
		Params: unsafe.Slice(x.params, x.paramsSize),
		Ranges: unsafe.Slice(x.ranges, x.rangeCount), Seed: x.seed, lost: x.lost, find: e.find}
	err := guarded(e.run, l)
	if err == nil {
		return 0
	}
	code := int32(LaunchFailed)
	var le *LaunchError
	if errors.As(err, &le) {
		code, err = le.Result, le.Err
	}
	return refuse(x, code, fmt.Errorf("kernel %s: %w", l.Kernel, err))
}

// refuse leaves the words where the fake's question "error" finds them.
func refuse(x *execution, code int32, err error) uintptr {
	text := unsafe.Slice(x.error, x.errorSize)
	n := copy(text[:len(text)-1], err.Error())
	text[n] = 0
	return uintptr(code)
}

// guarded turns a panic of the executor into its error.
func guarded(run Executor, l *Launch) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // runtime's, of a memory fault
			err = &LaunchError{IllegalAddress, fmt.Errorf("memory fault at %#x", p.Addr())}
		default:
			err = fmt.Errorf("the executor panics: %v\n%s", p, debug.Stack())
		}
	}()
	return run(l)
}

// Execute has the library at path hand its launches to run, until the next Execute; nil gives them
// back to the shim. The kernels of modules that are loaded from now on need not be the shim's.
func Execute(path string, run Executor) error {
	h, err := dl.Open(path)
	if err != nil {
		return err
	}
	set, err := dl.Symbol(h, "hx_fake_executor")
	if err != nil {
		return err
	}
	if run == nil {
		purego.SyscallN(set, 0, 0)
		return nil
	}
	find, err := dl.Symbol(h, "hx_fake_range")
	if err != nil {
		return err
	}
	n := executorNext.Add(1)
	executors.Store(n, &executed{run: run, find: find, texts: map[uint64]string{}})
	purego.SyscallN(set, entry(), uintptr(n))
	return nil
}
