package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// docs/reference/faults.md is up to date.
func TestFaultsDocument(t *testing.T) {
	var want bytes.Buffer
	require.NoError(t, writeFaults(&want))
	got, err := os.ReadFile("../../docs/reference/faults.md")
	require.NoError(t, err)
	require.Equal(t, want.String(), string(got), "run \"make generate\"")
}
