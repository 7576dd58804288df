package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/examples/internal/generated"
)

func TestTrain(t *testing.T) {
	dir, files := generated.Dataset(t)
	var first, second bytes.Buffer
	require.NoError(t, run(t.Context(), &first, dir, files))
	require.Regexp(t, `^epoch 1: loss 1\.\d{4}, \d+ rows from SSDs
epoch 2: loss [01]\.\d{4}, \d+ rows from SSDs
test accuracy [3-9]\d\.\d %; node 0 is of class [0-3]
$`, first.String())
	require.NoError(t, run(t.Context(), &second, dir, files))
	require.Equal(t, first.String(), second.String())
}
