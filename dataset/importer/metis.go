package importer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"

	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/philox"
)

var metisFormat = newFormat(Format{Name: "metis",
	Usage:       "graphs as METIS and KaHIP read them: the neighbours of a node in each line",
	Description: metisHelp}, METIS)

const metisHelp = "Line i behind the first has the neighbours of node i-1, and each edge stands at both of its ends. Weights of nodes and\n" +
	"edges are left out. Features, labels and splits come from {features}, {labels} and {splits}."

// METIS imports a graph in the format of METIS (metisHelp; METIS 5.1 manual, section 4.1.1).
func METIS(ctx context.Context, o Options) error {
	if err := o.fillMadeUp(); err != nil {
		return err
	}
	m, err := openMETIS(o.In)
	if err != nil {
		return err
	}
	if err := o.needFeaturesSoon(m.path); err != nil {
		return err
	}
	return run(request{kind: "metis", options: &o, Options: o}, func(im *importer) error {
		im.m.Nodes = m.n
		if m.before > 0 || m.weighted {
			o.note("not used of %s: the weights of its nodes or edges; models take no weights", m.path)
		}
		return im.around(ctx, m.path, edges.Source{Name: m.path, Unit: "edges", Total: m.entries,
			Parts: 1, Read: m.read})
	})
}

// metis is a graph whose first line was read.
type metis struct {
	path       string
	n, entries int64
	before     int  // numbers of a line before the neighbours: the node's size and weights
	weighted   bool // each neighbour has a weight behind it
	line       int64
}

func openMETIS(path string) (*metis, error) {
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	for {
		more, err := l.raw()
		if err != nil {
			return nil, err
		}
		if !more {
			return nil, l.bad("the file ends before the line of nodes and edges")
		}
		if len(l.text) > 0 && l.text[0] != '%' {
			break
		}
	}
	f := bytes.Fields(l.text)
	var v [4]int64
	v[3] = 1
	ok := len(f) >= 2 && len(f) <= 4
	for i := 0; ok && i < len(f); i++ {
		v[i], ok = parseID(f[i])
	}
	size, weight, edge := v[2]/100, v[2]/10%10, v[2]%10
	if !ok || size > 1 || weight > 1 || edge > 1 || v[3] < 1 || v[3] > 1000 || v[1] > 1<<60 {
		return nil, l.bad("%q is not \"NODES EDGES [FORMAT [WEIGHTS]]\" of METIS, where FORMAT is of the digits 0 and 1",
			clip(l.text))
	}
	if v[0] < 1 || v[0] > maxTextNodes {
		return nil, l.bad("%d nodes; 1 to %d are read", v[0], int64(maxTextNodes))
	}
	return &metis{path: path, n: v[0], entries: 2 * v[1], before: int(size + weight*v[3]),
		weighted: edge == 1, line: l.n}, nil
}

// metisReader reads the lines of nodes, which may be longer than memory.
type metisReader struct {
	*metis
	in       *bufio.Reader
	at       int64 // number of the line
	node     int64 // of the line
	column   int   // numbers of the line so far
	src, dst []int64
	entries  int64
	ends     uint64 // the edges of lower ends less those of higher ones, as a sum of hashes
	emit     func(src, dst []int64) error
}

// read emits all edges. There is one part.
func (m *metis) read(ctx context.Context, _ int, emit func(src, dst []int64) error,
	done func(int64)) error {
	in, err := container.OpenText(m.path)
	if err != nil {
		return err
	}
	defer in.Close()
	r := &metisReader{metis: m, in: bufio.NewReaderSize(in, 256<<10), at: 1}
	r.emit = func(src, dst []int64) error {
		if err := emit(src, dst); err != nil {
			return err
		}
		done(int64(len(src)))
		return ctx.Err()
	}
	for more := true; more; {
		if more, err = r.step(); err != nil {
			return err
		}
	}
	if r.node < m.n {
		return r.bad("the file ends behind node %d of %d", r.node, m.n)
	}
	if r.entries != m.entries || r.ends != 0 {
		return errs.New(errs.Usage,
			"%s: its lines have %d neighbours, and %d edges that stand at both ends are %d; it is cut short, or an edge stands at one end alone",
			m.path, r.entries, m.entries/2, m.entries)
	}
	return r.emit(r.src, r.dst)
}

func (r *metisReader) bad(format string, a ...any) error {
	return errs.New(errs.Usage, "%s:%d: "+format, append([]any{r.path, r.at}, a...)...)
}

// step reads to the next number, or to the end of a line; false at the end of the file.
func (r *metisReader) step() (more bool, err error) {
	c, err := r.in.ReadByte()
	for err == nil && (c == ' ' || c == '\t' || c == '\r') {
		c, err = r.in.ReadByte()
	}
	switch {
	case errors.Is(err, io.EOF):
		if r.column > 0 {
			err = r.endLine()
		} else {
			err = nil
		}
		return false, err
	case err != nil:
		return false, readFailed(r.path, r.at, 0, err)
	case c == '\n':
		return true, r.endLine()
	case r.at <= r.line || c == '%' && r.column == 0: // the first line, or a comment
		return true, r.skipLine()
	}
	v := int64(0)
	for digits := 0; c != ' ' && c != '\t' && c != '\r' && c != '\n' && err == nil; digits++ {
		if c < '0' || c > '9' || digits > 17 {
			return false, r.bad("%q within number %d of the line is no digit, or the number is too long", c, r.column+1)
		}
		v = v*10 + int64(c-'0')
		c, err = r.in.ReadByte()
	}
	if err == nil && c == '\n' {
		err = r.in.UnreadByte()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return false, readFailed(r.path, r.at, 0, err)
	}
	return true, r.number(v)
}

func (r *metisReader) skipLine() error {
	for {
		switch _, err := r.in.ReadSlice('\n'); {
		case err == nil:
			r.at++
			return nil
		case errors.Is(err, io.EOF):
			return nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return readFailed(r.path, r.at, 0, err)
		}
	}
}

// number takes a number of a node's line.
func (r *metisReader) number(v int64) error {
	k := r.column - r.before
	r.column++
	switch {
	case r.node >= r.n:
		return r.bad("a line for node %d, and the first line says %d", r.node+1, r.n)
	case k < 0 || r.weighted && k%2 == 1:
		return nil
	case v < 1 || v > r.n:
		return r.bad("neighbour %d of node %d is outside 1..%d", v, r.node+1, r.n)
	}
	r.src, r.dst = append(r.src, r.node), append(r.dst, v-1)
	switch to := v - 1; {
	case r.node < to:
		r.ends += philox.Mix(philox.Mix(uint64(r.node)) + uint64(to))
	case r.node > to:
		r.ends -= philox.Mix(philox.Mix(uint64(to)) + uint64(r.node))
	}
	r.entries++
	if len(r.src) < idsPerRead {
		return nil
	}
	err := r.emit(r.src, r.dst)
	r.src, r.dst = r.src[:0], r.dst[:0]
	return err
}

// endLine ends the line of a node, which may have no neighbours. Behind the last, empty lines are
// none of nodes.
func (r *metisReader) endLine() error {
	k := r.column - r.before
	switch {
	case r.at <= r.line || r.node >= r.n: // an empty line
	case k < 0:
		return r.bad("%d numbers, and the first line says %d before the neighbours", r.column, r.before)
	case r.weighted && k%2 == 1:
		return r.bad("the last neighbour has no weight")
	default:
		r.node++
	}
	r.at++
	r.column = 0
	return nil
}
