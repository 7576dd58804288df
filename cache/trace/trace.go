// Package trace keeps the accesses of a run in a file: which rows each mini-batch looked up, in
// order, and what placed the static tiers. "heliosctl cache replay" plays other policies and sizes
// on it.
//
// The file: 8 bytes of magic, the version, and the header as JSON with its CRC32C; then blocks,
// each with its lengths and the CRC32C of its compressed content (DEFLATE, RFC 1951), of whole
// records, whose numbers are varints: row numbers as differences to the one before, zigzag. A last
// block is the index: the blocks' offsets, and totals; the end of the file has the index's offset.
// So a file that was not finished, or was cut, is found at once, and the accesses can be read from
// the end to the beginning, as the offline optimum must.
package trace

import (
	"bufio"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"

	"helios/internal/outfile"
)

// Kinds of passes.
const (
	Train    = 0
	Validate = 1
	Test     = 2
)

// KindName is a pass's kind in words.
func KindName(kind int) string {
	switch kind {
	case Train:
		return "train"
	case Validate:
		return "validate"
	case Test:
		return "test"
	}
	return fmt.Sprintf("kind %d", kind)
}

// Header describes the run.
type Header struct {
	Dataset   string `json:"dataset"`   // UUID
	Name      string `json:"name"`      // of the dataset
	Rows      int64  `json:"rows"`      // of features
	RowBytes  int64  `json:"row_bytes"` // as stored
	SSDs      int64  `json:"ssds"`      // rows are striped over
	SlotBytes int64  `json:"slot_bytes"`
	// SlotBytes: from a row on an SSD to the next (several rows an LBA: LBA / rows)
	LBABytes int64   `json:"lba_bytes"`
	Seed     uint64  `json:"seed"`
	Fanouts  []int64 `json:"fanouts"`
	Sampler  string  `json:"sampler"`
	Batch    int64   `json:"batch"`
	// batches that share draws; traces of older programs have none: 0, as 1
	BatchDependency int64  `json:"batch_dependency,omitempty"`
	Mode            string `json:"mode"`
	// cpu and mmap widen reads to what their files allow
	IOStack string `json:"io_stack"`
	Policy  string `json:"policy"` // of the run
	// Directory of a dynamic GPU tier; traces of older programs have none: policy.InQueues
	Directory   string `json:"directory,omitempty"`
	GPULines    int64  `json:"gpu_lines"`      // lines (dynamic) or rows (static) of the GPU tier
	LineBytes   int64  `json:"line_bytes"`     // of a line of a dynamic GPU tier; 0: static
	RowsPerLine int64  `json:"rows_per_line"`  // of a dynamic GPU tier
	CPURows     int64  `json:"cpu_rows"`       // of the static CPU tier
	Window      int64  `json:"window"`         // coming batches whose lines stay
	HotnessBy   string `json:"hotness_source"` // what Hotness is from
	// of a run whose tiers know a superbatch: its first rows were read before it began
	SuperbatchFill bool `json:"superbatch_fill,omitempty"`
}

// Superbatch marks mini-batches of a pass, from First on, that were known beforehand, to tiers of
// so many rows. A later one may begin before it ends: where the GPU's memory ran out.
type Superbatch struct {
	Kind, Epoch    int
	First, Batches int
	GPURows        int64
	CPURows        int64
	// Kept are the slots, the first ones, whose rows the superbatch found there: those of both
	// tiers, of the GPU tier alone where the other's memory had served sampling, or 0.
	Kept int64
}

// Batch is one mini-batch's accesses.
type Batch struct {
	Kind, Epoch, Index int
	Parts              [][]int64 // rows in the order of the lookups, by lookup
}

// Live are a pass's live counters, in rows: what a replay must come to. They are of the batches
// that the trace holds: those before a checkpoint that the run resumed from don't count, and a
// batch that was looked up again after Reset counts once.
type Live struct {
	Kind, Epoch                 int
	Batches                     int64
	RowsGPU, RowsCPU, RowsSSD   int64
	BytesSSD                    int64
	Inserted, Evicted, Bypassed int64 // lines
}

// Totals are the index's counts of the file.
type Totals struct {
	Blocks  int64 `json:"blocks"`
	Batches int64 `json:"batches"`
	Parts   int64 `json:"lookups"`
	Rows    int64 `json:"row_accesses"`
	// Writer.Reset: only where there are some does a batch stand twice
	Resets  int64 `json:"resets"`
	Hotness bool  `json:"hotness"` // there are scores
}

const (
	magic    = "HELTRACE"
	endMagic = "HELTREND"
	// Version is the format's.
	Version = 3
	// oldest is the version without superbatches.
	oldest = 2
	// blockBytes of records make a block full; a record is at most partRows rows.
	blockBytes = 1 << 20
	partRows   = 1 << 16
	// maxBlock bounds what a reader takes for a block: a full one and a record of the longest
	// varints.
	maxBlock  = blockBytes + 11*partRows + 64
	maxHeader = 1 << 20
	tailBytes = 8 + 4 + 4 + len(endMagic) // offset of the index, its length, its CRC, the magic
)

// Records.
const (
	recBegin      = 1 + iota // kind, epoch, index
	recPart                  // count, rows
	recMore                  // more rows of the last part
	recReset                 // GPU lines
	recLive                  // ten numbers
	recHotness               // count, scores
	recPlace                 // tier, count, rows: what a static tier holds, ascending
	recSuperbatch            // seven numbers
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Writer writes a trace. Nothing with the file's name is there before Close. A nil Writer records
// nothing. After an error every call returns it. It is for one goroutine at a time.
type Writer struct {
	path    string
	header  Header
	f       *outfile.File
	w       *bufio.Writer
	err     error
	off     int64
	block   []byte
	blocks  []int64 // offsets
	totals  Totals
	begun   bool
	deflate *flate.Writer
	packed  bytes.Buffer
}

// Create begins a trace; replace allows it to take the place of a file that is there.
func Create(path string, h Header, replace bool) (*Writer, error) {
	head, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	f, err := outfile.Create("trace", path, replace)
	if err != nil {
		return nil, err
	}
	w := &Writer{path: path, header: h, f: f, w: bufio.NewWriterSize(f, 1<<18)}
	if w.deflate, err = flate.NewWriter(&w.packed, flate.BestSpeed); err != nil {
		return nil, errors.Join(err, w.Discard())
	}
	b := binary.LittleEndian.AppendUint32([]byte(magic), Version)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(head)))
	b = append(b, head...)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[len(magic):], castagnoli))
	if err := w.write(b); err != nil {
		return nil, errors.Join(err, w.Discard())
	}
	return w, nil
}

func (w *Writer) write(b []byte) error {
	if w.err == nil {
		if _, err := w.w.Write(b); err != nil {
			w.err = w.unwritten(err)
		}
		w.off += int64(len(b))
	}
	return w.err
}

func (w *Writer) unwritten(err error) error {
	return fmt.Errorf(
		"trace %s: %w; make room there (a row access takes about 4 bytes), or name a file elsewhere",
		w.path, err)
}

// flush ends the block.
func (w *Writer) flush() error {
	if w.err != nil || len(w.block) == 0 {
		return w.err
	}
	w.blocks = append(w.blocks, w.off)
	w.totals.Blocks++
	err := w.pack()
	w.block = w.block[:0]
	return err
}

// pack writes the block's content as it stands in the file.
func (w *Writer) pack() error {
	w.packed.Reset()
	w.deflate.Reset(&w.packed)
	if _, err := w.deflate.Write(w.block); err != nil {
		w.err = err
		return err
	}
	if err := w.deflate.Close(); err != nil {
		w.err = err
		return err
	}
	var head [12]byte
	binary.LittleEndian.PutUint32(head[0:], uint32(len(w.block)))
	binary.LittleEndian.PutUint32(head[4:], uint32(w.packed.Len()))
	sum := crc32.Update(crc32.Checksum(head[:8], castagnoli), castagnoli, w.packed.Bytes())
	binary.LittleEndian.PutUint32(head[8:], sum)
	if err := w.write(head[:]); err != nil {
		return err
	}
	return w.write(w.packed.Bytes())
}

func (w *Writer) record(numbers ...uint64) {
	for _, n := range numbers {
		w.block = binary.AppendUvarint(w.block, n)
	}
}

func (w *Writer) full() error {
	if len(w.block) >= blockBytes {
		return w.flush()
	}
	return w.err
}

// rows appends a count and rows as differences.
func (w *Writer) rows(rows []int64) {
	b := binary.AppendUvarint(w.block, uint64(len(rows)))
	last := int64(0)
	for _, r := range rows {
		b = binary.AppendVarint(b, r-last)
		last = r
	}
	w.block = b
}

// Hotness records what the static tiers were placed by: a score for each row; rows of equal score
// go by number. Before the first batch.
func (w *Writer) Hotness(scores []uint32) error {
	if w == nil || w.err != nil || len(scores) == 0 {
		return w.failed()
	}
	if int64(len(scores)) != w.header.Rows || w.totals.Batches > 0 {
		w.err = fmt.Errorf("trace %s: hotness of %d rows for %d, after %d batches", w.path,
			len(scores), w.header.Rows, w.totals.Batches)
		return w.err
	}
	w.totals.Hotness = true
	for len(scores) > 0 && w.err == nil {
		n := min(len(scores), partRows)
		w.record(recHotness, uint64(n))
		for _, s := range scores[:n] {
			w.block = binary.AppendUvarint(w.block, uint64(s))
		}
		scores = scores[n:]
		w.err = w.full()
	}
	return w.err
}

// Place records what the static tiers hold from here on, rows in ascending order: before the first
// batch and after a Reset. Without it the hottest rows are in the GPU tier (static policy) and the
// next in the CPU tier.
func (w *Writer) Place(gpu, cpu []int64) error {
	if w == nil {
		return nil
	}
	for tier, rows := range [][]int64{gpu, cpu} {
		for first := true; first || len(rows) > 0; first = false {
			n := min(len(rows), partRows)
			// The first piece of a tier begins it.
			begins := uint64(0)
			if first {
				begins = 1
			}
			w.record(recPlace, uint64(tier), begins)
			w.rows(rows[:n])
			rows = rows[n:]
			if err := w.full(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Begin begins a batch's accesses: a Part for each lookup follows.
func (w *Writer) Begin(kind, epoch, index int) error {
	if w == nil || w.err != nil {
		return w.failed()
	}
	w.begun = true
	w.totals.Batches++
	w.record(recBegin, uint64(kind), uint64(epoch), uint64(index))
	return w.full()
}

func (w *Writer) failed() error {
	if w == nil {
		return nil
	}
	return w.err
}

// Part records one lookup of the batch begun last: rows from 0 to Header.Rows-1.
func (w *Writer) Part(rows []int64) error {
	if w == nil || w.err != nil {
		return w.failed()
	}
	if !w.begun {
		w.err = fmt.Errorf("trace %s: a lookup before the first batch", w.path)
		return w.err
	}
	w.totals.Parts++
	w.totals.Rows += int64(len(rows))
	for tag := uint64(recPart); ; tag = recMore {
		n := min(len(rows), partRows)
		w.record(tag)
		w.rows(rows[:n])
		if err := w.full(); err != nil {
			return err
		}
		if rows = rows[n:]; len(rows) == 0 {
			return nil
		}
	}
}

// Reset records that the tiers were emptied and placed anew (the GPU's memory ran out) with so many
// lines. A batch that was looked up before it and is begun again after it counts once, with what it
// met then.
func (w *Writer) Reset(gpuLines int64) error {
	if w == nil || w.err != nil {
		return w.failed()
	}
	w.begun = false
	w.totals.Resets++
	w.record(recReset, uint64(gpuLines))
	return w.full()
}

// Superbatch records which mini-batches are known from here on: before the first of them.
func (w *Writer) Superbatch(s Superbatch) error {
	if w == nil || w.err != nil {
		return w.failed()
	}
	w.begun = false
	w.record(recSuperbatch, uint64(s.Kind), uint64(s.Epoch), uint64(s.First), uint64(s.Batches),
		uint64(s.GPURows), uint64(s.CPURows), uint64(s.Kept))
	return w.full()
}

// Live records a finished pass's counters.
func (w *Writer) Live(l Live) error {
	if w == nil || w.err != nil {
		return w.failed()
	}
	w.begun = false
	w.record(recLive, uint64(l.Kind), uint64(l.Epoch), uint64(l.Batches), uint64(l.RowsGPU),
		uint64(l.RowsCPU), uint64(l.RowsSSD),
		uint64(l.BytesSSD), uint64(l.Inserted), uint64(l.Evicted), uint64(l.Bypassed))
	return w.full()
}

// Bytes is the file's length so far.
func (w *Writer) Bytes() int64 {
	if w == nil {
		return 0
	}
	return w.off
}

// Close makes the file whole and gives it its name.
func (w *Writer) Close() error {
	if w == nil {
		return nil
	}
	if err := w.flush(); err != nil {
		return errors.Join(err, w.Discard())
	}
	offset := w.off
	hot := uint64(0)
	if w.totals.Hotness {
		hot = 1
	}
	w.record(uint64(w.totals.Blocks), uint64(w.totals.Batches), uint64(w.totals.Parts),
		uint64(w.totals.Rows), uint64(w.totals.Resets), hot)
	last := int64(0)
	for _, off := range w.blocks {
		w.record(uint64(off - last))
		last = off
	}
	tail := binary.LittleEndian.AppendUint64(nil, uint64(offset))
	tail = binary.LittleEndian.AppendUint32(tail, uint32(len(w.block)))
	tail = binary.LittleEndian.AppendUint32(tail, crc32.Checksum(w.block, castagnoli))
	tail = append(tail, endMagic...)
	err := w.write(w.block)
	if err == nil {
		err = w.write(tail)
	}
	if err == nil {
		err = w.w.Flush()
	}
	if err = w.f.Commit(err); err != nil && w.err == nil {
		err = w.unwritten(err)
	}
	return err
}

// Discard ends a trace that is not to be kept.
func (w *Writer) Discard() error {
	if w == nil {
		return nil
	}
	if w.err == nil {
		w.err = fmt.Errorf("trace %s was discarded", w.path)
	}
	return w.f.Discard()
}
