package gpuio

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/nvme"
	"helios/nvme/proxy"
)

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func TestBulk(t *testing.T) {
	for _, c := range []struct {
		lba, depth, mdts int
		ram              bool
	}{{512, 1, 0, true}, {512, 4, 1, false}, {4096, 8, 3, true}, {4096, 3, 12, false}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 1, lba: c.lba, rowBytes: 4096, rows: 1000, ram: c.ram,
				proxy: func(p *proxy.Config) {
					p.MDTS, p.OutOfOrder = c.mdts, true
				}})
			ctx := testCtx(t)
			b, err := NewBulk(ctx, r.ssds[0].Ctrl, c.depth)
			require.NoError(t, err)
			defer func() { require.NoError(t, b.Close(ctx)) }()
			image, err := os.ReadFile(r.ssds[0].BackingPath)
			require.NoError(t, err)
			rng := rand.New(rand.NewPCG(8, uint64(c.lba)))
			for i := range 12 {
				blocks := 1 + rng.IntN(len(image)/c.lba/(1+i%4))
				off := rng.IntN(len(image)/c.lba - blocks + 1)
				part := image[off*c.lba : (off+blocks)*c.lba]
				if i%2 == 0 {
					copy(part, randomBytes(uint64(i), len(part)))
					require.NoError(t, b.WriteAt(ctx, nvme.LBA(off), part))
					require.NoError(t, b.Flush(ctx))
				}
				got := make([]byte, len(part))
				require.NoError(t, b.ReadAt(ctx, nvme.LBA(off), got))
				require.True(t, bytes.Equal(part, got))
			}
			disk, err := os.ReadFile(r.ssds[0].BackingPath)
			require.NoError(t, err)
			require.True(t, bytes.Equal(image, disk))
			require.NoError(t, b.ReadAt(ctx, 0, nil))
			require.ErrorContains(t, b.ReadAt(ctx, 0, make([]byte, 100)), "whole number")
			require.ErrorContains(t, b.WriteAt(ctx, nvme.LBA(len(image)/c.lba),
				make([]byte, c.lba)), "the namespace ends at")
		})
	}
}

func TestBulkFaults(t *testing.T) {
	for name, c := range map[string]struct {
		faults, err string
	}{
		"retry": {"error(op=read,sct=0,sc=6,times=3);error(op=write,sct=0,sc=6,times=2)",
			""},
		"lost": {"lost(op=read,times=2);lost(op=write,times=1)", ""},
		"late": {"late(ms=300,op=any,times=2)", ""},
		"do not retry": {"error(op=read,lba=900,sct=2,sc=0x81,dnr=1)",
			"unrecovered read error (SCT 2h, SC 81h), not retryable"},
		"retries run out": {"error(op=write,lba=900,sct=2,sc=0x80)", "write fault"},
		"lost for good": {"lost(op=read)",
			"read LBA 0+256: no completion within 60ms, 3 attempts"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 200, ram: true,
				faults: c.faults})
			ctx := testCtx(t)
			b, err := NewBulk(ctx, r.ssds[0].Ctrl, 4, BulkTimeout(60*time.Millisecond),
				BulkRetries(2))
			require.NoError(t, err)
			want := randomBytes(1, 600<<10)
			err = b.WriteAt(ctx, 0, want)
			if err == nil {
				err = b.Flush(ctx)
			}
			got := make([]byte, len(want))
			if err == nil {
				err = b.ReadAt(ctx, 0, got)
			}
			require.Positive(t, r.faultCount())
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				require.Equal(t, errs.Device, errs.ClassOf(err))
			} else {
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got))
			}
			require.NoError(t, b.Close(ctx))
			require.Error(t, b.Flush(ctx), "closed")
		})
	}
}

func TestBulkCancelled(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 200, ram: true,
		faults: "late(ms=50,op=read)"})
	b, err := NewBulk(testCtx(t), r.ssds[0].Ctrl, 1)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, b.ReadAt(ctx, 0, make([]byte, 700<<10)), context.DeadlineExceeded)
	require.NoError(t, b.ReadAt(testCtx(t), 0, make([]byte, 512)),
		"nothing of the cancelled call is left")
	require.NoError(t, b.Close(testCtx(t)))
}

// TestBulkRecoverySteps: a Bulk climbs as far as it takes, writes and reads the right bytes all the
// same, or describes what was tried.
func TestBulkRecoverySteps(t *testing.T) {
	for _, c := range []struct {
		name, faults string
		spoil        func(b *regBus)
		err          string // "": none
		is           error
		aborts       bool
		recreated    bool
		resets       int64
	}{
		{"new queue pair", "drop(op=read,times=2);drop(op=write,times=1)", nil, "", nil, true,
			true, 0},
		{"no new queue pair", "drop(op=write,times=1);error(op=deleteq,sct=0,sc=6,dnr=1,times=1)",
			nil, "", nil, true, false, 1},
		{"no new queue pair to create",
			"drop(op=write,times=1);error(op=createq,sct=0,sc=6,dnr=1,times=1,after=2)", nil, "",
			nil, true, false, 1},
		{"new queue pair in vain", "drop(op=read,times=8)", nil, "", nil, true, true, 1},
		{"fatal status", "drop(op=write,after=2,times=2)", func(b *regBus) { b.cfs.Store(true) },
			"", nil, false, false, 1},
		{"not ready once", "drop(op=write,after=2,times=2)",
			func(b *regBus) { b.cfs.Store(true); b.notReady.Store(1) }, "", nil, false, false, 2},
		{"never ready", "drop(op=write,after=2,times=2)",
			func(b *regBus) { b.cfs.Store(true); b.notReady.Store(9) },
			"was given up after 2 resets: ", nvme.ErrTimeout, false, false, 2},
		{"gone", "drop(op=write,after=2,times=2)", func(b *regBus) { b.gone.Store(true) },
			"was given up: ", nvme.ErrGone, false, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, buses := resetRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 200,
				ram: true}, "error(op=abort,sct=0,sc=6,dnr=1);"+c.faults)
			ctx := testCtx(t)
			b, err := NewBulk(ctx, r.ssds[0].Ctrl, 4, BulkTimeout(80*time.Millisecond),
				BulkRetries(3), BulkResets(2))
			require.NoError(t, err)
			if c.spoil != nil {
				c.spoil(buses[0])
			}
			want := randomBytes(1, 800<<10)
			err = b.WriteAt(ctx, 0, want)
			if err == nil {
				err = b.Flush(ctx)
			}
			got := make([]byte, len(want))
			if err == nil {
				err = b.ReadAt(ctx, 0, got)
			}
			if c.err != "" {
				require.ErrorIs(t, err, c.is)
				require.Regexp(t, `nvme .* q\d: write LBA \d+\+\d+: nvme .*`+c.err, err.Error())
				require.Equal(t, errs.Device, errs.ClassOf(err))
				require.ErrorContains(t, b.Flush(ctx), c.err)
			} else {
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got))
			}
			require.Equal(t, c.aborts, b.tried.aborts.Load() > 0)
			require.Equal(t, c.recreated, b.tried.recreated.Load() > 0)
			require.Equal(t, c.resets, b.tried.resets.Load())
			require.NoError(t, b.Close(ctx))
		})
	}
}

func TestLayout(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for range 300 {
		rows, rowBytes, n, lba := rng.Int64N(400), 1+rng.IntN(9000), 1+rng.IntN(5),
			[]int{512, 4096}[rng.IntN(2)]
		l, err := NewLayout(rows, rowBytes, n, lba)
		require.NoError(t, err)
		require.NoError(t, l.Check())
		require.True(t, l.RowsPerLBA == 1 || l.LBAsPerRow == 1)
		used := map[[2]int64]int64{} // SSD, byte of the extent → row
		for row := range rows {
			ssd, pos, blocks, off := l.Locate(row)
			require.EqualValues(t, row%int64(n), ssd)
			require.LessOrEqual(t, off+rowBytes, int(blocks)*lba,
				"a row lies in what is read for it")
			require.LessOrEqual(t, int64(pos)+int64(blocks), l.LBAsOn(ssd))
			for _, b := range []int64{0, int64(rowBytes) - 1} {
				key := [2]int64{int64(ssd), int64(pos)*int64(lba) + int64(off) + b}
				if other, taken := used[key]; taken {
					require.Equal(t, other, row, "two rows share a byte")
				}
				used[key] = row
			}
		}
		var total, lbas int64
		for s := range n {
			total += l.RowsOn(s)
			lbas += l.LBAsOn(s)
		}
		require.Equal(t, rows, total)
		require.Equal(t, lbas*int64(lba)-rows*int64(rowBytes), l.PaddingBytes())
		require.GreaterOrEqual(t, l.PaddingBytes(), int64(0))
	}
	for _, bad := range [][4]int{{-1, 4, 1, 512}, {1, 0, 1, 512}, {1, 4, 0, 512}, {1, 4, 1, 500},
		{1, 4, 1, 0}, {1, 1 << 25, 1, 512}} {
		_, err := NewLayout(int64(bad[0]), bad[1], bad[2], bad[3])
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	l, err := NewLayout(10, 400, 1, 4096)
	require.NoError(t, err)
	require.EqualValues(t, 10, l.RowsPerLBA)
	l.RowsPerLBA = 11
	require.Error(t, l.Check())
}

func TestHistogram(t *testing.T) {
	var h Histogram
	require.Zero(t, h.Quantile(0.5))
	for i := range 1000 {
		h.Add(time.Duration(i+1) * time.Microsecond)
	}
	old := h
	require.EqualValues(t, 1000, h.Count())
	require.InEpsilon(t, 500e3, float64(h.Quantile(0.5)), 0.07)
	require.InEpsilon(t, 990e3, float64(h.Quantile(0.99)), 0.07)
	h.Add(0)
	h.Add(time.Hour)
	require.EqualValues(t, 1002, h.Count())
	d := h.Since(&old)
	require.EqualValues(t, 2, d.Count())
	d.Merge(&old)
	require.Equal(t, h, d)
	for b := range histBuckets - 1 {
		require.Equal(t, b+1, histBucket(histUpper(b)), "buckets meet")
		require.Equal(t, b, histBucket(histUpper(b)-1))
	}
}
