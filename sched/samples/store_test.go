package samples

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// drawn are mini-batches of random content.
func drawn(n int, nodes int64) (ids [][]int64, adj [][]byte) {
	r := rand.New(rand.NewPCG(1, uint64(nodes)))
	for range n {
		v, a := make([]int64, r.IntN(300)), make([]byte, r.IntN(500))
		for i := range v {
			v[i] = r.Int64N(nodes)
		}
		for i := range a {
			a[i] = byte(r.Uint32())
		}
		ids, adj = append(ids, v), append(adj, a)
	}
	return ids, adj
}

func holds(t *testing.T, s *Store, ids [][]int64, adj [][]byte) {
	t.Helper()
	require.Equal(t, len(ids), s.Batches())
	var wg sync.WaitGroup
	for g := range 3 {
		wg.Go(func() {
			var buf []int64
			var mem []byte
			for i := range ids {
				b := (i*7 + g) % len(ids)
				var err error
				if buf, err = s.Read(b, buf); err != nil || len(buf) != s.Rows(b) {
					t.Errorf("batch %d: %d rows, %v", b, len(buf), err)
					return
				}
				mem, err = s.Adj(b, mem)
				if err != nil || string(mem) != string(adj[b]) {
					t.Errorf("batch %d: %v", b, err)
					return
				}
				for k := range buf {
					if buf[k] != ids[b][k] {
						t.Errorf("batch %d: row %d", b, k)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

// A store that is stopped after every number of mini-batches and resumed is the one that was
// never stopped, byte for byte; until it is whole nobody opens it.
func TestStoreGoesOn(t *testing.T) {
	defer func(was int64) { syncBytes = was }(syncBytes)
	for _, syncBytes = range []int64{1, 2000, 64 << 20} {
		for _, nodes := range []int64{1 << 20, 1 << 40} {
			ids, adj := drawn(30, nodes)
			spec := Spec{Nodes: nodes, Batches: 30, Key: "k"}
			dir := t.TempDir()
			for stop, pos := 0, 0; pos < 30; stop++ {
				w, err := Write(dir, spec)
				require.NoError(t, err)
				pos = w.Batches()
				for i := 0; i < stop && pos < 30; i, pos = i+1, pos+1 {
					require.NoError(t, w.Append(ids[pos], adj[pos]))
				}
				if pos == 30 {
					require.NoError(t, w.Finish())
					break
				}
				_, err = Open(dir, spec)
				require.ErrorIs(t, err, os.ErrNotExist)
				if stop%2 == 0 {
					require.NoError(t, w.Sync())
				}
				require.NoError(t, w.Close())
				if stop > 40 {
					t.Fatal("nothing is gone on with")
				}
			}
			s, err := Open(dir, spec)
			require.NoError(t, err)
			holds(t, s, ids, adj)
			require.NoError(t, s.Close())
			_, err = Write(dir, spec)
			require.Equal(t, errs.Refused, errs.ClassOf(err))

			straight := t.TempDir()
			w, err := Write(straight, spec)
			require.NoError(t, err)
			for i := range ids {
				require.NoError(t, w.Append(ids[i], adj[i]))
			}
			require.Error(t, w.Append(ids[0], adj[0]))
			require.NoError(t, w.Finish())
			for _, name := range []string{idsName, adjName, indexName} {
				a, err := os.ReadFile(filepath.Join(dir, name))
				require.NoError(t, err)
				b, err := os.ReadFile(filepath.Join(straight, name))
				require.NoError(t, err)
				require.Equal(t, a, b, name)
			}
			require.NoError(t, Remove(dir))
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left)
		}
	}
}

// A crash can leave anything beyond what was made durable, a torn last record, no header.
func TestStoreAfterACrash(t *testing.T) {
	ids, adj := drawn(9, 100)
	spec := Spec{Nodes: 100, Batches: 9, Key: "k"}
	for name, spoil := range map[string]func(dir string) int{
		"nothing": func(string) int { return 6 },
		"data beyond the records": func(dir string) int {
			f, err := os.OpenFile(filepath.Join(dir, adjName), os.O_APPEND|os.O_WRONLY, 0)
			require.NoError(t, err)
			_, err = f.WriteString("torn")
			require.NoError(t, err)
			require.NoError(t, f.Close())
			return 6
		},
		"a torn record": func(dir string) int {
			require.NoError(t, os.Truncate(filepath.Join(dir, partName),
				headBytes+5*recordBytes+9))
			return 5
		},
		"a record of zeros": func(dir string) int {
			p := filepath.Join(dir, partName)
			require.NoError(t, os.Truncate(p, headBytes+4*recordBytes))
			require.NoError(t, os.Truncate(p, headBytes+6*recordBytes))
			return 4
		},
		"data that is not there": func(dir string) int {
			require.NoError(t, os.Truncate(filepath.Join(dir, idsName), 1))
			return 0
		},
		"a torn header": func(dir string) int {
			require.NoError(t, os.Truncate(filepath.Join(dir, partName), 11))
			return 0
		},
	} {
		dir := t.TempDir()
		w, err := Write(dir, spec)
		require.NoError(t, err)
		for i := range 6 {
			require.NoError(t, w.Append(ids[i], adj[i]))
		}
		require.NoError(t, w.Sync())
		require.NoError(t, w.Close())
		want := spoil(dir)
		w, err = Write(dir, spec)
		require.NoError(t, err, name)
		require.Equal(t, want, w.Batches(), name)
		for i := want; i < 9; i++ {
			require.NoError(t, w.Append(ids[i], adj[i]))
		}
		require.NoError(t, w.Finish())
		s, err := Open(dir, spec)
		require.NoError(t, err, name)
		holds(t, s, ids, adj)
		require.NoError(t, s.Close())
	}
}

// Any changed byte of the files is found, at the latest when it is read; so are files of another
// length and other options.
func TestStoreDamage(t *testing.T) {
	ids, adj := [][]int64{{1, 2, 3}, {4}}, [][]byte{[]byte("blocks"), []byte("b")}
	spec, dir := Spec{Nodes: 100, Batches: 2, Key: "k"}, t.TempDir()
	w, err := Write(dir, spec)
	require.NoError(t, err)
	for i := range ids {
		require.NoError(t, w.Append(ids[i], adj[i]))
	}
	require.NoError(t, w.Finish())
	read := func() error {
		s, err := Open(dir, spec)
		if err != nil {
			return err
		}
		defer func() { require.NoError(t, s.Close()) }()
		for i := range s.Batches() {
			if _, err := s.Read(i, nil); err != nil {
				return err
			}
			if _, err := s.Adj(i, nil); err != nil {
				return err
			}
		}
		return nil
	}
	require.NoError(t, read())
	for _, name := range []string{idsName, adjName, indexName} {
		path := filepath.Join(dir, name)
		was, err := os.ReadFile(path)
		require.NoError(t, err)
		for pos := range was {
			b := append([]byte(nil), was...)
			b[pos] ^= 16
			require.NoError(t, os.WriteFile(path, b, 0o644))
			err := read()
			require.Error(t, err, "%s byte %d", name, pos)
			require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		}
		for _, b := range [][]byte{nil, was[:len(was)-1], append(append([]byte(nil), was...), 0)} {
			require.NoError(t, os.WriteFile(path, b, 0o644))
			require.Equal(t, errs.Device, errs.ClassOf(read()), name)
		}
		require.NoError(t, os.WriteFile(path, was, 0o644))
	}
	other := spec
	other.Key = "l"
	_, err = Open(dir, other)
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	_, err = Open(dir, Spec{Nodes: 101, Batches: 2, Key: "k"})
	require.ErrorContains(t, err, "of 100 nodes")
}

// Without room nothing is left, and the error has the remedy.
func TestStoreWithoutRoom(t *testing.T) {
	dir := t.TempDir()
	w, err := Write(dir, Spec{Nodes: 100, Batches: 2, Key: "k", Limit: 20, LimitKey: "disk-budget"})
	require.NoError(t, err)
	require.NoError(t, w.Append([]int64{1, 2}, []byte("12345678")))
	err = w.Append([]int64{3}, []byte("8"))
	require.ErrorContains(t, err, "samples of 2 mini-batches take more than they may: option disk-budget 20 B")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.Equal(t, err, w.Append(nil, nil), "and it takes no more")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, w.Close())

	// A disk that is full: the limit of a file's size stands for it.
	w, err = Write(dir, Spec{Nodes: 100, Batches: 2, Key: "k"})
	require.NoError(t, err)
	err = w.gaveUp(w.cause(unix.ENOSPC))
	require.ErrorContains(t, err, "give another folder with option packed")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	left, err = os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	_, err = Write(filepath.Join(dir, "none"), Spec{Nodes: 100, Batches: 2})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// FuzzIndex: whatever an index holds, its mini-batches lie behind each other, and what was written
// is read.
func FuzzIndex(f *testing.F) {
	h := Spec{Nodes: 100, Batches: 3, Key: "k"}.head()
	b := h.append(nil)
	f.Add(b)
	sum := uint32(0)
	for i := range 3 {
		b, sum = appendRecord(b, &batch{rows: int64(i) * 3, bytes: 7, idsSum: 5}, sum)
	}
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		h, ok := readHead(b)
		if !ok {
			return
		}
		require.Equal(t, b[:headBytes], h.append(nil))
		all, _ := readRecords(b[headBytes:], 8, 1<<20)
		var again []byte
		sum, ids, adj := uint32(0), int64(0), int64(0)
		for i := range all {
			x := &all[i]
			require.Equal(t, []int64{ids, adj}, []int64{x.ids, x.adj})
			require.True(t, x.rows >= 0 && x.bytes >= 0)
			ids, adj = ids+8*x.rows, adj+x.bytes
			require.True(t, ids >= 0 && adj >= 0)
			again, sum = appendRecord(again, x, sum)
		}
		require.Equal(t, string(b[headBytes:][:len(again)]), string(again))
	})
}
