package samples

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

func TestFiles(t *testing.T) {
	for _, nodes := range []int64{1 << 20, 1 << 40} {
		dir := t.TempDir()
		f, err := Create(dir, nodes, 0)
		require.NoError(t, err)
		r := rand.New(rand.NewPCG(1, uint64(nodes)))
		var ids [][]int64
		var adj [][]byte
		for range 50 {
			v, a := make([]int64, r.IntN(300)), make([]byte, r.IntN(500))
			for i := range v {
				v[i] = r.Int64N(nodes)
			}
			for i := range a {
				a[i] = byte(r.Uint32())
			}
			require.NoError(t, f.Append(v, a))
			ids, adj = append(ids, v), append(adj, a)
		}
		require.Equal(t, 50, f.Batches())
		var buf []int64
		var mem []byte
		for _, b := range r.Perm(50) {
			require.Equal(t, len(ids[b]), f.Rows(b))
			buf, err = f.Read(b, buf)
			require.NoError(t, err)
			require.Equal(t, ids[b], append([]int64{}, buf...))
			mem, err = f.Adj(b, mem)
			require.NoError(t, err)
			require.Equal(t, adj[b], append([]byte{}, mem...))
		}
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left, "the files have no name")
		require.NoError(t, f.Close())
	}
}

// Every flipped bit is found, in either file.
func TestFlippedBit(t *testing.T) {
	f, err := Create(t.TempDir(), 100, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Append([]int64{1, 2, 3}, []byte("blocks")))
	for _, x := range []*os.File{f.ids, f.adj} {
		info, err := x.Stat()
		require.NoError(t, err)
		for offset := range info.Size() {
			one := []byte{0}
			_, err := x.ReadAt(one, offset)
			require.NoError(t, err)
			_, err = x.WriteAt([]byte{one[0] ^ 8}, offset)
			require.NoError(t, err)
			if x == f.ids {
				_, err = f.Read(0, nil)
			} else {
				_, err = f.Adj(0, nil)
			}
			require.ErrorContains(t, err, "have checksum")
			require.Equal(t, errs.Device, errs.ClassOf(err))
			_, err = x.WriteAt(one, offset)
			require.NoError(t, err)
		}
	}
}

func TestNoRoom(t *testing.T) {
	f, err := Create(t.TempDir(), 100, 20)
	require.NoError(t, err)
	require.NoError(t, f.Append([]int64{1, 2}, []byte("12345678")))
	err = f.Append([]int64{3}, []byte("8"))
	require.ErrorContains(t, err, "superbatch of 2 mini-batches take more than they may: option superbatch-disk 20 B")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.NoError(t, f.Close())

	require.ErrorContains(t, f.cause(unix.ENOSPC), "lower option superbatch")
	require.Equal(t, errs.Capability, errs.ClassOf(f.cause(unix.ENOSPC)))
	_, err = Create(filepath.Join(t.TempDir(), "none"), 100, 0)
	require.ErrorIs(t, err, os.ErrNotExist)
}
