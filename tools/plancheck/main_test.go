package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCalibrationRuns(t *testing.T) {
	require.Equal(t, "--mode inmem --gpu-cache 5% --fanout 5,5 --hidden 64",
		training("--mode gids --fanout 5,5 --gpu-cache 1% --hidden 64"))
	all := toMeasure()
	require.Contains(t, all, directory)
	for _, flags := range configurations {
		require.Contains(t, all, training(flags))
	}
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(all))), len(all), "each once")
}

func TestLimit(t *testing.T) {
	stages := map[string]float64{"sample": 1, "complete": 3, "train": 9}
	require.Equal(t, "training", limit(stages, 9, 0.1))
	require.Equal(t, "ssds", limit(stages, 9, 0.2))
	require.Equal(t, "nothing overlaps", limit(nil, 9, 1))
	require.Equal(t, 2.0, median([]float64{3, 1, 2}))
}

// Each measured run is planned with the machine's own speeds of training and of lookups, and the
// failure of a program is reported.
func TestCompare(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "heliosctl")
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	write("heliosctl", "#!/bin/sh\n"+
		`echo '{"seconds": 1.1, "bottleneck": "ssds", "busy_seconds": {"training": 4, "lookup": 3}}'`+"\n", 0o755)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "g"), 0o755))
	runs, err := json.Marshal([]run{{Flags: training("--mode bam --gpu-cache 5%"), Seconds: []float64{1}, Train: 2},
		{Flags: directory, Seconds: []float64{1}, Lookup: 1},
		{Flags: "--mode bam --gpu-cache 5%", Seconds: []float64{1, 1, 2}, Limit: "ssds"}})
	require.NoError(t, err)
	o := options{heliosctl: program, dir: dir, epochs: 2, model: "slow",
		plan: write("wall.json", string(runs), 0o600)}
	var out bytes.Buffer
	require.NoError(t, check(context.Background(), o, &out))
	require.Contains(t, out.String(), "1 runs: off by 10.0 % in the median")
	require.Contains(t, out.String(), "1 with the same limit")
	profile, err := os.ReadFile(filepath.Join(dir, "calibrated.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(profile), "value: 0.052")
	require.Contains(t, string(profile), "sets_ns: {value: 43.333")
	require.Contains(t, string(profile), "announce_ns: {value: 50,")
	write("heliosctl", "#!/bin/sh\necho no such thing >&2\nexit 2\n", 0o755)
	require.ErrorContains(t, check(context.Background(), o, &out), "no such thing")
}
