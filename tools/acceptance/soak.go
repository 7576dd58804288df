package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/internal/faultinject"
)

const (
	markVar   = "HELIOS_ACCEPTANCE" // in the environment of all that acceptance starts
	temporary = "tmp"               // the folder for temporary files of all of it
)

// lane is one kind of work that soak kills.
type lane struct {
	name   string
	round  func(*rand.Rand) (killed bool, err error) // starts it, or resumes it
	finish func() error                              // takes it to its end and clears it away
	hits   int
}

// soaked kills all kinds of work in turn, at random moments and under random faults of the
// catalogue, until it has had its kills and its time. After each it looks for processes that are
// left. In the end every kind comes to the result that it has without kills, and the folders and
// the shared memory hold what they held before.
func (r *runner) soaked() error {
	fmt.Printf("seed %d\n", r.seed)
	shared, err := r.sharedMemory()
	if err != nil {
		return err
	}
	var lanes []*lane
	for _, open := range []func() (*lane, error){r.trainLane, r.importLane, r.loadLane, r.rankLane,
		r.serveLane} {
		l, err := open()
		if err != nil {
			return err
		}
		lanes = append(lanes, l)
	}
	before, err := r.files()
	if err != nil {
		return err
	}
	began, kills, rounds := time.Now(), 0, 0
	for kills < r.kills || time.Since(began) < r.soak {
		if time.Since(began) > 2*r.soak+time.Minute {
			return fmt.Errorf("only %d kills in %v", kills, time.Since(began))
		}
		// Each round draws from the seed and its number alone, whatever came before it.
		rng := rand.New(rand.NewPCG(r.seed, uint64(rounds)))
		l := lanes[rng.IntN(len(lanes))]
		killed, err := l.round(rng)
		err = errors.Join(err, r.noProcess())
		if err != nil {
			return fmt.Errorf("seed %d, round %d, %s: %w", r.seed, rounds, l.name, err)
		}
		rounds++
		if killed {
			kills++
			l.hits++
		}
		if r.ctx.Err() != nil {
			return r.ctx.Err()
		}
	}
	text := ""
	for _, l := range lanes {
		if l.hits == 0 {
			return fmt.Errorf("seed %d: no kill hit %s", r.seed, l.name)
		}
		if err := l.finish(); err != nil {
			return fmt.Errorf("seed %d, end of %s: %w", r.seed, l.name, err)
		}
		text += fmt.Sprintf(", %d in %s", l.hits, l.name)
	}
	now, err := r.files()
	if err != nil {
		return err
	}
	left, err := r.sharedMemory()
	if err != nil {
		return err
	}
	for what, pair := range map[string][2][]string{"files": {before, now},
		"shared memory": {shared, left}} {
		if more, less := without(pair[1], pair[0]), without(pair[0], pair[1]); more != nil ||
			less != nil {
			return fmt.Errorf("seed %d: %s: left over %v, gone %v", r.seed, what, more, less)
		}
	}
	fmt.Printf("%d kills in %d rounds and %.0f minutes%s: each result as without kills; no process, "+
		"descriptor, mapping, lock, segment or file left over\n", kills, rounds,
		time.Since(began).Minutes(), text)
	return nil
}

// files are the names of everything in the work folders.
func (r *runner) files() (names []string, err error) {
	err = filepath.WalkDir(r.dir, func(path string, _ fs.DirEntry, err error) error {
		names = append(names, path)
		return err
	})
	return names, err
}

// sharedMemory names the files in /dev/shm of this run. Other programs here, such as the Go tests,
// make and remove their own. Those are left out: SSDs of another folder of state (bind-ssds
// --proxy-ram puts a hash of the folder into the name), and folders of tests.
func (r *runner) sharedMemory() (names []string, err error) {
	entries, err := os.ReadDir("/dev/shm")
	if err != nil {
		return nil, err
	}
	works, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, err
	}
	var ours []string
	for _, w := range works {
		sum := sha256.Sum256([]byte(stateOf(filepath.Join(r.dir, w.Name()))))
		ours = append(ours, hex.EncodeToString(sum[:4]))
	}
	for _, e := range entries {
		ssd := strings.Split(strings.TrimPrefix(e.Name(), "heliosctl-"), "-") // user, hash, number
		if !strings.Contains(e.Name(), "helios") || strings.HasPrefix(e.Name(), "helios-") ||
			len(ssd) == 3 && !slices.Contains(ours, ssd[1]) {
			continue
		}
		names = append(names, e.Name())
	}
	return names, nil
}

func without(all, these []string) (rest []string) {
	for _, x := range all {
		if !slices.Contains(these, x) {
			rest = append(rest, x)
		}
	}
	return rest
}

// noProcess waits a moment for the last processes of this run to be gone.
func (r *runner) noProcess() error {
	mark := []byte(markVar + "=" + r.dir + "\x00")
	var left []string
	for range 100 {
		left = nil
		all, err := filepath.Glob("/proc/[0-9]*/environ")
		if err != nil {
			return err
		}
		for _, p := range all {
			b, _ := os.ReadFile(p) // of another user, or gone
			if bytes.Contains(b, mark) {
				name, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "cmdline")) // perhaps gone
				left = append(left, fmt.Sprintf("%s %q", filepath.Base(filepath.Dir(p)), name))
			}
		}
		if left == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("processes are left: %v", left)
}

// faultOf draws a fault of the catalogue, most times none.
func faultOf(rng *rand.Rand, during faultinject.Workload) []string {
	if rng.IntN(3) > 0 {
		return nil
	}
	var all []faultinject.Entry
	for _, e := range faultinject.Catalogue() {
		// A write that goes astray in silence is for verify to find, and load to be repeated.
		if e.During == during && e.Class != faultinject.CaughtBySums {
			all = append(all, e)
		}
	}
	return []string{"--fault", all[rng.IntN(len(all))].Fault}
}

func (r *runner) trainLane() (*lane, error) {
	k, err := r.trainToKill("train")
	if err != nil {
		return nil, err
	}
	// A run without kills leaves the layouts that its modes make once.
	if _, err := r.train(k.work, append(k.args, "--mode", "diskgnn", "--packed", "packed")...); err != nil {
		return nil, err
	}
	return &lane{name: "train",
		round: func(rng *rand.Rand) (bool, error) {
			fault := faultOf(rng, faultinject.Reading)
			if fault != nil {
				fault = append(fault, "--check-reads", "--read-timeout", "200ms")
			}
			killed, err := k.round(rng, fault)
			if err == nil && rng.IntN(25) == 0 {
				err = k.resume()
			}
			return killed, err
		},
		finish: func() error {
			_, err := r.do(k.work, k.train("ck")...)
			if err == nil {
				err = k.look(true)
			}
			if err == nil {
				_, err = r.do(k.work, "verify", "g", "--source", "--quiet")
			}
			return errors.Join(err, k.clear())
		}}, nil
}

// importLane imports edges and features, with some kills while it sorts and some while it writes.
func (r *runner) importLane() (*lane, error) {
	work, err := r.setUp("import", 1, "16MiB", "generate", "--nodes", "20000", "--dim", "16", "--seed",
		"4")
	if err != nil {
		return nil, err
	}
	var edges bytes.Buffer
	rng := rand.New(rand.NewPCG(8, 8))
	for range 300_000 {
		fmt.Fprintf(&edges, "%d,%d\n", rng.IntN(20_000), rng.IntN(20_000))
	}
	if err := os.WriteFile(filepath.Join(work, "e.csv"), edges.Bytes(), 0o600); err != nil {
		return nil, err
	}
	k := &killing{runner: r, work: work}
	imports := []string{"import", "edges", "--in", "e.csv", "--features", "g/features.npy", "--out",
		"i", "--quiet"}
	if _, err := r.do(work, imports...); err != nil { // once for what it reads to be in memory
		return nil, err
	}
	want, err := sumsOf(filepath.Join(work, "i"))
	if err != nil {
		return nil, err
	}
	began := time.Now()
	whole := func() error {
		got, err := sumsOf(filepath.Join(work, "i"))
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("the import has other bytes than one that nobody has killed: %v, not %v",
				got, want)
		}
		return errors.Join(err, k.remove("i"))
	}
	finish := func() error {
		_, err := r.do(work, imports...)
		if err == nil {
			err = whole()
		}
		return err
	}
	if err := k.remove("i"); err != nil {
		return nil, err
	}
	if err := finish(); err != nil {
		return nil, err
	}
	length := time.Since(began)
	return &lane{name: "import", finish: finish, round: func(rng *rand.Rand) (bool, error) {
		c, stderr := r.command(work, imports...)
		code, err := killedAt(c, time.Duration(rng.Float64()*float64(length)*1.1))
		if err != nil || code > 0 {
			return false, errors.Join(err, fmt.Errorf("exit code %d: %s", code, stderr))
		}
		if _, err := os.Stat(filepath.Join(work, "i")); err == nil { // whole, whenever it was killed
			return code < 0, whole()
		}
		return true, nil
	}}, nil
}

// sumsOf are the SHA-256 of a dataset's arrays; its description and seal hold a time and a UUID.
func sumsOf(dir string) (map[string]string, error) {
	arrays, err := filepath.Glob(filepath.Join(dir, "*.npy"))
	if err == nil && len(arrays) < 3 {
		err = fmt.Errorf("%s has the arrays %v alone", dir, arrays)
	}
	sums := map[string]string{}
	for _, a := range arrays {
		if err == nil {
			sums[filepath.Base(a)], err = sumOf(a)
		}
	}
	return sums, err
}

func (r *runner) loadLane() (*lane, error) {
	work, err := r.setUp("load", 2, "32MiB", "generate", "--nodes", "60000", "--dim", "64", "--seed", "5")
	if err != nil {
		return nil, err
	}
	load := []string{"load", "g", "--quiet", "--mark-every", "5ms"}
	began := time.Now()
	if _, err := r.do(work, append(load, "--restart")...); err != nil {
		return nil, err
	}
	length := time.Since(began)
	finish := func() error {
		_, err := r.do(work, load...)
		if err == nil {
			_, err = r.do(work, "verify", "g", "--source", "--quiet")
		}
		return err
	}
	return &lane{name: "load", finish: finish, round: func(rng *rand.Rand) (bool, error) {
		args := append(slices.Clone(load), faultOf(rng, faultinject.Loading)...)
		faulty := len(args) > len(load)
		if rng.IntN(3) == 0 {
			args = append(args, "--restart")
		}
		c, stderr := r.command(work, args...)
		code, err := killedAt(c, time.Duration(rng.Float64()*float64(length)*1.2))
		if err != nil || code > 0 && !(faulty && code == deviceError) {
			return false, errors.Join(err, fmt.Errorf("%v: exit code %d: %s", args, code, stderr))
		}
		if rng.IntN(8) == 0 {
			err = finish()
		}
		return code < 0, err
	}}, nil
}

// rankLane trains by two or three ranks, each with SSDs of its own, and kills one of them.
func (r *runner) rankLane() (*lane, error) {
	const most = 3
	work, err := r.setUp("ranks", 1, "16MiB", "generate", "--kind", "sbm", "--nodes", "3000",
		"--avg-degree", "8", "--classes", "5", "--dim", "32", "--seed", "3")
	if err != nil {
		return nil, err
	}
	state := func(rank int) string { return filepath.Join(work, fmt.Sprintf("state%d", rank)) }
	for n := range most {
		for _, args := range [][]string{
			{"bind-ssds", "--proxy", fmt.Sprintf("rank%d.img", n), "--size", "16MiB"},
			{"load", "g"}} {
			if _, err := r.do(work, append(args, "--state", state(n))...); err != nil {
				return nil, err
			}
		}
	}
	k := &killing{runner: r, work: work, args: []string{"--dataset", "g", "--epochs", "12", "--hidden",
		"24", "--fanout", "5,5", "--batch-size", "64", "--seed", "9", "--workers", "1", "--shards", "4"}}
	began := time.Now()
	whole, err := r.train(work, k.args...)
	if err != nil {
		return nil, err
	}
	k.sha, k.length = whole.SHA, time.Since(began)
	// round kills one rank after a while, none where that is 0.
	round := func(n, victim int, after time.Duration) (bool, error) {
		port, err := freePort()
		if err != nil {
			return false, err
		}
		var all []*exec.Cmd
		var said []*bytes.Buffer
		for rank := range n {
			args := append([]string{"train", "--json", "--quiet"}, k.args...)
			c, stderr := r.command(work, append(args, "--checkpoint", "ck", "--checkpoint-every", "4",
				"--resume", "--rank-timeout", "10s", "--state", state(rank))...)
			c.Env = append(c.Env, fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", n),
				"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port)
			c.Stdout = &bytes.Buffer{}
			err = errors.Join(err, c.Start())
			all, said = append(all, c), append(said, stderr)
		}
		if after > 0 {
			kill := func() { _ = all[victim].Process.Kill() } // it may have ended
			defer time.AfterFunc(after, kill).Stop()
		}
		killed := false
		for _, c := range all {
			_ = c.Wait() // the exit code says it
			killed = killed || c.ProcessState.ExitCode() < 0
		}
		for rank, c := range all {
			code := c.ProcessState.ExitCode()
			if code > 0 && (!killed || code != 1) {
				err = errors.Join(err, fmt.Errorf("rank %d of %d: exit code %d: %s", rank, n, code,
					said[rank]))
			}
		}
		if killed || err != nil {
			return killed, err
		}
		res, err := lastLine(all[0].Stdout.(*bytes.Buffer).Bytes())
		if err == nil && res.SHA != k.sha {
			err = fmt.Errorf("params_sha256 of %d ranks is %s, of one %s", n, res.SHA, k.sha)
		}
		return false, errors.Join(err, k.remove("ck"))
	}
	return &lane{name: "ranks",
		round: func(rng *rand.Rand) (bool, error) {
			n := 2 + rng.IntN(most-1)
			return round(n, rng.IntN(n), 1+time.Duration(rng.Float64()*float64(k.length)))
		},
		finish: func() error { _, err := round(2, 0, 0); return err }}, nil
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), l.Close()
}

// serveLane has a daemon with clients that leave at random, and kills it while it hands out
// batches. Now and then it lives, to show that it keeps nothing of clients that are gone.
func (r *runner) serveLane() (*lane, error) {
	work, err := r.setUp("serve", 1, "16MiB", "generate", "--nodes", "3000", "--dim", "16", "--seed", "6")
	if err != nil {
		return nil, err
	}
	d := &daemon{runner: r, work: work}
	if err := d.start(); err != nil {
		return nil, err
	}
	for epoch := range soakEpochs {
		sums, err := takeEpoch(r.ctx, work, epoch, -1)
		if err != nil {
			return nil, errors.Join(err, d.kill())
		}
		d.want = append(d.want, sums)
	}
	if err := d.end(); err != nil {
		return nil, err
	}
	return &lane{name: "serve", finish: func() error { return d.calm(rand.New(rand.NewPCG(1, 1))) },
		round: func(rng *rand.Rand) (bool, error) {
			if rng.IntN(8) == 0 {
				return false, d.calm(rng)
			}
			if err := d.start(); err != nil {
				return false, err
			}
			ctx, stop := context.WithCancel(r.ctx)
			defer stop()
			clients := make(chan error, 2)
			for i := range cap(clients) {
				go func() { clients <- d.client(ctx, i) }()
			}
			time.Sleep(time.Duration(rng.Float64() * float64(300*time.Millisecond)))
			err := d.kill()
			stop()
			for range cap(clients) {
				err = errors.Join(err, <-clients)
			}
			return true, err
		}}, nil
}
