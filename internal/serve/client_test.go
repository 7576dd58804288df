package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// fakeBackend opens datasets whose batches hold numbers that identify them.
type fakeBackend struct {
	open    atomic.Int64 // datasets and loaders
	passes  atomic.Int64
	made    atomic.Int64 // batches
	rows    func(index int) int
	batches int
	ahead   int // batches that are made in their places
}

// fakePlace has room for larger batches than its slot.
type fakePlace struct {
	b   *fakeBackend
	mem []byte
}

const fakePlaceBytes = 4 << 20

func (p *fakePlace) Close() error {
	p.b.open.Add(-1)
	return hostmem.Free(p.mem)
}

func (l *fakeLoader) Ahead() int { return l.d.b.ahead }

func (l *fakeLoader) Place(fd int, offset, bytes int64) (Place, error) {
	mem, err := hostmem.MapFile(fd, offset, min(bytes, fakePlaceBytes), fakePlaceBytes, "place")
	if err != nil {
		return nil, err
	}
	l.d.b.open.Add(1)
	return &fakePlace{l.d.b, mem}, nil
}

type fakeDataset struct {
	b    *fakeBackend
	name string
	once sync.Once
}

type fakeLoader struct {
	d *fakeDataset
	q LoaderRequest
}

func (b *fakeBackend) Open(_ context.Context, q OpenRequest) (Dataset, error) {
	if q.Dataset == "none" {
		return nil, errs.New(errs.Usage, "no dataset %s", q.Dataset)
	}
	b.open.Add(1)
	return &fakeDataset{b: b, name: q.Dataset}, nil
}

func (d *fakeDataset) Info() DatasetInfo { return DatasetInfo{Name: d.name, Nodes: 10} }

func (d *fakeDataset) Close() error {
	d.once.Do(func() { d.b.open.Add(-1) })
	return nil
}

func (d *fakeDataset) Loader(ctx context.Context, q LoaderRequest) (Loader, error) {
	switch q.Options["do"] {
	case "fail":
		return nil, errs.New(errs.Device, "the SSD is gone")
	case "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	d.b.open.Add(1)
	return &fakeLoader{d, q}, nil
}

func (l *fakeLoader) Batches() int { return l.d.b.batches }

func (l *fakeLoader) BytesRead() int64 { return 0 }

// Seed has a batch for each node.
func (l *fakeLoader) Seed(nodes []int64) error {
	if slices.Contains(nodes, -1) {
		return errs.New(errs.Usage, "node -1 is not there")
	}
	l.d.b.batches = len(nodes)
	return nil
}

func (l *fakeLoader) Close() error { l.d.b.open.Add(-1); return nil }

// badEpoch ends with an error in place of its last batch.
const badEpoch = 1 << 20

// number is the content of every element of a batch.
func number(dataset string, epoch, index int) int64 {
	return int64(dataset[0])*1_000_000 + int64(epoch)*1000 + int64(index)
}

func (l *fakeLoader) Epoch(ctx context.Context, epoch int, batches []int,
	claim func(int) Place, emit func(*Batch) error) error {
	l.d.b.passes.Add(1)
	type made struct {
		v     []int64
		place Place
	}
	began := map[int]made{}
	begin := func(i int) {
		if _, ok := began[i]; ok {
			return
		}
		m := made{v: make([]int64, l.d.b.rows(i))}
		if p, ok := claim(i).(*fakePlace); ok {
			m.place, m.v = p, hostmem.View[int64](p.mem[:8*len(m.v)])
		}
		for k := range m.v {
			m.v[k] = number(l.d.name, epoch, i)
		}
		began[i] = m
	}
	for k, i := range batches {
		if epoch == badEpoch && i == l.d.b.batches-1 {
			return errs.New(errs.Device, "the epoch fails")
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		l.d.b.made.Add(1)
		for _, next := range batches[k:min(k+max(l.d.b.ahead, 1), len(batches))] {
			begin(next)
		}
		v := began[i].v
		err := emit(&Batch{Epoch: epoch, Index: i, Seeds: 1, HopEnd: []int64{1, int64(len(v))},
			Tensors: []Tensor{Of("v", "int64", v), Of("one", "int64", v[:1])}, At: began[i].place})
		if err != nil {
			return err
		}
	}
	return nil
}

// client speaks the protocol.
type client struct {
	t     testing.TB
	w     *wire
	rings map[int][]byte
	bytes map[int]int64
}

// answer is any message of the server.
type answer struct {
	Type      string   `json:"type"`
	ID        int      `json:"id"`
	Epoch     int      `json:"epoch"`
	Index     int      `json:"index"`
	Slot      int      `json:"slot"`
	Slots     int      `json:"slots"`
	Credits   int      `json:"credits"`
	SlotBytes int64    `json:"slot_bytes"`
	Batches   int      `json:"batches"`
	Handle    int      `json:"handle"`
	Protocol  int      `json:"protocol"`
	Class     string   `json:"class"`
	Code      int      `json:"code"`
	Message   string   `json:"message"`
	Tensors   []tensor `json:"tensors"`
}

func (c *client) send(m any) { require.NoError(c.t, c.w.write(m, -1)) }

func (c *client) next() answer {
	c.t.Helper()
	body, fds, err := c.w.read(20 * time.Second)
	require.NoError(c.t, err)
	var a answer
	require.NoError(c.t, json.Unmarshal(body, &a), "%s", body)
	if a.Type == "ring" || a.Type == "loader" {
		require.Len(c.t, fds, 1)
		require.NotZero(c.t, seals(c.t, fds[0])&unix.F_SEAL_SHRINK)
		require.ErrorIs(c.t, unix.Ftruncate(fds[0], 0), unix.EPERM)
		if old := c.rings[a.ID]; old != nil {
			require.NoError(c.t, unix.Munmap(old))
		}
		c.rings[a.ID], err = unix.Mmap(fds[0], 0, a.Slots*int(a.SlotBytes), unix.PROT_READ,
			unix.MAP_SHARED)
		require.NoError(c.t, err)
		c.bytes[a.ID] = a.SlotBytes
	} else {
		require.Empty(c.t, fds)
	}
	closeAll(fds)
	return a
}

func seals(t testing.TB, fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	require.NoError(t, err)
	return n
}

func (c *client) want(kind string) answer {
	c.t.Helper()
	a := c.next()
	require.Equal(c.t, kind, a.Type, "%+v", a)
	return a
}

// gone wants the server to close the connection, and returns what it said before.
func (c *client) gone() (last answer) {
	c.t.Helper()
	for {
		body, fds, err := c.w.read(20 * time.Second)
		closeAll(fds)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return last
		}
		require.NoError(c.t, err)
		require.NoError(c.t, json.Unmarshal(body, &last))
	}
}

func (c *client) close() {
	for _, r := range c.rings {
		_ = unix.Munmap(r)
	}
	c.rings = nil
	_ = c.w.c.Close()
}

func (c *client) hello() {
	c.send(map[string]any{"type": "hello", "protocol": Protocol})
	c.want("welcome")
}

func (c *client) loader(dataset string, more map[string]any) answer {
	c.send(map[string]any{"type": "open", "dataset": dataset})
	m := map[string]any{"type": "loader", "handle": c.want("opened").Handle, "split": "train"}
	for k, v := range more {
		m[k] = v
	}
	c.send(m)
	return c.want("loader")
}

// numbers returns the content of a tensor of a batch.
func (c *client) numbers(a answer, i int) []int64 {
	d := a.Tensors[i]
	require.Zero(c.t, d.Offset%alignment)
	offset := int64(a.Slot)*c.bytes[a.ID] + d.Offset
	return hostmem.View[int64](c.rings[a.ID][offset : offset+8*d.Shape[0]])
}

// check wants a batch of dataset to hold what it should.
func (c *client) check(a answer, dataset string, rows int) {
	c.t.Helper()
	require.Equal(c.t, number(dataset, a.Epoch, a.Index), c.numbers(a, 1)[0])
	v := c.numbers(a, 0)
	require.Len(c.t, v, rows)
	for _, x := range v {
		require.Equal(c.t, number(dataset, a.Epoch, a.Index), x)
	}
}

func (c *client) release(a answer) {
	c.send(map[string]any{"type": "release", "id": a.ID, "slot": a.Slot})
}

// rig is a server with its socket.
type rig struct {
	b     *fakeBackend
	s     *Server
	path  string
	ended chan error // when Serve has returned
}

func start(t testing.TB, set func(*Config)) *rig {
	t.Helper()
	r := &rig{b: &fakeBackend{batches: 6, rows: func(int) int { return 100 }},
		path: filepath.Join(t.TempDir(), "s"), ended: make(chan error, 1)}
	c := Config{Backend: r.b, Memory: 64 << 20, Timeout: 5 * time.Second}
	if set != nil {
		set(&c)
	}
	r.s = New(c)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.path, Net: "unix"})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { r.ended <- r.s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-r.ended)
		require.NoError(t, l.Close())
		require.Zero(t, r.b.open.Load(), "datasets or loaders stay open")
		require.Zero(t, r.s.memory.used.Load(), "rings stay")
	})
	return r
}

func (r *rig) dial(t testing.TB) *client {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.path, Net: "unix"})
	require.NoError(t, err)
	x := &client{t: t, w: &wire{c: c, timeout: 10 * time.Second}, rings: map[int][]byte{},
		bytes: map[int]int64{}}
	t.Cleanup(x.close)
	return x
}

func (r *rig) client(t testing.TB) *client {
	t.Helper()
	c := r.dial(t)
	c.hello()
	return c
}

// raw sends bytes as they are.
func (c *client) raw(b []byte) { _, _ = c.w.c.Write(b) } // the server may have closed

func frameOf(body string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// settles waits until f holds.
func settles(t testing.TB, f func() bool, what string) {
	t.Helper()
	for range 2000 {
		if f() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal(what)
}

func openFDs(t testing.TB) int {
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}

func goroutines() int { return runtime.NumGoroutine() }
