package main

import (
	"cmp"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/sched"
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

// thereNow names the datasets, checkpoints or SSDs that are there and begin with what is typed.
func thereNow(kind, typed string) []string {
	switch kind {
	case "dataset":
		return folders(typed, func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, dataset.MetaName))
			return err == nil
		})
	case "checkpoint":
		return folders(typed, sched.HoldsCheckpoint)
	case "ssd":
		store, err := state.Open("")
		if err != nil {
			return nil
		}
		st, err := store.Load()
		if err != nil {
			return nil
		}
		return namesExcept(st.SSDs, nil)
	}
	return nil
}

// folders lists the folders beside what is typed that hold something, and whose names need no
// quotes in a shell.
func folders(typed string, hold func(dir string) bool) (found []string) {
	parent, _ := filepath.Split(typed)
	entries, _ := os.ReadDir(cmp.Or(parent, ".")) // of a folder that is not there: none
	for _, e := range entries {
		name := parent + e.Name()
		if strings.HasPrefix(name, typed) && !strings.ContainsAny(name, " \t\n\"'\\$&;|<>()*?[`!") &&
			hold(name) {
			found = append(found, name)
		}
	}
	return found
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

// manCommand writes the manual pages that "make install" installs.
func manCommand() *cli.Command {
	return &cli.Command{
		Name:      "man",
		Usage:     "write the manual pages into a folder",
		ArgsUsage: "DIR",
		Hidden:    true,
		Action: action(1, func(_ context.Context, e *env) error {
			pages, err := manualPages(e.c.App)
			if err != nil {
				return err
			}
			dir := e.c.Args().First()
			if dir == "" {
				return errs.New(errs.Usage, "no folder for the pages; give one")
			}
			for name, page := range pages {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(page), 0o644); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}

// manualPages returns the pages by the names of their files: one that lists the verbs, and one for
// each verb, which has the pages of a group's verbs, too.
func manualPages(app *cli.App) (map[string]string, error) {
	index := *app
	index.Commands = nil
	apps := []*cli.App{&index}
	for _, c := range app.Commands {
		if c.Hidden {
			continue
		}
		name := app.Name + "-" + c.Name
		index.Commands = append(index.Commands,
			&cli.Command{Name: c.Name, Usage: c.Usage + "; see " + name + "(1)"})
		apps = append(apps, &cli.App{Name: name, Usage: c.Usage,
			UsageText:   hcli.UsageLine(app.Name+" "+c.Name, c),
			Description: "Example: " + c.UsageText + "\n\n" + c.Description, Flags: c.Flags, Commands: c.Subcommands})
	}
	pages := map[string]string{}
	for _, a := range apps {
		page, err := a.ToManWithSection(1)
		if err != nil {
			return nil, err
		}
		pages[a.Name+".1"] = page
	}
	return pages, nil
}
