package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"helios/cache/packed"
	"helios/cache/superbatch"
	"helios/dataset/pages"
	"helios/internal/hostmem"
)

const block = 4096

// features are rows in a file that is read past the page cache.
type features struct {
	f     *os.File
	width int64
	buf   []byte
}

// makeFeatures writes rows of numbers that differ.
func makeFeatures(path string, rows, width int64) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	buf := make([]byte, 8<<20)
	state := uint64(1)
	for left := (rows*width + block - 1) / block * block; left > 0; {
		n := min(left, int64(len(buf)))
		for i := range buf[:n] {
			if i%8 == 0 {
				state = state*6364136223846793005 + 1442695040888963407
			}
			buf[i] = byte(state >> (8 * (i % 8)))
		}
		if _, err := f.Write(buf[:n]); err != nil {
			return err
		}
		left -= n
	}
	return f.Sync()
}

func openFeatures(path string, width int64) (*features, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	buf, err := hostmem.Alloc(16<<20, "features")
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &features{f, width, buf}, nil
}

func (s *features) Close() error { return errors.Join(hostmem.Free(s.buf), s.f.Close()) }

// ReadRows implements packed.Source.
func (s *features) ReadRows(_ context.Context, first, n int64, dst []byte) error {
	return s.read(first, n, dst, s.buf)
}

func (s *features) read(first, n int64, dst, buf []byte) error {
	from, end := first*s.width, (first+n)*s.width
	for from < end {
		at := from / block * block
		to := min((end+block-1)/block*block, at+int64(len(buf)))
		if _, err := s.f.ReadAt(buf[:to-at], at); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		got := copy(dst, buf[from-at:min(end, to)-at])
		dst, from = dst[got:], from+int64(got)
	}
	return nil
}

// comparePacking packs all mini-batches at one go, and some of them one at a time: each row of
// their chunks is read by itself, by 32 goroutines.
func comparePacking(ctx context.Context, o options, m superbatch.Memory, c packed.Config,
	out io.Writer) (err error) {
	dir, err := os.MkdirTemp(o.dir, "packlayout-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "features")
	if err := makeFeatures(path, c.Rows, c.RowBytes); err != nil {
		return err
	}
	src, err := openFeatures(path, c.RowBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	f, err := os.Create(filepath.Join(dir, "plan"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	c.Segment, c.Budget = 1, 0 // chunks alone: what both ways pack
	r, err := packed.Build(ctx, m, c, f)
	if err != nil {
		return err
	}
	p, err := packed.New(f.Name(), f, r.Bytes)
	if err != nil {
		return err
	}
	rows := r.Stats.ChunkRows
	single := min(o.single, len(m))
	fmt.Fprintf(out, "\npacking\trows\tseconds\trows/s\tMB written\n")
	var per [2][]float64
	for turn := range 3 {
		folder := filepath.Join(dir, fmt.Sprint("pages", turn))
		if err := os.Mkdir(folder, 0o700); err != nil {
			return err
		}
		to, err := pages.CreateFolder(folder, pages.Spec{ID: uuid.New(),
			PageBytes: r.Shape.PageBytes, Pages: p.Pages()})
		if err != nil {
			return err
		}
		got, err := packed.Pack(ctx, p, src, to, packed.PackConfig{Workers: o.workers})
		if err != nil {
			return errors.Join(err, to.Close())
		}
		fmt.Fprintf(out, "at one go\t%d\t%.2f\t%.0f\t%.0f\n", rows, got.Seconds,
			float64(rows)/got.Seconds, float64(got.WrittenBytes)/1e6)
		begin := time.Now()
		n, err := packSingly(ctx, p, src, to, single, turn)
		if err == nil {
			err = to.Sync(ctx)
		}
		took := time.Since(begin).Seconds()
		if err = errors.Join(err, to.Close(), os.RemoveAll(folder)); err != nil {
			return err
		}
		fmt.Fprintf(out, "by mini-batch\t%d\t%.2f\t%.0f\t%.0f\n", n, took, float64(n)/took,
			float64(n*c.RowBytes)/1e6)
		per[0] = append(per[0], float64(rows)/got.Seconds)
		per[1] = append(per[1], float64(n)/took)
	}
	fmt.Fprintf(out, "rows a second at one go over those by mini-batch, by turn:")
	for i := range per[0] {
		fmt.Fprintf(out, " %.1f", per[0][i]/per[1][i])
	}
	fmt.Fprintln(out)
	return nil
}

// packSingly packs some mini-batches' chunks again, each by itself.
func packSingly(ctx context.Context, p *packed.Plan, src *features, to packed.Pages, n,
	turn int) (rows int64, err error) {
	h := p.Shape()
	for i := range n {
		s := p.Stream((turn*n + i) % p.Streams())
		list, err := p.Rows((turn*n + i) % p.Streams())
		if err != nil {
			return 0, err
		}
		chunk, err := hostmem.Alloc(h.PagesOf(s.Rows)*h.PageBytes, "chunk")
		if err != nil {
			return 0, err
		}
		var g errgroup.Group
		var next atomic.Int64
		for range 32 {
			g.Go(func() error {
				buf, err := hostmem.Alloc(block+(src.width+block-1)/block*block, "row")
				if err != nil {
					return err
				}
				defer func() { _ = hostmem.Free(buf) }()
				for {
					k := next.Add(1) - 1
					if k >= s.Rows {
						return nil
					}
					at := k/h.RowsPerPage*h.PageBytes + k%h.RowsPerPage*h.RowBytes
					if err := src.read(list[k], 1, chunk[at:at+h.RowBytes], buf); err != nil {
						return err
					}
				}
			})
		}
		if err = g.Wait(); err == nil {
			err = to.WriteAt(ctx, s.Page, chunk)
		}
		if err = errors.Join(err, hostmem.Free(chunk)); err != nil {
			return 0, err
		}
		rows += s.Rows
	}
	return rows, nil
}
