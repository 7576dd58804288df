package stripe

import (
	"context"
	"fmt"
	"hash/crc32"
	"slices"
	"sort"
	"strings"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
)

// AttachOptions shape Find.
type AttachOptions struct {
	// Note hears of oddities that are no errors: a superblock that had to be read from its second
	// copy, an SSD that is not part of the dataset. Nil is silent.
	Note func(string)
	// Tables has Note hear of a damaged table of chunk checksums, which verify alone needs, and
	// RowTables of a damaged row table; each is read for that.
	Tables, RowTables bool
}

// Attach is Find without options, for those who need no more than the layout and the SSDs.
func Attach(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD) (gpuio.Layout, []*gpuio.SSD,
	error) {
	a, err := Find(ctx, d, ssds, AttachOptions{})
	return a.Layout, a.SSDs, err
}

// Attached is a dataset as it is on SSDs.
type Attached struct {
	Layout  gpuio.Layout
	SSDs    []*gpuio.SSD // by stripe: one that has several is there for each
	RowType rowtype.Type // of the rows there: Layout.RowBytes is their size
	// Unchecked is the reason that rows are not compared with checksums unless that is asked for;
	// "": all have one, of what was stored.
	Unchecked string
	loads     uuid.UUID // the load that they are of
	uuid      uuid.UUID // of the dataset
	slots     []int     // of the superblocks, by SSD
}

// Find finds the dataset on the SSDs: it reads and checks all superblocks of each, and returns the
// SSDs by stripe, with their DataStart. SSDs that hold nothing of this dataset are left out, as
// long as all its stripes are there. Errors are of class device when stripes are missing,
// incomplete or damaged, and refused when the SSDs hold other datasets.
func Find(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, o AttachOptions) (a Attached,
	err error) {
	err = withStripes(ctx, d, ssds, o, func(found []stripe) error {
		for _, f := range found {
			ssd := *f.t.ssd // other datasets begin elsewhere on it
			ssd.DataStart = f.sb.DataLBA
			a.SSDs = append(a.SSDs, &ssd)
			a.slots = append(a.slots, f.t.slot)
		}
		a.uuid = d.UUID()
		a.Layout, a.RowType = found[0].sb.layout(), found[0].sb.RowType
		a.loads = found[0].sb.LoadID
		a.Unchecked = withoutSums(d, found)
		if found[0].sb.computed() && d.FeatureFunc() != nil { // nobody loads them
			a.Unchecked = "the SSDs compute rows and checksums when they are read"
		}
		return nil
	})
	return a, err
}

// Absent reports whether no SSD holds a stripe of the dataset, and all could be read: a damaged one
// may hold it.
func Absent(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD) (absent bool, err error) {
	err = withTargets(ctx, ssds, func(ts []*target) error {
		s, err := findStripes(ctx, d, ts, func(string, ...any) {})
		absent = err == nil && len(s.found) == 0 && !s.damaged
		return err
	})
	return absent, err
}

// withStripes gives fn the stripes of d.
func withStripes(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, o AttachOptions,
	fn func(stripes []stripe) error) error {
	return withTargets(ctx, ssds, func(ts []*target) error {
		stripes, err := attach(ctx, d, ts, o)
		if err != nil {
			return err
		}
		return fn(stripes)
	})
}

// MissingError is that of a dataset of which some stripes are on none of the SSDs.
type MissingError struct {
	Dataset string
	Stripes int      // it has
	Missing []string // their numbers
	Seen    []string // what the other SSDs hold
	Advice  string   // what to do; the text ends in it
}

func (e *MissingError) Error() string {
	seen := strings.Join(e.Seen, ", ")
	if seen != "" {
		seen = " (" + seen + ")"
	}
	return fmt.Sprintf("dataset %s has %d stripes, stripe %s is missing%s; %s", e.Dataset,
		e.Stripes, strings.Join(e.Missing, ", "), seen, e.Advice)
}

// stripe is an SSD with the superblock that it carries.
type stripe struct {
	t  *target
	sb Superblock
}

// attach returns the stripes in order.
func attach(ctx context.Context, d *dataset.Dataset, ts []*target, o AttachOptions) ([]stripe,
	error) {
	note := func(format string, a ...any) {
		if o.Note != nil {
			o.Note(fmt.Sprintf(format, a...))
		}
	}
	s, err := findStripes(ctx, d, ts, note)
	if err != nil {
		return nil, err
	}
	if len(s.found) == 0 {
		return nil, s.noneFound(d)
	}
	for _, f := range s.found {
		if err := s.fits(d, ts, f); err != nil {
			return nil, err
		}
	}
	if err := s.complete(d); err != nil {
		return nil, err
	}
	for _, left := range append(s.others, s.unusable...) {
		note("not used: %s", left)
	}
	if o.Note == nil {
		return s.found, nil
	}
	for _, f := range s.found {
		lost, err := f.lostTables(ctx, o.Tables, o.RowTables)
		if err != nil {
			return nil, err
		}
		for _, what := range lost {
			note("ssd %s: %s", f.t.name, what)
		}
	}
	return s.found, nil
}

// search holds what SSDs say when a dataset is looked for on them.
type search struct {
	found    []stripe // of the dataset, by place
	others   []string // SSDs with something else
	foreign  bool     // which is another dataset
	unusable []string // SSDs with no superblock that can be read
	damaged  bool     // some of them have one
}

func findStripes(ctx context.Context, d *dataset.Dataset, ts []*target,
	note func(format string, a ...any)) (s search, err error) {
	for _, t := range ts {
		all, err := t.contents(ctx)
		if err != nil && ctx.Err() != nil {
			return s, err
		}
		if err != nil {
			s.unusable = append(s.unusable, fmt.Sprintf("%s: %v", t.name, err))
			s.damaged = true
			continue
		}
		s.sort(d, t, all, note)
	}
	var left []stripe
	s.found, left = wholeSet(d, s.found)
	for _, f := range left {
		s.others = append(s.others, fmt.Sprintf("%s holds stripe %d of %d of another load of %s%s",
			f.t.name, f.sb.StripeIndex, f.sb.StripeCount, d.Dir(), f.sb.unfinished()))
	}
	return s, nil
}

// sort finds the dataset among those of an SSD.
func (s *search) sort(d *dataset.Dataset, t *target, all []held,
	note func(format string, a ...any)) {
	var others []string
	ours := false
	for _, h := range all {
		switch {
		case h.err != nil:
			s.unusable = append(s.unusable, fmt.Sprintf("%s: %v", t.name, h.err))
			s.damaged = s.damaged || !noSuperblock(&h.c)
		case h.sb.State == StateFree:
			if len(all) == 1 {
				s.unusable = append(s.unusable, t.name+": its dataset was unloaded")
			}
		case h.sb.UUID != d.UUID():
			others = append(others, fmt.Sprintf("%s holds stripe %d of %d of dataset %q (%s)",
				t.name, h.sb.StripeIndex, h.sb.StripeCount, h.sb.Name, h.sb.UUID))
		default:
			if h.note != "" {
				note("ssd %s: %s", t.name, h.note)
			}
			s.found = append(s.found, stripe{h.t, h.sb})
			ours = true
		}
	}
	if ours { // what else is there disturbs nobody
		return
	}
	s.foreign = s.foreign || len(others) > 0
	s.others = append(s.others, others...)
}

// reload advises to load the dataset again.
func reload(d *dataset.Dataset) string {
	return fmt.Sprintf("run %q", "heliosctl load --dataset "+d.Dir())
}

// noneFound is the error where no SSD holds a stripe of the dataset.
func (s *search) noneFound(d *dataset.Dataset) error {
	if s.foreign {
		return errs.New(errs.Refused,
			"the SSDs hold another dataset than %s (%s): %s; bind the right SSDs or %s",
			d.Dir(), d.UUID(), strings.Join(s.others, ", "), reload(d))
	}
	return errs.New(errs.Device, "dataset %s is on none of the SSDs (%s); %s", d.Dir(),
		strings.Join(s.unusable, ", "), reload(d))
}

// fits refuses a stripe that is not loaded whole, or not with rows as the dataset and the first
// stripe have them.
func (s *search) fits(d *dataset.Dataset, ts []*target, f stripe) error {
	rows, dim := d.Meta.Stored()
	first, want := s.found[0], f.sb.RowType.RowBytes(dim)
	switch {
	case f.sb.State != StateComplete:
		return errs.New(errs.Device,
			"ssd %s: loading dataset %s onto it did not finish%s; run %q", f.t.name, d.Dir(),
			f.sb.howFar(), s.loadAgain(d, ts, f))
	case f.sb.DType != d.Meta.RowType():
		return errs.New(errs.Device,
			"ssd %s holds rows that were made from %s, those of dataset %s are %s; %s",
			f.t.name, f.sb.DType, d.Dir(), d.Meta.RowType(), reload(d))
	case f.sb.RowBytes != want || f.sb.Rows != rows:
		return errs.New(errs.Device,
			"ssd %s holds %d rows of %d bytes, dataset %s has %d of %d (as %s); %s",
			f.t.name, f.sb.Rows, f.sb.RowBytes, d.Dir(), rows, want,
			f.sb.RowType, reload(d))
	case f.sb.StripeCount != first.sb.StripeCount || f.sb.LoadID != first.sb.LoadID ||
		f.sb.LBABytes != first.sb.LBABytes:
		return errs.New(errs.Device,
			"ssds %s and %s hold stripes of different loads of %s (stripe %d of %d, stripe %d of %d); choose those of one load with {ssds}, or load it again onto the SSDs that shall hold it, named in the same way",
			first.t.name, f.t.name, d.Dir(), first.sb.StripeIndex, first.sb.StripeCount,
			f.sb.StripeIndex, f.sb.StripeCount)
	}
	return nil
}

// loadAgain is the command that resumes a load: with the options that it was begun with, or it
// starts over.
func (s *search) loadAgain(d *dataset.Dataset, ts []*target, f stripe) string {
	again := "heliosctl load --dataset " + d.Dir() + onto(ts, ofLoad(s.found, &f.sb))
	if f.sb.RowType != d.Meta.RowType() {
		again += " " + errs.Key("row-dtype").Flag() + " " + f.sb.RowType.String()
	}
	if !f.sb.hasRowSums() {
		again += " " + errs.Key("row-checksums").Flag() + "=false"
	}
	return again
}

// complete refuses stripes that are there twice, or not all.
func (s *search) complete(d *dataset.Dataset) error {
	have := map[int]string{}
	for _, f := range s.found {
		if other, twice := have[f.sb.StripeIndex]; twice {
			return errs.New(errs.Device,
				"ssds %s and %s both hold stripe %d of %s; choose one with {ssds}", other, f.t.name,
				f.sb.StripeIndex, d.Dir())
		}
		have[f.sb.StripeIndex] = f.t.name
	}
	stripes := s.found[0].sb.StripeCount
	var missing []string
	for i := range stripes {
		if _, ok := have[i]; !ok {
			missing = append(missing, fmt.Sprint(i))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return errs.With(errs.Device, &MissingError{Dataset: d.Dir(), Stripes: stripes,
		Missing: missing, Seen: append(s.others, s.unusable...),
		Advice: "bind the SSD that holds it or " + reload(d)})
}

// wholeSet orders stripes by their place. Where those of one load alone make the dataset whole, it
// parts them from the others, which are left of other loads.
func wholeSet(d *dataset.Dataset, found []stripe) (set, left []stripe) {
	sort.SliceStable(found,
		func(i, j int) bool { return found[i].sb.StripeIndex < found[j].sb.StripeIndex })
	for _, f := range found {
		of := ofLoad(found, &f.sb)
		if f.sb.StripeIndex != 0 || len(of) != f.sb.StripeCount {
			continue
		}
		whole := true
		for i, x := range of {
			whole = whole && x.sb.StripeIndex == i && x.sb.State == StateComplete &&
				x.sb.DType == d.Meta.RowType() && x.sb.Rows == d.Meta.Rows() &&
				x.sb.RowBytes == x.sb.RowType.RowBytes(d.Meta.Dim)
		}
		switch {
		case !whole:
		case set != nil:
			return found, nil // two are: somebody has to choose
		default:
			set = of
		}
	}
	if set == nil {
		return found, nil
	}
	for _, f := range found {
		if f.sb.LoadID != set[0].sb.LoadID {
			left = append(left, f)
		}
	}
	return set, left
}

// namesOf names each SSD once.
func namesOf(ts []*target) (names []string) {
	for _, t := range ts {
		if !slices.Contains(names, t.name) {
			names = append(names, t.name)
		}
	}
	return names
}

// ofLoad are those of the stripes that a load has written together.
func ofLoad(found []stripe, sb *Superblock) (of []stripe) {
	for _, f := range found {
		if f.sb.LoadID == sb.LoadID && f.sb.StripeCount == sb.StripeCount &&
			f.sb.LBABytes == sb.LBABytes {
			of = append(of, f)
		}
	}
	return of
}

// onto names the SSDs of a load where they are not all that there are.
func onto(ts []*target, of []stripe) string {
	names := namesOf(targetsIn(of))
	if len(names) == len(ts) || len(of) != of[0].sb.StripeCount {
		return ""
	}
	return " " + errs.Key("ssds").Flag() + " " + strings.Join(names, ",")
}

// lostTables lists the checksum tables of a stripe that its superblock does not describe.
// SSDs that compute their content lose none.
func (s stripe) lostTables(ctx context.Context, chunks, rows bool) (lost []string, err error) {
	if s.sb.computed() {
		return nil, nil
	}
	if chunks {
		_, err := s.chunkTable(ctx)
		if err != nil && ctx.Err() != nil {
			return nil, err
		} else if err != nil {
			lost = append(lost, fmt.Sprintf("checksums of chunks: %v; verify needs them, load writes them",
				err))
		}
	}
	if rows && s.sb.rowEntry() > 0 {
		err := s.rowTable(ctx, func(int64, uint32, float32) {})
		if err != nil && ctx.Err() != nil {
			return nil, err
		} else if err != nil {
			lost = append(lost, fmt.Sprintf("%s: %v; load writes them", s.sb.rowTableName(), err))
		}
	}
	return lost, nil
}

// chunkTable reads the checksums of chunks and checks them.
func (s stripe) chunkTable(ctx context.Context) ([]byte, error) {
	lba := int64(s.sb.LBABytes)
	chunks := (s.sb.DataLBAs*lba + chunkBytes - 1) / chunkBytes
	table := make([]byte, s.sb.TableLBAs*lba)
	if err := s.t.dev.ReadAt(ctx, s.sb.TableLBA, table); err != nil {
		return nil, err
	}
	if got := crc32.Checksum(table[:4*chunks], castagnoli); got != s.sb.TableCRC {
		return nil, fmt.Errorf("%w: CRC32C %08x, the superblock says %08x", errTable, got,
			s.sb.TableCRC)
	}
	return table, nil
}
