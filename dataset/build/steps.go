package build

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"

	"helios/dataset"
	"helios/dataset/seal"
	"helios/internal/durable"
	"helios/internal/errs"
)

// scratchPrefix begins the names of files that no dataset has.
const scratchPrefix = "scratch-"

// ScratchName is the name in the directory of a scratch file.
func (s *Staging) ScratchName(name string) string {
	return scratchPrefix + strings.ReplaceAll(name, string(filepath.Separator), "_")
}

// Scratch makes a file that Commit removes.
func (s *Staging) Scratch(name string) (*os.File, error) {
	path := s.Path(s.ScratchName(name))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return nil, explainWrite(path, err)
	}
	return f, nil
}

// ClearScratch removes all scratch files.
func (s *Staging) ClearScratch() error {
	files, err := filepath.Glob(filepath.Join(s.dir, scratchPrefix+"*"))
	for _, f := range files {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}

// Step returns the state that an interrupted import has given to FinishStep.
func (s *Staging) Step(name string) (state json.RawMessage, ok bool) {
	if s.journal == nil || s.journal.steps[name] == nil {
		return nil, false
	}
	return s.journal.steps[name].State, true
}

// FinishStep makes files durable that a step has made, and notes them with a state, so that another
// run need not do the step again. Other scratch files are removed.
func (s *Staging) FinishStep(name string, state any, files ...string) error {
	keep := map[string]bool{}
	done := &stepDone{Name: name}
	var err error
	if done.State, err = json.Marshal(state); err != nil {
		return err
	}
	for _, file := range files {
		keep[s.Path(file)] = true
		if err := durable.Sync(s.Path(file)); err != nil {
			return explainWrite(file, err)
		}
		st, err := os.Stat(s.Path(file))
		if err != nil {
			return err
		}
		done.Files = append(done.Files, stepFile{file, st.Size(), sumOfSums(s.sealed[file])})
	}
	all, err := filepath.Glob(filepath.Join(s.dir, scratchPrefix+"*"))
	for _, f := range all {
		if !keep[f] {
			err = errors.Join(err, os.Remove(f))
		}
	}
	if err = errors.Join(err, s.syncFolders()); err != nil || s.journal == nil {
		return err
	}
	return s.journal.write(journalLine{Step: done})
}

func sumOfSums(f seal.Sealed) uint32 {
	b := make([]byte, 0, 4*len(f.Checksums))
	for _, c := range f.Checksums {
		b = binary.LittleEndian.AppendUint32(b, c)
	}
	return crc32.ChecksumIEEE(b)
}

// sealSteps takes the checksums of files that steps of an interrupted import have made.
func (s *Staging) sealSteps() error {
	if s.journal == nil {
		return nil
	}
	for _, step := range s.journal.steps {
		for _, f := range step.Files {
			if _, ok := s.sealed[f.Name]; ok || !dataset.IsFile(f.Name) {
				continue
			}
			again, _, err := dataset.SumFile(context.Background(), s.dir, f.Name, nil)
			if err != nil {
				return err
			}
			if sumOfSums(again) != f.Sum {
				return errs.New(errs.Device,
					"%s is not what was written before the import was interrupted; run the import again with {restart}",
					filepath.Join(s.out, f.Name))
			}
			s.sealed[f.Name] = again
		}
	}
	return nil
}
