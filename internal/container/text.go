package container

import (
	"bufio"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/therootcompany/xz"

	"helios/internal/errs"
)

// maxDictionary is twice what "xz -9" uses: the file gives the memory that its reader takes.
const maxDictionary = 128 << 20

var errDictionary = fmt.Errorf(
	"its dictionary has more than %d MiB; compress it again with a smaller one (xz -9, zstd -19)",
	maxDictionary>>20)

// errCut is the early end of a compressed file; it is not io.ErrUnexpectedEOF, which io.ReadFull
// says of the end of the text, too.
var errCut = errors.New("the compressed data ends early")

// Text is a text file, plain or compressed, as a stream of its text.
type Text struct {
	File   *os.File
	Size   int64 // of the file
	Packed bool  // File holds something else than the text
	path   string
	r      io.Reader
	n      int64
	zstd   *zstd.Decoder // nil: the file is no Zstandard
}

// OpenText opens a text file: plain, or compressed with gzip, bzip2, xz, lz4 or Zstandard, by its
// content.
// Other kinds, also within the compression, are refused by name.
func OpenText(path string) (*Text, error) {
	f, k, err := Open(path, Gzip, Bzip2, XZ, LZ4, Zstd)
	if err != nil {
		return nil, err
	}
	t := &Text{File: f, path: path, Packed: k.Kind != Plain}
	err = t.unpack(k)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (t *Text) unpack(k File) error {
	st, err := t.File.Stat()
	if err != nil {
		return errs.New(errs.Device, "%s: %w", t.path, err)
	}
	t.Size = st.Size()
	if !t.Packed {
		t.r = counter{t}
		return nil
	}
	in := bufio.NewReaderSize(counter{t}, 256<<10)
	switch k.Kind {
	case Gzip:
		t.r, err = gzip.NewReader(in)
	case Bzip2:
		t.r = bzip2.NewReader(in)
	case LZ4:
		t.r = lz4.NewReader(in)
	case Zstd:
		t.zstd, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderMaxWindow(maxDictionary))
		t.r = t.zstd
	default:
		t.r, err = xz.NewReader(in, maxDictionary)
	}
	if err != nil {
		return errs.New(errs.Usage, "%s: damaged %s: %w", t.path, k.Name[len("a"):], plainly(err))
	}
	br := bufio.NewReaderSize(t.r, 64<<10)
	t.r = br
	head, err := br.Peek(sniffed)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil //nolint:nilerr // the reader meets it again
	}
	if inner := Of(head, nil); inner.Kind != Plain {
		return errs.New(errs.Usage, "%s is %s, compressed; %s", t.path, inner.Name, inner.Next)
	}
	return nil
}

// Read reads text.
func (t *Text) Read(b []byte) (int, error) {
	n, err := t.r.Read(b)
	if t.Packed && err != nil {
		err = plainly(err)
	}
	return n, err
}

func plainly(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errCut
	case errors.Is(err, xz.ErrMemlimit), errors.Is(err, zstd.ErrWindowSizeExceeded):
		return errDictionary
	}
	return err
}

// At returns the number of bytes of the file that were read.
func (t *Text) At() int64 { return t.n }

// Close closes the file.
func (t *Text) Close() error {
	if t.zstd != nil {
		t.zstd.Close()
	}
	return t.File.Close()
}

type counter struct{ t *Text }

func (c counter) Read(b []byte) (int, error) {
	n, err := c.t.File.Read(b)
	c.t.n += int64(n)
	return n, err
}
