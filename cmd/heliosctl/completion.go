package main

import (
	"context"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
)

func completionCommand() *cli.Command {
	return &cli.Command{
		Name:  "completion",
		Usage: "print a script with which a shell completes verbs and flags",
		Description: "For bash: source <(heliosctl completion bash), or \"make install\", which puts the scripts of all shells\n" +
			"where they look for them.",
		ArgsUsage: strings.Join(hcli.Shells, "|"),
		Action:    action(1, runCompletion),
	}
}

func runCompletion(_ context.Context, e *env) error {
	shell := e.c.Args().First()
	if shell == "" {
		return errs.New(errs.Usage, "no shell; choose one of %s", strings.Join(hcli.Shells, ", "))
	}
	script, err := hcli.Completion(e.c.App, shell)
	if err != nil {
		return err
	}
	_, err = io.WriteString(e.c.App.Writer, script)
	return err
}

// manCommand writes the manual page that "make install" installs.
func manCommand() *cli.Command {
	return &cli.Command{
		Name:   "man",
		Usage:  "print the manual page",
		Hidden: true,
		Action: action(0, func(_ context.Context, e *env) error {
			page, err := e.c.App.ToManWithSection(1)
			if err != nil {
				return err
			}
			_, err = io.WriteString(e.c.App.Writer, page)
			return err
		}),
	}
}
