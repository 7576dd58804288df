package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// stepScript times PyTorch's step.
//
//go:embed step.py
var stepScript string

// trained is a training run: what the table shows of its result.
type trained struct {
	Run    string          `json:"run"`
	Args   []string        `json:"args"`
	Result json.RawMessage `json:"result"`

	res trainResult
}

// trainResult is a "result" of "train --json".
type trainResult struct {
	Device    string `json:"device"`
	Mode      string `json:"mode"`
	Pipeline  string `json:"pipeline"`
	Precision string `json:"precision"`
	Rung      string `json:"memory_rung"`
	GPUCache  int64  `json:"gpu_cache_bytes"`
	CPUCache  int64  `json:"cpu_cache_bytes"`
	Epochs    []struct {
		Loss    float64 `json:"loss"`
		Seconds float64 `json:"seconds"`
		Stall   float64 `json:"stall"`
		Overlap float64 `json:"overlap"`
		RowsGPU int64   `json:"rows_gpu"`
		RowsCPU int64   `json:"rows_cpu"`
		RowsSSD int64   `json:"rows_ssd"`
		Seeds   int64   `json:"seeds"`
	} `json:"epochs"`
}

// graphSize is a dataset to train on.
type graphSize struct {
	nodes, dim    int
	train         string // share of the nodes
	batch, epochs int
	fanout        string
	hidden        int
}

func (g graphSize) bytes() int64 { return int64(g.nodes) * int64(g.dim) * 4 }

// trainState is the environment of runs on a dataset: SSDs of its own.
func (r *runner) trainState(name string) []string {
	return []string{"HELIOS_STATE=" + filepath.Join(r.dir, "state-"+name)}
}

// dataset makes a dataset on two proxied SSDs: in memory where there is room for twice as much,
// else in files.
func (r *runner) dataset(name string, g graphSize) []job {
	dir, env := filepath.Join(r.dir, name), r.trainState(name)
	spare := int64(64 << 20)
	if r.small {
		spare = 4 << 20
	}
	size := strconv.FormatInt((g.bytes()*5/8+spare)&^(1<<20-1), 10)
	bind := []string{"--proxy-ram", "2"}
	var st unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &st); err != nil || int64(st.Bavail)*st.Bsize < 5*g.bytes() {
		bind = []string{"--proxy", dir + ".ssd0," + dir + ".ssd1"}
	}
	hc := r.bin("heliosctl")
	r.bound = append(r.bound, env[0])
	return []job{
		{name: "graph: " + name, limit: 60 * time.Second, env: env, args: []string{hc, "generate",
			"--kind", "sbm", "--nodes", strconv.Itoa(g.nodes), "--avg-degree", "15",
			"--classes", "16", "--dim", strconv.Itoa(g.dim), "--train-fraction", g.train,
			"--val-fraction", "0.001", "--out", dir, "--quiet"}},
		{name: "SSDs: " + name, limit: 30 * time.Second, env: env,
			args: append([]string{hc, "bind-ssds", "--quiet", "--size", size}, bind...)},
		{name: "load: " + name, limit: 60 * time.Second, env: env, args: []string{hc, "load", dir,
			"--quiet"}},
	}
}

// train is a run on a dataset, kept under a name.
func (r *runner) train(name, data string, g graphSize, limit time.Duration, more ...string) job {
	args := append([]string{r.bin("heliosctl"), "train", filepath.Join(r.dir, data), "--json",
		"--quiet", "--seed", "1", "--batch-size", strconv.Itoa(g.batch), "--fanout", g.fanout,
		"--hidden", strconv.Itoa(g.hidden), "--epochs", strconv.Itoa(g.epochs)}, more...)
	return job{name: "train: " + name, limit: limit, env: r.trainState(data), args: args,
		then: func(out, _ []byte) (string, error) {
			t := trained{Run: name, Args: args[1:]}
			for d := json.NewDecoder(bytes.NewReader(out)); ; {
				var raw json.RawMessage
				if err := d.Decode(&raw); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					return "", err
				}
				var kind struct {
					Event string `json:"event"`
				}
				if err := json.Unmarshal(raw, &kind); err != nil {
					return "", err
				}
				if kind.Event == "result" {
					t.Result = raw
				}
			}
			if t.Result == nil {
				return "", errors.New("no result")
			}
			if err := json.Unmarshal(t.Result, &t.res); err != nil {
				return "", err
			}
			if len(t.res.Epochs) != g.epochs {
				return "", fmt.Errorf("%d epochs, not %d", len(t.res.Epochs), g.epochs)
			}
			r.res.Training = append(r.res.Training, t)
			last := t.res.Epochs[g.epochs-1]
			return fmt.Sprintf("%.3g s an epoch, loss %.6f, rung %s", last.Seconds, last.Loss,
				t.res.Rung), nil
		}}
}

// lossTolerance bounds the distance of losses from the host device's, by precision, as a share.
var lossTolerance = map[string]float64{"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2}

// sameLosses holds the losses of a run against those of another one.
func (r *runner) sameLosses(name, with string) (string, error) {
	a, b := r.run(name), r.run(with)
	if a == nil || b == nil {
		return "", fmt.Errorf("no losses to compare: %s or %s did not run", name, with)
	}
	worst, pos := 0.0, 0
	for i, e := range a.res.Epochs {
		if d := math.Abs(e.Loss-
			b.res.Epochs[i].Loss) / math.Abs(b.res.Epochs[i].Loss); !(d <= worst) {
			worst, pos = d, i
		}
	}
	limit := lossTolerance[a.res.Precision]
	text := fmt.Sprintf(
		"losses of %d epochs differ by %.2g at most (epoch %d); the tolerance is %.0e",
		len(a.res.Epochs), worst, pos+1, limit)
	if !(worst <= limit) {
		return "", errors.New(text)
	}
	return text, nil
}

func (r *runner) run(name string) *trained {
	i := slices.IndexFunc(r.res.Training, func(t trained) bool { return t.Run == name })
	if i < 0 {
		return nil
	}
	return &r.res.Training[i]
}

// compared is a run whose losses must be those of another.
func (r *runner) compared(j job, with string) job {
	then := j.then
	j.then = func(out, both []byte) (string, error) {
		if d, err := then(out, both); err != nil {
			return d, err
		}
		return r.sameLosses(strings.TrimPrefix(j.name, "train: "), with)
	}
	return j
}

// trainings are the runs: the same losses on both devices, then modes and pipelines with features
// ten times the GPU cache.
func (r *runner) trainings() []job {
	same := graphSize{nodes: 20000, dim: 128, train: "0.2", batch: 512, epochs: 3, fanout: "10,5",
		hidden: 128}
	modes := graphSize{nodes: 400_000, dim: 1024, train: "0.02", batch: 1000, epochs: 2,
		fanout: "25,10", hidden: 256}
	if r.small {
		same = graphSize{nodes: 500, dim: 16, train: "0.1", batch: 32, epochs: 2, fanout: "3,2",
			hidden: 8}
		modes = graphSize{nodes: 400, dim: 32, train: "0.1", batch: 20, epochs: 1, fanout: "3,2",
			hidden: 8}
	}
	jobs := r.dataset("same", same)
	limit := 40 * time.Second
	// Both devices read the same rows from the SSDs, through the same tiers.
	tiers := func(
		more ...string) []string {
		return append(more, "--gpu-cache", "5%", "--cpu-cache", "10%")
	}
	jobs = append(jobs, r.train("host", "same", same, limit, tiers("--device", "host")...))
	for _, p := range []string{"fp32", "tf32", "bf16"} {
		jobs = append(jobs,
			r.compared(r.train("cuda "+p, "same", same, limit,
				tiers("--device", "cuda", "--precision", p)...), "host"))
		if r.small {
			break
		}
	}
	if !r.small {
		blas := r.compared(r.train("cuda cuBLAS", "same", same, limit,
			tiers("--device", "cuda", "--blas", "auto")...), "host")
		jobs = append(jobs, blas)
	}
	jobs = append(jobs, r.dataset("modes", modes)...)
	for _, m := range [][]string{
		{"helios", "--mode", "helios", "--gpu-cache", "10%", "--cpu-cache", "10%"},
		{"gids", "--mode", "gids", "--gpu-cache", "10%", "--cpu-cache", "10%"},
		{"helios, no pipeline", "--mode", "helios", "--gpu-cache", "10%", "--cpu-cache", "10%",
			"--pipeline", "none"},
		{"inmem", "--mode", "inmem", "--gpu-cache", "10%"},
		{"cpu", "--mode", "cpu", "--cpu-cache", "10%"},
		{"mmap", "--mode", "mmap"},
	} {
		j := r.train(m[0], "modes", modes, limit, append([]string{"--device", "cuda"}, m[1:]...)...)
		if m[0] != "helios" {
			j = r.compared(j, "helios")
		}
		jobs = append(jobs, j)
	}
	return jobs
}

// showTraining is the table of runs: seconds are those of the last epoch.
func (r *runner) showTraining(out *strings.Builder) {
	if len(r.res.Training) == 0 {
		return
	}
	fmt.Fprint(out, "\ntraining runs (figures of the last epoch)\n\n")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w,
		"run\tdevice\trung\tepochs\tseconds\tseeds/s\tGPU hits\tCPU hits\tfrom SSD\tstall\toverlap\tloss\tby helios\t")
	base := 0.0
	for _, t := range r.res.Training {
		e := t.res.Epochs[len(t.res.Epochs)-1]
		if t.Run == "helios" {
			base = e.Seconds
		}
		ratio := "-"
		if base > 0 {
			ratio = fmt.Sprintf("%.2f", e.Seconds/base)
		}
		device := t.res.Device
		if i := strings.IndexByte(device, ' '); i > 0 {
			device = device[:i]
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.3f\t%s\t%s\t%s\t%s\t%.0f%%\t%.0f%%\t%.6f\t%s\t\n", t.Run,
			device, t.res.Rung, len(t.res.Epochs), e.Seconds,
			count(float64(e.Seeds)/e.Seconds), count(float64(e.RowsGPU)), count(float64(e.RowsCPU)),
			count(float64(e.RowsSSD)), 100*e.Stall, 100*e.Overlap, e.Loss, ratio)
	}
	if err := w.Flush(); err != nil {
		panic(err)
	}
}

// figures is a call of the lab's bench, whose rows and words are kept. A row that failed its check
// has failed the step by its exit code.
func (r *runner) figures(name string, limit time.Duration, args ...string) job {
	return job{name: name, limit: limit, args: append([]string{r.bin("bench")}, args...),
		then: func(out, both []byte) (string, error) {
			rows := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
			if len(rows[0]) == 0 {
				return "", errors.New("no rows")
			}
			if r.res.Figures == nil {
				r.res.Figures = map[string][]json.RawMessage{}
			}
			for _, row := range rows {
				if !json.Valid(row) {
					return "", fmt.Errorf("a row that is no JSON: %s", row)
				}
				r.res.Figures[name] = append(r.res.Figures[name], row)
			}
			words := "\n" + name + ": bench " + strings.Join(args, " ") + "\n\n"
			for line := range bytes.Lines(both) {
				if line[0] != '{' {
					words += string(line)
				}
			}
			r.tables = append(r.tables, words)
			return fmt.Sprintf("%d rows, all audited", len(rows)), nil
		}}
}

// torchJob times PyTorch's step on blocks of the sizes of our step.
func (r *runner) torchJob(dim, hidden, classes int, seconds float64) job {
	j := job{name: "PyTorch step", limit: 60 * time.Second, args: []string{"python3", "-c",
		stepScript}, absent: 77}
	j.prepare = func(j *job) error {
		cfg := map[string]any{"dim": dim, "hidden": hidden, "classes": classes, "seconds": seconds}
		var precisions []string
		for _, raw := range r.res.Figures["bench step"] {
			var row struct {
				Precision string          `json:"precision"`
				Blocks    json.RawMessage `json:"blocks"`
			}
			if err := json.Unmarshal(raw, &row); err != nil {
				return err
			}
			if row.Blocks != nil {
				cfg["blocks"] = row.Blocks
				precisions = append(precisions, row.Precision)
			}
		}
		if len(precisions) == 0 {
			return errors.New("no step of ours to compare with")
		}
		cfg["precisions"] = precisions
		b, err := json.Marshal(cfg)
		j.args = append(j.args, string(b))
		return err
	}
	j.then = func(out, _ []byte) (string, error) {
		var said []string
		for _, raw := range bytes.Split(bytes.TrimSpace(out), []byte("\n")) {
			var row struct {
				Framework string `json:"framework"`
				Precision string `json:"precision"`
				Seconds   struct {
					Median float64 `json:"median"`
				} `json:"seconds"`
			}
			if err := json.Unmarshal(raw, &row); err != nil {
				return "", err
			}
			r.res.Torch = append(r.res.Torch, json.RawMessage(raw))
			text := fmt.Sprintf("%s %.2f ms", row.Precision, row.Seconds.Median*1e3)
			if ours := r.stepSeconds(row.Precision); ours > 0 {
				text += fmt.Sprintf(", ours %.2f (%.2f times)", ours*1e3, row.Seconds.Median/ours)
			}
			if len(said) == 0 {
				text = row.Framework + ": " + text
			}
			said = append(said, text)
		}
		return strings.Join(said, "; "), nil
	}
	return j
}

// stepSeconds returns what our step takes in a precision.
func (r *runner) stepSeconds(precision string) float64 {
	for _, raw := range r.res.Figures["bench step"] {
		var row struct {
			Precision string `json:"precision"`
			Seconds   struct {
				Median float64 `json:"median"`
			} `json:"seconds_per_run"`
			Blocks json.RawMessage `json:"blocks"`
		}
		if json.Unmarshal(raw, &row) == nil && row.Blocks != nil && row.Precision == precision {
			return row.Seconds.Median
		}
	}
	return 0
}
