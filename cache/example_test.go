package cache_test

import (
	"fmt"

	"helios/cache"
)

// The two hottest rows go to the GPU tier, the next one to the CPU tier, the rest stays on the
// SSDs.
func ExamplePlace() {
	accesses := []uint32{5, 0, 90, 12, 0, 40}
	p := cache.Place(accesses, 2, 1)
	fmt.Println("GPU", p.GPU)
	fmt.Println("CPU", p.CPU)
	// Output:
	// GPU [2 5]
	// CPU [3]
}
