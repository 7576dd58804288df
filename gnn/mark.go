package gnn

import (
	"context"
	"math"
	"unsafe"

	"helios/cuda"
)

// marks bounds the steps whose results the host has yet to read: one ends while the next runs.
const marks = 2

// Mark is the end of a step. On a GPU who waits for it does not wait for the steps behind it.
type Mark struct {
	m      *Model
	stream cuda.Stream
	turn   int
}

// Mark marks the end of the last Train or Infer on its stream. Its results stay until the second
// step behind it is enqueued.
func (m *Model) Mark(stream cuda.Stream) (k Mark, err error) {
	k = Mark{m, stream, m.turn}
	if !m.on.gpu { // whose stream can say what it runs when that takes too long
		return k, nil
	}
	end := &m.ends[m.turn]
	if *end == nil {
		if *end, err = m.params.dev.NewEvent(); err != nil {
			return k, err
		}
	}
	return k, stream.Record(*end)
}

// Outcome waits for the step and returns its mean loss over the labelled seeds, how many of them
// were predicted correctly, and their number. Without labelled seeds the loss is 0.
func (k Mark) Outcome(ctx context.Context) (loss float64, correct, counted int64, err error) {
	wait := k.stream.Synchronize
	if end := k.m.ends[k.turn]; end != nil {
		wait = end.Synchronize
	}
	if err := wait(ctx); err != nil {
		return 0, 0, 0, err
	}
	return k.outcome()
}

// outcome reads the results of a step that has ended.
func (k Mark) outcome() (loss float64, correct, counted int64, err error) {
	// The steps behind it have memory in which this one had no room.
	if err := k.m.mem.freeOld(); err != nil {
		return 0, 0, 0, err
	}
	o := (*[marks]outcome)(unsafe.Pointer(&k.m.mem.result.Bytes()[0]))[k.turn]
	return o.Loss, o.Correct, o.Counted, nil
}

// GradientNorm is the norm of the step's gradient, before ClipNorm, once Outcome has returned.
func (k Mark) GradientNorm() float64 {
	return math.Sqrt((*[marks]float64)(unsafe.Pointer(&k.m.params.squares.Bytes()[0]))[k.turn])
}

// Outcome is that of the last Train or Infer. It waits for all of the stream.
func (m *Model) Outcome(ctx context.Context, stream cuda.Stream) (loss float64, correct,
	counted int64, err error) {
	if err := stream.Synchronize(ctx); err != nil {
		return 0, 0, 0, err
	}
	return Mark{m, stream, m.turn}.outcome()
}

// GradientNorm is that of the last Train or Apply, once the stream has come to its end.
func (m *Model) GradientNorm() float64 { return Mark{m, nil, m.turn}.GradientNorm() }

// outcomeAt returns the place for the outcome of the step that is being enqueued.
func (m *Model) outcomeAt() cuda.DevicePtr {
	return m.mem.result.Ptr() + cuda.DevicePtr(m.turn)*cuda.DevicePtr(unsafe.Sizeof(outcome{}))
}
