// Command packlayout measures how package cache/packed lays the mini-batches of a recorded run out:
// under budgets of the disk, as the paper does and with copies; and with and without MinHash at
// given lengths of segments. With --dir it also measures packing, at one go and a mini-batch at a
// time, over files of made-up rows that are read and written past the page cache.
//
//	heliosctl train g --fanout 10,10 --trace T …
//	go run ./tools/packlayout --trace T --hot 5% --dir /some/disk
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"helios/cache/packed"
	"helios/cache/superbatch"
	"helios/cache/trace"
)

type options struct {
	trace, hot, budgets, segments, dir string
	rowBytes, seed                     int64
	workers, single, epochs            int
}

func main() {
	var o options
	flag.StringVar(&o.trace, "trace", "", "the trace of a run (heliosctl train, option trace)")
	flag.StringVar(&o.hot, "hot", "5%", "rows that stay in memory, in per cent of all")
	flag.StringVar(&o.budgets, "budgets", "3,5,7", "budgets of the disk, in sizes of the features")
	flag.StringVar(&o.segments, "segments", "50,100,150", "lengths of segments, for MinHash and none")
	flag.StringVar(&o.dir, "dir", "",
		"a folder to pack in; what this makes there is removed (without one nothing is packed)")
	flag.Int64Var(&o.rowBytes, "row-bytes", 512, "bytes of a row")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the hash functions and of samples")
	flag.IntVar(&o.workers, "workers", 2, "goroutines")
	flag.IntVar(&o.epochs, "epochs", 0, "training epochs of the trace to take; 0: all")
	flag.IntVar(&o.single, "single", 20, "mini-batches that are packed one at a time")
	flag.Parse()
	if err := run(context.Background(), o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "packlayout:", err)
		os.Exit(1)
	}
}

// load reads the training mini-batches of a trace.
func load(path string, epochs int) (m superbatch.Memory, rows int64, err error) {
	r, err := trace.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	err = r.Play(trace.Visitor{Batch: func(b *trace.Batch) error {
		if b.Kind != trace.Train || (epochs > 0 && b.Epoch >= epochs) {
			return nil
		}
		var all []int64
		for _, p := range b.Parts {
			all = append(all, p...)
		}
		m = append(m, all)
		return nil
	}})
	return m, r.Header().Rows, err
}

func numbers(list string) (all []float64, err error) {
	for _, s := range strings.Split(list, ",") {
		v, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

func run(ctx context.Context, o options, out io.Writer) error {
	if o.trace == "" {
		return errors.New("give --trace")
	}
	m, rows, err := load(o.trace, o.epochs)
	if err != nil {
		return err
	}
	hot, err := numbers(o.hot)
	if err != nil {
		return err
	}
	budgets, err := numbers(o.budgets)
	if err != nil {
		return err
	}
	segments, err := numbers(o.segments)
	if err != nil {
		return err
	}
	accesses := int64(0)
	for _, b := range m {
		accesses += int64(len(b))
	}
	c := packed.Config{Rows: rows, RowBytes: o.rowBytes, Seed: uint64(o.seed), Workers: o.workers,
		Hot: int64(hot[0] / 100 * float64(rows))}
	features := rows * o.rowBytes
	fmt.Fprintf(out, "%d mini-batches, %d accesses of %d rows of %d bytes, %d rows in memory\n\n",
		len(m), accesses, rows, o.rowBytes, c.Hot)
	fmt.Fprintln(out, "layout\tsegment\tdisk/features\tread KiB a batch\tamplification all\tof caches\tof chunks\trun KiB\tcopies %\tsearch s\testimate of disk, reads\tall s")
	one := func(name string, c packed.Config) (*packed.Result, error) {
		begin := time.Now()
		var f discard
		r, err := packed.Build(ctx, m, c, &f)
		if err != nil {
			fmt.Fprintf(out, "%s\t%v\n", name, err)
			return nil, nil
		}
		s, h := &r.Stats, r.Shape
		fmt.Fprintf(out, "%s\t%d\t%.2f\t%.0f\t%.3f\t%.3f\t%.3f\t%.0f\t%.1f\t", name, s.Segment,
			float64(s.Pages*h.PageBytes)/float64(features),
			float64(s.ReadPages()*h.PageBytes)/1024/float64(s.Batches), s.Amplification(h),
			s.CacheAmplification(h), s.ChunkAmplification(h), s.RunBytes(h)/1024,
			100*float64(s.Copies)/float64(max(s.Accesses-s.HotAccesses, 1)))
		if r.Found.Estimated {
			fmt.Fprintf(out, "%.1f\t%+.1f %%, %+.1f %%\t", r.Found.Seconds,
				100*(float64(r.Found.Pages)/float64(s.Pages)-1),
				100*(float64(r.Found.ReadPages)/float64(s.ReadPages())-1))
		} else {
			fmt.Fprint(out, "-\t-\t")
		}
		fmt.Fprintf(out, "%.1f\n", time.Since(begin).Seconds())
		return r, nil
	}
	for _, b := range budgets {
		c := c
		c.Budget = int64(b * float64(features))
		for _, once := range []bool{true, false} {
			c.Hashes = 0
			name := fmt.Sprintf("%gx, copies", b)
			if c.Once = once; once {
				c.Hashes = 2
				name = fmt.Sprintf("%gx, as the paper", b)
			}
			if _, err := one(name, c); err != nil {
				return err
			}
		}
	}
	for _, length := range segments {
		for _, hashes := range []int{-1, 2, 0} {
			c := c
			c.Segment, c.Hashes = int(length), hashes
			name := fmt.Sprintf("%g, %d hashes", length, hashes)
			switch {
			case hashes < 0:
				name = fmt.Sprintf("%g, no MinHash", length)
			case hashes == 0:
				name = fmt.Sprintf("%g, first mini-batches", length)
			}
			if _, err := one(name, c); err != nil {
				return err
			}
		}
	}
	if o.dir == "" {
		return nil
	}
	c.Budget = int64(budgets[0] * float64(features))
	return comparePacking(ctx, o, m, c, out)
}

// discard is a packed.File that keeps nothing.
type discard struct{}

func (*discard) WriteAt(b []byte, _ int64) (int, error) { return len(b), nil }
func (*discard) Truncate(int64) error                   { return nil }
