package main

import "github.com/urfave/cli/v2"

func cacheCommand() *cli.Command {
	return &cli.Command{
		Name:  "cache",
		Usage: "what other caches would have made of a run: policies, sizes, hotness, the split of memory",
		Subcommands: []*cli.Command{cacheReplayCommand(), cachePlanCommand(),
			cacheHotnessCommand()},
	}
}
