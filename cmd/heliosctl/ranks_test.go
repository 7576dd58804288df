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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
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
// them resumes a run; and the death of one is the end of all.
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
			if wide.Lean() && n == 2 {
				continue
			}
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
		if wide.Lean() {
			break // internal/ranks has MPI on few cases
		}
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

// Variables of a launcher are taken or refused by name, and verbs of one process refuse to be
// several.
func TestLaunchersAreRefused(t *testing.T) {
	t.Setenv("HELIOS_RANK_SECRET", "")
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("short", []byte("secret\n"), 0o600))
	require.NoError(t, os.WriteFile("long", []byte("0123456789abcdef\n"), 0o600))
	// One pipe has no writer, the other one that writes nothing.
	require.NoError(t, unix.Mkfifo("pipe", 0o600))
	quiet, silent, err := os.Pipe()
	require.NoError(t, err)
	defer silent.Close() //nolint:errcheck // nothing is written
	defer quiet.Close()  //nolint:errcheck // nothing is read
	secretTimeout = 10 * time.Millisecond
	defer func() { secretTimeout = time.Minute }()
	slurm := "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[1-2] "
	torch := "RANK=1 WORLD_SIZE=2 MASTER_PORT=1 MASTER_ADDR=192.0.2.1 "
	for _, c := range []struct {
		env, args string
		code      int
		says      string
	}{
		{slurm, "compare g", 2, "its launcher started 2 (SLURM_STEP_NUM_TASKS=2)"},
		{slurm, "rerun short", 2, "its launcher started 2"},
		{slurm, "eval g --checkpoint c", 2, "its launcher started 2"},
		{torch, "predict g --checkpoint c", 2, "its launcher started 2 (WORLD_SIZE=2)"},
		{"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3",
			"train g --clock virtual --hardware a100-p5510x12", 2, "its launcher started 3"},
		{"PMIX_RANK=0", "train g", 2, "PMIX_RANK is set"},
		{strings.Replace(slurm, "[1-2]", "[x]", 1), "train g", 2, "SLURM_STEP_NODELIST=\"n[x]\""},
		{torch, "train g", 4, "share no secret"},
		{torch, "train g --rank-secret-file missing", 2, "--rank-secret-file: open missing"},
		{torch, "train g --rank-secret-file .", 2, "--rank-secret-file: read ."},
		{torch, "train g --rank-secret-file pipe", 2, "pipe: a secret of ranks has 16 to 4096 bytes"},
		{torch, fmt.Sprintf("train g --rank-secret-file /dev/fd/%d", quiet.Fd()), 2, "timeout"},
		{torch, "train g --rank-secret-file short", 2, "short: a secret of ranks has 16 to 4096 bytes"},
		{torch, "train g --rank-secret-file /dev/zero", 2, "16 to 4096 bytes"},
		{torch, "train g --rank-secret-file long --rank-insecure", 2, "leave one of the two out"},
		{torch + "HELIOS_RANK_SECRET=x", "train g", 2, "$HELIOS_RANK_SECRET: a secret of ranks has"},
		{"", "train g --rank-secret-file long", 2, "--rank-secret-file is for several processes"},
		{"", "train g --rank-insecure", 2, "--rank-insecure is for several processes"},
		{"PMI_RANK=0 PMI_SIZE=2", "train g --rank-listen 0.0.0.0", 2, "--rank-listen is for several"},
	} {
		t.Run(c.args, func(t *testing.T) {
			for _, f := range strings.Fields(c.env) {
				name, value, _ := strings.Cut(f, "=")
				t.Setenv(name, value)
			}
			fails(t, hc(t, strings.Fields(c.args)...), c.code, strings.Fields(c.args)[0], c.says)
		})
	}
}

// Tasks of srun train one model, with and without a secret.
func TestSlurmTasksJoin(t *testing.T) {
	binary := ranksBinary(t)
	loaded(t, 1)
	args := []string{"train", "g", "--fanout", "3,3", "--batch-size", "96", "--hidden", "8",
		"--epochs", "1", "--seed", "1", "--device", "host", "--workers", "1", "--shards", "2",
		"--json", "--quiet"}
	one := last(t, ok(t, args...))
	for r := range 2 {
		t.Setenv("HELIOS_STATE", fmt.Sprintf("s%d", r))
		ok(t, "bind-ssds", "--proxy", fmt.Sprintf("rank%d.img", r), "--size", "8MiB")
		ok(t, "load", "g")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, os.WriteFile("secret", []byte("0123456789abcdef\n"), 0o600))
	port := testrig.FreePort(t)
	for _, more := range [][]string{nil, {"--rank-secret-file", "secret"}} {
		var all []*rankProcess
		for r := range 2 {
			p := &rankProcess{cmd: exec.CommandContext(ctx, binary, append(args, more...)...)}
			p.cmd.Env = append(os.Environ(), fmt.Sprintf("HELIOS_STATE=s%d", r), "SLURM_JOB_ID=1",
				"SLURM_STEP_ID=0", "SLURM_NTASKS=2", "SLURM_STEP_NUM_TASKS=2",
				"SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NODELIST=node[01-02]", "MASTER_PORT="+port,
				"SLURM_PROCID="+strconv.Itoa(r), "SLURM_LOCALID="+strconv.Itoa(r))
			p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.err
			require.NoError(t, p.cmd.Start())
			all = append(all, p)
		}
		for _, p := range all {
			require.Zero(t, p.code(t), p.err.String())
		}
		require.Equal(t, one["params_sha256"], last(t, all[0].out.String())["params_sha256"])
		require.Empty(t, all[1].out.String())
	}
}
