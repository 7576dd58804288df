package ranks

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"helios/internal/errs"
)

// The first rank listens at the address that all know. Each other rank comes there, says who it is,
// and where it listens itself; when all have come the first one sends everybody the list, with a
// token, and each rank connects to those between the first one and itself. So there is a
// connection for each pair.
//
// Nothing is encrypted, and whoever reaches the port before a rank does can take its place: the
// network has to be private. A stranger that says something else is sent away, and a rank waits on.

// hello is the first message on a connection, and the answer to it.
type hello struct {
	Rank   int      `json:"rank"`
	Size   int      `json:"size"`
	Job    string   `json:"job"`
	Host   string   `json:"host"`
	Listen string   `json:"listen,omitempty"` // port of a rank that waits for those behind it
	Token  string   `json:"token,omitempty"`
	Peers  []string `json:"peers,omitempty"` // addresses, of the first rank's answer
	Refuse string   `json:"refuse,omitempty"`
}

const (
	helloBytes = 1 << 20
	helloTime  = 10 * time.Second
	// How often a rank says that it lives, as a share of the silence that others bear.
	aliveShare = 4
)

type overTCP struct {
	ended
	l     Launch
	o     Options
	peers []*peer // by rank; nil: this one
	bye   atomic.Bool
	sent  atomic.Int64
	wg    sync.WaitGroup
}

// peer is the connection to another rank.
type peer struct {
	rank   int
	host   string
	conn   net.Conn
	mu     sync.Mutex // of writing
	number uint32
	in     chan []byte // messages; a rank is never more than one call ahead of another
	left   atomic.Bool // it said that it leaves
	gone   chan struct{}

	limits sync.Mutex // of last and the deadlines of writing
	last   time.Time  // of the last word to this rank; zero: not yet said
}

// writeUntil sets the deadline of writing, which is never behind that of the last word.
func (p *peer) writeUntil(deadline time.Time) error {
	p.limits.Lock()
	defer p.limits.Unlock()
	if !p.last.IsZero() && p.last.Before(deadline) {
		deadline = p.last
	}
	return p.conn.SetWriteDeadline(deadline)
}

// lastUntil is the deadline of all writing from now on, also of what is under way.
func (p *peer) lastUntil(deadline time.Time) {
	p.limits.Lock()
	defer p.limits.Unlock()
	p.last = deadline
	_ = p.conn.SetWriteDeadline(deadline) // a closed connection takes nothing
}

func newPeer(rank int, host string, c net.Conn) *peer {
	return &peer{rank: rank, host: host, conn: c, in: make(chan []byte, 2),
		gone: make(chan struct{})}
}

func joinTCP(ctx context.Context, l Launch, o Options) (_ Group, err error) {
	g := &overTCP{ended: newEnded(), l: l, o: o, peers: make([]*peer, l.Size)}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Join, errs.New(errs.Failed,
		"not all %d ranks came to %s within %v", l.Size, l.Master, o.Join))
	defer cancel()
	defer func() {
		if err == nil {
			return
		}
		for _, p := range g.peers {
			if p != nil {
				_ = p.conn.Close() // the error is known
			}
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		}
		err = fmt.Errorf("rank %d of %d: %w", l.Rank, l.Size, err)
	}()
	if l.Rank == 0 {
		err = g.gatherRanks(ctx)
	} else {
		err = g.comeTo(ctx)
	}
	if err != nil {
		return nil, err
	}
	for _, p := range g.peers {
		if p != nil {
			g.wg.Go(func() { g.read(p) })
		}
	}
	g.wg.Go(g.stayAlive)
	return g, nil
}

func (g *overTCP) me() hello {
	return hello{Rank: g.l.Rank, Size: g.l.Size, Job: g.o.Job, Host: hostname()}
}

// gatherRanks is the first rank's part of meeting.
func (g *overTCP) gatherRanks(ctx context.Context) error {
	at, err := (&net.ListenConfig{}).Listen(ctx, "tcp", g.l.Master)
	if errors.Is(err, syscall.EADDRINUSE) {
		return errs.New(errs.Usage,
			"%s is in use, by another run or program; give another MASTER_PORT (%w)", g.l.Master,
			err)
	}
	if err != nil {
		return errs.New(errs.Usage,
			"cannot listen at %s; MASTER_ADDR has to be an address of rank 0's machine (%w)",
			g.l.Master, err)
	}
	peers := make([]string, g.l.Size)
	if err := g.accept(ctx, at, g.l.Size-1, "", func(p *peer, h hello) {
		host, _, err := net.SplitHostPort(p.conn.RemoteAddr().String())
		if err == nil {
			peers[p.rank] = net.JoinHostPort(host, h.Listen)
		}
	}); err != nil {
		return err
	}
	h := g.me()
	h.Peers, h.Token = peers, rand.Text()
	for _, p := range g.peers[1:] {
		if err := sendHello(p.conn, h); err != nil {
			return g.lost(p, err)
		}
	}
	return nil
}

// accept waits for n ranks to come, and sends strangers away.
func (g *overTCP) accept(ctx context.Context, at net.Listener, n int, token string,
	come func(p *peer, h hello)) error {
	type arrival struct {
		p      *peer
		h      hello
		refuse error
	}
	stop := context.AfterFunc(ctx, func() { _ = at.Close() })
	defer stop()
	defer func() { _ = at.Close() }()
	arrivals, quit := make(chan arrival), make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{} // that have not said who they are
	defer func() {
		close(quit)
		_ = at.Close()
		mu.Lock()
		for c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	}()
	wg.Go(func() {
		for {
			c, err := at.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			full := len(open) >= 2*MaxSize // of strangers
			if !full {
				open[c] = true
			}
			mu.Unlock()
			if full {
				_ = c.Close()
				continue
			}
			wg.Go(func() {
				h, err := receiveHello(c, time.Now().Add(helloTime))
				mu.Lock()
				delete(open, c)
				mu.Unlock()
				if err != nil {
					_ = c.Close() // no rank
					return
				}
				h.Host = named(h.Host)
				a := arrival{p: newPeer(h.Rank, h.Host, c), h: h}
				if token != "" && h.Token != token {
					_ = c.Close()
					return
				}
				a.refuse = g.stranger(h)
				select {
				case arrivals <- a:
				case <-quit:
					_ = c.Close()
				}
			})
		}
	})
	var refused error // the last one that came and is none of this run
	for n > 0 {
		select {
		case a := <-arrivals:
			if a.refuse == nil && g.peers[a.p.rank] != nil {
				a.refuse = errs.New(errs.Usage, "two processes are rank %d, on %s and on %s",
					a.p.rank, g.peers[a.p.rank].host, a.p.host)
			}
			if a.refuse != nil {
				// Whoever reaches the port can say this: it ends no run.
				if refused == nil || refused.Error() != a.refuse.Error() {
					g.o.note(a.refuse.Error() + "; waiting on")
				}
				refused = a.refuse
				h := g.me()
				h.Refuse = refused.Error()
				wg.Go(func() {
					_ = sendHello(a.p.conn, h) // it may have gone already
					_ = a.p.conn.Close()
				})
				continue
			}
			g.peers[a.p.rank] = a.p
			come(a.p, a.h)
			n--
		case <-ctx.Done():
			var absent []int
			for r, p := range g.peers {
				if p == nil && r != g.l.Rank {
					absent = append(absent, r)
				}
			}
			switch {
			case refused != nil:
				return fmt.Errorf("ranks %v did not come, and the last that was refused: %w", absent,
					refused)
			case g.l.Rank == 0 && at.Addr().(*net.TCPAddr).IP.IsLoopback():
				return fmt.Errorf(
					"ranks %v did not come; MASTER_ADDR is %s here, which no other machine reaches: give all ranks rank 0's address in their network",
					absent, at.Addr())
			}
			return fmt.Errorf("ranks %v did not come", absent)
		}
	}
	return nil
}

// named is the name by which another process calls its machine, as errors show it.
func named(host string) string {
	const most = 64
	if len(host) > most {
		host = strings.ToValidUTF8(host[:most], "") + "…"
	}
	if strings.ContainsFunc(host, func(c rune) bool { return c <= ' ' || !unicode.IsPrint(c) }) {
		return strconv.Quote(host)
	}
	return host
}

// stranger says why a rank is none of this run's.
func (g *overTCP) stranger(h hello) error {
	switch {
	case h.Job != g.o.Job:
		return errs.New(errs.Usage,
			"rank %d on %s is of another run: its options or its job are others; give all ranks the same options, and each run a MASTER_PORT of its own",
			h.Rank, h.Host)
	case h.Size != g.l.Size:
		return errs.New(errs.Usage, "rank %d on %s has WORLD_SIZE=%d, rank %d has %d", h.Rank,
			h.Host, h.Size, g.l.Rank, g.l.Size)
	case h.Rank < 0 || h.Rank >= g.l.Size || h.Rank == g.l.Rank:
		return errs.New(errs.Usage, "two processes are rank %d of %d, or it is none: the other is on %s",
			h.Rank, g.l.Size, h.Host)
	}
	return nil
}

// comeTo is the part of the others.
func (g *overTCP) comeTo(ctx context.Context) error {
	conn, err := dial(ctx, g.l.Master, true)
	if err != nil {
		return err
	}
	first := newPeer(0, g.l.Master, conn)
	g.peers[0] = first
	// At the address by which the first rank sees this one.
	host, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return err
	}
	at, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return fmt.Errorf("listen for other ranks: %w", err)
	}
	defer func() { _ = at.Close() }()
	h := g.me()
	if _, h.Listen, err = net.SplitHostPort(at.Addr().String()); err != nil {
		return err
	}
	if err := sendHello(conn, h); err != nil {
		return fmt.Errorf("rank 0 at %s: %w", g.l.Master, err)
	}
	deadline, _ := ctx.Deadline()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Now()) })
	answer, err := receiveHello(conn, deadline)
	stop()
	if err != nil {
		return fmt.Errorf("rank 0 at %s: %w", g.l.Master, err)
	}
	answer.Host = named(answer.Host)
	if answer.Refuse != "" {
		return errs.New(errs.Usage, "rank 0 on %s refuses this rank: %s", answer.Host,
			cut(answer.Refuse))
	}
	if answer.Rank != 0 || len(answer.Peers) != g.l.Size || answer.Token == "" {
		return errs.New(errs.Usage, "what listens at %s is not rank 0 of this run", g.l.Master)
	}
	if err := g.stranger(answer); err != nil {
		return err
	}
	first.host = answer.Host
	for r := 1; r < g.l.Rank; r++ {
		c, err := dial(ctx, answer.Peers[r], false)
		if err != nil {
			return fmt.Errorf("rank %d at %s: %w", r, answer.Peers[r], err)
		}
		g.peers[r] = newPeer(r, answer.Peers[r], c)
		h := g.me()
		h.Token = answer.Token
		if err := sendHello(c, h); err != nil {
			return g.lost(g.peers[r], err)
		}
	}
	return g.accept(ctx, at, g.l.Size-1-g.l.Rank, answer.Token, func(*peer, hello) {})
}

// dial connects to an address; again and again where nobody may listen there yet.
func dial(ctx context.Context, to string, again bool) (net.Conn, error) {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		c, err := (&net.Dialer{Timeout: helloTime}).DialContext(ctx, "tcp", to)
		if err == nil {
			return c, nil
		}
		var dns *net.DNSError
		if !again || errors.As(err, &dns) && dns.IsNotFound {
			return nil, errs.New(errs.Usage, "cannot reach %s: %w", to, err)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
}

func sendHello(c net.Conn, h hello) error {
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	head := header{kind: kindHello, total: uint64(len(b))}.encode(b)
	if err := c.SetWriteDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	_, err = c.Write(append(head[:], b...))
	return err
}

func receiveHello(c net.Conn, deadline time.Time) (h hello, err error) {
	if err := c.SetReadDeadline(deadline); err != nil {
		return h, err
	}
	f, b, err := readFrame(c, nil, helloBytes)
	if err != nil {
		return h, err
	}
	if f.kind != kindHello {
		return h, fmt.Errorf("its first message is of kind %d", f.kind)
	}
	return h, json.Unmarshal(b, &h)
}

func (g *overTCP) Rank() int        { return g.l.Rank }
func (g *overTCP) Size() int        { return g.l.Size }
func (g *overTCP) Name() string     { return "TCP" }
func (g *overTCP) SentBytes() int64 { return g.sent.Load() }

// lost is the error of a connection that ended.
func (g *overTCP) lost(p *peer, err error) error {
	class := errs.Failed
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errs.New(class,
			"rank %d on %s: no sign of life for %v: its machine, the network or the process hangs",
			p.rank, p.host, g.o.Silence)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		return errs.New(class,
			"rank %d on %s: the connection ended without a word: the process was killed, or its machine went down",
			p.rank, p.host)
	}
	return errs.With(errs.ClassOf(err), fmt.Errorf("rank %d on %s: %w", p.rank, p.host, err))
}

// fail ends the group, unless it has ended, and passes the reason on: a rank that is not connected
// to the one at fault hears of it here.
func (g *overTCP) fail(why error, f *failure) {
	if !g.end(why) {
		return
	}
	b, err := json.Marshal(f)
	if err != nil {
		return
	}
	for _, p := range g.peers {
		if p != nil {
			g.wg.Go(func() { g.farewell(p, kindAbort, b) })
		}
	}
}

// farewell is the last message to a rank.
func (g *overTCP) farewell(p *peer, kind uint8, b []byte) {
	// A message to a rank that takes none holds the lock: its write ends soon, and that of one
	// which is about to take it too.
	until := time.Now().Add(leaveTime / 5)
	p.lastUntil(until)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastUntil(until.Add(leaveTime / 5)) // for this word alone
	if err := p.write(kind, b, until.Add(leaveTime/5)); err == nil {
		// What the other rank has sent is read to its end: closed before, a connection
		// is reset, and the last message is lost.
		if c, ok := p.conn.(*net.TCPConn); ok {
			_ = c.CloseWrite()
		}
	}
	last := leaveTime
	if kind == kindAbort {
		last /= 5 // who hangs is not waited for
	}
	_ = p.conn.SetReadDeadline(time.Now().Add(last))
}

// write sends a message. The lock is the caller's.
func (p *peer) write(kind uint8, b []byte, deadline time.Time) error {
	h := header{kind: kind, total: uint64(len(b))}
	if kind == kindData {
		h.number = p.number
		p.number++
	}
	if err := p.writeUntil(deadline); err != nil {
		return err
	}
	for first := true; first || len(b) > 0; first = false {
		part := b[:min(len(b), frameBytes)]
		b = b[len(part):]
		head := h.encode(part)
		buffers := net.Buffers{head[:], part}
		if _, err := buffers.WriteTo(p.conn); err != nil {
			return err
		}
	}
	return nil
}

// stayAlive tells the others that this rank lives while it has nothing else to say.
func (g *overTCP) stayAlive() {
	tick := time.NewTicker(g.o.Silence / aliveShare)
	defer tick.Stop()
	for {
		select {
		case <-g.done:
			return
		case <-tick.C:
			for _, p := range g.peers {
				// A long message is a sign of life itself.
				if p == nil || !p.mu.TryLock() {
					continue
				}
				// An end of the connection shows when it is read.
				_ = p.write(kindAlive, nil, time.Now().Add(g.o.Silence))
				p.mu.Unlock()
			}
		}
	}
}

// read takes what a rank sends, until the connection ends.
func (g *overTCP) read(p *peer) {
	defer close(p.gone)
	if err := g.receive(p); !p.left.Load() && !g.bye.Load() {
		why := g.lost(p, err)
		g.fail(why, &failure{p.rank, p.host, g.textOf(why, p), int(errs.ClassOf(why))})
	}
}

// textOf is a failure's text without the name of the rank, which it is sent with.
func (g *overTCP) textOf(why error, p *peer) string {
	text, prefix := why.Error(), fmt.Sprintf("rank %d on %s: ", p.rank, p.host)
	if len(text) > len(prefix) && text[:len(prefix)] == prefix {
		text = text[len(prefix):]
	}
	return cut(text)
}

// receive returns how the connection ended.
func (g *overTCP) receive(p *peer) error {
	var message, buf []byte
	number, within := uint32(0), false
	for {
		if err := g.readUntil(p); err != nil {
			return err
		}
		h, b, err := readFrame(p.conn, buf, frameBytes)
		if err != nil {
			return err
		}
		buf = b
		switch h.kind {
		case kindAlive:
		case kindBye:
			p.left.Store(true)
		case kindAbort:
			f, err := readFailure(b)
			if err != nil {
				return err
			}
			g.fail(f.err(), f)
		case kindData:
			if h.number != number || uint64(len(message)+len(b)) > h.total ||
				len(b) == 0 && h.total > 0 {
				return fmt.Errorf("message %d comes where %d should", h.number, number)
			}
			if !within {
				message = make([]byte, 0, min(h.total, 16*frameBytes)) // more as it arrives
			}
			message = append(message, b...)
			if within = uint64(len(message)) < h.total; within {
				continue
			}
			number++
			select {
			case p.in <- message:
			case <-g.done:
			}
			message = nil
		default:
			return fmt.Errorf("a message of kind %d", h.kind)
		}
	}
}

// readUntil sets the deadline of the next frame. After the group's end farewell has set the last.
func (g *overTCP) readUntil(p *peer) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.why != nil {
		return nil
	}
	return p.conn.SetReadDeadline(time.Now().Add(g.o.Silence))
}

func (g *overTCP) AllGather(ctx context.Context, mine []byte) ([][]byte, error) {
	return g.Exchange(ctx, same(mine, g.l.Size))
}

func (g *overTCP) Exchange(ctx context.Context, out [][]byte) ([][]byte, error) {
	if err := wrong(out, g.l.Size); err != nil {
		return nil, err
	}
	if err := g.Err(); err != nil {
		return nil, err
	}
	until := time.Now().Add(g.o.Wait)
	timer := time.NewTimer(g.o.Wait)
	defer timer.Stop()
	var writes sync.WaitGroup
	for r, p := range g.peers {
		if p == nil {
			continue
		}
		if len(out[r]) > mostMessage {
			return nil, tooLong(g.l.Rank, hostname(), uint64(len(out[r])))
		}
		g.sent.Add(int64(len(out[r])))
		writes.Go(func() {
			p.mu.Lock()
			err := p.write(kindData, out[r], until)
			p.mu.Unlock()
			// Where the rank has ended, its last word or the end of the connection is still to be
			// read, and says more.
			if err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
				why := g.slow(p)
				g.fail(why, &failure{p.rank, p.host, g.textOf(why, p), int(errs.Failed)})
			}
		})
	}
	defer writes.Wait()
	in := make([][]byte, g.l.Size)
	in[g.l.Rank] = append([]byte(nil), out[g.l.Rank]...)
	for r, p := range g.peers {
		if p == nil {
			continue
		}
		select {
		case in[r] = <-p.in:
		case <-p.gone:
			select {
			case in[r] = <-p.in:
				continue
			case <-g.done:
				return nil, g.Err()
			default:
			}
			why := errs.New(errs.Failed, "rank %d on %s: it has left, and is waited for", p.rank,
				p.host)
			g.fail(why, &failure{p.rank, p.host, g.textOf(why, p), int(errs.Failed)})
			return nil, why
		case <-g.done:
			return nil, g.Err()
		case <-ctx.Done():
			err := context.Cause(ctx)
			g.Abort(err)
			return nil, err
		case <-timer.C:
			why := g.slow(p)
			g.fail(why, &failure{p.rank, p.host, g.textOf(why, p), int(errs.Failed)})
			return nil, g.Err()
		}
	}
	return in, nil
}

func (g *overTCP) slow(p *peer) error {
	return errs.New(errs.Failed,
		"rank %d on %s: no answer within %v, though its machine answers; raise option rank-timeout if it is only slow",
		p.rank, p.host, g.o.Wait)
}

func (g *overTCP) Abort(cause error) {
	g.fail(fmt.Errorf("%w: %w", errAborted, cause),
		&failure{g.l.Rank, hostname(), cut(cause.Error()), int(errs.ClassOf(cause))})
}

// Close leaves the others. It waits until all have left, so that no last message is lost, but not
// for a rank that hangs.
func (g *overTCP) Close() error {
	g.bye.Store(true)
	if g.end(errClosed) {
		for _, p := range g.peers {
			if p != nil {
				g.farewell(p, kindBye, nil)
			}
		}
	}
	done := make(chan struct{})
	go func() { g.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(leaveTime + leaveTime/5):
	}
	var all []error
	for _, p := range g.peers {
		if p != nil {
			if err := p.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				all = append(all, err)
			}
		}
	}
	<-done
	return errors.Join(all...)
}
