// Command gputier makes and runs the gpu tier: what is tested and measured on a machine that has an
// NVIDIA driver and nothing of ours, not even Go.
//
//	bin/lab/gputier pack -o DIR      DIR and DIR.tar.gz, test binaries and heliosctl included
//	DIR/run.sh [-out RESULTS]               there: a table, and results.json
//	bin/lab/gputier selftest         both here, on the fake libcuda, as a proof of the script
//
// Each step has a limit, and a step that fails is a failed row of the table; the others run all the
// same. The exit code is 1 when a step failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: gputier pack -o DIR | run [-out DIR] | selftest")
		os.Exit(2)
	}
	verbs := map[string]func(context.Context, []string) error{
		"pack": packVerb, "run": runVerb, "selftest": selftestVerb,
	}
	verb := verbs[os.Args[1]]
	if verb == nil {
		fmt.Fprintf(os.Stderr, "gputier: no verb %q; choose pack, run or selftest\n", os.Args[1])
		os.Exit(2)
	}
	switch err := verb(ctx, os.Args[2:]); {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "gputier:", err)
		os.Exit(1)
	}
}
