package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// kernelText is a module with one kernel of that body.
func kernelText(body string) string {
	return ".version 8.2\n.target sm_70\n.visible .entry k(\n\t.param .b64 p\n)\n{\n" + body + "\tret;\n}\n"
}

// The committed kernels keep the rules. No compiler is needed for this.
func TestCommittedPTXKeepsOrder(t *testing.T) {
	modules, err := committed(filepath.Join("../..", folder))
	require.NoError(t, err)
	acquired := 0
	for _, m := range modules {
		require.NoError(t, checkOrder(m.name, string(m.ptx)))
		es, err := entries(string(m.ptx))
		require.NoError(t, err)
		require.NotEmpty(t, es, m.name)
		for _, e := range es {
			for _, in := range e.code {
				if acquires(in.op) {
					acquired++
					require.NotEmpty(t, in.writes, "%s: %s", e.name, in.op)
				}
			}
		}
	}
	require.Greater(t, acquired, 20, "what is looked for is there")
}

func TestUnusedAcquires(t *testing.T) {
	const and = "\tatom.acquire.gpu.global.and.b32 %r1, [%rd1], %r2;\n"
	use := "\tst.global.u32 [%rd2], %r1;\n"
	for what, body := range map[string]string{
		"used":            and + use,
		"used in a store": and + "\tadd.s32 %r3, %r1, 1;\n\tst.global.u32 [%rd2], %r3;\n",
		"an address":      "\tld.acquire.gpu.global.u64 %rd1, [%rd3];\n\tst.global.u32 [%rd1], %r2;\n",
		"a predicate": and + "\tsetp.eq.s32 %p1, %r1, 0;\n\t@%p1 bra $L1;\n" +
			"\tst.global.u32 [%rd2], %r2;\n$L1:\n",
		"on one way": and + "\t@%p1 bra $L1;\n" + use + "$L1:\n",
		"in a loop":  "$L1:\n\tsetp.eq.s32 %p2, %r1, 7;\n\t@%p2 bra $L2;\n" + and + "\tbra.uni $L1;\n$L2:\n",
		"in assembly": and + "\t{\n\t.reg .pred q;\n\tsetp.ne.u32 q, %r1, 0;\n" +
			"\tvote.sync.ballot.b32 %r4, q, -1;\n\t}\n\tst.global.u32 [%rd2], %r4;\n",
		"a vector":      "\tld.acquire.gpu.global.u32 %r1, [%rd1];\n\tst.global.v2.u32 [%rd2], {%r5, %r1};\n",
		"relaxed":       "\tatom.relaxed.gpu.global.and.b32 %r1, [%rd1], %r2;\n",
		"a release":     "\tatom.release.gpu.global.or.b32 %r1, [%rd1], %r2;\n",
		"under a guard": and + "\t@%p1 mov.u32 %r1, 0;\n" + use,
	} {
		require.NoError(t, checkOrder("m", kernelText(body)), what)
	}
	for what, body := range map[string]string{
		"dropped":     and,
		"overwritten": and + "\tmov.u32 %r1, 0;\n" + use,
		"dead":        and + "\tadd.s32 %r3, %r1, 1;\n\tshl.b32 %r4, %r3, 2;\n",
		"dead loop":   and + "$L1:\n\tadd.s32 %r1, %r1, 1;\n\t@%p1 bra $L1;\n",
		"other scope": and + "\t{\n\t.reg .pred q;\n\tsetp.ne.u32 q, %r1, 0;\n\t}\n" +
			"\t{\n\t.reg .pred q;\n\tvote.sync.ballot.b32 %r4, q, -1;\n\t}\n\tst.global.u32 [%rd2], %r4;\n",
		"acq_rel":     "\tatom.acq_rel.gpu.global.exch.b32 %r1, [%rd1], %r2;\n",
		"load":        "\tld.acquire.sys.global.u32 %r1, [%rd1];\n",
		"used before": use + and,
	} {
		err := checkOrder("m", kernelText(body))
		require.ErrorContains(t, err, "kernel k: nothing uses the result of ", what)
		require.ErrorContains(t, err, "m.ptx:", what)
	}
	err := checkOrder("m", kernelText("\tmov.u32 %r2, 0;\n"+and))
	require.ErrorContains(t, err, "m.ptx:8: kernel k: nothing uses the result of atom.acquire.gpu.global.and.b32")
}

func TestCountersInTurn(t *testing.T) {
	const load = "\tld.relaxed.sys.global.u64 %rd3, [%rd1];\n"
	const add = "\tadd.s64 %rd4, %rd3, %rd5;\n"
	const store = "\tst.relaxed.sys.global.u64 [%rd1], %rd4;\n"
	require.ErrorContains(t, checkOrder("m", kernelText(load+add+store)),
		"m.ptx:9: kernel k: st.relaxed.sys.global.u64 waits for a counter only to store it again")
	for what, body := range map[string]string{
		"other accesses between": load + "\tld.global.u32 %r1, [%rd2];\n" + add + store,
		"another value":          load + add + strings.Replace(store, "%rd4", "%rd6", 1),
		"on different ways":      load + add + "$L1:\n" + store,
		"a doorbell":             load + add + "\tst.mmio.relaxed.sys.global.u32 [%rd1], %r4;\n",
	} {
		require.NoError(t, checkOrder("m", kernelText(body)), what)
	}
}

// An instruction that the check cannot follow is refused, not passed over.
func TestOrderRefusesWhatItCannotFollow(t *testing.T) {
	for body, want := range map[string]string{
		"\tcall.uni (r), f, (a);\n": "call.uni, which this check cannot follow",
		"\tbrx.idx %r1, t;\n":       "brx.idx, which this check cannot follow",
		"\t@%p1 bra $L9;\n":         "no label $L9",
	} {
		require.ErrorContains(t, checkOrder("m", kernelText(body)), want)
	}
	require.ErrorContains(t, checkOrder("m", ".func f()\n{\n}\n"), "a function that is no kernel")
	require.ErrorContains(t, checkOrder("m", ".visible .entry k()\n{\n{\n"), "does not end")
}
