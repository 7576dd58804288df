package stripe

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
)

// AttachOptions shape an attach.
type AttachOptions struct {
	// Note is told what is worth knowing but no error: a superblock that had to be read from
	// its second copy, an SSD that is not part of the dataset. Nil is silent.
	Note func(string)
}

// Attach finds the dataset on the SSDs: it reads and checks both superblocks of each, orders
// the SSDs by stripe and sets their DataStart. SSDs that hold nothing of this dataset are left
// out, as long as all its stripes are there. Errors are of class device when stripes are
// missing, incomplete or damaged, and refused when the SSDs hold another dataset.
func Attach(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD) (gpuio.Layout, []*gpuio.SSD,
	error) {
	return AttachWith(ctx, d, ssds, AttachOptions{})
}

// AttachWith is Attach with options.
func AttachWith(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD,
	o AttachOptions) (gpuio.Layout, []*gpuio.SSD, error) {
	a, err := Find(ctx, d, ssds, o)
	return a.Layout, a.SSDs, err
}

// Attached is a dataset as it is on SSDs.
type Attached struct {
	Layout  gpuio.Layout
	SSDs    []*gpuio.SSD // by stripe
	RowType rowtype.Type // of the rows there: Layout.RowBytes is their size
}

// Find is AttachWith, and says of which type the rows are.
func Find(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, o AttachOptions) (a Attached,
	err error) {
	ts, err := openTargets(ctx, ssds)
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, closeTargets(ctx, ts)) }()
	found, err := attach(ctx, d, ts, o)
	if err != nil {
		return a, err
	}
	for _, f := range found {
		f.t.ssd.DataStart = f.sb.DataLBA
		a.SSDs = append(a.SSDs, f.t.ssd)
	}
	a.Layout, a.RowType = found[0].sb.layout(), found[0].sb.RowType
	return a, nil
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
	var found []stripe
	var others, unusable []string
	foreign := false
	for _, t := range ts {
		c, err := t.readCopies(ctx)
		if err != nil {
			return nil, err
		}
		sb, msg, err := c.best()
		switch {
		case err != nil:
			unusable = append(unusable, fmt.Sprintf("%s: %v", t.name, err))
		case sb.UUID != d.UUID():
			foreign = true
			others = append(others, fmt.Sprintf("%s holds stripe %d of %d of dataset %q (%s)",
				t.name, sb.StripeIndex, sb.StripeCount, sb.Name, sb.UUID))
		default:
			if msg != "" {
				note("ssd %s: %s", t.name, msg)
			}
			found = append(found, stripe{t, sb})
		}
	}
	load := "heliosctl load --dataset " + d.Dir()
	reload := fmt.Sprintf("run %q", load)
	if len(found) == 0 {
		if foreign {
			return nil, errs.New(errs.Refused,
				"the SSDs hold another dataset than %s (%s): %s; bind the right SSDs or %s",
				d.Dir(), d.UUID(), strings.Join(others, ", "), reload)
		}
		return nil, errs.New(errs.Device, "dataset %s is on none of the SSDs (%s); %s", d.Dir(),
			strings.Join(unusable, ", "), reload)
	}
	sort.SliceStable(found,
		func(i, j int) bool { return found[i].sb.StripeIndex < found[j].sb.StripeIndex })
	first := found[0]
	for _, f := range found {
		if f.sb.State != StateComplete {
			again := load // as it was begun, or it starts over
			if f.sb.RowType != d.Meta.RowType() {
				again += " " + errs.Key("row-dtype").Flag() + " " + f.sb.RowType.String()
			}
			if !f.sb.hasRowSums() {
				again += " " + errs.Key("row-checksums").Flag() + "=false"
			}
			return nil, errs.New(errs.Device,
				"ssd %s: loading dataset %s onto it did not finish%s; run %q", f.t.name, d.Dir(),
				f.sb.howFar(), again)
		}
		if f.sb.DType != d.Meta.RowType() {
			return nil, errs.New(errs.Device,
				"ssd %s holds rows that were made from %s, those of dataset %s are %s; %s",
				f.t.name, f.sb.DType, d.Dir(), d.Meta.RowType(), reload)
		}
		if want := f.sb.RowType.RowBytes(d.Meta.Dim); f.sb.RowBytes != want ||
			f.sb.Rows != d.Meta.Nodes {
			return nil, errs.New(errs.Device,
				"ssd %s holds %d rows of %d bytes, dataset %s has %d of %d (as %s); %s",
				f.t.name, f.sb.Rows, f.sb.RowBytes, d.Dir(), d.Meta.Nodes, want,
				f.sb.RowType, reload)
		}
		if f.sb.StripeCount != first.sb.StripeCount || f.sb.LoadID != first.sb.LoadID ||
			f.sb.LBABytes != first.sb.LBABytes {
			return nil, errs.New(errs.Device,
				"ssds %s and %s hold stripes of different loads of %s (stripe %d of %d, stripe %d of %d); choose the right ones with option ssds or %s",
				first.t.name, f.t.name, d.Dir(), first.sb.StripeIndex, first.sb.StripeCount,
				f.sb.StripeIndex, f.sb.StripeCount, reload)
		}
	}
	have := map[int]string{}
	for _, f := range found {
		if other, twice := have[f.sb.StripeIndex]; twice {
			return nil, errs.New(errs.Device,
				"ssds %s and %s both hold stripe %d of %s; choose one with option ssds", other, f.t.name,
				f.sb.StripeIndex, d.Dir())
		}
		have[f.sb.StripeIndex] = f.t.name
	}
	var missing []string
	for i := range first.sb.StripeCount {
		if _, ok := have[i]; !ok {
			missing = append(missing, fmt.Sprint(i))
		}
	}
	if len(missing) > 0 {
		return nil, errs.With(errs.Device, &MissingError{Dataset: d.Dir(),
			Stripes: first.sb.StripeCount, Missing: missing,
			Seen: append(others, unusable...), Advice: "bind the SSD that holds it or " + reload})
	}
	for _, s := range append(others, unusable...) {
		note("not used: %s", s)
	}
	return found, nil
}
