package sched

import (
	"helios/gpuio"
	"helios/nvme"
)

// Memory rungs: where queues and data are, as results name them.
const (
	rungPinned = "pinned" // in locked host memory that the SSDs reach by the IOMMU
	rungProxy  = "proxy"  // software controllers, or reads through the kernel
	rungMixed  = "mixed"  // some of each
)

func memoryRung(ssds []*gpuio.SSD) string {
	var buses []nvme.Bus
	for _, d := range ssds {
		if d != nil && d.Ctrl != nil {
			buses = append(buses, d.Ctrl.Bus())
		}
	}
	return rungOf(buses)
}

// rungOf tells software controllers, which are kicked after a doorbell, from real ones.
func rungOf(buses []nvme.Bus) string {
	soft := 0
	for _, b := range buses {
		for {
			u, ok := b.(nvme.Unwrapper)
			if !ok {
				break
			}
			b = u.Unwrap()
		}
		if _, ok := b.(nvme.Kicker); ok {
			soft++
		}
	}
	switch {
	case soft == len(buses):
		return rungProxy
	case soft == 0:
		return rungPinned
	}
	return rungMixed
}
