package pci

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// Way describes how DMA of one function reaches the memory of another one (Linux,
// Documentation/driver-api/pci/p2pdma.rst).
type Way int

// The ways, the shortest first.
const (
	BelowOnePort Way = iota // below one root port: one switch, or functions of one device
	ByRootComplex
	BetweenHostBridges // of two processors, or of two dies of one
)

// String is the way in words.
func (w Way) String() string {
	switch w {
	case BelowOnePort:
		return "below one root port"
	case ByRootComplex:
		return "by the root complex"
	}
	return "between two host bridges"
}

// Way describes how two functions lie to each other in the tree of bridges. With the IOMMU on, DMA
// goes up to the root complex for its translation on all of them.
func (s Sys) Way(a, b string) (Way, error) {
	var up [2][]string
	root, err := filepath.EvalSymlinks(s.Path("/sys/devices"))
	for i, addr := range []string{a, b} {
		var p string
		if err == nil {
			p, err = filepath.EvalSymlinks(s.Path(devicesDir, addr))
		}
		if err == nil {
			if p, err = filepath.Rel(root, p); err == nil && (strings.HasPrefix(p, "..") ||
				!strings.Contains(p, "/")) {
				err = errors.New("it is not below a host bridge")
			}
		}
		if err != nil {
			return 0, fmt.Errorf("PCI device %s: %w", addr, err)
		}
		up[i] = strings.Split(p, "/") // pci0000:00, bridges, the function
	}
	switch {
	case up[0][0] != up[1][0]:
		return BetweenHostBridges, nil
	case len(up[0]) > 2 && len(up[1]) > 2 && up[0][1] == up[1][1]:
		return BelowOnePort, nil
	}
	return ByRootComplex, nil
}
