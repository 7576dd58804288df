package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/state"
)

// leastFiles is the number of files that any verb must be able to open: below 7 Go's
// runtime may end the process with a trace, and a dataset with its SSDs takes some 20.
const leastFiles = 32

// enoughFiles refuses to begin what would end in the middle.
func enoughFiles(getrlimit func(int, *unix.Rlimit) error) error {
	var l unix.Rlimit
	if getrlimit(unix.RLIMIT_NOFILE, &l) != nil || l.Cur >= leastFiles {
		return nil
	}
	return errs.New(errs.Capability,
		"this process may open %d files only, and heliosctl needs %d at least; run \"ulimit -n 1024\" first (the hard limit is %d; \"ulimit -Hn\", or limits.conf(5), raises that)",
		l.Cur, leastFiles, l.Max)
}

// advise adds to an error what only the command line knows: the flag that led to it, the shell's
// limit.
func (e *env) advise(err error) error {
	var missing *stripe.MissingError
	switch {
	case errors.As(err, &missing) && len(e.leftOut) > 0 && errs.ClassOf(err) == errs.Device:
		text := strings.Replace(e.spell(err), missing.Advice,
			fmt.Sprintf("--ssds leaves out %s: add the SSDs that hold it, or leave --ssds out",
				strings.Join(e.leftOut, ", ")), 1)
		return errs.New(errs.Usage, "%s", text)
	case errors.Is(err, unix.EMFILE):
		var l unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
			return err
		}
		return errs.New(errs.Capability,
			"%w; this process may open %d files: raise that with \"ulimit -n %d\" and run it again",
			err, l.Cur, max(1024, 4*l.Cur))
	case errors.Is(err, unix.ENFILE):
		return errs.New(errs.Capability,
			"%w; the whole machine has no file handles left: raise fs.file-max with sysctl, or end what holds them",
			err)
	}
	return err
}

// namesExcept are the names of those of all that are not among chosen.
func namesExcept(all, chosen []state.SSD) []string {
	var out []string
	for _, d := range all {
		if !slices.ContainsFunc(chosen, func(c state.SSD) bool { return c.Name == d.Name }) {
			out = append(out, d.Name)
		}
	}
	return out
}
