package main

import (
	"fmt"
	"maps"
	"slices"
)

// tally counts ends.
type tally struct{ mutants, ran, noticed, order, orderNoticed int }

func count(ends []verdict) (t tally) {
	for _, v := range ends {
		t.mutants++
		if v.End == notExecuted {
			continue
		}
		t.ran++
		if v.OrderOnly {
			t.order++
		}
		if v.End == noticed {
			t.noticed++
			if v.OrderOnly {
				t.orderNoticed++
			}
		}
	}
	return t
}

// score is the share of the executed that were noticed.
func (t tally) score() float64 {
	if t.ran == 0 {
		return 0
	}
	return float64(t.noticed) / float64(t.ran)
}

// unnoticed lists the kernels of which no mutant was noticed, of those that have a few.
func unnoticed(ends []verdict) []string {
	const few = 3
	seen, of := map[string]bool{}, map[string]int{}
	for _, v := range ends {
		seen[v.Kernel] = seen[v.Kernel] || v.End == noticed
		of[v.Kernel]++
	}
	maps.DeleteFunc(seen, func(k string, ok bool) bool { return ok || of[k] < few })
	return slices.Sorted(maps.Keys(seen))
}

// table prints counts by a key.
func table(title string, ends []verdict, key func(verdict) string) {
	by := map[string][]verdict{}
	for _, v := range ends {
		by[key(v)] = append(by[key(v)], v)
	}
	fmt.Printf("%-28s %8s %8s %8s %8s %12s\n", title, "mutants", "noticed", "survived", "of order",
		"not executed")
	for _, k := range slices.Sorted(maps.Keys(by)) {
		t := count(by[k])
		fmt.Printf("%-28s %8d %8d %8d %8d %12d\n", k, t.mutants, t.noticed, t.ran-t.noticed,
			t.order-t.orderNoticed, t.mutants-t.ran)
	}
	fmt.Println()
}
