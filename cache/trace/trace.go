// Package trace keeps the accesses of a run in a file: which rows each mini-batch looked up, in order,
// and what placed the static tiers. "heliosctl cache replay" plays other policies and sizes on it.
package trace

import "helios/internal/errs"

// Kinds of passes.
const (
	Train    = 0
	Validate = 1
	Test     = 2
)

// Header says what was run.
type Header struct {
	Dataset        string // UUID
	Name           string // of the dataset
	Rows, RowBytes int64  // of features, as stored
	SSDs           int64  // rows are striped over
	SlotBytes      int64  // from a row on an SSD to the next (rows per LBA > 1: LBA / rows)
	LBABytes       int64
	Seed           uint64
	Fanouts        []int64
	Sampler        string
	Batch          int64
	Mode, Policy   string // of the run
	GPULines       int64  // lines (dynamic) or rows (static) of the GPU tier
	LineBytes      int64  // of a line of a dynamic GPU tier; 0: static
	RowsPerLine    int64
	CPURows        int64 // rows of the static CPU tier
	Window         int64
	HotnessBy      string // what Hotness is from
}

// Batch is one mini-batch's accesses.
type Batch struct {
	Kind, Epoch, Index int
	Parts              [][]int64 // rows in the order of the lookups, by lookup
}

// Live are a pass's live counters, in rows: what a replay must come to.
type Live struct {
	Kind, Epoch                 int
	Batches                     int64
	RowsGPU, RowsCPU, RowsSSD   int64
	BytesSSD                    int64
	Inserted, Evicted, Bypassed int64 // lines
}

// Writer writes a trace. Nothing with the file's name is there before Close.
type Writer struct{}

// Create begins a trace.
func Create(path string, h Header) (*Writer, error) {
	return nil, errs.New(errs.Capability, "trace %s", path)
}

// Hotness records what the static tiers were placed by: a score for each row; rows of equal score go by
// number. Before the first batch.
func (w *Writer) Hotness(scores []uint32) error { return nil }

// Batch records a batch's accesses: Begin, then a Part for each lookup.
func (w *Writer) Begin(kind, epoch, index int) error { return nil }

// Part records one lookup of the batch begun last.
func (w *Writer) Part(rows []int64) error { return nil }

// Reset records that the tiers were emptied and placed anew (the GPU's memory ran out) with so many lines.
func (w *Writer) Reset(gpuLines int64) error { return nil }

// Live records a finished pass's counters.
func (w *Writer) Live(l Live) error { return nil }

// Close makes the file whole and gives it its name.
func (w *Writer) Close() error { return nil }

// Discard ends a trace that is not to be kept.
func (w *Writer) Discard() error { return nil }
