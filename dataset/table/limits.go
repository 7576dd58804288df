package table

import (
	"bytes"

	"helios/internal/errs"
)

// checkFirst refuses a first line that no table begins with. A line of separators must not take all
// memory.
func (f *textFile) checkFirst(text []byte, line int64) error {
	if n := bytes.Count(text, []byte{SeparatorOf(text)}); n >= maxColumns {
		return f.bad(line, "%d columns; at most %d are read", n+1, maxColumns)
	}
	if bytes.IndexByte(text, '\r') >= 0 && bytes.IndexByte(text, '"') < 0 {
		return f.bad(line, `lines end in carriage returns alone; write line feeds, with tr '\r' '\n'`)
	}
	return nil
}

// noZero refuses a byte of 0 in what was read behind the first bytes of rest.
func (r *records) noZero(first int) error {
	i := bytes.IndexByte(r.rest[first:], 0)
	if i < 0 {
		return nil
	}
	return errs.New(errs.Usage, "%s:%d: a byte of 0, which is in no text; write the file in UTF-8", r.path,
		r.line+1+int64(bytes.Count(r.rest[:first+i], []byte{'\n'})))
}
