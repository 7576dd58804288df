package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/htmlreport"
	"helios/internal/serve"
	"helios/sched/report"
)

// scrape gets the metrics of an address.
func scrape(t *testing.T, addr string) string { return browse(t, addr+"/metrics") }

func browse(t *testing.T, url string) string {
	t.Helper()
	c := http.Client{Timeout: 10 * time.Second}
	r, err := c.Get("http://" + url)
	require.NoError(t, err)
	defer r.Body.Close() //nolint:errcheck // only read
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, r.StatusCode)
	return string(text)
}

// Counters grow by what a pass has come to, and a pass that begins anew takes nothing back.
func TestMetricsCount(t *testing.T) {
	m, err := serveMetrics("serve", ":0", nil)
	require.NoError(t, err)
	m.about(map[string]string{"mode": "m"})
	require.Regexp(t, `^127\.0\.0\.1:\d+$`, m.addr, "without a host nobody else reaches it")
	var heard []int
	var live []string
	o := m.watch(report.Observer{Epoch: func(r report.EpochResult) {
		heard = append(heard, r.Epoch)
	}, Live: func(pass string, _ report.Partial) { live = append(live, pass) }})
	p := report.Partial{Batches: 2, Seeds: 20, RowsGPU: 5, RowsCPU: 6, RowsSSD: 7, BytesSSD: 70,
		Commands: 4, Retries: 1, Timeouts: 1, Waited: 0.5, LossSum: 30, Correct: 4, Counted: 16}
	p.Stages.Train = 2
	o.TellLive("epoch 1", func() report.Partial { return report.Partial{Batches: 1, Seeds: 10} })
	o.TellLive("epoch 1", func() report.Partial { return p })
	o.TellEpoch(report.EpochResult{Epoch: 1, Seconds: 1.5, Overlap: 0.25})
	o.TellLive("validate", func() report.Partial { return report.Partial{Batches: 1, Seeds: 3} })
	o.TellLive("epoch 2", func() report.Partial { return report.Partial{Batches: 1, Seeds: 10} })
	text := scrape(t, m.addr)
	for _, want := range []string{
		`heliosctl_mini_batches_total{pass="train"} 3`, `heliosctl_seeds_total{pass="train"} 30`,
		`heliosctl_mini_batches_total{pass="validate"} 1`, `heliosctl_rows_total{tier="ssd"} 7`,
		"heliosctl_ssd_bytes_total 70", "heliosctl_ssd_commands_total 4",
		"heliosctl_ssd_retries_total 1", "heliosctl_ssd_timeouts_total 1",
		`heliosctl_stage_seconds_total{stage="train"} 2`, "heliosctl_stall_seconds_total 0.5",
		`heliosctl_loss{pass="train"} 1.875`, `heliosctl_accuracy{pass="train"} 0.25`,
		"heliosctl_epoch 1", "heliosctl_epoch_seconds 1.5", "heliosctl_epoch_overlap 0.25",
		`heliosctl_run_info{mode="m"} 1`,
	} {
		require.Contains(t, "\n"+text, "\n"+want+"\n")
	}
	require.Regexp(t, `\nheliosctl_memory_bytes [1-9]`, text)
	require.Equal(t, []int{1}, heard)
	require.Equal(t, []string{"epoch 1", "epoch 1", "validate", "epoch 2"}, live, "--live hears it, too")
	require.NoError(t, m.close())
	_, err = net.DialTimeout("tcp", m.addr, time.Second)
	require.Error(t, err, "closed")
}

// A page of another site, whose name leads to this machine, reads nothing; no site frames a page.
func TestMetricsRefuseOtherSites(t *testing.T) {
	machine, err := os.Hostname()
	require.NoError(t, err)
	for option, own := range map[string][]string{
		":0":          {"127.0.0.1:9", "[::1]:9", "[::1]", "localhost:9", "LOCALHOST.", machine},
		"127.0.0.1:0": {"10.1.2.3", "[fe80::1%25eth0]:9"}, "localhost:0": {"localhost"},
	} {
		m, err := serveMetrics("serve", option, htmlreport.NewLive("<b>", "v1"))
		require.NoError(t, err)
		for _, path := range []string{"/", "/live?lines=0", "/metrics"} {
			for _, host := range append(own, "evil.example", "127.0.0.1.evil.example:80",
				"localhost.evil.example", "evil.example:80@127.0.0.1", "2130706433") {
				r := httptest.NewRequest(http.MethodGet, path, nil)
				r.Host = host
				w := httptest.NewRecorder()
				m.server.Handler.ServeHTTP(w, r)
				if !slices.Contains(own, host) {
					require.Equal(t, http.StatusForbidden, w.Code, "%s of %s", path, host)
					require.NotContains(t, w.Body.String(), "heliosctl_")
					require.Contains(t, w.Body.String(), "or name it: --serve ")
					continue
				}
				require.Equal(t, http.StatusOK, w.Code, "%s of %s: %s", path, host, w.Body)
				require.Equal(t, "frame-ancestors 'none'", w.Header().Get("Content-Security-Policy"))
			}
		}
		require.NoError(t, m.server.Close())
	}
}

// A run that trains tells so meanwhile, on a page, too, and there how it ended.
func TestTrainMetrics(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "load", "g")
	cmd := child(t, "train", "g", "--epochs", "100000", "--hidden", "8", "--batch-size", "128",
		"--serve", "127.0.0.1:0")
	said, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(said)
	address := regexp.MustCompile(`http://(\S+)/;`)
	var addr string
	for addr == "" && lines.Scan() {
		if m := address.FindStringSubmatch(lines.Text()); m != nil {
			addr = m[1]
		}
	}
	require.NotEmpty(t, addr)
	trained := regexp.MustCompile(`heliosctl_mini_batches_total\{pass="train"\} [1-9]`)
	whole := regexp.MustCompile(`heliosctl_epoch [1-9]`)
	for deadline := time.Now().Add(time.Minute); ; {
		text := scrape(t, addr)
		if trained.MatchString(text) && whole.MatchString(text) {
			require.Contains(t, text, `dataset="g"`)
			break
		}
		require.True(t, time.Now().Before(deadline), text)
		time.Sleep(10 * time.Millisecond)
	}
	page := browse(t, addr+"/")
	for _, want := range []string{"<title>heliosctl train: g</title>", "Loss by epoch", "sage inmem, validation",
		"The run goes on.", "epoch", "</html>"} {
		require.True(t, strings.Contains(page, want), want)
	}
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	for news := ""; !strings.Contains(news, "not whole: "); { // until it is gone, and that is an error
		news = browse(t, addr+"/live?lines=0")
	}
	rest, err := io.ReadAll(said)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Equal(t, 130, cmd.ProcessState.ExitCode(), string(rest))

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck // nobody has connected
	for addr, says := range map[string]string{"9100": "HOST:PORT", l.Addr().String(): "another port"} {
		r := hc(t, strings.Fields("train g --quiet --metrics "+addr)...)
		require.Equal(t, 2, r.code)
		require.Contains(t, r.errOut, "--serve "+addr)
		require.Contains(t, r.errOut, says)
	}
	fails(t, hc(t, "train", "g", "--clock", "virtual", "--metrics", ":0"), 2, "train", "--serve")
	for _, flag := range []string{"--metric=log-loss", "--patience=2"} {
		fails(t, hc(t, "train", "g", "--clock", "virtual", "--hardware", "host", flag), 2, "train",
			strings.Split(flag, "=")[0]+" means nothing under --clock virtual")
	}
}

// A daemon's figures are those of the moment when somebody asks.
func TestMetricsOfDaemon(t *testing.T) {
	m, err := serveMetrics("metrics", ":0", nil)
	require.NoError(t, err)
	s := serve.New(serve.Config{Memory: 1 << 20})
	m.daemon(s)
	require.Contains(t, scrape(t, m.addr), "heliosctl_clients 0\n")
	d := openDoor(t, s)
	require.Contains(t, scrape(t, m.addr), "heliosctl_clients 1\nheliosctl_jobs 0\n")
	d.close()
	require.NoError(t, m.close())
}

// The dashboard shows each metric that there is, and no other.
func TestDashboardShowsMetrics(t *testing.T) {
	// names are read from the source, so a metric that no test exports counts, too
	names := func(file, pattern string) map[string]bool {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		found := map[string]bool{}
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(b), -1) {
			found[m[1]] = true
		}
		return found
	}
	const dashboard = repo + "/tools/grafana/heliosctl.json"
	b, err := os.ReadFile(dashboard)
	require.NoError(t, err)
	require.True(t, json.Valid(b))
	shown := names(dashboard, `heliosctl_([a-z_]+)`)
	require.Equal(t, names("metrics.go", `(?:m\.add\(|m\.put\(|metricName\(|[{ \t])"([a-z_]+)"(?:, (?:"|nil|labels)|: t\.)`), shown)
}
