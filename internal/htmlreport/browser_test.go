package htmlreport

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// browser finds Chromium. CI sets HELIOS_NEED_BROWSER, and then it must be there.
func browser(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("HELIOS_NEED_BROWSER") != "" {
		t.Fatal("no chromium: install the package of that name")
	}
	t.Skip("no Chromium on this machine: CI draws the pages")
	return ""
}

// A browser draws every figure, in both themes, on a wide screen and on a narrow one, without an
// error and without scrolling sideways.
func TestBrowserDrawsThePage(t *testing.T) {
	chromium := browser(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "report.html")
	text := page(t, all(t)...)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	figures := strings.Count(text, "<figure ")
	require.Greater(t, figures, 15)
	for i, v := range []struct {
		width  int
		scheme string
	}{{1280, "1"}, {390, "0"}} {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, chromium, "--headless", "--no-sandbox", "--disable-gpu",
			"--disable-dev-shm-usage", "--user-data-dir="+filepath.Join(dir, fmt.Sprint(i)),
			fmt.Sprintf("--window-size=%d,900", v.width),
			"--blink-settings=preferredColorScheme="+v.scheme, "--virtual-time-budget=5000",
			"--dump-dom", "file://"+file)
		out, err := cmd.Output()
		require.NoError(t, err)
		dom := string(out)
		head := regexp.MustCompile(`<html[^>]*>`).FindString(dom)
		require.Contains(t, head, `data-state="ready"`)
		require.Contains(t, head, `data-failures=""`)
		require.Contains(t, head, `data-overflow="0"`)
		require.Equal(t, figures, strings.Count(dom, `role="img"`))
		require.False(t, regexp.MustCompile(`d="[^"]*NaN`).MatchString(dom), "a path has no place")
	}
}
