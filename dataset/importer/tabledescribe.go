package importer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"helios/dataset/columns"
	"helios/dataset/edges"
	tables "helios/dataset/table"
	"helios/internal/errs"
)

// Draft is a first description of tables, as YAML.
type Draft string

func (d Draft) String() string { return string(d) }

// draftRows are the rows that show which table a column refers to.
const draftRows = 1 << 17

// draftTable is a table that is described.
type draftTable struct {
	name   string // of its type or relation
	file   string
	src    *tables.Source
	looks  []*columns.Profile
	values []map[string]bool // of the first rows, by column; nil: no names
	key    int               // column whose cells name the rows; -1: none
	refers []int             // by column: the table whose rows it names, or -1
	node   bool
}

// describeTables drafts a description of tables: a table is one of nodes if another one names its
// rows, and one of edges if two of its columns name rows.
func describeTables(ctx context.Context, o *TablesOptions) (Draft, error) {
	var all []*draftTable
	for _, f := range list(o.Describe) {
		t, err := o.look(ctx, f)
		if err != nil {
			return "", err
		}
		all = append(all, t)
	}
	for i, t := range all { // a short table of edges may have sources that are all different
		if t.key < 0 || referred(all, i, t.key) < 0 {
			continue
		}
		for c := range t.values {
			if c != t.key && t.key >= 0 && referred(all, i, c) >= 0 {
				t.key = -1
			}
		}
	}
	for i, t := range all {
		for c := range t.values {
			to := referred(all, i, c)
			if t.refers = append(t.refers, to); to >= 0 {
				all[to].node = true
			}
		}
	}
	d := &draft{all: all}
	for _, t := range all {
		if t.node || t.ends() == nil {
			d.nodes(t, o.NA)
		} else {
			d.edges(t)
		}
	}
	if d.nodeText.Len() == 0 || d.edgeText.Len() == 0 {
		return "", errs.New(errs.Usage,
			"%s: no table of nodes whose rows two columns of another table name; name all tables in {describe}, or write the description by hand",
			o.Describe)
	}
	return Draft("# Drafted from the first rows; check types, ends and transforms, and name the labels.\nnodes:\n" +
		d.nodeText.String() + "edges:\n" + d.edgeText.String()), nil
}

var typeEnding = regexp.MustCompile(`(\.[A-Za-z0-9]+)+$|[*?\[].*$`)

// look reads a table.
func (o *TablesOptions) look(ctx context.Context, file string) (*draftTable, error) {
	src, err := tables.Open([]string{file}, tables.Options{Header: o.Header,
		Memory: edges.Budget(o.Memory), Progress: o.Progress})
	if err != nil {
		return nil, err
	}
	t := &draftTable{file: file, src: src, key: -1,
		name: typeEnding.ReplaceAllString(filepath.Base(filepath.Clean(file)), "")}
	t.name = cmp.Or(strings.Trim(t.name, "-_."), "table")
	var names []string
	for _, f := range src.Fields {
		names = append(names, f.Name)
	}
	p, err := profile(ctx, src, list(o.NA), names, true, nil)
	if err != nil {
		return nil, err
	}
	if t.looks = p.Profiles; t.looks[0].Rows == 0 {
		return nil, errs.New(errs.Usage, "%s has no rows", file)
	}
	rows := 0
	err = tables.Each(ctx, src, func(b *tables.Batch) (*tables.Batch, error) { return b, nil },
		func(b *tables.Batch) error { return t.take(b, &rows) })
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if t.values == nil {
		t.values = make([]map[string]bool, len(src.Fields))
	}
	for c, v := range t.values {
		if t.key < 0 && len(v) == rows && t.looks[c].Missing == 0 {
			t.key = c
		}
	}
	return t, err
}

// take takes the first rows' names.
func (t *draftTable) take(b *tables.Batch, rows *int) error {
	if t.values == nil {
		for _, c := range b.Columns {
			var v map[string]bool
			if c.Kind == tables.Text || c.Kind == tables.Int || c.Kind == tables.Uint {
				v = map[string]bool{}
			}
			t.values = append(t.values, v)
		}
	}
	var key []byte
	for c := range b.Columns {
		if t.values[c] == nil {
			continue
		}
		for i := range b.Rows {
			if b.Columns[c].IsMissing(i) {
				continue
			}
			var err error
			if key, err = columns.AppendText(key[:0], &b.Columns[c], i); err != nil {
				return b.Bad(i, b.Columns[c].Name, "%w", err)
			}
			t.values[c][string(key)] = true
		}
	}
	if *rows += b.Rows; *rows >= draftRows {
		return io.EOF
	}
	return nil
}

// referred returns the table whose rows a column names, or -1: of several, the one whose name or
// key the column's name has, or else the smallest.
func referred(all []*draftTable, table, column int) int {
	v := all[table].values[column]
	best, least := -1, 0
	for i, t := range all {
		if i == table || t.key < 0 || len(v) == 0 {
			continue
		}
		known := 0
		for name := range v {
			if t.values[t.key][name] {
				known++
			}
		}
		if 10*known < 9*len(v) {
			continue
		}
		size := len(t.values[t.key])
		name := strings.ToLower(all[table].looks[column].Column)
		key := strings.ToLower(t.looks[t.key].Column)
		if stem := strings.TrimSuffix(strings.ToLower(t.name), "s"); name == key || strings.Contains(name, stem) {
			size = 0
		}
		if best < 0 || size < least {
			best, least = i, size
		}
	}
	return best
}

// ends are the first two columns that name rows; nil: there are none.
func (t *draftTable) ends() (found []int) {
	for c, to := range t.refers {
		if to >= 0 && len(found) < 2 {
			found = append(found, c)
		}
	}
	if len(found) < 2 {
		return nil
	}
	return found
}

// draft is a description that is written.
type draft struct {
	all                []*draftTable
	nodeText, edgeText strings.Builder
}

var plainYAML = regexp.MustCompile(`^[A-Za-z_./][A-Za-z0-9_./*-]*$`)

// yamlText writes a text so that YAML reads it as that.
func yamlText(s string) string {
	if plainYAML.MatchString(s) && !slices.Contains([]string{"true", "false", "null", "yes", "no",
		"on", "off", "y", "n"}, strings.ToLower(s)) {
		return s
	}
	text, _ := json.Marshal(s) // of a text: no error
	return string(text)
}

func (d *draft) nodes(t *draftTable, na string) {
	w := &d.nodeText
	fmt.Fprintf(w, "- node_type: %s\n  files: %s\n", yamlText(t.name), yamlText(t.file))
	if t.key >= 0 {
		fmt.Fprintf(w, "  node_id_col: %s\n", yamlText(t.looks[t.key].Column))
	}
	if na != "" {
		var all []string
		for _, text := range list(na) {
			all = append(all, yamlText(text))
		}
		fmt.Fprintf(w, "  na: [%s]\n", strings.Join(all, ", "))
	}
	var features, left []string
	for c, p := range t.looks {
		if c == t.key {
			continue
		}
		s, why := p.Suggest()
		if why != nil {
			left = append(left, fmt.Sprintf("  # %s: %v\n", yamlText(p.Column), why))
			continue
		}
		f := fmt.Sprintf("  - {feature_col: %s, transform: %s", yamlText(p.Column), s.Transform)
		if s.Unknown != "" {
			f += ", unknown: " + s.Unknown
		}
		if s.Size > 0 {
			f += fmt.Sprintf(", size: %d", s.Size)
		}
		if p.Missing > 0 && s.Transform == columns.OneHot {
			f += ", missing: " + columns.Category
		} else if p.Missing > 0 {
			f += ", missing: " + columns.Mean
		}
		features = append(features, f+"}\n")
	}
	if len(features) > 0 {
		fmt.Fprintf(w, "  features:\n%s", strings.Join(features, ""))
	}
	w.WriteString(strings.Join(left, ""))
	w.WriteString("  # labels: [{label_col: COLUMN, task_type: classification}]\n")
}

func (d *draft) edges(t *draftTable) {
	w, ends := &d.edgeText, t.ends()
	fmt.Fprintf(w, "- relation: [%s, %s, %s]\n  files: %s\n  source_id_col: %s\n  dest_id_col: %s\n",
		yamlText(d.all[t.refers[ends[0]]].name), yamlText(t.name),
		yamlText(d.all[t.refers[ends[1]]].name), yamlText(t.file),
		yamlText(t.looks[ends[0]].Column), yamlText(t.looks[ends[1]].Column))
	fmt.Fprintf(w, "  # reverse: rev_%s\n", t.name)
	for c, p := range t.looks {
		if !slices.Contains(ends, c) {
			fmt.Fprintf(w, "  # %s: edges have no features\n", yamlText(p.Column))
		}
	}
}
