package cache

import (
	"context"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/errs"
)

// Lines is how rows lie in the lines of a dynamic cache: row r is on SSD s = r mod SSDs at slot q = r div
// SSDs; the SSD's line q div RowsPerLine holds it, which as a row of a layout of lines is
// (q div RowsPerLine)·SSDs + s. RowsPerLine 1 with LineBytes = RowStride: a line is a row.
type Lines struct {
	SSDs, RowsPerLine, LineBytes, RowStride int64 // RowStride: bytes from a row of a line to the next
}

// Of is a row's line and its place in it.
func (l Lines) Of(row int64) (line, index int64) {
	ssd, slot := row%l.SSDs, row/l.SSDs
	return slot/l.RowsPerLine*l.SSDs + ssd, slot % l.RowsPerLine
}

// DynamicConfig is a dynamic cache's.
type DynamicConfig struct {
	Rows, RowBytes int64
	Lines          Lines
	Slots          int64 // lines of the GPU tier
	Policy         string
	Seed           uint64
	CPU            []int64 // rows of the constant CPU buffer, ascending
	// NoData: lookups only, for a run that reads nothing (the virtual clock).
	NoData bool
}

// Dynamic is a GPU tier whose lines come and go by a policy, over a constant CPU tier. What is in it is
// decided in the order of Admit, by one goroutine; what is moved follows in that same order, however late:
// a Ticket is a batch's lease on the lines that it found and on the slots that it will fill.
type Dynamic struct{}

// NewDynamic allocates the tiers.
func NewDynamic(dev cuda.Device, c DynamicConfig) (*Dynamic, error) {
	return nil, errs.New(errs.Capability, "dynamic cache")
}

// CPUBuffer is the constant CPU tier's memory, rows in the order of DynamicConfig.CPU: the caller fills it.
func (d *Dynamic) CPUBuffer() cuda.Buffer { return nil }

// Stats are the directory's.
func (d *Dynamic) Stats() policy.Stats { return policy.Stats{} }

// MetadataBytes is what the policy keeps.
func (d *Dynamic) MetadataBytes() int64 { return 0 }

// Announce tells the rows (host memory) of a batch that will be admitted, for the window; in the order of
// admission, each batch once.
func (d *Dynamic) Announce(rows []int64) error { return nil }

// NextBatch begins a batch.
func (d *Dynamic) NextBatch() {}

// Close frees everything. A ticket that was not released is an error that names it.
func (d *Dynamic) Close() error { return nil }

// Ticket is one lookup's answer and lease.
type Ticket struct {
	NGPU, NCPU, NMiss int64 // rows: found in the GPU tier, in the CPU tier, on lines to be read
	NLines            int64 // lines to be read
}

// NewTicket makes a ticket to be used again and again.
func (d *Dynamic) NewTicket() (*Ticket, error) { return nil, nil }

// Admit looks positions first..first+count-1 of nodes (device memory) up: on return the policy has decided,
// and t says what has to be read. It waits for st no longer than ctx.
func (d *Dynamic) Admit(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr, first, count int64, t *Ticket) error {
	return nil
}

// ReadPlan is the lines of one or several tickets as one set of reads of the layout of lines: Rows, Pos and
// SSDOffset of a gpuio.ReadSet; line Pos[i] of the staging buffer is line Rows[i].
type ReadPlan struct {
	Rows, Pos cuda.Buffer
	SSDOffset []int64
	Lines     int64
}

// NewReadPlan makes an empty plan to be used again and again.
func (d *Dynamic) NewReadPlan() (*ReadPlan, error) { return nil, nil }

// Close frees the plan.
func (p *ReadPlan) Close() error { return nil }

// Plan merges the reads of tickets, which must be admitted and not finished. A line that two of them miss
// (bypass) is read twice.
func (d *Dynamic) Plan(p *ReadPlan, tickets ...*Ticket) error { return nil }

// Finish enqueues on st what a ticket's rows need once its reads are whole and checked: hits, CPU hits and
// rows of staging go to dst + position·dstStride, then the lines of staging to their slots. Tickets must be
// finished in the order of their admission; another order is an error and moves nothing.
func (d *Dynamic) Finish(st cuda.Stream, t *Ticket, staging cuda.Buffer, dst cuda.DevicePtr, dstStride int64) error {
	return nil
}

// Release ends a ticket whose work on the stream is done.
func (d *Dynamic) Release(t *Ticket) error { return nil }

// Abandon ends a ticket whose reads failed, and all later ones that were admitted: their promised lines
// leave the directory.
func (d *Dynamic) Abandon(t *Ticket) error { return nil }

// Close frees a ticket's buffers.
func (t *Ticket) Close() error { return nil }
