package npy

import (
	"archive/zip"
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
)

// Array is one array in a file: a .npy file or a member of a .npz archive. It can be streamed
// any number of times, from any element.
type Array struct {
	Name   string // path, or "archive.npz:member", for errors
	Header Header
	file   string    // a .npy file, or the archive of a member that is stored as it is; or ""
	member *zip.File // a member of an archive
	start  int64     // where the data begins in the file, or in the member
	stored int64     // where a stored member's data begins in the archive
	own    string    // the archive, which each reader of the member opens; "": it is open
	view   *view     // of elements that are not one behind the other in the file; or nil
}

// Open reads the header of the .npy file and checks the file's length against its shape.
// Errors name the file and are of class usage.
func Open(path string) (*Array, error) { return open(path, ParseDType) }

// ErrTyped says that the header of an array gives its type.
var ErrTyped = errors.New("the header gives the type")

// OpenAs is Open for an array of raw bytes, of type V, which are read as the type.
func OpenAs(path string, dt DType) (*Array, error) {
	return open(path, func(s string) (DType, error) {
		if strings.TrimLeft(s, "<>=|") != fmt.Sprint("V", dt.Size) {
			return dt, ErrTyped
		}
		return dt, nil
	})
}

func open(path string, dtype func(string) (DType, error)) (*Array, error) {
	f, _, err := container.Open(path, container.NPY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h, start, err := readHeader(bufio.NewReader(f), dtype)
	if err != nil {
		return nil, errs.New(errs.Usage, "%s: %w", path, err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if st.Size()-start < h.Bytes() {
		return nil, errs.New(errs.Usage,
			"%s: truncated: shape %s of %s needs %d bytes, the file has %d; copy or save it again",
			path, h.ShapeString(), h.DType, uint64(start)+uint64(h.Bytes()), st.Size())
	}
	return &Array{Name: path, Header: h, file: path, start: start}, nil
}

// Section is an array without a header, from byte off of a file to the end of its shape. With
// whole, the file must end there too. name is for errors; "" means the path.
func Section(name, path string, off int64, h Header, whole bool) (*Array, error) {
	if name == "" {
		name = path
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	if !h.fits() {
		return nil, errs.New(errs.Usage, "%s: shape %s of %s is too large", name, h.ShapeString(),
			h.DType)
	}
	if left := st.Size() - off; off < 0 || left < h.Bytes() || whole && left != h.Bytes() {
		return nil, errs.New(errs.Usage,
			"%s: shape %s of %s needs %d bytes from offset %d on, the file has %d; copy it again",
			name, h.ShapeString(), h.DType, h.Bytes(), off, st.Size())
	}
	return &Array{Name: name, Header: h, file: path, start: off}, nil
}

// Archive is an open .npz file.
type Archive struct {
	Path string
	zr   *zip.Reader
	f    *os.File
	// tensors are the arrays of a file of PyTorch, by name, and values what else it holds; nil: the
	// members are arrays.
	tensors map[string]*Array
	values  []string
}

// OpenArchive opens a .npz file.
func OpenArchive(path string) (*Archive, error) {
	f, kind, err := container.Open(path, container.Zip, container.Torch)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	var zr *zip.Reader
	if err == nil {
		zr, err = zip.NewReader(f, st.Size())
	}
	if err != nil {
		return nil, errors.Join(errs.New(errs.Usage, "%s: not a .npz archive, or truncated: %w",
			path, err), f.Close())
	}
	seen := map[string]bool{}
	for _, m := range zr.File {
		if seen[m.Name] {
			return nil, errors.Join(errs.New(errs.Usage, "%s: %.60q stands in the archive twice",
				path, m.Name), f.Close())
		}
		seen[m.Name] = true
	}
	a := &Archive{Path: path, zr: zr, f: f}
	if kind.Kind == container.Zip && len(a.Names()) == 0 && len(zr.File) > 0 {
		return nil, errors.Join(kind.Refuse(path), f.Close())
	}
	return a, nil
}

// Close closes the archive; its arrays can no longer be streamed.
func (a *Archive) Close() error { return a.f.Close() }

// Names lists the arrays, sorted, without ".npy".
func (a *Archive) Names() []string {
	if a.tensors != nil {
		return slices.Sorted(maps.Keys(a.tensors))
	}
	var names []string
	for _, f := range a.zr.File {
		if n, ok := strings.CutSuffix(f.Name, ".npy"); ok {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	return names
}

// Others lists the members that are no arrays.
func (a *Archive) Others() (names []string) {
	if a.tensors != nil {
		return a.values
	}
	for _, f := range a.zr.File {
		if !strings.HasSuffix(f.Name, ".npy") {
			names = append(names, f.Name)
		}
	}
	return names
}

// Array opens the member called name (without ".npy").
func (a *Archive) Array(name string) (*Array, error) {
	if t := a.tensors[name]; t != nil {
		return t, nil
	}
	full := a.Path + ":" + name
	for _, f := range a.zr.File {
		if f.Name != name+".npy" {
			continue
		}
		r, err := f.Open()
		if err != nil {
			return nil, errs.New(errs.Usage, "%s: %w", full, err)
		}
		defer r.Close()
		h, start, err := ReadHeader(r)
		if err != nil {
			return nil, errs.New(errs.Usage, "%s: %w", full, err)
		}
		if f.UncompressedSize64 < uint64(start)+uint64(h.Bytes()) {
			return nil, errs.New(errs.Usage,
				"%s: truncated: shape %s of %s needs %d bytes, the archive holds %d",
				full, h.ShapeString(), h.DType, start+h.Bytes(), f.UncompressedSize64)
		}
		arr := &Array{Name: full, Header: h, member: f, start: start}
		return arr, arr.locate(a.Path)
	}
	return nil, errs.New(errs.Usage, "%s: no array of that name; it holds %.400s", full,
		strings.Join(a.Names(), ", "))
}

// Alone is an array that can be read when its archive is closed.
func (a *Array) Alone(archive *Archive) *Array {
	b := *a
	b.own = archive.Path
	return &b
}

// memberFile closes an archive with the member that is read of it.
type memberFile struct {
	io.ReadCloser
	archive *Archive
}

// Close closes both.
func (m memberFile) Close() error { return errors.Join(m.ReadCloser.Close(), m.archive.Close()) }

// openMember opens the member, and its archive where that need not be open.
func (a *Array) openMember() (io.ReadCloser, error) {
	if a.own == "" {
		return a.member.Open()
	}
	archive, err := OpenArchive(a.own)
	if err != nil {
		return nil, err
	}
	for _, f := range archive.zr.File {
		if f.Name == a.member.Name {
			r, err := f.Open()
			if err != nil {
				return nil, errors.Join(err, archive.Close())
			}
			return memberFile{r, archive}, nil
		}
	}
	return nil, errors.Join(errs.New(errs.Usage, "%s has changed", a.own), archive.Close())
}

// locate finds a stored member's data in its archive.
func (a *Array) locate(archive string) error {
	if a.member.Method != zip.Store {
		return nil
	}
	off, err := a.member.DataOffset()
	if err != nil {
		return errs.New(errs.Usage, "%s: %w", a.Name, err)
	}
	a.file, a.stored = archive, off+a.start
	return nil
}

// Put makes an array that Tensor returned one of the archive's, in place of its members; false
// where it has one of that name.
func (a *Archive) Put(name string, t *Array) bool {
	if a.tensors == nil {
		a.tensors = map[string]*Array{}
	}
	if a.tensors[name] != nil {
		return false
	}
	a.tensors[name] = t
	return true
}

// PutOther names something in the archive that is no array.
func (a *Archive) PutOther(name string) { a.values = append(a.values, name) }

// Read returns a member of at most so many bytes.
func (a *Archive) Read(member string, most int64) ([]byte, error) {
	f, err := a.zr.Open(member)
	if err != nil {
		return nil, errs.New(errs.Usage, "%s: %w", a.Path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		return nil, readError(a.Path+":"+member, err)
	case int64(len(b)) > most:
		return nil, errs.New(errs.Usage, "%s:%s has more than %d bytes", a.Path, member, most)
	}
	return b, nil
}

// Members lists all names in the archive.
func (a *Archive) Members() (names []string) {
	for _, f := range a.zr.File {
		names = append(names, f.Name)
	}
	return names
}

// maxText bounds a member that Text reads.
const maxText = 4 << 10

// Text returns the text that the member called name (without ".npy") holds, bytes or characters in
// an array without dimensions, as SciPy saves the format of a matrix; "" without an error where it
// is not there.
func (a *Archive) Text(name string) (string, error) {
	f, err := a.zr.Open(name + ".npy")
	if err != nil {
		return "", nil //nolint:nilerr // not there
	}
	defer f.Close()
	full := a.Path + ":" + name
	b, err := io.ReadAll(io.LimitReader(f, maxText))
	if err != nil {
		return "", readError(full, err)
	}
	text, err := readText(b)
	if err != nil {
		return "", errs.New(errs.Usage, "%s: %w", full, err)
	}
	return text, nil
}

// Base is the array's name without folder and ending.
func (a *Array) Base() string { return strings.TrimSuffix(filepath.Base(a.Name), ".npy") }

// Seekable reports whether a Reader can begin anywhere at no cost: not in a compressed member.
func (a *Array) Seekable() bool { return a.file != "" }

// Check reads a whole member of an archive and compares its checksum, before parts of it are read
// in any order. Of a file there is nothing to check.
func (a *Array) Check(ctx context.Context) error {
	if a.member == nil {
		return nil
	}
	r, err := a.openMember()
	if err != nil {
		return errs.New(errs.Usage, "%s: %w", a.Name, err)
	}
	defer r.Close()
	buf := make([]byte, 1<<20)
	for pos := int64(0); ; {
		n, err := r.Read(buf)
		pos += int64(n)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return readError(fmt.Sprintf("%s: near byte %d of the member", a.Name, pos), err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// readError gives a failure of the file system class device, and anything else, which is the
// content's, class usage.
func readError(where string, err error) error {
	class := errs.Usage
	var pe *fs.PathError
	if errors.As(err, &pe) {
		class = errs.Device
	}
	return errs.New(class, "%s: truncated or damaged: %w", where, err)
}

// Reader streams elements in file order.
type Reader struct {
	name   string
	dt     DType
	left   int64 // elements
	total  int64
	br     *bufio.Reader
	c      io.Closer
	buf    []byte
	member bool // read to its end, where the checksum is compared
}

const readerBuffer = 256 << 10

// Reader streams the elements [from, end). Members of archives are decompressed up to from.
func (a *Array) Reader(from int64) (*Reader, error) {
	n := a.Header.Elements()
	if from < 0 || from > n {
		return nil, fmt.Errorf("%s: element %d is outside its %d elements", a.Name, from, n)
	}
	skip := a.start + from*int64(a.Header.DType.Size)
	var rc io.ReadCloser
	// A stored member is read as a file, except from its start: then its checksum can be compared
	// at its end.
	member := a.member != nil && a.view == nil && (a.file == "" || from == 0)
	if a.member != nil && !member {
		skip += a.stored - a.start
	}
	switch {
	case a.view != nil:
		var err error
		if rc, err = a.openView(from); err != nil {
			return nil, err
		}
	case !member:
		f, err := infile.Open(a.file)
		if err != nil {
			return nil, err
		}
		if _, err := f.Seek(skip, io.SeekStart); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		rc = f
	default:
		r, err := a.openMember()
		if err != nil {
			return nil, errs.New(errs.Usage, "%s: %w", a.Name, err)
		}
		if _, err := io.CopyN(io.Discard, r, skip); err != nil {
			return nil, errors.Join(readError(a.Name, err), r.Close())
		}
		rc = r
	}
	return &Reader{name: a.Name, dt: a.Header.DType, left: n - from, total: n,
		br: bufio.NewReaderSize(rc, readerBuffer), c: rc, member: member}, nil
}

// ReaderOf streams elements that are in memory. It need not be closed.
func ReaderOf(name string, dt DType, data []byte) *Reader {
	n := int64(len(data) / max(dt.Size, 1))
	return &Reader{name: name, dt: dt, left: n, total: n,
		br: bufio.NewReaderSize(bytes.NewReader(data), 4096)}
}

// Close ends the stream.
func (r *Reader) Close() error { return r.c.Close() }

// next fills the byte buffer with up to want elements; 0 with io.EOF at the end.
func (r *Reader) next(want int) ([]byte, int, error) {
	if r.left == 0 {
		return nil, 0, io.EOF
	}
	n := min(int64(want), r.left)
	need := int(n) * r.dt.Size
	if cap(r.buf) < need {
		r.buf = make([]byte, need)
	}
	b := r.buf[:need]
	if _, err := io.ReadFull(r.br, b); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, 0, errs.New(errs.Usage, "%s: truncated near element %d of %d", r.name,
				r.total-r.left, r.total)
		}
		return nil, 0, readError(fmt.Sprintf("%s: near element %d of %d", r.name, r.total-r.left,
			r.total), err)
	}
	if r.left -= n; r.left == 0 && r.member {
		// archive/zip compares the checksum when it is asked for more than there is.
		if _, err := io.Copy(io.Discard, r.br); err != nil {
			return nil, 0, readError(r.name+": at its end", err)
		}
	}
	if r.dt.Big {
		swap(b, r.dt.Size)
	}
	return b, int(n), nil
}

func swap(b []byte, size int) {
	for i := 0; i < len(b); i += size {
		for x, y := i, i+size-1; x < y; x, y = x+1, y-1 {
			b[x], b[y] = b[y], b[x]
		}
	}
}

func intAt(dt DType, b []byte, i int) int64 {
	switch dt.Size {
	case 1:
		if dt.Kind == 'i' {
			return int64(int8(b[i]))
		}
		return int64(b[i])
	case 2:
		v := binary.LittleEndian.Uint16(b[2*i:])
		if dt.Kind == 'i' {
			return int64(int16(v))
		}
		return int64(v)
	case 4:
		v := binary.LittleEndian.Uint32(b[4*i:])
		if dt.Kind == 'i' {
			return int64(int32(v))
		}
		return int64(v)
	}
	return int64(binary.LittleEndian.Uint64(b[8*i:]))
}

// Ints fills dst with integers and returns how many; 0 with io.EOF at the end. Arrays of floats are
// refused: use Floats. So is a uint64 above the range of int64.
func (r *Reader) Ints(dst []int64) (int, error) {
	if r.dt.Kind == 'f' {
		return 0, errs.New(errs.Usage, "%s: holds %s, integers are needed; save x.astype(numpy.int64)", r.name,
			r.dt)
	}
	b, n, err := r.next(len(dst))
	if err != nil {
		return 0, err
	}
	switch r.dt { // the types that huge edge lists have
	case Int64:
		for i := range dst[:n] {
			dst[i] = int64(binary.LittleEndian.Uint64(b[8*i:]))
		}
	case Uint32:
		for i := range dst[:n] {
			dst[i] = int64(binary.LittleEndian.Uint32(b[4*i:]))
		}
	case Int32:
		for i := range dst[:n] {
			dst[i] = int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
		}
	default:
		for i := range dst[:n] {
			dst[i] = intAt(r.dt, b, i)
			if dst[i] < 0 && r.dt.Kind == 'u' {
				return 0, errs.New(errs.Usage,
					"%s: element %d is %d, which is above 2^63; no id, offset or class is that large",
					r.name, r.total-r.left-int64(n-i), uint64(dst[i]))
			}
		}
	}
	return n, nil
}

// Floats fills dst with any numbers as float64.
func (r *Reader) Floats(dst []float64) (int, error) { return floats(r, dst) }

// Each calls fn with the elements of an array from one on, some at a time, and the number of the
// first of them. fn does not keep them.
func Each[T int64 | float32 | float64](a *Array, from int64,
	fn func(first int64, xs []T) error) (err error) {
	r, err := a.Reader(from)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]T, 32<<10)
	for n := 0; from < a.Header.Elements(); from += int64(n) {
		switch dst := any(buf).(type) {
		case []int64:
			n, err = r.Ints(dst)
		case []float32:
			n, err = r.Float32s(dst)
		case []float64:
			n, err = r.Floats(dst)
		}
		if err != nil {
			return err
		}
		if err := fn(from, buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// RangeError is a number that float32 cannot hold.
type RangeError struct {
	Name  string
	Index int64 // of the element
	Value float64
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("%s: element %d is %g, which float32 cannot hold", e.Name, e.Index, e.Value)
}

// Float32s fills dst with any numbers, rounded to float32. A float64 that becomes infinite by that
// is a *RangeError.
func (r *Reader) Float32s(dst []float32) (int, error) { return floats(r, dst) }

func floats[T float32 | float64](r *Reader, dst []T) (int, error) {
	b, n, err := r.next(len(dst))
	if err != nil {
		return 0, err
	}
	for i := range dst[:n] {
		switch {
		case r.dt.Kind == 'u' && r.dt.Size == 8:
			dst[i] = T(binary.LittleEndian.Uint64(b[8*i:]))
		case r.dt.Kind != 'f':
			dst[i] = T(intAt(r.dt, b, i))
		case r.dt.Brain:
			dst[i] = T(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16))
		case r.dt.Size == 2:
			dst[i] = T(Half(binary.LittleEndian.Uint16(b[2*i:])))
		case r.dt.Size == 4:
			dst[i] = T(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
		default:
			x := math.Float64frombits(binary.LittleEndian.Uint64(b[8*i:]))
			if dst[i] = T(x); dst[i]-dst[i] != 0 && x-x == 0 {
				return 0, errs.With(errs.Usage,
					&RangeError{r.name, r.total - r.left - int64(n-i), x})
			}
		}
	}
	return n, nil
}

// Half widens an IEEE 754 binary16 value; it is exact.
func Half(h uint16) float32 {
	sign := uint32(h>>15) << 31
	exp, frac := uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch {
	case exp == 0x1f: // infinity, NaN
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	case exp != 0:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	case frac == 0:
		return math.Float32frombits(sign)
	}
	v := float32(frac) * (1.0 / (1 << 24)) // subnormal
	if sign != 0 {
		v = -v
	}
	return v
}

// DataOffset returns the offset of the data in a .npy file or section.
func (a *Array) DataOffset() int64 { return a.start }
