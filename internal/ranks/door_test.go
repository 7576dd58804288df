package ranks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/testrig"
)

// scarce is a listener that has no file for the fourth connection at first.
type scarce struct {
	net.Listener
	calls int
}

func (s *scarce) Accept() (net.Conn, error) {
	if s.calls++; s.calls == 4 {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return s.Listener.Accept()
}

// Strangers who say nothing take every place, or every file: those that came first go, and a rank
// that comes last is let in.
func TestSilentStrangersKeepNobodyOut(t *testing.T) {
	for _, limit := range []int{3, 100} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		l := listener
		if limit > 3 {
			l = &scarce{Listener: listener}
		}
		d := &door{listener: l, arrivals: make(chan arrival), quit: make(chan struct{}),
			limit: limit}
		var wg sync.WaitGroup
		served := make(chan struct{})
		go func() {
			d.serve(&wg, func(c net.Conn) (arrival, error) {
				_, err := io.ReadFull(c, make([]byte, 1))
				return arrival{p: newPeer(0, "", c)}, err
			})
			close(served)
		}()
		var all []net.Conn
		for range 6 {
			c, err := net.Dial("tcp", listener.Addr().String())
			require.NoError(t, err)
			all = append(all, c)
		}
		require.NoError(t, all[0].SetReadDeadline(time.Now().Add(10*time.Second)))
		_, err = all[0].Read(make([]byte, 1))
		require.True(t, hungUp(err), "the first one stays: %v", err)
		_, err = all[5].Write([]byte("x"))
		require.NoError(t, err)
		a := <-d.arrivals
		require.Equal(t, all[5].LocalAddr(), a.p.conn.RemoteAddr())
		close(d.quit)
		for _, c := range append(all, a.p.conn) {
			_ = c.Close()
		}
		wg.Wait()
		require.NoError(t, listener.Close())
		<-served
	}
}

// A rank that was killed while it waited may be started again; a second one beside it may not.
func TestRankIsStartedAgain(t *testing.T) {
	var mu sync.Mutex
	var notes []string
	o := Options{Join: 10 * time.Second, Note: func(text string) {
		mu.Lock()
		defer mu.Unlock()
		notes = append(notes, text)
	}}
	port := testrig.FreePort(t)
	var leave sync.WaitGroup
	leaving := make(chan struct{})
	defer leave.Wait()
	defer close(leaving)
	start := func(ctx context.Context, rank int) <-chan error {
		ended := make(chan error, 1)
		go func() {
			g, err := Join(ctx, Launch{Rank: rank, Size: 3, Master: "127.0.0.1:" + port, Job: "a"}, o)
			if err == nil {
				leave.Go(func() { <-leaving; _ = g.Close() }) // each waits for the others to leave
			}
			ended <- err
		}()
		return ended
	}
	first := start(t.Context(), 0)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	require.Error(t, <-start(ctx, 1))
	again := start(t.Context(), 1)
	time.Sleep(300 * time.Millisecond)
	require.ErrorContains(t, <-start(t.Context(), 1), "another process has come as this rank")
	last := start(t.Context(), 2)
	require.NoError(t, errors.Join(<-first, <-again, <-last))
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, notes, 1)
	require.Contains(t, notes[0], "two processes are rank 1")
}

// Refusals without end, each of another text, are noted a few times.
func TestRefusalsAreNotedAFewTimes(t *testing.T) {
	notes := 0
	o := Options{Join: 2 * time.Second, Note: func(string) { notes++ }, Patience: time.Minute}
	master := "127.0.0.1:" + testrig.FreePort(t)
	ended := make(chan error, 1)
	go func() {
		_, err := Join(t.Context(), Launch{Size: 2, Master: master}, o)
		ended <- err
	}()
	for i := range 2 * maxRefusals {
		g := &overTCP{l: Launch{Rank: 1, Master: master}, waits: &waiting{}}
		link, err := g.dial(t.Context(), 0, master)
		require.NoError(t, err)
		h := hello{Rank: 1, Size: 2, Job: "x", Host: fmt.Sprint("h", i)}
		require.NoError(t, link.sendHello(h))
		_, err = link.receiveHello(t.Context(), time.Now().Add(time.Second))
		require.NoError(t, err)
		require.NoError(t, link.Close())
	}
	require.ErrorContains(t, <-ended, "the last that was refused: rank 1 on h39 belongs to another run")
	require.Equal(t, maxRefusals, notes)
}

// Where the first rank's machine calls itself 127.0.1.1, as Debian does, a rank beside it comes
// over loopback, and those of other machines find it at the first one's address.
func TestRanksBesideTheFirstAreFound(t *testing.T) {
	far := &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 9}
	near := &net.TCPAddr{IP: net.ParseIP("127.0.1.1"), Port: 9}
	for _, c := range []struct {
		first      net.Addr
		peer, want string
	}{
		{far, "127.0.0.1:7", "192.0.2.1:7"}, {far, "[::1]:7", "192.0.2.1:7"},
		{far, "192.0.2.2:7", "192.0.2.2:7"}, {near, "127.0.0.1:7", "127.0.0.1:7"},
		{&net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}, "127.0.0.1:7", "[fe80::1%eth0]:7"},
	} {
		require.Equal(t, c.want, seenFrom(c.first, c.peer))
	}
	here, there := net.Pipe()
	defer func() { _, _ = here.Close(), there.Close() }()
	for nodes, all := range []bool{true, false, true} {
		g := &overTCP{l: Launch{Nodes: nodes}, o: Options{Secret: theSecret}}
		l, err := g.listenForOthers(t.Context(), "debian", &proven{Conn: at{here, near}})
		require.NoError(t, err)
		require.Equal(t, all, l.Addr().(*net.TCPAddr).IP.IsUnspecified(), "%d nodes", nodes)
		require.NoError(t, l.Close())
	}
}

type at struct {
	net.Conn
	local net.Addr
}

func (a at) LocalAddr() net.Addr { return a.local }

// A name's server that does not answer yet is asked again.
func TestNamesAreAskedAgain(t *testing.T) {
	withNames(t, map[string]string{"later": "192.0.2.1"})
	names, calls := lookup, 0
	lookup = func(ctx context.Context, network, host string) ([]netip.Addr, error) {
		if calls++; calls == 1 {
			return nil, &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}
		}
		return names(ctx, network, host)
	}
	all, err := addresses(t.Context(), "later")
	require.NoError(t, err)
	require.Equal(t, []netip.Addr{netip.MustParseAddr("192.0.2.1")}, all)
}
