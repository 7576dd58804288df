package edges

import (
	"io"

	"helios/dataset/npy"
)

// Store is the folder that a sorter keeps its runs in and writes the topology to.
type Store interface {
	// Path returns the path of a file of the folder lies.
	Path(name string) string
	// Create makes a file anew, as os.Create does.
	Create(name string) (File, error)
	// Array makes name.npy of one dimension, or resumes it at a mark that it gave.
	Array(name string, t npy.DType, mark *ArrayMark) (Array, error)
	// Log is nil where an interrupted sort starts over.
	Log() Log
}

// File is a file that is being written.
type File interface {
	io.Writer
	Flush() error   // hands what is buffered to the kernel
	Finish() error  // flushes, waits for the disk and closes
	Discard() error // closes; the content does not matter
}

// Array is an array that is being written.
type Array interface {
	io.Writer
	Mark() (ArrayMark, error) // makes what was written durable
	Close() error             // completes the file and makes it durable
	Discard() error
}

// Log remembers what is on the disk, so that another run can go on there. Each call returns when
// that is durable.
type Log interface {
	// Begin notes source number id, or checks that it is the one that the interrupted run read.
	Begin(id int, s Source) error
	// Covered returns what runs have of a source's parts.
	Covered(id int) map[int]*PartMark
	// Runs are the runs that are there, and the largest id that was given to one.
	Runs() (runs []Run, last int)
	// Ran notes a run, which takes the place of others.
	Ran(r Run, replaces []int) error
	// Merged returns how far the merge is; nil: it has not begun.
	Merged() *Merged
	// MergedTo notes how far the merge is.
	MergedTo(m Merged) error
	// Done notes that the topology is whole.
	Done(c Counts) error
}

// ArrayMark is the part of an array that is on the disk, with the state of its running hash.
type ArrayMark struct {
	Bytes int64  `json:"bytes"` // of rows
	Hash  []byte `json:"hash"`
}

// PartMark holds what runs have of a part of a source.
type PartMark struct {
	Spans []Span
	Total int64 // edges, where known
	Known bool
	Units int64
}

// Ended reports whether runs have all of the part.
func (p *PartMark) Ended() bool {
	have := int64(0)
	for _, s := range p.Spans {
		have += s.To - s.From
	}
	return p.Known && have == p.Total
}

// Merged is the progress of a merge.
type Merged struct {
	Dst  uint64 `json:"dst"`
	Src  uint64 `json:"src"`
	Done int64  `json:"done"` // keys
	// Again is the number of those that were repeated and stayed.
	Again int64 `json:"again"`
	// Total is the number of keys, with the self loops that are added.
	Total int64   `json:"total"`
	CSC   CSCMark `json:"csc"`
}

func (m *Merged) from() Edge { return Edge{m.Dst, m.Src} }
