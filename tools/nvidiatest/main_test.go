package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/driver"
)

const samplePTX = `
	ld.param.u64 	%rd1, [p];
	ld.acquire.sys.global.u32 %r1, [%rd1];
	ld.relaxed.sys.global.u32 %r2, [%rd1];
	atom.acq_rel.gpu.global.cas.b32 %r3, [%rd1], %r1, %r2;
	st.global.v4.u32 	[%rd2], {%r1, %r2, %r3, %r4};
	@%p1 bra 	$L__BB0_2;
	fence.acq_rel.sys;
	st.mmio.relaxed.sys.global.u32 [%rd3], %r5;
$L__BB0_2:
	st.mmio.relaxed.sys.global.u32 [%rd4], %r5;
	st.shared.v4.u32 	[%r9], {%r1, %r2, %r3, %r4};
	fence.acq_rel.sys;
	st.release.sys.global.u64 [%rd5], %rd6;
	ret;
`

const sampleSASS = `
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.STRONG.SYS R2, [R4.64] ;
        /*0020*/                   CCTL.IVALL ;
        /*0030*/                   LDG.E.STRONG.SYS R3, [R4.64] ;
        /*0040*/                   MEMBAR.ALL.GPU ;
        /*0050*/                   ATOMG.E.CAS.STRONG.GPU PT, R6, [R4], R2, R3 ;
        /*0060*/                   CCTL.IVALL ;
        /*0070*/                   STG.E.128 desc[UR8][R8.64], R12 ;
        /*0080*/               @P0 BRA ` + "`(.L_x_1)" + ` ;
        /*0090*/                   MEMBAR.ALL.SYS ;
        /*00a0*/                   ERRBAR;
        /*00b0*/                   CCTL.IVALL ;
        /*00c0*/                   STG.E.MMIO.SYS [R2], R40 ;
.L_x_1:
        /*00d0*/              @!P1 STG.E.MMIO.SYS [R2], R40 ;
        /*00e0*/                   MEMBAR.ALL.SYS ;
        /*00f0*/                   STG.E.64.STRONG.SYS [R2], R40 ;
        /*0100*/                   EXIT ;
`

// Machine code that breaks a rule is found by that rule.
func TestSASSRules(t *testing.T) {
	want := ptxOrder(samplePTX)
	require.Equal(t, order{doorbells: 2, fenced: 1, sysLoads: 2, entries: 1, acquires: 3,
		releases: 3, toSystem: 2, wide: 1, atomics: 1}, want)
	require.Equal(t, want, sassOrder(sampleSASS))
	require.Empty(t, want.broken(sassOrder(sampleSASS)))
	for name, c := range map[string]struct{ old, new, rule string }{
		"doorbell through the cache": {"STG.E.MMIO.SYS [R2], R40 ;\n.L", "STG.E [R2], R40 ;\n.L",
			"doorbells are MMIO stores"},
		"no fence before a doorbell": {"MEMBAR.ALL.SYS ;\n        /*00a0*/", "NOP ;\n        /*00a0*/",
			"a system fence before each SQ doorbell"},
		"a fence of the GPU": {"MEMBAR.ALL.SYS ;\n        /*00a0*/",
			"MEMBAR.ALL.GPU ;\n        /*00a0*/", "a system fence before each SQ doorbell"},
		"an entry behind the fence": {"ERRBAR;", "STG.E.64 [R8], R2 ;",
			"a system fence before each SQ doorbell"},
		"a weak load of an entry": {"LDG.E.STRONG.SYS R2", "LDG.E R2", "strong system loads"},
		"an entry's load that acquires nothing": {"LDG.E.STRONG.SYS R2, [R4.64] ;\n        /*0020*/                   CCTL.IVALL",
			"LDG.E.STRONG.SYS R2, [R4.64] ;\n        /*0020*/                   NOP",
			"completion entries are acquired"},
		"an acquire made a reduction": {"R2, R3 ;\n        /*0060*/                   CCTL.IVALL",
			"R2, R3 ;\n        /*0060*/                   NOP", "acquires have an effect"},
		"a release without a fence": {"MEMBAR.ALL.GPU", "NOP", "releases are fences"},
		"a release to the GPU only": {"MEMBAR.ALL.SYS ;\n        /*00f0*/",
			"MEMBAR.ALL.GPU ;\n        /*00f0*/", "releases to the system are system fences"},
		"an entry in pieces":  {"STG.E.128", "STG.E.64", "16-byte stores"},
		"an atomic in pieces": {"ATOMG.E.CAS.STRONG.GPU PT,", "LDG.E.STRONG.GPU", "atomics"},
	} {
		require.Equal(t, 1, strings.Count(sampleSASS, c.old), name)
		bad := want.broken(sassOrder(strings.Replace(sampleSASS, c.old, c.new, 1)))
		require.Contains(t, strings.Join(bad, "\n"), c.rule+": ", name)
	}
}

func TestTypedefs(t *testing.T) {
	got := readTypedefs("typedef CUresult (CUDAAPI *PFN_cuA_v4000)(int);\n" +
		"typedef CUresult(CUDAAPI *PFN_cuA_v12000)(int);\n" +
		"typedef CUresult (CUDAAPI *PFN_cuB_v12040)(int);\n" +
		"#define PFN_cuA __API_TYPEDEF_PTDS(PFN_cuA, 12000, 12000)\n")
	require.Equal(t, map[string][]int{"cuA": {4000, 12000}, "cuB": {12040}}, got)
	require.Equal(t, map[string]int{"cuA": 4000, "cuA_v2": 12000, "cuB": 12040}, sinceOf(got))
}

func TestNewest(t *testing.T) {
	const madison = ` libcuda1 | 555.58.02-4 | http://a experimental/non-free amd64 Packages
 libcuda1 | 550.163.01-5.1 | http://a sid/non-free amd64 Packages
 libcuda1 | 550.163.01-2 | http://a trixie/non-free amd64 Packages
`
	require.Equal(t, "550.163.01-2", newest(madison, "550"))
	require.Equal(t, "555.58.02-4", newest(madison, "555"))
	require.Empty(t, newest(madison, "535"))
}

// Every constant and layout of api.go has its name in cuda.h, and a new one must get one.
func TestAssertions(t *testing.T) {
	api, err := os.ReadFile("../../cuda/driver/api.go")
	require.NoError(t, err)
	program, n, err := assertions(string(api))
	require.NoError(t, err)
	require.Greater(t, n, 90)
	require.Equal(t, n, strings.Count(program, "_Static_assert"))
	require.Contains(t, program,
		`_Static_assert((long long)(offsetof(CUdevResource, sm.smCount)) == 96, `)
	require.Contains(t, program, `_Static_assert((long long)(CUDA_ERROR_NO_DEVICE) == 100, `)
	_, _, err = assertions(strings.Replace(string(api), "errNoDevice ", "errNobody ", 1))
	require.ErrorContains(t, err, "errNobody")
	_, _, err = assertions(strings.Replace(string(api), "memProp{}.Usage", "memProp{}.Use", 1))
	require.ErrorContains(t, err, "memProp.Use")
}

// The fake's table is found in its source, and exports are read from a real library.
func TestFakeTableAndExports(t *testing.T) {
	text, err := os.ReadFile("../../internal/testing/fakecuda/src/core.cc")
	require.NoError(t, err)
	require.Greater(t, len(fakeRow.FindAllString(string(text), -1)), 20)
	required, optional := driver.Symbols()
	require.Contains(t, required, "cuInit")
	require.Contains(t, optional, "cuGreenCtxCreate")
	_, err = exports(filepath.Join(t.TempDir(), "none"))
	require.Error(t, err)
}

// The tables go between the marks of the chapter.
func TestWriteTables(t *testing.T) {
	r := &run{root: t.TempDir(), passed: map[string]int{"jit": 2}, failed: map[string]int{},
		skipped: map[string]int{}}
	r.table("jit", "driver", "n").row("535", 3)
	r.skip("jit", 4, "for a reason")
	file := filepath.Join(r.root, chapter)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o777))
	require.NoError(t, os.WriteFile(file, []byte("a\n"+beginMark+"old"+endMark+"\nb\n"), 0o666))
	require.NoError(t, r.writeTables(r.report()))
	got, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "a\n"+beginMark+"\n\n"+titles["jit"]+"\n\n| driver | n |\n|---|---|\n| 535 | 3 |\n\n"+
		"2 checks passed, 0 failed, 4 skipped:\n\n- jit: 4: for a reason\n\n"+endMark+"\nb\n",
		string(got))
	require.NoError(t, os.WriteFile(file, []byte("no marks"), 0o666))
	require.ErrorContains(t, r.writeTables(""), "lacks the marks")
	r.check("jit", false, "driver %s", "535")
	require.Equal(t, []string{"jit: driver 535"}, r.failures)
}
