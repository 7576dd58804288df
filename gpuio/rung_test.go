package gpuio

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// hardBus is a software controller that passes for a real one: nobody kicks it or waits in it, and
// its doorbells are memory that can be registered.
type hardBus struct {
	nvme.Bus
	nvme.DoorbellMapper
	peer *peerTrick
}

// peerTrick holds what goes wrong when device memory is mapped for a controller.
type peerTrick struct {
	err   error
	other []byte // SSDs get this in place of the memory
	page  bool   // and for single pages of CPU memory, as Identify's proof takes one
}

func (b hardBus) MapPeerDMA(mem []byte, _ int, _ int64) (nvme.IOVA, error) {
	switch {
	case b.peer != nil && b.peer.err != nil:
		return 0, b.peer.err
	case b.peer != nil && b.peer.other != nil:
		mem = b.peer.other[:len(mem)]
	}
	return b.Bus.MapDMA(mem)
}

func (b hardBus) MapPeerWindow(mem []byte) (nvme.IOVA, error) {
	if b.peer != nil && b.peer.err != nil {
		return 0, b.peer.err
	}
	return b.Bus.MapDMA(mem)
}

func (b hardBus) MapDMA(mem []byte) (nvme.IOVA, error) {
	if b.peer != nil && b.peer.page && len(mem) == 4096 {
		mem = b.peer.other[:len(mem)]
	}
	return b.Bus.MapDMA(mem)
}

func hard(b nvme.Bus) nvme.Bus { return hardBus{b, b.(nvme.DoorbellMapper), nil} }

// trickDevice is a device whose ways to its memory can fail.
type trickDevice struct {
	cuda.Device
	methods func() []cuda.PeerMethod
	mapPeer func(cuda.Buffer) (cuda.PeerMapping, error)
	bells   error
}

func (d *trickDevice) Register(mem []byte, purpose string) (cuda.Buffer, error) {
	if d.bells != nil && purpose == "gpuio doorbells" {
		return nil, d.bells
	}
	return d.Device.Register(mem, purpose)
}

func (d *trickDevice) PeerMethods() []cuda.PeerMethod {
	if d.methods != nil {
		return d.methods()
	}
	return d.Device.(cuda.PeerMapper).PeerMethods()
}

func (d *trickDevice) MapPeer(b cuda.Buffer, method string) (cuda.PeerMapping, error) {
	if d.mapPeer != nil {
		if m, err := d.mapPeer(b); m != nil || err != nil {
			return m, err
		}
	}
	return d.Device.(cuda.PeerMapper).MapPeer(b, method)
}

// elsewhere is a mapping of other memory than the buffer's.
type elsewhere struct{ mem []byte }

func (m elsewhere) Bytes() []byte        { return m.mem }
func (m elsewhere) DMABuf() (int, int64) { return -1, 0 }
func (m elsewhere) Close() error         { return nil }

// noPeers is a device that has no way to map its memory.
type noPeers struct{ cuda.Device }

// TestRungReads: each rung reads the same rows, by both stacks, where its queues, lists and data
// should be.
func TestRungReads(t *testing.T) {
	onGPU(t)
	for _, name := range Rungs() {
		for _, stack := range []string{"async", "sync"} {
			if stack == "sync" && (raceEnabled || wide.Lean()) && name != "p2p" {
				continue
			}
			t.Run(name+"/"+stack, func(t *testing.T) {
				o := rigOptions{ssds: 2, lba: 4096, rowBytes: 4096, rows: 300, ram: true,
					wrap: hard}
				if name == "proxy" {
					o.wrap = nil
				}
				r := newRig(t, o)
				m, err := ChooseRung(r.dev, r.ssds, name)
				require.NoError(t, err)
				require.Equal(t, name, m.Report().Rung)
				require.Empty(t, m.Report().Tried)
				var rd Reader
				if stack == "sync" {
					rd = r.reader(NewSync(r.dev, r.ssds, r.layout,
						AsyncOptions{Depth: 16, Blocks: 4, Memory: m}))
				} else {
					rd = r.async(AsyncOptions{Depth: 16, QueuePairs: 2, CoalesceBytes: 64 << 10,
						Memory: m})
				}
				e := rd.(*async)
				for s := range e.listBuf {
					require.Equal(t, m.Rung() == RungP2P, e.listBuf[s].buf.Kind() == cuda.MemDevice)
				}
				q := e.queue(1)
				inLists := func(p cuda.DevicePtr) bool {
					b := e.listBuf[q.SSD].buf
					return p >= b.Ptr() && p < b.Ptr()+cuda.DevicePtr(b.Size())
				}
				require.Equal(t, m.Rung() == RungP2P, inLists(q.SQ) && inLists(q.CQ))
				rng := rand.New(rand.NewPCG(3, 4))
				for range 4 {
					s := r.newSet(rng, 1+rng.IntN(200), 4096, 0)
					direct := (s.rs.Dst.Kind() == cuda.MemDevice) == (m.Rung() == RungP2P)
					before := rd.Stats()
					s.read(rd)
					st := rd.Stats()
					require.Empty(t, st.NotInPlace)
					if direct {
						require.Greater(t, st.Direct, before.Direct)
					} else {
						require.Equal(t, st.Direct, before.Direct)
						require.Greater(t, st.Staged, before.Staged)
					}
					s.free(rd)
				}
				idle(t, rd)
				require.Equal(t, m.Rung() == RungPinnedCPUBell, e.bells != nil &&
					e.bells.rung.Load() > 0)
			})
		}
	}
}

// TestRungStaging: rows that cannot be placed directly, on the rungs where staging slots are
// elsewhere than usual.
func TestRungStaging(t *testing.T) {
	onGPU(t)
	for _, m := range []*Memory{{rung: RungP2P, method: "dma-buf"}, {rung: RungPinnedCPUBell}} {
		r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 400, rows: 200, ram: true,
			wrap: hard})
		rd := r.async(AsyncOptions{Depth: 8, Memory: m})
		e := rd.(*async)
		require.Equal(t, m.rung == RungP2P, e.stageBuf[0].buf.Kind() == cuda.MemDevice)
		s := r.newSet(rand.New(rand.NewPCG(5, 6)), 150, 400, 0)
		s.read(rd)
		s.free(rd)
	}
}

// bestRung shows where one SSD of hardware comes to on the ladder, and the rungs above with why
// they are not it. peer and bells are why rungs fail that keep queues in the device's memory, and
// those whose kernels ring doorbells.
func bestRung(peer, bells string) (string, []RungTried) {
	var tried []RungTried
	for r := range rungMixed {
		rule, why := r.rule(), ""
		switch {
		case rule.refuses != nil && rule.refuses(1, 0) != nil:
			why = rule.refuses(1, 0).Error()
		case rule.peer:
			why = peer
		case !rule.cpuBell:
			why = bells
		}
		if why == "" {
			return rule.name, tried
		}
		tried = append(tried, RungTried{rule.name, why})
	}
	return "", tried
}

// lockedRungs are those for SSDs of hardware whose queues are in the CPU's memory.
func lockedRungs() (names []string) {
	for r := range rungMixed {
		if rule := r.rule(); !rule.peer && (rule.refuses == nil || rule.refuses(1, 0) == nil) {
			names = append(names, rule.name)
		}
	}
	return names
}

// TestRungFailures: what fails leads to the next rung, which explains why it was not the better
// one.
func TestRungFailures(t *testing.T) {
	onGPU(t)
	defer func(d time.Duration) { proveTimeout = d }(proveTimeout)
	proveTimeout = 100 * time.Millisecond
	decoy, err := hostmem.Alloc(8<<20, "test decoy")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(decoy)) }()
	refused := errs.New(errs.Capability, "refused for the test")
	for _, c := range []struct {
		name  string
		dev   func(d cuda.Device) cuda.Device
		trick *peerTrick
		// why rungs fail that keep queues in the device's memory, and those whose kernels ring
		// doorbells; empty: they work
		peer, bells string
		nothing     bool
	}{
		{name: "works"},
		{name: "no peer memory", dev: func(d cuda.Device) cuda.Device { return noPeers{d} },
			peer: "cannot be mapped"},
		{name: "no way open", dev: func(d cuda.Device) cuda.Device {
			return &trickDevice{Device: d, methods: func() []cuda.PeerMethod {
				return []cuda.PeerMethod{{Name: "dma-buf", Err: refused},
					{Name: "gdrdrv", Err: errors.New("no module")}}
			}}
		}, peer: "by dma-buf: refused for the test; by gdrdrv: no module"},
		{name: "export refused", dev: func(d cuda.Device) cuda.Device {
			return &trickDevice{Device: d, mapPeer: func(cuda.Buffer) (cuda.PeerMapping,
				error) {
				return nil, refused
			}}
		}, peer: "by dma-buf: nvme ssd0: refused for the test"},
		{name: "IOMMU refuses", trick: &peerTrick{err: refused},
			peer: "map gpuio proof in memory of device"},
		{name: "the mapping is other memory", dev: func(d cuda.Device) cuda.Device {
			return &trickDevice{Device: d, mapPeer: func(b cuda.Buffer) (cuda.PeerMapping,
				error) {
				return elsewhere{decoy[:b.Size()]}, nil
			}}
		}, peer: "what the device wrote to its memory is not what the CPU reads there"},
		{name: "the SSD's writes land elsewhere", trick: &peerTrick{other: decoy},
			peer: "the SSD's Identify data did not arrive, although the SSD reported success"},
		{name: "the SSD reads elsewhere", dev: func(d cuda.Device) cuda.Device {
			return &trickDevice{Device: d, mapPeer: func(b cuda.Buffer) (cuda.PeerMapping, error) {
				if b.Purpose() == "gpuio queues and prp lists" {
					return elsewhere{decoy[:b.Size()]}, nil
				}
				return nil, nil
			}}
		}, peer: "a read by queues there"},
		{name: "no doorbells", dev: func(d cuda.Device) cuda.Device {
			return &trickDevice{Device: d, bells: refused}
		}, peer: "doorbells: refused for the test", bells: "doorbells: refused for the test"},
		{name: "nothing", trick: &peerTrick{other: decoy, page: true}, nothing: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var trick peerTrick
			r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 400, ram: true,
				wrap: func(b nvme.Bus) nvme.Bus {
					return hardBus{b, b.(nvme.DoorbellMapper), &trick}
				}})
			dev := r.dev
			if c.dev != nil {
				dev = c.dev(dev)
			}
			if c.trick != nil {
				trick = *c.trick
			}
			m, err := ChooseRung(dev, r.ssds, RungAuto)
			if c.nothing {
				require.ErrorContains(t, err, "no memory rung works")
				for _, name := range Rungs() {
					require.ErrorContains(t, err, name)
				}
				require.ErrorContains(t, err, strings.Join(lockedRungs(), " or ")+
					": nvme ssd0: the SSD's Identify data did not arrive")
				require.Equal(t, errs.Capability, errs.ClassOf(err))
				return
			}
			require.NoError(t, err)
			rep := m.Report()
			rung, tried := bestRung(c.peer, c.bells)
			require.Equal(t, rung, rep.Rung, "%+v", rep.Tried)
			require.Len(t, rep.Tried, len(tried))
			for i, want := range tried {
				require.Equal(t, want.Rung, rep.Tried[i].Rung)
				require.Contains(t, rep.Tried[i].Why, want.Why)
			}
			if len(tried) > 0 { // the same by force
				_, err = ChooseRung(dev, r.ssds, tried[0].Rung)
				require.ErrorContains(t, err, "memory rung "+tried[0].Rung+": ")
				require.ErrorContains(t, err, tried[0].Why)
				require.Equal(t, errs.Capability, errs.ClassOf(err))
			}
			// The SSD is as it was.
			rd := r.reader(NewAsync(dev, r.ssds, r.layout, AsyncOptions{Depth: 8, Memory: m}))
			s := r.newSet(rand.New(rand.NewPCG(5, 6)), 50, 512, 0)
			s.read(rd)
			s.free(rd)
		})
	}
}

// lostDevice has lost its context.
type lostDevice struct{ cuda.Device }

func (lostDevice) Alloc(cuda.MemKind, int64, string) (cuda.Buffer, error) {
	return nil, errs.New(errs.Device, "its context is lost")
}

// TestRungLostDevice: a device that is lost while rungs are tried lacks no capability.
func TestRungLostDevice(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 200, wrap: hard})
	for _, want := range []string{RungAuto, "pinned"} {
		_, err := ChooseRung(lostDevice{r.dev}, r.ssds, want)
		require.ErrorContains(t, err, "its context is lost")
		require.Equal(t, errs.Device, errs.ClassOf(err))
	}
}

// TestRungZeroRows: SSDs that hold zeros prove something too: what new memory holds is no row.
func TestRungZeroRows(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 200, ram: true, wrap: hard,
		proxy: func(c *proxy.Config) {
			require.NoError(t, os.WriteFile(c.Path, make([]byte, 256<<10), 0o600))
		}})
	decoy, err := hostmem.Alloc(8<<20, "test decoy")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(decoy)) }()
	_, err = ChooseRung(r.dev, r.ssds, "p2p")
	require.NoError(t, err)
	_, err = ChooseRung(&trickDevice{Device: r.dev, mapPeer: func(b cuda.Buffer) (cuda.PeerMapping,
		error) {
		if b.Purpose() == "gpuio staging" {
			return elsewhere{decoy[:b.Size()]}, nil
		}
		return nil, nil
	}}, r.ssds, "p2p")
	require.ErrorContains(t, err, "rows read by queues there")
}

// TestRungSoftware: software controllers are the last rung, whatever the device can.
func TestRungSoftware(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true})
	m, err := ChooseRung(r.dev, r.ssds, "")
	require.NoError(t, err)
	require.Equal(t, RungProxy, m.Rung())
	require.Len(t, m.Report().Tried, int(RungProxy))
	for _, want := range Rungs()[:RungProxy] {
		_, err = ChooseRung(r.dev, r.ssds, want)
		require.ErrorContains(t, err, "software controllers")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
	_, err = ChooseRung(r.dev, r.ssds, "bar")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, "pinned-cpubell")
}

// TestRungHost: on the host device there is nothing to choose.
func TestRungHost(t *testing.T) {
	soft := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	real := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true, wrap: hard,
		proxy: func(c *proxy.Config) { c.PollDoorbells = true }})
	for _, c := range []struct {
		ssds []*SSD
		want string
	}{{soft.ssds, "proxy"}, {real.ssds, "pinned"}, {[]*SSD{soft.ssds[0], real.ssds[0]}, "mixed"}} {
		m, err := ChooseRung(soft.dev, c.ssds, RungAuto)
		require.NoError(t, err)
		require.Equal(t, c.want, m.Report().Rung)
		_, err = ChooseRung(soft.dev, c.ssds, "p2p")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
	m, err := ChooseRung(real.dev, real.ssds, "pinned")
	require.NoError(t, err)
	rd := real.async(AsyncOptions{Depth: 8, Memory: m})
	s := real.newSet(rand.New(rand.NewPCG(5, 6)), 20, 512, 0)
	s.read(rd)
	s.free(rd)
}

// TestRungGrowable: a destination that grows keeps its place, for SSDs and CPU, and only what is
// there is written to.
func TestRungGrowable(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 2, lba: 4096, rowBytes: 4096, rows: 300, ram: true, wrap: hard})
	g, err := cuda.Reserve(r.dev, 64<<20, "test growable")
	require.NoError(t, err)
	rd := r.async(AsyncOptions{Depth: 16, Memory: &Memory{rung: RungP2P, method: "dma-buf"}})
	e := rd.(*async)
	var iova nvme.IOVA
	for i := range int64(3) {
		require.NoError(t, g.Grow((3+5*i)<<20))
		s := r.newSet(rand.New(rand.NewPCG(7, uint64(i))), 200, 4096, 0)
		own := s.rs.Dst
		s.rs.Dst, s.rs.DstOffset = g, i*(2<<20)
		ctx := testCtx(t)
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		_, err = p.Wait(ctx)
		require.NoError(t, err)
		mem := make([]byte, (3+5*i)<<20)
		r.copyOut(mem, g.Ptr())
		want := make([]byte, 4096)
		for k, row := range s.ids {
			fillRow(row, want)
			off := s.rs.DstOffset + int64(s.pos[k])*4096
			require.Equal(t, want, mem[off:off+4096])
		}
		if i == 0 {
			iova = e.dma.m[g].iovas[0]
		}
		require.Equal(t, iova, e.dma.m[g].iovas[0])
		s.rs.Dst = own
		s.free(rd)
	}
	st := rd.Stats()
	require.Zero(t, st.Staged)
	require.Empty(t, st.NotInPlace)
	// Memory that could not be mapped lately takes nothing from memory that is.
	e.mu.Lock()
	e.dma.refused[g] = g.Backed()
	m, err := e.dma.acquire(g, e.dma.m[g].reach)
	require.NoError(t, err)
	require.NotNil(t, m)
	e.dma.release(m)
	e.mu.Unlock()
	// Behind what is there.
	s := r.newSet(rand.New(rand.NewPCG(8, 8)), 10, 4096, 0)
	own := s.rs.Dst
	s.rs.Dst, s.rs.DstOffset = g, g.Backed()-4096
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	_, err = p.Wait(testCtx(t))
	require.ErrorContains(t, err, "outside the destination")
	s.rs.Dst = own
	s.free(rd)
	require.NoError(t, Forget(rd, g))
	require.NoError(t, g.Free())
}

// copyOut reads device memory.
func (r *rig) copyOut(dst []byte, src cuda.DevicePtr) {
	p := &prover{dev: r.dev}
	require.NoError(r.t, p.fromDevice(testCtx(r.t), dst, src))
}

// TestRungNoRoom: a destination for which there is no room behind the BAR gets its rows by a copy,
// and it is said why.
func TestRungNoRoom(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true, wrap: hard})
	tries := 0
	dev := &trickDevice{Device: r.dev, mapPeer: func(b cuda.Buffer) (cuda.PeerMapping, error) {
		if b.Purpose() == "test dst" {
			tries++
			return nil, errors.New("BAR 1 is full")
		}
		return nil, nil
	}}
	rd := r.reader(NewAsync(dev, r.ssds, r.layout,
		AsyncOptions{Depth: 8, Memory: &Memory{rung: RungP2P, method: "dma-buf"}}))
	rng := rand.New(rand.NewPCG(1, 1))
	for seen := false; !seen; {
		s := r.newSet(rng, 40, 512, 0)
		seen = s.rs.Dst.Kind() == cuda.MemDevice
		s.read(rd)
		s.read(rd)
		s.free(rd)
	}
	st := rd.Stats()
	require.Zero(t, st.Direct)
	require.Equal(t, 1, tries, "it was tried again")
	require.Contains(t, st.NotInPlace, "BAR 1 is full")
}

// TestRungRecovery: errors, lost completions, queue pairs that cannot be replaced and resets, with
// rings in device memory and with bells that the CPU hands on.
func TestRungRecovery(t *testing.T) {
	onGPU(t)
	t.Cleanup(func() { rigMemory = nil })
	for _, m := range []*Memory{{rung: RungP2P, method: "dma-buf"}, {rung: RungPinnedCPUBell}} {
		rigMemory = m
		for _, c := range []struct {
			name  string
			quick bool
			test  func(*testing.T)
		}{{"faults surface", false, TestFaultsSurface}, {"reset", true, TestQueueCannotBeReplaced},
			{"foreign", true, TestForeignCompletion}, {"sync", false, TestSyncFaultsSurface}} {
			if c.quick || !wide.Lean() && !raceEnabled {
				t.Run(m.rung.String()+"/"+c.name, c.test)
			}
		}
	}
}

// TestBellsRecover: the same with the host device's kernels, which the CPU's thread must keep up
// with.
func TestBellsRecover(t *testing.T) {
	rigMemory = &Memory{rung: RungPinnedCPUBell}
	t.Cleanup(func() { rigMemory = nil })
	for _, c := range []struct {
		name string
		test func(*testing.T)
	}{{"faults surface", TestFaultsSurface}, {"no new queue pair", TestQueueCannotBeReplaced},
		{"foreign", TestForeignCompletion}, {"sync", TestSyncFaultsSurface},
		{"concurrent", TestAsyncConcurrent}, {"close", TestCloseWithSetsInFlight}} {
		t.Run(c.name, c.test)
	}
}

// TestBells: each bell is handed on, of the right queue pair; nobody looks at bells when nothing is
// in flight.
func TestBells(t *testing.T) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	b, err := newBells(&side{dev: dev}, 2)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.buf.Free()) }()
	defer b.close()
	var real [2][2]uint32
	pair := func(i int) *nvme.QueuePair {
		return &nvme.QueuePair{ID: uint16(i + 1), SQDoorbell: &real[i][0], CQDoorbell: &real[i][1]}
	}
	soon := func(p *uint32, v uint32, what string) {
		t.Helper()
		require.Eventually(t, func() bool { return atomic.LoadUint32(p) == v }, 5*time.Second,
			time.Millisecond, what)
	}
	b.attach(0, pair(0), nil)
	b.attach(1, pair(1), nil)
	b.begin()
	sq, cq := b.bell(1)
	for v := uint32(1); v < 50; v++ {
		atomic.StoreUint32(sq, v)
		soon(&real[1][0], v, "SQ bell")
		atomic.StoreUint32(cq, v/2)
		soon(&real[1][1], v/2, "CQ bell")
	}
	require.Zero(t, real[0])
	// A queue pair that is replaced: what rang last is not rung at its successor.
	b.detach(1)
	atomic.StoreUint32(sq, 77)
	time.Sleep(5 * time.Millisecond)
	require.EqualValues(t, 49, atomic.LoadUint32(&real[1][0]))
	real[1] = [2]uint32{}
	b.attach(1, pair(1), nil)
	require.Zero(t, *sq)
	require.Equal(t, b.at(1), addr(b.buf.Bytes())+bellBytes)
	atomic.StoreUint32(sq, 3)
	soon(&real[1][0], 3, "after attach")
	// The last bell of the last set is handed on; then the thread sleeps.
	atomic.StoreUint32(cq, 9)
	b.end()
	soon(&real[1][1], 9, "after the last set")
	time.Sleep(10 * time.Millisecond)
	looks := b.looks.Load()
	time.Sleep(50 * time.Millisecond)
	require.Equal(t, looks, b.looks.Load(), "busy without sets")
	for range 3 { // wakes as often as it takes
		b.begin()
		v := atomic.AddUint32(cq, 1)
		soon(&real[1][1], v, "after a wake")
		b.end()
	}
	// Slow while nothing rings.
	b.begin()
	time.Sleep(20 * time.Millisecond)
	looks = b.looks.Load()
	time.Sleep(100 * time.Millisecond)
	require.Less(t, b.looks.Load()-looks, int64(3*100*time.Millisecond/bellNap), "naps")
	b.end()
}

// TestIOMemory: the loads and stores of device memory.
func TestIOMemory(t *testing.T) {
	mem := make([]byte, 64)
	ioFill(mem[8:56], 0x0102030405060708)
	require.Equal(t, make([]byte, 8), mem[:8])
	require.Equal(t, make([]byte, 8), mem[56:])
	require.EqualValues(t, 8, mem[8])
	ioCopy(mem[16:32], []byte("0123456789abcdef"))
	got := make([]byte, 16)
	ioRead(got, mem[16:])
	require.Equal(t, "0123456789abcdef", string(got))
	require.Equal(t, "", different(got, got, nil))
	require.Contains(t, different(got, make([]byte, 16), complement(got)),
		"16 of 16 bytes are wrong")
	require.Contains(t, different(got, make([]byte, 16), got), "still the junk")
	require.ErrorContains(t, seen("x", "", "a"), "not where the CPU")
	require.ErrorContains(t, seen("x", "a", ""), "not for the device")
	require.NoError(t, seen("x", "", ""))
	require.Equal(t, "unknown", fmt.Sprint(Rung(99)))
}
