//go:build linux && (amd64 || arm64) && !nocuda

package driver_test

import (
	"context"
	"testing"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
)

// BenchmarkLaunch measures what one launch costs the caller on this binding, from cuda.Launch to
// its return, with an empty grid's worth of work behind it: against the fake libcuda, so it
// compares bindings and says nothing of a GPU. Streams are drained outside the timed part.
func BenchmarkLaunch(b *testing.B) {
	d, err := driver.Open(driver.Options{Library: libraryForBench(b)})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			b.Error(err)
		}
	}()
	s, err := d.NewStream(cuda.StreamOptions{Name: "bench"})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			b.Error(err)
		}
	}()
	k, err := d.Kernel("conf_affine")
	if err != nil {
		b.Fatal(err)
	}
	// conformance.affineParams with no words to work on.
	params := struct {
		Dst uint64
		N   int64
		Mul uint64
		Add uint64
	}{Mul: 1}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	const burst = 64
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if err := cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, params); err != nil {
			b.Fatal(err)
		}
		if i%burst == burst-1 {
			b.StopTimer()
			if err := s.Synchronize(ctx); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
	b.StopTimer()
	if err := s.Synchronize(ctx); err != nil {
		b.Fatal(err)
	}
}
