package gpuio

import (
	"slices"
	"strings"
)

// Together is tried with the rungs that were not taken for one reason in one entry, by all their
// names, for people to read.
func Together(tried []RungTried) []RungTried {
	var out []RungTried
	for _, t := range tried {
		if i := slices.IndexFunc(out, func(o RungTried) bool { return o.Why == t.Why }); i >= 0 {
			out[i].Rung += ", " + t.Rung
		} else {
			out = append(out, t)
		}
	}
	for i, t := range out {
		if at := strings.LastIndex(t.Rung, ", "); at >= 0 {
			out[i].Rung = t.Rung[:at] + " or " + t.Rung[at+2:]
		}
	}
	return out
}
