package table

import (
	"encoding/binary"
	"errors"
)

// thrift reads the compact protocol of Thrift, which the footers and page headers of Parquet are in
// (thrift-compact-protocol.md). Nothing is allocated that the text does not hold: a list may claim
// any length. After an error all reads give zeros.
type thrift struct {
	b   []byte
	p   int
	err error
}

// errThriftEnd says that the text ends within a value.
var errThriftEnd = errors.New("its description ends early")

var errThrift = errors.New("its description makes no sense")

// The types of values of the protocol.
const (
	thriftTrue, thriftFalse                        = 1, 2
	thriftDouble, thriftBinary                     = 7, 8
	thriftList, thriftSet, thriftMap, thriftStruct = 9, 10, 11, 12
)

func (t *thrift) fail(err error) {
	if t.err == nil {
		t.err = err
	}
	t.p = len(t.b)
}

func (t *thrift) byte() byte {
	if t.p >= len(t.b) {
		t.fail(errThriftEnd)
		return 0
	}
	t.p++
	return t.b[t.p-1]
}

func (t *thrift) uvarint() uint64 {
	v, n := binary.Uvarint(t.b[t.p:])
	switch {
	case n == 0:
		t.fail(errThriftEnd)
		return 0
	case n < 0:
		t.fail(errThrift)
		return 0
	}
	t.p += n
	return v
}

// int reads an i16, i32 or i64.
func (t *thrift) int() int64 {
	v := t.uvarint()
	return int64(v>>1) ^ -int64(v&1)
}

func (t *thrift) bytes() []byte {
	n := t.uvarint()
	if t.err != nil || n > uint64(len(t.b)-t.p) {
		t.fail(errThriftEnd)
		return nil
	}
	t.p += int(n)
	return t.b[t.p-int(n) : t.p]
}

// each calls fn with the fields of a struct; fn reads a field's value, or returns false to have it
// left out. The value of a bool is in its type.
func (t *thrift) each(fn func(id int, kind byte) bool) { t.within(fn, 0) }

func (t *thrift) within(fn func(id int, kind byte) bool, depth int) {
	id := 0
	for t.err == nil {
		head := t.byte()
		kind := head & 15
		if kind == 0 {
			return
		}
		if head>>4 != 0 {
			id += int(head >> 4)
		} else {
			id = int(t.int())
		}
		if fn == nil || !fn(id, kind) {
			t.skip(kind, depth+1)
		}
	}
}

// list reads the head of a list.
func (t *thrift) list() (n int, kind byte) {
	head := t.byte()
	size := uint64(head >> 4)
	if size == 15 {
		size = t.uvarint()
	}
	if size > uint64(len(t.b)-t.p) { // an element takes a byte, at least
		t.fail(errThriftEnd)
		return 0, 0
	}
	return int(size), head & 15
}

// structs calls fn for each struct of a list.
func (t *thrift) structs(fn func()) bool {
	n, kind := t.list()
	if t.err == nil && n > 0 && kind != thriftStruct {
		t.fail(errThrift)
	}
	for i := 0; i < n && t.err == nil; i++ {
		fn()
	}
	return true
}

// skip leaves a value out.
func (t *thrift) skip(kind byte, depth int) {
	if depth > 32 {
		t.fail(errThrift)
		return
	}
	switch kind {
	case thriftTrue, thriftFalse:
	case 3:
		t.byte()
	case 4, 5, 6:
		t.uvarint()
	case thriftDouble:
		for range 8 {
			t.byte()
		}
	case thriftBinary:
		t.bytes()
	case thriftList, thriftSet:
		n, of := t.list()
		for i := 0; i < n && t.err == nil; i++ {
			if of == thriftTrue || of == thriftFalse {
				t.byte()
			} else {
				t.skip(of, depth+1)
			}
		}
	case thriftMap:
		n := t.uvarint()
		if n == 0 {
			return
		}
		kinds := t.byte()
		for i := uint64(0); i < n && t.err == nil; i++ {
			t.skip(kinds>>4, depth+1)
			t.skip(kinds&15, depth+1)
		}
	case thriftStruct:
		t.within(nil, depth)
	default:
		t.fail(errThrift)
	}
}
