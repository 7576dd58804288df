package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"helios/cuda/kernels"
)

// sassKernels are the modules whose machine code is held to the order of their PTX.
var sassKernels = []string{"submit", "complete", "read_sync", "lookup", "unique", "sample", "labor",
	"coalesce"}

// order counts what a text promises to others that read its memory. Of machine code it counts what
// keeps the promise.
type order struct {
	doorbells int // MMIO stores
	fenced    int // of these, with a system fence and nothing else before them: the SQ doorbells
	sysLoads  int // strong loads of system scope: completion entries, and what the CPU changes
	entries   int // of these, those that acquire: a completion entry's last word
	acquires  int // loads, atomics and fences after which nothing older is seen
	releases  int // stores, atomics and fences before which everything is there
	toSystem  int // of these, those for the CPU and the SSDs
	wide      int // stores of 16 bytes: queue entries
	atomics   int
}

// rules say how the machine code has to follow the PTX.
var rules = []struct {
	name  string
	exact bool // a compiler that unrolls a loop has more of the others
	of    func(o order) int
}{
	{"doorbells are MMIO stores", true, func(o order) int { return o.doorbells }},
	{"a system fence before each SQ doorbell", true, func(o order) int { return o.fenced }},
	{"strong system loads", false, func(o order) int { return o.sysLoads }},
	{"completion entries are acquired", false, func(o order) int { return o.entries }},
	{"acquires have an effect", false, func(o order) int { return o.acquires }},
	{"releases are fences", false, func(o order) int { return o.releases }},
	{"releases to the system are system fences", false, func(o order) int { return o.toSystem }},
	{"16-byte stores", true, func(o order) int { return o.wide }},
	{"atomics", false, func(o order) int { return o.atomics }},
}

// broken are the rules that machine code breaks, in words.
func (o order) broken(code order) []string {
	var out []string
	for _, r := range rules {
		want, got := r.of(o), r.of(code)
		if got < want || r.exact && got != want {
			out = append(out, fmt.Sprintf("%s: %d in the PTX, %d in the machine code", r.name, want,
				got))
		}
	}
	return out
}

// ptxOrder reads PTX.
func ptxOrder(text string) (o order) {
	before := "" // the memory operation before, in the same block
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "//")
		words := strings.Fields(line)
		if len(words) > 0 && strings.HasPrefix(words[0], "@") {
			words = words[1:]
		}
		if len(words) == 0 {
			continue
		}
		op := words[0]
		part := strings.Split(strings.TrimSuffix(op, ";"), ".")
		has := func(s string) bool { return slices.Contains(part, s) }
		switch part[0] {
		case "ld", "st", "atom", "red", "fence":
			if has("param") || has("shared") || has("local") {
				continue
			}
		default:
			if strings.HasSuffix(op, ":") || part[0] == "bra" {
				before = ""
			}
			continue
		}
		if has("mmio") {
			o.doorbells++
			if strings.HasPrefix(before, "fence.") && strings.Contains(before, ".sys") {
				o.fenced++
			}
		}
		if part[0] == "ld" && has("sys") {
			o.sysLoads++
			if has("acquire") {
				o.entries++
			}
		}
		// Of a fence and a release store directly behind it, as where a fault is recorded before
		// the kernel's end, compilers make one fence, which acquires nothing for nobody.
		if part[0] == "st" && has("release") && strings.HasPrefix(before, "fence.acq_rel.") &&
			strings.HasSuffix(before, "."+scopeOf(part)+";") {
			o.acquires--
			o.releases--
			if has("sys") {
				o.toSystem--
			}
		}
		if has("acquire") || has("acq_rel") {
			o.acquires++
		}
		if has("release") || has("acq_rel") {
			o.releases++
			if has("sys") {
				o.toSystem++
			}
		}
		if part[0] == "st" && (has("v4") && has("u32") || has("v2") && has("u64")) {
			o.wide++
		}
		if part[0] == "atom" || part[0] == "red" {
			o.atomics++
		}
		before = op
	}
	return o
}

// scopeOf is the scope of an instruction's parts.
func scopeOf(part []string) string {
	for _, s := range []string{"cta", "cluster", "gpu", "sys"} {
		if slices.Contains(part, s) {
			return s
		}
	}
	return ""
}

var instruction = regexp.MustCompile(`^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z0-9_.]+)`)

// sassOrder reads what nvdisasm -c prints.
func sassOrder(text string) (o order) {
	var ops []string // "" where a block begins
	for line := range strings.Lines(text) {
		if m := instruction.FindStringSubmatch(line); m != nil {
			ops = append(ops, m[1])
		} else if strings.HasSuffix(strings.TrimSpace(line), ":") {
			ops = append(ops, "")
		}
	}
	is := func(op, name string) bool { return op == name || strings.HasPrefix(op, name+".") }
	global := func(op string) bool {
		for _, name := range []string{"LDG", "STG", "LD", "ST", "ATOMG", "ATOM", "RED", "REDG",
			"LDGSTS"} {
			if is(op, name) {
				return true
			}
		}
		return false
	}
	barrier := func(op string) bool { return is(op, "MEMBAR") }
	ends := func(op string) bool {
		return op == "" || is(op, "BRA") || is(op, "EXIT") || is(op, "CALL") || is(op, "RET")
	}
	for i, op := range ops {
		switch {
		case is(op, "CCTL") && strings.Contains(op, ".IVALL"):
			o.acquires++
		case barrier(op):
			o.releases++
			if strings.Contains(op, ".SYS") {
				o.toSystem++
			}
		case is(op, "STG") && strings.Contains(op, ".MMIO"):
			o.doorbells++
			for j := i - 1; j >= 0 && !ends(ops[j]) && !global(ops[j]); j-- {
				if barrier(ops[j]) && strings.Contains(ops[j], ".SYS") {
					o.fenced++
					break
				}
			}
		case is(op, "LDG") && strings.Contains(op, ".STRONG.SYS"):
			o.sysLoads++
			for j := i + 1; j < len(ops) && !ends(ops[j]) && !global(ops[j]); j++ {
				if is(ops[j], "CCTL") && strings.Contains(ops[j], ".IVALL") {
					o.entries++
					break
				}
			}
		case is(op, "STG") && strings.Contains(op, ".128"), is(op, "ST") &&
			strings.Contains(op, ".128"):
			o.wide++
		case is(op, "ATOMG") || is(op, "ATOM") || is(op, "RED") || is(op, "REDG"):
			o.atomics++
		}
	}
	return o
}

// sass holds the machine code of ptxas and of each driver's compiler to the rules.
func (r *run) sass(ctx context.Context) error {
	type code struct{ name, module, file string }
	var all []code
	want := map[string]order{}
	modules, err := kernels.Modules()
	if err != nil {
		return err
	}
	for _, m := range modules {
		if !slices.Contains(sassKernels, m.Name) {
			continue
		}
		want[m.Name] = ptxOrder(m.PTX)
		for _, cc := range []int{80, 90, 100} {
			c, err := m.Cubin(cc)
			if err != nil {
				return err
			}
			file := filepath.Join(r.work, "ptxas-"+c.Arch+"-"+m.Name+".cubin")
			if err := os.WriteFile(file, c.Image, 0o600); err != nil {
				return err
			}
			all = append(all, code{"ptxas " + c.Arch, m.Name, file})
		}
	}
	skipped := 0
	for _, j := range r.jobs {
		if want[j.module] == (order{}) || j.err != nil {
			continue
		}
		if j.arch == "sm_70" {
			skipped++
			continue
		}
		all = append(all, code{j.driver + " " + j.arch, j.module, j.file(r.work)})
	}
	if skipped > 0 {
		r.skip("sass", skipped, "nvdisasm of CUDA 13 does not read machine code of sm_70")
	}
	texts := make([]string, len(all))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, c := range all {
		g.Go(func() error {
			out, err := command(ctx, "", nil, r.nvdisasm, "-c", c.file)
			texts[i] = string(out)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	kept, seen := map[string]int{}, map[string]int{}
	var exceptions []string
	for i, c := range all {
		bad := want[c.module].broken(sassOrder(texts[i]))
		seen[c.module]++
		if len(bad) == 0 {
			kept[c.module]++
		} else {
			exceptions = append(exceptions, c.name+" "+c.module)
		}
		r.checks("sass", len(rules)-len(bad), len(bad), "%s of %s: %s", c.module, c.name,
			strings.Join(bad, "; "))
	}
	t := r.table("sass", "module", "doorbells, of these fenced", "system loads, of these entries",
		"acquires", "releases, of these to the system", "16-byte stores", "atomics", "kept by compilers")
	for _, name := range sassKernels {
		o := want[name]
		t.row(name, fmt.Sprintf("%d, %d", o.doorbells, o.fenced),
			fmt.Sprintf("%d, %d", o.sysLoads, o.entries), o.acquires,
			fmt.Sprintf("%d, %d", o.releases, o.toSystem), o.wide, o.atomics,
			of(kept[name], seen[name]))
	}
	if len(exceptions) > 0 {
		r.note("sass", "broken in: %s", strings.Join(exceptions, ", "))
	}
	return nil
}
