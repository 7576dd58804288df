package main

import (
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
)

// commonFlags are taken by every verb, before or after its name.
func commonFlags() []cli.Flag {
	return append(commonOptions().Flags(), &cli.StringFlag{Name: "config", // arrange reads it
		Usage: "read flags from `FILE.yaml`, with their names as keys; flags given here win"})
}

// commonArgs hold the options of every verb.
type commonArgs struct {
	stateDir string `option:"state" use:"aside" arg:"DIR" usage:"DIR with the list of bound SSDs (default: $HELIOS_STATE, else heliosctl in the user's state folder)"`
	json     bool   `option:"json" use:"aside" usage:"write results as JSON, one object per line"`
	quiet    bool   `option:"quiet" use:"aside" usage:"show no progress"`
	progress string `option:"progress" use:"aside" oneof:"text,json" default:"text" usage:"progress and notes on standard error: for people, or as JSON lines for scripts"`
}

func commonOptions() hcli.Options[commonArgs] { return hcli.Of[commonArgs]() }

const progressJSON = "json"

// newApp builds the command line. urfave/cli parses and documents it; arrange has put the
// arguments in an order that it can parse.
func newApp(stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:        "heliosctl",
		Usage:       "train graph neural networks whose features live on NVMe SSDs",
		Description: "Exit codes: 0 done, 1 failed, 2 usage, 3 capability missing, 4 refused for safety,\n5 device or data error, 130 interrupted (state saved).",
		Commands: []*cli.Command{
			bindCommand(), unbindCommand(), ssdsCommand(),
			generateCommand(), importCommand(), namesCommand(), partitionCommand(), loadCommand(),
			unloadCommand(), verifyCommand(),
			prepareCommand(), trainCommand(), evalCommand(), predictCommand(), serveCommand(),
			compareCommand(),
			reportCommand(), rerunCommand(),
			benchCommand(), cacheCommand(), planCommand(),
			doctorCommand(), vfioSetupCommand(), versionCommand(),
			completionCommand(), manCommand(),
		},
		Writer:          stdout,
		ErrWriter:       stderr,
		HideVersion:     true,
		HideHelpCommand: true,
		// A library must not end the process or print errors of its own.
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return usageError(err) },
	}
	for _, c := range app.Commands {
		finish(c, "")
	}
	return app
}

// finish gives a verb, or each verb of a group, what all verbs have.
func finish(c *cli.Command, parent string) {
	path := strings.TrimPrefix(parent+" "+c.Name, " ")
	c.HideHelpCommand = true
	c.OnUsageError = func(_ *cli.Context, err error, _ bool) error { return usageError(err) }
	for _, s := range c.Subcommands {
		finish(s, path)
	}
	if len(c.Subcommands) == 0 {
		// Flags in groups are listed before the help flag is added by itself.
		explainColumns(c, path)
		c.Flags = slices.Concat(c.Flags, commonFlags(), []cli.Flag{cli.HelpFlag})
	}
}
