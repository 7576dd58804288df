package prepare

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"
	"strconv"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/infile"
)

// readHotList reads a user's list of nodes, the hottest first, from a .npy array of whole numbers
// or a text file with a number on each line ('#' begins a comment). The first of rows nodes in it
// scores as many points as the list is long, the next one fewer, and what is not in the list 0. Of
// a node that stands twice the first place counts.
func readHotList(path string, rows int64) ([]uint32, error) {
	scores := make([]uint32, rows)
	next := uint32(math.MaxUint32)
	add := func(v int64, where string, n int64) error {
		if v < 0 || v >= rows {
			return errs.New(errs.Usage,
				"%s: %s %d is node %d, nodes are 0 to %d; give this dataset's node numbers", path,
				where, n, v, rows-1)
		}
		if scores[v] == 0 {
			if next == 0 {
				return errs.New(errs.Usage, "%s: more than %d nodes; give the hottest ones alone",
					path, uint32(math.MaxUint32))
			}
			scores[v] = next
			next--
		}
		return nil
	}
	named := func(err error) ([]uint32, error) {
		if err == nil && next == math.MaxUint32 {
			err = errs.New(errs.Usage, "%s names no node; give node numbers, the hottest first",
				path)
		}
		return scores, err
	}
	f, err := infile.Open(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	defer func() { _ = f.Close() }() // read only
	r := bufio.NewReader(f)
	switch start, _ := r.Peek(6); {
	case bytes.HasPrefix(start, []byte("\x93NUMPY")):
		return named(readHotArray(path, add))
	case bytes.HasPrefix(start, []byte("PK")), bytes.HasPrefix(start, []byte("\x80")):
		return nil, errs.New(errs.Usage,
			"%s looks like a file of PyTorch; save the list as an array: numpy.save(\"hot.npy\", torch.load(%q).numpy())",
			path, path)
	}
	lines := bufio.NewScanner(r)
	for n := int64(1); lines.Scan(); n++ {
		text, _, _ := bytes.Cut(lines.Bytes(), []byte("#"))
		if text = bytes.TrimSpace(text); len(text) == 0 {
			continue
		}
		v, err := strconv.ParseInt(string(text), 10, 64)
		if err != nil {
			return nil, errs.New(errs.Usage,
				"%s: line %d: %.40q is no node number; give one on each line, the hottest first",
				path, n, text)
		}
		if err := add(v, "line", n); err != nil {
			return nil, err
		}
	}
	if err := lines.Err(); err != nil {
		return nil, errs.New(errs.Usage,
			"%s: %w; give a .npy array or a text file with a node number on each line", path, err)
	}
	return named(nil)
}

func readHotArray(path string, add func(v int64, where string, n int64) error) error {
	a, err := npy.Open(path)
	if err != nil {
		return err
	}
	if len(a.Header.Shape) != 1 {
		return errs.New(errs.Usage,
			"%s: has shape %s; give a list of node numbers, the hottest first", path,
			a.Header.ShapeString())
	}
	r, err := a.Reader(0)
	if err != nil {
		return err
	}
	buf := make([]int64, 1<<13)
	for offset := int64(0); err == nil; {
		var n int
		n, err = r.Ints(buf)
		for i, v := range buf[:n] {
			if aerr := add(v, "element", offset+int64(i)); aerr != nil {
				return errors.Join(aerr, r.Close())
			}
		}
		offset += int64(n)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return errors.Join(err, r.Close())
}
