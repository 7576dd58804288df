package stripe

import (
	"context"
	"fmt"
	"hash/crc32"
	"testing"
)

// BenchmarkRowChecksums measures what --row-checksums adds to a load: the CRC32C of each row, of
// rows as load has them at hand (a buffer of 4 MiB), and the table's bytes.
func BenchmarkRowChecksums(b *testing.B) {
	for _, row := range []int{64, 256, 512, 1024, 4096} {
		b.Run(fmt.Sprintf("%dB", row), func(b *testing.B) {
			buf := make([]byte, 4<<20)
			for i := range buf {
				buf[i] = byte(i * 7)
			}
			b.SetBytes(int64(len(buf)))
			var sum uint32
			for b.Loop() {
				for start := 0; start < len(buf); start += row {
					sum ^= crc32.Checksum(buf[start:start+row], castagnoli)
				}
			}
			sink = sum
			b.ReportMetric(100*4/float64(row), "%space")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(buf)/row),
				"ns/row")
		})
	}
}

var sink uint32

// BenchmarkLoad loads a dataset onto simulated SSDs that cost a copy, with and without row
// checksums.
func BenchmarkLoad(b *testing.B) {
	for _, dim := range []int{64, 256, 1024} {
		d := small(b, 32<<20/int64(dim*4), dim, 1)
		for _, off := range []bool{true, false} {
			b.Run(fmt.Sprintf("%dB/rowsums=%v", dim*4, !off), func(b *testing.B) {
				s := []*simSSD{newSim(48<<20/4096, 4096), newSim(48<<20/4096, 4096)}
				b.SetBytes(d.Meta.Nodes * int64(d.Meta.RowBytes()))
				for b.Loop() {
					for _, x := range s {
						x.cache = nil
					}
					if _, err := load(context.Background(), d, targetsOf(s...),
						LoadOptions{Force: "SER0,SER1", NoRowChecksums: off}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
