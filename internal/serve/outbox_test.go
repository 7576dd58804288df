package serve

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// outboxOn returns an outbox that runs, how it failed, and its client; the socket holds few
// messages.
func outboxOn(t *testing.T, timeout time.Duration) (o *outbox, failed chan error, c *client) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	require.NoError(t, unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 1))
	var ends [2]*wire
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "end")
		conn, err := net.FileConn(f)
		require.NoError(t, errors.Join(err, f.Close()))
		ends[i] = &wire{c: conn.(*net.UnixConn), timeout: timeout}
	}
	o, failed = newOutbox(ends[0]), make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { o.run(func(err error) { failed <- err }) })
	t.Cleanup(func() {
		_ = ends[1].c.Close() // it may be closed
		o.close()
		wg.Wait()
		_ = ends[0].c.Close() // everything is said
	})
	return o, failed, &client{t: t, w: ends[1]}
}

// Messages of several senders come whole and in each one's order, whether the socket takes them at
// once, in parts or later, and descriptors come with their own.
func TestOutboxKeepsOrder(t *testing.T) {
	o, _, c := outboxOn(t, 20*time.Second)
	const senders, each = 4, 300
	var wg sync.WaitGroup
	for id := range senders {
		wg.Go(func() {
			for i := range each {
				m := map[string]any{"id": id, "index": i, "message": strings.Repeat("x", i*37%9000)}
				send, fd := o.post, -1
				if i%7 == 3 {
					send = o.say
				}
				if i%11 == 5 {
					fd = 0
				}
				if err := send(m, fd); err != nil {
					t.Errorf("message %d of %d: %v", i, id, err)
					return
				}
			}
		})
	}
	var next [senders]int
	for k := range senders * each {
		if k%50 == 0 {
			time.Sleep(time.Millisecond) // the queue grows
		}
		body, fds, err := c.w.read(20 * time.Second)
		require.NoError(t, err)
		var a answer
		require.NoError(t, json.Unmarshal(body, &a), "%s", body)
		require.Equal(t, next[a.ID], a.Index)
		require.Len(t, a.Message, a.Index*37%9000)
		require.Equal(t, a.Index%11 == 5, len(fds) == 1, "%d descriptors came with %d", len(fds),
			a.Index)
		closeAll(fds)
		next[a.ID]++
	}
	wg.Wait()
}

// A client that does not read holds up nobody who posts, and is told of as gone when a message that
// the socket took in part is late; behind one that closed, each message says so.
func TestOutboxOfDeafClient(t *testing.T) {
	o, failed, _ := outboxOn(t, 50*time.Millisecond)
	for range 100 {
		require.NoError(t, o.post(strings.Repeat("x", 5000), -1))
	}
	require.ErrorIs(t, <-failed, os.ErrDeadlineExceeded)
	require.ErrorIs(t, o.say("more", -1), os.ErrDeadlineExceeded)

	o, failed, c := outboxOn(t, time.Second)
	require.NoError(t, o.say("first", -1))
	require.NoError(t, c.w.c.Close())
	require.ErrorIs(t, o.post("at once", -1), unix.EPIPE)
	require.ErrorIs(t, o.say("more", -1), unix.EPIPE)
	require.Empty(t, failed)
}
