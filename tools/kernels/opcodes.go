package main

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed ptx_opcodes.txt
var opcodeText string

// opcode is one line of the table.
type opcode struct {
	pattern string
	parts   []part
	isa, sm int // 83 is PTX ISA 8.3; 70 is sm_70
	asm     bool
}

// part holds what may stand between two dots.
type part struct {
	words    []string
	optional bool
}

// table is ptx_opcodes.txt.
type table struct{ lines []*opcode }

func readOpcodes() (*table, error) { return parseOpcodes(opcodeText) }

func parseOpcodes(text string) (*table, error) {
	t := &table{}
	sets := map[string][]string{}
	section := ""
	for i, line := range strings.Split(text, "\n") {
		bad := func(why string) (*table, error) {
			return nil, fmt.Errorf("ptx_opcodes.txt:%d: %s: %q", i+1, why, line)
		}
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0][0] == '#':
			continue
		case f[0] == "set":
			if len(f) < 4 || f[2] != "=" {
				return bad("want set name = words")
			}
			sets[f[1]] = f[3:]
			continue
		case f[0] == "[asm]" || f[0] == "[plain]":
			section = f[0]
			continue
		case section == "":
			return bad("before the first section")
		case len(f) < 4:
			return bad("want pattern, ISA, sm, section of the manual")
		}
		o := &opcode{pattern: f[0], asm: section == "[asm]"}
		major, minor, _ := strings.Cut(f[1], ".")
		a, err1 := strconv.Atoi(major)
		b, err2 := strconv.Atoi(minor)
		sm, err3 := strconv.Atoi(f[2])
		if err1 != nil || err2 != nil || err3 != nil {
			return bad("ISA or sm is no number")
		}
		o.isa, o.sm = 10*a+b, sm
		for p := range strings.SplitSeq(f[0], ".") {
			var q part
			p, q.optional = strings.CutSuffix(p, "?")
			for w := range strings.SplitSeq(p, "|") {
				if name, ok := strings.CutPrefix(w, "$"); ok {
					if sets[name] == nil {
						return bad("no set " + name)
					}
					q.words = append(q.words, sets[name]...)
				} else {
					q.words = append(q.words, w)
				}
			}
			o.parts = append(o.parts, q)
		}
		t.lines = append(t.lines, o)
	}
	return t, nil
}

// matches reports whether an opcode with its modifiers fits the pattern.
func (o *opcode) matches(words []string) bool { return fits(o.parts, words) }

func fits(parts []part, words []string) bool {
	if len(parts) == 0 {
		return len(words) == 0
	}
	if len(words) > 0 && slices.Contains(parts[0].words, words[0]) && fits(parts[1:], words[1:]) {
		return true
	}
	return parts[0].optional && fits(parts[1:], words)
}

// find returns the line of an opcode; asm lines first, and only those if onlyAsm.
func (t *table) find(op string, onlyAsm bool) *opcode {
	words := strings.Split(op, ".")
	for _, o := range t.lines {
		if (o.asm || !onlyAsm) && o.matches(words) {
			return o
		}
	}
	return nil
}

// used is an opcode or a special register, and where it was seen first.
type used struct {
	op   string
	line int
}

var (
	comment  = regexp.MustCompile(`//[^\n]*`)
	label    = regexp.MustCompile(`^[$%A-Za-z_][$A-Za-z0-9_]*:`)
	register = regexp.MustCompile(`%[a-z_]+[a-z0-9_]*(\.[xyzw])?`)
	// virtual registers as clang and the asm of ptx.h name them: %r1, %rd2, %p3; in asm templates
	// %0 is an operand, which the pattern above does not match.
	virtual = regexp.MustCompile(`^%(p|r|rd|rs|f|fd|rq|h|hh|SP|SPL)[0-9]*$`)
)

// instructions lists the opcodes and special registers of PTX text: a module, or the template of
// an asm statement. Statements that begin with a dot are directives.
func instructions(text string) []used {
	text = comment.ReplaceAllString(text, "")
	var out []used
	line, start, begin := 1, 1, 0
	statement := func(end int) {
		s := text[begin:end]
		trimmed := strings.TrimSpace(s)
		pos := start + strings.Count(s[:len(s)-len(strings.TrimLeft(s, " \t\r\n"))], "\n")
		for {
			l := label.FindString(trimmed)
			if l == "" {
				break
			}
			rest := trimmed[len(l):]
			pos += strings.Count(rest[:len(rest)-len(strings.TrimLeft(rest, " \t\r\n"))], "\n")
			trimmed = strings.TrimSpace(rest)
		}
		begin, start = end+1, line
		if trimmed == "" || trimmed[0] == '.' {
			return
		}
		if trimmed[0] == '@' { // predicate
			f := strings.Fields(trimmed)
			if len(f) < 2 {
				return
			}
			trimmed = strings.Join(f[1:], " ")
		}
		f := strings.Fields(trimmed)
		out = append(out, used{f[0], pos})
		for _, r := range register.FindAllString(strings.Join(f[1:], " "), -1) {
			if !virtual.MatchString(r) {
				out = append(out, used{r, pos})
			}
		}
	}
	empty := func(i int) bool {
		s := strings.TrimSpace(text[begin:i])
		return s == "" || label.FindString(s) == s
	}
	for i := 0; i < len(text); i++ {
		switch c := text[i]; c {
		case '\n':
			line++
		case ';':
			statement(i)
		case '{':
			// A block, unless it is a vector operand or an initialiser.
			s := strings.TrimSpace(text[begin:i])
			if empty(i) || s[0] == '.' && !strings.HasSuffix(s, "=") {
				statement(i)
			}
		case '}':
			if empty(i) {
				statement(i)
			}
		}
	}
	statement(len(text))
	return out
}

// checkModule looks up every opcode of a module and compares what it needs with the header.
func (t *table) checkModule(name, text string) error {
	var bad []string
	version, target := header(text)
	if version == 0 || target == 0 {
		return fmt.Errorf("%s: PTX without .version or .target", name)
	}
	seen := map[string]bool{}
	for _, u := range instructions(text) {
		if seen[u.op] {
			continue
		}
		seen[u.op] = true
		o := t.find(u.op, false)
		switch {
		case o == nil:
			bad = append(bad, fmt.Sprintf("%s.ptx:%d: %s is not in tools/kernels/ptx_opcodes.txt",
				name, u.line, u.op))
		case o.isa > version || o.sm > target:
			bad = append(bad,
				fmt.Sprintf(
					"%s.ptx:%d: %s needs PTX %d.%d and sm_%d; the module says %d.%d and sm_%d",
					name, u.line, u.op, o.isa/10, o.isa%10, o.sm, version/10, version%10, target))
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("opcodes:\n  %s", strings.Join(bad, "\n  "))
	}
	return nil
}

var (
	versionLine = regexp.MustCompile(`(?m)^\.version (\d+)\.(\d)\s*$`)
	targetLine  = regexp.MustCompile(`(?m)^\.target sm_(\d+)\s*$`)
)

func header(text string) (version, target int) {
	if m := versionLine.FindStringSubmatch(text); m != nil {
		version, _ = strconv.Atoi(m[1] + m[2])
	}
	if m := targetLine.FindStringSubmatch(text); m != nil {
		target, _ = strconv.Atoi(m[1])
	}
	return version, target
}

// asmWord finds asm statements, in whatever spelling.
var asmWord = regexp.MustCompile(`\b(asm|__asm__|__asm)\b`)

// checkAssembly looks up every opcode of ptx.h, also of templates that no kernel uses, and sees
// that no other file has assembly and that the table has no line that ptx.h does not use.
func checkAssembly(t *table, clang, dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.[ch]*"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if filepath.Base(f) == "ptx.h" {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		for i, l := range strings.Split(string(text), "\n") {
			if asmWord.MatchString(comment.ReplaceAllString(l, "")) {
				return fmt.Errorf("%s/%s:%d: inline assembly belongs in ptx.h, where it is checked",
					folder, filepath.Base(f), i+1)
			}
		}
	}
	text, err := preprocess(clang, dir, "device.h")
	if err != nil {
		return err
	}
	return t.checkTemplates(templates(string(text)))
}

func (t *table) checkTemplates(asm []string) error {
	var bad []string
	need := map[*opcode]bool{}
	for _, a := range asm {
		for _, u := range instructions(a) {
			o := t.find(u.op, true)
			if o == nil {
				bad = append(bad,
					fmt.Sprintf(
						"ptx.h: %s is not in section [asm] of tools/kernels/ptx_opcodes.txt", u.op))
				continue
			}
			need[o] = true
		}
	}
	for _, o := range t.lines {
		if o.asm && !need[o] {
			bad = append(bad,
				fmt.Sprintf(
					"tools/kernels/ptx_opcodes.txt: %s is in section [asm], and ptx.h does not use it",
					o.pattern))
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("opcodes:\n  %s", strings.Join(slices.Compact(bad), "\n  "))
	}
	return nil
}

// templates returns the instruction text of every asm statement of preprocessed C++.
func templates(text string) []string {
	var out []string
	for _, at := range asmWord.FindAllStringIndex(text, -1) {
		rest := text[at[1]:]
		open := strings.IndexByte(rest, '(')
		if open < 0 {
			continue
		}
		rest = rest[open+1:]
		var b strings.Builder
		for {
			rest = strings.TrimLeft(rest, " \t\r\n")
			if rest == "" || rest[0] != '"' {
				break
			}
			end := 1
			for end < len(rest) && rest[end] != '"' {
				if rest[end] == '\\' {
					end++
				}
				end++
			}
			if end >= len(rest) {
				break
			}
			s, err := strconv.Unquote(rest[:end+1])
			if err == nil {
				b.WriteString(s)
			}
			rest = rest[end+1:]
		}
		// %% is a percent sign in a template; %0 an operand.
		out = append(out, strings.ReplaceAll(b.String(), "%%", "%"))
	}
	return out
}
