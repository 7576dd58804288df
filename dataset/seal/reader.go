package seal

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/infile"
)

// Mismatch is a part of a file that is not what was sealed.
type Mismatch struct {
	Dir      string // of the dataset
	Path     string
	From, To int64 // bytes of the file
	What     string
}

func (e *Mismatch) Error() string {
	return fmt.Sprintf(
		"%s: bytes %d to %d are not those that were sealed (%s); restore the file or import the dataset again, and run \"heliosctl verify --dataset %s\"",
		e.Path, e.From, e.To-1, e.What, e.Dir)
}

// Counter adds up what readers have checked. It is safe for concurrent use.
type Counter struct {
	bytes atomic.Int64
	nanos atomic.Int64
}

// Checked returns how many bytes were held against their checksums.
func (c *Counter) Checked() int64 { return c.bytes.Load() }

// Took is the time that this took, of all cores together.
func (c *Counter) Took() time.Duration { return time.Duration(c.nanos.Load()) }

// Reader reads one file of a dataset. With a manifest it checks all that it reads. It is safe for
// concurrent use.
type Reader struct {
	f     *os.File
	dir   string
	path  string
	size  int64
	block int64
	sums  []uint32 // nil: the file is not sealed
	count *Counter
	// Blocks of which parts were read last, each in the place that its number gives: rows of a
	// stripe are read one by one, and a block holds many. Several goroutines read, each near where
	// it was before.
	kept [keptBlocks]atomic.Pointer[keptBlock]
	once []atomic.Uint64 // a bit a block: CheckOnce has it checked; nil: all reads are
}

// CheckOnce has a block checked only when a part of it is read for the first time: for rows that
// are read here and there, again and again. Nobody may be reading.
func (r *Reader) CheckOnce() {
	if r.sums != nil {
		r.once = make([]atomic.Uint64, (len(r.sums)+63)/64)
	}
}

// keptBlocks times the largest block is 4 MiB.
const keptBlocks = 64

// keptBlock is a block that was checked. Nobody changes it.
type keptBlock struct {
	first int64
	bytes []byte
}

// NewReader opens a file of the dataset in dir; m is nil where that is not sealed. A file that m
// does not name, that is missing, or that has another size than it was sealed with, is an error of
// class device.
func NewReader(m *Manifest, dir, name string, count *Counter) (r *Reader, err error) {
	r = &Reader{dir: dir, path: filepath.Join(dir, name), block: Block, count: count}
	if m != nil {
		e := m.File(name)
		if e == nil {
			return nil, errs.New(errs.Device,
				"%s is not one of the files that %s names, so it is no part of the dataset; remove it, or import the dataset again",
				r.path, m.Path())
		}
		r.block = e.Block
		if err := sized(dir, e); err != nil {
			return nil, err
		}
		if r.sums, err = m.checksums(e); err != nil {
			return nil, err
		}
	}
	if r.f, err = infile.Open(r.path); err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	st, err := r.f.Stat()
	if err != nil {
		return nil, errors.Join(errs.With(errs.Device, err), r.f.Close())
	}
	r.size = st.Size()
	return r, nil
}

// sized checks that a file is there and has its size.
func sized(dir string, e *File) error {
	path := filepath.Join(dir, e.Name)
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errs.New(errs.Device,
			"%s is missing: the dataset was sealed with it; restore the file or import the dataset again",
			path)
	case err != nil:
		return errs.With(errs.Usage, err)
	case !st.Mode().IsRegular():
		return errs.New(errs.Device,
			"%s is no file any more; restore it or import the dataset again", path)
	case st.Size() < e.Bytes:
		return errs.With(errs.Device, &Mismatch{dir, path, st.Size(), e.Bytes,
			fmt.Sprintf("the file ends at byte %d, it was sealed with %d", st.Size(), e.Bytes)})
	case st.Size() > e.Bytes:
		return errs.With(errs.Device, &Mismatch{dir, path, e.Bytes, st.Size(),
			fmt.Sprintf("it was sealed with %d bytes", e.Bytes)})
	}
	return nil
}

// CheckHeads checks that all files that m names are there with their sizes, and the first block of
// each, which holds an array's header.
func (m *Manifest) CheckHeads(count *Counter) error {
	for i := range m.Files {
		e := &m.Files[i]
		if err := sized(m.dir, e); err != nil {
			return err
		}
		if e.Bytes == 0 {
			continue
		}
		r, err := NewReader(m, m.dir, e.Name, count)
		if err != nil {
			return err
		}
		b := make([]byte, min(e.Block, e.Bytes))
		if err := errors.Join(r.ReadAt(b, 0), r.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the file.
func (r *Reader) Close() error { return r.f.Close() }

// Size is the file's.
func (r *Reader) Size() int64 { return r.size }

// Checksums are those of the file's blocks, and how many bytes a block has; nil where the file is
// not sealed.
func (r *Reader) Checksums() ([]uint32, int64) { return r.sums, r.block }

// check holds whole blocks from off on against their checksums.
func (r *Reader) check(b []byte, off int64) error {
	if r.sums == nil {
		return nil
	}
	start := time.Now()
	for offset := int64(0); offset < int64(len(b)); offset += r.block {
		end := min(offset+r.block, int64(len(b)))
		want := r.sums[(off+offset)/r.block]
		if got := crc32.Checksum(b[offset:end], castagnoli); got != want {
			return errs.With(errs.Device, &Mismatch{r.dir, r.path, off + offset, off + end,
				fmt.Sprintf("CRC32C %08x, the seal says %08x", got, want)})
		}
	}
	if r.count != nil {
		r.count.bytes.Add(int64(len(b)))
		r.count.nanos.Add(int64(time.Since(start)))
	}
	return nil
}

// read is ReadAt without a check.
func (r *Reader) read(dst []byte, off int64) error {
	n, err := r.f.ReadAt(dst, off)
	if n == len(dst) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return errs.New(errs.Device,
			"%s: ends at byte %d, %d were there when it was opened; restore the file or import the dataset again",
			r.path, off+int64(n), r.size)
	}
	return errs.New(errs.Device,
		"%s: bytes %d to %d: %w; look at the kernel's log for the storage behind it", r.path, off,
		off+int64(len(dst))-1, err)
}

// ReadAt reads dst from byte off on and checks it. A block of which only a part is asked for is
// read as a whole.
func (r *Reader) ReadAt(dst []byte, off int64) error {
	if r.sums == nil {
		return r.read(dst, off)
	}
	end := off + int64(len(dst))
	for off < end {
		first := off / r.block * r.block
		if last := min(first+r.block, r.size); first < off || last > end { // a part of a block
			bit := uint64(1) << (first / r.block % 64)
			if r.once != nil && r.once[first/r.block/64].Load()&bit != 0 {
				n := min(last, end) - off
				if err := r.read(dst[:n], off); err != nil {
					return err
				}
				dst, off = dst[n:], off+n
				continue
			}
			whole, err := r.whole(first, last)
			if err != nil {
				return err
			}
			n := copy(dst, whole[off-first:])
			dst, off = dst[n:], off+int64(n)
			continue
		}
		n := int64(len(dst))
		if end < r.size {
			n = end/r.block*r.block - off
		}
		err := r.read(dst[:n], off)
		if err == nil {
			err = r.check(dst[:n], off)
		}
		if err != nil {
			return err
		}
		dst, off = dst[n:], off+n
	}
	return nil
}

// whole is the block from first to last, checked.
func (r *Reader) whole(first, last int64) ([]byte, error) {
	place := &r.kept[first/r.block%keptBlocks]
	if k := place.Load(); k != nil && k.first == first {
		return k.bytes, nil
	}
	b := make([]byte, last-first)
	if err := r.read(b, first); err != nil {
		return nil, err
	}
	if err := r.check(b, first); err != nil {
		return nil, err
	}
	if r.once != nil {
		r.once[first/r.block/64].Or(uint64(1) << (first / r.block % 64))
		return b, nil
	}
	place.Store(&keptBlock{first, b})
	return b, nil
}

// pieceBytes are read and checked at a time: they stay in a core's cache from one to the other.
const pieceBytes = 1 << 20

// inPieces runs fn for all of [from, to) in pieces that end on multiples of pieceBytes, on all
// cores. The error is that of the first piece that has one.
func inPieces(ctx context.Context, from, to int64, fn func(from, to int64) error) error {
	first := from / pieceBytes
	n := (to+pieceBytes-1)/pieceBytes - first
	var next atomic.Int64
	var mu sync.Mutex
	var failed error
	failedPiece := n
	var wg sync.WaitGroup
	for range min(int64(hostcpu.Count()), n) {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= n {
					return
				}
				lo, hi := max(from, (first+i)*pieceBytes), min(to, (first+i+1)*pieceBytes)
				err := fn(lo, hi)
				if err == nil && ctx.Err() != nil {
					err = context.Cause(ctx)
				}
				if err != nil {
					mu.Lock()
					if i < failedPiece {
						failedPiece, failed = i, err
					}
					mu.Unlock()
					next.Store(n) // pieces before this one are under way
					return
				}
			}
		})
	}
	wg.Wait()
	return failed
}

// ReadAll reads dst from byte off on, on all cores. see, where it is not nil, is shown each piece
// of dst once that is checked, with its place in dst, while it is still in a core's cache; many
// calls run at once. Pieces begin and end on multiples of 8 bytes of dst, its end aside.
func (r *Reader) ReadAll(ctx context.Context, dst []byte, off int64,
	see func(offset int64, b []byte) error) error {
	if off%8 != 0 && see != nil { // pieces end on multiples of blocks of the file
		if err := r.ReadAll(ctx, dst, off, nil); err != nil {
			return err
		}
		return see(0, dst)
	}
	return inPieces(ctx, off, off+int64(len(dst)), func(from, to int64) error {
		b := dst[from-off : to-off]
		if err := r.ReadAt(b, from); err != nil {
			return err
		}
		if see == nil {
			return nil
		}
		return see(from-off, b)
	})
}

// CheckMapped is ReadAll of a file that is mapped from its start to its end: it shows see the
// payload that begins at off.
func (r *Reader) CheckMapped(ctx context.Context, mem []byte, off int64,
	see func(offset int64, b []byte) error) error {
	return inPieces(ctx, 0, int64(len(mem)), func(from, to int64) error {
		if err := r.check(mem[from:to], from); err != nil {
			return err
		}
		if see == nil || to <= off {
			return nil
		}
		from = max(from, off)
		return see(from-off, mem[from:to])
	})
}

// Verify reads the whole file and tells bad of each block that is not what was sealed. Its error is
// of the reads.
func (r *Reader) Verify(ctx context.Context, done func(bytes int64), bad func(*Mismatch)) error {
	return inPieces(ctx, 0, r.size, func(from, to int64) error {
		b := make([]byte, to-from)
		if err := r.read(b, from); err != nil {
			return err
		}
		for offset := from; offset < to; offset += r.block {
			end := min(offset+r.block, to)
			err := r.check(b[offset-from:end-from], offset)
			var m *Mismatch
			if errors.As(err, &m) {
				bad(m)
			} else if err != nil {
				return err
			}
		}
		done(to - from)
		return nil
	})
}
