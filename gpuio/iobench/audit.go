package iobench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/nvme"
)

// touchLimit bounds what touch reads of one SSD.
const touchLimit = 4 << 30

// touch reads SSDs that are memory once from end to end. Their first read in a process takes a
// page fault, and where they were never written an allocation too, which would be all that a short
// measurement sees. SSDs with faults in front (nvme/faultbus) are left alone: reads that nobody
// measures would use the faults up.
func touch(ctx context.Context, ssds []*gpuio.SSD, l gpuio.Layout) error {
	for i, s := range ssds {
		if b, ok := s.Ctrl.Bus().(interface{ Engine() string }); !ok || b.Engine() != "memory" {
			continue
		}
		bulk, err := gpuio.NewBulk(ctx, s.Ctrl, 4)
		if err != nil {
			return err
		}
		buf := make([]byte, 4<<20)
		end := min(l.LBAsOn(i), touchLimit/int64(l.LBABytes))
		for lba := int64(0); lba < end && err == nil; {
			n := min(int64(len(buf)/int(l.LBABytes)), end-lba)
			err = bulk.ReadAt(ctx, s.DataStart+nvme.LBA(lba), buf[:n*int64(l.LBABytes)])
			lba += n
		}
		// An SSD with errors is measured all the same: the row of results will tell.
		if err := bulk.Close(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// counted holds what SSDs say that they did.
type counted struct{ reads, units uint64 }

// counters are those of each SSD.
func (b *bench) counters(ctx context.Context) ([]counted, error) {
	var out []counted
	for _, s := range gpuio.Distinct(b.cfg.SSDs) {
		log, err := b.cfg.smart(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("SMART counters: %w", err)
		}
		out = append(out, counted{log.HostReads.Lo, log.DataUnitsRead.Lo})
	}
	return out, nil
}

// count enters what the SSDs counted into the row.
func (b *bench) count(t *gpuio.Stats, before, after []counted) {
	for i := range before {
		reads := int64(after[i].reads - before[i].reads)
		b.row.SMARTReads += reads
		if i < len(b.row.PerSSD) {
			b.row.PerSSD[i].SMARTReads = reads
			b.row.PerSSD[i].SMARTUnits = int64(after[i].units - before[i].units)
		}
	}
}

// audit decides whether the row of results may be believed. Reads that came right after a retry are
// no reason against it: they are counted, and so are the retries' commands.
func (b *bench) audit(ctx context.Context, t *gpuio.Stats) error {
	b.samples = slices.DeleteFunc(b.samples, func(s sample) bool { return s.data == nil })
	b.row.Sampled = len(b.samples)
	for _, s := range b.samples {
		b.row.ContentVaries = b.row.ContentVaries || !bytes.Equal(s.data, b.samples[0].data)
	}
	switch {
	case b.failed != nil:
		return b.failed
	case t.Failed != 0:
		return fmt.Errorf("%d rows were not read", t.Failed)
	case t.Foreign != 0:
		return fmt.Errorf("%d completions named no command in flight", t.Foreign)
	case b.row.IOPS == 0:
		return errors.New("no read was measured")
	case len(b.samples) == 0:
		return errors.New("no row was sampled")
	}
	for _, s := range b.row.PerSSD {
		if err := b.row.reconcile(&s); err != nil {
			return err
		}
	}
	return b.compare(ctx)
}

// unit is the size in which SSDs count their data: 1000 × 512 bytes (NVMe 2.0, figure 207).
const unit = 512000

// reconcile compares what the stack issued to an SSD with what that counted. Both are exact, but
// for commands that never came back, which the SSD may or may not have seen, and for what a command
// that failed has moved. The data is counted in units, rounded up: the difference of two readings
// is the bytes in units, one way or the other.
func (r *Row) reconcile(s *SSDRow) error {
	// they read the files beside the controllers
	if k, err := gpuio.FindStack(r.Stack); err != nil || !k.Queued {
		if s.SMARTReads != 0 || s.SMARTUnits != 0 {
			return errs.New(errs.Device,
				"SSD %s counted %d read commands and %d data units, the %s stack issues none",
				s.Name, s.SMARTReads, s.SMARTUnits, r.Stack)
		}
		return nil
	}
	unknown := int64(0)
	if s.Timeouts > 0 || s.Resets > 0 {
		unknown = s.Retries
	}
	if s.SMARTReads > s.Commands || s.SMARTReads < s.Commands-unknown {
		return errs.New(errs.Device, "SSD %s counted %d read commands, the stack issued %d", s.Name,
			s.SMARTReads, s.Commands)
	}
	least := s.Bytes
	if n := unknown + s.Errors; n > 0 { // of commands of different lengths we don't know which
		least = max(s.Bytes-n*maxCommand, 0)
	}
	if s.SMARTUnits < least/unit || s.SMARTUnits > (s.Bytes+unit-1)/unit {
		return errs.New(errs.Device,
			"SSD %s counted %d data units of %d bytes, the stack read %d bytes", s.Name,
			s.SMARTUnits, unit, s.Bytes)
	}
	return nil
}

// maxCommand is the most that one command moves: a page of PRP list, one page of memory each.
const maxCommand = 512 * 4096

// compare reads the sampled rows again by another way: the backing file with plain reads, or a
// queue pair of its own where there is no file.
func (b *bench) compare(ctx context.Context) error {
	read := make([]func(lba nvme.LBA, dst []byte) error, len(b.cfg.SSDs))
	for i, d := range b.cfg.SSDs {
		if d.BackingPath == "" {
			bulk, err := gpuio.NewBulk(ctx, d.Ctrl, 1)
			if err != nil {
				return err
			}
			defer bulk.Close(ctx)
			read[i] = func(lba nvme.LBA, dst []byte) error { return bulk.ReadAt(ctx, lba, dst) }
			continue
		}
		f, err := os.Open(d.BackingPath)
		if err != nil {
			return err
		}
		defer f.Close()
		if id, _, err := fileid.Of(f); err != nil {
			return err
		} else if how := id.Differs(d.Backing); d.Backing.Known() && how != "" {
			return errs.New(errs.Refused,
				"SSD %s: %s is not what was bound: %s; unbind it and bind it anew", d.Name,
				d.BackingPath, how)
		}
		read[i] = func(lba nvme.LBA, dst []byte) error {
			_, err := f.ReadAt(dst, int64(lba)*int64(b.l.LBABytes))
			return err
		}
	}
	buf := make([]byte, b.l.ReadBytes())
	for _, s := range b.samples {
		ssd, lba, _, off := b.l.Locate(s.row)
		d := b.cfg.SSDs[ssd]
		if err := read[ssd](d.DataStart+lba, buf); err != nil {
			return fmt.Errorf("row %d: independent read: %w", s.row, err)
		}
		if !bytes.Equal(s.data, buf[off:off+b.cfg.RowBytes]) {
			return errs.New(errs.Device, "row %d on SSD %d (%s, LBA %d) is not what the SSD holds",
				s.row, ssd, d.Name, d.DataStart+lba)
		}
	}
	return nil
}
