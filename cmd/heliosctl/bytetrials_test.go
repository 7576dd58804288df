package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Damage at random places of everything that a run reads, and verbs over it, by the number in
// HELIOS_BYTE_TRIALS (a few without it) and the seed in HELIOS_BYTE_SEED; HELIOS_BYTE_KIND has all
// of them of one kind. Each trial must end as one of
//
//	found      the verb fails, with an exit code by cause
//	noted      its result is equal, to the bit, and it names what is damaged or puts it aside
//	not read   its result is equal, and verify fails, which it does for all that has checksums
//	unused     its result is equal, and nothing of ours is there: zeros around a stripe
//
// A result that differs is a silent change, and an equal one without such a reason may be: there
// must be none of either.
const (
	byteTrialsEnv = "HELIOS_BYTE_TRIALS"
	byteSeedEnv   = "HELIOS_BYTE_SEED"
	byteKindEnv   = "HELIOS_BYTE_KIND"
)

type byteKind struct {
	name string
	do   func(r *rand.Rand, b []byte) []byte
}

// byteKinds change a file's bytes; nil says that nothing would be another.
var byteKinds = []byteKind{
	{"bit", func(r *rand.Rand, b []byte) []byte {
		if len(b) == 0 {
			return nil
		}
		b[somewhere(r, b)] ^= 1 << r.IntN(8)
		return b
	}},
	{"zeroed page", func(r *rand.Rand, b []byte) []byte {
		if len(b) == 0 {
			return nil
		}
		from := somewhere(r, b) &^ 4095
		page := b[from:min(from+4096, len(b))]
		if len(bytes.Trim(page, "\x00")) == 0 {
			return nil
		}
		clear(page)
		return b
	}},
	{"cut", func(r *rand.Rand, b []byte) []byte {
		if len(b) == 0 {
			return nil
		}
		return b[:r.IntN(len(b))]
	}},
	{"appended", func(r *rand.Rand, b []byte) []byte {
		more := make([]byte, 1+r.IntN(5000))
		for i := range more {
			more[i] = byte(r.Uint32())
		}
		return append(b, more...)
	}},
}

// somewhere is any byte of b, or, half of the time, one in a page that is not all zeros: an SSD is
// mostly empty.
func somewhere(r *rand.Rand, b []byte) int {
	for try, empty := 0, r.IntN(2) == 0; ; try++ {
		offset := r.IntN(len(b))
		page := b[offset&^4095 : min(offset&^4095+4096, len(b))]
		if empty || try == 10_000 || len(bytes.Trim(page, "\x00")) > 0 {
			return offset
		}
	}
}

// byteVerb is a use of files. Its result is what must not change.
type byteVerb struct {
	name string
	args []string
	// a file that it writes: its bytes are the result; else what --json says that does not depend
	// on time
	out  string
	keep []string // what it changes and needs as it was
}

// byteNotes are notes of verbs that go on without a damaged file.
var byteNotes = []string{"hotness cannot be used", "unusable", "damaged table", "not used:"}

func (v *byteVerb) run(t *testing.T, extra ...string) (result string, r outcome) {
	t.Helper()
	if v.out != "" {
		require.NoError(t, os.RemoveAll(v.out))
	}
	r = hc(t, append(slices.Clone(v.args), extra...)...)
	if r.code != 0 {
		return "", r
	}
	if v.out != "" {
		b, err := os.ReadFile(v.out)
		require.NoError(t, err)
		return string(b), r
	}
	var keep []any
	for _, l := range strings.Split(strings.TrimSpace(r.out), "\n") {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(l), &m), "%v: %s", v.args, l)
		if m["event"] == "note" {
			continue
		}
		for _, k := range []string{"event", "epoch", "loss", "train_acc", "val_acc", "test_acc",
			"params_sha256", "accuracy", "nodes", "chunks", "bad_count", "sealed", "cut_edges",
			"max_nodes", "max_edges", "policy", "lines", "total"} {
			keep = append(keep, m[k])
		}
	}
	return fmt.Sprint(keep...), r
}

func TestByteTrials(t *testing.T) {
	trials, seed := 34, uint64(1)
	if s := os.Getenv(byteTrialsEnv); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		trials, seed = n, uint64(time.Now().UnixNano())
	}
	if s := os.Getenv(byteSeedEnv); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
		seed = n
	}
	r := rand.New(rand.NewPCG(seed, 15))

	isolate(t)
	ok(t, "generate", "--nodes", "900", "--avg-degree", "12", "--classes", "4", "--dim", "24",
		"--seed", "3", "--out", "g")
	// A dataset with names, sealed.
	var names strings.Builder
	for i := range 900 {
		fmt.Fprintf(&names, "package-%d\n", i)
	}
	require.NoError(t, os.WriteFile("g/names.txt", []byte(names.String()), 0o644))
	meta, err := os.ReadFile("g/dataset.yaml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("g/dataset.yaml", bytes.Replace(meta, []byte("sealed: true\n"),
		nil, 1), 0o644))
	require.NoError(t, os.Remove("g/dataset.seal"))
	ok(t, "verify", "--seal", "g")
	ok(t, "partition", "g", "--parts", "3", "--method", "stream", "--out", "g/three.partition")
	ok(t, "bind-ssds", "--proxy", "ssd0.img,ssd1.img", "--size", "2500KiB")
	extents := map[string][][2]int64{}
	for i, x := range last(t, ok(t, "load", "g", "--json"))["extents"].([]any) {
		for _, e := range x.(map[string]any)["extents"].([]any) {
			e := e.(map[string]any)
			offset, n := int64(e["lba"].(float64))*512, int64(e["blocks"].(float64))*512
			switch e["what"] {
			case "superblock and zeros":
				n = 4096
			case "chunk checksums", "row checksums": // then padding
				n = int64(map[string]int{"chunk checksums": 4, "row checksums": 450 * 4}[e["what"].(string)])
			case "zeros and superblock":
				offset += n - 4096
				n = 4096
			}
			img := fmt.Sprintf("ssd%d.img", i)
			extents[img] = append(extents[img], [2]int64{offset, offset + n})
		}
	}
	model := []string{"--dataset", "g", "--fanout", "3,3", "--batch-size", "256", "--hidden", "8",
		"--lr", "0.01", "--workers", "1", "--json"}
	train := func(
		more ...string) []string {
		return append(append([]string{"train"}, model...), more...)
	}
	ok(t, train("--epochs", "1", "--checkpoint", "ck", "--hotness-dir", "hot",
		"--gpu-cache", "10%", "--cpu-cache", "10%")...)

	run := func(more ...string) *byteVerb {
		return &byteVerb{name: "train " + strings.Join(more, " "),
			args: train(append(more, "--epochs", "2")...)}
	}
	off := []string{"--hotness-dir", "off"}
	plain, inmem := run(off...), run(append(off, "--mode", "inmem")...)
	bam := run(append(off, "--mode", "bam", "--gpu-cache", "10%")...)
	cpu := run(append(off, "--mode", "cpu", "--cpu-cache", "10%")...)
	storage := run(append(off, "--topology", "ssd")...)
	diskgnn := run(append(off, "--mode", "diskgnn", "--gpu-cache", "5%", "--cpu-cache", "5%")...)
	hier := run(append(off, "--mode", "hier")...)
	diskgnn.keep, hier.keep = []string{"g/packed"}, []string{"g/parted-hier"}
	kept := run("--hotness-dir", "hot", "--gpu-cache", "10%", "--cpu-cache", "10%")
	kept.keep = []string{"hot"}
	for _, v := range []*byteVerb{diskgnn, hier} { // lay out what is damaged
		_, out := v.run(t)
		require.Equal(t, 0, out.code, "%v: %s", v.args, out.errOut)
	}
	resume := &byteVerb{name: "train --resume", args: train("--epochs", "2", "--checkpoint", "ck",
		"--resume", "--hotness-dir", "off"), keep: []string{"ck"}}
	eval := &byteVerb{name: "eval", args: []string{"eval", "g", "--checkpoint", "ck", "--json",
		"--hotness-dir", "off"}}
	best := &byteVerb{name: "eval best", args: []string{"eval", "g", "--checkpoint",
		"ck/best.safetensors", "--json", "--hotness-dir", "off"}}
	predict := &byteVerb{name: "predict", args: []string{"predict", "g", "--checkpoint", "ck",
		"--csv", "p.csv", "--hotness-dir", "off"}, out: "p.csv"}
	load := &byteVerb{name: "load", args: []string{"load", "g", "--json", "--quiet"},
		keep: []string{"ssd0.img", "ssd1.img"}}
	measure := &byteVerb{name: "partition --in", args: []string{"partition", "g", "--in",
		"g/three.partition", "--json", "--quiet"}}
	verify := &byteVerb{name: "verify", args: []string{"verify", "g", "--json", "--quiet"}}

	type target struct {
		file  string
		verbs []*byteVerb
	}
	var targets []target
	files, err := os.ReadDir("g")
	require.NoError(t, err)
	for _, f := range files {
		if f.IsDir() {
			continue
		}
		verbs := []*byteVerb{plain, storage, cpu, diskgnn, hier, eval, predict, load, verify}
		switch f.Name() {
		case "features.npy": // read by two verbs alone, and by the others its header
			verbs = append(verbs, load, verify, load, verify)
		case "names.txt":
			verbs = []*byteVerb{predict, load, verify}
		case "three.partition":
			verbs = []*byteVerb{measure, verify}
		}
		targets = append(targets, target{filepath.Join("g", f.Name()), verbs})
	}
	for dir, v := range map[string]*byteVerb{"ck": resume, "hot": kept, "g/packed": diskgnn,
		"g/parted-hier": hier} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			// a lock has no bytes
			if err == nil && d.Type().IsRegular() && !strings.HasSuffix(path, "lock") {
				verbs := []*byteVerb{v}
				switch {
				case filepath.Base(path) == "best.safetensors":
					verbs = []*byteVerb{best}
				case v == resume:
					verbs = []*byteVerb{resume, resume, eval, predict}
				}
				targets = append(targets, target{path, verbs})
			}
			return err
		}))
	}
	for _, img := range []string{"ssd0.img", "ssd1.img", "ssd0.img", "ssd1.img", "ssd0.img"} {
		targets = append(targets, target{img, []*byteVerb{plain, cpu, diskgnn, hier, bam,
			inmem, eval, predict, verify}})
	}
	slices.SortFunc(targets, func(a, b target) int { return strings.Compare(a.file, b.file) })

	good := keepFiles(t, "g", "ck", "hot", "ssd0.img", "ssd1.img")
	want := map[*byteVerb]string{}
	restore := func(v *byteVerb, file string) {
		for _, k := range append([]string{file}, v.keep...) {
			good.restore(t, k)
		}
	}
	wanted := func(v *byteVerb) string {
		if _, known := want[v]; !known {
			result, out := v.run(t)
			require.Equal(t, 0, out.code, "%v: %s", v.args, out.errOut)
			want[v] = result
			restore(v, "none")
		}
		return want[v]
	}

	const found, noted, notRead, unused, silent = 0, 1, 2, 3, 4
	kinds := byteKinds
	if k := os.Getenv(byteKindEnv); k != "" {
		kinds = slices.DeleteFunc(slices.Clone(kinds), func(x byteKind) bool { return x.name != k })
		require.NotEmpty(t, kinds, "%s=%s", byteKindEnv, k)
	}
	table := map[string]*[5]int{}
	for i := range trials {
		// Every file and kind in turn; the rest is drawn.
		tg := targets[i%len(targets)]
		kind := kinds[(i/len(targets))%len(kinds)]
		v := tg.verbs[r.IntN(len(tg.verbs))]
		what := wanted(v)
		row := tg.file + "\x00" + kind.name
		if table[row] == nil {
			table[row] = &[5]int{}
		}
		b := kind.do(r, slices.Clone(good[tg.file]))
		if b == nil || bytes.Equal(b, good[tg.file]) {
			table[row][unused]++
			continue
		}
		require.NoError(t, os.WriteFile(tg.file, b, 0o644))
		result, out := v.run(t)
		verdict := silent
		switch {
		case out.code != 0:
			verdict = found
			require.Contains(t, []int{2, 3, 4, 5}, out.code, "seed %d, trial %d: %s", seed, i,
				out.errOut)
			require.NotContains(t, out.errOut, "goroutine ", "a Go trace: seed %d, trial %d",
				seed, i)
		case result != what:
		case slices.ContainsFunc(byteNotes,
			func(s string) bool { return strings.Contains(out.errOut+out.out, s) }):
			verdict = noted
		case strings.HasSuffix(tg.file, ".img") && outside(good[tg.file], b, extents[tg.file]):
			verdict = unused
		case hc(t, "verify", "g", "--quiet").code == 5:
			verdict = notRead
		}
		table[row][verdict]++
		if verdict == silent {
			t.Errorf("seed %d, trial %d: %s of %s: %s gives %s result, and nobody says so", seed, i,
				kind.name, tg.file, v.name, map[bool]string{true: "an equal", false: "another"}[result ==
					what])
		}
		restore(v, tg.file)
	}
	var text strings.Builder
	const line = "%-34s %-12s %8v %8v %8v %8v %8v\n"
	fmt.Fprintf(&text, "%d trials, seed %d\n", trials, seed)
	fmt.Fprintf(&text, line, "file", "damage", "found", "noted", "not read", "unused", "silent")
	var sum [5]int
	for _, tg := range targets {
		for _, k := range byteKinds {
			if n := table[tg.file+"\x00"+k.name]; n != nil {
				delete(table, tg.file+"\x00"+k.name) // an SSD is a target more than once
				fmt.Fprintf(&text, line, tg.file, k.name, n[0], n[1], n[2], n[3], n[4])
				for i := range sum {
					sum[i] += n[i]
				}
			}
		}
	}
	fmt.Fprintf(&text, line, "all", "", sum[0], sum[1], sum[2], sum[3], sum[4])
	t.Log("\n" + text.String())
	for _, tg := range targets {
		require.FileExists(t, tg.file)
	}
	ok(t, "unbind-ssds", "--delete")
}

// outside reports whether two contents of an SSD are equal in all of some extents.
func outside(a, b []byte, extents [][2]int64) bool {
	for _, e := range extents {
		if int64(len(b)) < e[1] || !bytes.Equal(a[e[0]:e[1]], b[e[0]:e[1]]) {
			return false
		}
	}
	return true
}

// keptFiles are files' bytes.
type keptFiles map[string][]byte

// keepFiles reads files, and all that folders hold.
func keepFiles(t *testing.T, paths ...string) keptFiles {
	t.Helper()
	k := keptFiles{}
	for _, p := range paths {
		require.NoError(t, filepath.WalkDir(p, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				k[path], err = os.ReadFile(path)
			}
			return err
		}))
	}
	return k
}

// restore gives a file, or a folder's, their bytes, and removes what is new. A file stays the same
// inode, which a bound SSD must.
func (k keptFiles) restore(t *testing.T, path string) {
	t.Helper()
	_ = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && k[p] == nil {
			err = os.Remove(p)
		}
		return err
	})
	for p, b := range k {
		if p != path && !strings.HasPrefix(p, path+"/") {
			continue
		}
		if now, err := os.ReadFile(p); err == nil && bytes.Equal(now, b) {
			continue
		}
		require.NoError(t, os.WriteFile(p, b, 0o644))
	}
}
