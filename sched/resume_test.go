package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/static"
)

// counts are the figures of an epoch that do not depend on time.
func counts(e report.EpochResult) report.EpochResult {
	return report.EpochResult{
		Epoch: e.Epoch, Loss: e.Loss, TrainAcc: e.TrainAcc, ValAcc: e.ValAcc, Batches: e.Batches,
		Seeds:   e.Seeds,
		RowsGPU: e.RowsGPU, RowsCPU: e.RowsCPU, RowsSSD: e.RowsSSD, BytesSSD: e.BytesSSD,
		SSDCommands:       e.SSDCommands,
		ReadAmplification: e.ReadAmplification,
	}
}

// Stopped at a random batch, resumed under another pipeline and other caches, stopped again:
// the parameters and the epochs' figures are those of an undisturbed run.
func TestResumeMidEpoch(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs = 3
	cfg.CoalesceBytes = -1 // how many commands rows share depends on the sets that a pipeline makes
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)

	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 2))
	c := cfg
	c.CheckpointDir = t.TempDir()
	stops := 0
	for {
		c.Resume = true
		c.CheckpointEvery = rng.IntN(3)
		// run-ahead is for tiers whose counts a stop changes
		c.Pipeline = anyPipeline(rng, plan.PipelineRunAhead)
		// 36 steps in all: five stops always fit
		stopAt := 1 + rng.IntN(7)
		ctx, cancel := context.WithCancel(context.Background())
		left := stopAt
		obs := report.Observer{Step: func(string, int, int) {
			if left--; left == 0 && stops < 5 {
				cancel()
			}
		}}
		r := train(t, ctx, c, d, feat, s, 1+rng.IntN(2), obs)
		cancel()
		if r.err == nil {
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			require.Equal(t, want.res.TestAcc, r.res.TestAcc)
			for i := range want.res.Epochs {
				require.Equal(t, counts(want.res.Epochs[i]), counts(r.res.Epochs[i]))
			}
			break
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
		require.ErrorContains(t, r.err, "saved in", "the run says where it can go on")
		stops++
	}
	require.Equal(t, 5, stops)
}

func TestInterruptWithoutCheckpoint(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	ctx, cancel := context.WithCancel(context.Background())
	r := train(t, ctx, small(), d, feat, s, 2,
		report.Observer{Step: func(string, int, int) { cancel() }})
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "nothing is saved without option checkpoint")
	r = train(t, ctx, small(), d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "also before the first batch")
}

// A checkpoint of the time when all batches of an epoch drew alike: going on would train on other
// samples; what it holds can be evaluated as ever.
func TestResumeOfOlderDraws(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir = 1, t.TempDir()
	require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{}).err)
	path := filepath.Join(cfg.CheckpointDir, checkpointName)
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	const draws = `"draws":"batch"`
	require.Contains(t, f.Metadata["helios.config"], draws)
	for _, part := range []string{draws + ",", "," + draws, draws} {
		f.Metadata["helios.config"] = strings.Replace(f.Metadata["helios.config"], part, "", 1)
	}
	f.Metadata["helios.format"] = "1"
	require.NoError(t, checkpoint.Save(path, f))
	cfg.Epochs, cfg.Resume = 2, true
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "drawn by epoch")
	require.ErrorContains(t, r.err, "start anew")
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	_, err = Evaluate(context.Background(), plan.Config{}, prepare.Inputs{Dev: dev, Dataset: d,
		SSDs: s.ssds}, cfg.CheckpointDir, "test", report.Observer{})
	require.NoError(t, err)
}

// A checkpoint of the time when every node had a self loop beside its own edges to itself goes on
// as it began, unless something else is asked for.
func TestResumeOfOlderSelfLoops(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Model, cfg.Epochs, cfg.SelfLoops = "gcn", 2, gnn.LoopsAlways
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg.Epochs, cfg.CheckpointDir = 1, t.TempDir()
	require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{}).err)
	f, err := checkpoint.Load(filepath.Join(cfg.CheckpointDir, checkpointName))
	require.NoError(t, err)
	require.NotContains(t, f.Metadata["helios.config"], "self-loops")
	require.Equal(t, "3", f.Metadata["helios.format"])
	cfg.Epochs, cfg.Resume, cfg.SelfLoops, cfg.LoopsGiven = 2, true, gnn.LoopsRemaining, true
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "self-loops always")
	cfg.SelfLoops, cfg.LoopsGiven = "", false
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
}

func TestResumeRefusesAnotherRun(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir = 1, t.TempDir()
	first := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, first.err)
	cfg.Resume = true
	for field, set := range map[string]func(*plan.Config){
		"lr 0.01": func(c *plan.Config) { c.LR = 0.02 }, "seed": func(c *plan.Config) { c.Seed++ },
		"fanout": func(c *plan.Config) { c.Fanouts = []int{4, 4} },
		"hidden": func(c *plan.Config) { c.Hidden = 17 },
	} {
		c := cfg
		set(&c)
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.Equal(t, errs.Usage, errs.ClassOf(r.err))
		require.ErrorContains(t, r.err, field)
	}
	// The other way round: what does not change the result may change, and a finished run's
	// epochs can be extended as if it had never stopped.
	c := cfg
	c.Mode, c.Epochs = static.ModeMmap, 2
	r := train(t, context.Background(), c, d, feat, s, 1, report.Observer{})
	require.NoError(t, r.err)
	c = small()
	straight := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
	require.Equal(t, straight.res.ParamsSHA256, r.res.ParamsSHA256)
	// A damaged checkpoint is refused by name.
	path := filepath.Join(cfg.CheckpointDir, checkpointName)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[len(b)-1] ^= 1
	require.NoError(t, os.WriteFile(path, b, 0o644))
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Device, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, path)
	// And one folder serves one run at a time.
	lock, err := checkpoint.LockDir(cfg.CheckpointDir)
	require.NoError(t, err)
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Refused, errs.ClassOf(r.err))
	require.NoError(t, lock.Unlock())
}

// Evaluate and Predict give what training reported.
func TestEvaluateAndPredict(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir = 3, t.TempDir()
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
	ctx := context.Background()
	for _, mode := range []string{static.ModeHelios, static.ModeCPU} {
		e, err := Evaluate(ctx, plan.Config{Mode: mode, GPUCache: percent(5)}, in,
			cfg.CheckpointDir, "test", report.Observer{})
		require.NoError(t, err)
		require.Equal(t, *r.res.TestAcc, *e.Accuracy)
		require.Equal(t, r.res.BestEpoch, e.Epoch)
		e, err = Evaluate(ctx, plan.Config{Mode: mode}, in, filepath.Join(cfg.CheckpointDir,
			checkpointName), "val", report.Observer{})
		require.NoError(t, err)
		require.Equal(t, *r.res.Epochs[r.res.BestEpoch-1].ValAcc, *e.Accuracy)
	}
	// Every neighbour: no sampling, so the batch size is of no account.
	full, err := Evaluate(ctx, plan.Config{Fanouts: []int{-1, -1}}, in, cfg.CheckpointDir, "test",
		report.Observer{})
	require.NoError(t, err)
	again, err := Evaluate(ctx, plan.Config{Fanouts: []int{-1, -1}, Batch: 37,
		Mode: static.ModeMmap},
		in, cfg.CheckpointDir, "test", report.Observer{})
	require.NoError(t, err)
	require.Equal(t, full.Accuracy, again.Accuracy)
	require.Greater(t, *full.Accuracy, 0.3)

	test, err := d.Split("test")
	require.NoError(t, err)
	labels, err := d.Labels()
	require.NoError(t, err)
	var got []int64
	right := 0
	io, err := Predict(ctx, plan.Config{Fanouts: []int{-1, -1}, Batch: 64}, in, cfg.CheckpointDir,
		test, report.Outputs{Embeddings: true}, func(p report.Prediction) error {
			got = append(got, p.Nodes...)
			require.Len(t, p.Embeddings, len(p.Nodes)*cfg.Hidden)
			for i, v := range p.Nodes {
				if labels[v] == p.Classes[i] {
					right++
				}
			}
			return nil
		}, report.Observer{})
	require.NoError(t, err)
	require.Len(t, io.IO.SSDs, len(in.SSDs))
	require.Equal(t, test, got)
	require.Equal(t, *full.Accuracy, float64(right)/float64(len(test)))

	for want, f := range map[string]func() error{
		"does not exist": func() error {
			_, err := Evaluate(ctx, plan.Config{}, in, t.TempDir(), "test", report.Observer{})
			return err
		},
		"has 2 layers": func() error {
			_, err := Evaluate(ctx, plan.Config{Fanouts: []int{3}}, in, cfg.CheckpointDir, "test",
				report.Observer{})
			return err
		},
		"unknown split": func() error {
			_, err := Evaluate(ctx, plan.Config{}, in, cfg.CheckpointDir, "all", report.Observer{})
			return err
		},
		"asked for twice": func() error {
			_, err := Predict(ctx, plan.Config{}, in, cfg.CheckpointDir, []int64{1, 2, 1},
				report.Outputs{}, func(report.Prediction) error { return nil }, report.Observer{})
			return err
		},
		"not in dataset": func() error {
			_, err := Predict(ctx, plan.Config{}, in, cfg.CheckpointDir, []int64{tiny.nodes},
				report.Outputs{}, func(report.Prediction) error { return nil }, report.Observer{})
			return err
		},
	} {
		err := f()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), want)
	}
	require.NoError(t, dev.Close())
}

// childEnv holds a childRun: the test binary then trains instead of testing.
const childEnv = "HELIOS_SCHED_CHILD"

type childRun struct {
	Dataset    string
	SSDs       []string
	Checkpoint string
	Pipeline   string
	Packed     string // a folder: its pages on the SSDs
	OutOfCore  string // a mode: train outOfCore instead, and print the result
}

func childConfig() plan.Config {
	cfg := small()
	cfg.Epochs, cfg.CheckpointEvery, cfg.Batch = 6, 1, 40
	cfg.GPUCache = percent(5)
	return cfg
}

// childMain trains with a checkpoint after every batch and prints the parameters' hash.
func childMain() int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var c childRun
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		return fail(err)
	}
	d, err := dataset.Open(c.Dataset)
	if err != nil {
		return fail(err)
	}
	in := prepare.Inputs{Dataset: d}
	for _, p := range c.SSDs {
		s, err := openSSD(p, c.OutOfCore == "", nil)
		if err != nil {
			return fail(err)
		}
		in.SSDs = append(in.SSDs, s)
	}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	if err != nil {
		return fail(err)
	}
	in.Dev = dev
	if c.OutOfCore != "" {
		if err := outOfCore(c.OutOfCore, in); err != nil {
			return fail(err)
		}
		return 0
	}
	cfg := childConfig()
	cfg.CheckpointDir, cfg.Resume, cfg.Pipeline = c.Checkpoint, true, c.Pipeline
	if cfg.Pipeline == plan.PipelineRunAhead { // an epoch resumes with an empty tier
		cfg.Policy, cfg.CacheLine, cfg.Window, cfg.Accumulate, cfg.IOStack = "sieve", 4096, 2, 0.9,
			gpuio.StackSync
	}
	obs := report.Observer{}
	if c.Packed != "" {
		extentRun(&cfg)
		cfg.Mode, cfg.PackedDir, cfg.PagesOn = diskgnn.ModeDiskGNN, c.Packed, plan.PagesSSDs
		obs.Step = func(string, int, int) { fmt.Println("step") }
	}
	cfg.OnBatch = func(int, int, *graph.MiniBatch) { fmt.Println("batch") }
	r, err := Train(context.Background(), cfg, in, obs)
	if err != nil {
		return fail(err)
	}
	fmt.Println(r.ParamsSHA256)
	return 0
}

// Killed with SIGKILL at random moments and resumed: the parameters are those of an undisturbed
// run.
func TestKilledAndResumed(t *testing.T) {
	kills := 20
	if wide.Lean() {
		kills = 8
	}
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	want := train(t, context.Background(), childConfig(), d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	s.off(t)

	run := childRun{Dataset: d.Dir(), SSDs: s.paths, Checkpoint: t.TempDir()}
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 3))
	killed := 0
	for {
		run.Pipeline = anyPipeline(rng, "")
		env, err := json.Marshal(run)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+string(env))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		var stdout killer
		if killed < kills {
			// A few batches in, at any moment of what follows: sampling, reading, training
			// and each step of replacing the checkpoint.
			stdout = killer{after: 1 + rng.IntN(4),
				delay: time.Duration(rng.IntN(3000)) * time.Microsecond}
		}
		stdout.cmd = cmd
		cmd.Stdout = &stdout
		err = cmd.Run()
		cancel()
		if err == nil {
			fields := strings.Fields(stdout.out.String())
			require.Equal(t, want.res.ParamsSHA256, fields[len(fields)-1], "after %d kills", killed)
			break
		}
		require.Empty(t, stderr.String(), "died by itself")
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), "%v", err)
		killed++
	}
	require.Equal(t, kills, killed, "an epoch too few for so many kills")
}

// killer counts the lines of a child's output and kills it a while after one of them.
type killer struct {
	cmd   *exec.Cmd
	after int // lines; 0 = never
	delay time.Duration
	seen  int
	out   bytes.Buffer
}

func (k *killer) Write(b []byte) (int, error) {
	k.out.Write(b)
	before := k.seen
	k.seen += bytes.Count(b, []byte("\n"))
	if k.after > 0 && before < k.after && k.seen >= k.after {
		p := k.cmd.Process
		time.AfterFunc(k.delay, func() { _ = p.Kill() })
	}
	return len(b), nil
}
