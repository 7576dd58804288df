package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func testRunner(t *testing.T) *runner {
	log, err := os.Create(filepath.Join(t.TempDir(), "log.txt"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, log.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return &runner{ctx: ctx, pack: t.TempDir(), dir: t.TempDir(), log: log}
}

// TestSteps: every way a step can end is a row, and none ends the others.
func TestSteps(t *testing.T) {
	r := testRunner(t)
	began := time.Now()
	for _, j := range []job{
		{name: "good", limit: 10 * time.Second, args: []string{"/bin/sh", "-c",
			"echo first words >&2; echo last words >&2"}},
		{name: "code", limit: 10 * time.Second, args: []string{"/bin/sh", "-c",
			"echo reasons; exit 7"}},
		{name: "right code", limit: 10 * time.Second, codes: []int{3},
			args: []string{"/bin/sh", "-c", "exit 3"}},
		{name: "wrong code", limit: 10 * time.Second, codes: []int{3}, args: []string{"/bin/true"}},
		{name: "hangs", limit: 200 * time.Millisecond, args: []string{"/bin/sh", "-c",
			"sleep 60 & sleep 60"}},
		{name: "absent", limit: 10 * time.Second, args: []string{"no-such-program-here"}},
		{name: "not runnable", limit: 10 * time.Second, args: []string{"/etc/passwd"}},
		{name: "nothing to test", limit: 10 * time.Second, then: lastLine("ok"),
			args: []string{"/bin/sh", "-c",
				"echo 'testing: warning: no tests to run' >&2; echo PASS"}},
		{name: "skipped", limit: 10 * time.Second, then: lastLine("ok"),
			args: []string{"/bin/sh", "-c", "echo '--- SKIP: TestX'; echo PASS"}},
		{name: "no benchmark", limit: 10 * time.Second, then: benchmarks,
			args: []string{"/bin/echo", "PASS"}},
		{name: "no rows", limit: 10 * time.Second, then: r.benched,
			args: []string{"/bin/echo", `{"event":"error"}`}},
		{name: "unaudited", limit: 10 * time.Second, then: r.benched,
			args: []string{"/bin/echo", `{"stack":"async","audit_error":"row 5 is wrong"}`}},
		{name: "still here", limit: 10 * time.Second, args: []string{"/bin/true"}},
	} {
		r.do(j)
	}
	require.Less(t, time.Since(began), 30*time.Second)
	want := map[string][2]string{
		"good": {passed, "last words"}, "code": {failed, "exit code 7, not 0: reasons"},
		"right code": {passed, ""},
		"wrong code": {failed, "exit code 0, not 3"}, "hangs": {failed, "over its limit of 200ms"},
		"absent":       {notThere, "no-such-program-here"},
		"not runnable": {failed, "permission denied"}, "nothing to test": {failed, "no such test"},
		"skipped":      {failed, "skipped"},
		"no benchmark": {failed, "no benchmark ran"}, "no rows": {failed, "no rows"},
		"unaudited": {failed, "row 5 is wrong"}, "still here": {passed, ""},
	}
	require.Len(t, r.res.Steps, len(want))
	for _, s := range r.res.Steps {
		require.Equal(t, want[s.Name][0], s.Status, "%+v", s)
		require.Contains(t, s.Detail, want[s.Name][1])
		require.Contains(t, r.table(), s.Name)
	}
	// When the time of all is up, the rest are rows too.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r.ctx = ctx
	r.do(job{name: "late", limit: time.Second, args: []string{"/bin/true"}})
	require.Equal(t, noTime, r.res.Steps[len(want)].Status)
}

// Every figure of BENCHMARKS's table for a GPU is one command away: its steps exist and call what
// the table says, and no step that measures is left out.
func TestBenchmarksNameSteps(t *testing.T) {
	text, err := os.ReadFile("../../BENCHMARKS.md")
	require.NoError(t, err)
	_, section, ok := strings.Cut(string(text), "\n## On a GPU\n")
	require.True(t, ok)
	section, _, _ = strings.Cut(section, "\n## ")
	r := testRunner(t)
	r.res.CPUs = 16
	jobs := r.jobs()
	named := map[string]bool{}
	rows := 0
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 4 || !strings.Contains(cells[3], "not measured") {
			continue
		}
		rows++
		var args []string
		for p := range strings.SplitSeq(strings.Trim(cells[2], " `"), ",") {
			found := false
			for _, j := range jobs {
				if strings.HasPrefix(j.name, p) {
					found, named[j.name] = true, true
					args = append(args, j.args...)
				}
			}
			require.True(t, found, "no step begins with %q: %s", p, line)
		}
		_, command, ok := strings.Cut(cells[1], "`heliosctl ")
		if !ok {
			if _, command, ok = strings.Cut(cells[1], "`bench "); !ok {
				continue
			}
		}
		command, _, _ = strings.Cut(command, "`")
		for w := range strings.FieldsSeq(command) {
			if w != "…" {
				require.Contains(t, args, w, line)
			}
		}
	}
	require.Greater(t, rows, 12)
	for _, j := range jobs {
		about := strings.HasPrefix(j.name, "bad: ") || strings.HasPrefix(j.name, "nvidia-smi") ||
			slices.Contains([]string{"driver", "heliosctl", "doctor"}, j.name)
		require.True(t, about || named[j.name], "BENCHMARKS.md does not name step %q", j.name)
	}
}

// The limit of all steps leaves the rows of I/O and of training: they come first, after what they
// need.
func TestOrderOfSteps(t *testing.T) {
	r := testRunner(t)
	r.res.CPUs = 16
	var names []string
	for _, j := range r.jobs() {
		names = append(names, j.name)
	}
	require.Equal(t, first, names[:len(first)])
}

func TestRefilled(t *testing.T) {
	d, err := refilled([]byte("BenchmarkGPURefill-2  2  34 ns/op  31399 ns/refill  240529 ns/submit\n"),
		nil)
	require.NoError(t, err)
	require.Equal(t, "31399 ns/refill, 240529 ns/submit", d)
	_, err = refilled([]byte("PASS\n"), nil)
	require.ErrorContains(t, err, "no figure")
}

func TestTableOfSweeps(t *testing.T) {
	r := testRunner(t)
	row := func(device, stack string, blocks int, iops float64) string {
		b, err := json.Marshal(map[string]any{"device": device, "stack": stack, "blocks": blocks,
			"iops": iops, "ssds": 2, "threads": 128,
			"audited": true, "serve_threads": 2, "serve_iops": 5e6, "ssd_latency_us": 80})
		require.NoError(t, err)
		return string(b)
	}
	_, err := r.benched([]byte(strings.Join([]string{
		row("cuda:0 (X)", "async", 1, 900e3), row("cuda:0 (X)", "async", 8, 1e6),
		row("cuda:0 (X)", "sync", 1, 50e3), row("cuda:0 (X)", "sync", 8, 400e3),
		row("host", "async", 8, 123), `{"kind":"summary"}`,
	}, "\n")), nil)
	require.NoError(t, err)
	require.Len(t, r.res.Bench, 5)
	require.Len(t, r.res.Summaries, 1)
	table := r.table()
	require.Regexp(t, `80 us +GPU +2 +2 +5 M +async +900 k +1 M +8`, table)
	require.Regexp(t, `async/sync +18.00 +2.50`, table)
	require.Regexp(t, `80 us +CPU +2 +2 +5 M +async +123 +8`, table)
}
