package gpuio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// Proof of a rung. Success codes prove nothing: one public project got them
// while its data landed in CPU memory.
// So, for each SSD:
//
//  1. the CPU writes a pattern to memory of the rung and the device reads it, then the other way round: both mean the
//     same memory;
//  2. the SSD writes its Identify data there, by its admin queue, which is in CPU memory: device and CPU must see it;
//  3. the rung's own engine reads rows with its kernels: the SSD fetches commands and PRP lists from the rung's memory and writes
//     completions and data to it, kernels ring and poll. Two sets: one whose destination is on the side of the queues and is
//     written in place, page by page in another order than the SSD has them, so that a PRP list that was not read puts rows in
//     wrong places; one on the other side, by way of staging slots.
//
// What must come is known from an ordinary queue in CPU memory. Before, each byte is junk: the
// complement of what must come. Nothing is ever written to an SSD, and fresh rings are zero: should
// an SSD fetch commands from a place where ours are not, it finds flushes of no namespace.

const (
	proveRows  = 8                // of each SSD
	proveLimit = 60 * time.Second // of all proofs together
)

// proveTimeout bounds a command of a proof. Tests shorten it.
var proveTimeout = time.Second

// prover knows what SSDs hold.
type prover struct {
	dev      cuda.Device
	ssds     []*SSD
	layout   Layout
	identify [][]byte      // by SSD
	rows     [][]byte      // by SSD: the first rows of its namespace
	bufs     []cuda.Buffer // of the engine that is being tried: freed when it is closed
}

// newProver asks the SSDs what they hold.
func newProver(ctx context.Context, dev cuda.Device, ssds []*SSD) (*prover, error) {
	p := &prover{dev: dev}
	row, lba, n := 0, ssds[0].Ctrl.Namespace().LBABytes, int64(proveRows)
	for _, d := range ssds {
		row = max(row, d.Ctrl.PageBytes(), d.Ctrl.Namespace().LBABytes)
	}
	for _, d := range ssds {
		ns := d.Ctrl.Namespace()
		if ns.LBABytes != lba {
			return nil, errs.New(errs.Usage,
				"SSD %s has LBAs of %d bytes, SSD %s %d: format all with the same", d.name(),
				ns.LBABytes, ssds[0].name(), lba)
		}
		n = min(n, int64(ns.Blocks)/int64(row/lba))
		p.ssds = append(p.ssds, &SSD{Ctrl: d.Ctrl, Name: d.Name})
	}
	if n == 0 {
		return nil, errs.New(errs.Usage, "an SSD has less than %d bytes", row)
	}
	var err error
	if p.layout, err = NewLayout(n*int64(len(ssds)), row, len(ssds), lba); err != nil {
		return nil, err
	}
	for _, d := range p.ssds {
		id := make([]byte, nvmeIdentifyBytes)
		if _, err := d.Ctrl.Admin(ctx, "identify controller",
			nvme.IdentifyCommand(0, nvme.CNSController, 0, 0, 0), id); err != nil {
			return nil, err
		}
		data := make([]byte, int(n)*row)
		b, err := NewBulk(ctx, d.Ctrl, 1, BulkTimeout(5*proveTimeout), BulkRetries(1),
			BulkResets(-1))
		if err != nil {
			return nil, err
		}
		if err := errors.Join(b.ReadAt(ctx, 0, data), b.Close(ctx)); err != nil {
			return nil, err
		}
		p.identify, p.rows = append(p.identify, id), append(p.rows, data)
	}
	return p, nil
}

const nvmeIdentifyBytes = 4096

// prove explains why a rung does not do.
func (p *prover) prove(ctx context.Context, m *Memory) error {
	s := side{dev: p.dev}
	if m.rung.rule().peer {
		s.peer, s.method = p.dev.(cuda.PeerMapper), m.method
	}
	for i, d := range p.ssds {
		if err := p.identifies(ctx, &s, i); err != nil {
			return fmt.Errorf("nvme %s: %w", d.name(), err)
		}
	}
	return p.reads(ctx, m)
}

// identifies proves one SSD's writes to the memory, and that device and CPU mean the same.
func (p *prover) identifies(ctx context.Context, s *side, i int) (err error) {
	d, want := p.ssds[i], p.identify[i]
	a, err := s.area(d, len(want), "gpuio proof")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.giveBack(d, &a)) }()
	got, junk := make([]byte, len(want)), complement(want)
	if err := p.toDevice(ctx, a.buf.Ptr(), want); err != nil {
		return err
	}
	if a.look(got); different(got, want, nil) != "" {
		return fmt.Errorf("what the device wrote to its memory is not what the CPU reads there: %s",
			different(got, want, nil))
	}
	a.put(junk)
	if err := p.fromDevice(ctx, got, a.buf.Ptr()); err != nil {
		return err
	}
	if w := different(got, junk, want); w != "" {
		return fmt.Errorf("what the CPU wrote to the memory is not what the device reads there: %s",
			w)
	}
	// The data goes where the command says, as there is none of the Controller's.
	if _, err := d.Ctrl.Admin(ctx, "identify into the rung's memory",
		nvme.IdentifyCommand(0, nvme.CNSController, 0, uint64(a.iova), 0), nil); err != nil {
		return err
	}
	a.look(got)
	byCPU := different(got, want, junk)
	if err := p.fromDevice(ctx, got, a.buf.Ptr()); err != nil {
		return err
	}
	return seen("the SSD's Identify data", different(got, want, junk), byCPU)
}

// reads proves the whole way of rows.
func (p *prover) reads(ctx context.Context, m *Memory) (err error) {
	rd, err := newEngine("proof", nil, p.dev, p.ssds, p.layout, AsyncOptions{
		Blocks: 1, QueuePairs: 1, Depth: FitDepth(p.ssds, 1, 4), Timeout: proveTimeout,
		Retries: 1, Resets: -1,
		CoalesceBytes: proveRows * int(p.layout.RowBytes), Memory: m,
	})
	if err != nil {
		return err
	}
	e := rd.(*async)
	defer func() {
		st := e.Stats()
		err = errors.Join(err, e.Close(ctx))
		// Not before: an SSD may still write to what a read that failed was given.
		for _, b := range p.bufs {
			err = errors.Join(err, b.Free())
		}
		p.bufs = nil
		for s := range st.PerSSD {
			if st.PerSSD[s].GivenUp == "" {
				continue
			}
			// Others are to find the controller as it was.
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx),
				p.ssds[s].Ctrl.ResetTimeout())
			err = errors.Join(err, p.ssds[s].Ctrl.Reset(rctx))
			cancel()
		}
	}()
	here, there := cuda.MemPinned, cuda.MemDevice
	if m.rung.rule().peer {
		here, there = there, here
	}
	if err := p.readsTo(ctx, e, here); err != nil {
		return err
	}
	if st := e.Stats(); st.Direct == 0 {
		return fmt.Errorf("destinations of the device's side are not written in place: %s",
			st.NotInPlace)
	}
	if err := p.junkStaging(ctx, e); err != nil {
		return err
	}
	return p.readsTo(ctx, e, there)
}

// junkStaging fills the staging slots, which are zero when they are new, as rows may be. No set is
// in flight.
func (p *prover) junkStaging(ctx context.Context, e *async) error {
	e.mu.Lock()
	err := e.ensureStaging(e.submitS)
	e.mu.Unlock()
	for s := 0; s < len(e.stageBuf) && err == nil; s++ {
		err = p.toDevice(ctx, e.stageBuf[s].buf.Ptr(),
			bytes.Repeat([]byte{0x5a}, int(e.stageBuf[s].buf.Size())))
	}
	return err
}

// readsTo reads all rows to a destination and looks at all of it.
func (p *prover) readsTo(ctx context.Context, e *async, kind cuda.MemKind) error {
	l := &p.layout
	n, row := int(l.Rows), int(l.RowBytes)
	places := n + n/2
	alloc := func(kind cuda.MemKind, bytes int) (b cuda.Buffer, err error) {
		if b, err = p.dev.Alloc(kind, int64(bytes), "gpuio proof"); err == nil {
			p.bufs = append(p.bufs, b)
		}
		return b, err
	}
	list, err := alloc(cuda.MemPinned, n*12)
	if err != nil {
		return err
	}
	dst, err := alloc(kind, (places*row+exportBytes-1)/exportBytes*exportBytes)
	if err != nil {
		return err
	}
	ids := unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(list.Bytes()))), n)
	pos := unsafe.Slice((*uint32)(unsafe.Pointer(&list.Bytes()[n*8])), n)
	want, junk := make([]byte, places*row), make([]byte, places*row)
	for i := range junk {
		junk[i] = 0x5a
	}
	copy(want, junk)
	offsets := []int64{0}
	for s, k := 0, 0; s < len(p.ssds); s++ {
		for slot := 0; slot < n/len(p.ssds); slot++ {
			ids[k] = int64(slot*len(p.ssds) + s)
			off := places - 1 - k // backwards
			pos[k] = uint32(off)
			data := p.rows[s][slot*row : (slot+1)*row]
			copy(want[off*row:], data)
			copy(junk[off*row:], complement(data))
			k++
		}
		offsets = append(offsets, int64(k))
	}
	if err := p.toDevice(ctx, dst.Ptr(), junk); err != nil {
		return err
	}
	set, err := e.Submit(ctx, &ReadSet{Rows: list.Ptr(), Pos: list.Ptr() + cuda.DevicePtr(n*8),
		SSDOffset: offsets, Dst: dst, DstStride: int64(row), DstBytes: int64(places * row)})
	if err != nil {
		return err
	}
	if _, err := set.Wait(ctx); err != nil {
		return fmt.Errorf("a read by queues there: %w", err)
	}
	got := make([]byte, len(want))
	byCPU := ""
	if mem := e.dma.view(dst); mem != nil {
		ioRead(got, mem)
		byCPU = different(got, want, junk)
	}
	if err := p.fromDevice(ctx, got, dst.Ptr()); err != nil {
		return err
	}
	return seen("rows read by queues there", different(got, want, junk), byCPU)
}

// view returns what the CPU sees of a destination; nil: nothing.
func (c *dmaCache) view(b cuda.Buffer) []byte {
	if m := c.m[b]; m != nil && m.peer != nil {
		return m.peer.Bytes()
	}
	return b.Bytes()
}

// put stores to an area, whichever side it is on.
func (a *dmaArea) put(src []byte) {
	if a.peer != nil {
		ioCopy(a.mem, src)
		return
	}
	copy(a.mem, src)
}

// look loads from an area.
func (a *dmaArea) look(dst []byte) {
	if a.peer != nil {
		ioRead(dst, a.mem)
		return
	}
	copy(dst, a.mem)
}

func complement(b []byte) []byte {
	c := make([]byte, len(b))
	for i := range b {
		c[i] = ^b[i]
	}
	return c
}

// different says in words how got is not want; "": it is. junk, where it is not nil, is what was
// there before.
func different(got, want, junk []byte) string {
	n, first, old := 0, -1, 0
	for i := range want {
		if got[i] == want[i] {
			continue
		}
		if n++; first < 0 {
			first = i
		}
		if junk != nil && got[i] == junk[i] {
			old++
		}
	}
	switch {
	case n == 0:
		return ""
	case old == n:
		return fmt.Sprintf("%d of %d bytes are still the junk of before, from byte %d on", n,
			len(want), first)
	}
	return fmt.Sprintf("%d of %d bytes are wrong, the first is byte %d: %02Xh for %02Xh", n,
		len(want), first, got[first], want[first])
}

// seen is the error of data that device and CPU were to see.
func seen(what, byDevice, byCPU string) error {
	switch {
	case byDevice == "" && byCPU == "":
		return nil
	case byDevice != "" && byCPU != "":
		return fmt.Errorf(
			"%s did not arrive, although the SSD reported success: as the device sees the memory %s; as the CPU does, %s",
			what, byDevice, byCPU)
	case byDevice != "":
		return fmt.Errorf("%s arrived where the CPU sees the memory, but not for the device: %s",
			what, byDevice)
	}
	return fmt.Errorf("%s arrived for the device, but not where the CPU sees the memory: %s",
		what, byCPU)
}

// toDevice and fromDevice have the device write and read memory of its own or pinned memory.
func (p *prover) toDevice(ctx context.Context, dst cuda.DevicePtr, src []byte) error {
	return p.move(ctx, len(src), func(s cuda.Stream, via cuda.Buffer) error {
		copy(via.Bytes(), src)
		return s.Copy(dst, via.Ptr(), int64(len(src)))
	}, nil)
}

func (p *prover) fromDevice(ctx context.Context, dst []byte, src cuda.DevicePtr) error {
	return p.move(ctx, len(dst), func(s cuda.Stream, via cuda.Buffer) error {
		return s.Copy(via.Ptr(), src, int64(len(dst)))
	}, func(via cuda.Buffer) { copy(dst, via.Bytes()) })
}

func (p *prover) move(ctx context.Context, n int, copies func(cuda.Stream, cuda.Buffer) error,
	after func(cuda.Buffer)) (err error) {
	via, err := p.dev.Alloc(cuda.MemPinned, int64(n), "gpuio proof")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, via.Free()) }()
	s, err := p.dev.NewStream(cuda.StreamOptions{Name: "proof"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := copies(s, via); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	if after != nil {
		after(via)
	}
	return nil
}
