package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"helios/internal/cachedir"
	"helios/internal/testing/fakecuda"
)

// selftestLimit bounds each of the two runs of the script.
const selftestLimit = 4 * time.Minute

// selftestVerb proves the script without a GPU: packs, unpacks the archive elsewhere, and runs it
// there on the fake libcuda with no Go in its PATH. Then once more with a driver that fails, which
// must be failed rows and a whole table.
func selftestVerb(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("gputier selftest", flag.ContinueOnError)
	keep := f.String("keep", "", "leave results in `DIR`")
	if err := f.Parse(args); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gputier-selftest-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cache, err := cachedir.Private("helios-fakecuda")
	if err != nil {
		return err
	}
	lib, err := fakecuda.BuildIn(cache)
	if errors.Is(err, fakecuda.ErrNoCompiler) {
		fmt.Println("gputier selftest: not run:", err)
		return nil
	}
	if err != nil {
		return err
	}
	if err := pack(ctx, filepath.Join(dir, "tier"), ""); err != nil {
		return err
	}
	there := filepath.Join(dir, "there")
	if err := os.Mkdir(there, 0o777); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xJf", filepath.Join(dir, "tier.tar.xz"), "-C",
		there).CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %w: %s", err, out)
	}
	out := *keep
	if out == "" {
		out = filepath.Join(dir, "results")
	}
	if out, err = filepath.Abs(out); err != nil {
		return err
	}
	run := func(out, knobs string, more ...string) (results, error) {
		ctx, cancel := context.WithTimeout(ctx, selftestLimit)
		defer cancel()
		var res results
		c := exec.CommandContext(ctx, filepath.Join(there, "tier", "run.sh"),
			append([]string{"-small", "-out", out}, more...)...)
		c.Dir = dir
		// As bare as the machine it is for: no Go, no compiler, and no home.
		c.Env = []string{"PATH=/usr/bin:/bin", "HELIOS_LIBCUDA=" + lib, "HELIOS_FAKECUDA=" + knobs}
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		rerr := c.Run()
		b, err := os.ReadFile(filepath.Join(out, "results.json"))
		if err != nil {
			return res, errors.Join(rerr, err)
		}
		if err := json.Unmarshal(b, &res); err != nil {
			return res, err
		}
		for _, name := range []string{"table.txt", "log.txt"} {
			if b, err := os.ReadFile(filepath.Join(out, name)); err != nil ||
				len(bytes.TrimSpace(b)) == 0 {
				return res, fmt.Errorf("%s is missing or empty: %w", name, err)
			}
		}
		return res, rerr
	}
	res, err := run(out, "sms=4,mem=268435456")
	if err != nil {
		return fmt.Errorf("on the fake libcuda: %w", err)
	}
	count := map[string]int{}
	for _, s := range res.Steps {
		count[s.Status]++
	}
	if len(res.Bench) == 0 || len(res.Summaries) == 0 || len(res.Probe) == 0 ||
		len(res.Figures) < 5 || len(res.Training) < 7 || count[passed] < 30 {
		return fmt.Errorf(
			"results.json lacks something: %d rows, %d summaries, figures of %d benchmarks, %d training runs, %d steps passed",
			len(res.Bench), len(res.Summaries), len(res.Figures), len(res.Training), count[passed])
	}
	const queues = 6 // of the fake, which the measurement has to find
	few, err := run(filepath.Join(dir, "queues"), fmt.Sprintf("sms=4,hw_queues=%d", queues), "-only",
		"hardware queues")
	if err != nil {
		return fmt.Errorf("with %d hardware queues: %w", queues, err)
	}
	for _, want := range []struct {
		what string
		of   results
		ok   func(d deviceRow) bool
	}{
		{"the clock's step", res, func(d deviceRow) bool { return d.Values > 2 && d.LeastNS > 0 }},
		{"all streams at one time", res, func(d deviceRow) bool {
			return d.Streams > 32 && d.AtOnce == d.Streams && d.Connections == "32"
		}},
		{"the fake's hardware queues", few, func(d deviceRow) bool { return d.AtOnce == queues }},
		{"a start as shipped", res, func(d deviceRow) bool {
			return d.Kernels > 20 && !d.ForcedPTX
		}},
		{"prices of trips", res, func(d deviceRow) bool { return len(d.Prices) > 10 }},
		{"a start from PTX", res, func(d deviceRow) bool { return d.Kernels > 20 && d.ForcedPTX }},
	} {
		if !slices.ContainsFunc(want.of.Device, func(row json.RawMessage) bool {
			var d deviceRow
			return json.Unmarshal(row, &d) == nil && want.ok(d)
		}) {
			return fmt.Errorf("results.json lacks %s: %s", want.what, want.of.Device)
		}
	}
	// The rows of I/O come before the time is over, however slow the rest is.
	// Its conformance alone takes 39 s of 2 cores.
	slow, err := run(filepath.Join(dir, "slow"), "sms=4,mem=268435456,launch_ns=3000000", "-limit",
		"60s")
	if err == nil || len(slow.Bench) == 0 {
		return fmt.Errorf("a slow driver: %d rows of bench io within the limit: %w", len(slow.Bench),
			err)
	}
	bad, err := run(filepath.Join(dir, "failing"), "sms=4,mem=268435456,crash=1", "-only",
		"driver,heliosctl,sampling,bad,RAM,I/O at")
	if err == nil {
		return errors.New("a driver whose launches fail passed")
	}
	failures := 0
	for _, s := range bad.Steps {
		if s.Status == failed {
			failures++
		}
	}
	if failures == 0 || len(bad.Steps) < 6 {
		return fmt.Errorf("a driver whose launches fail: %d of %d steps failed: %w", failures,
			len(bad.Steps), err)
	}
	fmt.Printf(
		"gputier selftest: passed; %d steps, %d passed, %d not there; with failing launches %d of %d failed and the others ran\n",
		len(res.Steps), count[passed], count[notThere], failures, len(bad.Steps))
	return nil
}
