package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tutorialBlock is a block of commands of the tutorial, with the lines of output that it shows.
type tutorialBlock struct {
	commands string
	shown    []string
}

// readTutorial reads the tutorial's programs, by their file names, and its commands.
func readTutorial(t *testing.T) (programs map[string]string, blocks []tutorialBlock) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repo, "docs/tutorial.md"))
	require.NoError(t, err)
	programs = map[string]string{}
	for _, m := range fence.FindAllStringSubmatch(string(text), -1) {
		switch m[1] {
		case "python":
			name, _, _ := strings.Cut(strings.TrimPrefix(m[2], "# "), "\n")
			programs[name] = m[2]
		case "sh":
			blocks = append(blocks, tutorialBlock{commands: m[2]})
		case "text":
			blocks[len(blocks)-1].shown = strings.Split(strings.TrimSpace(m[2]), "\n")
		}
	}
	return programs, blocks
}

// needsPandas reports whether a block runs a program that imports pandas.
func (b *tutorialBlock) needsPandas(programs map[string]string) bool {
	for name, text := range programs {
		if strings.Contains(b.commands, name) && strings.Contains(text, "import pandas") {
			return !strings.Contains(b.commands, "rm ")
		}
	}
	return false
}

// holdShown finds the lines that a block shows in its output, in their order; … is any text.
func (b *tutorialBlock) holdShown(t *testing.T, output string) {
	t.Helper()
	lines := strings.Split(output, "\n")
	for _, want := range b.shown {
		pattern := strings.ReplaceAll(regexp.QuoteMeta(want), "…", ".*")
		line := regexp.MustCompile("^" + pattern + "$")
		for len(lines) > 0 && !line.MatchString(lines[0]) {
			lines = lines[1:]
		}
		require.NotEmpty(t, lines, "the tutorial shows %q, the commands print\n%s", want, output)
		lines = lines[1:]
	}
}

// The tutorial's commands run as they stand, in one shell, and print what it shows.
func TestTutorial(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	pandas := exec.CommandContext(t.Context(), python, "-c", "import pandas").Run() == nil
	self, err := os.Executable()
	require.NoError(t, err)
	bin, work := t.TempDir(), t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(bin, "heliosctl")))
	programs, blocks := readTutorial(t)
	for name, text := range programs {
		require.NoError(t, os.WriteFile(filepath.Join(work, name), []byte(text), 0o600))
	}
	const mark = "== end of block"
	var script strings.Builder
	script.WriteString("set -euo pipefail\n")
	for _, b := range blocks {
		if pandas || !b.needsPandas(programs) {
			script.WriteString(b.commands)
		}
		script.WriteString("echo '" + mark + "'\n")
	}
	c := exec.CommandContext(t.Context(), "bash", "-c", script.String())
	c.Dir = work
	c.Env = append(os.Environ(), asChild+"=1", "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := c.CombinedOutput()
	require.NoError(t, err, string(out))
	outputs := strings.Split(string(out), mark+"\n")
	require.Len(t, outputs, len(blocks)+1)
	for i, b := range blocks {
		if !pandas && b.needsPandas(programs) {
			t.Log("pandas is not installed: left out\n" + b.commands)
			continue
		}
		b.holdShown(t, outputs[i])
	}
	left, err := os.ReadDir(work)
	require.NoError(t, err)
	require.Empty(t, left, "the tutorial cleans up")
}
