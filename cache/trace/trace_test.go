package trace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

var header = Header{
	Dataset: "d", Name: "graph", Rows: 1 << 40, RowBytes: 512, SSDs: 2, SlotBytes: 512, LBABytes: 512, Seed: 7,
	Fanouts: []int64{10, 5}, Sampler: "neighbor", Batch: 100, Mode: "gids", Policy: "random", GPULines: 10, LineBytes: 4096, RowsPerLine: 8,
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
			all = append(all, event{live: &Live{Kind: 1, Epoch: 2, Batches: r.Int64(), RowsGPU: 4, RowsCPU: 5, RowsSSD: 6, BytesSSD: 7, Inserted: 8, Evicted: 9, Bypassed: 1 << 40}})
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
	write(t, path, h, scores, []event{{place: []int64{1, 5}, tier: 0}, {place: []int64{2}, tier: 1}, {batch: &Batch{Parts: [][]int64{{1, 2}}}}})
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
	require.ErrorContains(t, err, fmt.Sprintf("has version %d; this heliosctl reads version %d", Version+1, Version))
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

// FuzzRead: a block with a right checksum and any content is read or refused, without a panic.
func FuzzRead(f *testing.F) {
	f.Add([]byte{recBegin, 0, 0, 0, recPart, 2, 2, 2, recLive})
	f.Add([]byte{recPlace, 0, 1, 1, 4, recHotness, 1, 9})
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "trace")
		w, err := Create(path, header, false)
		require.NoError(t, err)
		w.block = append(w.block, content...)
		require.NoError(t, w.Close())
		r, err := Open(path)
		require.NoError(t, err)
		_, _ = read(r)
		_ = r.Backwards(func([]int64) error { return nil })
		_, _ = r.Hotness()
		require.NoError(t, r.Close())
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
