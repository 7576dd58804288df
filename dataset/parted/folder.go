package parted

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// The files of a folder, beside its pages. Each but the lock is replaced as a whole, by a rename
// from a name that begins with a dot and ends in partSuffix.
const (
	manifestName  = "parted.json"
	tablesName    = "parts.tables"
	markName      = "parted.mark"
	partitionName = "nodes.partition"
	lockName      = ".lock"
	partSuffix    = ".part"
)

// format is the version of the folder and of its pages.
const format = 1

// manifest is the content of manifestName, behind which stands a line with its checksum.
type manifest struct {
	Format int       `json:"parted"`
	ID     uuid.UUID `json:"id"` // of the pages
	Key    Key       `json:"key"`
	Whole  bool      `json:"whole"`
	Stats  Stats     `json:"stats"`
}

// isOurs reports whether a folder has a layout. One that is not there, or empty, may become one.
func isOurs(dir string) (bool, error) {
	holds, other, err := durable.Holds(dir, manifestName, lockName, "."+manifestName+partSuffix)
	if err != nil {
		return false, unusable(err)
	}
	if other != "" {
		return false, errs.New(errs.Refused,
			"folder %s holds %s and no layout by part; name another folder, or one that is empty",
			dir, other)
	}
	return holds, nil
}

func unusable(err error) error {
	return errs.New(errs.Usage, "layout by part: %w; name a folder that can be written", err)
}

// takeLock keeps other processes out until the file is closed, or the process ends.
func takeLock(dir string) (*os.File, error) {
	f, err := durable.Lock(dir, lockName)
	var held *durable.HeldError
	if errors.As(err, &held) {
		return nil, errs.New(errs.Refused,
			"the layout in %s is in use by %s, which makes it; wait for it, or name another folder",
			dir, held.Holder)
	}
	if err != nil {
		return nil, unusable(err)
	}
	return f, nil
}

// mostManifest is far more than a manifest or a mark takes.
const mostManifest = 1 << 20

func readManifest(dir string) (m manifest, err error) {
	path := filepath.Join(dir, manifestName)
	b, err := infile.Read(path, mostManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return m, err
	}
	if err != nil {
		return m, damagedAt(dir, "%v", err)
	}
	if err := durable.Decode(b, &m); err != nil {
		return m, damagedAt(dir, "%s: %v", path, err)
	}
	if m.Format != format {
		return m, errs.New(errs.Capability,
			"the layout in %s has format %d, and this heliosctl reads format %d: use the one that made it, or make it in another folder",
			dir, m.Format, format)
	}
	k := &m.Key
	if m.ID == uuid.Nil || k.Parts < 1 || k.Nodes < 1 || k.RowBytes < 1 || k.PageBytes < 1 ||
		k.PageBytes%k.RowBytes != 0 {
		return m, damagedAt(dir, "%s: %d parts of %d nodes, rows of %d bytes in pages of %d", path,
			k.Parts, k.Nodes, k.RowBytes, k.PageBytes)
	}
	return m, nil
}

func (m *manifest) save(dir string) error {
	b, err := durable.Encode(m)
	if err != nil {
		return err
	}
	return durably(dir, manifestName, b)
}

// savedHook lets tests end the process, or fail, before and after a file gets its name.
var savedHook func(name string, written bool) error

// durably replaces a file of a folder: whenever the process or the machine stops, the old one or
// the new one is there.
func durably(dir, name string, data []byte) error {
	part := "." + name + partSuffix
	err := durable.Replace(dir, part, name, func(to *os.File) error {
		_, err := to.Write(data)
		return err
	}, func(done bool) error {
		if savedHook == nil {
			return nil
		}
		return savedHook(name, done)
	})
	if durable.Full(err) {
		return errs.New(errs.Capability, "%s: %w; free some room, or name another folder",
			filepath.Join(dir, part), err)
	}
	return err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The tables are magic, then the number of parts, of training nodes and of the static nodes' edges,
// Base, Statics, Edges, Train, all int64, and a CRC32C of what comes before; little-endian.
const tablesMagic = "HelParts"

// tables are the tables as they stand in their file.
func (l *Layout) tables() []byte {
	b := []byte(tablesMagic)
	put := func(v ...int64) {
		for _, x := range v {
			b = binary.LittleEndian.AppendUint64(b, uint64(x))
		}
	}
	put(int64(l.Parts), int64(len(l.Train)), l.StaticEdgeCount)
	put(l.Base...)
	put(l.Statics...)
	put(l.Edges...)
	put(l.Train...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// readTables is tables the other way round, of a layout whose manifest is m.
func readTables(dir string, m *manifest) (*Layout, error) {
	l := &Layout{Dir: dir, Key: m.Key, Parts: m.Key.Parts, Nodes: m.Key.Nodes,
		RowBytes: m.Key.RowBytes}
	path := filepath.Join(dir, tablesName)
	f, err := infile.Open(path)
	if err != nil {
		return nil, l.damaged("%v", err)
	}
	defer func() { _ = f.Close() }() // read only
	st, err := f.Stat()
	if err != nil {
		return nil, errs.With(errs.Device, err)
	}
	const head = int64(len(tablesMagic)) + 3*8
	limit := head + 8*(3*int64(l.Parts)+2+l.Nodes) + 4
	if st.Size() < head+4 || st.Size() > limit {
		return nil, l.damaged("%s has %d bytes", path, st.Size())
	}
	if hostmem.Scarce(2*st.Size(), 1) {
		return nil, errs.New(errs.Capability,
			"%s has %d bytes, which memory has no room for; free some", path, st.Size())
	}
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, errs.New(errs.Device, "%s: %w", path, err)
	}
	end := len(b) - 4
	if got, said := crc32.Checksum(b[:end], castagnoli),
		binary.LittleEndian.Uint32(b[end:]); got != said || string(b[:8]) != tablesMagic {
		return nil, l.damaged("%s has CRC32C %08x, and says %08x", path, got, said)
	}
	pos := len(tablesMagic)
	next := func() int64 {
		pos += 8
		return int64(binary.LittleEndian.Uint64(b[pos-8:]))
	}
	parts, train := next(), next()
	if parts != int64(l.Parts) || train < 0 || train > l.Nodes ||
		st.Size() != head+8*(3*parts+2+train)+4 {
		return nil, l.damaged("%s has %d parts and %d training nodes in %d bytes", path, parts,
			train, st.Size())
	}
	list := func(n int64) []int64 {
		v := make([]int64, n)
		for i := range v {
			v[i] = next()
		}
		return v
	}
	l.StaticEdgeCount = next()
	l.Base, l.Statics, l.Edges, l.Train = list(parts+1), list(parts+1), list(parts), list(train)
	if err := l.check(); err != nil {
		return nil, err
	}
	if err := l.place(m.ID, m.Key.PageBytes); err != nil {
		return nil, l.damaged("%v", err)
	}
	return l, nil
}

// Open opens the layout in a folder, which must be whole. A folder without one is an error of class
// usage.
func Open(dir string) (*Layout, error) {
	m, err := readManifest(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.Usage,
			"there is no layout by part in %s; \"heliosctl prepare\" makes one", dir)
	}
	if err != nil {
		return nil, err
	}
	if !m.Whole {
		return nil, errs.New(errs.Device,
			"the layout in %s is not finished: making it was cut off; go on with it", dir)
	}
	return readTables(dir, &m)
}

// Stats are the cost of making a layout, summed over all runs that have worked on it.
type Stats struct {
	Seconds      float64 `json:"seconds"`
	RowBytesRead int64   `json:"row_bytes_read"`
	EdgesRead    int64   `json:"edges_read"`
	BytesWritten int64   `json:"bytes_written"`
	RowSweeps    int     `json:"row_sweeps"` // over the features
	EdgeSweeps   int     `json:"edge_sweeps"`
}

// DiskBytes returns the size of the layout on disk.
func (l *Layout) DiskBytes() int64 { return l.Spec.Bytes() + int64(len(l.tables())) }
