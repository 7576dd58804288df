package options

import (
	"slices"
	"strings"
)

// Meant suggests the nearest name, or gives the other advice.
func Meant(name string, all []string, other string) string {
	if n := Nearest(name, all); n != "" {
		return "did you mean " + n + "?"
	}
	return other
}

// OneOf suggests the nearest choice, if there is one, and lists them all.
func OneOf(name string, all []string) string {
	return strings.TrimSpace(Meant(name, all, "") + " choose one of " + strings.Join(all, ", "))
}

// Nearest is the name within a third of the letters of the given one, or "".
func Nearest(name string, all []string) string {
	best, least := "", max(len(name)/3, 1)+1
	for _, n := range all {
		if d := distance(strings.ToLower(name), n); d < least {
			best, least = n, d
		}
	}
	if best == "" { // "cache" for "gpu-cache", "batch" for "batch-size"
		for _, n := range all {
			if len(name) >= 3 && slices.Contains(strings.Split(n, "-"), strings.ToLower(name)) {
				return n
			}
		}
	}
	return best
}

// distance counts the letters to add, drop, change or swap with a neighbour that make a into b.
func distance(a, b string) int {
	before, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], before[j-2]+1)
			}
		}
		before, prev, cur = prev, cur, before
	}
	return prev[len(b)]
}
