package ptxrun

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/kernels"
)

const head = ".version 8.2\n.target sm_70\n.address_size 64\n"

// Every committed module parses, with the kernels and parameters that the driver's side reads.
func TestParseCommitted(t *testing.T) {
	modules, err := kernels.Modules()
	require.NoError(t, err)
	require.NotEmpty(t, modules)
	for _, c := range modules {
		m, err := Parse([]byte(c.PTX))
		require.NoError(t, err, c.Name)
		var want []string
		for _, k := range c.Kernels {
			want = append(want, k.Name)
			got, ok := m.Kernel(k.Name)
			require.True(t, ok, k.Name)
			require.Len(t, got.Params, 2, k.Name)
			require.Equal(t, k.ParamBytes, got.Params[0].Size, k.Name)
			require.Equal(t, kernels.LaunchBytes, got.Params[1].Size, k.Name)
			require.Zero(t, got.Params[1].Offset%got.Params[1].Align)
			require.Positive(t, got.Instructions())
		}
		require.Equal(t, want, m.Kernels())
	}
}

// The text of an instruction is that of its line.
func TestInstrText(t *testing.T) {
	files, err := filepath.Glob("../../cuda/kernels/ptx/*.ptx")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	plain := strings.NewReplacer(" ", "", "\t", "")
	for _, f := range files {
		src, err := os.ReadFile(f)
		require.NoError(t, err)
		m, err := Parse(src)
		require.NoError(t, err, f)
		lines := strings.Split(string(src), "\n")
		for _, name := range m.Kernels() {
			k, _ := m.Kernel(name)
			for i := range k.Instructions() {
				in := k.Instr(i)
				text, _, _ := strings.Cut(in.String(), "@")
				if in.Guard != "" || strings.Contains(in.String(), "@") {
					text = in.Opcode
				}
				require.Contains(t, plain.Replace(lines[in.Line-1]), plain.Replace(text),
					"%s:%d", f, in.Line)
			}
		}
	}
}

func TestParseErrors(t *testing.T) {
	for name, c := range map[string]struct{ src, want string }{
		"empty":        {"", "no .version"},
		"no target":    {".version 8.2\n", "no .target"},
		"small":        {".version 8.2 .target sm_70 .address_size 32", "only 64"},
		"function":     {head + ".func f() {}", `line 4: ".func"`},
		"twice":        {head + ".entry f() { ret; }\n.entry f() { ret; }", "line 5: kernel f stands twice"},
		"open":         {head + ".entry f() { ret;", "does not end"},
		"comment":      {head + "/* x", "line 4: comment"},
		"string":       {head + `.pragma "x`, "line 4: string"},
		"character":    {head + "\x01", "line 4: character"},
		"bracket":      {head + ".entry f() { ld.u32 %r1, [%rd1; }", "line 4: instruction ld.u32 has a bracket"},
		"close":        {head + ".entry f() { ld.u32 %r1, %rd1]; }", "not open"},
		"operand":      {head + ".entry f() { add.s32 %r1,,%r2; }", "empty operand"},
		"label":        {head + ".entry f() { x: ret;\nx: ret; }", "line 5: label x stands twice"},
		"register":     {head + ".entry f() { .reg .b32 a; .reg .b32 a; ret; }", "register a is declared twice"},
		"align":        {head + ".entry f(.param .align 3 .b8 a[4]) { ret; }", `alignment "3"`},
		"size":         {head + ".entry f(.param .b8 a[99999999999]) { ret; }", "want a number"},
		"directive":    {head + ".entry f() .fast { ret; }", `".fast" is no performance`},
		"value":        {head + ".global .u32 a = {1;", "does not end"},
		"many values":  {head + ".global .u32 a = {1, 2};", "more values than bytes"},
		"shared value": {head + ".shared .u32 a = 1;", "no value at the start"},
		"untyped":      {head + ".global a;", "want a type"},
	} {
		_, err := Parse([]byte(c.src))
		require.ErrorContains(t, err, c.want, name)
	}
}

func TestMutation(t *testing.T) {
	src := head + `.entry f() { .reg .pred %p<2>; .reg .b32 %r<3>;
	@%p1 add.s32 %r1, %r2, 1;
	ret; }`
	m, err := Parse([]byte(src))
	require.NoError(t, err)
	text := func(m *Module) string {
		k, _ := m.Kernel("f")
		return k.Instr(0).String()
	}
	for _, c := range []struct {
		mut  Mutation
		want string
	}{
		{Mutation{NegateGuard: true}, "@!%p1 add.s32 %r1, %r2, 1"},
		{Mutation{Opcode: "sub.s32"}, "@%p1 sub.s32 %r1, %r2, 1"},
		{Mutation{Operand: 2, Text: "2"}, "@%p1 add.s32 %r1, %r2, 2"},
		{Mutation{Drop: true}, "nop"},
	} {
		got, err := m.WithMutation("f", 0, c.mut)
		require.NoError(t, err)
		require.Equal(t, c.want, text(got))
		require.Equal(t, "@%p1 add.s32 %r1, %r2, 1", text(m), "the first module stays as it is")
	}
	_, err = m.WithMutation("g", 0, Mutation{})
	require.ErrorContains(t, err, "no kernel g; the module has f")
	_, err = m.WithMutation("f", 2, Mutation{})
	require.ErrorContains(t, err, "0 to 1")
	_, err = m.WithMutation("f", 1, Mutation{NegateGuard: true})
	require.ErrorContains(t, err, "no guard")
	_, err = m.WithMutation("f", 1, Mutation{Text: "x"})
	require.ErrorContains(t, err, "no operand 0")
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("../../cuda/kernels/ptx/*.ptx")
	if err != nil || len(files) == 0 {
		f.Fatal("no PTX: ", err)
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src[:min(len(src), 20000)])
	}
	f.Add([]byte(head + ".global .u32 a = {1, -2}; .entry f(.param .u64 .ptr .global p) { { .reg .pred q; @!q bra L; } L: ret; }"))
	f.Fuzz(func(t *testing.T, src []byte) {
		m, err := Parse(src)
		if err != nil {
			return
		}
		for _, n := range m.Kernels() {
			k, ok := m.Kernel(n)
			if !ok {
				t.Fatalf("no kernel %q", n)
			}
			for i := range k.Instructions() {
				_ = k.Instr(i).String()
			}
		}
	})
}
