package pages

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/fileid"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/ssdmodel"
	"helios/internal/work"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// OpenOptions shape the software SSD over a folder's pages.
type OpenOptions struct {
	// Faults strike between the program and the SSD; nil: none do.
	Faults *faultinject.Set
	// Model is an SSD to play in wall time; nil: as fast as the file.
	Model *ssdmodel.Model
	// PollDoorbells has the controller look at its doorbells, for a device that cannot call it.
	PollDoorbells bool
}

// folderMDTS lets a command of the software SSD move longRead.
const folderMDTS = 8

// samplePages are read and held against their checksums when a store is opened: they tell pages of
// another pack from these.
const samplePages = 16

// OpenFolder opens the finished pages in dir to be read: one software SSD over the file. Several
// processes may. Pages that are missing, unfinished, another pack's, cut short or damaged where a
// few are looked at are errors that name the file.
func OpenFolder(ctx context.Context, dir string, s Spec, o OpenOptions) (_ *Opened, err error) {
	path := filepath.Join(dir, PagesName)
	id, err := checkFolder(dir, s)
	if err != nil {
		return nil, err
	}
	l, err := gpuio.NewLayout(s.Pages, int(s.PageBytes), 1, align)
	if err != nil {
		return nil, err
	}
	cfg := proxy.Config{Name: path, Path: path, Bytes: s.Bytes(), File: id, LBABytes: align,
		ReadOnly: true, MDTS: folderMDTS, Model: o.Model, PollDoorbells: o.PollDoorbells}
	if o.Model != nil && !o.Model.LBAOK(align) {
		return nil, errs.New(errs.Usage, "%s: SSD model %s has no LBAs of %d bytes", path,
			o.Model.Name, align)
	}
	bus, err := openBus(cfg)
	if err != nil {
		return nil, err
	}
	if !o.Faults.Empty() {
		bus = faultbus.New(bus, o.Faults, faultbus.Options{PollDoorbells: o.PollDoorbells})
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), bus.Close())
	}
	ssd := &gpuio.SSD{Ctrl: c, Name: path, BackingPath: path, Backing: id, Repair: advice}
	return &Opened{SSDs: []*gpuio.SSD{ssd}, Layout: l,
		Sums: func(context.Context) ([]uint32, error) {
			f, err := readSums(dir, &s)
			return f.sums, err
		},
		Shutdown: c.Close}, nil
}

// openBus opens the file past the page cache, or through it where the file system has nothing else.
func openBus(cfg proxy.Config) (nvme.Bus, error) {
	bus, err := proxy.Open(cfg)
	if errs.ClassOf(err) == errs.Capability {
		cfg.Buffered = true
		if b, berr := proxy.Open(cfg); berr == nil {
			return b, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return bus, nil
}

// checkFolder checks that finished pages of s are in dir, and a few of them.
func checkFolder(dir string, s Spec) (id fileid.ID, err error) {
	if err := s.Check(); err != nil {
		return id, err
	}
	sums, err := readFinished(dir, &s)
	if err != nil {
		return id, err
	}
	f, err := openPages(dir, s)
	if err != nil {
		return id, err
	}
	defer errs.Closing(&err, f.Close)
	if id, _, err = fileid.Of(f); err != nil {
		return id, errs.With(errs.Device, err)
	}
	b := make([]byte, s.PageBytes)
	for i := range min(samplePages, s.Pages) {
		p := i * (s.Pages - 1) / max(min(samplePages, s.Pages)-1, 1)
		if err := readPage(f, s, p, b, sums[p]); err != nil {
			return id, err
		}
	}
	return id, nil
}

// readFinished reads the checksums of pages that must be finished.
func readFinished(dir string, want *Spec) ([]uint32, error) {
	t, err := readSums(dir, want)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, errs.New(errs.Usage, "there are no pages in %s: %w",
			dir, err)
	case err != nil:
		return nil, err
	case !t.complete:
		return nil, errs.New(errs.Device,
			"the prepared pages in %s are not finished: preparing them was cut off; go on with it",
			dir)
	}
	return t.sums, nil
}

// openPages opens the file of the pages, which must have its size.
func openPages(dir string, s Spec) (*os.File, error) {
	path := filepath.Join(dir, PagesName)
	f, err := infile.Open(path)
	if err != nil {
		return nil, damaged(path, "%v", err)
	}
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, errors.Join(errs.With(errs.Device, err), f.Close())
	case st.Size() != s.Bytes():
		return nil, errors.Join(damaged(path, "it has %d bytes and should have %d", st.Size(),
			s.Bytes()), f.Close())
	}
	return f, nil
}

// readPage reads a page into b and checks it.
func readPage(f *os.File, s Spec, page int64, b []byte, want uint32) error {
	offset := page * s.PageBytes
	if n, err := f.ReadAt(b, offset); n < len(b) {
		if errors.Is(err, io.EOF) {
			return damaged(f.Name(), "it ends at byte %d, in page %d", offset+int64(n), page)
		}
		return errs.New(errs.Device,
			"%s: page %d (bytes from %d on): %w; look at the kernel's log for the storage behind it",
			f.Name(), page, offset, err)
	}
	if got := crc32.Checksum(b, castagnoli); got != want {
		return mismatch(f.Name(), page, offset, got, want)
	}
	return nil
}

// VerifyFolder reads all pages in dir and compares them with their checksums. It returns how many
// it has read; the error, of class device, names the first that is wrong and how many are. want,
// where it is given, is what the pages must be.
func VerifyFolder(ctx context.Context, dir string, want *Spec, p work.Progress) (n int64,
	err error) {
	t, err := readSums(dir, want)
	if err != nil {
		return 0, err
	}
	sums, err := readFinished(dir, &t.spec)
	if err != nil {
		return 0, err
	}
	f, err := openPages(dir, t.spec)
	if err != nil {
		return 0, err
	}
	defer errs.Closing(&err, f.Close)
	per := max(folderPiece/t.spec.PageBytes, 1)
	buf, err := hostmem.Alloc(per*t.spec.PageBytes, "pages")
	if err != nil {
		return 0, err
	}
	defer errs.Closing(&err, func() error { return hostmem.Free(buf) })
	var first error
	bad := int64(0)
	for n < t.spec.Pages {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		b := buf[:min(per, t.spec.Pages-n)*t.spec.PageBytes]
		_, rerr := f.ReadAt(b, n*t.spec.PageBytes)
		for ; len(b) > 0; n++ {
			page := b[:t.spec.PageBytes]
			b = b[len(page):]
			var err error
			if rerr != nil { // which of them it is shows one at a time
				err = readPage(f, t.spec, n, page, sums[n])
			} else if got := crc32.Checksum(page, castagnoli); got != sums[n] {
				err = mismatch(f.Name(), n, n*t.spec.PageBytes, got, sums[n])
			}
			if err != nil {
				bad++
				if first == nil {
					first = err
				}
			}
		}
		p.Report("verify pages", n, t.spec.Pages)
	}
	if bad > 1 {
		first = fmt.Errorf("%w; %d of %d pages are wrong", first, bad, n)
	}
	return n, first
}
