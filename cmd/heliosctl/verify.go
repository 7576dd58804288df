package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/units"
)

func verifyCommand() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "read a dataset back from the SSDs and check every checksum",
		ArgsUsage: "[DATASET]",
		Flags: append([]cli.Flag{
			datasetFlag,
			&cli.BoolFlag{Name: "source", Usage: "also compare every row with the dataset's features.npy"},
		}, ssdFlags()...),
		Action: action(1, runVerify),
	}
}

func runVerify(ctx context.Context, e *env) (err error) {
	d, err := e.openDataset()
	if err != nil {
		return err
	}
	defer closing(&err, d.Close)
	set, err := e.openSSDs(ctx, "ssds")
	if err != nil {
		return err
	}
	defer closing(&err, set.close)
	r, verr := dataset.Verify(ctx, d, set.ssds, dataset.VerifyOptions{Source: e.c.Bool("source"), Progress: e.ui.Progress})
	e.showFaults(set, &results{ui: e.ui})
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
		if r.RowsCompared > 0 {
			compared = fmt.Sprintf(", %d rows equal to the source", r.RowsCompared)
		}
		e.ui.Printf("%s: %d chunks (%s) on %d SSDs are good%s; %.2f s", d.Meta.Name, r.Chunks, units.FormatBytes(r.Bytes), r.SSDs, compared, r.Seconds)
	} else if r.BadCount == 0 {
		return verr // nothing was found out
	}
	if err := e.ui.Event("result", r); err != nil {
		return err
	}
	return verr
}
