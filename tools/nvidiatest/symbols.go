package main

import (
	"context"
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"helios/cuda/driver"
)

// exports are the functions that a library offers.
func exports(path string) (map[string]bool, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, s := range list {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			out[s.Name] = true
		}
	}
	return out, nil
}

// imports are the calls of libcuda that a program was linked against.
func imports(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := f.ImportedSymbols()
	var out []string
	for _, s := range list {
		if regexp.MustCompile(`^cu[A-Z]`).MatchString(s.Name) {
			out = append(out, s.Name)
		}
	}
	slices.Sort(out)
	return out, err
}

// linked builds heliosctl with the binding of -tags gorgonia, against a driver's own library, and
// returns what it imports.
func (r *run) linked(ctx context.Context, l driverLibs) ([]string, error) {
	dir, err := os.MkdirTemp("", "nvidiatest-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "heliosctl")
	_, err = command(ctx, r.root, []string{"CGO_ENABLED=1", "CGO_CFLAGS=-I" + r.cuda12,
		"CGO_LDFLAGS=-L" + l.dir + " -Wl,--allow-shlib-undefined"},
		"go", "build", "-tags", "gorgonia", "-o", out, "./cmd/heliosctl")
	if err != nil {
		return nil, err
	}
	return imports(out)
}

// symbols compares what both bindings call with what each driver exports.
func (r *run) symbols(ctx context.Context) error {
	required, optional := driver.Symbols()
	t := r.table("symbols", "driver", "CUDA", "exported", "required", "optional",
		"of gorgonia.org/cu", "lacks")
	byLinker, err := r.linked(ctx, r.drivers[0])
	if err != nil {
		r.fail("symbols", "heliosctl -tags gorgonia does not link against driver %s: %v",
			r.drivers[0].version, err)
	}
	for _, l := range r.drivers {
		if l.exportErr != nil {
			return l.exportErr
		}
		count := func(list []string) (n int, lacking []string) {
			for _, s := range list {
				if l.exported[s] {
					n++
				} else {
					lacking = append(lacking, s)
				}
			}
			return n, lacking
		}
		have, lacking := count(required)
		r.check("symbols", len(lacking) == 0, "driver %s lacks %s, which the purego binding requires",
			l.version, strings.Join(lacking, ", "))
		some, without := count(optional)
		imported, bad := count(byLinker)
		r.check("symbols", len(bad) == 0, "driver %s lacks %s, which the binding of gorgonia links",
			l.version, strings.Join(bad, ", "))
		t.row(l.version, version(l.cuda), len(l.exported), of(have, len(required)),
			of(some, len(optional)), of(imported, len(byLinker)), dash(strings.Join(without, ", ")))
		for _, s := range optional {
			v, ok := r.since[s]
			if !ok {
				r.fail("symbols", "%s is in no header of CUDA 13 (cudaTypedefs.h)", s)
				continue
			}
			r.check("symbols", l.exported[s] == (v <= l.cuda),
				"%s came with CUDA %s by the header; driver %s (CUDA %s) has it: %v", s, version(v),
				l.version, version(l.cuda), l.exported[s])
		}
	}
	return nil
}

var typedef = regexp.MustCompile(`\bPFN_(cu[A-Za-z0-9]+)_v(\d+)\)`)

// readTypedefs gives the versions of each call by the header, oldest first.
func readTypedefs(text string) map[string][]int {
	out := map[string][]int{}
	for _, m := range typedef.FindAllStringSubmatch(text, -1) {
		if n, err := strconv.Atoi(m[2]); err == nil && !slices.Contains(out[m[1]], n) {
			out[m[1]] = append(out[m[1]], n)
		}
	}
	for _, v := range out {
		slices.Sort(v)
	}
	return out
}

// sinceOf is the CUDA version that brought each symbol of a library: the first of a call without a
// suffix, the n-th version of one with _vn.
func sinceOf(typedefs map[string][]int) map[string]int {
	out := map[string]int{}
	for name, list := range typedefs {
		for i, v := range list {
			if i == 0 {
				out[name] = v
			} else {
				out[fmt.Sprintf("%s_v%d", name, i+1)] = v
			}
		}
	}
	return out
}

var fakeRow = regexp.MustCompile(`(?m)^    \{"(cu\w+)", "(cu\w+)", (\d+)\},$`)

// versions compares the fake libcuda's table with CUDA's header and with what each driver exports.
func (r *run) versions(context.Context) error {
	const file = "internal/testing/fakecuda/src/core.cc"
	text, err := os.ReadFile(filepath.Join(r.root, file))
	if err != nil {
		return err
	}
	rows := fakeRow.FindAllStringSubmatch(string(text), -1)
	if len(rows) < 20 {
		return fmt.Errorf("%s has %d rows of versions; the pattern does not fit any more", file,
			len(rows))
	}
	for _, row := range rows {
		since, err := strconv.Atoi(row[3])
		if err != nil {
			return err
		}
		r.check("versions", slices.Contains(r.typedefs[row[1]], since),
			"%s: %s is of CUDA %s; the header has %v", file, row[1], version(since),
			r.typedefs[row[1]])
		for _, l := range r.drivers {
			r.check("versions", l.exported[row[2]] == (since <= l.cuda),
				"%s: %s is of CUDA %s; driver %s (CUDA %s) has it: %v", file, row[2], version(since),
				l.version, version(l.cuda), l.exported[row[2]])
		}
	}
	r.note("versions", "%d rows of the fake's table, against cudaTypedefs.h and %d drivers",
		len(rows), len(r.drivers))
	return nil
}

func version(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

func of(n, all int) string { return fmt.Sprintf("%d of %d", n, all) }

func dash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

func keys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
