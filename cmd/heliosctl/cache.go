package main

import "github.com/urfave/cli/v2"

func cacheCommand() *cli.Command {
	return &cli.Command{
		Name:        "cache",
		Usage:       "what other caches would have made of a recorded run",
		Subcommands: []*cli.Command{cacheReplayCommand()},
	}
}
