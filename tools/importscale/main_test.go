package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/npy"
)

// TestMakeList: the list is the same as text and as an array.
func TestMakeList(t *testing.T) {
	o := options{edges: 70_000, nodes: 1000, format: "text"}
	text, array := filepath.Join(t.TempDir(), "e.txt"), filepath.Join(t.TempDir(), "e.npy")
	require.NoError(t, makeList(text, o))
	o.format = "npy"
	require.NoError(t, makeList(array, o))
	b, err := os.ReadFile(text)
	require.NoError(t, err)
	a, err := npy.Open(array)
	require.NoError(t, err)
	require.Equal(t, []int64{o.edges, 2}, a.Header.Shape)
	r, err := a.Reader(0)
	require.NoError(t, err)
	defer r.Close()
	ids := make([]int64, 2*o.edges)
	n, err := r.Ints(ids)
	require.NoError(t, err)
	require.Equal(t, len(ids), n)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	require.Len(t, lines, int(o.edges))
	for i, l := range lines {
		require.Equal(t, fmt.Sprintf("%d\t%d", ids[2*i], ids[2*i+1]), l)
		require.Less(t, max(ids[2*i], ids[2*i+1]), o.nodes)
	}
}

func TestBadOptions(t *testing.T) {
	require.ErrorContains(t, run(options{}, os.Stdout), "--heliosctl")
	mine := filepath.Join(t.TempDir(), "whole")
	require.NoError(t, os.WriteFile(mine, nil, 0o644))
	require.ErrorContains(t, run(options{heliosctl: "/bin/false", dir: filepath.Dir(mine),
		memory: "1GiB", edges: 10, nodes: 5}, os.Stdout), "holds whole")
	require.FileExists(t, mine)
	require.ErrorContains(t, run(options{heliosctl: "/bin/false", dir: t.TempDir(), memory: "much"},
		os.Stdout), "much")
	require.ErrorContains(t, run(options{heliosctl: "/bin/false", dir: t.TempDir(), memory: "1GiB",
		edges: 10, nodes: 5}, os.Stdout), "/bin/false")
	require.Error(t, run(options{heliosctl: "/bin/true", dir: t.TempDir(), memory: "1GiB",
		edges: 10, nodes: 5}, os.Stdout), "no result")
}
