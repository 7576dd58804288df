package table

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/work"
)

// Options say how files are read. The zero value finds out everything.
type Options struct {
	// Columns are those that are decoded, in this order; nil: all, in the order of the files.
	Columns []string
	// Header is "yes" or "no" where the first line of text files does or does not name the columns;
	// "": it does, and a line that holds numbers is refused. Columns without names are 1, 2, …
	Header string
	// Memory bounds the bytes that a piece of a file may take that states its own size: at least
	// 64 MiB; 0: 256 MiB. Columns of a Parquet file hold at most three eighths of it together.
	Memory int64
	// Progress hears of bytes read; may be nil.
	Progress work.Progress
}

// Field is a column of a source.
type Field struct {
	Name string
	Kind Kind // of Values' cells where it is a List
	List bool
	why  string // the column cannot be read
}

// Source is a table: one file, or several with the same columns, one after the other.
type Source struct {
	Files  []string // in the order in which they are read
	Fields []Field  // all that there are
	Size   int64    // bytes of the files
	o      Options
	take   []int // of Fields, those that are decoded
	files  []file
}

// file is an opened table of one kind. Its methods may be called again, and those of its readers
// from one goroutine at a time.
type file interface {
	fields() []Field
	// rows is the number of rows where the file states it, or else -1.
	rows() int64
	// read begins to read the columns of fields.
	read(take []int) (reader, error)
}

// reader reads a file from its start.
type reader interface {
	// next returns how to decode the next rows, which other goroutines may do; nil at the end.
	next() (func() (*Batch, error), error)
	// done is the number of bytes of the file that next has come to.
	done() int64
	close() error
}

// batchRows is about the number of rows of a batch.
const batchRows = 1 << 16

// defaultMemory is Options.Memory where it is 0, leastMemory the least that it stands for.
const (
	defaultMemory = 256 << 20
	leastMemory   = 64 << 20
)

// Open opens the files that patterns name: files, folders, whose files are parts, and patterns as
// filepath.Match has them. Parts are in the order of their names, numbers in these by value.
func Open(patterns []string, o Options) (*Source, error) {
	o.Memory = max(cmp.Or(o.Memory, defaultMemory), leastMemory)
	s := &Source{o: o}
	for _, p := range patterns {
		files, err := expand(p)
		if err != nil {
			return nil, err
		}
		s.Files = append(s.Files, files...)
	}
	for _, path := range s.Files {
		f, err := openFile(path, o)
		if err != nil {
			return nil, err
		}
		if err := s.add(path, f); err != nil {
			return nil, err
		}
	}
	if len(s.Files) == 0 {
		return nil, errs.New(errs.Usage, "no file of a table is named")
	}
	return s, s.choose(o.Columns)
}

// expand lists the files that a pattern names.
func expand(pattern string) (files []string, err error) {
	st, err := os.Stat(pattern)
	switch {
	case err == nil && !st.IsDir():
		return []string{pattern}, nil
	case err == nil:
		entries, err := os.ReadDir(pattern)
		if err != nil {
			return nil, errs.With(errs.Usage, err)
		}
		for _, e := range entries {
			// "_SUCCESS" and ".part.crc" are of Hadoop.
			if n := e.Name(); !strings.HasPrefix(n, ".") && !strings.HasPrefix(n, "_") && !e.IsDir() {
				files = append(files, filepath.Join(pattern, n))
			}
		}
		if len(files) == 0 {
			return nil, errs.New(errs.Usage, "%s holds no files", pattern)
		}
	case !strings.ContainsAny(pattern, "*?["):
		return nil, errs.New(errs.Usage, "%w; name a file, a folder of parts or a pattern", err)
	default:
		if files, err = filepath.Glob(pattern); err != nil {
			return nil, errs.New(errs.Usage, "%s: %w", pattern, err)
		}
		files = slices.DeleteFunc(files, func(f string) bool {
			st, err := os.Stat(f)
			return err == nil && st.IsDir()
		})
		if len(files) == 0 {
			return nil, errs.New(errs.Usage, "%s: no file has such a name", pattern)
		}
	}
	slices.SortFunc(files, natural)
	return files, nil
}

// natural compares names, and the numbers in them by value: part-2 comes before part-10.
func natural(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		nx, ny := digits(x), digits(y)
		if nx > 0 && ny > 0 {
			p, q := strings.TrimLeft(x[:nx], "0"), strings.TrimLeft(y[:ny], "0")
			if c := cmp.Or(cmp.Compare(len(p), len(q)), strings.Compare(p, q)); c != 0 {
				return c
			}
			x, y = x[nx:], y[ny:]
			continue
		}
		if x[0] != y[0] {
			return cmp.Compare(x[0], y[0])
		}
		x, y = x[1:], y[1:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(a, b))
}

func digits(s string) int {
	return len(s) - len(strings.TrimLeft(s, "0123456789"))
}

// openFile opens a file by its content.
func openFile(path string, o Options) (file, error) {
	k, err := container.FileOf(path)
	if err != nil {
		return nil, err
	}
	var f file
	err = safely(path, func() (err error) {
		switch k.Kind {
		case container.Parquet:
			f, err = openParquet(path, o)
		case container.Arrow, container.ArrowStream:
			f, err = openArrow(path, k.Kind == container.ArrowStream, o)
		default:
			f, err = openText(path, o)
		}
		return err
	})
	return f, err
}

// safely calls fn and makes an error of a panic: a damaged file must not end the program.
func safely(path string, fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = damaged(path, fmt.Errorf("%v", p))
			if os.Getenv("HELIOS_TRACE") != "" {
				err = fmt.Errorf("%w\n%s", err, debug.Stack())
			}
		}
	}()
	return fn()
}

// tooLarge is the error of a part of a file that the budget has no room for.
func tooLarge(format string, args ...any) error {
	return errs.New(errs.Usage, format+": {memory} gives too little for it; give more", args...)
}

// damaged says that a file cannot be what it says it is, or is tooLarge. A library that meets what
// it did not expect panics, and may recover itself.
func damaged(path string, err error) error {
	if errs.ClassOf(err) == errs.Usage {
		return errs.New(errs.Usage, "%s: %w", path, err)
	}
	if strings.Contains(err.Error(), "runtime error") {
		err = errors.New("its parts contradict each other")
	}
	return errs.New(errs.Usage, "%s is damaged or cut short: %w; copy or write it again", path, err)
}

// add takes a file, whose columns are those of the files before.
func (s *Source) add(path string, f file) error {
	fields := f.fields()
	if len(s.files) == 0 {
		s.Fields = fields
		seen := map[string]int{}
		for i, c := range fields {
			if k, ok := seen[c.Name]; ok {
				return errs.New(errs.Usage, "%s: columns %d and %d are both called %q", path, k+1, i+1,
					Brief(c.Name))
			}
			seen[c.Name] = i
		}
	} else if !slices.Equal(fields, s.Fields) {
		return errs.New(errs.Usage, "%s has the columns %s, %s has %s; parts of a table have the same",
			s.Files[0], describe(s.Fields), path, describe(fields))
	}
	st, err := os.Stat(path)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	s.Size += st.Size()
	s.files = append(s.files, f)
	return nil
}

// describe lists columns for a message.
func describe(fields []Field) string {
	var out []string
	for _, f := range fields {
		out = append(out, fmt.Sprintf("%s (%v)", Brief(f.Name), f))
	}
	if len(out) > 12 {
		out = append(out[:12], fmt.Sprintf("and %d more", len(out)-12))
	}
	return strings.Join(out, ", ")
}

// Brief is text of a file for a message: escaped where it must be, and cut.
func Brief[T string | []byte](text T) string {
	s, end := string(text), ""
	if len(s) > 60 {
		s, end = s[:60], "…"
	}
	if q := fmt.Sprintf("%q", s); q != `"`+s+`"` {
		s = q[1 : len(q)-1]
	}
	return s + end
}

func (f Field) String() string {
	if f.List {
		return "list of " + f.Kind.String()
	}
	return f.Kind.String()
}

// String names a kind.
func (k Kind) String() string {
	return [...]string{"text", "integer", "unsigned integer", "float", "bool", "time", "list"}[k]
}

// choose sets the columns that are decoded.
func (s *Source) choose(columns []string) error {
	s.take = nil
	if columns == nil {
		for i := range s.Fields {
			s.take = append(s.take, i)
		}
	}
	for _, name := range columns {
		i := s.Find(name)
		if i < 0 {
			return errs.New(errs.Usage, "%s has no column %q; it has %s", s.Files[0], Brief(name),
				describe(s.Fields))
		}
		s.take = append(s.take, i)
	}
	for _, i := range s.take {
		if c := s.Fields[i]; c.why != "" {
			return errs.New(errs.Usage, "%s: column %s %s, which is not read; leave it out", s.Files[0],
				Brief(c.Name), c.why)
		}
	}
	return nil
}

// Find returns the number of a column, or -1.
func (s *Source) Find(name string) int {
	return slices.IndexFunc(s.Fields, func(f Field) bool { return f.Name == name })
}

// Select is the source with these columns decoded, in their order.
func (s *Source) Select(columns ...string) (*Source, error) {
	c := *s
	return &c, c.choose(columns)
}

// Rows is the number of rows where all files state theirs, or else -1.
func (s *Source) Rows() (n int64) {
	for _, f := range s.files {
		k := f.rows()
		if k < 0 {
			return -1
		}
		n += k
	}
	return n
}

// Each reads a source once: parse works on batches on all cores, and take gets the results in the
// order of the files and rows, on the caller's goroutine. A bounded number of batches waits. When
// take returns, a batch's memory is used again.
func Each[T any](ctx context.Context, s *Source, parse func(*Batch) (T, error),
	take func(T) error) (err error) {
	var r reader
	i, before := 0, int64(0)
	type result struct {
		b *Batch
		v T
	}
	defer func() {
		if r != nil {
			err = errors.Join(err, r.close())
		}
	}()
	return work.Pipe(ctx, func() (_ func() (*Batch, error), more bool, err error) {
		var decode func() (*Batch, error)
		for i < len(s.files) && decode == nil && err == nil {
			err = safely(s.Files[i], func() (err error) {
				if r == nil {
					if r, err = s.files[i].read(s.take); err != nil {
						return err
					}
				}
				decode, err = r.next()
				s.o.Progress.Report("read", before+r.done(), s.Size)
				if err == nil && decode == nil {
					before += r.done()
					i, err, r = i+1, r.close(), nil
				}
				return err
			})
		}
		path := s.Files[min(i, len(s.files)-1)]
		return func() (b *Batch, err error) {
			err = safely(path, func() (err error) { b, err = decode(); return err })
			return b, err
		}, decode != nil, err
	}, func(decode func() (*Batch, error)) (out result, err error) {
		if out.b, err = decode(); err == nil {
			out.v, err = parse(out.b)
		}
		return out, err
	}, func(x result) error {
		if err := take(x.v); err != nil {
			return err
		}
		if x.b.free != nil {
			x.b.free()
		}
		return nil
	})
}

// Bad is an error about cell i of a column of the batch; column is "" for one about the row.
func (b *Batch) Bad(i int, column string, format string, args ...any) error {
	where := b.Where(i)
	if column != "" {
		where += fmt.Sprintf(", column %s", Brief(column))
	}
	return errs.New(errs.Usage, "%s: "+format, append([]any{where}, args...)...)
}

// Where names row i of the batch: by its line in text files, or else by its number from 1.
func (b *Batch) Where(i int) string {
	switch {
	case b.lines != nil:
		return fmt.Sprintf("%s:%d", b.File, b.lines[i])
	case b.Line > 0:
		return fmt.Sprintf("%s:%d", b.File, b.Line+int64(i))
	}
	return fmt.Sprintf("%s: row %d", b.File, b.First+int64(i)+1)
}
