package nvme_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"helios/nvme"
	"helios/nvme/proxy"
)

// A software controller over a file comes up as a real one does.
func ExampleOpen() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "helios-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	path := filepath.Join(dir, "ssd.img")
	if err := proxy.Create(path, 8<<20); err != nil {
		log.Fatal(err)
	}
	bus, err := proxy.Open(proxy.Config{Path: path, Serial: "S1", LBABytes: 4096, Buffered: true})
	if err != nil {
		log.Fatal(err)
	}
	ctrl, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		log.Fatal(err)
	}
	ns := ctrl.Namespace()
	fmt.Printf("%s: %d blocks of %d bytes\n", ctrl.Serial(), ns.Blocks, ns.LBABytes)
	if err := ctrl.Close(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: S1: 2048 blocks of 4096 bytes
}

// A status of a completion in the words of the specification.
func ExampleStatus() {
	s := nvme.NewStatus(2, 0x81, true)
	fmt.Println(s.Words())
	fmt.Println("may be tried again:", !s.DNR())
	// Output:
	// unrecovered read error
	// may be tried again: false
}
