package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/internal/bench"
	"helios/internal/bench/memory"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
)

func benchMemoryCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "memory",
		Usage: "gathers of cached rows beside plain copies of as many bytes, audited",
		Description: "Gathers random rows of both tiers of the cache with the kernel that training uses, and copies as many bytes\n" +
			"in one piece from the same memory: from the device's own memory (gather and copy move each byte twice,\n" +
			"in and out, and both are counted), and from registered CPU memory, which the kernel reads in place (UVA).\n" +
			"Gather and copy take turns; the ratio is the gather's rate by the copy's, the median over the turns and its\n" +
			"range. After each row of results the destination is overwritten, gathered or copied into once more, and its\n" +
			"bytes are compared: all of them, or where they are many a sample of rows.\n" +
			"\"lookups\" are rows a second that the index finds, the wait for the answer included.",
	}, 0, hcli.Of[memoryBenchArgs]().Says("seed", "seed of the order of rows"), runBenchMemory)
}

// memoryBenchArgs holds the options of "bench memory".
type memoryBenchArgs struct {
	kernelBenchArgs
	rowBytes []int64       `option:"row-bytes" default:"4096" arg:"SIZE[,SIZE…]" usage:"sizes of a row SIZE[,SIZE…], multiples of 4"`
	cfg      memory.Config `options:"in"`
}

// SetOption reads sizes of rows.
func (a *memoryBenchArgs) SetOption(name, text string) (done bool, err error) {
	if name != "row-bytes" {
		return false, nil
	}
	a.rowBytes, err = parseList(name, text, "a size such as 4096", func(s string) (int64, error) {
		n, err := units.ParseBytes(s)
		if err != nil {
			err = errs.New(errs.Usage, "{row-bytes}: %w", err)
		}
		return n, err
	})
	return true, err
}

// check completes the configuration and refuses what cannot be.
func (a *memoryBenchArgs) check(e *env) error {
	if err := a.refuseHostOnly(e, &a.workers, &a.kernels); err != nil {
		return err
	}
	a.cfg.Seed, a.cfg.Length = a.seed, a.length()
	for _, n := range a.rowBytes {
		if err := a.cfg.Check(n); err != nil {
			return err
		}
	}
	return nil
}

func runBenchMemory(ctx context.Context, e *env, a *memoryBenchArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	var rows []memory.Row
	failed := 0
	total := len(a.devices) * len(a.rowBytes)
	for _, d := range a.devices {
		for _, n := range a.rowBytes {
			e.ui.Progress("bench memory", int64(len(rows)/2), int64(total))
			got, err := a.measure(ctx, d, n)
			if err != nil {
				return whenStopped(err,
					"the rows are incomplete: run it again, with fewer --seconds")
			}
			for _, r := range got {
				if !r.Audited {
					failed++
				}
				out.event("row", r)
				rows = append(rows, r)
			}
		}
	}
	showMemoryBench(e, rows)
	return auditFailed(failed, len(rows))
}

func showMemoryBench(e *env, rows []memory.Row) {
	giga := func(s bench.Spread) string {
		return fmt.Sprintf("%.3g", s.Median/1e9)
	}
	around := func(s bench.Spread) string {
		return fmt.Sprintf("%.3g–%.3g", s.Min/1e9, s.Max/1e9)
	}
	var table [][]string
	for _, r := range rows {
		check := "passed"
		if !r.Audited {
			check = "FAILED: " + r.Why
		}
		table = append(table, []string{r.Device, r.From, units.FormatBytes(r.RowBytes),
			units.FormatCount(float64(r.Rows)), strconv.Itoa(r.Turns),
			giga(r.Gather), around(r.Gather), giga(r.Copy),
			around(r.Copy), r.Ratio.String(), units.FormatCount(r.Lookups.Median),
			units.FormatCount(float64(r.Checked)), check})
	}
	e.ui.Columns(memoryColumns, table)
}

// measure measures both tiers of a device of its own with one size of row.
func (a *memoryBenchArgs) measure(ctx context.Context, device string,
	rowBytes int64) (rows []memory.Row, err error) {
	dev, err := a.open(device)
	if err != nil {
		return nil, err
	}
	defer closing(&err, dev.Close)
	return memory.Measure(ctx, dev, a.cfg, rowBytes)
}
