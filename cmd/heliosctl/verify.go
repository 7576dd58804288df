package main

import (
	"context"
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
		Usage:     "read a dataset back from the SSDs and check every checksum",
		ArgsUsage: "[DATASET]",
		Description: "Without a dataset each SSD is checked by itself, by its own superblock and checksums. Where load has\n" +
			"written row checksums (its default), bad rows are named.",
		Flags: []cli.Flag{
			datasetFlag,
			&cli.BoolFlag{Name: "source", Usage: "also compare every row with the dataset's features.npy"},
			&cli.StringFlag{Name: "ssds", Aliases: []string{"ssd"}, Usage: "only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
			sqFlag(), faultFlag(),
		},
		Action: action(1, runVerify),
	}
}

func runVerify(ctx context.Context, e *env) (err error) {
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
