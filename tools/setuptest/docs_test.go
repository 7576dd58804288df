package setuptest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each message in the table of docs/guide/ssds.md is one that the product still prints.
func TestDocsQuoteRealMessages(t *testing.T) {
	root := filepath.Join("..", "..")
	var source strings.Builder
	add := func(path string) {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		source.Write(b)
	}
	add(filepath.Join(root, "vfio-setup.sh"))
	for _, dir := range []string{"cmd/heliosctl", "dataset", "internal", "nvme", "cuda/driver"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(p string, _ fs.DirEntry,
			err error) error {
			if err == nil && strings.HasSuffix(p, ".go") && !strings.HasSuffix(p, "_test.go") {
				add(p)
			}
			return err
		})
		require.NoError(t, err)
	}
	doc, err := os.ReadFile(filepath.Join(root, "docs", "guide", "ssds.md"))
	require.NoError(t, err)
	_, table, _ := strings.Cut(string(doc), "| the message says |")
	messages := 0
	for _, line := range strings.Split(table, "\n") {
		cell, _, _ := strings.Cut(strings.TrimPrefix(line, "|"), "|")
		if !strings.HasPrefix(line, "| `") || strings.Contains(cell, "kernel's log") {
			continue
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
			messages++
			for _, part := range strings.Split(m[1], "…") {
				if part = strings.TrimSpace(part); !strings.Contains(source.String(), part) {
					t.Errorf("%q: nothing prints %q", m[1], part)
				}
			}
		}
	}
	if messages < 20 {
		t.Errorf("%d messages found in the table", messages)
	}
}
