package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/faultinject"
)

// --fault list needs neither SSD nor dataset.
func TestFaultList(t *testing.T) {
	t.Chdir(t.TempDir())
	all := faultinject.Catalogue()
	text := ok(t, "train", "--fault", "list")
	for _, f := range all {
		require.Contains(t, text, f.Fault)
		require.Contains(t, text, f.Outcome)
	}
	lines := strings.Split(strings.TrimSpace(ok(t, "bench", "io", "--fault", "list", "--json")),
		"\n")
	require.Len(t, lines, len(all))
	require.Contains(t, lines[0], `"class":"`+string(all[0].Class)+`"`)
}
