// Package checkpoint stores tensors in the safetensors format and replaces files atomically.
//
// A safetensors file is eight bytes of little-endian header length, a JSON header that gives
// each tensor's dtype, shape and byte range, and the tensors' bytes
// (https://github.com/huggingface/safetensors, "Format"). Everything a reader takes from the
// header is checked against the file's size before anything is allocated or sliced.
package checkpoint

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// MaxHeaderBytes bounds the header, as the reference implementation does.
const MaxHeaderBytes = 100_000_000

// The format has no checksum of its own, so we put one among the metadata, which other readers
// ignore. Files of other writers have none and are read without.
const (
	// sumKey is the CRC32C of the whole file, in eight hexadecimal digits, with these digits taken
	// as zeros.
	sumKey = "helios.file_crc32c"
	// dataKey is that of the tensors' bytes alone, of earlier versions of this program.
	dataKey = "helios.data_crc32c"
)

const noSum = "00000000"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// dtypeBytes is the element size of the dtypes that we read and write.
var dtypeBytes = map[string]uint64{
	"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
	"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}

// Tensor is one named array; Data is its little-endian, row-major bytes.
type Tensor struct {
	Name  string
	DType string // "F32", "I64", ...
	Shape []int64
	Data  []byte
}

// File is the content of a safetensors file.
type File struct {
	Metadata map[string]string
	Tensors  []Tensor // in the order of their bytes in the file
	// Sealed tells that the file that this was read from has a checksum over all of it. Write
	// always makes one.
	Sealed bool
}

// Tensor finds a tensor by name.
func (f *File) Tensor(name string) (*Tensor, bool) {
	for i := range f.Tensors {
		if f.Tensors[i].Name == name {
			return &f.Tensors[i], true
		}
	}
	return nil, false
}

type headerEntry struct {
	DType   string    `json:"dtype"`
	Shape   []int64   `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// byteSize is the number of bytes of a dtype and shape; ok is false for an unknown dtype, a
// negative dimension or an overflow.
func byteSize(dtype string, shape []int64) (uint64, bool) {
	n, ok := dtypeBytes[dtype]
	if !ok {
		return 0, false
	}
	for _, d := range shape {
		if d < 0 {
			return 0, false
		}
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 {
			return 0, false
		}
		n = lo
	}
	return n, true
}

// Write encodes f.
func Write(w io.Writer, f *File) error {
	meta := make(map[string]string, len(f.Metadata)+1)
	for k, v := range f.Metadata {
		meta[k] = v
	}
	// The header is assembled by hand so that equal contents give equal bytes: the tensors in
	// their order, the metadata sorted (encoding/json sorts map keys).
	var hdr bytes.Buffer
	seen := map[string]bool{"__metadata__": true}
	entries := make([][]byte, 0, len(f.Tensors))
	offset := uint64(0)
	for _, t := range f.Tensors {
		if seen[t.Name] {
			return fmt.Errorf("tensor name %q is reserved or used twice", t.Name)
		}
		seen[t.Name] = true
		n, ok := byteSize(t.DType, t.Shape)
		if !ok || n != uint64(len(t.Data)) {
			return fmt.Errorf("tensor %q: %d bytes do not make a %s of shape %v", t.Name,
				len(t.Data), t.DType, t.Shape)
		}
		shape := t.Shape
		if shape == nil {
			shape = []int64{} // a scalar's shape is [], not null
		}
		name, err := json.Marshal(t.Name)
		if err != nil {
			return err
		}
		body, err := json.Marshal(headerEntry{t.DType, shape, [2]uint64{offset, offset + n}})
		if err != nil {
			return err
		}
		entries = append(entries, append(append(name, ':'), body...))
		offset += n
	}
	meta[sumKey] = noSum
	m, err := json.Marshal(meta)
	if err != nil {
		return err
	}
	hdr.WriteString(`{"__metadata__":`)
	hdr.Write(m)
	for _, e := range entries {
		hdr.WriteByte(',')
		hdr.Write(e)
	}
	hdr.WriteByte('}')
	for hdr.Len()%8 != 0 { // spaces align the tensors, as the reference writer does
		hdr.WriteByte(' ')
	}
	if hdr.Len() > MaxHeaderBytes {
		return fmt.Errorf("header of %d bytes is over the format's limit of %d", hdr.Len(),
			MaxHeaderBytes)
	}
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], uint64(hdr.Len()))
	digits, err := findSum(hdr.Bytes())
	if err != nil {
		return err
	}
	sum := crc32.Update(crc32.Checksum(n[:], castagnoli), castagnoli, hdr.Bytes())
	for _, t := range f.Tensors {
		sum = crc32.Update(sum, castagnoli, t.Data)
	}
	copy(hdr.Bytes()[digits:], fmt.Sprintf("%08x", sum))
	if _, err := w.Write(n[:]); err != nil {
		return err
	}
	if _, err := w.Write(hdr.Bytes()); err != nil {
		return err
	}
	for _, t := range f.Tensors {
		if _, err := w.Write(t.Data); err != nil {
			return err
		}
	}
	return nil
}

// Decode reads a whole file's bytes. The tensors' Data are slices of b.
func Decode(b []byte) (*File, error) {
	if len(b) < 8 {
		return nil, fmt.Errorf("%d bytes are too short for a safetensors file", len(b))
	}
	n := binary.LittleEndian.Uint64(b)
	if n > MaxHeaderBytes || n > uint64(len(b)-8) {
		return nil, fmt.Errorf("header length %d does not fit a file of %d bytes", n, len(b))
	}
	data := b[8+n:]
	f, err := decodeHeader(b[8:8+n], data)
	if err != nil {
		return nil, err
	}
	if want, ok := f.Metadata[sumKey]; ok {
		pos, err := findSum(b[8 : 8+n])
		if err != nil {
			return nil, err
		}
		sum := crc32.Checksum(b[:8+pos], castagnoli)
		for _, part := range [][]byte{[]byte(noSum), b[8+pos+len(noSum):]} {
			sum = crc32.Update(sum, castagnoli, part)
		}
		if got := fmt.Sprintf("%08x", sum); got != want {
			return nil, fmt.Errorf("CRC32C of the file is %s, its header says %s: it is damaged",
				got, want)
		}
		delete(f.Metadata, sumKey)
		f.Sealed = true
	}
	if want, ok := f.Metadata[dataKey]; ok {
		if got := fmt.Sprintf("%08x", crc32.Checksum(data, castagnoli)); got != want {
			return nil,
				fmt.Errorf("CRC32C of the tensors is %s, the header says %s: the file is damaged",
					got, want)
		}
		delete(f.Metadata, dataKey)
	}
	return f, nil
}

// findSum finds the digits of the whole file's checksum in a header. They stand after the
// key as Write puts it; a file in which the key stands twice, or otherwise, is none of ours.
func findSum(hdr []byte) (pos int, err error) {
	key := []byte(`"` + sumKey + `":"`)
	pos = bytes.Index(hdr, key)
	if pos < 0 || bytes.LastIndex(hdr, key) != pos || pos+len(key)+len(noSum) >= len(hdr) ||
		hdr[pos+len(key)+len(noSum)] != '"' {
		return 0,
			fmt.Errorf("the checksum of the file is not where its writer puts it: it is damaged")
	}
	return pos + len(key), nil
}

func decodeHeader(hdr, data []byte) (*File, error) {
	if len(hdr) == 0 || hdr[0] != '{' {
		return nil, fmt.Errorf("header does not start with '{'")
	}
	// Token by token, since decoding into a map would hide a name that occurs twice.
	dec := json.NewDecoder(bytes.NewReader(hdr))
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	f := &File{Metadata: map[string]string{}}
	type span struct {
		off [2]uint64
		t   Tensor
	}
	var spans []span
	seen := map[string]bool{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("header: %w", err)
		}
		name, ok := tok.(string)
		if !ok {
			return nil, fmt.Errorf("header: %v is not a tensor name", tok)
		}
		if seen[name] {
			return nil, fmt.Errorf("header: %q occurs twice", name)
		}
		seen[name] = true
		if name == "__metadata__" {
			if err := dec.Decode(&f.Metadata); err != nil {
				return nil, fmt.Errorf("header: metadata: %w", err)
			}
			if f.Metadata == nil {
				f.Metadata = map[string]string{}
			}
			continue
		}
		var e headerEntry
		if err := dec.Decode(&e); err != nil {
			return nil, fmt.Errorf("header: tensor %q: %w", name, err)
		}
		lo, hi := e.Offsets[0], e.Offsets[1]
		if lo > hi || hi > uint64(len(data)) {
			return nil, fmt.Errorf("tensor %q: bytes %d to %d are outside the file's %d", name, lo,
				hi, len(data))
		}
		if n, ok := byteSize(e.DType, e.Shape); !ok || n != hi-lo {
			return nil, fmt.Errorf("tensor %q: %d bytes do not make a %s of shape %v", name, hi-lo,
				e.DType, e.Shape)
		}
		spans = append(spans, span{e.Offsets, Tensor{Name: name, DType: e.DType, Shape: e.Shape,
			Data: data[lo:hi:hi]}})
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	if rest, err := io.ReadAll(dec.Buffered()); err != nil ||
		strings.Trim(string(rest), " ") != "" {
		return nil, fmt.Errorf("header: something follows its closing brace")
	}
	sort.SliceStable(spans, func(i, j int) bool {
		a, b := spans[i].off, spans[j].off
		return a[0] < b[0] || a[0] == b[0] && a[1] < b[1]
	})
	offset := uint64(0)
	for _, s := range spans {
		if s.off[0] != offset { // the format allows neither holes nor overlaps
			return nil, fmt.Errorf("tensor %q starts at byte %d, the one before it ends at %d",
				s.t.Name, s.off[0], offset)
		}
		offset = s.off[1]
		f.Tensors = append(f.Tensors, s.t)
	}
	if offset != uint64(len(data)) {
		return nil, fmt.Errorf("%d bytes follow the last tensor", uint64(len(data))-offset)
	}
	return f, nil
}

// readable refuses what is no checkpoint, or too large a one, before memory is taken for it: a
// sparse file may claim any size.
func readable(path string) error {
	f, err := infile.Open(path)
	if err != nil {
		return errs.New(errs.Usage, "checkpoint %s: %w", path, err)
	}
	defer f.Close() //nolint:errcheck // only read
	st, err := f.Stat()
	if err != nil {
		return errs.New(errs.Device, "checkpoint %s: %w", path, err)
	}
	var n [8]byte
	if _, err := f.ReadAt(n[:], 0); err == nil {
		if h := binary.LittleEndian.Uint64(n[:]); h == 0 || h > MaxHeaderBytes ||
			h > uint64(st.Size()-8) {
			return errs.New(errs.Device,
				"checkpoint %s: no safetensors file: its header would have %d bytes; give an intact one, or train anew",
				path, h)
		}
	}
	if free, err := hostmem.AvailableBytes(); err == nil && st.Size() > free {
		return errs.New(errs.Capability,
			"checkpoint %s has %d bytes, and %d are free in memory; give an intact one, or more memory",
			path, st.Size(), free)
	}
	return nil
}

// Load reads a file that Save or another writer made. The error names the file.
func Load(path string) (*File, error) {
	if err := readable(path); err != nil {
		return nil, err
	}
	b, err := infile.Read(path, 1<<40)
	if err != nil {
		return nil, errs.New(errs.Usage, "checkpoint %s: %w", path, err)
	}
	f, err := Decode(b)
	if err != nil {
		return nil, errs.New(errs.Device, "checkpoint %s: %w; give an intact one, or train anew",
			path, err)
	}
	return f, nil
}

// Save replaces path atomically: a crash at any moment leaves the old file or the new one,
// whole. The temporary file has one fixed name, so that crashes do not pile up leftovers;
// the folder's Lock keeps two writers apart.
func Save(path string, f *File) (err error) {
	dir, base := filepath.Split(path)
	if dir == "" {
		dir = "."
	}
	tmp := filepath.Join(dir, "."+base+partial)
	state := "the one before it is untouched"
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint %s: %w; %s", path, err, state)
		}
	}()
	o, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(o, 1<<20)
	err = Write(w, f)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = o.Sync()
	}
	if cerr := o.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp) // best effort: the next Save truncates it
		return err
	}
	state = "it is written, but a power failure may bring back the one before it"
	return durable.Sync(dir)
}

// partial ends the temporary names.
const partial = ".partial"

// Lock is the right to write a folder's checkpoints.
type Lock struct{ f *os.File }

// LockDir makes dir where it is missing and takes its lock; a second holder is refused.
// The lock ends with the process, however it dies.
func LockDir(dir string) (*Lock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, errs.New(errs.Usage, "{checkpoint}: %w; name a folder that can be written", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, errs.New(errs.Usage, "{checkpoint}: %w; name a folder that can be written", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, errs.New(errs.Refused,
			"checkpoint folder %s is in use by another run; wait for it, or give another folder",
			dir)
	}
	// A Save that was killed left it; no other writer is there.
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name, hidden := strings.CutPrefix(e.Name(), ".")
		if name, ours := strings.CutSuffix(name, ".safetensors"+partial); hidden && ours &&
			e.Type().IsRegular() && (name == "checkpoint" || name == "best") {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil {
		return nil,
			errors.Join(errs.New(errs.Usage, "{checkpoint}: %w; name a folder that can be written",
				err), f.Close())
	}
	return &Lock{f}, nil
}

// Unlock gives the folder back.
func (l *Lock) Unlock() error { return l.f.Close() }
