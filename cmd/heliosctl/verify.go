package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/parted"
	"helios/dataset/stripe"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/packs"
	diskgnnspec "helios/sched/tiers/diskgnn/spec"
)

func verifyCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "verify",
		Usage:     "read a dataset's files, and its rows on the SSDs, and check every checksum",
		ArgsUsage: "[DATASET]",
		Description: "The files of a dataset's folder are held against the checksums that were taken when it was made\n" +
			"(dataset.seal), those of an older dataset, which has none, against the UUID in dataset.yaml. Where SSDs are bound,\n" +
			"the rows on them are read, too, and always what is prepared in the folder: partitions (*.partition), packed\n" +
			"mini-batches (packed) and layouts by part. --seal gives an older dataset its checksums, once its arrays are what the UUID\n" +
			"says; what disagrees with its seal is never sealed again.\n\n" +
			"Without a dataset each SSD is checked by itself, by its own superblock and checksums. Where load has\n" +
			"written row checksums (its default), bad rows are named. Pages that were prepared beside the rows are read,\n" +
			"too, and bad ones named.",
	}, 1, hcli.Of[verifyArgs]().Says("ssds",
		"only `SSD[,SSD…]`, by name, path or serial (default: all bound)"), runVerify)
}

// verifyArgs holds the options of verify.
type verifyArgs struct {
	datasetArgs
	ssdArgs
	source bool `option:"source" usage:"also compare every row with the dataset's features.npy"`
	seal   bool `option:"seal" usage:"check the files of a dataset that an older version made, and seal it; SSDs are left alone"`
}

// verifier checks the files of a dataset.
type verifier struct {
	*env
	*verifyArgs
}

func runVerify(ctx context.Context, e *env, a *verifyArgs) (err error) {
	v := &verifier{e, a}
	if a.seal {
		return v.sealDataset(ctx)
	}
	o := stripe.VerifyOptions{Source: a.source, Progress: e.ui.Progress}
	name := "SSDs"
	check := func(s *ssdSet) (stripe.VerifyReport,
		error) {
		return stripe.VerifySSDs(ctx, s.SSDs, o)
	}
	if a.named(e) {
		d, err := a.open(e)
		if err != nil {
			return whenStopped(err, "nothing was read or written: run it again")
		}
		defer closing(&err, d.Close)
		name = d.Meta.Name
		if done, err := v.verifyFiles(ctx, d); done || err != nil {
			return err
		}
		check = func(s *ssdSet) (stripe.VerifyReport,
			error) {
			return stripe.Verify(ctx, d, s.SSDs, o)
		}
	} else if o.Source {
		return errs.New(errs.Usage,
			"{source} compares with a dataset; give its folder with {dataset} DIR")
	}
	set, err := (&ssdOpener{env: e, ssdArgs: a.ssdArgs}).open(ctx)
	if err != nil {
		return whenStopped(err, "nothing was read or written: run it again")
	}
	defer closing(&err, set.Close)
	r, verr := check(set)
	verr = whenStopped(verr,
		"what was read until then is counted nowhere and nothing was written: run it again")
	showFaults(e, set, &results{e: e})
	for _, n := range r.Notes {
		e.plainNote(n)
	}
	v.showBad(&r)
	if verr == nil {
		v.showGood(name, &r)
	} else if r.BadCount == 0 {
		return verr // nothing was found out
	}
	if err := e.ui.Event("result", r); err != nil {
		return err
	}
	return verr
}

// showBad lists what is damaged.
func (v *verifier) showBad(r *stripe.VerifyReport) {
	if len(r.Bad) == 0 {
		return
	}
	rows := make([][]string, len(r.Bad))
	for i, b := range r.Bad {
		rows[i] = []string{b.SSD, strconv.Itoa(b.Stripe), strconv.FormatInt(b.Chunk, 10),
			fmt.Sprintf("%d+%d", b.LBA, b.Blocks), b.What}
	}
	v.ui.Table([]string{"SSD", "stripe", "chunk", "LBA", "what"}, rows)
}

// showGood shows how much was checked.
func (v *verifier) showGood(name string, r *stripe.VerifyReport) {
	compared := ""
	if r.RowsChecked > 0 {
		compared = fmt.Sprintf(", %d rows have their checksums", r.RowsChecked)
	}
	if r.RowsCompared > 0 {
		compared += fmt.Sprintf(", %d rows equal to the source", r.RowsCompared)
	}
	if r.Pages > 0 {
		compared += fmt.Sprintf(", %d prepared pages have theirs", r.Pages)
	}
	rows := ""
	if r.RowBytes > 0 {
		rows = fmt.Sprintf(", rows of %s (%s)", units.FormatBytes(int64(r.RowBytes)),
			r.RowDType)
	}
	v.ui.Printf("%s: %d chunks (%s) on %d SSDs are good%s%s; %.2f s", name, r.Chunks,
		units.FormatBytes(r.Bytes), r.SSDs, rows, compared, r.Seconds)
}

// verifyFiles checks the files of a dataset. done says that there is nothing else: no SSD is bound,
// and none was asked for.
func (v *verifier) verifyFiles(ctx context.Context, d *dataset.Dataset) (done bool, err error) {
	r, err := dataset.VerifyFiles(ctx, d, v.ui.Progress)
	if err := v.showFiles(d.Meta.Name, r, err); err != nil {
		return true, whenStopped(err, "nothing was written: run it again")
	}
	if err := v.verifyPartitions(d); err != nil {
		return true, err
	}
	if err := v.verifyPacks(ctx, d); err != nil {
		return true, whenStopped(err, "nothing was written: run it again")
	}
	if err := v.verifyLayouts(ctx, d); err != nil {
		return true, whenStopped(err, "nothing was written: run it again")
	}
	if len(v.names) > 0 || v.source {
		return false, nil
	}
	st, err := v.store.Load()
	if err != nil || len(st.SSDs) > 0 {
		return false, err
	}
	v.ui.Note("no SSD is bound: only the files were checked")
	return true, nil
}

// verifyPacks checks packed mini-batches beside the dataset, where there are some.
func (v *verifier) verifyPacks(ctx context.Context, d *dataset.Dataset) error {
	r, err := packs.Verify(ctx, diskgnnspec.PackedSettings{}.PackedFolder(d.Dir()), v.ui.Progress)
	if r == nil || err != nil {
		return err
	}
	for _, n := range r.Notes {
		v.plainNote(n)
	}
	v.ui.Printf("%s: %d packs of %d mini-batches (%s, %d pages) are good", r.Dir, r.Packs,
		r.Batches, units.FormatBytes(r.Bytes), r.Pages)
	return v.ui.Event("packs", r)
}

// verifyLayouts checks layouts by part beside the dataset, where there are some.
func (v *verifier) verifyLayouts(ctx context.Context, d *dataset.Dataset) error {
	folders, err := parted.Folders(d.Dir())
	if err != nil {
		return err
	}
	var all []error
	for _, dir := range folders {
		r, err := parted.Verify(ctx, dir, d.Meta.UUID, v.ui.Progress)
		if err != nil && ctx.Err() != nil {
			return err
		}
		if err != nil {
			all = append(all, err)
			continue
		}
		for _, n := range r.Notes {
			v.plainNote(n)
		}
		if r.Whole {
			v.ui.Printf("%s: %d parts of %d nodes and %d edges (%d pages, %s) are good", r.Dir,
				r.Parts, r.Nodes, r.Edges, r.Pages, units.FormatBytes(r.Bytes))
		}
		if err := v.ui.Event("layout", r); err != nil {
			return err
		}
	}
	return errors.Join(all...)
}

// showFiles shows the checked files; err is the check's.
func (v *verifier) showFiles(name string, r dataset.FilesReport, err error) error {
	if len(r.Bad) > 0 {
		rows := make([][]string, len(r.Bad))
		for i, b := range r.Bad {
			rows[i] = []string{b.File, fmt.Sprintf("%d to %d", b.From, b.To-1), b.What}
		}
		v.ui.Table([]string{"file", "bytes", "what"}, rows)
	}
	if err == nil {
		how := "their seal"
		if !r.Sealed {
			how = "the dataset's UUID, which says nothing of dataset.yaml and names"
		}
		v.ui.Printf("%s: %d files (%s) are good by %s; %.2f s", name, r.Files,
			units.FormatBytes(r.Bytes), how, r.Seconds)
	} else if r.BadCount == 0 {
		return err // there is nothing to list
	}
	return errors.Join(err, v.ui.Event("files", r))
}

// sealDataset is verify --seal.
func (v *verifier) sealDataset(ctx context.Context) error {
	if f := v.given(&v.source, &v.names, &v.faults); f != "" {
		return errs.New(errs.Usage,
			"{seal} checks files and %v is about SSDs; give one of them", errs.Key(f))
	}
	dir, err := v.dir(v.env)
	if err != nil {
		return err
	}
	r, anew, err := dataset.Seal(ctx, dir, v.ui.Progress)
	if err := v.showFiles(dir, r, err); err != nil {
		return whenStopped(err, "nothing was sealed: run it again")
	}
	if anew {
		v.ui.Printf("%s is sealed now: each read of its files is checked from here on", dir)
	} else {
		v.ui.Printf("%s is sealed already; nothing was written", dir)
	}
	return nil
}
