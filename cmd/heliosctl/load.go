package main

import (
	"context"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/units"
)

func loadCommand() *cli.Command {
	return &cli.Command{
		Name:      "load",
		Usage:     "stripe a dataset's features over the SSDs, with superblocks and checksums",
		ArgsUsage: "[DATASET]",
		Description: "SSDs that hold a file system, a partition table, RAID, LVM or another dataset are refused,\n" +
			"unless --force names their serial numbers.",
		Flags: append([]cli.Flag{
			datasetFlag,
			&cli.StringFlag{Name: "force", Usage: "overwrite the SSDs with these `SERIAL[,SERIAL…]` whatever they hold"},
		}, ssdFlags()...),
		Action: action(1, runLoad),
	}
}

func runLoad(ctx context.Context, e *env) (err error) {
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
	r, err := dataset.Load(ctx, d, set.ssds, dataset.LoadOptions{Force: e.c.String("force"), Progress: e.ui.Progress})
	e.showFaults(set, &results{ui: e.ui})
	if err != nil {
		return whenStopped(err, "no dataset can be used from these SSDs until a load has ended: run it again")
	}
	packing := "one row to a block"
	if r.LBAsPerRow > 1 {
		packing = units.FormatCount(float64(r.LBAsPerRow)) + " blocks to a row"
	} else if r.RowsPerLBA > 1 {
		packing = units.FormatCount(float64(r.RowsPerLBA)) + " rows to a block"
	}
	e.ui.Printf("%s: %d rows of %s on %d SSDs in %.2f s: %s (%s), padding %s, %d checksummed chunks",
		d.Meta.Name, r.Rows, units.FormatBytes(int64(r.RowBytes)), r.SSDs, r.Seconds, units.FormatBytes(r.DataBytes), packing, units.FormatBytes(r.PaddingBytes), r.Chunks)
	return e.ui.Event("result", r)
}
