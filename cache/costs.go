package cache

import (
	"fmt"
	"math"
)

// Costs hold what one access of a row takes by the tier that it is in, all in one unit: time of a
// resource, or of the whole path. They need not rise from GPU to CPU to SSD: with a dozen SSDs
// behind one link, reading a row from the CPU's memory over that link may be no better than reading
// it from an SSD.
type Costs struct{ GPU, CPU, SSD float64 }

func (c Costs) check() error {
	for _, v := range []float64{c.GPU, c.CPU, c.SSD} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return fmt.Errorf("cache: costs of %+v for an access: want numbers of at least 0", c)
		}
	}
	return nil
}

// GPUFirst reports whether the GPU tier gets the hottest rows.
func (c Costs) GPUFirst() bool { return c.GPU <= c.CPU }

// Place is the placement of at most gpuRows and cpuRows rows that makes the sum of all accesses'
// costs least, given place, which puts the hottest first rows into the GPU list of a placement and
// the next into the CPU list (Hotness.Place).
//
// The sum is least when the hottest rows are in the cheapest tier (an exchange of two rows that
// stand otherwise never makes it worse), so the tiers are filled in the order of their costs. A
// tier that saves nothing over an SSD stays empty. Of tiers with equal costs the GPU's comes first.
func (c Costs) Place(gpuRows, cpuRows int64, place func(first, next int64) (Placement,
	error)) (Placement, error) {
	if err := c.check(); err != nil {
		return Placement{}, err
	}
	if c.GPU >= c.SSD {
		gpuRows = 0
	}
	if c.CPU >= c.SSD {
		cpuRows = 0
	}
	if c.GPUFirst() {
		return place(gpuRows, cpuRows)
	}
	p, err := place(cpuRows, gpuRows)
	return Placement{GPU: p.CPU, CPU: p.GPU}, err
}
