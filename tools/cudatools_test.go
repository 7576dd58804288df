// Package tools tests the scripts beside it.
package tools

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// CI runs the tools that cudatools.sh leaves, so it takes no folder that another user can fill.
func TestCUDAToolsRefusesFoldersOfOthers(t *testing.T) {
	const version = "12.9.86-12.9.79"
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		code  int
		want  string
	}{
		{"ours", func(*testing.T, string) {}, 0, "has " + version},
		{"writable by others",
			func(t *testing.T, dir string) { require.NoError(t, os.Chmod(dir, 0o777)) }, 4,
			"mode 777: others can put programs there"},
		{"writable by the group",
			func(t *testing.T, dir string) { require.NoError(t, os.Chmod(dir, 0o770)) }, 4,
			"mode 770"},
		{"in a folder for all",
			func(t *testing.T,
				dir string) {
				require.NoError(t, os.Chmod(filepath.Dir(dir), 0o777|os.ModeSticky))
			}, 4, "mode 1777"},
		{"a link", func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir, dir+"2"))
			require.NoError(t, os.Symlink(dir+"2", dir))
		}, 4, "is not a folder"},
		{"another user's", func(t *testing.T, dir string) {
			if os.Geteuid() != 0 {
				t.Skip("only root makes a folder of another user's")
			}
			require.NoError(t, os.Chown(dir, 65534, 65534))
		}, 4, "belongs to user 65534"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a folder", "tools")
			require.NoError(t, os.MkdirAll(dir, 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(dir, "version"),
				[]byte(version+"\n"), 0o644))
			c.spoil(t, dir)
			cmd := exec.Command("./cudatools.sh", dir)
			out, _ := cmd.CombinedOutput()
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s", out)
			require.Contains(t, string(out), c.want)
		})
	}
}
