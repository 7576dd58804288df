package importer

import (
	"slices"

	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// sparseArrays are the members of an archive that scipy.sparse.save_npz writes.
var sparseArrays = []string{"format", "shape", "indptr", "indices", "row", "col", "coords",
	"offsets", "data", "_is_array"}

// sparse is an adjacency matrix in an archive of scipy.sparse.save_npz. Entry (i, j) is the edge
// i → j, whichever way the matrix is stored.
type sparse struct {
	archive *npy.Archive
	format  string // csr, csc or coo
	nodes   int64
}

// openSparse reads the format and the shape; nil where the archive has not both.
func openSparse(a *npy.Archive) (*sparse, error) {
	if !slices.Contains(a.Names(), "shape") { // a format of something else
		return nil, nil
	}
	format, err := a.Text("format")
	if format == "" || err != nil {
		return nil, err
	}
	switch format {
	case "csr", "csc", "coo":
	default:
		return nil, errs.New(errs.Usage,
			"%s is a sparse matrix in format %s; csr, csc and coo are read: save A.tocsr()", a.Path,
			brief(format))
	}
	shape, err := a.Array("shape")
	if err != nil {
		return nil, err
	}
	var n []int64
	if shape.Header.Elements() <= 2 && len(shape.Header.Shape) == 1 {
		err = eachInt(shape, func(_, x int64) error { n = append(n, x); return nil })
	}
	if err != nil {
		return nil, err
	}
	if len(n) != 2 {
		return nil, errs.New(errs.Usage, "%s: shape %s; a graph is a matrix of two dimensions",
			shape.Name, shape.Header.ShapeString())
	}
	if n[0] != n[1] {
		return nil, errs.New(errs.Usage,
			"%s is a matrix of %d × %d, a bipartite graph, whose rows and columns are different nodes; only square matrices are imported",
			a.Path, n[0], n[1])
	}
	if n[0] < 1 || n[0] > maxTextNodes {
		return nil, errs.New(errs.Usage, "%s is a matrix of %d rows; 1 to %d are read", a.Path,
			n[0], int64(maxTextNodes))
	}
	return &sparse{a, format, n[0]}, nil
}

// edges are the entries as edges. lists, "in" or "out", is the direction of the list of a row (csr)
// or of a column (csc), where it is not the format's.
func (s *sparse) edges(lists string) (edges.Source, error) {
	if s.format == "coo" {
		if lists != "" {
			return edges.Source{}, errs.New(errs.Usage,
				"{lists} %s: %s has pairs (format coo) and no lists; leave it out", lists,
				s.archive.Path)
		}
		if slices.Contains(s.archive.Names(), "coords") { // of a later SciPy
			a, err := s.archive.Array("coords")
			if err != nil {
				return edges.Source{}, err
			}
			return indexEdges(a, ofOne(s.nodes), twoRows)
		}
		row, err := s.archive.Array("row")
		if err != nil {
			return edges.Source{}, err
		}
		col, err := s.archive.Array("col")
		if err != nil {
			return edges.Source{}, err
		}
		return pairEdges(row, col, s.nodes)
	}
	ptr, err := s.archive.Array("indptr")
	if err != nil {
		return edges.Source{}, err
	}
	idx, err := s.archive.Array("indices")
	if err != nil {
		return edges.Source{}, err
	}
	in := s.format == "csc"
	if lists != "" {
		in = lists == "in"
	}
	return offsetEdges(ptr, idx, ofOne(s.nodes), in)
}

// noteValues names the values of the entries, which are not used.
func (im *npyImport) noteValues(s *sparse, entries int64) error {
	a, err := s.archive.Array("data")
	if err != nil {
		im.o.note("not used of %s: data, the values of its entries; models take no edge weights",
			s.archive.Path)
		return nil //nolint:nilerr // values of a type that is not read
	}
	if n := a.Header.Elements(); n != entries {
		return errs.New(errs.Usage, "%s has %d entries, the matrix has %d", a.Name, n, entries)
	}
	zeros, ones := 0, true
	if err := npy.Each(a, 0, func(_ int64, values []float64) error {
		for _, x := range values {
			if x == 0 {
				zeros++
			}
			ones = ones && x == 1
		}
		return nil
	}); err != nil {
		return err
	}
	if !ones {
		im.o.note("not used of %s: data, the values of its entries; models take no edge weights",
			s.archive.Path)
	}
	if zeros > 0 {
		im.m.Source.Counts["entries-of-0"] = int64(zeros)
		im.o.note("%d of the %d entries of %s are stored zeros, and become edges; A.eliminate_zeros() drops them",
			zeros, entries, s.archive.Path)
	}
	return nil
}
