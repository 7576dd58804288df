package faultbus_test

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

const media = nvme.StatusUnrecoveredRead

// A command that fails is not carried out, and counts as one that the controller failed.
func TestError(t *testing.T) {
	g := newRig(t,
		rigOptions{
			faults: "error(op=read,lba=100-199,sct=2,sc=0x81,dnr=1,times=2);error(op=write,sct=2,sc=0x80,after=1,times=1);error(op=flush,sct=0,sc=6)"})
	q := g.queue(8)
	q.Put(g.read(1, 99, 1, 0))
	q.done(1, 0)
	g.holds(99, 1, 0)
	for i, want := range []nvme.Status{media.WithDNR(), media.WithDNR(), 0} {
		q.Put(g.read(uint16(i), 99, 2, 0))
		q.done(uint16(i), want)
		if want != 0 {
			require.EqualValues(t, 0xcc, g.mem[0], "not carried out")
		}
	}
	g.holds(99, 2, 0)
	p1, _ := g.prps(0, 512)
	for i, want := range []nvme.Status{0, nvme.StatusWriteFault, 0} {
		q.Put(nvme.WriteCommand(9, 1, nvme.LBA(300+i), 1, p1, 0))
		q.done(9, want)
	}
	q.Put(nvme.FlushCommand(3, 1))
	q.done(3, nvme.StatusInternalError)
	g.counts(2, 1, 1)
	log, err := g.c.SMART(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 4, log.HostReads.Lo, "failed ones too")
	require.EqualValues(t, 3, log.HostWrites.Lo)
	require.EqualValues(t, 3, log.MediaErrors.Lo)
}

func TestLostIsCarriedOutAndAborts(t *testing.T) {
	t.Run("ram", func(t *testing.T) { testLost(t, true) })
	t.Run("file", func(t *testing.T) { testLost(t, false) })
}

func testLost(t *testing.T, ram bool) {
	g := newRig(t, rigOptions{faults: "lost(op=read,lba=3,times=1)",
		proxy: func(c *proxy.Config) { c.RAM = ram }})
	q := g.queue(8)
	q.Put(g.read(5, 3, 1, 0), g.read(6, 4, 1, 4096))
	q.done(6, 0)
	q.none()
	g.holds(3, 1, 0)
	// Its CID stays taken, as with any command that does not end.
	q.Put(g.read(5, 9, 1, 8192))
	q.done(5, nvme.StatusCommandIDConflict.WithDNR())
	aborted, err := g.c.Abort(t.Context(), q.qp.ID, 5)
	require.NoError(t, err)
	require.True(t, aborted)
	q.done(5, nvme.StatusAbortRequested)
	aborted, err = g.c.Abort(t.Context(), q.qp.ID, 5)
	require.NoError(t, err)
	require.False(t, aborted, "no such command any more")
	q.Put(g.read(5, 3, 1, 0))
	q.done(5, 0)
	g.counts(1)
}

func TestDropNeverArrives(t *testing.T) {
	g := newRig(t, rigOptions{faults: "drop(op=write,times=1);drop(op=read,lba=7)"})
	q := g.queue(4)
	p1, _ := g.prps(0, 512)
	q.Put(nvme.WriteCommand(1, 1, 5, 1, p1, 0), g.read(2, 7, 1, 4096), g.read(3, 5, 1, 8192))
	q.done(3, 0)
	g.holds(5, 1, 8192)
	q.none()
	require.EqualValues(t, 0xcc, g.mem[4096])
	// More dropped commands than the queue has entries cost no entry.
	for cid := uint16(10); cid < 30; cid++ {
		q.Put(g.read(cid, 7, 1, 4096))
	}
	q.Put(g.read(3, 8, 1, 0))
	q.done(3, 0)
	log, err := g.c.SMART(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2, log.HostReads.Lo)
	require.Zero(t, log.HostWrites.Lo)
	q.delete()
}

func TestLate(t *testing.T) {
	t.Run("ram", func(t *testing.T) { testLate(t, true) })
	t.Run("file", func(t *testing.T) { testLate(t, false) })
}

func testLate(t *testing.T, ram bool) {
	g := newRig(t,
		rigOptions{faults: "late(ms=300,op=read,lba=3,times=1);late(ms=60000,op=read,lba=9,times=2)",
			proxy: func(c *proxy.Config) { c.RAM = ram }})
	q := g.queue(8)
	start := time.Now()
	q.Put(g.read(1, 3, 1, 0), g.read(2, 4, 1, 4096), g.read(3, 9, 1, 8192))
	q.done(2, 0)
	q.done(1, 0)
	require.GreaterOrEqual(t, time.Since(start), 300*time.Millisecond)
	g.holds(3, 1, 0)
	// Aborted while it is held back, and deleted with its queue.
	aborted, err := g.c.Abort(t.Context(), q.qp.ID, 3)
	require.NoError(t, err)
	require.True(t, aborted)
	q.done(3, nvme.StatusAbortRequested)
	q.Put(g.read(4, 9, 1, 8192))
	q.none()
	q.delete()
	require.EqualValues(t, 0xcc, g.mem[8192])
}

func TestSlow(t *testing.T) {
	g := newRig(t, rigOptions{faults: "slow(us=30000,op=read)"})
	q := g.queue(8)
	start := time.Now()
	q.Put(g.read(1, 3, 1, 0), g.read(2, 4, 1, 4096))
	for range 2 {
		e := q.next()
		require.True(t, e.CID == 1 || e.CID == 2)
	}
	require.GreaterOrEqual(t, time.Since(start), 30*time.Millisecond)
	g.holds(4, 1, 4096)
	// A command that is done and held back is not aborted.
	q.Put(g.read(3, 5, 1, 0))
	time.Sleep(5 * time.Millisecond)
	aborted, err := g.c.Abort(t.Context(), q.qp.ID, 3)
	require.NoError(t, err)
	require.False(t, aborted)
	q.done(3, 0)
}

func TestDuplicate(t *testing.T) {
	g := newRig(t, rigOptions{faults: "dup(op=read,lba=3)"})
	q := g.queue(4)
	for i := range 20 { // both entries also where the ring wraps
		q.Put(g.read(uint16(i), 3, 1, 0))
		q.done(uint16(i), 0)
		q.done(uint16(i), 0)
	}
	q.none()
	// With a full queue the second one follows when there is room.
	q.Put(g.read(1, 4, 1, 0), g.read(2, 4, 1, 4096), g.read(3, 3, 1, 8192))
	time.Sleep(5 * time.Millisecond)
	for _, cid := range []uint16{1, 2, 3, 3} {
		q.done(cid, 0)
	}
	q.none()
}

// The second completion comes with the first one even where all entries are promised to commands:
// one of these waits for the client instead.
func TestDuplicateAmongMany(t *testing.T) {
	g := newRig(t, rigOptions{faults: "dup(op=read,lba=2);foreign(op=read,lba=4)"})
	q := g.queue(8)
	for range 30 {
		var cmds []nvme.Command
		for cid := range 7 {
			cmds = append(cmds, g.read(uint16(cid), cid, 1, cid*512))
		}
		q.Put(cmds...)
		for _, cid := range []uint16{0, 1, 2, 2, 3, 0xfffe, 4, 5, 6} {
			q.done(cid, 0)
		}
		g.holds(0, 7, 0)
	}
	q.none()
}

// With n the second completion comes after others: of the same CID, too, when that is in use again.
func TestLateDuplicate(t *testing.T) {
	const late = "dup(op=read,lba=3,n=3)"
	// The client may be slow: the second one does not give up waiting.
	g := newRig(t, rigOptions{faults: late, opt: faultbus.Options{EchoWait: time.Minute}})
	q := g.queue(4)
	for range 10 {
		q.Put(g.read(2, 3, 1, 0))
		q.done(2, 0)
		for _, cid := range []uint16{1, 2, 1} {
			q.Put(g.read(cid, 4, 1, 0))
			q.done(cid, 0)
		}
		q.done(2, 0)
	}
	// Where none follow, it comes soon; not behind the end of its queue.
	g = newRig(t, rigOptions{faults: late})
	q = g.queue(4)
	q.Put(g.read(2, 3, 1, 0))
	q.done(2, 0)
	q.done(2, 0)
	q.Put(g.read(2, 3, 1, 0))
	q.done(2, 0)
	q.delete()
	q = g.queue(4)
	q.Put(g.read(1, 4, 1, 0))
	q.done(1, 0)
	q.none()
}

func TestForeign(t *testing.T) {
	g := newRig(t,
		rigOptions{faults: "foreign(op=read,lba=3,cid=0x1234,times=1);foreign(op=read,lba=4)"})
	q := g.queue(4)
	q.Put(g.read(1, 3, 1, 0))
	q.done(0x1234, 0)
	q.done(1, 0)
	q.Put(g.read(1, 4, 1, 0))
	q.done(0xfffe, 0)
	q.done(1, 0)
	q.none()
}

func TestWrongPhase(t *testing.T) {
	g := newRig(t, rigOptions{faults: "phase(op=read,lba=3,times=1)"})
	q := g.queue(4)
	q.Put(g.read(1, 2, 1, 0), g.read(2, 3, 1, 4096), g.read(3, 4, 1, 8192))
	q.done(1, 0)
	q.none() // neither the entry nor the one behind it
	g.holds(4, 1, 8192)
	q.delete()
	q = g.queue(4)
	q.Put(g.read(2, 3, 1, 4096))
	q.done(2, 0)
}

func TestWrongSQHeadAndSQID(t *testing.T) {
	g := newRig(t, rigOptions{faults: "sqhead(op=read,lba=3);sqid(op=read,lba=4)"})
	q := g.queue(4)
	q.Put(g.read(1, 3, 1, 0))
	e := q.next()
	require.EqualValues(t, 11, e.SQHead)
	require.Equal(t, q.qp.ID, e.SQID)
	q.Put(g.read(2, 4, 1, 0))
	e = q.next()
	require.EqualValues(t, 2, e.SQHead)
	require.Equal(t, q.qp.ID+1, e.SQID)
	require.EqualValues(t, 2, e.CID)
}

func TestReorder(t *testing.T) {
	g := newRig(t, rigOptions{faults: "reorder(op=read,n=3)"})
	q := g.queue(16)
	var cmds []nvme.Command
	for cid := range uint16(7) {
		cmds = append(cmds, g.read(cid, int(cid), 1, int(cid)*4096))
	}
	q.Put(cmds...)
	for _, cid := range []uint16{2, 1, 0, 5, 4, 3} {
		q.done(cid, 0)
	}
	q.done(6, 0) // alone: after a time
	for i := range 7 {
		g.holds(i, 1, i*4096)
	}
}

func TestStuckSubmissionQueue(t *testing.T) {
	g := newRig(t, rigOptions{faults: "stuck(op=read,lba=3,times=1)"})
	q, other := g.queue(8), g.queue(8)
	q.Put(g.read(1, 2, 1, 0), g.read(2, 3, 1, 4096), g.read(3, 4, 1, 8192))
	q.done(1, 0)
	q.Put(g.read(4, 5, 1, 12288))
	q.none()
	other.Put(g.read(1, 3, 1, 0))
	other.done(1, 0)
	aborted, err := g.c.Abort(t.Context(), q.qp.ID, 2)
	require.NoError(t, err)
	require.False(t, aborted, "it was never fetched")
	q.delete()
	q = g.queue(8)
	q.Put(g.read(2, 3, 1, 4096))
	q.done(2, 0)
}

func TestTornDoorbell(t *testing.T) {
	g := newRig(t, rigOptions{faults: "torndb(op=read,lba=3,times=2)"})
	q := g.queue(8)
	q.Put(g.read(1, 3, 1, 0))
	q.none()
	q.Put(g.read(2, 4, 1, 4096)) // the next doorbell mends it
	q.done(1, 0)
	q.done(2, 0)
	q.Put(g.read(3, 3, 1, 0))
	q.none()
	q.delete() // and so does a new queue
	q = g.queue(8)
	q.Put(g.read(3, 3, 1, 0))
	q.done(3, 0)
}

func TestStuckCompletionQueue(t *testing.T) {
	g := newRig(t, rigOptions{faults: "cqstuck(op=read,lba=3,times=1)"})
	q := g.queue(4)
	for range 5 {
		q.Put(g.read(1, 2, 1, 0))
		q.done(1, 0)
	}
	q.Put(g.read(1, 3, 1, 0))
	q.done(1, 0)
	for range 2 { // as many as there were entries
		q.Put(g.read(1, 2, 1, 0))
		q.done(1, 0)
	}
	q.Put(g.read(1, 2, 1, 0))
	q.none()
	q.delete()
	q = g.queue(4)
	q.Put(g.read(1, 3, 1, 0))
	q.done(1, 0)
}

func TestFlip(t *testing.T) {
	for _, lba := range []int{512, 4096} {
		g := newRig(t,
			rigOptions{
				faults: "flip(op=read,lba=3,byte=9,bit=3,times=1);flip(op=read,lba=32,byte=20000,bit=0)",
				proxy:  func(c *proxy.Config) { c.LBABytes = lba }})
		q := g.queue(4)
		q.Put(g.read(1, 2, 3, 512))
		q.done(1, 0)
		g.mem[512+lba+9] ^= 1 << 3 // of block 3
		g.holds(2, 3, 512)
		// Behind a PRP list, at an odd place of a page.
		n := 24576 / lba
		q.Put(g.read(1, 32, n, 2048))
		q.done(1, 0)
		g.mem[2048+20000] ^= 1
		g.holds(32, n, 2048)
		g.counts(1, 1)
	}
}

func TestShort(t *testing.T) {
	g := newRig(t, rigOptions{faults: "short(op=read,bytes=5000,times=1);short(op=read,lba=900)"})
	q := g.queue(4)
	q.Put(g.read(1, 2, 30, 1024))
	q.done(1, 0)
	g.holds(2, 9, 1024) // 4608 bytes
	require.Equal(t, pattern(11, 391), g.mem[1024+4999])
	require.Equal(t, bytes.Repeat([]byte{0xcc}, 30*512-5000), g.mem[1024+5000:1024+30*512])
	q.Put(g.read(1, 900, 1, 0))
	q.done(1, 0)
	require.Equal(t, bytes.Repeat([]byte{0xcc}, 512), g.mem[:512])
	q.Put(g.read(1, 2, 30, 1024))
	q.done(1, 0)
	g.holds(2, 30, 1024)
}

func TestMisdirect(t *testing.T) {
	g := newRig(t,
		rigOptions{
			faults: "misdirect(op=read,lba=100,shift=8,times=1);misdirect(op=read,lba=3,shift=8);misdirect(op=write,shift=1)"})
	q := g.queue(4)
	q.Put(g.read(1, 100, 2, 0))
	q.done(1, 0)
	g.holds(92, 2, 0)
	q.Put(g.read(1, 3, 1, 0)) // there is nothing 8 blocks before
	q.done(1, 0)
	g.holds(11, 1, 0)
	q.Put(g.read(1, 200, 1, 0))
	q.done(1, 0)
	p1, _ := g.prps(0, 512)
	q.Put(nvme.WriteCommand(1, 1, 50, 1, p1, 0))
	q.done(1, 0)
	img, err := os.ReadFile(g.path)
	require.NoError(t, err)
	require.Equal(t, g.mem[:512], img[49*512:50*512])
	require.Equal(t, pattern(50, 1), img[50*512+1])
}

func TestTornWrite(t *testing.T) {
	g := newRig(t, rigOptions{faults: "torn(times=2)"})
	q := g.queue(4)
	copy(g.mem, bytes.Repeat([]byte{0x77}, 4096))
	p1, _ := g.prps(0, 8*512)
	q.Put(nvme.WriteCommand(1, 1, 50, 8, p1, 0), nvme.WriteCommand(2, 1, 80, 1, p1, 0))
	q.done(2, 0) // nothing of a single block lands: it never reaches the controller
	q.done(1, 0)
	q.Put(nvme.WriteCommand(2, 1, 90, 2, p1, 0))
	q.done(2, 0)
	img, err := os.ReadFile(g.path)
	require.NoError(t, err)
	want := bytes.Repeat([]byte{0x77}, 4096)
	require.Equal(t, want[:2048], img[50*512:54*512])
	require.Equal(t, pattern(54, 0), img[54*512])
	require.Equal(t, pattern(80, 0), img[80*512])
	require.Equal(t, want[:1024], img[90*512:92*512])
}

// A client that never calls Kick.
func TestPollDoorbells(t *testing.T) {
	g := newRig(t, rigOptions{faults: "late(ms=2,op=read,times=1)",
		opt: faultbus.Options{PollDoorbells: true}})
	mem, io, err := g.bus.DoorbellMemory()
	require.NoError(t, err)
	require.False(t, io)
	require.NotEmpty(t, mem)
	q := g.queue(4)
	for i := range 50 {
		cmd := g.read(1, i, 1, 0)
		q.Write(cmd)
		nvme.StoreDoorbell(q.qp.SQDoorbell, uint32(q.Tail))
		for end := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
			if _, ok := q.Poll(); ok {
				break
			}
			require.True(t, time.Now().Before(end), "no completion")
		}
		g.holds(i, 1, 0)
	}
	plain := newRig(t, rigOptions{})
	_, _, err = plain.bus.DoorbellMemory()
	require.ErrorContains(t, err, "PollDoorbells")
}
