package proxy

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/hostmem"
	"helios/nvme"
)

// eachKind runs a test on every way to reach a medium.
func eachKind(t *testing.T, f func(t *testing.T, cfg Config)) {
	for name, cfg := range kinds() {
		t.Run(name, func(t *testing.T) { f(t, cfg) })
	}
}

func fill(p []byte, rng *rand.Rand) {
	for i := 0; i+8 <= len(p); i += 8 {
		*(*uint64)(unsafe.Pointer(&p[i])) = rng.Uint64()
	}
}

func stain(p []byte) {
	for i := range p {
		p[i] = 0x5a
	}
}

func stained(p []byte) bool { return bytes.Count(p, []byte{0x5a}) == len(p) }

// Every I/O command that a controller has to refuse.
func TestIORefusals(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 16)
		pos := uint64(g.iova)
		last := nvme.LBA(g.bus.blocks)
		page := uint32(4096 / g.bus.cfg.LBABytes)
		mdts := uint32(128 << 10 / g.bus.cfg.LBABytes)
		list := func(off int, entries ...uint64) uint64 {
			for i, e := range entries {
				*(*uint64)(unsafe.Pointer(&g.mem[off+8*i])) = e
			}
			return pos + uint64(off)
		}
		endOfMap := pos + rigMem
		for name, x := range map[string]struct {
			st  nvme.Status
			cmd nvme.Command
		}{
			"opcode": {nvme.StatusInvalidOpcode, nvme.Command{Opcode: 0x42, NSID: 1}},
			"namespace 0": {nvme.StatusInvalidNamespace,
				nvme.ReadCommand(0, 0, 0, 1, pos, 0)},
			"namespace 2": {nvme.StatusInvalidNamespace, nvme.WriteCommand(0, 2, 0, 1,
				pos, 0)},
			"all namespaces": {nvme.StatusInvalidNamespace, nvme.ReadCommand(0, nvme.NSIDAll,
				0, 1, pos, 0)},
			"flush namespace 3": {nvme.StatusInvalidNamespace, nvme.FlushCommand(0, 3)},
			"fused": {nvme.StatusInvalidField, nvme.Command{Opcode: nvme.OpRead,
				Flags: 1, NSID: 1}},
			"SGLs": {nvme.StatusInvalidField, nvme.Command{Opcode: nvme.OpRead,
				Flags: 0x40, NSID: 1}},
			"over MDTS": {nvme.StatusInvalidField, nvme.ReadCommand(0, 1, 0, mdts+1,
				pos, pos)},
			"first block beyond": {nvme.StatusLBAOutOfRange, nvme.ReadCommand(0, 1, last, 1,
				pos, 0)},
			"last block beyond": {nvme.StatusLBAOutOfRange, nvme.WriteCommand(0, 1, last-1, 2,
				pos, pos+4096)},
			"block number wraps": {nvme.StatusLBAOutOfRange, nvme.ReadCommand(0, 1, 1<<64-1, 2,
				pos, pos+4096)},
			"byte offset": {nvme.StatusInvalidPRPOffset,
				nvme.ReadCommand(0, 1, 0, 1, pos+1, 0)},
			"second PRP's offset": {nvme.StatusInvalidPRPOffset, nvme.ReadCommand(0, 1, 0, 2*page,
				pos, pos+4096+512)},
			"list's offset": {nvme.StatusInvalidPRPOffset, nvme.ReadCommand(0, 1, 0, 3*page,
				pos, pos+4)},
			"list entry's offset": {nvme.StatusInvalidPRPOffset, nvme.ReadCommand(0, 1, 0, 3*page,
				pos, list(1<<20, pos+4096, pos+8192+4))},
			"next list's offset": {nvme.StatusInvalidPRPOffset, nvme.ReadCommand(0, 1, 0, 3*page,
				pos, list(1<<20+4096-8, pos+8))},
			"first PRP unmapped": {nvme.StatusDataTransferError, nvme.ReadCommand(0, 1, 0, 1,
				0x7000, 0)},
			"virtual address": {nvme.StatusDataTransferError, nvme.ReadCommand(0, 1, 0, 1,
				uint64(uintptr(unsafe.Pointer(&g.mem[0]))), 0)},
			"second PRP unmapped": {nvme.StatusDataTransferError, nvme.ReadCommand(0, 1, 0, 2*page,
				pos, 0x7000)},
			"list unmapped": {nvme.StatusDataTransferError,
				nvme.WriteCommand(0, 1, 0, 3*page, pos, 0x7000)},
			"list entry unmapped": {nvme.StatusDataTransferError,
				nvme.WriteCommand(0, 1, 0, 3*page, pos, list(2<<20, pos+4096, 0x7000))},
			"next list unmapped": {nvme.StatusDataTransferError,
				nvme.WriteCommand(0, 1, 0, 3*page, pos, list(2<<20+4096-8, 0x7000))},
			"behind the mapping": {nvme.StatusDataTransferError, nvme.ReadCommand(0, 1, 0, 1,
				endOfMap, 0)},
			"list runs off memory": {nvme.StatusDataTransferError, nvme.ReadCommand(0, 1, 0, 4*page,
				pos, list(rigMem-4096, pos+4096, pos+8192, endOfMap))},
		} {
			t.Run(name, func(t *testing.T) {
				g.t = t
				x.cmd.CID = g.nextCID()
				q.want(x.st, x.cmd)
			})
		}
		g.t = t
		assert.Zero(t, g.smart().HostReads.Lo+g.smart().HostWrites.Lo,
			"refused commands are not reads")
	})
}

// Random writes and reads of all lengths, with all offsets into the first page and chained
// lists, against a copy in memory.
func TestReadWrite(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		cfg.MDTS = 9 // 2 MiB: 513 list entries need two pages
		g := newRig(t, cfg)
		q := g.pair(1, 16)
		seed := time.Now().UnixNano()
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(uint64(seed), 1))
		lba := g.bus.cfg.LBABytes
		blocks := int(g.bus.blocks)
		shadow := make([]byte, blocks*lba)
		const data, list = 0, 4 << 20
		var reads, writes, readBytes, writeBytes uint64
		rounds := 120
		if testing.Short() {
			rounds = 40
		}
		for i := range rounds {
			limit := 32 << 10
			if i%8 == 0 {
				limit = 2 << 20
			}
			n := 1 + rng.IntN(limit/lba)
			pos := rng.IntN(blocks - n + 1)
			off := []int{0, 0, 512, 4, 4092, 2048, rng.IntN(1024) * 4}[rng.IntN(7)]
			// A list may start anywhere in its page, on a quadword.
			prp1, prp2 := g.prps(data+off, n*lba, list+[]int{0, 8, 4080, 4088, 2048}[rng.IntN(5)])
			mem := g.mem[data+off : data+off+n*lba]
			if rng.IntN(2) == 0 {
				fill(mem[:len(mem)&^7], rng)
				copy(shadow[pos*lba:], mem)
				c := nvme.WriteCommand(g.nextCID(), 1, nvme.LBA(pos), uint32(n), prp1, prp2)
				if rng.IntN(8) == 0 {
					c.CDW12 |= fua
				}
				q.must(c)
				writes++
				writeBytes += uint64(n * lba)
				continue
			}
			guard := g.mem[data+off+n*lba]
			q.must(nvme.ReadCommand(g.nextCID(), 1, nvme.LBA(pos), uint32(n), prp1, prp2))
			require.True(t, bytes.Equal(mem, shadow[pos*lba:(pos+n)*lba]),
				"round %d: %d blocks at %d to offset %d", i, n, pos, off)
			require.Equal(t, guard, g.mem[data+off+n*lba], "byte behind the buffer")
			reads++
			readBytes += uint64(n * lba)
		}
		q.must(nvme.FlushCommand(g.nextCID(), 1))
		q.must(nvme.FlushCommand(g.nextCID(), nvme.NSIDAll))
		s := g.smart()
		assert.Equal(t, reads, s.HostReads.Lo)
		assert.Equal(t, writes, s.HostWrites.Lo)
		assert.Equal(t, (readBytes+511999)/512000, s.DataUnitsRead.Lo)
		assert.Equal(t, (writeBytes+511999)/512000, s.DataUnitsWritten.Lo)
		assert.Zero(t, s.ErrorLogEntries.Lo)
		file, err := os.ReadFile(g.bus.cfg.Path)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(file, shadow), "the backing file has what was written")
		// Counters outlive the queue that counted.
		g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
		g.adm.must(nvme.DeleteCQCommand(g.nextCID(), 1))
		assert.Equal(t, reads, g.smart().HostReads.Lo)
	})
}

// Where a unit of O_DIRECT holds several blocks, writes must not undo their neighbours.
func TestUnitsLargerThanBlocks(t *testing.T) {
	g := newRig(t, Config{})
	g.bus.back.offAlign, g.bus.back.memAlign = 4096, 4096
	q1, q2 := g.pair(1, 64), g.pair(2, 64)
	const n = 48
	for i := range n {
		for j := range 512 {
			g.mem[i*512+j] = byte(i + 1)
		}
		q := q1
		if i%2 == 1 {
			q = q2
		}
		q.Put(nvme.WriteCommand(uint16(i), 1, nvme.LBA(i), 1, uint64(g.iova)+uint64(i)*512, 0))
	}
	for range n / 2 {
		for _, q := range []*ring{q1, q2} {
			e, ok := q.Get(10 * time.Second)
			require.True(t, ok)
			require.True(t, e.Status().OK(), e.Status())
		}
	}
	prp1, prp2 := g.prps(1<<20, n*512, 4<<20)
	q1.must(nvme.ReadCommand(1, 1, 0, n, prp1, prp2))
	assert.True(t, bytes.Equal(g.mem[:n*512], g.mem[1<<20:1<<20+n*512]))
}

// A deep submission queue on a shallow completion queue: the controller must not post what
// has no room, and the rings wrap many times.
func TestRingWrapAndFullCQ(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		cq := g.ring(1, 1, 4)
		sq := g.ring(1, 1, 32)
		g.adm.must(nvme.CreateCQCommand(g.nextCID(), 1, 4, cq.cq))
		g.adm.must(nvme.CreateSQCommand(g.nextCID(), 1, 32, sq.sq, 1))
		cq.ID = 1
		const total = 1000
		sent, got := 0, 0
		outstanding := map[uint16]bool{}
		for got < total {
			var cmds []nvme.Command
			for sent < total && len(outstanding) < 31 {
				cid := uint16(sent)
				outstanding[cid] = true
				cmds = append(cmds, nvme.ReadCommand(cid, 1, nvme.LBA(sent%64), 1,
					uint64(g.iova)+uint64(sent%64)*4096, 0))
				sent++
			}
			if len(cmds) > 0 {
				sq.Put(cmds...)
			}
			e, ok := cq.Get(10 * time.Second)
			require.True(t, ok, "after %d of %d", got, total)
			require.True(t, e.Status().OK())
			require.True(t, outstanding[e.CID], "CID %d twice, or never sent", e.CID)
			require.Less(t, int(e.SQHead), 32)
			delete(outstanding, e.CID)
			got++
		}
		_, ok := cq.Get(5 * time.Millisecond)
		assert.False(t, ok, "a completion too many")
	})
}

func TestOutOfOrder(t *testing.T) {
	g := newRig(t, Config{RAM: true, OutOfOrder: true})
	q := g.pair(1, 128)
	swapped := false
	for round := range 20 {
		var cmds []nvme.Command
		for i := range 100 {
			cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1,
				uint64(g.iova)+uint64(i)*4096, 0))
		}
		q.Put(cmds...)
		seen := [100]bool{}
		for i := range 100 {
			e, ok := q.Get(5 * time.Second)
			require.True(t, ok)
			require.False(t, seen[e.CID], "round %d: CID %d twice", round, e.CID)
			seen[e.CID] = true
			swapped = swapped || int(e.CID) != i
		}
	}
	assert.True(t, swapped, "completions came in order")
}

// I/O commands run to their end whether they are aborted or not.
func TestAbortOfIO(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 16)
		q.Put(nvme.ReadCommand(2, 1, 3, 1, uint64(g.iova)+8192, 0))
		for _, cid := range []uint16{2, 99} {
			assert.EqualValues(t, 1, g.adm.must(nvme.AbortCommand(g.nextCID(), 1, cid))&1,
				"not aborted")
		}
		assert.EqualValues(t, 1, g.adm.must(nvme.AbortCommand(g.nextCID(), 9, 2))&1,
			"no such queue")
		e, ok := q.Get(10 * time.Second)
		require.True(t, ok)
		assert.EqualValues(t, 2, e.CID)
		assert.True(t, e.Status().OK())
	})
}

// A medium that fails: the backing loses its second half under the controller's feet.
func TestFailingMedium(t *testing.T) {
	for _, name := range []string{"file", "buffered", "pread"} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, kinds()[name])
			q := g.pair(1, 16)
			require.NoError(t, os.Truncate(g.bus.cfg.Path, 8<<20))
			p1, p2 := g.prps(0, 64<<10, 4<<20)
			e := q.Do(q.g.t, nvme.ReadCommand(2, 1, 12<<20/512, 128, p1, p2))
			assert.True(t, e.Status().Is(nvme.StatusUnrecoveredRead), e.Status())
			e = q.Do(q.g.t, nvme.ReadCommand(2, 1, 8<<20/512-8, 16, p1, p1+4096)) // half of it
			assert.True(t, e.Status().Is(nvme.StatusUnrecoveredRead), e.Status())
			q.must(nvme.ReadCommand(2, 1, 0, 128, p1, p2))
			s := g.smart()
			assert.EqualValues(t, 2, s.MediaErrors.Lo)
			assert.EqualValues(t, nvme.WarnReliability, s.CriticalWarning)
		})
	}
}

func TestReadOnly(t *testing.T) {
	for _, ram := range []bool{false, true} {
		g := newRig(t, Config{ReadOnly: true, RAM: ram})
		q := g.pair(1, 16)
		q.want(nvme.StatusNamespaceReadOnly, nvme.WriteCommand(1, 1, 0, 1, uint64(g.iova), 0))
		q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
		assert.EqualValues(t, nvme.WarnReadOnly, g.smart().CriticalWarning)
	}
}

// Unmapping memory waits for transfers into it; after that commands into it fail.
func TestUnmap(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		q := g.pair(1, 64)
		for range 30 {
			m, iova := g.dma(256 << 10)
			var cmds []nvme.Command
			for i := range 32 {
				cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, nvme.LBA(i), 1,
					uint64(iova)+uint64(i)*4096, 0))
			}
			q.Put(cmds...)
			g.bus.WaitCQ(1, 0) // begin some
			require.NoError(t, g.bus.UnmapDMA(iova, int64(len(m))))
			stain(m)
			for range 32 {
				e, ok := q.Get(10 * time.Second)
				require.True(t, ok)
				if s := e.Status(); !s.OK() {
					require.True(t, s.Is(nvme.StatusDataTransferError), s)
				}
			}
			require.True(t, stained(m), "written after it was unmapped")
			q.want(nvme.StatusDataTransferError, nvme.ReadCommand(1, 1, 0, 1, uint64(iova), 0))
			m2, iova2 := g.dma(4096)
			g.undma(m2, iova2)
			assert.Error(t, g.bus.UnmapDMA(iova, int64(len(m))), "twice")
			assert.Error(t, g.bus.UnmapDMA(g.iova, 4096), "a part")
			g.freeOnly(m)
		}
	})
}

// Live queues whose memory is unmapped are fatal to the controller; a reset recovers it.
func TestUnmapLiveQueue(t *testing.T) {
	g := newRig(t, Config{RAM: true})
	q := g.pair(1, 16)
	require.NoError(t, g.bus.UnmapDMA(q.sq, int64(len(q.SQ))))
	assert.True(t, g.csts().CFS())
	q.Put(nvme.FlushCommand(1, 1))
	_, ok := q.Get(10 * time.Millisecond)
	assert.False(t, ok, "a dead controller answers")
	iova, err := g.bus.MapDMA(q.SQ)
	require.NoError(t, err)
	q.sq = iova
	g.write32(nvme.RegCC, 0)
	g.enable()
	assert.False(t, g.csts().CFS())
}

// A reset in the middle of transfers waits for them; nothing is written afterwards.
func TestResetInFlight(t *testing.T) {
	eachKind(t, func(t *testing.T, cfg Config) {
		g := newRig(t, cfg)
		for round := range 10 {
			q := g.pair(1, 256)
			var cmds []nvme.Command
			for i := range 200 {
				cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, nvme.LBA(i), 1,
					uint64(g.iova)+uint64(i)*4096, 0))
			}
			q.Put(cmds...)
			if round%2 == 0 {
				g.bus.WaitCQ(1, 0)
			}
			g.write32(nvme.RegCC, 0)
			stain(g.mem)
			stain(q.CQ)
			require.Zero(t, g.bus.react.inflight.Load())
			require.True(t, stained(g.mem), "data written after the reset")
			require.True(t, stained(q.CQ), "completed after the reset")
			g.enable()
		}
	})
}

func (g *rig) freeOnly(m []byte) {
	g.t.Helper()
	if err := hostmem.Free(m); err != nil {
		g.t.Error(err)
	}
}

// FuzzCommand sends arbitrary commands: the controller answers each, with some status, and
// touches nothing outside mapped memory.
func FuzzCommand(f *testing.F) {
	add := func(c nvme.Command, admin bool) {
		f.Add(append([]byte(nil), structBytes(&c)...), admin)
	}
	add(nvme.ReadCommand(1, 1, 2, 9, 1<<32, 1<<32+4096), false)
	add(nvme.WriteCommand(1, 1, 2, 200, 1<<32+8, 1<<32+16), false)
	add(nvme.IdentifyCommand(1, 0, 1, 1<<32, 0), true)
	add(nvme.GetLogPageCommand(1, 2, 0, 512, false, 1<<32, 0), true)
	add(nvme.CreateCQCommand(1, 2, 16, 1<<32), true)
	add(nvme.CreateSQCommand(1, 2, 16, 1<<32, 2), true)
	f.Fuzz(func(t *testing.T, raw []byte, admin bool) {
		g := newRig(t, Config{RAM: true, Path: newFile(t, 1<<20, true)})
		q := g.pair(1, 16)
		if admin {
			q = g.adm
		}
		var c nvme.Command
		copy(structBytes(&c), raw)
		if admin && (c.Opcode == nvme.AdminDeleteSQ || c.Opcode == nvme.AdminDeleteCQ) {
			return // takes the queue that is asked below
		}
		e := q.Do(q.g.t, c)
		if e.Status().Words() == "" {
			t.Errorf("status %#x has no words", uint16(e.Status()))
		}
		g.adm.must(nvme.GetFeaturesCommand(c.CID+1, nvme.FeatureArbitration))
	})
}

// With memory pages of 8 KiB a PRP covers twice as much, and offsets count within 8 KiB.
func TestLargerMemoryPages(t *testing.T) {
	for _, cfg := range []Config{{RAM: true}, {}} {
		g := newRig(t, cfg)
		g.write32(nvme.RegCC, 0)
		g.write32(nvme.RegCC, uint32(nvme.MakeCC(13, 6, 4)|nvme.CCEnable))
		require.True(t, g.csts().RDY())
		g.adm.Tail, g.adm.Head, g.adm.Phase = 0, 0, true
		q := g.pair(1, 16)
		require.Zero(t, uint64(g.iova)%8192)
		rng := rand.New(rand.NewPCG(5, 6))
		off := uint64(g.iova)
		fill(g.mem[:16384], rng)
		q.must(nvme.WriteCommand(1, 1, 0, 32, off, off+8192))
		list := (*[2]uint64)(unsafe.Pointer(&g.mem[1<<20]))
		list[0], list[1] = off+(1<<17), off+(1<<18)
		clear(g.mem[65536 : 65536+8192])
		q.must(nvme.ReadCommand(3, 1, 0, 32, off+65536+4096, off+(1<<20))) // 4 + 8 + 4 KiB
		assert.True(t, bytes.Equal(g.mem[:4096], g.mem[65536+4096:65536+8192]))
		assert.True(t, bytes.Equal(g.mem[4096:12288], g.mem[1<<17:1<<17+8192]))
		assert.True(t, bytes.Equal(g.mem[12288:16384], g.mem[1<<18:1<<18+4096]))
		q.want(nvme.StatusInvalidPRPOffset, nvme.ReadCommand(4, 1, 0, 32, off, off+4096))
	}
}

// A RAM SSD keeps its contents when its process ends; here, when it is closed.
func TestRAMOutlivesController(t *testing.T) {
	path := newFile(t, 1<<20, true)
	t.Run("write", func(t *testing.T) {
		g := newRig(t, Config{Path: path, RAM: true})
		copy(g.mem, "still here")
		g.pair(1, 8).must(nvme.WriteCommand(1, 1, 77, 1, uint64(g.iova), 0))
	})
	t.Run("read", func(t *testing.T) {
		g := newRig(t, Config{Path: path, RAM: true})
		g.pair(1, 8).must(nvme.ReadCommand(1, 1, 77, 1, uint64(g.iova), 0))
		assert.Equal(t, "still here", string(g.mem[:10]))
	})
}
