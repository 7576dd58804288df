package proxy

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/nvme"
)

// BenchmarkRead is a closed loop of 4 KiB random reads at a fixed depth on one queue pair:
// ns/op is the time per read, cpu-ns/op the CPU time of the whole process per read.
// Set PROXY_BENCH_FILE to a file of your own to compare with fio on it.
func BenchmarkRead(b *testing.B) {
	for _, kind := range []string{"ram", "file", "buffered"} {
		for _, depth := range []int{1, 32, 256} {
			b.Run(fmt.Sprintf("%s/depth=%d", kind, depth), func(b *testing.B) {
				cfg := Config{RAM: kind == "ram", Buffered: kind == "buffered"}
				if p := os.Getenv("PROXY_BENCH_FILE"); p != "" && !cfg.RAM {
					cfg.Path = p
				} else {
					cfg.Path = newFile(b, 256<<20, cfg.RAM)
				}
				g := newRig(b, cfg)
				q := g.pair(1, 512)
				benchRead(b, g, q, depth)
			})
		}
	}
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchRead(b *testing.B, g *rig, q *ring, depth int) {
	grp, err := g.bus.GroupCQs([]nvme.CQRef{{Bus: g.bus, QID: q.CQID}})
	require.NoError(b, err)
	defer func() {
		if err := grp.Close(); err != nil {
			b.Error(err)
		}
	}()
	rows := g.bus.blocks / 8
	rng := rand.New(rand.NewPCG(1, 2))
	free := make([]uint16, depth)
	for i := range free {
		free[i] = uint16(i)
	}
	inflight, issued := 0, 0
	b.ResetTimer()
	cpu := cpuTime()
	for done := 0; done < b.N; {
		if n := min(len(free), b.N-issued); n > 0 {
			for _, cid := range free[:n] {
				c := (*nvme.Command)(unsafe.Pointer(&q.SQ[q.Tail*nvme.CommandBytes]))
				*c = nvme.ReadCommand(cid, 1, nvme.LBA(rng.Uint64N(rows)*8), 8,
					uint64(g.iova)+uint64(cid)*4096, 0)
				q.Tail = (q.Tail + 1) % q.Entries
			}
			free = free[:copy(free, free[n:])]
			issued += n
			inflight += n
			nvme.StoreDoorbell(q.SQDoorbell, uint32(q.Tail))
			g.bus.Kick(q.ID)
		}
		got := 0
		for {
			c, ok := nvme.LoadCompletion(
				(*nvme.Completion)(unsafe.Pointer(&q.CQ[q.Head*nvme.CompletionBytes])), q.Phase)
			if !ok {
				break
			}
			if q.Head++; q.Head == q.Entries {
				q.Head, q.Phase = 0, !q.Phase
			}
			if !c.Status().OK() {
				b.Fatal(c.Status())
			}
			free = append(free, c.CID)
			got++
		}
		if got > 0 {
			nvme.StoreDoorbell(q.CQDoorbell, uint32(q.Head))
			done += got
			inflight -= got
			continue
		}
		grp.Wait(time.Second)
	}
	b.StopTimer()
	b.ReportMetric(float64((cpuTime()-cpu).Nanoseconds())/float64(b.N), "cpu-ns/op")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
