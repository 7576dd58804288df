package main

import (
	"fmt"

	"helios/internal/ssdmodel"
	"helios/internal/state"
)

// ssdModel is the model that a software controller plays, nil for none: the latency that bench asks
// for, or the model that the SSD was bound with.
func (e *env) ssdModel(d state.SSD) (*ssdmodel.Model, error) {
	if e.ssdLatency > 0 {
		return ssdmodel.Fixed(e.ssdLatency)
	}
	if d.Model == "" {
		return nil, nil
	}
	m, err := ssdmodel.Load(d.Model)
	if err != nil {
		return nil, fmt.Errorf("SSD %s: %w; bring the file back, or \"heliosctl unbind-ssds %s\" and bind it anew", d.Name, err, d.Name)
	}
	return m, nil
}
