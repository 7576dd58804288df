package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/regular"
	"helios/sched/plan"
	"helios/sched/planner"
)

// trainedRun is what a run's results say of its training.
type trainedRun struct {
	begun   runLine
	seconds float64 // of an epoch's training, the median
}

// readTrained reads the results of a run of train on the wall clock.
func readTrained(path string) (r trainedRun, err error) {
	// A pipe would be waited for, and a device has no end.
	if st, err := os.Stat(path); err == nil {
		if err := regular.Check(path, st); err != nil {
			return r, errs.With(errs.Usage, fmt.Errorf("results: %w", err))
		}
	}
	m, err := readMade(path)
	if err != nil {
		return r, err
	}
	r.begun = m.begun
	if r.begun.Verb != "train" || fmt.Sprint(r.begun.Settings["clock"]) != "wall" {
		return r, errs.New(errs.Usage, "%s is of no run of train on the wall clock: give one that is",
			path)
	}
	f, err := os.Open(path)
	if err != nil {
		return r, err
	}
	defer closing(&err, f.Close)
	var all []float64
	lines := bufio.NewReader(f)
	for {
		text, rerr := lines.ReadBytes('\n')
		var l struct {
			Event  string             `json:"event"`
			Stages map[string]float64 `json:"stage_seconds"`
		}
		if len(text) > 0 && json.Unmarshal(text, &l) == nil && l.Event == "epoch" {
			all = append(all, l.Stages["train"])
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			return r, fmt.Errorf("%s: %w", path, rerr)
		}
	}
	if len(all) > 1 { // the first one warms up
		all = all[1:]
	}
	if len(all) == 0 {
		return r, errs.New(errs.Usage, "%s has no epoch to calibrate by", path)
	}
	slices.Sort(all)
	r.seconds = all[len(all)/2]
	return r, nil
}

// alike refuses a run that computed something else than the plan would.
func (r *trainedRun) alike(path string, dataset string, c plan.Config) error {
	if r.begun.Dataset != dataset {
		return errs.New(errs.Usage, "%s is of dataset %s (%s), not of this one (%s)", path,
			r.begun.Name, r.begun.Dataset, dataset)
	}
	f, err := c.Filled()
	if err != nil {
		return err
	}
	for key, is := range map[string]any{"model": f.Model, "batch-size": f.Batch,
		"hidden": f.Hidden, "sampler": f.Sampler, "fanout": f.Fanouts} {
		was := r.begun.Settings[key]
		if x, ok := was.(float64); ok {
			was = int64(x)
		}
		if a, b := fmt.Sprint(was), fmt.Sprint(is); a != b {
			return errs.New(errs.Usage, "%s ran with --%s %s, and the plan has %s: give it that", path,
				key, strings.Trim(a, "[]"), strings.Trim(b, "[]"))
		}
	}
	return nil
}

// calibrate makes the planner train as fast as a run did, and keeps the profile where asked to.
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
	tflops, err := p.Calibrate(ctx, r.seconds)
	if err != nil {
		return err
	}
	e.note(fmt.Sprintf("calibrated: an epoch trained in %.4g s in %s, which is gpu.tensor_tflops %.4g",
		r.seconds, a.run, tflops))
	if out == nil {
		return nil
	}
	base := a.profile
	if !slices.Contains(hardware.Names(), base) {
		if base, err = filepath.Abs(base); err != nil {
			return err
		}
	}
	text, err := yaml.Marshal(map[string]any{"base": base, "name": "calibrated",
		"gpu": map[string]any{"tensor_tflops": map[string]any{"value": tflops,
			"source": "training measured in run " + r.begun.Run}}})
	if err == nil {
		_, err = out.Write(text)
	}
	return out.Commit(err)
}
