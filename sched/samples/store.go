package samples

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/infile"
	"helios/internal/units"
)

// The files of a store in its folder. Its index has the second name until the store is whole.
const (
	idsName   = "samples.ids"
	adjName   = "samples.adj"
	indexName = "samples.index"
	partName  = "samples.index.part"
)

// Spec describes the mini-batches of a store.
type Spec struct {
	Nodes   int64 // node numbers are below it
	Batches int   // that the store has when it is whole
	// Key is a text that is equal where the samples are.
	Key string
	// Limit bounds the bytes of frontiers and blocks; 0: what there is room for.
	Limit int64
	// LimitKey is the option that Limit is from, for errors.
	LimitKey string
}

func (s Spec) head() head {
	h := head{version: version, idBytes: 4, nodes: uint64(s.Nodes), batches: uint64(s.Batches),
		key: sha256.Sum256([]byte(s.Key))}
	if s.Nodes > math.MaxUint32 {
		h.idBytes = 8
	}
	return h
}

// Store holds whole mini-batches of a folder. It is read by several goroutines.
type Store struct {
	batches
	dir string
}

// Whole reports whether a folder has a store that is whole.
func Whole(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, indexName))
	return err == nil
}

// Open opens a folder's store, which must be whole and of s. Damage of its index is an error
// of class Device; frontiers and blocks are held against their checksums as they are read.
func Open(dir string, s Spec) (_ *Store, err error) {
	x := &Store{dir: dir}
	x.batches = batches{what: "folder " + dir, remedy: "prepare them again", cause: x.cause}
	defer func() {
		if err != nil {
			err = errors.Join(err, x.Close())
		}
	}()
	b, err := readIndex(filepath.Join(dir, indexName), s.Batches)
	if err != nil {
		return nil, err
	}
	h, ok := readHead(b)
	if !ok {
		return nil, x.damaged("its index has no header")
	}
	if err := x.same(h, s); err != nil {
		return nil, err
	}
	x.wide = h.idBytes == 8
	x.all, _ = readRecords(b[headBytes:], x.idBytes(), int64(s.Batches))
	if len(x.all) != s.Batches || len(b) != headBytes+recordBytes*s.Batches {
		return nil, x.damaged(fmt.Sprintf("its index has %d whole records of %d", len(x.all),
			s.Batches))
	}
	for _, f := range []struct {
		to   **os.File
		name string
		end  *int64
		size int64
	}{{&x.ids, idsName, &x.idsEnd, x.endOfIDs()}, {&x.adj, adjName, &x.adjEnd, x.endOfAdj()}} {
		if *f.to, err = infile.Open(filepath.Join(dir, f.name)); err != nil {
			return nil, x.damaged(err.Error())
		}
		st, err := (*f.to).Stat()
		if err != nil {
			return nil, x.cause(err)
		}
		if st.Size() != f.size {
			return nil, x.damaged(fmt.Sprintf("%s has %d bytes, and its index says %d", f.name,
				st.Size(), f.size))
		}
		*f.end = f.size
	}
	return x, nil
}

// readIndex reads an index of so many mini-batches at most, and not a byte beyond.
func readIndex(path string, limit int) ([]byte, error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, headBytes+recordBytes*int64(limit)+1))
	if err != nil {
		err = errs.With(errs.Device, err)
	}
	return b, errors.Join(err, f.Close())
}

func (f *batches) endOfIDs() int64 {
	if len(f.all) == 0 {
		return 0
	}
	last := &f.all[len(f.all)-1]
	return last.ids + last.rows*f.idBytes()
}

func (f *batches) endOfAdj() int64 {
	if len(f.all) == 0 {
		return 0
	}
	last := &f.all[len(f.all)-1]
	return last.adj + last.bytes
}

func (x *Store) damaged(why string) error {
	return errs.New(errs.Device, "the samples in %s are damaged: %s; prepare them again", x.dir, why)
}

// same refuses a store that is of something else.
func (x *Store) same(h head, s Spec) error {
	want := s.head()
	switch {
	case h.version != version:
		return errs.New(errs.Capability,
			"the samples in %s have version %d, and this heliosctl reads version %d: use the one that wrote them, or prepare them again",
			x.dir, h.version, version)
	case h.key != want.key:
		return errs.New(errs.Refused,
			"the samples in %s are of other options or of another dataset; name another folder",
			x.dir)
	case h != want:
		return x.damaged(fmt.Sprintf(
			"they are %d mini-batches of %d nodes, and %d of %d were expected", h.batches, h.nodes,
			want.batches, want.nodes))
	}
	return nil
}

func (x *Store) cause(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF):
		return x.damaged("a file ends too early")
	}
	return errs.New(errs.Device, "the samples in %s: %w; check that disk", x.dir, err)
}

// Close closes the files.
func (x *Store) Close() error { return x.close() }

// Remove removes what a store has in a folder, whole or not. A missing file is no error.
func Remove(dir string) error {
	var all []error
	for _, name := range []string{indexName, partName, idsName, adjName} {
		err := os.Remove(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// syncBytes bounds the samples that may be lost when the machine stops, or the process.
var syncBytes int64 = 64 << 20

// Writer writes a store. One goroutine has it, and one Writer a folder: whoever names the folder
// sees to that.
type Writer struct {
	batches
	dir     string
	spec    Spec
	index   *os.File
	sum     uint32 // of the records so far
	durable int    // mini-batches with a record
	unsaved int64
	broken  error
}

// Write begins a store in a folder, or resumes one of the same Spec that was not finished:
// Batches are there then. One of another Spec, or a whole one, is refused.
func Write(dir string, s Spec) (_ *Writer, err error) {
	if s.Batches < 1 || s.Batches > mostBatches || s.Nodes < 1 {
		return nil, errs.New(errs.Usage, "samples of %d mini-batches and %d nodes cannot be kept",
			s.Batches, s.Nodes)
	}
	w := &Writer{dir: dir, spec: s}
	h := s.head()
	w.batches = batches{what: "folder " + dir, remedy: "prepare them again", cause: w.cause,
		full: w.full, limit: s.Limit, wide: h.idBytes == 8}
	if Whole(dir) {
		return nil, errs.New(errs.Refused, "the samples in %s are whole; remove them first", dir)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	for _, f := range []struct {
		to   **os.File
		name string
	}{{&w.index, partName}, {&w.ids, idsName}, {&w.adj, adjName}} {
		*f.to, err = os.OpenFile(filepath.Join(dir, f.name),
			os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
		if err != nil {
			return nil, w.cause(err)
		}
	}
	if err := w.goOn(h); err != nil {
		return nil, err
	}
	return w, w.cause(durable.Sync(dir))
}

// goOn takes over the mini-batches that an earlier writer has made durable.
func (w *Writer) goOn(h head) error {
	b, err := readIndex(filepath.Join(w.dir, partName), w.spec.Batches)
	if err != nil {
		return err
	}
	was, ok := readHead(b)
	if !ok { // its writer was stopped before it had begun
		b, err := h.append(nil), w.index.Truncate(0)
		if err == nil {
			_, err = w.index.WriteAt(b, 0)
		}
		if err == nil {
			err = errors.Join(w.ids.Truncate(0), w.adj.Truncate(0), w.index.Sync())
		}
		return w.failed(err)
	}
	if err := (&Store{dir: w.dir}).same(was, w.spec); err != nil {
		return err
	}
	w.all, w.sum = readRecords(b[headBytes:], w.idBytes(), int64(w.spec.Batches))
	ids, err := w.ids.Stat()
	if err != nil {
		return w.cause(err)
	}
	adj, err := w.adj.Stat()
	if err != nil {
		return w.cause(err)
	}
	for len(w.all) > 0 && (w.endOfIDs() > ids.Size() || w.endOfAdj() > adj.Size()) {
		w.all = w.all[:len(w.all)-1] // somebody has cut a file
	}
	_, w.sum = readRecords(b[headBytes:], w.idBytes(), int64(len(w.all)))
	w.idsEnd, w.adjEnd, w.durable = w.endOfIDs(), w.endOfAdj(), len(w.all)
	return w.failed(errors.Join(w.ids.Truncate(w.idsEnd), w.adj.Truncate(w.adjEnd),
		w.index.Truncate(headBytes+recordBytes*int64(len(w.all)))))
}

// Append adds a mini-batch. After an error the Writer takes no more. Where there is no room for it,
// on the disk or within Spec.Limit, nothing is left of the store.
func (w *Writer) Append(nodes []int64, adj []byte) error {
	if w.broken != nil {
		return w.broken
	}
	if len(w.all) == w.spec.Batches {
		return errs.New(errs.Failed, "a mini-batch more than the %d of %s", w.spec.Batches, w.dir)
	}
	before := w.Bytes()
	if err := w.add(nodes, adj); err != nil {
		return w.gaveUp(err)
	}
	if w.unsaved += w.Bytes() - before; w.unsaved >= syncBytes {
		return w.Sync()
	}
	return nil
}

// Sync makes durable what was added.
func (w *Writer) Sync() error {
	if w.broken != nil || w.durable == len(w.all) {
		return w.broken
	}
	err := errors.Join(w.ids.Sync(), w.adj.Sync())
	if err == nil {
		var b []byte
		sum := w.sum
		for i := w.durable; i < len(w.all); i++ {
			b, sum = appendRecord(b, &w.all[i], sum)
		}
		_, err = w.index.WriteAt(b, headBytes+recordBytes*int64(w.durable))
		w.sum = sum
	}
	if err == nil {
		err = w.index.Sync()
	}
	w.durable, w.unsaved = len(w.all), 0
	return w.failed(err)
}

// Finish makes the store whole and closes it.
func (w *Writer) Finish() error {
	if err := w.Sync(); err != nil {
		return err
	}
	if len(w.all) != w.spec.Batches {
		return errs.New(errs.Failed, "%d mini-batches of %d are in %s", len(w.all),
			w.spec.Batches, w.dir)
	}
	err := os.Rename(filepath.Join(w.dir, partName), filepath.Join(w.dir, indexName))
	if err == nil {
		err = durable.Sync(w.dir)
	}
	return errors.Join(w.cause(err), w.Close())
}

// Close leaves what is durable of a store that is not whole, to be resumed.
func (w *Writer) Close() error {
	err := w.close()
	if w.index != nil {
		err = errors.Join(err, w.index.Close())
		w.index = nil
	}
	return err
}

// failed is gaveUp of an error that says nothing of what to do.
func (w *Writer) failed(err error) error {
	if err == nil {
		return nil
	}
	return w.gaveUp(w.cause(err))
}

// gaveUp ends the Writer. Without room nothing of the store stays.
func (w *Writer) gaveUp(err error) error {
	w.broken = err
	if errs.ClassOf(err) == errs.Capability || errors.Is(err, ErrFull) {
		w.broken = errors.Join(err, w.Close(), Remove(w.dir))
	}
	return w.broken
}

func (w *Writer) full() error {
	return errs.New(errs.Usage, "the samples of %d mini-batches %w: %v %s; give more, or lower %v",
		w.spec.Batches, ErrFull, errs.Key(w.spec.LimitKey), units.FormatBytes(w.limit),
		errs.Key("sample-epochs"))
}

func (w *Writer) cause(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG):
		return errs.New(errs.Capability,
			"the samples of %d mini-batches take more room than %s has (%w; %s were written, and are removed): lower %v, or give another folder with %v",
			w.spec.Batches, w.dir, err, units.FormatBytes(w.Bytes()), errs.Key("sample-epochs"),
			errs.Key("packed"))
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) ||
		errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) ||
		errors.Is(err, unix.ELOOP):
		return errs.New(errs.Usage, "samples: %w; give another folder with %v", err,
			errs.Key("packed"))
	}
	return errs.New(errs.Device, "the samples in %s: %w; check that disk", w.dir, err)
}
