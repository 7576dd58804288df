package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// An option of one mode chooses it where no mode is given.
func TestOptionsChooseTheMode(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "300", "--avg-degree", "5", "--dim", "8", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	for _, x := range [][]string{{"inmem"}, {"diskgnn", "--packed", "p"},
		{"diskgnn", "--mode", "auto", "--disk-budget", "1MiB"}} {
		out := ok(t, append([]string{"train", "g", "--epochs", "1", "--fanout", "2", "--no-eval"},
			x[1:]...)...)
		require.Regexp(t, `\nmode +`+x[0]+",", out)
	}
}
