package conformance

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
)

// The suite's kernels. A backend that is not the host device brings its own under the same
// names: the parameter blocks below are their ABI, and the functions say what they compute.
// Words that the CPU and the kernel share are 64 bits and lie in pinned memory.

// affineParams: x = x*Mul + Add for N words at Dst, spread over the blocks. Launches of it do
// not commute, so the result shows their order.
type affineParams struct {
	Dst cuda.DevicePtr
	N   int64
	Mul uint64
	Add uint64
}

// AffineParams is the parameter block of kernel conf_affine, for tests of a backend's own.
type AffineParams = affineParams

// Affine makes one: dst[i] = dst[i]*mul + add for n words.
func Affine(dst cuda.DevicePtr, n int64, mul, add uint64) AffineParams {
	return affineParams{dst, n, mul, add}
}

// moveParams: Dst[i] = Src[i] + Add for N words.
type moveParams struct {
	Dst, Src cuda.DevicePtr
	N        int64
	Add      uint64
}

// gridParams: block b writes Index, Blocks, Threads to Dst[4b..] and counts its runs in
// Dst[4b+3].
type gridParams struct {
	Dst cuda.DevicePtr
}

// gateParams: block b adds 1 to *Arrived and waits until *Gate > b*Step, or for LimitNS. A block
// whose limit passes writes 1 to *Late. With Yield it lets others run while it waits. Last, it
// adds 1 to *Left.
type gateParams struct {
	Gate, Arrived, Left, Late cuda.DevicePtr
	Step                      uint64
	LimitNS                   int64
	Yield                     uint32
	_                         uint32
}

// GateParams is the parameter block of kernel conf_gate, for measurements.
type GateParams = gateParams

// countParams: adds 1 to *Now, raises *Max to it, waits HoldNS, subtracts it again.
type countParams struct {
	Now, Max cuda.DevicePtr
	HoldNS   int64
}

// failParams: block At fails; all blocks add 1 to *Ran first.
type failParams struct {
	Ran cuda.DevicePtr
	At  int64
}

type packInner struct {
	A uint8
	B uint32
	C [3]int16
}

// packParams has every kind of field. Block 0 writes each, widened to 64 bits, to Dst in the
// order of the declaration.
type packParams struct {
	Dst cuda.DevicePtr
	U8  uint8
	I8  int8
	U16 uint16
	I16 int16
	B   bool
	U32 uint32
	I32 int32
	F32 float32
	U64 uint64
	I64 int64
	F64 float64
	In  packInner
	Arr [5]uint64
	End uint8
}

// bigParams is all of the 4096 bytes that CUDA takes, less the 16 that a driver backend adds to
// each launch (hx_launch in cuda/kernels/device.h). Dst[0] = sum of (i+1)*V[i].
type bigParams struct {
	Dst cuda.DevicePtr
	V   [509]uint64
}

// clockParams: block 0 writes to Dst[1..] the values that the device's clock takes one after the
// other, in nanoseconds, N of them or as many as it sees in so many looks, and to Dst[0] how many.
type clockParams struct {
	Dst   cuda.DevicePtr
	N     int64
	Looks int64
}

// ClockParams is the parameter block of kernel conf_clock, for measurements.
type ClockParams = clockParams

// priceParams: a thing N times over, by one thread of the grid. PriceRead is reads of 16 bytes by
// all threads, which make lines of Width bytes (32, 64 or 128) out of Lines of them, a
// power of two, and N a multiple of 8. Block b writes to Dst[2b] and Dst[2b+1] when it began and
// ended in nanoseconds; behind these each thread writes what it read last, or the sum of the first
// words of its reads.
type priceParams struct {
	Dst   cuda.DevicePtr
	Src   cuda.DevicePtr
	N     int64
	Kind  uint32
	Width uint32
	Lines uint32
	_     uint32
}

// Kinds of PriceParams.
const (
	PriceTrip   = iota // a load of the place that the load before found, a uint64
	PriceAtomic        // an addition of 1 that waits for the one before
	PriceFence         // a store, and a fence of system scope
	PriceRing          // a store as to a doorbell, 4 bytes
	PriceRead
)

// PriceParams is the parameter block of kernel conf_price, for measurements.
type PriceParams = priceParams

// The layouts are those of a C++ compiler for the same declarations.
const (
	_ = -(unsafe.Sizeof(affineParams{}) ^ 32)
	_ = -(unsafe.Sizeof(gateParams{}) ^ 56)
	_ = -(unsafe.Offsetof(packParams{}.U32) ^ 16)
	_ = -(unsafe.Offsetof(packParams{}.U64) ^ 32)
	_ = -(unsafe.Offsetof(packParams{}.In) ^ 56)
	_ = -(unsafe.Offsetof(packParams{}.Arr) ^ 72)
	_ = -(unsafe.Sizeof(packParams{}) ^ 120)
	_ = -(unsafe.Sizeof(bigParams{}) ^ 4080)
	_ = -(unsafe.Sizeof(clockParams{}) ^ 24)
	_ = -(unsafe.Sizeof(priceParams{}) ^ 40)
)

var errConf = errors.New("conf_fail was told to fail")

func word(p cuda.DevicePtr) *uint64 { return &cuda.View[uint64](p, 1)[0] }

func init() {
	cuda.RegisterHost("conf_affine", func(b *cuda.Block, p *affineParams) error {
		v := cuda.View[uint64](p.Dst, p.N)
		lo, hi := b.Range(p.N)
		for i := lo; i < hi; i++ {
			v[i] = v[i]*p.Mul + p.Add
		}
		return nil
	})
	cuda.RegisterHost("conf_move", func(b *cuda.Block, p *moveParams) error {
		dst, src := cuda.View[uint64](p.Dst, p.N), cuda.View[uint64](p.Src, p.N)
		lo, hi := b.Range(p.N)
		for i := lo; i < hi; i++ {
			dst[i] = src[i] + p.Add
		}
		return nil
	})
	cuda.RegisterHost("conf_grid", func(b *cuda.Block, p *gridParams) error {
		v := cuda.View[uint64](p.Dst, 4*int64(b.Blocks))[4*b.Index:]
		v[0], v[1], v[2] = uint64(b.Index), uint64(b.Blocks), uint64(b.Threads)
		atomic.AddUint64(&v[3], 1)
		return nil
	})
	cuda.RegisterHost("conf_gate", func(b *cuda.Block, p *gateParams) error {
		gate := word(p.Gate)
		atomic.AddUint64(word(p.Arrived), 1)
		end := time.Now().Add(time.Duration(p.LimitNS))
		for atomic.LoadUint64(gate) <= uint64(b.Index)*p.Step {
			if time.Now().After(end) {
				atomic.StoreUint64(word(p.Late), 1)
				break
			}
			if p.Yield != 0 {
				b.Yield()
			}
		}
		atomic.AddUint64(word(p.Left), 1)
		return nil
	})
	cuda.RegisterHost("conf_count", func(_ *cuda.Block, p *countParams) error {
		n, top := atomic.AddUint64(word(p.Now), 1), word(p.Max)
		for {
			old := atomic.LoadUint64(top)
			if old >= n || atomic.CompareAndSwapUint64(top, old, n) {
				break
			}
		}
		for end := time.Now().Add(time.Duration(p.HoldNS)); time.Now().Before(end); {
			continue
		}
		atomic.AddUint64(word(p.Now), ^uint64(0))
		return nil
	})
	cuda.RegisterHost("conf_fail", func(b *cuda.Block, p *failParams) error {
		atomic.AddUint64(word(p.Ran), 1)
		if int64(b.Index) == p.At {
			return fmt.Errorf("block %d: %w", b.Index, errConf)
		}
		return nil
	})
	cuda.RegisterHost("conf_pack", func(b *cuda.Block, p *packParams) error {
		if b.Index == 0 {
			copy(cuda.View[uint64](p.Dst, packWords), packed(p))
		}
		return nil
	})
	cuda.RegisterHost("conf_big", func(b *cuda.Block, p *bigParams) error {
		if b.Index != 0 {
			return nil
		}
		var sum uint64
		for i, v := range p.V {
			sum += uint64(i+1) * v
		}
		*word(p.Dst) = sum
		return nil
	})
	cuda.RegisterHost("conf_clock", func(b *cuda.Block, p *clockParams) error {
		if b.Index != 0 {
			return nil
		}
		begin := time.Now()
		d, n, last := cuda.View[uint64](p.Dst, 1+p.N), int64(0), time.Duration(0)
		for look := int64(0); look < p.Looks && n < p.N; look++ {
			t := time.Since(begin)
			if t == last {
				continue
			}
			last = t
			n++
			d[n] = uint64(begin.UnixNano()) + uint64(t)
		}
		d[0] = uint64(n)
		return nil
	})
	cuda.RegisterHost("conf_price", priceKernel)
}

func priceKernel(b *cuda.Block, p *priceParams) error {
	read := p.Kind == PriceRead
	if p.Kind > PriceRead || read && p.Width != 32 && p.Width != 64 && p.Width != 128 {
		return fmt.Errorf("conf_price: kind %d, lines of %d bytes", p.Kind, p.Width)
	}
	begin := time.Now()
	first := 2 * b.Blocks
	d := cuda.View[uint64](p.Dst, int64(first+b.Blocks*b.Threads))
	for t := b.Index * b.Threads; t < (b.Index+1)*b.Threads; t++ {
		d[first+t] = 0
		switch {
		case read:
			d[first+t] = priceReads(p, t, b.Blocks*b.Threads/32)
		case t == 0:
			d[first] = priceSteps(p)
		}
	}
	d[2*b.Index] = uint64(begin.UnixNano())
	d[2*b.Index+1] = uint64(begin.UnixNano()) + uint64(time.Since(begin))
	return nil
}

func priceSteps(p *priceParams) (v uint64) {
	for i := range p.N {
		switch p.Kind {
		case PriceTrip:
			v = atomic.LoadUint64(word(p.Src + cuda.DevicePtr(8*v)))
		case PriceAtomic:
			v = atomic.AddUint64(word(p.Src), 1) - 1
		case PriceFence:
			v = uint64(i) + 1
			atomic.StoreUint64(word(p.Src), v)
		default:
			v = uint64(i) + 1
			atomic.StoreUint32(&cuda.View[uint32](p.Src, 1)[0], uint32(v))
		}
	}
	return v
}

func priceReads(p *priceParams, thread, warps int) (sum uint64) {
	words := cuda.View[uint32](p.Src, int64(p.Lines)*int64(p.Width)/4)
	per := p.Width / 16
	lane, lines := uint32(thread%32), 32/per
	for i := range uint32(p.N) {
		line := uint32(thread/32)*lines + lane/per + i*uint32(warps)*lines
		line = line * 0x9e3779b1 & (p.Lines - 1)
		sum += uint64(words[line*p.Width/4+lane%per*4])
	}
	return sum
}

const packWords = 22

// packed returns what conf_pack writes.
func packed(p *packParams) []uint64 {
	flag := uint64(0)
	if p.B {
		flag = 1
	}
	out := []uint64{
		uint64(p.Dst), uint64(p.U8), uint64(p.I8), uint64(p.U16), uint64(p.I16), flag,
		uint64(p.U32), uint64(p.I32), uint64(math.Float32bits(p.F32)), p.U64, uint64(p.I64),
		math.Float64bits(p.F64),
		uint64(p.In.A), uint64(p.In.B), uint64(p.In.C[0]), uint64(p.In.C[2]),
	}
	out = append(out, p.Arr[:]...)
	return append(out, uint64(p.End))
}
