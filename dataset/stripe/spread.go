package stripe

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
)

// Row r of a dataset is in stripe r mod n. One stripe on each SSD is fastest, as all SSDs then have
// as many reads. Where an SSD has no room for its stripe, larger SSDs take several, each with its
// own superblock. A load tries up to spreadOver stripes for each SSD. It takes the spread whose
// busiest SSD has the smallest share of the reads; where two are equal, the one of fewer stripes.
const (
	spreadOver  = 2
	fewStripes  = 8   // are always allowed
	mostStripes = 256 // that a run reads
)

// spread holds how many stripes each SSD takes.
type spread []int

func (s spread) stripes() (n int) {
	for _, k := range s {
		n += k
	}
	return n
}

// dealt lists the SSD of each stripe: in turns, as long as each has some left.
func (s spread) dealt() (ssds []int) {
	for k := range slices.Max(s) {
		for i, n := range s {
			if n > k {
				ssds = append(ssds, i)
			}
		}
	}
	return ssds
}

// even reports whether each SSD has one stripe.
func (s spread) even() bool { return s.stripes() == len(s) }

// placed is a stripe that has found room.
type placed struct {
	room  // with its slot
	index int
	disk  int
	start int64 // LBA
	g     geometry
}

// own are the LBAs that it takes.
func (p *placed) own() run { return p.g.own() }

// choosePlaces finds room for all stripes: as they were, where the SSDs hold the dataset whole.
func (w *loader) choosePlaces(rooms []room) ([]placed, error) {
	var all []spread
	if s := keptSpread(rooms); s != nil && !w.o.Restart {
		all = append(all, s)
	}
	even := slices.Repeat(spread{1}, len(rooms))
	limit := min(max(spreadOver*len(rooms), fewStripes), mostStripes)
	all = append(all, even)
	for n := len(rooms) + 1; n <= limit; n++ {
		if s := w.widest(rooms, n); s != nil {
			all = append(all, s)
		}
	}
	from := slices.IndexFunc(all, spread.even)
	slices.SortStableFunc(all[from:], func(a, b spread) int {
		return cmp.Compare(slices.Max(a)*b.stripes(), slices.Max(b)*a.stripes())
	})
	var lacks error
	for i, s := range all {
		p, err := w.fit(rooms, s)
		if err == nil {
			w.tellSpread(rooms, s, i < from)
			return p, nil
		}
		if s.even() {
			lacks = err
		}
	}
	return nil, lacks
}

// tellSpread notes a spread that is not even; kept: the SSDs hold the dataset so.
func (w *loader) tellSpread(rooms []room, s spread, kept bool) {
	if s.even() {
		return
	}
	var parts []string
	for i := range rooms {
		parts = append(parts, fmt.Sprintf("%s %d", rooms[i].t.name, s[i]))
	}
	why := "equal shares have no room, so"
	if kept {
		why = "as before (a restart chooses anew),"
	}
	w.note("%s of %d stripes, and parts of the reads, the SSDs take: %s", why, s.stripes(),
		strings.Join(parts, ", "))
}

// keptSpread returns the spread of the dataset on the SSDs now; nil: they do not hold all of it.
func keptSpread(rooms []room) spread {
	s, count := make(spread, len(rooms)), 0
	for i := range rooms {
		for _, h := range rooms[i].ours {
			if count == 0 {
				count = h.sb.StripeCount
			}
			if h.sb.StripeCount != count {
				return nil
			}
			s[i]++
		}
	}
	if s.stripes() != count || count == 0 || slices.Min(s) == 0 {
		return nil
	}
	return s
}

// widest is the spread of n stripes that gives the busiest SSD the fewest; nil: there is no room,
// or an SSD has too few queue pairs.
func (w *loader) widest(rooms []room, n int) spread {
	_, g, err := w.shapeOf(n, 0, rooms[0].t.lbaBytes, maxStripe/uint64(rooms[0].t.lbaBytes))
	if err != nil {
		return nil
	}
	own := g.own()
	s, fits := make(spread, len(rooms)), make([]int64, len(rooms))
	for i := range rooms {
		s[i] = 1
		used, err := taken(rooms[i].others(), -1)
		if err != nil {
			return nil
		}
		from, to := rooms[i].t.bounds()
		for _, r := range append(used, run{to, to}) {
			fits[i] += max(r.from-from, 0) / (own.to - own.from)
			from = max(from, r.to)
		}
		fits[i] = min(fits[i], int64(rooms[i].t.pairs))
	}
	for s.stripes() < n {
		to := -1
		for i := range s {
			if int64(s[i]) < fits[i] && (to < 0 || s[i] < s[to]) {
				to = i
			}
		}
		if to < 0 {
			return nil
		}
		s[to]++
	}
	return s
}

// shapeOf lays rows out over n stripes, and finds what one of them takes.
func (w *loader) shapeOf(n, stripe, lbaBytes int, lbas uint64) (l gpuio.Layout, g geometry,
	err error) {
	l, err = gpuio.NewLayout(w.d.Meta.Rows(), w.rt.RowBytes(w.d.Meta.Dim), n, lbaBytes)
	if err == nil {
		g, err = newGeometry(l, stripe, lbaBytes, lbas, rowEntry(w.rt, !w.o.NoRowChecksums))
	}
	return l, g, err
}

// fit finds room for a spread.
func (w *loader) fit(rooms []room, s spread) (out []placed, err error) {
	ssds := s.dealt()
	lba := rooms[0].t.lbaBytes
	w.l, _, err = w.shapeOf(len(ssds), 0, lba, maxStripe/uint64(lba))
	if err != nil {
		return nil, err
	}
	out = make([]placed, len(ssds))
	for i := range rooms {
		var mine []*placed
		for k, disk := range ssds {
			if disk == i {
				out[k] = placed{room: rooms[i], index: k, disk: i}
				mine = append(mine, &out[k])
			}
		}
		if err := w.fitOn(&rooms[i], mine); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// fitOn finds room for stripes on an SSD, and slots for their superblocks. A stripe stays where it
// was; others take the first room. Where stripes that stay leave too little of it, none does.
func (w *loader) fitOn(r *room, mine []*placed) error {
	r.settleSlots(w.l.SSDs, mine)
	err := w.fitStripes(r, mine, true)
	if err != nil && len(mine) > 1 {
		err = w.fitStripes(r, mine, false)
	}
	return err
}

func (w *loader) fitStripes(r *room, mine []*placed, stay bool) error {
	used, err := taken(r.others(), -1)
	if err != nil {
		return err
	}
	slices.SortStableFunc(mine, func(a, b *placed) int { return cmp.Compare(b.known(), a.known()) })
	for _, p := range mine {
		if p.t == nil {
			return errs.New(errs.Refused,
				"ssd %s (serial %s) has superblocks for %d stripes, and no room for more; \"heliosctl unload\" frees what you name",
				r.t.name, r.t.serial, maxDatasets)
		}
		if p.g, err = w.findRoom(p, used, stay); err != nil {
			return err
		}
		used = append(used, p.own())
		sortRuns(used)
	}
	return nil
}

// known is 1 where the slot has a superblock of the dataset.
func (p *placed) known() int {
	if p.c.err[0] == nil || p.c.err[1] == nil {
		return 1
	}
	return 0
}

// settleSlots gives each stripe the slot of its superblock: the one that it has, else one that the
// dataset leaves, else a free one; nil: there is none.
func (r *room) settleSlots(stripes int32, mine []*placed) {
	left := slices.Clone(r.ours)
	take := func(p *placed, i int) {
		p.t, p.c = left[i].t, left[i].c
		left = slices.Delete(left, i, i+1)
	}
	for _, p := range mine {
		p.t, p.c = nil, copies{err: [2]error{ErrNoSuperblock, ErrNoSuperblock}}
		if i := slices.IndexFunc(left, func(h held) bool {
			return h.sb.StripeIndex == p.index && h.sb.StripeCount == int(stripes)
		}); i >= 0 {
			take(p, i)
		}
	}
	free := 0
	for _, p := range mine {
		if p.t == nil && len(left) > 0 {
			take(p, 0)
		}
		for ; p.t == nil && free < maxDatasets; free++ {
			if !slices.ContainsFunc(r.all, func(h held) bool {
				return h.t.slot == free && h.takesSlot()
			}) {
				p.t = r.t.inSlot(free)
			}
		}
	}
	if r.all == nil {
		mine[0].c = r.c
	}
}

// findRoom places one stripe beside what is used; stay: where it was, if it can be.
func (w *loader) findRoom(p *placed, used []run, stay bool) (g geometry, err error) {
	t := p.t
	n := int(w.l.SSDs)
	_, whole, err := w.shapeOf(n, p.index, t.lbaBytes, t.lbas)
	if err != nil {
		return g, errs.Errorf(
			"ssd %s is too small for its share (stripe %d of %d): %w, and more, smaller stripes have no room or queue pairs; bind larger SSDs or more of them, or leave small ones out with {ssds}",
			t.name, p.index, n, err)
	}
	own := whole.own()
	need := own.to - own.from
	from, to := t.bounds()
	start, free, ok := firstRoom(used, from, to, need)
	if old := &p.c.sb[0]; stay && p.c.err[0] == nil && isOurs(w.d, old) {
		was := run{int64(old.DataLBA), int64(old.DataLBA) + need}
		if was.to <= to && !slices.ContainsFunc(used, was.meets) {
			start, ok = was.from, true
		}
	}
	if lba := int64(t.lbaBytes); !ok {
		return g, errs.New(errs.Refused,
			"ssd %s (serial %s) holds %s beside which %s are free in one piece, and %s takes %s; \"heliosctl unload\" frees what you name, and {force} %s overwrites all that is there",
			t.name, t.serial, owners(p.others()), units.FormatBytes(free*lba), w.d.Dir(),
			units.FormatBytes(need*lba), t.forceName())
	}
	return geometryAt(start*int64(t.lbaBytes), w.l, p.index, t.lbaBytes, t.lbas,
		rowEntry(w.rt, !w.o.NoRowChecksums))
}

// onDisk are the stripes of an SSD, by slot.
func (w *loader) onDisk(disk int) (stripes []int) {
	for i := range w.places {
		if w.places[i].disk == disk {
			stripes = append(stripes, i)
		}
	}
	slices.SortFunc(stripes, func(a, b int) int {
		return cmp.Compare(w.places[a].t.slot, w.places[b].t.slot)
	})
	return stripes
}

// freeLeftover frees superblocks of the dataset that must go before the load writes an SSD's: those
// in slots that it does not write, and those with room that another stripe takes now.
func (w *loader) freeLeftover(ctx context.Context, r *room, stripes []int) error {
	for i := range r.ours {
		h := &r.ours[i]
		old, err := h.sb.runs()
		if err != nil {
			return err
		}
		written, lost := false, false
		for _, i := range stripes {
			own := w.geo[i].own()
			if w.ts[i].slot == h.t.slot {
				written = true
				continue
			}
			lost = lost || slices.ContainsFunc(old, own.meets)
		}
		if written && !lost {
			continue
		}
		if err := h.free(ctx); err != nil {
			return err
		}
	}
	return nil
}
