package hostmem

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestUses(t *testing.T) {
	const size = 64 * PageBytes
	a, err := Alloc(size, "test uses")
	require.NoError(t, err)
	b, err := Alloc(size, "test uses")
	require.NoError(t, err)
	get := func() Use {
		all, err := Uses()
		require.NoError(t, err)
		seen := map[string]bool{}
		found := Use{}
		for i, u := range all {
			require.False(t, seen[u.Purpose], u.Purpose)
			seen[u.Purpose] = true
			require.LessOrEqual(t, u.Resident, max(u.Bytes+PageBytes*16, all[0].Resident), "%d", i)
			if u.Purpose == "test uses" {
				found = u
			}
		}
		require.True(t, seen[GoHeap] && seen[GoOther])
		return found
	}
	require.Equal(t, Use{"test uses", 2 * size, 0}, get(), "nothing is touched yet")
	for i := 0; i < size/2; i += PageBytes {
		a[i] = 1
	}
	require.Equal(t, Use{"test uses", 2 * size, size / 2}, get())
	was := mincore
	mincore = func(at, bytes uintptr, vec []byte) unix.Errno {
		if at == uintptr(unsafe.Pointer(&b[0])) {
			return unix.EPERM
		}
		return was(at, bytes, vec)
	}
	require.Equal(t, Use{"test uses", 2 * size, -1}, get(),
		"a sandbox that forbids the question costs the figure, not the result")
	mincore = was
	require.NoError(t, Free(a))
	require.Equal(t, Use{"test uses", size, 0}, get())
	require.NoError(t, Free(b))
	require.Equal(t, Use{}, get())
}

func BenchmarkUses(b *testing.B) {
	mem, err := Alloc(1<<30, "bench uses")
	require.NoError(b, err)
	for i := 0; i < len(mem); i += PageBytes {
		mem[i] = 1
	}
	b.SetBytes(1 << 30)
	for b.Loop() {
		if _, err := Uses(); err != nil {
			b.Fatal(err)
		}
	}
	require.NoError(b, Free(mem))
}
