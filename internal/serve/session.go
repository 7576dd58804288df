package serve

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// helloTimeout bounds the time until a new client's hello.
const helloTimeout = 10 * time.Second

// session is a client's connection, and what it has open. A goroutine reads requests and gives
// slots back, another one answers in their order, and a third one sends.
type session struct {
	s        *Server
	w        *wire
	out      *outbox
	parent   context.Context // of jobs, which other sessions may share
	ctx      context.Context
	cancel   context.CancelCauseFunc
	foreign  bool           // of another user than the daemon's, root aside
	admitted bool           // by hello; Server.mu guards it
	datasets []*openDataset // by handle, from 1

	mu      sync.Mutex // of the map, and of slots
	loaders map[int]*loader
	made    int // loaders so far
}

// errGone ends a session whose client is gone.
var errGone = errors.New("the client is gone")

// ServeConn serves one client until it or ctx ends, and closes the connection. The error is the
// reason why the client was sent away.
func (s *Server) ServeConn(ctx context.Context, c *net.UnixConn) error {
	x := &session{s: s, w: &wire{c: c, timeout: s.Timeout}, parent: ctx, loaders: map[int]*loader{}}
	defer func() { _ = c.Close() }() // everything is said
	var err error
	if x.foreign, err = s.permit(c); err != nil {
		_ = x.w.write(failure(0, err), -1)
		return err
	}
	x.ctx, x.cancel = context.WithCancelCause(ctx)
	defer x.cancel(nil)
	s.await(x)
	defer s.forget(x)
	stop := context.AfterFunc(x.ctx, func() { _ = c.CloseRead() })
	defer stop()
	requests := make(chan *request, maxWaiting)
	x.out = newOutbox(x.w)
	var wg, sender sync.WaitGroup
	sender.Go(func() { x.out.run(func(err error) { _ = x.wrote(err) }) })
	wg.Go(func() {
		defer close(requests)
		if err := x.readAll(requests); err != nil {
			x.cancel(err)
		}
	})
	for q := range requests {
		if x.ctx.Err() == nil {
			_ = x.wrote(x.handle(q)) // it ends the session
		}
		s.memory.used.Add(-q.taken)
	}
	wg.Wait()
	x.cancel(errGone)
	var all []error
	for _, l := range x.loaders {
		all = append(all, l.close())
	}
	for _, d := range x.datasets {
		all = append(all, d.letGo())
	}
	if cause := context.Cause(x.ctx); ctx.Err() == nil && !errors.Is(cause, errGone) {
		all = append(all, cause)
		if errs.ClassOf(cause) != errs.Failed {
			_ = x.out.post(failure(0, cause), -1) // it may be gone
		}
	}
	x.out.close()
	sender.Wait()
	return errors.Join(all...)
}

// wrote ends the session where a message could not be written.
func (x *session) wrote(err error) error {
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		err = errGone
	}
	if err != nil {
		x.cancel(err)
	}
	return err
}

// readAll reads requests until the client is gone or does what no client may.
func (x *session) readAll(to chan<- *request) error {
	for first := helloTimeout; ; first = 0 {
		q, taken, err := x.readOne(first)
		if err != nil || x.ctx.Err() != nil {
			x.s.memory.used.Add(-taken)
			return err
		}
		if q == nil {
			continue
		}
		q.taken = taken
		select {
		case to <- q:
		default:
			x.s.memory.used.Add(-taken)
			return errs.New(errs.Usage, "protocol: %d requests wait for an answer; wait for some",
				maxWaiting)
		}
	}
}

// readOne reads a request; nil for one that is done at once. wait bounds the time for the first
// one, hello, and is 0 for others. taken is the memory that the request holds.
func (x *session) readOne(wait time.Duration) (q *request, taken int64, err error) {
	greeted := wait == 0
	x.w.room = func(n int64) error {
		if limit := int64(map[bool]int{false: maxSmall, true: maxFrame}[greeted]); n > limit {
			return errs.New(errs.Usage, "protocol: a frame of %d bytes; %d is the most", n, limit)
		}
		if n > maxSmall {
			taken = n * decoded
		}
		err := x.s.memory.take(taken)
		if err != nil {
			taken = 0
		}
		return err
	}
	body, fds, err := x.w.read(wait)
	defer closeAll(fds)
	switch {
	case x.ctx.Err() != nil:
		return nil, taken, nil
	case errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET):
		return nil, taken, errGone
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, taken, errs.New(errs.Usage, "protocol: a frame did not come whole in time")
	case err != nil:
		return nil, taken, err
	}
	if q, err = decode(body); err != nil {
		return nil, taken, err
	}
	if !greeted && q.Type != "hello" {
		return nil, taken, errs.New(errs.Usage, "protocol: %q before hello", q.Type)
	}
	if (q.Type == "loader" || q.Type == "epoch") && len(fds) > 0 {
		var bytes int64
		q.nodes, bytes, err = x.readNodes(fds[0])
		taken += bytes
	}
	if q.Type == "release" {
		err = x.release(q)
		x.s.memory.used.Add(-taken)
		return nil, 0, err
	}
	return q, taken, err
}

// readNodes copies node numbers out of a file in memory, and takes as many bytes of the memory that
// clients share. Nothing of the client's is mapped: whatever becomes of the file, we read what is
// there.
func (x *session) readNodes(fd int) (nodes []int64, taken int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, 0, errs.New(errs.Usage, "protocol: the file of nodes: %w", err)
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, 0, errs.New(errs.Usage, "protocol: the file of nodes is not of memfd_create")
	}
	if st.Size%8 != 0 || st.Size > x.s.Memory {
		return nil, 0, errs.New(errs.Usage,
			"protocol: a file of nodes of %d bytes; it has 8 for each, and at most %d", st.Size,
			x.s.Memory)
	}
	if err := x.s.memory.take(st.Size); err != nil {
		return nil, 0, err
	}
	nodes = make([]int64, st.Size/8)
	for raw := hostmem.Bytes(nodes); len(raw) > 0; {
		n, err := unix.Pread(fd, raw, st.Size-int64(len(raw)))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return nil, st.Size, errs.New(errs.Usage, "protocol: the file of nodes ended early: %v",
				err)
		}
		raw = raw[n:]
	}
	return nodes, st.Size, nil
}

// handle answers a request. An error ends the session; others are sent to the client.
func (x *session) handle(q *request) error {
	if q.Type == "hello" {
		if q.Protocol != Protocol {
			return errs.New(errs.Usage,
				"the client speaks protocol %d, this daemon %d; install the package that belongs to it",
				q.Protocol, Protocol)
		}
		if err := x.s.admit(x); err != nil {
			return err
		}
		welcome := map[string]any{"type": "welcome", "protocol": Protocol, "version": x.s.Version,
			"pid": os.Getpid()}
		if !x.foreign {
			welcome["environment"] = x.s.Environment
		}
		return x.out.say(welcome, -1)
	}
	switch q.Type {
	case "open":
		return x.open(q)
	case "loader":
		return x.loader(q)
	case "epoch", "stop", "close":
	default:
		return errs.New(errs.Usage, "protocol: unknown message %q", q.Type)
	}
	if q.ID < 1 || q.ID > x.made {
		return errs.New(errs.Usage, "protocol: %s of loader %d, which was never made", q.Type, q.ID)
	}
	l := x.loaders[q.ID]
	switch {
	case q.Type == "epoch" && l == nil:
		return x.out.say(failure(q.ID, errs.New(errs.Usage, "loader %d is closed", q.ID)), -1)
	case q.Type == "epoch":
		if err := l.job.start(l, q); err != nil {
			return x.out.say(failure(q.ID, err), -1)
		}
		return nil
	}
	var err error
	kind := "stopped"
	if l != nil {
		l.job.stop(l)
	}
	if q.Type == "close" {
		kind = "closed"
		if l != nil {
			x.mu.Lock()
			delete(x.loaders, q.ID)
			x.mu.Unlock()
			err = l.close()
		}
	}
	if err != nil {
		return x.out.say(failure(q.ID, err), -1)
	}
	return x.out.say(map[string]any{"type": kind, "id": q.ID}, -1)
}

func (x *session) open(q *request) error {
	if len(x.datasets) == maxDatasets {
		return x.out.say(failure(0, errs.New(errs.Capability,
			"a client may open %d datasets; use another connection", maxDatasets)), -1)
	}
	of := OpenRequest{q.Dataset, q.SSDFile, q.SSD, q.Typed, x.foreign}
	d, err := x.s.Backend.Open(x.ctx, of)
	if err != nil {
		return x.answer(err)
	}
	o := &openDataset{Dataset: d, q: of}
	o.users.Store(1)
	x.datasets = append(x.datasets, o)
	return x.out.say(map[string]any{"type": "opened", "dataset": d.Info(),
		"handle": len(x.datasets)}, -1)
}

// answer tells the client of an error of its request, unless the session ends.
func (x *session) answer(err error) error {
	if x.ctx.Err() != nil {
		return nil
	}
	return x.out.say(failure(0, err), -1)
}

func (x *session) loader(q *request) error {
	if q.Handle < 1 || q.Handle > len(x.datasets) {
		return errs.New(errs.Usage, "protocol: no dataset has handle %d", q.Handle)
	}
	l, err := x.newLoader(q)
	if err != nil {
		return x.answer(err)
	}
	m := l.describe("loader")
	m["batches"], m["credits"], m["total"] = l.count, cap(l.free), l.job.from.Batches()
	return x.out.say(m, l.ring.fd)
}

func (x *session) newLoader(q *request) (*loader, error) {
	if len(x.loaders) == maxLoaders {
		return nil, errs.New(errs.Capability, "a client may have %d loaders; close some",
			maxLoaders)
	}
	r, slots, err := x.loaderRequest(q)
	if err != nil {
		return nil, err
	}
	l := &loader{of: x, rank: q.Rank, free: make(chan struct{}, slots), held: map[int]*ring{}}
	for range slots {
		l.free <- struct{}{}
	}
	var first bool
	if l.job, first, err = x.s.join(x.parent, l, x.datasets[q.Handle-1], q.Job, r); err != nil {
		return nil, err
	}
	if first {
		l.job.keep(q)
	}
	select {
	case <-l.job.opened:
		err = l.job.err
	case <-x.ctx.Done():
		err = context.Cause(x.ctx)
	}
	if err == nil {
		slots += l.job.ahead()
		for i := range slots {
			l.spare = append(l.spare, i)
		}
		l.ring, err = newRing(&x.s.memory, slots, firstSlot, l.job.device(), l.job.placer())
	}
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.made++
	l.id = x.made
	l.count = (l.job.from.Batches() + r.World - 1 - l.rank) / r.World
	x.loaders[l.id] = l
	return l, nil
}

// loaderRequest checks what a client asks of a loader.
func (x *session) loaderRequest(q *request) (r LoaderRequest, slots int, err error) {
	r = LoaderRequest{Nodes: q.nodes, Type: q.Of, Shuffle: q.Shuffle, Anew: q.Anew,
		AllLabels: q.Labels, Positions: q.Position, NoBlocks: q.NoBlocks, World: 1,
		Device: cmp.Or(q.Device, "cpu"), Visible: q.Visible, Rests: q.Rests,
		Foreign: x.foreign}
	switch {
	case q.Split == nil && q.nodes == nil:
		return r, 0, errs.New(errs.Usage, "neither a split nor nodes; give one")
	case q.Split != nil && q.nodes != nil:
		return r, 0, errs.New(errs.Usage, "a split and nodes; give one")
	case q.Split != nil:
		r.Split = *q.Split
	}
	if r.Device != "cpu" && r.Device != "cuda" && r.Device != "auto" {
		return r, 0, errs.New(errs.Usage, "device %q is not one of cpu, cuda and auto", r.Device)
	}
	if q.World != nil {
		r.World = *q.World
	}
	if r.World < 1 || r.World > maxWorld || q.Rank < 0 || q.Rank >= r.World {
		return r, 0, errs.New(errs.Usage,
			"rank %d of world %d; it is from 0 to world - 1, and a world has at most %d", q.Rank,
			r.World, maxWorld)
	}
	if r.Rests && (r.Nodes == nil || r.World > 1) {
		return r, 0, errs.New(errs.Usage, "a loader that rests is of nodes and of one rank")
	}
	slots = 4
	if q.Slots != nil {
		slots = *q.Slots
	}
	if slots < 1 || slots > maxSlots {
		return r, 0, errs.New(errs.Usage, "%d slots are not between 1 and %d", slots, maxSlots)
	}
	r.Options, err = texts(q.Options)
	return r, slots, err
}

// release takes a slot back. Of a loader that is closed it says nothing new.
func (x *session) release(q *request) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if q.ID < 1 || q.ID > x.made {
		return errs.New(errs.Usage, "protocol: release of loader %d, which was never made", q.ID)
	}
	l := x.loaders[q.ID]
	if l == nil {
		return nil
	}
	r := l.held[q.Slot]
	if r == nil {
		return errs.New(errs.Usage, "protocol: release of slot %d, which the client does not have",
			q.Slot)
	}
	delete(l.held, q.Slot)
	r.held--
	r.settle()
	l.spare = append(l.spare, q.Slot)
	l.free <- struct{}{}
	l.job.poke()
	return nil
}
