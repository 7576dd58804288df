package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/examples/internal/loaded"
	"helios/internal/hostmem"
)

func TestMinibatches(t *testing.T) {
	dir, files := loaded.Dataset(t)
	files[0], files[1] = files[1], files[0]
	before := hostmem.Usage()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, dir, files))
	// Some 60 % of the nodes are for training.
	require.Regexp(t, `^batch 0: 1024 seeds, 29\d\d nodes, [1-9]\d* read commands
batch 1: 740 seeds, 28\d\d nodes, [1-9]\d* read commands
$`, out.String())
	require.Equal(t, before, hostmem.Usage(), "the program leaves memory behind")
}
