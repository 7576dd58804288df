package dataset

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/internal/errs"
)

// A dataset is sealed when it is made: dataset.seal has the size and the checksums of every file that a run may read,
// taken while they were written, and each read of any of them is held against it. It and dataset.yaml bind each
// other: it has dataset.yaml's checksum, and the hashes of the arrays in it give dataset.yaml's UUID.

// datasetFiles are the files that a run may read.
var datasetFiles = []string{metaName, indptrName, indicesName, featuresName, labelsName, "train.npy", "val.npy", "test.npy", namesName}

// sealBlock is how much of a file a checksum is of: --topology ssd reads and checks the ids by page.
func sealBlock(name string) int64 {
	if name == indicesName {
		return seal.Page
	}
	return seal.Block
}

// Sealed says whether the dataset has checksums that its files are held against.
func (d *Dataset) Sealed() bool { return d.seal != nil }

// SealInfo says what of the files was checked so far.
type SealInfo struct {
	Sealed       bool    `json:"sealed"`
	CheckedBytes int64   `json:"checked_bytes"`
	Seconds      float64 `json:"seconds"` // that the checks took, of all cores together
}

// SealInfo is what reads of the dataset's files have checked.
func (d *Dataset) SealInfo() SealInfo {
	return SealInfo{Sealed: d.Sealed(), CheckedBytes: d.checked.Checked(), Seconds: d.checked.Took().Seconds()}
}

// openSeal opens the manifest, where there is one, and holds dataset.yaml's text against it.
func (d *Dataset) openSeal(text []byte) (err error) {
	if d.seal, err = seal.Open(d.dir); err != nil {
		d.seal = nil
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	r, err := d.reader(metaName)
	if err != nil {
		return err
	}
	again := make([]byte, r.Size())
	if err := errors.Join(r.ReadAt(again, 0), r.Close()); err != nil {
		return err
	}
	if string(again) != string(text) {
		return errs.New(errs.Device, "%s changed while it was read; run that again", d.path(metaName))
	}
	return nil
}

// checkSeal checks that the manifest and dataset.yaml are of one dataset, and that the manifest has all files that there
// are, with their sizes and headers. toSeal takes a dataset that has lost its manifest.
func (d *Dataset) checkSeal(toSeal bool) error {
	m := d.seal
	if m == nil {
		if d.Meta.Sealed && !toSeal {
			return errs.New(errs.Device, "%s is missing: the dataset was sealed with it; restore it, or make it anew after a check of the arrays with \"heliosctl verify --seal %s\"", d.path(seal.Name), d.dir)
		}
		return nil
	}
	sums, rows := d.functionSum()
	for i := range m.Files {
		if f := &m.Files[i]; f.SHA256 != nil {
			name := strings.TrimSuffix(f.Name, ".npy")
			sums[name], rows[name] = f.SHA256, f.Rows
		}
	}
	if id := identity(sums, rows); m.UUID != d.Meta.UUID || id != d.id {
		return errs.New(errs.Device, "%s is of dataset %s, %s says %s: they do not belong together; restore the files or import the dataset again", m.Path(), m.UUID, d.path(metaName), d.Meta.UUID)
	}
	for _, name := range datasetFiles {
		if _, err := os.Lstat(d.path(name)); err == nil && m.File(name) == nil && !d.unread(name) {
			return errs.New(errs.Device, "%s is not one of the files that %s names, so it is no part of the dataset; remove it, or import the dataset again", d.path(name), m.Path())
		}
	}
	return m.CheckHeads(&d.checked)
}

// unread tells whether no run reads a file of this dataset.
func (d *Dataset) unread(name string) bool { return name == featuresName && d.Meta.FeatureFn != "" }

// functionSum is what a feature function counts for in the identity; empty where features.npy does.
func (d *Dataset) functionSum() (map[string][]byte, map[string]int64) {
	s := staging{sums: map[string][]byte{}, rows: map[string]int64{}}
	if fn := d.Meta.FeatureFn; fn != "" {
		m := d.Meta
		s.featureFn(&m, fn, m.Dim)
	}
	return s.sums, s.rows
}

func (d *Dataset) reader(name string) (*seal.Reader, error) {
	return seal.NewReader(d.seal, d.dir, name, &d.checked)
}

// pageSums are the checksums of indices.npy's pages; nil where the dataset is not sealed.
func (d *Dataset) pageSums() ([]uint32, error) {
	if d.seal == nil {
		return nil, nil
	}
	r, err := d.reader(indicesName)
	if err != nil {
		return nil, err
	}
	sums, block := r.Checksums()
	if block != seal.Page {
		sums = nil // then the pages are summed up as they are at the start
	}
	return sums, r.Close()
}

// writeSeal writes the manifest of all that was written.
func (s *staging) writeSeal(uuid string) error {
	for name, sum := range s.sums {
		file := name + ".npy"
		f, ok := s.sealed[file]
		if !ok { // written by an import that was interrupted, or made by a feature function
			path := filepath.Join(s.dir, file)
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			again, payload, err := sumFile(context.Background(), path, nil)
			if err != nil {
				return err
			}
			if string(payload) != string(sum) {
				return errs.New(errs.Device, "%s is not what was written before the import was interrupted; run the import again with --restart", filepath.Join(s.out, file))
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
	f, err := s.create(seal.Name)
	if err != nil {
		return err
	}
	if err := seal.Write(f, uuid, files); err != nil {
		return errors.Join(err, f.discard())
	}
	return f.finish()
}

// sumFile reads a file once and returns its block checksums and, of an array, the SHA-256 of its payload.
func sumFile(ctx context.Context, path string, done func(int64)) (f seal.Sealed, payload []byte, err error) {
	name := filepath.Base(path)
	sum, hash := seal.NewSum(name, sealBlock(name)), sha256.New()
	skip := int64(0)
	if strings.HasSuffix(name, ".npy") {
		a, err := npy.Open(path)
		if err != nil {
			return f, nil, err
		}
		skip = a.DataOffset()
	}
	r, err := os.Open(path)
	if err != nil {
		return f, nil, errs.With(errs.Usage, err)
	}
	defer func() { _ = r.Close() }() // read only
	buf := make([]byte, 1<<20)
	for {
		n, err := io.ReadFull(r, buf)
		_, _ = sum.Write(buf[:n]) // never fails
		cut := min(skip, int64(n))
		skip -= cut
		hash.Write(buf[cut:n])
		if done != nil {
			done(int64(n))
		}
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return sum.Sealed(), hash.Sum(nil), nil
		case err != nil:
			return f, nil, errs.New(errs.Device, "%s: %w", path, err)
		case ctx.Err() != nil:
			return f, nil, context.Cause(ctx)
		}
	}
}

// BadFile is a part of a file that is not what was sealed.
type BadFile struct {
	File string `json:"file"`
	From int64  `json:"from"` // byte
	To   int64  `json:"to"`   // the byte behind its last one
	What string `json:"what"`
}

// FilesReport says what VerifyFiles has read.
type FilesReport struct {
	Sealed   bool      `json:"sealed"`
	Files    int       `json:"files"`
	Bytes    int64     `json:"bytes"`
	BadCount int64     `json:"bad_count"`
	Bad      []BadFile `json:"bad"`
	Seconds  float64   `json:"seconds"`
}

// files are those of the dataset that are there and read by runs, without some, and their bytes.
func (d *Dataset) files(without []string) (names []string, total int64) {
	for _, name := range datasetFiles {
		if st, err := os.Stat(d.path(name)); err == nil && !slices.Contains(without, name) && !d.unread(name) {
			names = append(names, name)
			total += st.Size()
		}
	}
	return names, total
}

// VerifyFiles reads the dataset's files and checks them: each block of a sealed dataset against its checksum, the
// arrays of one that is not sealed against the UUID in dataset.yaml. Its error, of class device, sums up what is bad.
func VerifyFiles(ctx context.Context, d *Dataset, progress Progress) (FilesReport, error) {
	return d.verifyFiles(ctx, progress)
}

// VerifyAllButRows is VerifyFiles of a sealed dataset without features.npy, which Load checks while it reads it.
func VerifyAllButRows(ctx context.Context, d *Dataset, progress Progress) (FilesReport, error) {
	if !d.Sealed() {
		return FilesReport{Bad: []BadFile{}}, nil
	}
	return d.verifyFiles(ctx, progress, featuresName)
}

func (d *Dataset) verifyFiles(ctx context.Context, progress Progress, without ...string) (FilesReport, error) {
	start := time.Now()
	r := FilesReport{Sealed: d.Sealed(), Bad: []BadFile{}}
	names, total := d.files(without)
	r.Files = len(names)
	var mu sync.Mutex
	read := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		r.Bytes += n
		progress.report("verify files", r.Bytes, total)
	}
	if !d.Sealed() {
		_, err := d.sumFiles(ctx, names, read)
		r.Seconds = time.Since(start).Seconds()
		return r, err
	}
	for _, name := range names {
		f, err := d.reader(name)
		if err != nil {
			return r, err
		}
		err = f.Verify(ctx, read, func(m *seal.Mismatch) {
			mu.Lock()
			defer mu.Unlock()
			if r.BadCount++; r.BadCount <= 1000 {
				r.Bad = append(r.Bad, BadFile{m.Path, m.From, m.To, m.What})
			}
		})
		if err := errors.Join(err, f.Close()); err != nil {
			return r, err
		}
	}
	slices.SortFunc(r.Bad, func(a, b BadFile) int { // blocks are read at once
		if c := strings.Compare(a.File, b.File); c != 0 {
			return c
		}
		return int(a.From/seal.Page - b.From/seal.Page)
	})
	r.Seconds = time.Since(start).Seconds()
	if r.BadCount > 0 {
		b := r.Bad[0]
		return r, errs.New(errs.Device, "dataset %s: %d blocks of its files are not those that were sealed, the first in %s at bytes %d to %d: %s; restore the file or import the dataset again",
			d.dir, r.BadCount, b.File, b.From, b.To-1, b.What)
	}
	return r, nil
}

// sumFiles reads all files and checks that their arrays give the UUID in dataset.yaml.
func (d *Dataset) sumFiles(ctx context.Context, names []string, read func(int64)) ([]seal.Sealed, error) {
	files := make([]seal.Sealed, len(names))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for i, name := range names {
		g.Go(func() error {
			f, payload, err := sumFile(gctx, d.path(name), read)
			if err == nil && strings.HasSuffix(name, ".npy") {
				var a *npy.Array
				if a, err = npy.Open(d.path(name)); err == nil {
					f.SHA256, f.Rows = payload, a.Header.Shape[0]
				}
			}
			files[i] = f
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	sums, rows := d.functionSum()
	var all []string
	for _, f := range files {
		if f.SHA256 != nil {
			name := strings.TrimSuffix(f.Name, ".npy")
			sums[name], rows[name] = f.SHA256, f.Rows
			all = append(all, fmt.Sprintf("%s %s", f.Name, hex.EncodeToString(f.SHA256[:4])))
		}
	}
	if id := identity(sums, rows); id != d.id {
		return nil, errs.New(errs.Device, "dataset %s: its arrays give UUID %s, %s says %s: at least one of them changed since it was made (%s); restore the files or import the dataset again",
			d.dir, id, d.path(metaName), d.id, strings.Join(all, ", "))
	}
	return files, nil
}

// Seal seals the dataset in dir, once its arrays are what its UUID says; names.txt and the rest of dataset.yaml are
// sealed as they are. A dataset that is sealed is verified and stays as it is: what disagrees with its seal is never
// sealed again. anew says whether there is a seal now that was not there.
func Seal(ctx context.Context, dir string, progress Progress) (r FilesReport, anew bool, err error) {
	d, err := openDir(dir, true)
	if err != nil {
		return r, false, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if d.Sealed() {
		r, err = VerifyFiles(ctx, d, progress)
		return r, false, err
	}
	start := time.Now()
	names, total := d.files(nil)
	r = FilesReport{Sealed: true, Files: len(names), Bad: []BadFile{}}
	var mu sync.Mutex
	files, err := d.sumFiles(ctx, names, func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		r.Bytes += n
		progress.report("seal", r.Bytes, total)
	})
	if err != nil {
		return r, false, err
	}
	if err := writeManifest(d.dir, d.id, files); err != nil {
		return r, false, err
	}
	r.Seconds = time.Since(start).Seconds()
	return r, true, nil
}

// writeManifest puts the manifest in place, whole or not at all.
func writeManifest(dir string, id uuid.UUID, files []seal.Sealed) (err error) {
	f, err := os.CreateTemp(dir, seal.Name+partialMark)
	if err != nil {
		return errs.New(errs.Usage, "cannot write to %s: %w; make the folder writable", dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	err = seal.Write(f, id.String(), files)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return explainWrite(f.Name(), err)
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, seal.Name)); err != nil {
		return err
	}
	parent, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fsync(int(parent.Fd())), parent.Close())
}
