package dataset

import "testing"

// CheckFeatureFn is checkFeatureFn, for tests from outside.
func CheckFeatureFn(m *Meta) error { return m.checkFeatureFn() }

// MapAlways makes every array one that is too large to be copied.
func MapAlways(t *testing.T) {
	topology, labels := mapTopologyFrom, mapLabelsFrom
	mapTopologyFrom, mapLabelsFrom = 0, 0
	t.Cleanup(func() { mapTopologyFrom, mapLabelsFrom = topology, labels })
}

// Maps is the number of arrays that are mapped.
func Maps(d *Dataset) int { return len(d.maps) }

// Uncheck lets reads of d check nothing.
func Uncheck(d *Dataset) { d.seal = nil }
