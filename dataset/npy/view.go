package npy

import (
	"io"
	"os"
	"slices"

	"helios/internal/errs"
	"helios/internal/infile"
)

// view describes the elements of a matrix that are not one behind the other in their file.
type view struct {
	rows, cols       int64
	rowStep, colStep int64 // elements from one to the next
}

// Matrix returns the array as one in C order: an array of two dimensions in Fortran order is read a
// block of columns at a time.
func (a *Array) Matrix() (*Array, error) {
	sh := a.Header.Shape
	if !a.Header.Fortran || len(sh) < 2 {
		return a, nil
	}
	if len(sh) > 2 {
		return nil, errs.New(errs.Usage,
			"%s has shape %s in Fortran order; save numpy.ascontiguousarray(x)", a.Name, a.Header.ShapeString())
	}
	return a.strided([]int64{1, sh[0]})
}

// strided is the array with its elements so many elements apart in each dimension.
func (a *Array) strided(strides []int64) (*Array, error) {
	sh := a.Header.Shape
	if a.file == "" {
		return nil, errs.New(errs.Usage,
			"%s is compressed, and its elements do not lie in their order; save numpy.ascontiguousarray(x)", a.Name)
	}
	v := &view{rows: 1, cols: 1}
	switch len(sh) {
	case 1:
		v.cols, v.colStep = sh[0], strides[0] // read as a line
	case 2:
		v.rows, v.rowStep, v.cols, v.colStep = sh[0], strides[0], sh[1], strides[1]
	default:
		return nil, errs.New(errs.Usage,
			"%s has shape %s, and its elements do not lie in their order; save x.contiguous()", a.Name,
			a.Header.ShapeString())
	}
	b := *a
	b.Header.Fortran, b.view = false, v
	return &b, nil
}

// Tensor returns the member of an archive as PyTorch stores a tensor: elements of a storage, from
// one on, so many elements apart in each dimension.
func (a *Archive) Tensor(name, member string, offset int64, h Header, strides []int64) (*Array,
	error) {
	full := a.Path
	if name != "" {
		full += ":" + name
	}
	i := slices.Index(a.Members(), member)
	if i < 0 {
		return nil, errs.New(errs.Usage, "%s: the archive lacks its data, %.60q", full, member)
	}
	f := a.zr.File[i]
	if !h.fits() {
		return nil, errs.New(errs.Usage, "%s: shape %s of %s is too large", full, h.ShapeString(), h.DType)
	}
	in := int64(f.UncompressedSize64) / int64(h.DType.Size) // elements
	if h.Elements() > 0 && !lies(h.Shape, strides, offset, in) {
		return nil, errs.New(errs.Usage,
			"%s: truncated: shape %s of %s from element %d on does not lie in its %d elements", full,
			h.ShapeString(), h.DType, offset, in)
	}
	isPlain := follows(h.Shape, strides)
	isFortran := len(h.Shape) == 2 && follows(reversed(h.Shape), reversed(strides))
	h.Fortran = !isPlain && isFortran
	arr := &Array{Name: full, Header: h, member: f, start: offset * int64(h.DType.Size)}
	if err := arr.locate(a.Path); err != nil {
		return nil, err
	}
	if isPlain || isFortran || h.Elements() == 0 {
		return arr, nil
	}
	return arr.strided(strides)
}

// lies reports whether all elements of a shape are among some.
func lies(shape, strides []int64, first, in int64) bool {
	if first < 0 || first >= in {
		return false
	}
	for k, n := range shape {
		s := strides[k]
		if n < 2 || s == 0 {
			continue
		}
		if s < 0 || n-1 > in/s { // so that nothing overflows
			return false
		}
		if first += (n - 1) * s; first >= in {
			return false
		}
	}
	return true
}

// follows reports whether elements are one behind the other, the last dimension first.
func follows(shape, strides []int64) bool {
	step := int64(1)
	for k := len(shape) - 1; k >= 0; k-- {
		if shape[k] > 1 && strides[k] != step {
			return false
		}
		step *= shape[k]
	}
	return true
}

func reversed(xs []int64) []int64 {
	xs = slices.Clone(xs)
	slices.Reverse(xs)
	return xs
}

const (
	viewBytes = 8 << 20 // of a block in C order
	spanBytes = 1 << 20 // that are read at once
)

// viewReader gives the bytes of a view in C order.
type viewReader struct {
	f     *os.File
	start int64 // of the first element in the file
	size  int64 // of an element
	v     view
	next  int64 // element that the next block begins with
	block []byte
	left  []byte // of the block
	span  []byte
}

// openView returns a reader of the elements from one on.
func (a *Array) openView(from int64) (io.ReadCloser, error) {
	f, err := infile.Open(a.file)
	if err != nil {
		return nil, err
	}
	start := a.start
	if a.member != nil {
		start = a.stored
	}
	size := int64(a.Header.DType.Size)
	return &viewReader{f: f, start: start, size: size, v: *a.view, next: from}, nil
}

// Close closes the file.
func (r *viewReader) Close() error { return r.f.Close() }

func (r *viewReader) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		if r.next >= r.v.rows*r.v.cols {
			return 0, io.EOF
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// fill reads a block: some rows, or a part of a row that is long.
func (r *viewReader) fill() error {
	limit := viewBytes / r.size
	row, col := r.next/r.v.cols, r.next%r.v.cols
	rows, cols := int64(1), min(r.v.cols-col, limit)
	if r.v.cols <= limit && col == 0 {
		rows = min(limit/r.v.cols, r.v.rows-row)
	}
	if n := rows * cols * r.size; int64(cap(r.block)) < n {
		r.block = make([]byte, n)
	}
	r.left = r.block[:rows*cols*r.size]
	r.next += rows * cols
	first := row*r.v.rowStep + col*r.v.colStep
	if r.v.rowStep < r.v.colStep && rows > 1 { // the columns are closer together
		for c := range cols {
			dst := r.left[c*r.size:]
			if err := r.line(first+c*r.v.colStep, r.v.rowStep, rows, dst, cols); err != nil {
				return err
			}
		}
		return nil
	}
	for i := range rows {
		dst := r.left[i*cols*r.size:]
		if err := r.line(first+i*r.v.rowStep, r.v.colStep, cols, dst, 1); err != nil {
			return err
		}
	}
	return nil
}

// line puts n elements that lie step apart into dst, apart elements from each other there.
func (r *viewReader) line(first, step, n int64, dst []byte, apart int64) error {
	limit := int64(1)
	if step*r.size < spanBytes {
		limit = spanBytes/max(step*r.size, 1) - 1
	}
	for i := int64(0); i < n; {
		k := min(limit, n-i)
		bytes := ((k-1)*step + 1) * r.size
		if int64(cap(r.span)) < bytes {
			r.span = make([]byte, max(bytes, spanBytes))
		}
		span := r.span[:bytes]
		if _, err := r.f.ReadAt(span, r.start+(first+i*step)*r.size); err != nil {
			return err
		}
		for j := range k {
			to := (i + j) * apart * r.size
			copy(dst[to:to+r.size], span[j*step*r.size:])
		}
		i += k
	}
	return nil
}
