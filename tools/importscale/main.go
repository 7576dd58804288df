// Command importscale shows what an import of a large edge list takes: it makes a list, imports it
// once, imports it again and kills that import with SIGKILL in the middle, goes on with it, and
// compares the two datasets byte for byte. It prints times, rates and the most memory that was
// held, and fails if that is more than 1.3 × --memory or if anything differs.
//
//	go build -o /tmp/heliosctl ./cmd/heliosctl
//	go run ./tools/importscale --heliosctl /tmp/heliosctl --dir /tmp/scale --edges 200000000 --memory 1GiB
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"helios/internal/units"
)

type options struct {
	heliosctl, dir, memory, format string
	edges, nodes                   int64
	extra                          []string
}

func main() {
	var o options
	flag.StringVar(&o.heliosctl, "heliosctl", "", "the program to run")
	flag.StringVar(&o.dir, "dir", "",
		"an empty or new directory for the list and the datasets; what this makes in it is removed")
	flag.StringVar(&o.memory, "memory", "1GiB", "budget of the import")
	flag.StringVar(&o.format, "format", "text", "text or npy")
	flag.Int64Var(&o.edges, "edges", 200_000_000, "edges of the list")
	flag.Int64Var(&o.nodes, "nodes", 20_000_000, "nodes")
	flag.Parse()
	o.extra = flag.Args() // more flags for the import
	if err := run(o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "importscale:", err)
		os.Exit(1)
	}
}

func run(o options, out io.Writer) (err error) {
	if o.heliosctl == "" || o.dir == "" {
		return errors.New("give --heliosctl and --dir")
	}
	memory, err := units.ParseBytes(o.memory)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	if there, err := os.ReadDir(o.dir); err != nil {
		return err
	} else if len(there) > 0 {
		return fmt.Errorf(
			"--dir %s holds %s; give an empty or new directory, since what is made in it is removed",
			o.dir, there[0].Name())
	}
	list := filepath.Join(o.dir, "edges.txt")
	if o.format == "npy" {
		list = filepath.Join(o.dir, "edges.npy")
	}
	a, b := filepath.Join(o.dir, "whole"), filepath.Join(o.dir, "killed")
	defer func() {
		// of an import that was killed and not gone on with
		left, gerr := filepath.Glob(b + ".partial-*")
		err = errors.Join(err, gerr)
		for _, p := range append(left, list, a, b) {
			err = errors.Join(err, os.RemoveAll(p))
		}
	}()
	from := time.Now()
	if err := makeList(list, o); err != nil {
		return err
	}
	st, err := os.Stat(list)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "list: %d edges of %d nodes, %s as %s, made in %.1f s\n", o.edges, o.nodes,
		units.FormatBytes(st.Size()), o.format, time.Since(from).Seconds())

	whole, err := runImport(o, list, a, -1)
	if err != nil {
		return err
	}
	fmt.Fprintf(out,
		"import --memory %s: %.1f s, %.2f M edges/s, %d runs, peak %s (%.2f × --memory), uuid %s\n",
		o.memory, whole.seconds,
		float64(o.edges)/whole.seconds/1e6, whole.runs, units.FormatBytes(whole.peak),
		float64(whole.peak)/float64(memory), whole.uuid)
	for _, l := range whole.stages {
		fmt.Fprintln(out, "  "+l)
	}
	if whole.runs < 2 {
		return fmt.Errorf(
			"only %d runs were spilled: there is no middle to be killed in; give more --edges or less --memory",
			whole.runs)
	}
	killed, err := runImport(o, list, b, whole.runs/2)
	if err != nil {
		return err
	}
	if !killed.killed {
		return errors.New("the second import ended before it could be killed")
	}
	fmt.Fprintf(out, "killed with SIGKILL after %.1f s and %d runs\n", killed.seconds, killed.runs)
	again, err := runImport(o, list, b, -1)
	if err != nil {
		return err
	}
	if again.resumed == "" {
		return errors.New("the import did not go on where it was killed")
	}
	fmt.Fprintf(out, "again: %.1f s, peak %s (%.2f × --memory), uuid %s; it said: %s\n",
		again.seconds, units.FormatBytes(again.peak), float64(again.peak)/float64(memory),
		again.uuid, again.resumed)
	if err := same(a, b, out); err != nil {
		return err
	}
	if whole.uuid != again.uuid {
		return fmt.Errorf("uuid %s and %s", whole.uuid, again.uuid)
	}
	for _, p := range []int64{whole.peak, again.peak} {
		if float64(p) > 1.3*float64(memory) {
			return fmt.Errorf("%s were held, more than 1.3 × %s", units.FormatBytes(p), o.memory)
		}
	}
	fmt.Fprintln(out, "equal byte for byte, and within 1.3 × --memory")
	return nil
}

func mix(x uint64) uint64 {
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}

// edge draws a source evenly and a destination unevenly, so that some nodes have very many
// neighbours.
func (o options) edge(i int64) (src, dst uint64) {
	x := mix(uint64(i) + 0x9E3779B97F4A7C15)
	u := float64(x>>40) / (1 << 24)
	v := float64(mix(x)>>11) / (1 << 53)
	dst = mix(uint64(float64(o.nodes)*u*u*v)) % uint64(o.nodes)
	return mix(x^0x5555) % uint64(o.nodes), dst
}

func makeList(path string, o options) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	const chunk = 1 << 16
	type block struct{ b chan []byte }
	queue := make(chan block, 2*runtime.GOMAXPROCS(0))
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		defer close(queue)
		for at := int64(0); at < o.edges; at += chunk {
			k := block{make(chan []byte, 1)}
			select {
			case queue <- k:
			case <-stop:
				return
			}
			go func() {
				b := make([]byte, 0, chunk*18)
				for i := at; i < min(at+chunk, o.edges); i++ {
					s, d := o.edge(i)
					if o.format == "npy" { // [E, 2], uint32
						b = append(b, byte(s), byte(s>>8), byte(s>>16), byte(s>>24), byte(d),
							byte(d>>8), byte(d>>16), byte(d>>24))
						continue
					}
					b = strconv.AppendUint(b, s, 10)
					b = append(b, '\t')
					b = strconv.AppendUint(b, d, 10)
					b = append(b, '\n')
				}
				k.b <- b
			}()
		}
	}()
	if o.format == "npy" {
		head := fmt.Sprintf("{'descr': '<u4', 'fortran_order': False, 'shape': (%d, 2), }", o.edges)
		head += strings.Repeat(" ", 127-10-len(head)) + "\n"
		if _, err := f.Write(append([]byte("\x93NUMPY\x01\x00\x76\x00"), head...)); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	for k := range queue {
		if _, err := f.Write(<-k.b); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return errors.Join(f.Sync(), f.Close())
}

type result struct {
	seconds float64
	peak    int64
	uuid    string
	runs    int
	killed  bool
	resumed string
	stages  []string
}

// runImport imports the list; with killAt 0 or more it kills the import once that many runs are in
// its journal.
func runImport(o options, list, out string, killAt int) (r result, err error) {
	args := append([]string{"--json", "import", "edges", "--in", list, "--out", out, "--memory",
		o.memory, "--nodes", strconv.FormatInt(o.nodes, 10), "--feature-fn", "hash", "--dim", "16"},
		o.extra...)
	cmd := exec.Command(o.heliosctl, args...)
	var stdout bytes.Buffer
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return r, err
	}
	cmd.Stdout = &stdout
	from := time.Now()
	if err := cmd.Start(); err != nil {
		return r, err
	}
	var text []string
	var wg sync.WaitGroup
	wg.Go(func() {
		for sc := bufio.NewScanner(stderr); sc.Scan(); {
			text = append(text, sc.Text())
		}
	})
	ended := make(chan error, 1)
	go func() {
		wg.Wait()
		ended <- cmd.Wait()
	}()
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		select {
		case err = <-ended:
			tick.Stop()
			r.seconds = time.Since(from).Seconds()
			if r.killed {
				return r, nil
			}
			if err != nil {
				return r, fmt.Errorf("%s %s: %w: %s", o.heliosctl, strings.Join(args, " "), err,
					strings.Join(text, "; "))
			}
			return r, r.read(stdout.Bytes(), text)
		case <-tick.C:
			found, _ := filepath.Glob(out + ".partial-*/import.journal")
			for _, j := range found {
				b, _ := os.ReadFile(j) // it goes when the import ends
				r.runs = max(r.runs, bytes.Count(b, []byte(`{"run":`)))
			}
			if killAt >= 0 && r.runs >= killAt && !r.killed && len(found) > 0 {
				r.killed = true
				if err := cmd.Process.Kill(); err != nil {
					return r, err
				}
			}
		}
	}
}

func (r *result) read(stdout []byte, text []string) error {
	for line := range bytes.Lines(stdout) {
		var e struct {
			UUID string `json:"uuid"`
			Peak int64  `json:"peak_memory_bytes"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		if e.UUID != "" {
			r.uuid = e.UUID
		}
		r.peak = max(r.peak, e.Peak)
	}
	for _, l := range text {
		if strings.HasPrefix(l, "going on") {
			r.resumed = l
		}
	}
	// The last line of each stage has its rate.
	for i, l := range text {
		stage, _, ok := strings.Cut(l, ":")
		next := ""
		if i+1 < len(text) {
			next, _, _ = strings.Cut(text[i+1], ":")
		}
		if ok && stage != next {
			r.stages = append(r.stages, l)
		}
	}
	if r.uuid == "" || r.peak == 0 {
		return fmt.Errorf("the import's result has no uuid or peak_memory_bytes: %s", stdout)
	}
	return nil
}

// same compares two dataset directories.
func same(a, b string, out io.Writer) error {
	var sums [2][]string
	for i, dir := range []string{a, b} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			f, err := os.Open(filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			h := sha256.New()
			n, err := io.Copy(h, f)
			if err = errors.Join(err, f.Close()); err != nil {
				return err
			}
			// one has the names, the other its checksum
			if e.Name() == "dataset.yaml" || e.Name() == "dataset.seal" {
				continue
			}
			sums[i] = append(sums[i], fmt.Sprintf("%s %d %x", e.Name(), n, h.Sum(nil)[:8]))
		}
	}
	if !slices.Equal(sums[0], sums[1]) {
		return fmt.Errorf("the datasets differ: %v and %v", sums[0], sums[1])
	}
	for _, l := range sums[0] {
		fmt.Fprintln(out, "  "+l)
	}
	return nil
}
