package htmlreport

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/outfile"
)

// Source is a file of results: the JSON lines that a verb writes with its option results.
type Source struct {
	Name    string // of the file, for people
	Verb    string
	Command []string
	Dataset string
	Time    string // of its beginning, RFC 3339
	// Ended: the file has its last line, which says that the run was whole, or why it was not.
	Ended, Whole bool
	Reason       string

	plain     bool        // the output of --json, which has neither beginning nor end
	arguments []string    // of the command, as they were settled; older files have none
	settings  trainResult // what the beginning says of a result
	lines     []line
}

// line is an event of a source.
type line struct {
	event string
	raw   json.RawMessage
}

// Read reads the results in r; name is the file's.
func Read(r io.Reader, name string) (*Source, error) {
	s := &Source{Name: name}
	bad := func(n int, why string) error {
		return errs.New(errs.Usage,
			"%s, line %d: %s; give a file that {results} has written, or the output of {json}",
			name, n, why)
	}
	b := outfile.NewReader(r)
	for n := 1; ; n++ {
		text, err := b.Next()
		if err == io.EOF && len(text) == 0 {
			if len(s.lines) == 0 {
				return nil, bad(n, "it is empty")
			}
			s.settle()
			return s, nil
		}
		if errs.ClassOf(err) == errs.Usage {
			return nil, bad(n, err.Error())
		}
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("%s, line %d: %w", name, n, err)
		}
		text = bytes.TrimSpace(text)
		if len(text) == 0 {
			continue
		}
		var head struct {
			Event string `json:"event"`
			Kind  string `json:"kind"`
		}
		if json.Unmarshal(text, &head) != nil || text[0] != '{' {
			if err == io.EOF && len(s.lines) > 0 { // a run that was killed in the middle of a line
				s.settle()
				s.Ended, s.Whole, s.Reason = false, false, "its last line is cut off"
				return s, nil
			}
			return nil, bad(n, "no JSON object")
		}
		if head.Event == "" {
			if head.Event = head.Kind; head.Event == "" {
				head.Event = "row" // as rows of benchmarks were, without an event
			}
		}
		if werr := s.add(head.Event, text); werr != nil {
			return nil, bad(n, werr.Error())
		}
	}
}

// settle finds out what the output of --json does not say: the verb, by its events, and whether the
// last of them is there.
func (s *Source) settle() {
	if s.plain = !s.has("begin"); !s.plain || s.Verb != "" {
		return
	}
	for _, k := range [][3]string{{"epoch", "train", "result"}, {"seed", "train", "result"},
		{"run", "compare", "compare"}, {"compare", "compare", "compare"},
		{verbPlan, verbPlan, verbPlan}, {"point", verbPlan, "sweep"}, {"result", "eval", "result"},
		{"row", "bench io", "row"}} {
		if s.has(k[0]) {
			s.Verb, s.Ended = k[1], s.has(k[2])
			s.Whole = s.Ended
			return
		}
	}
	s.Ended, s.Whole = true, true
}

// state says for people how far the run came.
func (s *Source) state() string {
	switch {
	case s.Ended && !s.Whole:
		return "not whole: " + s.Reason
	case !s.Ended:
		return "not ended" + strings.TrimSuffix(": "+s.Reason, ": ")
	case s.plain && s.has("row"):
		return "as far as it goes: plain events mark no end"
	}
	return "whole"
}

// add takes a line over.
func (s *Source) add(event string, text []byte) error {
	switch event {
	case "begin":
		var b struct {
			Verb      string   `json:"verb"`
			Command   []string `json:"command"`
			Arguments []string `json:"arguments"`
			Name      string   `json:"dataset_name"`
			Time      string   `json:"time"`
			Settings  struct {
				Mode  string `json:"mode"`
				Model string `json:"model"`
				Seed  uint64 `json:"seed"`
			} `json:"settings"`
		}
		if err := json.Unmarshal(text, &b); err != nil {
			return err
		}
		s.Verb, s.Command, s.Dataset, s.Time = b.Verb, b.Command, b.Name, b.Time
		s.arguments = b.Arguments
		s.settings.Mode, s.settings.Model = b.Settings.Mode, b.Settings.Model
		s.settings.Seed = b.Settings.Seed
	case "resume": // the end that it comes behind is not the last; the flags are those of it all
		var b struct {
			Arguments []string `json:"arguments"`
		}
		if err := json.Unmarshal(text, &b); err != nil {
			return err
		}
		s.Ended, s.Whole, s.Reason, s.arguments = false, false, "", b.Arguments
	case "end":
		var e struct {
			Whole  bool   `json:"whole"`
			Reason string `json:"reason"`
		}
		if err := json.Unmarshal(text, &e); err != nil {
			return err
		}
		s.Ended, s.Whole, s.Reason = true, e.Whole, e.Reason
	}
	s.lines = append(s.lines, line{event, append(json.RawMessage(nil), text...)})
	return nil
}

// each decodes the events of a name into values of T.
func each[T any](s *Source, event string, f func(T)) error {
	for _, l := range s.lines {
		if l.event != event {
			continue
		}
		var v T
		if err := json.Unmarshal(l.raw, &v); err != nil {
			return errs.New(errs.Usage,
				"%s: an event %q is not what this version of heliosctl writes: %w", s.Name,
				event, err)
		}
		f(v)
	}
	return nil
}

func (s *Source) has(event string) bool {
	for _, l := range s.lines {
		if l.event == event {
			return true
		}
	}
	return false
}

// aside are the options of a run's outputs, of its progress, and of the way its processes
// find each other: none of them makes it another experiment.
var aside = []string{"results", "live", "log-format", "quiet", "json", "wide", "overwrite",
	"checkpoint", "checkpoint-every", "resume", "timeline", "config", "metrics", "mpi",
	"rank-timeout", "rank-secret-file", "rank-insecure", "rank-listen", "save-profile", "serve",
	"explain"}

// neutral reports whether an option leaves a run in its experiment.
func neutral(key string) bool {
	return key == "seed" || key == "state" || slices.Contains(aside, key)
}

// options are the arguments of a source's command that tell runs apart.
func (s *Source) options() (all []string) {
	if s.plain { // nobody knows: it is like no other
		return []string{s.Name}
	}
	words := s.Command
	if len(s.arguments) > 0 { // each with its value, those of a configuration file among them
		words = append([]string{"heliosctl"}, s.arguments...)
	}
	verb := 1 + len(strings.Fields(s.Verb))
	for i := 0; i < len(words); i++ {
		w := words[i]
		name, isFlag := strings.CutPrefix(w, "--")
		if isFlag && name == "" {
			continue
		}
		if !isFlag {
			if i >= verb {
				all = append(all, w)
			}
			continue
		}
		key, value, given := strings.Cut(name, "=")
		typed := len(s.arguments) == 0 && i+1 < len(words) // where a value may be a word of its own
		if !given && typed && !strings.HasPrefix(words[i+1], "--") {
			value, given = words[i+1], true
			i++
		}
		if neutral(key) {
			continue
		}
		if given {
			key += " " + value
		}
		all = append(all, key)
	}
	return all
}
