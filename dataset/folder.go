package dataset

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/uuid"

	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/internal/errs"
)

// folder is the directory of a dataset, and the seal that its files are held against.
type folder struct {
	dir     string // as given to Open
	was     fs.FileInfo
	meta    *Meta
	id      uuid.UUID
	seal    *seal.Manifest // nil: the dataset is not sealed
	checked seal.Counter
}

func (d *folder) path(name string) string { return filepath.Join(d.dir, name) }

// Same refuses a folder that another has taken the place of since Open.
func (d *folder) Same() error {
	if now, err := os.Stat(d.dir); err == nil && d.was != nil && !os.SameFile(now, d.was) {
		return errs.New(errs.Refused,
			"dataset %s was replaced while it was in use, as an import that adds to it does; run it again",
			d.dir)
	}
	return nil
}

func (d *folder) sealed() bool { return d.seal != nil }

// array is an array of a dataset's folder, as the description has it.
type array struct {
	name  string
	types []npy.DType
	shape []int64
}

// check compares every array's header and length with the metadata.
func (d *folder) check() error {
	for _, a := range d.meta.arrays() {
		if err := d.checkArray(a); err != nil {
			return err
		}
	}
	return nil
}

func (d *folder) checkArray(w array) error {
	path := d.path(w.name)
	a, err := npy.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.Usage,
			"%s is missing: the dataset is not whole; make or import it again", path)
	}
	if errors.Is(err, fs.ErrPermission) {
		return errs.New(errs.Usage, "%w; make it readable", err)
	}
	if err != nil {
		return err
	}
	if st, err := os.Stat(path); err == nil && st.Size() != a.DataOffset()+a.Header.Bytes() {
		return errs.New(errs.Usage,
			"%s: has %d bytes, its header says %d: something was written behind the array; restore the file or import the dataset again",
			path, st.Size(), a.DataOffset()+a.Header.Bytes())
	}
	if !slices.Contains(w.types, a.Header.DType) {
		return errs.New(errs.Usage, "%s: holds %s, expected %v", path, a.Header.DType, w.types)
	}
	expect := npy.Header{Shape: w.shape}
	if a.Header.ShapeString() != expect.ShapeString() || a.Header.Fortran && len(w.shape) > 1 {
		return errs.New(errs.Usage,
			"%s has shape %s, %s says %s; the two do not belong together, import again",
			path, a.Header.ShapeString(), d.path(MetaName), expect.ShapeString())
	}
	return nil
}

// readArray reads the whole payload of an array of this directory into dst and checks it, as
// seal.Reader.ReadAll does.
func (d *folder) readArray(name string, dst []byte, see func(offset int64, b []byte) error) error {
	if err := d.Same(); err != nil {
		return err
	}
	path := d.path(name)
	a, err := npy.Open(path)
	if err != nil {
		return err
	}
	if int64(len(dst)) != a.Header.Bytes() {
		return errs.New(errs.Usage, "%s: has %d bytes of data, expected %d; import again", path,
			a.Header.Bytes(), len(dst))
	}
	r, err := d.reader(name)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read only
	return r.ReadAll(context.Background(), dst, a.DataOffset(), see)
}

// openSeal opens the manifest, where there is one, and holds dataset.yaml's text against it.
func (d *folder) openSeal(text []byte) (err error) {
	if d.seal, err = seal.Open(d.dir); err != nil {
		d.seal = nil
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	r, err := d.reader(MetaName)
	if err != nil {
		return err
	}
	again := make([]byte, r.Size())
	if err := errors.Join(r.ReadAt(again, 0), r.Close()); err != nil {
		return err
	}
	if string(again) != string(text) {
		return errs.New(errs.Device, "%s changed while it was read; run that again",
			d.path(MetaName))
	}
	return nil
}

// checkSeal checks that the manifest and dataset.yaml are of one dataset, and that the manifest has
// all files that there are, with their sizes and headers. toSeal takes a dataset that has lost its
// manifest.
func (d *folder) checkSeal(toSeal bool) error {
	m := d.seal
	if m == nil {
		if d.meta.Sealed && !toSeal {
			return errs.New(errs.Device,
				"%s is missing: the dataset was sealed with it; restore it, or make it anew after a check of the arrays with \"heliosctl verify --seal %s\"",
				d.path(seal.Name), d.dir)
		}
		return nil
	}
	sums, rows := d.described()
	for i := range m.Files {
		if f := &m.Files[i]; f.SHA256 != nil {
			name := strings.TrimSuffix(f.Name, ".npy")
			sums[name], rows[name] = f.SHA256, f.Rows
		}
	}
	if id := Identity(sums, rows); m.UUID != d.meta.UUID || id != d.id {
		return errs.New(errs.Device,
			"%s belongs to dataset %s, %s says %s: they do not belong together; restore the files or import the dataset again",
			m.Path(), m.UUID, d.path(MetaName), d.meta.UUID)
	}
	for _, name := range d.meta.files() {
		if _, err := os.Lstat(d.path(name)); err == nil && m.File(name) == nil && !d.unread(name) {
			return errs.New(errs.Device,
				"%s is not one of the files that %s names, so it is no part of the dataset; remove it, or import the dataset again",
				d.path(name), m.Path())
		}
	}
	return m.CheckHeads(&d.checked)
}

// unread reports whether no run reads a file of this dataset.
func (d *folder) unread(name string) bool { return isFeatures(name) && d.meta.FeatureFn != "" }

// described returns the parts of the description that count in the identity: the schema, and a
// feature function, which makes what features.npy would hold.
func (d *folder) described() (map[string][]byte, map[string]int64) {
	sums, rows := map[string][]byte{}, map[string]int64{}
	d.meta.CountIn(sums, rows)
	return sums, rows
}

func (d *folder) reader(name string) (*seal.Reader, error) {
	if err := d.Same(); err != nil {
		return nil, err
	}
	return seal.NewReader(d.seal, d.dir, name, &d.checked)
}

// pageSums are the checksums of the pages of a file of indices; nil where the dataset is not
// sealed.
func (d *folder) pageSums(indices string) ([]uint32, error) {
	if d.seal == nil {
		return nil, nil
	}
	r, err := d.reader(indices)
	if err != nil {
		return nil, err
	}
	sums, block := r.Checksums()
	if block != seal.Page {
		sums = nil // then the pages are summed up as they are at the start
	}
	return sums, r.Close()
}
