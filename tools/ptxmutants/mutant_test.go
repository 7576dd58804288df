package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/kernels"
	"helios/tools/ptxrun"
)

const text = `.version 8.2
.target sm_70
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
	.reg .pred %p<3>;
	.reg .b32 %r<6>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<4>;
	.shared .align 4 .b8 s[64];
	ld.param.u64 %rd1, [k_param_0];
	mov.u32 %r1, %tid.x;
	add.s32 %r2, %r1, 5;
	setp.lt.u32 %p1, %r2, %r1;
	@%p1 bra END;
	shl.b32 %r3, %r2, %r1;
	bar.sync 0;
	ld.acquire.gpu.global.u32 %r4, [%rd1+8];
	mul.f32 %f1, %f2, 0f40000000;
	fence.acq_rel.sys;
	st.global.u32 [%rd1], %r3;
END:
	ret;
}
`

// The changes of a small kernel, by hand.
func TestAll(t *testing.T) {
	m, err := ptxrun.Parse([]byte(text))
	require.NoError(t, err)
	k, _ := m.Kernel("k")
	got := map[string][]string{}
	for _, x := range All(k) {
		op, _, _ := strings.Cut(x.Was, " ")
		if x.Class == Predicate {
			op = "bra"
		}
		got[op] = append(got[op], x.Class+": "+x.Mutation.String())
		if want := x.Class == Order || op == "fence.acq_rel.sys"; x.OrderOnly != want {
			t.Errorf("%v: order only %v", x, x.OrderOnly)
		}
	}
	want := map[string][]string{
		"ld.param.u64": {"constant: operand 1 is [k_param_0+8]"},
		"add.s32":      {"operation: opcode sub.s32", "constant: operand 2 is 6", "constant: operand 2 is 4"},
		"setp.lt.u32": {"comparison: opcode setp.le.u32", "comparison: opcode setp.ge.u32",
			"operand: operand 1 is %r1"},
		"bra": {"predicate: negate the guard"},
		"shl.b32": {"operation: opcode shr.u32", "operand: operand 1 is %r1",
			"operand: operand 2 is %r2"},
		"bar.sync": {"barrier: drop"},
		"ld.acquire.gpu.global.u32": {"order: opcode ld.relaxed.gpu.global.u32",
			"order: opcode ld.acquire.cta.global.u32", "constant: operand 1 is [%rd1+12]"},
		"mul.f32":           {"operation: opcode add.f32", "constant: operand 2 is 0f40800000"},
		"fence.acq_rel.sys": {"barrier: drop", "order: opcode fence.acq_rel.gpu"},
		"st.global.u32": {"store: drop", "constant: operand 0 is [%rd1+4]",
			"operand: operand 1 is %r1", "operand: operand 1 is %r2"},
	}
	for op, list := range want {
		slices.Sort(list)
		slices.Sort(got[op])
		if !slices.Equal(list, got[op]) {
			t.Errorf("%s:\n got %q\nwant %q", op, got[op], list)
		}
		delete(got, op)
	}
	if len(got) != 0 {
		t.Errorf("more than wanted: %q", got)
	}
}

// Samples of every committed kernel parse, differ from each other and from what is there, and come
// again with their seed.
func TestSampleOfEveryKernel(t *testing.T) {
	modules, err := kernels.Modules()
	require.NoError(t, err)
	classes := map[string]int{}
	for _, c := range modules {
		m, err := ptxrun.Parse([]byte(c.PTX))
		require.NoError(t, err)
		for _, k := range c.Kernels {
			const n = 2
			list, err := Sample(m, k.Name, n, 1)
			require.NoError(t, err)
			again, _ := Sample(m, k.Name, n, 1)
			other, _ := Sample(m, k.Name, n, 2)
			if len(list) != n || !reflect.DeepEqual(list, again) ||
				reflect.DeepEqual(list, other) {
				t.Errorf("%s: %v, again %v, with another seed %v", k.Name, list, again, other)
			}
			for i, x := range list {
				classes[x.Class]++
				changed, err := m.WithMutation(k.Name, x.Index, x.Mutation)
				if err != nil {
					t.Errorf("%v: %v", x, err)
					continue
				}
				now, _ := changed.Kernel(k.Name)
				if now.Instr(x.Index).String() == x.Was || slices.Contains(list[:i], x) {
					t.Errorf("%v is no change of its own", x)
				}
			}
		}
	}
	for _, c := range Classes() {
		if classes[c] == 0 {
			t.Errorf("no sample of class %s", c)
		}
	}
	t.Log(classes)
	if _, err := Sample(&ptxrun.Module{}, "none", 1, 1); err == nil {
		t.Error("a kernel that is not there gave a sample")
	}
}
