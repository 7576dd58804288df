package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// assembler skips the test only where ptxas is not there.
func assembler(t *testing.T) string {
	t.Helper()
	ptxas, err := findPtxas(os.Getenv("HELIOS_PTXAS"))
	if errors.Is(err, errNoPtxas) {
		t.Skip(err)
	}
	require.NoError(t, err)
	return ptxas
}

// ptxas enforces the table of opcodes that came with later versions: at the
// stated version and architecture it takes them, one step below either it does not.
func TestOpcodeTableIsPtxas(t *testing.T) {
	ptxas := assembler(t)
	table, err := readOpcodes()
	require.NoError(t, err)
	dir := t.TempDir()
	assemble := func(isa, sm int, statement string) (string, error) {
		text := fmt.Sprintf(
			".version %d.%d\n.target sm_%d\n.address_size 64\n.visible .entry f(.param .u64 a)\n{\n"+
				".reg .b64 %%rd<4>;\n.reg .b32 %%r<4>;\n.reg .f32 %%f<4>;\n.reg .pred %%p<2>;\nld.param.u64 %%rd1, [a];\n%s\nret;\n}\n",
			isa/10, isa%10, sm, statement)
		file := filepath.Join(dir, "one.ptx")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o666))
		out, err := exec.CommandContext(t.Context(), ptxas, fmt.Sprintf("-arch=sm_%d", max(sm, 70)),
			file, "-o", filepath.Join(dir, "one.cubin")).CombinedOutput()
		return string(out), err
	}
	versions := []int{40, 41, 42, 43, 50, 60, 61, 62, 63, 64, 65, 70, 71, 72, 73, 74, 75, 76, 77,
		78, 80, 81, 82, 83}
	first := map[int]int{50: 40, 60: 50, 70: 60, 80: 70} // the version that a target came with
	checked := 0
	for _, s := range []string{
		"bar.warp.sync %r1;",
		"vote.sync.ballot.b32 %r1, %p1, %r2;",
		"shfl.sync.idx.b32 %r1, %r2, %r3, 31, %r1;",
		"ld.relaxed.gpu.global.u32 %r1, [%rd1];", "ld.relaxed.sys.global.u64 %rd2, [%rd1];",
		"ld.acquire.gpu.global.u64 %rd2, [%rd1];", "ld.acquire.sys.global.u32 %r1, [%rd1];",
		"st.relaxed.gpu.global.u64 [%rd1], %rd2;", "st.release.sys.global.u32 [%rd1], %r1;",
		"st.mmio.relaxed.sys.global.u32 [%rd1], %r1;",
		"atom.relaxed.gpu.global.add.u32 %r1, [%rd1], %r2;",
		"atom.acq_rel.sys.global.max.s64 %rd2, [%rd1], %rd2;",
		"atom.acquire.sys.global.cas.b64 %rd2, [%rd1], %rd2, %rd3;",
		"atom.release.gpu.global.exch.b32 %r1, [%rd1], %r2;",
		"red.relaxed.cta.shared.add.u32 [%r1], %r2;",
		"fence.acq_rel.gpu;", "fence.acq_rel.sys;",
		"nanosleep.u32 %r1;",
		"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%f0, %f1, %f2, %f3};",
		"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%f0, %f1, %f2, %f3};",
		"cvt.rna.tf32.f32 %r1, %f1;", "cvt.rn.bf16x2.f32 %r1, %f1, %f2;",
		"cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;",
		"cp.async.ca.shared.global [%r1], [%rd1], 4, %r2;",
		"cp.async.commit_group;", "cp.async.wait_group 1;",
	} {
		op := strings.TrimSuffix(strings.Fields(s)[0], ";")
		o := table.find(op, true)
		require.NotNil(t, o, op)
		sm := max(o.sm, 50)
		out, err := assemble(max(o.isa, first[sm]), sm, s)
		require.NoError(t, err, "%s: %s", op, out)
		// The manual gives nanosleep to PTX 6.3; ptxas 12.9 is not that strict. The table stays
		// with the manual.
		if i := slices.Index(versions, o.isa); i > 0 && op != "nanosleep.u32" {
			before := versions[i-1]
			target := 70
			for first[target] > before {
				target -= 10
			}
			if target >= o.sm {
				out, err := assemble(before, target, s)
				require.Error(t, err, "%s: the table says PTX %d, and ptxas takes it in %d", op,
					o.isa, before)
				require.Contains(t, out, "requires PTX ISA", op)
				checked++
			}
		}
		if o.sm >= 70 {
			out, err := assemble(max(o.isa, 60), o.sm-10, s)
			require.Error(t, err, "%s: the table says sm_%d, and ptxas takes it on sm_%d", op, o.sm,
				o.sm-10)
			require.Contains(t, out, fmt.Sprintf("sm_%d", o.sm), op)
			checked++
		}
	}
	require.Greater(t, checked, 10)
}

// The committed table of resources is of the committed PTX; whether its numbers are ptxas's is
// "kernels check" with ptxas.
func TestResourcesAreOfThePTX(t *testing.T) {
	dir := filepath.Join("../..", folder)
	table, err := os.ReadFile(filepath.Join(dir, resources))
	require.NoError(t, err)
	modules, err := committed(dir)
	require.NoError(t, err)
	sums := checksums(modules)
	require.True(t, strings.HasSuffix(string(table), sums),
		"RESOURCES.md was made from other PTX; run \"make kernels PTXAS=…\"")
	for _, k := range noSpills {
		require.Contains(t, string(table), "| "+k+" | sm_80 |")
		require.Contains(t, string(table), "| "+k+" | sm_90 |")
	}
	ptxas, err := findPtxas(os.Getenv("HELIOS_PTXAS"))
	if err == nil {
		got, code, err := assembleAll(options{ptxas: ptxas}, modules)
		require.NoError(t, err)
		require.Equal(t, string(table), string(got))
		file, err := readArchive(dir)
		require.NoError(t, err)
		require.Empty(t, code.difference(file))
	}
}
