package parted

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"helios/dataset/pages"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/work"
)

// VerifyReport counts the bytes and pages that Verify has read.
type VerifyReport struct {
	Dir   string   `json:"dir"`
	Whole bool     `json:"whole"` // else nothing but the manifest was read
	Parts int      `json:"parts"`
	Nodes int64    `json:"nodes"`
	Edges int64    `json:"edges"`
	Pages int64    `json:"pages"` // in the folder; those on SSDs are checked with the SSDs
	Bytes int64    `json:"bytes"`
	Notes []string `json:"notes,omitempty"` // what was not checked
}

// Folders are the folders of layouts right below a dataset's, sorted.
func Folders(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	var out []string
	for _, e := range entries { // sorted
		path := filepath.Join(dir, e.Name())
		if _, err := os.Lstat(filepath.Join(path, manifestName)); err == nil {
			out = append(out, path)
		}
	}
	return out, nil
}

// Verify reads the layout in a folder: manifest, tables and partition by their checksums; pages in
// the folder by theirs, then the edges of all parts: each node must be in one part, and
// neighbours must be nodes. dataset, unless it is "", is the UUID that the layout must be of. An
// unfinished layout, or one in use, is noted. Damage has class device and names the folder.
func Verify(ctx context.Context, dir, dataset string, progress work.Progress) (_ *VerifyReport,
	err error) {
	r := &VerifyReport{Dir: dir}
	m, err := readManifest(dir)
	if err != nil {
		return nil, err
	}
	r.Parts, r.Nodes, r.Edges, r.Whole = m.Key.Parts, m.Key.Nodes, m.Key.Edges, m.Whole
	if dataset != "" && m.Key.Dataset != dataset {
		return nil, errs.New(errs.Usage,
			"the layout in %s is of dataset %s, this one is %s; remove the folder, or move it to its dataset",
			dir, m.Key.Dataset, dataset)
	}
	if !m.Whole {
		r.Notes = append(r.Notes, fmt.Sprintf(
			"the layout in %s is not finished and was not checked", dir))
		return r, nil
	}
	l, err := readTables(dir, &m)
	if err != nil {
		return nil, err
	}
	of, err := l.ownPartition()
	if err != nil {
		return nil, err
	}
	if of != nil {
		defer errs.Closing(&err, of.Close)
	}
	if !m.Key.InFolder {
		r.Notes = append(r.Notes, fmt.Sprintf(
			"the pages of the layout in %s are on SSDs and are checked with them", dir))
		return r, nil
	}
	if r.Pages, err = pages.VerifyFolder(ctx, dir, &l.Spec, progress); err != nil {
		return nil, err
	}
	r.Bytes = l.DiskBytes()
	return r, l.verifyEdges(ctx, of, progress)
}

// ownPartition opens the folder's own partition, where it has one.
func (l *Layout) ownPartition() (*partition.Partition, error) {
	path := filepath.Join(l.Dir, partitionName)
	p, err := partition.Open(path)
	if l.Key.Asked == nil && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, l.damaged("%v", err)
	}
	if sumOf(p) != l.Key.Sum {
		return nil, errors.Join(l.damaged("%s is another partition than its pages were made by",
			path), p.Close())
	}
	return p, nil
}

// verifyEdges reads the edge sections of all parts from the folder.
func (l *Layout) verifyEdges(ctx context.Context, of *partition.Partition,
	progress work.Progress) (err error) {
	f, err := infile.Open(filepath.Join(l.Dir, pages.PagesName))
	if err != nil {
		return err
	}
	defer errs.Closing(&err, f.Close)
	seen, err := hostmem.Alloc((l.Nodes+7)/8, "verify layout")
	if err != nil {
		return err
	}
	defer errs.Closing(&err, func() error { return hostmem.Free(seen) })
	for p := range l.Parts {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.verifyPart(f, p, of, seen); err != nil {
			return err
		}
		progress.Report("verify edges of parts", int64(p+1), int64(l.Parts))
	}
	return nil
}

func (l *Layout) verifyPart(f io.ReaderAt, part int, of *partition.Partition,
	seen []byte) (err error) {
	raw, err := l.read(f, l.EdgePages[part])
	if err != nil {
		return err
	}
	defer errs.Closing(&err, func() error { return hostmem.Free(raw) })
	s, err := l.Section(part, raw)
	if err != nil {
		return err
	}
	for i, old := range s.Old {
		v := int64(old)
		switch {
		case v >= l.Nodes:
			return l.damaged("node %d of part %d is %d of %d", i, part, v, l.Nodes)
		case seen[v/8]>>(v%8)&1 != 0:
			return l.damaged("node %d is in part %d and in the same or an earlier one", v, part)
		case of != nil && int(of.Of[v]) != part:
			return l.damaged("node %d is in part %d, its partition has it in %d", v, part, of.Of[v])
		case i > 0 && int64(i) != l.statics(part) && old < s.Old[i-1]:
			return l.damaged("node %d of part %d is not in order", v, part)
		}
		seen[v/8] |= 1 << (v % 8)
	}
	for _, id := range s.Neighbors {
		if int64(id) >= l.Nodes {
			return l.damaged("a neighbour in part %d is %d of %d", part, id, l.Nodes)
		}
	}
	return nil
}

// read reads a run of pages into memory that the caller frees.
func (l *Layout) read(f io.ReaderAt, r Run) ([]byte, error) {
	raw, err := hostmem.Alloc(r.Pages*l.Spec.PageBytes, "verify layout")
	if err != nil {
		return nil, err
	}
	if _, err := f.ReadAt(raw, l.start(r)); err != nil {
		return nil, errors.Join(errs.New(errs.Device, "%s: %w", l.Dir, err), hostmem.Free(raw))
	}
	return raw, nil
}
