// Command fiocompare reads 4 KiB rows at random from one file, in turn through heliosctl's whole
// I/O path (NVMe queues, software controller) and with fio's io_uring engine, O_DIRECT both, and
// prints the medians and their ratios. It is the comparison of BENCHMARKS.md.
//
// Both read the same file for the same time at the same depth; CPU time is the process's user
// and system time, by I/O.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/internal/units"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "fiocompare:", err)
		os.Exit(1)
	}
}

type options struct {
	heliosctl string
	dir       string
	size      int64
	runs      int
	seconds   float64
	depths    []int
	blocks    string
	out       string
	minIOPS   float64
	maxCPU    float64
}

// sample is one run of one side.
type sample struct {
	Side    string  `json:"side"` // "heliosctl" or "fio"
	Depth   int     `json:"depth"`
	Run     int     `json:"run"`
	IOPS    float64 `json:"iops"`
	CPU     float64 `json:"cpu_us_per_io"`
	Audited bool    `json:"audited"` // heliosctl's own check of what it read
}

func run() (err error) {
	o := options{}
	size, depths, smoke := "", "", false
	flag.StringVar(&o.heliosctl, "heliosctl", "bin/heliosctl", "the binary")
	flag.StringVar(&o.dir, "dir", ".", "folder for the file, on the disk to measure")
	flag.StringVar(&size, "size", "1GiB", "size of the file")
	flag.IntVar(&o.runs, "runs", 5, "alternations")
	flag.Float64Var(&o.seconds, "seconds", 3, "length of a run")
	flag.StringVar(&depths, "depths", "1,32,256", "total depths")
	flag.StringVar(&o.blocks, "blocks", "32", "heliosctl's I/O blocks")
	flag.StringVar(&o.out, "out", "", "also write each run as a JSON line to this file")
	flag.Float64Var(&o.minIOPS, "min-iops", 0, "fail below this ratio of IOPS at depths over 1")
	flag.Float64Var(&o.maxCPU, "max-cpu", 0, "fail above this ratio of CPU time by I/O at depths over 1")
	flag.BoolVar(&smoke, "smoke", false, "one short run on a small file, to see that both sides work")
	flag.Parse()
	if smoke {
		size, o.runs, o.seconds, depths = "128MiB", 1, 1, "32"
	}
	if o.size, err = units.ParseBytes(size); err != nil {
		return fmt.Errorf("-size: %w", err)
	}
	if o.depths, err = units.ParseInts(depths, 1); err != nil {
		return fmt.Errorf("-depths: %w", err)
	}
	if o.heliosctl, err = filepath.Abs(o.heliosctl); err != nil {
		return err
	}
	_, err = exec.LookPath("fio")
	fio := err == nil
	if !fio {
		fmt.Println("fio is not installed: heliosctl's side alone")
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp(o.dir, "fiocompare-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := filepath.Join(dir, "ssd.img")
	if err := fill(file, o.size); err != nil {
		return err
	}
	state := filepath.Join(dir, "state")
	if _, err := output(ctx, o.heliosctl, "bind-ssds", "--state", state, "--proxy", file); err != nil {
		return err
	}

	var all []sample
	for _, depth := range o.depths {
		for r := range o.runs {
			s, err := helios(ctx, o, state, depth)
			if err != nil {
				return err
			}
			s.Run = r
			all = append(all, s)
			if fio {
				f, err := runFio(ctx, o, file, depth)
				if err != nil {
					return err
				}
				f.Run = r
				all = append(all, f)
			}
		}
		if err := report(o, all, depth, fio); err != nil {
			return err
		}
	}
	if o.out == "" {
		return nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, s := range all {
		if err := enc.Encode(s); err != nil {
			return err
		}
	}
	return os.WriteFile(o.out, b.Bytes(), 0o644)
}

// fill writes random bytes: holes of a sparse file would never reach the disk.
func fill(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := io.CopyN(f, rand.Reader, size); err != nil {
		return errors.Join(err, f.Close())
	}
	return errors.Join(f.Sync(), f.Close())
}

func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	c.Stderr = os.Stderr
	b, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", filepath.Base(name), strings.Join(args, " "), err)
	}
	return b, nil
}

func helios(ctx context.Context, o options, state string, depth int) (sample, error) {
	b, err := output(ctx, o.heliosctl, "bench", "io", "--state", state, "--ssds", "1", "--blocks", o.blocks, "--depth", strconv.Itoa(depth),
		"--row-bytes", "4096", "--stack", "async", "--seconds", strconv.FormatFloat(o.seconds, 'f', -1, 64), "--json", "--quiet")
	if err != nil {
		return sample{}, err
	}
	var row struct {
		sample
		Errors int64 `json:"errors"`
	}
	if err := json.Unmarshal(bytes.TrimSpace(b), &row); err != nil {
		return sample{}, fmt.Errorf("bench io: %w in %q", err, b)
	}
	if !row.Audited || row.Errors != 0 {
		return sample{}, fmt.Errorf("bench io failed its audit: %s", b)
	}
	row.Side, row.Depth = "heliosctl", depth
	return row.sample, nil
}

func runFio(ctx context.Context, o options, file string, depth int) (sample, error) {
	b, err := output(ctx, "fio", "--name=randread", "--filename="+file, "--readonly", "--rw=randread", "--bs=4k", "--direct=1", "--ioengine=io_uring",
		"--iodepth="+strconv.Itoa(depth), "--time_based", fmt.Sprintf("--runtime=%dms", int(o.seconds*1000)), "--norandommap", "--output-format=json")
	if err != nil {
		return sample{}, err
	}
	var doc struct {
		Jobs []struct {
			Read struct {
				IOPS    float64 `json:"iops"`
				Total   float64 `json:"total_ios"`
				Runtime float64 `json:"runtime"` // ms
			} `json:"read"`
			User   float64 `json:"usr_cpu"` // percent of runtime
			System float64 `json:"sys_cpu"`
		} `json:"jobs"`
	}
	if i := bytes.IndexByte(b, '{'); i > 0 {
		b = b[i:] // warnings come first
	}
	if err := json.Unmarshal(b, &doc); err != nil || len(doc.Jobs) != 1 || doc.Jobs[0].Read.Total == 0 {
		return sample{}, fmt.Errorf("fio: %v in %q", err, b)
	}
	j := doc.Jobs[0]
	return sample{Side: "fio", Depth: depth, IOPS: j.Read.IOPS, CPU: (j.User + j.System) / 100 * j.Read.Runtime * 1000 / j.Read.Total, Audited: true}, nil
}

// median of one side at a depth, with the lowest and highest.
func median(all []sample, side string, depth int, value func(sample) float64) (mid, low, high float64) {
	var v []float64
	for _, s := range all {
		if s.Side == side && s.Depth == depth {
			v = append(v, value(s))
		}
	}
	slices.Sort(v)
	mid = v[len(v)/2]
	if len(v)%2 == 0 {
		mid = (mid + v[len(v)/2-1]) / 2
	}
	return mid, v[0], v[len(v)-1]
}

func report(o options, all []sample, depth int, fio bool) error {
	iops := func(s sample) float64 { return s.IOPS }
	cpu := func(s sample) float64 { return s.CPU }
	var mids [2][2]float64
	for i, side := range []string{"heliosctl", "fio"} {
		if side == "fio" && !fio {
			return nil
		}
		m, lo, hi := median(all, side, depth, iops)
		c, clo, chi := median(all, side, depth, cpu)
		mids[i] = [2]float64{m, c}
		fmt.Printf("depth %3d  %-9s  %8.0f IOPS (%.0f to %.0f)  %6.2f us CPU by I/O (%.2f to %.2f)\n", depth, side, m, lo, hi, c, clo, chi)
	}
	ri, rc := mids[0][0]/mids[1][0], mids[0][1]/mids[1][1]
	fmt.Printf("depth %3d  ratio      %8.2f                          %6.2f\n", depth, ri, rc)
	if depth > 1 && o.minIOPS > 0 && ri < o.minIOPS {
		return fmt.Errorf("depth %d: %.2f of fio's IOPS is below %.2f", depth, ri, o.minIOPS)
	}
	if depth > 1 && o.maxCPU > 0 && rc > o.maxCPU {
		return fmt.Errorf("depth %d: %.2f of fio's CPU time is above %.2f", depth, rc, o.maxCPU)
	}
	return nil
}
