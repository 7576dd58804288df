package main

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/graph/partition"
	"helios/sched/plan"
	"helios/sched/tiers"
)

const repo = "../.."

// document is a Markdown file: its text, and the pieces of code in it.
type document struct {
	path string // from the repository's root
	text string
	code []string // spans and lines of blocks; continued lines are one
}

var (
	fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	block = regexp.MustCompile(`(?m)^    \S.*$`)
	span  = regexp.MustCompile("`([^`\n]+(?:\n[^`\n]+)?)`")
	link  = regexp.MustCompile(`\]\(([^)#\s]+)(?:#[^)]*)?\)`)
)

func documents(t *testing.T) (docs []document) {
	t.Helper()
	add := func(path string) {
		b, err := os.ReadFile(filepath.Join(repo, path))
		require.NoError(t, err)
		d := document{path: path, text: string(b)}
		rest := fence.ReplaceAllStringFunc(d.text, func(f string) string {
			if m := fence.FindStringSubmatch(f); m[1] != "text" {
				d.code = append(d.code, strings.Split(strings.ReplaceAll(m[2], "\\\n", " "),
					"\n")...)
			}
			return ""
		})
		rest = block.ReplaceAllStringFunc(rest, func(l string) string {
			d.code = append(d.code, strings.TrimSpace(l))
			return ""
		})
		for _, m := range span.FindAllStringSubmatch(rest, -1) {
			d.code = append(d.code, strings.ReplaceAll(m[1], "\n", " "))
		}
		docs = append(docs, d)
	}
	for _, p := range []string{"README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CONTRIBUTING.md",
		"CHANGELOG.md", "examples/README.md"} {
		add(p)
	}
	require.NoError(t, filepath.WalkDir(filepath.Join(repo, "docs"), func(p string, e fs.DirEntry,
		err error) error {
		if err == nil && strings.HasSuffix(p, ".md") {
			rel, _ := filepath.Rel(repo, p)
			add(rel)
		}
		return err
	}))
	return docs
}

// Links lead to files, and paths of the repository that documents name exist.
func TestDocumentsNamePathsThatExist(t *testing.T) {
	path := regexp.MustCompile(
		`^(?:\./)?((?:\.ci|cmd|sched|gnn|cache|graph|dataset|gpuio|nvme|cuda|internal|tools|docs|examples)/[\w./*-]+)$`)
	for _, d := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(d.text, -1) {
			if !strings.Contains(m[1], ":") {
				_, err := os.Stat(filepath.Join(repo, filepath.Dir(d.path), m[1]))
				require.NoError(t, err, "link in %s", d.path)
			}
		}
		for _, c := range d.code {
			for _, token := range strings.Fields(c) {
				if m := path.FindStringSubmatch(strings.TrimSuffix(strings.Trim(token, ",;:()"),
					"/...")); m != nil {
					found, err := filepath.Glob(filepath.Join(repo, m[1]))
					require.NoError(t, err)
					require.NotEmpty(t, found, "%s names %s", d.path, m[1])
				}
			}
		}
	}
}

// anchorsOf are the anchors that GitHub gives the headings of a document.
func anchorsOf(text string) map[string]bool {
	anchors := map[string]bool{}
	mark := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := mark.ReplaceAllString(strings.ToLower(m[1]), "")
		anchors[strings.ReplaceAll(name, " ", "-")] = true
	}
	return anchors
}

// Links into a document lead to one of its headings.
func TestDocumentsLinkToHeadings(t *testing.T) {
	docs, links := documents(t), 0
	anchors := map[string]map[string]bool{}
	for _, d := range docs {
		anchors[d.path] = anchorsOf(d.text)
	}
	anchored := regexp.MustCompile(`\]\(([^)#\s:]*)#([^)\s]+)\)`)
	for _, d := range docs {
		for _, m := range anchored.FindAllStringSubmatch(d.text, -1) {
			to := d.path
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(d.path), m[1])
			}
			require.True(t, anchors[to][m[2]], "%s: no heading %s#%s", d.path, to, m[2])
			links++
		}
	}
	require.Greater(t, links, 20)
}

// Identifiers of packages, tests and targets of make that documents name exist.
func TestDocumentsNameWhatExists(t *testing.T) {
	sources := map[string]*strings.Builder{} // by package name
	tests := &strings.Builder{}
	require.NoError(t, filepath.WalkDir(repo, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(p, ".go") {
			return err
		}
		b, err := os.ReadFile(p)
		if strings.HasSuffix(p, "_test.go") {
			tests.Write(b)
			return err
		}
		name := filepath.Base(filepath.Dir(p))
		if sources[name] == nil {
			sources[name] = &strings.Builder{}
		}
		sources[name].Write(b)
		return err
	}))
	makefile, err := os.ReadFile(filepath.Join(repo, "Makefile"))
	require.NoError(t, err)
	identifier := regexp.MustCompile(`^([a-z]+)\.([A-Z]\w*)(?:\(\))?$`)
	test := regexp.MustCompile(`^(?:Test|Fuzz|Benchmark|Example)[A-Z]\w*$`)
	target := regexp.MustCompile(`^(?:sudo )?make((?: [a-z][a-z-]*)*)(?: |$)`)
	for _, d := range documents(t) {
		for _, c := range d.code {
			if m := identifier.FindStringSubmatch(c); m != nil && sources[m[1]] != nil {
				found, err := regexp.MatchString(`\b`+m[2]+`\b`, sources[m[1]].String())
				require.NoError(t, err)
				require.True(t, found, "%s names %s", d.path, c)
			}
			if test.MatchString(c) {
				require.True(t, strings.Contains(tests.String(), "func "+c+"("), "%s names %s",
					d.path, c)
			}
			for _, one := range strings.Split(c, "&&") {
				if m := target.FindStringSubmatch(strings.TrimSpace(one)); m != nil {
					for _, w := range strings.Fields(m[1]) {
						require.True(t, strings.Contains(string(makefile), "\n"+w+":"),
							"%s names make %s", d.path, w)
					}
				}
			}
		}
	}
}

func flagSet(c *cli.Command) map[string]bool {
	names := map[string]bool{"help": true}
	for _, f := range c.Flags {
		for _, n := range f.Names() {
			names[n] = true
			if _, is := f.(*cli.BoolFlag); is {
				names["no-"+n] = true // switchOff
			}
		}
	}
	return names
}

// Verbs and flags that documents name are those of the program, its script and its tools.
func TestDocumentsNameVerbsAndFlags(t *testing.T) {
	app := newApp(io.Discard, io.Discard)
	all := map[string]bool{}
	var collect func(cs []*cli.Command)
	collect = func(cs []*cli.Command) {
		for _, c := range cs {
			for n := range flagSet(c) {
				all[n] = true
			}
			collect(c.Subcommands)
		}
	}
	collect(app.Commands)
	// A span that begins with a flag does not say whose it is; it may be a script's or a tool's.
	others := &strings.Builder{}
	for _, pattern := range []string{"vfio-setup.sh", "cmd/heliosctl/vfiosetup.go", "tools/*/*.py",
		"tools/*/*.go", "tools/*.sh"} {
		files, err := filepath.Glob(filepath.Join(repo, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, f := range files {
			b, err := os.ReadFile(f)
			require.NoError(t, err)
			others.Write(b)
		}
	}
	flag := regexp.MustCompile(`^--([A-Za-z][\w-]*)`)
	word := regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	separator := regexp.MustCompile(`&&|\||;| # `)
	for _, d := range documents(t) {
		if strings.HasSuffix(d.path, "gids-flags.md") {
			continue // flags of other programs
		}
		for _, c := range d.code {
			for _, one := range separator.Split(c, -1) {
				words := strings.Fields(one)
				if len(words) > 0 && app.Command(words[0]) != nil && strings.Contains(one, " --") {
					words = slices.Insert(words, 0, "heliosctl")
				}
				index := slices.IndexFunc(words,
					func(w string) bool { return strings.TrimPrefix(w, "bin/") == "heliosctl" })
				if index > 0 && strings.HasSuffix(words[index-1], "-heliosctl") {
					index = -1 // the program's path, as a flag of another
				}
				flags, anyones := all, true
				switch {
				case index >= 0 && index+1 < len(words) && word.MatchString(words[index+1]):
					cmd := app.Command(words[index+1])
					require.NotNil(t, cmd, "%s: %q: no such verb", d.path, one)
					words = words[index+2:]
					if len(cmd.Subcommands) > 0 && len(words) > 0 && word.MatchString(words[0]) {
						i := slices.IndexFunc(cmd.Subcommands,
							func(s *cli.Command) bool { return s.HasName(words[0]) })
						require.GreaterOrEqual(t, i, 0, "%s: %q: no such verb", d.path, one)
						cmd, words = cmd.Subcommands[i], words[1:]
					}
					if !cmd.SkipFlagParsing && len(cmd.Subcommands) == 0 {
						flags, anyones = flagSet(cmd), false
					}
				case len(words) == 0 || !strings.HasPrefix(words[0], "--"):
					continue // another program's
				}
				for _, w := range words {
					m := flag.FindStringSubmatch(w)
					if m == nil || flags[m[1]] {
						continue
					}
					foreign := strings.Contains(others.String(), m[0]) ||
						strings.Contains(others.String(), `"`+m[1]+`"`)
					require.True(t, anyones && foreign, "%s: %q: no flag %s", d.path, one, m[0])
				}
			}
		}
	}
}

// Tables whose first column lists a registry list all of it, and nothing else.
func TestDocumentsListRegistries(t *testing.T) {
	var formats []string
	for _, s := range newApp(io.Discard, io.Discard).Command("import").Subcommands {
		formats = append(formats, s.Name)
	}
	registries := map[string][]string{
		"`--mode`":    tiers.Catalog.Names(),
		"`--model`":   gnn.Models(),
		"format":      formats,
		"`--policy`":  plan.Policies,
		"`--sampler`": graph.MethodNames(),
		"stack":       gpuio.StackNames(nil),
		"pipeline":    plan.PipelineNames(nil),
		"rung":        gpuio.Rungs(),
		"partitioner": partition.MethodNames(),
	}
	seen := map[string]int{}
	name := regexp.MustCompile("`([a-z0-9-]+)`")
	for _, d := range documents(t) {
		lines := strings.Split(d.text, "\n")
		for i, l := range lines {
			if i+1 == len(lines) || !strings.HasPrefix(l, "|") || !strings.HasPrefix(lines[i+1],
				"|---") {
				continue
			}
			head := strings.TrimSpace(strings.Split(l, "|")[1])
			want, ok := registries[head]
			if !ok {
				continue
			}
			seen[head]++
			var got []string
			for _, row := range lines[i+2:] {
				if !strings.HasPrefix(row, "|") {
					break
				}
				for _, m := range name.FindAllStringSubmatch(strings.Split(row, "|")[1], -1) {
					got = append(got, m[1])
				}
			}
			require.ElementsMatch(t, want, got, "%s: the table of %s", d.path, head)
		}
	}
	for head := range registries {
		require.Positive(t, seen[head], "no document has a table of %s", head)
	}
}
