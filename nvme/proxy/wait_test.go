package proxy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/nvme"
)

// A host that never waits, only looks at its completion queue, is served in the background.
func TestBackground(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		for _, poll := range []bool{false, true} {
			cfg.PollDoorbells = poll
			g := newRig(t, cfg)
			q := g.pair(1, 16)
			for i := range 50 {
				*(*nvme.Command)(
					unsafe.Pointer(&q.SQ[q.Tail*nvme.CommandBytes])) = nvme.ReadCommand(uint16(i),
					1, nvme.LBA(i), 1, uint64(g.iova), 0)
				q.Tail = (q.Tail + 1) % q.Entries
				nvme.StoreDoorbell(q.SQDoorbell, uint32(q.Tail))
				if !poll {
					g.bus.Kick(1)
				}
				q.mustPoll(uint16(i))
			}
		}
	})
}

// A party that has waited is expected back for some ticks; doorbells wake nobody else meanwhile.
func TestExpectedBack(t *testing.T) {
	g := newRig(t, Config{RAM: true})
	g.pair(1, 16)
	g.bus.WaitCQ(1, 0)
	g.bus.react.stop() // and its ticks
	g.bus.react.ending.Wait()
	select {
	case <-g.bus.react.svc: // of the queue's creation; the goroutine may end before it looks
	default:
	}
	c := g.bus.cqs[1].Load()
	w := c.waiter.Load()
	w.attended.Store(attendTicks)
	for range attendTicks {
		c.kick()
		require.Empty(t, g.bus.react.svc)
		require.True(t, w.attends())
	}
	require.True(t, w.acquire(0))
	c.kick()
	require.Empty(t, g.bus.react.svc, "it is in its wait, though awake")
	require.True(t, w.attends())
	w.busy.Store(false)
	require.False(t, w.attends())
	c.kick()
	require.Len(t, g.bus.react.svc, 1)
}

// mustPoll looks at the queue until the completion of cid is there.
func (q *ring) mustPoll(cid uint16) {
	q.g.t.Helper()
	tick := time.NewTicker(50 * time.Microsecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); <-tick.C {
		if e, ok := q.Poll(); ok {
			if e.CID != cid || !e.Status().OK() {
				q.g.t.Fatalf("CID %d: %v; want CID %d", e.CID, e.Status(), cid)
			}
			return
		}
	}
	q.g.t.Fatalf("CID %d was not served", cid)
}

// The party that used to wait goes away, with commands submitted and in flight: the
// background takes over.
func TestWaiterLeaves(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 64)
		for i := range uint16(20) {
			q.must(nvme.ReadCommand(i, 1, 0, 1, uint64(g.iova), 0)) // waits
			q.Put(nvme.ReadCommand(100+i, 1, 0, 1, uint64(g.iova), 0))
			if i%2 == 0 {
				g.bus.WaitCQ(1, 0) // begins the command, then goes
			}
			q.mustPoll(100 + i)
		}
	})
}

// One party submits, another waits; each wait must end in time, whatever state the waiting
// party is in when the doorbell rings.
func TestKickWakesWaiter(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 64)
		const total = 2000
		tokens := make(chan uint16, 60)
		for i := range uint16(cap(tokens)) {
			tokens <- i
		}
		var sum atomic.Int64
		go func() {
			rng := rand.New(rand.NewPCG(1, 1))
			for i := 0; i < total; {
				var cmds []nvme.Command
				for range min(1+rng.IntN(4), total-i) {
					cid := <-tokens
					cmds = append(cmds, nvme.ReadCommand(cid, 1, nvme.LBA(rng.IntN(1000)), 1,
						uint64(g.iova)+uint64(cid)*4096, 0))
					i++
				}
				q.Put(cmds...)
				for range rng.IntN(2000) {
					sum.Add(1) // arrive at different moments
				}
			}
		}()
		slow := 0
		for range total {
			start := time.Now()
			e, ok := q.Get(10 * time.Second)
			require.True(t, ok, "lost wake-up")
			require.True(t, e.Status().OK())
			if time.Since(start) > 2*time.Second {
				slow++
			}
			tokens <- e.CID
		}
		assert.Zero(t, slow, "waits that ended by their deadline")
	})
}

// A group waits for queues of several SSDs of different kinds with one party.
func TestGroup(t *testing.T) {
	var rigs []*rig
	var refs []nvme.CQRef
	var queues []*ring
	for _, cfg := range []Config{{}, {RAM: true}, {Buffered: true}, {NoIOUring: true}} {
		g := newRig(t, cfg)
		rigs = append(rigs, g)
		for qid := range uint16(2) {
			q := g.pair(qid+1, 32)
			queues = append(queues, q)
			refs = append(refs, nvme.CQRef{Bus: g.bus, QID: qid + 1})
		}
	}
	grp, err := rigs[0].bus.GroupCQs(refs)
	require.NoError(t, err)
	_, err = rigs[0].bus.GroupCQs(refs[:1])
	require.Error(t, err, "a queue is in one group at most")
	require.Error(t, grp.Rejoin(refs[0]), "twice")
	require.Error(t, grp.Rejoin(nvme.CQRef{Bus: rigs[0].bus, QID: 9}))
	require.Error(t, grp.Rejoin(nvme.CQRef{Bus: rigs[0].bus, QID: 0}))

	start := time.Now()
	grp.Wait(0)
	grp.Wait(20 * time.Millisecond) // may end early once, for what came before the queues joined
	grp.Wait(20 * time.Millisecond)
	assert.GreaterOrEqual(t, time.Since(start), 20*time.Millisecond,
		"nothing came, yet Wait returned")

	run := func(total int) {
		stop := make(chan struct{})
		var wg sync.WaitGroup
		tokens := make([]chan uint16, len(queues))
		for i, q := range queues {
			tokens[i] = make(chan uint16, 24)
			for c := range uint16(24) {
				tokens[i] <- c
			}
			wg.Go(func() { // somebody else submits, as a submit kernel does
				for {
					select {
					case c := <-tokens[i]:
						q.Put(nvme.ReadCommand(c, 1, 0, 1, uint64(q.g.iova)+uint64(c)*4096, 0))
					case <-stop:
						return
					}
				}
			})
		}
		deadline := time.Now().Add(20 * time.Second)
		got := make([]int, len(queues))
		for slices.Min(got) < total/len(queues) {
			any := false
			for i, q := range queues {
				for {
					e, ok := q.Poll()
					if !ok {
						break
					}
					require.True(t, e.Status().OK())
					any = true
					got[i]++
					tokens[i] <- e.CID
				}
			}
			if !any {
				require.True(t, time.Now().Before(deadline), "stuck: %v", got)
				grp.Wait(time.Until(deadline))
			}
		}
		close(stop)
		wg.Wait()
		for i, q := range queues {
			for len(tokens[i]) < 24 {
				e, ok := q.Poll()
				if ok {
					tokens[i] <- e.CID
					continue
				}
				require.True(t, time.Now().Before(deadline))
				grp.Wait(10 * time.Millisecond)
			}
		}
	}
	run(4000)

	// A member is deleted and made again while the others go on.
	g := rigs[0]
	g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
	g.adm.must(nvme.DeleteCQCommand(g.nextCID(), 1))
	queues[0] = g.pair(1, 32)
	require.NoError(t, grp.Rejoin(refs[0]))
	run(4000)

	// A queue that is in a group can be waited for alone.
	queues[1].Put(nvme.FlushCommand(1, 1))
	e, ok := queues[1].Get(5 * time.Second)
	require.True(t, ok)
	require.True(t, e.Status().OK())

	require.NoError(t, grp.Close())
	require.NoError(t, grp.Close())
	require.Error(t, grp.Rejoin(refs[0]))
	for _, q := range queues {
		q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(q.g.iova), 0))
	}
	ram, err := rigs[1].bus.GroupCQs(refs[2:3])
	require.NoError(t, err)
	needsRing := rigs[0].bus.Engine() == "io_uring" // which a group of RAM has not
	require.Equal(t, needsRing, ram.Rejoin(refs[0]) != nil, "a file among RAM")
	require.NoError(t, ram.Close())
}

// Group.Close with commands in flight, and queues deleted under a sleeping group.
func TestGroupCloseInFlight(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 64)
		for range 5 {
			grp, err := g.bus.GroupCQs([]nvme.CQRef{{Bus: g.bus, QID: 1}})
			require.NoError(t, err)
			var cmds []nvme.Command
			for i := range 40 {
				cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1,
					uint64(g.iova)+uint64(i)*4096, 0))
			}
			q.Put(cmds...)
			grp.Wait(0)
			require.NoError(t, grp.Close())
			for range 40 {
				e, ok := q.Get(10 * time.Second)
				require.True(t, ok)
				require.True(t, e.Status().OK())
			}
		}
		grp, err := g.bus.GroupCQs([]nvme.CQRef{{Bus: g.bus, QID: 1}})
		require.NoError(t, err)
		done := make(chan struct{})
		go func() {
			grp.Wait(200 * time.Millisecond)
			close(done)
		}()
		g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
		g.adm.must(nvme.DeleteCQCommand(g.nextCID(), 1))
		<-done
		require.NoError(t, grp.Close())
	})
}

// Many hosts on many queues at once, with writes, reads, deletions and log pages; every block is
// checked.
func TestStress(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		const parties = 4
		rounds := 8 // small random writes are slow on disks
		if cfg.RAM {
			rounds = 150
		}
		lba := g.bus.cfg.LBABytes
		share := int(g.bus.blocks) / parties
		queues := make([]*ring, parties)
		for i := range queues {
			queues[i] = g.pair(uint16(i+1), 32)
		}
		var wg sync.WaitGroup
		fail := make(chan string, parties+1)
		stop := make(chan struct{})
		for p, q := range queues {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(p), 9))
				shadow := make([]byte, share*lba)
				base := p * (1 << 20)
				for r := range rounds {
					n := 8 + rng.IntN(16)
					want := map[uint16]int{}
					var cmds []nvme.Command
					perm := rng.Perm(share)[:n]
					for i, at := range perm {
						mem := g.mem[base+i*4096 : base+i*4096+lba]
						c := nvme.ReadCommand(uint16(i), 1, nvme.LBA(p*share+at), 1,
							uint64(g.iova)+uint64(base+i*4096), 0)
						if rng.IntN(2) == 0 {
							c.Opcode = nvme.OpWrite
							fill(mem, rng)
							copy(shadow[at*lba:], mem)
						} else {
							want[uint16(i)] = at
						}
						cmds = append(cmds, c)
					}
					q.Put(cmds...)
					for range n {
						e, ok := q.Get(20 * time.Second)
						if !ok || !e.Status().OK() {
							fail <- fmt.Sprintf("party %d round %d: %v %v", p, r, ok, e.Status())
							return
						}
						if off, ok := want[e.CID]; ok {
							mem := g.mem[base+int(e.CID)*4096 : base+int(e.CID)*4096+lba]
							if !bytes.Equal(mem, shadow[off*lba:(off+1)*lba]) {
								fail <- fmt.Sprintf("party %d round %d: wrong data", p, r)
								return
							}
						}
					}
				}
			})
		}
		var admin sync.WaitGroup
		admin.Go(func() { // and admin work beside it
			extra := g.ring(9, 9, 16)
			for {
				select {
				case <-stop:
					return
				default:
				}
				g.adm.must(nvme.CreateCQCommand(g.nextCID(), 9, 16, extra.cq))
				g.adm.must(nvme.CreateSQCommand(g.nextCID(), 9, 16, extra.sq, 9))
				clear(extra.CQ)
				extra.Tail, extra.Head, extra.Phase = 0, 0, true
				extra.Put(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova)+(7<<20), 0))
				g.smart()
				g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 9))
				g.adm.must(nvme.DeleteCQCommand(g.nextCID(), 9))
			}
		})
		wg.Wait()
		close(stop)
		admin.Wait()
		select {
		case m := <-fail:
			t.Fatal(m)
		default:
		}
	})
}

// The read path of a closed loop does not allocate.
func TestNoAllocation(t *testing.T) {
	for _, cfg := range []Config{{RAM: true}, {}} {
		g := newRig(t, cfg)
		q := g.pair(1, 64)
		var cmds [32]nvme.Command
		for i := range cmds {
			cmds[i] = nvme.ReadCommand(uint16(i), 1, nvme.LBA(i*8), 8,
				uint64(g.iova)+uint64(i)*4096, 0)
		}
		allocs := testing.AllocsPerRun(50, func() {
			q.Put(cmds[:]...)
			for range cmds {
				if _, ok := q.Get(5 * time.Second); !ok {
					t.Fatal("no completion")
				}
			}
		})
		assert.Less(t, allocs, 2.0, "allocations per 32 reads (a timer's goroutine now and then)")
	}
}

// A block device is opened exclusively and served with its own block size.
func TestBlockDevice(t *testing.T) {
	path := newFile(t, 16<<20, false)
	out, err := exec.Command("losetup", "--find", "--show", "--sector-size", "4096",
		"--direct-io=on", path).CombinedOutput()
	if err != nil {
		t.Skipf("no loop devices here: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("detach %s: %v: %s", dev, err, out)
		}
	})
	g := newRig(t, Config{Path: dev})
	assert.EqualValues(t, 4096, g.bus.back.offAlign)
	_, err = Open(Config{Path: dev})
	assert.Error(t, err, "claimed twice")
	q := g.pair(1, 16)
	rng := rand.New(rand.NewPCG(1, 2))
	fill(g.mem[:1536], rng)
	q.must(nvme.WriteCommand(1, 1, 7, 3, uint64(g.iova), 0)) // parts of two units
	q.must(nvme.ReadCommand(1, 1, 7, 3, uint64(g.iova)+8192, 0))
	assert.Equal(t, g.mem[:1536], g.mem[8192:8192+1536])
	q.must(nvme.FlushCommand(1, 1))
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.True(t, bytes.Equal(raw[7*512:10*512], g.mem[:1536]))
}

// A turn at many operations waits for an eighth of them; one at few, or with a completion that is
// due, takes what there is.
func TestTurnIsEarly(t *testing.T) {
	r, err := newReactor(true, false)
	if errs.ClassOf(err) == errs.Capability {
		t.Skipf("no io_uring here: %v", err)
	}
	require.NoError(t, err)
	defer func() { assert.NoError(t, r.close()) }()
	for range 2 {
		e := r.ring.SQE()
		e.PrepNop()
		e.Data = wakeData
	}
	r.ring.Flush()
	r.submit()
	require.EqualValues(t, 2, r.ring.Ready())
	for _, c := range []struct {
		inflight int64
		due      int64
		early    bool
	}{{24, never, true}, {16, never, false}, {3, never, false}, {24, immediately, false}} {
		r.inflight.Store(c.inflight)
		assert.Equal(t, c.early, r.early(c.due), "%+v", c)
	}
	r.inflight.Store(2)
	r.reap()
	assert.Zero(t, r.inflight.Load())
}
