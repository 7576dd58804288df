package trace

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

var header = Header{
	Dataset: "d", Name: "graph", Rows: 1 << 36, RowBytes: 512, SSDs: 2, SlotBytes: 512,
	LBABytes: 512, Seed: 7,
	Fanouts: []int64{10, 5}, Sampler: "neighbor", Batch: 100, Mode: "gids", Policy: "random",
	GPULines: 10, LineBytes: 4096, RowsPerLine: 8,
}

// event is anything that a trace holds.
type event struct {
	batch *Batch
	reset int64
	live  *Live
	place []int64
	tier  int
}

func random(seed uint64, batches int) []event {
	r := rand.New(rand.NewPCG(seed, 2))
	var all []event
	for range 1 + r.IntN(2) {
		for tier := range 2 {
			place := []int64{}
			for range r.IntN(100) {
				place = append(place, r.Int64N(header.Rows))
			}
			if tier == 1 && r.IntN(4) == 0 {
				place = make([]int64, partRows+5) // more than a record
			}
			slices.Sort(place)
			all = append(all, event{place: place, tier: tier})
		}
	}
	for i := range batches {
		b := &Batch{Kind: r.IntN(3), Epoch: r.IntN(5), Index: i}
		for range r.IntN(4) {
			n := r.IntN(500)
			if r.IntN(80) == 0 {
				n = partRows + 1 + r.IntN(10)
			}
			part := make([]int64, n)
			for j := range part {
				part[j] = r.Int64N(header.Rows)
			}
			b.Parts = append(b.Parts, part)
		}
		all = append(all, event{batch: b})
		switch r.IntN(10) {
		case 0:
			all = append(all, event{reset: 1 + r.Int64N(1000)})
		case 1:
			all = append(all, event{live: &Live{Kind: 1, Epoch: 2, Batches: r.Int64(), RowsGPU: 4,
				RowsCPU: 5, RowsSSD: 6, BytesSSD: 7, Inserted: 8, Evicted: 9, Bypassed: 1 << 36}})
			all[len(all)-1].live.Batches >>= 2
		}
	}
	return all
}

func write(t testing.TB, path string, h Header, scores []uint32, all []event) {
	w, err := Create(path, h, false)
	require.NoError(t, err)
	if scores != nil {
		require.NoError(t, w.Hotness(scores))
	}
	for i, e := range all {
		switch {
		case e.batch != nil:
			require.NoError(t, w.Begin(e.batch.Kind, e.batch.Epoch, e.batch.Index))
			for _, p := range e.batch.Parts {
				require.NoError(t, w.Part(p))
			}
		case e.live != nil:
			require.NoError(t, w.Live(*e.live))
		case e.reset != 0:
			require.NoError(t, w.Reset(e.reset))
		case e.tier == 0:
			require.NoError(t, w.Place(e.place, all[i+1].place))
		}
	}
	require.NoError(t, w.Close())
}

func read(r *Reader) (all []event, err error) {
	err = r.Play(Visitor{
		Batch: func(b *Batch) error { all = append(all, event{batch: b}); return nil },
		Reset: func(n int64) error { all = append(all, event{reset: n}); return nil },
		Live:  func(l Live) error { all = append(all, event{live: &l}); return nil },
		Place: func(tier int, rows []int64) error {
			all = append(all, event{place: append([]int64{}, rows...), tier: tier})
			return nil
		},
	})
	return all, err
}

func TestRoundTrip(t *testing.T) {
	for seed := range uint64(4) {
		path := filepath.Join(t.TempDir(), "trace")
		want := random(seed, 40)
		write(t, path, header, nil, want)
		r, err := Open(path)
		require.NoError(t, err)
		require.Equal(t, header, r.Header())
		got, err := read(r)
		require.NoError(t, err)
		require.Equal(t, want, got, "seed %d", seed)
		resets := int64(0)
		for _, e := range want {
			if e.reset != 0 {
				resets++
			}
		}
		require.Equal(t, resets, r.Totals().Resets)

		var parts [][]int64
		for _, e := range want {
			if e.batch != nil {
				parts = append(parts, e.batch.Parts...)
			}
		}
		require.NoError(t, r.Backwards(func(rows []int64) error {
			require.Equal(t, parts[len(parts)-1], append([]int64{}, rows...))
			parts = parts[:len(parts)-1]
			return nil
		}))
		require.Empty(t, parts)
		scores, err := r.Hotness()
		require.NoError(t, err)
		require.Nil(t, scores)
		require.NoError(t, r.Close())
	}
}

func TestHotness(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace")
	h := header
	h.Rows = 3*partRows + 1
	scores := make([]uint32, h.Rows)
	for i := range scores {
		scores[i] = uint32(i) * 2654435761
	}
	write(t, path, h, scores, []event{{place: []int64{1, 5}, tier: 0}, {place: []int64{2}, tier: 1},
		{batch: &Batch{Parts: [][]int64{{1, 2}}}}})
	r, err := Open(path)
	require.NoError(t, err)
	got, err := r.Hotness()
	require.NoError(t, err)
	require.Equal(t, scores, got)
	all, err := read(r)
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.NoError(t, r.Close())
}

// Whatever is cut off or turned, a reader says so, by name, and with a class.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	write(t, path, header, nil, random(3, 3)[:6])
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	try := func(b []byte) error {
		require.NoError(t, os.WriteFile(path, b, 0o600))
		r, err := Open(path)
		if err != nil {
			return err
		}
		_, err = read(r)
		back := r.Backwards(func([]int64) error { return nil })
		if err != nil {
			require.Error(t, back)
		}
		require.NoError(t, r.Close())
		return err
	}
	step := max(1, len(whole)/60)
	for n := 0; n < len(whole); n += step {
		err := try(whole[:n])
		require.Error(t, err, "cut to %d bytes of %d", n, len(whole))
		require.ErrorContains(t, err, path)
		if n >= len(magic) {
			require.Equal(t, errs.Device, errs.ClassOf(err), "cut to %d: %v", n, err)
		}
	}
	require.ErrorContains(t, try(whole[:len(whole)-1]), "cut short")
	for n := 0; n < len(whole); n += step {
		b := bytes.Clone(whole)
		b[n] ^= 0x40
		require.Error(t, try(b), "byte %d of %d turned", n, len(whole))
	}
	newer := bytes.Clone(whole)
	binary.LittleEndian.PutUint32(newer[len(magic):], Version+1)
	err = try(newer)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, fmt.Sprintf("has version %d; this heliosctl reads versions 2 to %d",
		Version+1, Version))
	require.Equal(t, errs.Usage, errs.ClassOf(try([]byte("something else entirely"))))
	_, err = Open(filepath.Join(dir, "none"))
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	_, err = Open(dir)
	require.Error(t, err)
}

func TestWriter(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	names := func() (all []string) {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range entries {
			all = append(all, e.Name())
		}
		return all
	}
	w, err := Create(path, header, false)
	require.NoError(t, err)
	require.NoError(t, w.Begin(Train, 0, 0))
	require.NoError(t, w.Part([]int64{1}))
	require.NotContains(t, names(), "trace")
	require.NoError(t, w.Discard())
	require.Empty(t, names())
	require.Error(t, w.Part([]int64{1}), "after Discard")
	require.Error(t, w.Close())

	w, err = Create(path, header, false)
	require.NoError(t, err)
	require.Error(t, w.Part([]int64{1}), "no batch")
	require.Error(t, w.Close())
	require.Empty(t, names())

	_, err = Create(filepath.Join(dir, "no", "trace"), header, false)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.Empty(t, names())

	var none *Writer
	require.NoError(t, none.Hotness(nil))
	require.NoError(t, none.Place(nil, nil))
	require.NoError(t, none.Begin(0, 0, 0))
	require.NoError(t, none.Part(nil))
	require.NoError(t, none.Reset(0))
	require.NoError(t, none.Live(Live{}))
	require.NoError(t, none.Close())
	require.NoError(t, none.Discard())
}

// file is a trace of one block, with right checksums, in memory.
func file(t testing.TB, head, content []byte) []byte {
	b := []byte(magic)
	fixed := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, Version),
		uint32(len(head)))
	b = append(append(b, fixed...), head...)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(append(fixed, head...), castagnoli))
	offset := len(b)
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.NoCompression)
	require.NoError(t, err)
	_, err = w.Write(content)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	lengths := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil,
		uint32(len(content))), uint32(packed.Len()))
	sum := crc32.Update(crc32.Checksum(lengths, castagnoli), castagnoli, packed.Bytes())
	b = append(binary.LittleEndian.AppendUint32(append(b, lengths...), sum), packed.Bytes()...)
	var index []byte
	for _, n := range []uint64{1, 1, 1, 1, 0, 1, uint64(offset)} {
		index = binary.AppendUvarint(index, n)
	}
	end := len(b)
	b = append(b, index...)
	b = binary.LittleEndian.AppendUint64(b, uint64(end))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(index)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(index, castagnoli))
	return append(b, endMagic...)
}

func openBytes(b []byte) (*Reader, error) {
	r := &Reader{path: "t", r: bytes.NewReader(b), size: int64(len(b)),
		close: func() error { return nil }}
	return r, r.open()
}

// TestHeaderBounds: a right checksum makes no number right.
func TestHeaderBounds(t *testing.T) {
	text, err := json.Marshal(header)
	require.NoError(t, err)
	_, err = openBytes(file(t, text, nil))
	require.NoError(t, err)
	for _, field := range []string{"rows", "row_bytes", "ssds", "slot_bytes", "lba_bytes", "batch",
		"gpu_lines", "line_bytes", "rows_per_line", "cpu_rows", "window"} {
		for _, v := range []int64{1 << 62, -1} {
			var h map[string]any
			require.NoError(t, json.Unmarshal(text, &h))
			h[field] = v
			b, err := json.Marshal(h)
			require.NoError(t, err)
			_, err = openBytes(file(t, b, nil))
			require.ErrorContains(t, err, "t is damaged: the header makes no sense", "%s %d",
				field, v)
		}
	}
	// Lookups of nothing: two bytes each in the file, much more in memory.
	r, err := openBytes(file(t, text, append([]byte{recBegin, 0, 0, 0},
		bytes.Repeat([]byte{recPart, 0}, maxParts+1)...)))
	require.NoError(t, err)
	require.ErrorContains(t, r.Play(Visitor{}), "is not what a writer writes")
}

// FuzzRead: a header and a block with right checksums and any content are read or refused, without
// a panic, and in memory in proportion to the content.
func FuzzRead(f *testing.F) {
	text, err := json.Marshal(header)
	require.NoError(f, err)
	f.Add([]byte{}, []byte{recBegin, 0, 0, 0, recPart, 2, 2, 2, recLive})
	f.Add([]byte{}, []byte{recPlace, 0, 1, 1, 4, recHotness, 1, 9})
	f.Add([]byte{}, append([]byte{recBegin, 0, 0, 0}, bytes.Repeat([]byte{recPart, 0}, 300)...))
	f.Add([]byte(`{"rows":4611686018427387904,"row_bytes":512,"ssds":1}`),
		[]byte{recBegin, 0, 0, 0, recPart, 1, 2})
	f.Add([]byte(`{"rows":100,"row_bytes":512,"ssds":1,"gpu_lines":4611686018427387904}`),
		[]byte{recReset, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f})
	f.Fuzz(func(t *testing.T, head, content []byte) {
		if len(head) == 0 {
			head = text
		}
		if len(head) > 1<<12 || len(content) > 1<<16 {
			return
		}
		r, err := openBytes(file(t, head, content))
		if err != nil {
			return
		}
		// Each byte of a block is at most one row, of 8 bytes, or one lookup; slices grow by
		// doubling.
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = read(r)
		_ = r.Backwards(func([]int64) error { return nil })
		_, _ = r.Hotness()
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > uint64(1024*len(content)+32<<20) {
			t.Fatalf("%d bytes allocate %d", len(content), used)
		}
	})
}

func BenchmarkWrite(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	rows := make([]int64, 1<<16)
	for i := range rows {
		rows[i] = int64(float64(100_000_000) * r.Float64() * r.Float64() * r.Float64())
	}
	w, err := Create(filepath.Join(b.TempDir(), "trace"), header, false)
	require.NoError(b, err)
	require.NoError(b, w.Begin(0, 0, 0))
	b.SetBytes(int64(len(rows)))
	for b.Loop() {
		require.NoError(b, w.Part(rows))
	}
	b.ReportMetric(float64(w.Bytes())/float64(w.totals.Rows), "bytes/row")
	require.NoError(b, w.Discard())
}
