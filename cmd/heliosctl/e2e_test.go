package main

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
)

// loaded makes a small graph and puts it on n proxied SSDs.
func loaded(t *testing.T, n int) {
	t.Helper()
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "32", "--seed", "3", "--out", "g")
	var files []string
	for i := range n {
		files = append(files, fmt.Sprintf("ssd%d.img", i))
	}
	ok(t, "bind-ssds", "--proxy", strings.Join(files, ","), "--size", "8MiB")
	ok(t, "load", "g")
}

func trainArgs(extra ...string) []string {
	return append([]string{"train", "--dataset", "g", "--fanout", "5,5", "--batch-size", "256",
		"--hidden", "16", "--epochs", "2", "--lr", "0.01", "--seed", "1", "--json", "--quiet"},
		extra...)
}

// The main job, verb by verb, in every mode.
func TestMainJob(t *testing.T) {
	loaded(t, 2)

	require.Contains(t, ok(t, "verify", "--dataset", "g", "--source"),
		"4000 rows equal to the source")
	ssds := lines(t, ok(t, "ssds", "--json"))
	require.Len(t, ssds, 2)
	for i, s := range ssds {
		require.Equal(t, "good", s["health"])
		require.Equal(t, "g", s["dataset"])
		require.Equal(t, float64(i), s["stripe"], "counted from 0, as in messages")
		require.Equal(t, true, s["loaded"])
	}
	require.Contains(t, ok(t, "ssds"), "g, stripe 1 of 2")

	var sha string
	var result map[string]any
	for _, mode := range [][]string{
		{"--mode", "helios", "--gpu-cache", "5%", "--cpu-cache", "10%", "--checkpoint", "ckpt",
			"--results", "r.jsonl"},
		{"--mode", "helios", "--gpu-cache", "0", "--cpu-cache", "0", "--pipeline", "none",
			"--workers", "1"},
		{"--mode", "inmem", "--pipeline", "intra"},
		{"--mode", "cpu", "--cpu-cache", "10%"},
		{"--mode", "mmap"},
		{"--mode", "bam", "--gpu-cache", "10%", "--accumulate", "0.8", "--pipeline", "run-ahead"},
		{"--mode", "gids", "--window", "4", "--cpu-cache", "20%", "--tune", "quick"},
		{"--policy", "sieve", "--cache-line", "4096", "--window", "2", "--gpu-cache", "10%",
			"--hotness", "degree", "--topology", "ssd"},
		{"--pipeline", "series", "--hotness-dir", "off"},
	} {
		out := ok(t, trainArgs(mode...)...)
		r := last(t, out)
		epochs := r["epochs"].([]any)
		require.Len(t, epochs, 2)
		first, second := epochs[0].(map[string]any), epochs[1].(map[string]any)
		require.Less(t, second["loss"], first["loss"], mode)
		for _, k := range []string{"mode", "model", "dataset", "seed", "device", "io_stack",
			"memory_rung", "epochs", "test_acc", "gpu_cache_bytes", "cpu_cache_bytes",
			"topology_bytes", "peak_memory_bytes", "params_sha256"} {
			require.Contains(t, r, k)
		}
		for _, k := range []string{"epoch", "seconds", "loss", "train_acc", "val_acc", "batches",
			"seeds", "rows_gpu", "rows_cpu", "rows_ssd", "bytes_ssd", "ssd_commands",
			"read_amplification", "stall", "overlap", "stage_seconds", "hit_ratio",
			"lines_inserted", "lines_evicted", "lines_bypassed", "read_groups", "group_batches"} {
			require.Contains(t, first, k)
		}
		require.Contains(t, r, "policy")
		for _, k := range []string{"sample", "lookup", "submit", "complete", "gather", "train"} {
			require.Contains(t, first["stage_seconds"], k)
		}
		if sha == "" {
			sha, result = r["params_sha256"].(string), r
			require.Len(t, sha, 64)
			require.Equal(t, out, kept(t, "r.jsonl"), "--results holds what --json prints")
		}
		require.Equal(t, sha, r["params_sha256"], mode)
		require.Equal(t, result["test_acc"], r["test_acc"], mode)
	}
	require.Greater(t, result["test_acc"], 0.3, "5 classes: chance is 0.2")

	ev := last(t, ok(t, "eval", "g", "--checkpoint", "ckpt", "--json"))
	require.Equal(t, result["test_acc"], ev["accuracy"])

	predicted := last(t, ok(t, "predict", "g", "--checkpoint", "ckpt", "--split", "test", "--csv", "p.csv",
		"--embeddings", "e.npy", "--json"))
	require.Equal(t, []any{"p.csv", "e.npy"}, []any{predicted["csv"], predicted["embeddings"]})
	f, err := os.Open("p.csv")
	require.NoError(t, err)
	defer f.Close()
	n := 0
	for sc := bufio.NewScanner(f); sc.Scan(); n++ {
		if n == 0 {
			require.True(t, strings.HasPrefix(sc.Text(), "node,class"))
		}
	}
	require.Equal(t, int(ev["nodes"].(float64))+1, n)
	fi, err := os.Stat("e.npy")
	require.NoError(t, err)
	require.Equal(t, int64(128+(n-1)*16*4), fi.Size())
	require.Len(t,
		strings.Split(strings.TrimSpace(ok(t, "predict", "g", "--checkpoint", "ckpt", "--nodes",
			"5,0,7")), "\n"), 3)

	row := lines(t, ok(t, "bench", "io", "--ssd-count", "1,2", "--io-blocks", "4", "--row-bytes", "4096",
		"--io-stack", "async", "--seconds", "0.2", "--json"))
	require.Len(t, row, 2)
	for i, r := range row {
		for _, k := range []string{"ssds", "blocks", "row_bytes", "stack", "queue_pairs", "depth",
			"iops", "bytes_per_second", "cpu_us_per_io", "p50_us", "p99_us", "errors", "audited",
			"smart_reads"} {
			require.Contains(t, r, k)
		}
		require.Equal(t, float64(i+1), r["ssds"])
		require.Equal(t, true, r["audited"])
		require.Equal(t, 0.0, r["errors"])
	}

	keep, err := filepath.Glob("*.img")
	require.NoError(t, err)
	require.Len(t, keep, 2)
	ok(t, "unbind-ssds", "--delete")
	gone, err := filepath.Glob("*.img")
	require.NoError(t, err)
	require.Empty(t, gone)
	left, err := filepath.Glob("*partial*")
	require.NoError(t, err)
	require.Empty(t, left)
}

// SSDs in shared memory outlive the command that bound them.
func TestSharedMemory(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "500", "--classes", "4", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy-ram", "2", "--size", "4MiB", "--lba", "4096")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	c := finishChild(t, child(t, "load", "g"))
	require.Equal(t, 0, c.code, c.errOut)
	require.Contains(t, ok(t, "verify", "g"), "good")
}

// Injected faults surface in counters and change nothing; those that can't be mended are
// errors of class device.
func TestFaults(t *testing.T) {
	loaded(t, 1)
	plain := last(t, ok(t, trainArgs("--no-eval")...))
	require.Nil(t, plain["test_acc"], "not measured is null, not 0")
	r := ok(t, trainArgs("--no-eval", "--gpu-cache", "0", "--cpu-cache", "0", "--coalesce", "off", "--read-timeout",
		"200ms", "--fault",
		"error(op=read,sct=0,sc=6,times=3,after=50);lost(op=read,times=2,after=100);late(ms=30,op=read,times=5,after=150)")...)
	got := last(t, r)
	require.Equal(t, plain["params_sha256"], got["params_sha256"])
	var retries float64
	for _, e := range got["epochs"].([]any) {
		retries += e.(map[string]any)["retries"].(float64)
	}
	require.Positive(t, retries)
	for _, l := range lines(t, r) {
		if l["event"] == "faults" {
			delete(l, "event")
			require.Len(t, l, 3)
			for f, n := range l {
				require.Positive(t, n, f)
			}
		}
	}
	bad := hc(t, trainArgs("--no-eval", "--gpu-cache", "0", "--cpu-cache", "0", "--fault",
		"error(op=read,sct=2,sc=0x81,dnr=1,after=50)")...)
	fails(t, bad, 5, "train", "unrecovered read error")
}

// Another command gets a clear answer while SSDs are in use; they are free when the user dies.
func TestSSDsInUse(t *testing.T) {
	loaded(t, 1)
	c := child(t, trainArgs("--mode", "helios", "--epochs", "100000", "--no-eval")...)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	_, err = bufio.NewReader(out).ReadString('\n') // an epoch is done
	require.NoError(t, err)
	fails(t, hc(t, "load", "g"), 4, "load", "reads it; wait until that has ended",
		strconv.Itoa(c.Process.Pid))
	fails(t, hc(t, "unload", "g"), 4, "unload", "reads it; wait until that has ended")
	fails(t, hc(t, "unbind-ssds", "--delete"), 4, "unbind-ssds", "in use")
	require.NoError(t, c.Process.Kill())
	require.Error(t, c.Wait())
	ok(t, "verify", "g")
}

// The first Ctrl-C saves and exits with 130; the run goes on later as if nothing had been.
func TestCtrlC(t *testing.T) {
	loaded(t, 1)
	want := last(t, ok(t, trainArgs("--epochs", "12", "--no-eval", "--cpu-cache", "80%")...))
	c := child(t, trainArgs("--epochs", "12", "--no-eval", "--cpu-cache", "80%", "--checkpoint",
		"ck")...)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	var errOut strings.Builder
	c.Stderr = &errOut
	require.NoError(t, c.Start())
	rd := bufio.NewReader(out)
	_, err = rd.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, c.Process.Signal(os.Interrupt))
	for err == nil {
		_, err = rd.ReadString('\n')
	}
	require.Error(t, c.Wait())
	fails(t, outcome{c.ProcessState.ExitCode(), "", errOut.String()}, 130, "train", "saved in ck",
		"--resume", "(interrupted)")
	got := last(t, ok(t, trainArgs("--epochs", "12", "--no-eval", "--cpu-cache", "80%",
		"--checkpoint", "ck", "--resume")...))
	require.Equal(t, want["params_sha256"], got["params_sha256"])
}

// Killed at random moments, again and again, a run ends with the parameters of an undisturbed
// one.
func TestKillAndResume(t *testing.T) {
	loaded(t, 1)
	args := trainArgs("--epochs", "12", "--no-eval", "--cpu-cache", "80%")
	want := last(t, ok(t, args...))
	args = append(args, "--checkpoint", "ck", "--checkpoint-every", "2", "--resume")
	kills := 20
	if wide.Lean() {
		kills = 4
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	killed := 0
	for range kills {
		c := child(t, args...)
		require.NoError(t, c.Start())
		time.Sleep(time.Duration(20+rng.IntN(200)) * time.Millisecond) // the random moment
		require.NoError(t, c.Process.Signal(syscall.SIGKILL))
		if err := c.Wait(); err != nil {
			killed++
		} else if err := os.RemoveAll("ck"); err != nil { // it was done already; start again
			t.Fatal(err)
		}
	}
	require.Positive(t, killed)
	got := last(t, ok(t, args...))
	require.Equal(t, want["params_sha256"], got["params_sha256"])
	left, err := filepath.Glob("ck/[^.]*")
	require.NoError(t, err)
	require.Len(t, left, 2, "the last and the best; no temporary file stays: %v", left)
	hidden, err := filepath.Glob("ck/.*")
	require.NoError(t, err)
	require.Equal(t, []string{"ck/.lock"}, hidden)
}

// Ctrl-C in the middle of writing leaves nothing that looks whole.
func TestCtrlCLeavesNoPart(t *testing.T) {
	loaded(t, 1)
	arrays(t, "in")
	for _, c := range []struct {
		args string
		out  string
	}{
		{"generate --kind rmat --nodes 3000000 --avg-degree 30 --dim 256 --out big", "big"},
		{"generate --kind sbm --nodes 3000000 --dim 256 --out big", "big"},
	} {
		cmd := child(t, strings.Fields(c.args)...)
		var errOut strings.Builder
		cmd.Stderr = &errOut
		require.NoError(t, cmd.Start())
		require.Eventually(t, func() bool { // it is writing
			part, _ := filepath.Glob("*big*partial*")
			return len(part) > 0
		}, 20*time.Second, 10*time.Millisecond)
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.Error(t, cmd.Wait())
		r := outcome{cmd.ProcessState.ExitCode(), "", errOut.String()}
		require.Equal(t, 130, r.code, r.errOut)
		require.Contains(t, r.errOut, "heliosctl generate: ")
		require.NoDirExists(t, c.out)
		part, err := filepath.Glob("*big*")
		require.NoError(t, err)
		require.Empty(t, part)
	}
}

// The second Ctrl-C ends the process at once, whatever it waits for.
func TestSecondCtrlC(t *testing.T) {
	loaded(t, 1)
	// A completion that never comes, with an hour until the deadline, holds the first Ctrl-C up.
	// One that is sent before the process waits for it ends the run at once: then it is tried
	// again, slower.
	for every := 300 * time.Millisecond; ; every *= 2 {
		require.Less(t, every, 20*time.Second, "the first Ctrl-C always ended it")
		if sent := interruptEvery(t, every); sent >= 2 {
			return
		}
	}
}

// interruptEvery trains with a read that hangs and sends Ctrl-C until the process is gone.
func interruptEvery(t *testing.T, every time.Duration) (sent int) {
	c := child(t, trainArgs("--no-eval", "--gpu-cache", "0", "--cpu-cache", "0",
		"--coalesce", "off", "--read-timeout", "1h", "--fault", "late(ms=3000000,op=read,after=2000,times=1)")...)
	require.NoError(t, c.Start())
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			require.Error(t, err)
			if c.ProcessState.ExitCode() == -1 { // before it waited for signals
				return 0
			}
			require.Equal(t, 130, c.ProcessState.ExitCode())
			return sent
		case <-tick.C:
			sent++
			_ = c.Process.Signal(os.Interrupt) // it may just have ended
			require.Less(t, sent, 60, "still there")
		}
	}
}

// Runs in one process give back what they took: descriptors, mappings, goroutines.
func TestNothingLeaks(t *testing.T) {
	loaded(t, 2)
	round := func() {
		ok(t, trainArgs("--checkpoint", "ck", "--overwrite")...)
		ok(t, "eval", "g", "--checkpoint", "ck", "--mode", "cpu")
		ok(t, "eval", "g", "--checkpoint", "ck", "--mode", "mmap")
		ok(t, "verify", "g")
		fails(t, hc(t, trainArgs("--no-eval", "--gpu-cache", "0", "--cpu-cache", "0", "--fault",
			"error(op=read,sct=2,sc=0x81,dnr=1,after=50)")...), 5, "train")
	}
	round()
	before := testrig.Held(t)
	round()
	before.Leaked(t)
}
