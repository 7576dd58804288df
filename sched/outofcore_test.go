package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gnn"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// outOfCore is an epoch of the reference model with caches of 15 % of the features. It
// compares random gathered rows with the source and prints the result as JSON.
func outOfCore(mode string, in prepare.Inputs) error {
	cfg := plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 64},
		Mode:          mode,
		Seed:          1,
		NoEval:        true,
		GPUCache:      percent(5),
		CPUCache:      percent(10),
	}
	if mode != static.ModeHelios {
		cfg.GPUCache = percent(0)
	}
	d := in.Dataset
	rng := rand.New(rand.NewPCG(1, 1))
	want := make([]byte, d.Meta.RowBytes())
	var bad error
	cfg.OnRows = func(nodes []int64, rows []float32) {
		for range 50 {
			i := rng.IntN(len(nodes))
			if err := d.ReadRows(nodes[i], want); err != nil {
				bad = err
				return
			}
			for k, x := range hostmem.View[float32](want) {
				if rows[i*d.Meta.Dim+k] != x {
					bad = fmt.Errorf("row %d differs from the source", nodes[i])
				}
			}
		}
	}
	r, err := Train(context.Background(), cfg, in, report.Observer{})
	if err == nil {
		err = bad
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// Features of more than six times the caches, on file-backed SSDs: memory stays below budgets +
// topology + 400 MiB. Each mode runs in a process of its own, whose memory it is that counts.
func TestOutOfCoreMemory(t *testing.T) {
	if wide.Lean() {
		t.Skip("writes a gigabyte and trains an epoch on it twice")
	}
	d := graphSpec{nodes: 500_000, dim: 256, degree: 10, train: 0.025}.generate(t)
	s := bindIn(t, d, 2, t.TempDir(), true, "")
	s.off(t)
	sha := ""
	for _, mode := range []string{static.ModeHelios, static.ModeCPU} {
		env, err := json.Marshal(childRun{Dataset: d.Dir(), SSDs: s.paths, OutOfCore: mode})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+string(env))
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		err = cmd.Run()
		cancel()
		require.NoError(t, err, stderr.String())
		var r report.Result
		require.NoError(t, json.Unmarshal(out.Bytes(), &r))
		features := d.Meta.Nodes * int64(d.Meta.RowBytes())
		require.Greater(t, features, 5*(r.GPUCacheBytes+r.CPUCacheBytes))
		limit := r.GPUCacheBytes + r.CPUCacheBytes + r.TopologyBytes + 400<<20
		t.Logf(
			"%s: features %d MiB, peak %d MiB, limit %d MiB, epoch %.1f s, stall %.2f, overlap %.2f",
			mode, features>>20,
			r.PeakMemoryBytes>>20, limit>>20, r.Epochs[0].Seconds, r.Epochs[0].Stall,
			r.Epochs[0].Overlap)
		require.Less(t, r.PeakMemoryBytes, limit)
		if sha == "" {
			sha = r.ParamsSHA256
		}
		require.Equal(t, sha, r.ParamsSHA256)
	}
}
