package serve

import (
	"net"
	"os"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// nodesOf is a sparse file of node numbers.
func nodesOf(t *testing.T, bytes int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("nodes", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, bytes))
	return fd
}

// Requests of clients take no more than the memory that they share, and nothing before hello.
func TestRequestsCountAsMemory(t *testing.T) {
	r := start(t, func(c *Config) { c.Memory = 9 << 20 })
	loader := map[string]any{"type": "loader", "handle": 1, "options": map[string]any{"do": "hang"}}
	c := r.dial(t)
	fd := nodesOf(t, 4<<20)
	require.NoError(t, c.w.write(loader, fd))
	require.Contains(t, c.gone().Message, "before hello")
	require.Zero(t, r.s.memory.used.Load())
	c = r.dial(t)
	c.raw(append([]byte{1, 0x20, 0, 0}, make([]byte, 0x2001)...))
	require.Contains(t, c.gone().Message, "a frame of 8193 bytes; 4096 is the most")

	a, b := r.client(t), r.client(t)
	for _, c := range []*client{a, b} {
		c.send(map[string]any{"type": "open", "dataset": "a"})
		c.want("opened")
	}
	for range 2 { // the first hangs, the second waits for it
		require.NoError(t, a.w.write(loader, fd))
	}
	settles(t, func() bool { return r.s.memory.used.Load() == 8<<20 }, "the lists are not counted")
	require.NoError(t, b.w.write(loader, fd))
	require.Contains(t, b.gone().Message, "what they ask for may take 9 MiB")
	a.close()
	settles(t, func() bool { return r.s.memory.used.Load() == 0 }, "memory stays taken")

	// A job has its nodes until it ends; whoever joins it has them from it.
	a, b = r.client(t), r.client(t)
	for rank, c := range []*client{a, b} {
		c.send(map[string]any{"type": "open", "dataset": "a"})
		c.want("opened")
		require.NoError(t, c.w.write(map[string]any{"type": "loader", "handle": 1, "rank": rank, "world": 2,
			"slots": 1}, fd))
		c.want("loader")
	}
	settles(t, func() bool { return r.s.memory.used.Load() == 4<<20+2*firstSlot }, "counted twice")
	a.close()
	settles(t, func() bool { return r.s.memory.used.Load() == 4<<20+firstSlot }, "the job lives")
	b.close()
	settles(t, func() bool { return r.s.memory.used.Load() == 0 }, "memory stays taken")
	require.NoError(t, unix.Close(fd))
}

// Clients that say nothing take nobody's place, and the last place is the daemon's own user's.
func TestSilentClientsTakeNoPlace(t *testing.T) {
	var foreign atomic.Bool
	r := start(t, func(c *Config) {
		c.MaxClients, c.Group = 2, true
		c.credentials = func(*net.UnixConn) (*unix.Ucred, error) {
			q := &unix.Ucred{Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())}
			if foreign.Load() {
				q.Uid = 4242
			}
			return q, nil
		}
	})
	count := func() int { r.s.mu.Lock(); defer r.s.mu.Unlock(); return len(r.s.silent) }
	first := r.dial(t)
	settles(t, func() bool { return count() == 1 }, "not noted")
	for range maxSilent {
		r.dial(t)
	}
	require.Contains(t, first.gone().Message, "no hello came")
	settles(t, func() bool { return count() == maxSilent }, "not noted")
	foreign.Store(true)
	a := r.client(t)
	b := r.dial(t)
	b.send(map[string]any{"type": "hello", "protocol": Protocol})
	require.Contains(t, b.gone().Message, "has 2 clients")
	foreign.Store(false)
	c := r.client(t)
	require.Contains(t, r.dial(t).gone().Message, "has 2 clients")
	a.close()
	c.close()
	settles(t, func() bool { return r.s.Stats().Clients == 0 }, "places stay taken")
	r.client(t)
}
