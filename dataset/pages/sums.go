package pages

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/google/uuid"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/outfile"
)

// SumsName is the file of the checksums, beside PagesName. All little-endian:
//
//	0     magic "HeliosPG"
//	8     uint32 version, uint32 state
//	16    id of the pack
//	32    uint64 bytes of a page, uint64 pages
//	48    uint32 CRC32C of the table, uint32 CRC32C of the bytes before this field
//	56    zeros up to
//	4096  the table: CRC32C of each page, 4 bytes each
//
// It is replaced as a whole, by a rename: at Sync, and when the pages are finished.
const SumsName = "pages.crc"

const (
	sumsMagic   = "HeliosPG"
	sumsVersion = 1
	sumsHeader  = 4096
	sumsCRCAt   = 52
)

// States of a store.
const (
	stateOpen     = 1 // pages are being written
	stateComplete = 2
)

// sumsFile is the content of SumsName.
type sumsFile struct {
	spec     Spec
	complete bool
	sums     []uint32
}

// write replaces the file in dir.
func (s *sumsFile) write(dir string) (err error) {
	f, err := outfile.Create("checksums of pages", filepath.Join(dir, SumsName), true)
	if err != nil {
		return err
	}
	table := hostmem.Bytes(s.sums)
	h := make([]byte, sumsHeader)
	le := binary.LittleEndian
	copy(h, sumsMagic)
	le.PutUint32(h[8:], sumsVersion)
	le.PutUint32(h[12:], stateOpen)
	if s.complete {
		le.PutUint32(h[12:], stateComplete)
	}
	copy(h[16:], s.spec.ID[:])
	le.PutUint64(h[32:], uint64(s.spec.PageBytes))
	le.PutUint64(h[40:], uint64(s.spec.Pages))
	le.PutUint32(h[48:], crc32.Checksum(table, castagnoli))
	le.PutUint32(h[sumsCRCAt:], crc32.Checksum(h[:sumsCRCAt], castagnoli))
	if _, err = f.Write(h); err == nil {
		_, err = f.Write(table)
	}
	return f.Commit(err)
}

// readSums reads the file in dir and checks all of it. want, where it is given, is what it must be
// of. A file that is not there is fs.ErrNotExist.
func readSums(dir string, want *Spec) (s sumsFile, err error) {
	path := filepath.Join(dir, SumsName)
	f, err := infile.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
		return s, damaged(path, "%v", err)
	}
	defer errs.Closing(&err, f.Close)
	st, err := f.Stat()
	if err != nil {
		return s, errs.With(errs.Device, err)
	}
	h := make([]byte, sumsHeader)
	if _, err := io.ReadFull(f, h); err != nil {
		return s, damaged(path, "its header cannot be read (%v): it has %d bytes", err, st.Size())
	}
	if s.spec, s.complete, err = parseSumsHeader(path, h); err != nil {
		return s, err
	}
	if want != nil && s.spec != *want {
		return s, errs.New(errs.Refused,
			"%s has %d pages of %d bytes of pack %s, and %d of %d of pack %s are looked for; name the right folder, or another one to prepare in",
			path, s.spec.Pages, s.spec.PageBytes, s.spec.ID, want.Pages, want.PageBytes, want.ID)
	}
	if size := sumsHeader + 4*s.spec.Pages; st.Size() != size {
		return s, damaged(path, "it has %d bytes and should have %d", st.Size(), size)
	}
	if err := roomForSums(s.spec.Pages); err != nil {
		return s, err
	}
	s.sums = make([]uint32, s.spec.Pages)
	table := hostmem.Bytes(s.sums)
	if _, err := io.ReadFull(f, table); err != nil {
		return s, damaged(path, "its table cannot be read: %v", err)
	}
	said := binary.LittleEndian.Uint32(h[48:])
	if got := crc32.Checksum(table, castagnoli); got != said {
		return s, damaged(path, "its table has CRC32C %08x, and should have %08x", got, said)
	}
	return s, nil
}

// parseSumsHeader checks a header.
func parseSumsHeader(path string, h []byte) (spec Spec, complete bool, err error) {
	le := binary.LittleEndian
	if string(h[:8]) != sumsMagic {
		return spec, false, damaged(path, "it does not begin as a file of page checksums does")
	}
	if got, said := crc32.Checksum(h[:sumsCRCAt], castagnoli),
		le.Uint32(h[sumsCRCAt:]); got != said {
		return spec, false, damaged(path, "its header has CRC32C %08x, and says %08x", got, said)
	}
	if len(bytes.Trim(h[sumsCRCAt+4:], "\x00")) > 0 {
		return spec, false, damaged(path, "the rest of its header is not zeros")
	}
	if v := le.Uint32(h[8:]); v != sumsVersion {
		return spec, false, errs.New(errs.Device,
			"%s: version %d is not known, this heliosctl reads %d; use the heliosctl that wrote it, or prepare again in another folder",
			path, v, sumsVersion)
	}
	spec = Spec{ID: uuid.UUID(h[16:32]), PageBytes: int64(le.Uint64(h[32:])),
		Pages: int64(le.Uint64(h[40:]))}
	state := le.Uint32(h[12:])
	if err := spec.Check(); err != nil || state != stateOpen && state != stateComplete {
		return spec, false, damaged(path, "its header is impossible (%v, state %d)", err, state)
	}
	return spec, state == stateComplete, nil
}

// roomForSums refuses a table that memory has no room for: Go's heap would end the process.
func roomForSums(pages int64) error {
	if hostmem.Scarce(4*pages, 1) {
		return errs.New(errs.Capability,
			"the checksums of %d pages take %d bytes, which memory has no room for; free some",
			pages, 4*pages)
	}
	return nil
}

// zeroSum is the checksum of a page of zeros.
func zeroSum(pageBytes int64) uint32 {
	var z [align]byte
	crc := uint32(0)
	for n := int64(0); n < pageBytes; n += align {
		crc = crc32.Update(crc, castagnoli, z[:])
	}
	return crc
}

// mismatch names a page that is not what was written.
func mismatch(place string, page, offset int64, got, want uint32) error {
	return damaged(place, "page %d (bytes from %d on) has CRC32C %08x, and %08x was written", page,
		offset, got, want)
}

// FinishedError refuses to write into a store that is whole.
type FinishedError struct {
	Place  string // "in DIR"
	Remove string // how the pages are removed
}

func (e *FinishedError) Error() string {
	return fmt.Sprintf(
		"the pages %s are finished and are not written again; use them, or remove them: %s",
		e.Place, e.Remove)
}

func finished(dir string) error {
	return errs.With(errs.Refused, &FinishedError{Place: "in " + dir, Remove: "remove the folder"})
}
