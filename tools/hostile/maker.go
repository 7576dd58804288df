package main

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// hostileCase is one input: its files, and the arguments that read them, in the case's own folder.
type hostileCase struct {
	name string
	args string // split at blanks; "out" is never there before
	// files by path: text, or for what else a file can be a function.
	files map[string]any
	names string // what the error must name
	note  string // accepted, if the output has this text
	// secret must not be in the output.
	secret string
}

// special makes something other than a plain file at the path.
type special func(path string) error

type maker struct {
	dir, bin string
	set      string // a good dataset
}

// shared makes a small dataset that cases damage.
func (m *maker) shared() error {
	m.set = filepath.Join(m.dir, "set")
	out, err := exec.Command(m.bin, "generate", "--nodes", "400", "--out", m.set).CombinedOutput()
	if err != nil {
		return fmt.Errorf("generate: %w: %s", err, out)
	}
	return nil
}

func (m *maker) make(c hostileCase) ([]string, error) {
	if err := os.MkdirAll(m.dir, 0o755); err != nil {
		return nil, err
	}
	if strings.Contains(c.args, " set") {
		if err := os.CopyFS(filepath.Join(m.dir, "set"), os.DirFS(m.set)); err != nil {
			return nil, err
		}
	}
	for name, content := range c.files {
		path := filepath.Join(m.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		if err := os.RemoveAll(path); err != nil {
			return nil, err
		}
		var err error
		switch x := content.(type) {
		case string:
			err = os.WriteFile(path, []byte(x), 0o644)
		case []byte:
			err = os.WriteFile(path, x, 0o644)
		case special:
			err = x(path)
		default:
			err = fmt.Errorf("%s: %T", name, x)
		}
		if err != nil {
			return nil, err
		}
	}
	return strings.Fields(c.args), nil
}

func fifo(path string) error { return syscall.Mkfifo(path, 0o644) }

func folder(path string) error { return os.Mkdir(path, 0o755) }

func linkTo(target string) special {
	return func(path string) error { return os.Symlink(target, path) }
}

func socket(path string) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	rel := filepath.Base(path) // a socket's name has at most 107 bytes
	short := filepath.Join(os.TempDir(), fmt.Sprintf("hs-%d-%s", os.Getpid(), rel))
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: short}); err != nil {
		return err
	}
	return os.Rename(short, path)
}

// sparse is a file of head, and zeros that take no room, up to size.
func sparse(head []byte, size int64) special {
	return func(path string) error {
		if err := os.WriteFile(path, head, 0o644); err != nil {
			return err
		}
		return os.Truncate(path, size)
	}
}

const lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"

// head is a .npy header.
func head(descr, shape string) []byte {
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, shape)
	for (len(dict)+11)%64 != 0 {
		dict += " "
	}
	dict += "\n"
	b := append([]byte("\x93NUMPY\x01\x00"), byte(len(dict)), byte(len(dict)>>8))
	return append(b, dict...)
}

// npy is an array of little-endian numbers: int64, or float64 with descr <f8.
func npy(descr, shape string, values ...float64) []byte {
	b := head(descr, shape)
	for _, v := range values {
		switch descr {
		case "<f8":
			b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
		case "<f4":
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
		case "|b1", "|u1", "|i1":
			b = append(b, byte(v))
		default:
			b = binary.LittleEndian.AppendUint64(b, uint64(int64(v)))
		}
	}
	return b
}

// arrays are those of a good folder of five nodes.
func arrays() map[string]any {
	return map[string]any{
		"in/features.npy":   npy("<f4", "(5, 1)", 1, 2, 3, 4, 5),
		"in/labels.npy":     npy("<i8", "(5,)", 0, 1, 0, 1, 0),
		"in/edge_index.npy": npy("<i8", "(2, 3)", 0, 1, 2, 1, 2, 3),
		"in/train.npy":      npy("<i8", "(2,)", 0, 1),
		"in/val.npy":        npy("<i8", "(1,)", 2),
		"in/test.npy":       npy("<i8", "(2,)", 3, 4),
	}
}

// with is files with others in their place; nil takes one away.
func with(files map[string]any, change map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range files {
		out[k] = v
	}
	for k, v := range change {
		if out[k] = v; v == nil {
			delete(out, k)
		}
	}
	return out
}

// npz puts the arrays of a folder into an archive.
func npz(files map[string]any, method uint16) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	names := make([]string, 0, len(files))
	for n := range files {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		w, err := z.CreateHeader(&zip.FileHeader{Name: strings.TrimPrefix(n, "in/"),
			Method: method})
		if err == nil {
			_, err = w.Write(files[n].([]byte))
		}
		if err != nil {
			panic(err) // a buffer takes everything
		}
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func gz(s string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(s)); err != nil {
		panic(err)
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func u32(n uint32) string { return string(binary.LittleEndian.AppendUint32(nil, n)) }

// pickled is an array in a pickle.
func pickled(kind, data string, shape ...uint32) string {
	s := "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01("
	for _, n := range shape {
		s += "J" + u32(n)
	}
	return s + "tcnumpy\ndtype\nU" + string(rune(len(kind)-1)) + kind[1:] +
		"K\x00K\x01\x87R(K\x03U\x01" + kind[:1] +
		"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + u32(uint32(len(data))) + data + "tb"
}

// matrix is a csr_matrix in a pickle, of the state that makes its arrays.
func matrix(rows, cols uint32, indptr, indices, values string) string {
	return "cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shapeJ" + u32(rows) + "J" + u32(cols) +
		"\x86U\x06indptr" + indptr +
		"U\x07indices" + indices + "U\x04data" + values + "ub"
}

func words(v ...uint32) (s string) {
	for _, x := range v {
		s += u32(x)
	}
	return s
}

// planetoid are the files of a dataset of four nodes.
func planetoid() map[string]any {
	const p = "\x80\x02"
	x := func(rows int) string {
		ptr := make([]uint32, rows+1)
		return p + matrix(uint32(rows), 2, pickled("<i4", words(ptr...), uint32(rows+1)),
			pickled("<i4", "", 0), pickled("<f4", "", 0)) + "."
	}
	y := func(rows int) string {
		s := ""
		for r := range rows {
			s += words(uint32(1-r%2), uint32(r%2))
		}
		return p + pickled("<i4", s, uint32(rows), 2) + "."
	}
	return map[string]any{
		"in/ind.toy.x": x(1), "in/ind.toy.tx": x(1), "in/ind.toy.allx": x(3), "in/ind.toy.y": y(1),
		"in/ind.toy.ty": y(1), "in/ind.toy.ally": y(3),
		"in/ind.toy.graph": p +
			"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(K\x00](K\x01K\x02eK\x01](K\x00eu.",
		"in/ind.toy.test.index": "3\n",
	}
}

// xzHead is the beginning of an xz file whose first block asks for a dictionary by its code.
func xzHead(code byte) []byte {
	sum := func(
		b []byte) []byte {
		return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	}
	b := []byte("\xfd7zXZ\x00")
	flags := []byte{0, 1}
	b = append(append(b, flags...), binary.LittleEndian.AppendUint32(nil,
		crc32.ChecksumIEEE(flags))...)
	return append(append(b, sum([]byte{2, 0, 0x21, 1, code, 0, 0, 0})...), 1, 0, 0, 'x', 0, 0, 0, 0)
}
