package gnn

import (
	"fmt"
	"unsafe"

	"helios/cuda"
)

// stepSink takes the launches of a training or inference step. On the host device each one goes to the stream at once:
// its workers then begin while the rest of the step is still being written. On a GPU a launch costs the CPU more than many
// of the kernels take, so they are collected, and flush enqueues them as one (a CUDA graph, where the driver has them).
type stepSink struct {
	stream cuda.Stream
	steps  *cuda.Steps // nil: launch at once
	// measure, where it is not nil, gets the most scratch memory that a part of the step needs, and nothing is launched.
	measure *int64
}

// need tells whether the sink only measures, and notes n bytes of scratch memory if so.
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
		return fmt.Errorf("kernel %q takes %d bytes of parameters, the step has %d: kernels and host code are of different builds",
			k.Name(), k.ParamSize(), n)
	}
	cuda.Add(q.steps, k, cfg, p)
	return nil
}

// flush enqueues what was collected. Work that does not go through the sink (products of a BLAS) comes after a flush.
func (q *stepSink) flush() error {
	if q.steps == nil || len(q.steps.List) == 0 {
		return nil
	}
	err := cuda.LaunchSteps(q.stream, q.steps)
	q.steps.Reset()
	return err
}

// sink is where a step's launches go.
func (m *Model) sink(stream cuda.Stream) stepSink {
	if !m.gpu {
		return stepSink{stream: stream}
	}
	m.steps.Reset()
	return stepSink{stream: stream, steps: &m.steps}
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

// kernel is a kernel of the device by name, remembered: an Arch has its own, and backends other than the host's need some that
// no field of kernels has (splits of products, the passes of the transpose). NewModel asks for all that a step can use, because loading a
// module may wait for what runs (CUDA programming guide, Lazy Loading).
func (m *Model) kernel(name string) (cuda.Kernel, error) {
	if k := m.named[name]; k != nil {
		return k, nil
	}
	k, err := m.dev.Kernel(name)
	if err != nil {
		return nil, err
	}
	if m.named == nil {
		m.named = map[string]cuda.Kernel{}
	}
	m.named[name] = k
	return k, nil
}
