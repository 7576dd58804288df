package seal

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

var bg = context.Background()

// made is a folder with a sealed file of so many bytes, which were written in odd pieces and whose
// start was patched.
func made(t *testing.T, size int, block int64) (dir string, data []byte) {
	t.Helper()
	dir = t.TempDir()
	r := rand.New(rand.NewPCG(uint64(size), uint64(block)))
	data = make([]byte, size)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	s := NewSum("a", block)
	first := bytes.Clone(data)
	for i := range min(size, 128) {
		first[i] = 0
	}
	for rest := first; len(rest) > 0; {
		n := min(1+r.IntN(9000), len(rest))
		_, _ = s.Write(rest[:n])
		rest = rest[n:]
	}
	s.Patch(data[:min(size, 128)])
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), data, 0o644))
	var text bytes.Buffer
	require.NoError(t, Write(&text, "id", []Sealed{s.Sealed()}))
	require.NoError(t, os.WriteFile(filepath.Join(dir, Name), text.Bytes(), 0o644))
	return dir, data
}

// Any part of a file of any size reads as it is, and one bit in a block fails whatever touches the
// block, and nothing else.
func TestReader(t *testing.T) {
	for _, block := range []int64{Page, Block} {
		for _, size := range []int{0, 1, 127, int(block) - 1, int(block), int(block) + 1,
			3*int(block) + 700, pieceBytes + 5} {
			dir, data := made(t, size, block)
			m, err := Open(dir)
			require.NoError(t, err)
			require.NoError(t, m.CheckHeads(nil))
			var c Counter
			r, err := NewReader(m, dir, "a", &c)
			require.NoError(t, err)
			got := make([]byte, size)
			require.NoError(t, r.ReadAll(bg, got, 0, nil))
			require.True(t, bytes.Equal(data, got))
			require.EqualValues(t, size, c.Checked())
			require.NoError(t, r.CheckMapped(bg, data, 0, nil))
			require.NoError(t, r.Close())
			if size == 0 {
				continue
			}
			rnd := rand.New(rand.NewPCG(1, uint64(size)))
			bad := rnd.IntN(size)
			data[bad] ^= 1
			require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), data, 0o644))
			r, err = NewReader(m, dir, "a", &c)
			require.NoError(t, err)
			from, to := int64(bad)/block*block, min((int64(bad)/block+1)*block, int64(size))
			for range 50 {
				lo := rnd.IntN(size)
				hi := lo + 1 + rnd.IntN(size-lo)
				err := r.ReadAt(got[:hi-lo], int64(lo))
				if int64(hi) <= from || int64(lo) >= to {
					require.NoError(t, err)
					require.True(t, bytes.Equal(data[lo:hi], got[:hi-lo]))
					continue
				}
				var mm *Mismatch
				require.ErrorAs(t, err, &mm)
				require.Equal(t, errs.Device, errs.ClassOf(err))
				require.Equal(t, [2]int64{from, to}, [2]int64{mm.From, mm.To})
			}
			require.Error(t, r.CheckMapped(bg, data, 0, nil))
			var mu sync.Mutex
			var found []*Mismatch
			require.NoError(t, r.Verify(bg, func(int64) {}, func(m *Mismatch) {
				mu.Lock()
				defer mu.Unlock()
				found = append(found, m)
			}))
			require.Len(t, found, 1)
			require.Equal(t, from, found[0].From)
			require.NoError(t, r.Close())
		}
	}
}

// Pieces that ReadAll shows are whole numbers of 8 bytes, wherever the payload begins, and make up
// all of it.
func TestReadAllShowsAllOnce(t *testing.T) {
	dir, data := made(t, 3*pieceBytes+24, Block)
	m, err := Open(dir)
	require.NoError(t, err)
	for _, manifest := range []*Manifest{m, nil} {
		r, err := NewReader(manifest, dir, "a", nil)
		require.NoError(t, err)
		for _, off := range []int64{0, 128, 90} {
			dst, seen := make([]byte, int64(len(data))-off), make([]byte, int64(len(data))-off)
			var mu sync.Mutex
			require.NoError(t, r.ReadAll(bg, dst, off, func(offset int64, b []byte) error {
				mu.Lock()
				defer mu.Unlock()
				require.Zero(t, offset%8)
				copy(seen[offset:], b)
				return nil
			}))
			require.True(t, bytes.Equal(data[off:], seen))
		}
		stop := errors.New("stop")
		err = r.ReadAll(bg, make([]byte, len(data)), 0, func(int64, []byte) error { return stop })
		require.ErrorIs(t, err, stop)
		require.NoError(t, r.Close())
	}
}

// No byte of the manifest is unused: each one, changed, is found by who reads it all.
func TestManifestDamage(t *testing.T) {
	dir, _ := made(t, 2*Page+5, Page)
	path := filepath.Join(dir, Name)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	use := func() error {
		m, err := Open(dir)
		if err != nil {
			return err
		}
		_, err = NewReader(m, dir, "a", nil)
		return err
	}
	require.NoError(t, use())
	for i := range text {
		bad := bytes.Clone(text)
		bad[i] ^= 1 << (i % 8)
		require.NoError(t, os.WriteFile(path, bad, 0o644))
		err := use()
		require.Equal(t, errs.Device, errs.ClassOf(err), "byte %d: %v", i, err)
	}
	for _, bad := range [][]byte{{}, text[:len(text)-1], append(bytes.Clone(text), 0)} {
		require.NoError(t, os.WriteFile(path, bad, 0o644))
		require.Equal(t, errs.Device, errs.ClassOf(use()))
	}
}

// Rows that are read one by one, as a stripe's are, cost one read and one check of the block that
// they are in.
func TestPartsOfABlockAreCheckedOnce(t *testing.T) {
	const size = 3*Block + 700
	dir, data := made(t, size, Block)
	m, err := Open(dir)
	require.NoError(t, err)
	var c Counter
	r, err := NewReader(m, dir, "a", &c)
	require.NoError(t, err)
	row := make([]byte, 4)
	for offset := 0; offset+4 <= size; offset += 8 {
		require.NoError(t, r.ReadAt(row, int64(offset)))
		require.Equal(t, data[offset:offset+4], row)
	}
	require.EqualValues(t, size, c.Checked())
	require.NoError(t, r.Close())
}
