package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/htmlreport"
	figures "helios/internal/metrics"
	"helios/internal/serve"
	"helios/sched/report"
)

// metrics serves the state of a run at /metrics, in the text that Prometheus reads
// (prometheus.io/docs/instrumenting/exposition_formats). Its client libraries open files before
// main runs, and a process that may open few could not say so any more.
type metrics struct {
	mu     sync.Mutex
	values map[string]float64 // by name with its labels
	fill   func()             // brings values up to date before they are told; nil: they are
	server *http.Server
	addr   string           // that it listens on
	page   *htmlreport.Live // nil: there is none
	done   chan error

	numbers bool // are learnt: no seed is right or wrong

	pass string // that was last heard of, and what it had come to
	last report.Partial
}

// metricsTimeout bounds a request, and the end of those under way.
const metricsTimeout = 5 * time.Second

// serveMetrics begins to serve on the address of an option, with a page where there is one; close
// ends it.
func serveMetrics(option errs.Key, addr string, page *htmlreport.Live) (*metrics, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, errs.New(errs.Usage, "%v %s: %w; write HOST:PORT or :PORT", option, addr, err)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, errs.New(errs.Usage, "%v %s: %w; choose another port", option, addr, err)
	}
	m := &metrics{values: map[string]float64{}, page: page}
	mux := http.NewServeMux()
	if page != nil {
		mux.Handle("GET /{$}", page)
		mux.Handle("GET /live", page)
	}
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		m.mu.Lock()
		fill := m.fill
		m.mu.Unlock()
		if fill != nil {
			fill()
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		m.write(w)
	})
	m.server = &http.Server{Handler: ownPages(option, host, mux), ReadTimeout: metricsTimeout,
		WriteTimeout: metricsTimeout}
	m.addr = l.Addr().String()
	m.done = make(chan error, 1)
	go func() { m.done <- m.server.Serve(l) }()
	return m, nil
}

// ownPages keeps pages of other sites out. A site can have its own name lead here, and would then
// read what its browser reads; it can't do so with an address, nor with a name of this machine.
// host is the one that an option gave.
func ownPages(option errs.Key, host string, to http.Handler) http.Handler {
	machine, _ := os.Hostname() // without one, the other names remain
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.Trim((&url.URL{Host: r.Host}).Hostname(), ".")
		_, err := netip.ParseAddr(name)
		if err != nil && !slices.ContainsFunc([]string{"localhost", host, machine},
			func(own string) bool { return own != "" && strings.EqualFold(name, own) }) {
			http.Error(w, fmt.Sprintf("%q is no name of this machine: ask for its address, or name it: --%s %s:PORT",
				name, string(option), name), http.StatusForbidden)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		w.Header().Set("Content-Security-Policy", "frame-ancestors 'none'")
		to.ServeHTTP(w, r)
	})
}

// metricName is a name with labels, whose values are quoted as Prometheus reads them.
func metricName(name string, labels map[string]string) string {
	keys := slices.Sorted(maps.Keys(labels))
	for i, k := range keys {
		keys[i] = k + "=" + strconv.Quote(labels[k])
	}
	name = "heliosctl_" + name
	if len(keys) > 0 {
		name += "{" + strings.Join(keys, ",") + "}"
	}
	return name
}

// about tells the run from others by its labels.
func (m *metrics) about(labels map[string]string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values[metricName("run_info", labels)] = 1
}

// write writes all values, and the memory that there is now.
func (m *metrics) write(w io.Writer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rss, err := hostmem.ReadRSS(); err == nil {
		m.values[metricName("memory_bytes", nil)] = float64(rss.Counted())
	}
	for _, name := range slices.Sorted(maps.Keys(m.values)) {
		_, _ = fmt.Fprintf(w, "%s %v\n", name, m.values[name]) // who reads has gone
	}
}

// add adds to a counter, which a label tells from others of its name; without one there is one.
func (m *metrics) add(name, label, value string, v float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values[labelled(name, label, value)] += max(v, 0)
}

// put sets a gauge.
func (m *metrics) put(name, label, value string, v float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values[labelled(name, label, value)] = v
}

func labelled(name, label, value string) string {
	if label == "" {
		return metricName(name, nil)
	}
	return metricName(name, map[string]string{label: value})
}

// daemon has the figures of a daemon told.
func (m *metrics) daemon(s *serve.Server) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fill = func() {
		t := s.Stats()
		for name, v := range map[string]int64{"clients": t.Clients, "jobs": t.Jobs,
			"ranks": t.Ranks, "ring_bytes": t.RingBytes, "mini_batches_total": t.Batches,
			"ssd_bytes_total": t.BytesSSD} {
			m.put(name, "", "", float64(v))
		}
	}
}

// watch has an observer's calls counted.
func (m *metrics) watch(o report.Observer) report.Observer {
	live, epoch := o.Live, o.Epoch
	o.Live = func(pass string, p report.Partial) {
		m.live(pass, p)
		if live != nil {
			live(pass, p)
		}
	}
	o.Epoch = func(r report.EpochResult) {
		m.put("epoch", "", "", float64(r.Epoch))
		m.put("epoch_seconds", "", "", r.Seconds)
		m.put("epoch_overlap", "", "", r.Overlap)
		if r.GradNorm != nil {
			m.put("learning_rate", "", "", r.LR)
			m.put("gradient_norm", "", "", *r.GradNorm)
		}
		if r.ValAcc != nil {
			m.put("validation", "metric", "accuracy", *r.ValAcc)
		}
		for _, x := range figures.All[1:] {
			if r.ValMetrics != nil && x.Of(r.ValMetrics) != nil {
				m.put("validation", "metric", x.Name, *x.Of(r.ValMetrics))
			}
		}
		if epoch != nil {
			epoch(r)
		}
	}
	return o
}

// live takes over what a pass has come to.
func (m *metrics) live(pass string, p report.Partial) {
	was := m.last
	if pass != m.pass {
		was = report.Partial{}
	}
	kind := pass
	if strings.HasPrefix(pass, "epoch ") {
		kind = "train"
	}
	m.add("mini_batches_total", "pass", kind, float64(p.Batches-was.Batches))
	m.add("seeds_total", "pass", kind, float64(p.Seeds-was.Seeds))
	m.add("rows_total", "tier", "gpu", float64(p.RowsGPU-was.RowsGPU))
	m.add("rows_total", "tier", "cpu", float64(p.RowsCPU-was.RowsCPU))
	m.add("rows_total", "tier", "ssd", float64(p.RowsSSD-was.RowsSSD))
	m.add("ssd_bytes_total", "", "", float64(p.BytesSSD-was.BytesSSD))
	m.add("ssd_commands_total", "", "", float64(p.Commands-was.Commands))
	m.add("ssd_retries_total", "", "", float64(p.Retries-was.Retries))
	m.add("ssd_timeouts_total", "", "", float64(p.Timeouts-was.Timeouts))
	m.add("stall_seconds_total", "", "", p.Waited-was.Waited)
	before := was.Stages.ByName()
	for name, seconds := range p.Stages.ByName() {
		m.add("stage_seconds_total", "stage", name, seconds-before[name])
	}
	if p.Counted > 0 {
		m.put("loss", "pass", kind, p.Loss())
		if !m.numbers {
			m.put("accuracy", "pass", kind, float64(p.Correct)/float64(p.Counted))
		}
	}
	m.pass, m.last = pass, p
}

// close ends the server; nil metrics have none.
func (m *metrics) close() error {
	if m == nil {
		return nil
	}
	if m.page != nil {
		m.page.Leave()
	}
	ctx, cancel := context.WithTimeout(context.Background(), metricsTimeout)
	defer cancel()
	err := m.server.Shutdown(ctx)
	if served := <-m.done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
