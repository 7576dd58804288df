package cache

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/outfile"
)

// HotnessScores are scores as Hotness ranks them: the bits of a float32 that is not negative are in
// the order of its value. Below 0 counts as 0.
func HotnessScores(scores []float32) []uint32 {
	out := make([]uint32, len(scores))
	for i, s := range scores {
		out[i] = math.Float32bits(max(s, 0))
	}
	return out
}

// Set makes scores the counts, row by row, after the work of st so far and no longer than ctx:
// scores that are known and not counted (degrees, reverse PageRank, a list, counts of an earlier
// run) are ranked by the same kernels.
func (h *Hotness) Set(ctx context.Context, st cuda.Stream, scores []uint32) (err error) {
	if int64(len(scores)) != h.rows {
		return fmt.Errorf("cache: hotness of %d rows for a table of %d", len(scores), h.rows)
	}
	if h.rows == 0 {
		return nil
	}
	if mem := h.counts.Bytes(); mem != nil {
		if err := st.Synchronize(ctx); err != nil {
			return fmt.Errorf("cache: hotness of %d rows: %w", h.rows, err)
		}
		copy(hostmem.View[uint32](mem), scores)
		return nil
	}
	const part = 16 << 20 // rows
	stage, err := h.dev.Alloc(cuda.MemPinned, min(h.rows, part)*4, "hotness")
	if err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	defer func() { err = errors.Join(err, stage.Free()) }()
	for first := int64(0); first < h.rows; first += part {
		n := copy(hostmem.View[uint32](stage.Bytes()), scores[first:])
		to := h.counts.Ptr() + cuda.DevicePtr(first*4)
		if err = st.Copy(to, stage.Ptr(), int64(n)*4); err == nil {
			err = st.Synchronize(ctx)
		}
		if err != nil {
			return fmt.Errorf("cache: hotness of %d rows: %w", h.rows, err)
		}
	}
	return nil
}

// HotnessKey is everything that saved hotness depends on: where one of these differs, it is another
// hotness.
type HotnessKey struct {
	Source  string `json:"source"`
	Dataset string `json:"dataset"` // UUID
	Rows    int64  `json:"rows"`
	Edges   int64  `json:"edges"`
	Train   string `json:"train"` // SHA-256 of the training nodes
	// Of sampling; zero for sources that do not sample.
	Seed    uint64 `json:"seed,omitempty"`
	Fanouts []int  `json:"fanouts,omitempty"`
	Batch   int    `json:"batch,omitempty"`
	Sampler string `json:"sampler,omitempty"`
	Epochs  int    `json:"epochs,omitempty"`
	// Dependency is the number of batches that share draws; zero where each draws for itself.
	Dependency int `json:"batch_dependency,omitempty"`
	// Method holds what else the scores depend on, in words.
	Method string `json:"method,omitempty"`
}

// HashNodes is a HotnessKey's Train.
func HashNodes(nodes []int64) string {
	h := sha256.New()
	buf := make([]byte, 0, 8<<10)
	for _, v := range nodes {
		if buf = binary.LittleEndian.AppendUint64(buf, uint64(v)); len(buf) == cap(buf) {
			h.Write(buf)
			buf = buf[:0]
		}
	}
	h.Write(buf)
	return hex.EncodeToString(h.Sum(nil))
}

// SavedHotness holds what a file of hotness holds.
type SavedHotness struct {
	Key HotnessKey `json:"key"`
	// Nodes and Edges are the most that a sampled batch had, by hop; empty where nothing was
	// sampled.
	Nodes []int64 `json:"nodes,omitempty"`
	Edges []int64 `json:"edges,omitempty"`
	// Seconds is the time that finding it took.
	Seconds float64 `json:"seconds"`

	Scores []uint32 `json:"-"`
}

// A file of hotness: magic, version, length of the header (8 + 4 + 4 bytes), the header
// (SavedHotness as JSON), its CRC32C, a score of 4 bytes for each row, their CRC32C; all little
// endian.
const (
	hotMagic     = "HELIOHOT"
	hotVersion   = 1
	hotHeaderMax = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// HotnessPath is the path of a key's file in dir.
func HotnessPath(dir string, key HotnessKey) (string, error) {
	text, err := json.Marshal(key)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return filepath.Join(dir, key.Source+"-"+hex.EncodeToString(sum[:8])+".hotness"), nil
}

// SaveHotness writes s to dir, which it makes where it is missing. The file is there whole or not
// at all.
func SaveHotness(dir string, s *SavedHotness) (path string, err error) {
	if path, err = HotnessPath(dir, s.Key); err != nil {
		return "", err
	}
	if int64(len(s.Scores)) != s.Key.Rows {
		return "", fmt.Errorf("cache: hotness of %d rows under a key of %d", len(s.Scores),
			s.Key.Rows)
	}
	header, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	outfile.Sweep(dir, ".hotness-", ".part") // of earlier versions
	// An old file is replaced: it was found damaged, or its scores are superseded.
	f, err := outfile.Create("hotness", path, true)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Discard()) }()
	w := bufio.NewWriterSize(f, 1<<20)
	head := binary.LittleEndian.AppendUint32([]byte(hotMagic), hotVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(header)))
	head = append(head, header...)
	head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(header, castagnoli))
	if _, err = w.Write(head); err != nil {
		return "", err
	}
	sum := uint32(0)
	buf := make([]byte, 0, hotChunk)
	for first := 0; first < len(s.Scores); first += hotChunk / 4 {
		buf = buf[:0]
		for _, v := range s.Scores[first:min(first+hotChunk/4, len(s.Scores))] {
			buf = binary.LittleEndian.AppendUint32(buf, v)
		}
		sum = crc32.Update(sum, castagnoli, buf)
		if _, err = w.Write(buf); err != nil {
			return "", err
		}
	}
	if _, err = w.Write(binary.LittleEndian.AppendUint32(nil, sum)); err == nil {
		err = w.Flush()
	}
	return path, f.Commit(err)
}

const hotChunk = 1 << 16 // bytes of scores at a time

// LoadHotness reads the file of a key from dir; path is its place, also where it does not exist.
// The error is an fs.ErrNotExist where there is none; others name its damage or its version. After
// any of them the caller finds the scores anew.
func LoadHotness(dir string, key HotnessKey) (s *SavedHotness, path string, err error) {
	if path, err = HotnessPath(dir, key); err != nil {
		return nil, "", err
	}
	f, err := infile.Open(path)
	if err != nil {
		return nil, path, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	s, err = readHotness(f)
	if err != nil {
		return nil, path, fmt.Errorf("%s: %w", path, err)
	}
	if !sameKey(s.Key, key) {
		return nil, path, fmt.Errorf("%s: is of other settings than its name says", path)
	}
	return s, path, nil
}

func sameKey(a, b HotnessKey) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func readHotness(f *os.File) (*SavedHotness, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(f, 1<<20)
	s, headBytes, err := readHotnessHeader(r)
	if err != nil {
		return nil, err
	}
	// The length is checked before there is memory for it.
	body := st.Size() - headBytes - 4
	switch rows := s.Key.Rows; {
	case rows < 0 || rows > math.MaxInt64/4 || body > rows*4:
		return nil, fmt.Errorf("damaged: %d bytes for %d rows", body, rows)
	case body < rows*4:
		return nil, errCutOff
	}
	s.Scores = make([]uint32, s.Key.Rows)
	sum := uint32(0)
	buf := make([]byte, hotChunk)
	for first := 0; first < len(s.Scores); first += hotChunk / 4 {
		part := s.Scores[first:min(first+hotChunk/4, len(s.Scores))]
		b := buf[:len(part)*4]
		if err := readFull(r, b); err != nil {
			return nil, err
		}
		sum = crc32.Update(sum, castagnoli, b)
		for i := range part {
			part[i] = binary.LittleEndian.Uint32(b[i*4:])
		}
	}
	var tail [4]byte
	if err := readFull(r, tail[:]); err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint32(tail[:]) != sum {
		return nil, errors.New("damaged: the checksum of the scores is wrong")
	}
	return s, nil
}

var errCutOff = errors.New("the file is cut off")

// readFull fills b, or fails with errCutOff.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errCutOff
	}
	return err
}

// readHotnessHeader returns scores without their values, and the header's length.
func readHotnessHeader(r io.Reader) (*SavedHotness, int64, error) {
	var head [16]byte
	if err := readFull(r, head[:]); err != nil {
		return nil, 0, err
	}
	if string(head[:8]) != hotMagic {
		return nil, 0, errors.New("is no file of hotness")
	}
	if v := binary.LittleEndian.Uint32(head[8:]); v != hotVersion {
		return nil, 0, fmt.Errorf("has format version %d, this program reads %d", v, hotVersion)
	}
	n := binary.LittleEndian.Uint32(head[12:])
	if n > hotHeaderMax {
		return nil, 0, fmt.Errorf("damaged: a header of %d bytes", n)
	}
	header := make([]byte, n+4)
	if err := readFull(r, header); err != nil {
		return nil, 0, err
	}
	if crc32.Checksum(header[:n], castagnoli) != binary.LittleEndian.Uint32(header[n:]) {
		return nil, 0, errors.New("damaged: the checksum of the header is wrong")
	}
	s := &SavedHotness{}
	if err := json.Unmarshal(header[:n], s); err != nil {
		return nil, 0, fmt.Errorf("damaged: %w", err)
	}
	return s, int64(len(head) + len(header)), nil
}
