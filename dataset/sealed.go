package dataset

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/work"
)

// A dataset is sealed when it is made: dataset.seal has the size and the checksums of every file
// that a run may read, taken while they were written, and each read of any of them is held against
// it. It and dataset.yaml bind each other: it has dataset.yaml's checksum, and the hashes of the
// arrays in it give dataset.yaml's UUID.

// Files are the files of format 1 that a run may read.
var Files = []string{MetaName, IndptrName, IndicesName, FeaturesName, LabelsName, "train.npy",
	"val.npy", "test.npy", NamesName, NameMapName, IDsName, ColumnsName}

// IsFile reports whether a name, relative to the folder, is that of a file that a dataset may have.
func IsFile(name string) bool {
	dir, base := path.Split(name)
	if dir == "" {
		return slices.Contains(Files, name)
	}
	part, number, _ := strings.Cut(strings.TrimSuffix(dir, "/"), "/")
	i, err := strconv.Atoi(number)
	return err == nil && dir == partDir(part, i)+"/" && slices.Contains(partFiles[part], base)
}

// IsPart reports whether a name, relative to the folder, is that of a folder of such files.
func IsPart(name string) bool {
	part, number, in := strings.Cut(name, "/")
	if _, known := partFiles[part]; !known || !in {
		return known
	}
	i, err := strconv.Atoi(number)
	return err == nil && name == partDir(part, i)
}

// SealBlock returns how much of a file a checksum is of: --topology ssd reads and checks the ids by
// page.
func SealBlock(name string) int64 {
	if path.Base(name) == IndicesName {
		return seal.Page
	}
	return seal.Block
}

// Sealed reports whether the dataset has checksums that its files are held against.
func (d *Dataset) Sealed() bool { return d.sealed() }

// SealInfo counts the files that were checked so far.
type SealInfo struct {
	Sealed       bool    `json:"sealed"`
	CheckedBytes int64   `json:"checked_bytes"`
	Seconds      float64 `json:"seconds"` // that the checks took, of all cores together
}

// SealInfo returns what reads of the dataset's files have checked.
func (d *Dataset) SealInfo() SealInfo {
	return SealInfo{Sealed: d.Sealed(), CheckedBytes: d.checked.Checked(),
		Seconds: d.checked.Took().Seconds()}
}

// SumFile reads a file of the dataset in dir once and returns its block checksums and, of an array,
// the SHA-256 of its payload.
func SumFile(ctx context.Context, dir, name string, done func(int64)) (f seal.Sealed,
	payload []byte, err error) {
	path := filepath.Join(dir, name)
	sum, hash := seal.NewSum(name, SealBlock(name)), sha256.New()
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

// FilesReport counts the files that VerifyFiles has read.
type FilesReport struct {
	Sealed   bool      `json:"sealed"`
	Files    int       `json:"files"`
	Bytes    int64     `json:"bytes"`
	BadCount int64     `json:"bad_count"`
	Bad      []BadFile `json:"bad"`
	Seconds  float64   `json:"seconds"`
}

// files are those of the dataset that are there and read by runs, and their bytes.
func (d *folder) files(withoutRows bool) (names []string, total int64) {
	for _, name := range d.meta.files() {
		if st, err := os.Stat(d.path(name)); err == nil && !d.unread(name) &&
			!(withoutRows && isFeatures(name)) {
			names = append(names, name)
			total += st.Size()
		}
	}
	return names, total
}

// VerifyFiles reads the dataset's files and checks them: each block of a sealed dataset against its
// checksum, the arrays of one that is not sealed against the UUID in dataset.yaml. Its error, of
// class device, sums up what is bad.
func VerifyFiles(ctx context.Context, d *Dataset, progress work.Progress) (FilesReport, error) {
	return d.verifyFiles(ctx, progress, false)
}

// VerifyAllButRows is VerifyFiles of a sealed dataset without features.npy, which Load checks while
// it reads it.
func VerifyAllButRows(ctx context.Context, d *Dataset, progress work.Progress) (FilesReport,
	error) {
	if !d.Sealed() {
		return FilesReport{Bad: []BadFile{}}, nil
	}
	return d.verifyFiles(ctx, progress, true)
}

func (d *folder) verifyFiles(ctx context.Context, progress work.Progress,
	withoutRows bool) (FilesReport, error) {
	start := time.Now()
	r := FilesReport{Sealed: d.sealed(), Bad: []BadFile{}}
	names, total := d.files(withoutRows)
	r.Files = len(names)
	var mu sync.Mutex
	read := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		r.Bytes += n
		progress.Report("verify files", r.Bytes, total)
	}
	if !d.sealed() {
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
		return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.From, b.From))
	})
	r.Seconds = time.Since(start).Seconds()
	if r.BadCount > 0 {
		b := r.Bad[0]
		return r, errs.New(errs.Device,
			"dataset %s: %d blocks of its files are not those that were sealed, the first in %s at bytes %d to %d: %s; restore the file or import the dataset again",
			d.dir, r.BadCount, b.File, b.From, b.To-1, b.What)
	}
	return r, nil
}

// sumFiles reads all files and checks that their arrays give the UUID in dataset.yaml.
func (d *folder) sumFiles(ctx context.Context, names []string, read func(int64)) ([]seal.Sealed,
	error) {
	files := make([]seal.Sealed, len(names))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for i, name := range names {
		g.Go(func() error {
			f, payload, err := SumFile(gctx, d.dir, name, read)
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
	sums, rows := d.described()
	var all []string
	for _, f := range files {
		if f.SHA256 != nil {
			name := strings.TrimSuffix(f.Name, ".npy")
			sums[name], rows[name] = f.SHA256, f.Rows
			all = append(all, fmt.Sprintf("%s %s", f.Name, hex.EncodeToString(f.SHA256[:4])))
		}
	}
	if id := Identity(sums, rows); id != d.id {
		return nil, errs.New(errs.Device,
			"dataset %s: its arrays give UUID %s, %s says %s: at least one of them changed since it was made (%s); restore the files or import the dataset again",
			d.dir, id, d.path(MetaName), d.id, strings.Join(all, ", "))
	}
	return files, nil
}

// Seal seals the dataset in dir, once its arrays agree with its UUID; names.txt and the rest of
// dataset.yaml are sealed as they are. A dataset that is sealed is verified and stays as it is:
// what disagrees with its seal is never sealed again. anew reports whether there is a seal now that
// was not there.
func Seal(ctx context.Context, dir string, progress work.Progress) (r FilesReport, anew bool,
	err error) {
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
	names, total := d.files(false)
	r = FilesReport{Sealed: true, Files: len(names), Bad: []BadFile{}}
	var mu sync.Mutex
	files, err := d.sumFiles(ctx, names, func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		r.Bytes += n
		progress.Report("seal", r.Bytes, total)
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
func writeManifest(dir string, id uuid.UUID, files []seal.Sealed) error {
	part := fmt.Sprintf("%s%s%d", seal.Name, PartialMark, os.Getpid())
	if err := durable.Replace(dir, part, seal.Name, func(f *os.File) error {
		return seal.Write(f, id.String(), files)
	}, nil); err != nil {
		return errs.New(errs.Usage, "cannot write to %s: %w; make the folder writable", dir, err)
	}
	return nil
}

// Identity is a UUID of the content: the same arrays give the same dataset, wherever and
// whenever they are made (RFC 9562 section 5.8, version 8).
func Identity(sums map[string][]byte, rows map[string]int64) uuid.UUID {
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(sums)) {
		fmt.Fprintf(h, "%s %d %s\n", n, rows[n], hex.EncodeToString(sums[n]))
	}
	var id uuid.UUID
	copy(id[:], h.Sum(nil))
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}
