package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda/driver"
	hcli "helios/internal/cli"
	"helios/internal/pci"
	"helios/internal/state"
)

// asChild makes the test binary be heliosctl, for tests that need a process of its own.
const asChild = "HELIOSCTL_TEST_AS_CHILD"

func TestMain(m *testing.M) {
	// No test sees or touches the controllers of the machine that it runs on.
	thisMachine = func() *machine { return machineOf(pci.Sys{Root: noMachine}) }
	if os.Getenv(state.EnvRun) == "" {
		_ = os.Setenv(state.EnvRun, noMachine)
	}
	if os.Getenv(asChild) != "" {
		main()
	}
	os.Exit(m.Run())
}

// outcome holds what a run of heliosctl gave.
type outcome struct {
	code        int
	out, errOut string
}

// hc runs heliosctl in this process.
func hc(t *testing.T, args ...string) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	code := run(context.WithoutCancel(t.Context()), args, &out, &errOut) // cleanups run, too
	flagsNamed(t, args, out.String()+errOut.String())
	validOutput(t, args, out.String())
	return outcome{code, out.String(), errOut.String()}
}

var namedOption = regexp.MustCompile(`\boption ([a-z][a-z0-9]*(?:-[a-z0-9]+)*)`)

// flagsNamed wants no option named the way libraries do (errs.Key) in output, if a verb has a flag
// for it; args may have the words themselves.
func flagsNamed(t *testing.T, args []string, text string) {
	t.Helper()
	for _, m := range namedOption.FindAllStringSubmatch(text, -1) {
		if strings.Contains(strings.Join(args, " "), m[0]) {
			continue
		}
		for path, c := range verbs(readApp().Commands, "") {
			require.False(t, hcli.HasFlag(c.Flags, m[1]), "heliosctl %s: %q has %q, a flag of %s",
				strings.Join(args, " "), text, m[0], path)
		}
	}
}

// ok runs heliosctl and wants exit code 0; it returns standard output.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	r := hc(t, args...)
	require.Equal(t, 0, r.code, "heliosctl %s: %s", strings.Join(args, " "), r.errOut)
	return r.out
}

// lines decodes JSON lines.
func lines(t *testing.T, s string) []map[string]any {
	t.Helper()
	var out []map[string]any
	for _, l := range strings.Split(strings.TrimSpace(s), "\n") {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(l), &m), l)
		out = append(out, m)
	}
	return out
}

// last is the last JSON line, which must be the result.
func last(t *testing.T, s string) map[string]any {
	t.Helper()
	all := lines(t, s)
	l := all[len(all)-1]
	require.Equal(t, "result", l["event"])
	return l
}

// kept returns what a file of --results holds between its first line, which identifies the run, and
// its last, which calls the run whole.
func kept(t *testing.T, file string) string {
	t.Helper()
	all := readFile(t, file)
	rows := lines(t, all)
	require.Equal(t, "begin", rows[0]["event"])
	require.NotEmpty(t, rows[0]["run"])
	end := rows[len(rows)-1]
	require.Equal(t, []any{"end", true}, []any{end["event"], end["whole"]}, "%v", end)
	all = all[strings.Index(all, "\n")+1:]
	return all[:strings.LastIndex(strings.TrimSuffix(all, "\n"), "\n")+1]
}

// fails wants an exit code and exactly one line on standard error that starts with heliosctl
// and the verb and holds all of want. Before it may come the note which device was taken.
func fails(t *testing.T, r outcome, code int, verb string, want ...string) {
	t.Helper()
	require.Equal(t, code, r.code, "stderr: %s\nstdout: %s", r.errOut, r.out)
	if strings.HasPrefix(r.errOut, "device: ") {
		_, r.errOut, _ = strings.Cut(r.errOut, "\n")
	}
	require.Equal(t, 1, strings.Count(r.errOut, "\n"), "exactly one line: %q", r.errOut)
	require.True(t, strings.HasSuffix(r.errOut, "\n"), "%q", r.errOut)
	prefix := "heliosctl"
	if verb != "" {
		prefix += " " + verb
	}
	require.True(t, strings.HasPrefix(r.errOut, prefix+": "), "%q", r.errOut)
	for _, w := range want {
		require.Contains(t, r.errOut, w)
	}
}

// child prepares heliosctl as a process of its own.
func child(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), asChild+"=1")
	return c
}

// finish runs a prepared child to its end.
func finishChild(t *testing.T, c *exec.Cmd) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	c.Stdout, c.Stderr = &out, &errOut
	err := c.Run()
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		t.Fatal(err)
	}
	return outcome{c.ProcessState.ExitCode(), out.String(), errOut.String()}
}

// isolate gives the test a state folder and a working directory of its own.
func isolate(t *testing.T) {
	t.Helper()
	t.Setenv(driver.EnvLibrary, "libcuda-of-no-test.so") // a GPU here is no part of these tests
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", t.TempDir())
	t.Setenv(state.EnvRun, filepath.Join(t.TempDir(), "run"))
}

// noMachine is a folder that is not there: a machine without devices.
const noMachine = "/heliosctl-test/no-machine"

// readFile returns the text of a file.
func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// With --json an error of the flags is the last line of standard output, too.
func TestJSONError(t *testing.T) {
	isolate(t)
	for args, want := range map[string]string{"train g --json --none": "--none", "none --json": "none",
		"--json=true load --ssds": "--ssds", "train --json none": "none"} {
		o := hc(t, strings.Fields(args)...)
		var last errorLine
		lines := strings.Split(strings.TrimSpace(o.out), "\n")
		require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last), args)
		require.Equal(t, []int{2, 2}, []int{o.code, last.ExitCode}, args)
		require.Contains(t, last.Error, want)
	}
	require.Empty(t, hc(t, "train", "g", "--none").out)
	require.Empty(t, hc(t, "train", "--none", "--", "--json").out)
}

// With --log-format json each line of standard error is an object, the error's too.
func TestLogFormatJSON(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "300", "--dim", "8", "--classes", "3", "--out", "g")
	for args, level := range map[string]string{"train g --epochs 1 --log-format json": "info",
		"load none --log-format json": "error", "none --log-format json": "error",
		"train g --log-format=json --none":     "error",
		"--log-format json train g --epochs x": "error"} {
		lines := strings.Split(strings.TrimSpace(hc(t, strings.Fields(args)...).errOut), "\n")
		var last map[string]any
		for _, line := range lines {
			last = nil
			require.NoError(t, json.Unmarshal([]byte(line), &last), line)
			_, err := time.Parse(time.RFC3339Nano, last["time"].(string))
			require.NoError(t, err)
			require.NotEmpty(t, last["msg"])
		}
		require.Equal(t, level, last["level"], args)
	}
}
