package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	hcli "helios/internal/cli"
)

// A shell that asks gets the verbs, or the flags of the verb, and never an error.
func TestCompletion(t *testing.T) {
	isolate(t)
	ask := func(args ...string) []string {
		args = append(args, "--generate-bash-completion")
		before := os.Args // which urfave/cli reads
		defer func() { os.Args = before }()
		os.Args = append([]string{"heliosctl"}, args...)
		return strings.Fields(ok(t, args...))
	}
	require.Subset(t, ask(), []string{"train", "bench", "doctor"})
	require.NotContains(t, ask(), "man", "hidden")
	require.Contains(t, ask("bench"), "memory")
	require.Equal(t, []string{"--batch-size"}, ask("train", "g", "--batch-s"))
	require.Empty(t, ask("nosuchverb", "--x"))
	for _, shell := range hcli.Shells {
		script := ok(t, "completion", shell)
		require.Contains(t, script, "heliosctl")
		require.False(t, strings.Contains(script, "_NAME"), "a name that was not filled in")
		if path, err := exec.LookPath(shell); err == nil {
			cmd := exec.Command(path, "-n")
			cmd.Stdin = strings.NewReader(script)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s: %s", shell, out)
		}
	}
	fails(t, hc(t, "completion"), 2, "completion", "bash, zsh, fish")
	fails(t, hc(t, "completion", "csh"), 2, "completion", "csh", "bash, zsh, fish")
}

// The manual page names every verb and its flags.
func TestManualPage(t *testing.T) {
	isolate(t)
	page := ok(t, "man")
	require.True(t, strings.HasPrefix(page, ".nh\n.TH heliosctl 1"))
	for _, want := range []string{".SH bind-ssds", ".SH train", "--hidden", "Exit codes"} {
		require.Contains(t, page, want)
	}
	require.NotContains(t, page, ".SH man")
}
