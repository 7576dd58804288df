package packed

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// readAll reads all that a plan's file holds.
func readAll(b []byte) error {
	p, err := New("plan", bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return err
	}
	if _, err := p.Hot(); err != nil {
		return err
	}
	var x Batch
	for i := range p.Batches() {
		if err := p.Batch(i, &x); err != nil {
			return err
		}
	}
	for i := range p.Streams() {
		l, err := p.list(i)
		for err == nil {
			_, err = l.next()
		}
		if !errors.Is(err, io.EOF) {
			return err
		}
		if p.Stream(i).Cache {
			if _, err := p.places(i, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func smallPlan(t testing.TB) []byte {
	m := random(rand.New(rand.NewPCG(2, 2)), 8, 200, 60)
	_, _, b := build(t, m, Config{Rows: 200, RowBytes: 700, Hot: 20, Segment: 4})
	require.NoError(t, readAll(b))
	return b
}

// A plan whose bits were flipped, or that was cut, is found out.
func TestDamagedPlans(t *testing.T) {
	b := smallPlan(t)
	for i := range b {
		for _, bit := range []byte{1, 16, 128} {
			b[i] ^= bit
			err := readAll(b)
			require.Error(t, err, "byte %d of %d, bit %d", i, len(b), bit)
			require.NotEqual(t, errs.Failed, errs.ClassOf(err), "byte %d: %v", i, err)
			b[i] ^= bit
		}
	}
	for n := range b {
		require.Error(t, readAll(b[:n]), "%d bytes of %d", n, len(b))
	}
	require.NoError(t, readAll(b))

	path := filepath.Join(t.TempDir(), "plan")
	require.NoError(t, os.WriteFile(path, b, 0o600))
	p, err := Open(path)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	require.NoError(t, os.Truncate(path, int64(len(b)-3)))
	_, err = Open(path)
	require.ErrorContains(t, err, "it was cut")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	b[len(magic)] = Version + 1
	require.NoError(t, os.WriteFile(path, b, 0o600))
	_, err = Open(path)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
}

// FuzzPlan gives the reader files whose checksums are right, whatever they say.
func FuzzPlan(f *testing.F) {
	b := smallPlan(f)
	f.Add(b)
	for _, i := range []int{20, 200, len(b) / 2, len(b) - 200, len(b) - 60} {
		c := bytes.Clone(b)
		c[i] ^= 0x55
		f.Add(c)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<20 {
			return
		}
		b = bytes.Clone(b)
		// Right checksums: of the index, then, where it can be read, of the parts.
		end := len(b) - tailBytes
		if end > 0 {
			offset := binary.LittleEndian.Uint64(b[end:])
			n := binary.LittleEndian.Uint64(b[end+8:])
			if offset < uint64(end) && n == uint64(end)-offset {
				binary.LittleEndian.PutUint32(b[end+16:], crc32.Checksum(b[offset:end], castagnoli))
			}
		}
		p, err := New("plan", bytes.NewReader(b), int64(len(b)))
		if err != nil {
			require.NotEqual(t, errs.Failed, errs.ClassOf(err))
			return
		}
		sum := func(e *extent) { e.sum = crc32.Checksum(b[e.offset:e.offset+e.bytes], castagnoli) }
		for i := range p.hots {
			sum(&p.hots[i])
		}
		if hot, err := p.Hot(); err == nil {
			require.Len(t, hot, int(p.header.Stats.HotRows))
		}
		var x Batch
		for i := range p.batches {
			sum(&p.batches[i])
			if p.Batch(i, &x) != nil {
				continue
			}
			slots := x.ReadPages * p.Shape().RowsPerPage
			for _, s := range x.Slot {
				require.Less(t, int64(s), slots)
			}
			for _, r := range x.HotRank {
				require.Less(t, int64(r), p.header.Stats.HotRows)
			}
			for _, r := range x.Runs {
				require.LessOrEqual(t, r.Page+r.Pages, p.Pages())
			}
		}
		for i := range p.streams {
			sum(&p.streams[i].list)
			sum(&p.streams[i].places)
			l, err := p.list(i)
			for err == nil {
				var row int64
				row, err = l.next()
				require.Less(t, row, p.header.Rows)
			}
			if p.streams[i].Cache {
				_, _ = p.places(i, nil)
			}
		}
	})
}
