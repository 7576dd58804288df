// Package parted keeps a second copy of a dataset's rows and in-neighbour lists in which a part of
// the graph lies in one piece, so that training loads whole parts by long sequential reads. Nodes
// get new numbers: by part, in a part its static nodes first, then by old number. Thus a node's
// part follows from a table with one entry a part, and no table by node is needed to train.
//
// The copy is a folder with a manifest and small tables, and pages in a pages.Place. Make makes it
// in bounded memory and resumes an interrupted one; Open reads it; Verify checks all of it. The
// dataset itself is only read. docs/reference/partitions.md has the bytes.
package parted

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"unsafe"

	"github.com/google/uuid"

	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Run is a number of pages that lie behind each other.
type Run struct {
	Page, Pages int64
}

// Source gives feature rows in the order of the old numbers, as they are to be stored: n rows from
// first on into dst. A stripe.RowSource is one.
type Source interface {
	ReadRows(ctx context.Context, first, n int64, dst []byte) error
}

// Layout is the place of every part. It is read only and holds nothing that has to be closed.
type Layout struct {
	Dir string
	Key Key
	// Spec describes the pages. PageBytes is a multiple of RowBytes: a part's feature pages, behind
	// each other in memory, are rows without gaps, and what fills up the last page is whole rows.
	Spec     pages.Spec
	Parts    int
	Nodes    int64
	RowBytes int64
	// Base has the first new number of each part, and Nodes as its last entry.
	Base []int64
	// Statics counts the static nodes of the parts before each part, and all of them last. The
	// static nodes of part p are its first Statics[p+1]-Statics[p], and their ranks begin at
	// Statics[p].
	Statics []int64
	Edges   []int64 // by part: in-edges of its nodes
	// StaticEdgeCount is the in-edges of all static nodes.
	StaticEdgeCount int64
	// FeaturePages and EdgePages are a part's; those of a part without nodes have no pages.
	FeaturePages, EdgePages []Run
	// StaticFeatures and StaticEdges have the static nodes' rows and lists once more, by rank.
	StaticFeatures, StaticEdges Run
	Train                       []int64 // new numbers of the training split, in the split's order
}

// StaticNodes counts the static nodes.
func (l *Layout) StaticNodes() int64 { return l.Statics[l.Parts] }

// PartOf returns the part of a node by its new number, which must be below Nodes.
func (l *Layout) PartOf(id int64) int {
	return sort.Search(l.Parts, func(p int) bool { return l.Base[p+1] > id })
}

// Section is the content of the edge pages of a part, or of the static nodes. Its slices are views
// of the bytes that it was read from. A partition has fewer than 2^32 nodes, so all are 32 bits.
type Section struct {
	Degrees []uint32 // in-degree by node, in the order of new numbers
	// Neighbors has the nodes' in-neighbours by their new numbers, one list behind the other; a
	// list is in the order that the dataset has it in.
	Neighbors []uint32
	Old       []uint32 // old number by node
}

// Section reads the bytes of a part's EdgePages, which begin on a multiple of 4.
func (l *Layout) Section(part int, raw []byte) (Section, error) {
	return l.section(fmt.Sprintf("part %d", part), l.Base[part+1]-l.Base[part], l.Edges[part], raw)
}

// StaticSection reads the bytes of StaticEdges: its nodes are the static ones by rank.
func (l *Layout) StaticSection(raw []byte) (Section, error) {
	return l.section("the static nodes", l.StaticNodes(), l.StaticEdgeCount, raw)
}

func (l *Layout) section(name string, nodes, edges int64, raw []byte) (s Section, err error) {
	if nodes == 0 {
		return s, nil
	}
	if n := sectionBytes(nodes, edges); int64(len(raw)) < n ||
		uintptr(unsafe.Pointer(unsafe.SliceData(raw)))%4 != 0 {
		return s, errs.New(errs.Failed,
			"the edges of %s take %d bytes on a multiple of 4, these are %d", name, n, len(raw))
	}
	all := hostmem.View[uint32](raw[:sectionBytes(nodes, edges)])
	s = Section{Degrees: all[:nodes:nodes], Old: all[nodes : 2*nodes : 2*nodes],
		Neighbors: all[2*nodes:]}
	sum := int64(0)
	for _, d := range s.Degrees {
		sum += int64(d)
	}
	if sum != edges {
		return s, l.damaged("the nodes of %s have %d in-edges, and should have %d", name, sum,
			edges)
	}
	return s, nil
}

// sectionBytes returns the size of an edge section: degrees, old numbers, neighbours.
func sectionBytes(nodes, edges int64) int64 { return 4 * (2*nodes + edges) }

// OpenPages opens the pages to be read, in the place that they were made in.
func (l *Layout) OpenPages(ctx context.Context, place pages.Place) (*pages.Opened, error) {
	if err := l.Key.samePlace(place, l.Dir); err != nil {
		return nil, err
	}
	o, err := place.Open(ctx, l.Dir, l.Spec)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w; where they are gone or damaged remove the folder %s, too, and make the layout again",
			err, l.Dir)
	}
	return o, err
}

// damaged returns an error of class device with the next step.
func (l *Layout) damaged(format string, a ...any) error {
	return damagedAt(l.Dir, format, a...)
}

func damagedAt(path, format string, a ...any) error {
	return errs.New(errs.Device, "the layout in %s is damaged: %s; remove the folder and make it again",
		path, fmt.Sprintf(format, a...))
}

// place computes the page runs from the tables.
func (l *Layout) place(id uuid.UUID, pageBytes int64) error {
	next := int64(0)
	run := func(bytes int64) Run {
		r := Run{next, (bytes + pageBytes - 1) / pageBytes}
		next += r.Pages
		return r
	}
	l.FeaturePages, l.EdgePages = make([]Run, l.Parts), make([]Run, l.Parts)
	for p := range l.Parts {
		n := l.Base[p+1] - l.Base[p]
		l.FeaturePages[p] = run(n * l.RowBytes)
		l.EdgePages[p] = run(sectionBytes(n, l.Edges[p]))
	}
	s := l.StaticNodes()
	l.StaticFeatures = run(s * l.RowBytes)
	l.StaticEdges = run(sectionBytes(s, l.StaticEdgeCount))
	l.Spec = pages.Spec{ID: id, PageBytes: pageBytes, Pages: next}
	return l.Spec.Check()
}

// PageBytes chooses the size of a page for parts of so many rows in the mean: a 64th of a part's
// rows, from 64 KiB to 1 MiB, up to the next common multiple of a row and 4096 bytes. Longer pages
// than 16 MiB cannot be: rows of a length with few factors of two in common with 4096 bytes may
// take that.
func PageBytes(rowBytes, nodes int64, parts int) (int64, error) {
	unit := rowBytes / gcd(rowBytes, pageUnit) * pageUnit
	if unit > mostPage {
		return 0, errs.New(errs.Capability,
			"rows of %d bytes are whole in pages of %d bytes, and pages of up to %d bytes can be: a layout by part needs rows with more factors of two; choose another %v, or pad the features",
			rowBytes, unit, int64(mostPage), errs.Key("row-dtype"))
	}
	want := min(max(nodes*rowBytes/int64(parts)/64, leastWanted), mostWanted)
	return max((want+unit-1)/unit*unit, unit), nil
}

const (
	pageUnit    = 4096
	mostPage    = 16 << 20
	leastWanted = 64 << 10
	mostWanted  = 1 << 20
)

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// check looks for tables that cannot be.
func (l *Layout) check() error {
	rising := func(v []int64, last int64) bool {
		return v[0] == 0 && v[len(v)-1] == last && slices.IsSorted(v)
	}
	if !rising(l.Base, l.Nodes) || !rising(l.Statics, l.Statics[l.Parts]) {
		return l.damaged("its tables of parts do not rise from 0 to %d nodes", l.Nodes)
	}
	edges := int64(0)
	for p := range l.Parts {
		n, s := l.Base[p+1]-l.Base[p], l.Statics[p+1]-l.Statics[p]
		if s > n || l.Edges[p] < 0 || n == 0 && l.Edges[p] > 0 {
			return l.damaged("part %d has %d nodes, %d static ones and %d edges", p, n, s, l.Edges[p])
		}
		edges += l.Edges[p]
	}
	if edges != l.Key.Edges || l.StaticEdgeCount < 0 || l.StaticEdgeCount > edges {
		return l.damaged("its parts have %d edges (%d of static nodes), the dataset %d", edges,
			l.StaticEdgeCount, l.Key.Edges)
	}
	for i, v := range l.Train {
		if v < 0 || v >= l.Nodes {
			return l.damaged("training node %d is %d of %d", i, v, l.Nodes)
		}
	}
	return nil
}
