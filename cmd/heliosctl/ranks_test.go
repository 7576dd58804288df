package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testrig"
	"helios/internal/wide"
)

// rankProcess is one rank of a run.
type rankProcess struct {
	cmd      *exec.Cmd
	out, err bytes.Buffer
}

func ranksBinary(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "heliosctl")
	b, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, "%s", b)
	return binary
}

// startRanks starts n processes, the state folder of rank r being sr.
func startRanks(ctx context.Context, t *testing.T, binary string, n int,
	args ...string) []*rankProcess {
	t.Helper()
	port := testrig.FreePort(t)
	var all []*rankProcess
	for r := range n {
		p := &rankProcess{cmd: exec.CommandContext(ctx, binary, args...)}
		p.cmd.Env = append(os.Environ(), fmt.Sprintf("HELIOS_STATE=s%d", r),
			"RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(n), "MASTER_ADDR=127.0.0.1",
			"MASTER_PORT="+port)
		p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.err
		require.NoError(t, p.cmd.Start())
		all = append(all, p)
	}
	return all
}

func (p *rankProcess) code(t *testing.T) int {
	t.Helper()
	err := p.cmd.Wait()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return p.cmd.ProcessState.ExitCode()
}

// awaitCheckpoint returns when a run has written its first checkpoint.
func awaitCheckpoint(ctx context.Context, t *testing.T, dir string) {
	t.Helper()
	for {
		if _, err := os.Stat(filepath.Join(dir, "checkpoint.safetensors")); err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("no checkpoint in %s: %v", dir, context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Processes give the parameters and figures of one, whatever carries their bytes; another number of
// them goes on with a run; and the death of one is the end of all.
func TestRanks(t *testing.T) {
	binary := ranksBinary(t)
	loaded(t, 1)
	args := []string{"train", "g", "--fanout", "5,5", "--batch-size", "96", "--hidden", "16",
		"--epochs", "2", "--seed", "1", "--device", "host", "--workers", "1", "--shards", "4",
		"--json", "--quiet"}
	one := last(t, ok(t, args...))
	for r := range 4 {
		t.Setenv("HELIOS_STATE", fmt.Sprintf("s%d", r))
		ok(t, "bind-ssds", "--proxy", fmt.Sprintf("rank%d.img", r), "--size", "8MiB")
		ok(t, "load", "g")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	same := func(out string, what string) {
		r := last(t, out)
		require.Equal(t, one["params_sha256"], r["params_sha256"], what)
		require.Equal(t, one["test_acc"], r["test_acc"], what)
		for i, ep := range one["epochs"].([]any) {
			want, got := ep.(map[string]any), r["epochs"].([]any)[i].(map[string]any)
			for _, f := range []string{"loss", "train_acc", "val_acc", "batches", "seeds"} {
				require.Equal(t, want[f], got[f], "%s %s", what, f)
			}
		}
	}
	modes := []string{"helios"}
	if !wide.Lean() {
		modes = append(modes, "cpu", "inmem", "mmap", "gids", "ginex")
	}
	for _, m := range modes {
		for _, n := range []int{2, 4} {
			all := startRanks(ctx, t, binary, n, append(args, "--mode", m)...)
			for r, p := range all {
				require.Zero(t, p.code(t), "%s, rank %d of %d: %s", m, r, n, p.err.String())
				if r > 0 {
					require.Empty(t, p.out.String())
				}
			}
			same(all[0].out.String(), fmt.Sprintf("%s, %d ranks", m, n))
		}
	}
	for _, run := range [][]string{
		{"mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", "sh", "-c",
			`HELIOS_STATE=s$OMPI_COMM_WORLD_RANK exec "$@"`, "sh"},
		{"mpirun.mpich", "-n", "2", "sh", "-c", `HELIOS_STATE=s$PMI_RANK exec "$@"`, "sh"},
	} {
		if _, err := exec.LookPath(run[0]); err != nil {
			t.Logf("%s is not on this machine (apt-get install openmpi-bin mpich)", run[0])
			continue
		}
		c := exec.CommandContext(ctx, run[0], append(append(run[1:], binary), args...)...)
		out, err := c.Output()
		require.NoError(t, err, run[0])
		same(string(out), run[0])
	}
	for _, p := range startRanks(ctx, t, binary, 4, append(args[:len(args):len(args)],
		"--checkpoint", "c", "--epochs", "1")...) {
		require.Zero(t, p.code(t), p.err.String())
	}
	all := startRanks(ctx, t, binary, 2, append(args[:len(args):len(args)], "--checkpoint", "c",
		"--resume")...)
	for _, p := range all {
		require.Zero(t, p.code(t), p.err.String())
	}
	same(all[0].out.String(), "4 ranks, then 2")

	all = startRanks(ctx, t, binary, 3, append(args[:len(args):len(args)], "--epochs", "1000",
		"--checkpoint", "kill")...)
	awaitCheckpoint(ctx, t, "kill") // all ranks train then
	require.NoError(t, all[2].cmd.Process.Signal(syscall.SIGKILL))
	began := time.Now()
	for r, p := range all {
		code := p.code(t)
		if r < 2 {
			require.Equal(t, 1, code, p.err.String())
			require.Contains(t, p.err.String(), "rank 2 on ")
			require.Contains(t, p.err.String(), "was killed")
		}
	}
	require.Less(t, time.Since(began), 30*time.Second)

	all = startRanks(ctx, t, binary, 2, append(args[:len(args):len(args)], "--epochs", "1000",
		"--checkpoint", "stop")...)
	awaitCheckpoint(ctx, t, "stop")
	require.NoError(t, all[1].cmd.Process.Signal(syscall.SIGTERM))
	for r, p := range all {
		require.Equal(t, 130, p.code(t), p.err.String())
		require.Contains(t, p.err.String(), []string{"and saved in stop", "rank 0 saves"}[r])
	}

	all = startRanks(ctx, t, binary, 2, append(args[:len(args):len(args)], "--mode", "diskgnn")...)
	for _, p := range all {
		require.Equal(t, 2, p.code(t))
		require.Contains(t, p.err.String(), "for one process")
	}
}
