// Package gpuio is the I/O engine: where NVMe queues meet device memory. It reads feature rows
// from a set of SSDs to their places in a device buffer, by one of several stacks:
//
//   - async: kernels on the device fill submission queues and reap completion queues themselves
//     (Helios; async.go has the host's side, launch.go starts the kernels submit.go and
//     complete.go);
//   - sync: a warp reads one row at a time and waits for it (BaM, GIDS): the baseline on the same
//     queues (sync.go, readsync.go);
//   - cpu: threads of the CPU read the backing files with io_uring or pread, gather and copy;
//   - mmap: rows are copied out of the page cache.
//
// All stacks read the same Layout and give the same bytes. Bulk moves long extents for loading
// and verification.
package gpuio

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"helios/cuda"
	"helios/internal/fileid"
	"helios/nvme"
)

// SSD is the drive of one stripe. A drive with several stripes of a set is listed once for each,
// with one controller; Distinct lists it once.
type SSD struct {
	Ctrl *nvme.Controller
	Name string // for errors; defaults to the controller's name
	// BackingPath is the file or block device behind a software controller, "" when there is
	// none. The cpu and mmap stacks read it.
	BackingPath string
	// what is behind BackingPath, where that is known: another file is not read
	Backing   fileid.ID
	DataStart nvme.LBA // first LBA of the feature extent
	// what to do where it holds wrong data, for errors; "": what helps for a dataset's rows
	Repair string
}

func (s *SSD) name() string {
	if s.Name != "" || s.Ctrl == nil {
		return s.Name
	}
	return s.Ctrl.Name()
}

// Distinct lists each drive once, in the order of their first stripes.
func Distinct(ssds []*SSD) (out []*SSD) {
	for i, s := range ssds {
		if firstOf(ssds, i) == i {
			out = append(out, s)
		}
	}
	return out
}

// StripesOn counts the stripes on an SSD.
func StripesOn(ssds []*SSD, ssd *SSD) (n int) {
	for _, s := range ssds {
		if s == ssd || s.Ctrl == ssd.Ctrl && s.Ctrl != nil {
			n++
		}
	}
	return n
}

// firstOf returns the first stripe that is on the drive of stripe i.
func firstOf(ssds []*SSD, i int) int {
	return slices.IndexFunc(ssds, func(o *SSD) bool {
		return o == ssds[i] || o.Ctrl == ssds[i].Ctrl && o.Ctrl != nil
	})
}

// ReadSet is a set of rows to read, bucketed by SSD: Rows[SSDOffset[s]:SSDOffset[s+1]] must all
// live on SSD s. The row Rows[i] goes to Dst at DstOffset + Pos[i]*DstStride. The buffers must
// stay until Wait returned without a context error, or the Reader is closed.
type ReadSet struct {
	Rows      cuda.DevicePtr // int64[n] row numbers
	Pos       cuda.DevicePtr // uint32[n] destination row index
	SSDOffset []int64        // SSDs+1 bounds of the buckets; the last is n
	Dst       cuda.Buffer
	DstOffset int64 // bytes
	DstStride int64 // bytes, at least the row's
	// optional: positions end within so many bytes from DstOffset; 0: in the rest of Dst
	DstBytes int64
	Ready    cuda.Event // optional: Rows and Pos are valid once it happened
}

// extent shows where positions may lie: bytes from DstOffset.
func (rs *ReadSet) extent() int64 {
	rest := backedBytes(rs.Dst) - rs.DstOffset
	if rs.DstBytes > 0 {
		return min(rs.DstBytes, rest)
	}
	return rest
}

// Reader is an I/O stack over a set of SSDs and a layout. It is safe for concurrent use.
type Reader interface {
	Name() string // of the Stack
	// Submit checks and enqueues a set. It blocks only when too many sets are in flight, no
	// longer than ctx. The reads proceed without Wait.
	Submit(ctx context.Context, rs *ReadSet) (Pending, error)
	// Stats are totals since the Reader was made.
	Stats() Stats
	// Close waits for what is in flight and gives everything back.
	Close(ctx context.Context) error
}

// Pending is a set in flight.
type Pending interface {
	// Wait returns once each row is in place and its completion status was good, or with an
	// error after which nothing will be written to Dst any more. Only an error of ctx leaves
	// the set in flight; Wait may then be called again.
	Wait(ctx context.Context) (ReadStats, error)
}

// ReadStats holds what one set took.
type ReadStats struct {
	Rows     int64
	Commands int64 // NVMe commands, or reads of the backing file; repeated ones count again
	Bytes    int64 // bytes that these moved from the SSD: whole LBAs
	Retries  int64
	Timeouts int64
	Submit   time.Duration // time in the submit kernel or call
	Complete time.Duration // from there until the last row was in place
}

// Stats are totals of a Reader.
type Stats struct {
	ReadStats
	Sets      int64
	Failed    int64 // rows that could not be read
	Direct    int64 // commands whose data landed in the final place
	Staged    int64 // commands whose data was copied from a staging slot
	Pended    int64 // commands that waited in a pending list before they were issued
	Errors    int64 // completions with an error status
	Aborts    int64 // Abort commands sent
	Recreated int64 // queue pairs deleted and created again
	Foreign   int64 // completions that named no command in flight
	Doorbells int64 // writes of SQ and CQ doorbells
	Resets    int64 // controller resets
	Coalesced int64 // rows that shared a command with another
	Mismatch  int64 // rows whose checksum was wrong, each time it was
	// NotInPlace explains why a destination in device memory that should have been written in place
	// (rung p2p) was not; "": all were.
	NotInPlace string
	Latency    Histogram
	PerSSD     []SSDStats
}

// SSDStats are one SSD's share of Stats.
type SSDStats struct {
	Name      string
	Commands  int64
	Bytes     int64
	Errors    int64 // completions with an error status
	Timeouts  int64 // commands past their deadline
	Retries   int64 // commands issued again
	Aborts    int64
	Recreated int64  // queue pairs deleted and created again
	Resets    int64  // of the controller
	Foreign   int64  // completions that named no command in flight
	GivenUp   string // why the SSD is not used any more; "": it is
}

// MergeSSDs adds up the shares of one SSD, by its name.
func MergeSSDs(all []SSDStats) (out []SSDStats) {
	for _, y := range all {
		i := slices.IndexFunc(out, func(x SSDStats) bool { return x.Name == y.Name })
		if i < 0 {
			out = append(out, y)
			continue
		}
		x := &out[i]
		x.Commands += y.Commands
		x.Bytes += y.Bytes
		x.Errors += y.Errors
		x.Timeouts += y.Timeouts
		x.Retries += y.Retries
		x.Aborts += y.Aborts
		x.Recreated += y.Recreated
		x.Resets += y.Resets
		x.Foreign += y.Foreign
		if y.GivenUp != "" {
			x.GivenUp = y.GivenUp
		}
	}
	return out
}

// TimeoutError is a command that did not complete in time, also after Abort, a new queue pair
// and retries.
type TimeoutError struct {
	SSD      string
	QID, CID uint16
	Op       string // "read" or "write"
	LBA      nvme.LBA
	Blocks   uint32
	After    time.Duration // deadline of each attempt
	Attempts int
	Tried    string // what recovery has done to the SSD so far, for the message
}

func (e *TimeoutError) Error() string {
	also := ""
	if e.Tried != "" {
		also = ", in spite of " + e.Tried
	}
	return fmt.Sprintf(
		"nvme %s q%d: %s LBA %d+%d: no completion within %v, %d attempts%s; check the SSD with \"heliosctl ssds\" and its error log",
		e.SSD, e.QID, e.Op, e.LBA, e.Blocks, e.After, e.Attempts, also)
}

// rowUnknown is the Row of a row whose number only the device knows.
const rowUnknown = math.MinInt64

// RowError is a row that could not be read. Err explains why and names SSD, queue and LBA.
type RowError struct {
	Row int64
	Err error
}

func (e *RowError) Error() string {
	if e.Row == rowUnknown {
		return fmt.Sprintf("row not known here: %v", e.Err)
	}
	return fmt.Sprintf("row %d: %v", e.Row, e.Err)
}
func (e *RowError) Unwrap() error { return e.Err }

// SetError reports the failed rows of a set: how many, and the first few.
type SetError struct {
	Stack  string
	Failed int64
	Rows   int64
	First  []*RowError
}

func (e *SetError) Error() string {
	s := fmt.Sprintf("gpuio %s: %d of %d rows not read", e.Stack, e.Failed, e.Rows)
	if len(e.First) > 0 {
		s += "; first: " + e.First[0].Error()
	}
	return s
}

func (e *SetError) Unwrap() []error {
	out := make([]error, len(e.First))
	for i, r := range e.First {
		out[i] = r
	}
	return out
}

// forgetter is a Reader that keeps something per destination buffer.
type forgetter interface{ Forget(cuda.Buffer) error }

// Forget drops what r keeps for a destination buffer (DMA mappings). Call it before the buffer is
// freed; it fails while a set that writes to the buffer is in flight.
func Forget(r Reader, b cuda.Buffer) error {
	if f, ok := r.(forgetter); ok {
		return f.Forget(b)
	}
	return nil
}
