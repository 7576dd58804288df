package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// heliosctl carries vfio-setup.sh: a binary that was copied to another machine needs nothing beside
// it.
func TestVFIOSetup(t *testing.T) {
	script, err := os.ReadFile("../../vfio-setup.sh")
	require.NoError(t, err)
	isolate(t)
	require.Equal(t, string(script), ok(t, "vfio-setup", "--print"))
	require.Contains(t, ok(t, "vfio-setup", "--help"), "--hugepages SIZE")

	root := t.TempDir()
	t.Setenv("HELIOS_SYSROOT", root)
	r := hc(t, "vfio-setup", "status", "--group", "helios")
	require.Equal(t, 3, r.code, "%+v", r)
	require.Contains(t, r.out, "sudo heliosctl vfio-setup setup",
		"its advice names the command that there is")
	require.NotContains(t, r.out+r.errOut, "vfio-setup.sh")
	r = hc(t, "vfio-setup", "setup", "--hugepages", "much")
	require.Equal(t, 2, r.code, "%+v", r)
	require.Equal(t,
		"vfio-setup: --hugepages \"much\" is not a size; write it like 512MiB or 2GiB, or 0; \"heliosctl vfio-setup --help\" shows what there is\n",
		r.errOut)
	require.Equal(t, 2, hc(t, "vfio-setup").code)

	// bind and unbind come back to this program, wherever it lies.
	r = hc(t, "vfio-setup", "unbind", "--dry-run")
	require.Zero(t, r.code, "%+v", r)
	self, err := os.Executable()
	require.NoError(t, err)
	require.Contains(t, r.out, self+" unbind-ssds")
}

// No message or text of the program sends the reader to a script that a copied binary does not
// have.
func TestAdviceNamesVFIOSetup(t *testing.T) {
	advice := regexp.MustCompile(`vfio-setup\.sh +(setup|status|bind|unbind|reset)`)
	for _, dir := range []string{"cmd", "internal", "nvme", "gpuio", "dataset", "sched", "cuda"} {
		require.NoError(t, filepath.WalkDir(filepath.Join("../..", dir),
			func(path string, d os.DirEntry, err error) error {
				if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") ||
					strings.HasSuffix(path, "_test.go") {
					return err
				}
				text, err := os.ReadFile(path)
				require.Empty(t, advice.FindAllString(string(text), -1),
					"%s: write \"sudo heliosctl vfio-setup setup\"", path)
				return err
			}))
	}
}
