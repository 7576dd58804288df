package table

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"helios/internal/errs"
)

// Lines of JSON: an object a line, whose members are the columns. Numbers and texts are cells of
// Text, arrays lists of them; a column is one of lists where a line of the first block has one.

// openJSON finds the columns of lines of JSON; first is the first.
func openJSON(f *textFile, first []byte, r *records) (file, error) {
	f.json, f.skip = true, f.skip-1
	places := map[string]int{}
	rest, _, err := r.block(false)
	if err != nil {
		return nil, err
	}
	line := r.line - int64(bytes.Count(rest, []byte{'\n'}))
	for text := range bytes.Lines(append(append(bytes.Clone(first), '\n'), rest...)) {
		if text = bytes.TrimSpace(text); len(text) > 0 {
			if err := members(text, func(name string, v json.RawMessage) error {
				i, ok := places[name]
				if !ok {
					if i = len(f.names); i == maxColumns {
						return fmt.Errorf("more than %d columns", maxColumns)
					}
					places[name] = i
					f.names = append(f.names, Field{Name: name})
				}
				f.names[i].List = f.names[i].List || v[0] == '['
				return nil
			}); err != nil {
				return nil, f.bad(line, "%w", err)
			}
		}
		line++
	}
	if len(f.names) == 0 {
		return nil, errs.New(errs.Usage, "%s: the objects have no members", f.path)
	}
	return f, nil
}

var errObject = errors.New("the line is no JSON object")

// members calls fn with the members of an object.
func members(text []byte, fn func(name string, v json.RawMessage) error) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errObject
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return fmt.Errorf("%w: %w", errObject, err)
		}
		name, ok := t.(string)
		if !ok {
			return errObject
		}
		var v json.RawMessage
		if err := d.Decode(&v); err != nil {
			return fmt.Errorf("member %s: %w", Brief(name), err)
		}
		if err := fn(name, v); err != nil {
			return fmt.Errorf("member %s: %w", Brief(name), err)
		}
	}
	if _, err := d.Token(); err != nil {
		return fmt.Errorf("%w: %w", errObject, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("text behind the object")
	}
	return nil
}

// parseJSON fills a batch with the rows of a text.
func (f *textFile) parseJSON(b *Batch, text []byte, take []int, _ bool) error {
	b.Columns = make([]Column, len(take))
	places := map[string]int{}
	for i := range f.names {
		places[f.names[i].Name] = -1
	}
	for i, k := range take {
		c := &b.Columns[i]
		*c = Column{Name: f.names[k].Name, Offsets: []int{0}}
		if f.names[k].List {
			c.Kind, c.Values = List, &Column{Offsets: []int{0}}
		}
		places[c.Name] = i
	}
	line := b.Line - 1
	seen := make([]bool, len(take))
	for text := range bytes.Lines(text) {
		line++
		if text = bytes.TrimSpace(text); len(text) == 0 {
			if b.lines == nil {
				for i := range b.Rows {
					b.lines = append(b.lines, b.Line+int64(i))
				}
				b.lines = append(make([]int64, 0, len(b.lines)+1), b.lines...)
			}
			continue
		}
		clear(seen)
		if err := members(text, func(name string, v json.RawMessage) error {
			i, ok := places[name]
			switch {
			case !ok:
				return errors.New("the first lines have no such member; all columns must appear there")
			case i < 0:
				return nil
			case seen[i]:
				return errors.New("stands twice in the line")
			}
			seen[i] = true
			return b.Columns[i].json(v, b.Rows)
		}); err != nil {
			return f.bad(line, "%w", err)
		}
		for i := range seen {
			if !seen[i] {
				if err := b.Columns[i].json(json.RawMessage("null"), b.Rows); err != nil {
					return err
				}
			}
		}
		if b.lines != nil {
			b.lines = append(b.lines, line)
		}
		b.Rows++
	}
	return nil
}

// json adds a value as a cell.
func (c *Column) json(v json.RawMessage, row int) error {
	list := v[0] == '['
	switch {
	case string(v) == "null":
		c.Offsets = append(c.Offsets, c.Offsets[len(c.Offsets)-1])
		c.miss(row)
		return nil
	case v[0] == '{':
		return errors.New("an object within an object is not read")
	case list != (c.Kind == List):
		return errors.New("some lines have an array and some have none")
	case !list:
		cell := []byte(v)
		if v[0] == '"' {
			var s string
			if err := json.Unmarshal(v, &s); err != nil {
				return err
			}
			cell = []byte(s)
		}
		c.text(cell, row)
		return nil
	}
	var all []json.RawMessage
	if err := json.Unmarshal(v, &all); err != nil {
		return err
	}
	n := c.Offsets[len(c.Offsets)-1]
	for i, x := range all {
		if err := c.Values.json(x, n+i); err != nil {
			return err
		}
	}
	c.Offsets = append(c.Offsets, n+len(all))
	if c.Missing != nil {
		c.Missing = append(c.Missing, false)
	}
	return nil
}
