package gnn

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/philox"
)

// Param is one parameter tensor with Adam's two moments, float32, row-major. The buffers are
// parts of one allocation of the model: freeing them does nothing.
type Param struct {
	Name        string
	Rows, Cols  int
	Value, M, V cuda.Buffer
}

// parameters hold what a model learns, with what an optimiser keeps for each: the four of them
// stand behind each other in one buffer, each of n floats.
type parameters struct {
	dev      cuda.Device
	list     []Param
	n        int64       // floats of all parameters with padding
	learns   int64       // of those, from the first on, the ones that Adam changes
	store    cuda.Buffer // values, gradients, m, v: 4 × n float32; then see clip
	squares  cuda.Buffer // pinned float64[marks]: of a step's gradient, the sum of its squares
	adamStep int64       // steps of the optimiser done
}

// tensors collects the parameters of a model while it is made.
type tensors struct {
	list []tensor
	n    int64 // floats with padding
}

type tensor struct {
	name               string
	rows, cols, offset int64
	limit              float64 // initial values are uniform in ±limit; 0: all are fill
	fill               float32
}

// add appends a tensor and returns its place in floats.
func (t *tensors) add(name string, rows, cols int64, limit float64) int64 {
	offset := t.n
	t.list = append(t.list,
		tensor{name: name, rows: rows, cols: cols, offset: offset, limit: limit})
	t.n += align(rows * cols)
	return offset
}

// addFilled is add with initial values that are all the same.
func (t *tensors) addFilled(name string, rows, cols int64, fill float32) int64 {
	offset := t.add(name, rows, cols, 0)
	t.list[len(t.list)-1].fill = fill
	return offset
}

// alignFloats starts every tensor on a 256-byte boundary.
const alignFloats = 64

func align(n int64) int64 { return (n + alignFloats - 1) &^ (alignFloats - 1) }

// glorot is the limit of the uniform distribution of Glorot and Bengio (AISTATS 2010).
func glorot(in, out int64) float64 { return math.Sqrt(6 / float64(in+out)) }

// allocate makes the tensors and their initial values, drawn by Philox from seed. Gradients change
// the first learns floats of them.
func (p *parameters) allocate(all *tensors, learns int64, seed uint64) error {
	p.n, p.learns = all.n, learns
	var err error
	if p.store, err = p.dev.Alloc(cuda.MemDevice, 4*4*p.n+8*(squareUnits(p.learns)+1),
		"model parameters"); err != nil {
		return err
	}
	if p.squares, err = p.dev.Alloc(cuda.MemPinned, 8*marks, "norm of a gradient"); err != nil {
		return err
	}
	values := make([]float32, p.n)
	key := philox.Key(seed, philox.StreamInit)
	for i, t := range all.list {
		size := t.rows * t.cols
		p.list = append(p.list, Param{t.name, int(t.rows), int(t.cols), p.part(t.offset, size),
			p.part(2*p.n+t.offset, size), p.part(3*p.n+t.offset, size)})
		for e := range size {
			values[t.offset+e] = t.fill
		}
		if t.limit == 0 {
			continue
		}
		for e := range size {
			w := philox.Block(key, [4]uint32{uint32(e / 4), uint32(e / 4 >> 32), uint32(i), 0})
			values[t.offset+e] = float32((2*float64(philox.Float32(w[e%4])) - 1) * t.limit)
		}
	}
	if err := p.upload(p.ptr(0), values); err != nil || p.learns == p.n {
		return err
	}
	// Parameters without a gradient begin in their first moment, too (see batchNorm).
	return p.upload(p.moment(0, p.learns), values[p.learns:])
}

// part is n floats of the store as a buffer.
func (p *parameters) part(offset, n int64) cuda.Buffer {
	return &subBuffer{p.store, offset * 4, n * 4}
}

// ptr is the address of the parameter at an offset in floats, grad that of its gradient, and moment
// that of Adam's first (0) or second (1) moment.
func (p *parameters) ptr(offset int64) cuda.DevicePtr {
	return p.store.Ptr() + cuda.DevicePtr(offset*4)
}
func (p *parameters) grad(offset int64) cuda.DevicePtr { return p.ptr(p.n + offset) }
func (p *parameters) moment(which, offset int64) cuda.DevicePtr {
	return p.ptr((2+which)*p.n + offset)
}

// clip is the address of the sum of squares of a unit of gradients, behind the last of the factor.
func (p *parameters) clip(unit int64) cuda.DevicePtr {
	return p.ptr(4*p.n) + cuda.DevicePtr(8*unit)
}

// sum is the hex SHA-256 over every parameter's name, shape (two little-endian uint64) and value
// bytes.
func (p *parameters) sum() (string, error) {
	h := sha256.New()
	hash := func(all []byte) {
		offset := int64(0)
		for _, t := range p.list {
			n := int64(t.Rows) * int64(t.Cols)
			h.Write([]byte(t.Name))
			h.Write(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil,
				uint64(t.Rows)), uint64(t.Cols)))
			h.Write(all[offset*4 : (offset+n)*4])
			offset += align(n)
		}
	}
	if all := p.store.Bytes(); all != nil {
		hash(all)
	} else if err := p.transfer(p.n*4, func(s cuda.Stream, stage cuda.Buffer) error {
		return s.Copy(stage.Ptr(), p.ptr(0), p.n*4)
	}, hash); err != nil {
		return "", fmt.Errorf("read parameters: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// transferTimeout bounds the copies of start-up and of ParamsSHA256, which have no context.
const transferTimeout = 5 * time.Minute

// upload copies values to the device and waits.
func (p *parameters) upload(dst cuda.DevicePtr, values []float32) error {
	return p.transfer(int64(len(values))*4, func(s cuda.Stream, stage cuda.Buffer) error {
		copy(unsafe.Slice((*float32)(unsafe.Pointer(&stage.Bytes()[0])), len(values)), values)
		return s.Copy(dst, stage.Ptr(), int64(len(values))*4)
	}, nil)
}

// transfer runs enqueue and then, when the stream is done, use, both with a pinned buffer.
func (p *parameters) transfer(size int64, enqueue func(cuda.Stream, cuda.Buffer) error,
	use func([]byte)) (err error) {
	stage, err := p.dev.Alloc(cuda.MemPinned, size, "parameter transfer")
	if err != nil {
		return err
	}
	s, err := p.dev.NewStream(cuda.StreamOptions{Name: "parameters"})
	if err != nil {
		_ = stage.Free()
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	if err = enqueue(s, stage); err == nil {
		err = s.Synchronize(ctx)
	}
	if err == nil && use != nil {
		use(stage.Bytes())
	}
	if e := s.Close(); err == nil {
		err = e
	}
	if e := stage.Free(); err == nil {
		err = e
	}
	return err
}

func (p *parameters) close() (err error) {
	for _, b := range []cuda.Buffer{p.store, p.squares} {
		if b != nil {
			err = errors.Join(err, b.Free())
		}
	}
	return err
}

// subBuffer is a part of another buffer, which owns the memory.
type subBuffer struct {
	cuda.Buffer
	offset, size int64
}

func (b *subBuffer) Ptr() cuda.DevicePtr { return b.Buffer.Ptr() + cuda.DevicePtr(b.offset) }
func (b *subBuffer) Size() int64         { return b.size }
func (b *subBuffer) Free() error         { return nil }
func (b *subBuffer) Bytes() []byte {
	all := b.Buffer.Bytes()
	if all == nil {
		return nil
	}
	return all[b.offset : b.offset+b.size : b.offset+b.size]
}
