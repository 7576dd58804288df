// Package pickle reads the few things that graph data sets keep in Python pickles: numbers,
// strings, lists, dictionaries, NumPy arrays and SciPy CSR matrices. A pickle is a program that may
// call anything; this reader knows the binary opcodes of protocols 2 to 4 and eight names, makes
// only its own types from them, and refuses the rest with the offset. Nothing is ever run. Each
// opcode is done once, so the steps are bounded by the input; what they allocate is charged to a
// budget, since a memo lets a few bytes stand for many; and nothing walks a value, since values can
// nest as deep as the file is long, and hold each other.
//
// A library does not serve here: nlpodyssey/gopickle 0.2.0 allocates what a length in the file says
// before it reads on, 8 GiB for a file of 12 bytes (BINBYTES8), and has no bound on values, memo or
// nesting.
package pickle

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"strings"

	"helios/dataset/npy"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
)

// MaxBytes is the largest file that Load reads.
const MaxBytes = 256 << 20

// maxValues bounds what a file of one-byte opcodes can make.
const maxValues = 1 << 24

// A pickle may allocate perByte for each of its bytes (an opcode of two bytes makes a value,
// the room for it on the stack, and its share of a list) and floor, or less where the caller has
// less.
const (
	perByte    = 64
	floor      = 16 << 20
	valueBytes = 32 // of a number in an interface, and the interface
	// A tuple, list or dictionary costs more than an opcode of a byte brings in, so that the levels
	// of nesting are bounded by the budget: Go's collector follows a chain of millions, again and
	// again, one link after the other.
	holderBytes = 192
)

// What Load returns is made of nil, bool, int64, float64, string and these types.
type (
	// Bytes is a Python 2 string or Python 3 bytes; it aliases the file's content.
	Bytes []byte
	// Tuple is a Python tuple.
	Tuple []any
	// List is a Python list.
	List struct{ Items []any }
	// Dict is a dictionary, also a defaultdict, in the order of the file; keys may repeat.
	Dict struct{ Keys, Values []any }
	// Array is a NumPy array.
	Array struct {
		DType   npy.DType
		Shape   []int64
		Fortran bool
		Data    []byte // Elements() values
	}
	// CSR is a SciPy matrix in compressed sparse rows; its parts agree with each other.
	CSR struct {
		Rows, Cols int64
		Indptr     []int64
		Indices    []int64
		Values     []float64
	}
)

// global is a name that a pickle may use.
type global int

const (
	fnReconstruct global = iota + 1
	fnEncode
	classArray
	classDType
	classCSR
	classDefaultDict
	classList
)

// The same things under the module names of old and new NumPy, SciPy and Python.
var globals = map[string]global{
	"numpy.core.multiarray _reconstruct":  fnReconstruct,
	"numpy._core.multiarray _reconstruct": fnReconstruct,
	"numpy ndarray":                       classArray,
	"numpy dtype":                         classDType,
	"scipy.sparse.csr csr_matrix":         classCSR,
	"scipy.sparse._csr csr_matrix":        classCSR,
	"collections defaultdict":             classDefaultDict,
	"__builtin__ list":                    classList,
	"builtins list":                       classList,
	"_codecs encode":                      fnEncode,
}

// Objects on their way: made by a call, filled by BUILD.
type (
	dtype struct {
		kind string // as in "i4"
		dt   npy.DType
		set  bool
	}
	array struct {
		Array
		set bool
	}
	csr struct {
		CSR
		set bool
	}
)

// Load reads the pickle in a file and takes at most memory bytes for it; 0 leaves that to the size
// of the file.
func Load(path string, memory int64) (any, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	if st.Size() > MaxBytes {
		return nil, errs.New(errs.Usage, "%s: %d bytes; pickles of at most %d are read", path,
			st.Size(), MaxBytes)
	}
	if memory > 0 && st.Size() >= memory {
		return nil, errs.New(errs.Usage, "%s: %d bytes, there is memory for %d", path,
			st.Size(), memory)
	}
	if err := container.Check(path, container.Pickle); err != nil {
		return nil, err
	}
	b, err := infile.Read(path, MaxBytes)
	if err != nil {
		return nil, err
	}
	if memory > 0 {
		memory -= int64(len(b))
	}
	return Parse(path, b, memory)
}

// Parse reads the pickle in b and allocates at most memory bytes for it, and never more than in
// proportion to len(b), which is also the limit where memory is 0; name is for errors.
func Parse(name string, b []byte, memory int64) (any, error) {
	return newParser(name, b, memory).run()
}

func newParser(name string, b []byte, memory int64) *parser {
	p := &parser{name: name, b: b, memo: map[uint32]any{}, left: int64(len(b))*perByte + floor}
	if memory > 0 {
		p.left = min(p.left, memory)
	}
	return p
}

// Describe returns a few words about a value, whatever it holds.
func Describe(v any) string {
	switch x := v.(type) {
	case nil:
		return "None"
	case bool, int64, float64:
		return fmt.Sprint(x)
	case string:
		return fmt.Sprintf("%.40q", x)
	case Bytes:
		return fmt.Sprintf("%d bytes", len(x))
	case Tuple:
		return fmt.Sprintf("a tuple of %d", len(x))
	case *List:
		return fmt.Sprintf("a list of %d", len(x.Items))
	case *Dict:
		return fmt.Sprintf("a dictionary of %d", len(x.Keys))
	case *Array, *array:
		return "an array"
	case *CSR, *csr:
		return "a csr_matrix"
	case *Tensor:
		return "a tensor"
	}
	return "a class"
}

// describeAll is Describe of the first few values.
func describeAll(vs []any) string {
	var words []string
	for _, v := range vs[:min(len(vs), 4)] {
		words = append(words, Describe(v))
	}
	if len(vs) > 4 {
		words = append(words, fmt.Sprintf("and %d more", len(vs)-4))
	}
	return "(" + strings.Join(words, ", ") + ")"
}

type parser struct {
	name   string
	torch  bool // the pickle is of a file of PyTorch
	b      []byte
	next   int // index of the next byte
	op     int // index of the current opcode
	stack  []any
	marks  []int
	memo   map[uint32]any
	values int
	left   int64 // bytes that may still be allocated
	err    error
}

// charge takes bytes off the budget; false where it has not that many.
func (p *parser) charge(bytes int64) bool {
	if p.err != nil || bytes > p.left {
		p.fail("the pickle takes more memory than %d times its size, or than there is", perByte)
		return false
	}
	p.left -= bytes
	return true
}

// str copies text.
func (p *parser) str(b []byte) string {
	if !p.charge(int64(len(b))) {
		return ""
	}
	return string(b)
}

// numbers charges for the numbers that an array is converted to.
func (p *parser) numbers(v any) bool {
	a, ok := v.(*array)
	return !ok || p.charge(8*a.Elements())
}

func (p *parser) fail(format string, a ...any) {
	if p.err == nil {
		p.err = errs.New(errs.Usage, "%s: offset %d: %w", p.name, p.op, fmt.Errorf(format, a...))
	}
}

// take returns the next n bytes.
func (p *parser) take(n uint64) []byte {
	if n > uint64(len(p.b)-p.next) {
		p.fail("the pickle ends in an opcode that needs %d more bytes: truncated",
			n-uint64(len(p.b)-p.next))
		return nil
	}
	p.next += int(n)
	return p.b[p.next-int(n) : p.next : p.next]
}

func (p *parser) u8() uint64 {
	if b := p.take(1); b != nil {
		return uint64(b[0])
	}
	return 0
}

func (p *parser) u32() uint32 {
	if b := p.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (p *parser) u64() uint64 {
	if b := p.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// line reads to the next newline.
func (p *parser) line() string {
	for i := p.next; i < len(p.b) && i < p.next+256; i++ {
		if p.b[i] == '\n' {
			s := string(p.b[p.next:i])
			p.next = i + 1
			return s
		}
	}
	p.fail("a name without an end of line")
	return ""
}

// value counts a value; false where there are too many.
func (p *parser) value() bool {
	if p.values++; p.values > maxValues {
		p.fail("more than %d values", maxValues)
		return false
	}
	return true
}

func (p *parser) push(v any) {
	if !p.value() {
		return
	}
	cost := int64(valueBytes)
	switch v.(type) {
	case Tuple, *List, *Dict:
		cost += holderBytes
	}
	if p.charge(cost) {
		p.stack = append(p.stack, v)
	}
}

func (p *parser) pop() any {
	n := len(p.stack)
	if n == 0 || len(p.marks) > 0 && p.marks[len(p.marks)-1] >= n {
		p.fail("the opcode takes a value from an empty stack")
		return nil
	}
	v := p.stack[n-1]
	p.stack = p.stack[:n-1]
	return v
}

func (p *parser) top() any {
	v := p.pop()
	if p.err == nil {
		p.stack = append(p.stack, v)
	}
	return v
}

// popMark returns what was pushed since the last mark.
func (p *parser) popMark() []any {
	if len(p.marks) == 0 {
		p.fail("the opcode needs a mark and there is none")
		return nil
	}
	m := p.marks[len(p.marks)-1]
	p.marks = p.marks[:len(p.marks)-1]
	if !p.charge(16 * int64(len(p.stack)-m)) {
		return nil
	}
	v := append([]any(nil), p.stack[m:]...)
	clear(p.stack[m:])
	p.stack = p.stack[:m]
	return v
}

func (p *parser) put(key uint32) {
	if v := p.top(); p.err == nil {
		if p.value() && p.charge(64) {
			p.memo[key] = v
		}
	}
}

func (p *parser) get(key uint32) {
	v, ok := p.memo[key]
	if !ok {
		p.fail("memo %d is used before it is set", key)
	}
	if p.value() && p.charge(valueBytes) {
		p.stack = append(p.stack, v)
	}
}

func (p *parser) global(name string) {
	if p.torch {
		p.torchGlobal(name)
		return
	}
	g, ok := globals[name]
	if !ok && p.err == nil {
		p.fail(
			"%.80q is not among the classes that this reader knows (NumPy arrays, SciPy csr_matrix, defaultdict of lists); save the data as .npy arrays and use \"import npy\"",
			name)
	}
	p.push(g)
}

func (p *parser) run() (any, error) {
	for p.err == nil {
		p.op = p.next
		if p.next >= len(p.b) {
			p.fail("the pickle ends without its STOP opcode: truncated")
			break
		}
		if c := p.u8(); c == '.' { // STOP
			v := p.pop()
			if p.err != nil {
				break
			}
			if p.next != len(p.b) || len(p.stack) > 0 {
				p.fail("%d bytes follow the end of the pickle, %d values are left over",
					len(p.b)-p.next, len(p.stack))
				break
			}
			return p.finished(v)
		} else {
			p.opcode(byte(c))
		}
	}
	return nil, p.err
}

// opcode does one step (Lib/pickletools.py of Python has the list).
func (p *parser) opcode(c byte) {
	if p.constant(c) || p.text(c) || p.container(c) || p.object(c) {
		return
	}
	what := "is not read here"
	if c >= '0' && c <= '}' {
		what = "is of the text protocols 0 and 1, or not read here"
	}
	p.fail("opcode %#02x %s; write the file again with pickle protocol 2", c, what)
}

// constant does the opcodes of numbers and of the protocol; false for others.
func (p *parser) constant(c byte) bool {
	switch c {
	case 0x80: // PROTO
		if v := p.u8(); p.err == nil && (v < 2 || v > 4) {
			p.fail("pickle protocol %d; protocols 2 to 4 are read", v)
		}
	case 0x95: // FRAME: how much to read ahead
		p.take(8)
	case 'N':
		p.push(nil)
	case 0x88:
		p.push(true)
	case 0x89:
		p.push(false)
	case 'K': // BININT1
		p.push(int64(p.u8()))
	case 'M': // BININT2
		if b := p.take(2); b != nil {
			p.push(int64(binary.LittleEndian.Uint16(b)))
		}
	case 'J': // BININT
		p.push(int64(int32(p.u32())))
	case 0x8a: // LONG1
		p.long(p.take(p.u8()))
	case 'G': // BINFLOAT, big endian
		if b := p.take(8); b != nil {
			p.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
		}
	default:
		return false
	}
	return true
}

// long pushes a whole number in two's complement.
func (p *parser) long(b []byte) {
	if len(b) > 8 {
		p.fail("a whole number of %d bytes; at most 8 are read", len(b))
		return
	}
	v := int64(0)
	for i := len(b) - 1; i >= 0; i-- {
		v = v<<8 | int64(b[i])
	}
	if len(b) > 0 {
		v = v << (64 - 8*len(b)) >> (64 - 8*len(b))
	}
	p.push(v)
}

// text does the opcodes of bytes and text; false for others.
func (p *parser) text(c byte) bool {
	switch c {
	case 'U', 'C': // SHORT_BINSTRING, SHORT_BINBYTES
		p.push(Bytes(p.take(p.u8())))
	case 'T', 'B': // BINSTRING, BINBYTES
		p.push(Bytes(p.take(uint64(p.u32()))))
	case 0x8e: // BINBYTES8
		p.push(Bytes(p.take(p.u64())))
	case 0x8c: // SHORT_BINUNICODE
		p.push(p.str(p.take(p.u8())))
	case 'X': // BINUNICODE
		p.push(p.str(p.take(uint64(p.u32()))))
	case 0x8d: // BINUNICODE8
		p.push(p.str(p.take(p.u64())))
	default:
		return false
	}
	return true
}

// container does the opcodes of marks, tuples, lists and dictionaries; false for others.
func (p *parser) container(c byte) bool {
	switch c {
	case '(':
		p.marks = append(p.marks, len(p.stack))
		p.value()
	case '0':
		p.pop()
	case ')':
		p.push(Tuple{})
	case 't':
		p.push(Tuple(p.popMark()))
	case 0x85, 0x86, 0x87: // TUPLE1, 2, 3
		t := make(Tuple, int(c-0x84))
		for i := len(t) - 1; i >= 0; i-- {
			t[i] = p.pop()
		}
		p.push(t)
	case ']':
		p.push(&List{})
	case 'a': // APPEND
		p.appendItems([]any{p.pop()})
	case 'e': // APPENDS
		p.appendItems(p.popMark())
	case '}':
		p.push(&Dict{})
	case 's': // SETITEM
		v := p.pop()
		p.setItems([]any{p.pop(), v})
	case 'u': // SETITEMS
		p.setItems(p.popMark())
	default:
		return false
	}
	return true
}

// appendItems adds items to the list on the stack.
func (p *parser) appendItems(items []any) {
	l, ok := p.top().(*List)
	if !ok {
		p.fail("items are added to something that is no list")
		return
	}
	if p.charge(32 * int64(len(items))) {
		l.Items = append(l.Items, items...)
	}
}

// setItems sets keys and values of the dictionary on the stack.
func (p *parser) setItems(items []any) {
	d, ok := p.top().(*Dict)
	if !ok || len(items)%2 != 0 {
		p.fail("entries are set in something that is no dictionary, or a key lacks its value")
		return
	}
	if !p.charge(32 * int64(len(items))) {
		return
	}
	for i := 0; i < len(items); i += 2 {
		d.Keys, d.Values = append(d.Keys, items[i]), append(d.Values, items[i+1])
	}
}

// object does the opcodes of the memo and of objects; false for others.
func (p *parser) object(c byte) bool {
	switch c {
	case 'q':
		p.put(uint32(p.u8()))
	case 'r':
		p.put(p.u32())
	case 0x94: // MEMOIZE
		p.put(uint32(len(p.memo)))
	case 'h':
		p.get(uint32(p.u8()))
	case 'j':
		p.get(p.u32())
	case 'c': // GLOBAL
		module := p.line()
		p.global(module + " " + p.line())
	case 0x93: // STACK_GLOBAL
		name, ok1 := p.pop().(string)
		module, ok2 := p.pop().(string)
		if !ok1 || !ok2 {
			p.fail("the name of a class is no string")
			return true
		}
		p.global(module + " " + name)
	case 'R', 0x81: // REDUCE, NEWOBJ
		args, ok1 := p.pop().(Tuple)
		fn, ok2 := p.pop().(global)
		if !ok1 || !ok2 {
			p.fail("something is called that is no known name")
			return true
		}
		p.call(fn, args)
	case 'b':
		p.build()
	case 'Q': // BINPERSID
		if !p.torch {
			return false
		}
		p.persistent()
	default:
		return false
	}
	return true
}

// call makes the object that fn stands for.
func (p *parser) call(fn global, args Tuple) {
	var made any
	switch {
	case p.torch:
		made = p.callTorch(fn, args)
	case fn == fnReconstruct && len(args) > 0 && args[0] == any(classArray):
		made = &array{} // (ndarray, (0,), b'b')
	case fn == classDType && len(args) > 0:
		if s, ok := asText(args[0]); ok && len(s) <= 8 {
			made = &dtype{kind: s} // ("i4", False, True)
		}
	case fn == classCSR && len(args) == 0:
		made = &csr{}
	case fn == classDefaultDict && (len(args) == 0 || len(args) == 1 && args[0] == any(classList)):
		made = &Dict{}
	case fn == classList && len(args) == 0:
		made = &List{}
	case fn == fnEncode && len(args) == 2:
		s, ok := args[0].(string)
		if code, _ := asText(args[1]); ok && (code == "latin1" || code == "latin-1") {
			p.encode(s)
			return
		}
	}
	if made == nil {
		p.fail("a known class is called with arguments that this reader does not expect")
		return
	}
	p.push(made)
}

// encode pushes the bytes of a text in Latin-1: so Python 3 writes bytes in protocol 2.
func (p *parser) encode(s string) {
	if !p.charge(int64(len(s))) { // a memo can encode one text again and again
		return
	}
	b := make(Bytes, 0, len(s))
	for _, r := range s {
		if r > 0xff {
			p.fail("character %q is not of latin-1", r)
			return
		}
		b = append(b, byte(r))
	}
	p.push(b)
}

func asText(v any) (string, bool) {
	switch s := v.(type) {
	case string:
		return s, true
	case Bytes:
		return string(s), true
	}
	return "", false
}

// build gives an object its state.
func (p *parser) build() {
	state := p.pop()
	switch o := p.top().(type) {
	case *dtype: // (3, "<", None, None, None, -1, -1, 0)
		t, ok := state.(Tuple)
		if !ok || len(t) < 2 {
			p.fail("the state of a dtype is no tuple")
			return
		}
		order, _ := asText(t[1])
		dt, err := npy.ParseDType(order + o.kind)
		if err != nil {
			p.fail("%w", err)
			return
		}
		o.dt, o.set = dt, true
	case *array: // (1, shape, dtype, is Fortran, data)
		if err := o.build(state); err != nil {
			p.fail("%w", err)
		}
	case *csr:
		// All three arrays are converted, each time that a matrix is made of them.
		if d, ok := state.(*Dict); ok {
			if !p.charge(64 * int64(len(d.Keys))) {
				return
			}
			for _, v := range d.Values {
				if !p.numbers(v) {
					return
				}
			}
		}
		if err := o.build(state); err != nil {
			p.fail("%w", err)
		}
	case *Dict: // OrderedDict of a module's parameters, with their versions
		if _, ok := state.(*Dict); !ok || !p.torch {
			p.fail("an object gets a state that has none")
		}
	default:
		p.fail("an object gets a state that has none")
	}
}

func (a *array) build(state any) error {
	if a.set {
		return fmt.Errorf("an array gets its content twice")
	}
	t, ok := state.(Tuple)
	if !ok || len(t) != 5 {
		return fmt.Errorf("the state of an array is not (version, shape, dtype, order, data)")
	}
	shape, ok1 := t[1].(Tuple)
	d, ok2 := t[2].(*dtype)
	fortran, ok3 := t[3].(bool)
	data, ok4 := t[4].(Bytes)
	if !ok1 || !ok2 || !d.set || !ok3 || !ok4 {
		return fmt.Errorf(
			"the state of an array is not (version, shape, dtype, order, data) of plain numbers")
	}
	size := int64(d.dt.Size)
	if len(shape) > 32 { // NumPy's own limit was 32
		return fmt.Errorf("an array has %d dimensions", len(shape))
	}
	for _, v := range shape {
		n, ok := v.(int64)
		if !ok || n < 0 || n > math.MaxInt32 || size > math.MaxInt32 {
			return fmt.Errorf("an array has shape %s", describeAll(shape))
		}
		a.Shape = append(a.Shape, n)
		size *= n
	}
	if size != int64(len(data)) {
		return fmt.Errorf(
			"an array of shape %v and %d bytes an element has %d bytes of data, not %d", a.Shape,
			d.dt.Size, len(data), size)
	}
	a.DType, a.Fortran, a.Data, a.set = d.dt, fortran, data, true
	return nil
}

func (m *csr) build(state any) error {
	d, ok := state.(*Dict)
	if !ok || m.set {
		return fmt.Errorf("the state of a csr_matrix is no dictionary, or it gets two")
	}
	part := map[string]any{}
	for i, k := range d.Keys {
		s, ok := asText(k)
		if !ok {
			return fmt.Errorf("the state of a csr_matrix has a key that is no string")
		}
		part[s] = d.Values[i]
	}
	shape, ok := part["_shape"].(Tuple)
	if !ok {
		shape, ok = part["shape"].(Tuple)
	}
	if !ok || len(shape) != 2 {
		return fmt.Errorf("a csr_matrix has no shape of two numbers")
	}
	var ok1, ok2 bool
	m.Rows, ok1 = shape[0].(int64)
	m.Cols, ok2 = shape[1].(int64)
	if !ok1 || !ok2 || m.Rows < 0 || m.Cols < 0 {
		return fmt.Errorf("a csr_matrix has shape %s", describeAll(shape))
	}
	var err error
	if m.Indptr, err = ints(part, "indptr"); err != nil {
		return err
	}
	if m.Indices, err = ints(part, "indices"); err != nil {
		return err
	}
	a, ok := part["data"].(*array)
	if !ok || !a.set {
		return fmt.Errorf("a csr_matrix has no array %q", "data")
	}
	if m.Values, err = a.Floats(); err != nil {
		return err
	}
	err = m.check()
	m.set = err == nil
	return err
}

// check holds the parts of a matrix against each other.
func (m *CSR) check() error {
	if int64(len(m.Indptr)) != m.Rows+1 || len(m.Indices) != len(m.Values) {
		return fmt.Errorf("a csr_matrix of %d rows has %d row offsets, %d columns and %d values",
			m.Rows, len(m.Indptr), len(m.Indices), len(m.Values))
	}
	last := int64(0)
	for r, offset := range m.Indptr {
		if r == 0 && offset != 0 || offset < last || offset > int64(len(m.Indices)) {
			return fmt.Errorf("row offset %d of a csr_matrix is %d: offsets must rise from 0 to %d",
				r, offset, len(m.Indices))
		}
		last = offset
	}
	if last != int64(len(m.Indices)) {
		return fmt.Errorf("the row offsets of a csr_matrix end at %d of %d values", last,
			len(m.Indices))
	}
	for i, c := range m.Indices {
		if c < 0 || c >= m.Cols {
			return fmt.Errorf("value %d of a csr_matrix is in column %d of %d", i, c, m.Cols)
		}
	}
	return nil
}

func ints(part map[string]any, name string) ([]int64, error) {
	a, ok := part[name].(*array)
	if !ok || !a.set {
		return nil, fmt.Errorf("a csr_matrix has no array %q", name)
	}
	return a.Ints()
}

// finished turns the objects that were on their way into what callers see.
func (p *parser) finished(v any) (any, error) {
	switch o := v.(type) {
	case *array:
		if o.set {
			return &o.Array, nil
		}
	case *csr:
		if o.set {
			return &o.CSR, nil
		}
	case *dtype, *storage, torchType, global:
	default:
		return v, nil
	}
	p.fail("the object has no content")
	return nil, p.err
}

// Elements is the number of elements of the array.
func (a *Array) Elements() int64 { return int64(len(a.Data) / max(a.DType.Size, 1)) }

// Floats returns the elements in the order of the data.
func (a *Array) Floats() ([]float64, error) { return convert(a, (*npy.Reader).Floats) }

// Ints returns the elements in the order of the data, which must be integers.
func (a *Array) Ints() ([]int64, error) { return convert(a, (*npy.Reader).Ints) }

func convert[T any](a *Array, read func(*npy.Reader, []T) (int, error)) ([]T, error) {
	r := npy.ReaderOf("an array", a.DType, a.Data)
	out := make([]T, a.Elements())
	for rest := out; len(rest) > 0; {
		n, err := read(r, rest[:min(len(rest), 8<<10)])
		if err != nil {
			return nil, err
		}
		rest = rest[n:]
	}
	return out, nil
}
