// Command fiocompare runs fio and "heliosctl bench io" in turn on one file and prints what each
// reached, as medians with their range, and the ratio of each pair of runs. The order within a
// pair changes from run to run, so that a drift of the machine falls on both.
//
//	make bench
//
// fio reads 4 KiB at random with io_uring and O_DIRECT, one job with the whole depth; heliosctl
// reads rows of the same size with the same total depth through its software controller.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What -check asks for.
const (
	leastIOPS = 0.95 // of fio's
	mostCPU   = 2.0  // times fio's, per read
)

type options struct {
	heliosctl, fio, file string
	size                 int64
	runs                 int
	seconds              float64
	depths               []int
	bytes                int
	extra                []string
	jsonOut, check       bool
}

// result is one run of either program.
type result struct {
	IOPS     float64 `json:"iops"`
	CPUPerIO float64 `json:"cpu_us_per_io"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
}

// pair is one alternation.
type pair struct {
	Depth  int    `json:"depth"`
	Run    int    `json:"run"`
	Fio    result `json:"fio"`
	Helios result `json:"heliosctl"`
}

func main() {
	var o options
	depths := flag.String("depths", "1,32,256", "total depths")
	extra := flag.String("args", "", "more arguments for heliosctl bench io, separated by spaces")
	flag.StringVar(&o.heliosctl, "heliosctl", "heliosctl", "the program to measure")
	flag.StringVar(&o.fio, "fio", "fio", "the program to compare with")
	flag.StringVar(&o.file, "file", "",
		"file to read; without it one of -size MiB is made for the time of the runs")
	mib := flag.Int64("size", 2048, "size of the file that is made, in MiB")
	flag.IntVar(&o.runs, "runs", 5, "alternations at each depth")
	flag.Float64Var(&o.seconds, "seconds", 3, "length of a run")
	flag.IntVar(&o.bytes, "bytes", 4096, "bytes of a read")
	flag.BoolVar(&o.jsonOut, "json", false, "print each alternation as a JSON object")
	flag.BoolVar(&o.check, "check", false,
		fmt.Sprintf(
			"fail when at depth 32 or more IOPS are below %.2f of fio's, or CPU time per read above %.0f times fio's",
			leastIOPS, mostCPU))
	flag.Parse()
	o.size = *mib << 20
	o.extra = strings.Fields(*extra)
	for _, d := range strings.Split(*depths, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(d))
		if err != nil || n < 1 {
			fmt.Fprintf(os.Stderr, "fiocompare: -depths: %q is not a depth\n", d)
			os.Exit(2)
		}
		o.depths = append(o.depths, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "fiocompare:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	dir, err := os.MkdirTemp(".", "fiocompare-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if o.file == "" {
		o.file = filepath.Join(dir, "ssd.img")
		if err := makeFile(o.file, o.size); err != nil {
			return err
		}
	}
	state := filepath.Join(dir, "state")
	if _, err := output(ctx, o.heliosctl, "bind-ssds", "--state", state, "--proxy",
		o.file); err != nil {
		return err
	}
	defer func() {
		_, uerr := output(context.WithoutCancel(ctx), o.heliosctl, "unbind-ssds", "--state", state)
		err = errors.Join(err, uerr)
	}()
	pairs := map[int][]pair{}
	for i := range o.runs {
		for _, depth := range o.depths {
			p := pair{Depth: depth, Run: i + 1}
			steps := []func() error{
				func() (err error) { p.Fio, err = runFio(ctx, o, depth); return err },
				func() (err error) { p.Helios, err = runHelios(ctx, o, state, depth); return err },
			}
			if i%2 == 1 {
				slices.Reverse(steps)
			}
			for _, s := range steps {
				if err := s(); err != nil {
					return err
				}
			}
			pairs[depth] = append(pairs[depth], p)
			if o.jsonOut {
				if err := json.NewEncoder(out).Encode(p); err != nil {
					return err
				}
			}
		}
	}
	return report(o, pairs, out)
}

// makeFile writes random data: unwritten parts of a file read without the disk.
func makeFile(path string, size int64) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriterSize(f, 1<<20)
	if _, err := io.CopyN(w, rand.NewChaCha8([32]byte{1}), size); err != nil {
		return err
	}
	return errors.Join(w.Flush(), f.Sync())
}

// output runs a program and returns what it printed; a failure carries its last words.
func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	b, err := cmd.Output()
	if err == nil {
		return b, nil
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err,
			strings.TrimSpace(string(exit.Stderr)))
	}
	return nil, fmt.Errorf("%s: %w", name, err)
}

func runFio(ctx context.Context, o options, depth int) (result, error) {
	b, err := output(ctx, o.fio, "--name=compare", "--filename="+o.file, "--ioengine=io_uring",
		"--direct=1", "--rw=randread", "--readonly",
		fmt.Sprintf("--bs=%d", o.bytes), fmt.Sprintf("--iodepth=%d", depth), "--norandommap",
		"--randrepeat=0", "--time_based",
		fmt.Sprintf("--runtime=%dms", int(o.seconds*1000)), fmt.Sprintf("--ramp_time=%dms",
			int(o.seconds*250)), "--output-format=json")
	if err != nil {
		return result{}, err
	}
	var report struct {
		Jobs []struct {
			Error   int     `json:"error"`
			UserCPU float64 `json:"usr_cpu"` // percent of the job's run time
			SysCPU  float64 `json:"sys_cpu"`
			Runtime float64 `json:"job_runtime"` // ms
			Read    struct {
				IOPS   float64 `json:"iops"`
				Total  float64 `json:"total_ios"`
				TimeMS float64 `json:"runtime"`
				Lat    struct {
					Percentile map[string]float64 `json:"percentile"`
				} `json:"clat_ns"`
			} `json:"read"`
		} `json:"jobs"`
	}
	// fio may print notes before the object.
	if i := strings.IndexByte(string(b), '{'); i > 0 {
		b = b[i:]
	}
	if err := json.Unmarshal(b, &report); err != nil {
		return result{}, fmt.Errorf("fio's report: %w", err)
	}
	if len(report.Jobs) != 1 || report.Jobs[0].Error != 0 || report.Jobs[0].Read.Total == 0 {
		return result{}, fmt.Errorf("fio did not read: %s", b)
	}
	j := report.Jobs[0]
	return result{
		IOPS:     j.Read.IOPS,
		CPUPerIO: (j.UserCPU + j.SysCPU) / 100 * j.Read.TimeMS * 1000 / j.Read.Total,
		P50:      j.Read.Lat.Percentile["50.000000"] / 1e3,
		P99:      j.Read.Lat.Percentile["99.000000"] / 1e3,
	}, nil
}

func runHelios(ctx context.Context, o options, state string, depth int) (result, error) {
	args := []string{"bench", "io", "--state", state, "--ssd-count", "1", "--row-bytes",
		strconv.Itoa(o.bytes), "--depth", strconv.Itoa(depth),
		// fio has a command for each read
		"--seconds", strconv.FormatFloat(o.seconds, 'f', -1, 64), "--coalesce", "off", "--json"}
	b, err := output(ctx, o.heliosctl, append(args, o.extra...)...)
	if err != nil {
		return result{}, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		var r struct {
			result
			Audited *bool `json:"audited"`
		}
		if json.Unmarshal([]byte(line), &r) == nil && r.Audited != nil {
			if !*r.Audited {
				return result{}, fmt.Errorf("heliosctl's run failed its audit: %s", line)
			}
			return r.result, nil
		}
	}
	return result{}, fmt.Errorf("heliosctl printed no row of results: %s", b)
}

// median, least and most of one figure of all pairs.
func spread(ps []pair, f func(pair) float64) (med, lo, hi float64) {
	v := make([]float64, len(ps))
	for i, p := range ps {
		v[i] = f(p)
	}
	slices.Sort(v)
	med = v[len(v)/2]
	if len(v)%2 == 0 {
		med = (med + v[len(v)/2-1]) / 2
	}
	return med, v[0], v[len(v)-1]
}

func report(o options, pairs map[int][]pair, out io.Writer) error {
	w := bufio.NewWriter(out)
	show := func(format string, f func(pair) float64, ps []pair) string {
		m, lo, hi := spread(ps, f)
		return fmt.Sprintf(format+" ("+format+"-"+format+")", m, lo, hi)
	}
	var missed []string
	for _, depth := range o.depths {
		ps := pairs[depth]
		iops := func(p pair) float64 { return p.Helios.IOPS / p.Fio.IOPS }
		cpu := func(p pair) float64 { return p.Helios.CPUPerIO / p.Fio.CPUPerIO }
		fmt.Fprintf(w, "depth %d, %d alternations, %d bytes: median (least-most)\n", depth, len(ps),
			o.bytes)
		fmt.Fprintf(w, "  %-12s %s IOPS, %s us CPU per read, p50 %s us, p99 %s us\n", "fio",
			show("%.0f", func(p pair) float64 { return p.Fio.IOPS }, ps),
			show("%.2f", func(p pair) float64 { return p.Fio.CPUPerIO }, ps),
			show("%.0f", func(p pair) float64 { return p.Fio.P50 }, ps),
			show("%.0f", func(p pair) float64 { return p.Fio.P99 }, ps))
		fmt.Fprintf(w, "  %-12s %s IOPS, %s us CPU per read, p50 %s us, p99 %s us\n", "heliosctl",
			show("%.0f", func(p pair) float64 { return p.Helios.IOPS }, ps),
			show("%.2f", func(p pair) float64 { return p.Helios.CPUPerIO }, ps),
			show("%.0f", func(p pair) float64 { return p.Helios.P50 }, ps),
			show("%.0f", func(p pair) float64 { return p.Helios.P99 }, ps))
		fmt.Fprintf(w, "  %-12s %s of fio's IOPS, %s of fio's CPU per read\n", "ratio",
			show("%.3f", iops, ps), show("%.2f", cpu, ps))
		mi, _, _ := spread(ps, iops)
		mc, _, _ := spread(ps, cpu)
		if depth >= 32 && (mi < leastIOPS || mc > mostCPU) {
			missed = append(missed,
				fmt.Sprintf(
					"depth %d: %.3f of fio's IOPS (%.2f wanted), %.2f of its CPU per read (%.1f allowed)",
					depth, mi, leastIOPS, mc, mostCPU))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if o.check && len(missed) > 0 {
		return errors.New(strings.Join(missed, "; "))
	}
	return nil
}
