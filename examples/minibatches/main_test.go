package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/examples/internal/generated"
	"helios/internal/hostmem"
)

func TestMinibatches(t *testing.T) {
	dir, files := generated.Dataset(t)
	before := hostmem.Usage()
	for range 2 { // the second time the rows are loaded again
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), &out, dir, files))
		// Some 60 % of the nodes are for training.
		require.Regexp(t, `^batch 0: 1024 seeds, 29\d\d nodes, 16 features each
batch 1: 740 seeds, 28\d\d nodes, 16 features each
$`, out.String())
	}
	require.Equal(t, before, hostmem.Usage(), "the program leaves memory behind")
}
