package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cache/policy"
	"helios/internal/bench"
	"helios/internal/bench/cache"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
)

func benchCacheCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "cache",
		Usage: "lookups in the static index and in dynamic tiers, audited",
		Description: "Looks sets of distinct, uniformly random rows up: in the static index, bucketing, slots and the wait for the\n" +
			"answer included, and in a dynamic GPU tier under each policy (--gpu-cache of the rows, filled before it is\n" +
			"measured), the plan of the reads included. No row is read from an SSD.\n" +
			"\"limit\" is what memory allows the static lookup: as many random 64-byte lines of the same index, loaded by as\n" +
			"many workers, and nothing done with them; \"latency\" is one such load that waits for the one before. Lookups and limit\n" +
			"take turns, each with sets of its own; the ratio is the median over the turns, with its range.\n" +
			"\"build\" is the most memory that was taken while the index was made, the index included.\n" +
			"The audit holds every answer of a set against where the row should be, and every row that a dynamic tier\n" +
			"delivers, in each set, against what it should hold.",
	}, 0, hcli.Of[cacheBenchArgs]().Says("seed", "seed of tiers, rows and random eviction"),
		runBenchCache)
}

// cacheBenchArgs holds the options of "bench cache".
type cacheBenchArgs struct {
	kernelBenchArgs
	cfg      cache.Config `options:"in"`
	nodes    []int64      `option:"nodes" default:"100M" arg:"N[,N…]" usage:"rows of the dataset N[,N…]; K, M and G are thousands, millions and billions"`
	policies []string     `option:"policy" use:"setting" offers:"@bench-policies" default:"@bench-policies" arg:"NAME[,NAME…]" usage:"what is measured NAME[,NAME…]"`
}

// SetOption reads lists of counts and policies.
func (a *cacheBenchArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "nodes":
		a.nodes, err = parseList(name, text, "a number such as 100M", parseNodeCount)
	case "policy":
		a.policies, err = parseList(name, text, cache.Static+" or one of "+strings.Join(policy.Online(), ", "),
			parseBenchPolicy)
	default:
		return false, nil
	}
	return true, err
}

func parseNodeCount(s string) (int64, error) {
	n, err := units.ParseCount(s)
	if err != nil || n < 1 || n > 1<<40 {
		return 0, errs.New(errs.Usage,
			"{nodes} %s: give a whole number from 1 to 2^40, such as 1000000 or 100M", s)
	}
	return n, nil
}

func parseBenchPolicy(name string) (string, error) {
	if name == cache.Static {
		return name, nil
	}
	if _, err := policy.New(policy.Config{Policy: name}); err != nil {
		return "", errs.New(errs.Usage, "{policy}: %w (or %s)", err, cache.Static)
	}
	return name, nil
}

// check completes the configuration and refuses what cannot be.
func (a *cacheBenchArgs) check(e *env) error {
	if err := a.refuseHostOnly(e, &a.workers, &a.kernels); err != nil {
		return err
	}
	for _, n := range a.nodes {
		if n < a.cfg.Rows {
			return errs.New(errs.Usage,
				"{rows} %d are more than {nodes} %d; a lookup has each row at most once",
				a.cfg.Rows, n)
		}
	}
	a.cfg.Seed, a.cfg.Length = a.seed, a.length()
	return a.cfg.Check()
}

func runBenchCache(ctx context.Context, e *env, a *cacheBenchArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	var rows []cache.Row
	failed := 0
	total := len(a.devices) * len(a.nodes) * len(a.policies)
	for _, device := range a.devices {
		for _, nodes := range a.nodes {
			for _, name := range a.policies {
				e.ui.Progress("bench cache", int64(len(rows)), int64(total))
				r, err := a.measure(ctx, device, nodes, name)
				if err != nil {
					return whenStopped(err,
						"the rows are incomplete: run it again, with fewer --seconds")
				}
				if !r.Audited {
					failed++
				}
				out.event("row", r)
				rows = append(rows, r)
			}
		}
	}
	showCacheBench(e, rows)
	return auditFailed(failed, len(rows))
}

func showCacheBench(e *env, rows []cache.Row) {
	rate := func(s *bench.Spread) (median, around string) {
		if s == nil {
			return "-", "-"
		}
		return units.FormatCount(s.Median),
			units.FormatCount(s.Min) + "–" + units.FormatCount(s.Max)
	}
	var table [][]string
	for _, r := range rows {
		check := "passed"
		if !r.Audited {
			check = "FAILED: " + r.Why
		}
		ratio, latency := "-", "-"
		if r.Ratio != nil {
			ratio, latency = r.Ratio.String(), units.FormatSeconds(r.LatencyNS/1e9)
		}
		metadata := fmt.Sprintf("%s (%.3f B/node)", units.FormatBytes(r.IndexBytes),
			float64(r.IndexBytes)/float64(r.Nodes))
		if r.Policy != cache.Static {
			metadata = fmt.Sprintf("%s (%.1f B/line)", units.FormatBytes(r.Metadata),
				float64(r.Metadata)/float64(r.Slots))
		}
		lookups, around := rate(&r.Lookups)
		limit, limitAround := rate(r.Limit)
		table = append(table, []string{r.Device, units.FormatCount(float64(r.Nodes)), r.Policy,
			strconv.Itoa(r.Workers), lookups, around, limit, limitAround, ratio, latency,
			metadata, units.FormatBytes(r.BuildBytes), units.FormatSeconds(r.BuildTime),
			fmt.Sprintf("%.1f%%", 100*r.HitRatio), units.FormatCount(float64(r.Checked)), check})
	}
	e.ui.Columns(cacheColumns, table)
}

// measure measures one policy on a device of its own.
func (a *cacheBenchArgs) measure(ctx context.Context, device string, nodes int64,
	name string) (row cache.Row, err error) {
	dev, err := a.open(device)
	if err != nil {
		return row, err
	}
	defer closing(&err, dev.Close)
	return cache.Measure(ctx, dev, a.cfg, nodes, name)
}
