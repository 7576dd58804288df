package main

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"helios/internal/cachedir"
)

// models are the versions of NVIDIA's model, from the PTX ISA of that version.
var models = []string{"6.0", "7.5"}

// lackError names a need that this machine proved not to have.
type lackError struct{ what, next string }

func (e *lackError) Error() string { return e.what + "; " + e.next }

// dartagnan is a folder with what a run needs.
type dartagnan struct{ home, jar string }

// result holds what Dartagnan said of one variant under one model.
type result struct {
	variant
	model     string
	reachable bool
	seconds   float64
}

// findDartagnan looks for the model checker and makes a copy with its libraries where they lack.
func findDartagnan(ctx context.Context, dir string, out io.Writer) (*dartagnan, error) {
	if dir == "" {
		return nil, &lackError{"no folder of Dartagnan is named",
			"build Dat3M 4.3.1 and set HELIOS_DARTAGNAN to its folder"}
	}
	if _, err := os.Stat(filepath.Join(dir, "cat", "ptx-v7.5.cat")); err != nil {
		return nil, fmt.Errorf("no Dartagnan: %w: HELIOS_DARTAGNAN (or --dartagnan) names its folder", err)
	}
	java, err := exec.LookPath("java")
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &lackError{"there is no java in PATH", "install a Java 17 runtime"}
	} else if err != nil {
		return nil, err
	}
	if text, err := exec.CommandContext(ctx, java, "-version").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s -version: %w: %s", java, err, bytes.TrimSpace(text))
	}
	d := &dartagnan{home: dir, jar: filepath.Join(dir, "dartagnan", "target", "dartagnan.jar")}
	if missing, err := d.missing(); err == nil && missing == "" {
		return d, nil
	}
	return fetch(ctx, dir, out)
}

// missing names a library that the jar wants and that is not there; "": none.
func (d *dartagnan) missing() (string, error) {
	r, err := zip.OpenReader(d.jar)
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Close() }() // read only
	f, err := r.Open("META-INF/MANIFEST.MF")
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return "", err
	}
	// A continuation of a line begins with a space.
	manifest := strings.ReplaceAll(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n ", "")
	for l := range strings.SplitSeq(manifest, "\n") {
		list, ok := strings.CutPrefix(l, "Class-Path: ")
		if !ok {
			continue
		}
		for _, lib := range append(strings.Fields(list), "libs/libz3.so", "libs/libz3java.so") {
			_, err := os.Stat(filepath.Join(filepath.Dir(d.jar), lib))
			if errors.Is(err, fs.ErrNotExist) {
				return lib, nil
			} else if err != nil {
				return "", err
			}
		}
		return "", nil
	}
	return "", fmt.Errorf("%s has no Class-Path", d.jar)
}

// fetch copies a folder of Dartagnan without libraries into this user's cache, and has Maven fetch
// what its POM names, once.
func fetch(ctx context.Context, dir string, out io.Writer) (*dartagnan, error) {
	jar, err := os.ReadFile(filepath.Join(dir, "dartagnan.jar"))
	if err != nil {
		return nil, fmt.Errorf("no libraries of Dartagnan: %w: build it with Maven", err)
	}
	cache, err := cachedir.Private("heliosctl")
	if err != nil {
		return nil, err
	}
	home := filepath.Join(cache, fmt.Sprintf("dartagnan-%x", sha256.Sum256(jar))[:24])
	d := &dartagnan{home, filepath.Join(home, "dartagnan", "target", "dartagnan.jar")}
	if missing, err := d.missing(); err == nil && missing == "" {
		return d, nil
	}
	mvn, err := exec.LookPath("mvn")
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &lackError{"there is no mvn in PATH", "install Maven, which fetches Dartagnan's libraries once"}
	} else if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(home); err != nil {
		return nil, err
	}
	target := filepath.Dir(d.jar)
	if err := os.MkdirAll(filepath.Join(home, "cat"), 0o700); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(target, 0o700); err != nil {
		return nil, err
	}
	names, err := filepath.Glob(filepath.Join(dir, "cat", "*.cat"))
	if err != nil {
		return nil, err
	}
	copies := map[string]string{"pom.xml": "pom.xml", "dartagnan/pom.xml": "dartagnan/pom.xml",
		"dartagnan.jar": "dartagnan/target/dartagnan.jar"}
	for _, n := range names {
		copies["cat/"+filepath.Base(n)] = "cat/" + filepath.Base(n)
	}
	for from, to := range copies {
		text, err := os.ReadFile(filepath.Join(dir, from))
		if err == nil {
			err = os.WriteFile(filepath.Join(home, to), text, 0o600)
		}
		if err != nil {
			return nil, fmt.Errorf("copy Dartagnan: %w", err)
		}
	}
	fmt.Fprintf(out, "fetching the libraries of Dartagnan into %s\n", home)
	cmd := exec.CommandContext(ctx, mvn, "-q", "-B", "-f", "pom.xml", "initialize")
	cmd.Dir = home
	text, err := cmd.CombinedOutput()
	// The POM's last goal wants a git repository and fails; the libraries are there by then.
	missing, missErr := d.missing()
	if missErr != nil {
		return nil, missErr
	}
	if missing != "" {
		return nil, fmt.Errorf("%s initialize in %s left no %s (%w):\n%s", mvn, home, missing, err,
			text)
	}
	return d, nil
}

// run has Dartagnan decide every variant of the tests under each model.
func (d *dartagnan) run(ctx context.Context, tests []*test, out io.Writer) ([]result, error) {
	dir, err := os.MkdirTemp("", "litmus-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var all []result
	for _, model := range models {
		began := time.Now()
		var wants []result
		args := []string{"-jar", d.jar, filepath.Join(d.home, "cat", "ptx-v"+model+".cat"),
			"--target=ptx"}
		for _, t := range tests {
			for _, v := range t.variants() {
				file := filepath.Join(dir, t.name+"."+v.name+".litmus")
				if err := os.WriteFile(file, []byte(v.text), 0o600); err != nil {
					return nil, err
				}
				args = append(args, file)
				wants = append(wants, result{variant: v, model: model})
			}
		}
		cmd := exec.CommandContext(ctx, "java", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DAT3M_HOME="+d.home, "DAT3M_OUTPUT="+dir)
		text, err := cmd.CombinedOutput()
		got, parseErr := parseResults(string(text))
		for i := range wants {
			name := wants[i].test.name + "." + wants[i].name + ".litmus"
			g, ok := got[name]
			if parseErr != nil || !ok {
				return nil, fmt.Errorf("under PTX %s Dartagnan said nothing of %s: %w\n%s", model,
					name, errors.Join(err, parseErr), tail(string(text)))
			}
			wants[i].reachable, wants[i].seconds = g.reachable, g.seconds
		}
		fmt.Fprintf(out, "PTX %s: %d programs in %.0f s\n", model, len(wants),
			time.Since(began).Seconds())
		all = append(all, wants...)
	}
	return all, nil
}

func tail(s string) string { return s[max(0, len(s)-4000):] }

var resultText = regexp.MustCompile(`(?m)^Test: (.+)\nResult: (\w+)\n((?:.+\n)*)`)
var timeText = regexp.MustCompile(`(?m)^Time: ([0-9.]+) secs$`)

// parseResults reads Dartagnan's report. PASS means that the condition can be reached, FAIL that it
// cannot; anything else is an error.
func parseResults(text string) (map[string]result, error) {
	out := map[string]result{}
	for _, m := range resultText.FindAllStringSubmatch(text+"\n", -1) {
		r := result{reachable: m[2] == "PASS"}
		name := filepath.Base(strings.TrimSpace(m[1]))
		if m[2] != "PASS" && m[2] != "FAIL" {
			return nil, fmt.Errorf("%s: %s: %s", name, m[2], strings.TrimSpace(m[3]))
		}
		s := timeText.FindStringSubmatch(m[3])
		if s == nil {
			return nil, fmt.Errorf("%s: no time in its result", name)
		}
		r.seconds, _ = strconv.ParseFloat(s[1], 64)
		out[name] = r
	}
	return out, nil
}

// report prints what was decided; its error names what is not as expected.
func report(results []result, out io.Writer) error {
	count := map[bool]int{} // as expected, by what was expected
	var wrong []string
	says := map[bool]string{true: "reachable", false: "unreachable"}
	for _, r := range results {
		state := "ok"
		if r.reachable != r.variant.reachable {
			state = "WRONG: want " + says[r.variant.reachable]
			wrong = append(wrong, fmt.Sprintf("%s %s under PTX %s is %s", r.test.name, r.name,
				r.model, says[r.reachable]))
		}
		fmt.Fprintf(out, "PTX %s  %-28s %-22s %-12s %5.1f s  %s\n", r.model, r.test.name, r.name,
			says[r.reachable], r.seconds, state)
		if state == "ok" {
			count[r.reachable]++
		}
	}
	fmt.Fprintf(out, "%d unreachable and %d reachable as expected, %d wrong\n", count[false],
		count[true], len(wrong))
	if len(wrong) > 0 {
		return fmt.Errorf("%d results differ from what is expected:\n  %s", len(wrong),
			strings.Join(wrong, "\n  "))
	}
	return nil
}
