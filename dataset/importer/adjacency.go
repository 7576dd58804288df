package importer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"helios/dataset/edges"
	"helios/internal/errs"
)

// metisHead is the first line of a graph of METIS: nodes, edges, and what stands before and between
// the neighbours of a line (Karypis, METIS manual 5.1, section 4.1).
type metisHead struct {
	nodes, edges int64
	before       int  // numbers before the neighbours: the node's size and weights
	weights      bool // each neighbour has a weight behind it
}

func parseMETISHead(text []byte) (h metisHead, ok bool) {
	f := bytes.Fields(text)
	if len(f) < 2 || len(f) > 4 {
		return h, false
	}
	var n [2]int64
	for i := range n {
		if n[i], ok = parseID(f[i]); !ok {
			return h, false
		}
	}
	h.nodes, h.edges = n[0], n[1]
	form := "000"
	if len(f) > 2 {
		form = fmt.Sprintf("%03s", f[2])
	}
	constraints := int64(1)
	if len(f) > 3 {
		if constraints, ok = parseID(f[3]); !ok || constraints > 1<<10 {
			return h, false
		}
	}
	if len(form) != 3 || strings.Trim(form, "01") != "" || h.nodes > maxTextNodes {
		return h, false
	}
	if form[0] == '1' {
		h.before++
	}
	if form[1] == '1' {
		h.before += int(constraints)
	}
	h.weights = form[2] == '1'
	return h, true
}

// metisText reads the lists of a METIS graph, node by node.
type metisText struct {
	metisHead
	l    *lines
	node int64 // whose list was read last, from 1
	list []int64
	ends int64 // of edges that were read
}

func openMETIS(path string) (*metisText, error) {
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	t := &metisText{l: l}
	more, err := t.line()
	var ok bool
	if t.metisHead, ok = parseMETISHead(l.text); err == nil && (!more || !ok) {
		err = l.bad("%q is not \"NODES EDGES [FORMAT [WEIGHTS]]\", as a graph of METIS begins",
			clip(l.text))
	}
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	return t, nil
}

// line reads a line that is no comment; an empty one is a list without neighbours.
func (t *metisText) line() (bool, error) {
	for {
		more, err := t.l.raw()
		if !more || err != nil || len(t.l.text) == 0 || t.l.text[0] != '%' {
			return more, err
		}
	}
}

// next reads the list of the next node; false at the end.
func (t *metisText) next() (bool, error) {
	more, err := t.line()
	if err != nil {
		return false, err
	}
	switch {
	case !more && t.node == t.nodes && t.ends == 2*t.edges:
		return false, nil
	case !more && t.node < t.nodes:
		return false, t.l.bad("the file ends after the lists of %d of %d nodes", t.node, t.nodes)
	case !more:
		return false, t.l.bad("the lists have %d neighbours, %d edges have %d", t.ends, t.edges,
			2*t.edges)
	case t.node == t.nodes && len(t.l.text) == 0:
		return t.next()
	case t.node == t.nodes:
		return false, t.l.bad("a list after those of all %d nodes", t.nodes)
	}
	t.node++
	t.list = t.list[:0]
	f := bytes.Fields(t.l.text)
	per := 1
	if t.weights {
		per = 2
	}
	if len(f) < t.before || (len(f)-t.before)%per != 0 {
		return false, t.l.bad("the line has %d numbers, which its weights leave no list of neighbours",
			len(f))
	}
	for i := t.before; i < len(f); i += per {
		v, ok := parseID(f[i])
		if !ok || v < 1 || v > t.nodes {
			return false, t.l.bad("%q is not a node from 1 to %d", clip(f[i]), t.nodes)
		}
		t.list = append(t.list, v)
	}
	if t.ends += int64(len(t.list)); t.ends > 2*t.edges {
		return false, t.l.bad("more neighbours than the %d edges have", t.edges)
	}
	return true, nil
}

// mostArcs bounds the neighbours that looksMETIS keeps in memory.
const mostArcs = 1 << 22

// looksMETIS reports whether a file is a graph of METIS, by its numbers of lines and neighbours,
// and whether it may be a list of edges as well: each line has two numbers. Most lists of edges are
// out of these bounds after a few lines.
func looksMETIS(path string) (metis, pairs bool, err error) {
	t, err := openMETIS(path)
	if err != nil || t.edges < 1 || t.nodes < 1 {
		if err == nil {
			err = t.l.close()
		} else if errs.ClassOf(err) == errs.Usage {
			err = nil // the reader of edges names the fault
		}
		return false, false, err
	}
	defer t.l.close()
	pairs = len(bytes.Fields(t.l.text)) == 2
	type arc struct{ from, to int64 }
	arcs := map[arc]bool{}
	for {
		more, err := t.next()
		if err != nil {
			return false, false, nil //nolint:nilerr // it is none
		}
		if !more {
			break
		}
		if n := len(bytes.Fields(t.l.text)); n != 2 && n != 0 {
			pairs, arcs = false, nil
		}
		for _, v := range t.list {
			if pairs && len(arcs) < mostArcs {
				arcs[arc{t.node, v}] = true
			}
		}
	}
	for a := range arcs { // a graph of METIS has each edge in both lists, and no self loops
		if pairs && (a.from == a.to || !arcs[arc{a.to, a.from}]) {
			return false, false, nil
		}
	}
	return true, pairs, nil
}

// emitter hands edges on in batches.
type emitter struct {
	ctx      context.Context
	src, dst []int64
	emit     func(src, dst []int64) error
}

func (e *emitter) put(src, dst int64) error {
	e.src, e.dst = append(e.src, src), append(e.dst, dst)
	if len(e.src) < idsPerRead {
		return nil
	}
	return e.flush()
}

func (e *emitter) flush() error {
	err := e.emit(e.src, e.dst)
	e.src, e.dst = e.src[:0], e.dst[:0]
	return errors.Join(err, e.ctx.Err())
}

// metisSource is the edges of a METIS graph: an arc from each node to each of its list.
func metisSource(path string) edges.Source {
	return listSource(path, func(e *emitter) error {
		t, err := openMETIS(path)
		if err != nil {
			return err
		}
		defer t.l.close()
		for {
			more, err := t.next()
			if !more || err != nil {
				return err
			}
			for _, v := range t.list {
				if err := e.put(t.node-1, v-1); err != nil {
					return err
				}
			}
		}
	})
}

// listSource is a source that is read line by line.
func listSource(path string, read func(*emitter) error) edges.Source {
	s := edges.Source{Name: path, Unit: "bytes", Parts: 1}
	if st, err := os.Stat(path); err == nil {
		s.Total = st.Size()
	}
	s.Read = func(ctx context.Context, _ int, emit func(src, dst []int64) error,
		done func(int64)) error {
		e := &emitter{ctx: ctx, emit: emit}
		err := read(e)
		if err == nil {
			done(s.Total)
			err = e.flush()
		}
		return err
	}
	return s
}

// adjacencySource is the edges of lines of a node and its neighbours, as NetworkX's write_adjlist
// writes them. lone hears of each node that begins a line, since it may have no neighbours.
func adjacencySource(path string, ids idRange, lone func(id int64)) edges.Source {
	return listSource(path, func(e *emitter) error {
		l, err := openLines(path)
		if err != nil {
			return err
		}
		defer l.close()
		var s splitter
		for {
			more, err := l.next()
			if !more || err != nil {
				return err
			}
			if s.sep == 0 {
				s.sep = separatorOf(l.text)
			}
			cells, err := s.split(l.text)
			if err != nil {
				return l.bad("%w", err)
			}
			node := int64(0)
			for i, c := range cells {
				v, ok := parseID(c)
				switch {
				case !ok:
					return l.bad("%q is not a node id; ids are whole numbers from 0", clip(c))
				case uint64(v-ids.base) >= uint64(ids.nodes):
					return l.bad("%s", ids.outside(v, i+1, false))
				case i == 0:
					node = v - ids.base
					lone(node)
				default:
					if err := e.put(node, v-ids.base); err != nil {
						return err
					}
				}
			}
		}
	})
}
