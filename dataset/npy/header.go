// Package npy reads and writes NumPy's .npy arrays and .npz archives as streams, so that an
// array larger than memory passes through a fixed buffer. The format is NEP 1 and its versions
// 2 and 3: magic, version, header length, and a Python dictionary literal with the element
// type, the order and the shape.
package npy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"regexp"
	"strconv"
	"strings"
)

const magic = "\x93NUMPY"

// maxHeader bounds the dictionary that we accept. NumPy itself refuses more than 10,000 bytes
// by default.
const maxHeader = 64 << 10

// maxDims is NumPy's own limit (NPY_MAXDIMS).
const maxDims = 64

// ErrNotNPY says that a file does not begin with the .npy magic: it is raw, or something else.
var ErrNotNPY = errors.New("not a .npy array (its magic bytes are missing); write it with numpy.save")

// DType is an element type: a kind as NumPy writes it and a size in bytes.
type DType struct {
	Kind  byte // 'f', 'i', 'u' or 'b' (bool)
	Size  int  // bytes
	Big   bool // big-endian
	Brain bool // bfloat16, the upper half of a float32, for which NumPy has no name
}

// The types that Helios writes.
var (
	Float32 = DType{Kind: 'f', Size: 4}
	Int64   = DType{Kind: 'i', Size: 8}
	Int32   = DType{Kind: 'i', Size: 4}
	Uint32  = DType{Kind: 'u', Size: 4}
	Uint8   = DType{Kind: 'u', Size: 1}
)

// BFloat16 is read, and never written.
var BFloat16 = DType{Kind: 'f', Size: 2, Brain: true}

// String is the NumPy spelling, such as "<f4".
func (d DType) String() string {
	order := "<"
	switch {
	case d.Brain:
		return "bfloat16"
	case d.Size == 1:
		order = "|"
	case d.Big:
		order = ">"
	}
	return order + string(d.Kind) + strconv.Itoa(d.Size)
}

// notNumbers are NumPy's other kinds of elements, and what to do with them.
var notNumbers = map[byte]string{
	'O': "Python objects, which are pickled and not read; save the array with a dtype of numbers",
	'S': "text; save numbers instead", 'a': "text; save numbers instead",
	'U': "text; save numbers instead",
	'c': "complex numbers; save the real part",
	'M': "dates; save numbers instead", 'm': "times; save numbers instead",
	'V': "raw bytes, as bfloat16 is written; {types} NAME=bfloat16 of \"import npy\" reads it so, or save x.astype(numpy.float32)",
	'f': "a float of another width; save x.astype(numpy.float32)",
}

// ParseDType reads a NumPy type string. Only numbers and bools are known.
func ParseDType(s string) (DType, error) {
	bad := fmt.Errorf(
		"element type %.20q is not a number that Helios reads (f2, f4, f8, i1-i8, u1-u8, b1)", s)
	if kind := strings.TrimLeft(s, "<>=|"); len(s) > 1 && kind != "" && notNumbers[kind[0]] != "" {
		bad = fmt.Errorf("%w: it is %s", bad, notNumbers[kind[0]])
	}
	if len(s) != 3 || s[2] < '1' || s[2] > '8' {
		return DType{}, bad
	}
	d := DType{Kind: s[1], Size: int(s[2] - '0')}
	switch s[0] {
	case '<', '=':
	case '|':
		if d.Size != 1 {
			return DType{}, bad
		}
	case '>':
		d.Big = d.Size > 1
	default:
		return DType{}, bad
	}
	if !strings.ContainsRune(widths[d.Kind], rune(s[2])) {
		return DType{}, bad
	}
	return d, nil
}

// widths are the bytes that a number of each kind may have.
var widths = map[byte]string{'f': "248", 'i': "1248", 'u': "1248", 'b': "1"}

// Header describes an array.
type Header struct {
	DType   DType
	Fortran bool // column-major
	Shape   []int64
}

// Elements is the product of the shape; 1 for a scalar.
func (h Header) Elements() int64 {
	n := int64(1)
	for _, d := range h.Shape {
		n *= d
	}
	return n
}

// Bytes is the size of the data after the header.
func (h Header) Bytes() int64 { return h.Elements() * int64(h.DType.Size) }

// fits reports whether the shape is one that a file can have.
func (h Header) fits() bool {
	total := uint64(h.DType.Size)
	for _, d := range h.Shape {
		hi, lo := bits.Mul64(total, uint64(d))
		if d < 0 || hi != 0 || lo > math.MaxInt64 {
			return false
		}
		total = lo
	}
	return true
}

// ShapeString is the shape as NumPy prints it.
func (h Header) ShapeString() string {
	parts := make([]string, len(h.Shape))
	for i, d := range h.Shape {
		parts[i] = strconv.FormatInt(d, 10)
	}
	if len(parts) == 1 {
		return "(" + parts[0] + ",)"
	}
	return "(" + strings.Join(parts, ", ") + ")"
}

// ReadHeader reads the header at the start of r and returns it with its length in bytes, which
// is where the data begins.
func ReadHeader(r io.Reader) (Header, int64, error) { return readHeader(r, ParseDType) }

func readHeader(r io.Reader, dtype func(string) (DType, error)) (Header, int64, error) {
	var pre [12]byte
	if _, err := io.ReadFull(r, pre[:8]); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return Header{}, 0, ErrNotNPY
		}
		return Header{}, 0, err
	}
	if string(pre[:6]) != magic {
		return Header{}, 0, ErrNotNPY
	}
	var length, start int64
	switch pre[6] {
	case 1:
		if _, err := io.ReadFull(r, pre[8:10]); err != nil {
			return Header{}, 0, truncatedHeader(err)
		}
		length, start = int64(binary.LittleEndian.Uint16(pre[8:])), 10
	case 2, 3:
		if _, err := io.ReadFull(r, pre[8:12]); err != nil {
			return Header{}, 0, truncatedHeader(err)
		}
		length, start = int64(binary.LittleEndian.Uint32(pre[8:])), 12
	default:
		return Header{}, 0, fmt.Errorf("unknown .npy format version %d", pre[6])
	}
	if length > maxHeader {
		return Header{}, 0, fmt.Errorf("the .npy header claims %d bytes; at most %d are accepted",
			length, maxHeader)
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(r, text); err != nil {
		return Header{}, 0, truncatedHeader(err)
	}
	h, err := parseDict(string(text), dtype)
	if err != nil {
		return Header{}, 0, err
	}
	return h, start + length, nil
}

// readText reads a .npy file of one text, in NumPy's types S (bytes) and U (characters).
func readText(b []byte) (string, error) {
	h, start, err := readHeader(bytes.NewReader(b), textDType)
	if err != nil {
		return "", err
	}
	if b = b[start:]; h.Elements() != 1 || int64(len(b)) != h.Bytes() {
		return "", fmt.Errorf("one text is needed, shape %s is there", h.ShapeString())
	}
	if h.DType.Kind == 'U' { // four bytes a character
		if h.DType.Big {
			swap(b, 4)
		}
		var out []rune
		for ; len(b) > 0; b = b[4:] {
			out = append(out, rune(binary.LittleEndian.Uint32(b)))
		}
		b = []byte(string(out))
	}
	return strings.TrimRight(string(b), "\x00"), nil
}

// textDType reads a NumPy type string of text: S and the bytes, or U and the characters.
func textDType(s string) (DType, error) {
	kind := strings.TrimLeft(s, "<>=|")
	n := 0
	var err error
	if len(kind) > 1 {
		n, err = strconv.Atoi(kind[1:])
	}
	if err != nil || n < 1 || n > maxHeader || kind[0] != 'S' && kind[0] != 'U' {
		return DType{}, fmt.Errorf("element type %.20q is not text", s)
	}
	if kind[0] == 'U' {
		n *= 4
	}
	return DType{Kind: kind[0], Size: n, Big: s[0] == '>'}, nil
}

func truncatedHeader(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("truncated within the .npy header")
	}
	return err
}

// The pieces of the dictionary literal.
var (
	dictKey   = regexp.MustCompile(`^\s*(?:'(\w*)'|"(\w*)")\s*:\s*`)
	dictText  = regexp.MustCompile(`^(?:'([^']*)'|"([^"]*)")`)
	dictBool  = regexp.MustCompile(`^(True|False)`)
	dictShape = regexp.MustCompile(`^\(([^()]*)\)`)
)

// cut takes a piece off s, and returns the text in it.
func cut(piece *regexp.Regexp, s string) (text, rest string, ok bool) {
	m := piece.FindStringSubmatch(s)
	if m == nil {
		return "", s, false
	}
	return strings.Join(m[1:], ""), s[len(m[0]):], true
}

var errDict = errors.New(
	"the .npy header is not the dictionary that NumPy writes ('descr', 'fortran_order', 'shape')")

func parseDict(s string, dtype func(string) (DType, error)) (h Header, err error) {
	rest, more := strings.CutPrefix(strings.TrimSpace(s), "{")
	seen := map[string]bool{}
	for more {
		key, value, ok := cut(dictKey, rest)
		if !ok || seen[key] {
			return h, errDict
		}
		seen[key] = true
		if rest, err = h.entry(key, value, dtype); err != nil {
			return h, err
		}
		rest, more = strings.CutPrefix(strings.TrimSpace(rest), ",")
		end, ended := strings.CutPrefix(strings.TrimSpace(rest), "}")
		if !more && !ended {
			return h, errDict
		}
		if ended {
			rest, more = end, false
		}
	}
	if rest != "" || !seen["descr"] || !seen["fortran_order"] || !seen["shape"] {
		return h, errDict
	}
	if !h.fits() {
		return h, fmt.Errorf("the .npy shape %s is too large", h.ShapeString())
	}
	return h, nil
}

// entry reads the value of a key, and returns what is behind it.
func (h *Header) entry(key, value string, dtype func(string) (DType, error)) (rest string,
	err error) {
	var text string
	ok := false
	switch key {
	case "descr":
		if text, rest, ok = cut(dictText, value); !ok {
			return "", errors.New(
				"the .npy array holds records, not numbers; save each field as an array of its own")
		}
		h.DType, err = dtype(text)
	case "fortran_order":
		text, rest, ok = cut(dictBool, value)
		h.Fortran = text == "True"
	case "shape":
		if text, rest, ok = cut(dictShape, value); ok {
			h.Shape, err = parseShape(text)
		}
	}
	if !ok {
		err = errDict
	}
	return rest, err
}

func parseShape(text string) ([]int64, error) {
	shape := []int64{}
	text = strings.TrimSpace(text)
	for text != "" {
		size, rest, _ := strings.Cut(text, ",")
		size = strings.TrimSuffix(strings.TrimSpace(size), "L") // Python 2 wrote longs
		d, err := strconv.ParseInt(size, 10, 64)
		if err != nil || d < 0 || len(shape) == maxDims {
			return nil, fmt.Errorf("the .npy shape holds %.40q, not a size", size)
		}
		shape, text = append(shape, d), strings.TrimSpace(rest)
	}
	return shape, nil
}

// headerBytes is the fixed size of the headers that we write. A fixed size lets the row count
// be filled in when a stream ends; 128 holds any shape of one or two dimensions.
const headerBytes = 128

// EncodeHeader is a version 1 header of one or two dimensions, always 128 bytes long.
func EncodeHeader(h Header) ([]byte, error) {
	order := "False"
	if h.Fortran {
		order = "True"
	}
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }", h.DType, order,
		h.ShapeString())
	if len(dict)+11 > headerBytes {
		return nil, fmt.Errorf("shape %s does not fit the .npy header", h.ShapeString())
	}
	b := make([]byte, headerBytes)
	copy(b, magic)
	b[6] = 1
	binary.LittleEndian.PutUint16(b[8:], headerBytes-10)
	for i := 10 + copy(b[10:], dict); i < headerBytes-1; i++ {
		b[i] = ' '
	}
	b[headerBytes-1] = '\n'
	return b, nil
}
