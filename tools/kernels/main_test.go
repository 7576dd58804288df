package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/tools/internal/ptxas"

	"helios/internal/testing/wide"
)

// compiler skips the test only where clang 19 is not there.
func compiler(t *testing.T) string {
	t.Helper()
	clang, err := findClang(os.Getenv("HELIOS_CLANG"))
	if errors.Is(err, errNoClang) {
		t.Skip(err)
	}
	require.NoError(t, err)
	return clang
}

// checkout copies the sources of the kernels to a new folder and returns its root.
func checkout(t *testing.T, at string) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), at)
	dir := filepath.Join(root, folder)
	require.NoError(t, os.MkdirAll(dir, 0o777))
	files, err := filepath.Glob(filepath.Join("../..", folder, "*.[ch]*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(f)), text, 0o666))
	}
	return root
}

// The committed PTX is what the sources give, from any folder.
// make kernels-check does it too, as a step of .ci/run.
func TestCommittedPTX(t *testing.T) {
	wide.Only(t)
	clang := compiler(t)
	b, err := build(options{root: checkout(t, "some where/else"), clang: clang, ptxas: "no-ptxas"},
		io.Discard)
	require.NoError(t, err)
	require.NoError(t, b.compare(filepath.Join("../..", folder), io.Discard))
}

// generate, check, and check after a change.
func TestGenerateAndCheck(t *testing.T) {
	o := options{root: t.TempDir(), clang: compiler(t), ptxas: "no-ptxas"}
	from := checkout(t, "a")
	dir := filepath.Join(o.root, folder)
	require.NoError(t, os.MkdirAll(dir, 0o777))
	for _, h := range []string{"types.h", "device.h", "ptx.h"} {
		text, err := os.ReadFile(filepath.Join(from, folder, h))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, h), text, 0o666))
	}
	source := filepath.Join(dir, "one.cu")
	put := func(body string) {
		require.NoError(t,
			os.WriteFile(source,
				[]byte(
					"#include \"device.h\"\nstruct P { u64 A; };\nHX_KERNEL(one, P) {\n\tif (dev::dropped(hx)) return;\n"+body+"}\n"), 0o666))
	}
	put("\tdev::st(dev::at<u64>(p.A), (u64)1);\n")
	require.NoError(t, run("generate", o, io.Discard))
	require.NoError(t, run("check", o, io.Discard))

	put("\tdev::st(dev::at<u64>(p.A), (u64)2);\n")
	require.ErrorContains(t, run("check", o, io.Discard), "one.ptx: line")
	put("\tint unused;\n")
	require.ErrorContains(t, run("check", o, io.Discard), "unused")
	put("\tasm volatile(\"membar.sys;\");\n")
	require.ErrorContains(t, run("check", o, io.Discard),
		"one.cu:5: inline assembly belongs in ptx.h")
	put("\tdev::st(dev::at<float>(p.A), __builtin_sinf(dev::ld(dev::at<float>(p.A))));\n")
	require.Error(t, run("check", o, io.Discard), "there is no libdevice")

	require.NoError(t, os.Rename(source, filepath.Join(dir, "two.cu")))
	put("\tdev::st(dev::at<u64>(p.A), (u64)1);\n")
	require.NoError(t, os.Remove(filepath.Join(dir, "two.cu")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ptx", "gone.ptx"), nil, 0o666))
	require.ErrorContains(t, run("check", o, io.Discard), "its .cu file is gone")
	require.NoError(t, run("generate", o, io.Discard))
	require.NoError(t, run("check", o, io.Discard))
	require.NoFileExists(t, filepath.Join(dir, "ptx", "gone.ptx"))

	o.needPtxas = true
	require.ErrorIs(t, run("check", o, io.Discard), errNoPtxas)
	require.Error(t, run("polish", o, io.Discard))
}

func TestOpcodeTable(t *testing.T) {
	table, err := readOpcodes()
	require.NoError(t, err)
	for op, asm := range map[string]bool{
		"atom.acq_rel.sys.global.add.u64": true, "fence.acq_rel.gpu": true,
		"st.mmio.relaxed.sys.global.u32": true,
		"ld.global.nc.v4.u32":            false, "ld.v4.u32": false, "st.shared.u8": false,
		"setp.lt.and.s64": false, "bra": false, "bra.uni": false, "%tid.x": false,
	} {
		o := table.find(op, false)
		require.NotNil(t, o, op)
		require.Equal(t, asm, o.asm, op)
	}
	require.Nil(t, table.find("ld.global.nc.v4.u32", true), "not assembly")
	for _, op := range []string{"redux.sync.add.s32", "atom.acq_rel.cluster.global.add.u64",
		"ld.global.v8.f32", "fence.proxy.async", "st", "bra.uni.x", "membar.sys", "%clock64"} {
		require.Nil(t, table.find(op, false), op)
	}
	for text, want := range map[string]string{
		"mov.u32 1.0 10 x":         "before the first section",
		"[asm]\nmov.u32 1.0":       "want pattern",
		"[asm]\nmov.u32 one 10 x":  "no number",
		"[asm]\nmov.$none 1.0 1 x": "no set",
		"set a b":                  "set name",
	} {
		_, err := parseOpcodes(text)
		require.ErrorContains(t, err, want)
	}
}

const body = `.version 8.3
.target sm_70
.address_size 64
.visible .entry f(
	.param .align 8 .b8 f_param_0[8]
)
{
	.reg .b64 	%rd<3>;
	.shared .align 4 .b8 s[128];
// %bb.0:
	mov.u32 	%r1, %tid.x;  // mov.fake
	@!%p1 bra 	$L__BB0_2;
	.pragma "nounroll";
$L__BB0_1: // in a loop
	ld.global.v2.u32 	{%r1, %r2}, [%rd1];
$L__BB0_2:
	{
	.reg .pred q;
	setp.ne.u32 q, %r1, 0;
	}
	ret;
                                        // -- End function
}
.global .align 4 .b8 table[4] = {1, 2, 3, 4};
`

func TestInstructions(t *testing.T) {
	require.Equal(t, []used{{"mov.u32", 11}, {"%tid.x", 11}, {"bra", 12}, {"ld.global.v2.u32", 15},
		{"setp.ne.u32", 19}, {"ret", 21}}, instructions(body))
	require.Equal(t, []used{{"fence.acq_rel.sys", 1}}, instructions("fence.acq_rel.sys;"))
	require.Equal(t, []used{{"mov.u64", 1}, {"%globaltimer", 1}},
		instructions("mov.u64 %0, %globaltimer;"))
	table, err := readOpcodes()
	require.NoError(t, err)
	require.NoError(t, table.checkModule("m", body))
	for old, c := range map[string][2]string{
		"ret;": {"wgmma.fence.sync.aligned;",
			"m.ptx:21: wgmma.fence.sync.aligned is not in"},
		".version 8.3": {".version 8.1", ""},
		"sm_70":        {"sm_60", ""},
	} {
		text := strings.Replace(body, old, c[0], 1)
		if c[1] == "" { // too old for an instruction that is then in it
			text = strings.Replace(text, "\tret;",
				"\tst.mmio.relaxed.sys.global.u32 [%rd1], %r1;\n\tret;", 1)
			c[1] = "st.mmio.relaxed.sys.global.u32 needs PTX 8.2 and sm_70"
		}
		require.ErrorContains(t, table.checkModule("m", text), c[1])
	}
	require.ErrorContains(t, table.checkModule("m", "ret;"), "without .version")
}

func TestTemplates(t *testing.T) {
	got := templates(
		`void f() { asm volatile("ld." "gpu" ".u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); __asm__ ("{\n\tmov.u64 %0, %%globaltimer;\n\t}" : : ); } int plasma("x");`)
	require.Equal(t, []string{"ld.gpu.u32 %0, [%1];", "{\n\tmov.u64 %0, %globaltimer;\n\t}"}, got)
	table, err := parseOpcodes(
		"[asm]\nmov.u64 1.0 10 x\n%globaltimer 3.1 30 x\n[plain]\nadd.u32 1.0 10 x\n")
	require.NoError(t, err)
	require.NoError(t, table.checkTemplates(got[1:]))
	require.ErrorContains(t, table.checkTemplates(got), "ld.gpu.u32 is not in section [asm]")
	require.ErrorContains(t, table.checkTemplates([]string{"mov.u64 %0, 1;"}),
		"%globaltimer is in section [asm], and ptx.h does not use it")
	require.ErrorContains(t, table.checkTemplates(append(got[1:], "add.u32 %0, %0, 1;")),
		"add.u32 is not in section [asm]")
}

const ptxasReport = `ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'submit' for 'sm_80'
ptxas info    : Function properties for submit
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 5.0 ms
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 368 bytes cmem[0]
`

func TestReport(t *testing.T) {
	got, err := parseReport(ptxasReport)
	require.NoError(t, err)
	require.Equal(t, []ptxas.Usage{
		{Kernel: "submit", Arch: "sm_80", Registers: 22, Stack: 8, Shared: 128, Barriers: 1},
		{Kernel: "other", Arch: "sm_80", Registers: 255, Stack: 16, SpillStores: 4, SpillLoads: 12},
	}, got)
	_, err = parseReport(strings.Replace(ptxasReport, "0 bytes spill stores",
		"8 bytes spill stores", 1))
	require.ErrorContains(t, err, "kernel submit spills registers (8 bytes stored, 0 loaded)")
	_, err = parseReport(ptxasReport + "ptxas warning : Something\n")
	require.ErrorContains(t, err, "Something")
	_, err = parseReport(strings.Replace(ptxasReport, "Used 22", "Took 22", 1))
	require.ErrorContains(t, err, "no registers reported for submit")
	_, err = parseReport("")
	require.ErrorContains(t, err, "names no kernel")
}
