// Package container knows files by their first bytes, whatever they are called. A reader of text or
// of one kind of array asks it before it reads, so that a file of another kind is unpacked, or
// refused by the name of what it is.
package container

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"

	"helios/internal/errs"
	"helios/internal/infile"
)

// Kind is a kind of file.
type Kind int

// The kinds that a reader may want. Plain is text, or an array without a header: nothing in it is
// known.
const (
	Plain Kind = iota
	Gzip
	Bzip2
	XZ
	LZ4
	Zstd
	NPY
	Zip
	Pickle
	Parquet
	Arrow       // a file, also called Feather version 2
	ArrowStream // the same without an index at its end
	Torch       // a zip archive
	foreign     // from here on, kinds that nobody here reads
)

// signature tells a kind by bytes at an offset.
type signature struct {
	kind   Kind
	offset int
	text   string
	name   string // with its article
	next   string // what to do with it
}

const (
	convert = "write it again as CSV, or its columns as .npy"
	tables  = `"import tables" reads it`
	unpack  = "unpack it first"
)

var signatures = []signature{
	{Gzip, 0, "\x1f\x8b\x08", "a gzip file", unpack + " with gunzip"},
	{Bzip2, 0, "BZh", "a bzip2 file", unpack + " with bunzip2"},
	{XZ, 0, "\xfd7zXZ\x00", "an xz file", unpack + " with unxz"},
	{LZ4, 0, "\x04\x22\x4d\x18", "an lz4 file", unpack + " with unlz4"},
	{Zstd, 0, "\x28\xb5\x2f\xfd", "a Zstandard file", unpack + " with unzstd"},
	{NPY, 0, "\x93NUMPY", "a .npy array", "give it where an array is wanted"},
	{Zip, 0, "PK\x03\x04", "a zip archive", unpack + " with unzip"},
	{Zip, 0, "PK\x05\x06", "an empty zip archive", "give the files themselves"},
	{Parquet, 0, "PAR1", "a Parquet file", tables},
	{Arrow, 0, "ARROW1", "an Arrow file (Feather version 2)", tables},
	{ArrowStream, 0, "\xff\xff\xff\xff", "a stream of Arrow", tables},
	{foreign, 0, "FEA1", "a Feather file (version 1)", convert},
	{foreign, 0, "ORC", "an ORC file", convert},
	{foreign, 0, "Obj\x01", "an Avro file", convert},
	{foreign, 0, "\x89HDF\r\n\x1a\n", "an HDF5 file", "write its datasets as .npy, with h5py and numpy.save"},
	{foreign, 512, "\x89HDF\r\n\x1a\n", "an HDF5 file (MATLAB 7.3)", "write its datasets as .npy, with h5py and numpy.save"},
	{foreign, 0, "MATLAB 5.0 MAT-file", "a MATLAB file",
		"write its matrices with scipy.io.loadmat and scipy.sparse.save_npz or numpy.save"},
	{foreign, 0, "SQLite format 3\x00", "an SQLite database", "write its tables as CSV"},
	{foreign, 0, "CDF\x01", "a NetCDF file", "write its variables as .npy"},
	{foreign, 0, "CDF\x02", "a NetCDF file", "write its variables as .npy"},
	{foreign, 0, "\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", "a file of PyTorch before 1.6",
		"write it again with torch.save(torch.load(FILE), FILE) of a later one"},
	{foreign, 0, "RDX3\n", "an R file", "write its tables as CSV"},
	{foreign, 0, "7z\xbc\xaf\x27\x1c", "a 7z archive", unpack + " with 7z x"},
	{foreign, 0, "Rar!\x1a\x07", "a RAR archive", unpack},
	{foreign, 257, "ustar", "a tar archive", unpack + " with tar -xf"},
	{foreign, 0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel file (.xls)", "write its sheet as CSV"},
	{foreign, 0, "%PDF-", "a PDF document", "give the data itself"},
	{foreign, 0, "\x7fELF", "a program", "give the data itself"},
	{foreign, 0, "\xff\xfe", "text in UTF-16", "write it again in UTF-8"},
	{foreign, 0, "\xfe\xff", "text in UTF-16", "write it again in UTF-8"},
}

// words are signatures that can also be the first column of a text. In the formats a byte below the
// space follows.
var words = []string{"PAR1", "ARROW1", "FEA1"}

// sniffed is the number of bytes at a file's start that the signatures need.
const sniffed = 520

// zips are archives that are zip files, by a member.
var zips = []struct {
	kind               Kind
	member, name, next string
}{
	{Torch, "/data.pkl", "a PyTorch file", "\"import npy\" reads its tensors"},
	{Zip, "[Content_Types].xml", "an Excel file (.xlsx)", "write its sheet as CSV"},
	{Zip, ".npy", "an .npz archive of NumPy", "give it to \"import npy\", or write its arrays as .npy"},
}

// File is the kind of a file.
type File struct {
	Kind Kind
	Name string // such as "a Parquet file"; "" where it is Plain
	Next string // what to do with it
}

// Hint names the kind, to be put behind an error about the file; "" where it is Plain.
func (k File) Hint() string {
	if k.Kind == Plain {
		return ""
	}
	return ": it is " + k.Name + "; " + k.Next
}

// Foreign reports whether the file is neither an array nor text, plain or compressed.
func (k File) Foreign() bool { return k.Kind == Zip || k.Kind >= Pickle }

// Of looks at the start of a file, of which tail are the last bytes, or nil.
func Of(head, tail []byte) File {
	for _, s := range signatures {
		if len(head) < s.offset || !bytes.HasPrefix(head[s.offset:], []byte(s.text)) {
			continue
		}
		// Short signatures that numbers or text may have by chance need more.
		switch {
		case s.kind == Gzip && !gzipped(head), s.kind == Bzip2 && !bzipped(head),
			s.text == "ORC" && !bytes.HasSuffix(tail, []byte("ORC\x00")) &&
				!bytes.HasSuffix(tail[:max(len(tail)-1, 0)], []byte("ORC")),
			s.text == "\xff\xff\xff\xff" && !arrowStream(head),
			slices.Contains(words, s.text) && len(head) > len(s.text) && head[len(s.text)] >= ' ',
			s.text == "\xff\xfe" && !wide(head, 0), s.text == "\xfe\xff" && !wide(head, 1):
			continue
		}
		f := File{s.kind, s.name, s.next}
		if s.kind == Zip {
			for _, z := range zips {
				m := []byte(z.member)
				if bytes.Contains(head, m) || bytes.Contains(tail, m) {
					f.Kind, f.Name, f.Next = z.kind, z.name, z.next
					break
				}
			}
		}
		return f
	}
	if pickled(head, tail) {
		return File{Pickle, "a pickle, which can hold any code and is not read",
			"write its arrays with numpy.save"}
	}
	return File{}
}

// gzipped: no reserved flag, and a level and a system that there are (RFC 1952, 2.3.1). An array
// of ids without a header may begin with the magic.
func gzipped(head []byte) bool {
	return len(head) >= 10 && head[3]&0xe0 == 0 && (head[8] == 0 || head[8] == 2 || head[8] == 4) &&
		(head[9] <= 13 || head[9] == 255) || len(head) < 10
}

// bzipped: a digit, and the magic of a block or of the end.
func bzipped(head []byte) bool {
	return len(head) >= 10 && (bytes.HasPrefix(head[4:], []byte("1AY&SY")) ||
		bytes.HasPrefix(head[4:], []byte("\x17\x72\x45\x38\x50\x90")))
}

// arrowStream: 0xffffffff, then the length of a schema, of which the low bytes alone are not 0.
func arrowStream(head []byte) bool {
	return len(head) > 16 && head[4]|head[5] != 0 && head[6] == 0 && head[7] == 0 &&
		head[8] == 0x10 && head[9] == 0
}

// wide reports whether two characters of plain text in UTF-16 follow the mark: of each, one byte is
// 0, the first (zero is 1) or the second (zero is 0) as the mark says.
func wide(head []byte, zero int) bool {
	if len(head) < 6 {
		return len(head) == 2
	}
	return head[3-zero] == 0 && head[5-zero] == 0 && head[2+zero] != 0 && head[4+zero] != 0
}

// pickled knows pickles of the protocols 2 to 5 by their first opcodes and the last one, ".".
func pickled(head, tail []byte) bool {
	if len(head) < 4 || head[0] != 0x80 || head[1] < 2 || head[1] > 5 {
		return false
	}
	if len(tail) > 0 && tail[len(tail)-1] != '.' {
		return false
	}
	if head[1] >= 4 {
		return head[2] == 0x95
	}
	return bytes.IndexByte([]byte("}](cKXqMJU)\x8a"), head[2]) >= 0
}

// sniff looks at an open file.
func sniff(f *os.File) (File, error) {
	head, err := part(f, 0)
	if err != nil {
		return File{}, err
	}
	st, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	// The directory of a zip archive is at its end.
	tail, err := part(f, max(st.Size()-16<<10, 0))
	return Of(head[:min(len(head), sniffed)], tail), err
}

func part(f *os.File, offset int64) ([]byte, error) {
	b := make([]byte, 16<<10)
	n, err := f.ReadAt(b, offset)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

// FileOf looks at the file at path.
func FileOf(path string) (File, error) {
	f, err := infile.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	k, err := sniff(f)
	if err != nil {
		return k, errs.New(errs.Device, "%s: %w", path, err)
	}
	return k, nil
}

// Is reports whether the file at path is there and of a kind.
func Is(path string, kind Kind) bool {
	f, err := FileOf(path)
	return err == nil && f.Kind == kind
}

// Open opens a file for a reader of plain files and of the kinds, and refuses others by the name of
// what they are.
func Open(path string, kinds ...Kind) (*os.File, File, error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, File{}, errs.With(errs.Usage, err)
	}
	k, err := sniff(f)
	if err != nil {
		err = errs.New(errs.Device, "%s: %w", path, err)
	} else if k.Kind != Plain && !slices.Contains(kinds, k.Kind) {
		err = k.Refuse(path)
	}
	if err != nil {
		return nil, k, errors.Join(err, f.Close())
	}
	return f, k, nil
}

// Check refuses a file that Open would refuse.
func Check(path string, kinds ...Kind) error {
	f, _, err := Open(path, kinds...)
	if err != nil {
		return err
	}
	return f.Close()
}

// ForeignError says that a file is of a kind that its reader does not take.
type ForeignError struct {
	Path string
	File File
}

func (e *ForeignError) Error() string { return e.Path + " is " + e.File.Name + "; " + e.File.Next }

// Refuse returns an error that names the kind of the file at path.
func (k File) Refuse(path string) error {
	return errs.With(errs.Usage, &ForeignError{path, k})
}
