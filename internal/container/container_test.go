package container

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func write(t *testing.T, name string, content []byte) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

func zipped(t *testing.T, names ...string) []byte {
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, n := range names {
		f, err := w.Create(n)
		require.NoError(t, err)
		_, err = f.Write([]byte("x"))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

// text is compressed in each way that is read.
const text = "0,1\n1,2\n"

func packed(t *testing.T, s string) map[string][]byte {
	out := map[string][]byte{}
	pack := func(name string, open func(io.Writer) io.WriteCloser) {
		var b bytes.Buffer
		w := open(&b)
		_, err := w.Write([]byte(s))
		require.NoError(t, err)
		require.NoError(t, w.Close())
		out[name] = b.Bytes()
	}
	pack("gz", func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) })
	pack("lz4", func(w io.Writer) io.WriteCloser { return lz4.NewWriter(w) })
	pack("zst", func(w io.Writer) io.WriteCloser {
		z, err := zstd.NewWriter(w)
		require.NoError(t, err)
		return z
	})
	return out
}

// Text is read whatever the name and the compression, and the end of what is cut is an error.
func TestOpenText(t *testing.T) {
	all := packed(t, text)
	var err error
	all["bz2"], err = hex.DecodeString(
		"425a6839314159265359bca2513100000258000010000470002000221e8d0668152a185dc914e14242f28944c4")
	require.NoError(t, err)
	all["xz"], err = hex.DecodeString("fd377a585a000004e6d6b4460200210116000000742fe5a301" +
		"0007302c310a312c320a00032d51bc33541eac00012008bb19d9bb1fb6f37d010000000004595a")
	require.NoError(t, err)
	all["plain"] = []byte(text)
	for kind, content := range all {
		for _, name := range []string{"edges.csv", "edges.csv.gz", "edges"} {
			in, err := OpenText(write(t, name, content))
			require.NoError(t, err, kind)
			got, err := io.ReadAll(in)
			require.NoError(t, err, kind)
			require.Equal(t, text, string(got), kind)
			require.EqualValues(t, len(content), in.Size)
			require.EqualValues(t, len(content), in.At(), kind)
			require.Equal(t, kind != "plain", in.Packed)
			require.NoError(t, in.Close())
		}
		if kind == "plain" {
			continue
		}
		in, err := OpenText(write(t, "cut", content[:len(content)-6]))
		if err == nil {
			_, err = io.ReadAll(in)
			require.NoError(t, in.Close())
		}
		require.Error(t, err, kind)
		require.NotErrorIs(t, err, io.ErrUnexpectedEOF, kind)
	}
	empty, err := OpenText(write(t, "empty", nil))
	require.NoError(t, err)
	require.NoError(t, empty.Close())
	_, err = OpenText(write(t, "e.csv.gz", packed(t, "PAR1\x15\x04")["gz"]))
	require.ErrorContains(t, err, "e.csv.gz is a Parquet file, compressed; \"import tables\" reads it")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// Each kind is refused by its name, with what to do, whatever the file is called.
func TestForeign(t *testing.T) {
	bytesAt := func(n int, s string) []byte {
		return append(make([]byte, n), s+strings.Repeat("\x00", 64)...)
	}
	for name, c := range map[string]struct {
		content []byte
		say     string
	}{
		"parquet":  {[]byte("PAR1\x15\x04\x15PAR1"), "a Parquet file; \"import tables\" reads it"},
		"feather":  {[]byte("ARROW1\x00\x00\xff\xff\xff\xff"), "an Arrow file (Feather version 2)"},
		"feather1": {[]byte("FEA1\x00\x00"), "a Feather file (version 1)"},
		"arrows": {[]byte("\xff\xff\xff\xff\x78\x00\x00\x00\x10\x00\x00\x00\x00\x00\x0a\x00\x0c\x00"),
			"a stream of Arrow"},
		"orc":        {[]byte("ORC\x11\x00\x00\x0a\x06ORC\x17"), "an ORC file"},
		"avro":       {[]byte("Obj\x01\x04\x14avro.codec"), "an Avro file"},
		"hdf5":       {[]byte("\x89HDF\r\n\x1a\n\x00\x00"), "an HDF5 file; write its datasets as .npy"},
		"matlab":     {[]byte("MATLAB 5.0 MAT-file, Platform: GLNXA64"), "a MATLAB file"},
		"matlab 7.3": {bytesAt(512, "\x89HDF\r\n\x1a\n"), "an HDF5 file (MATLAB 7.3)"},
		"sqlite":     {[]byte("SQLite format 3\x00\x10\x00"), "an SQLite database"},
		"tar":        {bytesAt(257, "ustar\x0000"), "a tar archive; unpack it first with tar -xf"},
		"pickle 2":   {[]byte("\x80\x02]q\x00(K\x01K\x02e."), "a pickle, which can hold any code"},
		"pickle 4":   {[]byte("\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94."), "a pickle"},
		"numpy":      {[]byte("\x93NUMPY\x01\x00"), "a .npy array"},
		"zip":        {zipped(t, "edges.csv"), "a zip archive; unpack it first with unzip"},
		"npz":        {zipped(t, "a.npy", "b.npy"), "an .npz archive of NumPy"},
		"torch":      {zipped(t, "archive/data.pkl", "archive/data/0"), "a PyTorch file; \"import npy\" reads its tensors"},
		"xlsx":       {zipped(t, "[Content_Types].xml", "xl/workbook.xml"), "an Excel file (.xlsx)"},
		"utf-16":     {[]byte("\xff\xfe0\x00,\x001\x00\n\x00"), "text in UTF-16; write it again in UTF-8"},
		"utf-16 be":  {[]byte("\xfe\xff\x000\x00,\x001"), "text in UTF-16"},
	} {
		for _, file := range []string{"edges.csv", "x." + name} {
			path := write(t, file, c.content)
			_, err := OpenText(path)
			require.ErrorContains(t, err, path+" is "+c.say, name)
			require.Equal(t, errs.Usage, errs.ClassOf(err), name)
			var foreign *ForeignError
			require.ErrorAs(t, err, &foreign)
		}
	}
}

// Arrays of numbers without a header, and text, are Plain although they begin like something else.
func TestPlain(t *testing.T) {
	ids := func(v ...uint32) []byte {
		b, err := binary.Append(nil, binary.LittleEndian, v)
		require.NoError(t, err)
		return b
	}
	for name, content := range map[string][]byte{
		"0x088b1f":     ids(0x088b1f, 0x0a0b0c0d, 0x01020305, 5),
		"0x00000280":   ids(0x280, 7, 9),
		"-1":           ids(0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff),
		"65279":        ids(0xfeff, 3, 4, 5),
		"BZh":          []byte("BZhou,1\nBZhang,2\n"),
		"ORC":          []byte("ORCID,1\n2,3\n"),
		"PAR1":         []byte("PAR1,PAR2\n2,3\n"),
		"ARROW1":       []byte("ARROW1 ARROW2\n2 3\n"),
		"FEA1":         []byte("FEA1;FEA2\n2;3\n"),
		"a pickle cut": []byte("\x80\x04\x95\x05\x00\x00"),
		"nothing":      nil, "text": []byte(text),
	} {
		f, err := FileOf(write(t, "x", content))
		require.NoError(t, err, name)
		require.Equal(t, File{}, f, name)
	}
}
