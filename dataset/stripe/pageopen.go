package stripe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/nvme"
)

// pageAdvice helps where pages on SSDs are damaged: there is no second copy of them.
func pageAdvice(id uuid.UUID) string {
	return fmt.Sprintf(
		"remove them with \"heliosctl ssds --remove-pages %s\" and prepare them again",
		id)
}

// OpenPages opens the finished pages of s on the SSDs that hold d, to be read. The SSDs are used,
// not taken over: they stay open until what reads the pages is closed. Pages that are missing,
// unfinished or others than s, a damaged table, and damaged pages among a few that are looked at
// are errors that name the SSD.
func OpenPages(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD,
	s pages.Spec) (o *pages.Opened, err error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	err = withStripes(ctx, d, ssds, AttachOptions{}, func(stripes []stripe) error {
		o, err = openPages(ctx, d, stripes, s)
		return err
	})
	if err != nil {
		return nil, err
	}
	o.Sums = func(ctx context.Context) (sums []uint32, err error) {
		err = withStripes(ctx, d, ssds, AttachOptions{}, func(stripes []stripe) error {
			sums, err = pageSums(ctx, stripes, s)
			return err
		})
		return sums, err
	}
	return o, nil
}

// samplePages of an SSD are held against their checksums when a store is opened.
const samplePages = 8

func openPages(ctx context.Context, d *dataset.Dataset, stripes []stripe,
	s pages.Spec) (*pages.Opened, error) {
	l, err := gpuio.NewLayout(s.Pages, int(s.PageBytes), len(stripes), stripes[0].sb.LBABytes)
	if err != nil {
		return nil, err
	}
	o := &pages.Opened{Layout: l}
	for _, x := range stripes {
		e, err := x.pages(s)
		if err != nil {
			return nil, err
		}
		if x.t.ssd == nil {
			return nil, errs.New(errs.Failed, "ssd %s has no controller", x.t.name)
		}
		ssd := *x.t.ssd
		ssd.DataStart, ssd.Repair = e.LBA, pageAdvice(s.ID)
		o.SSDs = append(o.SSDs, &ssd)
	}
	sums, err := pageSums(ctx, stripes, s)
	if err != nil {
		return nil, err
	}
	n := int64(len(stripes))
	g, gctx := errgroup.WithContext(ctx)
	for i, x := range stripes {
		g.Go(func() error {
			slots := l.RowsOn(i)
			b := make([]byte, s.PageBytes)
			for k := range min(samplePages, slots) {
				slot := k * (slots - 1) / max(min(samplePages, slots)-1, 1)
				page := slot*n + int64(i)
				if err := x.checkPage(gctx, s, slot, page, b, sums[page]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return o, g.Wait()
}

// pages returns the stripe's extent of a store that must be finished.
func (x *stripe) pages(s pages.Spec) (*PageExtent, error) {
	i := x.sb.Pages.find(s.ID)
	if i < 0 {
		there := x.sb.Pages.String()
		if there == "" {
			there = "none"
		}
		return nil, errs.New(errs.Usage,
			"ssd %s: pages of pack %s are not there (there are: %s); prepare them again", x.t.name,
			s.ID, there)
	}
	e := &x.sb.Pages.e[i]
	switch {
	case e.Spec() != s:
		return nil, errs.New(errs.Refused,
			"ssd %s holds %d pages of %d bytes of pack %s, and %d of %d are looked for; %s",
			x.t.name, e.Pages, e.PageBytes, s.ID, s.Pages, s.PageBytes, pageAdvice(s.ID))
	case e.State != StateComplete:
		return nil, errs.New(errs.Device,
			"ssd %s: the pages of pack %s are not finished: preparing them was cut off; go on with it",
			x.t.name, s.ID)
	}
	return e, nil
}

// pageSums reads the checksums of all pages: 4 bytes a page.
func pageSums(ctx context.Context, stripes []stripe, s pages.Spec) ([]uint32, error) {
	if hostmem.Scarce(4*s.Pages, refuseSumsFrom) {
		return nil, errs.New(errs.Capability,
			"the checksums of %d pages take %d bytes, which memory has no room for; free some",
			s.Pages, 4*s.Pages)
	}
	sums := make([]uint32, s.Pages)
	n := int64(len(stripes))
	g, gctx := errgroup.WithContext(ctx)
	for i, x := range stripes {
		g.Go(func() error {
			e, err := x.pages(s)
			if err != nil {
				return err
			}
			table, err := x.pageTable(gctx, e)
			if err != nil {
				return err
			}
			for k := int64(0); len(table) > 0; k, table = k+1, table[4:] {
				sums[k*n+int64(i)] = binary.LittleEndian.Uint32(table)
			}
			return nil
		})
	}
	return sums, g.Wait()
}

// pageTable reads the checksums of an SSD's share and checks them.
func (x *stripe) pageTable(ctx context.Context, e *PageExtent) ([]byte, error) {
	share, err := x.sb.pageShare(e.Spec())
	if err != nil || share.slots == 0 {
		return nil, err
	}
	table := make([]byte, e.TableLBAs*int64(x.sb.LBABytes))
	if err := x.t.dev.ReadAt(ctx, e.TableLBA, table); err != nil {
		return nil, errs.With(errs.Device, fmt.Errorf("ssd %s: page checksums of pack %s: %w",
			x.t.name, e.ID, err))
	}
	table = table[:4*share.slots]
	if got := crc32.Checksum(table, castagnoli); got != e.TableCRC {
		return nil, errs.New(errs.Device,
			"ssd %s: page checksums of pack %s at LBA %d+%d: CRC32C %08x, the superblock says %08x; %s",
			x.t.name, e.ID, e.TableLBA, e.TableLBAs, got, e.TableCRC, pageAdvice(e.ID))
	}
	return table, nil
}

// checkPage reads the page in a slot into b and checks it.
func (x *stripe) checkPage(ctx context.Context, s pages.Spec, slot, page int64, b []byte,
	want uint32) error {
	e, err := x.pages(s)
	if err != nil {
		return err
	}
	per := s.PageBytes / int64(x.sb.LBABytes)
	start := e.LBA + nvme.LBA(slot*per)
	if err := x.t.dev.ReadAt(ctx, start, b); err != nil {
		return errs.With(errs.Device, fmt.Errorf("ssd %s: pages of pack %s: %w", x.t.name, s.ID,
			err))
	}
	if got := crc32.Checksum(b, castagnoli); got != want {
		return errs.New(errs.Device,
			"ssd %s: page %d of pack %s at LBA %d+%d: CRC32C %08x, %08x was written; %s",
			x.t.name, page, s.ID, start, per, got, want, pageAdvice(s.ID))
	}
	return nil
}

// RemovePages forgets the pages of a pack on all of the SSDs that have some; their room is free
// again. It returns the names of those SSDs. A removal that was cut off is done again, and a copy
// of a superblock that such a thing has torn is written anew.
func RemovePages(ctx context.Context, ssds []*gpuio.SSD, id uuid.UUID) (from []string, err error) {
	err = withTargets(ctx, ssds, func(ts []*target) error {
		lease, err := holdForPack(ctx, ts, id, true)
		if err != nil {
			return err
		}
		from, err = removePages(ctx, ts, id)
		return errors.Join(err, lease.Close())
	})
	return from, err
}

// holdForPack is holdEach of SSDs with superblocks, to remove a pack from them. alone: nobody else
// reads the dataset that it is of.
func holdForPack(ctx context.Context, ts []*target, id uuid.UUID, alone bool) (*Lease, error) {
	var held []*target
	var of []uuid.UUID
	for _, t := range ts {
		all, err := t.contents(ctx)
		if err != nil {
			return nil, err
		}
		there, of1 := false, id // no dataset has that, so only who writes is in the way
		for i := range all {
			there = there || all[i].err == nil
			if alone && all[i].lists(id) {
				of1 = all[i].sb.UUID
			}
		}
		if there {
			held, of = append(held, t), append(of, of1)
		}
	}
	return holdEach(ctx, held, func(i int) uuid.UUID { return of[i] }, nil)
}

// lists reports whether a copy of the superblock has a pack: where a change was cut off, one may.
func (h *held) lists(id uuid.UUID) bool {
	for k := range h.c.sb {
		if h.c.err[k] == nil && h.c.sb[k].Pages.find(id) >= 0 {
			return true
		}
	}
	return false
}

func removePages(ctx context.Context, ts []*target, id uuid.UUID) ([]string, error) {
	from, there, err := forgetPages(ctx, ts, id)
	if err != nil || len(from) > 0 {
		return from, err
	}
	what := "there are no pages on them"
	if len(there) > 0 {
		what = "there are " + strings.Join(there, "; ")
	}
	return nil, errs.New(errs.Usage, "none of the SSDs has pages of pack %s; %s", id, what)
}

// forgetPages is removePages; there are all pages that SSDs have had.
func forgetPages(ctx context.Context, ts []*target, id uuid.UUID) (from, there []string,
	err error) {
	for _, t := range ts {
		all, err := t.contents(ctx)
		if err != nil {
			return from, there, err
		}
		for i := range all {
			h := &all[i]
			if what := h.sb.Pages.String(); h.err == nil && what != "" {
				there = append(there, t.name+": "+what)
			}
			gone, err := h.forget(ctx, id)
			if err != nil {
				return from, there, fmt.Errorf("ssd %s: %w", t.name, err)
			}
			if gone && !slices.Contains(from, t.name) {
				from = append(from, t.name)
			}
		}
	}
	return from, there, nil
}

// forget takes a pack out of the superblock; false: it has none of it.
func (h *held) forget(ctx context.Context, id uuid.UUID) (bool, error) {
	if h.err != nil || h.sb.State != StateComplete {
		return false, nil // it holds no dataset, so no pages
	}
	if !h.lists(id) {
		return false, h.t.settle(ctx)
	}
	if i := h.sb.Pages.find(id); i >= 0 {
		h.sb.Pages.remove(i)
	}
	return true, h.t.putSuperblocks(ctx, &h.sb)
}
