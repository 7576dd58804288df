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
	"errors"
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
	//go:embed assets/live.js
	liveScript string
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

// view holds the values of the template.
type view struct {
	Title, Version, Policy string
	Sources                []shownSource
	Sections               []shownSection
	Style                  template.CSS
	Scripts                []template.JS
	// Of a run that is under way.
	Live  bool
	State string
	Now   table

	figures []figure
}

// newView digests sources.
func newView(sources []*Source, version string) (*view, error) {
	sections, err := digest(sources)
	if err != nil {
		return nil, err
	}
	v := &view{Title: title(sources), Version: version, Style: template.CSS(pageStyle),
		figures: []figure{}}
	for _, s := range sources {
		v.Sources = append(v.Sources, shownSource{s.Name, s.Verb, s.Dataset,
			strings.Join(s.Command, " "), s.Time, s.state()})
	}
	for i, x := range sections {
		to := shownSection{ID: i, Title: x.Title, Note: strings.TrimSpace(x.Note), Tables: x.Tables}
		for _, f := range x.Figures {
			f.rescale()
			f.Hues = f.hues()
			to.Figures = append(to.Figures, shown{len(v.figures), f.Title, f.Note, f.values()})
			v.figures = append(v.figures, f)
		}
		v.Sections = append(v.Sections, to)
	}
	return v, nil
}

// Write makes the page of sources. version is the program's.
func Write(w io.Writer, sources []*Source, version string) error {
	v, err := newView(sources, version)
	if err != nil {
		return err
	}
	if len(v.Sections) == 0 {
		return errs.New(errs.Usage,
			"the files hold no results: no event of a run that has got so far; give files that {results} has written")
	}
	return v.write(w)
}

// write writes the page.
func (v *view) write(w io.Writer) error {
	// Marshal escapes <, > and &, so that no text in the data ends the script.
	data, err := json.Marshal(v.figures)
	if err != nil {
		return err
	}
	scripts := []string{plotScript, "const figures = " + string(data) + ";", pageScript}
	if v.Live {
		scripts = append(scripts, liveScript)
	}
	for _, script := range scripts {
		v.Scripts = append(v.Scripts, template.JS(ui.Lines(script)))
	}
	v.Policy = policy(v.Scripts, v.Live)
	text, err := v.part("report")
	if err == nil {
		_, err = io.WriteString(w, text)
	}
	return err
}

// part is the text of a template. It escapes what HTML acts on; what a terminal acts on, should the
// page be printed there, goes as well.
func (v *view) part(name string) (string, error) {
	var b bytes.Buffer
	err := pageTemplate.ExecuteTemplate(&b, name, v)
	return ui.Lines(b.String()), err
}

// policy is the page's Content-Security-Policy: nothing comes from elsewhere or goes anywhere, and
// no script runs but the page's own. Plot writes attributes of style. A live page asks its run.
func policy(scripts []template.JS, live bool) string {
	own := ""
	for _, s := range scripts {
		sum := sha256.Sum256([]byte(s))
		own += " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	if live {
		own += "; connect-src 'self'"
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
	how, tested, err := train(sources)
	if err = errors.Join(err, add(how, nil), add(tested, nil)); err != nil {
		return nil, err
	}
	for _, s := range together(sources) {
		switch {
		case s.Verb == "train":
		case s.Verb == "eval":
			err = add(evaluation(s))
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
		return strings.Join(strings.Fields("heliosctl "+sources[0].Verb), " ") + ": " +
			sources[0].Name
	}
	return fmt.Sprintf("heliosctl: %d results", len(sources))
}
