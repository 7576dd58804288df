package ranks

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// The first rank listens at the address that all know. Each other rank comes there, says who it is,
// and where it listens itself; when all have come the first one sends everybody the list, with a
// token, and each rank connects to those between the first one and itself. So there is a
// connection for each pair.
//
// A stranger is sent away, and a rank waits on; see prove.go for who is none.

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
	// The most refusals that a rank notes while it waits.
	maxRefusals = 20
	// How often a rank says that it lives, as a share of the silence that others bear.
	aliveShare = 4
	// How often a rank that waits for others looks whether the first one is still there.
	lookEvery = 100 * time.Millisecond
)

type overTCP struct {
	ended
	l     Launch
	o     Options
	peers []*peer // by rank; nil: this one
	bye   atomic.Bool
	sent  atomic.Int64
	wg    sync.WaitGroup
	waits *waiting // while ranks meet
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
	g.waits = g.startWaiting()
	defer func() {
		g.waits.end()
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
	return hello{Rank: g.l.Rank, Size: g.l.Size, Job: g.l.Job, Host: hostname()}
}

// gatherRanks is the first rank's part of meeting.
func (g *overTCP) gatherRanks(ctx context.Context) error {
	listener, err := g.listen(ctx)
	if err != nil {
		return err
	}
	peers, links := make([]string, g.l.Size), make([]*proven, g.l.Size)
	if err := g.accept(ctx, listener, g.l.Size-1, "", func(p *peer, link *proven, h hello) {
		links[p.rank] = link
		host, _, err := net.SplitHostPort(p.conn.RemoteAddr().String())
		if err == nil {
			peers[p.rank] = net.JoinHostPort(host, h.Listen)
		}
	}); err != nil {
		return err
	}
	h := g.me()
	h.Peers, h.Token = peers, rand.Text()
	for r, link := range links[1:] {
		if err := link.sendHello(h); err != nil {
			return g.lost(g.peers[1+r], err)
		}
	}
	return nil
}

// accept waits for n ranks to come, and sends strangers away.
func (g *overTCP) accept(ctx context.Context, listener net.Listener, n int, token string,
	come func(p *peer, link *proven, h hello)) error {
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	meet, cancel := context.WithCancel(ctx)
	d := &door{listener: listener, arrivals: make(chan arrival), quit: make(chan struct{}),
		limit: 2 * MaxSize}
	var wg sync.WaitGroup
	defer func() {
		close(d.quit)
		cancel()
		_ = listener.Close()
		wg.Wait()
	}()
	wg.Go(func() {
		d.serve(&wg, func(c net.Conn) (arrival, error) { return g.receiveRank(meet, c, token) })
	})
	var refused error // the last one that came and is none of this run
	notes := 0
	for n > 0 {
		g.waits.set(fmt.Sprintf("ranks %v at %s", g.absent(), listener.Addr()))
		select {
		case a := <-d.arrivals:
			again := false
			if a.refuse == nil && g.peers[a.p.rank] != nil {
				// One that was killed may be started again, before rank 0 has answered.
				if again = token == "" && g.peers[a.p.rank].hasEnded(); !again {
					a.reply = "another process has come as this rank"
					a.refuse = errs.New(errs.Usage, "two processes are rank %d, on %s and on %s",
						a.p.rank, g.peers[a.p.rank].host, a.p.host)
				}
			}
			if a.refuse != nil {
				// Whoever reaches the port can say this: it ends no run, and fills no disk.
				if refused == nil || refused.Error() != a.refuse.Error() && notes < maxRefusals {
					g.o.note(a.refuse.Error() + "; waiting on")
					notes++
				}
				refused = a.refuse
				wg.Go(func() {
					if a.reply != "" {
						_ = a.link.sendHello(hello{Refuse: a.reply}) // it may have gone already
					}
					_ = a.p.conn.Close()
				})
				continue
			}
			if again {
				_ = g.peers[a.p.rank].conn.Close()
			} else {
				n--
			}
			g.peers[a.p.rank] = a.p
			come(a.p, a.link, a.h)
		case <-ctx.Done():
			return g.notCome(listener, refused)
		}
	}
	return nil
}

// hasEnded reports whether a rank that waits in silence for the first one's answer has gone.
func (p *peer) hasEnded() bool {
	_ = p.conn.SetReadDeadline(time.Now().Add(time.Millisecond)) // the read fails, too
	_, err := p.conn.Read(make([]byte, 1))
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

// receiveRank lets a process that came say who it is. It fails for what is no heliosctl.
func (g *overTCP) receiveRank(ctx context.Context, c net.Conn, token string) (a arrival,
	err error) {
	deadline := time.Now().Add(helloTime)
	a.p = newPeer(0, "", c)
	if a.link, err = g.prove(ctx, c, false, deadline); err != nil {
		if errors.Is(err, errSecret) {
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			a.refuse = errs.New(errs.Usage,
				"a process on %s: %w; give all ranks the same one, by $HELIOS_RANK_SECRET or {rank-secret-file}",
				host, err)
			return a, nil
		}
		return a, err
	}
	if a.h, err = a.link.receiveHello(ctx, deadline); err != nil {
		return a, err
	}
	if token != "" && a.h.Token != token {
		return a, errors.New("it belongs to another meeting")
	}
	a.p.rank, a.p.host = a.h.Rank, named(a.h.Host)
	a.reply, a.refuse = g.stranger(a.h)
	return a, nil
}

// absent are the ranks that have not come.
func (g *overTCP) absent() (all []int) {
	for r, p := range g.peers {
		if p == nil && r != g.l.Rank {
			all = append(all, r)
		}
	}
	return all
}

// notCome is the error where the time is up.
func (g *overTCP) notCome(listener net.Listener, refused error) error {
	switch {
	case refused != nil:
		return fmt.Errorf("ranks %v did not come, and the last that was refused: %w", g.absent(),
			refused)
	case g.l.Rank == 0 && listener.Addr().(*net.TCPAddr).IP.IsLoopback():
		return fmt.Errorf(
			"ranks %v did not come; MASTER_ADDR is %s here, which no other machine reaches: give all ranks rank 0's address in their network",
			g.absent(), listener.Addr())
	}
	return fmt.Errorf("ranks %v did not come", g.absent())
}

// named is the name by which another process calls its machine, as errors show it.
func named(host string) string {
	const limit = 64
	if len(host) > limit {
		host = strings.ToValidUTF8(host[:limit], "") + "…"
	}
	if strings.ContainsFunc(host, func(c rune) bool { return c <= ' ' || !unicode.IsPrint(c) }) {
		return strconv.Quote(host)
	}
	return host
}

// stranger returns the reason why a rank is none of this run's: err to the user, and reply, which
// tells nothing of the run, to that rank.
func (g *overTCP) stranger(h hello) (reply string, err error) {
	host := named(h.Host)
	switch {
	case h.Job != g.l.Job:
		return "it belongs to another run: its options or its job are others; give all ranks the same options, and each run a MASTER_PORT of its own",
			errs.New(errs.Usage,
				"rank %d on %s belongs to another run: its options or its job are others; give all ranks the same options, and each run a MASTER_PORT of its own",
				h.Rank, host)
	case h.Size != g.l.Size:
		return "its number of ranks (WORLD_SIZE) is another; this rank's output has it",
			errs.New(errs.Usage, "rank %d on %s has WORLD_SIZE=%d, rank %d has %d", h.Rank, host,
				h.Size, g.l.Rank, g.l.Size)
	case h.Rank < 0 || h.Rank >= g.l.Size || h.Rank == g.l.Rank:
		return "another process has its rank, or it is none",
			errs.New(errs.Usage, "two processes are rank %d of %d, or it is none: the other is on %s",
				h.Rank, g.l.Size, host)
	}
	return "", nil
}

// comeTo is the part of the others.
func (g *overTCP) comeTo(ctx context.Context) error {
	host, _, err := net.SplitHostPort(g.l.Master)
	if err != nil {
		return err
	}
	all, err := addresses(ctx, host)
	if err != nil {
		return noMaster(err)
	}
	if err := g.o.mayMeet("MASTER_ADDR="+host, all); err != nil {
		return err
	}
	link, err := g.dial(ctx, 0, g.l.Master)
	if err != nil {
		return err
	}
	first := newPeer(0, g.l.Master, link.Conn)
	g.peers[0] = first
	listener, err := g.listenForOthers(ctx, host, link)
	if err != nil {
		return fmt.Errorf("listen for other ranks: %w", err)
	}
	defer func() { _ = listener.Close() }()
	h := g.me()
	if _, h.Listen, err = net.SplitHostPort(listener.Addr().String()); err != nil {
		return err
	}
	answer, err := g.introduce(ctx, link, h)
	if err != nil {
		return fmt.Errorf("rank 0 at %s: %w", g.l.Master, err)
	}
	first.host = named(answer.Host)
	there, stop := g.whileThere(ctx, first)
	defer stop()
	if err = g.meetOthers(there, listener, &answer); err != nil && ctx.Err() == nil &&
		there.Err() != nil {
		err = fmt.Errorf("%w (%w)", context.Cause(there), err)
	}
	return err
}

// meetOthers connects to the ranks between the first one and this one, and waits for those behind.
func (g *overTCP) meetOthers(ctx context.Context, listener net.Listener, answer *hello) error {
	for r := 1; r < g.l.Rank; r++ {
		to := seenFrom(g.peers[0].conn.RemoteAddr(), answer.Peers[r])
		link, err := g.dial(ctx, r, to)
		if err != nil {
			return err
		}
		g.peers[r] = newPeer(r, to, link.Conn)
		h := g.me()
		h.Token = answer.Token
		if err := link.sendHello(h); err != nil {
			return g.lost(g.peers[r], err)
		}
	}
	return g.accept(ctx, listener, g.l.Size-1-g.l.Rank, answer.Token,
		func(*peer, *proven, hello) {})
}

// whileThere returns a context that ends where the first rank goes: it has met all ranks, so it
// leaves where one of them is lost, which a rank that still waits for that one would not hear of.
func (g *overTCP) whileThere(ctx context.Context, first *peer) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(lookEvery):
			}
			if first.closed() {
				cancel(errs.New(errs.Failed,
					"rank 0 on %s left before all ranks had met; its own output says why", first.host))
			}
		}
	})
	return ctx, func() {
		cancel(nil)
		wg.Wait()
	}
}

// closed reports whether the other side has closed the connection, also where something that it
// sent before is not yet read.
func (p *peer) closed() bool {
	conn, is := p.conn.(syscall.Conn)
	if !is {
		return false
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		// EINTR: the next look
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
	})
	return err != nil || n > 0
}

// listenForOthers opens a port for the ranks behind this one, at the address by which the first
// rank sees this one; host is MASTER_ADDR's.
func (g *overTCP) listenForOthers(ctx context.Context, host string,
	link *proven) (net.Listener, error) {
	own := *link.LocalAddr().(*net.TCPAddr)
	if own.Port = 0; own.IP.IsLoopback() && g.othersCome(host) {
		own.IP = nil
	}
	return (&net.ListenConfig{}).Listen(ctx, "tcp", own.String())
}

// seenFrom is the address of a rank. One that runs beside the first rank may have come to it over
// loopback: from another machine it is found where the first one is.
func seenFrom(first net.Addr, peer string) string {
	host, port, err := net.SplitHostPort(peer)
	if ip := net.ParseIP(host); err != nil || !ip.IsLoopback() {
		return peer
	}
	seen := first.(*net.TCPAddr)
	if seen.IP.IsLoopback() {
		return peer
	}
	return net.JoinHostPort((&net.IPAddr{IP: seen.IP, Zone: seen.Zone}).String(), port)
}

// introduce says to the first rank who this one is, and returns the answer, which comes when all
// ranks have come.
func (g *overTCP) introduce(ctx context.Context, link *proven, h hello) (answer hello, err error) {
	if err := link.sendHello(h); err != nil {
		return answer, err
	}
	g.waits.set("the other ranks: rank 0 at " + g.l.Master + " has met this one")
	deadline, _ := ctx.Deadline()
	answer, err = link.receiveHello(ctx, deadline)
	switch {
	case err != nil:
		return answer, err
	case answer.Refuse != "":
		return answer, errs.New(errs.Usage, "refuses this rank: %s", cut(answer.Refuse))
	case answer.Rank != 0 || len(answer.Peers) != g.l.Size || answer.Token == "":
		return answer, errs.New(errs.Usage, "what listens there is not rank 0 of this run")
	}
	_, err = g.stranger(answer)
	return answer, err
}

// dial connects to a rank, and proves this one to it. It tries again where the first rank does not
// listen yet, and where one hangs up before it has sent its number: strangers took its places, or
// another program listens there.
func (g *overTCP) dial(ctx context.Context, rank int, to string) (*proven, error) {
	g.waits.set(fmt.Sprintf("rank %d at %s", rank, to))
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		c, err := (&net.Dialer{Timeout: helloTime}).DialContext(ctx, "tcp", to)
		var dns *net.DNSError
		if unknown := errors.As(err, &dns) && dns.IsNotFound; err != nil && (rank > 0 || unknown) {
			class := errs.Failed // it listened a moment ago: it was killed, or the network ended
			if unknown {
				class = errs.Usage
			}
			return nil, errs.New(class, "cannot reach rank %d at %s: %w", rank, to, err)
		}
		if err == nil {
			deadline, _ := ctx.Deadline()
			var link *proven
			if link, err = g.prove(ctx, c, true, deadline); err == nil {
				return link, nil
			}
			_ = c.Close()
			if err = fmt.Errorf("rank %d at %s: %w", rank, to, err); !errors.Is(err, errEarly) {
				return nil, err
			}
		}
		g.waits.set(fmt.Sprintf("rank %d at %s, which cannot be reached: %v", rank, to, err))
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
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
			"rank %d on %s: no sign of life for %v, says rank %d on %s: its machine, the network or the process hangs",
			p.rank, p.host, g.o.Silence, g.l.Rank, hostname())
	case hungUp(err):
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
		// The other rank's last message is read to its end: closed before, a connection
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
			why := f.err()
			if f.Rank == g.l.Rank {
				// Of this one, which lives: what it sends does not arrive.
				why = errs.New(errs.Class(f.Class), "rank %d on %s has ended the run, for it says of this rank: %s",
					p.rank, p.host, f.Text)
			}
			g.fail(why, f)
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
		"rank %d on %s: no answer within %v, though its machine answers; raise {rank-timeout} if it is only slow",
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
