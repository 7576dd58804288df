package dataset

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"helios/internal/errs"
	"helios/internal/signatures"
	"helios/nvme"
)

// checkFree refuses a device that holds something which is not this dataset, unless force
// names its serial number. It returns what the superblocks say.
func (t *target) checkFree(ctx context.Context, d *Dataset, force string) (copies, error) {
	forced := false
	for _, f := range strings.Split(force, ",") {
		forced = forced || f != "" && strings.TrimSpace(f) == t.serial
	}
	c, err := t.readCopies(ctx)
	if err != nil {
		return c, err
	}
	for i, rerr := range c.read {
		if rerr != nil { // not knowing what is there is no licence to overwrite it
			if forced {
				continue
			}
			return c, errs.New(errs.Device, "ssd %s: cannot read superblock %d of 2, so it may hold data: %w; --force %s overwrites it anyway", t.name, i+1, rerr, t.serial)
		}
	}
	if forced {
		return c, nil
	}
	refuse := func(what string) (copies, error) {
		return c, errs.New(errs.Refused, "ssd %s (serial %s) holds %s; loading would destroy it; to do so, add --force %s", t.name, t.serial, what, t.serial)
	}
	ours := false
	for i := range c.sb {
		switch {
		case c.err[i] == nil && c.sb[i].UUID != d.id:
			return refuse(fmt.Sprintf("another dataset, %q (%s)", c.sb[i].Name, c.sb[i].UUID))
		case c.err[i] == nil:
			ours = true
		}
	}
	if ours {
		return c, nil
	}
	for i := range c.sb {
		if c.read[i] == nil && !errors.Is(c.err[i], ErrNoSuperblock) {
			return refuse(fmt.Sprintf("something like a dataset (superblock %d of 2: %v)", i+1, c.err[i]))
		}
	}
	bytesAll := int64(t.lbas) * int64(t.lbaBytes)
	n := min(int64(signatures.ProbeBytes), bytesAll)
	head, tail := make([]byte, n), make([]byte, n)
	if err := t.dev.ReadAt(ctx, 0, head); err != nil {
		return c, errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
	}
	if err := t.dev.ReadAt(ctx, nvme.LBA((bytesAll-n)/int64(t.lbaBytes)), tail); err != nil {
		return c, errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
	}
	if what := signatures.Find(head, tail, bytesAll); what != "" {
		return refuse(what)
	}
	return c, nil
}
