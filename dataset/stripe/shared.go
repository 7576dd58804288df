package stripe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/google/uuid"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/signatures"
	"helios/internal/units"
	"helios/nvme"
)

// An SSD may hold several datasets. The superblock of the first lies at both ends of the SSD; those
// of more lie in slots among the zeros beside it, 4 KiB each, in the head from slotsAt on, and
// again as far before the end. A flag in slot 0 announces more (Shared), so a heliosctl that does
// not know of them refuses the SSD by its version. A superblock stays when its dataset is unloaded,
// in state free, until another takes the slot. A dataset's rows, checksums and pages take the first
// room that no other dataset has.
const (
	slotsAt     = 256 << 10
	maxDatasets = 32 // the slots end before the leases
)

// isShared reports whether the superblock needs the version of shared SSDs.
func (s *Superblock) isShared() bool {
	return s.Shared || s.State == StateFree || s.LBABytes > 0 &&
		int64(s.DataLBA)*int64(s.LBABytes) != headBytes
}

// copyLBA returns the place of a copy of the superblock in the target's slot.
func (t *target) copyLBA(second int) nvme.LBA {
	lba := nvme.LBA(0)
	if t.slot > 0 {
		lba = nvme.LBA((slotsAt + (t.slot-1)*superblockBytes) / t.lbaBytes)
	}
	if second == 1 {
		lba = secondCopy(t.lbaBytes, t.lbas) - lba
	}
	return lba
}

// inSlot is the target for the dataset in a slot.
func (t *target) inSlot(slot int) *target {
	there := *t
	there.slot = slot
	return &there
}

// held is a dataset's stripe on an SSD, as its superblocks say.
type held struct {
	t    *target // with its slot
	sb   Superblock
	c    copies
	note string
	err  error // no copy of the superblock can be used
}

// takesSlot reports whether a superblock must stay.
func (h *held) takesSlot() bool {
	return h.there() || h.err != nil && !(h.t.slot == 0 && noSuperblock(&h.c))
}

// there reports whether the stripe has a dataset's extents, whole or not.
func (h *held) there() bool { return h.err == nil && h.sb.State != StateFree }

// contents reads all superblocks of an SSD: that of slot 0 always, and of the other slots those
// that are taken.
func (t *target) contents(ctx context.Context) ([]held, error) {
	read := func(slot int) (h held, err error) {
		h.t = t.inSlot(slot)
		if h.c, err = h.t.readCopies(ctx); err == nil {
			h.sb, h.note, h.err = h.c.best()
		}
		return h, err
	}
	first, err := read(0)
	if err != nil {
		return nil, err
	}
	all := []held{first}
	if first.err == nil && !first.sb.Shared || noSuperblock(&first.c) {
		return all, nil
	}
	// All slots in one read of each end: an unreadable sector has them read one by one.
	n := (maxDatasets - 1) * superblockBytes
	ends := [2][]byte{make([]byte, n), make([]byte, n)}
	whole := t.dev.ReadAt(ctx, t.inSlot(1).copyLBA(0), ends[0]) == nil &&
		t.dev.ReadAt(ctx, t.inSlot(maxDatasets-1).copyLBA(1), ends[1]) == nil
	for slot := 1; slot < maxDatasets; slot++ {
		start := (slot - 1) * superblockBytes
		second := signatures.Blank(ends[1][n-start-superblockBytes:][:superblockBytes])
		if whole && second && signatures.Blank(ends[0][start:][:superblockBytes]) {
			continue
		}
		h, err := read(slot)
		if err != nil {
			return nil, err
		}
		// One alone that is torn was the first that a load wrote there when it was cut off.
		// Anything else is a dataset that is damaged: its room is not free.
		if h.err == nil || whole && !second || !errors.Is(h.c.err[1], ErrNoSuperblock) {
			all = append(all, h)
		}
	}
	return all, overlaps(t, all)
}

// noSuperblock reports whether both copies were read and neither is one.
func noSuperblock(c *copies) bool {
	return errors.Is(c.err[0], ErrNoSuperblock) && errors.Is(c.err[1], ErrNoSuperblock)
}

// run is a run of LBAs of an SSD.
type run struct{ from, to int64 }

// meets reports whether two runs have LBAs in common.
func (r run) meets(x run) bool { return x.from < r.to && r.from < x.to }

// runs are the LBAs that the stripe's rows, checksums and pages take.
func (s *Superblock) runs() ([]run, error) {
	g, err := s.geometry()
	if err != nil {
		return nil, err
	}
	out := []run{g.own()}
	for _, e := range s.Pages.All() {
		out = append(out, run{int64(e.LBA), int64(s.endOf(e))})
	}
	return out, nil
}

// own are the LBAs of a stripe's rows and checksums.
func (g *geometry) own() run {
	return run{int64(g.dataLBA), (g.needBytes - tailBytes) / int64(g.lbaBytes)}
}

// taken are the LBAs of all datasets but the one in a slot, by place.
func taken(all []held, slot int) (out []run, err error) {
	for i := range all {
		if h := &all[i]; h.there() && h.t.slot != slot {
			r, err := h.sb.runs()
			if err != nil {
				return nil, err
			}
			out = append(out, r...)
		}
	}
	sortRuns(out)
	return out, nil
}

func sortRuns(r []run) {
	slices.SortFunc(r, func(a, b run) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
}

// overlaps refuses superblocks whose extents are each other's.
func overlaps(t *target, all []held) error {
	out, err := taken(all, -1)
	for i := 1; i < len(out) && err == nil; i++ {
		if out[i].from < out[i-1].to {
			return errs.New(errs.Device,
				"ssd %s: its superblocks give LBA %d to two datasets; see \"heliosctl verify\", and load them again with {force} %s",
				t.name, out[i].from, t.forceName())
		}
	}
	return err
}

// firstRoom finds the first room for need LBAs between from and to that nobody has taken; used is
// by place. free is the longest piece of room where none is long enough.
func firstRoom(used []run, from, to, need int64) (start, free int64, ok bool) {
	for _, r := range used {
		if r.from-from >= need {
			return from, 0, true
		}
		free = max(free, r.from-from)
		from = max(from, r.to)
	}
	return from, max(free, to-from), to-from >= need
}

// bounds are the LBAs between the zeros at both ends of an SSD.
func (t *target) bounds() (from, to int64) {
	lba := int64(t.lbaBytes)
	return headBytes / lba, (t.bytes()/alignBytes*alignBytes - tailBytes) / lba
}

// putShared sets or clears the flag of more superblocks in slot 0.
func (t *target) putShared(ctx context.Context, shared bool) error {
	first := t.inSlot(0)
	c, err := first.readCopies(ctx)
	if err != nil {
		return err
	}
	sb, err := c.settled()
	if err != nil || sb.Shared == shared && c.alike() {
		return err
	}
	sb.Shared = shared
	return first.putSuperblocks(ctx, &sb)
}

// settleOthers makes both copies of the other superblocks say the same: what one that is out of
// date lists may be room that a load takes.
func (t *target) settleOthers(ctx context.Context) error {
	all, err := t.contents(ctx)
	for i := 0; i < len(all) && err == nil; i++ {
		if h := &all[i]; h.err == nil && h.t.slot != t.slot {
			err = h.t.settle(ctx)
		}
	}
	return err
}

// Content is a dataset's stripe on an SSD, and what is lost of its second superblock and of its
// checksum tables. The first of an SSD also lists other datasets whose superblocks are lost.
type Content struct {
	Superblock
	Lost []string
}

// Contents reads what an SSD holds, and the bytes of its longest piece of free room. Its error is
// of class device when there is no superblock.
func Contents(ctx context.Context, s *gpuio.SSD) (out []Content, free int64, err error) {
	err = withTargets(ctx, []*gpuio.SSD{s}, func(ts []*target) error {
		out, free, err = ts[0].listed(ctx, true)
		return err
	})
	return out, free, err
}

// ContentsFrom is Contents for a disk that is read by other means, such as its block device: r of
// lbas LBAs. name is the disk in messages. Tables are not read.
func ContentsFrom(ctx context.Context, name string, r io.ReaderAt, lbaBytes int,
	lbas uint64) ([]Content, int64, error) {
	t := &target{dev: readOnly{name, r, lbaBytes}, name: name, lbaBytes: lbaBytes, lbas: lbas}
	return t.listed(ctx, false)
}

func (t *target) listed(ctx context.Context, tables bool) (out []Content, free int64, err error) {
	all, err := t.contents(ctx)
	if err != nil {
		return nil, 0, err
	}
	var damaged []string // slots, whose neighbours are whole
	for i := range all {
		h := &all[i]
		if h.err != nil && h.t.slot > 0 {
			damaged = append(damaged, fmt.Sprintf("the dataset in slot %d: %v: \"heliosctl unload %s:%d\" frees its room",
				h.t.slot, h.err, t.forceName(), h.t.slot))
			continue
		}
		if h.err != nil {
			how := errs.Text("load")
			if !errors.Is(h.err, ErrNoSuperblock) { // what it holds is not known
				how = errs.Textf("load {force} %s", t.forceName())
			}
			return nil, 0, errs.New(errs.Device,
				"ssd %s: %w; load a dataset onto it with \"heliosctl %s\"", t.name, h.err, how)
		}
		if !h.there() {
			continue
		}
		c := Content{Superblock: h.sb}
		if tables && h.sb.State == StateComplete {
			if c.Lost, err = (stripe{h.t, h.sb}).lostTables(ctx, true, true); err != nil {
				return nil, 0, err
			}
			if h.note != "" {
				c.Lost = append([]string{h.note}, c.Lost...)
			}
		}
		out = append(out, c)
	}
	if len(damaged) > 0 && len(out) == 0 {
		return nil, 0, errs.New(errs.Device, "ssd %s: %s", t.name, strings.Join(damaged, "; "))
	}
	if len(damaged) > 0 {
		out[0].Lost = append(out[0].Lost, damaged...)
	}
	used, err := taken(all, -1)
	if err != nil {
		return nil, 0, err
	}
	from, to := t.bounds()
	_, free, _ = firstRoom(used, from, to, to)
	return out, free * int64(t.lbaBytes), nil
}

// Unload forgets a dataset, with its pages, on all of the SSDs that hold stripes of it; their room
// is free again. It returns the names of those SSDs. It is refused while another process uses the
// dataset. The next one finishes an unloading that was cut off.
func Unload(ctx context.Context, ssds []*gpuio.SSD, dataset uuid.UUID) (from []string, err error) {
	err = withTargets(ctx, ssds, func(ts []*target) error {
		var ours []*target
		for _, t := range ts {
			all, err := t.contents(ctx)
			if err != nil {
				return err
			}
			for _, h := range all {
				if h.err == nil && h.sb.UUID == dataset {
					if h.sb.computed() {
						return errs.New(errs.Refused,
							"ssd %s computes its rows and holds no others; \"heliosctl unbind-ssds\" removes it",
							t.name)
					}
					ours = append(ours, h.t)
				}
			}
		}
		lease, err := holdToWrite(ctx, ours, dataset, nil)
		if err != nil {
			return err
		}
		for _, t := range ours {
			if err := t.unload(ctx, dataset); err != nil {
				return errors.Join(fmt.Errorf("ssd %s: %w", t.name, err), lease.Close())
			}
		}
		from = namesOf(ours)
		return lease.Close()
	})
	return from, err
}

// UnloadSlot forgets a dataset whose superblocks are lost: an SSD's, by its serial number, and the
// slot, as Contents names it. It is refused while another process uses the SSD.
func UnloadSlot(ctx context.Context, ssds []*gpuio.SSD, serial string, slot int) error {
	return withTargets(ctx, ssds, func(ts []*target) error {
		i := slices.IndexFunc(ts, func(t *target) bool { return t.forceName() == serial })
		if i < 0 || slot < 1 || slot >= maxDatasets {
			return errs.New(errs.Usage, "no bound SSD %s has a slot %d", serial, slot)
		}
		t := ts[i].inSlot(slot)
		lease, err := holdToWrite(ctx, []*target{t}, uuid.Nil, nil)
		if err != nil {
			return err
		}
		return errors.Join(t.unloadLost(ctx), lease.Close())
	})
}

func (t *target) unloadLost(ctx context.Context) error {
	all, err := t.contents(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(h held) bool { return h.t.slot == t.slot })
	if i < 0 || all[i].err == nil {
		return errs.New(errs.Usage, "ssd %s: the superblocks of slot %d are not lost; \"heliosctl ssds\" lists what is there",
			t.name, t.slot)
	}
	for copy := range 2 {
		if err := t.dev.WriteAt(ctx, t.copyLBA(copy), make([]byte, superblockBytes)); err != nil {
			return err
		}
		if err := t.dev.Flush(ctx); err != nil {
			return err
		}
	}
	return t.lessShared(ctx, all)
}

// lessShared clears the flag of more superblocks where no slot beside the target's has one.
func (t *target) lessShared(ctx context.Context, all []held) error {
	for i := range all {
		h := &all[i]
		if h.t.slot != t.slot && h.t.slot > 0 && (h.there() || h.err != nil) {
			return nil
		}
	}
	return t.putShared(ctx, false)
}

// unload frees the target's slot, where it holds that dataset still.
func (t *target) unload(ctx context.Context, dataset uuid.UUID) error {
	all, err := t.contents(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(h held) bool { return h.t.slot == t.slot })
	if i < 0 || all[i].err != nil || all[i].sb.UUID != dataset {
		return nil // somebody was faster
	}
	if err := all[i].free(ctx); err != nil {
		return err
	}
	return t.lessShared(ctx, all)
}

// free gives up what the superblock describes.
func (h *held) free(ctx context.Context) error {
	h.sb.State, h.sb.Mark, h.sb.Pages = StateFree, Mark{}, PageList{}
	return h.t.putSuperblocks(ctx, &h.sb)
}

// Bytes counts what the stripe takes of its SSD: rows, checksums and pages.
func (s *Superblock) Bytes() (n int64) {
	r, _ := s.runs() // they were checked when it was decoded
	for _, x := range r {
		n += (x.to - x.from) * int64(s.LBABytes)
	}
	return n
}

// owners lists the datasets of an SSD for messages.
func owners(all []held) string {
	var out []string
	for i := range all {
		if h := &all[i]; h.there() {
			out = append(out, fmt.Sprintf("%q (%s, %s)", h.sb.Name, h.sb.UUID,
				units.FormatBytes(h.sb.Bytes())))
		}
	}
	return strings.Join(out, ", ")
}
