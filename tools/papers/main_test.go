package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every experiment goes through on a small graph, and its factors have the direction that they have
// at any size.
func TestSelftest(t *testing.T) {
	o := options{selftest: true}
	if testing.Short() {
		o.only = "pipeline|buffer|ladies"
	}
	require.NoError(t, run(context.Background(), o))
	require.ErrorContains(t, run(context.Background(), options{selftest: true, only: "nothing"}),
		"accumulator")
	require.ErrorContains(t, run(context.Background(), options{selftest: true, only: "("}), "-only")
}

// Tables and figures go to files, and a dataset that is there is used again with the same outcome.
func TestOutput(t *testing.T) {
	dir := t.TempDir()
	var figures [2][]byte
	for i := range figures {
		o := options{dir: dir, nodes: 3000, degree: 8, only: "^window$",
			md: filepath.Join(dir, "t.md"), json: filepath.Join(dir, "t.json")}
		require.NoError(t, run(context.Background(), o))
		var err error
		figures[i], err = os.ReadFile(o.json)
		require.NoError(t, err)
		md, err := os.ReadFile(o.md)
		require.NoError(t, err)
		require.Contains(t, string(md), "**GIDS: window depth and cache size.**")
		require.Contains(t, string(md), "modelled")
	}
	require.True(t, bytes.Equal(figures[0], figures[1]))
	var got struct {
		Modelled bool
		Nodes    int64
		Tables   []table
	}
	require.NoError(t, json.Unmarshal(figures[0], &got))
	require.True(t, got.Modelled)
	require.EqualValues(t, 3000, got.Nodes)
	require.Len(t, got.Tables, 1)
	require.Len(t, got.Tables[0].Rows, 3)
}
