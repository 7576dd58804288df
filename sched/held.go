package sched

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"helios/dataset"
	"helios/internal/errs"
	"helios/sched/checkpoint"
	"helios/sched/report"
)

// Held holds what a checkpoint folder holds.
type Held struct {
	Path        string
	Model       string
	DatasetUUID string
	DatasetName string // empty in checkpoints of older versions
	Epoch       int    // in work, from 1
	Batch       int    // trained of it
	Epochs      []report.EpochResult
	Written     string // RFC 3339
	Run         string // empty in checkpoints of older versions
	Damage      error  // what is wrong with it; the rest is then empty
}

// Resumable reports whether a run can go on from what is held: the best parameters alone are no
// run's state.
func (h *Held) Resumable() bool { return filepath.Base(h.Path) == checkpointName }

// String describes the content.
func (h *Held) String() string {
	if h.Damage != nil {
		return fmt.Sprintf("holds a checkpoint that can't be read (%v)", h.Damage)
	}
	name := h.DatasetName
	if name == "" {
		name = h.DatasetUUID
	}
	s := fmt.Sprintf("holds %s of dataset %s, epoch %d, batch %d", h.Model, name, h.Epoch, h.Batch)
	if h.Batch == 0 && h.Epoch > 1 {
		s = fmt.Sprintf("holds %s of dataset %s, %d epochs done", h.Model, name, h.Epoch-1)
	}
	if h.Written != "" {
		s += ", written " + h.Written
	}
	return s
}

// HeldError is the refusal to train into a folder that holds a checkpoint. Its class is
// errs.Refused.
type HeldError struct {
	Dir  string
	Held *Held
}

func (e *HeldError) Error() string { return fmt.Sprintf("folder %s %s", e.Dir, e.Held) }

// HoldsCheckpoint reports whether a folder has a checkpoint's file, without reading it.
func HoldsCheckpoint(dir string) bool {
	return slices.ContainsFunc([]string{checkpointName, bestName}, func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	})
}

// HeldIn looks into a checkpoint folder; nil where it holds nothing, or is not there.
func HeldIn(dir string) (*Held, error) {
	for _, name := range []string{checkpointName, bestName} {
		path := filepath.Join(dir, name)
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) ||
			errors.Is(err, syscall.ENOTDIR) {
			continue
		} else if err != nil {
			return nil, errs.New(errs.Usage, "checkpoint folder %s: %w; name another", dir, err)
		}
		h := &Held{Path: path, Written: modified(path)}
		f, err := checkpoint.Load(path)
		var st state
		if err == nil {
			st, err = decodeState(path, f)
		}
		if err != nil {
			h.Damage = err
			return h, nil
		}
		h.Model, h.DatasetUUID, h.DatasetName, h.Run = st.Print.Model, st.Print.Dataset,
			st.Name, st.Run
		h.Epoch, h.Batch, h.Epochs = st.Epoch+1, st.Batch, st.Epochs
		if st.Written != "" {
			h.Written = st.Written
		}
		return h, nil
	}
	return nil, nil
}

// modified tells when a file was written, for checkpoints that do not say so themselves.
func modified(path string) string {
	st, err := os.Stat(path)
	if err != nil {
		return ""
	}
	return st.ModTime().UTC().Format(time.RFC3339)
}

// OtherDataset is the refusal to use a checkpoint on a dataset that it was not trained on, or that
// it can't be told. Its class is errs.Refused.
type OtherDataset struct {
	Path     string
	Was, Now string // UUIDs
	WasName  string
	Name     string
}

func (e *OtherDataset) Error() string {
	if e.Was == "" || e.Now == "" {
		return fmt.Sprintf(
			"checkpoint %s: it is unknown whether it was trained on dataset %s, as one of them has no UUID",
			e.Path, e.Name)
	}
	was := strings.TrimSpace(e.WasName + " " + e.Was)
	return fmt.Sprintf(
		"checkpoint %s was trained on dataset %s, this is %s %s: nodes that one trained on may be test nodes of the other",
		e.Path, was, e.Name, e.Now)
}

// otherDataset is an error unless a checkpoint is of this dataset, as it is or was before imports
// added to it.
func otherDataset(path string, st state, m *dataset.Meta) error {
	was := st.Print.Dataset
	if was == m.UUID && was != "" || m.Source.WasOnce(was) {
		return nil
	}
	return errs.With(errs.Refused, &OtherDataset{Path: path, Was: was, Now: m.UUID,
		WasName: st.Name, Name: m.Name})
}
