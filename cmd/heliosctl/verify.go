package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/units"
)

func verifyCommand() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "read a dataset's files, and its rows on the SSDs, and check every checksum",
		ArgsUsage: "[DATASET]",
		Description: "The files of a dataset's folder are held against the checksums that were taken when it was made\n" +
			"(dataset.seal), those of an older dataset, which has none, against the UUID in dataset.yaml. Where SSDs are bound,\n" +
			"the rows on them are read, too. --seal gives an older dataset its checksums, once its arrays are what the UUID\n" +
			"says; what disagrees with its seal is never sealed again.\n\n" +
			"Without a dataset each SSD is checked by itself, by its own superblock and checksums. Where load has\n" +
			"written row checksums (its default), bad rows are named.",
		Flags: []cli.Flag{
			datasetFlag,
			&cli.BoolFlag{Name: "source", Usage: "also compare every row with the dataset's features.npy"},
			&cli.BoolFlag{Name: "seal", Usage: "check the files of a dataset that an older version made, and seal it; SSDs are left alone"},
			&cli.StringFlag{Name: "ssds", Aliases: []string{"ssd"}, Usage: "only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
			sqFlag(), faultFlag(),
		},
		Action: action(1, runVerify),
	}
}

func runVerify(ctx context.Context, e *env) (err error) {
	if e.c.Bool("seal") {
		return e.sealDataset(ctx)
	}
	o := dataset.VerifyOptions{Source: e.c.Bool("source"), Progress: e.ui.Progress}
	name := "SSDs"
	check := func(s *ssdSet) (dataset.VerifyReport, error) { return dataset.VerifySSDs(ctx, s.ssds, o) }
	if e.c.IsSet("dataset") || e.c.NArg() > 0 {
		d, err := e.openDataset()
		if err != nil {
			return err
		}
		defer closing(&err, d.Close)
		name = d.Meta.Name
		if done, err := e.verifyFiles(ctx, d); done || err != nil {
			return err
		}
		check = func(s *ssdSet) (dataset.VerifyReport, error) { return dataset.Verify(ctx, d, s.ssds, o) }
	} else if o.Source {
		return errs.New(errs.Usage, "--source compares with a dataset; give its folder with --dataset DIR")
	}
	set, err := e.openSSDs(ctx, "ssds")
	if err != nil {
		return whenStopped(err, "nothing was read or written: run it again")
	}
	defer closing(&err, set.close)
	r, verr := check(set)
	verr = whenStopped(verr, "what was read until then is counted nowhere and nothing was written: run it again")
	e.showFaults(set, &results{e: e})
	for _, n := range r.Notes {
		e.ui.Note("%s", n)
	}
	if len(r.Bad) > 0 {
		rows := make([][]string, len(r.Bad))
		for i, b := range r.Bad {
			rows[i] = []string{b.SSD, strconv.Itoa(b.Stripe), strconv.FormatInt(b.Chunk, 10), fmt.Sprintf("%d+%d", b.LBA, b.Blocks), b.What}
		}
		e.ui.Table([]string{"SSD", "stripe", "chunk", "LBA", "what"}, rows)
	}
	if verr == nil {
		compared := ""
		if r.RowsChecked > 0 {
			compared = fmt.Sprintf(", %d rows have their checksums", r.RowsChecked)
		}
		if r.RowsCompared > 0 {
			compared += fmt.Sprintf(", %d rows equal to the source", r.RowsCompared)
		}
		rows := ""
		if r.RowBytes > 0 {
			rows = fmt.Sprintf(", rows of %s (%s)", units.FormatBytes(int64(r.RowBytes)), r.RowDType)
		}
		e.ui.Printf("%s: %d chunks (%s) on %d SSDs are good%s%s; %.2f s", name, r.Chunks, units.FormatBytes(r.Bytes), r.SSDs, rows, compared, r.Seconds)
	} else if r.BadCount == 0 {
		return verr // nothing was found out
	}
	if err := e.ui.Event("result", r); err != nil {
		return err
	}
	return verr
}

// verifyFiles checks the files of a dataset. done says that there is nothing else: no SSD is bound, and none was asked for.
func (e *env) verifyFiles(ctx context.Context, d *dataset.Dataset) (done bool, err error) {
	r, err := dataset.VerifyFiles(ctx, d, e.ui.Progress)
	if err := e.showFiles(d.Meta.Name, r, err); err != nil {
		return true, whenStopped(err, "nothing was written: run it again")
	}
	if e.c.IsSet("ssds") || e.c.Bool("source") {
		return false, nil
	}
	st, err := e.store.Load()
	if err != nil || len(st.SSDs) > 0 {
		return false, err
	}
	e.ui.Note("no SSD is bound: only the files were checked")
	return true, nil
}

// showFiles tells what was checked; err is what the check gave.
func (e *env) showFiles(name string, r dataset.FilesReport, err error) error {
	if len(r.Bad) > 0 {
		rows := make([][]string, len(r.Bad))
		for i, b := range r.Bad {
			rows[i] = []string{b.File, fmt.Sprintf("%d to %d", b.From, b.To-1), b.What}
		}
		e.ui.Table([]string{"file", "bytes", "what"}, rows)
	}
	if err == nil {
		how := "their seal"
		if !r.Sealed {
			how = "the dataset's UUID, which says nothing of dataset.yaml and names"
		}
		e.ui.Printf("%s: %d files (%s) are good by %s; %.2f s", name, r.Files, units.FormatBytes(r.Bytes), how, r.Seconds)
	} else if r.BadCount == 0 {
		return err // there is nothing to list
	}
	return errors.Join(err, e.ui.Event("files", r))
}

// sealDataset is verify --seal.
func (e *env) sealDataset(ctx context.Context) error {
	for _, f := range []string{"source", "ssds", "fault"} {
		if e.c.IsSet(f) {
			return errs.New(errs.Usage, "--seal checks files and --%s is about SSDs; give one of them", f)
		}
	}
	dir, err := e.dataset()
	if err != nil {
		return err
	}
	r, anew, err := dataset.Seal(ctx, dir, e.ui.Progress)
	if err := e.showFiles(dir, r, err); err != nil {
		return whenStopped(err, "nothing was sealed: run it again")
	}
	if anew {
		e.ui.Printf("%s is sealed now: each read of its files is checked from here on", dir)
	} else {
		e.ui.Printf("%s is sealed already; nothing was written", dir)
	}
	return nil
}
