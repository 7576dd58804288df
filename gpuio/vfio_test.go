package gpuio

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/vfiobus"
)

// TestVFIO reads and WRITES the controllers at HELIOS_VFIO_TEST=ADDR[,ADDR…], which vfio-pci has,
// with Bulk and with both stacks. tools/vmtest runs it in a guest.
func TestVFIO(t *testing.T) {
	list := os.Getenv("HELIOS_VFIO_TEST")
	if list == "" {
		t.Skip("HELIOS_VFIO_TEST names no scratch controllers that are bound to vfio-pci")
	}
	dom, err := vfio.New(vfio.Options{})
	require.NoError(t, err)
	defer func() {
		pieces, n := dom.Mapped()
		require.Zero(t, pieces, "%d bytes left mapped", n)
		require.NoError(t, dom.Close())
	}()
	var all []*realSSD
	for _, addr := range strings.Split(list, ",") {
		s := openReal(t, dom, addr, nvme.Options{})
		all = append(all, s)
		t.Run("bulk "+addr, s.bulk)
	}
	byLBA := map[int][]*realSSD{}
	for _, s := range all {
		lba := s.Ctrl.Namespace().LBABytes
		byLBA[lba] = append(byLBA[lba], s)
	}
	for lba, group := range byLBA {
		for _, rowBytes := range []int{100, 512, 4096, 20_000, 200_000} {
			t.Run(fmt.Sprintf("rows of %d on %d LBAs of %d", rowBytes, len(group), lba),
				func(t *testing.T) {
					r := loadReal(t, group, lba, rowBytes)
					rng := rand.New(rand.NewPCG(uint64(rowBytes), uint64(lba)))
					m, err := ChooseRung(r.dev, r.ssds, RungAuto)
					require.NoError(t, err)
					require.Equal(t, RungPinned, m.Rung())
					bells := &Memory{rung: RungPinnedCPUBell}
					for _, o := range []AsyncOptions{{Depth: 64, Memory: m},
						{Depth: 256, CoalesceBytes: -1},
						{Depth: 3, QueuePairs: 1, CoalesceBytes: -1}} {
						rd, err := NewAsync(r.dev, r.ssds, r.layout, o)
						r.readAll(rng, rd, err)
					}
					rd, err := NewSync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 64})
					r.readAll(rng, rd, err)
					if rowBytes == 4096 { // doorbells of a real BAR by the CPU's thread
						rd, err := NewAsync(r.dev, r.ssds, r.layout,
							AsyncOptions{Depth: 64, Memory: bells})
						r.readAll(rng, rd, err)
						rd, err = NewSync(r.dev, r.ssds, r.layout,
							AsyncOptions{Depth: 64, Memory: bells})
						r.readAll(rng, rd, err)
					}
				})
		}
		t.Run(fmt.Sprintf("death of a controller among %d", len(group)), func(t *testing.T) {
			r := loadReal(t, group, lba, 4096)
			for _, kill := range []struct {
				how string
				fn  func() error
				m   *Memory
			}{{"bus master off", group[0].dev.DisableDMA, nil}, {"function reset, bells by the CPU",
				group[0].dev.Reset, &Memory{rung: RungPinnedCPUBell}}} {
				began := time.Now()
				rd, err := NewAsync(r.dev, r.ssds, r.layout,
					AsyncOptions{Depth: 64, Timeout: time.Second, Memory: kill.m})
				require.NoError(t, err)
				rng := rand.New(rand.NewPCG(1, 2))
				var sets []*testSet
				var pending []Pending
				ctx := testCtx(t)
				for i := range 4 {
					s := r.newSet(rng, 1500, 4096, 0)
					p, err := rd.Submit(ctx, s.rs)
					require.NoError(t, err)
					sets, pending = append(sets, s), append(pending, p)
					if i == 1 {
						require.NoError(t, kill.fn())
					}
				}
				for i, p := range pending {
					st, err := p.Wait(ctx)
					require.NoError(t, err)
					require.EqualValues(t, 1500, st.Rows)
					sets[i].check(nil)
				}
				st := rd.Stats()
				t.Logf("%s: %d resets, %d timeouts, %d retries, %v in all", kill.how, st.Resets,
					st.Timeouts, st.Retries, time.Since(began))
				require.Positive(t, st.Resets)
				for _, s := range sets {
					s.free(rd)
				}
				require.NoError(t, rd.Close(ctx))
			}
		})
	}
	for _, o := range []AsyncOptions{
		{Depth: 64, QueuePairs: 1}, {Depth: 256, QueuePairs: 2},
	} {
		t.Run("rate", func(t *testing.T) { all[0].rate(t, o) })
	}
	for _, s := range all {
		require.NoError(t, s.Ctrl.Close(context.Background()))
	}
	require.Empty(t, hostmem.Usage())
}

// realSSD is an SSD behind VFIO.
type realSSD struct {
	*SSD
	dev *vfio.Device
}

func openReal(t *testing.T, dom *vfio.Domain, addr string, opt nvme.Options) *realSSD {
	t.Helper()
	dev, err := dom.Attach(addr)
	require.NoError(t, err)
	bus, err := vfiobus.Open(dev, vfiobus.Options{})
	require.NoError(t, err)
	c, err := nvme.Open(t.Context(), bus, opt)
	if err != nil {
		_ = bus.Close()
	}
	require.NoError(t, err)
	return &realSSD{&SSD{Ctrl: c, Name: addr}, dev}
}

// bulk writes the whole namespace, and reads it in other pieces.
func (s *realSSD) bulk(t *testing.T) {
	ctx := testCtx(t)
	ns := s.Ctrl.Namespace()
	data := make([]byte, ns.Bytes())
	rng := rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32s", s.Name))))
	_, _ = rng.Read(data)
	for _, depth := range []int{16, 1} {
		b, err := NewBulk(ctx, s.Ctrl, depth)
		require.NoError(t, err)
		began := time.Now()
		if depth > 1 {
			require.NoError(t, b.WriteAt(ctx, 0, data))
			require.NoError(t, b.Flush(ctx))
		}
		wrote := time.Since(began)
		got := make([]byte, len(data))
		step := 300 * ns.LBABytes
		for off := 0; off < len(got); off += step {
			require.NoError(t, b.ReadAt(ctx, nvme.LBA(off/ns.LBABytes),
				got[off:min(off+step, len(got))]))
		}
		require.True(t, bytes.Equal(data, got))
		t.Logf("depth %d: %d bytes written in %v, read in %v", depth, len(data), wrote,
			time.Since(began)-wrote)
		require.NoError(t, b.Close(ctx))
	}
}

// loadReal puts a layout's rows onto the SSDs.
func loadReal(t *testing.T, ssds []*realSSD, lba, rowBytes int) *rig {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	r := &rig{t: t, dev: dev}
	rows := int64(min(4000, 8<<20/max(rowBytes, lba))*len(ssds) - 1)
	r.layout, err = NewLayout(rows, rowBytes, len(ssds), lba)
	require.NoError(t, err)
	ctx := testCtx(t)
	for i, s := range ssds {
		s.DataStart = rigDataStart
		img := bytes.Repeat([]byte{0xA5}, int(r.layout.LBAsOn(i))*lba)
		for row := int64(i); row < rows; row += int64(len(ssds)) {
			_, pos, _, off := r.layout.Locate(row)
			fillRow(row, img[int(pos)*lba+int(off):][:rowBytes])
		}
		b, err := NewBulk(ctx, s.Ctrl, 32)
		require.NoError(t, err)
		require.NoError(t, b.WriteAt(ctx, rigDataStart, img))
		require.NoError(t, b.Close(ctx))
		r.ssds = append(r.ssds, s.SSD)
	}
	return r
}

// readAll reads sets in every way of placing rows, several in flight.
func (r *rig) readAll(rng *rand.Rand, rd Reader, err error) {
	r.t.Helper()
	require.NoError(r.t, err)
	ctx := testCtx(r.t)
	defer func() { require.NoError(r.t, rd.Close(ctx)) }()
	commands := func() int64 {
		n := int64(0)
		for _, s := range r.ssds {
			n += smartReads(r.t, s)
		}
		return n
	}
	before := commands()
	n := min(400, int(r.layout.Rows), max(2<<20/int(r.layout.RowBytes), 8))
	row := int64(r.layout.RowBytes)
	var sets []*testSet
	var pending []Pending
	for _, place := range [][2]int64{{(row + 4095) &^ 4095, 0}, {row, 0}, {row + 12, 4},
		{row + 13, 3}} {
		s := r.newSet(rng, n, place[0], place[1])
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(r.t, err)
		sets, pending = append(sets, s), append(pending, p)
	}
	for i, p := range slices.Backward(pending) {
		st, err := p.Wait(ctx)
		require.NoError(r.t, err)
		require.EqualValues(r.t, n, st.Rows)
		sets[i].check(nil)
	}
	st := rd.Stats()
	require.Equal(r.t, commands()-before, st.Commands, "by the controllers' own count")
	require.Zero(r.t, st.Retries+st.Timeouts+st.Foreign)
	for _, s := range sets {
		s.free(rd)
	}
}

// rate is random reads of 4 KiB for a while.
func (s *realSSD) rate(t *testing.T, o AsyncOptions) {
	r := loadReal(t, []*realSSD{s}, s.Ctrl.Namespace().LBABytes, 4096)
	o.CoalesceBytes = -1
	rd := r.reader(NewAsync(r.dev, r.ssds, r.layout, o))
	rng := rand.New(rand.NewPCG(1, 2))
	ctx := testCtx(t)
	var sets [3]*testSet
	for i := range sets {
		sets[i] = r.newSet(rng, 4000, 4096, 0)
	}
	defer func() {
		for _, s := range sets {
			s.check(nil)
			s.free(rd)
		}
	}()
	began := time.Now()
	var pending [3]Pending
	var err error
	rows := int64(0)
	for i := 0; time.Since(began) < time.Second; i++ {
		k := i % len(sets)
		if pending[k] != nil {
			st, err := pending[k].Wait(ctx)
			require.NoError(t, err)
			rows += st.Rows
		}
		pending[k], err = rd.Submit(ctx, sets[k].rs)
		require.NoError(t, err)
	}
	for _, p := range pending {
		st, err := p.Wait(ctx)
		require.NoError(t, err)
		rows += st.Rows
	}
	took := time.Since(began)
	l := rd.Stats().Latency
	t.Logf(
		"%s: depth %d over %d queue pairs: %.0f reads of 4 KiB a second; median latency %v",
		s.Name, o.Depth, o.QueuePairs, float64(rows)/took.Seconds(), l.Quantile(0.5))
}
