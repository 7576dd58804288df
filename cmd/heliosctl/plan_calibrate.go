package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/infile"
	"helios/internal/outfile"
	"helios/sched/plan"
	"helios/sched/planner"
)

// trainedRun has the results of a run's training.
type trainedRun struct {
	begun runLine
	took  planner.Measured // medians over its epochs
}

// readTrained reads the results of a run of train on the wall clock.
func readTrained(path string) (r trainedRun, err error) {
	m, err := readMade(path)
	if err != nil {
		return r, err
	}
	r.begun = m.begun
	if r.begun.Verb != "train" || fmt.Sprint(r.begun.Settings["clock"]) != "wall" {
		return r, errs.New(errs.Usage, "%s has no run of train on the wall clock: give a file that has",
			path)
	}
	f, err := infile.Open(path)
	if err != nil {
		return r, err
	}
	defer closing(&err, f.Close)
	var training, lookup []float64
	lines := outfile.NewReader(f)
	for {
		text, rerr := lines.Next()
		var l struct {
			Event  string             `json:"event"`
			Stages map[string]float64 `json:"stage_seconds"`
		}
		if len(text) > 0 && json.Unmarshal(text, &l) == nil && l.Event == "epoch" {
			training = append(training, l.Stages["train"])
			lookup = append(lookup, l.Stages["lookup"])
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			return r, fmt.Errorf("%s: %w", path, rerr)
		}
	}
	if len(training) == 0 {
		return r, errs.New(errs.Usage, "%s has no epoch to calibrate by", path)
	}
	middle := func(all []float64) float64 {
		if len(all) > 1 { // the first one warms up
			all = all[1:]
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	r.took = planner.Measured{Training: middle(training), Lookup: middle(lookup)}
	return r, nil
}

// alike refuses a run that computed something else than the plan would.
func (r *trainedRun) alike(path string, dataset string, c plan.Config) error {
	if r.begun.Dataset != dataset {
		return errs.New(errs.Usage, "%s has results of dataset %s (%s), not of this one (%s)", path,
			r.begun.Name, r.begun.Dataset, dataset)
	}
	f, err := c.Filled()
	if err != nil {
		return err
	}
	if key, was, is := r.differs([]setting{{"model", f.Model}, {"batch-size", f.Batch},
		{"hidden", f.Hidden}, {"sampler", f.Sampler}, {"fanout", f.Fanouts}}); key != "" {
		return errs.New(errs.Usage, "%s ran with %v %s, and the plan has %s: give it that", path, errs.Key(key),
			was, is)
	}
	return nil
}

// setting is an option, and what a plan has it set to.
type setting struct {
	key string
	is  any
}

// differs returns the first of some settings that the run had another value of; "" for none.
func (r *trainedRun) differs(settings []setting) (key, was, is string) {
	for _, s := range settings {
		had := r.begun.Settings[s.key]
		if x, ok := had.(float64); ok {
			had = int64(x)
		}
		if a, b := fmt.Sprint(had), fmt.Sprint(s.is); a != b {
			return s.key, strings.Trim(a, "[]"), strings.Trim(b, "[]")
		}
	}
	return "", "", ""
}

// calibrate makes the planner as fast as a run was, and keeps the profile where asked to.
func (a *planArgs) calibrate(ctx context.Context, e *env, p *planner.Planner, dataset string) (
	err error) {
	r, err := readTrained(a.run)
	if err != nil {
		return err
	}
	if err := r.alike(a.run, dataset, a.cfg); err != nil {
		return err
	}
	out, err := a.create("save-profile", a.saved)
	if err != nil {
		return err
	}
	defer closing(&err, out.Discard)
	f, err := a.cfg.Filled()
	if err != nil {
		return err
	}
	if key, _, _ := r.differs([]setting{{"mode", f.Mode}, {"policy", f.Policy},
		{"directory", f.Directory}, {"window", f.Window}, {"cache-line", f.CacheLine}}); key != "" {
		r.took.Lookup = 0
		if f.Directory != "" {
			e.note(errs.Textf(
				"%s had another %v than the plan: its lookups say nothing of this tier, and their time stays as it is",
				a.run, errs.Key(key)))
		}
	}
	c, err := p.Calibrate(ctx, r.took)
	if err != nil {
		return err
	}
	said := fmt.Sprintf("calibrated: an epoch trained in %.4g s in %s, which is gpu.tensor_tflops %.4g",
		r.took.Training, a.run, c.TensorTFLOPS)
	if c.Directory != "" {
		said += fmt.Sprintf("; its lookups took %.4g s, which is cpu.%s %.4g", r.took.Lookup,
			c.Directory, c.LookupNS)
	}
	e.plainNote(said)
	if out == nil {
		return nil
	}
	base := a.profile
	if !slices.Contains(hardware.Names(), base) {
		if base, err = filepath.Abs(base); err != nil {
			return err
		}
	}
	figure := func(v float64, what string) map[string]any {
		return map[string]any{"value": v, "source": what + " measured in run " + r.begun.Run}
	}
	profile := map[string]any{"base": base, "name": "calibrated",
		"gpu": map[string]any{"tensor_tflops": figure(c.TensorTFLOPS, "training")}}
	if c.Directory != "" {
		profile["cpu"] = map[string]any{c.Directory: figure(c.LookupNS, "lookups"),
			"announce_ns": figure(c.AnnounceNS, "in proportion to lookups")}
	}
	text, err := yaml.Marshal(profile)
	if err == nil {
		_, err = out.Write(text)
	}
	return out.Commit(err)
}
