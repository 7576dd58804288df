package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/outfile"
)

// open begins the folder, or goes on in one that the same command began.
func (s *suite) open() error {
	if err := os.MkdirAll(s.out, 0o777); err != nil {
		return errs.New(errs.Usage, "{out}: %w; name another folder", err)
	}
	path := filepath.Join(s.out, suiteResults)
	s.results = &results{e: s.env, path: path, run: newRun()}
	files := &outfile.Set{}
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		all, err := os.ReadDir(s.out)
		if err != nil {
			return errs.New(errs.Usage, "{out}: %w; name another folder", err)
		}
		if len(all) > 0 {
			return errs.New(errs.Refused,
				"{out} %s holds files that no suite has written (%s); name an empty folder, or one that is not there",
				s.out, all[0].Name())
		}
		return s.begin(files)
	}
	lines, err := files.Continue("--out", path, s.resume())
	if err != nil {
		return err
	}
	r := s.results
	if s.anew {
		if err := lines.Close(); err != nil {
			return err
		}
		r.run, s.done = newRun(), map[string]stepDone{}
		if err := os.RemoveAll(s.work()); err != nil {
			return err
		}
		return s.begin(&outfile.Set{Replace: true})
	}
	r.lines, r.continued = lines, true
	r.render()
	r.keep(r.w.Event("resume", s.runLine(r.run)))
	return r.err
}

// begin makes the folder the suite's by the first line of its results.
func (s *suite) begin(files *outfile.Set) (err error) {
	if s.results.file, err = files.Create("--out", s.results.path); err != nil {
		return err
	}
	s.results.begin()
	return s.results.err
}

// resume reads the lines of a suite that goes on.
func (s *suite) resume() func([]byte) error {
	path := filepath.Join(s.out, suiteResults)
	first := true
	return func(text []byte) error {
		if !first {
			var l struct {
				Event string `json:"event"`
				stepDone
			}
			if json.Unmarshal(text, &l) == nil && l.Event == "step" && l.Failed == "" {
				s.done[doneKey(l.Step, l.Round)] = l.stepDone
			}
			return nil
		}
		first = false
		var was struct {
			Event string `json:"event"`
			runLine
		}
		if json.Unmarshal(text, &was) != nil || was.Event != "begin" || was.Verb != s.verb {
			return errs.New(errs.Refused, "{out} %s: %s is no suite's; name another folder", s.out,
				path)
		}
		s.results.run = was.Run
		if s.anew {
			return nil
		}
		now := s.runLine("")
		if what := differs(&was.runLine, &now, s.uses); what != "" {
			return errs.New(errs.Refused,
				"{out} %s holds a suite with %s; {overwrite} begins it anew, or name another folder",
				s.out, what)
		}
		return nil
	}
}

// differs returns the reason why a suite's figures cannot stand beside those of an earlier run; ""
// for none.
func differs(was, now *runLine, uses optionUses) string {
	switch {
	case was.Version != now.Version:
		return "another version, " + was.Version
	case was.Machine.CPU != now.Machine.CPU || was.Machine.CPUs != now.Machine.CPUs:
		return fmt.Sprintf("another machine, %s with %d CPUs", was.Machine.CPU, was.Machine.CPUs)
	case !slices.Equal(uses.settings(was.Arguments), uses.settings(now.Arguments)):
		return "other options, " + strings.Join(was.Command, " ")
	}
	return ""
}
