package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/ssdmodel"
	"helios/internal/state"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
)

// boundModel holds what bind-ssds --ssd-model asks for. The zero value is no model.
type boundModel struct {
	*ssdmodel.Model
	// in the state: a built-in name, or the absolute path of a file, which each command reads again
	keep string
}

func modelToBind(arg string, given bool, lba int) (b boundModel, err error) {
	if !given {
		return b, nil
	}
	if b.Model, err = ssdmodel.Load(arg); err != nil {
		return b, errs.New(errs.Usage, "{ssd-model}: %w", err)
	}
	if !b.LBAOK(lba) {
		return b, errs.New(errs.Usage,
			"{ssd-model} %s has blocks of %v bytes, not {lba}'s %d; choose another of the two", arg,
			b.LBAs.Bytes, lba)
	}
	b.keep = arg
	if !slices.Contains(ssdmodel.Names(), arg) {
		if b.keep, err = filepath.Abs(arg); err != nil {
			return b, errs.New(errs.Usage, "{ssd-model} %s: %w", arg, err)
		}
	}
	return b, nil
}

// bind lets an SSD play the model.
func (b boundModel) bind(d *state.SSD) error {
	if b.Model == nil {
		return nil
	}
	if !b.Fits(d.Bytes) {
		return errs.New(errs.Usage,
			"%s has %s and {ssd-model} %s %s; choose a smaller SSD or another model", d.Path,
			units.FormatBytes(d.Bytes), b.Name, units.FormatBytes(b.Capacity.Bytes))
	}
	d.Model = b.keep
	return nil
}

// modelName is the cell of a table with the model that an SSD plays.
func modelName(d state.SSD) string {
	if d.Model == "" {
		return "-"
	}
	return filepath.Base(d.Model)
}

// markModelled names in a run's result the models that its SSDs played. The stacks cpu and mmap
// read what is behind a software SSD themselves, as fast as it goes, and so is a folder of packed
// pages read, which no bound SSD holds.
func (s *ssdSet) markModelled(io *report.IOResult, cfg plan.Config) {
	c := cfg.WithDefaults()
	if s == nil || !c.Queued() || c.PagesOn == plan.PagesFolder {
		return
	}
	for _, d := range s.Bound {
		for i := range io.SSDs {
			if io.SSDs[i].Name == d.Name && d.Model != "" {
				io.SSDs[i].Model = modelName(d)
			}
		}
	}
}

// modelRow is the line of a summary that says whose times are modelled, none where nobody's are.
func modelRow(io report.IOResult) [][]string {
	var names []string
	for _, s := range io.SSDs {
		if s.Model != "" && !slices.Contains(names, s.Model) {
			names = append(names, s.Model)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return [][]string{{"modelled SSDs", "they play " + strings.Join(names, ", ") +
		": times and rates are no measurement of real SSDs"}}
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
			lines = append(lines, fmt.Sprintf("%s is modelled: %s; %s", modelName(d), m.Title,
				m.Summary()))
		}
	}
	return lines
}
