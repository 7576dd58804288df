// Package seal keeps the checksums of a dataset's files: a manifest that is written when the
// dataset is made, and readers that hold every byte against it. A file that rots between then and a
// run is found before its bytes can change a result.
//
// The manifest is a line of JSON (Manifest), a line with that line's CRC32C, and the CRC32C of each
// block of each file, 4 bytes little-endian, one file after the other. The JSON holds the checksum
// of each file's part, so a reader needs only the part of the file that it reads.
package seal

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path/filepath"
	"slices"

	"helios/internal/errs"
	"helios/internal/infile"
)

// Name is the manifest's file in a dataset's folder.
const Name = "dataset.seal"

// Version is the version of the manifest that this code writes and reads.
const Version = 1

// Sizes of the blocks that have a checksum each: files that are read by page have small ones.
const (
	Block = 64 << 10
	Page  = 4096
)

// maxHead bounds the two lines: a dataset has a dozen files, and two for each relation.
const maxHead = 32 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// File holds what the manifest says of one file.
type File struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	Block int64  `json:"block"` // bytes that a checksum is of; the last one may be of fewer
	// Sums is the CRC32C of the file's block checksums as they stand in the manifest.
	Sums uint32 `json:"sums_crc32c"`
	// SHA256 and Rows are of an array's payload: the dataset's UUID is made of them.
	SHA256 []byte `json:"sha256,omitempty"`
	Rows   int64  `json:"rows,omitempty"`

	offset int64 // where its checksums begin in the manifest
}

func (f *File) blocks() int64 { return (f.Bytes + f.Block - 1) / f.Block }

// Manifest is an open manifest.
type Manifest struct {
	Version int    `json:"seal"`
	UUID    string `json:"uuid"` // of the dataset
	Files   []File `json:"files"`

	dir string
}

// Path is the manifest's file.
func (m *Manifest) Path() string { return filepath.Join(m.dir, Name) }

// File returns what the manifest says of a file; nil when it does not name it.
func (m *Manifest) File(name string) *File {
	for i := range m.Files {
		if m.Files[i].Name == name {
			return &m.Files[i]
		}
	}
	return nil
}

// Sealed is a file with its block checksums, ready to be written to a manifest.
type Sealed struct {
	File
	Checksums []uint32
}

// Write makes the manifest of a dataset in w, the files sorted by name.
func Write(w io.Writer, uuid string, files []Sealed) error {
	slices.SortFunc(files,
		func(a, b Sealed) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	m := Manifest{Version: Version, UUID: uuid}
	var sums []byte
	for _, f := range files {
		if int64(len(f.Checksums)) != f.blocks() {
			return fmt.Errorf("seal %s: %d checksums for %d blocks", f.Name, len(f.Checksums),
				f.blocks())
		}
		from := len(sums)
		for _, s := range f.Checksums {
			sums = binary.LittleEndian.AppendUint32(sums, s)
		}
		f.Sums = crc32.Checksum(sums[from:], castagnoli)
		m.Files = append(m.Files, f.File)
	}
	head, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(head)+len("\n01234567\n") > maxHead {
		return fmt.Errorf("seal: its list of files takes %d bytes, at most %d can be", len(head),
			maxHead)
	}
	_, err = fmt.Fprintf(w, "%s\n%08x\n", head, crc32.Checksum(head, castagnoli))
	if err == nil {
		_, err = w.Write(sums)
	}
	return err
}

// Open reads the manifest of the dataset in dir and checks it. Without one the error is
// fs.ErrNotExist; a damaged one is an error of class device.
func Open(dir string) (*Manifest, error) {
	m := &Manifest{dir: dir}
	f, err := infile.Open(m.Path())
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	head, err := readHead(f)
	if err != nil {
		return nil, errs.New(errs.Device, "%s: %w", m.Path(), err)
	}
	if head == nil {
		return nil, m.damaged("its list of files has another checksum than it was written with")
	}
	if err := json.Unmarshal(head, m); err != nil {
		return nil, m.damaged(err.Error())
	}
	if m.Version != Version {
		return nil, errs.New(errs.Usage,
			"%s: version %d is unknown, this heliosctl reads %d; use the heliosctl that wrote it",
			m.Path(), m.Version, Version)
	}
	offset := int64(len(head) + len("\n01234567\n"))
	for i := range m.Files {
		f := &m.Files[i]
		if f.Bytes < 0 || f.Block < Page || f.Block > pieceBytes || f.Block&(f.Block-1) != 0 ||
			!filepath.IsLocal(f.Name) || filepath.Clean(f.Name) != f.Name {
			return nil, m.damaged(fmt.Sprintf("%q has %d bytes in blocks of %d", f.Name, f.Bytes,
				f.Block))
		}
		f.offset = offset
		offset += 4 * f.blocks()
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errs.New(errs.Device, "%s: %w", m.Path(), err)
	}
	if st.Size() != offset {
		return nil, m.damaged(fmt.Sprintf("it has %d bytes, its list of files needs %d",
			st.Size(), offset))
	}
	return m, nil
}

// readHead returns the list of files; nil where its checksum is another.
func readHead(r io.Reader) (head []byte, err error) {
	b := bufio.NewReader(io.LimitReader(r, maxHead))
	head, err = b.ReadBytes('\n')
	if err == nil {
		var sum []byte
		sum, err = b.ReadBytes('\n')
		head = head[:len(head)-1]
		if string(sum) == fmt.Sprintf("%08x\n", crc32.Checksum(head, castagnoli)) {
			return head, nil
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return nil, nil
}

func (m *Manifest) damaged(what string) error {
	return errs.New(errs.Device, "%s: damaged: %s; restore the file, or import the dataset again",
		m.Path(), what)
}

// checksums reads those of one file.
func (m *Manifest) checksums(e *File) ([]uint32, error) {
	f, err := infile.Open(m.Path())
	if err != nil {
		return nil, errs.With(errs.Device, err)
	}
	defer func() { _ = f.Close() }() // read only
	b := make([]byte, 4*e.blocks())
	if _, err := f.ReadAt(b, e.offset); err != nil {
		return nil, errs.New(errs.Device, "%s: %w", m.Path(), err)
	}
	if crc32.Checksum(b, castagnoli) != e.Sums {
		return nil, m.damaged("the checksums of " + e.Name + " are not those that were written")
	}
	sums := make([]uint32, e.blocks())
	for i := range sums {
		sums[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return sums, nil
}

// Sum collects the checksums of a file that is written from front to back.
type Sum struct {
	name  string
	block int64
	sums  []uint32
	crc   uint32
	fill  int64  // bytes in crc
	first []byte // the first block, which Patch may change
	bytes int64
}

// NewSum begins a file with blocks of so many bytes.
func NewSum(name string, block int64) *Sum { return &Sum{name: name, block: block} }

// Write takes the file's next bytes; it never fails.
func (s *Sum) Write(b []byte) (int, error) {
	all := len(b)
	for len(b) > 0 {
		n := min(int64(len(b)), s.block-s.fill)
		if s.bytes < s.block {
			s.first = append(s.first, b[:n]...)
		}
		s.crc = crc32.Update(s.crc, castagnoli, b[:n])
		s.fill += n
		s.bytes += n
		b = b[n:]
		if s.fill == s.block {
			s.sums = append(s.sums, s.crc)
			s.crc, s.fill = 0, 0
		}
	}
	return all, nil
}

// Patch says that the file's beginning was written again, as b: no longer than a block, nor than
// the file.
func (s *Sum) Patch(b []byte) {
	copy(s.first, b)
	crc := crc32.Checksum(s.first, castagnoli)
	if len(s.sums) > 0 {
		s.sums[0] = crc
	} else {
		s.crc = crc
	}
}

// Sealed is the file as it was written.
func (s *Sum) Sealed() Sealed {
	sums := slices.Clone(s.sums)
	if s.fill > 0 {
		sums = append(sums, s.crc)
	}
	return Sealed{File: File{Name: s.name, Bytes: s.bytes, Block: s.block}, Checksums: sums}
}
