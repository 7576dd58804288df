package iosim

import (
	"fmt"
	"os"
	"testing"
)

func TestExplore(t *testing.T) {
	if os.Getenv("EXPLORE") == "" {
		t.Skip()
	}
	for _, p := range []string{"a100-optane", "a100-980pro"} {
		for _, stack := range []string{Sync, Async} {
			line := fmt.Sprintf("%s %-5s:", p, stack)
			for _, n := range []int64{128, 256, 512, 768, 1024, 1280, 1536, 2048, 4096, 8192, 16384, 32768} {
				iops, _, s := bench{profile: p, ssds: 1, c: Config{Stack: stack, Depth: 8192, QueuePairs: 64}, set: n, sets: 1, warm: 10e6, ns: 100e6}.run(t)
				line += fmt.Sprintf(" %d:%.3f", n, iops/s.m.Bound(4096))
			}
			t.Log(line)
		}
	}
	for _, d := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512} {
		line := fmt.Sprintf("depth %d:", d)
		for _, p := range []string{"a100-optane", "a100-980pro", "a100-p5510x12"} {
			for _, st := range []string{"gpu", "host"} {
				iops, stt, _ := bench{profile: p, ssds: 1, c: Config{Stack: Async, Depth: d, State: st}, set: 8192, sets: 4, warm: 10e6, ns: 100e6}.run(t)
				line += fmt.Sprintf(" %s/%s: %.1fk %v", p, st, iops/1e3, stt.Latency.Quantile(.5))
			}
		}
		t.Log(line)
	}
}
