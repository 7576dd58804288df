// Package debian reads Debian package indexes (the Packages files of an archive, as apt keeps
// them) and turns them into a graph: packages, the dependencies between them, and words of
// their descriptions. See deb-control(5) and Debian Policy chapters 5 and 7.
package debian

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"unsafe"

	"helios/internal/container"
	"helios/internal/errs"
)

// Package holds what a stanza says about one binary package.
type Package struct {
	Name        string
	Version     string
	Source      string // empty when it is called like the package
	Section     string // without the archive area: "games", also for "contrib/games"
	Description string // synopsis, and the long text after a newline where the index has it
	// Relations are the contents of the fields in RelationFields, "" where absent.
	Relations       [len(RelationFields)]string
	Conflicts       [2]string // Conflicts and Breaks
	Maintainer, Tag string    // Tag has debtags
}

// SourceName is the name of the source that the package is built from.
func (p *Package) SourceName() string {
	name, _, _ := strings.Cut(p.Source, " ") // "name (version)"
	return cmp.Or(name, p.Name)
}

// Tags are the package's debtags, each once: "role::{app-data,data}, use::editing" gives
// role::app-data, role::data and use::editing.
func (p *Package) Tags() (all []string) {
	for text := p.Tag; text != ""; {
		var part string
		end := strings.IndexByte(text, ',')
		if from := strings.IndexByte(text, '{'); from >= 0 && end > from {
			if to := strings.IndexByte(text, '}'); to > from {
				end = to + 1
			}
		}
		if end < 0 || end >= len(text) {
			part, text = text, ""
		} else {
			part, text = text[:end], text[end:]
			text = strings.TrimLeft(text, ", \n\t")
		}
		facet, list, several := strings.Cut(part, "{")
		if !several {
			facet, list = "", part
		}
		for one := range strings.SplitSeq(strings.Trim(list, "}"), ",") {
			if one = strings.TrimSpace(one); one != "" {
				all = append(all, strings.TrimSpace(facet)+one)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Bytes is about the memory that a package takes.
func (p *Package) Bytes() int64 {
	n := int64(unsafe.Sizeof(*p)) + int64(len(p.Name)+len(p.Version)+len(p.Source)+
		len(p.Section)+len(p.Description)+len(p.Conflicts[0])+len(p.Conflicts[1])+
		len(p.Maintainer)+len(p.Tag))
	for _, r := range p.Relations {
		n += int64(len(r))
	}
	return n
}

// RelationFields are the dependencies that become edges.
var RelationFields = [...]string{"Depends", "Pre-Depends", "Recommends", "Suggests", "Enhances"}

// maxStanzaLine bounds a line of an index, and a field with its continuation lines; the longest of
// Debian 12 has 30 KiB.
const maxStanzaLine = 4 << 20

// Parse reads an index and calls fn for each package. Errors name the line.
func Parse(r io.Reader, fn func(Package) error) error {
	x := stanzas{br: bufio.NewReaderSize(r, 256<<10), fn: fn}
	for {
		text, last, err := x.read()
		if err != nil {
			return err
		}
		if len(text) > 0 || !last {
			x.line++
			if err := x.take(bytes.TrimRight(text, "\r\n")); err != nil {
				return err
			}
		}
		if last {
			return x.end()
		}
	}
}

// stanzas parses the stanzas of an index.
type stanzas struct {
	br   *bufio.Reader
	fn   func(Package) error
	line int
	long []byte // a line of more than br's buffer

	p      Package
	open   bool    // p has a field
	field  string  // the last
	target *string // where it goes; nil: it is not needed
	more   []byte  // continuation lines of it
}

// read reads a line.
func (x *stanzas) read() (text []byte, last bool, err error) {
	text, err = x.br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		x.long = append(x.long[:0], text...)
		for errors.Is(err, bufio.ErrBufferFull) && len(x.long) <= maxStanzaLine {
			text, err = x.br.ReadSlice('\n')
			x.long = append(x.long, text...)
		}
		text = x.long
	}
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, false, fmt.Errorf("line %d: longer than %d bytes; is it a package index?",
			x.line+1, maxStanzaLine)
	case errors.Is(err, io.EOF):
		return text, true, nil
	case err != nil:
		return nil, false, fmt.Errorf("line %d: %w", x.line+1, err)
	}
	return text, false, nil
}

// take takes a line.
func (x *stanzas) take(text []byte) error {
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		return x.end()
	case text[0] == '#':
		return nil
	case text[0] == ' ' || text[0] == '\t':
		return x.goOn(text)
	}
	name, value, ok := bytes.Cut(text, []byte{':'})
	if !ok || len(name) == 0 || bytes.ContainsAny(name, " \t") {
		return fmt.Errorf("line %d: %q is no \"Field: value\"; is it a package index?", x.line,
			clip(text))
	}
	x.join()
	x.open = true
	x.field = string(name)
	if x.target = x.p.field(x.field); x.target != nil {
		*x.target = string(bytes.TrimSpace(value))
		if x.field == "Section" {
			x.p.Section = x.p.Section[strings.LastIndexByte(x.p.Section, '/')+1:]
		}
	}
	return nil
}

// goOn takes a continuation line.
func (x *stanzas) goOn(text []byte) error {
	if x.field == "" {
		return fmt.Errorf("line %d: a continuation without a field; is it a package index?", x.line)
	}
	if x.target == nil {
		return nil
	}
	x.more = append(append(x.more, '\n'), bytes.TrimSpace(text)...)
	if len(x.more) > maxStanzaLine {
		return fmt.Errorf("line %d: the field %s is longer than %d bytes; is it a package index?",
			x.line, clip([]byte(x.field)), maxStanzaLine)
	}
	return nil
}

// join adds the continuation lines to their field.
func (x *stanzas) join() {
	if x.target != nil && len(x.more) > 0 {
		*x.target += string(x.more)
	}
	x.more = x.more[:0]
}

// end ends a stanza.
func (x *stanzas) end() error {
	x.join()
	if !x.open {
		return nil
	}
	if x.p.Name == "" {
		return fmt.Errorf(
			"line %d: a stanza without Package field ends here; is it a package index?", x.line)
	}
	err := x.fn(x.p)
	x.p, x.open, x.target, x.field = Package{}, false, nil, ""
	return err
}

func clip(b []byte) string {
	if len(b) > 40 {
		return string(b[:40]) + "…"
	}
	return string(b)
}

func (p *Package) field(name string) *string {
	switch name {
	case "Package":
		return &p.Name
	case "Version":
		return &p.Version
	case "Source":
		return &p.Source
	case "Section":
		return &p.Section
	case "Description", "Description-en":
		return &p.Description
	case "Conflicts":
		return &p.Conflicts[0]
	case "Breaks":
		return &p.Conflicts[1]
	case "Maintainer":
		return &p.Maintainer
	case "Tag":
		return &p.Tag
	}
	for i, f := range RelationFields {
		if name == f {
			return &p.Relations[i]
		}
	}
	return nil
}

// Targets lists the package names in a relation field, all alternatives, without versions,
// architectures and build profiles: "a (>= 1) | b:any [amd64] <!nocheck>, c" gives a, b, c.
func Targets(relation string) []string {
	var names []string
	for _, part := range strings.FieldsFunc(relation,
		func(r rune) bool { return r == ',' || r == '|' }) {
		part = strings.TrimSpace(part)
		if i := strings.IndexAny(part, " \t\n(:[<"); i >= 0 {
			part = part[:i]
		}
		if part != "" {
			names = append(names, part)
		}
	}
	return names
}

// Open opens an index, plain or compressed, by its content.
func Open(path string) (io.ReadCloser, error) { return container.OpenText(path) }

// ListsDir is the folder of the indexes that apt has downloaded (Dir::State::lists).
const ListsDir = "/var/lib/apt/lists"

// FindLists lists the package indexes in a folder, sorted by name.
func FindLists(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	var files []string
	for _, e := range entries {
		name := e.Name()
		base := name
		switch ext := filepath.Ext(name); ext {
		case ".gz", ".lz4", ".xz":
			base = strings.TrimSuffix(name, ext)
		}
		if e.Type().IsRegular() && (base == "Packages" || strings.HasSuffix(base, "_Packages")) {
			files = append(files, filepath.Join(dir, name))
		}
	}
	sort.Strings(files)
	return files, nil
}

// CompareVersions orders versions as dpkg does (Debian Policy 5.6.12): negative when a is
// older than b.
func CompareVersions(a, b string) int {
	split := func(v string) (epoch, upstream, revision string) {
		if e, rest, ok := strings.Cut(v, ":"); ok {
			epoch, v = e, rest
		}
		if i := strings.LastIndexByte(v, '-'); i >= 0 {
			return epoch, v[:i], v[i+1:]
		}
		return epoch, v, ""
	}
	ea, ua, ra := split(a)
	eb, ub, rb := split(b)
	for _, c := range []int{compareDigits(ea, eb), comparePart(ua, ub), comparePart(ra, rb)} {
		if c != 0 {
			return c
		}
	}
	return 0
}

// comparePart alternates between runs of non-digits and of digits. Letters sort before all
// other characters, and a tilde before everything, even the end.
func comparePart(a, b string) int {
	for a != "" || b != "" {
		for digits(a) == 0 && a != "" || digits(b) == 0 && b != "" {
			if c := order(a) - order(b); c != 0 {
				return c
			}
			a, b = a[1:], b[1:] // equal orders other than 0 mean equal characters
		}
		na, nb := digits(a), digits(b)
		if c := compareDigits(a[:na], b[:nb]); c != 0 {
			return c
		}
		a, b = a[na:], b[nb:]
	}
	return 0
}

// order is the place of the first character among non-digits.
func order(s string) int {
	if s == "" || s[0] >= '0' && s[0] <= '9' {
		return 0
	}
	c := int(s[0])
	switch {
	case c == '~':
		return -1
	case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z':
		return c
	}
	return c + 256
}

// digits counts the digits at the beginning.
func digits(s string) (n int) {
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}

// compareDigits compares numbers of any length; "" is 0.
func compareDigits(a, b string) int {
	a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
	if len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}
