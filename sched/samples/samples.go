// Package samples keeps the mini-batches of a superbatch outside of memory between their sampling
// and their training: run files, one for the node numbers that the cache's changes are found by
// (Ginex's ids) and one for blocks (its adj). The files have no name, so nothing is left of them
// however the process ends.
package samples

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// Files are a superbatch's. Append is of one goroutine; what is appended is read by several.
type Files struct {
	dir      string
	wide     bool // node numbers take 8 bytes, else 4
	limit    int64
	ids, adj *os.File
	all      []batch
	idsEnd   int64
	adjEnd   int64
	narrow   []uint32 // scratch
}

// batch tells where a mini-batch is.
type batch struct {
	ids, adj       int64 // from where
	rows, bytes    int64 // of adj
	idsSum, adjSum uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrFull is the cause where a mini-batch does not go into what the files may take.
var ErrFull = errors.New("take more than they may")

// Create makes files without a name on the file system of dir, for node numbers below nodes, that
// take up to limit bytes (0: what there is room for).
func Create(dir string, nodes, limit int64) (*Files, error) {
	f := &Files{dir: dir, wide: nodes > math.MaxUint32, limit: limit}
	for _, to := range []**os.File{&f.ids, &f.adj} {
		var err error
		if *to, err = unnamed(dir); err != nil {
			return nil, errors.Join(f.cause(err), f.Close())
		}
	}
	return f, nil
}

// unnamed opens a file that no folder lists.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), dir), nil
	}
	// File systems without O_TMPFILE say one of these (open(2)): the name lasts for a moment.
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) &&
		!errors.Is(err, unix.EINVAL) {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	f, err := os.CreateTemp(dir, ".superbatch-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// cause says what to do about an error of a file.
func (f *Files) cause(err error) error {
	key, dir := errs.Key("superbatch"), errs.Key("superbatch-dir")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG):
		return errs.New(errs.Capability,
			"the samples of a superbatch take more room than %s has (%w; %s were written): lower %v, or give another folder with %v",
			f.dir, err, units.FormatBytes(f.Bytes()), key, dir)
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) ||
		errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
		return errs.New(errs.Usage, "the samples of a superbatch: %w; give another folder with %v",
			err, dir)
	}
	return fmt.Errorf("the samples of a superbatch in %s: %w", f.dir, err)
}

// Close gives the room back.
func (f *Files) Close() error {
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
func (f *Files) Bytes() int64 { return f.idsEnd + f.adjEnd }

// Append adds a mini-batch: its frontier and what else belongs to it.
func (f *Files) Append(nodes []int64, adj []byte) error {
	ids := hostmem.Bytes(nodes)
	if !f.wide {
		f.narrow = f.narrow[:0]
		for _, v := range nodes {
			f.narrow = append(f.narrow, uint32(v))
		}
		ids = hostmem.Bytes(f.narrow)
	}
	if more := int64(len(ids) + len(adj)); f.limit > 0 && f.Bytes()+more > f.limit {
		return errs.New(errs.Usage,
			"the samples of a superbatch of %d mini-batches %w: %v %s; lower %v, or give more",
			len(f.all)+1, ErrFull, errs.Key("superbatch-disk"), units.FormatBytes(f.limit),
			errs.Key("superbatch"))
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
func (f *Files) Batches() int { return len(f.all) }

// Rows is the length of a mini-batch's frontier.
func (f *Files) Rows(index int) int { return int(f.all[index].rows) }

// Read gives a mini-batch's frontier, in buf where that has room.
func (f *Files) Read(index int, buf []int64) ([]int64, error) {
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
func (f *Files) Adj(index int, buf []byte) ([]byte, error) {
	b := &f.all[index]
	if int64(cap(buf)) < b.bytes {
		buf = make([]byte, b.bytes+b.bytes/8)
	}
	buf = buf[:b.bytes]
	return buf, f.read(f.adj, index, "blocks", buf, b.adj, b.adjSum)
}

func (f *Files) read(from *os.File, index int, what string, to []byte, at int64,
	sum uint32) error {
	if _, err := from.ReadAt(to, at); err != nil {
		return f.cause(err)
	}
	if got := crc32.Checksum(to, castagnoli); got != sum {
		return errs.New(errs.Device,
			"the samples of a superbatch in %s: the %s of mini-batch %d have checksum %08x and were written with %08x; check that disk, and run it again",
			f.dir, what, index, got, sum)
	}
	return nil
}
