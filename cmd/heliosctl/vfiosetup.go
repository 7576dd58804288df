package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios"
	"helios/internal/errs"
)

func vfioSetupCommand() *cli.Command {
	return &cli.Command{
		Name:      verbVFIOSetup,
		Usage:     "prepare this machine for SSDs by VFIO, or say what it lacks (vfio-setup.sh, which heliosctl carries)",
		ArgsUsage: "status | setup | reset | --print | --help",
		Description: "status lists what is there and what lacks, and needs no root; \"sudo heliosctl vfio-setup setup\" loads modules,\n" +
			"reserves huge pages, makes the group and the udev rule; reset takes that back. --dry-run shows what would be\n" +
			"done, --help all options. --print writes the script to standard output, to be read before it runs as root.",
		// The script reads its options itself.
		SkipFlagParsing: true,
		Action:          runVFIOSetup,
	}
}

// verbVFIOSetup is the verb whose arguments are the script's, all of them.
const verbVFIOSetup = "vfio-setup"

// scriptStop is the time that the script has to end once it was interrupted.
const scriptStop = 10 * time.Second

func runVFIOSetup(c *cli.Context) error {
	args := c.Args().Slice()
	if len(args) == 1 && args[0] == "--print" {
		_, err := io.WriteString(c.App.Writer, helios.VFIOSetup)
		return err
	}
	err := runScript(c, "/bin/sh", helios.VFIOSetup, args)
	if err == nil || errors.Is(err, errSaid) || errs.ClassOf(err) == errs.Interrupted {
		return err
	}
	return errs.New(errs.Failed,
		"the script does not run: %w; \"heliosctl vfio-setup --print > vfio-setup.sh\" writes it to a file",
		err)
}

// runScript runs a script that the program carries for a verb.
func runScript(c *cli.Context, shell, text string, args []string) error {
	ctx := c.Context
	// The script is an argument: the input stays the user's, and no file has to be made that root
	// would run.
	cmd := exec.CommandContext(ctx, shell, append([]string{"-c", text, c.Command.HelpName}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = scriptStop
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, c.App.Writer, c.App.ErrWriter
	// The script calls this very program, though it may be in no PATH.
	cmd.Env = os.Environ()
	if self, err := os.Executable(); err == nil {
		cmd.Env = append(cmd.Env, "HELIOSCTL="+self)
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errs.With(errs.Interrupted, context.Cause(ctx))
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return errs.With(errs.Class(exit.ExitCode()), errSaid)
	}
	return err
}
