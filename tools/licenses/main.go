// Command licenses collects the licences of what is linked into heliosctl, from the module cache
// and GOROOT, into the file that package internal/licenses carries. "make generate" runs it.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"helios/internal/licenses"
	"helios/tools/internal/repo"
)

func main() {
	out := flag.String("o", "licenses.json", "file to write")
	flag.Parse()
	if err := run(*out); err != nil {
		fmt.Fprintln(os.Stderr, "licenses:", err)
		os.Exit(1)
	}
}

func run(out string) error {
	all, err := collect()
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(b, '\n'), 0o644)
}

// builds are those whose modules count: heliosctl as it is built, for each machine that it is built
// for.
var builds = [][]string{{"GOARCH=amd64"}, {"GOARCH=arm64"}}

// collect reads the licences of all modules of the binary.
func collect() ([]licenses.Module, error) {
	root, err := repo.Root()
	if err != nil {
		return nil, err
	}
	dirs := map[string]string{} // by "path version"
	for _, env := range builds {
		cmd := exec.Command("go", "list", "-deps", "-f",
			"{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}{{end}}{{end}}",
			"helios/cmd/heliosctl")
		cmd.Dir = root
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux"), env...)
		cmd.Stderr = os.Stderr
		list, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		for l := range strings.Lines(string(list)) {
			if m, dir, ok := strings.Cut(strings.TrimSpace(l), "\t"); ok {
				dirs[m] = dir
			}
		}
	}
	goenv, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	std, err := module(licenses.Std, "", strings.TrimSpace(string(goenv)))
	if err != nil {
		return nil, err
	}
	all := []licenses.Module{std}
	for _, m := range slices.Sorted(maps.Keys(dirs)) {
		path, version, _ := strings.Cut(m, " ")
		mod, err := module(path, version, dirs[m])
		if err != nil {
			return nil, err
		}
		all = append(all, mod)
	}
	page, err := pageModule(filepath.Join(root, "internal/htmlreport/assets"))
	return append(all, page), err
}

// pageModule is the script of the pages of "report", whose licences tools/plotbundle has collected.
func pageModule(dir string) (licenses.Module, error) {
	text, err := os.ReadFile(filepath.Join(dir, "LICENSES.txt"))
	if err != nil {
		return licenses.Module{}, err
	}
	path, version, ok := strings.Cut(strings.SplitN(string(text), "\n", 2)[0], " ")
	if !ok {
		return licenses.Module{}, fmt.Errorf("%s: its first line is no package with a version", dir)
	}
	return licenses.Module{Path: path, Version: version,
		Files: []licenses.File{{Name: "LICENSES.txt", Text: string(text)}}}, nil
}

// legal are the files that a licence is in.
var legal = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents|copyright)([-_.].*)?$`)

// module reads the licence files of a module, which must have a licence.
func module(path, version, dir string) (licenses.Module, error) {
	m := licenses.Module{Path: path, Version: version}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return m, fmt.Errorf("%s: %w; run \"go mod download\"", path, err)
	}
	licensed := false
	for _, e := range entries {
		if e.IsDir() || !legal.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return m, err
		}
		upper := strings.ToUpper(e.Name())
		licensed = licensed || strings.HasPrefix(upper, "LICEN") ||
			strings.HasPrefix(upper, "COPYING")
		m.Files = append(m.Files, licenses.File{Name: e.Name(), Text: string(text)})
	}
	if !licensed {
		return m, fmt.Errorf("%s %s has no licence file in %s", path, version, dir)
	}
	return m, nil
}
