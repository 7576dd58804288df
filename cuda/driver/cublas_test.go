//go:build linux && (amd64 || arm64) && !nocuda

package driver_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/testing/fakecuda"
)

// blasLibraries are a libcuda and the cuBLAS that goes with it: the machine's with HELIOS_GPU=1,
// else the fakes, which the test may send commands to.
func blasLibraries(t *testing.T) (lib, blas string, fake func(string) string) {
	if gpu() {
		return "", "", func(string) string { return "" }
	}
	lib, blas = fakecuda.Build(t), fakecuda.BuildBLAS(t)
	fakecuda.Control(t, lib, "reset,sms=16,cc=9.0,threads_per_sm=512")
	fakecuda.Control(t, blas, "reset,libcuda="+lib)
	return lib, blas, func(command string) string { return fakecuda.Control(t, blas, command) }
}

func floatsOf(b cuda.Buffer) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(&b.Bytes()[0])), b.Size()/4)
}

// Products in every way of storing the factors, on plain streams and on one of a green context,
// against float64; the same bits again, and rows' gaps stay as they are.
func TestBLAS(t *testing.T) {
	lib, path, fake := blasLibraries(t)
	d := openDevice(t, lib)
	opened, err := d.OpenBLAS(path)
	if gpu() && errs.ClassOf(err) == errs.Capability {
		require.NoError(t, d.Close())
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, opened.Name(), "cuBLAS 1")
	streams := make([]cuda.Stream, 3)
	for i, opt := range []cuda.StreamOptions{{Name: "a"}, {Name: "b", Priority: 1},
		{Name: "green", SMs: 8}} {
		streams[i], err = d.NewStream(opt)
		require.NoError(t, err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for i, c := range []struct{ m, n, k int64 }{{1, 1, 1}, {5, 3, 70}, {33, 17, 9}} {
		for way := range 8 {
			for prec, eps := range []float64{cuda.FP32: 0x1p-24, cuda.TF32: 0x1p-10,
				cuda.BF16: 0x1p-7} {
				p := cuda.BLASProduct{
					M: c.m, N: c.n, K: c.k, LDA: c.k + 1, LDB: c.n, LDC: c.n + 2,
					TransA: way&1 != 0, TransB: way&2 != 0, Add: way&4 != 0,
					Precision: cuda.Precision(prec),
				}
				rowsA, rowsB := c.m, c.k
				if p.TransA {
					rowsA, p.LDA = c.k, c.m+3
				}
				if p.TransB {
					rowsB, p.LDB = c.n, c.k
				}
				pinned := func(n int64) cuda.Buffer {
					b, err := d.Alloc(cuda.MemPinned, n*4, "test")
					require.NoError(t, err)
					for i := range floatsOf(b) {
						floatsOf(b)[i] = float32(r.NormFloat64())
					}
					return b
				}
				a, b, out, first := pinned(rowsA*p.LDA), pinned(rowsB*p.LDB), pinned(c.m*p.LDC),
					pinned(c.m*p.LDC)
				p.A, p.B, p.C = a.Ptr(), b.Ptr(), first.Ptr()
				before := append([]float32(nil), floatsOf(first)...)
				copy(floatsOf(out), before)
				if !p.Add {
					floatsOf(out)[0] = float32(math.NaN()) // is not read
				}
				s := streams[(i+way)%len(streams)]
				require.NoError(t, opened.Multiply(s, &p))
				p.C = out.Ptr()
				require.NoError(t, opened.Multiply(streams[(i+way+1)%len(streams)], &p))
				for _, s := range streams {
					require.NoError(t, s.Synchronize(t.Context()))
				}
				require.Equal(t, floatsOf(first), floatsOf(out))
				for i := range c.m {
					for j := range p.LDC {
						want, size := float64(before[i*p.LDC+j]), 1.0
						if j < c.n && !p.Add {
							want = 0
						}
						for l := range c.k {
							if j >= c.n {
								break
							}
							ia, ib := i*p.LDA+l, l*p.LDB+j
							if p.TransA {
								ia = l*p.LDA + i
							}
							if p.TransB {
								ib = j*p.LDB + l
							}
							x := float64(floatsOf(a)[ia]) * float64(floatsOf(b)[ib])
							want, size = want+x, size+math.Abs(x)
						}
						bound := size * (eps + float64(c.k+2)*0x1p-24)
						if j >= c.n {
							bound = 0
						}
						if got := float64(floatsOf(out)[i*p.LDC+j]); !(math.Abs(got-
							want) <= bound) {
							t.Fatalf("%+v: element (%d, %d) is %v, want %v within %v", p, i, j, got,
								want, bound)
						}
					}
				}
				for _, b := range []cuda.Buffer{a, b, out, first} {
					require.NoError(t, b.Free())
				}
			}
		}
	}
	require.Positive(t, streams[0].Busy())
	p := cuda.BLASProduct{M: 2, N: 2, K: 2, LDA: 2, LDB: 2, LDC: 2}
	require.ErrorContains(t, opened.Multiply(streams[0], &p), "no live buffer")
	p.LDC = 1
	require.ErrorContains(t, opened.Multiply(streams[0], &p), "overlap")
	require.NoError(t, streams[0].Synchronize(t.Context()),
		"errors of a call leave the stream as it was")
	for _, s := range streams {
		require.NoError(t, s.Close())
	}
	mem, err := d.Alloc(cuda.MemDevice, 4096, "test")
	require.NoError(t, err)
	require.NoError(t, opened.Close())
	require.NoError(t, opened.Close())
	p = cuda.BLASProduct{M: 2, N: 2, K: 2, A: mem.Ptr(), B: mem.Ptr(), C: mem.Ptr(), LDA: 2,
		LDB: 2, LDC: 2}
	require.ErrorIs(t, opened.Multiply(streams[0], &p), cuda.ErrClosed)
	require.NoError(t, mem.Free())
	require.NoError(t, d.Close())
	if !gpu() {
		require.Empty(t, fake("violations"))
		require.Equal(t, "0", fake("handles"))
		empty(t, lib)
	}
}

// Each failure has an error with its next step.
func TestBLASFailures(t *testing.T) {
	if gpu() {
		t.Skip("the fake's failures")
	}
	lib, path, fake := blasLibraries(t)
	d := openDevice(t, lib)
	for _, c := range []struct {
		path, knobs string
		class       errs.Class
		words       []string
	}{
		{"/no/such/libcublas.so", "", errs.Capability, []string{"/no/such/libcublas.so",
			"option blas off"}},
		{lib, "", errs.Capability, []string{"lacks cublasCreate_v2", "no cuBLAS", "option blas off"}},
		{path, "fail=cublasCreate_v2:1:1", errs.Capability,
			[]string{"cuBLAS 12.6.4", "cublasCreate_v2", "NOT_INITIALIZED (1)", "driver"}},
		{path, "fail=cublasCreate_v2:1:3", errs.Capability, []string{"out of memory for cuBLAS",
			"ALLOC_FAILED (3)"}},
		{path, "fail=cublasGemmEx:1:15", errs.Capability,
			[]string{"cublasGemmEx", "NOT_SUPPORTED (15)", "option blas off"}},
		{path, "fail=cublasSetWorkspace_v2:1:7", errs.Device, []string{"cublasSetWorkspace_v2",
			"INVALID_VALUE (7)"}},
		{path, "wrong=1", errs.Capability, []string{"trial product in fp32 is wrong",
			"option blas off"}},
		{path, "fail=cublasGetProperty:1:99", errs.Capability, []string{"cublasStatus_t 99"}},
	} {
		t.Run(fmt.Sprint(c.words[0], c.knobs), func(t *testing.T) {
			fake("reset,libcuda=" + lib)
			if c.knobs != "" {
				fake(c.knobs)
			}
			_, err := d.OpenBLAS(c.path)
			require.Error(t, err)
			require.Equal(t, c.class, errs.ClassOf(err), "%v", err)
			for _, w := range c.words {
				require.ErrorContains(t, err, w)
			}
			require.Equal(t, "0", fake("handles"))
			require.Empty(t, d.MemUsage())
		})
	}
	// A precision that is not there is refused; others work. The trial makes four products in each.
	fake("reset,libcuda=" + lib + ",fail=cublasGemmEx:5:15")
	b, err := d.OpenBLAS(path)
	require.NoError(t, err)
	s, err := d.NewStream(cuda.StreamOptions{Name: "s"})
	require.NoError(t, err)
	m, err := d.Alloc(cuda.MemDevice, 4096, "test")
	require.NoError(t, err)
	p := cuda.BLASProduct{M: 2, N: 2, K: 2, A: m.Ptr(), B: m.Ptr(), C: m.Ptr(), LDA: 2, LDB: 2,
		LDC: 2, Precision: cuda.TF32}
	err = b.Multiply(s, &p)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "option precision fp32")
	p.Precision = cuda.BF16
	require.NoError(t, b.Multiply(s, &p))
	// An error of the library in the middle leaves the stream usable.
	fake("fail=cublasGemmEx:1:13")
	err = b.Multiply(s, &p)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, "EXECUTION_FAILED (13)")
	require.NoError(t, b.Multiply(s, &p))
	require.NoError(t, s.Synchronize(t.Context()))
	// A lost context says so, and everything can still be closed.
	fakecuda.Control(t, lib, "lose=719")
	err = b.Multiply(s, &p)
	var lost *driver.LostError
	require.ErrorAs(t, err, &lost)
	require.NoError(t, b.Close())
	_ = s.Close()
	require.NoError(t, m.Free())
	require.ErrorAs(t, d.Close(), &lost)
	require.Empty(t, fake("violations"))
	fakecuda.Control(t, lib, "reset")
}
