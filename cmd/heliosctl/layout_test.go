package main

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/dataset/parted"
	"helios/graph/partition"
)

// verify finds layouts by part in a dataset's folder, whatever they are called, and names one that
// is damaged or another dataset's.
func TestVerifyLayouts(t *testing.T) {
	isolate(t)
	for _, name := range []string{"g", "h"} {
		ok(t, "generate", "--kind", "rmat", "--nodes", "3000", "--avg-degree", "8", "--dim", "16",
			"--seed", map[string]string{"g": "1", "h": "2"}[name], "--out", name)
	}
	d, err := dataset.Open("g")
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	topo, err := d.Topology()
	require.NoError(t, err)
	l, err := parted.Make(context.Background(), d, topo, parted.Options{Dir: "g/eight",
		Place: pages.InFolder{}, StaticShare: 0.1,
		PartitionOptions: partition.Options{Parts: 8, Method: partition.Stream}})
	require.NoError(t, err)

	require.Contains(t, ok(t, "verify", "g"), "g/eight: 8 parts of 3000 nodes and ")
	found := false
	for _, e := range lines(t, ok(t, "verify", "g", "--json")) {
		if e["event"] == "layout" {
			found = true
			require.Equal(t, "g/eight", e["dir"])
			require.EqualValues(t, l.Spec.Pages, e["pages"])
			require.Equal(t, true, e["whole"])
		}
	}
	require.True(t, found)

	b := []byte(readFile(t, "g/eight/pages"))
	b[len(b)/2] ^= 1
	require.NoError(t, os.WriteFile("g/eight/pages", b, 0o644))
	fails(t, hc(t, "verify", "g"), 5, "verify", "g/eight/pages: page ", "prepare it again")
	require.NoError(t, os.Rename("g/eight", "h/eight"))
	fails(t, hc(t, "verify", "h"), 2, "verify", "the layout in h/eight is of dataset")
	ok(t, "verify", "g")
}
