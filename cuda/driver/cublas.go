package driver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"helios/cuda"
	"helios/internal/dl"
	"helios/internal/errs"
)

// NVIDIA's cuBLAS, opened at run time as libcuda is. Its types and values are those of
// cublas_api.h, CUDA 12.

// cublasNames are tried in this order: the major versions whose calls we know, then a toolkit's own
// link.
var cublasNames = []string{"libcublas.so.12", "libcublas.so.13", "libcublas.so"}

// status is cublasStatus_t.
type status int32

const (
	statusSuccess         status = 0
	statusNotInitialized  status = 1
	statusAllocFailed     status = 3
	statusInvalidValue    status = 7
	statusArchMismatch    status = 8
	statusExecutionFailed status = 13
	statusInternalError   status = 14
	statusNotSupported    status = 15
)

var statusNames = map[status]string{
	statusNotInitialized:  "CUBLAS_STATUS_NOT_INITIALIZED",
	statusAllocFailed:     "CUBLAS_STATUS_ALLOC_FAILED",
	statusInvalidValue:    "CUBLAS_STATUS_INVALID_VALUE",
	statusArchMismatch:    "CUBLAS_STATUS_ARCH_MISMATCH",
	statusExecutionFailed: "CUBLAS_STATUS_EXECUTION_FAILED",
	statusInternalError:   "CUBLAS_STATUS_INTERNAL_ERROR",
	statusNotSupported:    "CUBLAS_STATUS_NOT_SUPPORTED",
}

func (s status) String() string {
	if n := statusNames[s]; n != "" {
		return fmt.Sprintf("%s (%d)", n, int32(s))
	}
	return fmt.Sprintf("cublasStatus_t %d", int32(s))
}

const (
	opPlain, opTransposed = 0, 1 // cublasOperation_t
	real32                = 0    // cudaDataType CUDA_R_32F
	// cublasMath_t: precision is what the compute type says, no more and no less
	defaultMath = 0
	// CUBLAS_GEMM_DEFAULT; the others are deprecated or ignored since sm_80
	defaultAlgorithm = -1
)

// computeTypes are cublasComputeType_t: CUBLAS_COMPUTE_32F, _32F_FAST_TF32 and _32F_FAST_16BF,
// which round the factors and sum in float32.
var computeTypes = [...]int32{cuda.FP32: 68, cuda.TF32: 77, cuda.BF16: 75}

// cublasCalls are the functions that we call.
type cublasCalls struct {
	create       func(h *uintptr) status                        // cublasCreate_v2
	destroy      func(h uintptr) status                         // cublasDestroy_v2
	property     func(kind int32, v *int32) status              // cublasGetProperty
	setStream    func(h, s uintptr) status                      // cublasSetStream_v2
	setWorkspace func(h uintptr, p uint64, bytes uint64) status // cublasSetWorkspace_v2
	setMath      func(h uintptr, mode int32) status             // cublasSetMathMode
	gemm         func(h uintptr, transA, transB, m, n, k int32, alpha *float32, a uint64, typeA,
		lda int32, b uint64, typeB, ldb int32,
		beta *float32, c uint64, typeC, ldc, compute, algorithm int32) status // cublasGemmEx
}

func (c *cublasCalls) bind(lib uintptr, name string) error {
	err := dl.Bind(lib, map[string]any{
		"cublasCreate_v2":       &c.create,
		"cublasDestroy_v2":      &c.destroy,
		"cublasGetProperty":     &c.property,
		"cublasSetStream_v2":    &c.setStream,
		"cublasSetWorkspace_v2": &c.setWorkspace,
		"cublasSetMathMode":     &c.setMath,
		"cublasGemmEx":          &c.gemm,
	})
	if err != nil {
		return fmt.Errorf("%s %w: it is no cuBLAS of CUDA 12 or 13", name, err)
	}
	return nil
}

// cublas is cuda.BLAS.
//
// The library promises the same bits for the same call on the same GPU while only one stream uses
// it, or each stream has a workspace that is not the library's own pool (cuBLAS documentation,
// Results Reproducibility; cublasSetWorkspace). Ours is one, and a stream that follows another one
// in using it waits for it.
type cublas struct {
	d     *Device
	name  string
	calls cublasCalls
	k     *kernel // stands for its kernels in what streams say of themselves

	mu      sync.Mutex
	closed  bool
	work    cuda.Buffer
	handles map[*green]*cublasHandle // nil: the primary context
	last    *gpuStream               // that has used the workspace
	refused [len(computeTypes)]error // why a precision can't be used here
}

// cublasHandle is a cublasHandle_t, which belongs to the context that was current when it was made
// (cuBLAS documentation, cuBLAS Context). A green context is one of its own.
type cublasHandle struct {
	h   uintptr
	set *gpuStream // that it works on
}

var _ cuda.BLASOpener = (*Device)(nil)

// OpenBLAS implements cuda.BLASOpener. It multiplies small matrices in each precision before it
// returns.
func (d *Device) OpenBLAS(name string) (_ cuda.BLAS, err error) {
	if !dl.Have {
		return nil, errs.New(errs.Capability,
			"cuBLAS: this build of heliosctl opens no libraries (-tags nocuda, or a platform without it); use {blas} off")
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	tried := cublasNames
	if name != "" {
		tried = []string{name}
	}
	b := &cublas{d: d, handles: map[*green]*cublasHandle{}}
	err = dl.First(tried, dl.Open, func(lib uintptr, path string) error {
		b.name = path
		return b.calls.bind(lib, path)
	})
	if err != nil {
		next := errs.Textf("name another library or use {blas} off")
		if name == "" {
			next = errs.Textf("install it (CUDA toolkit, or Python's nvidia-cublas-cu12 with its directory in LD_LIBRARY_PATH), name the library with {blas} PATH, or do without by {blas} off")
		}
		return nil, errs.New(errs.Capability, "cuBLAS: %w; %s", err, next)
	}
	var version [3]int32
	for i := range version {
		// MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
		if s := b.calls.property(int32(i), &version[i]); s != statusSuccess {
			return nil, errs.New(errs.Capability,
				"cuBLAS: %s: cublasGetProperty: %v; name another library or use {blas} off",
				b.name, s)
		}
	}
	b.name = fmt.Sprintf("cuBLAS %d.%d.%d", version[0], version[1], version[2])
	b.k = &kernel{d: d, name: b.name}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	// What NVIDIA recommends (cuBLAS documentation, cublasSetWorkspace).
	bytes := int64(4 << 20)
	if d.cc >= 90 {
		bytes = 32 << 20
	}
	if b.work, err = d.Alloc(cuda.MemDevice, bytes, "cuBLAS workspace"); err != nil {
		return nil, err
	}
	if err := b.prove(); err != nil {
		return nil, fmt.Errorf("device %s: %w", d.info.Name, err)
	}
	return b, nil
}

// Name implements cuda.BLAS.
func (b *cublas) Name() string { return b.name }

// prove multiplies matrices of small integers, which all precisions have exactly, in every way of
// storing them. A precision that fails is refused from then on; float32 must work.
func (b *cublas) prove() (err error) {
	mem, err := b.d.Alloc(cuda.MemPinned, 4096, "cuBLAS trial")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Free()) }()
	s, err := b.d.NewStream(cuda.StreamOptions{Name: "cuBLAS trial"})
	if err != nil {
		return err
	}
	defer func() {
		b.mu.Lock()
		b.last = nil
		for _, h := range b.handles {
			h.set = nil
		}
		b.mu.Unlock()
		err = errors.Join(err, s.Close())
	}()
	for prec := range computeTypes {
		for way := range 4 {
			err := b.try(s, mem, cuda.Precision(prec), way&1 != 0, way&2 != 0)
			if err != nil && (prec == int(cuda.FP32) || errs.ClassOf(err) != errs.Capability) {
				return err
			}
			if err != nil {
				b.refused[prec] = err
				break
			}
		}
	}
	return nil
}

// try multiplies a 3×4 and a 4×5 matrix in mem, and compares with a product of ours.
func (b *cublas) try(s cuda.Stream, mem cuda.Buffer, prec cuda.Precision,
	transA, transB bool) error {
	const m, n, k = 3, 5, 4
	v := unsafe.Slice((*float32)(unsafe.Pointer(&mem.Bytes()[0])), 1024)
	x, y, z := v[:256], v[256:512], v[512:768]
	for i := range 256 {
		x[i], y[i], z[i] = float32(i%7-3), float32(i*i%11-5), float32(i%13)
	}
	p := cuda.BLASProduct{M: m, N: n, K: k, A: mem.Ptr(), B: mem.Ptr() + 4*256,
		C: mem.Ptr() + 4*512, LDA: k + 1, LDB: n + 2, LDC: n + 3, TransA: transA, TransB: transB,
		Add: true, Precision: prec}
	// The steps in memory from row to row and from column to column.
	rowA, colA, rowB, colB := p.LDA, int64(1), p.LDB, int64(1)
	if transA {
		p.LDA = m + 1
		rowA, colA = 1, p.LDA
	}
	if transB {
		p.LDB = k + 2
		rowB, colB = 1, p.LDB
	}
	if err := b.Multiply(s, &p); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), b.d.opt.QueueTimeout)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	for i := range int64(m) {
		for j := range p.LDC {
			want := float32((i*p.LDC + j) % 13)
			for l := int64(0); l < k && j < n; l++ { // nothing is added between the rows
				want += x[i*rowA+l*colA] * y[l*rowB+j*colB]
			}
			if got := z[i*p.LDC+j]; got != want {
				return errs.New(errs.Capability,
					"%s: a trial product in %v is wrong: element (%d, %d) is %v in place of %v; use {blas} off",
					b.name, prec, i, j, got, want)
			}
		}
	}
	return nil
}

// Multiply implements cuda.BLAS. cuBLAS has matrices by columns: what we call C[M,N] by rows is for
// it Cᵀ[N,M], and Cᵀ = op(B)ᵀ · op(A)ᵀ, so the factors change places and nothing is transposed that
// was not.
func (b *cublas) Multiply(s cuda.Stream, p *cuda.BLASProduct) error {
	gs, ok := s.(*gpuStream)
	if !ok || gs == nil || gs.d != b.d {
		return fmt.Errorf("%s: the stream is not of device %s", b.name, b.d.info.Name)
	}
	if err := b.check(gs, p); err != nil {
		return err
	}
	if p.M == 0 || p.N == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return fmt.Errorf("%s: %w", b.name, cuda.ErrClosed)
	}
	if err := b.refused[p.Precision]; err != nil {
		return err
	}
	if err := b.follow(gs); err != nil {
		return err
	}
	err := gs.foreign(b.k, func() error { return b.enqueue(gs, p) })
	if err != nil {
		return fmt.Errorf("stream %q: %w", gs.opt.Name, err)
	}
	b.last = gs
	return nil
}

// check checks a product's sizes and that its matrices are in memory of the device.
func (b *cublas) check(gs *gpuStream, p *cuda.BLASProduct) error {
	rowsA, colsA, rowsB, colsB := p.M, p.K, p.K, p.N
	if p.TransA {
		rowsA, colsA = colsA, rowsA
	}
	if p.TransB {
		rowsB, colsB = colsB, rowsB
	}
	switch {
	case p.M < 0 || p.N < 0 || p.K < 1 || max(p.M, p.N, p.K, p.LDA, p.LDB, p.LDC) > math.MaxInt32:
		return errs.New(errs.Usage,
			"stream %q: %s: a product of %d×%d×%d with rows of %d, %d and %d is out of its limits",
			gs.opt.Name, b.name, p.M, p.N, p.K, p.LDA, p.LDB, p.LDC)
	case p.LDA < colsA || p.LDB < colsB || p.LDC < p.N:
		return fmt.Errorf("stream %q: %s: a product of %d×%d×%d: rows of %d, %d and %d overlap",
			gs.opt.Name, b.name, p.M, p.N, p.K, p.LDA, p.LDB, p.LDC)
	case int(p.Precision) >= len(computeTypes):
		return errs.New(errs.Usage, "%s: %v is unknown", b.name, p.Precision)
	}
	if p.M == 0 || p.N == 0 {
		return nil
	}
	for _, m := range []struct {
		what       string
		p          cuda.DevicePtr
		rows, cols int64
		ld         int64
	}{{"A", p.A, rowsA, colsA, p.LDA}, {"B", p.B, rowsB, colsB, p.LDB},
		{"C", p.C, p.M, p.N, p.LDC}} {
		if err := b.d.regions.Check("product", "matrix "+m.what, uint64(m.p),
			4*((m.rows-1)*m.ld+m.cols)); err != nil {
			return fmt.Errorf("stream %q: %s: %w", gs.opt.Name, b.name, err)
		}
	}
	return nil
}

// enqueue calls the library, with the stream's context current. b.mu is held.
func (b *cublas) enqueue(s *gpuStream, p *cuda.BLASProduct) error {
	h, err := b.handle(s)
	if err != nil {
		return err
	}
	c := &b.calls
	if h.set != s {
		h.set = nil
		if r := c.setStream(h.h, uintptr(s.h)); r != statusSuccess {
			return b.failed("cublasSetStream_v2", r)
		}
		// It "unconditionally resets the cuBLAS library workspace back to the default workspace
		// pool" (cublasSetStream).
		if r := c.setWorkspace(h.h, uint64(b.work.Ptr()),
			uint64(b.work.Size())); r != statusSuccess {
			return b.failed("cublasSetWorkspace_v2", r)
		}
		h.set = s
	}
	trans := func(t bool) int32 {
		if t {
			return opTransposed
		}
		return opPlain
	}
	alpha, beta := float32(1), float32(0) // beta 0: C is not read, it may hold NaN
	if p.Add {
		beta = 1
	}
	return b.failed("cublasGemmEx", c.gemm(h.h, trans(p.TransB), trans(p.TransA), int32(p.N),
		int32(p.M), int32(p.K), &alpha,
		uint64(p.B), real32, int32(p.LDB), uint64(p.A), real32, int32(p.LDA), &beta, uint64(p.C),
		real32, int32(p.LDC),
		computeTypes[p.Precision], defaultAlgorithm))
}

// handle finds or makes the handle of the stream's context, which is current. b.mu is held.
func (b *cublas) handle(s *gpuStream) (*cublasHandle, error) {
	if h := b.handles[s.green]; h != nil {
		return h, nil
	}
	h := &cublasHandle{}
	if r := b.calls.create(&h.h); r != statusSuccess {
		return nil, b.failed("cublasCreate_v2", r)
	}
	if r := b.calls.setMath(h.h, defaultMath); r != statusSuccess {
		b.calls.destroy(h.h)
		return nil, b.failed("cublasSetMathMode", r)
	}
	b.handles[s.green] = h
	if s.green != nil {
		s.green.refs.Add(1)
	}
	return h, nil
}

// follow makes s wait for the stream that has used the workspace before. b.mu is held.
func (b *cublas) follow(s *gpuStream) error {
	last := b.last
	if last == nil || last == s {
		return nil
	}
	e, err := b.d.NewEvent()
	if err != nil {
		return err
	}
	defer e.Close()
	if err := last.Record(e); err == nil {
		err = s.Wait(e)
		if err != nil {
			return err
		}
	} else if !errors.Is(err, cuda.ErrClosed) {
		// a closed stream has done its work; one that has failed still does it
		ctx, cancel := context.WithTimeout(context.Background(), b.d.opt.QueueTimeout)
		defer cancel()
		if err := last.Synchronize(ctx); errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("%s: its workspace is in use: %w", b.name, err)
		}
	}
	b.last = nil
	return nil
}

// failed is nil for success, else the error of a call with what to do. It runs within enter.
func (b *cublas) failed(call string, r status) error {
	switch r {
	case statusSuccess:
		return nil
	case statusAllocFailed:
		free, _, m := b.d.api.MemGetInfo()
		if m != success {
			return b.d.failed("cuMemGetInfo_v2", m)
		}
		// The library does not say how much: its kernels and states are some tens of MiB.
		return fmt.Errorf("%w (%s: %v)",
			errs.With(errs.Capability, &cuda.OutOfMemoryError{Device: b.d.info.Name,
				Purpose: b.name, Want: 64 << 20, Free: free}), call, r)
	case statusNotSupported, statusArchMismatch:
		return errs.New(errs.Capability,
			"%s: %s: %v: this GPU or library does not have it; use {precision} fp32 or {blas} off",
			b.name, call, r)
	case statusNotInitialized:
		return errs.New(errs.Capability,
			"%s: %s: %v: the library does not work with this driver (\"heliosctl doctor\" has its version); install one of the driver's CUDA version or older, or use {blas} off",
			b.name, call, r)
	case statusExecutionFailed, statusInternalError:
		if _, _, m := b.d.api.MemGetInfo(); m != success { // a lost context says so to every call
			return b.d.failed("cuMemGetInfo_v2", m)
		}
	}
	return errs.New(errs.Device, "%s: %s: %v; use {blas} off", b.name, call, r)
}

// Close implements cuda.BLAS. Streams that it has worked on have done so or keep its memory in use:
// the driver waits for them.
func (b *cublas) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	var err error
	for g, h := range b.handles {
		if b.d.enterToFree() {
			holdGreen(g, nil)
			back := b.d.makeCurrent(g)
			b.calls.setStream(h.h, 0) // the stream may be gone, and cublasDestroy may wait for it
			if r := b.calls.destroy(h.h); r != statusSuccess && b.d.lost.Load() == nil {
				err = errors.Join(err, fmt.Errorf("%s: cublasDestroy_v2: %v", b.name, r))
			}
			back()
			b.d.leaveWith(g, nil)
		}
		if g != nil {
			g.drop()
		}
	}
	b.handles, b.last = nil, nil
	if b.work != nil {
		err = errors.Join(err, b.work.Free())
	}
	return err
}

// makeCurrent makes a green context current, if there is one, until the returned function is
// called. It runs within enterWith of that context.
func (d *Device) makeCurrent(g *green) (back func()) {
	if g == nil {
		return func() {}
	}
	if r := d.api.CtxSetCurrent(g.ctx); r != success {
		_ = d.failed("cuCtxSetCurrent", r) // noted; the next call fails
	}
	return func() {
		if r := d.api.CtxSetCurrent(d.ctx); r != success {
			_ = d.failed("cuCtxSetCurrent", r)
		}
	}
}

// foreignLoad is the commands that a product counts as: two events, its kernel, and the fill and
// the sum of one that is split.
const foreignLoad = launchLoad + 2

// foreign enqueues a library's own launches: run, which is called with the stream's context
// current. k stands for it in the stream's errors and in Busy. A failed run has enqueued nothing
// that matters.
func (s *gpuStream) foreign(k *kernel, run func() error) error {
	if err := s.lock(); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if err := s.room(foreignLoad); err != nil {
		return err
	}
	d := s.d
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	m, err := s.openMark()
	if err != nil {
		return err
	}
	back := d.makeCurrent(s.green)
	err = run()
	back()
	if err != nil {
		return err
	}
	if err := s.closeMark(m, k, nil, 1, foreignLoad); err != nil {
		err = fmt.Errorf("%s: %w", k.name, err)
		s.setErr(err)
		return err
	}
	return s.reapHalf()
}
