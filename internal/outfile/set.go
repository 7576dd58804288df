package outfile

import (
	"os"
	"path/filepath"
	"slices"

	"helios/internal/errs"
)

// Set is the outputs of one run: no two may be the same file.
type Set struct {
	Replace bool // files that are there may be replaced
	taken   []claim
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

// Reads notes a file that the run reads, which none of its outputs may replace.
func (s *Set) Reads(what, path string) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		st, _ := os.Stat(real) // nil where it is gone meanwhile
		s.taken = append(s.taken, claim{what: what, path: path, real: real, st: st})
	}
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
