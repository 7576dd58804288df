package importer

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"

	"helios/internal/errs"
)

// placer puts rows that name their nodes in the order of these. Rows that come in this order go
// through; from the first that does not, rows are put in their places in a file beside.
type placer struct {
	im    *importer
	t     *table
	w     *featureWriter
	n     int64    // rows that went through: those of nodes 0 to n-1
	f     *os.File // of float32, from node n on
	limit int64    // of nodes
	rows  bool     // limit is the number of rows
	seen  []uint64 // a bit for each node from n on
	buf   []byte
}

func (p *placer) put(ctx context.Context, r rows[float32], b lineBlock) error {
	dim := len(p.t.take)
	through := 0
	for i, id := range r.ids {
		node, ok := p.im.ids.node(id)
		if p.f == nil && ok && node == p.n+int64(through) {
			through++
			continue
		}
		if p.f == nil {
			if err := p.begin(ctx, p.n+int64(through)); err != nil {
				return err
			}
		}
		switch row := node - p.n - int64(through); {
		case p.rows && node >= p.limit:
			return b.bad(r.lines[i],
				"node id %d, but there are %d rows, so the ids should be %d to %d: a row is missing, or ids count from another number or have gaps",
				id, p.limit, p.im.idOf(0), p.im.idOf(p.limit-1))
		case !ok || node >= p.limit:
			return b.bad(r.lines[i], "%s", p.im.outside(id, p.limit))
		case row < 0 || p.seen[row/64]>>(row%64)&1 != 0:
			return b.bad(r.lines[i], "node %d has a row already", id)
		default:
			p.seen[row/64] |= 1 << (row % 64)
			p.buf = p.buf[:0]
			for _, x := range r.v[i*dim : (i+1)*dim] {
				p.buf = binary.LittleEndian.AppendUint32(p.buf, math.Float32bits(x))
			}
			if _, err := p.f.WriteAt(p.buf, row*int64(4*dim)); err != nil {
				return err
			}
		}
	}
	p.n += int64(through)
	return p.w.put(r.v[:through*dim])
}

// begin makes the file. Where the number of nodes is not known, it is that of the rows.
func (p *placer) begin(ctx context.Context, from int64) (err error) {
	if p.limit = p.im.m.Nodes; p.limit == 0 {
		if p.limit, err = countRows(ctx, p.t.path); err != nil {
			return err
		}
		p.limit -= p.t.heading
		p.rows = true
	}
	words := max(p.limit-from, 0)/64 + 1
	if err := p.im.needMemory(p.t.path+": which nodes have a row", words, 8); err != nil {
		return err
	}
	p.seen = make([]uint64, words)
	p.f, err = os.Create(p.im.s.Path("rows.tmp"))
	return err
}

// end writes the rows that were put beside, of which none may miss.
func (p *placer) end(rows int64) error {
	if p.f == nil {
		return nil
	}
	if missing := p.limit - rows; missing > 0 {
		gap := int64(0)
		for p.seen[gap/64]>>(gap%64)&1 != 0 {
			gap++
		}
		return errs.New(errs.Usage, "%s has no row for node %d, nor for %d others; each node needs one",
			p.t.path, p.im.idOf(p.n+gap), missing-1)
	}
	row := make([]float32, len(p.t.take))
	r := bufio.NewReaderSize(io.NewSectionReader(p.f, 0, 1<<62), 1<<20)
	for range p.limit - p.n {
		if err := binary.Read(r, binary.LittleEndian, row); err != nil {
			return err
		}
		if err := p.w.put(row); err != nil {
			return err
		}
	}
	return nil
}

func (p *placer) close() error {
	if p.f == nil {
		return nil
	}
	return errors.Join(p.f.Close(), os.Remove(p.f.Name()))
}

// idLooks finds a first column that looks like node ids in features without a heading: different
// whole numbers that are 0 to n-1 or 1 to n, or that ascend or are far apart where the second
// column has no such numbers. Most features are none after a row or two.
type idLooks struct {
	t    *table
	cols [2]struct {
		not  bool
		seen map[int64]bool
	}
	inOrder, ascend bool
	last, n         int64
}

// mostLooked bounds the rows that idLooks keeps in memory.
const mostLooked = 1 << 20

func (l *idLooks) see(firsts [][2]int64) {
	for _, row := range firsts {
		if l.cols[0].not || l.n == mostLooked {
			return
		}
		l.inOrder = (l.n == 0 || l.inOrder) && row[0] == l.n
		l.ascend = l.n == 0 || l.ascend && row[0] > l.last
		for c, x := range row {
			s := &l.cols[c]
			if s.seen == nil {
				s.seen = map[int64]bool{}
			}
			if s.not = s.not || x < 0 || s.seen[x]; !s.not {
				s.seen[x] = true
			}
		}
		l.last = row[0]
		l.n++
	}
}

// refuse asks what the first column is, where it looks like ids.
func (l *idLooks) refuse() error {
	s := &l.cols[0]
	largest := int64(0)
	for x := range s.seen {
		largest = max(largest, x)
	}
	all := largest == l.n-1 || largest == l.n && !s.seen[0]
	alone := l.cols[1].not && (l.ascend && l.n > 3 || largest > 16*l.n)
	if l.n < 2 || s.not || !(l.inOrder || l.n > 2 && (all || alone)) {
		return nil
	}
	return errs.New(errs.Usage,
		"%s:%d: column 1 may hold the node ids or a feature: it is %d different whole numbers; give {id-column} features=1 or features=none",
		l.t.path, l.t.from, l.n)
}
