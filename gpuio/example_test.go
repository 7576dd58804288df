package gpuio_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"helios/cuda"
	"helios/gpuio"
	"helios/nvme"
	"helios/nvme/proxy"
)

// Rows of 512 bytes alternate between two SSDs; one of 1,024 takes two blocks.
func ExampleLayout_Locate() {
	for _, rowBytes := range []int{512, 1024} {
		l, err := gpuio.NewLayout(1000, rowBytes, 2, 512)
		if err != nil {
			log.Fatal(err)
		}
		ssd, lba, blocks, _ := l.Locate(7)
		fmt.Printf("row 7 of %d bytes: SSD %d, block %d, %d blocks\n", rowBytes, ssd, lba, blocks)
	}
	// Output:
	// row 7 of 512 bytes: SSD 1, block 3, 1 blocks
	// row 7 of 1024 bytes: SSD 1, block 6, 2 blocks
}

// Kernels of the device put three reads into the queues of an SSD and reap them.
func ExampleNewAsync() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "helios-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	path := filepath.Join(dir, "ssd.img")
	image := make([]byte, 64<<10) // 128 rows of 512 bytes: row r begins with r
	for r := range 128 {
		binary.LittleEndian.PutUint64(image[512*r:], uint64(r))
	}
	if err := os.WriteFile(path, image, 0o600); err != nil {
		log.Fatal(err)
	}
	bus, err := proxy.Open(proxy.Config{Path: path, Buffered: true})
	if err != nil {
		log.Fatal(err)
	}
	ctrl, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer ctrl.Close(ctx) //nolint:errcheck // an example
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close() //nolint:errcheck // an example
	layout, err := gpuio.NewLayout(128, 512, 1, 512)
	if err != nil {
		log.Fatal(err)
	}
	reader, err := gpuio.NewAsync(dev, []*gpuio.SSD{{Ctrl: ctrl, Name: "ssd"}}, layout,
		gpuio.AsyncOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer reader.Close(ctx) //nolint:errcheck // an example

	alloc := func(bytes int64) cuda.Buffer {
		b, err := dev.Alloc(cuda.MemDevice, bytes, "example")
		if err != nil {
			log.Fatal(err)
		}
		return b
	}
	rows, places, features := alloc(3*8), alloc(3*4), alloc(3*512)
	defer func() { _, _, _ = rows.Free(), places.Free(), features.Free() }()
	copy(cuda.View[int64](rows.Ptr(), 3), []int64{5, 77, 100})
	copy(cuda.View[uint32](places.Ptr(), 3), []uint32{2, 0, 1})
	pending, err := reader.Submit(ctx, &gpuio.ReadSet{
		Rows: rows.Ptr(), Pos: places.Ptr(), SSDOffset: []int64{0, 3}, Dst: features,
		DstStride: 512,
	})
	if err != nil {
		log.Fatal(err)
	}
	stats, err := pending.Wait(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for i := range 3 {
		fmt.Println("place", i, "has row", binary.LittleEndian.Uint64(features.Bytes()[512*i:]))
	}
	fmt.Println(stats.Commands, "commands")
	// Output:
	// place 0 has row 77
	// place 1 has row 100
	// place 2 has row 5
	// 3 commands
}
