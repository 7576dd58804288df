package dataset

import (
	"bufio"
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/google/uuid"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/internal/errs"
)

// partialMark is in the name of every directory that is being written. Open refuses such names.
const partialMark = ".partial-"

// writeFault lets tests make a write fail as a full disk would.
var writeFault func(path string) error

// staging is the directory that a generate or import writes into. It gets its final name only
// when every file in it is complete and on the disk, so a dataset directory is whole or absent.
type staging struct {
	dir, out string
	lock     *os.File
	sums     map[string][]byte // payload hash of each array, for the UUID
	rows     map[string]int64
	sealed   map[string]seal.Sealed // files that are written, by name
	journal  *journal               // of an import that can go on; else nil
}

func newStaging(out string) (*staging, error) {
	out, err := checkOut(out)
	if err != nil {
		return nil, err
	}
	_ = eachStale(out, func(string, *os.File) bool { return false })
	return makeStaging(out)
}

func checkOut(out string) (string, error) {
	out = filepath.Clean(out)
	if out == "." || out == "" || out == string(filepath.Separator) {
		return "", errs.New(errs.Usage, "--out must name a new directory")
	}
	if strings.Contains(filepath.Base(out), partialMark) {
		return "", errs.New(errs.Usage, "--out %s: a name with %q marks unfinished output; choose another", out, partialMark)
	}
	if _, err := os.Lstat(out); err == nil {
		return "", errs.New(errs.Refused, "%s already exists and is not overwritten; choose another --out or remove it", out)
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", errs.With(errs.Usage, err)
	}
	return out, nil
}

// makeStaging makes and locks a directory. Until it has the lock, another run for the same output may take the
// directory for one that was left behind, and remove it: then it makes another.
func makeStaging(out string) (s *staging, err error) {
	for range 10 {
		if s, err = tryStaging(out); !errors.Is(err, errStagingTaken) {
			break
		}
	}
	return s, err
}

var errStagingTaken = errors.New("another run for the same --out removed it; run it again")

// stagingMade lets tests come between a directory and its lock.
var stagingMade func(dir string)

func tryStaging(out string) (*staging, error) {
	dir, err := os.MkdirTemp(filepath.Dir(out), filepath.Base(out)+partialMark)
	if err != nil {
		return nil, errs.New(errs.Usage, "cannot create %s: %w; choose a writable --out", out, err)
	}
	s := &staging{dir: dir, out: out, sums: map[string][]byte{}, rows: map[string]int64{}, sealed: map[string]seal.Sealed{}}
	if stagingMade != nil {
		stagingMade(dir)
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
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), s.abort())
	}
	return s, nil
}

// enoughDisk refuses output that cannot fit before hours are spent on writing it.
func enoughDisk(out string, bytes float64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(filepath.Clean(out)), &fs); err != nil || fs.Blocks == 0 {
		return nil //nolint:nilerr // not known: writing will tell
	}
	if free := float64(fs.Bavail) * float64(fs.Bsize); bytes > free {
		return fmt.Errorf("--out %s: at least %.1f GB are needed and %.1f GB are free there: %w; free some space, choose an --out elsewhere, or lower --nodes or --dim",
			out, bytes/1e9, free/1e9, unix.ENOSPC)
	}
	return nil
}

// eachStale looks at what killed runs for the same output left behind, of which nobody holds the
// lock. keep gets each directory, locked; what it does not keep is removed.
func eachStale(out string, keep func(dir string, lock *os.File) bool) error {
	entries, err := os.ReadDir(filepath.Dir(out))
	if err != nil {
		return err // making the directory will say it better
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), filepath.Base(out)+partialMark) {
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

// abort removes everything. It returns nil so that it can be joined to the cause only when
// the removal itself fails.
func (s *staging) abort() error {
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

// identity is a UUID of the content: the same arrays give the same dataset, wherever and
// whenever they are made (RFC 9562 section 5.8, version 8).
func (s *staging) identity() uuid.UUID { return identity(s.sums, s.rows) }

func identity(sums map[string][]byte, rows map[string]int64) uuid.UUID {
	names := make([]string, 0, len(sums))
	for n := range sums {
		names = append(names, n)
	}
	sort.Strings(names)
	h := sha256.New()
	for _, n := range names {
		fmt.Fprintf(h, "%s %d %s\n", n, rows[n], hex.EncodeToString(sums[n]))
	}
	var id uuid.UUID
	copy(id[:], h.Sum(nil))
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

// commit writes dataset.yaml and the seal, and gives the directory its final name.
func (s *staging) commit(m Meta) error {
	m.Format = FormatVersion
	m.UUID = s.identity().String()
	m.CreatedBy = "heliosctl"
	m.Sealed = true
	text, err := yaml.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", metaName, err)
	}
	f, err := s.create(metaName)
	if err != nil {
		return err
	}
	if _, err := f.Write(text); err != nil {
		return errors.Join(err, f.discard())
	}
	if err := f.finish(); err != nil {
		return err
	}
	if err := s.writeSeal(m.UUID); err != nil {
		return err
	}
	if err := s.journal.remove(); err != nil {
		return err
	}
	if err := s.lock.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", s.dir, err)
	}
	err = unix.Renameat2(unix.AT_FDCWD, s.dir, unix.AT_FDCWD, s.out, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // a file system without the flag
		if _, serr := os.Lstat(s.out); serr == nil {
			err = unix.EEXIST
		} else {
			err = os.Rename(s.dir, s.out)
		}
	}
	if errors.Is(err, unix.EEXIST) {
		return errs.New(errs.Refused, "%s appeared while it was being written; choose another --out", s.out)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", s.dir, s.out, err)
	}
	parent, err := os.Open(filepath.Dir(s.out))
	if err != nil {
		return err
	}
	if err := errors.Join(parent.Sync(), parent.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", filepath.Dir(s.out), err)
	}
	err = s.lock.Close()
	s.lock = nil
	return err
}

// outFile is a buffered, hashed file in the staging directory.
type outFile struct {
	path string
	f    *os.File
	bw   *bufio.Writer
	s    *staging
	seal *seal.Sum // of a file of the dataset that is written from its start; else nil
}

func (s *staging) create(name string) (*outFile, error) {
	path := filepath.Join(s.dir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return nil, explainWrite(filepath.Join(s.out, name), err)
	}
	o := s.buffered(name, f)
	if slices.Contains(datasetFiles, name) { // others are scratch, which several goroutines make at once
		delete(s.sealed, name)
		o.seal = seal.NewSum(name, sealBlock(name))
	}
	return o, nil
}

func (s *staging) buffered(name string, f *os.File) *outFile {
	o := &outFile{path: filepath.Join(s.out, name), f: f, s: s}
	o.bw = bufio.NewWriterSize(rawWriter{o}, 1<<20)
	return o
}

func explainWrite(path string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("writing %s: %w; free some space or choose an --out elsewhere (nothing was kept)", path, err)
	}
	return fmt.Errorf("writing %s: %w", path, err)
}

type rawWriter struct{ o *outFile }

func (w rawWriter) Write(b []byte) (int, error) {
	if writeFault != nil {
		if err := writeFault(w.o.path); err != nil {
			return 0, explainWrite(w.o.path, err)
		}
	}
	n, err := w.o.f.Write(b)
	if err != nil {
		err = explainWrite(w.o.path, err)
	}
	return n, err
}

func (o *outFile) Write(b []byte) (int, error) {
	if o.seal != nil {
		_, _ = o.seal.Write(b) // never fails; a file whose writing fails is not sealed
	}
	return o.bw.Write(b)
}

// finish flushes, syncs and closes.
func (o *outFile) finish() error {
	if err := o.bw.Flush(); err != nil {
		return errors.Join(err, o.discard())
	}
	if err := o.f.Sync(); err != nil {
		return errors.Join(explainWrite(o.path, err), o.discard())
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

// discard closes without caring for the content, in clean-up after another error too.
func (o *outFile) discard() error {
	if err := o.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// arrayOut is a .npy file whose first dimension is known only at the end.
type arrayOut struct {
	*outFile
	name string
	h    npy.Header
	row  int64 // bytes of one row
	n    int64 // bytes written
	sum  hash.Hash
	tmp  []byte
}

// array creates name.npy with rows of the given width; width 0 makes it one-dimensional.
func (s *staging) array(name string, dt npy.DType, width int64) (*arrayOut, error) {
	if j := s.journal; j != nil {
		if err := j.anew(name); err != nil {
			return nil, err
		}
	}
	f, err := s.create(name + ".npy")
	if err != nil {
		return nil, err
	}
	a := &arrayOut{outFile: f, name: name, sum: sha256.New(), row: int64(dt.Size)}
	a.h = npy.Header{DType: dt, Shape: []int64{0}}
	if width > 0 {
		a.h.Shape = append(a.h.Shape, width)
		a.row *= width
	}
	head, err := npy.EncodeHeader(a.h) // a place holder of the final length
	if err == nil {
		_, err = f.Write(head)
	}
	if err != nil {
		return nil, errors.Join(err, f.discard())
	}
	return a, nil
}

// arrayMark is how far an array is on the disk, with the state of its running hash.
type arrayMark struct {
	Bytes int64  `json:"bytes"` // of rows
	Hash  []byte `json:"hash"`
}

// mark makes what was written durable.
func (a *arrayOut) mark() (arrayMark, error) {
	if err := a.bw.Flush(); err != nil {
		return arrayMark{}, err
	}
	if err := a.f.Sync(); err != nil {
		return arrayMark{}, explainWrite(a.path, err)
	}
	state, err := a.sum.(encoding.BinaryMarshaler).MarshalBinary()
	return arrayMark{a.n, state}, err
}

// arrayFrom goes on with an array at a mark, or creates it where that is nil.
func (s *staging) arrayFrom(name string, dt npy.DType, width int64, at *arrayMark) (*arrayOut, error) {
	if at == nil {
		return s.array(name, dt, width)
	}
	path := filepath.Join(s.dir, name+".npy")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	a := &arrayOut{outFile: s.buffered(name+".npy", f), name: name, sum: sha256.New(), row: int64(dt.Size), n: at.Bytes}
	a.h = npy.Header{DType: dt, Shape: []int64{0}}
	if width > 0 {
		a.h.Shape = append(a.h.Shape, width)
		a.row *= width
	}
	head, err := npy.EncodeHeader(a.h)
	end := int64(len(head)) + at.Bytes
	var st os.FileInfo
	if err == nil {
		st, err = f.Stat()
	}
	if err == nil && st.Size() < end {
		err = fmt.Errorf("has %d bytes, the journal says %d; run the import again with --restart", st.Size(), end)
	}
	if err == nil {
		err = f.Truncate(end)
	}
	if err == nil {
		_, err = f.Seek(end, io.SeekStart)
	}
	if err == nil {
		err = a.sum.(encoding.BinaryUnmarshaler).UnmarshalBinary(at.Hash)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), a.discard())
	}
	return a, nil
}

func (a *arrayOut) Write(b []byte) (int, error) {
	a.sum.Write(b)
	n, err := a.outFile.Write(b)
	a.n += int64(n)
	return n, err
}

func (a *arrayOut) int64s(v []int64) error {
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

func (a *arrayOut) int32s(v []int32) error {
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

// close fills in the shape and makes the file durable.
func (a *arrayOut) close() error {
	if err := a.bw.Flush(); err != nil {
		return errors.Join(err, a.discard())
	}
	if a.n%a.row != 0 {
		return errors.Join(fmt.Errorf("%s: %d bytes are not whole rows of %d", a.path, a.n, a.row), a.discard())
	}
	a.h.Shape[0] = a.n / a.row
	head, err := npy.EncodeHeader(a.h)
	if err == nil {
		_, err = a.f.WriteAt(head, 0)
	}
	if err != nil {
		return errors.Join(explainWrite(a.path, err), a.discard())
	}
	if a.outFile.seal != nil {
		a.outFile.seal.Patch(head)
	}
	if err := a.finish(); err != nil {
		return err
	}
	a.s.sums[a.name] = a.sum.Sum(nil)
	a.s.rows[a.name] = a.h.Shape[0]
	if j := a.s.journal; j != nil && a.name == "features" { // the topology has a line of its own
		d := arrayDone{Sum: a.s.sums[a.name], Rows: a.h.Shape[0], Width: a.h.Shape[1]}
		return j.write(journalLine{Array: a.name, Done: &d})
	}
	return nil
}
