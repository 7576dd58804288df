package gnn

import (
	"context"
	"errors"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// plan is the layout of a step's workspace, in floats from its start.
type plan struct {
	layers      []layerPlan
	input       int64 // of layer 0, where it is not what was read
	logitGrad   int64
	dSelf, dAgg int64
	dMid        int64
	part        int64 // of sums over relations, and over runs of a type's rows
	relation    int64 // matrices of relations that are made of bases, and their gradients
	dRelation   int64
	skip        int64 // see layoutSkips
	sorted      [3]int64
	norms       []int64 // statistics of normalisations
	head        headPlan
	featureless featurelessPlan
	gat         gatPlan
	rgat        rgatPlan
	tEnd, tDst  int64
	weights     int64 // of edges, see aggParams
	dstWeights  int64 // of blocks with weights, and with remaining self loops
	selfWeights int64 // of remaining self loops
	loss, pred  int64
	// of kernels that only GPUs have, used by one launch after the other; -1: none
	scratch int64
	size    int64
	base    cuda.DevicePtr
	fixed   [8]layerPlan // backing of layers for the usual depths
	embedAt int64
}

// layerPlan holds what a layer keeps until its backward pass: its sums h, what its Arch makes of
// agg, mid and act, what its normalisation makes of h, and the layer's output. In a
// fused model, h is the output.
type layerPlan struct{ h, agg, mid, act, sums, out int64 }

func (p *plan) take(n int64) int64 {
	offset := p.size
	p.size += align(n)
	return offset
}

func (p *plan) ptr(offset int64) cuda.DevicePtr { return p.base + cuda.DevicePtr(offset*4) }

// scratchAt is the scratch memory, or 0.
func (p *plan) scratchAt() cuda.DevicePtr {
	if p.scratch < 0 {
		return 0
	}
	return p.ptr(p.scratch)
}

// workspace is the memory of activations, of one step after the other, and of results.
type workspace struct {
	dev    cuda.Device
	work   cuda.Buffer
	old    []cuda.Buffer // that launched steps may still use
	result cuda.Buffer   // pinned outcome[marks]
	weigh  cuda.Buffer   // pinned float32[Classes], of the loss; nil: none
	stage  cuda.Buffer   // pinned, of downloads
	last   lastRun
}

// lastRun is the place of the results of the last Train or Infer.
type lastRun struct {
	seeds     int64
	pred      cuda.DevicePtr
	logits    cuda.DevicePtr // float32[seeds, Classes]
	embedding cuda.DevicePtr // float32[seeds, EmbeddingDim], 0 after Train
}

// workBytes rounds up to what the workspace is allocated in.
func workBytes(n int64) int64 { return (n + 4095) &^ 4095 }

// allocate makes the memory of outcomes, and of a loss's weights where there are some.
func (w *workspace) allocate(weights []float32) (err error) {
	w.result, err = w.dev.Alloc(cuda.MemPinned, marks*int64(unsafe.Sizeof(outcome{})),
		"training outcome")
	if err != nil || weights == nil {
		return err
	}
	w.weigh, err = w.dev.Alloc(cuda.MemPinned, int64(len(weights))*4, "weights of the loss")
	if err == nil {
		copy(hostmem.View[float32](w.weigh.Bytes()), weights)
	}
	return err
}

// weightsAt returns the address of the loss's weights, or 0.
func (w *workspace) weightsAt() cuda.DevicePtr { return pointer(w.weigh) }

// reserve makes room for so many bytes of activations, with some to spare where it grows, and
// returns where it is.
func (w *workspace) reserve(need int64) (cuda.DevicePtr, error) {
	if w.work == nil || w.work.Size() < need {
		size := need
		if w.work != nil {
			size += size / 4
		}
		work, err := w.dev.Alloc(cuda.MemDevice, workBytes(size), "activations")
		if oom := (*cuda.OutOfMemoryError)(nil); errors.As(err, &oom) && size > need {
			work, err = w.dev.Alloc(cuda.MemDevice, workBytes(need), "activations")
		}
		if err != nil {
			return 0, err
		}
		if w.work != nil {
			w.old = append(w.old, w.work)
		}
		w.work = work
	}
	return w.work.Ptr(), nil
}

// freeOld frees memory that no launched step uses any more.
func (w *workspace) freeOld() error {
	var err error
	for _, b := range w.old {
		if e := b.Free(); err == nil {
			err = e
		}
	}
	w.old = w.old[:0]
	return err
}

// release gives back the memory of activations, and with it the results of the last step.
func (w *workspace) release() error {
	err := w.freeOld()
	if w.work != nil {
		if e := w.work.Free(); err == nil {
			err = e
		}
		w.work = nil
	}
	w.last = lastRun{}
	return err
}

func (w *workspace) close() error {
	err := w.freeOld()
	for _, b := range []cuda.Buffer{w.result, w.weigh, w.work, w.stage} {
		if b != nil {
			if e := b.Free(); err == nil {
				err = e
			}
		}
	}
	return err
}

// download copies device memory through a pinned buffer, whose bytes are good until the next one.
func (w *workspace) download(ctx context.Context, stream cuda.Stream, src cuda.DevicePtr,
	size int64) ([]byte, error) {
	if size == 0 {
		return nil, errs.New(errs.Failed, "nothing was computed yet; call Train or Infer first")
	}
	if w.stage == nil || w.stage.Size() < size {
		if w.stage != nil {
			if err := w.stage.Free(); err != nil {
				return nil, err
			}
			w.stage = nil
		}
		var err error
		if w.stage, err = w.dev.Alloc(cuda.MemPinned, (size+4095)&^4095,
			"result staging"); err != nil {
			return nil, err
		}
	}
	if err := stream.Copy(w.stage.Ptr(), src, size); err != nil {
		return nil, err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return nil, err
	}
	return w.stage.Bytes()[:size], nil
}
