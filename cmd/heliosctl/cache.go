package main

import "github.com/urfave/cli/v2"

func cacheCommand() *cli.Command {
	return &cli.Command{
		Name:        "cache",
		Usage:       "what static caches would make of a run: hotness",
		Subcommands: []*cli.Command{cacheHotnessCommand()},
	}
}
