package report

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEpochFigures(t *testing.T) {
	p := Partial{
		Seconds: 2, Waited: 0.5, LossSum: 30, Correct: 5, Counted: 10, Batches: 3, Seeds: 12,
		RowsSSD: 100, BytesSSD: 100 * 512, Commands: 100, Stages: StageSeconds{Sample: 1,
			Complete: 2, Train: 1},
	}
	r := p.Result(4, 128)
	require.Equal(t, 5, r.Epoch)
	require.Equal(t, 3.0, r.Loss)
	require.Equal(t, 0.5, *r.TrainAcc)
	require.Equal(t, 4.0, r.ReadAmplification)
	require.Equal(t, 0.25, r.Stall)
	require.Equal(t, 6.0, r.SeedsPerSecond)
	require.Equal(t, 25600.0, r.SSDBytesPerSecond)
	require.Equal(t, 50.0, r.SSDIOPS)
	require.Equal(t, 0.5, r.Overlap)
	zero := Partial{}.Result(0, 128)
	require.Zero(t, zero.Loss)
	require.Zero(t, zero.Overlap)
	_, err := json.Marshal(zero) // no NaN, which JSON can't hold
	require.NoError(t, err)
}

// The names that scripts rely on (the JSON contract).
func TestResultFieldNames(t *testing.T) {
	b, err := json.Marshal(Result{Epochs: []EpochResult{{}}})
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(b, &m))
	for _, k := range []string{
		"mode", "model", "dataset", "seed", "device", "io_stack", "memory_rung", "epochs",
		"test_acc",
		"gpu_cache_bytes", "cpu_cache_bytes", "topology_bytes", "peak_memory_bytes",
		"params_sha256",
	} {
		require.Contains(t, m, k)
	}
	e := m["epochs"].([]any)[0].(map[string]any)
	for _, k := range []string{
		"epoch", "seconds", "loss", "train_acc", "val_acc", "batches", "seeds", "rows_gpu",
		"rows_cpu", "rows_ssd",
		"bytes_ssd", "ssd_commands", "read_amplification", "stall", "overlap", "stage_seconds",
	} {
		require.Contains(t, e, k)
	}
	s := e["stage_seconds"].(map[string]any)
	for _, k := range []string{"sample", "lookup", "submit", "complete", "gather", "train"} {
		require.Contains(t, s, k)
	}
}
