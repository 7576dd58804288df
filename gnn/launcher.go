package gnn

import (
	"fmt"
	"slices"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
)

// launcher launches the kernels that models share: products, sums over columns, the transpose of a
// block. It knows the device and no model.
type launcher struct {
	grid
	dev       cuda.Device
	precision cuda.Precision         // of products
	blas      cuda.BLAS              // that computes them; nil: our own kernels
	products  [3]cuda.Kernel         // of the host, by operation
	named     map[string]cuda.Kernel // see kernel
	steps     cuda.Steps
}

func newLauncher(dev cuda.Device) *launcher {
	return &launcher{grid: gridOf(dev.Info()), dev: dev}
}

// find loads all kernels that a step can launch, of which own are those of the model's Arch,
// Activation, Norm and Loss: loading a module may wait for what runs (CUDA programming guide, Lazy
// Loading).
func (o *launcher) find(own []string) error {
	names := append([]string{"square_sum", "clip_factor", "adam", "drop_input", "shard_sum"}, own...)
	if o.gpu {
		names = append(names, o.gpuKernels()...)
	} else if err := o.findHost(); err != nil {
		return err
	}
	for _, name := range names {
		if _, err := o.kernel(name); err != nil {
			return err
		}
	}
	return nil
}

// hostProduct is the host's kernel of a product.
func (o *launcher) hostProduct(op gemmOp) string {
	return gemmName(op, false, o.precision, gemmVariant{})
}

// findHost finds the host's kernels of products and of sums over columns.
func (o *launcher) findHost() (err error) {
	if !slices.Contains(hostPrecisions, o.precision) {
		return errs.New(errs.Usage,
			"precision %v is for a GPU ({device} cuda); a host device computes products in fp32 or bf16",
			o.precision)
	}
	for op := range o.products {
		if o.products[op], err = o.dev.Kernel(o.hostProduct(gemmOp(op))); err != nil {
			return err
		}
	}
	_, err = o.kernel("col_sum")
	return err
}

// kernel is a kernel of the device by name, remembered.
func (o *launcher) kernel(name string) (cuda.Kernel, error) {
	if k := o.named[name]; k != nil {
		return k, nil
	}
	k, err := o.dev.Kernel(name)
	if err != nil {
		return nil, err
	}
	if o.named == nil {
		o.named = map[string]cuda.Kernel{}
	}
	o.named[name] = k
	return k, nil
}

// gemm enqueues a product.
func (o *launcher) gemm(q *stepSink, op gemmOp, p *gemmParams, scratch cuda.DevicePtr) error {
	if p.M == 0 || p.N == 0 {
		return nil
	}
	if q.measure != nil {
		return o.measureProduct(q, op, p)
	}
	if o.gpu {
		return o.productGPU(q, op, p, scratch)
	}
	p.MB, p.NB = gemmTiles(p.M, p.N, p.K+p.K2, int64(o.sms))
	blocks := (p.M + p.MB - 1) / p.MB * ((p.N + p.NB - 1) / p.NB)
	return put(q, o.products[op], cuda.LaunchConfig{Blocks: int(blocks), Threads: 256}, *p)
}

// transpose enqueues the lists of the backward pass; name is the host's kernel.
func (o *launcher) transpose(q *stepSink, name string, a *aggParams, scratch cuda.DevicePtr) error {
	if q.need(func() int64 { return transposeScratch(a.NumSrc, a.Edges) }) {
		return nil
	}
	if o.gpu {
		return o.transposeGPU(q, a, scratch)
	}
	k, err := o.kernel(name)
	if err != nil {
		return err
	}
	// A block reads all edges, so there are no more of them than run at one time.
	per := max(4096, (a.NumSrc+int64(o.limit)/4-1)/max(1, int64(o.limit)/4))
	return put(q, k, o.blocksFor(a.NumSrc, per), *a)
}

// colSum enqueues the sums of columns.
func (o *launcher) colSum(q *stepSink, p *sumParams, scratch cuda.DevicePtr) error {
	if q.need(func() int64 { return colSumScratch(p.Rows, p.Cols) }) {
		return nil
	}
	if o.gpu {
		return o.colSumGPU(q, p, scratch)
	}
	// No more blocks than workers: each row is read in so many parts.
	blocks := max(1, min(int64(o.sms), (p.Cols+colSumPer-1)/colSumPer))
	k, err := o.kernel("col_sum")
	if err != nil {
		return err
	}
	return put(q, k, cuda.LaunchConfig{Blocks: int(blocks), Threads: aggThreads}, *p)
}

// stepSink takes the launches of a training or inference step. On the host device each one goes to
// the stream at once: its workers then begin while the rest of the step is still being written. On
// a GPU a launch costs the CPU more than many of the kernels take, so they are collected, and flush
// enqueues them as one (a CUDA graph, where the driver has them).
type stepSink struct {
	stream cuda.Stream
	steps  *cuda.Steps // nil: launch at once
	// measure, where it is not nil, gets the most scratch memory that a part of the step needs, and
	// nothing is launched.
	measure *int64
}

// need reports whether the sink only measures, and notes n bytes of scratch memory if so.
func (q *stepSink) need(n func() int64) bool {
	if q.measure == nil {
		return false
	}
	*q.measure = max(*q.measure, n())
	return true
}

// put appends a launch of k with the parameter block p, which must hold no Go pointers.
func put[T any](q *stepSink, k cuda.Kernel, cfg cuda.LaunchConfig, p T) error {
	if q.measure != nil {
		return nil
	}
	if q.steps == nil {
		return cuda.Launch(q.stream, k, cfg, p)
	}
	if n := unsafe.Sizeof(p); n != k.ParamSize() {
		// LaunchRaw would say it too, but for all of the steps at one time.
		return fmt.Errorf(
			"kernel %q takes %d bytes of parameters, the step has %d: kernels and host code are of different builds",
			k.Name(), k.ParamSize(), n)
	}
	cuda.Add(q.steps, k, cfg, p)
	return nil
}

// flush enqueues what was collected. Work that does not go through the sink (products of a BLAS)
// comes after a flush.
func (q *stepSink) flush() error {
	if q.steps == nil || len(q.steps.List) == 0 {
		return nil
	}
	err := cuda.LaunchSteps(q.stream, q.steps)
	q.steps.Reset()
	return err
}

// sink takes a step's launches.
func (o *launcher) sink(stream cuda.Stream) stepSink {
	if !o.gpu {
		return stepSink{stream: stream}
	}
	o.steps.Reset()
	return stepSink{stream: stream, steps: &o.steps}
}

// end flushes when all of the step could be written, and forgets it when not.
func (q *stepSink) end(err error) error {
	if err == nil {
		return q.flush()
	}
	if q.steps != nil {
		q.steps.Reset()
	}
	return err
}
