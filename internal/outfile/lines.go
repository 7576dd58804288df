package outfile

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// Lines is a file that grows by whole lines, each written by one call: whatever ends the process,
// the file holds whole lines. It has its name from its first line on. One process writes it at a
// time.
type Lines struct {
	what, path string
	f          *os.File
	size       int64
	straight   bool
	err        error
}

// Begin puts f in its place with its first line. On an error nothing is left of f.
func Begin(f *File, first []byte) (*Lines, error) {
	l := &Lines{what: f.what, path: f.path, f: f.f, straight: f.place == ""}
	if err := l.Append(first); err != nil {
		return nil, errors.Join(err, f.Discard())
	}
	if !l.straight {
		err := lock(l.f)
		if err == nil {
			err = f.put()
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s %s: %w; name another file", l.what, l.path, err),
				f.Discard())
		}
	}
	f.f = nil // ours from here on
	return l, nil
}

// Continue opens a file to add lines to it. each gets the lines that are there, without their ends;
// its error ends Continue and leaves the file as it is. A part behind the last line's end, which
// the kernel wrote in part, is cut off.
func Continue(what, path string, each func(line []byte) error) (*Lines, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, errs.New(errs.Usage, "%s: %w; name another file", what, err)
	}
	l := &Lines{what: what, path: path, f: f}
	fail := func(err error) (*Lines, error) {
		_ = f.Close()
		return nil, err
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return fail(errs.New(errs.Usage,
			"%s %s is no regular file, which can't be continued; name another", what, path))
	}
	if err := lock(f); err != nil {
		return fail(errs.New(errs.Refused,
			"%s %s is being written by another run; wait for it, or name another file", what, path))
	}
	for r := NewReader(f); ; {
		line, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if errs.ClassOf(err) == errs.Usage {
			return fail(errs.New(errs.Refused, "%s %s is there and %w; name another file", what, path,
				err))
		}
		if err != nil {
			return fail(errs.New(errs.Device, "%s %s: %w", what, path, err))
		}
		if err := each(line[:len(line)-1]); err != nil {
			return fail(err)
		}
		l.size += int64(len(line))
	}
	if l.size == 0 { // a file of ours has its first line before it has its name
		return fail(errs.New(errs.Refused,
			"%s %s is there and holds no whole line; name another file", what, path))
	}
	if err := f.Truncate(l.size); err != nil {
		return fail(errs.New(errs.Usage, "%s %s: %w; name another file", what, path, err))
	}
	return l, nil
}

// Bounds of a file of JSON lines that is read: no run writes so much.
const (
	maxLine   = 16 << 20
	maxValues = 1 << 20 // of a line; each takes a hundred times its bytes once it is decoded
	maxFile   = 256 << 20
)

// Reader reads lines that somebody else may have written, in bounded memory.
type Reader struct {
	*bufio.Reader
	left int64
}

// NewReader reads lines from r.
func NewReader(r io.Reader) *Reader {
	return &Reader{bufio.NewReaderSize(r, 1<<16), maxFile}
}

// Next returns a line with its end, behind the last one io.EOF with what has no end. An error of
// class usage names a content that no run writes: "has a line of more than …".
func (r *Reader) Next() (line []byte, err error) {
	for {
		part, err := r.ReadSlice('\n')
		r.left -= int64(len(part))
		line = append(line, part...)
		switch {
		case len(line) > maxLine:
			return nil, errs.New(errs.Usage, "has a line of more than %d bytes, which no run writes",
				maxLine)
		case r.left < 0:
			return nil, errs.New(errs.Usage, "has more than %d bytes, which no run writes", maxFile)
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case bytes.Count(line, []byte{','}) > maxValues:
			return nil, errs.New(errs.Usage, "has a line of more than %d values, which no run writes",
				maxValues)
		}
		if err != nil && !errors.Is(err, io.EOF) {
			err = errs.With(errs.Device, err)
		}
		return line, err
	}
}

// lock keeps a second writer out, for as long as the file is open.
func lock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// Append adds a line, which ends in a newline. After an error, of which nothing is left in the
// file, it adds no more.
func (l *Lines) Append(line []byte) error {
	if l.err != nil {
		return l.err
	}
	n, err := l.f.Write(line)
	if err != nil {
		l.err = fmt.Errorf("%s %s: %w; it lacks the lines from here on", l.what, l.path, err)
		if n > 0 && !l.straight {
			l.err = errors.Join(l.err, l.f.Truncate(l.size))
		}
		return l.err
	}
	l.size += int64(n)
	return nil
}

// Write is Append, for one line.
func (l *Lines) Write(line []byte) (int, error) {
	if err := l.Append(line); err != nil {
		return 0, err
	}
	return len(line), nil
}

// Close makes the lines durable.
func (l *Lines) Close() error {
	err := l.err
	if !l.straight {
		if serr := l.f.Sync(); err == nil {
			err = serr
		}
	}
	if cerr := l.f.Close(); err == nil {
		err = cerr
	}
	return err
}
