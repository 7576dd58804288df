package main

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
)

// "make install" puts the program, its pages, what shells complete and units below DESTDIR and
// PREFIX; "make uninstall" takes exactly that back.
func TestMakeInstall(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is not here")
	}
	self, err := os.Executable()
	require.NoError(t, err)
	root := filepath.Join(t.TempDir(), "a root")
	run := func(target string) {
		c := exec.CommandContext(t.Context(), "make", "-C", repo, target, "DESTDIR="+root,
			"PREFIX=/opt/h", "HELIOSCTL="+self)
		c.Env = append(os.Environ(), asChild+"=1")
		out, err := c.CombinedOutput()
		require.NoError(t, err, string(out))
	}
	files := func() (found []string) {
		require.NoError(t, filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				rel, _ := filepath.Rel(root, p)
				found = append(found, rel)
			}
			return err
		}))
		slices.Sort(found)
		return found
	}
	require.NoError(t, os.MkdirAll(filepath.Join(root, "opt/h/bin"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(root, "opt/h/bin/other"), nil, 0o600))
	run("install")
	for file, has := range map[string]string{
		"opt/h/share/man/man1/heliosctl.1":                     ".TH",
		"opt/h/share/man/man1/heliosctl-train.1":               ".TH heliosctl-train",
		"opt/h/share/bash-completion/completions/heliosctl":    "complete",
		"opt/h/share/zsh/site-functions/_heliosctl":            "#compdef heliosctl",
		"opt/h/share/fish/vendor_completions.d/heliosctl.fish": "complete -c heliosctl",
		"opt/h/lib/systemd/user/heliosctl.socket":              "ListenStream=%t/heliosctl.sock\nSocketMode=0600",
		"opt/h/lib/systemd/user/heliosctl.service":             "ExecStart=/opt/h/bin/heliosctl serve\n",
		"opt/h/lib/systemd/system/heliosctl.socket":            "ListenStream=/run/heliosctl.sock\nSocketUser=heliosctl",
		"opt/h/lib/systemd/system/heliosctl.service":           "ExecStart=/opt/h/bin/heliosctl serve --group ",
		"opt/h/lib/sysusers.d/heliosctl.conf":                  "u heliosctl ",
		"opt/h/share/heliosctl/grafana.json":                   `"heliosctl"`,
	} {
		b, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		require.Contains(t, string(b), has, file)
	}
	st, err := os.Stat(filepath.Join(root, "opt/h/bin/heliosctl"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o755), st.Mode())
	visible := slices.DeleteFunc(newApp(io.Discard, io.Discard).Commands,
		func(c *cli.Command) bool { return c.Hidden })
	require.Len(t, files(), 12+len(visible))
	verifyUnits(t, root)
	run("uninstall")
	require.Equal(t, []string{"opt/h/bin/other"}, files())
}

// verifyUnits has systemd read the units below a root, with the program where they look for it.
func verifyUnits(t *testing.T, root string) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Log("systemd-analyze is not here: units are not verified")
		return
	}
	dir := t.TempDir()
	for _, of := range []string{"system", "user"} {
		var units []string
		for _, unit := range []string{"heliosctl.service", "heliosctl.socket"} {
			b, err := os.ReadFile(filepath.Join(root, "opt/h/lib/systemd", of, unit))
			require.NoError(t, err)
			b = bytes.ReplaceAll(b, []byte("/opt/h/bin/heliosctl"), []byte("/bin/sh"))
			units = append(units, filepath.Join(dir, unit))
			require.NoError(t, os.WriteFile(units[len(units)-1], b, 0o600))
		}
		analyze := func(args ...string) string {
			c := exec.CommandContext(t.Context(), "systemd-analyze",
				append([]string{"--" + of, "--man=no"}, args...)...)
			c.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+dir)
			out, err := c.CombinedOutput()
			require.NoError(t, err, string(out))
			return string(out)
		}
		require.NotContains(t, analyze(append([]string{"verify"}, units...)...), dir)
		if of == "system" { // 10 is open, 0 is shut
			analyze("security", "--offline=true", "--threshold=40", units[0])
		}
	}
}
