package htmlreport

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"helios/internal/units"
)

// mostColumns bounds a table of events that no figure is made for.
const mostColumns = 12

// other tells the events of a verb that has no figures of its own, a table for each event.
func other(s *Source) section {
	out := section{Title: s.Verb + ": " + s.Name}
	var events []string
	for _, l := range s.lines {
		if l.event != "begin" && l.event != "end" && !slices.Contains(events, l.event) {
			events = append(events, l.event)
		}
	}
	for _, event := range events {
		t := table{Title: event}
		if event == "row" {
			t.Title = "Measurements"
		}
		column := map[string]int{}
		for _, l := range s.lines {
			if l.event != event {
				continue
			}
			var row []string
			for _, f := range fields(l.raw) {
				i, ok := column[f.name]
				if !ok {
					if i = len(t.Head); i == mostColumns {
						continue
					}
					column[f.name] = i
					t.Head = append(t.Head, f.name)
				}
				for len(row) <= i {
					row = append(row, "")
				}
				row[i] = f.text
			}
			t.Rows = append(t.Rows, row)
		}
		for i := range t.Rows {
			for len(t.Rows[i]) < len(t.Head) {
				t.Rows[i] = append(t.Rows[i], "")
			}
		}
		if len(t.Head) > 0 {
			out.Tables = append(out.Tables, t)
		}
	}
	return out
}

type field struct{ name, text string }

// fields are the plain values of an object, in its order.
func fields(raw json.RawMessage) (all []field) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if _, err := d.Token(); err != nil {
		return nil
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return all
		}
		var v any
		if err := d.Decode(&v); err != nil {
			return all
		}
		name, _ := key.(string)
		if name == "event" || name == "kind" {
			continue
		}
		switch v := v.(type) {
		case string:
			all = append(all, field{name, v})
		case bool:
			all = append(all, field{name, strconv.FormatBool(v)})
		case json.Number:
			f, err := v.Float64()
			if err == nil {
				all = append(all, field{name, decimal(f)})
			}
		}
	}
	return all
}

// Texts of numbers for people.

func number(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

func decimal(v float64) string {
	if v == float64(int64(v)) && v < 1e9 && v > -1e9 {
		return number(v)
	}
	if v >= 1e4 && v < 1e9 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

func size(bytes float64) string {
	if bytes == 0 {
		return "–"
	}
	return units.FormatBytes(int64(bytes))
}

// short is the beginning of a checksum.
func short(s string) string {
	if len(s) > 12 {
		return s[:12] + "…"
	}
	return s
}
