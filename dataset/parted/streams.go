package parted

// piece is a place in the pages, in bytes over all pages, and a length.
type piece struct{ offset, bytes int64 }

// A kind is one of the two passes that fill the pages: of lists, and of rows.
type kind interface {
	name() string
	// sections are the runs of pages that it fills, and the bytes of each.
	sections(see func(r Run, bytes int64))
	// rewind begins a walk over the nodes by their old numbers; pieces returns the next one's, by
	// its part and its place among all nodes by new number. The slice is valid until the next call.
	rewind()
	pieces(v int64, part int, id int64) []piece
	// buffers bounds the pages that are in memory at one time for a part, in its own run and in
	// that of the static nodes: a page for each stream of rising places, and one where two meet.
	buffers(part int) (own, static int64)
	static() Run // the pages of the static nodes
}

// start is the first byte of a run.
func (l *Layout) start(r Run) int64 { return r.Page * l.Spec.PageBytes }

// statics counts the static nodes of a part.
func (l *Layout) statics(part int) int64 { return l.Statics[part+1] - l.Statics[part] }

// rowKind fills the feature pages.
type rowKind struct {
	l   *Layout
	out [2]piece
}

func (k *rowKind) name() string { return "rows" }

func (k *rowKind) sections(see func(r Run, bytes int64)) {
	l := k.l
	for p, r := range l.FeaturePages {
		see(r, (l.Base[p+1]-l.Base[p])*l.RowBytes)
	}
	see(l.StaticFeatures, l.StaticNodes()*l.RowBytes)
}

func (k *rowKind) rewind() {}

func (k *rowKind) pieces(_ int64, part int, id int64) []piece {
	l := k.l
	index := id - l.Base[part]
	k.out[0] = piece{l.start(l.FeaturePages[part]) + index*l.RowBytes, l.RowBytes}
	if index >= l.statics(part) {
		return k.out[:1]
	}
	k.out[1] = piece{l.start(l.StaticFeatures) + (l.Statics[part]+index)*l.RowBytes, l.RowBytes}
	return k.out[:2]
}

func (k *rowKind) buffers(part int) (own, static int64) {
	if k.l.statics(part) == 0 {
		return min(1, k.l.FeaturePages[part].Pages), 0
	}
	return min(3, k.l.FeaturePages[part].Pages), 2
}

func (k *rowKind) static() Run { return k.l.StaticFeatures }

// listKind fills the edge pages.
type listKind struct {
	l      *Layout
	indptr []int64
	// Where the next list goes, by part: of its static nodes, of the others, and of the static ones
	// once more in the static section.
	next        [3][]int64
	staticEdges []int64 // by part
	out         [6]piece
}

func (k *listKind) name() string { return "edges" }

func (k *listKind) sections(see func(r Run, bytes int64)) {
	l := k.l
	for p, r := range l.EdgePages {
		see(r, sectionBytes(l.Base[p+1]-l.Base[p], l.Edges[p]))
	}
	see(l.StaticEdges, sectionBytes(l.StaticNodes(), l.StaticEdgeCount))
}

// newListKind needs how many in-edges the static nodes of each part have.
func newListKind(l *Layout, indptr, staticEdges []int64) *listKind {
	k := &listKind{l: l, indptr: indptr, staticEdges: staticEdges}
	for i := range k.next {
		k.next[i] = make([]int64, l.Parts)
	}
	return k
}

func (k *listKind) rewind() {
	l := k.l
	static := l.start(l.StaticEdges) + 8*l.StaticNodes()
	for p := range l.Parts {
		lists := l.start(l.EdgePages[p]) + 8*(l.Base[p+1]-l.Base[p])
		k.next[0][p], k.next[1][p], k.next[2][p] = lists, lists+4*k.staticEdges[p], static
		static += 4 * k.staticEdges[p]
	}
}

// pieces are the node's degree, its old number and its list; of a static node the same once more.
func (k *listKind) pieces(v int64, part int, id int64) []piece {
	l := k.l
	index, nodes := id-l.Base[part], l.Base[part+1]-l.Base[part]
	first, bytes := l.start(l.EdgePages[part]), 4*(k.indptr[v+1]-k.indptr[v])
	stream := 1
	if index < l.statics(part) {
		stream = 0
	}
	k.out[0] = piece{first + 4*index, 4}
	k.out[1] = piece{first + 4*(nodes+index), 4}
	k.out[2] = piece{k.next[stream][part], bytes}
	k.next[stream][part] += bytes
	if stream == 1 {
		return k.out[:3]
	}
	rank, first := l.Statics[part]+index, l.start(l.StaticEdges)
	k.out[3] = piece{first + 4*rank, 4}
	k.out[4] = piece{first + 4*(l.StaticNodes()+rank), 4}
	k.out[5] = piece{k.next[2][part], bytes}
	k.next[2][part] += bytes
	return k.out[:6]
}

func (k *listKind) buffers(part int) (own, static int64) {
	if k.l.statics(part) == 0 {
		return min(5, k.l.EdgePages[part].Pages), 0
	}
	return min(11, k.l.EdgePages[part].Pages), 6
}

func (k *listKind) static() Run { return k.l.StaticEdges }
