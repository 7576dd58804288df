// Command acceptance runs the main job's long claims on the built binary and prints what it saw:
//
//	edges    GraphSAGE on the Debian graph against the same model without edges, by paired seeds
//	memory   features several times both cache budgets: the peak against budgets + topology + 400 MiB
//	same     one seed in every mode, cache, policy, pipeline, topology, worker and SSD count, with AVX2 and AVX-512: equal parameters
//	growth   30 epochs: the memory after the last within 1 % of that after the third
//	kills    a run killed with SIGKILL at random moments: its checkpoint is the old or the new one, each line of its results
//	         parses, and resumed it comes to equal parameters
//	hierkills  partition and runs of mode hier, from the making of their layout on, killed with SIGKILL at random moments: the
//	         next one goes on, its parameters and bytes are those without kills, the dataset is as it was, nothing is left over
//	soak     import, load, train, serve and ranks under random faults, each killed at random moments: nothing is lost,
//	         and nothing is left over: not by default
//
//	make build && bin/lab/acceptance -heliosctl bin/heliosctl
//
// It leaves nothing behind, and exits with 1 when a claim does not hold. Unit tests hold smaller
// forms of the same claims; this is what BENCHMARKS.md quotes.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

type runner struct {
	ctx   context.Context
	bin   string
	dir   string
	seeds int
	kills int
	nodes int
	seed  uint64
	soak  time.Duration
}

// result holds what acceptance reads of "train --json".
type result struct {
	Event  string `json:"event"`
	Epochs []struct {
		Loss    float64 `json:"loss"`
		Seconds float64 `json:"seconds"`
		RowsGPU int64   `json:"rows_gpu"`
		RowsCPU int64   `json:"rows_cpu"`
		RowsSSD int64   `json:"rows_ssd"`
		Memory  int64   `json:"memory_bytes"`
	} `json:"epochs"`
	Kernels  string  `json:"kernels"`
	TestAcc  float64 `json:"test_acc"`
	GPU      int64   `json:"gpu_cache_bytes"`
	CPU      int64   `json:"cpu_cache_bytes"`
	Topology int64   `json:"topology_bytes"`
	Peak     int64   `json:"peak_memory_bytes"`
	SHA      string  `json:"params_sha256"`
}

func main() {
	r := &runner{}
	only := flag.String("only", "edges,memory,same,growth,kills,hierkills", "claims to run")
	parent := flag.String("dir", os.TempDir(), "folder for the work; needs 6 GB free")
	flag.StringVar(&r.bin, "heliosctl", "bin/heliosctl", "binary to run")
	flag.IntVar(&r.seeds, "seeds", 5, "paired seeds of edges")
	flag.IntVar(&r.kills, "kills", 20,
		"kills of kills, hierkills and soak; 200 take about a minute on an idle machine")
	flag.Uint64Var(&r.seed, "seed", 0, "seed of the kills and faults (default: the time)")
	flag.DurationVar(&r.soak, "soak", 30*time.Minute, "how long soak goes on at least")
	flag.IntVar(&r.nodes, "nodes", 1_000_000, "nodes of memory")
	flag.Parse()
	if r.seed == 0 {
		r.seed = uint64(time.Now().UnixNano())
	}
	if err := run(r, *only, *parent); err != nil {
		fmt.Fprintln(os.Stderr, "acceptance:", err)
		os.Exit(1)
	}
}

func run(r *runner, only, parent string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r.ctx = ctx
	if r.bin, err = filepath.Abs(r.bin); err != nil {
		return err
	}
	if r.dir, err = os.MkdirTemp(parent, "heliosctl-acceptance-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if err := os.Mkdir(filepath.Join(r.dir, temporary), 0o700); err != nil {
		return err
	}
	claims := map[string]func() error{
		"edges": r.edges, "memory": r.memory, "same": r.same, "growth": r.growth, "kills": r.killed,
		"hierkills": r.hierKilled, "soak": r.soaked}
	var failed []string
	for _, name := range strings.Split(only, ",") {
		claim, ok := claims[name]
		if !ok {
			return fmt.Errorf("unknown claim %q: choose edges, memory, same, growth, kills, hierkills or soak", name)
		}
		fmt.Printf("== %s\n", name)
		began := time.Now()
		if err := claim(); err != nil {
			fmt.Printf("%s: FAILED: %v\n", name, err)
			failed = append(failed, name)
			continue
		}
		fmt.Printf("%s: holds (%.0f s)\n", name, time.Since(began).Seconds())
	}
	if failed != nil {
		return fmt.Errorf("%s did not hold", strings.Join(failed, ", "))
	}
	return nil
}

// stateOf is the folder of state of a work folder.
func stateOf(work string) string { return filepath.Join(work, "state") }

// command makes one call of heliosctl in a work folder with a state of its own.
func (r *runner) command(work string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	var stderr bytes.Buffer
	c := exec.CommandContext(r.ctx, r.bin, args...)
	c.Dir = work
	c.Env = append(os.Environ(), "HELIOS_STATE="+stateOf(work), markVar+"="+r.dir,
		"TMPDIR="+filepath.Join(r.dir, temporary))
	c.Stderr = &stderr
	return c, &stderr
}

func (r *runner) do(work string, args ...string) ([]byte, error) {
	c, stderr := r.command(work, args...)
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("heliosctl %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// train returns the last line of a training run.
func (r *runner) train(work string, args ...string) (result, error) {
	out, err := r.do(work, append([]string{"train", "--json", "--quiet"}, args...)...)
	if err != nil {
		return result{}, err
	}
	return lastLine(out)
}

func lastLine(out []byte) (result, error) {
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	var res result
	if err := json.Unmarshal(lines[len(lines)-1], &res); err != nil {
		return res, err
	}
	if res.Event != "result" {
		return res, fmt.Errorf("the last line is a %q, not a result", res.Event)
	}
	return res, nil
}

// setUp makes a work folder with a dataset and n file-backed SSDs that hold it.
func (r *runner) setUp(name string, n int, size string, data ...string) (string, error) {
	work := filepath.Join(r.dir, name)
	if err := os.MkdirAll(work, 0o755); err != nil {
		return "", err
	}
	images := make([]string, n)
	for i := range images {
		images[i] = fmt.Sprintf("%c.img", 'a'+i)
	}
	for _, step := range [][]string{
		append(data, "--out", "g"),
		{"bind-ssds", "--proxy", strings.Join(images, ","), "--size", size},
		{"load", "--dataset", "g"},
	} {
		if _, err := r.do(work, step...); err != nil {
			return "", err
		}
	}
	return work, nil
}

func (r *runner) edges() error {
	work, err := r.setUp("edges", 2, "512MiB", "import", "debian")
	if err != nil {
		return err
	}
	var gain []float64
	for seed := 1; seed <= r.seeds; seed++ {
		args := []string{"--dataset", "g", "--model", "sage", "--fanout", "10,10", "--batch-size",
			"1024", "--hidden", "128",
			"--epochs", "8", "--lr", "0.003", "--dropout", "0.3", "--mode", "inmem", "--seed",
			fmt.Sprint(seed)}
		with, err := r.train(work, args...)
		if err != nil {
			return err
		}
		without, err := r.train(work, append(args, "--no-edges")...)
		if err != nil {
			return err
		}
		gain = append(gain, 100*(with.TestAcc-without.TestAcc))
		fmt.Printf("seed %d: test accuracy %.2f %% with edges, %.2f %% without: %+.2f points\n",
			seed, 100*with.TestAcc, 100*without.TestAcc, gain[seed-1])
	}
	mean, dev := meanDev(gain)
	fmt.Printf("gain by edges: mean %+.2f points, standard deviation %.2f, range %+.2f to %+.2f\n",
		mean, dev, slices.Min(gain), slices.Max(gain))
	if mean < 3 {
		return fmt.Errorf("a mean gain of %.2f points is below 3", mean)
	}
	return nil
}

func meanDev(x []float64) (mean, dev float64) {
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		dev += (v - mean) * (v - mean)
	}
	if len(x) > 1 {
		dev = math.Sqrt(dev / float64(len(x)-1))
	}
	return mean, dev
}

func (r *runner) memory() error {
	work, err := r.setUp("memory", 4, "512MiB", "generate", "--kind", "sbm", "--nodes",
		fmt.Sprint(r.nodes),
		"--avg-degree", "12", "--classes", "16", "--dim", "256", "--seed", "1")
	if err != nil {
		return err
	}
	features := int64(r.nodes) * 256 * 4
	for _, mode := range []string{"helios", "cpu"} {
		args := []string{"--dataset", "g", "--mode", mode, "--fanout", "10,10", "--hidden", "32",
			"--epochs", "1", "--seed", "1", "--cpu-cache", "10%", "--no-eval"}
		if mode == "helios" {
			args = append(args, "--gpu-cache", "5%")
		}
		res, err := r.train(work, args...)
		if err != nil {
			return err
		}
		budgets := res.GPU + res.CPU
		limit := budgets + res.Topology + 400<<20
		if mode == "cpu" {
			limit += 132 << 20 // what its stack reads into, before rows are gathered
		}
		fmt.Printf(
			"%-6s features %d MiB, budgets %d MiB (1:%.1f), topology %d MiB, peak %d MiB, limit %d MiB\n",
			mode,
			features>>20, budgets>>20, float64(features)/float64(budgets), res.Topology>>20,
			res.Peak>>20, limit>>20)
		if features < 5*budgets || res.Peak > limit {
			return fmt.Errorf("mode %s: peak %d bytes, limit %d", mode, res.Peak, limit)
		}
	}
	return nil
}

// small is the dataset of same.
var small = []string{"generate", "--kind", "sbm", "--nodes", "20000", "--avg-degree", "12",
	"--classes", "8", "--dim", "64", "--seed", "3"}

func (r *runner) same() error {
	want, runs := "", 0
	for _, ssds := range []int{1, 4} {
		work, err := r.setUp(fmt.Sprintf("same%d", ssds), ssds, "64MiB", small...)
		if err != nil {
			return err
		}
		var variants []string
		for _, mode := range []string{"helios --gpu-cache 0 --cpu-cache 0",
			"helios --gpu-cache 5% --cpu-cache 10%", "inmem", "cpu", "mmap"} {
			for _, pipeline := range []string{"deep", "intra", "none"} {
				for _, workers := range []string{"1", "2"} {
					variants = append(variants, mode+" --pipeline "+pipeline+" --workers "+workers)
				}
			}
		}
		if ssds == 4 {
			variants = append(variants, "gids", "gids --gpu-cache 10% --cache-line row", "bam",
				"bam --accumulate 0.9 --pipeline run-ahead",
				"helios --policy lru", "helios --policy sieve --cache-line 4096 --window 4",
				"helios --policy clock --pipeline intra", "cpu --gpu-cache 5% --policy s3fifo",
				"helios --pipeline series", "helios --tune full", "helios --topology ssd",
				"helios --hotness degree", "ginex", "ginex --policy static", "ginex --superbatch 5 --superbatch-overlap",
				"helios --policy belady --superbatch 7", "diskgnn",
				"diskgnn --io-stack async --pipeline none --check-reads", "gids --policy belady --gpu-cache 10%")
		}
		for _, v := range variants {
			res, err := r.train(work, append([]string{"--dataset", "g", "--epochs", "2", "--hidden",
				"32", "--seed", "5", "--dropout", "0.2", "--lr", "0.01",
				"--mode"}, strings.Fields(v)...)...)
			if err != nil {
				return fmt.Errorf("%d SSDs, %s: %w", ssds, v, err)
			}
			if want == "" {
				want = res.SHA
				fmt.Printf("params_sha256 %s, loss %.4f then %.4f\n", want, res.Epochs[0].Loss,
					res.Epochs[1].Loss)
			}
			if res.SHA != want {
				return fmt.Errorf("%d SSDs, %s: params_sha256 %s", ssds, v, res.SHA)
			}
			if res.Epochs[1].Loss >= res.Epochs[0].Loss {
				return fmt.Errorf("the loss did not fall: %v", res.Epochs)
			}
			runs++
		}
	}
	fmt.Printf("%d runs: equal parameters\n", runs)
	work := filepath.Join(r.dir, "same4")
	for _, level := range []string{"avx2", "avx512"} {
		args := []string{"--dataset", "g", "--epochs", "2", "--hidden", "32", "--seed", "5",
			"--dropout", "0.2", "--lr", "0.01", "--kernels", level}
		res, err := r.train(work, args...)
		if err != nil && strings.Contains(err.Error(), "has no such instructions") {
			fmt.Printf("%s: this CPU does not have it\n", level)
			continue
		}
		if err != nil {
			return err
		}
		if res.SHA != want || res.Kernels != level {
			return fmt.Errorf("kernels %s (asked for %s): params_sha256 %s", res.Kernels, level,
				res.SHA)
		}
		fmt.Printf("kernels %s: the same\n", level)
	}
	return nil
}

// growth holds the memory at the end of the epochs together. Pages that a run touches for the first
// time late (staging slots, the most that a batch needed) are a few MiB, so the caches are some
// hundreds.
func (r *runner) growth() error {
	work, err := r.setUp("growth", 2, "512MiB", "generate", "--nodes", "400000", "--avg-degree",
		"12", "--classes", "16", "--dim", "256", "--seed", "4",
		"--train-fraction", "0.04", "--val-fraction", "0.005", "--test-fraction", "0.005")
	if err != nil {
		return err
	}
	for _, mode := range []string{"helios", "inmem"} {
		res, err := r.train(work, "--dataset", "g", "--mode", mode, "--fanout", "8,4", "--hidden",
			"16", "--batch-size", "1024", "--cpu-cache", "80%", "--epochs", "30", "--seed", "2")
		if err != nil {
			return err
		}
		third, last := res.Epochs[2].Memory, res.Epochs[29].Memory
		change := 100 * float64(last-third) / float64(third)
		fmt.Printf(
			"%-6s %.1f MiB after epoch 3, %.1f MiB after epoch 30: %+.2f %%; peak %.1f MiB\n", mode,
			float64(third)/(1<<20), float64(last)/(1<<20), change, float64(res.Peak)/(1<<20))
		if math.Abs(change) > 1 {
			return fmt.Errorf("mode %s: the memory changed by %.2f %%", mode, change)
		}
	}
	return nil
}
