package stripe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sync"

	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/nvme"
)

// PageStore writes a store of pages beside the rows of a dataset, on all its SSDs. It is a
// packed.Pages, and safe for concurrent use; a page is written by one goroutine at a time. A page
// that was never written is zeros.
type PageStore struct {
	spec    pages.Spec
	all     []*target // that are open
	parts   []*pagePart
	resumed bool
	lease   *Lease

	mu sync.Mutex // of what parts know of pages
}

// pagePart is the share of one SSD.
type pagePart struct {
	t     *target
	sb    Superblock
	start int // of the extent in sb.Pages
	share pageShare
	table []byte // checksums by slot, to a 4 KiB bound
	there []byte // a bit for each slot that was written, to a 4 KiB bound
}

func (p *pagePart) extent() *PageExtent { return &p.sb.Pages.e[p.start] }

// lba returns the first LBA of a slot.
func (p *pagePart) lba(slot int64) nvme.LBA {
	return p.extent().LBA + nvme.LBA(slot*int64(p.share.l.LBAsPerRow))
}

func (p *pagePart) mapLBA() nvme.LBA {
	return p.extent().TableLBA + nvme.LBA(p.share.tableLBAs)
}

// CreatePages makes the pages of s on the SSDs that hold d, in room that nothing of it takes. Pages
// of that pack that were not finished are resumed: they hold what was written before the last Sync,
// and of later writes some, or parts. Finished ones are a *pages.FinishedError of class
// refused, and so are others of that pack than s. Nothing is written before all of it is known to
// have room.
//
// An entry in both superblocks of each SSD says that the pages are being written, before the first
// of them is; one that says that they are complete is written when they and their checksums are
// durable. The entries of different SSDs are not written at once: pages are complete when all say
// so.
func CreatePages(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD,
	s pages.Spec) (*PageStore, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	ts, err := openTargets(ctx, ssds)
	if err != nil {
		return nil, err
	}
	stripes, err := attach(ctx, d, ts, AttachOptions{})
	var lease *Lease
	if err == nil {
		lease, err = holdToWrite(ctx, targetsIn(stripes), d.UUID(), nil)
	}
	var p *PageStore
	if err == nil {
		p, err = createPages(ctx, d, ts, s)
	}
	if err != nil {
		return nil, errors.Join(err, lease.Close(), closeTargets(ctx, ts))
	}
	p.lease = lease
	return p, nil
}

func createPages(ctx context.Context, d *dataset.Dataset, ts []*target,
	s pages.Spec) (*PageStore, error) {
	stripes, err := attach(ctx, d, ts, AttachOptions{})
	if err != nil {
		return nil, err
	}
	p := &PageStore{spec: s, all: ts}
	have, complete := 0, 0
	for _, x := range stripes {
		part := &pagePart{t: x.t, sb: x.sb, start: x.sb.Pages.find(s.ID)}
		if part.share, err = part.sb.pageShare(s); err != nil {
			return nil, err
		}
		p.parts = append(p.parts, part)
		if part.start < 0 {
			continue
		}
		e := part.extent()
		if e.Spec() != s {
			return nil, errs.New(errs.Refused,
				"ssd %s holds %d pages of %d bytes of pack %s, and now they are %d of %d; remove them with \"heliosctl ssds --remove-pages %s\"",
				x.t.name, e.Pages, e.PageBytes, s.ID, s.Pages, s.PageBytes, s.ID)
		}
		have++
		if e.State == StateComplete {
			complete++
		}
	}
	if complete == len(stripes) {
		return nil, errs.With(errs.Refused, &pages.FinishedError{Place: "on the SSDs",
			Remove: fmt.Sprintf("heliosctl ssds --remove-pages %s", s.ID)})
	}
	if have == len(stripes) {
		return p, p.goOn(ctx, complete > 0)
	}
	return p, p.begin(ctx)
}

func targetsIn(stripes []stripe) (ts []*target) {
	for _, s := range stripes {
		ts = append(ts, s.t)
	}
	return ts
}

// each does something with all SSDs at once.
func (p *PageStore) each(ctx context.Context,
	fn func(ctx context.Context, i int, part *pagePart) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, part := range p.parts {
		g.Go(func() error {
			if err := fn(ctx, i, part); err != nil {
				return fmt.Errorf("ssd %s: %w", part.t.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// begin makes the entries. Some SSDs may have one, of a making or a removal that was cut off.
func (p *PageStore) begin(ctx context.Context) error {
	for i, part := range p.parts {
		if part.start >= 0 {
			part.sb.Pages.remove(part.start)
		}
		lba := int64(part.sb.LBABytes)
		start, free, ok, err := part.placePages(ctx, p.parts[:i])
		if err != nil {
			return err
		}
		there := part.sb.Pages.String()
		if there != "" {
			there = "; it holds " + there +
				", which \"heliosctl ssds --remove-pages ID\" removes"
		}
		switch {
		case !ok:
			return errs.New(errs.Usage,
				"ssd %s: pages of pack %s take %s there, and %s are free in one piece%s; use larger SSDs, or a folder",
				part.t.name, p.spec.ID, units.FormatBytes(part.share.all()*lba),
				units.FormatBytes(free*lba), there)
		case part.sb.Pages.n == maxPageExtents:
			return errs.New(errs.Usage, "ssd %s: it has room for the pages of %d packs%s",
				part.t.name, maxPageExtents, there)
		}
		part.start = part.sb.Pages.n
		part.sb.Pages.n++
		*part.extent() = PageExtent{ID: p.spec.ID, State: StateLoading, PageBytes: p.spec.PageBytes,
			Pages: p.spec.Pages, LBA: nvme.LBA(start), LBAs: part.share.lbas,
			TableLBA: nvme.LBA(start + part.share.lbas), TableLBAs: part.share.tableLBAs}
		part.table = make([]byte, part.share.tableLBAs*lba)
		part.there = make([]byte, part.share.mapLBAs*lba)
	}
	if err := p.each(ctx, func(ctx context.Context, _ int, part *pagePart) error {
		// The room may be that of an extent that an older copy of the superblock still lists.
		if err := part.t.settle(ctx); err != nil || part.share.slots == 0 {
			return err
		}
		if err := part.t.dev.WriteAt(ctx, part.mapLBA(), part.there); err != nil {
			return err
		}
		return part.t.dev.Flush(ctx)
	}); err != nil {
		return err
	}
	return p.putAll(ctx)
}

// placePages finds the first room for the part's share, in LBAs, as firstRoom does. Parts before it
// have a place, of which the SSD does not know yet.
func (p *pagePart) placePages(ctx context.Context, before []*pagePart) (start,
	free int64, ok bool, err error) {
	all, err := p.t.contents(ctx)
	if err != nil {
		return 0, 0, false, err
	}
	used, err := taken(all, p.t.slot)
	if err != nil {
		return 0, 0, false, err
	}
	own, err := p.sb.runs()
	if err != nil {
		return 0, 0, false, err
	}
	used = append(used, own...)
	for _, b := range before {
		if b.t.name == p.t.name {
			placed, err := b.sb.runs()
			if err != nil {
				return 0, 0, false, err
			}
			used = append(used, placed...)
		}
	}
	sortRuns(used)
	from, to := p.t.bounds()
	if !p.sb.isShared() {
		from = own[0].to
	}
	start, free, ok = firstRoom(used, from, to, p.share.all())
	return start, free, ok, nil
}

func (p *PageStore) putAll(ctx context.Context) error {
	return p.each(ctx, func(ctx context.Context, _ int, part *pagePart) error {
		return part.t.putSuperblocks(ctx, &part.sb)
	})
}

// settle makes both copies of a superblock say the same, where a change of one was cut off.
func (t *target) settle(ctx context.Context) error {
	c, err := t.readCopies(ctx)
	if err != nil {
		return err
	}
	sb, err := c.settled()
	if err != nil || c.alike() {
		return err
	}
	return t.putSuperblocks(ctx, &sb)
}

// goOn reads what was written. Where some SSDs say complete, finishing was cut off.
func (p *PageStore) goOn(ctx context.Context, reopen bool) error {
	p.resumed = true
	for _, part := range p.parts {
		lba := int64(part.sb.LBABytes)
		part.table = make([]byte, part.share.tableLBAs*lba)
		part.there = make([]byte, part.share.mapLBAs*lba)
		if reopen {
			part.extent().State, part.extent().TableCRC = StateLoading, 0
		}
	}
	if err := p.each(ctx, func(ctx context.Context, _ int, part *pagePart) error {
		if err := part.t.settle(ctx); err != nil || part.share.slots == 0 {
			return err
		}
		if err := part.t.dev.ReadAt(ctx, part.extent().TableLBA, part.table); err != nil {
			return err
		}
		return part.t.dev.ReadAt(ctx, part.mapLBA(), part.there)
	}); err != nil || !reopen {
		return err
	}
	return p.putAll(ctx)
}

// Spec describes the store.
func (p *PageStore) Spec() pages.Spec { return p.spec }

// Resumed reports whether pages were there that are resumed.
func (p *PageStore) Resumed() bool { return p.resumed }

// WriteAt writes whole pages from a page on, all SSDs at once.
func (p *PageStore) WriteAt(ctx context.Context, page int64, data []byte) error {
	if err := p.deal(ctx, page, data, func(ctx context.Context, part *pagePart, slot int64,
		b []byte, first int64) error {
		n := int64(len(p.parts))
		size := p.spec.PageBytes
		if n > 1 {
			for k := int64(0); k*size < int64(len(b)); k++ {
				copy(b[k*size:][:size], data[(first+k*n)*size:])
			}
		} else {
			b = data
		}
		return part.t.dev.WriteAt(ctx, part.lba(slot), b)
	}); err != nil {
		return err
	}
	size, n := p.spec.PageBytes, int64(len(p.parts))
	for ; len(data) > 0; page, data = page+1, data[size:] {
		sum := crc32.Checksum(data[:size], castagnoli)
		part, slot := p.parts[page%n], page/n
		p.mu.Lock()
		binary.LittleEndian.PutUint32(part.table[4*slot:], sum)
		part.there[slot/8] |= 1 << (slot % 8)
		p.mu.Unlock()
	}
	return nil
}

// ReadAt reads whole pages from a page on. They are not checked: after a crash those of the last
// moments are rewritten by whoever goes on.
func (p *PageStore) ReadAt(ctx context.Context, page int64, data []byte) error {
	if err := p.deal(ctx, page, data, func(ctx context.Context, part *pagePart, slot int64,
		b []byte, first int64) error {
		n := int64(len(p.parts))
		if n == 1 {
			return part.t.dev.ReadAt(ctx, part.lba(slot), data)
		}
		if err := part.t.dev.ReadAt(ctx, part.lba(slot), b); err != nil {
			return err
		}
		size := p.spec.PageBytes
		for k := int64(0); k*size < int64(len(b)); k++ {
			copy(data[(first+k*n)*size:][:size], b[k*size:])
		}
		return nil
	}); err != nil {
		return err
	}
	size := p.spec.PageBytes
	for ; len(data) > 0; page, data = page+1, data[size:] {
		if !p.written(page) {
			clear(data[:size])
		}
	}
	return nil
}

// written reports whether a page was.
func (p *PageStore) written(page int64) bool {
	n := int64(len(p.parts))
	slot := page / n
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.parts[page%n].there[slot/8]>>(slot%8)&1 != 0
}

// deal has each SSD move its share of a run of pages: slots from slot on, in b where there is more
// than one SSD. The first of them is page number first of the run.
func (p *PageStore) deal(ctx context.Context, page int64, data []byte, fn func(ctx context.Context,
	part *pagePart, slot int64, b []byte, first int64) error) error {
	if err := p.spec.CheckRun(page, data); err != nil {
		return err
	}
	n, count := int64(len(p.parts)), int64(len(data))/p.spec.PageBytes
	return p.each(ctx, func(ctx context.Context, i int, part *pagePart) error {
		first := (int64(i) - page%n + n) % n
		if first >= count {
			return nil
		}
		var b []byte
		if n > 1 {
			b = make([]byte, (count-first+n-1)/n*p.spec.PageBytes)
		}
		return fn(ctx, part, (page+first)/n, b, first)
	})
}

// Sync makes durable what was written, and then the checksums of it.
func (p *PageStore) Sync(ctx context.Context) error {
	return p.each(ctx, func(ctx context.Context, _ int, part *pagePart) error {
		// The table must not be ahead of the pages: it is taken before they are made durable.
		p.mu.Lock()
		table := append([]byte(nil), part.table...)
		there := append([]byte(nil), part.there...)
		p.mu.Unlock()
		if err := part.t.dev.Flush(ctx); err != nil || part.share.slots == 0 {
			return err
		}
		if err := part.t.dev.WriteAt(ctx, part.extent().TableLBA, table); err != nil {
			return err
		}
		if err := part.t.dev.WriteAt(ctx, part.mapLBA(), there); err != nil {
			return err
		}
		return part.t.dev.Flush(ctx)
	})
}

// Finish is Sync, and says that the pages are whole: from then on they are read only.
func (p *PageStore) Finish(ctx context.Context) error {
	zero := make([]byte, p.spec.PageBytes)
	for page := range p.spec.Pages {
		if p.written(page) {
			continue
		}
		if err := p.WriteAt(ctx, page, zero); err != nil {
			return err
		}
	}
	if err := p.Sync(ctx); err != nil {
		return err
	}
	for _, part := range p.parts {
		e := part.extent()
		e.State, e.TableCRC = StateComplete,
			crc32.Checksum(part.table[:4*part.share.slots], castagnoli)
	}
	return p.putAll(ctx)
}

// Close ends the writing. Pages that are not finished stay, to be resumed.
func (p *PageStore) Close(ctx context.Context) error {
	err := errors.Join(p.lease.Close(), closeTargets(ctx, p.all))
	p.all, p.lease = nil, nil
	return err
}
