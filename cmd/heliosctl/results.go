package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
	"helios/internal/ui"
)

func resultsFlag() cli.Flag {
	return &cli.StringFlag{Name: "results", Usage: "also write the --json lines to `FILE`, whole or not at all"}
}

// atomicFile is written beside its place and renamed when it is whole, so that no reader takes a
// part of it for all.
type atomicFile struct {
	f    *os.File
	flag string // for errors
	path string
}

func createAtomic(flag, path string) (*atomicFile, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".partial-*")
	if err != nil {
		return nil, errs.New(errs.Usage, "--%s: %w; name a file in a folder that can be written", flag, err)
	}
	if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
		return nil, errors.Join(errs.New(errs.Usage, "--%s %s is there and no file; name another", flag, path), f.Close(), os.Remove(f.Name()))
	}
	return &atomicFile{f: f, flag: flag, path: path}, nil
}

// commit puts the file in its place; err is what went wrong in writing it.
func (a *atomicFile) commit(err error) error {
	if err == nil {
		err = a.f.Chmod(0o644)
	}
	if err == nil {
		err = a.f.Sync()
	}
	if err == nil {
		err = os.Rename(a.f.Name(), a.path)
	}
	if err != nil {
		return fmt.Errorf("--%s %s: %w; nothing was kept of it: free some space there or name another file", a.flag, a.path, err)
	}
	err = a.f.Close()
	a.f = nil
	return err
}

// discard removes what was not committed.
func (a *atomicFile) discard() error {
	if a == nil || a.f == nil {
		return nil
	}
	err := errors.Join(a.f.Close(), os.Remove(a.f.Name()))
	a.f = nil
	return err
}

// results writes a verb's JSON lines to standard output, with --json, and to the file of
// --results.
type results struct {
	ui   *ui.UI
	file *atomicFile // nil without --results
	w    *ui.UI      // over file
	err  error
}

func (e *env) openResults() (*results, error) {
	r := &results{ui: e.ui}
	path := e.c.String("results")
	if path == "" {
		return r, nil
	}
	var err error
	if r.file, err = createAtomic("results", path); err != nil {
		return nil, err
	}
	r.w = ui.New(r.file.f, r.file.f)
	r.w.JSON, r.w.Quiet = true, true
	return r, nil
}

// event and object keep their first error for commit, so that callbacks can use them.
func (r *results) event(name string, v any) {
	r.keep(r.ui.Event(name, v))
	if r.w != nil {
		r.keep(r.w.Event(name, v))
	}
}

func (r *results) object(v any) {
	r.keep(r.ui.Object(v))
	if r.w != nil {
		r.keep(r.w.Object(v))
	}
}

func (r *results) keep(err error) {
	if r.err == nil {
		r.err = err
	}
}

// commit ends the results; without it, close leaves no file.
func (r *results) commit() error {
	if r.file == nil || r.err != nil {
		return r.err
	}
	return r.file.commit(r.w.Close())
}

func (r *results) close() error { return r.file.discard() }
