// Package htmlreport makes one HTML page of files of results: figures that a person looks at, with
// their values in tables. The page needs no network and nothing beside it. Its drawings are made in
// the browser by Observable Plot, which tools/plotbundle packs; without scripts the tables remain.
package htmlreport

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/ui"
)

// section is a part of the page.
type section struct {
	Title, Note string
	Figures     []figure
	Tables      []table
}

// Files of the page.
var (
	//go:embed assets/plot.js
	plotScript string
	//go:embed assets/page.js
	pageScript string
	//go:embed assets/page.css
	pageStyle string
	//go:embed assets/page.html
	pageText string
)

var pageTemplate = template.Must(template.New("report").Parse(pageText))

// shown is a figure as the template has it.
type shown struct {
	ID     int
	Title  string
	Note   string
	Values table
}

type shownSection struct {
	ID          int
	Title, Note string
	Figures     []shown
	Tables      []table
}

type shownSource struct {
	Name, Verb, Dataset, Command, Time, State string
}

// Write makes the page of sources. version is the program's.
func Write(w io.Writer, sources []*Source, version string) error {
	sections, err := digest(sources)
	if err != nil {
		return err
	}
	if len(sections) == 0 {
		return errs.New(errs.Usage,
			"the files hold no results: no event of a run that has got so far; give files that {results} has written")
	}
	var figures []figure
	page := struct {
		Title, Version, Policy string
		Sources                []shownSource
		Sections               []shownSection
		Style                  template.CSS
		Scripts                []template.JS
	}{Title: title(sources), Version: version, Style: template.CSS(pageStyle)}
	for _, s := range sources {
		state := "whole"
		switch {
		case s.Ended && !s.Whole:
			state = "not whole: " + s.Reason
		case !s.Ended:
			state = "not ended" + strings.TrimSuffix(": "+s.Reason, ": ")
		}
		page.Sources = append(page.Sources, shownSource{s.Name, s.Verb, s.Dataset,
			strings.Join(s.Command, " "), s.Time, state})
	}
	for i, x := range sections {
		to := shownSection{ID: i, Title: x.Title, Note: strings.TrimSpace(x.Note), Tables: x.Tables}
		for _, f := range x.Figures {
			f.rescale()
			f.Hues = f.hues()
			to.Figures = append(to.Figures, shown{len(figures), f.Title, f.Note, f.values()})
			figures = append(figures, f)
		}
		page.Sections = append(page.Sections, to)
	}
	// Marshal escapes <, > and &, so that no text in the data ends the script.
	data, err := json.Marshal(figures)
	if err != nil {
		return err
	}
	for _, script := range []string{plotScript, "const figures = " + string(data) + ";", pageScript} {
		page.Scripts = append(page.Scripts, template.JS(ui.Lines(script)))
	}
	page.Policy = policy(page.Scripts)
	var b bytes.Buffer
	if err := pageTemplate.Execute(&b, page); err != nil {
		return err
	}
	// The template escapes what HTML acts on; what a terminal acts on, should the page be printed
	// there, goes as well.
	_, err = io.WriteString(w, ui.Lines(b.String()))
	return err
}

// policy is the page's Content-Security-Policy: nothing comes from elsewhere or goes anywhere, and
// no script runs but the page's own. Plot writes attributes of style.
func policy(scripts []template.JS) string {
	own := ""
	for _, s := range scripts {
		sum := sha256.Sum256([]byte(s))
		own += " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	return "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; " +
		"script-src" + own
}

// digest makes the sections of all sources.
func digest(sources []*Source) (all []section, err error) {
	add := func(s section, err error) error {
		s.Figures = slices.DeleteFunc(s.Figures, func(f figure) bool { return f.empty() })
		if err == nil && len(s.Figures)+len(s.Tables) > 0 {
			all = append(all, s)
		}
		return err
	}
	if err := add(train(sources)); err != nil {
		return nil, err
	}
	for _, s := range sources {
		switch {
		case s.has("epoch") || s.Verb == "train":
		case s.Verb == verbPlan:
			err = add(plans(s))
		case s.has("compare"):
			err = add(compare(s))
		case s.Verb == "bench io":
			err = add(benchIO(s))
		default:
			err = add(other(s), nil)
		}
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

func title(sources []*Source) string {
	if len(sources) == 1 {
		return fmt.Sprintf("heliosctl %s: %s", sources[0].Verb, sources[0].Name)
	}
	return fmt.Sprintf("heliosctl: %d results", len(sources))
}
