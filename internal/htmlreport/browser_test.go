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
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
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

// withScript is a page that runs one more script behind its own.
func withScript(t *testing.T, text, script string) string {
	t.Helper()
	allowed := regexp.MustCompile(`content="default-src[^"]*script-src `).FindString(text)
	require.NotEmpty(t, allowed)
	sum := sha256.Sum256([]byte(script))
	text = strings.Replace(text, allowed,
		allowed+"'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"' ", 1)
	return strings.Replace(text, "</body>", "<script>"+script+"</script></body>", 1)
}

// domOf is a page as Chromium has it some seconds after it was opened.
func domOf(t *testing.T, chromium string, width int, scheme, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, chromium, "--headless", "--no-sandbox", "--disable-gpu",
		"--disable-dev-shm-usage", "--user-data-dir="+t.TempDir(),
		fmt.Sprintf("--window-size=%d,900", width),
		"--blink-settings=preferredColorScheme="+scheme, "--virtual-time-budget=5000",
		"--dump-dom", url).Output()
	require.NoError(t, err)
	return string(out)
}

// axe-core finds nothing in a page, as it opens and with all unfolded and a value pointed at.
func TestBrowserPageIsAccessible(t *testing.T) {
	chromium := browser(t)
	axe, err := os.ReadFile(os.Getenv("HELIOS_AXE"))
	if err != nil && os.Getenv("HELIOS_NEED_BROWSER") != "" {
		t.Fatal("no axe-core: ", err)
	} else if err != nil {
		t.Skip("HELIOS_AXE names no axe.min.js: \"make test-pages\" has npm fetch it")
	}
	live := NewLive("g", "v1")
	feed(t, live, judgedRun(t), 0, 9)
	live.source.Ended = false
	live.Show([][]string{{"helios", "epoch 1 of 2"}})
	server := httptest.NewServer(live)
	defer server.Close()
	answer, err := http.Get(server.URL)
	require.NoError(t, err)
	followed, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	for name, text := range map[string]string{"report": page(t, all(t)...), "live": string(followed)} {
		for _, do := range []string{"", `
			document.querySelectorAll("details").forEach((d) => { d.open = true; });
			document.querySelector("figure svg[tabindex]").dispatchEvent(
				new KeyboardEvent("keydown", {key: "End"}));`} {
			file := filepath.Join(t.TempDir(), "report.html")
			require.NoError(t, os.WriteFile(file, []byte(withScript(t, text, string(axe)+";\n"+do+
				`axe.run({resultTypes: ["violations"]}).then((r) => {
				document.documentElement.dataset.axe = JSON.stringify({rules: r.passes.length,
					found: r.violations.map((v) => v.impact + " " + v.id + ": " + v.nodes[0].html)});
			});`)), 0o600))
			for _, scheme := range []string{"0", "1"} {
				dom := domOf(t, chromium, 1280, scheme, "file://"+file)
				found := regexp.MustCompile(`data-axe="([^"]*)"`).FindStringSubmatch(dom)
				require.NotNil(t, found)
				var result struct {
					Rules int
					Found []string
				}
				require.NoError(t, json.Unmarshal([]byte(html.UnescapeString(found[1])), &result))
				require.Greater(t, result.Rules, 15)
				require.Empty(t, result.Found, "%s, scheme %s", name, scheme)
			}
		}
	}
}

// A page follows its run to the end: what was unfolded stays so, and the focus stays where it was.
func TestBrowserFollowsARun(t *testing.T) {
	chromium := browser(t)
	live, run := NewLive("g", "v1"), judgedRun(t)
	feed(t, live, run, 0, 2)
	var once sync.Once
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/live" {
			once.Do(func() { feed(t, live, run, 2, 9) })
			live.ServeHTTP(w, r)
			return
		}
		answer := httptest.NewRecorder()
		live.ServeHTTP(answer, r)
		_, _ = io.WriteString(w, withScript(t, answer.Body.String(), `
			document.querySelector("figure details").open = true;
			document.querySelector("figure svg[tabindex]").focus();
			setInterval(() => {
				const is = document.activeElement, root = document.documentElement;
				root.dataset.kept = is.tagName + " " + is.getAttribute("aria-label") + " " +
					document.querySelectorAll("figure details[open]").length;
			}, 100);`))
	}))
	defer server.Close()
	dom := domOf(t, chromium, 390, "1", server.URL)
	require.Contains(t, dom, `data-failures=""`)
	require.Contains(t, dom, "The run has ended: whole.")
	require.Contains(t, dom, `Confusion: inmem`)
	require.Contains(t, dom, `data-kept="svg Loss by epoch. Arrow keys walk`)
	require.Contains(t, dom, `in the table below, too. 1"`)
	require.Equal(t, strings.Count(dom, "<figure "), strings.Count(dom, `role="img"`))
}

// feed gives a live page lines of a source.
func feed(t *testing.T, live *Live, s *Source, from, to int) {
	for _, l := range s.lines[from:min(to, len(s.lines))] {
		_, err := live.Write(append(l.raw, '\n'))
		require.NoError(t, err)
	}
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
	require.NoError(t, os.WriteFile(file, []byte(withScript(t, text, probeScript)), 0o600))
	figures := strings.Count(text, "<figure ")
	require.Greater(t, figures, 20)
	for _, v := range []struct {
		width  int
		scheme string
	}{{1280, "1"}, {390, "0"}, {390, "1"}, {1280, "0"}} {
		dom := domOf(t, chromium, v.width, v.scheme, "file://"+file)
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
