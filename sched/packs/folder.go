// Package packs keeps mini-batches that are sampled, and whose rows are laid out on disk, before
// they train (DiskGNN, Liu et al., 2024): a folder with packs of sample epochs, each with its
// samples (package samples), its plan and its pages (packages cache/packed and dataset/pages). Work
// that was cut off is resumed; whole packs are used again by runs of the same Key.
package packs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"helios/dataset/pages"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/infile"
	"helios/sched/samples"
)

// The files of a folder: the manifest, the name that it has while it is written, and the lock.
const (
	manifestName = "packs.json"
	partName     = ".packs.json.part"
	lockName     = ".lock"
)

// format is the version of the manifest and of what it describes.
const format = 2

// manifest is the content of manifestName, behind which stands a line with its checksum.
type manifest struct {
	Format int     `json:"format"`
	Key    Key     `json:"key"`
	Packs  []Entry `json:"packs"`
}

// Folder is a folder of packs that this process has for itself.
type Folder struct {
	dir   string
	place pages.Place
	lock  *os.File
	m     manifest
	disk  atomic.Int64 // bytes of all packs, as measure has found
}

// Open takes the folder for a run with a key, and makes it where it is not there; its packs have
// their pages in a place that the key tells from others. One that another process has, that holds
// anything else, or that was prepared with another key is refused.
func Open(dir string, key Key, place pages.Place) (_ *Folder, err error) {
	there, err := isOurs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, unusable(err)
	}
	f := &Folder{dir: dir, place: place}
	if f.lock, err = takeLock(dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if !there {
		if there, err = isOurs(dir); err != nil { // another process may have begun one meanwhile
			return nil, err
		}
	}
	if !there {
		f.m = manifest{Format: format, Key: key}
		return f, f.save()
	}
	if f.m, err = readManifest(filepath.Join(dir, manifestName)); err != nil {
		return nil, err
	}
	was := f.m.Key
	if !f.planned() { // samples do not depend on these
		was.Segment, was.Budget = key.Segment, key.Budget
	}
	if err := key.same(was, dir); err != nil {
		return nil, err
	}
	f.measure()
	if was.Segment != f.m.Key.Segment || was.Budget != f.m.Key.Budget {
		f.m.Key = was
		if err := f.save(); err != nil {
			return nil, err
		}
	}
	return f, f.clean()
}

// planned reports whether a pack has been laid out.
func (f *Folder) planned() bool {
	return slices.ContainsFunc(f.m.Packs, func(e Entry) bool {
		_, err := os.Lstat(filepath.Join(f.dir, e.name(), planName))
		return e.Whole || e.Planned != nil || !errors.Is(err, fs.ErrNotExist)
	})
}

// packFolder is the pattern of the names of packs' folders.
var packFolder = regexp.MustCompile(`^epochs-[0-9]+-[0-9]+$`)

// clean removes what an end of the process has left of packs that were removed.
func (f *Folder) clean() error {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return unusable(err)
	}
	for _, d := range entries {
		known := slices.ContainsFunc(f.m.Packs, func(e Entry) bool { return e.name() == d.Name() })
		if !d.IsDir() || known || !packFolder.MatchString(d.Name()) {
			continue
		}
		if err := removePack(filepath.Join(f.dir, d.Name())); err != nil {
			return unusable(err)
		}
	}
	return nil
}

// removePack removes the files of a pack, and its folder where nothing else is in it.
func removePack(dir string) error {
	if err := samples.Remove(dir); err != nil {
		return err
	}
	if err := pages.RemoveFolder(dir); err != nil {
		return err
	}
	for _, name := range []string{planName, planPartName, markName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	err := os.Remove(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil // what else is in it is not ours
	}
	return err
}

// isOurs reports whether a folder has packs. One that is not there, or empty, may become one.
func isOurs(dir string) (bool, error) {
	holds, other, err := durable.Holds(dir, manifestName, lockName, partName)
	if err != nil {
		return false, unusable(err)
	}
	if other != "" {
		return false, errs.New(errs.Refused,
			"folder %s holds %s and no packed mini-batches; name another folder, or one that is empty, with %v",
			dir, other, errs.Key("packed"))
	}
	return holds, nil
}

func unusable(err error) error {
	return errs.New(errs.Usage, "%v: %w; name a folder that can be written", errs.Key("packed"),
		err)
}

// takeLock keeps other processes out until the file is closed, or the process ends.
func takeLock(dir string) (*os.File, error) {
	f, err := durable.Lock(dir, lockName)
	var held *durable.HeldError
	if errors.As(err, &held) {
		return nil, errs.New(errs.Refused,
			"the packed mini-batches in %s are in use by %s; wait for it, or name another folder with %v",
			dir, held.Holder, errs.Key("packed"))
	}
	if err != nil {
		return nil, unusable(err)
	}
	return f, nil
}

// Close gives the folder back.
func (f *Folder) Close() error {
	if f.lock == nil {
		return nil
	}
	err := f.lock.Close()
	f.lock = nil
	return err
}

// Dir is the folder's name.
func (f *Folder) Dir() string { return f.dir }

// mostManifest is far more than a manifest of the most packs takes.
const mostManifest = 1 << 28

func readManifest(path string) (m manifest, err error) {
	f, err := infile.Open(path)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return m, errs.With(errs.Device, err)
	}
	damaged := func(why string) error {
		return errs.New(errs.Device,
			"%s is damaged: %s; remove the folder and prepare its mini-batches again", path, why)
	}
	if st.Size() > mostManifest {
		return m, damaged("it is too long")
	}
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return m, errs.With(errs.Device, err)
	}
	return m, m.decode(b, damaged)
}

// decode reads a manifest.
func (m *manifest) decode(b []byte, damaged func(why string) error) error {
	if err := durable.Decode(b, m); err != nil {
		return damaged(err.Error())
	}
	if m.Format != format {
		return errs.New(errs.Capability,
			"the packed mini-batches have format %d, and this heliosctl reads format %d: use the one that prepared them, or prepare them in another folder",
			m.Format, format)
	}
	for _, e := range m.Packs {
		if e.First < 0 || e.End <= e.First {
			return damaged(fmt.Sprintf("there is no pack of sample epochs %d to %d", e.First, e.End))
		}
	}
	return nil
}

// save replaces the manifest: whenever the process or the machine stops, one of the two is there.
func (f *Folder) save() error {
	f.measure()
	b, err := durable.Encode(&f.m)
	if err != nil {
		return err
	}
	return durably(f.dir, partName, manifestName, func(to *os.File) error {
		_, err := to.Write(b)
		return err
	})
}

// measure adds up what the packs take, for whoever asks while one is made.
func (f *Folder) measure() {
	all := int64(0)
	for i := range f.m.Packs {
		all += f.m.Packs[i].DiskBytes()
	}
	f.disk.Store(all)
}

// durably writes a file of a folder under another name first.
func durably(dir, part, name string, write func(*os.File) error) error {
	err := durable.Replace(dir, part, name, write, nil)
	if durable.Full(err) {
		return errs.New(errs.Capability, "%s: %w; give another folder with %v",
			filepath.Join(dir, part), err, errs.Key("packed"))
	}
	return err
}

// entry returns the pack of sample epochs first to end-1, nil where there is none.
func (f *Folder) entry(first, end int) *Entry {
	i := slices.IndexFunc(f.m.Packs, func(e Entry) bool {
		return e.First == first && e.End == end
	})
	if i < 0 {
		return nil
	}
	return &f.m.Packs[i]
}
