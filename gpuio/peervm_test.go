package gpuio

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/vfio"
	"helios/nvme"
)

// barDevice is the host device with memory of its own behind another PCI device's BAR, which the
// CPU is not told of: in place of a GPU, it has rung p2p meet real type1 mappings and real
// controllers.
type barDevice struct {
	*cuda.Host
	bar []byte

	mu   sync.Mutex
	live []barSpan // sorted
}

type barSpan struct{ lo, hi int }

// barBuffer is memory of a barDevice; a piece of the BAR that is registered with the host device.
type barBuffer struct {
	cuda.Buffer
	d  *barDevice
	at barSpan
}

func (b *barBuffer) Kind() cuda.MemKind { return cuda.MemDevice }
func (b *barBuffer) Bytes() []byte      { return nil }

func (b *barBuffer) Free() error {
	err := b.Buffer.Free()
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	b.d.live = slices.DeleteFunc(b.d.live, func(s barSpan) bool { return s == b.at })
	return err
}

// kernelState names the buffers of kernel state, which SSDs never reach. The host device runs the
// kernels, and they need memory with atomics.
var kernelState = []string{"gpuio queues", "gpuio commands", "gpuio latency", "gpuio sets"}

func (d *barDevice) Alloc(kind cuda.MemKind, size int64, purpose string) (cuda.Buffer, error) {
	if kind != cuda.MemDevice || slices.Contains(kernelState, purpose) {
		return d.Host.Alloc(kind, size, purpose)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	off, n := barSpan{}, int(size+4095)&^4095
	for _, s := range d.live {
		if s.lo-off.lo >= n {
			break
		}
		off.lo = s.hi
	}
	if off.hi = off.lo + n; off.hi > len(d.bar) {
		return nil, errs.With(errs.Capability, &cuda.OutOfMemoryError{Device: "bar",
			Purpose: purpose, Want: size})
	}
	mem := d.bar[off.lo:][:size]
	ioFill(d.bar[off.lo:off.hi], 0)
	b, err := d.Register(mem, purpose)
	if err != nil {
		return nil, err
	}
	d.live = append(d.live, off)
	slices.SortFunc(d.live, func(a, b barSpan) int { return a.lo - b.lo })
	return &barBuffer{b, d, off}, nil
}

func (d *barDevice) RegisterIO(mem []byte, purpose string) (cuda.Buffer, error) {
	return d.Register(mem, purpose)
}

func (d *barDevice) PeerMethods() []cuda.PeerMethod { return []cuda.PeerMethod{{Name: "bar"}} }

func (d *barDevice) MapPeer(b cuda.Buffer, _ string) (cuda.PeerMapping, error) {
	bb, ok := b.(*barBuffer)
	if !ok {
		return nil, errors.New("memory of another kind")
	}
	return elsewhere{d.bar[bb.at.lo:][:b.Size()]}, nil
}

// TestVFIOPeer: rung p2p over real controllers, HELIOS_VFIO_TEST=ADDR, with their queues, PRP lists
// and data in the memory of the device whose BAR is the file HELIOS_VFIO_PEER. It WRITES to the
// controller.
func TestVFIOPeer(t *testing.T) {
	addr, file := os.Getenv("HELIOS_VFIO_TEST"), os.Getenv("HELIOS_VFIO_PEER")
	if addr == "" || file == "" {
		t.Skip(
			"HELIOS_VFIO_TEST names no scratch controller that is bound to vfio-pci, and HELIOS_VFIO_PEER no file of a BAR with memory (…/resource2_wc)")
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(t, err)
	p, err := unix.MmapPtr(int(f.Fd()), 0, nil, uintptr(st.Size()), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	require.NoError(t, err)
	dom, err := vfio.New(vfio.Options{})
	require.NoError(t, err)
	s := openReal(t, dom, addr, nvme.Options{})
	r := loadReal(t, []*realSSD{s}, s.Ctrl.Namespace().LBABytes, 4096)
	bar := &barDevice{Host: r.dev.(*cuda.Host), bar: unsafe.Slice((*byte)(p), st.Size())}
	r.dev = bar

	began := time.Now()
	pr, err := newProver(testCtx(t), bar, r.ssds)
	require.NoError(t, err)
	m := &Memory{rung: RungP2P, method: "bar"}
	require.NoError(t, pr.prove(testCtx(t), m))
	t.Logf("peer: rung p2p proved in %v", time.Since(began).Round(time.Millisecond))
	for _, stack := range []string{"async", "sync"} {
		t.Run(stack, func(t *testing.T) {
			r.t = t
			rng := rand.New(rand.NewPCG(1, 2))
			if stack == "sync" {
				rd, err := NewSync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 16, Blocks: 4,
					Memory: m})
				r.readAll(rng, rd, err)
				return
			}
			rd, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 64, QueuePairs: 2,
				CoalesceBytes: 64 << 10, Memory: m})
			r.readAll(rng, rd, err)
		})
	}
	// A function reset while reads are in flight: the queues come again in the same memory.
	t.Run("reset", func(t *testing.T) {
		r.t = t
		ctx := testCtx(t)
		rd, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 64, Timeout: time.Second,
			Memory: m})
		require.NoError(t, err)
		rng := rand.New(rand.NewPCG(3, 4))
		var sets []*testSet
		var pending []Pending
		for i := range 3 {
			set := r.newSet(rng, 1000, 4096, 0)
			p, err := rd.Submit(ctx, set.rs)
			require.NoError(t, err)
			sets, pending = append(sets, set), append(pending, p)
			if i == 1 {
				require.NoError(t, s.dev.Reset())
			}
		}
		for i, p := range pending {
			_, err := p.Wait(ctx)
			require.NoError(t, err)
			sets[i].check(nil)
		}
		require.Positive(t, rd.Stats().Resets)
		for _, set := range sets {
			set.free(rd)
		}
		require.NoError(t, rd.Close(ctx))
	})
	require.Empty(t, bar.live, "memory of the device is left")
	require.NoError(t, s.Ctrl.Close(testCtx(t)))
	pieces, n := dom.Mapped()
	require.Zero(t, pieces, "%d bytes left mapped", n)
	require.NoError(t, dom.Close())
	require.NoError(t, unix.MunmapPtr(p, uintptr(st.Size())))
	require.Empty(t, hostmem.Usage())
}
