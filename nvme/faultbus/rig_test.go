package faultbus_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

const (
	rigMem  = 4 << 20
	ssdSize = 4 << 20
	listAt  = rigMem - 64<<10 // PRP lists
)

// rig is a host above a bus with faults in front of a software controller. It drives queues entry
// by entry, so that it sees what a driver would not show.
type rig struct {
	t    *testing.T
	bus  *faultbus.Bus
	set  *faultinject.Set
	c    *nvme.Controller
	mem  []byte
	iova nvme.IOVA
	path string

	ready time.Duration // CAP.TO; 0: the proxy's
}

type rigOptions struct {
	faults  string
	opt     faultbus.Options
	proxy   func(*proxy.Config)
	options nvme.Options
	wrap    func(nvme.Bus) nvme.Bus // between the faults and the controller
}

func pattern(block, i int) byte { return byte(block*31 + i*7 + i>>8) }

// image is an SSD whose content tells block and offset.
func image(t *testing.T, ram bool, lba int) string {
	t.Helper()
	dir := t.TempDir()
	if ram {
		dir = testrig.MemoryDir(t)
	}
	img := make([]byte, ssdSize)
	for i := range img {
		img[i] = pattern(i/lba, i%lba)
	}
	path := filepath.Join(dir, "ssd.img")
	require.NoError(t, os.WriteFile(path, img, 0o600))
	return path
}

// openBus opens a software controller with faults in front of it.
func openBus(t *testing.T, o rigOptions) (*faultbus.Bus, *faultinject.Set, string) {
	t.Helper()
	set, err := faultinject.Parse(o.faults)
	require.NoError(t, err)
	cfg := proxy.Config{RAM: true}
	if o.proxy != nil {
		o.proxy(&cfg)
	}
	cfg.Path = image(t, cfg.RAM, max(cfg.LBABytes, 512))
	inner, err := proxy.Open(cfg)
	require.NoError(t, err)
	var b nvme.Bus = inner
	if o.wrap != nil {
		b = o.wrap(b)
	}
	return faultbus.New(b, set, o.opt), set, cfg.Path
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	testrig.CheckLeaks(t)
	g := &rig{t: t}
	g.bus, g.set, g.path = openBus(t, o)
	if o.options.Timeout == 0 {
		o.options.Timeout = time.Second
	}
	g.begin(o.options)
	t.Cleanup(g.end)
	return g
}

// newBubble is newRig within a bubble of virtual time, over a controller that was made there.
func newBubble(t *testing.T, inner nvme.Bus, faults string, ready time.Duration) *rig {
	t.Helper()
	set, err := faultinject.Parse(faults)
	require.NoError(t, err)
	g := &rig{t: t, set: set, bus: faultbus.New(inner, set, faultbus.Options{}), ready: ready}
	g.begin(nvme.Options{})
	return g
}

func (g *rig) begin(o nvme.Options) {
	g.t.Helper()
	var err error
	g.c, err = nvme.Open(context.Background(), testrig.WithReadyTimeout(g.bus, g.ready), o)
	require.NoError(g.t, err)
	g.mem, err = hostmem.Alloc(rigMem, "fault bus test")
	require.NoError(g.t, err)
	g.iova, err = g.c.MapDMA(g.mem)
	require.NoError(g.t, err)
}

func (g *rig) end() {
	g.t.Helper()
	require.NoError(g.t, g.c.UnmapDMA(g.iova, rigMem))
	require.NoError(g.t, g.c.Close(context.Background()))
	require.NoError(g.t, hostmem.Free(g.mem))
}

// prps describes n bytes at off of the rig's memory.
func (g *rig) prps(off, n int) (prp1, prp2 uint64) {
	g.t.Helper()
	used := 0
	p1, p2, err := nvme.BuildPRP(g.iova+nvme.IOVA(off), n, 4096, func() ([]uint64, nvme.IOVA,
		error) {
		pos := listAt + used*4096
		used++
		return hostmem.View[uint64](g.mem[pos : pos+4096]), g.iova + nvme.IOVA(pos), nil
	})
	require.NoError(g.t, err)
	return p1, p2
}

// queue is a queue pair driven entry by entry.
type queue struct {
	*testrig.Queue
	g  *rig
	qp *nvme.QueuePair
}

func (g *rig) queue(entries int) *queue {
	g.t.Helper()
	qp, err := g.c.CreateQueuePair(g.t.Context(), entries)
	require.NoError(g.t, err)
	return &queue{Queue: testrig.QueueOf(g.bus, qp), g: g, qp: qp}
}

func (q *queue) delete() {
	q.g.t.Helper()
	require.NoError(q.g.t, q.g.c.DeleteQueuePair(q.g.t.Context(), q.qp))
}

const (
	patience = 10 * time.Second
	nothing  = 20 * time.Millisecond // how long the absence of a completion is awaited
)

// next is the next completion, which must come.
func (q *queue) next() nvme.Completion {
	q.g.t.Helper()
	e, ok := q.Get(patience)
	require.True(q.g.t, ok, "no completion")
	return e
}

func (q *queue) none() {
	q.g.t.Helper()
	e, ok := q.Get(nothing)
	require.False(q.g.t, ok, "%+v", e)
}

// done wants the completion of one command, with a status.
func (q *queue) done(cid uint16, st nvme.Status) nvme.Completion {
	q.g.t.Helper()
	e := q.next()
	require.Equal(q.g.t, cid, e.CID)
	require.Equal(q.g.t, q.qp.ID, e.SQID)
	require.Equal(q.g.t, st, e.Status(), e.Status().String())
	return e
}

// read is a read of blocks to off of the rig's memory, whose content it poisons.
func (g *rig) read(cid uint16, lba, blocks, off int) nvme.Command {
	n := blocks * g.c.Namespace().LBABytes
	copy(g.mem[off:off+n], bytes.Repeat([]byte{0xcc}, n))
	p1, p2 := g.prps(off, n)
	return nvme.ReadCommand(cid, 1, nvme.LBA(lba), uint32(blocks), p1, p2)
}

// holds wants the data of blocks from lba on at off.
func (g *rig) holds(lba, blocks, off int) {
	g.t.Helper()
	n := g.c.Namespace().LBABytes
	want := make([]byte, blocks*n)
	for i := range want {
		want[i] = pattern(lba+i/n, i%n)
	}
	require.True(g.t, bytes.Equal(want, g.mem[off:off+len(want)]), "data of LBA %d+%d", lba, blocks)
}

func (g *rig) counts(n ...int64) {
	g.t.Helper()
	got := g.set.Counts()
	total, want := int64(0), int64(0)
	for _, v := range got {
		total += v
	}
	for _, v := range n {
		want += v
	}
	require.Equal(g.t, want, total, "%v", got)
}
