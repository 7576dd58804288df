package names

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sync/errgroup"

	"helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/work"
)

// Join numbers names of one type of nodes. Names are added in an order of which the result is a
// function: first those of the table of nodes, if there is one, whose places are the numbers; then
// those that edges have. Without a table a name's number is the order of its first appearance.
type Join struct {
	o      Options
	parts  int
	shift  uint
	nodes  uint64 // names of the table, and the others once they are numbered
	rows   uint64 // names of the table
	total  uint64 // names that were added
	closed bool   // the table is whole

	texts *spool        // the names of each part, in order
	ranks *spool        // the numbers of each part's different names
	order *bufio.Writer // the part of each name, 2 bytes
	orderFile,
	listFile *os.File
	list  *bufio.Writer // different names in the order of their numbers
	local *spool        // for each name of a part its place among the different ones, or its number
	found *spool        // hash and number of each different name of a part, ascending
	fresh []uint64      // of each part, different names
	spare work.Spare[*Dealt]
}

// Options say where and how names are numbered.
type Options struct {
	// Create makes a scratch file.
	Create func(name string) (*os.File, error)
	Memory int64
	// Table says that a table of the nodes is added first: no others are nodes then, unless Open.
	Table, Open bool
	Type        string // name of the type, for errors
	Bytes       int64  // about how much text all names have
}

// None is the number of a name that no node has.
const None = ^uint64(0)

// The number of parts. With 64 MiB of memory 256 parts hold some 100 million names, 1024 four times
// as many; with 2 GiB, 3 and 12 billion.
const (
	fewParts  = 256
	manyParts = 1024
	manyBytes = 32 << 30
)

// New begins to number names.
func New(o Options) (*Join, error) {
	j := &Join{o: o, parts: fewParts, shift: 56, closed: !o.Table, spare: work.NewSpare[*Dealt](8)}
	if o.Bytes > manyBytes {
		j.parts, j.shift = manyParts, 54
	}
	var err error
	if j.texts, err = j.spool("texts"); err == nil {
		j.ranks, err = j.spool("ranks")
	}
	if err == nil {
		j.orderFile, err = o.Create("order")
	}
	if err == nil {
		j.listFile, err = o.Create("list")
	}
	if err != nil {
		return nil, errors.Join(err, j.Close())
	}
	j.order = bufio.NewWriterSize(j.orderFile, 1<<18)
	j.list = bufio.NewWriterSize(j.listFile, 1<<18)
	return j, nil
}

func (j *Join) spool(name string) (*spool, error) {
	room := int(min(64<<10, max(j.o.Memory/int64(16*j.parts), 4<<10)))
	return newSpool(j.o.Create, name, j.parts, room)
}

// Close closes the scratch files.
func (j *Join) Close() (err error) {
	for _, s := range []*spool{j.texts, j.ranks, j.local, j.found} {
		if s != nil && s.f != nil {
			err = errors.Join(err, s.f.Close())
		}
	}
	for _, f := range []*os.File{j.orderFile, j.listFile} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	j.texts, j.ranks, j.local, j.found, j.orderFile, j.listFile = nil, nil, nil, nil, nil, nil
	return err
}

// Dealt is the names of a batch, dealt to parts.
type Dealt struct {
	order []byte // the part of each name, 2 bytes
	text  []byte // of all parts, one after the other
	ends  []int  // of each part in text
	list  []byte // in order; of the table alone
	names [][]byte
	room  []byte // for names that are numbers
}

// Len is the number of names.
func (d *Dealt) Len() int { return len(d.order) / 2 }

// Deal deals the names of columns, alternately: of each row first that of the first column. It may
// run on several goroutines.
func (j *Join) Deal(b *table.Batch, columns ...*table.Column) (*Dealt, error) {
	d := j.spare.Take()
	if d == nil {
		d = &Dealt{ends: make([]int, j.parts)}
	}
	d.order, d.list, d.names, d.room = d.order[:0], d.list[:0], d.names[:0], d.room[:0]
	clear(d.ends)
	for i := range b.Rows {
		for _, c := range columns {
			name, room, err := nameOf(c, i, d.room)
			if err != nil {
				return nil, b.Bad(i, c.Name, "%w", err)
			}
			d.room = room
			p := hashOf(name) >> j.shift
			d.ends[p] += len(name) + uvarintSize(len(name))
			d.names = append(d.names, name)
			d.order = binary.LittleEndian.AppendUint16(d.order, uint16(p))
			if !j.closed {
				d.list = append(binary.AppendUvarint(d.list, uint64(len(name))), name...)
			}
		}
	}
	sum := 0
	for p, n := range d.ends { // starts, which become ends
		d.ends[p] = sum
		sum += n
	}
	d.text = slices.Grow(d.text[:0], sum)[:sum]
	for i, name := range d.names {
		p := binary.LittleEndian.Uint16(d.order[2*i:])
		to := d.ends[p] + binary.PutUvarint(d.text[d.ends[p]:], uint64(len(name)))
		d.ends[p] = to + copy(d.text[to:], name)
	}
	clear(d.names) // they are the batch's
	return d, nil
}

// uvarintSize is the number of bytes that a length of a name takes.
func uvarintSize(n int) int { return (bits.Len(uint(n)|1) + 6) / 7 }

// maxName bounds a name.
const maxName = 64 << 10

// nameOf is a cell as a name: text as it is, whole numbers in digits, which are added to room.
func nameOf(c *table.Column, i int, room []byte) (name, with []byte, err error) {
	switch {
	case c.IsMissing(i):
		return nil, room, errors.New("the id is missing")
	case c.Kind == table.Text:
		name := c.Text(i)
		if len(name) > maxName {
			return nil, room, fmt.Errorf("an id of %d bytes; at most %d", len(name), maxName)
		}
		return name, room, nil
	}
	with = table.AppendInt(room, c, i)
	return with[len(room):], with, nil
}

// CheckKind refuses a column whose cells are no names.
func CheckKind(file string, f table.Field) error {
	if f.List || f.Kind != table.Text && f.Kind != table.Int && f.Kind != table.Uint {
		return errs.New(errs.Usage,
			"%s: column %s holds cells of type %v; ids are texts or whole numbers", file,
			table.Brief(f.Name), f)
	}
	return nil
}

// Add adds what Deal has dealt.
func (j *Join) Add(d *Dealt) error {
	from := 0
	for p, to := range d.ends {
		if to > from {
			if err := j.texts.add(p, d.text[from:to]); err != nil {
				return err
			}
		}
		from = to
	}
	n := j.total
	j.total += uint64(d.Len())
	if _, err := j.order.Write(d.order); err != nil {
		return err
	}
	if j.closed {
		j.spare.Give(d)
		return nil
	}
	var b [8]byte
	for i := range d.Len() {
		binary.LittleEndian.PutUint64(b[:], n+uint64(i))
		if err := j.ranks.add(int(binary.LittleEndian.Uint16(d.order[2*i:])), b[:]); err != nil {
			return err
		}
	}
	_, err := j.list.Write(d.list)
	j.spare.Give(d)
	return err
}

// EndTable says that all nodes of the table were added.
func (j *Join) EndTable() { j.closed, j.nodes, j.rows = true, j.total, j.total }

// open reports whether names that are in no table are nodes.
func (o *Options) open() bool { return !o.Table || o.Open }

// Twice says that two rows of a table have one name: they count from 0.
type Twice struct{ First, Second uint64 }

func (e *Twice) Error() string { return fmt.Sprintf("rows %d and %d have one id", e.First, e.Second) }

// Number numbers the names.
func (j *Join) Number(ctx context.Context) (err error) {
	if err := errors.Join(j.texts.finishAll(), j.ranks.finishAll(), j.order.Flush()); err != nil {
		return err
	}
	if j.local, err = j.spool("local"); err != nil {
		return err
	}
	if j.found, err = j.spool("found"); err != nil {
		return err
	}
	var seen *spool // different names of each part, where no table has them
	if j.o.open() {
		if seen, err = j.spool("seen"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, seen.f.Close()) }()
	}
	j.fresh = make([]uint64, j.parts)
	twice := make([]*Twice, j.parts)
	g, all := errgroup.WithContext(ctx)
	g.SetLimit(hostcpu.Count())
	for p := range j.parts {
		g.Go(func() (err error) {
			if err := all.Err(); err != nil {
				return err
			}
			t := part{j: j, p: p, seen: seen}
			twice[p], err = t.join()
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	var first *Twice
	for _, t := range twice {
		if t != nil && (first == nil || t.Second < first.Second) {
			first = t
		}
	}
	if first != nil {
		return first
	}
	if !j.o.open() {
		return j.list.Flush()
	}
	if err := j.rank(seen); err != nil {
		return err
	}
	return errors.Join(j.list.Flush(), j.index(ctx))
}

// part is a table of the names of one part.
type part struct {
	j      *Join
	p      int
	seen   *spool
	ranks  []uint64 // of a table, the numbers of its names, by their places
	slots  []uint32 // 1 + place of a name
	hashes []uint64
	ends   []uint32 // of the names in text
	text   []byte
}

// room is the memory that the table of a part may take.
func (j *Join) room() int64 {
	return min(max(j.o.Memory/2, 16<<20)/int64(hostcpu.Count()), math.MaxUint32)
}

// join finds for each name of the part its place among the different ones, or with a table its
// number.
func (t *part) join() (twice *Twice, err error) {
	j := t.j
	t.slots, t.ends = make([]uint32, 1<<10), append(t.ends, 0)
	open := j.o.open()
	if !open {
		if err := t.readRanks(); err != nil {
			return nil, err
		}
	}
	nodes := uint64(j.ranks.size(t.p)) / 8
	r := j.texts.stream(t.p)
	var out []byte
	for n := uint64(0); ; n++ {
		name, err := r.name()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		k, isNew := t.find(name, hashOf(name), open || n < nodes)
		if isNew && int64(len(t.text)+32*len(t.hashes)) > j.room() {
			return nil, j.tooMany()
		}
		switch {
		case n < nodes && !isNew:
			return t.twice(n, k)
		case n < nodes: // its number is its place
			continue
		case !open && k == noPlace:
			out = j.appendNumber(out, None)
		case !open:
			out = j.appendNumber(out, t.ranks[k])
		default:
			if isNew {
				b := append(binary.AppendUvarint(out, uint64(len(name))), name...)
				if err := t.seen.add(t.p, b); err != nil {
					return nil, err
				}
			}
			out = binary.LittleEndian.AppendUint32(out, k)
		}
		if err := j.local.add(t.p, out); err != nil {
			return nil, err
		}
		out = out[:0]
	}
	j.fresh[t.p] = uint64(len(t.hashes))
	if err := j.local.finish(t.p); err != nil {
		return nil, err
	}
	if !open {
		t.text, t.ends, t.slots = nil, nil, nil
		all := make([]hashed, len(t.hashes))
		for i, h := range t.hashes {
			all[i] = hashed{h, t.ranks[i]}
		}
		return nil, j.addFound(t.p, all)
	}
	if err := t.seen.finish(t.p); err != nil {
		return nil, err
	}
	for _, h := range t.hashes { // in the order of the places, for index
		out = binary.LittleEndian.AppendUint64(out[:0], h)
		if err := j.found.add(t.p, out); err != nil {
			return nil, err
		}
	}
	return nil, j.found.finish(t.p)
}

// readRanks reads the numbers of the table's names of the part.
func (t *part) readRanks() (err error) {
	n := t.j.ranks.size(t.p) / 8
	if 32*n > t.j.room() {
		return t.j.tooMany()
	}
	t.ranks = make([]uint64, n)
	r := t.j.ranks.stream(t.p)
	for i := range t.ranks {
		if t.ranks[i], err = r.number(); err != nil {
			return err
		}
	}
	return nil
}

// wide reports whether numbers take 8 bytes in local, and not 4.
func (j *Join) wide() bool { return j.nodes >= math.MaxUint32 }

func (j *Join) appendNumber(dst []byte, v uint64) []byte {
	if j.wide() {
		return binary.LittleEndian.AppendUint64(dst, v)
	}
	return binary.LittleEndian.AppendUint32(dst, uint32(v)) // of None the same bits
}

// noPlace is the place of a name that no node has.
const noPlace = ^uint32(0)

// find returns the place of a name, which it adds where the table is open.
func (t *part) find(name []byte, h uint64, open bool) (place uint32, isNew bool) {
	mask := uint64(len(t.slots) - 1)
	i := h & mask
	for ; t.slots[i] != 0; i = (i + 1) & mask {
		k := t.slots[i] - 1
		if t.hashes[k] == h && bytes.Equal(t.text[t.ends[k]:t.ends[k+1]], name) {
			return k, false
		}
	}
	if !open {
		return noPlace, false
	}
	k := uint32(len(t.hashes))
	t.slots[i] = k + 1
	t.hashes = append(t.hashes, h)
	t.text = append(t.text, name...)
	t.ends = append(t.ends, uint32(len(t.text)))
	if len(t.hashes)*2 > len(t.slots) {
		t.slots = make([]uint32, 2*len(t.slots))
		mask = uint64(len(t.slots) - 1)
		for k, h := range t.hashes {
			i := h & mask
			for t.slots[i] != 0 {
				i = (i + 1) & mask
			}
			t.slots[i] = uint32(k) + 1
		}
	}
	return k, true
}

// twice finds the rows of a name that is n-th in the part and k-th among the different ones.
func (t *part) twice(n uint64, k uint32) (*Twice, error) {
	r := t.j.ranks.stream(t.p)
	e := &Twice{}
	for i := uint64(0); i <= n; i++ {
		v, err := r.number()
		if err != nil {
			return nil, err
		}
		if i == uint64(k) { // all before n are different
			e.First = v
		}
		e.Second = v
	}
	return e, nil
}

// parts are the parts of all names in their order.
func (j *Join) partsFrom(skip uint64) (*bufio.Reader, error) {
	_, err := j.orderFile.Seek(int64(2*skip), io.SeekStart)
	return bufio.NewReaderSize(j.orderFile, 1<<18), err
}

// rank numbers names by their first appearance: the next place of a part is a new name.
func (j *Join) rank(seen *spool) error {
	order, err := j.partsFrom(j.rows)
	if err != nil {
		return err
	}
	local, texts := make([]*stream, j.parts), make([]*stream, j.parts)
	next := make([]uint32, j.parts)
	for p := range j.parts {
		local[p], texts[p] = j.local.stream(p), seen.stream(p)
		next[p] = uint32(j.ranks.size(p) / 8)
	}
	var b [8]byte
	for range j.total - j.rows {
		if _, err := io.ReadFull(order, b[:2]); err != nil {
			return err
		}
		p := binary.LittleEndian.Uint16(b[:])
		k, err := local[p].short()
		if err != nil {
			return err
		}
		if k != next[p] {
			continue
		}
		next[p]++
		name, err := texts[p].name()
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint64(b[:], j.nodes)
		if err := j.ranks.add(int(p), b[:]); err != nil {
			return err
		}
		j.nodes++
		if _, err := j.list.Write(binary.AppendUvarint(nil, uint64(len(name)))); err != nil {
			return err
		}
		if _, err := j.list.Write(name); err != nil {
			return err
		}
	}
	return j.ranks.finishAll()
}

// index sorts the hashes of each part with the numbers, and replaces places by numbers.
func (j *Join) index(ctx context.Context) (err error) {
	hashes, local := j.found, j.local
	if j.found, err = j.spool("index"); err != nil {
		return err
	}
	if j.local, err = j.spool("numbers"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hashes.f.Close(), local.f.Close()) }()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(hostcpu.Count())
	for p := range j.parts {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return j.indexPart(p, hashes, local)
		})
	}
	return g.Wait()
}

// hashed is a name's hash and the number of its node.
type hashed struct{ hash, node uint64 }

func (j *Join) indexPart(p int, hashes, local *spool) error {
	n := j.fresh[p]
	if int64(n)*24 > 2*j.room() {
		return j.tooMany()
	}
	ranks, all := make([]uint64, n), make([]hashed, n)
	r, h := j.ranks.stream(p), hashes.stream(p)
	var err error
	for i := range ranks {
		if ranks[i], err = r.number(); err != nil {
			return err
		}
		all[i].node = ranks[i]
		if all[i].hash, err = h.number(); err != nil {
			return err
		}
	}
	if err := j.addFound(p, all); err != nil {
		return err
	}
	var b []byte
	places := local.stream(p)
	for range uint64(local.size(p)) / 4 {
		k, err := places.short()
		if err != nil {
			return err
		}
		v := None
		if k != noPlace {
			v = ranks[k]
		}
		b = j.appendNumber(b[:0], v)
		if err := j.local.add(p, b); err != nil {
			return err
		}
	}
	return j.local.finish(p)
}

// addFound adds the names of a part to the index.
func (j *Join) addFound(p int, all []hashed) error {
	slices.SortFunc(all, func(a, b hashed) int {
		if a.hash != b.hash {
			return cmp.Compare(a.hash, b.hash)
		}
		return cmp.Compare(a.node, b.node)
	})
	var b []byte
	for _, x := range all {
		b = binary.LittleEndian.AppendUint64(b[:0], x.hash)
		b = binary.LittleEndian.AppendUint64(b, x.node)
		if err := j.found.add(p, b); err != nil {
			return err
		}
	}
	return j.found.finish(p)
}

func (j *Join) tooMany() error {
	return errs.New(errs.Usage,
		"a part of the names of %s takes more than the %d MiB that {memory} leaves for it; give more",
		j.o.Type, j.room()>>20)
}

// Nodes is the number of nodes.
func (j *Join) Nodes() int64 { return int64(j.nodes) }

// Numbers calls fn with the numbers of the names that were added behind the table, in their order;
// None for one that no node has.
func (j *Join) Numbers(ctx context.Context, fn func([]uint64) error) error {
	order, err := j.partsFrom(j.rows)
	if err != nil {
		return err
	}
	from := make([]*stream, j.parts)
	for p := range from {
		from[p] = j.local.stream(p)
	}
	const at = 1 << 14
	raw, out := make([]byte, 2*at), make([]uint64, at)
	for left := j.total - j.rows; left > 0; {
		n := min(left, at)
		left -= n
		if _, err := io.ReadFull(order, raw[:2*n]); err != nil {
			return err
		}
		for i := range n {
			r := from[binary.LittleEndian.Uint16(raw[2*i:])]
			if j.wide() {
				out[i], err = r.number()
			} else {
				var v uint32
				if v, err = r.short(); v != math.MaxUint32 {
					out[i] = uint64(v)
				} else {
					out[i] = None
				}
			}
			if err != nil {
				return err
			}
		}
		if err := fn(out[:n]); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}
