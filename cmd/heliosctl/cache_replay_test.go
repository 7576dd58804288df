package main

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cache/trace"
)

// writeTrace records a run of lru over lines of eight rows, with the counters that it must have
// come to, or wrong ones.
func writeTrace(t *testing.T, path string, wrong int64) {
	h := trace.Header{Name: "graph", Rows: 4000, RowBytes: 512, SSDs: 2, SlotBytes: 512,
		LBABytes: 512, Mode: "bam", IOStack: "sync", Policy: policy.LRU,
		GPULines: 50, LineBytes: 4096, RowsPerLine: 8, Window: 1}
	w, err := trace.Create(path, h, false)
	require.NoError(t, err)
	d, err := policy.New(policy.Config{Policy: policy.LRU, Slots: 50})
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 1))
	batches := make([][]int64, 20)
	for i := range batches {
		for len(batches[i]) < 60 { // one row of a line, so lines are counted by rows
			line := int64(250 * r.Float64() * r.Float64())
			row := line*16 + r.Int64N(2)
			if !containsLine(batches[i], row) {
				batches[i] = append(batches[i], row)
			}
		}
	}
	lineOf := func(rows []int64) (out []int64) {
		for _, row := range rows {
			out = append(out, row/16*2+row%2)
		}
		return out
	}
	l := trace.Live{Batches: 20}
	out := make([]policy.Answer, 60)
	d.Announce(lineOf(batches[0]))
	for i, b := range batches {
		if i+1 < len(batches) {
			d.Announce(lineOf(batches[i+1]))
		}
		d.NextBatch()
		d.Access(lineOf(b), out)
		require.NoError(t, w.Begin(trace.Train, 0, i))
		require.NoError(t, w.Part(b))
		for _, a := range out {
			if a.Hit {
				l.RowsGPU++
			} else {
				l.RowsSSD++
				l.BytesSSD += 4096
			}
		}
	}
	s := d.Stats()
	l.Inserted, l.Evicted, l.Bypassed = s.Inserted, s.Evicted+wrong, s.Bypassed
	require.NoError(t, w.Live(l))
	require.NoError(t, w.Close())
}

func containsLine(rows []int64, row int64) bool {
	for _, r := range rows {
		if r/16 == row/16 && r%2 == row%2 {
			return true
		}
	}
	return false
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func TestCacheReplay(t *testing.T) {
	isolate(t)
	writeTrace(t, "run.trace", 0)
	text := ok(t, "cache", "replay", "run.trace", "--sizes", "2%,5%,200lines",
		"--cache-line", "row,4096",
		"--window", "0,2", "--superbatch", "5,100", "--results", "out.json")
	require.Contains(t, text, "s3fifo")
	require.Contains(t, text, "belady is what reads the fewest lines")
	require.Contains(t, text, "may show more hits than belady")
	rows := lines(t, kept(t, "out.json"))
	// Belady, five policies with two windows and superbatches of two lengths, for two sizes of rows
	// (200 are 5 %, which is there) and three of lines; the oracle for the former; the result.
	require.Equal(t, (2+3)*13+2+1, len(rows))
	for _, r := range rows[:len(rows)-1] {
		total := r["total"].(map[string]any)
		require.EqualValues(t, 1200, total["rows"])
		require.GreaterOrEqual(t, total["reads_over_optimum"], 1.0)
		require.GreaterOrEqual(t, total["gap_points"], -1e-9)
		if r["superbatch"] == 100.0 { // more than the run's 20 mini-batches: it knows all
			require.Equal(t, 1.0, total["reads_over_optimum"])
		}
	}
	// The page needs no other, and its figures have every play that there was.
	ok(t, "report", "out.json", "--out", "out.html")
	page := readFile(t, "out.html")
	require.NotRegexp(t, `(src|href)="[^#]`, page)
	require.Equal(t, 3, strings.Count(page, "<figure "))
	require.Contains(t, page, "Hits by size of the cache")
	figures := regexp.MustCompile(`const figures = (.*);</script>`).FindStringSubmatch(page)
	require.NotNil(t, figures)
	var drawn []struct {
		Series []struct {
			Limit  bool
			Points []struct{ X float64 }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(figures[1]), &drawn))
	points := 0
	for _, s := range drawn[0].Series {
		if !s.Limit {
			points += len(s.Points)
		}
	}
	require.Equal(t, len(rows)-1, points)
	require.Regexp(t, `lru +10 % +train 1 +\d+\.\d\d %`,
		ok(t, "cache", "replay", "--trace", "run.trace", "--policy", "lru", "--sizes", "50lines",
			"--window", "0", "--passes"))
}

func TestCacheReplayCheck(t *testing.T) {
	isolate(t)
	writeTrace(t, "run.trace", 0)
	require.Contains(t, ok(t, "cache", "replay", "run.trace", "--check"), "1 of 1 passes are equal")
	rows := lines(t, ok(t, "cache", "replay", "run.trace", "--check", "--json", "--policy", "lru",
		"--sizes", "10%"))
	require.Equal(t, true, rows[0]["equal"])
	require.Equal(t, true, rows[0]["bytes_compared"])
	require.Equal(t, "play", rows[1]["event"])
	writeTrace(t, "wrong.trace", 1)
	whole := []byte(readFile(t, "run.trace"))
	require.NoError(t, os.WriteFile("cut.trace", whole[:len(whole)-100], 0o600))
	whole[len(whole)/2]++
	require.NoError(t, os.WriteFile("bad.trace", whole, 0o600))
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "--trace"},
		{"none.trace", 2, "none.trace"},
		{"wrong.trace --check", 1, "in 1 passes"},
		{"cut.trace --check", 5, "cut short"},
		{"bad.trace", 5, "damaged"},
		{"run.trace --policy lur", 2, "did you mean lru"},
		{"run.trace --policy static", 2, "no hotness"},
		{"run.trace --sizes 50", 2, "--sizes"},
		{"run.trace --cache-line 0", 2, "--cache-line 0"},
		{"run.trace --window 65", 2, "--window 65"},
		{"run.trace --superbatch 0", 2, "--superbatch 0"},
		{"run.trace --superbatch 5,x", 2, "--superbatch x"},
		{"run.trace --cpu-cache 10%", 2, "hotness"},
		{"run.trace --workers 0", 2, "--workers 0"},
	} {
		fails(t, hc(t, append([]string{"cache", "replay"}, strings.Fields(c.args)...)...), c.code,
			"cache replay", c.says)
	}
}
