package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The script of examples/ runs as it stands, and its modes agree.
func TestExampleScript(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	bin := t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(bin, "heliosctl")))
	c := exec.CommandContext(t.Context(), "../../examples/compare-modes.sh",
		filepath.Join(t.TempDir(), "out"))
	c.Env = append(os.Environ(), asChild+"=1", "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := c.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "the same parameters in every mode")
}
