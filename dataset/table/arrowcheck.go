package table

import (
	"encoding/binary"
	"errors"
	"os"
)

// The reader of Arrow allocates the lengths that a file claims, and follows a schema as deep as it
// goes; no program survives either. So all descriptions are checked first. They are tables of
// FlatBuffers, as Schema.fbs, File.fbs and Message.fbs of Arrow's format say.

// Fields of tables, by their place in the vtable.
const (
	footerSchema       = 1
	footerDictionaries = 2
	footerBatches      = 3
	messageKind        = 1
	messageHeader      = 2
	messageBody        = 3
	messageMeta        = 4
	schemaFields       = 1
	schemaMeta         = 2
	fieldChildren      = 5
	fieldMeta          = 6
	dictionaryRows     = 1
	rowsBuffers        = 2
	rowsViews          = 4

	kindSchema     = 1
	kindDictionary = 2
	continues      = 0xffffffff // stands before the length of a message
	deepestField   = 64
)

var errSchema = errors.New("a description in it leads outside itself, or has too many columns")

// flat is a buffer of FlatBuffers.
type flat struct {
	b      []byte
	fields int // that were seen
	bad    bool
}

// u32 reads a number; places outside are noted.
func (f *flat) u32(pos int) int {
	if pos < 0 || pos > len(f.b)-4 {
		f.bad = true
		return 0
	}
	return int(binary.LittleEndian.Uint32(f.b[pos:]))
}

func (f *flat) u16(pos int) int {
	if pos < 0 || pos > len(f.b)-2 {
		f.bad = true
		return 0
	}
	return int(binary.LittleEndian.Uint16(f.b[pos:]))
}

// place returns the place of a field of a table; 0: it is not there.
func (f *flat) place(table, field int) int {
	v := table - int(int32(f.u32(table)))
	if size := f.u16(v); 4+2*field >= size {
		return 0
	}
	if o := f.u16(v + 4 + 2*field); o != 0 {
		return table + o
	}
	return 0
}

// vector returns the place of a field's first element, and the number of elements.
func (f *flat) vector(table, field, size int) (first, n int) {
	p := f.place(table, field)
	if p == 0 {
		return 0, 0
	}
	p += f.u32(p)
	if n = f.u32(p); n > (len(f.b)-p-4)/size {
		f.bad = true
		n = 0
	}
	return p + 4, n
}

// columns goes through the fields that a field of a table lists.
func (f *flat) columns(table, list, meta, depth int) {
	f.vector(table, meta, 4)
	first, n := f.vector(table, list, 4)
	if f.fields += n; f.fields > maxColumns || depth > deepestField {
		f.bad = true
	}
	for i := 0; i < n && !f.bad; i++ {
		p := first + 4*i
		f.columns(p+f.u32(p), fieldChildren, fieldMeta, depth+1)
	}
}

// message goes through a message: a schema, or rows of a batch or dictionary.
func (f *flat) message() {
	root := f.u32(0)
	f.vector(root, messageMeta, 4)
	p := f.place(root, messageHeader)
	if p == 0 {
		return
	}
	p += f.u32(p)
	kind := 0
	if k := f.place(root, messageKind); k > 0 && k < len(f.b) {
		kind = int(f.b[k])
	}
	switch kind {
	case kindSchema:
		f.columns(p, schemaFields, schemaMeta, 0)
		return
	case kindDictionary:
		if p = f.place(p, dictionaryRows); p == 0 {
			return
		}
		p += f.u32(p)
	}
	// How many of the buffers the columns of views have.
	_, buffers := f.vector(p, rowsBuffers, 16)
	first, n := f.vector(p, rowsViews, 8)
	for i := 0; i < n && !f.bad; i++ {
		if f.u32(first+8*i) > buffers || f.u32(first+8*i+4) != 0 {
			f.bad = true
		}
	}
}

// read reads a part of the file.
func (f *flat) read(in *os.File, from, size, end int64) error {
	if from < 0 || size < 8 || size > min(end-from, maxFooter) {
		return errors.New("a part of it is outside the file")
	}
	if int64(cap(f.b)) < size {
		f.b = make([]byte, size)
	}
	f.b = f.b[:size]
	_, err := in.ReadAt(f.b, from)
	return err
}

// checkArrow goes through what describes the parts of a file or stream.
func checkArrow(in *os.File, stream bool) error {
	st, err := in.Stat()
	if err != nil {
		return err
	}
	f, end := &flat{}, st.Size()
	if stream {
		return f.checkStream(in, end)
	}
	const tail = 10 // a length, and ARROW1
	if err := f.read(in, end-tail, tail, end); err != nil {
		return err
	}
	size := int64(f.u32(0))
	if err := f.read(in, end-tail-size, size, end); err != nil {
		return err
	}
	root := f.u32(0)
	if p := f.place(root, footerSchema); p != 0 {
		f.columns(p+f.u32(p), schemaFields, schemaMeta, 0)
	}
	footer := *f
	f.b = nil
	for _, list := range []int{footerDictionaries, footerBatches} {
		first, n := footer.vector(root, list, 24)
		for i := 0; i < n && !footer.bad && !f.bad; i++ {
			block := footer.b[first+24*i:]
			from := int64(binary.LittleEndian.Uint64(block))
			size := int64(int32(binary.LittleEndian.Uint32(block[8:])))
			if err := f.read(in, from, size, end); err != nil {
				return err
			}
			if f.u32(0) == continues {
				f.b = f.b[4:]
			}
			f.b = f.b[4:]
			f.message()
		}
	}
	if footer.bad || f.bad {
		return errSchema
	}
	return nil
}

// checkStream goes through the messages of a stream. The reader meets its end, and what is cut.
func (f *flat) checkStream(in *os.File, end int64) error {
	for pos := int64(0); pos+8 <= end && !f.bad; {
		if err := f.read(in, pos, 8, end); err != nil {
			return err
		}
		size := int64(f.u32(4))
		if pos += 8; f.u32(0) != continues { // of Arrow before 0.15
			size, pos = int64(f.u32(0)), pos-4
		}
		if size == 0 {
			break
		}
		if err := f.read(in, pos, size, end); err != nil {
			return err
		}
		f.message()
		pos += size
		if p := f.place(f.u32(0), messageBody); p != 0 {
			if f.u32(p+4) > 1<<30 {
				f.bad = true
			}
			pos += int64(f.u32(p)) | int64(f.u32(p+4))<<32
		}
	}
	if f.bad {
		return errSchema
	}
	return nil
}
