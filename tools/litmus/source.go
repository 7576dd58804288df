package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// operation is one access, fence or barrier of the source, as the kernels' vocabulary
// (cuda/kernels/device.h) or Go's sync/atomic names it.
type operation struct {
	kind    string // ld, st, fence, bar, or the name of a read-modify-write: add, cas, …
	order   string // weak, relaxed, acquire, release, acq_rel
	scope   string // gpu, sys; none for weak ones
	name    string // of what is accessed: a member or a variable
	dropped bool   // a read-modify-write whose result nobody uses
	at      string // file:line
}

func (o operation) String() string {
	s := o.kind
	if o.order != "" {
		s += "." + o.order
	}
	if o.scope != "" {
		s += "." + o.scope
	}
	return strings.TrimSpace(s + " " + o.name)
}

// source holds what is tagged in the kernels and in the host's side of the protocol.
type source struct {
	places map[string][]operation
	files  map[string]string // of a place
}

// tag is a comment that ends with "litmus: place, place". At the end of a line of code it means
// this line; on a line of its own the block or the statement that follows. Lines of one place are
// taken together, in their order.
var (
	tagText = regexp.MustCompile(`litmus: ([a-z0-9-]+(?:, [a-z0-9-]+)*)$`)
	planted = regexp.MustCompile(`^#(ifdef|ifndef) (HX_PLANT_\w+)`)
	defined = regexp.MustCompile(`^(?:template <[^>]*> )?HX_DEVICE .*?\b([a-z_0-9]+)\(`)

	deviceCall = regexp.MustCompile(`\bdev::(ld16_global|ld16|st16|ld|st|fence|ring|syncwarp|` +
		`syncthreads|add|or|and|min|max|exch|cas)(?:_(relaxed|acquire|release))?(?:_(gpu|sys))?` +
		`(?:<(?:dev::)?(relaxed|acquire|release|acq_rel)>)?\(`)
	// The vocabulary's own header names it without its namespace.
	ownCall  = regexp.MustCompile(strings.Replace(deviceCall.String(), `\bdev::`, `\b`, 1))
	hostCall = regexp.MustCompile(`\b(?:atomic\.(Load|Store|Add|And|Or|Swap|CompareAndSwap)` +
		`(?:Uint32|Uint64|Int32|Int64)|nvme\.(StoreDoorbell))\(`)
	otherCall = regexp.MustCompile(`(dev::)?\b([a-z_0-9]+)(?:<[^<>()]*>)?\(`)
	lastName  = regexp.MustCompile(`([A-Za-z_][A-Za-z0-9_]*)$`)
	atCall    = regexp.MustCompile(`^(?:dev::)?at(?:<[^>]*>|\[[^\]]*\])\((.*)\)$`)
)

// line is a line of source without comments and planted mistakes.
type line struct {
	code string
	tags []string
	at   string
}

type function struct{ lines []line }

type reader struct {
	files     map[string][]line
	functions map[string]map[string]function // by name, by file
}

// readSource reads what is tagged. edit, if not nil, changes a file's text before; plant is a
// mistake that is built in (HX_PLANT_…), or none: both are for tests of the check itself.
func readSource(root, plant string, edit func(file, text string) string) (*source, error) {
	r := &reader{files: map[string][]line{}, functions: map[string]map[string]function{}}
	var names []string
	for _, pattern := range []string{"cuda/kernels/*.h", "cuda/kernels/*.cu", "gpuio/*.go",
		"cuda/driver/*.go"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		names = append(names, found...)
	}
	for _, f := range names {
		base := filepath.Base(f)
		if base == "ptx.h" || strings.HasSuffix(f, "_test.go") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		rel, err := filepath.Rel(root, f)
		if err != nil {
			return nil, err
		}
		rel = filepath.ToSlash(rel)
		plain := string(text)
		if edit != nil {
			plain = edit(rel, plain)
		}
		r.files[rel] = plainLines(rel, plain, plant)
	}
	return r.source()
}

func (r *reader) source() (*source, error) {
	for _, f := range slices.Sorted(maps.Keys(r.files)) {
		r.findFunctions(f)
	}
	s := &source{places: map[string][]operation{}, files: map[string]string{}}
	for _, f := range slices.Sorted(maps.Keys(r.files)) {
		lines := r.files[f]
		for i, l := range lines {
			region := []line{l}
			if l.code == "" && len(l.tags) > 0 {
				if region = block(lines, i+1); region == nil {
					return nil, fmt.Errorf("%s: a litmus tag with no code after it", l.at)
				}
			}
			if defined.MatchString(region[0].code) { // a function's own name is no call
				region = slices.Clone(region)
				_, region[0].code, _ = strings.Cut(region[0].code, "{")
			}
			for _, tag := range l.tags {
				if old := s.files[tag]; old != "" && old != f {
					return nil, fmt.Errorf("%s: litmus tag %s is in %s, too", l.at, tag, old)
				}
				s.files[tag] = f
				s.places[tag] = append(s.places[tag], r.operations(f, region, 0)...)
			}
		}
	}
	return s, nil
}

// plainLines takes comments and the branches of planted mistakes, but for one, out of a file.
func plainLines(file, text, plant string) []line {
	var out []line
	type branch struct{ plant, keep bool }
	var open []branch
	for i, l := range strings.Split(text, "\n") {
		code, note, _ := strings.Cut(l, "//")
		p := line{code: strings.TrimSpace(code), at: fmt.Sprintf("%s:%d", file, i+1)}
		if m := tagText.FindStringSubmatch(strings.TrimSpace(note)); m != nil {
			p.tags = strings.Split(m[1], ", ")
		}
		if strings.HasPrefix(p.code, "#") {
			switch m := planted.FindStringSubmatch(p.code); {
			case m != nil:
				open = append(open, branch{true, (m[1] == "ifdef") == (m[2] == plant)})
			case strings.HasPrefix(p.code, "#if"):
				open = append(open, branch{false, true})
			case strings.HasPrefix(p.code, "#else") && len(open) > 0 && open[len(open)-1].plant:
				open[len(open)-1].keep = !open[len(open)-1].keep
			case strings.HasPrefix(p.code, "#endif") && len(open) > 0:
				open = open[:len(open)-1]
			}
			p = line{at: p.at}
		}
		for _, b := range open {
			if !b.keep {
				p = line{at: p.at}
			}
		}
		out = append(out, p)
	}
	return out
}

// block is the statement or braced block that begins at or after a line.
func block(lines []line, i int) []line {
	for i < len(lines) && lines[i].code == "" {
		i++
	}
	depth := 0
	for k := i; k < len(lines); k++ {
		depth += strings.Count(lines[k].code, "{") - strings.Count(lines[k].code, "}")
		if depth <= 0 {
			return lines[i : k+1]
		}
	}
	return nil
}

// findFunctions notes the device functions of a file, whose operations count where they are called.
func (r *reader) findFunctions(file string) {
	lines := r.files[file]
	for i, l := range lines {
		m := defined.FindStringSubmatch(l.code)
		if m == nil || !strings.Contains(l.code, "{") {
			continue
		}
		name := m[1]
		if strings.HasSuffix(file, "/device.h") {
			name = "dev::" + name
		}
		body := slices.Clone(block(lines, i))
		_, body[0].code, _ = strings.Cut(l.code, "{") // its own name is no call
		if r.functions[name] == nil {
			r.functions[name] = map[string]function{}
		}
		r.functions[name][file] = function{body}
	}
}

// callee is the function that a name means in a file.
func (r *reader) callee(file, name string) (string, function, bool) {
	all := r.functions[name]
	if f, ok := all[file]; ok {
		return file, f, true
	}
	for _, f := range slices.Sorted(maps.Keys(all)) {
		if strings.HasSuffix(f, ".h") {
			return f, all[f], true
		}
	}
	return "", function{}, false
}

// operations are those of some lines, calls included, in the order in which they are done: a call's
// arguments before it.
func (r *reader) operations(file string, lines []line, depth int) []operation {
	var out []operation
	if depth > 12 {
		return nil // nothing calls itself
	}
	for _, l := range lines {
		type found struct {
			end int
			ops []operation
		}
		var all []found
		if strings.HasSuffix(file, ".go") {
			for _, m := range hostCall.FindAllStringSubmatchIndex(l.code, -1) {
				args := arguments(l.code, m[1])
				o := hostOperation(group(l.code, m, 1), group(l.code, m, 2))
				o.name, o.at = nameOf(first(args)), l.at
				all = append(all, found{m[1] + len(args), []operation{o}})
			}
		} else {
			call := deviceCall
			if strings.HasSuffix(file, "/device.h") {
				call = ownCall
			}
			for _, m := range call.FindAllStringSubmatchIndex(l.code, -1) {
				args := arguments(l.code, m[1])
				o := deviceOperation(l.code, m)
				if o.kind != "fence" && o.kind != "bar" {
					o.name = nameOf(first(args))
				}
				o.at = l.at
				o.dropped = o.dropped && statement(l.code[:m[0]])
				all = append(all, found{m[1] + len(args), []operation{o}})
			}
			for _, m := range otherCall.FindAllStringSubmatchIndex(l.code, -1) {
				name := group(l.code, m, 1) + group(l.code, m, 2)
				if f, fn, ok := r.callee(file, name); ok {
					end := m[1] + len(arguments(l.code, m[1]))
					all = append(all, found{end, r.operations(f, fn.lines, depth+1)})
				}
			}
		}
		slices.SortStableFunc(all, func(a, b found) int { return a.end - b.end })
		for _, f := range all {
			out = append(out, f.ops...)
		}
	}
	return out
}

func group(s string, m []int, i int) string {
	if m[2*i] < 0 {
		return ""
	}
	return s[m[2*i]:m[2*i+1]]
}

// arguments is the text from behind an opening parenthesis to its closing one.
func arguments(s string, from int) string {
	depth := 1
	for i := from; i < len(s); i++ {
		switch s[i] {
		case '(':
			depth++
		case ')':
			if depth--; depth == 0 {
				return s[from:i]
			}
		}
	}
	return s[from:]
}

// first is the first of some arguments.
func first(args string) string {
	depth := 0
	for i, c := range args {
		switch c {
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case ',':
			if depth == 0 {
				return args[:i]
			}
		}
	}
	return args
}

// statement reports whether a statement begins after this text, so that its result is dropped.
func statement(before string) bool {
	before = strings.TrimSpace(before)
	return before == "" || strings.HasSuffix(before, ";") || strings.HasSuffix(before, "{") ||
		strings.HasSuffix(before, "else") || strings.HasPrefix(before, "if (") &&
		strings.HasSuffix(before, ")")
}

// nameOf is the member or variable that an address expression names: &q->Free[w] is Free, to + 16
// is to, dev::at<u32>(s->Remaining, g) is Remaining.
func nameOf(expr string) string {
	expr = strings.TrimSpace(expr)
	expr = strings.TrimPrefix(expr, "&")
	if m := atCall.FindStringSubmatch(strings.TrimSpace(expr)); m != nil {
		return nameOf(first(m[1]))
	}
	for strings.HasPrefix(expr, "(") { // a cast
		expr = strings.TrimPrefix(strings.TrimSpace(expr[len(arguments(expr, 1))+2:]), "&")
	}
	var b strings.Builder
	depth := 0
	for _, c := range expr {
		switch c {
		case '(', '[':
			depth++
		case ')', ']':
			depth--
		default:
			if depth == 0 {
				b.WriteRune(c)
			}
		}
	}
	name, _, _ := strings.Cut(b.String(), " ")
	name = strings.TrimSuffix(name, "++")
	return lastName.FindString(name)
}

func deviceOperation(code string, m []int) operation {
	kind, order, scope, rmw := group(code, m, 1), group(code, m, 2), group(code, m, 3),
		group(code, m, 4)
	switch kind {
	case "ld", "ld16", "ld16_global":
		if order == "" {
			order = "weak"
		}
		return operation{kind: "ld", order: order, scope: scope}
	case "st", "st16":
		if order == "" {
			order = "weak"
		}
		return operation{kind: "st", order: order, scope: scope}
	case "fence":
		return operation{kind: "fence", order: "acq_rel", scope: scope}
	case "ring":
		return operation{kind: "st", order: "relaxed", scope: "sys"}
	case "syncwarp", "syncthreads":
		return operation{kind: "bar"}
	}
	return operation{kind: kind, order: rmw, scope: scope, dropped: true}
}

// hostOperation returns the least order of Go's atomics on the CPUs that we run on: loads acquire,
// stores release, in the scope of the system. StoreDoorbell comes after all stores before it.
func hostOperation(name, doorbell string) operation {
	o := operation{order: "acq_rel", scope: "sys"}
	switch name {
	case "Load":
		o.kind, o.order = "ld", "acquire"
	case "Store":
		o.kind, o.order = "st", "release"
	case "Swap":
		o.kind = "exch"
	case "CompareAndSwap":
		o.kind = "cas"
	default:
		o.kind = strings.ToLower(name)
	}
	if doorbell != "" {
		o.kind, o.order = "st", "release"
	}
	return o
}
