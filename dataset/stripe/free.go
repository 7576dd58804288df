package stripe

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/signatures"
)

// forceName returns what --force calls a device: its serial number, or its name where it has none.
func (t *target) forceName() string {
	if serial := strings.TrimSpace(t.serial); serial != "" {
		return serial
	}
	return t.name
}

// room describes an SSD to a load.
type room struct {
	t      *target
	c      copies // of the slot of t
	all    []held // what the SSD holds; nil: all that is there may go
	ours   []held // of these the dataset's own, as it is or was before imports added to it
	shared bool   // with other datasets, which stay
}

// checkFree refuses a device that holds something which is not a dataset, unless force names it. A
// device is free where it carries datasets, none of them computed or damaged, and no pages of this
// one, or where nothing is recognised on it and it is blank, at both ends and in samples of the
// middle: unknown content is somebody's, too. Every write of a load comes after this check, and
// pages go onto SSDs that carry their dataset.
func (t *target) checkFree(ctx context.Context, d *dataset.Dataset, force string) (r room,
	err error) {
	forced := false
	for _, f := range strings.Split(force, ",") {
		forced = forced || strings.TrimSpace(f) == t.forceName()
	}
	r.t = t.inSlot(0)
	if r.c, err = r.t.readCopies(ctx); err != nil {
		return r, err
	}
	for i, rerr := range r.c.read {
		if rerr != nil { // not knowing what is there is no licence to overwrite it
			if forced {
				continue
			}
			return r, errs.New(errs.Device,
				"ssd %s: cannot read superblock %d of 2, so it may hold data: %w; {force} %s overwrites it anyway",
				t.name, i+1, rerr, t.forceName())
		}
	}
	if forced {
		return r, nil
	}
	if r.all, err = t.contents(ctx); err != nil {
		return r, err
	}
	what, its := r.choose(d)
	if what == "" {
		what, err = t.content(ctx, &r.c, its)
	}
	if err == nil && what != "" {
		err = errs.New(errs.Refused,
			"ssd %s (serial %s) holds %s; loading would destroy it; to do so, add {force} %s",
			t.name, t.serial, what, t.forceName())
	}
	return r, err
}

// same refuses an SSD where somebody has loaded or unloaded since the room was looked for.
func (r *room) same(ctx context.Context) error {
	if r.all == nil { // all that is there may go
		return nil
	}
	all, err := r.t.contents(ctx)
	if err == nil && !slices.EqualFunc(all, r.all, func(a, b held) bool {
		return a.t.slot == b.t.slot && a.sb == b.sb && (a.err == nil) == (b.err == nil)
	}) {
		err = errs.New(errs.Refused,
			"ssd %s: somebody has loaded or unloaded a dataset there meanwhile; run it again", r.t.name)
	}
	return err
}

// isOurs reports whether a superblock is of the dataset, as it is or was before imports added to
// it.
func isOurs(d *dataset.Dataset, sb *Superblock) bool {
	return sb.UUID == d.UUID() || d.Meta.Source.WasOnce(sb.UUID.String())
}

// choose finds the dataset's own superblocks. what names something that it must not be loaded over
// or beside; its: the superblocks are all Helios's.
func (r *room) choose(d *dataset.Dataset) (what string, its bool) {
	first, slots := &r.all[0], 0
	exact := slices.ContainsFunc(r.all, func(h held) bool {
		return h.there() && h.sb.UUID == d.UUID()
	})
	for i := range r.all {
		h := &r.all[i]
		if h.takesSlot() {
			slots++
		}
		switch {
		case h.err != nil:
			r.shared = r.shared || h.t.slot > 0
		case !h.there():
		case h.sb.computed() && h.sb.UUID != d.UUID():
			return fmt.Sprintf("dataset %q, which it computes", h.sb.Name), true
		case h.sb.UUID == d.UUID(), !exact && isOurs(d, &h.sb):
			r.ours = append(r.ours, *h)
		default:
			r.shared = true
		}
	}
	if !r.shared && (len(r.ours) == 0 || r.ours[0].t.slot == 0) {
		if first.err == nil && !first.there() {
			return "", true
		}
		if what, its = r.c.holds(d); what != "" || len(r.ours) < 2 {
			return what, its
		}
	}
	for i := range r.all {
		if h := &r.all[i]; h.err != nil {
			return fmt.Sprintf("something like a dataset (superblock of slot %d: %v)", h.t.slot,
				h.err), true
		}
	}
	for i := range r.ours {
		if pages := r.ours[i].sb.Pages.String(); pages != "" {
			return pages + " beside the rows of this dataset", true
		}
	}
	if len(r.ours) == 0 && slots == maxDatasets {
		return fmt.Sprintf("%d datasets, and has room for no more (\"heliosctl unload\" frees it)",
			maxDatasets), true
	}
	return "", true
}

// others are the superblocks of other datasets.
func (r *room) others() []held {
	return slices.DeleteFunc(slices.Clone(r.all), func(h held) bool {
		return slices.ContainsFunc(r.ours, func(o held) bool { return o.t.slot == h.t.slot })
	})
}

// holds names what the superblocks say is there and is not this dataset's rows alone; "": nothing.
// its: one of them is this dataset's.
func (c *copies) holds(d *dataset.Dataset) (what string, its bool) {
	for i := range c.sb {
		switch {
		case c.err[i] == nil && !isOurs(d, &c.sb[i]):
			return fmt.Sprintf("another dataset, %q (%s)", c.sb[i].Name, c.sb[i].UUID), its
		case c.err[i] == nil:
			its = true
		}
	}
	for i := range c.sb {
		switch pages := c.sb[i].Pages.String(); {
		case its && c.err[i] == nil && pages != "":
			return pages + " beside the rows of this dataset", its
		case !its && c.read[i] == nil && !errors.Is(c.err[i], ErrNoSuperblock):
			return fmt.Sprintf("something like a dataset (superblock %d of 2: %v)", i+1,
				c.err[i]), its
		}
	}
	return "", its
}

// content names what is there beside superblocks, as far as both ends and samples of the middle
// show; "": nothing.
func (t *target) content(ctx context.Context, c *copies, ours bool) (string, error) {
	head, tail, err := t.readEnds(ctx)
	if err != nil {
		return "", err
	}
	// A load clears the places beside its superblocks: a mark there, as of md or bcache at 4 KiB,
	// is of somebody who came later.
	if what := signatures.Find(head, tail, t.bytes()); what != "" {
		return what, nil
	}
	if ours {
		// One copy of the superblock is not there: not written yet, if its place is blank, else
		// somebody has written there. A copy that is damaged is a load that was cut off.
		for i, end := range [][]byte{head[:superblockBytes], tail[len(tail)-superblockBytes:]} {
			if c.read[i] == nil && errors.Is(c.err[i], ErrNoSuperblock) && !signatures.Blank(end) {
				return signatures.Unknown(end, nil) + ", where this dataset has a superblock", nil
			}
		}
		return "", nil
	}
	// A load that was killed before its superblock was there left the record of its lease alone.
	for i := range leaseSlots {
		if slot := head[leaseAt+i*leaseSlot:]; decodeLease(slot) != nil {
			clear(slot[:wireBytes])
		}
	}
	if what := signatures.Unknown(head, tail); what != "" {
		return what, nil
	}
	what, err := t.sample(ctx)
	if what != "" {
		what += ", between two blank ends"
	}
	return what, err
}
