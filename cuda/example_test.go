package cuda_test

import (
	"context"
	"fmt"
	"log"

	"helios/cuda"
)

// scaleParams hold what the kernel gets: numbers and addresses, no Go pointers.
type scaleParams struct {
	Values cuda.DevicePtr // float32[N]
	N      int64
	Factor float32
}

func init() {
	cuda.RegisterHost("example_scale", func(b *cuda.Block, p *scaleParams) error {
		values := cuda.View[float32](p.Values, p.N)
		for lo, hi := b.Range(p.N); lo < hi; lo++ {
			values[lo] *= p.Factor
		}
		return nil
	})
}

// Two blocks of a kernel share an array on the host device.
func ExampleLaunch() {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close() //nolint:errcheck // an example
	stream, err := dev.NewStream(cuda.StreamOptions{Name: "example"})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close() //nolint:errcheck // an example
	kernel, err := dev.Kernel("example_scale")
	if err != nil {
		log.Fatal(err)
	}
	buf, err := dev.Alloc(cuda.MemDevice, 4*4, "example")
	if err != nil {
		log.Fatal(err)
	}
	defer buf.Free() //nolint:errcheck // an example
	values := cuda.View[float32](buf.Ptr(), 4)
	copy(values, []float32{1, 2, 3, 4})

	grid := cuda.LaunchConfig{Blocks: 2, Threads: 32}
	if err := cuda.Launch(stream, kernel, grid, scaleParams{Values: buf.Ptr(), N: 4,
		Factor: 10}); err != nil {
		log.Fatal(err)
	}
	if err := stream.Synchronize(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(values)
	// Output: [10 20 30 40]
}
