package main

import (
	"context"
	"os"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/htmlreport"
)

// mostReported bounds the files of a report.
const mostReported = 1000

func reportCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "report",
		Usage:     "draw results of other verbs on one web page",
		ArgsUsage: "FILE…",
		Description: "Each FILE is what --results or --json of train, eval, compare, bench or cache wrote.\n" +
			"The page needs no network and nothing beside it. Runs of train that differ by their seed alone become one line with a band; others stand beside each other.",
	}, mostReported, hcli.Of[reportArgs]().Without("results"), runReport)
}

// reportArgs holds the options of report.
type reportArgs struct {
	outputs
	out string `option:"out" shown:"none" arg:"FILE" usage:"web page FILE to write (required)"`
}

func runReport(_ context.Context, e *env, a *reportArgs) (err error) {
	names := e.c.Args().Slice()
	switch {
	case len(names) == 0:
		return errs.New(errs.Usage,
			"no FILE to draw; give files that {results} of train, compare, bench or cache has written")
	case a.out == "":
		return errs.New(errs.Usage, "no {out} FILE; name the web page that there is to be")
	}
	for _, name := range names {
		fi, err := os.Stat(name)
		page, perr := os.Stat(a.out)
		if err == nil && perr == nil && os.SameFile(fi, page) {
			return errs.New(errs.Usage,
				"{out} %s is one of the files of results; name another for the page", a.out)
		}
	}
	out, err := a.create("out", a.out)
	if err != nil {
		return err
	}
	defer closing(&err, out.Discard)
	var all []*htmlreport.Source
	for _, name := range names {
		s, err := readSource(name)
		if err != nil {
			return err
		}
		if !s.Ended || !s.Whole {
			e.ui.Note("%s has a run that did not come to its end; the page says so", name)
		}
		all = append(all, s)
	}
	err = htmlreport.Write(out, all, programVersion())
	if errs.ClassOf(err) == errs.Usage { // it lies in the results, not in the page's place
		return err
	}
	if err := out.Commit(err); err != nil {
		return err
	}
	e.ui.Printf("%s: %d files of results", a.out, len(all))
	return e.ui.Event("result", reportLine{a.out, len(all)})
}

// reportLine names the page that report has written.
type reportLine struct {
	File    string `json:"file"`
	Sources int    `json:"sources"` // files of results
}

func readSource(name string) (_ *htmlreport.Source, err error) {
	f, err := openConfig(name)
	if err != nil {
		return nil, errs.New(errs.Usage, "results: %w", err)
	}
	defer closing(&err, f.Close)
	return htmlreport.Read(f, name)
}
