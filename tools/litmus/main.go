// Command litmus checks the hand-overs of the GPU's side in NVIDIA's memory model: what one
// thread, block, SSD or CPU leaves for another in memory. Each file of cuda/kernels/litmus is a
// small program with a state that must not be reachable. Dartagnan, a model checker, decides it
// under two versions of the model.
//
//	bin/lab/litmus check   compare the files with the tagged source that they model; no JVM
//	bin/lab/litmus run     run them all; --table also writes the table of the results
//
// Dartagnan (Dat3M 4.3.1) is looked for in the folder that --dartagnan or HELIOS_DARTAGNAN names:
// its cat files, dartagnan.jar, and either its libraries or the POMs that name these. It needs Java
// 17, and Maven once, to fetch the libraries. Where the machine lacks one of them the exit code is
// 3; a folder that is named and is not there is an error.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"helios/tools/internal/repo"
)

// folder of the litmus files, and the chapter with the table of results, from the module's root.
const (
	folder  = "cuda/kernels/litmus"
	chapter = "docs/architecture/memory-model.md"
)

type options struct {
	root, dartagnan, only string
	table                 bool
}

func main() {
	var o options
	fs := flag.NewFlagSet("litmus", flag.ExitOnError)
	fs.StringVar(&o.dartagnan, "dartagnan", os.Getenv("HELIOS_DARTAGNAN"), "Dartagnan's folder")
	fs.StringVar(&o.only, "only", "", "run: names of litmus tests, with commas (default: all)")
	fs.BoolVar(&o.table, "table", false, "run: write the results to "+chapter)
	fs.Usage = func() {
		fmt.Fprintln(fs.Output(), "usage: litmus check|run [flags]")
		fs.PrintDefaults()
	}
	if len(os.Args) < 2 || strings.HasPrefix(os.Args[1], "-") {
		fs.Usage()
		os.Exit(2)
	}
	verb := os.Args[1]
	_ = fs.Parse(os.Args[2:])
	if fs.NArg() > 0 || o.table && o.only != "" {
		fs.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := run(ctx, verb, o, os.Stdout)
	var lacks *lackError
	if errors.As(err, &lacks) {
		fmt.Printf("\n*** LITMUS TESTS NOT RUN: %v\n"+
			"*** The memory model of the queue protocol was not checked on this machine.\n\n", lacks)
		os.Exit(3)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "litmus %s: %v\n", verb, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, verb string, o options, out io.Writer) error {
	if verb != "check" && verb != "run" {
		return fmt.Errorf("unknown verb %q: want check or run", verb)
	}
	var err error
	if o.root, err = repo.Root(); err != nil {
		return err
	}
	tests, err := readTests(filepath.Join(o.root, folder))
	if err != nil {
		return err
	}
	src, err := readSource(o.root, "", nil)
	if err != nil {
		return err
	}
	if err := checkAll(tests, src); err != nil {
		return err
	}
	variants := 0
	for _, t := range tests {
		variants += len(t.variants())
	}
	fmt.Fprintf(out, "%d litmus tests with %d variants agree with %d tagged places of the source\n",
		len(tests), variants, len(src.places))
	if verb == "check" {
		return nil
	}
	if o.only != "" {
		names := strings.Split(o.only, ",")
		for _, n := range names {
			if !slices.ContainsFunc(tests, func(t *test) bool { return t.name == n }) {
				return fmt.Errorf("no litmus test %q in %s", n, folder)
			}
		}
		tests = slices.DeleteFunc(tests, func(t *test) bool {
			return !slices.Contains(names, t.name)
		})
	}
	d, err := findDartagnan(ctx, o.dartagnan, out)
	if err != nil {
		return err
	}
	results, err := d.run(ctx, tests, out)
	if err != nil {
		return err
	}
	if err := report(results, out); err != nil {
		return err
	}
	if o.table {
		return writeTable(filepath.Join(o.root, chapter), tests, src, results)
	}
	return nil
}
