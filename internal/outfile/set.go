package outfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"helios/internal/errs"
)

// Set is the outputs of one run: no two may be the same file.
type Set struct {
	Replace bool // files that are there may be replaced
	taken   []claim
	inputs  []claim
}

type claim struct {
	what, path, real string
	st               os.FileInfo
}

// Claim checks an output that somebody else will Create.
func (s *Set) Claim(what, path string) error {
	if err := s.claim(what, path, s.Replace); err != nil {
		return err
	}
	return Check(what, path, s.Replace)
}

// Reads notes a file that no output may replace or write to, by whatever name and whatever Replace
// is; of a folder, all files in it and below.
func (s *Set) Reads(what, path string) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return // nothing is there
	}
	_ = filepath.WalkDir(real, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // what can't be read is none of the run's inputs
		}
		if st, err := os.Stat(path); err == nil && !st.IsDir() {
			s.inputs = append(s.inputs, claim{what: what, st: st})
		}
		return nil
	})
}

// spare refuses an output that is an input.
func (s *Set) spare(what, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return nil //nolint:nilerr // find says so
	}
	for _, in := range s.inputs {
		if os.SameFile(in.st, st) {
			return errs.New(errs.Refused,
				"%s and %s both name %s, which is read and never written over; name another file",
				in.what, what, path)
		}
	}
	return nil
}

// Create claims and begins an output.
func (s *Set) Create(what, path string) (*File, error) {
	if err := s.claim(what, path, s.Replace); err != nil {
		return nil, err
	}
	return Create(what, path, s.Replace)
}

// Continue claims a file that grows by lines and opens it, as the function Continue does.
func (s *Set) Continue(what, path string, each func(line []byte) error) (*Lines, error) {
	if err := s.claim(what, path, true); err != nil {
		return nil, err
	}
	l, err := Continue(what, path, each)
	if err != nil {
		// nothing is written there
		s.taken = slices.DeleteFunc(s.taken,
			func(c claim) bool { return c.what == what && c.path == path })
	}
	return l, err
}

// claim refuses a file that an earlier claim has named, by whatever name.
func (s *Set) claim(what, path string, replace bool) error {
	if err := s.spare(what, path); err != nil {
		return err
	}
	t, err := find(what, path, replace)
	if err != nil || t.straight() {
		return err
	}
	c := claim{what: what, path: path, real: t.real}
	c.st, _ = os.Stat(t.real) // nil where it is not there yet
	for _, o := range s.taken {
		if o.real == c.real || o.st != nil && c.st != nil && os.SameFile(o.st, c.st) {
			return errs.New(errs.Usage, "%s and %s both name %s; give each its own file", o.what,
				what, path)
		}
	}
	s.taken = append(s.taken, c)
	return nil
}
