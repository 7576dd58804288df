package packs

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/internal/work"
	"helios/sched/plan"
	"helios/sched/samples"
)

// VerifyReport counts the data that a Verify has read.
type VerifyReport struct {
	Dir     string   `json:"dir"`
	Packs   int      `json:"packs"`
	Batches int64    `json:"batches"`
	Pages   int64    `json:"pages"` // in the folder; those on SSDs are checked with the SSDs
	Bytes   int64    `json:"bytes"`
	Notes   []string `json:"notes,omitempty"` // what was not checked
}

// Verify reads the packs in a folder and holds all of them against their checksums: samples, plans,
// each mini-batch of one against that of the other, and pages in the folder. nil: there are no
// packs. Packs that are not finished, or in use, are noted. Damage has class device and names the
// file.
func Verify(ctx context.Context, dir string, progress work.Progress) (_ *VerifyReport, err error) {
	if there, err := isOurs(dir); !there { // what else is there is nobody's business here
		if errs.ClassOf(err) == errs.Refused {
			err = nil
		}
		return nil, err
	}
	r := &VerifyReport{Dir: dir}
	lock, err := takeLock(dir)
	if errs.ClassOf(err) == errs.Refused {
		r.Notes = append(r.Notes, err.Error())
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	m, err := readManifest(filepath.Join(dir, manifestName))
	if err != nil {
		return nil, err
	}
	for _, e := range m.Packs {
		if !e.Whole {
			r.Notes = append(r.Notes, fmt.Sprintf(
				"the pack of sample epochs %d to %d in %s is not finished and was not checked",
				e.First, e.End-1, dir))
			continue
		}
		if err := r.pack(ctx, &e, &m.Key, progress); err != nil {
			return nil, err
		}
		r.Packs++
	}
	return r, nil
}

// pack checks a pack that is whole.
func (r *VerifyReport) pack(ctx context.Context, e *Entry, k *Key,
	progress work.Progress) (err error) {
	dir := filepath.Join(r.Dir, e.name())
	p, err := packed.Open(filepath.Join(dir, planName))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	h := p.Header()
	s, err := samples.Open(dir, samples.Spec{Nodes: h.Rows, Batches: p.Batches(),
		Key: k.samples(e.First, e.End)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, err := p.Hot(); err != nil {
		return err
	}
	if err := p.CheckStreams(); err != nil {
		return err
	}
	var at packed.Batch
	var nodes []int64
	var adj []byte
	for i := range p.Batches() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if nodes, err = s.Read(i, nodes); err != nil {
			return err
		}
		if adj, err = s.Adj(i, adj); err != nil {
			return err
		}
		if err := p.Batch(i, &at); err != nil {
			return err
		}
		if n := len(at.HotPos) + len(at.Pos); n != len(nodes) {
			return errs.New(errs.Device,
				"%s: mini-batch %d has %d rows in the plan and %d in the samples; remove the folder %s and prepare again",
				dir, i, n, len(nodes), r.Dir)
		}
		progress.Report("verify packs", int64(i+1), int64(p.Batches()))
	}
	r.Batches += int64(p.Batches())
	r.Bytes += s.Bytes() + p.Bytes()
	if h.Stats.Pages == 0 || k.PagesOn != plan.PagesFolder {
		return nil
	}
	spec := pages.Spec{ID: e.ID, PageBytes: h.Shape.PageBytes, Pages: h.Stats.Pages}
	n, err := pages.VerifyFolder(ctx, dir, &spec, progress)
	r.Pages, r.Bytes = r.Pages+n, r.Bytes+n*spec.PageBytes
	return err
}
