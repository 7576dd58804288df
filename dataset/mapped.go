package dataset

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/infile"
)

// Arrays are copied to memory where that leaves room for the rest of a run, and mapped from their
// files where it does not: a mapped page is memory that the kernel can take back, and reads again
// when it is needed. These are the shares of the memory that can be had from which on that is done;
// variables for tests.
var (
	mapTopologyFrom = 0.4
	mapLabelsFrom   = 0.125
)

// mapping is a file's pages, read-only.
type mapping struct {
	mem  []byte
	data []byte // the array's payload
}

// mapArray maps an array of this directory and holds it against its checksums, once: the kernel may
// drop pages and read them again. see is as in seal.Reader.CheckMapped. The caller holds d.mu;
// Close ends the mapping.
func (d *Dataset) mapArray(name string, see func(m *mapping) func(offset int64,
	b []byte) error) (*mapping, error) {
	path := d.Path(name)
	a, err := npy.Open(path)
	if err != nil {
		return nil, err
	}
	f, err := infile.Open(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	defer func() { _ = f.Close() }() // the mapping stays
	n := a.DataOffset() + a.Header.Bytes()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() != n {
		return nil, errs.New(errs.Usage, "%s: has %d bytes, its header says %d; import again", path,
			st.Size(), n)
	}
	m := &mapping{}
	if m.mem, err = unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	m.data = m.mem[a.DataOffset():]
	m.advise(unix.MADV_SEQUENTIAL) // it is checked first, from front to back
	d.maps = append(d.maps, m)
	r, err := d.reader(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // read only
	var each func(offset int64, b []byte) error
	if see != nil {
		each = see(m)
	}
	if err := r.CheckMapped(context.Background(), m.mem, a.DataOffset(), each); err != nil {
		return nil, err
	}
	return m, nil
}

// advise tells the kernel how pages will be needed; where it does not listen nothing is lost.
func (m *mapping) advise(how int) {
	if len(m.mem) > 0 {
		_ = unix.Madvise(m.mem, how)
	}
}

// unmap ends all mappings. The caller holds d.mu.
func (d *Dataset) unmap() error {
	var all []error
	for _, m := range d.maps {
		if err := unix.Munmap(m.mem); err != nil {
			all = append(all, err)
		}
	}
	d.maps = nil
	return errors.Join(all...)
}

// numbers views a payload as little-endian numbers. Payloads start on multiples of 64 bytes (npy),
// or are refused.
func numbers[T int32 | int64 | uint32](file string, b []byte) ([]T, error) {
	var x T
	if len(b) == 0 {
		return []T{}, nil
	}
	if uintptr(unsafe.Pointer(&b[0]))%unsafe.Sizeof(x) != 0 {
		return nil, errs.New(errs.Usage,
			"%s: its data are not aligned, and there is not enough memory to copy them; import again",
			file)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/int(unsafe.Sizeof(x))), nil
}

// mapOffsets is a topology of mapped offsets alone, checked.
func (d *Dataset) mapOffsets(l *lists) (*graph.Topology, *mapping, error) {
	m, err := d.mapArray(l.indptr(), nil)
	if err != nil {
		return nil, nil, err
	}
	t := &graph.Topology{NumNodes: l.dsts, NumEdges: l.edges}
	if t.Indptr, err = numbers[int64](l.inptr, m.data); err != nil {
		return nil, nil, err
	}
	return t, m, l.checkIndptr(t)
}

// mapTopology is Relation over mapped files.
func (d *Dataset) mapTopology(l *lists, wide bool) (*graph.Topology, error) {
	t, indptr, err := d.mapOffsets(l)
	if err != nil {
		return nil, err
	}
	indices, err := d.mapArray(l.indices(), func(m *mapping) func(int64, []byte) error {
		var err error
		if wide {
			t.Indices64, err = numbers[int64](l.file, m.data)
		} else {
			t.Indices32, err = numbers[uint32](l.file, m.data)
		}
		if err != nil {
			return func(int64, []byte) error { return err }
		}
		return l.idsWithin(t)
	})
	if err != nil {
		return nil, err
	}
	if err := t.ValidateOffsets(); err != nil {
		return nil, fmt.Errorf("%s: %w", l.file, err)
	}
	indptr.advise(unix.MADV_RANDOM) // from now on samplers jump
	indices.advise(unix.MADV_RANDOM)
	return t, nil
}

// mapLabels maps the labels of a task.
func (d *Dataset) mapLabels(file string) ([]int32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("dataset %s is closed", d.dir)
	}
	m, err := d.mapArray(file, nil)
	if err != nil {
		return nil, err
	}
	m.advise(unix.MADV_RANDOM)
	return numbers[int32](d.Path(file), m.data)
}
