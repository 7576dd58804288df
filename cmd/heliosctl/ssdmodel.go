package main

import (
	"fmt"
	"path/filepath"
	"slices"

	"helios/internal/errs"
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

// modelToKeep checks bind-ssds --ssd-model and returns what the state keeps: the name of a built-in
// model, or the absolute path of a file, which is read again by each command that uses the SSD.
func modelToKeep(arg string, given bool, lba int) (string, error) {
	if !given {
		return "", nil
	}
	m, err := ssdmodel.Load(arg)
	if err != nil {
		return "", errs.New(errs.Usage, "--ssd-model: %w", err)
	}
	if !m.LBAOK(lba) {
		return "", errs.New(errs.Usage, "--ssd-model %s has blocks of %v bytes, not --lba's %d; choose another of the two", arg, m.LBAs.Bytes, lba)
	}
	if slices.Contains(ssdmodel.Names(), arg) {
		return arg, nil
	}
	path, err := filepath.Abs(arg)
	if err != nil {
		return "", errs.New(errs.Usage, "--ssd-model %s: %w", arg, err)
	}
	return path, nil
}

// modelName is the cell of a table that says what an SSD plays.
func modelName(d state.SSD) string {
	if d.Model == "" {
		return "-"
	}
	return filepath.Base(d.Model)
}

// modelLines say what the models of some SSDs are, a line for each that can be read.
func modelLines(ssds []state.SSD) []string {
	var lines, seen []string
	for _, d := range ssds {
		if d.Model == "" || slices.Contains(seen, d.Model) {
			continue
		}
		seen = append(seen, d.Model)
		if m, err := ssdmodel.Load(d.Model); err == nil {
			lines = append(lines, fmt.Sprintf("%s is modelled: %s; %s", modelName(d), m.Title, m.Summary()))
		}
	}
	return lines
}
