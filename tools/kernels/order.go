package main

import (
	"fmt"
	"slices"
	"strings"
)

// Rules of memory order that PTX must keep besides being valid.

// checkOrder holds a module's kernels to the rules.
func checkOrder(name, text string) error {
	es, err := entries(text)
	if err != nil {
		return fmt.Errorf("%s.ptx: %w", name, err)
	}
	var bad []string
	for _, e := range es {
		unused, err := e.unusedAcquires()
		if err != nil {
			return fmt.Errorf("%s.ptx: kernel %s: %w", name, e.name, err)
		}
		for _, in := range unused {
			bad = append(bad, fmt.Sprintf(
				"%s.ptx:%d: kernel %s: nothing uses the result of %s: a driver's compiler may make a reduction of it, which acquires nothing; use the result, or relaxed and a fence",
				name, in.line, e.name, in.op))
		}
		for _, in := range e.countersInTurn() {
			bad = append(bad, fmt.Sprintf(
				"%s.ptx:%d: kernel %s: %s waits for a counter only to store it again: each is a way to the CPU's memory; load counters with what is needed anyway (load_counts)",
				name, in.line, e.name, in.op))
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("memory order:\n  %s", strings.Join(bad, "\n  "))
	}
	return nil
}

// acquires reports whether an instruction with a result orders what follows it by what it read.
func acquires(op string) bool {
	words := strings.Split(op, ".")
	return (words[0] == "atom" || words[0] == "ld") &&
		(slices.Contains(words, "acquire") || slices.Contains(words, "acq_rel"))
}

// unusedAcquires are the acquires whose result nothing with an effect depends on. The compilers in
// the drivers 535 and 550 made REDG of such an atom.acquire.and for sm_90, without the invalidation
// of caches that an acquire needs (seen in the machine code, 2026).
func (e *entry) unusedAcquires() ([]instr, error) { return e.unneeded(acquires) }

// countersInTurn are the stores of a counter for the host whose load is the memory access before:
// nothing is under way while the kernel waits for it.
func (e *entry) countersInTurn() []instr {
	starts := map[int]bool{}
	for _, at := range e.labels {
		starts[at] = true
	}
	var out []instr
	// registers computed from the last access, which was a load that the host's stores may meet
	loaded := map[string]bool{}
	for i, in := range e.code {
		if starts[i] {
			loaded = map[string]bool{}
		}
		words := strings.Split(in.op, ".")
		switch words[0] {
		case "ld", "st", "atom", "red", "fence", "bra":
			has := func(w string) bool { return slices.Contains(words, w) }
			host := has("relaxed") && has("sys") && !has("mmio")
			if words[0] == "st" && host && len(in.reads) > 1 && loaded[in.reads[len(in.reads)-1]] {
				out = append(out, in)
			}
			if words[0] == "bra" || words[0] == "ld" && words[1] == "param" {
				continue
			}
			loaded = map[string]bool{}
			if words[0] == "ld" && host {
				for _, r := range in.writes {
					loaded[r] = true
				}
			}
			continue
		}
		if slices.ContainsFunc(in.reads, func(r string) bool { return loaded[r] }) {
			for _, r := range in.writes {
				loaded[r] = true
			}
		}
	}
	return out
}
