// Package gputest holds what the gpu tier runs on a real device beside the packages' own tests: rows
// read end to end, by kernels on the device from software SSDs. With HELIOS_GPU=1 the device is the
// machine's GPU, else the fake libcuda.
package gputest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/difftest"
	"helios/cuda/driver"
	"helios/gpuio"
	"helios/internal/faultinject"
	"helios/nvme"
	"helios/nvme/proxy"
)

func open(t testing.TB) *driver.Device {
	t.Helper()
	d, err := driver.Open(driver.Options{Library: difftest.Library(t)})
	require.NoError(t, err)
	return d
}

// fill writes row r's content.
func fill(r int64, b []byte) {
	x := uint64(r)*0x9E3779B97F4A7C15 + 1
	for i := 0; i+8 <= len(b); i += 8 {
		x ^= x >> 12
		x ^= x << 25
		x ^= x >> 27
		binary.LittleEndian.PutUint64(b[i:], x*0x2545F4914F6CDD1D)
	}
}

// ssds makes RAM SSDs that hold the rows of a layout; faults are the first one's.
func ssds(t testing.TB, l gpuio.Layout, faults string) []*gpuio.SSD {
	dir, err := os.MkdirTemp("/dev/shm", "gputest-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	var out []*gpuio.SSD
	for s := range int(l.SSDs) {
		img := make([]byte, (l.LBAsOn(s)*int64(l.LBABytes)+4095)&^4095)
		for r := int64(s); r < l.Rows; r += int64(l.SSDs) {
			_, lba, _, off := l.Locate(r)
			fill(r, img[int64(lba)*int64(l.LBABytes)+int64(off):][:l.RowBytes])
		}
		path := filepath.Join(dir, fmt.Sprintf("%d.img", s))
		require.NoError(t, os.WriteFile(path, img, 0o600))
		cfg := proxy.Config{Path: path, LBABytes: int(l.LBABytes), RAM: true, PollDoorbells: true, OutOfOrder: true}
		if s == 0 {
			cfg.Faults, err = faultinject.Parse(faults)
			require.NoError(t, err)
		}
		bus, err := proxy.Open(cfg)
		require.NoError(t, err)
		ctrl, err := nvme.Open(context.Background(), bus, nvme.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, ctrl.Close(context.Background())) })
		out = append(out, &gpuio.SSD{Ctrl: ctrl, Name: fmt.Sprintf("ssd%d", s), BackingPath: path})
	}
	return out
}

// TestReads: kernels on the device read rows from software SSDs, with both stacks, staged and
// through full queues, through errors, late and lost completions; every byte is compared.
func TestReads(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	for _, c := range []struct {
		name, faults string
		rowBytes     int
		lba          int
		depth        int
	}{
		{"whole LBAs", "", 512, 512, 64},
		{"packed rows", "", 104, 512, 64},
		{"large rows, few CIDs", "", 12288, 4096, 6},
		{"errors", "error(op=read,sct=0,sc=0x06,after=20,times=3)", 512, 512, 16},
		{"late", "late(op=read,ms=5,after=20,times=5)", 512, 512, 16},
		{"lost", "lost(op=read,after=30,times=2)", 512, 512, 16},
	} {
		for _, stack := range []string{"async", "sync"} {
			t.Run(c.name+"/"+stack, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(c.rowBytes)))
				t.Logf("seed %d", seed)
				ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
				defer cancel()
				dev := open(t)
				defer func() { require.NoError(t, dev.Close()) }()
				l, err := gpuio.NewLayout(600, c.rowBytes, 2, c.lba)
				require.NoError(t, err)
				disks := ssds(t, l, c.faults)
				timeout := 10 * time.Second
				if c.name == "lost" {
					timeout = 700 * time.Millisecond
				}
				var rd gpuio.Reader
				if stack == "async" {
					rd, err = gpuio.NewAsync(dev, disks, l, gpuio.AsyncOptions{Depth: c.depth, QueuePairs: 2, Threads: 64, Timeout: timeout})
				} else {
					rd, err = gpuio.NewSync(dev, disks, l, gpuio.SyncOptions{Blocks: 3, Threads: 64, Depth: c.depth, QueuePairs: 2, Timeout: timeout})
				}
				require.NoError(t, err)
				const n = 500
				for range 3 {
					readSet(ctx, t, dev, rd, l, rng, n)
				}
				st := rd.Stats()
				require.EqualValues(t, 3*n, st.Rows)
				require.Zero(t, st.Failed)
				switch c.name {
				case "errors":
					require.EqualValues(t, 3, st.Errors)
				case "lost":
					require.GreaterOrEqual(t, st.Timeouts, int64(2)) // more on a machine that stalls
				default:
					require.Zero(t, st.Retries)
				}
				require.NoError(t, rd.Close(ctx))
			})
		}
	}
}

// readSet reads n random rows to random places and compares the destination, which the CPU sees
// only through copies.
func readSet(ctx context.Context, t *testing.T, dev cuda.Device, rd gpuio.Reader, l gpuio.Layout, rng *rand.Rand, n int) {
	t.Helper()
	alloc := func(kind cuda.MemKind, bytes int) cuda.Buffer {
		b, err := dev.Alloc(kind, int64(bytes), "gputest")
		require.NoError(t, err)
		return b
	}
	stride := (int(l.RowBytes) + 3) &^ 3
	rows, pos := alloc(cuda.MemPinned, n*8), alloc(cuda.MemPinned, n*4)
	dst, back := alloc(cuda.MemDevice, n*stride), alloc(cuda.MemPinned, n*stride)
	places := rng.Perm(n)
	var ids []int64
	offsets := []int64{0}
	for s := range int(l.SSDs) {
		for len(ids) < (s+1)*n/int(l.SSDs) {
			ids = append(ids, rng.Int64N(l.RowsOn(s))*int64(l.SSDs)+int64(s))
		}
		offsets = append(offsets, int64(len(ids)))
	}
	for i, id := range ids {
		binary.LittleEndian.PutUint64(rows.Bytes()[i*8:], uint64(id))
		binary.LittleEndian.PutUint32(pos.Bytes()[i*4:], uint32(places[i]))
	}
	stream, err := dev.NewStream(cuda.StreamOptions{Name: "gputest"})
	require.NoError(t, err)
	require.NoError(t, stream.Fill(dst.Ptr(), 0xEE, dst.Size()))
	require.NoError(t, stream.Synchronize(ctx))
	p, err := rd.Submit(ctx, &gpuio.ReadSet{Rows: rows.Ptr(), Pos: pos.Ptr(), SSDOffset: offsets, Dst: dst, DstStride: int64(stride)})
	require.NoError(t, err)
	st, err := p.Wait(ctx)
	require.NoError(t, err)
	require.EqualValues(t, n, st.Rows)
	require.NoError(t, stream.Copy(back.Ptr(), dst.Ptr(), dst.Size()))
	require.NoError(t, stream.Synchronize(ctx))
	require.NoError(t, stream.Close())
	want := make([]byte, l.RowBytes)
	for i, id := range ids {
		fill(id, want)
		require.Equal(t, want, back.Bytes()[places[i]*stride:][:l.RowBytes], "row %d at position %d", id, places[i])
	}
	require.NoError(t, gpuio.Forget(rd, dst))
	for _, b := range []cuda.Buffer{rows, pos, dst, back} {
		require.NoError(t, b.Free())
	}
}
