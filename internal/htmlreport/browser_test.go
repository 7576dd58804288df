package htmlreport

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
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

//go:embed testdata/probe.js
var probeScript string

// A browser draws every figure, in both themes, on a wide screen and on a narrow one, without an
// error and without scrolling sideways, folded and unfolded. Each text has the contrast of WCAG
// 2.2, 1.4.3, as the browser computed its colours, and each figure tells its values by keys.
func TestBrowserDrawsThePage(t *testing.T) {
	chromium := browser(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "report.html")
	text := page(t, all(t)...)
	probed := strings.Replace(text, "</body>", "<script>"+probeScript+"</script></body>", 1)
	require.NotEqual(t, text, probed)
	allowed := regexp.MustCompile(`content="default-src[^"]*script-src `).FindString(probed)
	require.NotEmpty(t, allowed)
	sum := sha256.Sum256([]byte(probeScript))
	probed = strings.Replace(probed, allowed,
		allowed+"'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"' ", 1)
	require.NoError(t, os.WriteFile(file, []byte(probed), 0o600))
	figures := strings.Count(text, "<figure ")
	require.Greater(t, figures, 20)
	for i, v := range []struct {
		width  int
		scheme string
	}{{1280, "1"}, {390, "0"}, {390, "1"}, {1280, "0"}} {
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
		require.Contains(t, head, `data-unfolded="0"`)
		require.Equal(t, figures, strings.Count(dom, `role="img"`))
		var found struct {
			Texts                    int
			Faint, Mute, Wide, Small []string
		}
		probe := regexp.MustCompile(`data-probe="([^"]*)"`).FindStringSubmatch(head)
		require.NotNil(t, probe)
		require.NoError(t, json.Unmarshal([]byte(html.UnescapeString(probe[1])), &found))
		require.Greater(t, found.Texts, 300)
		require.Empty(t, found.Faint, "width %d, scheme %s", v.width, v.scheme)
		require.Empty(t, found.Mute, "width %d, scheme %s", v.width, v.scheme)
		require.Empty(t, found.Wide, "width %d, scheme %s", v.width, v.scheme)
		require.Empty(t, found.Small, "width %d, scheme %s", v.width, v.scheme)
		require.False(t, regexp.MustCompile(`d="[^"]*NaN`).MatchString(dom), "a path has no place")
	}
}

// Printed, the page has its figures, and tables whose words are whole.
func TestBrowserPrintsThePage(t *testing.T) {
	chromium := browser(t)
	pdftotext, err := exec.LookPath("pdftotext")
	if err != nil {
		if os.Getenv("HELIOS_NEED_BROWSER") != "" {
			t.Fatal("no pdftotext: install the package poppler-utils")
		}
		t.Skip("no pdftotext on this machine: CI reads what is printed")
	}
	dir := t.TempDir()
	file, pdf := filepath.Join(dir, "report.html"), filepath.Join(dir, "report.pdf")
	require.NoError(t, os.WriteFile(file, []byte(page(t, all(t)...)), 0o600))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, chromium, "--headless", "--no-sandbox", "--disable-gpu",
		"--disable-dev-shm-usage", "--user-data-dir="+filepath.Join(dir, "profile"),
		"--virtual-time-budget=5000", "--no-pdf-header-footer", "--print-to-pdf="+pdf,
		"file://"+file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	text, err := exec.CommandContext(ctx, pdftotext, pdf, "-").Output()
	require.NoError(t, err)
	words := strings.Fields(string(text))
	for _, want := range []string{"blocks", "stack", "parameters", "validation", "overlap",
		"passed", "epochs"} {
		require.True(t, slices.Contains(words, want), want)
	}
	require.False(t, slices.Contains(words, "ocks"), "a word of a table is cut")
	require.Less(t, bytes.Count(text, []byte("\f")), 120, "pages")
}
