package sched

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/hostmem"
)

// Place is a consumer's memory for the rows of a mini-batch: SSDs and gathers write straight to it.
// It begins with bytes of a file. Rows beyond them lie in the loader's own memory, so that a batch
// that is larger than expected comes whole: Loaded.Rows has all of it.
type Place struct {
	cuda.Growable
	of  *Loader
	mem []byte
}

// places are those of a loader that are closed. One that is closed in the middle of an epoch ends
// on the epoch's goroutine, where the I/O stack that has it mapped doesn't change.
type places struct {
	mu      sync.Mutex
	running bool
	closed  []*Place
	stuck   []*Place // an SSD may still write there, until the stack is closed
}

// Ahead is the number of batches that EpochInto makes beside the one that is emitted, each of which
// may have a place; 0: the loader uses no places. Those go where the device's memory is the CPU's.
// Tiers that take rows in from where a batch has them keep to the engine's own, and so do rows that
// are held against a feature function there. A consumer that writes to a place before its batch
// comes spoils the checksums of its own rows, and its own epoch alone fails.
func (l *Loader) Ahead() int {
	c := l.e.Config
	if l.e.OnGPU() || c.VerifyRows || !l.e.Tiers.Places() {
		return 0
	}
	return l.e.Plan.Credits
}

// NewPlace makes a place over so many bytes of a file from offset on, multiples of
// hostmem.PageBytes. Any goroutine may call it.
func (l *Loader) NewPlace(fd int, offset, bytes int64) (*Place, error) {
	const purpose = "rows in a consumer's memory"
	size := (l.e.SlotBytes + hostmem.PageBytes - 1) &^ (hostmem.PageBytes - 1)
	mem, err := hostmem.MapFile(fd, offset, min(bytes, size), size, purpose)
	if err != nil {
		return nil, err
	}
	b, err := l.e.Device.Register(mem, purpose)
	if err != nil {
		return nil, errors.Join(err, hostmem.Free(mem))
	}
	return &Place{cuda.Whole(b), l, mem}, nil
}

// Close ends a place that no batch has. Any goroutine may call it.
func (a *Place) Close() error {
	p := &a.of.at
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running {
		p.closed = append(p.closed, a)
		return nil
	}
	return p.close(a.of.e, a)
}

// close ends the DMA to a place, and it. p.mu is held.
func (p *places) close(e *runner, a *Place) error {
	if r := e.Store.Reader; r != nil {
		if err := gpuio.Forget(r, a); err != nil {
			p.stuck = append(p.stuck, a)
			return fmt.Errorf("a consumer's place for rows: %w", err)
		}
	}
	return a.free()
}

func (a *Place) free() error { return errors.Join(a.Free(), hostmem.Free(a.mem)) }

func (p *places) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = true
}

// sweep ends the places that were closed meanwhile. It runs on the epoch's goroutine.
func (p *places) sweep(e *runner, last bool) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = !last
	for _, a := range p.closed {
		err = errors.Join(err, p.close(e, a))
	}
	p.closed = nil
	return err
}

// end frees what is left. The I/O stack is closed.
func (p *places) end() (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range slices.Concat(p.closed, p.stuck) {
		err = errors.Join(err, a.free())
	}
	p.closed, p.stuck = nil, nil
	return err
}
