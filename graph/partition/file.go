package partition

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// A partition's file is a line of JSON (head), a line with that line's CRC32C, the CRC32C of each
// block of the parts, zeros up to a multiple of 4096 bytes, and the parts: a little-endian uint32
// for each node. docs/reference/partitions.md has it for others.

// Version is the version of the file that this code writes and reads.
const Version = 1

// Suffix is that of the names of partitions' files.
const Suffix = ".partition"

const (
	blockBytes = 64 << 10 // that have a checksum each
	maxHead    = 64 << 10
	tailBytes  = len("\n01234567\n")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// head is the file's first line.
type head struct {
	Info
	Block int64  `json:"block"`       // bytes of the parts that a checksum is of
	Sums  uint32 `json:"sums_crc32c"` // of the checksums as they stand
}

// layout returns the number of checksums, and the offsets at which the parts begin and the file
// ends.
func (h *head) layout(line int) (sums, begin, end int64) {
	sums = (4*h.Nodes + h.Block - 1) / h.Block
	begin = int64(line+tailBytes) + 4*sums
	begin = (begin + hostmem.PageBytes - 1) &^ (hostmem.PageBytes - 1)
	return sums, begin, begin + 4*h.Nodes
}

// Write writes the file.
func (p *Partition) Write(w io.Writer) error {
	h := head{Info: p.Info, Block: blockBytes}
	data := hostmem.Bytes(p.Of)
	var sums []byte
	for pos := 0; pos < len(data); pos += blockBytes {
		sums = binary.LittleEndian.AppendUint32(sums,
			crc32.Checksum(data[pos:min(pos+blockBytes, len(data))], castagnoli))
	}
	h.Sums = crc32.Checksum(sums, castagnoli)
	line, err := json.Marshal(h)
	if err != nil {
		return err
	}
	_, begin, _ := h.layout(len(line))
	b := bufio.NewWriterSize(w, 1<<20)
	_, _ = fmt.Fprintf(b, "%s\n%08x\n", line, crc32.Checksum(line, castagnoli))
	_, _ = b.Write(sums)
	_, _ = b.Write(make([]byte, begin-int64(len(line)+tailBytes+len(sums))))
	_, _ = b.Write(data)
	return b.Flush() // the first error of all
}

// Damaged is a partition's file that isn't as it was written.
type Damaged struct{ Path, What string }

func (e *Damaged) Error() string {
	return fmt.Sprintf("%s is damaged: %s; partition the dataset again", e.Path, e.What)
}

// Open reads a partition and checks all of it. A file that is not as it was written is an error of
// class Device, *Damaged; one that never was a partition, or of another version, of class Usage.
func Open(path string) (p *Partition, err error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	defer func() { _ = f.Close() }() // read only
	st, err := f.Stat()
	if err != nil {
		return nil, errs.With(errs.Device, err)
	}
	return open(f, st.Size(), path)
}

// open is Open of a file that is open, and as long as size.
func open(f io.ReaderAt, size int64, path string) (*Partition, error) {
	bad := func(format string, a ...any) error {
		return errs.With(errs.Device, &Damaged{path, fmt.Sprintf(format, a...)})
	}
	h, line, err := readHead(io.NewSectionReader(f, 0, size), path, bad)
	if err != nil {
		return nil, err
	}
	n, begin, end := h.layout(line)
	if size != end {
		return nil, bad("it has %d bytes, %d nodes need %d", size, h.Nodes, end)
	}
	// As many bytes are there, so the file itself bounds what is allocated.
	sums := make([]byte, begin-int64(line+tailBytes))
	if _, err := f.ReadAt(sums, int64(line+tailBytes)); err != nil {
		return nil, errs.New(errs.Device, "%s: %w", path, err)
	}
	if got := crc32.Checksum(sums[:4*n], castagnoli); got != h.Sums {
		return nil, bad("its checksums have CRC32C %08x, not %08x", got, h.Sums)
	}
	for _, b := range sums[4*n:] {
		if b != 0 {
			return nil, bad("something stands between its checksums and byte %d", begin)
		}
	}
	mem, err := hostmem.Alloc(4*h.Nodes, "parts of nodes")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	p := &Partition{Info: h.Info, Of: hostmem.View[uint32](mem), mem: mem}
	if err := p.read(f, begin, sums, bad); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// read fills and checks the parts.
func (p *Partition) read(f io.ReaderAt, offset int64, sums []byte,
	bad func(format string, a ...any) error) error {
	for from := int64(0); from < int64(len(p.mem)); from += blockBytes {
		b := p.mem[from:min(from+blockBytes, int64(len(p.mem)))]
		if _, err := f.ReadAt(b, offset+from); err != nil {
			return errs.With(errs.Device, err)
		}
		want := binary.LittleEndian.Uint32(sums[from/blockBytes*4:])
		if got := crc32.Checksum(b, castagnoli); got != want {
			return bad("bytes %d to %d have CRC32C %08x, not %08x", offset+from,
				offset+from+int64(len(b))-1, got, want)
		}
	}
	for v, part := range p.Of {
		if int64(part) >= int64(p.Info.Parts) {
			return bad("node %d is in part %d of %d", v, part, p.Info.Parts)
		}
	}
	return nil
}

func readHead(f io.Reader, path string, bad func(format string, a ...any) error) (h head, line int,
	err error) {
	text := make([]byte, maxHead)
	n, err := io.ReadFull(f, text)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return h, 0, errs.New(errs.Device, "%s: %w", path, err)
	}
	first, rest, _ := bytes.Cut(text[:n], []byte("\n"))
	if !bytes.HasPrefix(first, []byte(`{"partition":`)) {
		return h, 0, errs.New(errs.Usage,
			"%s is no partition; \"heliosctl partition\" makes one", path)
	}
	if want := fmt.Sprintf("%08x\n", crc32.Checksum(first, castagnoli)); !bytes.HasPrefix(rest,
		[]byte(want)) {
		return h, 0, bad("its first line has another checksum than it was written with")
	}
	if err := json.Unmarshal(first, &h); err != nil {
		return h, 0, bad("%v", err)
	}
	if h.Version != Version {
		return h, 0, errs.New(errs.Usage,
			"%s: version %d is unknown, this heliosctl reads %d; use the heliosctl that wrote it",
			path, h.Version, Version)
	}
	if h.Nodes < 1 || h.Nodes >= math.MaxUint32 || h.Edges < 0 || h.Parts < 1 ||
		int64(h.Parts) > h.Nodes || h.Block != blockBytes {
		return h, 0, bad("%d nodes, %d edges, %d parts, blocks of %d bytes", h.Nodes, h.Edges,
			h.Parts, h.Block)
	}
	if _, err := uuid.Parse(h.Dataset); err != nil {
		return h, 0, bad("dataset %.40q is no UUID", h.Dataset)
	}
	return h, len(first), nil
}

// Files are the partitions' files in a folder, sorted: those whose names end in Suffix.
func Files(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	var out []string
	for _, e := range entries { // sorted
		// Hidden ones are being written.
		if filepath.Ext(e.Name()) == Suffix && e.Name()[0] != '.' {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out, nil
}
