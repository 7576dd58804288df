package names

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/bits"
	"slices"
	"sort"
	"strconv"

	"github.com/parquet-go/parquet-go"

	"helios/dataset/table"
)

// row is a row of a file of names: the name of the node that is the row's number, and an index of
// all names, hash and node, by ascending hash. Names that are all whole numbers are kept as such.
type row[N string | int64 | uint64] struct {
	Name N      `parquet:"name,plain"`
	Hash uint64 `parquet:"hash,plain"`
	Node int64  `parquet:"node,plain"`
}

// groupRows is the number of rows of a group, which a look-up decodes.
const groupRows = 1 << 15

// Write writes the file of names, when they are numbered.
func (j *Join) Write(ctx context.Context, w io.Writer) error {
	signed, unsigned := true, true
	next, err := j.names()
	for i := uint64(0); err == nil && i < j.nodes && (signed || unsigned); i++ {
		var name []byte
		name, err = next()
		signed = signed && isNumber(name, strconv.ParseInt, strconv.FormatInt)
		unsigned = unsigned && isNumber(name, strconv.ParseUint, strconv.FormatUint)
	}
	switch {
	case err != nil:
		return err
	case signed:
		return write(ctx, j, w, func(name []byte) (int64, error) {
			return strconv.ParseInt(string(name), 10, 64)
		})
	case unsigned:
		return write(ctx, j, w, func(name []byte) (uint64, error) {
			return strconv.ParseUint(string(name), 10, 64)
		})
	}
	return write(ctx, j, w, func(name []byte) (string, error) { return string(name), nil })
}

// isNumber reports whether a name is a whole number as it is written: not 007, and not +7.
func isNumber[N int64 | uint64](name []byte, parse func(string, int, int) (N, error),
	format func(N, int) string) bool {
	x, err := parse(string(name), 10, 64)
	return err == nil && format(x, 10) == string(name)
}

// names returns what reads the different names in the order of their nodes.
func (j *Join) names() (next func() ([]byte, error), err error) {
	_, err = j.listFile.Seek(0, io.SeekStart)
	list := bufio.NewReaderSize(j.listFile, 1<<18)
	var name []byte
	return func() ([]byte, error) {
		n, err := binary.ReadUvarint(list)
		if err != nil {
			return nil, err
		}
		name = slices.Grow(name[:0], int(n))[:n]
		_, err = io.ReadFull(list, name)
		return name, err
	}, err
}

func write[N string | int64 | uint64](ctx context.Context, j *Join, w io.Writer,
	of func(name []byte) (N, error)) error {
	next, err := j.names()
	if err != nil {
		return err
	}
	p, index := 0, j.found.stream(0)
	out := parquet.NewGenericWriter[row[N]](w, parquet.MaxRowsPerRowGroup(groupRows),
		parquet.CreatedBy("heliosctl", "1", ""), parquet.DataPageStatistics(false))
	rows := make([]row[N], 0, groupRows)
	for i := range j.nodes {
		name, err := next()
		if err != nil {
			return err
		}
		r := row[N]{}
		if r.Name, err = of(name); err != nil {
			return err
		}
		for {
			r.Hash, err = index.number()
			if !errors.Is(err, io.ErrUnexpectedEOF) || p+1 == j.parts {
				break
			}
			p++
			index = j.found.stream(p)
		}
		if err != nil {
			return err
		}
		node, err := index.number()
		if err != nil {
			return err
		}
		r.Node = int64(node)
		if rows = append(rows, r); len(rows) == groupRows || i+1 == j.nodes {
			if _, err := out.Write(rows); err != nil {
				return err
			}
			if err := out.Flush(); err != nil {
				return err
			}
			rows = rows[:0]
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
	return out.Close()
}

// File is a file of names. It is not for several goroutines.
type File struct {
	g      *table.Groups
	names  group
	hashes group
	nodes  group
}

// group is the column of a group of rows that was read last.
type group struct {
	i int
	c *table.Column
}

// Open opens a file of names.
func Open(path string, in io.ReaderAt, size int64) (*File, error) {
	g, err := table.OpenGroups(path, in, size)
	return &File{g: g}, err
}

// Nodes is the number of nodes.
func (f *File) Nodes() int64 { return f.g.Starts[len(f.g.Starts)-1] }

// read reads a column at a row, and returns the row's place in it.
func (f *File) read(g *group, column string, at int64) (place int, err error) {
	i := sort.Search(len(f.g.Starts), func(i int) bool { return f.g.Starts[i] > at }) - 1
	if g.c == nil || g.i != i {
		if g.c, err = f.g.Read(i, column); err != nil {
			return 0, err
		}
		g.i = i
	}
	return int(at - f.g.Starts[i]), nil
}

// Name returns the name of a node.
func (f *File) Name(node int64) (string, error) {
	i, err := f.read(&f.names, "name", node)
	if err != nil {
		return "", err
	}
	return string(nameAt(f.names.c, i)), nil
}

// nameAt is a name of the file as text.
func nameAt(c *table.Column, i int) []byte {
	if c.Kind == table.Text {
		return c.Text(i)
	}
	return table.AppendInt(nil, c, i)
}

// Node returns the node of a name; ok is false where none has it. Hashes are spread evenly, so the
// first guess is near.
func (f *File) Node(name string) (node int64, ok bool, err error) {
	h := hashOf([]byte(name))
	hash := func(at int64) uint64 {
		i, e := f.read(&f.hashes, "hash", at)
		if e != nil {
			err = errors.Join(err, e)
			return 0
		}
		return uint64(f.hashes.c.Ints[i])
	}
	n := f.Nodes()
	guess, _ := bits.Mul64(h, uint64(n))
	lo, hi := int64(0), n // the first hash of at least h is in lo..hi
	for step := int64(groupRows / 2); lo < hi && err == nil; step *= 4 {
		from, to := max(int64(guess)-step, lo), min(int64(guess)+step, hi)
		if from > lo && hash(from-1) >= h {
			hi = from
			continue
		}
		lo = from
		if to < hi && hash(to) < h {
			lo = to
			continue
		}
		hi = to
		break
	}
	slot := lo + int64(sort.Search(int(hi-lo), func(i int) bool { return hash(lo+int64(i)) >= h }))
	for ; slot < n && err == nil && hash(slot) == h; slot++ {
		i, e := f.read(&f.nodes, "node", slot)
		if e != nil {
			return 0, false, e
		}
		v := f.nodes.c.Ints[i]
		if v < 0 || v >= n {
			continue
		}
		if its, e := f.Name(v); e != nil || its == name {
			return v, e == nil, e
		}
	}
	return 0, false, err
}

// Each calls fn with all names in the order of the nodes.
func (f *File) Each(fn func(name []byte) error) error {
	for i := range len(f.g.Starts) - 1 {
		c, err := f.g.Read(i, "name")
		if err != nil {
			return err
		}
		for k := range int(f.g.Starts[i+1] - f.g.Starts[i]) {
			if err := fn(nameAt(c, k)); err != nil {
				return err
			}
		}
	}
	return nil
}
