package gnn

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/testing/difftest"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// gemmSide is a device with memory for the operands of one product. Both sides of a comparison have
// the same numbers at the same offsets.
type gemmSide struct {
	on    *launcher
	st    cuda.Stream
	arena cuda.Buffer
	f     []float32
}

const (
	gemmArena   = 1 << 20 // floats
	gemmPartsAt = gemmArena / 2
)

func newGemmSide(t *testing.T, dev cuda.Device) *gemmSide {
	t.Helper()
	s := &gemmSide{on: newLauncher(dev)}
	var err error
	if s.arena, err = dev.Alloc(cuda.MemPinned, gemmArena*4, "matrices"); err != nil {
		t.Fatal(err)
	}
	if s.st, err = dev.NewStream(cuda.StreamOptions{Name: "gemm"}); err != nil {
		t.Fatal(err)
	}
	s.f = unsafe.Slice((*float32)(unsafe.Pointer(&s.arena.Bytes()[0])), gemmArena)
	t.Cleanup(func() {
		if err := errors.Join(s.st.Close(), s.arena.Free(), dev.Close()); err != nil &&
			!t.Failed() {
			t.Error(err)
		}
	})
	return s
}

// gemmSides are the host device and the fake libcuda's (or, with HELIOS_GPU=1, the GPU's).
func gemmSides(t *testing.T) (host, gpu *gemmSide) {
	t.Helper()
	d, err := driver.Open(driver.Options{Library: difftest.Library(t)})
	if err != nil {
		t.Fatal(err)
	}
	h, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	if err != nil {
		t.Fatal(err)
	}
	return newGemmSide(t, h), newGemmSide(t, d)
}

// gemmShape is a product's shape; pads are floats between rows, at is where A begins in its 16
// bytes.
type gemmShape struct {
	op               gemmOp
	m, n, k, k2      int64
	pada, padb, padc int64
	skip             int64
	bias             bool
	flags            uint32
}

func (c gemmShape) String() string {
	return fmt.Sprintf("%s %dx%dx%d+%d pads %d,%d,%d at %d bias %v flags %d", c.op, c.m, c.n, c.k,
		c.k2, c.pada, c.padb, c.padc, c.skip, c.bias, c.flags)
}

// lay fills the arenas with the same random operands, NaN everywhere else, and returns the
// products, equal but for their addresses.
func (c gemmShape) lay(r *rand.Rand, sides ...*gemmSide) []gemmParams {
	f := sides[0].f
	nan := float32(math.NaN())
	next := int64(0)
	for i := range f[:min(gemmPartsAt, 1<<18)] {
		f[i] = nan
	}
	matrix := func(rows, cols, pad, skip int64) (int64, int64) {
		next += skip
		begin, ld := next, cols+pad
		for i := range rows {
			for j := range cols {
				v := float32(r.NormFloat64())
				switch r.IntN(40) {
				case 0:
					v = 0
				case 1:
					v = float32(math.Copysign(0, -1))
				}
				f[begin+i*ld+j] = v
			}
		}
		next = (begin + rows*ld + 8 + 3) &^ 3
		return begin, ld
	}
	p := gemmParams{M: c.m, N: c.n, K: c.k, K2: c.k2, Flags: c.flags}
	p.Drop = dropout{Key: philox.Key(5, philox.StreamDropout), Epoch: 3, Batch: 9, Layer: 1, P: 0.3,
		Scale: 1 / (1 - float32(0.3))}
	var a, b, a2, b2, cc, bias int64
	left := func(k int64) (int64, int64) {
		if c.op == opTN {
			return matrix(k, c.m, c.pada, c.skip)
		}
		return matrix(c.m, k, c.pada, c.skip)
	}
	right := func(k int64) (int64, int64) {
		if c.op == opNT {
			return matrix(c.n, k, c.padb, 0)
		}
		return matrix(k, c.n, c.padb, 0)
	}
	a, p.LDA = left(c.k)
	b, p.LDB = right(c.k)
	if c.k2 > 0 {
		a2, p.LDA2 = left(c.k2)
		b2, p.LDB2 = right(c.k2)
	}
	bias, _ = matrix(1, c.n, 0, 0)
	cc, p.LDC = matrix(c.m, c.n, c.padc, 0)
	if next > 1<<18 {
		panic("the arena is too small for " + c.String())
	}
	var out []gemmParams
	for _, s := range sides {
		copy(s.f[:1<<18], f[:1<<18])
		q, ptr := p, func(floats int64) cuda.DevicePtr {
			return s.arena.Ptr() + cuda.DevicePtr(floats*4)
		}
		q.A, q.B, q.C = ptr(a), ptr(b), ptr(cc)
		if c.k2 > 0 {
			q.A2, q.B2 = ptr(a2), ptr(b2)
		}
		if c.bias {
			q.Bias = ptr(bias)
		}
		out = append(out, q)
	}
	return out
}

func (s *gemmSide) wait(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.st.Synchronize(ctx); err != nil {
		t.Fatal(err)
	}
}

// host runs a product on the host device.
func (s *gemmSide) host(t *testing.T, op gemmOp, p gemmParams) {
	t.Helper()
	k, err := s.on.dev.Kernel(op.String())
	if err != nil {
		t.Fatal(err)
	}
	p.MB, p.NB = gemmTiles(p.M, p.N, p.K+p.K2, 2)
	blocks := (p.M + p.MB - 1) / p.MB * ((p.N + p.NB - 1) / p.NB)
	if err := cuda.Launch(s.st, k, cuda.LaunchConfig{Blocks: int(blocks), Threads: 256},
		p); err != nil {
		t.Fatal(err)
	}
	s.wait(t)
}

// gpu runs a product as the model does.
func (s *gemmSide) gpu(t *testing.T, op gemmOp, p *gemmParams, prec cuda.Precision) {
	t.Helper()
	if n := gemmScratch(op, p, prec); n > (gemmArena-gemmPartsAt)*4 {
		t.Fatalf("%d bytes for parts", n)
	}
	if err := s.on.gemmGPU(&stepSink{stream: s.st}, op, p, prec,
		s.arena.Ptr()+gemmPartsAt*4); err != nil {
		t.Fatal(err)
	}
	s.wait(t)
}

// variant launches one kernel by name with a grid and a block of its own.
func (s *gemmSide) variant(t *testing.T, op gemmOp, p *gemmParams, prec cuda.Precision,
	v gemmVariant, cfg cuda.LaunchConfig) {
	t.Helper()
	k, err := s.on.kernel(gemmName(op, false, prec, v))
	if err == nil {
		err = cuda.Launch(s.st, k, cfg, *p)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.wait(t)
}

// sameBits demands that both arenas are the same, what nobody may write included.
func sameBits(t *testing.T, what string, host, gpu *gemmSide) {
	t.Helper()
	for i, v := range host.f[:1<<18] {
		if g := gpu.f[i]; math.Float32bits(v) != math.Float32bits(g) && (v == v || g == g) {
			t.Fatalf("%s: float %d of the arena is %v (%08x) on the host, %v (%08x) on the GPU",
				what, i, v, math.Float32bits(v), g, math.Float32bits(g))
		}
	}
}

// roundFactor returns what a tensor core sees of v.
func roundFactor(v float32, prec cuda.Precision) float64 {
	b := math.Float32bits(v)
	switch prec {
	case cuda.TF32:
		b = (b + 0x1000) &^ 0x1fff
	case cuda.BF16:
		b = (b + 0x7fff + b>>16&1) &^ 0xffff
	}
	return float64(math.Float32frombits(b))
}

// near compares C with the product in float64 of the rounded factors: each of at most steps
// additions may be off by 2^-22 of the sum of what is added, more than any order or rounding of a
// tensor core takes.
func (c gemmShape) near(t *testing.T, s *gemmSide, p *gemmParams, prec cuda.Precision, steps int64,
	unit float64) {
	t.Helper()
	value := func(p cuda.DevicePtr, i int64) float32 { return s.f[int64(p-s.arena.Ptr())/4+i] }
	for i := range c.m {
		for j := range c.n {
			sum, size := 0.0, 0.0
			for term := range 2 {
				k, pa, pb, lda, ldb := p.K, p.A, p.B, p.LDA, p.LDB
				if term == 1 {
					k, pa, pb, lda, ldb = p.K2, p.A2, p.B2, p.LDA2, p.LDB2
				}
				for x := range k {
					ia, ib := i*lda+x, x*ldb+j
					if c.op == opTN {
						ia = x*lda + i
					}
					if c.op == opNT {
						ib = j*ldb + x
					}
					v := roundFactor(value(pa, ia), prec) * roundFactor(value(pb, ib), prec)
					sum, size = sum+v, size+math.Abs(v)
				}
			}
			tol := float64(steps) * unit * size
			if c.bias {
				b := float64(value(p.Bias, j))
				sum, tol = sum+b, tol+math.Abs(sum+b)*0x1p-24
			}
			if c.flags&gemmReLU != 0 {
				sum = max(sum, 0)
			}
			if c.flags&gemmDropout != 0 {
				w := philox.Block(p.Drop.Key, [4]uint32{p.Drop.Layer<<24 | uint32(j/4), uint32(i),
					p.Drop.Epoch, p.Drop.Batch})
				sum, tol = sum*float64(p.Drop.Scale), tol*float64(p.Drop.Scale)+
					math.Abs(sum)*0x1p-22
				if philox.Float32(w[j&3]) < p.Drop.P {
					sum, tol = 0, 0
				}
			}
			if got := float64(value(p.C, i*p.LDC+j)); !(math.Abs(got-sum) <= tol) {
				t.Fatalf("%s in %s: C[%d,%d] is %v, want %v within %v", c, prec, i, j, got,
					sum, tol)
			}
		}
	}
	for i := range c.m { // what lies between rows
		for j := c.n; j < p.LDC && i+1 < c.m; j++ {
			if v := value(p.C, i*p.LDC+j); v == v {
				t.Fatalf("%s in %s: wrote %v behind row %d", c, prec, v, i)
			}
		}
	}
}

const gemmAll = gemmReLU | gemmDropout

// gemmShapes have edges in every direction, rows of every alignment, one term and two.
func gemmShapes(short bool) []gemmShape {
	cases := []gemmShape{
		{op: opNN, m: 130, n: 70, k: 36, k2: 20, bias: true, flags: gemmAll},
		{op: opNN, m: 33, n: 47, k: 50, k2: 7, padc: 1, bias: true, flags: gemmReLU},
		{op: opNN, m: 5, n: 1, k: 1, flags: gemmDropout},
		{op: opNN, m: 3, n: 6, k: 0, bias: true},
		{op: opNN, m: 9, n: 10, k: 0, k2: 17, padb: 3},
		{op: opNT, m: 70, n: 130, k: 47, padc: 2},
		{op: opNT, m: 33, n: 36, k: 32, k2: 18, skip: 2, bias: true, flags: gemmAll},
		{op: opTN, m: 130, n: 66, k: 35, padb: 2},
		{op: opTN, m: 36, n: 47, k: 33, k2: 16, skip: 1, padc: 1},
		{op: opTN, m: 7, n: 5, k: 0},
	}
	if short {
		return cases
	}
	return append(cases,
		gemmShape{op: opNN, m: 257, n: 129, k: 17, pada: 1, padb: 1, flags: gemmReLU},
		gemmShape{op: opNN, m: 64, n: 602, k: 16, skip: 3},
		gemmShape{op: opNT, m: 129, n: 64, k: 100, pada: 4, bias: true},
		gemmShape{op: opNT, m: 1, n: 300, k: 5},
		gemmShape{op: opTN, m: 602, n: 16, k: 40, pada: 2},
		gemmShape{op: opTN, m: 1, n: 1, k: 300},
	)
}

// Every fp32 kernel has the host's bits, chosen by the model or launched with any grid and block.
func TestGemmGPUIsTheHosts(t *testing.T) {
	host, gpu := gemmSides(t)
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range gemmShapes(wide.Lean()) {
		p := c.lay(r, host, gpu)
		host.host(t, c.op, p[0])
		gpu.gpu(t, c.op, &p[1], cuda.FP32)
		sameBits(t, c.String(), host, gpu)
		for _, v := range tilesFP32 {
			cfg := cuda.LaunchConfig{Blocks: 1 + r.IntN(4), Threads: 32 * (1 + r.IntN(8))}
			for i := range c.m {
				first := int64(p[1].C-gpu.arena.Ptr())/4 + i*p[1].LDC
				copy(gpu.f[first:first+c.n], make([]float32, c.n))
			}
			gpu.variant(t, c.op, &p[1], cuda.FP32, v, cfg)
			sameBits(t, fmt.Sprintf("%s, %s with %+v", c, gemmName(c.op, false, cuda.FP32, v), cfg),
				host, gpu)
		}
	}
}

// The tensor-core kernels give the product of rounded factors.
func TestGemmGPUTensorCores(t *testing.T) {
	_, gpu := gemmSides(t)
	r := rand.New(rand.NewPCG(3, 4))
	for _, prec := range []cuda.Precision{cuda.TF32, cuda.BF16} {
		for _, c := range gemmShapes(true) {
			p := c.lay(r, gpu)
			gpu.gpu(t, c.op, &p[0], prec)
			c.near(t, gpu, &p[0], prec, c.k+c.k2+1, 0x1p-22)
			for _, v := range tilesTensor {
				cfg := cuda.LaunchConfig{Blocks: 1 + r.IntN(4), Threads: 32 * (1 + r.IntN(8))}
				gpu.variant(t, c.op, &p[0], prec, v, cfg)
				c.near(t, gpu, &p[0], prec, c.k+c.k2+1, 0x1p-22)
			}
		}
	}
}

// With stores that wait for a barrier, and copies that wait for theirs (the shim's Pipe always
// makes them as late as it may), a missing one shows.
func TestGemmGPUWithHeldStores(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("knobs of the fake libcuda")
	}
	host, gpu := gemmSides(t)
	fakecuda.Control(t, difftest.Library(t), "seed=3,store_buffer=16,jitter=1")
	t.Cleanup(func() { fakecuda.Control(t, difftest.Library(t), "seed=1,store_buffer=0,jitter=0") })
	r := rand.New(rand.NewPCG(7, 8))
	for _, c := range []gemmShape{
		{op: opNN, m: 60, n: 40, k: 50, k2: 33, bias: true, flags: gemmAll},
		{op: opTN, m: 40, n: 60, k: 600},
	} {
		for _, prec := range []cuda.Precision{cuda.FP32, cuda.TF32, cuda.BF16} {
			p := c.lay(r, host, gpu)
			gpu.gpu(t, c.op, &p[1], prec)
			c.near(t, gpu, &p[1], prec, c.k+c.k2+1, 0x1p-22)
		}
	}
}

// Products that the kernels' 32-bit indices cannot name are refused.
func TestGemmGPULimit(t *testing.T) {
	err := (&launcher{}).gemmGPU(nil, opNN, &gemmParams{M: 1 << 31, N: 2, K: 3}, cuda.TF32, 0)
	if errs.ClassOf(err) != errs.Usage {
		t.Errorf("got %v", err)
	}
}

// Long sums over K are split by shape alone, to the stated tolerance, and equal to the bit where
// one part is enough.
func TestGemmGPUSplit(t *testing.T) {
	host, gpu := gemmSides(t)
	r := rand.New(rand.NewPCG(5, 6))
	for _, c := range []gemmShape{
		{op: opTN, m: 20, n: 10, k: 512, bias: true},
		{op: opTN, m: 20, n: 10, k: 513},
		{op: opTN, m: 66, n: 5, k: 1100, padc: 3, bias: true, flags: gemmAll},
		{op: opTN, m: 9, n: 70, k: 1030},
	} {
		p := c.lay(r, host, gpu)
		parts := int64(1)
		if _, chunk := gemmPick(c.op, &p[1], cuda.FP32); chunk != 0 {
			parts = (c.k + chunk - 1) / chunk
		}
		if (parts > 1) != (c.k > gemmSplitLeast) {
			t.Fatalf("%s: %d parts", c, parts)
		}
		gpu.gpu(t, c.op, &p[1], cuda.FP32)
		if parts == 1 {
			host.host(t, c.op, p[0])
			sameBits(t, c.String(), host, gpu)
			continue
		}
		c.near(t, gpu, &p[1], cuda.FP32, c.k/parts+parts, 0x1p-24)
		for _, prec := range []cuda.Precision{cuda.TF32, cuda.BF16} {
			gpu.gpu(t, c.op, &p[1], prec)
			c.near(t, gpu, &p[1], prec, c.k, 0x1p-22)
		}
		// The variants that no shape of this size would get, or none at all.
		for _, prec := range []cuda.Precision{cuda.FP32, cuda.TF32, cuda.BF16} {
			for _, v := range gemmVariantsOf(prec) {
				const chunk = 288
				if err := gpu.on.gemmVariant(&stepSink{stream: gpu.st}, c.op, &p[1], prec,
					gpu.arena.Ptr()+gemmPartsAt*4, v, chunk); err != nil {
					t.Fatal(err)
				}
				gpu.wait(t)
				c.near(t, gpu, &p[1], prec, c.k, 0x1p-22)
			}
		}
	}
}

// The shape alone decides tiles, parts and scratch.
func TestGemmPick(t *testing.T) {
	for _, c := range []struct {
		op      gemmOp
		m, n, k int64
		prec    cuda.Precision
		suffix  string
		parts   int64
	}{
		{opNN, 1 << 20, 256, 1024, cuda.FP32, "", 1},
		{opNN, 1 << 20, 47, 256, cuda.TF32, "_128x64", 1},
		{opNN, 1000, 256, 256, cuda.FP32, "_64x64", 1},
		{opNN, 1000, 256, 256, cuda.BF16, "_128x64", 1},
		{opTN, 1024, 256, 88000, cuda.FP32, "", 33},
		{opTN, 256, 47, 8000, cuda.TF32, "_128x64", 16},
		{opTN, 1024, 256, 512, cuda.FP32, "_64x64", 1},
		{opTN, 8192, 8192, 1 << 20, cuda.BF16, "", 1},
	} {
		p := gemmParams{M: c.m, N: c.n, K: c.k}
		v, chunk := gemmPick(c.op, &p, c.prec)
		parts := int64(1)
		if chunk != 0 {
			parts = (c.k + chunk - 1) / chunk
		}
		if v.suffix != c.suffix || parts != c.parts {
			t.Errorf("%s %dx%dx%d in %s: tile %q and %d parts, want %q and %d", c.op, c.m, c.n, c.k,
				c.prec, v.suffix, parts, c.suffix, c.parts)
		}
		want := int64(0)
		if parts > 1 {
			want = parts * c.m * ((c.n + 3) &^ 3) * 4
		}
		if n := gemmScratch(c.op, &p, c.prec); n != want {
			t.Errorf("%s %dx%dx%d: scratch of %d bytes, want %d", c.op, c.m, c.n, c.k, n, want)
		}
	}
}
