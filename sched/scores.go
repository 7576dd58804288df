package sched

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/metrics"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/prepare"
	"helios/sched/report"
)

// maxProbabilities is the most memory for the probabilities of an evaluation: beyond, figures of
// the order of nodes are absent.
const maxProbabilities = 1 << 30

// validateStage is the pass behind an epoch that chooses the best one.
const validateStage = "validate"

// probabilities returns the memory for the probabilities of an evaluation.
func probabilities(nodes, classes int) int64 { return int64(nodes) * int64(classes) * 4 }

// roomFor returns the most memory for the probabilities of a pass: no more than half of what is
// free, so that a test does not end a run whose caches have taken the rest.
func (e *runner) roomFor(stage string, available func() (int64, error)) int64 {
	if e.others != nil || stage == validateStage {
		return maxProbabilities // ranks keep alike, and so do epochs that are compared
	}
	free, err := available()
	if err != nil {
		return maxProbabilities
	}
	return min(maxProbabilities, free/2)
}

// undefined refuses a metric that validation nodes do not define: before an epoch trains for
// nothing.
func undefined(m metrics.Metric, dataset string, t *prepare.Targets, nodes []int64) error {
	size := probabilities(len(nodes), t.Columns)
	others := strings.Join(metrics.NamesFor(t.Kind), ", ")
	switch {
	case t.Defines(m, nodes, size <= maxProbabilities):
		return nil
	case t.Defines(m, nodes, true):
		return errs.New(errs.Usage,
			"{metric} %s needs the probabilities of %d validation nodes for %d classes, %s of memory, and has %s at most; choose another of %s",
			m.Name, len(nodes), t.Columns, units.FormatBytes(size),
			units.FormatBytes(maxProbabilities), others)
	}
	return errs.New(errs.Usage,
		"{metric} %s is not defined on the %d validation nodes of dataset %s; they need %s; choose another of %s",
		m.Name, len(nodes), dataset, map[metrics.Target]string{
			metrics.Classes: "labels of several classes", metrics.Labels: "labels of both kinds",
			metrics.Numbers: "numbers that differ"}[t.Kind], others)
}

// scored is infer, and judges the nodes by the model's outputs for them. The report is nil where no
// node has a label.
func (e *runner) scored(ctx context.Context, p *engine.Pass, nodes []int64) (report.EpochResult,
	*metrics.Report, error) {
	whole, classes := p.Order.Whole(), e.model.Classes()
	size, room := probabilities(len(nodes), classes), e.roomFor(p.Name, hostmem.AvailableBytes)
	s := e.Targets.Judge(nodes, size <= room)
	if size > room && e.Targets.Kind != metrics.Numbers {
		e.Observer.TellNote(
			"%s: ROC AUC and average precision need the probabilities of %d nodes for %d classes, %s of memory, and have %s at most: they are left out",
			p.Name, len(nodes), classes, units.FormatBytes(size), units.FormatBytes(room))
	}
	logits := make([]float32, e.Config.Batch*classes)
	r, err := e.infer(ctx, p, func(op context.Context, slot *engine.Slot) error {
		batch := logits[:len(slot.Seeds)*classes]
		if err := e.model.Logits(op, e.TrainStream, batch); err != nil {
			return err
		}
		e.Targets.InUnit(batch)
		from, _ := whole.Bounds(p.Order.Index(slot.Index))
		for i := range slot.Seeds {
			s.Set(from+i, batch[i*classes:(i+1)*classes])
		}
		return nil
	})
	if err == nil {
		err = e.others.exchange(whole, s)
	}
	if err != nil {
		return r, nil, err
	}
	judged := s.Report()
	if judged != nil {
		for i := range judged.Classes {
			if c := &judged.Classes[i]; c.Class < len(e.Targets.Names) {
				c.Name = e.Targets.Names[c.Class]
			}
		}
	}
	return r, judged, nil
}

// exchange gives all ranks the scores of each.
func (o *others) exchange(whole prepare.Order, s metrics.Judge) error {
	if o == nil {
		return nil
	}
	var mine bytes.Buffer
	err := eachScore(o.rankPart(whole, o.group.Rank()), func(v any) error {
		return binary.Write(&mine, binary.LittleEndian, v)
	}, whole, s)
	if err != nil {
		return err
	}
	ctx, cancel := o.call()
	defer cancel()
	all, err := o.group.AllGather(ctx, mine.Bytes())
	if err != nil {
		return err
	}
	for r, b := range all {
		in := bytes.NewReader(b)
		err := eachScore(o.rankPart(whole, r), func(v any) error {
			return binary.Read(in, binary.LittleEndian, v)
		}, whole, s)
		if err == nil && in.Len() > 0 {
			err = errors.New("too many")
		}
		if err != nil {
			return fmt.Errorf("rank %d: scores of %d bytes: %w", r, len(b), err)
		}
	}
	return nil
}

// eachScore calls do with what each mini-batch of a rank has set.
func eachScore(part prepare.Order, do func(any) error, whole prepare.Order,
	s metrics.Judge) error {
	for i := range part.Len() {
		for _, p := range s.Parts(whole.Bounds(part.Index(i))) {
			if err := do(p); err != nil {
				return err
			}
		}
	}
	return nil
}
