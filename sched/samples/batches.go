package samples

import (
	"errors"
	"hash/crc32"
	"os"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// batches are mini-batches in two files. One goroutine adds to them, several read.
type batches struct {
	what, remedy string            // for errors: of what the samples are; what to do about damage
	cause        func(error) error // adds the remedy to an error of a file
	full         func() error      // the error of a mini-batch beyond limit
	wide         bool              // node numbers take 8 bytes, else 4
	limit        int64             // bytes of both files; 0: none
	ids, adj     *os.File
	all          []batch
	idsEnd       int64
	adjEnd       int64
	narrow       []uint32 // scratch
}

// batch is the place of a mini-batch.
type batch struct {
	ids, adj       int64 // from where
	rows, bytes    int64 // of adj
	idsSum, adjSum uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// idBytes is the size of a node number.
func (f *batches) idBytes() int64 {
	if f.wide {
		return 8
	}
	return 4
}

func (f *batches) close() error {
	var all []error
	for _, x := range []*os.File{f.ids, f.adj} {
		if x != nil {
			all = append(all, x.Close())
		}
	}
	f.ids, f.adj = nil, nil
	return errors.Join(all...)
}

// Bytes returns what the files take.
func (f *batches) Bytes() int64 { return f.idsEnd + f.adjEnd }

// add adds a mini-batch: its frontier and what else belongs to it.
func (f *batches) add(nodes []int64, adj []byte) error {
	ids := hostmem.Bytes(nodes)
	if !f.wide {
		f.narrow = f.narrow[:0]
		for _, v := range nodes {
			f.narrow = append(f.narrow, uint32(v))
		}
		ids = hostmem.Bytes(f.narrow)
	}
	if more := int64(len(ids) + len(adj)); f.limit > 0 && f.Bytes()+more > f.limit {
		return f.full()
	}
	b := batch{ids: f.idsEnd, adj: f.adjEnd, rows: int64(len(nodes)), bytes: int64(len(adj)),
		idsSum: crc32.Checksum(ids, castagnoli), adjSum: crc32.Checksum(adj, castagnoli)}
	if _, err := f.ids.WriteAt(ids, f.idsEnd); err != nil {
		return f.cause(err)
	}
	f.idsEnd += int64(len(ids))
	if _, err := f.adj.WriteAt(adj, f.adjEnd); err != nil {
		return f.cause(err)
	}
	f.adjEnd += int64(len(adj))
	f.all = append(f.all, b)
	return nil
}

// Batches implements superbatch.Accesses, as Rows and Read do.
func (f *batches) Batches() int { return len(f.all) }

// Rows is the length of a mini-batch's frontier.
func (f *batches) Rows(index int) int { return int(f.all[index].rows) }

// Read gives a mini-batch's frontier, in buf where that has room.
func (f *batches) Read(index int, buf []int64) ([]int64, error) {
	b := &f.all[index]
	if int64(cap(buf)) < b.rows {
		buf = make([]int64, b.rows+b.rows/8)
	}
	buf = buf[:b.rows]
	mem := hostmem.Bytes(buf)
	if f.wide {
		return buf, f.read(f.ids, index, "frontier", mem, b.ids, b.idsSum)
	}
	// Into the second half, which the numbers then leave from the front.
	half := mem[len(mem)/2:]
	if err := f.read(f.ids, index, "frontier", half, b.ids, b.idsSum); err != nil {
		return nil, err
	}
	for i, v := range hostmem.View[uint32](half) {
		buf[i] = int64(v)
	}
	return buf, nil
}

// Adj gives what else belongs to a mini-batch, in buf where that has room.
func (f *batches) Adj(index int, buf []byte) ([]byte, error) {
	b := &f.all[index]
	if int64(cap(buf)) < b.bytes {
		buf = make([]byte, b.bytes+b.bytes/8)
	}
	buf = buf[:b.bytes]
	return buf, f.read(f.adj, index, "blocks", buf, b.adj, b.adjSum)
}

func (f *batches) read(from *os.File, index int, what string, to []byte, offset int64,
	sum uint32) error {
	if _, err := from.ReadAt(to, offset); err != nil {
		return f.cause(err)
	}
	if got := crc32.Checksum(to, castagnoli); got != sum {
		return errs.New(errs.Device,
			"the samples of a %s: the %s of mini-batch %d have checksum %08x and were written with %08x; check that disk, and %s",
			f.what, what, index, got, sum, f.remedy)
	}
	return nil
}
