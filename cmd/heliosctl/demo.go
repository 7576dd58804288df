package main

import (
	_ "embed"
	"slices"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
)

//go:embed demo.sh
var demoScript string

func demoCommand() *cli.Command {
	return &cli.Command{
		Name:      "demo",
		Usage:     "show the main job: train a real graph from two file-backed SSDs, in 1 to 2 minutes",
		ArgsUsage: "[DIR]",
		Description: "Makes DIR (demo-out), which holds all that it writes, some 1.5 GiB. The graph is the package index\n" +
			"of this machine, or a generated one. It is a script; heliosctl carries it and needs bash and awk beside.",
		SkipFlagParsing: true, // none of those of other verbs means anything to it
		Action: func(c *cli.Context) error {
			args := c.Args().Slice()
			switch i := slices.IndexFunc(args, isFlag); {
			case slices.ContainsFunc(args, isHelp):
				hcli.PrintHelp(c.App.Writer, "", c.Command)
				return nil
			case i >= 0:
				return errs.New(errs.Usage, "unknown flag %s; the demo takes a folder alone", args[i])
			case len(args) > 1:
				return errs.New(errs.Usage, "unexpected argument %q; give one folder", args[1])
			}
			return runScript(c, "bash", demoScript, args)
		},
	}
}
