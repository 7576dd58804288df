package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/errs"
)

var (
	_ cuda.MemoryMeter = (*Device)(nil)
	_ cuda.Reserver    = (*Device)(nil)
	_ cuda.Growable    = (*buffer)(nil)
)

// FreeMemory implements cuda.MemoryMeter, by the driver, which knows all processes.
func (d *Device) FreeMemory() (free, total int64, err error) {
	if err := d.enter(); err != nil {
		return 0, 0, err
	}
	defer d.leave()
	free, total, r := d.api.MemGetInfo()
	if r != success {
		return 0, 0, fmt.Errorf("device %s: %w", d.info.Name, d.failed("cuMemGetInfo_v2", r))
	}
	return free, total, nil
}

// growth is the memory behind a buffer that grows: pieces of physical memory (cuMemCreate) mapped
// one behind the other from the beginning of its addresses. A piece goes as a whole (cuMemUnmap
// "cannot unmap a sub-range"), so large ones are not made: then little is kept when it shrinks.
type growth struct {
	mu      sync.Mutex // held while it grows or shrinks; taken before all others
	span    int64      // bytes of addresses
	granule int64      // of pieces and of where they start
	pieces  []int64    // sizes, in order
	mapped  atomic.Int64
	gone    bool
	shared  *shared // nil: with no other process
}

// pieceBytes is the most that one piece has.
const pieceBytes = 64 << 20

func (d *Device) memProp() *memProp {
	p := &memProp{Type: memPinned, Location: memLocation{locationDevice, int32(d.ord)}}
	if d.vmmRDMA {
		p.RDMA = 1 // SSDs reach it (rung p2p)
	}
	return p
}

// Reserve implements cuda.Reserver. Where the driver cannot reserve addresses alone, it is memory
// of that size from the beginning.
func (d *Device) Reserve(size int64, purpose string) (cuda.Growable, error) {
	if !d.caps.GrowingMemory || size <= 0 {
		b, err := d.Alloc(cuda.MemDevice, size, purpose)
		if oom := (*cuda.OutOfMemoryError)(nil); errors.As(err, &oom) {
			return nil,
				fmt.Errorf(
					"%w; its driver cannot reserve addresses without memory (virtual memory management, CUDA 10.2), so the worst case has to fit",
					err)
		}
		if err != nil {
			return nil, err
		}
		return b.(*buffer), nil
	}
	fail := func(err error) (cuda.Growable, error) {
		return nil, fmt.Errorf("device %s: reserve %d bytes for %s: %w", d.info.Name, size,
			purpose, err)
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	b := &buffer{d: d, size: size, purpose: purpose, origin: fromReserve, grows: &growth{}}
	if err := d.enter(); err != nil {
		return nil, err
	}
	err := b.reserveAddresses()
	d.leave()
	if err != nil {
		return fail(err)
	}
	if b.region, _, err = d.regions.Add(uint64(b.ptr), uint64(b.ptr)+uint64(size),
		purpose); err != nil {
		return fail(errors.Join(err, b.Free()))
	}
	b.region.Back(0)
	if err := d.keep(b); err != nil {
		return nil, err
	}
	return b, nil
}

// reserveAddresses gives b its addresses. The context is current.
func (b *buffer) reserveAddresses() error {
	d, g := b.d, b.grows
	n, r := d.api.MemGetAllocationGranularity(d.memProp(), granularityLeast)
	switch {
	case r != success:
		return d.failed("cuMemGetAllocationGranularity", r)
	case n < pageBytes || n&(n-1) != 0:
		return fmt.Errorf(
			"cuMemGetAllocationGranularity: %d bytes: want a power of two of whole pages", n)
	case b.size > 1<<48: // more than any GPU has addresses; sums of it must not overflow
		return errs.New(errs.Usage, "more than GPUs can address")
	}
	g.granule, g.span = n, (b.size+n-1)&^(n-1)
	if b.base, r = d.api.MemAddressReserve(g.span, n); r != success {
		return d.failed("cuMemAddressReserve", r)
	}
	b.ptr = b.base
	return nil
}

// Backed implements cuda.Growable.
func (b *buffer) Backed() int64 {
	switch {
	case b.freed.Load():
		return 0
	case b.grows != nil:
		return min(b.grows.mapped.Load(), b.size)
	}
	return b.size
}

// back sets what has memory, for the checks of copies and for MemUsage. b.grows.mu is held.
func (b *buffer) back(mapped int64) {
	g := b.grows
	before := min(g.mapped.Load(), b.size)
	g.mapped.Store(mapped)
	now := min(mapped, b.size)
	if b.region != nil {
		b.region.Back(uint64(now))
	}
	b.d.memMu.Lock()
	b.d.countLocked(b.purpose, now-before)
	b.d.memMu.Unlock()
}

// Grow implements cuda.Growable. It works beside kernels that use what is there already.
func (b *buffer) Grow(bytes int64) error {
	d, g := b.d, b.grows
	fail := func(err error) error {
		return fmt.Errorf("device %s: grow %s to %d bytes: %w", d.info.Name, b.purpose, bytes, err)
	}
	if bytes < 0 || bytes > b.size {
		return fail(fmt.Errorf("%d are reserved", b.size))
	}
	if b.freed.Load() {
		return fail(errors.New("it is freed"))
	}
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	have := g.mapped.Load()
	if bytes <= have {
		return nil
	}
	if g.gone {
		return fail(errors.New("it is freed"))
	}
	if err := d.accepting(); err != nil {
		return err
	}
	end := (bytes + g.granule - 1) &^ (g.granule - 1)
	kept := g.count(have)
	if err := b.cutBack(have, kept); err != nil { // what an earlier call could not give back
		return fail(err)
	}
	err := b.mapTo(have, end)
	if err == nil {
		err = d.house.zero(d, b.base+devicePtr(have), end-have)
	}
	if err != nil {
		if ce := (*CallError)(nil); errors.As(err, &ce) && result(ce.Code) == errOutOfMemory {
			err = fmt.Errorf("%w (%w)", d.outOfMemory(b.purpose, end-have), ce)
		}
		return fail(errors.Join(err, b.cutBack(have, kept)))
	}
	b.back(end)
	return nil
}

// mapTo puts memory behind the addresses from have to end, in pieces. g.mu is held.
func (b *buffer) mapTo(have, end int64) error {
	d, g := b.d, b.grows
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	limit := max(pieceBytes&^(g.granule-1), g.granule)
	if g.shared != nil {
		limit = end
	}
	for offset := have; offset < end; {
		n := min(end-offset, limit)
		if err := d.mapPiece(b.base+devicePtr(offset), n, g.shared); err != nil {
			return err
		}
		g.pieces = append(g.pieces, n)
		offset += n
	}
	access := &memAccess{Location: memLocation{locationDevice, int32(d.ord)},
		Flags: accessReadWrite}
	return d.check("cuMemSetAccess", d.api.MemSetAccess(b.base+devicePtr(have), end-have, access))
}

// count returns how many pieces the first bytes have, which end with one. g.mu is held.
func (g *growth) count(bytes int64) int {
	n := 0
	for offset := int64(0); n < len(g.pieces) && offset < bytes; n++ {
		offset += g.pieces[n]
	}
	return n
}

// cutBack is unmapTo for memory that nothing uses but what clears it, for which cuMemUnmap does not
// wait. Memory that cannot be freed now goes with a later Grow, or with the buffer. g.mu is held.
func (b *buffer) cutBack(bytes int64, keep int) error {
	if len(b.grows.pieces) == keep {
		return nil
	}
	if !b.d.house.done(b.d) {
		return errors.New("memory that was not used after all is still being cleared")
	}
	_, err := b.unmapTo(bytes, keep)
	return err
}

// mapPiece puts new memory behind n bytes from p. It runs within enter. The handle is given back at
// once: "the memory allocation will be freed when all outstanding mappings to the memory are
// unmapped" (cuMemRelease).
func (d *Device) mapPiece(p devicePtr, n int64, to *shared) error {
	prop := d.memProp()
	if to != nil {
		prop.HandleTypes = handleFD
	}
	h, r := d.api.MemCreate(n, prop)
	if r != success {
		return d.failed("cuMemCreate", r)
	}
	if to != nil {
		if err := to.export(d, h); err != nil {
			d.api.MemRelease(h)
			return err
		}
	}
	r = d.api.MemMap(p, n, h)
	released := d.api.MemRelease(h)
	if r != success {
		return d.failed("cuMemMap", r)
	}
	if released != success {
		d.api.MemUnmap(p, n)
		d.api.MemRelease(h) // or the memory is lost until the process ends
		return d.failed("cuMemRelease", released)
	}
	return nil
}

// unmapTo takes memory away from the end until the first keep pieces are left, which have bytes. It
// returns the bytes that still have memory: more than bytes where the driver refused.
func (b *buffer) unmapTo(bytes int64, keep int) (int64, error) {
	d, g := b.d, b.grows
	end := int64(0)
	for _, n := range g.pieces {
		end += n
	}
	if !d.enterToFree() {
		g.pieces = g.pieces[:keep]
		return bytes, nil // it went with the context
	}
	defer d.leave()
	for len(g.pieces) > keep {
		n := g.pieces[len(g.pieces)-1]
		if err := d.freed("cuMemUnmap", d.api.MemUnmap(b.base+devicePtr(end-n), n)); err != nil {
			return end, err
		}
		g.pieces = g.pieces[:len(g.pieces)-1]
		end -= n
	}
	return end, nil
}

// unreserve gives the memory and the addresses back. Where kernels may still use them (idle is
// false) they stay with the process.
func (b *buffer) unreserve(idle bool) error {
	d, g := b.d, b.grows
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gone = true
	var err error
	if idle {
		if _, err = b.unmapTo(0, 0); err == nil && d.enterToFree() {
			err = d.freed("cuMemAddressFree", d.api.MemAddressFree(b.base, g.span))
			d.leave()
		}
	}
	if b.kept {
		b.back(0)
	}
	return errors.Join(err, g.shared.close())
}

// peerPieces are the physical allocations that are behind a buffer now, in order.
func (b *buffer) peerPieces() []peerPiece {
	end := (b.size + pageBytes - 1) &^ (pageBytes - 1)
	if b.grows == nil {
		return []peerPiece{{0, end}}
	}
	b.grows.mu.Lock()
	defer b.grows.mu.Unlock()
	var out []peerPiece
	offset := int64(0)
	for _, n := range b.grows.pieces {
		out = append(out, peerPiece{offset, min(n, end-offset)})
		offset += n
	}
	return out
}

// quiet waits until the work that is enqueued on all streams is done, for CloseTimeout at most.
func (d *Device) quiet() error {
	d.streamMu.Lock()
	list := slices.Collect(maps.Keys(d.streams))
	d.streamMu.Unlock()
	limit := d.opt.CloseTimeout
	if d.hung.Load() != nil {
		limit = hungPatience
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, s := range list {
		if s.quiet(ctx) {
			continue
		}
		// Others may be what this one waits for: all that run are named.
		var running []string
		for _, o := range list {
			if o.running.Load() != nil {
				running = append(running, fmt.Sprintf("stream %q still runs %s", o.opt.Name,
					o.runningText()))
			}
		}
		if len(running) == 0 {
			running = append(running, fmt.Sprintf("stream %q is not done", s.opt.Name))
		}
		slices.Sort(running)
		return fmt.Errorf("it stays where it is, for after %v %s", limit,
			strings.Join(running, ", "))
	}
	return nil
}

// quiet waits for the stream's work so far. On a lost device nothing runs.
func (s *gpuStream) quiet(ctx context.Context) bool {
	s.mu.Lock()
	if s.closed || s.h == 0 || s.enter() != nil {
		s.mu.Unlock()
		return true
	}
	r := s.d.api.StreamQuery(s.h)
	s.leave()
	if r == success {
		s.mu.Unlock()
		return true
	}
	rec, err := s.fence()
	s.mu.Unlock()
	if err != nil {
		end, _ := ctx.Deadline()
		return s.idle(time.Until(end)) // without an event
	}
	defer rec.drop()
	w := (*waitError)(nil)
	return !errors.As(rec.waitOnly(ctx), &w)
}
