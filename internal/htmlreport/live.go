package htmlreport

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// Live is the page of a run that is under way. Its script asks for what is new, and draws it as
// Write does.
type Live struct {
	version string

	mu     sync.Mutex
	source Source
	now    [][]string
	err    error     // of a line
	asked  time.Time // when a page last did
}

// NewLive is the page of a run that has no results yet; name is for people.
func NewLive(name, version string) *Live {
	return &Live{version: version, source: Source{Name: name}}
}

// Write takes over a line of results, as --results has it.
func (l *Live) Write(text []byte) (int, error) {
	var head struct {
		Event string `json:"event"`
	}
	err := json.Unmarshal(text, &head)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		err = l.source.add(head.Event, bytes.TrimSpace(text))
	}
	return len(text), err
}

// Show has the page say what the run does now: names, and what there is to say.
func (l *Live) Show(now [][]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now
}

// pollEvery is the time after which a page asks again, as the script has it.
const pollEvery = time.Second

// Leave waits until pages that are open have asked once more, and so have the end.
func (l *Live) Leave() {
	l.mu.Lock()
	open := time.Since(l.asked) < 2*pollEvery
	l.mu.Unlock()
	if open {
		time.Sleep(pollEvery * 3 / 2)
	}
}

// ServeHTTP answers with the page, and under "live" with what the run does now. There it sends the
// page anew when the results have grown by a sixteenth since the page that asks, or have ended: all
// that a run sends stays in proportion to its results.
func (l *Live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	source := l.source // lines are only added
	now := table{Title: "now", Rows: l.now}
	l.asked = time.Now()
	l.mu.Unlock()
	v, err := newView([]*Source{&source}, l.version)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	v.Live, v.Now, v.State = true, now, "The run goes on."
	if source.Ended {
		v.Now.Rows, v.State = nil, "The run has ended: "+source.state()+"."
	} else {
		v.Sources[0].State = "under way"
	}
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Path != "/live" {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = v.write(w) // who asked has gone
		return
	}
	answer := struct {
		Lines   int      `json:"lines"`
		Ended   bool     `json:"ended"`
		Now     string   `json:"now"`
		Page    string   `json:"page,omitempty"`
		Figures []figure `json:"figures,omitempty"`
	}{Ended: source.Ended}
	had, lines := -1, len(source.lines)
	if n, err := strconv.Atoi(r.URL.Query().Get("lines")); err == nil && n >= 0 && n <= lines {
		had = n // of another run where there are more
	}
	answer.Lines = had
	if answer.Now, err = v.part("now"); err == nil &&
		(lines-had > max(had, 0)/16 || lines > had && source.Ended) {
		answer.Lines, answer.Figures = lines, v.figures
		answer.Page, err = v.part("page")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}
