package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	hcli "helios/internal/cli"
	"helios/internal/faultinject"
)

// A verb that saves nothing says, when it is stopped, what is left and what to do.
func TestStoppedVerbsSayWhatIsLeft(t *testing.T) {
	for verb, args := range map[string]string{
		"generate":   "generate --nodes 3000 --out big",
		"import npy": "import npy --in in --out big",
	} {
		t.Run(verb, func(t *testing.T) {
			isolate(t)
			arrays(t, "in")
			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(errSignal)
			var out, errOut bytes.Buffer
			code := run(ctx, strings.Fields(args), &out, &errOut)
			fails(t, outcome{code, out.String(), errOut.String()}, 130, verb,
				"interrupted; nothing was kept; run it again")
			require.NotContains(t, errOut.String(), "context canceled")
			require.NoDirExists(t, "big")
		})
	}
	other := errors.New("disk full")
	require.Equal(t, other, whenStopped(other, "run it again"), "only a stop is commented")
	require.NoError(t, whenStopped(nil, "run it again"))
	require.EqualError(t, whenStopped(fmt.Errorf("load of g: %w", context.Canceled),
		"run it again"), "load of g: context canceled; run it again")
}

// What --help shows can be typed.
func TestHelpExamplesOfFaultsParse(t *testing.T) {
	found := regexp.MustCompile(`"((?:error|lost|late)\([^"]*)"`).FindAllStringSubmatch(ok(t,
		"train", "--help", "all"), -1)
	require.NotEmpty(t, found)
	for _, f := range found {
		_, err := faultinject.Parse(f[1])
		require.NoError(t, err, f[1])
	}
}

// Texts of --help name each default once.
func TestHelpNamesDefaultsOnce(t *testing.T) {
	for verb, c := range verbs(newApp(io.Discard, io.Discard).Commands, "") {
		for _, f := range c.Flags {
			_, usage := hcli.FlagText(f)
			require.LessOrEqual(t, strings.Count(usage, "(default:"), 1, "%s: %s", verb, usage)
		}
	}
}

// A bench io that is stopped says so once.
func TestStoppedBenchSaysSoOnce(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "8MiB", "--quiet")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete", "--quiet") })
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := time.AfterFunc(200*time.Millisecond, func() { cancel(errSignal) })
	defer stop.Stop()
	var out, errOut bytes.Buffer
	code := run(ctx, strings.Fields("bench io --seconds 600 --device host"), &out, &errOut)
	fails(t, outcome{code, out.String(), errOut.String()}, 130, "bench io", "interrupted")
	require.Equal(t, 1, strings.Count(errOut.String(), "interrupted"), errOut.String())
}
