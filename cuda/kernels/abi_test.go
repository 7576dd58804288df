package kernels

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// The structs that kernels and Go share are declared twice. Here the C++ declarations are laid out
// by the rules of the x86-64 and PTX ABIs (which agree: natural alignment), the Go ones by
// go/types, and every field's name, order, offset, size and kind is compared; then the C++ compiler
// is asked whether it sees the same offsets.

// kind is the type of a scalar: "u", "i", "f" or "bool"; "struct" has fields.
type cType struct {
	kind        string
	size, align int64
	fields      []cField // of a struct
}

type cField struct {
	name   string
	typ    *cType
	count  int64 // of an array; 1
	offset int64
}

func (f cField) padding() bool { return strings.HasPrefix(f.name, "_") || f.name == "Reserved" }

var scalars = map[string]*cType{
	"u8": {"u", 1, 1, nil}, "u16": {"u", 2, 2, nil}, "u32": {"u", 4, 4, nil},
	"u64": {"u", 8, 8, nil},
	"i8":  {"i", 1, 1, nil}, "i16": {"i", 2, 2, nil}, "i32": {"i", 4, 4, nil},
	"i64":         {"i", 8, 8, nil},
	"signed char": {"i", 1, 1, nil}, "char": {"i", 1, 1, nil}, "int": {"i", 4, 4, nil},
	"unsigned": {"u", 4, 4, nil},
	"bool":     {"bool", 1, 1, nil}, "float": {"f", 4, 4, nil}, "double": {"f", 8, 8, nil},
}

// header holds what the C++ files declare.
type header struct {
	structs   map[string]*cType
	constants map[string]constant.Value
	marks     []mark   // "// go: package.Name" before a struct or a constant
	kernels   []string // "name Params" of HX_KERNEL
}

type mark struct {
	goName string // gpuio.queueState
	name   string // QueueState
	isType bool
}

var (
	blockComment = regexp.MustCompile(`(?s)/\*.*?\*/`)
	goMark       = regexp.MustCompile(`(?m)^[ \t]*//[ \t]*go:[ \t]*([a-z]+\.\w+)[ \t]*$`)
	lineComment  = regexp.MustCompile(`//[^\n]*`)
	declaration  = regexp.MustCompile(
		`(?:@go ([\w.]+)@\s*)?(?:(\btemplate\s*<[^;{]*>\s*)?\bstruct\s+(?:alignas\s*\((\d+)\)\s*)?(\w+)\s*\{|\b((?:static\s+|inline\s+)?constexpr)\s+\w+\s+([^;()]+\([^;]*|[^;(){]+);|\bHX_KERNEL\s*\(\s*(\w+)\s*,\s*([\w:]+)\s*\))`)
	suffix = regexp.MustCompile(`\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+\b`)
	cast   = regexp.MustCompile(`\((?:u|i)(?:8|16|32|64)\)`)
)

// parse reads one file into h, which already has what it includes.
func (h *header) parse(file, text string) error {
	text = blockComment.ReplaceAllString(text, "")
	text = goMark.ReplaceAllString(text, "@go $1@")
	text = lineComment.ReplaceAllString(text, "")
	marks := strings.Count(text, "@go ")
	for offset := 0; ; {
		m := declaration.FindStringSubmatchIndex(text[offset:])
		if m == nil {
			break
		}
		group := func(i int) string {
			if m[2*i] < 0 {
				return ""
			}
			return text[offset+m[2*i] : offset+m[2*i+1]]
		}
		marked := group(1)
		if marked != "" {
			marks--
		}
		end := offset + m[1]
		switch {
		case group(4) != "":
			name := group(4)
			close := matching(text, end-1)
			if close < 0 {
				return fmt.Errorf("%s: struct %s does not end", file, name)
			}
			t, err := h.layout(text[end:close], group(3))
			end = close
			switch {
			case err != nil && marked != "":
				return fmt.Errorf("%s: struct %s: %w", file, name, err)
			case err != nil || group(2) != "": // a helper of the kernels, with methods for example
			default:
				h.structs[name] = t
				if marked != "" {
					h.marks = append(h.marks, mark{marked, name, true})
				}
			}
		case group(5) != "":
			for i, d := range splitTop(group(6)) {
				name, expr, ok := strings.Cut(d, "=")
				name = strings.TrimSpace(name)
				if !ok {
					continue
				}
				v, err := h.eval(expr)
				if err != nil {
					if marked != "" {
						return fmt.Errorf("%s: constant %s: %w", file, name, err)
					}
					continue
				}
				h.constants[name] = v
				if marked != "" && i == 0 {
					h.marks = append(h.marks, mark{marked, name, false})
				}
			}
		case group(7) != "":
			h.kernels = append(h.kernels, group(7)+" "+group(8))
		}
		offset = end
	}
	if marks != 0 {
		return fmt.Errorf("%s: %d lines \"// go:\" stand before neither a struct nor a constant",
			file, marks)
	}
	return nil
}

// matching is the index of the brace that closes the one at open.
func matching(text string, open int) int {
	depth := 0
	for i := open; i < len(text); i++ {
		switch text[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// splitTop splits at commas outside parentheses.
func splitTop(s string) []string {
	var out []string
	depth, begin := 0, 0
	for i, c := range s {
		switch c {
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, s[begin:i])
				begin = i + 1
			}
		}
	}
	return append(out, s[begin:])
}

// eval computes a constant expression. Go's precedence differs from C++'s only between shifts, & |
// ^ and arithmetic, so those may be mixed in parentheses only.
func (h *header) eval(expr string) (constant.Value, error) {
	expr = suffix.ReplaceAllString(strings.TrimSpace(expr), "$1")
	expr = cast.ReplaceAllString(expr, "")
	expr = strings.ReplaceAll(expr, "~", "^")
	e, err := parser.ParseExpr(expr)
	if err != nil {
		return nil, err
	}
	scope := types.NewPackage("c", "c")
	for n, v := range h.constants {
		scope.Scope().Insert(types.NewConst(token.NoPos, scope, n, types.Typ[types.UntypedInt], v))
	}
	var mixed error
	ast.Inspect(e, func(n ast.Node) bool {
		b, ok := n.(*ast.BinaryExpr)
		if !ok {
			return true
		}
		for _, side := range []ast.Expr{b.X, b.Y} {
			if inner, ok := side.(*ast.BinaryExpr); ok && bits(inner.Op) != bits(b.Op) {
				mixed = fmt.Errorf("%q mixes shifts or masks with arithmetic; use parentheses",
					expr)
			}
		}
		return true
	})
	if mixed != nil {
		return nil, mixed
	}
	tv, err := types.Eval(token.NewFileSet(), scope, token.NoPos, expr)
	if err != nil {
		return nil, err
	}
	if tv.Value == nil || tv.Value.Kind() != constant.Int {
		return nil, fmt.Errorf("%q is no integer constant", expr)
	}
	return tv.Value, nil
}

func bits(op token.Token) bool {
	return slices.Contains([]token.Token{token.SHL, token.SHR, token.AND, token.OR, token.XOR}, op)
}

var member = regexp.MustCompile(
	`^(?:alignas\s*\((\d+)\)\s*)?(?:const\s+|volatile\s+)*(?:::)?((?:signed|unsigned)\s+\w+|[\w:]+)\s*(\*?)\s*(.+)$`)
var declarator = regexp.MustCompile(`^\s*(\*?)\s*(\w+)\s*((?:\[[^\]]+\])*)\s*$`)

// layout lays a struct body out.
func (h *header) layout(body, alignas string) (*cType, error) {
	t := &cType{kind: "struct", align: 1}
	if alignas != "" {
		n, err := strconv.Atoi(alignas)
		if err != nil {
			return nil, err
		}
		t.align = int64(n)
	}
	for line := range strings.SplitSeq(body, ";") {
		line = strings.Join(strings.Fields(line), " ")
		if line == "" {
			continue
		}
		m := member.FindStringSubmatch(line)
		if m == nil || strings.ContainsAny(line, "(){}=") && m[1] == "" {
			return nil, fmt.Errorf("%q is no plain member", line)
		}
		var typ *cType
		if typ = scalars[m[2]]; typ == nil {
			typ = h.structs[m[2]]
		}
		if typ == nil && m[3] == "" {
			return nil, fmt.Errorf("type %s of %q is not known", m[2], line)
		}
		rest := m[3] + m[4]
		for i, d := range splitTop(rest) {
			q := declarator.FindStringSubmatch(d)
			if q == nil {
				return nil, fmt.Errorf("%q is no plain declarator", d)
			}
			f := cField{name: q[2], typ: typ, count: 1}
			if q[1] != "" {
				f.typ = scalars["u64"]
			} else if typ == nil {
				return nil, fmt.Errorf("type %s of %q is not known", m[2], line)
			}
			for n := range strings.SplitSeq(strings.Trim(q[3], "[]"), "][") {
				if n == "" {
					continue
				}
				v, err := h.eval(n)
				if err != nil {
					return nil, err
				}
				c, _ := constant.Int64Val(v)
				f.count *= c
			}
			align := f.typ.align
			if m[1] != "" && i == 0 {
				n, _ := strconv.Atoi(m[1])
				align = max(align, int64(n))
			}
			t.align = max(t.align, align)
			f.offset = (t.size + align - 1) / align * align
			t.size = f.offset + f.typ.size*f.count
			t.fields = append(t.fields, f)
		}
	}
	if t.size == 0 {
		t.size = 1
	}
	t.size = (t.size + t.align - 1) / t.align * t.align
	return t, nil
}

// goSide type-checks our packages from source, as far as declarations go; what it cannot import
// (the standard library, other modules) stays unknown, and no shared struct is made of that.
type goSide struct {
	root     string
	fset     *token.FileSet
	packages map[string]*types.Package
}

var goSizes = types.SizesFor("gc", "amd64")

func newGoSide(root string) *goSide {
	return &goSide{root, token.NewFileSet(), map[string]*types.Package{}}
}

// Import implements types.Importer.
func (g *goSide) Import(path string) (*types.Package, error) {
	rel, ours := strings.CutPrefix(path, "helios/")
	if !ours {
		return nil, fmt.Errorf("%s is not looked into", path)
	}
	return g.load(rel)
}

func (g *goSide) load(dir string) (*types.Package, error) {
	if p := g.packages[dir]; p != nil {
		return p, nil
	}
	ctx := build.Default
	ctx.GOOS, ctx.GOARCH, ctx.CgoEnabled = "linux", "amd64", false
	list, err := os.ReadDir(filepath.Join(g.root, dir))
	if err != nil {
		return nil, err
	}
	var files []*ast.File
	for _, e := range list {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		if ok, err := ctx.MatchFile(filepath.Join(g.root, dir), e.Name()); err != nil || !ok {
			continue
		}
		f, err := parser.ParseFile(g.fset, filepath.Join(g.root, dir, e.Name()), nil,
			parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no Go files in %s", dir)
	}
	c := types.Config{Importer: g, Sizes: goSizes, IgnoreFuncBodies: true, Error: func(error) {}}
	p, _ := c.Check("helios/"+dir, g.fset, files, nil) // errors are about what was not imported
	g.packages[dir] = p
	return p, nil
}

// find returns an object by "package.Name". A package is known by the last part of its path.
func (g *goSide) find(name string) (types.Object, error) {
	pkg, id, _ := strings.Cut(name, ".")
	for _, under := range []string{"", "cache", "cuda", "nvme", "internal", "internal/testing",
		"gpuio"} {
		dir := filepath.ToSlash(filepath.Join(under, pkg))
		if _, err := os.Stat(filepath.Join(g.root, dir)); err != nil {
			continue
		}
		p, err := g.load(dir)
		if err != nil {
			return nil, err
		}
		if o := p.Scope().Lookup(id); o != nil {
			return o, nil
		}
		return nil, fmt.Errorf("package %s declares no %s", dir, id)
	}
	return nil, fmt.Errorf("no package %s in this module", pkg)
}

// goKind is the kind of a scalar as cType has it.
func goKind(t types.Type) string {
	b, ok := t.Underlying().(*types.Basic)
	if !ok {
		return ""
	}
	switch i := b.Info(); {
	case i&types.IsBoolean != 0:
		return "bool"
	case i&types.IsUnsigned != 0:
		return "u"
	case i&types.IsInteger != 0:
		return "i"
	case i&types.IsFloat != 0:
		return "f"
	}
	return ""
}

// compareStruct lists the differences of a C++ struct from the Go one.
func compareStruct(path string, c *cType, gt types.Type) []string {
	s, ok := gt.Underlying().(*types.Struct)
	if !ok {
		// A Go array type may be what C++ wraps into a struct of one member.
		if _, array := gt.Underlying().(*types.Array); array && len(c.fields) == 1 &&
			c.size == goSizes.Sizeof(gt) {
			return compareField(path, c.fields[0], gt)
		}
		return []string{fmt.Sprintf("%s is %s in Go, a struct in C++", path, gt)}
	}
	var bad []string
	var vars []*types.Var
	for i := range s.NumFields() {
		vars = append(vars, s.Field(i))
	}
	offsets := goSizes.Offsetsof(vars)
	type goField struct {
		*types.Var
		offset int64
	}
	var want []goField
	for i, v := range vars {
		if v.Name() != "_" && v.Name() != "Reserved" {
			want = append(want, goField{v, offsets[i]})
		}
	}
	got := slices.DeleteFunc(slices.Clone(c.fields), cField.padding)
	for i := range min(len(want), len(got)) {
		w, f := want[i], got[i]
		where := path + "." + w.Name()
		if exported(w.Name()) != f.name {
			return append(bad, fmt.Sprintf("%s: C++ has %s in its place", where, f.name))
		}
		if w.offset != f.offset {
			bad = append(bad, fmt.Sprintf("%s is at offset %d in Go, %d in C++", where, w.offset,
				f.offset))
		}
		bad = append(bad, compareField(where, f, w.Type())...)
	}
	if len(want) != len(got) {
		bad = append(bad, fmt.Sprintf("%s has %d fields in Go, %d in C++", path, len(want),
			len(got)))
	}
	if n := goSizes.Sizeof(gt); n != c.size {
		bad = append(bad, fmt.Sprintf("%s has %d bytes in Go, %d in C++", path, n, c.size))
	}
	return bad
}

// exported is a Go field's name as C++ writes it.
func exported(name string) string { return strings.ToUpper(name[:1]) + name[1:] }

func compareField(where string, f cField, gt types.Type) []string {
	if n, m := goSizes.Sizeof(gt), f.typ.size*f.count; n != m {
		return []string{fmt.Sprintf("%s has %d bytes in Go, %d in C++", where, n, m)}
	}
	count := int64(1)
	for {
		a, ok := gt.Underlying().(*types.Array)
		if !ok {
			break
		}
		count *= a.Len()
		gt = a.Elem()
	}
	if count != f.count {
		return []string{fmt.Sprintf("%s has %d elements in Go, %d in C++", where, count, f.count)}
	}
	if f.typ.kind == "struct" {
		return compareStruct(where, f.typ, gt)
	}
	if k := goKind(gt); k != f.typ.kind {
		return []string{fmt.Sprintf("%s is %s in Go, of kind %s in C++", where, gt, f.typ.kind)}
	}
	return nil
}

// compareConstant lists the differences of a C++ constant from the Go one.
func compareConstant(name string, v constant.Value, o types.Object) []string {
	c, ok := o.(*types.Const)
	if !ok {
		return []string{fmt.Sprintf("%s is no constant in Go", name)}
	}
	if w := constant.ToInt(c.Val()); w.Kind() != constant.Int ||
		!constant.Compare(w, token.EQL, v) {
		return []string{fmt.Sprintf("%s is %s in Go, %s in C++", name, c.Val(), v)}
	}
	return nil
}

// compare checks everything that one C++ file shares with Go, and returns how many structs and
// constants that were.
func (h *header) compare(g *goSide) (structs, constants int, bad []string) {
	packages := map[string]bool{}
	marked := map[string]bool{}
	for _, m := range h.marks {
		pkg, _, _ := strings.Cut(m.goName, ".")
		packages[pkg] = true
		o, err := g.find(m.goName)
		if err != nil {
			bad = append(bad, fmt.Sprintf("// go: %s: %v", m.goName, err))
			continue
		}
		if m.isType {
			if _, ok := o.(*types.TypeName); !ok {
				bad = append(bad, fmt.Sprintf("%s is no type in Go", m.goName))
				continue
			}
			structs++
			bad = append(bad, compareStruct(m.goName, h.structs[m.name], o.Type())...)
		} else {
			constants++
			marked[m.name] = true
			bad = append(bad, compareConstant(m.goName, h.constants[m.name], o)...)
		}
	}
	// Constants of one name mean one thing.
	for name, v := range h.constants {
		if marked[name] {
			continue
		}
		for pkg := range packages {
			if o, err := g.find(pkg + "." + name); err == nil {
				constants++
				bad = append(bad, compareConstant(pkg+"."+name, v, o)...)
			}
		}
	}
	slices.Sort(bad)
	return structs, constants, bad
}

// shimHeader is the CPU's side of device.h, in internal/testing/shim. It shares no layout with Go.
const shimHeader = "device_shim.h"

// readHeaders parses a .cu or .h file and, before it, what it includes from this folder.
func readHeaders(dir, file string) (own, all *header, err error) {
	all = &header{structs: map[string]*cType{}, constants: map[string]constant.Value{}}
	seen := map[string]bool{}
	var read func(name string, h *header) error
	include := regexp.MustCompile(`(?m)^\s*#include "([^"]+)"`)
	read = func(name string, h *header) error {
		if seen[name] {
			return nil
		}
		seen[name] = true
		if name == shimHeader {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		for _, m := range include.FindAllStringSubmatch(string(text), -1) {
			if err := read(m[1], all); err != nil {
				return err
			}
		}
		return h.parse(name, string(text))
	}
	if err := read(file, all); err != nil {
		return nil, nil, err
	}
	// The file's own declarations: its marks come last.
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil, nil, err
	}
	own = &header{structs: maps.Clone(all.structs), constants: maps.Clone(all.constants)}
	before := maps.Clone(all.constants)
	if err := own.parse(file, string(text)); err != nil {
		return nil, nil, err
	}
	names := regexp.MustCompile(`\b(\w+)\s*=`)
	declared := map[string]bool{}
	for _, m := range names.FindAllStringSubmatch(string(text), -1) {
		declared[m[1]] = true
	}
	maps.DeleteFunc(own.constants,
		func(n string, _ constant.Value) bool { _, ok := before[n]; return ok && !declared[n] })
	return own, all, nil
}

// sources lists the C++ files of this folder.
func sources(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.[ch]*")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// Every struct and constant that kernels share with Go is the same on both sides.
func TestABI(t *testing.T) {
	g := newGoSide("../..")
	structs, constants := 0, 0
	for _, f := range sources(t) {
		own, _, err := readHeaders(".", f)
		require.NoError(t, err)
		s, c, bad := own.compare(g)
		structs, constants = structs+s, constants+c
		for _, b := range bad {
			t.Errorf("%s: %s", f, b)
		}
	}
	t.Logf("%d structs and %d constants are the same in C++ and Go", structs, constants)
	require.Greater(t, structs, 8)
}

// Every kernel's parameters are a struct that Go shares, the PTX takes as many bytes, and the
// launch record has the size that the driver passes.
func TestKernelParameters(t *testing.T) {
	list, err := List()
	require.NoError(t, err)
	n := 0
	for _, f := range sources(t) {
		if !strings.HasSuffix(f, ".cu") {
			continue
		}
		own, all, err := readHeaders(".", f)
		require.NoError(t, err)
		require.Equal(t, int64(LaunchBytes), all.structs["hx_launch"].size)
		for _, k := range own.kernels {
			n++
			name, params, _ := strings.Cut(k, " ")
			s := all.structs[params]
			if !assertf(t, s != nil, "%s: kernel %s: no plain struct %s", f, name, params) {
				continue
			}
			marked := slices.ContainsFunc(all.marks,
				func(m mark) bool { return m.isType && m.name == params })
			assertf(t, marked, "%s: kernel %s: struct %s has no line \"// go: package.type\"", f,
				name, params)
			i := slices.IndexFunc(list, func(k Kernel) bool { return k.Name == name })
			if !assertf(t, i >= 0, "%s: no kernel %s in the PTX; run \"make kernels\"", f, name) {
				continue
			}
			got := list[i]
			assertf(t, int64(got.ParamBytes) == s.size,
				"%s: kernel %s takes %d bytes in PTX, %d in C++", f, name, got.ParamBytes, s.size)
			assertf(t, got.Module+".cu" == f, "%s: kernel %s is in module %s", f, name, got.Module)
		}
	}
	require.Len(t, list, n, "kernels in the PTX and in the sources")
}

func assertf(t *testing.T, ok bool, format string, a ...any) bool {
	t.Helper()
	if !ok {
		t.Errorf(format, a...)
	}
	return ok
}

// goAsserts writes Go's layout of every marked struct as static_asserts.
func goAsserts(t *testing.T, g *goSide, marks []mark, b *strings.Builder) {
	for _, m := range marks {
		if !m.isType {
			continue
		}
		o, err := g.find(m.goName)
		require.NoError(t, err)
		fmt.Fprintf(b, "static_assert(sizeof(%s) == %d, \"%s\");\n", m.name,
			goSizes.Sizeof(o.Type()), m.goName)
		s, ok := o.Type().Underlying().(*types.Struct)
		if !ok {
			continue
		}
		var vars []*types.Var
		for i := range s.NumFields() {
			vars = append(vars, s.Field(i))
		}
		for i, off := range goSizes.Offsetsof(vars) {
			if n := vars[i].Name(); n != "_" && n != "Reserved" {
				fmt.Fprintf(b,
					"static_assert(__builtin_offsetof(%s, %s) == %d && sizeof(%s::%s) == %d, \"%s.%s\");\n",
					m.name, exported(n), off, m.name, exported(n), goSizes.Sizeof(vars[i].Type()),
					m.goName, n)
			}
		}
	}
}

// The compilers see Go's offsets: for headers the C++ compiler, for .cu files clang in CUDA mode.
func TestCompilersAgree(t *testing.T) {
	g := newGoSide("../..")
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	cxx := os.Getenv("CXX")
	if cxx == "" {
		cxx = "g++"
	}
	cuda := os.Getenv("HELIOS_CLANG")
	if cuda == "" {
		cuda = "clang-19"
	}
	for _, f := range sources(t) {
		own, _, err := readHeaders(".", f)
		require.NoError(t, err)
		if !slices.ContainsFunc(own.marks, func(m mark) bool { return m.isType }) {
			continue
		}
		t.Run(f, func(t *testing.T) {
			var b strings.Builder
			fmt.Fprintf(&b, "#include %q\n", f)
			goAsserts(t, g, own.marks, &b)
			compile := func(tool string, args ...string) {
				path, err := exec.LookPath(tool)
				if errors.Is(err, exec.ErrNotFound) {
					t.Skipf("%s is not there", tool)
				}
				require.NoError(t, err)
				run := func(text string) (string, error) {
					cmd := exec.CommandContext(t.Context(), path,
						append(args, "-std=c++17", "-fsyntax-only", "-I", here, "-")...)
					cmd.Stdin = strings.NewReader(text)
					cmd.Dir = here
					var out bytes.Buffer
					cmd.Stdout, cmd.Stderr = &out, &out
					err := cmd.Run()
					return out.String(), err
				}
				out, err := run(b.String())
				require.NoError(t, err, "%s", out)
				// One wrong offset must be seen.
				_, err = run(strings.Replace(b.String(), ") == ", ") == 1 + ", 1))
				require.Error(t, err)
			}
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			if strings.HasSuffix(f, ".cu") || bytes.Contains(text, []byte(`#include "device.h"`)) {
				compile(cuda, "-nocudalib", "-nocudainc", "-x", "cuda", "--cuda-device-only",
					"--cuda-gpu-arch=sm_70", "--cuda-feature=+ptx83", "-Wno-unused-function")
				return
			}
			compile(cxx, "-x", "c++")
		})
	}
}

// Wrong declarations are found, each by its own words.
func TestABIFindsDifferences(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "pack"), 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(root, "pack", "pack.go"), []byte(`package pack

import "helios/base"

const (
	slots = 4
	limit = 1<<4 - 1
)

type inner struct {
	A uint8
	B [slots]int16
}

type state struct {
	Ptr   base.Ptr
	Flag  bool
	N     int32
	Words [slots]uint32
	In    [2]inner
	_     uint32
	F     float32
	_     [2]uint32
}

type grid [2][3]uint32
`), 0o666))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "base"), 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(root, "base", "base.go"),
		[]byte("package base\n\ntype Ptr uint64\n"), 0o666))
	const good = `
constexpr u32 slots = 4, other = 0xffu;
// go: pack.limit
constexpr u32 highest = (1 << 4) - 1;
// go: pack.inner
struct Inner {
	u8 A; // a byte
	i16 B[slots];
};
/* the record
   struct Fake { u8 X; } */
// go: pack.state
struct State {
	u64 Ptr;
	bool Flag;
	i32 N;
	u32 Words[slots];
	::Inner In[2];
	u32 _;
	float F;
	u32 _2, _3;
};
// go: pack.grid
struct Grid {
	u32 Cells[2][3];
};
template <typename T> struct Box { T X; };
struct Helper { u32 X; u32 twice() const { return 2 * X; } };
HX_KERNEL(run, State) { if (dev::dropped(hx)) return; }
`
	check := func(text string) (int, int, []string, error) {
		h := &header{structs: map[string]*cType{}, constants: map[string]constant.Value{}}
		if err := h.parse("pack.h", text); err != nil {
			return 0, 0, nil, err
		}
		require.Equal(t, []string{"run State"}, h.kernels)
		s, c, bad := h.compare(newGoSide(root))
		return s, c, bad, nil
	}
	s, c, bad, err := check(good)
	require.NoError(t, err)
	require.Empty(t, bad)
	require.Equal(t, 3, s)
	require.Equal(t, 2, c)

	for name, x := range map[string]struct{ old, new, want string }{
		"order": {"u64 Ptr;\n\tbool Flag;", "bool Flag;\n\tu64 Ptr;",
			"pack.state.Ptr: C++ has Flag in its place"},
		"name":  {"i32 N;", "i32 M;", "pack.state.N: C++ has M in its place"},
		"sign":  {"i32 N;", "u32 N;", "pack.state.N is int32 in Go, of kind u in C++"},
		"width": {"i32 N;", "i64 N;", "pack.state.N is at offset 12 in Go, 16 in C++"},
		"offset": {"i32 N;", "u32 _4[2]; i32 N;",
			"pack.state.N is at offset 12 in Go, 20 in C++"},
		"float": {"float F;", "u32 F;",
			"pack.state.F is float32 in Go, of kind u in C++"},
		"array": {"Words[slots]", "Words[slots + 1]",
			"pack.state.Words has 16 bytes in Go, 20 in C++"},
		"elements": {"u32 Words[slots]", "u64 Words[2]",
			"pack.state.Words has 4 elements in Go, 2 in C++"},
		"nested": {"i16 B[slots];", "u16 B[slots];",
			"pack.state.In.B is int16 in Go, of kind u in C++"},
		"missing": {"float F;\n\tu32 _2, _3;", "",
			"pack.state has 6 fields in Go, 5 in C++"},
		"more": {"u32 _2, _3;", "u32 X, Y;",
			"pack.state has 6 fields in Go, 8 in C++"},
		"size": {"u32 _2, _3;", "u32 _2, _3, _4, _5;",
			"pack.state has 72 bytes in Go, 80 in C++"},
		"alignment": {"struct State {", "struct alignas(128) State {",
			"pack.state has 72 bytes in Go, 128 in C++"},
		"pointer": {"bool Flag;\n\ti32 N;", "u8 *Flag;",
			"pack.state.Flag is at offset 8"},
		"constant by name":  {"slots = 4", "slots = 5", "pack.slots is 4 in Go, 5 in C++"},
		"constant by mark":  {"(1 << 4) - 1", "(1 << 4)", "pack.limit is 15 in Go, 16 in C++"},
		"no such type":      {"go: pack.state", "go: pack.stat", "package pack declares no stat"},
		"no such package":   {"go: pack.state", "go: pock.state", "no package pock"},
		"constant for type": {"go: pack.state", "go: pack.limit", "pack.limit is no type in Go"},
		"type for constant": {"go: pack.limit", "go: pack.inner",
			"pack.inner is no constant in Go"},
		"two dimensions": {"Cells[2][3]", "Cells[7]", "pack.grid"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, 1, strings.Count(good, x.old), "the sample has %q once", x.old)
			_, _, bad, err := check(strings.Replace(good, x.old, x.new, 1))
			require.NoError(t, err)
			if name == "pointer" {
				require.NotEmpty(t, bad)
				return
			}
			require.Contains(t, strings.Join(bad, "\n"), x.want)
		})
	}
	for name, x := range map[string]struct{ old, new, want string }{
		"method in a shared struct": {"i32 N;", "i32 N; i32 twice() const { return 2 * N; }",
			"struct State"},
		"unknown type":        {"i32 N;", "wchar N;", "type wchar"},
		"mark before nothing": {"template", "// go: pack.state\ntemplate", "struct Box"},
		"mark at the end": {"HX_KERNEL", "// go: pack.state\nint f();\nHX_KERNEL",
			"before neither"},
		"precedence": {"(1 << 4) - 1", "1 << 4 - 1", "parentheses"},
		"not closed": {"u32 _2, _3;\n};", "", "is not"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, _, err := check(strings.Replace(good, x.old, x.new, 1))
			if name == "not closed" {
				require.Error(t, err)
				return
			}
			require.ErrorContains(t, err, x.want)
		})
	}
}

var failCall = regexp.MustCompile(`dev::fail\(hx, (\w+)((?:, [^;]*)?)\);`)

// Every code that a kernel fails with has words, with no more numbers than the kernel gives, and
// there are no words for kernels or codes that are not there.
func TestFaultWords(t *testing.T) {
	include := regexp.MustCompile(`(?m)^\s*#include "([^"]+)"`)
	verbs := regexp.MustCompile(`%(\[\d\])?d`)
	kernel := regexp.MustCompile(`HX_KERNEL\(\s*(\w+)`)
	named, used := map[string]bool{}, map[string]bool{}
	for _, f := range sources(t) {
		if !strings.HasSuffix(f, ".cu") {
			continue
		}
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		source := lineComment.ReplaceAllString(string(text), "")
		var kernels []string
		for _, m := range kernel.FindAllStringSubmatch(source, -1) {
			kernels = append(kernels, m[1])
			named[m[1]] = true
		}
		// Functions may fail on behalf of any kernel of the file; a kernel's own body on its own.
		common, bodies := source, map[string]string{}
		for i, m := range kernel.FindAllStringIndex(source, -1) {
			open := strings.IndexByte(source[m[0]:], '{')
			close := matching(source, m[0]+open)
			require.Greater(t, close, 0, "%s: kernel %s", f, kernels[i])
			bodies[kernels[i]] = source[m[0]:close]
			common = strings.Replace(common, bodies[kernels[i]], "", 1)
		}
		for _, m := range include.FindAllStringSubmatch(source, -1) {
			if m[1] == "device.h" {
				continue
			}
			h, err := os.ReadFile(m[1])
			require.NoError(t, err)
			common += lineComment.ReplaceAllString(string(h), "")
		}
		check := func(who []string, text string, all bool) {
			for _, m := range failCall.FindAllStringSubmatch(text, -1) {
				code, err := strconv.Atoi(m[1])
				if !assertf(t, err == nil && code > 0,
					"%s: dev::fail with code %s; codes are plain numbers from 1", f, m[1]) {
					continue
				}
				args := 0
				if m[2] != "" {
					args = len(splitTop(m[2][1:]))
				}
				found := false
				for _, k := range who {
					if len(faults[k]) >= code {
						found = true
						used[faults[k][code-1]] = true
						n := len(verbs.FindAllString(faults[k][code-1], -1))
						assertf(t, n <= args,
							"%s: kernel %s: the words of code %d use %d numbers, dev::fail gives %d",
							f, k, code, n, args)
					} else {
						assertf(t, !all,
							"%s: kernel %s fails with code %d, which has no words in faults.go", f,
							k, code)
					}
				}
				assertf(t, found, "%s: no words for code %d in faults.go", f, code)
			}
		}
		check(kernels, common, false)
		for k, b := range bodies {
			check([]string{k}, b, true)
		}
		for _, k := range kernels {
			for i, words := range faults[k] {
				assertf(t, !strings.Contains(FaultText(k, uint32(i+1), 1, 2, 3), "%!"),
					"faults.go: %q is no plain format", words)
			}
		}
	}
	for k, words := range faults {
		assertf(t, named[k], "faults.go has words for %s, which is no kernel", k)
		for _, w := range words { // a list may be shared by kernels that use parts of it
			assertf(t, used[w], "faults.go: no kernel fails with %q", w)
		}
	}
}

func TestFaultWordsFindCalls(t *testing.T) {
	m := failCall.FindAllStringSubmatch(
		"if (x) dev::fail(hx, 1, row, (u64)(p.First + i), f(a, b));\n\tdev::fail(hx, code);", -1)
	require.Len(t, m, 2)
	require.Equal(t, "1", m[0][1])
	require.Len(t, splitTop(m[0][2][1:]), 3)
	require.Equal(t, []string{"code", ""}, m[1][1:])
}

// The shim's compilers take every kernel without a warning, and lay the structs out as Go does.
func TestShimCompilersAgree(t *testing.T) {
	if wide.Lean() {
		t.Skip("compiles every kernel")
	}
	g := newGoSide("../..")
	first := os.Getenv("CXX")
	if first == "" {
		first = "g++"
	}
	compilers := []string{first}
	if first != "clang++-19" {
		compilers = append(compilers, "clang++-19")
	}
	for _, cxx := range compilers {
		path, err := exec.LookPath(cxx)
		if errors.Is(err, exec.ErrNotFound) {
			t.Logf("%s is not there", cxx)
			continue
		}
		require.NoError(t, err)
		for _, f := range sources(t) {
			if !strings.HasSuffix(f, ".cu") {
				continue
			}
			own, _, err := readHeaders(".", f)
			require.NoError(t, err)
			var b strings.Builder
			fmt.Fprintf(&b, "#include %q\n", f)
			goAsserts(t, g, own.marks, &b)
			t.Run(cxx+"/"+f, func(t *testing.T) {
				t.Parallel()
				cmd := exec.CommandContext(t.Context(), path, "-x", "c++", "-std=c++17", "-Wall",
					"-Wextra", "-Werror", "-DHX_SHIM",
					"-fsyntax-only", "-I", ".", "-I", "../../internal/testing/shim", "-")
				cmd.Stdin = strings.NewReader(b.String())
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s", out)
			})
		}
	}
}
