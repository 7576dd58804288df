package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The options of the partitions and of the runs that hierKilled kills.
var (
	hierPartition = []string{"partition", "g", "--parts", "16", "--method", "stream", "--quiet"}
	hierTrain     = []string{"--dataset", "g", "--mode", "hier", "--parts", "16", "--megabatch", "4",
		"--hidden", "16", "--fanout", "5,5", "--batch-size", "512", "--epochs", "3", "--seed", "9",
		"--dropout", "0.3", "--no-eval"}
)

// hierPlaces are the places for the pages of a layout.
var hierPlaces = []string{"folder", "ssds"}

// hierKilled kills partition, and runs of hier from before they make their layout on, and looks at
// what is left each time: nothing of a partition, and of a run what the next one resumes.
func (r *runner) hierKilled() error {
	work, err := r.setUp("hierkills", 2, "48MiB", "generate", "--kind", "rmat", "--nodes", "30000",
		"--avg-degree", "8", "--dim", "64", "--seed", "3", "--train-fraction", "0.2")
	if err != nil {
		return err
	}
	k := &hierKilling{killing: &killing{runner: r, work: work}, seed: r.seed}
	k.rng = rand.New(rand.NewPCG(k.seed, 2))
	if err := k.undisturbed(); err != nil {
		return err
	}
	if k.files, err = k.sums(); err != nil {
		return err
	}
	kills := 0
	for kills < r.kills || slices.Min(k.hits[:]) == 0 { // at least one of each kind
		if k.runs++; k.runs > 10*r.kills+30 {
			return fmt.Errorf("no end after %d runs: %d kills in partition, in layouts and in loads",
				k.runs, k.hits)
		}
		kill := k.killTrain
		if k.runs%4 == 0 {
			kill = k.killPartition
		}
		killed, err := kill()
		if err != nil {
			return fmt.Errorf("run %d after %d kills (seed %d): %w", k.runs, kills, k.seed, err)
		}
		if killed {
			kills++
		}
	}
	for k.place != "" { // to the end
		if err := k.finish(); err != nil {
			return fmt.Errorf("after %d kills (seed %d): %w", kills, k.seed, err)
		}
	}
	fmt.Printf(
		"%d kills in %d runs: %d in partition, %d while a layout was made, %d in loads or training; %d partitions and %d runs came to their end with the bytes and the params_sha256 (%s) of those without kills; the dataset's files and the rows on its SSDs as they were; nothing left over\n",
		kills, k.runs, k.hits[inPartition], k.hits[inLayout], k.hits[inLoads],
		k.ends[inPartition], k.ends[inLoads], k.sha)
	return nil
}

// Where a kill has hit.
const (
	inPartition = iota
	inLayout
	inLoads
)

type hierKilling struct {
	*killing
	seed  uint64
	rng   *rand.Rand
	parts string // SHA-256 of the partition without kills
	files map[string]string
	// place has the pages of the run that is resumed; "": there is none.
	place  string
	length struct{ partition, layout, train time.Duration } // layout: making it alone
	runs   int
	hits   [3]int
	ends   [3]int
}

// undisturbed notes what comes of everything that nobody kills, and how long it takes.
func (k *hierKilling) undisturbed() error {
	began := time.Now()
	if _, err := k.do(k.work, append(hierPartition, "--out", "p")...); err != nil {
		return err
	}
	k.length.partition = time.Since(began)
	var err error
	if k.parts, err = sumOf(filepath.Join(k.work, "p")); err != nil {
		return err
	}
	for _, place := range hierPlaces {
		args := append(hierTrain, "--pages-on", place, "--parted", "l")
		began = time.Now()
		first, err := k.train(k.work, args...)
		if err != nil {
			return err
		}
		k.length.layout = time.Since(began)
		began = time.Now()
		if _, err := k.train(k.work, args...); err != nil {
			return err
		}
		k.length.train = time.Since(began)
		k.length.layout -= k.length.train
		if k.sha != "" && first.SHA != k.sha {
			return fmt.Errorf("params_sha256 is %s with pages in a folder, and %s with them on SSDs",
				k.sha, first.SHA)
		}
		k.sha = first.SHA
		if err := k.remove("l"); err != nil {
			return err
		}
	}
	return k.remove("p")
}

// train is that of runner, which killing hides.
func (k *hierKilling) train(work string, args ...string) (result, error) {
	return k.runner.train(work, args...)
}

// start starts a command, and kills it at a random moment of length, which begins once since says
// so.
func (k *hierKilling) start(since func() bool, length time.Duration, args []string) (killed bool,
	err error) {
	c, stderr := k.command(k.work, args...)
	if err := c.Start(); err != nil {
		return false, err
	}
	wait := time.Duration(k.rng.Float64() * float64(length))
	ended, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for !since() {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		select {
		case <-ended:
		case <-time.After(wait):
			_ = c.Process.Kill()
		}
	}()
	err = c.Wait()
	close(ended)
	<-watched
	if err != nil && c.ProcessState.ExitCode() == -1 {
		return true, nil
	}
	if err != nil {
		err = fmt.Errorf("heliosctl %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return false, err
}

func atOnce() bool { return true }

func (k *hierKilling) killPartition() (killed bool, err error) {
	killed, err = k.start(atOnce, k.length.partition, append(hierPartition, "--out", "p"))
	if err != nil {
		return false, err
	}
	// It is there, whole, or nothing of it is. A run that is cut off may have left more.
	sum, err := sumOf(filepath.Join(k.work, "p"))
	switch {
	case err == nil && sum != k.parts:
		return false, errors.New("the partition has other bytes than one that nobody has killed")
	case err == nil:
		k.ends[inPartition]++
	case !errors.Is(err, fs.ErrNotExist) || !killed:
		return false, err
	}
	if killed {
		k.hits[inPartition]++
	}
	left, err := filepath.Glob(filepath.Join(k.work, ".*"))
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("partition left %v", left)
	}
	return killed, errors.Join(err, k.remove("p"), k.untouched(false))
}

// run is the command of the run that goes on.
func (k *hierKilling) run() []string {
	return append(append([]string{"train", "--json", "--quiet"}, hierTrain...), "--pages-on", k.place,
		"--parted", "l", "--checkpoint", "ck", "--checkpoint-every", "3", "--resume")
}

func (k *hierKilling) killTrain() (bool, error) {
	if k.place == "" {
		k.place = hierPlaces[k.rng.IntN(len(hierPlaces))]
	}
	since, length := k.layoutWhole, k.length.train
	if !k.layoutWhole() && k.rng.IntN(2) == 0 {
		since, length = atOnce, k.length.layout
	}
	killed, err := k.start(since, length, k.run())
	if err != nil {
		return false, err
	}
	switch {
	case killed && !k.layoutWhole():
		k.hits[inLayout]++
	case killed:
		k.hits[inLoads]++
	}
	if !killed || k.layoutWhole() && k.rng.IntN(4) == 0 { // the next kill meets what begins anew
		return killed, k.finish()
	}
	return killed, k.untouched(false)
}

func (k *hierKilling) layoutWhole() bool {
	b, err := os.ReadFile(filepath.Join(k.work, "l", "parted.json"))
	return err == nil && bytes.Contains(b, []byte(`"whole": true`))
}

// finish takes the run to its end, looks at all of it and clears it away.
func (k *hierKilling) finish() error {
	out, err := k.do(k.work, k.run()...)
	if err != nil {
		return err
	}
	res, err := lastLine(out)
	if err != nil {
		return err
	}
	if res.SHA != k.sha {
		return fmt.Errorf("pages-on %s: params_sha256 is %s, without kills %s", k.place, res.SHA,
			k.sha)
	}
	k.ends[inLoads]++
	err = filepath.WalkDir(k.work, func(path string, d fs.DirEntry, err error) error {
		if name := d.Name(); err == nil && name != ".lock" &&
			(strings.HasPrefix(name, ".") || strings.Contains(name, ".part") &&
				name != "nodes.partition" || name == "parted.mark") {
			return fmt.Errorf("%s is left over", path)
		}
		return err
	})
	if k.place == "ssds" {
		err = errors.Join(err, k.removePages())
	}
	k.place = ""
	return errors.Join(err, k.untouched(true), k.remove("l", "ck"))
}

// removePages removes the pages of the layout from the SSDs, which would be full of those of former
// runs else.
func (k *hierKilling) removePages() error {
	b, err := os.ReadFile(filepath.Join(k.work, "l", "parted.json"))
	if err != nil {
		return err
	}
	var layout struct{ ID string }
	// Its seal stands behind the value.
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&layout); err != nil {
		return err
	}
	_, err = k.do(k.work, "ssds", "--remove-pages", layout.ID, "--quiet")
	return err
}

// untouched holds the dataset's files, and at times the rows on the SSDs, against what they were.
func (k *hierKilling) untouched(rows bool) error {
	is, err := k.sums()
	if err != nil {
		return err
	}
	for name, was := range k.files {
		if is[name] != was {
			return fmt.Errorf("g/%s is not what it was", name)
		}
		delete(is, name)
	}
	for name := range is {
		return fmt.Errorf("g/%s is left over", name)
	}
	if rows {
		_, err = k.do(k.work, "verify", "g", "--source", "--quiet")
	}
	return err
}

// sums are the SHA-256 of the dataset's files.
func (k *hierKilling) sums() (map[string]string, error) {
	entries, err := os.ReadDir(filepath.Join(k.work, "g"))
	if err != nil {
		return nil, err
	}
	sums := map[string]string{}
	for _, e := range entries {
		if sums[e.Name()], err = sumOf(filepath.Join(k.work, "g", e.Name())); err != nil {
			return nil, err
		}
	}
	return sums, nil
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close() //nolint:errcheck // only read
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
