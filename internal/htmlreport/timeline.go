package htmlreport

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"helios/internal/errs"
)

// verbTimeline stands for a verb in a source that was a file of option timeline.
const verbTimeline = "timeline"

// timelineStart begins a file of internal/timeline.
const timelineStart = `{"displayTimeUnit"`

// mostTimeline bounds a file of option timeline.
const mostTimeline = 512 << 20

// mostEvents bounds its events.
const mostEvents = 2 << 20

// mostSpans bounds the spans of a figure.
const mostSpans = 400

// traced is a Chrome trace, as internal/timeline writes it.
type traced struct {
	Other struct {
		Clock string `json:"clock"`
	} `json:"otherData"`
	Events []tracedEvent `json:"traceEvents"`
}

type tracedEvent struct {
	Phase string  `json:"ph"`
	Name  string  `json:"name"`
	Start float64 `json:"ts"` // microseconds
	Dur   float64 `json:"dur"`
	Lane  int     `json:"tid"`
	Args  struct {
		Name  string `json:"name"`
		Order int    `json:"sort_index"`
		Batch *int   `json:"batch"`
		Pass  string `json:"pass"`
	} `json:"args"`
}

// readTimeline reads a file of option timeline. A run that was killed leaves it without its end.
func readTimeline(r io.Reader, name string) (*Source, error) {
	s := &Source{Name: name, Verb: verbTimeline, Ended: true, Whole: true, timeline: new(traced)}
	d := json.NewDecoder(io.LimitReader(r, mostTimeline))
	err := s.timeline.read(d)
	switch {
	case err == nil:
	case errs.ClassOf(err) == errs.Usage || d.InputOffset() >= mostTimeline:
		return nil, errs.New(errs.Usage,
			"%s has more than %d bytes or %d events; open it in ui.perfetto.dev, or trace fewer epochs",
			name, mostTimeline, mostEvents)
	case len(s.timeline.Events) > 0 && errors.Is(err, io.ErrUnexpectedEOF):
		s.Ended, s.Whole, s.Reason = false, false, "its end is missing"
	default:
		return nil, errs.New(errs.Usage,
			"%s: no timeline: %w; give a file that {timeline} or results has written", name, err)
	}
	return s, nil
}

// read takes events one by one, so that memory is for those that a figure needs.
func (t *traced) read(d *json.Decoder) error {
	if _, err := d.Token(); err != nil {
		return err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		switch key {
		case "otherData":
			err = d.Decode(&t.Other)
		case "traceEvents":
			err = t.readEvents(d)
		default:
			err = d.Decode(&json.RawMessage{})
		}
		if err != nil {
			return err
		}
	}
	_, err := d.Token()
	return endless(err)
}

func (t *traced) readEvents(d *json.Decoder) error {
	if _, err := d.Token(); err != nil {
		return err
	}
	for d.More() {
		var e tracedEvent
		if err := d.Decode(&e); err != nil {
			return endless(err)
		}
		if e.Phase != "M" && e.Phase != "X" {
			continue
		}
		if len(t.Events) == mostEvents {
			return errs.New(errs.Usage, "too many events")
		}
		t.Events = append(t.Events, e)
	}
	_, err := d.Token()
	return endless(err)
}

// endless is one error for all ways in which a file lacks its end.
func endless(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// timeline draws a part of a run from its middle, where it is in its stride, and how busy each lane
// is over all of it.
func timeline(s *Source) section {
	out := section{Title: "Timeline: " + s.Name}
	names, order := map[int]string{}, map[int]int{}
	var spans []tracedEvent
	for _, e := range s.timeline.Events {
		switch {
		case e.Phase == "M" && e.Name == "thread_name":
			names[e.Lane] = e.Args.Name
		case e.Phase == "M" && e.Name == "thread_sort_index":
			order[e.Lane] = e.Args.Order
		case e.Phase == "X" && e.Dur > 0:
			spans = append(spans, e)
		}
	}
	if len(spans) == 0 {
		return section{}
	}
	slices.SortStableFunc(spans, func(a, b tracedEvent) int {
		return cmp.Compare(a.Start, b.Start)
	})
	end := 0.0
	for _, e := range spans {
		end = max(end, e.Start+e.Dur)
	}
	lanes := []int{}
	for l := range names {
		lanes = append(lanes, l)
	}
	slices.SortFunc(lanes, func(a, b int) int {
		return cmp.Or(cmp.Compare(order[a], order[b]), cmp.Compare(a, b))
	})
	first := max(len(spans)/2-mostSpans/2, 0)
	shown := spans[first:min(first+mostSpans, len(spans))]
	from := shown[0].Start
	f := figure{Kind: kindLanes, Title: "When each stage works", X: axis{Label: "ms"}, Note: fmt.Sprintf(
		"%d of %d spans, from %s ms after the beginning.", len(shown), len(spans), decimal(from/1e3))}
	busy := figure{Kind: kindSpans, Title: "Busy share of each lane", X: axis{Label: "share of the time",
		Share: true}, Note: "From its first span to the end of the run."}
	for _, l := range lanes {
		b := bar{Name: names[l]}
		for _, e := range shown {
			if e.Lane == l {
				track, _, _ := strings.Cut(names[l], " (")
				b.Spans = append(b.Spans, lapse{e.what(), track, (e.Start - from) / 1e3,
					(e.Start + e.Dur - from) / 1e3})
			}
		}
		if len(b.Spans) > 0 {
			f.Bars = append(f.Bars, b)
		}
		if share := busyShare(spans, l, end); share > 0 {
			busy.Bars = append(busy.Bars, bar{Name: names[l], Value: share, Lo: share, Hi: share})
		}
	}
	out.Figures = []figure{f, busy}
	if s.timeline.Other.Clock == "virtual" {
		out.Note = "Modelled: the virtual clock gave the times."
	}
	return out
}

// what tells a span from others of its lane.
func (e *tracedEvent) what() string {
	text := e.Name
	if e.Args.Batch != nil {
		text += fmt.Sprintf(", mini-batch %d", *e.Args.Batch)
	}
	if e.Args.Pass != "" {
		text += " of " + e.Args.Pass
	}
	return text
}

// busyShare is the share of the time in which a lane has a span. spans are in their order.
func busyShare(spans []tracedEvent, lane int, end float64) float64 {
	sum, first, covered := 0.0, -1.0, 0.0
	for _, e := range spans {
		if e.Lane != lane {
			continue
		}
		if first < 0 {
			first, covered = e.Start, e.Start
		}
		if to := e.Start + e.Dur; to > covered {
			sum += to - max(covered, e.Start)
			covered = to
		}
	}
	if first < 0 || end <= first {
		return 0
	}
	return sum / (end - first)
}
