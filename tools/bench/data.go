package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/hostcpu"
	"helios/internal/philox"
)

// transferTimeout bounds transfers of data for checks.
const transferTimeout = 5 * time.Minute

// array is memory of a device and what the CPU sees of it: on a GPU a copy in pinned memory.
type array struct {
	v     []float32
	p     cuda.DevicePtr
	stage cuda.DevicePtr // of v; p where they are one
}

// view is the CPU's side of a as other elements of 4 bytes.
func view32[T uint32 | int32](a array) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(a.v))), len(a.v))
}

func view64(a array) []int64 {
	return unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(a.v))), len(a.v)/2)
}

// buffers allocates for a case; close frees all.
type buffers struct {
	dev cuda.Device
	all []cuda.Buffer
	err error
}

func (b *buffers) alloc(kind cuda.MemKind, bytes int64) cuda.DevicePtr {
	if b.err != nil {
		return 0
	}
	x, err := b.dev.Alloc(kind, bytes, "bench")
	if err != nil {
		b.err = err
		return 0
	}
	b.all = append(b.all, x)
	return x.Ptr()
}

// floats allocates n float32.
func (b *buffers) floats(n int64) array {
	a := array{p: b.alloc(cuda.MemDevice, n*4)}
	if a.stage = a.p; !onHost(b.dev) {
		a.stage = b.alloc(cuda.MemPinned, n*4)
	}
	if b.err != nil {
		return array{v: make([]float32, n)}
	}
	if a.stage == a.p {
		a.v = cuda.View[float32](a.p, n)
	} else if mem := b.all[len(b.all)-1].Bytes(); n > 0 {
		a.v = unsafe.Slice((*float32)(unsafe.Pointer(&mem[0])), n)
	}
	return a
}

// scratch allocates memory that only kernels see; 0 bytes need none.
func (b *buffers) scratch(n int64) cuda.DevicePtr {
	if n == 0 {
		return 0
	}
	return b.alloc(cuda.MemDevice, n)
}

// move copies arrays between the CPU's side and the device's, where they are not one, and waits.
func (b *buffers) move(ctx context.Context, s cuda.Stream, toDevice bool, list ...array) error {
	for _, a := range list {
		if a.stage == a.p || len(a.v) == 0 {
			continue
		}
		dst, src := a.stage, a.p
		if toDevice {
			dst, src = src, dst
		}
		if err := s.Copy(dst, src, int64(len(a.v))*4); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	return s.Synchronize(ctx)
}

// upload is move to the device, by a stream of its own.
func (b *buffers) upload(list ...array) error {
	if b.err != nil || onHost(b.dev) {
		return b.err
	}
	return b.do(func(s cuda.Stream) error {
		return b.move(context.Background(), s, true, list...)
	})
}

// do runs something on a stream of its own and waits.
func (b *buffers) do(enqueue func(cuda.Stream) error) error {
	s, err := b.dev.NewStream(cuda.StreamOptions{Name: "bench"})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	if err = enqueue(s); err == nil {
		err = s.Synchronize(ctx)
	}
	return errors.Join(err, s.Close())
}

// again spoils results, does the work once more and brings the results to the CPU.
func (b *buffers) again(ctx context.Context, s cuda.Stream, run *kernelRun,
	results ...array) error {
	for _, a := range results {
		if err := s.Fill(a.p, 0xFF, int64(len(a.v))*4); err != nil { // NaN
			return err
		}
	}
	if err := s.Synchronize(ctx); err != nil { // the CPU's rival does not go through the stream
		return err
	}
	if err := run.Launch(s); err != nil {
		return err
	}
	if run.Rival != nil {
		if err := run.Rival(s); err != nil {
			return err
		}
	}
	return b.move(ctx, s, false, results...)
}

// read copies bytes of the device to memory of the caller's.
func (b *buffers) read(ctx context.Context, s cuda.Stream, src cuda.DevicePtr, n int64) (_ []byte,
	err error) {
	stage, err := b.dev.Alloc(cuda.MemPinned, n, "bench")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stage.Free()) }()
	if err := s.Copy(stage.Ptr(), src, n); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return nil, err
	}
	return slices.Clone(stage.Bytes()[:n]), nil
}

func (b *buffers) close() (err error) {
	for _, x := range b.all {
		err = errors.Join(err, x.Free())
	}
	b.all = nil
	return err
}

// fill draws uniform values of [-1, 1).
func fill(v []float32, stream uint32) {
	key := philox.Key(benchSeed, philox.StreamBench)
	parts := min((len(v)+1<<20-1)>>20, hostcpu.Count())
	var wg sync.WaitGroup
	for part := range parts {
		lo, hi := len(v)*part/parts&^3, len(v)*(part+1)/parts&^3
		if part == parts-1 {
			hi = len(v)
		}
		wg.Go(func() {
			for i := lo; i < hi; i += 4 {
				w := philox.Block(key, [4]uint32{uint32(i / 4), uint32(i / 4 >> 32), stream, 0xc0})
				for j := range v[i:min(i+4, hi)] {
					v[i+j] = 2*philox.Float32(w[j]) - 1
				}
			}
		})
	}
	wg.Wait()
}
