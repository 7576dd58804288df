package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	hcli "helios/internal/cli"
)

// Each verb that keeps results can be run again from them, and then has the same results.
func TestRerunOfEveryVerb(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "load", "g")
	small := "--fanout 3,3 --batch-size 128"
	model := small + " --hidden 8 --epochs 1 --gpu-cache 10%"
	ok(t, append([]string{"train", "g", "--checkpoint", "run"}, strings.Fields(model)...)...)
	ways := map[string][]string{
		"bench io":      {"--seconds 0.02", "--clock virtual --hardware a100-optane --ssd-count 1..2"},
		"cache hotness": {"g --sizes 5% --hotness degree,presample:1 " + small},
		"compare":       {"g --modes helios,inmem --repeats 1 " + model, "g --clock virtual --hardware a100-optane --modes helios,gids " + small},
		"eval":          {"g --checkpoint run"},
		"plan":          {"g --hardware a100-optane --sweep ssds=1,2 " + small, "g --hardware a100-optane " + small},
		"train":         {"g " + model, "g --clock virtual --hardware a100-optane " + model},
	}
	for path, c := range verbs(newApp(os.Stdout, os.Stderr).Commands, "") {
		if path == "rerun" || !hcli.HasFlag(c.Flags, "results") {
			continue
		}
		require.NotEmpty(t, ways[path], "%s keeps results: have it run again here", path)
		for _, way := range ways[path] {
			file := strings.ReplaceAll(path, " ", "-") + ".jsonl"
			args := slices.Concat(strings.Fields(path), strings.Fields(way),
				[]string{"--quiet", "--results", file, "--overwrite"})
			ok(t, args...)
			begin := lines(t, readFile(t, file))[0]
			for _, key := range []string{"schema", "version", "settings", "machine", "command", "time"} {
				require.NotEmpty(t, begin[key], "%s: %s", path, key)
			}
			got := lines(t, ok(t, "rerun", file, "--json"))
			require.Greater(t, got[0]["equal"], 0.0, path)
			require.Equal(t, path, got[0]["verb"])
			if path == "train" && !strings.Contains(way, "virtual") {
				require.Len(t, got[0]["params_sha256"], 64)
				require.EqualValues(t, 128, begin["settings"].(map[string]any)["batch-size"])
				require.EqualValues(t, 0.003, begin["settings"].(map[string]any)["lr"], "a default")
				require.Len(t, begin["ssds"], 1)
				require.Len(t, begin["devices"], 1)
			}
		}
	}
}
