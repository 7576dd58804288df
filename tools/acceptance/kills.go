package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"helios/sched"
)

// killed kills a run at random moments of its life, from before its first line on, and looks at
// what it left each time.
func (r *runner) killed() error {
	k, err := r.trainToKill("kills")
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(r.seed, 1))
	data, err := os.ReadDir(filepath.Join(k.work, "g"))
	if err != nil {
		return err
	}
	kills, runs, ends, again := 0, 0, 0, 0
	for kills < r.kills {
		if runs++; runs > 10*r.kills+10 {
			return fmt.Errorf("no end after %d runs", runs)
		}
		fail := func(err error) error {
			return fmt.Errorf("run %d after %d kills (seed %d): %w", runs, kills, r.seed, err)
		}
		killed, err := k.round(rng, nil)
		if err != nil {
			return fail(err)
		}
		if !killed {
			ends++
			continue
		}
		if kills++; kills%max(r.kills/8, 1) == 0 {
			if err := k.resume(); err != nil {
				return fail(err)
			}
			again++
		}
	}
	if err := k.resume(); err != nil {
		return fmt.Errorf("after %d kills (seed %d): %w", kills, r.seed, err)
	}
	fmt.Printf(
		"%d kills at random moments in %d runs, %d of which came to their end: %d checkpoints looked at, %d times another than before, never a part of one; %d lines of results, each whole; %d resumed copies: params_sha256 %s, as without kills\n",
		kills, runs, ends, k.checkpoints, k.moved, k.lines, again+1, k.sha)
	left, err := os.ReadDir(filepath.Join(k.work, "g")) // where superbatches have their files
	if err != nil {
		return err
	}
	if len(left) > len(data)+1 { // hotness
		return fmt.Errorf("the kills left files in the dataset's folder: %v before, %v now", data,
			left)
	}
	if k.moved == 0 || ends+again == 0 {
		return errors.New("the kills came at no moment that matters")
	}
	return nil
}

// killing holds what the kills have left so far.
type killing struct {
	*runner
	work   string
	args   []string
	sha    string
	length time.Duration // of a run without kills

	last                      [2]int // epoch and batch of the checkpoint
	checkpoints, moved, lines int
}

// trainToKill sets up a run and lets it come to its end once.
func (r *runner) trainToKill(name string) (*killing, error) {
	work, err := r.setUp(name, 2, "16MiB", "generate", "--kind", "sbm", "--nodes", "3000",
		"--avg-degree", "8", "--classes", "5", "--dim", "32", "--seed", "3")
	if err != nil {
		return nil, err
	}
	k := &killing{runner: r, work: work, args: []string{"--dataset", "g", "--epochs", "12",
		"--hidden", "24", "--fanout", "5,5", "--batch-size", "128", "--seed", "9", "--dropout",
		"0.3"}}
	began := time.Now()
	whole, err := r.train(work, k.args...)
	k.sha, k.length = whole.SHA, time.Since(began)
	return k, err
}

// round resumes the run, in any way, as none changes what it computes, kills it at a random
// moment and looks at what is left. One that comes to its end is cleared away. Under a fault it may
// end with a device error instead, which killed is false for, too.
func (k *killing) round(rng *rand.Rand, fault []string) (killed bool, err error) {
	packed := filepath.Join(k.work, "packed")
	ways := [][]string{nil, nil,
		{"--mode", "ginex", "--superbatch", "3", "--superbatch-overlap"},
		{"--mode", "ginex", "--superbatch", "2"},
		{"--policy", "belady", "--gpu-cache", "10%", "--superbatch", "2"},
		{"--mode", "diskgnn", "--packed", packed},
		{"--mode", "diskgnn", "--packed", packed, "--io-stack", "async"}}
	way := append(ways[rng.IntN(len(ways))], fault...)
	c, stderr := k.command(k.work, append(k.train("ck"), way...)...)
	code, err := killedAt(c, time.Duration(rng.Float64()*float64(k.length)/3))
	if err != nil {
		return false, err
	}
	if code > 0 && (fault == nil || code != deviceError) {
		return false, fmt.Errorf("%s: exit code %d: %s", strings.Join(c.Args, " "), code,
			strings.TrimSpace(stderr.String()))
	}
	if err := k.look(code == 0); err != nil {
		return false, err
	}
	if code == 0 {
		err = k.clear()
	}
	return code < 0, err
}

// deviceError is the exit code of a device's failure.
const deviceError = 5

// killedAt runs a command and kills it after a while. The code is -1 where the kill came in time.
func killedAt(c *exec.Cmd, after time.Duration) (code int, err error) {
	if err := c.Start(); err != nil {
		return 0, err
	}
	timer := time.AfterFunc(after, func() { _ = c.Process.Kill() }) // it may have ended
	defer timer.Stop()
	if err := c.Wait(); c.ProcessState == nil {
		return 0, err
	}
	return c.ProcessState.ExitCode(), nil
}

// train is the next run's command. A run that was killed right after its end has left its timeline,
// which no later one replaces unasked.
func (k *killing) train(dir string) []string {
	_ = os.Remove(filepath.Join(k.work, dir+".json")) // mostly not there
	return append(append([]string{"train", "--quiet"}, k.args...), "--checkpoint", dir,
		"--checkpoint-every", "2", "--resume", "--results", dir+".jsonl", "--timeline", dir+".json")
}

// look checks the checkpoint, the results and the folder; ended: of a run that came to its end.
func (k *killing) look(ended bool) error {
	held, err := sched.HeldIn(filepath.Join(k.work, "ck"))
	if err != nil {
		return err
	}
	if held != nil {
		if held.Damage != nil {
			return held.Damage
		}
		k.checkpoints++
		pos := [2]int{held.Epoch, held.Batch}
		if slices.Compare(pos[:], k.last[:]) < 0 {
			return fmt.Errorf(
				"the checkpoint went back from epoch %d, batch %d to epoch %d, batch %d", k.last[0],
				k.last[1], pos[0], pos[1])
		}
		if pos != k.last {
			k.moved++
		}
		k.last = pos
	} else if k.last != [2]int{} {
		return errors.New("the checkpoint is gone")
	}
	if err := k.results("ck.jsonl", ended); err != nil {
		return err
	}
	return k.leftovers(ended)
}

// results holds a file's lines against what they must be: each parses, the first identifies the
// run, no epoch is there twice, and after a run's end the last says that it was whole.
func (k *killing) results(file string, ended bool) error {
	b, err := os.ReadFile(filepath.Join(k.work, file))
	if errors.Is(err, fs.ErrNotExist) && !ended {
		return nil // killed before it had begun
	}
	if err != nil {
		return err
	}
	if !bytes.HasSuffix(b, []byte("\n")) {
		return fmt.Errorf("%s does not end with a whole line: %q", file, b[max(0, len(b)-80):])
	}
	type line struct {
		Event string `json:"event"`
		Run   string `json:"run"`
		Epoch int    `json:"epoch"`
		Whole bool   `json:"whole"`
		SHA   string `json:"params_sha256"`
	}
	var l line
	epochs := 0
	for i, text := range bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n")) {
		l = line{}
		if err := json.Unmarshal(text, &l); err != nil {
			return fmt.Errorf("%s, line %d: %w: %q", file, i+1, err, text)
		}
		if i == 0 && (l.Event != "begin" || l.Run == "") {
			return fmt.Errorf("%s begins with %q", file, text)
		}
		if l.Event == "epoch" {
			if epochs++; l.Epoch != epochs {
				return fmt.Errorf("%s, line %d: epoch %d where %d is missing", file, i+1,
					l.Epoch, epochs)
			}
		}
		if l.Event == "result" && l.SHA != k.sha {
			return fmt.Errorf("%s: params_sha256 is %s, without kills %s", file, l.SHA, k.sha)
		}
		k.lines++
	}
	if ended && (l.Event != "end" || !l.Whole || epochs != 12) {
		return fmt.Errorf("%s ends with event %q, whole %v, after %d epochs", file, l.Event,
			l.Whole, epochs)
	}
	return nil
}

// leftovers counts temporary files: a kill may leave those of one run, which the next one removes.
func (k *killing) leftovers(ended bool) error {
	limit := 1
	if ended {
		limit = 0
	}
	for _, pattern := range []string{".ck.jsonl.partial-*", ".ck.json.partial-*", "ck/.*.partial"} {
		found, err := filepath.Glob(filepath.Join(k.work, pattern))
		if err != nil {
			return err
		}
		if len(found) > limit {
			return fmt.Errorf("temporary files pile up: %v", found)
		}
	}
	return nil
}

// resume takes a copy of what is there to its end.
func (k *killing) resume() error {
	copied := []string{"ck"}
	if _, err := os.Stat(filepath.Join(k.work, "ck.jsonl")); err == nil {
		copied = append(copied, "ck.jsonl")
	}
	for _, name := range copied {
		from, to := filepath.Join(k.work, name),
			filepath.Join(k.work, strings.Replace(name, "ck", "copy", 1))
		if st, err := os.Stat(from); err == nil && st.IsDir() {
			if err := os.CopyFS(to, os.DirFS(from)); err != nil {
				return err
			}
		} else if err == nil {
			b, err := os.ReadFile(from)
			if err != nil {
				return err
			}
			if err := os.WriteFile(to, b, 0o644); err != nil {
				return err
			}
		}
	}
	if _, err := k.do(k.work, k.train("copy")...); err != nil {
		return err
	}
	if err := k.results("copy.jsonl", true); err != nil {
		return err
	}
	return k.remove("copy", "copy.jsonl", "copy.json")
}

func (k *killing) clear() error {
	k.last = [2]int{}
	return k.remove("ck", "ck.jsonl", "ck.json")
}

func (k *killing) remove(names ...string) error {
	for _, n := range names {
		if err := os.RemoveAll(filepath.Join(k.work, n)); err != nil {
			return err
		}
	}
	return nil
}
