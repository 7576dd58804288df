package ranks

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/testrig"
)

var theSecret = []byte("correct horse battery staple")

// Ranks that know the secret meet; one that knows another, or none, is sent away, and each side
// names what to look at.
func TestSecret(t *testing.T) {
	good := Options{Join: 10 * time.Second, Secret: theSecret}
	groups, failed := join(t, testrig.FreePort(t), []Options{good, good, good})
	require.NoError(t, errors.Join(failed...))
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			_, err := g.AllGather(t.Context(), []byte("x"))
			require.NoError(t, err)
		})
	}
	wg.Wait()
	for name, other := range map[string][]byte{"another": []byte("correct horse battery stable"),
		"none": nil} {
		bad, first := good, good
		first.Join = 500 * time.Millisecond
		bad.Secret = other
		for _, o := range [][]Options{{first, bad}, {bad, first}} {
			o[0].Join = 500 * time.Millisecond
			_, failed := join(t, testrig.FreePort(t), o)
			require.ErrorContains(t, failed[0], "a process on 127.0.0.1: it does not know this run's secret", name)
			require.ErrorContains(t, failed[1], "hangs up when this rank proves", name)
			require.ErrorContains(t, failed[1], "rank-secret-file", name)
			require.Equal(t, errs.Failed, errs.ClassOf(failed[1]), name)
		}
	}
}

// stranger answers a rank's side of the hand-shake on a connection of memory.
func stranger(t *testing.T, came bool, secret []byte, act func(c net.Conn)) (*proven, error) {
	t.Helper()
	here, there := net.Pipe()
	defer func() { _, _ = here.Close(), there.Close() }()
	go act(there)
	g := &overTCP{o: Options{Secret: secret}}
	return g.prove(t.Context(), here, came, time.Now().Add(200*time.Millisecond))
}

// A stranger hears a random number and nothing else, sends back what it hears in vain, and no
// message passes that was changed, or that this end wrote itself.
func TestStrangersHearNothing(t *testing.T) {
	heard := make(chan []byte, 1)
	_, err := stranger(t, false, theSecret, func(c net.Conn) {
		go func() {
			b, _ := io.ReadAll(c)
			heard <- b
		}()
		_ = send(c, kindNonce, make([]byte, nonceBytes))
		_ = send(c, kindProof, make([]byte, 32))
	})
	require.ErrorIs(t, err, errSecret)
	require.Len(t, <-heard, headerBytes+nonceBytes)
	for _, came := range []bool{true, false} {
		_, err := stranger(t, came, theSecret, func(c net.Conn) {
			go func() { _, _ = io.Copy(io.Discard, c) }()
			_ = send(c, kindNonce, make([]byte, nonceBytes-1))
		})
		require.ErrorContains(t, err, "a random number of 31 bytes")
		_, err = stranger(t, came, theSecret, func(c net.Conn) { _, _ = io.Copy(c, c) })
		require.Error(t, err, "its own words")
		_, err = stranger(t, came, theSecret, func(c net.Conn) {
			g := &overTCP{o: Options{Secret: theSecret}}
			_, _ = g.prove(context.Background(), c, came, time.Now().Add(time.Second))
		})
		require.Error(t, err, "two ranks of one side")
	}
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	var p, q *proven
	var wg sync.WaitGroup
	g := &overTCP{o: Options{Secret: theSecret}}
	until := time.Now().Add(5 * time.Second)
	// Ends of a pipe have no room: both send their number first.
	wg.Go(func() { p, _ = g.prove(t.Context(), roomy(a), true, until) })
	wg.Go(func() { q, _ = g.prove(t.Context(), roomy(b), false, until) })
	wg.Wait()
	require.NotNil(t, p)
	require.NotNil(t, q)
	var sent bytes.Buffer
	p.Conn = writer{&limited{}, &sent}
	require.NoError(t, p.sendHello(hello{Rank: 1, Size: 2, Job: "j"}))
	for i, change := range []func(b []byte) []byte{
		func(b []byte) []byte { return b },
		func(b []byte) []byte { return []byte(strings.Replace(string(b), `"size":2`, `"size":3`, 1)) },
		func(b []byte) []byte { return b[:20] },
	} {
		body := change(bytes.Clone(sent.Bytes()[headerBytes:]))
		head := header{kind: kindHello, total: uint64(len(body))}.encode(body)
		in := reader{&limited{}, bytes.NewReader(append(head[:], body...))}
		h, err := (&proven{Conn: in, key: q.key, mine: q.mine, theirs: q.theirs}).receiveHello(
			t.Context(), until)
		if i == 0 {
			require.NoError(t, err)
			require.Equal(t, 2, h.Size)
			in.r.Reset(append(head[:], body...))
			_, err = (&proven{Conn: in, key: q.key, mine: q.theirs, theirs: q.mine}).receiveHello(
				t.Context(), until)
		}
		require.ErrorContains(t, err, "was changed on its way")
	}
}

// roomy is a connection whose writes do not wait for the other end.
func roomy(c net.Conn) net.Conn {
	out := make(chan []byte, 16)
	go func() {
		for b := range out {
			_, _ = c.Write(b)
		}
	}()
	return queued{c, out}
}

type queued struct {
	net.Conn
	out chan []byte
}

func (q queued) Write(b []byte) (int, error) { q.out <- bytes.Clone(b); return len(b), nil }

type writer struct {
	net.Conn
	to *bytes.Buffer
}

func (w writer) Write(b []byte) (int, error) { return w.to.Write(b) }

type reader struct {
	net.Conn
	r *bytes.Reader
}

func (r reader) Read(b []byte) (int, error)        { return r.r.Read(b) }
func (r reader) SetReadDeadline(t time.Time) error { return nil }

// Rank 0 never tells a process that it sends away what job, size or machine it is of.
func TestRefusalsTellNothing(t *testing.T) {
	o := Options{Join: time.Second}
	port := testrig.FreePort(t)
	ended := make(chan error, 1)
	go func() {
		_, err := Join(t.Context(), Launch{Size: 7, Master: "127.0.0.1:" + port, Job: "hush"}, o)
		ended <- err
	}()
	for _, h := range []hello{{Rank: 1, Size: 7, Job: "x"}, {Rank: 1, Size: 3, Job: "hush"},
		{Rank: 9, Size: 7, Job: "hush"}} {
		g := &overTCP{l: Launch{Rank: 1, Master: "127.0.0.1:" + port}, o: o}
		g.waits = &waiting{}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		link, err := g.dial(ctx, 0, g.l.Master)
		require.NoError(t, err)
		require.NoError(t, link.sendHello(h))
		b, err := expect(link, kindHello, helloBytes)
		require.NoError(t, err)
		require.NotContains(t, string(b[32:]), "hush")
		require.NotContains(t, string(b[32:]), "7")
		require.NotContains(t, string(b[32:]), hostname())
		_ = link.Close()
		cancel()
	}
	require.ErrorContains(t, <-ended, "did not come")
}

func TestCheckSecret(t *testing.T) {
	s, err := CheckSecret([]byte(" 0123456789abcdef\r\n"))
	require.NoError(t, err)
	require.Equal(t, "0123456789abcdef", string(s))
	for _, bad := range []string{"", "\n", "0123456789abcde\n", strings.Repeat("x", MaxSecret+1)} {
		_, err := CheckSecret([]byte(bad))
		require.ErrorContains(t, err, "a secret of ranks has 16 to 4096 bytes")
	}
	_, err = CheckSecret(make([]byte, 32))
	require.ErrorContains(t, err, "32 equal bytes")
}

// withNames gives names addresses for a test.
func withNames(t *testing.T, names map[string]string) {
	was := lookup
	t.Cleanup(func() { lookup = was })
	lookup = func(ctx context.Context, network, host string) (all []netip.Addr, err error) {
		if ips, ok := names[host]; ok {
			for _, ip := range strings.Fields(ips) {
				all = append(all, netip.MustParseAddr(ip))
			}
			return all, nil
		}
		if _, err := netip.ParseAddr(host); err != nil {
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}
		return was(ctx, network, host)
	}
}

// Where the first rank listens, by what MASTER_ADDR is on its machine and what the user allows.
func TestWhereRankZeroListens(t *testing.T) {
	// 192.0.2.0/24 is nobody's (RFC 5737).
	withNames(t, map[string]string{"debian": "127.0.1.1", "service": "192.0.2.1",
		"both": "::1 127.0.0.1", "mixed": "192.0.2.1 127.0.0.1", "localhost": "127.0.0.1 ::1"})
	secret := Options{Secret: theSecret}
	for _, c := range []struct {
		host  string
		nodes int
		o     Options
		where string // address; "*": all
		note  string
		class errs.Class
		says  string
	}{
		{"127.0.0.1", 0, Options{}, "127.0.0.1", "", 0, ""},
		{"localhost", 0, Options{}, "127.0.0.1", "", 0, ""},
		{"both", 1, Options{}, "127.0.0.1", "", 0, ""},
		{"debian", 0, Options{}, "127.0.1.1", "MASTER_ADDR=debian (127.0.1.1), not reached from other machines", 0, ""},
		{"debian", 2, Options{}, "127.0.1.1", "not reached from other machines", 0, ""},
		{"debian", 1, Options{}, "127.0.1.1", "", 0, ""},
		{"localhost", 2, Options{}, "127.0.0.1", "not reached from other machines", 0, ""},
		{"127.0.0.1", 2, Options{}, "127.0.0.1", "not reached from other machines", 0, ""},
		{"debian", 0, Options{Insecure: true}, "127.0.1.1", "not reached from other machines", 0, ""},
		{"debian", 0, secret, "*", "rank 0 listens at all addresses", 0, ""},
		{"localhost", 0, secret, "*", "rank 0 listens at all addresses", 0, ""},
		{"localhost", 1, secret, "127.0.0.1", "", 0, ""},
		{"127.0.0.1", 0, secret, "127.0.0.1", "", 0, ""},
		{"127.0.0.1", 2, secret, "*", "rank 0 listens at all addresses", 0, ""},
		{"service", 0, secret, "*", "is no address of this machine", 0, ""},
		{"192.0.2.1", 0, secret, "*", "is no address of this machine", 0, ""},
		{"service", 0, Options{}, "", "", errs.Usage, "MASTER_ADDR=service (192.0.2.1) is no address of rank 0's machine"},
		{"192.0.2.1", 0, Options{Insecure: true}, "", "", errs.Usage, "option rank-listen"},
		{"mixed", 0, Options{}, "", "", errs.Refused, "share no secret"},
		{"0.0.0.0", 0, Options{}, "", "", errs.Refused, "share no secret"},
		{"0.0.0.0", 0, Options{Insecure: true}, "*", "", 0, ""},
		{"nobody", 0, secret, "", "", errs.Usage, "set MASTER_ADDR"},
		{"service", 0, Options{Listen: "127.0.0.1"}, "127.0.0.1", "", 0, ""},
		{"service", 0, Options{Listen: "127.0.0.1:0"}, "127.0.0.1", "", 0, ""},
		{"service", 0, Options{Listen: "[::1]:0"}, "::1", "", 0, ""},
		{"service", 0, Options{Listen: "::1"}, "::1", "", 0, ""},
		{"service", 0, Options{Listen: "both"}, "127.0.0.1", "", 0, ""},
		{"service", 0, Options{Listen: "0.0.0.0"}, "", "", errs.Refused, "share no secret"},
		{"service", 0, Options{Listen: ":0"}, "", "", errs.Refused, "share no secret"},
		{"service", 0, Options{Listen: ":0", Secret: theSecret}, "*", "", 0, ""},
		{"service", 0, Options{Listen: "0.0.0.0", Secret: theSecret}, "*", "", 0, ""},
		{"service", 0, Options{Listen: "192.0.2.7", Secret: theSecret}, "", "", errs.Usage, "option rank-listen 192.0.2.7 is no address of rank 0's machine"},
		{"service", 0, Options{Listen: "tcp://x:1"}, "", "", errs.Usage, "is no ADDRESS or ADDRESS:PORT"},
		{"service", 0, Options{Listen: "127.0.0.1:99999"}, "", "", errs.Usage, "cannot listen"},
		{"service", 0, Options{Listen: "nobody"}, "", "", errs.Usage, "option rank-listen: the address of nobody"},
	} {
		name := strings.Join([]string{c.host, c.o.Listen, c.note, c.says}, " ")
		var notes []string
		c.o.Note = func(text string) { notes = append(notes, text) }
		g := &overTCP{l: Launch{Size: 2, Nodes: c.nodes,
			Master: net.JoinHostPort(c.host, testrig.FreePort(t))}, o: c.o}
		listener, err := g.listen(t.Context())
		if c.says != "" {
			require.ErrorContains(t, err, c.says, name)
			require.Equal(t, c.class, errs.ClassOf(err), name)
			continue
		}
		require.NoError(t, err, name)
		require.NoError(t, listener.Close())
		ip := listener.Addr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if c.where == "*" {
			require.True(t, ip.IsUnspecified(), "%s: %s", name, ip)
		} else {
			require.Equal(t, c.where, ip.String(), name)
		}
		said := strings.Join(notes, "\n")
		require.Contains(t, said, c.note, name)
		require.Equal(t, c.note == "", said == "", "%s: %s", name, said)
	}
}

// The others refuse an address of other machines without a secret, before they connect.
func TestOthersNeedTheSecret(t *testing.T) {
	withNames(t, map[string]string{"service": "192.0.2.1"})
	for host, says := range map[string]string{"service": "MASTER_ADDR=service", "192.0.2.1": "share no secret",
		"nobody": "set MASTER_ADDR"} {
		_, err := Join(t.Context(), Launch{Rank: 1, Size: 2, Master: host + ":9"},
			Options{Join: 5 * time.Second})
		require.ErrorContains(t, err, says)
	}
}

// A rank names the cause of its wait: the first one who is absent, another what keeps it from the
// first.
func TestRanksSayWhatTheyWaitFor(t *testing.T) {
	for r, want := range []string{"rank 0 of 3 waits for ranks [1 2] at 127.0.0.1:",
		"which cannot be reached: dial tcp 127.0.0.1:"} {
		said := make(chan string, 10)
		_, err := Join(t.Context(), Launch{Rank: r, Size: 3, Master: "127.0.0.1:" + testrig.FreePort(t)},
			Options{Join: 300 * time.Millisecond, Patience: 100 * time.Millisecond,
				Note: func(text string) { said <- text }})
		require.Error(t, err)
		require.Contains(t, <-said, want)
		require.Empty(t, said)
	}
}

// A rank that the others no longer hear does not call itself dead.
func TestOneWayCut(t *testing.T) {
	o := Options{Join: 10 * time.Second}
	groups, failed := join(t, testrig.FreePort(t), []Options{o, o})
	require.NoError(t, errors.Join(failed...))
	first := groups[0].(*overTCP)
	why := first.lost(first.peers[1], context.DeadlineExceeded)
	first.fail(why, &failure{1, "b", first.textOf(why, first.peers[1]), int(errs.Failed)})
	<-groups[1].Failed()
	require.ErrorContains(t, groups[1].Err(), "rank 0 on "+hostname()+" has ended the run, for it says of this rank: ")
}
