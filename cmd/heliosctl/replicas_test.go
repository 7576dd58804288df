package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Replicas on the host device share its workers, and change no parameter; results and the table say
// how many there were, and another number of them resumes a run.
func TestReplicas(t *testing.T) {
	loaded(t, 1)
	args := func(extra ...string) []string {
		return append([]string{"train", "g", "--fanout", "5,5", "--batch-size", "128", "--epochs",
			"2", "--device", "host", "--workers", "4", "--shards", "4", "--seed", "1"}, extra...)
	}
	one := last(t, ok(t, args("--json", "--quiet")...))
	require.Equal(t, 1.0, one["replicas"])
	require.Equal(t, 4.0, one["shards"])
	require.NotContains(t, one, "more_devices")
	for _, q := range []string{"2", "3", "4"} {
		r := last(t, ok(t, args("--json", "--quiet", "--replicas", q)...))
		require.Equal(t, one["params_sha256"], r["params_sha256"], q)
		require.Equal(t, one["test_acc"], r["test_acc"])
	}
	text := ok(t, args("--replicas", "2", "--checkpoint", "c", "--epochs", "1")...)
	require.Regexp(t, `steps +of 4 mini-batches`, text)
	require.Regexp(t, `replicas +2; beside the first on host`, text)
	r := last(t, ok(t, args("--json", "--quiet", "--replicas", "4", "--checkpoint", "c",
		"--resume")...))
	require.Equal(t, one["params_sha256"], r["params_sha256"])
	fails(t, hc(t, args("--shards", "2", "--checkpoint", "c", "--resume")...), 2, "train",
		"shards 4, this run has 2")
	// without --shards a step has a mini-batch for each replica
	two := []string{"train", "g", "--fanout", "5,5", "--batch-size", "128", "--device", "host",
		"--workers", "2", "--json", "--quiet"}
	require.Equal(t, last(t, ok(t, append(two, "--shards", "2")...))["params_sha256"],
		last(t, ok(t, append(two, "--replicas", "2")...))["params_sha256"])
}
