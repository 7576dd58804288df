package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every output that is there is refused before any work, whatever verb and flag, and left as it is;
// --overwrite replaces it.
func TestOutputsAreNotReplaced(t *testing.T) {
	loaded(t, 1)
	ok(t, trainArgs("--epochs", "1", "--checkpoint", "ck")...)
	virtual := []string{"--clock", "virtual", "--hardware", "a100-p5510x12"}
	with := func(a []string, b ...string) []string { return append(append([]string{}, a...), b...) }
	for flag, args := range map[string][]string{
		"train --results":                 trainArgs("--epochs", "1"),
		"train --timeline":                trainArgs("--epochs", "1"),
		"train --clock virtual --results": trainArgs(with(virtual, "--epochs", "1")...),
		"eval --results":                  {"eval", "g", "--checkpoint", "ck"},
		"eval --timeline":                 {"eval", "g", "--checkpoint", "ck"},
		"predict --csv":                   {"predict", "g", "--checkpoint", "ck"},
		"predict --embeddings":            {"predict", "g", "--checkpoint", "ck"},
		"predict --timeline":              {"predict", "g", "--checkpoint", "ck"},
		"compare --results": with([]string{"compare", "g", "--modes", "helios,bam",
			"--fanout", "5,5"}, virtual...),
		"bench io --timeline": with([]string{"bench", "io", "--seconds", "0.001"},
			virtual...),
		"bench io --results": with([]string{"bench", "io", "--seconds", "0.001"},
			virtual...),
		"partition --out":         {"partition", "g", "--parts", "2", "--method", "random"},
		"cache hotness --results": {"cache", "hotness", "g", "--hotness", "degree"},
	} {
		require.NoError(t, os.WriteFile("there", []byte("mine"), 0o644))
		words := strings.Fields(flag)
		name := words[len(words)-1]
		r := hc(t, with(args, name, "there")...)
		require.Equal(t, 4, r.code, "%s: %s", flag, r.errOut)
		require.Contains(t, r.errOut, name+" there is there already; --overwrite replaces it", flag)
		require.NotContains(t, r.out, `"event":"epoch"`, flag)
		require.Equal(t, "mine", readFile(t, "there"), flag)
		if flag == "predict --csv" || flag == "train --results" {
			ok(t, with(args, name, "there", "--overwrite")...)
			require.NotEqual(t, "mine", readFile(t, "there"), flag)
		}
		ok := hc(t, with(args, name, "no/there")...)
		require.Equal(t, 2, ok.code, "%s: a folder that is not there: %s", flag, ok.errOut)
		hidden, err := filepath.Glob(".*there*")
		require.NoError(t, err)
		require.Empty(t, hidden, flag)
	}
	fails(t, hc(t, "predict", "g", "--checkpoint", "ck", "--csv", "x", "--embeddings", "./x"), 2,
		"predict", "--csv and --embeddings both name ./x")
	fails(t, hc(t, trainArgs("--timeline", "x", "--results", "x")...), 2, "train", "both name x")
	require.NoFileExists(t, "x")
	require.Contains(t, ok(t, "predict", "g", "--checkpoint", "ck", "--nodes", "1", "--csv",
		"/dev/null"), "/dev/null")
}

// Not even --overwrite replaces the list of bound SSDs, or a file that only a variant reads.
func TestOverwriteSparesListAndVariants(t *testing.T) {
	loaded(t, 1)
	list := filepath.Join(os.Getenv("HELIOS_STATE"), "state.json")
	require.NoError(t, os.WriteFile("ids.txt", []byte("1\n2\n3\n"), 0o644))
	for path, args := range map[string][]string{
		list:      trainArgs("--epochs", "1", "--results"),
		"ids.txt": {"compare", "g", "--modes", "cpu", "--variants", "a=--hotness ids.txt", "--results"},
	} {
		before := readFile(t, path)
		fails(t, hc(t, append(args, path, "--overwrite")...), 4, args[0], "never written over")
		require.Equal(t, before, readFile(t, path))
	}
}

// A run does not replace another one's checkpoint.
func TestTrainKeepsAnothersCheckpoint(t *testing.T) {
	loaded(t, 1)
	ok(t, trainArgs("--checkpoint", "ck", "--results", "r.jsonl")...)
	before := readFile(t, "ck/checkpoint.safetensors")
	r := hc(t, trainArgs("--checkpoint", "ck", "--model", "gcn", "--results", "other.jsonl")...)
	fails(t, r, 4, "train",
		"--checkpoint folder ck holds sage of dataset g, 2 epochs done, written 20", "--resume",
		"--overwrite")
	require.NoFileExists(t, "other.jsonl")
	fails(t, hc(t, trainArgs("--checkpoint", "ck", "--model", "gcn", "--resume")...), 2, "train",
		"made with model sage, this run has gcn")
	require.Equal(t, before, readFile(t, "ck/checkpoint.safetensors"))

	// A run that goes on adds to its own results, and to nobody else's.
	ok(t, trainArgs("--checkpoint", "ck", "--resume", "--epochs", "3", "--results", "r.jsonl")...)
	var events []string
	for _, l := range lines(t, readFile(t, "r.jsonl")) {
		events = append(events, l["event"].(string))
	}
	require.Equal(t, []string{"begin", "epoch", "epoch", "result", "end", "resume", "epoch",
		"result", "end"}, events)
	ok(t, trainArgs("--epochs", "1", "--results", "alien.jsonl")...)
	fails(t, hc(t, trainArgs("--checkpoint", "ck", "--resume", "--epochs", "3", "--results",
		"alien.jsonl")...), 4, "train", "holds the results of run ", "--overwrite")
	require.NoError(t, os.WriteFile("text", []byte("hello\nworld"), 0o644))
	fails(t, hc(t, trainArgs("--checkpoint", "ck", "--resume", "--epochs", "3", "--results",
		"text")...), 4, "train", "no run's results")
	require.Equal(t, "hello\nworld", readFile(t, "text"))
	// Results that lack an epoch that was saved, and end in a part of a line, are mended.
	all := strings.SplitAfter(readFile(t, "r.jsonl"), "\n")
	require.NoError(t, os.WriteFile("torn.jsonl", []byte(all[0]+all[1]+all[2][:40]), 0o644))
	ok(t, trainArgs("--checkpoint", "ck", "--resume", "--epochs", "3", "--results",
		"torn.jsonl")...)
	got := lines(t, readFile(t, "torn.jsonl"))
	require.Len(t, got, 1+1+1+2+2)
	for i, index := range []int{1, 3, 4} {
		require.Equal(t, float64(i+1), got[index]["epoch"])
	}
	// Without a checkpoint nothing is gone on from: neither another run's results, nor the best
	// parameters of a folder.
	whole := readFile(t, "alien.jsonl")
	fails(t, hc(t, trainArgs("--checkpoint", "new", "--resume", "--seed", "77", "--results",
		"alien.jsonl")...), 4, "train", "holds epochs of run ", "no checkpoint to go on from")
	fails(t, hc(t, "train", "no-such", "--checkpoint", "ck", "--resume", "--epochs", "3",
		"--results", "r.jsonl"), 2, "train", "no-such")
	require.Equal(t, whole, readFile(t, "alien.jsonl"))
	require.Equal(t, strings.Join(all, ""), readFile(t, "r.jsonl"),
		"a run that did not begin says nothing of it")
	require.NoError(t, os.WriteFile("notes", []byte("my notes"), 0o644))
	fails(t, hc(t, trainArgs("--checkpoint", "ck", "--resume", "--epochs", "3", "--results",
		"notes")...), 4, "train", "holds no whole line")
	require.Equal(t, "my notes", readFile(t, "notes"))
	require.NoError(t, os.Mkdir("kept", 0o755))
	best := readFile(t, "ck/best.safetensors")
	require.NoError(t, os.WriteFile("kept/best.safetensors", []byte(best), 0o644))
	fails(t, hc(t, trainArgs("--checkpoint", "kept", "--resume", "--seed", "9")...), 4, "train",
		"in best.safetensors alone, which no run can go on from", "--overwrite")
	require.Equal(t, best, readFile(t, "kept/best.safetensors"))

	ok(t, trainArgs("--checkpoint", "ck", "--overwrite", "--model", "gcn")...)
	require.NotEqual(t, before, readFile(t, "ck/checkpoint.safetensors"))
}

// A checkpoint of another dataset is not evaluated by mistake.
func TestEvalOfAnotherDataset(t *testing.T) {
	loaded(t, 1)
	ok(t, trainArgs("--checkpoint", "ck")...)
	ok(t, "generate", "--kind", "sbm", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "32", "--seed", "4", "--out", "h")
	ok(t, "unbind-ssds", "--quiet")
	ok(t, "bind-ssds", "--proxy", "b.img", "--size", "16MiB")
	ok(t, "load", "h")
	for _, verb := range []string{"eval", "predict"} {
		fails(t, hc(t, verb, "h", "--checkpoint", "ck", "--device", "host", "--quiet"), 4, verb,
			"was trained on dataset g ", "this is h ", "test nodes of the other", "--other-dataset")
		r := hc(t, verb, "h", "--checkpoint", "ck", "--device", "host", "--other-dataset", "--json")
		require.Equal(t, 0, r.code, r.errOut)
		require.Contains(t, r.errOut, "test nodes of the other", "it says so all the same")
	}
}

// closedPipe is standard output whose reader goes away after some lines.
type closedPipe struct{ left int }

func (p *closedPipe) Write(b []byte) (int, error) {
	if p.left--; p.left < 0 {
		return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
	}
	return len(b), nil
}

// When the reader of standard output goes away, training stops as after Ctrl-C: the checkpoint is
// saved and the results say so; with --resume it goes on.
func TestClosedPipeStopsAndSaves(t *testing.T) {
	loaded(t, 1)
	var errOut bytes.Buffer
	args := trainArgs("--epochs", "4", "--checkpoint", "ck", "--results", "r.jsonl")
	code := run(t.Context(), args, &closedPipe{left: 1}, &errOut)
	fails(t, outcome{code: code, errOut: errOut.String()}, 130, "train",
		"saved in ck/checkpoint.safetensors", "the reader of standard output closed it")
	rows := lines(t, readFile(t, "r.jsonl"))
	end := rows[len(rows)-1]
	require.Equal(t, []any{"end", false, 130.0}, []any{end["event"], end["whole"],
		end["exit_code"]})
	require.Contains(t, end["reason"], "saved in")
	want := last(t, ok(t, trainArgs("--epochs", "4")...))
	require.Equal(t, want["params_sha256"],
		last(t, ok(t, append(args, "--resume")...))["params_sha256"])
	rows = lines(t, readFile(t, "r.jsonl"))
	require.Equal(t, true, rows[len(rows)-1]["whole"])
	// Short output of a verb that is done.
	errOut.Reset()
	code = run(t.Context(), []string{"ssds"}, &closedPipe{}, &errOut)
	require.Equal(t, 130, code)
	// A real pipe: the signal does not end the process.
	c := child(t, trainArgs("--epochs", "1", "--checkpoint", "ck2")...)
	c.Stderr = &errOut
	r, w, err := os.Pipe()
	require.NoError(t, err)
	c.Stdout = w
	require.NoError(t, r.Close())
	err = c.Run()
	require.NoError(t, w.Close())
	require.Error(t, err)
	require.Equal(t, 130, c.ProcessState.ExitCode(), errOut.String())
}

// Results that can't be written are an error, and what came before it stays.
func TestResultsOnAFullDisk(t *testing.T) {
	loaded(t, 1)
	r := hc(t, trainArgs("--epochs", "1", "--results", "/dev/full")...)
	require.Equal(t, 1, r.code)
	require.Contains(t, r.errOut, "--results /dev/full: ")
	require.Contains(t, r.errOut, "no space left")
}

// A run that fails after it has begun leaves its results with the reason; one that fails before
// leaves none.
func TestResultsOfAFailedRun(t *testing.T) {
	loaded(t, 1)
	args := trainArgs("--results", "r.jsonl", "--gpu-cache", "0", "--cpu-cache", "0", "--fault",
		"error(op=read,sct=2,sc=0x81,dnr=1,after=50)")
	require.Equal(t, 5, hc(t, args...).code)
	rows := lines(t, readFile(t, "r.jsonl"))
	require.Equal(t, "begin", rows[0]["event"])
	require.NotEmpty(t, rows[0]["dataset"])
	end := rows[len(rows)-1]
	require.Equal(t, []any{"end", false, 5.0}, []any{end["event"], end["whole"], end["exit_code"]})
	require.Equal(t, 2, hc(t, trainArgs("--results", "none.jsonl", "--ssds", "nosuch")...).code)
	require.NoFileExists(t, "none.jsonl")
}

// No output replaces what the run reads, or what an SSD that is bound keeps, by whatever name.
func TestOutputsSpareInputs(t *testing.T) {
	loaded(t, 1)
	ok(t, trainArgs("--epochs", "1", "--checkpoint", "ck", "--results", "r.jsonl")...)
	require.NoError(t, os.WriteFile("c.yaml", []byte("epochs: 1\n"), 0o600))
	require.NoError(t, os.WriteFile("ids.txt", []byte("1\n2\n"), 0o600))
	ok(t, "generate", "--nodes", "600", "--dim", "8", "--out", "far")
	ok(t, "partition", "g", "--parts", "2", "--method", "random", "--out", "p.npy")
	ssd := "ssd0.img"
	require.NoError(t, os.Symlink(ssd, "soft"))
	require.NoError(t, os.Link(ssd, "hard"))
	require.NoError(t, os.Link("g/labels.npy", "labels"))
	require.NoError(t, os.Symlink("g", "dir"))
	dir, err := os.Getwd()
	require.NoError(t, err)
	f, err := os.OpenFile(ssd, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close() //nolint:errcheck // of a test
	train := trainArgs("--epochs", "1", "--overwrite")
	with := func(a []string, b ...string) []string { return append(append([]string{}, a...), b...) }
	for _, c := range [][]string{
		with(train, "--results", ssd), with(train, "--results", "soft"), with(train, "--results", "hard"),
		with(train, "--timeline", "hard"), with(train, "--timeline", ssd),
		with(train, "--results", fmt.Sprintf("/dev/fd/%d", f.Fd())),
		with(train, "--results", fmt.Sprintf("/proc/self/fd/%d", f.Fd())),
		with(train, "--results", "g/labels.npy"), with(train, "--results", "labels"),
		with(train, "--results", "dir/dataset.yaml"), with(train, "--timeline", dir+"/g/../g/features.npy"),
		with(train, "--config", "c.yaml", "--results", "c.yaml"),
		with(train, "--hotness", "ids.txt", "--results", "ids.txt"),
		with(train, "--mode", "hier", "--partition", "p.npy", "--timeline", "p.npy"),
		with(train, "--checkpoint", "ck", "--resume", "--results", "ck/checkpoint.safetensors"),
		{"eval", "g", "--checkpoint", "ck", "--overwrite", "--results", "ck/checkpoint.safetensors"},
		{"predict", "g", "--checkpoint", "ck", "--overwrite", "--csv", "g/test.npy"},
		{"predict", "--dataset=g", "--checkpoint", "ck/best.safetensors", "--overwrite", "--embeddings", ssd},
		{"cache", "hotness", "g", "--hotness", "ids.txt", "--overwrite", "--results", "ids.txt"},
		{"cache", "hotness", "g", "--hotness", "degree", "--overwrite", "--results", ssd},
		{"partition", "g", "--parts", "2", "--overwrite", "--out", "g/indptr.npy"},
		{"report", "r.jsonl", "--overwrite", "--out", "hard"},
		{"rerun", "r.jsonl", "--overwrite", "--results", "r.jsonl"},
		{"bench", "io", "--overwrite", "--results", ssd},
		{"plan", "far", "--hardware", "a100-optane", "--overwrite", "--results", "far/labels.npy"},
		with(trainArgs("--epochs", "1"), "--results", ssd), // nor is --overwrite the advice
	} {
		r := hc(t, c...)
		require.Equal(t, 4, r.code, "%v: %s", c, r.errOut)
		require.Contains(t, r.errOut, "never written over", c)
		require.NotContains(t, r.out, `"event":"begin"`, c)
	}
	ok(t, "verify", "g")
	ok(t, with(train, "--results", "g/mine.jsonl")...)
	ok(t, with(train, "--results", "g/mine.jsonl")...) // what somebody keeps beside a dataset is his
}
