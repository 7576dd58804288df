package vfiobus

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/vfio"
	"helios/nvme"
)

// peerRig is an SSD and another device's memory: the kernel's part of rung p2p of the memory
// ladder, with a device in place of the GPU whose BAR sysfs maps, as page frames that are no RAM,
// like NVIDIA's modules do. Addresses are those of cuda.PeerMapping: reserved at once, filled piece
// by piece.
type peerRig struct {
	*rig
	dom  *vfio.Domain
	f    *os.File
	mem  []byte // the BAR
	iova nvme.IOVA
}

const fill = 0xee

// pinned is VmLck or VmPin of this process, whichever the kernel counts DMA in.
func pinned(t *testing.T) (lines string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for l := range strings.Lines(string(b)) {
		if strings.HasPrefix(l, "VmLck:") || strings.HasPrefix(l, "VmPin:") {
			lines += l
		}
	}
	return lines
}

func newPeerRig(t *testing.T) *peerRig {
	t.Helper()
	addr, file := os.Getenv("HELIOS_VFIO_TEST"), os.Getenv("HELIOS_VFIO_PEER")
	if addr == "" || file == "" {
		t.Skip(
			"HELIOS_VFIO_TEST names no scratch controller that is bound to vfio-pci, and HELIOS_VFIO_PEER no file of a BAR with memory (…/resource2_wc)")
	}
	dom, err := vfio.New(vfio.Options{})
	require.NoError(t, err)
	b := openDevice(t, dom, addr)
	c, err := nvme.Open(t.Context(), b, nvme.Options{})
	require.NoError(t, err)
	p := &peerRig{rig: &rig{t: t, bus: b, c: c}, dom: dom}
	p.f, err = os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	st, err := p.f.Stat()
	require.NoError(t, err)
	off, err := unix.MmapPtr(-1, 0, nil, uintptr(st.Size()), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	require.NoError(t, err)
	p.mem = unsafe.Slice((*byte)(off), st.Size())
	return p
}

// grow maps a part of the BAR.
func (p *peerRig) grow(lo, hi int) {
	p.t.Helper()
	_, err := unix.MmapPtr(int(p.f.Fd()), int64(lo), unsafe.Pointer(&p.mem[lo]), uintptr(hi-lo),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	require.NoError(p.t, err)
	junk := bytes.Repeat([]byte{fill}, 64<<10)
	for off := lo; off < hi; off += len(junk) {
		copy(p.mem[off:hi], junk)
	}
}

// Places in the BAR.
const (
	peerSQ   = 0
	peerCQ   = 4096
	peerList = 8192
	peerData = 1 << 20
	peerRead = 128 << 10
)

// peerQueue makes a queue pair whose rings are in the BAR.
func (p *peerRig) peerQueue(entries int) *queue {
	p.t.Helper()
	clear(p.mem[peerCQ : peerCQ+4096])
	qp, err := p.c.CreateQueuePairIn(p.t.Context(), entries, &nvme.QueueMemory{
		SQ: p.mem[peerSQ:peerCQ], CQ: p.mem[peerCQ:peerList], SQAddr: p.iova + peerSQ,
		CQAddr: p.iova + peerCQ,
	})
	require.NoError(p.t, err)
	require.Same(p.t, &p.mem[peerSQ], &qp.SQ[0])
	return &queue{Queue: testrig.QueueOf(nil, qp), t: p.t, qp: qp}
}

// pages writes the PRP list of n bytes at an address into the BAR and returns both PRPs.
func (p *peerRig) pages(at nvme.IOVA, n int) (prp1, prp2 uint64) {
	for i := 1; i < n/4096; i++ {
		binary.LittleEndian.PutUint64(p.mem[peerList+8*(i-1):], uint64(at)+uint64(i)*4096)
	}
	return uint64(at), uint64(p.iova) + peerList
}

func (p *peerRig) close() {
	p.t.Helper()
	require.NoError(p.t, p.c.UnmapDMA(p.iova, int64(len(p.mem))))
	pieces, n := p.dom.Mapped()
	require.NoError(p.t, p.c.Close(context.Background()))
	require.Positive(p.t, pieces, "the controller's own queues were still mapped: %d bytes", n)
	require.NoError(p.t, unix.MunmapPtr(unsafe.Pointer(&p.mem[0]), uintptr(len(p.mem))))
	require.NoError(p.t, p.f.Close())
	pieces, n = p.dom.Mapped()
	require.Zero(p.t, pieces, "%d bytes left mapped", n)
	require.Empty(p.t, hostmem.Usage())
	require.NoError(p.t, p.dom.Close())
}

// TestVFIOPeer moves data between an SSD and another device's memory in both directions, with the
// rings, the commands and the PRP lists there too, and compares it with what goes through RAM. It
// WRITES to the SSD. It leaves the data of LBA 0 at the border of the BAR's halves.
func TestVFIOPeer(t *testing.T) {
	p := newPeerRig(t)
	half := len(p.mem) / 2
	counted := pinned(t)
	iova, err := p.c.MapPeerWindow(p.mem)
	require.NoError(t, err)
	p.iova = iova
	err = p.c.ExtendWindow(iova, 4096)
	require.Equal(t, errs.Capability, errs.ClassOf(err), "nothing is behind the addresses yet")
	require.ErrorContains(t, err, "no page frame")
	p.grow(0, half)
	began := time.Now()
	require.NoError(t, p.c.ExtendWindow(iova, int64(half)))
	require.Error(t, p.c.ExtendWindow(iova, int64(half)+4096))
	p.grow(half, len(p.mem))
	require.NoError(t, p.c.ExtendWindow(iova, int64(len(p.mem))))
	t.Logf("peer: %d MiB of I/O memory mapped for DMA in %v", len(p.mem)>>20,
		time.Since(began).Round(time.Microsecond))
	require.Equal(t, counted, pinned(t), "no locked memory is counted for it")
	if again, err := p.c.MapDMA(p.mem[peerData : peerData+peerRead]); err != nil ||
		again != iova+peerData {
		t.Errorf("a part of it is mapped at %#x (%v), not at %#x", uint64(again), err,
			uint64(iova+peerData))
	} else {
		require.NoError(t, p.c.UnmapDMA(again, peerRead))
	}

	ram, err := hostmem.Alloc(peerRead, "test")
	require.NoError(t, err)
	ramAt, err := p.c.MapDMA(ram)
	require.NoError(t, err)
	q := p.peerQueue(16)
	ns := p.c.Namespace()
	blocks := uint32(peerRead / ns.LBABytes)

	// From the BAR to the SSD, with a list in the BAR.
	for i := range peerRead {
		p.mem[peerData+i] = byte(i*131 + i>>9*17 + 5)
	}
	prp1, prp2 := p.pages(iova+peerData, peerRead)
	require.Zero(t, q.do(nvme.WriteCommand(1, ns.ID, 0, blocks, prp1, prp2)))
	prp1, prp2 = p.pages(ramAt, peerRead)
	require.Zero(t, q.do(nvme.ReadCommand(2, ns.ID, 0, blocks, prp1, prp2)))
	require.True(t, bytes.Equal(p.mem[peerData:peerData+peerRead], ram),
		"what RAM got is what the other device had")
	// From the SSD to the BAR, across two mappings.
	off := half - peerRead/2
	prp1, prp2 = p.pages(iova+nvme.IOVA(off), peerRead)
	require.Zero(t, q.do(nvme.ReadCommand(3, ns.ID, 0, blocks, prp1, prp2)))
	require.True(t, bytes.Equal(p.mem[off:off+peerRead], ram),
		"what the other device got is what RAM got")
	around := append(bytes.Clone(p.mem[off-4096:off]), p.mem[off+peerRead:off+peerRead+4096]...)
	require.Equal(t, bytes.Repeat([]byte{fill}, 8192), around, "and nothing beside it")

	// Often enough for both rings to wrap many times.
	began = time.Now()
	const n = 500
	page := peerData + 2*peerRead
	for i := range n {
		lba := nvme.LBA(uint64(i*37%32) * 4096 / uint64(ns.LBABytes))
		p.mem[page], p.mem[page+4095] = ^ram[i*37%32*4096], ^ram[i*37%32*4096+4095]
		require.Zero(t, q.do(nvme.ReadCommand(uint16(i), ns.ID, lba, uint32(4096/ns.LBABytes),
			uint64(iova)+uint64(page), 0)))
		if i%64 == 0 {
			require.True(t, bytes.Equal(p.mem[page:page+4096], ram[i*37%32*4096:][:4096]),
				"read %d", i)
		}
		require.Equal(t, ram[i*37%32*4096+4095], p.mem[page+4095])
	}
	t.Logf(
		"peer: %d reads of 4 KiB one after the other into I/O memory, rings there too: %.1f µs each",
		n, time.Since(began).Seconds()*1e6/n)
	require.NoError(t, p.c.DeleteQueuePair(t.Context(), q.qp))
	require.NoError(t, errors.Join(p.c.UnmapDMA(ramAt, peerRead), hostmem.Free(ram)))
	p.close()
}

// TestVFIOPeerForever keeps reads into the BAR in flight until it is killed; the file
// HELIOS_VFIO_READY says that they are.
func TestVFIOPeerForever(t *testing.T) {
	if os.Getenv("HELIOS_VFIO_READY") == "" {
		t.Skip("HELIOS_VFIO_READY names no file to make when reads are in flight")
	}
	p := newPeerRig(t)
	p.grow(0, len(p.mem))
	var err error
	p.iova, err = p.c.MapPeer(p.mem, -1, 0)
	require.NoError(t, err)
	q := p.peerQueue(16)
	ns := p.c.Namespace()
	const bytesEach, most = 8192, 15
	blocks := uint32(bytesEach / ns.LBABytes)
	end := time.Now().Add(time.Minute)
	for sent, done := 0, 0; time.Now().Before(end); {
		if sent-done < most {
			to := uint64(p.iova) + peerData + uint64(sent%most)*bytesEach
			lba := nvme.LBA(uint64(sent) * uint64(blocks) % (ns.Blocks - uint64(blocks)))
			*(*nvme.Command)(unsafe.Pointer(&q.qp.SQ[q.Tail*nvme.CommandBytes])) = nvme.ReadCommand(
				uint16(sent%most), ns.ID, lba, blocks, to, to+4096)
			q.Tail = (q.Tail + 1) % q.qp.Entries
			nvme.StoreDoorbell(q.qp.SQDoorbell, uint32(q.Tail))
			sent++
			continue
		}
		// Completions may come in another order: all of a round, then the next.
		for done < sent {
			if _, ok := nvme.LoadCompletion(
				(*nvme.Completion)(unsafe.Pointer(&q.qp.CQ[q.Head*nvme.CompletionBytes])),
				q.Phase); !ok {
				require.True(t, time.Now().Before(end), "no completion")
				continue
			}
			done++
			if q.Head++; q.Head == q.qp.Entries {
				q.Head, q.Phase = 0, !q.Phase
			}
			nvme.StoreDoorbell(q.qp.CQDoorbell, uint32(q.Head))
		}
		if sent == 2*most {
			require.NoError(t, os.WriteFile(os.Getenv("HELIOS_VFIO_READY"), nil, 0o644))
		}
	}
	t.Fatal("nobody killed it")
}
