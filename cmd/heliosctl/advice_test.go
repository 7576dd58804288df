package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// With too few files to open, heliosctl says so before it begins, and never ends in a trace of
// Go's.
func TestFewFiles(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--classes", "3", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "4MiB")
	limited := func(files string, args ...string) outcome {
		c := child(t, args...)
		c.Path, c.Args = "/bin/sh",
			append([]string{"sh", "-c", "ulimit -n " + files + "; exec \"$@\"", "sh", os.Args[0]},
				args...)
		return finishChild(t, c)
	}
	if out, err := exec.Command("/bin/sh", "-c", "ulimit -n 7 && ulimit -n").Output(); err != nil ||
		string(out) != "7\n" {
		t.Skipf("this shell cannot lower the limit: %s %v", out, err)
	}
	// Three streams and two files of the runtime's timers are the least that any Go program has.
	for _, n := range []string{"7", "8", "12"} {
		fails(t, limited(n, "load", "g"), 3, "load", "may open "+n+" files only", "ulimit -n 1024")
	}
	// Enough to begin with, too few for the work.
	r := limited("32", "train", "g", "--epochs", "1", "--quiet")
	require.NotContains(t, r.errOut, "goroutine")
	ok(t, "load", "g")
	r = limited("32", "bind-ssds", "--proxy-ram", "64", "--size", "1MiB")
	require.Zero(t, r.code, r.errOut)
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	r = limited("32", "bench", "io", "--seconds", "0.01", "--quiet")
	fails(t, r, 3, "bench io", "too many open files", "may open 32 files", "ulimit -n 1024")
}
