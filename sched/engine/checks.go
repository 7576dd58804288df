package engine

import (
	"context"
	"errors"
	"fmt"

	"helios/cuda"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// checks are the checksums of the reads of a run's SSDs (gpuio.NewCheckedBy). They stay
// in memory for the whole run: a stack is opened more than once.
type checks struct {
	off   bool        // nothing is checked: nobody wants it
	rows  cuda.Buffer // of rows; nil: they are not checked
	lines cuda.Buffer // of the lines of a dynamic tier, once they are read
}

// openChecks reads the checksums of rows, and finds out what the run checks. pages are as
// describeChecks has them.
func (s *Store) openChecks(ctx context.Context, pages string) error {
	c := &s.of.Config
	why, full := s.unchecked, stripe.RoomForSums(s.Layout.Rows)
	switch {
	case c.CheckReads == plan.ChecksOff:
		s.checks.off = true
		why = "turned off"
	case c.CheckReads == plan.ChecksOn && full != nil:
		return errs.Errorf("{check-reads}: %w; free some, or leave it out", full)
	case c.CheckReads == plan.ChecksOn:
		why = ""
	case why == "" && full != nil:
		why = full.Error()
	}
	if why == "" {
		var err error
		read := func(sums []uint32) error {
			return stripe.RowSums(ctx, s.of.In.Dataset, s.SSDs, sums)
		}
		if s.checks.rows, err = gpuio.NewSums(s.of.Device, s.Layout.Rows, read); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return stopped
			}
			return errs.Errorf("{check-reads}: %w", err)
		}
	}
	s.Checked = s.describeChecks(why, pages)
	return nil
}

// describeChecks describes the checked reads of the run. why is the reason that rows are not;
// pages name what is read in their place, if anything.
func (s *Store) describeChecks(why, pages string) (i report.ChecksInfo) {
	c := &s.of.Config
	say := func(what, whyNot string) {
		if whyNot == "" {
			i.Checked = append(i.Checked, what)
		} else {
			i.NotChecked = append(i.NotChecked, what+" ("+whyNot+")")
		}
	}
	say("rows as they come from the SSDs", why)
	if pages != "" {
		if !s.checks.off {
			why = "" // they always have checksums
		}
		say(pages, why)
	}
	unsealed := ""
	if d := s.of.In.Dataset; !d.Sealed() {
		unsealed = fmt.Sprintf("not sealed: run \"heliosctl verify --seal %s\"", d.Dir())
	}
	if c.Topology == plan.TopologySSD {
		say("neighbour lists, page by page", unsealed)
	}
	say("other files of the dataset, when they are opened", unsealed)
	return i
}

// sumsOf are the checksums of what a stack reads by l, which are nil where nothing is checked.
func (s *Store) sumsOf(ctx context.Context, l gpuio.Layout) (sums cuda.Buffer, err error) {
	of := s.of
	switch p := s.Pages; {
	case s.checks.off:
		return nil, nil
	case p != nil:
		if p.checks == nil {
			p.checks, err = gpuio.NewSums(of.Device, l.Rows, func(to []uint32) error {
				sums, err := p.Sums(ctx)
				copy(to, sums)
				return err
			})
		}
		return p.checks, err
	case s.checks.rows == nil || l == s.Layout:
		return s.checks.rows, nil
	case s.checks.lines == nil:
		lines, as, err := prepare.LayLines(s.Layout, of.Rows, of.Config.CacheLine)
		if err != nil || as != l {
			return nil, errors.Join(err, errs.New(errs.Failed, "reads of %d bytes have no checksums",
				l.RowBytes))
		}
		s.checks.lines, err = gpuio.NewSums(of.Device, l.Rows, func(to []uint32) error {
			return stripe.LineSums(ctx, of.In.Dataset, s.SSDs, stripe.Lines{Layout: l,
				Rows: lines.RowsPerLine, Stride: lines.RowStride},
				hostmem.View[uint32](s.checks.rows.Bytes()), to)
		})
		return s.checks.lines, err
	}
	return s.checks.lines, nil
}

// closeChecks frees the checksums. No stack is open.
func (s *Store) closeChecks() (err error) {
	for _, b := range []*cuda.Buffer{&s.checks.rows, &s.checks.lines} {
		if *b != nil {
			err = errors.Join(err, (*b).Free())
			*b = nil
		}
	}
	return err
}
