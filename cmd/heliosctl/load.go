package main

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/stripe"
	hcli "helios/internal/cli"
	"helios/internal/units"
)

func loadCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "load",
		Usage:     "stripe a dataset's features over the SSDs, with superblocks and checksums",
		ArgsUsage: "[DATASET]",
		Description: "SSDs may hold several datasets: load takes the room that others leave, and unload frees some. Each SSD takes an\n" +
			"equal share; where that has no room, those with more of it take several of up to 8 or two for each SSD equal stripes,\n" +
			"and as many parts of the reads. SSDs without room, or with prepared pages of this dataset or anything else on them are refused, unless --force names their serial\n" +
			"numbers: then they hold this dataset alone. An SSD is blank where its first and last MiB are all zeroes, and so are some 2,000 places\n" +
			"between them. To empty one: \"blkdiscard\" of the whole SSD, while the kernel has it.\n\n" +
			"A load that was interrupted, by Ctrl-C, a kill or a power failure, is resumed by the next one of the\n" +
			"same dataset with the same options over the same SSDs in the same order; it checks a sample of what is there\n" +
			"and starts over in case of doubt, or with --restart. A mark of how far it is is written every second, or more\n" +
			"seldom where flushes are slow (--mark-every), and when Ctrl-C ends it.\n\n" +
			"--row-dtype stores rows in fewer bytes: float16 (up to 65504), bfloat16 (float32's range, 8 bits of precision)\n" +
			"or int8 (8 bits; a scale for each row lies beside the rows, 4 bytes). They stay so in every cache and become\n" +
			"float32 when they are trained on. A value that the type cannot hold is refused, with its row.\n\n" +
			"Each chunk of 1 MiB gets a CRC32C, which verify checks. By default each row gets one too: verify then\n" +
			"names bad rows, and train, eval and predict check each row that they read.\n" +
			"That costs 4 bytes a row on the SSDs (1.6 % for rows of 256 bytes, 0.1 % for 4 KiB) and CPU time while\n" +
			"loading: 13 ns for a row of 64 bytes, 21 ns for 256, 58 ns for 1 KiB (5, 12 and 18 GB/s on one core of\n" +
			"an EPYC; go test -bench RowChecksums ./dataset/stripe).",
	}, 1, hcli.Of[loadArgs](), runLoad)
}

// loadArgs holds the options of load.
type loadArgs struct {
	datasetArgs
	ssdArgs
	rowChecksums bool          `option:"row-checksums" default:"true" usage:"write a CRC32C for each row (4 bytes a row); =false leaves them out, and checked reads with them"`
	rowType      string        `option:"row-dtype" oneof:"@row-types" shown:"the dataset's own" arg:"TYPE" usage:"store rows as TYPE"`
	restart      bool          `option:"restart" usage:"start over, not where an interrupted load was"`
	markEvery    time.Duration `option:"mark-every" hint:"give a time such as 5s, or leave it out" positive:"yes" range:"1ns.." arg:"DURATION" shown:"1s, or more where that would cost 1 % of the time" usage:"write a mark of how far the load is every DURATION"`
	force        string        `option:"force" arg:"SERIAL[,SERIAL…]" usage:"overwrite the SSDs with these SERIAL[,SERIAL…] whatever they hold"`
}

func runLoad(ctx context.Context, e *env, a *loadArgs) (err error) {
	d, err := a.open(e)
	if err != nil {
		return err
	}
	defer closing(&err, d.Close)
	set, err := (&ssdOpener{env: e, ssdArgs: a.ssdArgs}).open(ctx)
	if err != nil {
		return whenStopped(err, "nothing was read or written: run it again")
	}
	defer closing(&err, set.Close)
	if done, err := loadComputed(ctx, e, d, set, a.rowType); done || err != nil {
		return err
	}
	// rows are checked while they are read
	if _, err := dataset.VerifyAllButRows(ctx, d, e.ui.Progress); err != nil {
		return whenStopped(err, "nothing was written: run it again")
	}
	r, err := stripe.Load(ctx, d, set.SSDs, stripe.LoadOptions{Force: a.force,
		RowType: a.rowType, NoRowChecksums: !a.rowChecksums,
		Restart: a.restart, MarkEvery: a.markEvery,
		Progress: e.ui.Progress, Note: e.plainNote})
	showFaults(e, set, &results{e: e})
	if err != nil {
		again := "heliosctl load --dataset " + d.Dir() // with other options it would start over
		if a.rowType != "" {
			again += " --row-dtype " + a.rowType
		}
		if !a.rowChecksums {
			again += " --row-checksums=false"
		}
		if all := max(r.DataBytes, 1); r.OnFlash > 0 {
			return whenStopped(err,
				fmt.Sprintf(
					"%.0f %% of it are on the SSDs: the next \"%s\" goes on there, and until it has ended no dataset can be used from them",
					100*float64(r.OnFlash)/float64(all), again))
		}
		return whenStopped(err,
			fmt.Sprintf("no dataset can be used from these SSDs until a load has ended: run \"%s\"",
				again))
	}
	packing := "one row to a block"
	if r.LBAsPerRow > 1 {
		packing = units.FormatCount(float64(r.LBAsPerRow)) + " blocks to a row"
	} else if r.RowsPerLBA > 1 {
		packing = units.FormatCount(float64(r.RowsPerLBA)) + " rows to a block"
	}
	sums := "no row checksums"
	if r.RowChecksums > 0 {
		sums = units.FormatBytes(r.RowChecksums) + " of row checksums"
	}
	if r.RowScales > 0 {
		sums += ", " + units.FormatBytes(r.RowScales) + " of scales"
	}
	where := fmt.Sprintf("on %d SSDs", r.SSDs)
	if r.Stripes > r.SSDs {
		where = fmt.Sprintf("in %d stripes %s", r.Stripes, where)
	}
	how := ""
	if r.ResumedBytes > 0 {
		how = fmt.Sprintf(", resumed at %.0f %%", 100*float64(r.ResumedBytes)/float64(r.DataBytes))
	} else if r.StartedOver != "" {
		how = ", started over"
	}
	e.ui.Printf(
		"%s: %d rows of %s (%s) %s in %.2f s: %s (%s), padding %s, %d checksummed chunks, %s%s",
		d.Meta.Name, r.Rows, units.FormatBytes(int64(r.RowBytes)), r.RowDType, where, r.Seconds,
		units.FormatBytes(r.DataBytes), packing, units.FormatBytes(r.PaddingBytes), r.Chunks,
		sums, how)
	return e.ui.Event("result", r)
}
