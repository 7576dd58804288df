// Package build writes dataset directories, whole or not at all: staging.go is the directory while
// it is written, resume.go lets an interrupted import continue, splits.go deals nodes to train,
// val and test, generate.go and rmat.go make up graphs. Package importer builds on it, too.
package build

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/internal/durable"
	"helios/internal/errs"
)

// WriteFault lets tests make a write fail as a full disk would.
var WriteFault func(path string) error

// Staging is the directory that a generate or import writes into. It gets its final name only
// when every file in it is complete and on the disk, so a dataset directory is whole or absent.
type Staging struct {
	dir, out string
	over     string // UUID of the dataset at out, whose place it takes; "": none is there
	lock     *os.File
	sums     map[string][]byte // payload hash of each array, for the UUID
	rows     map[string]int64
	sealed   map[string]seal.Sealed // files that are written, by name
	journal  *journal               // of an import that can go on; else nil
}

// NewStaging makes the directory for out, and removes what killed runs for it left behind.
func NewStaging(out string) (*Staging, error) {
	out, err := CheckOut(out)
	if err != nil {
		return nil, err
	}
	_ = EachStale(out, func(string, *os.File) bool { return false })
	return makeStaging(out)
}

// CheckOut checks the name of a directory that is to be made, and cleans it.
func CheckOut(out string) (string, error) {
	out = filepath.Clean(out)
	if out == "." || out == "" || out == string(filepath.Separator) {
		return "", errs.New(errs.Usage, "{out} must name a new directory")
	}
	if strings.Contains(filepath.Base(out), dataset.PartialMark) {
		return "", errs.New(errs.Usage,
			"{out} %s: a name with %q marks unfinished output; choose another", out,
			dataset.PartialMark)
	}
	if _, err := os.Lstat(out); err == nil {
		return "", errs.New(errs.Refused,
			"%s already exists and is not overwritten; choose another {out} or remove it", out)
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", errs.With(errs.Usage, err)
	}
	return out, nil
}

// makeStaging makes and locks a directory. Until it has the lock, another run for the same output
// may take the directory for one that was left behind, and remove it: then it makes another.
func makeStaging(out string) (s *Staging, err error) {
	for range 10 {
		if s, err = tryStaging(out); !errors.Is(err, errStagingTaken) {
			break
		}
	}
	return s, err
}

var errStagingTaken = errs.New(errs.Failed, "another run for the same {out} removed it; run it again")

// StagingMade lets tests come between a directory and its lock.
var StagingMade func(dir string)

func tryStaging(out string) (*Staging, error) {
	dir, err := os.MkdirTemp(filepath.Dir(out), filepath.Base(out)+dataset.PartialMark)
	if err != nil {
		return nil, errs.New(errs.Usage, "cannot create %s: %w; choose a writable {out}", out, err)
	}
	s := &Staging{dir: dir, out: out, sums: map[string][]byte{}, rows: map[string]int64{},
		sealed: map[string]seal.Sealed{}}
	if StagingMade != nil {
		StagingMade(dir)
	}
	// The lock tells a later run that this directory is in use; the kernel drops it if we die.
	if err = os.Chmod(dir, 0o755); err == nil {
		s.lock, err = os.Open(dir)
	}
	if err == nil {
		err = unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		_, err = os.Stat(dir) // with the lock, nobody else removes it
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK) {
		err = errStagingTaken
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), s.Abort())
	}
	return s, nil
}

// EnoughDisk refuses output that cannot fit before hours are spent on writing it.
func EnoughDisk(out string, bytes float64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(filepath.Clean(out)), &fs); err != nil || fs.Blocks == 0 {
		return nil //nolint:nilerr // not known: writing will tell
	}
	if free := float64(fs.Bavail) * float64(fs.Bsize); bytes > free {
		return errs.Errorf(
			"{out} %s: at least %.1f GB are needed and %.1f GB are free there: %w; free some space, choose an {out} elsewhere, or lower {nodes} or {dim}",
			out, bytes/1e9, free/1e9, unix.ENOSPC)
	}
	return nil
}

// EachStale looks at what killed runs for the same output left behind, of which nobody holds the
// lock. keep gets each directory, locked; what it does not keep is removed.
func EachStale(out string, keep func(dir string, lock *os.File) bool) error {
	entries, err := os.ReadDir(filepath.Dir(out))
	if err != nil {
		return err // making the directory will say it better
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), filepath.Base(out)+dataset.PartialMark) {
			continue
		}
		path := filepath.Join(filepath.Dir(out), e.Name())
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			if keep(path, f) {
				continue // and keeps the lock
			}
			_ = os.RemoveAll(path) // best effort: only disk space is at stake
		}
		_ = f.Close()
	}
	return nil
}

// Abort removes everything. It returns nil so that it can be joined to the cause only when
// the removal itself fails.
func (s *Staging) Abort() error {
	err := s.journal.close()
	err = errors.Join(err, os.RemoveAll(s.dir))
	if s.lock != nil {
		_ = s.lock.Close()
		s.lock = nil
	}
	if err != nil {
		return fmt.Errorf("removing the partial output: %w", err)
	}
	return nil
}

// Commit writes dataset.yaml and the seal, and gives the directory its final name.
func (s *Staging) Commit(m dataset.Meta) error {
	if m.Typed() {
		m.Sum()
	}
	m.CountIn(s.sums, s.rows)
	m.UUID = dataset.Identity(s.sums, s.rows).String()
	m.CreatedBy = "heliosctl"
	m.Sealed = true
	text, err := m.Encode()
	if err != nil {
		return fmt.Errorf("encode %s: %w", dataset.MetaName, err)
	}
	f, err := s.Create(dataset.MetaName)
	if err != nil {
		return err
	}
	if _, err := f.Write(text); err != nil {
		return errors.Join(err, f.Discard())
	}
	if err := f.Finish(); err != nil {
		return err
	}
	if err := errors.Join(s.ClearScratch(), s.sealSteps()); err != nil {
		return err
	}
	if err := s.writeSeal(m.UUID); err != nil {
		return err
	}
	if err := s.journal.remove(); err != nil {
		return err
	}
	if err := s.syncFolders(); err != nil {
		return err
	}
	if s.over != "" {
		return s.exchange()
	}
	err = durable.RenameNew(s.dir, s.out)
	if errors.Is(err, unix.EEXIST) {
		return errs.New(errs.Refused,
			"%s appeared while it was being written; choose another {out}", s.out)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", s.dir, s.out, err)
	}
	if err := durable.Sync(filepath.Dir(s.out)); err != nil {
		return fmt.Errorf("sync %s: %w", filepath.Dir(s.out), err)
	}
	err = s.lock.Close()
	s.lock = nil
	return err
}

// exchange changes places with the dataset at out, in one step, and removes that.
func (s *Staging) exchange() error {
	old, err := os.Open(s.out)
	if err != nil {
		return err
	}
	defer func() { _ = old.Close() }()                              // a directory
	if err := unix.Flock(int(old.Fd()), unix.LOCK_EX); err != nil { // two that change it at once
		return fmt.Errorf("lock %s: %w", s.out, err)
	}
	if err := CheckOver(s.out, s.over); err != nil {
		return err
	}
	st, err := old.Stat()
	if err == nil {
		err = os.Chmod(s.dir, st.Mode().Perm()) // a private one stays so
	}
	if err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, s.dir, unix.AT_FDCWD, s.out,
		unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("changing places of %s and %s: %w", s.dir, s.out, err)
	}
	if err := durable.Sync(filepath.Dir(s.out)); err != nil {
		return fmt.Errorf("sync %s: %w", filepath.Dir(s.out), err)
	}
	return s.Abort() // the name is the old dataset's now
}

// CheckOver refuses a folder that is not a dataset with a UUID, or holds anything else.
func CheckOver(out, uuid string) error {
	d, err := dataset.Open(out)
	if err != nil {
		return err
	}
	is := d.UUID().String()
	if err := d.Close(); err != nil {
		return err
	}
	if is != uuid {
		return errs.New(errs.Refused, "%s was changed by somebody else meanwhile; run it again", out)
	}
	return filepath.WalkDir(out, func(path string, e fs.DirEntry, err error) error {
		name, rerr := filepath.Rel(out, path)
		if err = errors.Join(err, rerr); err != nil {
			return err
		}
		const hotness = "hotness" // of the graph as it was, which a run makes anew
		folder := name == "." || name == hotness || dataset.IsPart(name)
		file := name == seal.Name || dataset.IsFile(name) ||
			filepath.Dir(name) == hotness && filepath.Ext(name) == "."+hotness
		if e.IsDir() && folder || e.Type().IsRegular() && file {
			return nil
		}
		return errs.New(errs.Refused,
			"%s is no file of the dataset, whose folder is replaced; move it elsewhere (partitions and checkpoints are of the graph as it was)",
			path)
	})
}

// syncFolders makes the names of all files durable.
func (s *Staging) syncFolders() error {
	return filepath.WalkDir(s.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		if err := durable.Sync(path); err != nil {
			return fmt.Errorf("sync %s: %w", path, err)
		}
		return nil
	})
}

// File is a buffered, hashed file in the staging directory.
type File struct {
	path string
	f    *os.File
	bw   *bufio.Writer
	s    *Staging
	seal *seal.Sum // of a file of the dataset that is written from its start; else nil
}

// Create makes a file of the directory, and the folder that its name begins with.
func (s *Staging) Create(name string) (*File, error) {
	path := filepath.Join(s.dir, name)
	if folder := filepath.Dir(name); folder != "." {
		if err := os.MkdirAll(filepath.Join(s.dir, folder), 0o755); err != nil {
			return nil, explainWrite(filepath.Join(s.out, name), err)
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return nil, explainWrite(filepath.Join(s.out, name), err)
	}
	o := s.buffered(name, f)
	// others are scratch, which several goroutines make at once
	if dataset.IsFile(name) {
		delete(s.sealed, name)
		o.seal = seal.NewSum(name, dataset.SealBlock(name))
	}
	return o, nil
}

func (s *Staging) buffered(name string, f *os.File) *File {
	o := &File{path: filepath.Join(s.out, name), f: f, s: s}
	o.bw = bufio.NewWriterSize(rawWriter{o}, 1<<20)
	return o
}

func explainWrite(path string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Errorf(
			"writing %s: %w; free some space or choose an {out} elsewhere (nothing was kept)",
			path, err)
	}
	return fmt.Errorf("writing %s: %w", path, err)
}

type rawWriter struct{ o *File }

func (w rawWriter) Write(b []byte) (int, error) {
	if WriteFault != nil {
		if err := WriteFault(w.o.path); err != nil {
			return 0, explainWrite(w.o.path, err)
		}
	}
	n, err := w.o.f.Write(b)
	if err != nil {
		err = explainWrite(w.o.path, err)
	}
	return n, err
}

// Write buffers b.
func (o *File) Write(b []byte) (int, error) {
	if o.seal != nil {
		_, _ = o.seal.Write(b) // never fails; a file whose writing fails is not sealed
	}
	return o.bw.Write(b)
}

// Flush hands what is buffered to the kernel.
func (o *File) Flush() error { return o.bw.Flush() }

// Finish flushes, syncs and closes.
func (o *File) Finish() error {
	if err := o.bw.Flush(); err != nil {
		return errors.Join(err, o.Discard())
	}
	if err := o.f.Sync(); err != nil {
		return errors.Join(explainWrite(o.path, err), o.Discard())
	}
	if err := o.f.Close(); err != nil {
		return explainWrite(o.path, err)
	}
	if o.seal != nil {
		f := o.seal.Sealed()
		o.s.sealed[f.Name] = f
	}
	return nil
}

// Discard closes without caring for the content, in clean-up after another error too.
func (o *File) Discard() error {
	if err := o.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Array is a .npy file whose first dimension is known only at the end.
type Array struct {
	*File
	name string
	h    npy.Header
	row  int64 // bytes of one row
	n    int64 // bytes written
	sum  hash.Hash
	tmp  []byte
}

func newArray(f *File, name string, dt npy.DType, width int64) *Array {
	a := &Array{File: f, name: name, sum: sha256.New(), row: int64(dt.Size),
		h: npy.Header{DType: dt, Shape: []int64{0}}}
	if width > 0 {
		a.h.Shape = append(a.h.Shape, width)
		a.row *= width
	}
	return a
}

// Array creates name.npy with rows of the given width; width 0 makes it one-dimensional.
func (s *Staging) Array(name string, dt npy.DType, width int64) (*Array, error) {
	if j := s.journal; j != nil {
		if err := j.anew(name); err != nil {
			return nil, err
		}
	}
	f, err := s.Create(name + ".npy")
	if err != nil {
		return nil, err
	}
	a := newArray(f, name, dt, width)
	head, err := npy.EncodeHeader(a.h) // a place holder of the final length
	if err == nil {
		_, err = f.Write(head)
	}
	if err != nil {
		return nil, errors.Join(err, f.Discard())
	}
	return a, nil
}

// Mark makes what was written durable.
func (a *Array) Mark() (edges.ArrayMark, error) {
	if err := a.bw.Flush(); err != nil {
		return edges.ArrayMark{}, err
	}
	if err := a.f.Sync(); err != nil {
		return edges.ArrayMark{}, explainWrite(a.path, err)
	}
	state, err := a.sum.(encoding.BinaryMarshaler).MarshalBinary()
	return edges.ArrayMark{Bytes: a.n, Hash: state}, err
}

// ArrayFrom resumes an array at a mark, or creates it where that is nil.
func (s *Staging) ArrayFrom(name string, dt npy.DType, width int64, mark *edges.ArrayMark) (*Array,
	error) {
	if mark == nil {
		return s.Array(name, dt, width)
	}
	path := filepath.Join(s.dir, name+".npy")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	a := newArray(s.buffered(name+".npy", f), name, dt, width)
	a.n = mark.Bytes
	head, err := npy.EncodeHeader(a.h)
	end := int64(len(head)) + mark.Bytes
	var st os.FileInfo
	if err == nil {
		st, err = f.Stat()
	}
	if err == nil && st.Size() < end {
		err = errs.Errorf("has %d bytes, the journal says %d; run the import again with {restart}",
			st.Size(), end)
	}
	if err == nil {
		err = f.Truncate(end)
	}
	if err == nil {
		_, err = f.Seek(end, io.SeekStart)
	}
	if err == nil {
		err = a.sum.(encoding.BinaryUnmarshaler).UnmarshalBinary(mark.Hash)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), a.Discard())
	}
	return a, nil
}

// Write adds rows, or parts of some.
func (a *Array) Write(b []byte) (int, error) {
	a.sum.Write(b)
	n, err := a.File.Write(b)
	a.n += int64(n)
	return n, err
}

// int64s adds numbers.
func (a *Array) int64s(v []int64) error {
	for part := range slices.Chunk(v, 1<<14) {
		a.tmp = a.tmp[:0]
		for _, x := range part {
			a.tmp = binary.LittleEndian.AppendUint64(a.tmp, uint64(x))
		}
		if _, err := a.Write(a.tmp); err != nil {
			return err
		}
	}
	return nil
}

// Int32s adds numbers.
func (a *Array) Int32s(v []int32) error {
	for part := range slices.Chunk(v, 1<<14) {
		a.tmp = a.tmp[:0]
		for _, x := range part {
			a.tmp = binary.LittleEndian.AppendUint32(a.tmp, uint32(x))
		}
		if _, err := a.Write(a.tmp); err != nil {
			return err
		}
	}
	return nil
}

// Float32s adds numbers.
func (a *Array) Float32s(v []float32) error {
	for part := range slices.Chunk(v, 1<<14) {
		a.tmp = a.tmp[:0]
		for _, x := range part {
			a.tmp = binary.LittleEndian.AppendUint32(a.tmp, math.Float32bits(x))
		}
		if _, err := a.Write(a.tmp); err != nil {
			return err
		}
	}
	return nil
}

// Close fills in the shape and makes the file durable.
func (a *Array) Close() error {
	if err := a.bw.Flush(); err != nil {
		return errors.Join(err, a.Discard())
	}
	if a.n%a.row != 0 {
		return errors.Join(fmt.Errorf("%s: %d bytes are not whole rows of %d", a.path, a.n, a.row),
			a.Discard())
	}
	a.h.Shape[0] = a.n / a.row
	head, err := npy.EncodeHeader(a.h)
	if err == nil {
		_, err = a.f.WriteAt(head, 0)
	}
	if err != nil {
		return errors.Join(explainWrite(a.path, err), a.Discard())
	}
	if a.File.seal != nil {
		a.File.seal.Patch(head)
	}
	if err := a.Finish(); err != nil {
		return err
	}
	a.s.sums[a.name] = a.sum.Sum(nil)
	a.s.rows[a.name] = a.h.Shape[0]
	// the topology has a line of its own
	if j := a.s.journal; j != nil && path.Base(a.name) == "features" {
		d := arrayDone{Sum: a.s.sums[a.name], Rows: a.h.Shape[0], Width: a.h.Shape[1]}
		return j.write(journalLine{Array: a.name, Done: &d})
	}
	return nil
}

// sorterStore is a staging directory as a sorter of edges sees it. The arrays are made in a folder
// of it, scratch files beside the folders.
type sorterStore struct {
	s      *Staging
	folder string
}

// Path returns the path of a file.
func (t sorterStore) Path(name string) string { return t.s.Path(name) }

// Create makes a file.
func (t sorterStore) Create(name string) (edges.File, error) {
	f, err := t.s.Create(name)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Array makes an array, or resumes it.
func (t sorterStore) Array(name string, dt npy.DType, mark *edges.ArrayMark) (edges.Array, error) {
	a, err := t.s.ArrayFrom(path.Join(t.folder, name), dt, 0, mark)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Log is the journal of an import, where there is one.
func (t sorterStore) Log() edges.Log {
	if t.s.journal == nil {
		return nil
	}
	return sorterLog{t.s.journal, t.s, t.folder}
}

// writeSeal writes the manifest of all that was written.
func (s *Staging) writeSeal(uuid string) error {
	for name, sum := range s.sums {
		file := name + ".npy"
		f, ok := s.sealed[file]
		if !ok { // written by an import that was interrupted, or made by a feature function
			path := filepath.Join(s.dir, file)
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			again, payload, err := dataset.SumFile(context.Background(), s.dir, file, nil)
			if err != nil {
				return err
			}
			if string(payload) != string(sum) {
				return errs.New(errs.Device,
					"%s is not what was written before the import was interrupted; run the import again with {restart}",
					filepath.Join(s.out, file))
			}
			f = again
		}
		f.SHA256, f.Rows = sum, s.rows[name]
		s.sealed[file] = f
	}
	files := make([]seal.Sealed, 0, len(s.sealed))
	for _, f := range s.sealed {
		files = append(files, f)
	}
	f, err := s.Create(seal.Name)
	if err != nil {
		return err
	}
	if err := seal.Write(f, uuid, files); err != nil {
		return errors.Join(err, f.Discard())
	}
	return f.Finish()
}

// Path returns the path of a file of the directory lies while it is being written.
func (s *Staging) Path(name string) string { return filepath.Join(s.dir, name) }

// Store is the directory as a sorter of edges sees it.
func (s *Staging) Store() edges.Store { return sorterStore{s: s} }

// RelationStore is Store for the topology of a relation: its arrays are made in the relation's
// folder. Relations are sorted one after the other.
func (s *Staging) RelationStore(i int) edges.Store { return sorterStore{s, dataset.EdgesDir(i)} }
