package packed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// rowsSource has rows that are known from their numbers.
type rowsSource struct {
	rows, width int64
	reads       int
	next        int64 // where a read in order begins
	jumps       int
}

func (s *rowsSource) row(r int64) []byte {
	b := make([]byte, 0, s.width+8)
	for i := uint64(0); int64(len(b)) < s.width; i++ {
		b = binary.LittleEndian.AppendUint64(b, (uint64(r)*2654435761+i)*0x9e3779b97f4a7c15)
	}
	return b[:s.width]
}

func (s *rowsSource) ReadRows(_ context.Context, first, n int64, dst []byte) error {
	if first < 0 || n < 1 || first+n > s.rows || int64(len(dst)) != n*s.width {
		return fmt.Errorf("rows %d+%d of %d into %d bytes", first, n, s.rows, len(dst))
	}
	if s.reads++; first != s.next {
		s.jumps++
	}
	s.next = first + n
	for r := range n {
		copy(dst[r*s.width:], s.row(first+r))
	}
	return nil
}

var errKilled = errors.New("killed")

// disk keeps pages as a process leaves them that is killed: those that were written since the last
// Sync may be as before, as written or torn, and may not be read.
type disk struct {
	mu        sync.Mutex
	size      int64
	pages     [][]byte
	before    map[int64][]byte // written since Sync: what was there
	unknown   map[int64]bool   // left by a process that died
	writes    int
	killAfter int // writes; 0: never
	dead      bool
}

func newDisk(p *Plan) *disk {
	d := &disk{size: p.Shape().PageBytes, pages: make([][]byte, p.Pages()),
		before: map[int64][]byte{}, unknown: map[int64]bool{}}
	for i := range d.pages {
		d.pages[i] = make([]byte, d.size)
	}
	return d
}

func (d *disk) check(page int64, data []byte) error {
	if d.dead {
		return errKilled
	}
	n := int64(len(data))
	if n == 0 || n%d.size != 0 || page < 0 || page+n/d.size > int64(len(d.pages)) {
		return fmt.Errorf("page %d and %d bytes of %d pages", page, n, len(d.pages))
	}
	return nil
}

func (d *disk) WriteAt(_ context.Context, page int64, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.check(page, data); err != nil {
		return err
	}
	for i := range int64(len(data)) / d.size {
		if d.writes++; d.writes == d.killAfter {
			d.dead = true
			return errKilled
		}
		if _, ok := d.before[page+i]; !ok {
			d.before[page+i] = append([]byte{}, d.pages[page+i]...)
		}
		copy(d.pages[page+i], data[i*d.size:])
		delete(d.unknown, page+i)
	}
	return nil
}

func (d *disk) ReadAt(_ context.Context, page int64, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.check(page, data); err != nil {
		return err
	}
	for i := range int64(len(data)) / d.size {
		if d.unknown[page+i] {
			return fmt.Errorf("page %d is what a killed process left", page+i)
		}
		copy(data[i*d.size:], d.pages[page+i])
	}
	return nil
}

func (d *disk) Sync(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return errKilled
	}
	clear(d.before)
	return nil
}

// restart is the disk after the process died.
func (d *disk) restart(r *rand.Rand) {
	for p, was := range d.before {
		switch r.IntN(3) {
		case 0:
			copy(d.pages[p], was)
		case 1:
			copy(d.pages[p][r.IntN(int(d.size)):], was)
		}
		d.unknown[p] = true
	}
	clear(d.before)
	d.dead, d.writes = false, 0
}

// marks is a MarkFile whose writes may be torn.
type marks struct {
	b    [2 * markBytes]byte
	left int // until it dies; 0: never
	r    *rand.Rand
}

func (m *marks) ReadAt(b []byte, offset int64) (int, error) { return copy(b, m.b[offset:]), nil }

func (m *marks) WriteAt(b []byte, offset int64) (int, error) {
	if m.left > 0 {
		if m.left--; m.left == 0 {
			copy(m.b[offset:], b[:m.r.IntN(len(b))])
			return 0, errKilled
		}
	}
	return copy(m.b[offset:], b), nil
}

func (m *marks) Sync() error { return nil }

// want is the content that the pages of a plan should have.
func want(t testing.TB, p *Plan, s *rowsSource) [][]byte {
	h := p.Shape()
	all := make([][]byte, p.Pages())
	for i := range all {
		all[i] = make([]byte, h.PageBytes)
	}
	for to, row := range contents(t, p) {
		copy(all[to.page][to.row*h.RowBytes:], s.row(row))
	}
	return all
}

// least gives a pack so little memory that it takes several parts.
func least(p *Plan, workers int) PackConfig {
	k := &packer{p: p, shape: p.Shape(), streams: make([]packStream, p.Streams()),
		c: PackConfig{Workers: workers}}
	c := PackConfig{Workers: workers, MarkEvery: 1}
	for c.Memory = 1 << 20; ; c.Memory += 1 << 20 {
		k.c.Memory = c.Memory
		if _, err := k.part(); err == nil {
			return c
		}
	}
}

// The pages hold the rows that the plan says, bit for bit.
func TestPack(t *testing.T) {
	cases := 300
	if wide.Lean() {
		cases = 15
	}
	for i := range cases {
		r := rand.New(rand.NewPCG(23, uint64(i)))
		rows := 1 + r.IntN(5000)
		width := []int64{100, 512, 700, 4096, 5000}[r.IntN(5)]
		m := random(r, 1+r.IntN(12), rows, 800)
		p, _, _ := build(t, m, Config{Rows: int64(rows), RowBytes: width, Hot: int64(r.IntN(rows)),
			Segment: 1 + r.IntN(len(m)), Seed: uint64(i)})
		src := &rowsSource{rows: int64(rows), width: width}
		d := newDisk(p)
		c := least(p, 1+r.IntN(3))
		said := int64(0)
		c.Progress = func(done, total int64) {
			require.GreaterOrEqual(t, done, said)
			require.LessOrEqual(t, done, total)
			said = done
		}
		got, err := Pack(t.Context(), p, src, d, c)
		require.NoError(t, err)
		require.Equal(t, want(t, p, src), d.pages, "case %d", i)
		require.Zero(t, src.jumps, "the source is read once, in order")
		require.Equal(t, int64(rows)*width, got.SourceBytes)
		require.False(t, got.Resumed)
		st := p.Stats()
		require.Equal(t, (st.Pages+st.CachePages)*p.Shape().PageBytes, got.WrittenBytes)
		require.Empty(t, d.before, "all is durable")
	}
}

// However often a pack is killed, the next one goes on, and the pages are the same.
func TestPackGoesOn(t *testing.T) {
	cases := 200
	if wide.Lean() {
		cases = 8
	}
	resumed, collected := 0, int64(0)
	for i := range cases {
		r := rand.New(rand.NewPCG(29, uint64(i)))
		rows, width := 4000+r.IntN(8000), int64(512)
		m := random(r, 40, rows, 1500)
		p, _, _ := build(t, m, Config{Rows: int64(rows), RowBytes: width, Hot: int64(rows / 20),
			Segment: 1 + r.IntN(8), Seed: uint64(i)})
		d, mk := newDisk(p), &marks{r: r}
		c := least(p, 1+r.IntN(2))
		c.Mark = mk
		for kills := 0; ; kills++ {
			src := &rowsSource{rows: int64(rows), width: width}
			if d.killAfter = 0; kills < 6 {
				d.killAfter = 1 + r.IntN(int(p.Pages()))
				if r.IntN(4) == 0 {
					mk.left = 1 + r.IntN(3)
				}
			} else {
				mk.left = 0
			}
			got, err := Pack(t.Context(), p, src, d, c)
			if err == nil {
				if got.Resumed {
					resumed++
				}
				collected += got.Collected
				break
			}
			require.ErrorIs(t, err, errKilled)
			d.restart(r)
		}
		require.Equal(t, want(t, p, &rowsSource{rows: int64(rows), width: width}), d.pages,
			"case %d", i)
	}
	require.Positive(t, resumed)
	require.Positive(t, collected)
}

// A mark of another plan is refused, and the error for too little memory has the size that is
// needed.
func TestPackRefuses(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	m := random(r, 10, 1000, 300)
	p, _, _ := build(t, m, Config{Rows: 1000, RowBytes: 512, Segment: 5})
	q, _, _ := build(t, m, Config{Rows: 1000, RowBytes: 512, Segment: 3})
	mk := &marks{}
	src := &rowsSource{rows: 1000, width: 512}
	_, err := Pack(t.Context(), p, src, newDisk(p), PackConfig{Mark: mk, MarkEvery: time.Hour})
	require.NoError(t, err)
	_, err = Pack(t.Context(), q, src, newDisk(q), PackConfig{Mark: mk})
	require.ErrorContains(t, err, "another plan")
	_, err = Pack(t.Context(), p, src, newDisk(p), PackConfig{Memory: 1 << 20})
	require.ErrorContains(t, err, "of memory, and it may take 1 MiB")
}
