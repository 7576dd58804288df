package stripe

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/hostmem"
	"helios/internal/testing/datasettest"
	"helios/nvme"
	"helios/nvme/proxy"
)

// openLong opens backing files as SSDs whose commands move up to 4096 << mdts bytes.
func openLong(b *testing.B, paths []string, mdts int) (ssds []*gpuio.SSD) {
	for _, p := range paths {
		bus, err := proxy.Open(proxy.Config{Path: p, LBABytes: 512, MDTS: mdts})
		require.NoError(b, err)
		c, err := nvme.Open(bg, bus, nvme.Options{})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, c.Close(context.Background())) })
		ssds = append(ssds, &gpuio.SSD{Ctrl: c, Name: p, BackingPath: p})
	}
	return ssds
}

// BenchmarkChunks reads chunks of 4 MiB, as packed mini-batches are read, by each stack from one,
// two and four SSDs in files, and reports the mean length of their requests.
func BenchmarkChunks(b *testing.B) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(b, err)
	defer func() { require.NoError(b, dev.Close()) }()
	d := small(b, 1000, 128, 1)
	const chunk = 1024 // pages of 4 KiB
	s := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 16 * chunk}
	for _, n := range []int{1, 2, 4} {
		for _, mdts := range []int{5, 8} {
			ssds := openLong(b, backing(b, n, false, 96<<20), mdts)
			_, err := Load(bg, d, ssds, LoadOptions{})
			require.NoError(b, err)
			p, err := CreatePages(bg, d, ssds, s)
			require.NoError(b, err)
			for start := int64(0); start < s.Pages; start += chunk {
				require.NoError(b, p.WriteAt(bg, start, make([]byte, chunk*4096)))
			}
			require.NoError(b, p.Finish(bg))
			require.NoError(b, p.Close(bg))
			for _, name := range []string{gpuio.StackAsync, gpuio.StackCPU} {
				b.Run(fmt.Sprintf("%d SSDs/MDTS %d KiB/%s", n, 4<<mdts, name),
					func(b *testing.B) {
						stack, err := gpuio.FindStack(name)
						require.NoError(b, err)
						o, err := OpenPages(bg, d, ssds, s)
						require.NoError(b, err)
						r, err := stack.Open(dev, o.SSDs, o.Layout, o.Options(gpuio.StackOptions{}))
						require.NoError(b, err)
						list := make([]int64, chunk)
						commands, bytes := int64(0), int64(0)
						b.SetBytes(chunk * 4096)
						for k := range b.N {
							for i := range list { // not where a window begins
								list[i] = int64(k%15)*chunk + 77 + int64(i)
							}
							_, st, err := datasettest.ReadRows(b, dev, r, o.Layout, list)
							require.NoError(b, err)
							commands, bytes = commands+st.Commands, bytes+st.Bytes
						}
						b.ReportMetric(float64(bytes)/float64(commands)/1024, "KiB/request")
						require.NoError(b, r.Close(bg))
					})
			}
		}
	}
}

// BenchmarkSequentialRows reads all rows in order from two SSDs in files, checked, and in turns the
// same files with O_DIRECT, 1 MiB at a time, one after the other, as dd does.
func BenchmarkSequentialRows(b *testing.B) {
	d := small(b, 200000, 128, 1) // 98 MiB
	paths := backing(b, 2, false, 96<<20)
	ssds := openLong(b, paths, 8)
	_, err := Load(bg, d, ssds, LoadOptions{})
	require.NoError(b, err)
	r, err := OpenRows(bg, d, ssds)
	require.NoError(b, err)
	defer func() { require.NoError(b, r.Close(bg)) }()
	buf, err := hostmem.Alloc(64<<20, "bench")
	require.NoError(b, err)
	defer func() { require.NoError(b, hostmem.Free(buf)) }()
	var ours, dd time.Duration
	all := int64(200000 * 512)
	b.SetBytes(all)
	for b.Loop() {
		start := time.Now()
		for start := int64(0); start < 200000; start += 100000 {
			require.NoError(b, r.ReadRows(bg, start, 100000, buf))
		}
		ours += time.Since(start)
		start = time.Now()
		for _, p := range paths {
			f, err := os.OpenFile(p, os.O_RDONLY|syscall.O_DIRECT, 0)
			require.NoError(b, err)
			for start := int64(0); start < all/2; start += 1 << 20 {
				n := min(1<<20, (all/2-start)/4096*4096)
				_, err := f.ReadAt(buf[:n], headBytes+start)
				require.NoError(b, err)
			}
			require.NoError(b, f.Close())
		}
		dd += time.Since(start)
	}
	gib := float64(all) * float64(b.N) / (1 << 30)
	b.ReportMetric(gib/ours.Seconds(), "GiB/s-rows")
	b.ReportMetric(gib/dd.Seconds(), "GiB/s-O_DIRECT")
}
