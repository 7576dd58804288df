package ptxrun

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// launchWords runs a kernel of one parameter, an address of n words of 32 bits, and returns those.
func launchWords(t testing.TB, body string, n int, l Launch) ([]uint32, Stats, error) {
	t.Helper()
	k := mustKernel(t, head+".entry f(.param .u64 out) {\n"+body+"\n}")
	out, pos := words[uint32](n)
	l.Params = pack(pos)
	if l.MaxInstructions == 0 {
		l.MaxInstructions = 50_000_000
	}
	s, err := k.Run(context.Background(), l)
	return out, s, err
}

// begin declares registers, and makes %o the address of the thread's word and %l its index.
const begin = `.reg .b32 %r<40>; .reg .b64 %rd<20>, %o; .reg .b32 %l; .reg .pred %p<10>;
	ld.param.u64 %rd0, [out]; mov.u32 %l, %tid.x; mul.wide.u32 %o, %l, 4; add.s64 %o, %rd0, %o;
	`

// everyWay runs a launch in order and with seeds, with one worker and several.
func everyWay(t *testing.T, fn func(t *testing.T, l Launch)) {
	for _, l := range []Launch{{}, {Seed: 1}, {Seed: 2, Workers: 2}, {Seed: 3, Resident: 1}} {
		t.Run(fmt.Sprintf("seed %d, %d workers", l.Seed, l.Workers), func(t *testing.T) {
			fn(t, l)
		})
	}
}

// Nested branches, and loops of as many rounds as the lane's number.
func TestDivergence(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block = [3]int{70}
		got, s, err := launchWords(t, begin+`
	mov.u32 %r1, 0;
	and.b32 %r2, %l, 1; setp.eq.u32 %p1, %r2, 0;
	@%p1 bra EVEN;
	and.b32 %r3, %l, 2; setp.eq.u32 %p2, %r3, 0;
	@%p2 bra ONE;
	add.s32 %r1, %r1, 300;
	bra.uni JOIN1;
ONE: add.s32 %r1, %r1, 100;
JOIN1: add.s32 %r1, %r1, 1000;
	bra.uni JOIN;
EVEN: mov.u32 %r4, 0;
LOOP: setp.ge.u32 %p3, %r4, %l;
	@%p3 bra JOIN;
	add.s32 %r4, %r4, 1; add.s32 %r1, %r1, %r4;
	bra.uni LOOP;
JOIN: activemask.b32 %r5;
	popc.b32 %r5, %r5;
	shl.b32 %r5, %r5, 16; or.b32 %r1, %r1, %r5;
	st.global.u32 [%o], %r1; ret;`, 70, l)
		require.NoError(t, err)
		for i, v := range got {
			want := i * (i + 1) / 2
			switch i & 3 {
			case 1:
				want = 1100
			case 3:
				want = 1300
			}
			warp := min(32, 70-i/32*32)
			require.Equal(t, want|warp<<16, int(v), "lane %d", i)
		}
		require.Greater(t, s.Lanes, s.Instructions)
	})
}

// Lanes that leave early are missed by nobody, and a guarded exit leaves the others.
func TestEarlyExit(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block = [3]int{64}
		got, _, err := launchWords(t, begin+`
	and.b32 %r1, %l, 3; setp.eq.u32 %p1, %r1, 0;
	@%p1 ret;
	setp.eq.u32 %p2, %r1, 1;
	@%p2 bra A;
	setp.eq.u32 %p3, %r1, 2;
	@%p3 exit;
A:	bar.sync 0;
	mov.pred %p4, 1;
	vote.sync.ballot.b32 %r2, %p4, -1;
	st.global.u32 [%o], %r2; ret;`, 64, l)
		require.NoError(t, err)
		for i, v := range got {
			want := uint32(0)
			if i&3 == 1 || i&3 == 3 {
				want = 0xaaaaaaaa
			}
			require.Equal(t, want, v, "lane %d", i)
		}
	})
}

// A lock that every lane of a warp takes in turn: the lane that has it must go on while the others
// spin, also where they meet behind the loop.
func TestSpinLockInsideAWarp(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block, l.Grid = [3]int{64}, [3]int{3}
		got, _, err := launchWords(t, begin+`
SPIN: atom.acquire.gpu.global.cas.b32 %r1, [%rd0], 0, 1;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra SPIN;
	ld.global.u32 %r2, [%rd0+4]; add.s32 %r2, %r2, 1; st.global.u32 [%rd0+4], %r2;
	st.release.gpu.global.u32 [%rd0], 0;
	ret;`, 2, l)
		require.NoError(t, err)
		require.Equal(t, []uint32{0, 64 * 3}, got)
	})
}

// One side of a branch waits for a word that the other side writes behind the branch.
func TestWaitForTheOtherSide(t *testing.T) {
	for _, pause := range []string{"", "nanosleep.u32 50;"} {
		everyWay(t, func(t *testing.T, l Launch) {
			l.Block = [3]int{32}
			got, _, err := launchWords(t, begin+`
	setp.eq.u32 %p1, %l, 7;
	@!%p1 bra BEHIND;
WAIT: `+pause+` ld.relaxed.gpu.global.u32 %r1, [%rd0];
	setp.ne.u32 %p2, %r1, 31;
	@%p2 bra WAIT;
BEHIND: atom.relaxed.gpu.global.add.u32 %r1, [%rd0], 1;
	ret;`, 1, l)
			require.NoError(t, err)
			require.Equal(t, uint32(32), got[0])
		})
	}
}

// Blocks wait for each other in turn; more are resident than the last one needs.
func TestBlocksWaitForBlocks(t *testing.T) {
	for _, l := range []Launch{{}, {Seed: 1}, {Seed: 2, Workers: 2}, {Resident: 3}} {
		l.Block, l.Grid = [3]int{32}, [3]int{20}
		got, _, err := launchWords(t, begin+`
	mov.u32 %r2, %ctaid.x;
WAIT: ld.acquire.gpu.global.u32 %r1, [%rd0]; nanosleep.u32 10;
	setp.ne.u32 %p2, %r1, %r2;
	@%p2 bra WAIT;
	bar.warp.sync -1;
	setp.ne.u32 %p1, %l, 31;
	@%p1 ret;
	add.s32 %r1, %r1, 1;
	st.release.gpu.global.u32 [%rd0], %r1;
	ret;`, 1, l)
		require.NoError(t, err)
		require.Equal(t, uint32(20), got[0])
	}
}

// Collectives find the lanes of their mask wherever those are.
func TestCollectivesAcrossPaths(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block = [3]int{32}
		got, _, err := launchWords(t, begin+`
	setp.lt.u32 %p1, %l, 16;
	xor.b32 %r3, %l, 31;
	@%p1 bra LOW;
	mul.lo.s32 %r4, %l, 10;
	shfl.sync.idx.b32 %r1, %r4, %r3, 31, -1;
	bra.uni JOIN;
LOW: mul.lo.s32 %r4, %l, 100;
	shfl.sync.idx.b32 %r1, %r4, %r3, 31, -1;
JOIN: st.global.u32 [%o], %r1; ret;`, 32, l)
		require.NoError(t, err)
		for i, v := range got {
			want := (31 - i) * 10
			if i >= 16 {
				want = (31 - i) * 100
			}
			require.Equal(t, want, int(v), "lane %d", i)
		}
	})
	// two masks at one instruction
	got, _, err := launchWords(t, begin+`
	setp.lt.u32 %p1, %l, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;
	and.b32 %r2, %l, 1; setp.eq.u32 %p2, %r2, 1;
	vote.sync.ballot.b32 %r3, %p2, %r1;
	st.global.u32 [%o], %r3; ret;`, 32, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	require.Equal(t, uint32(0xaaaa), got[3])
	require.Equal(t, uint32(0xaaaa0000), got[20])
}

func TestShuffles(t *testing.T) {
	for _, c := range []struct {
		text string
		want func(l int) (from int, ok bool)
	}{
		{"idx.b32 %r1|%p1, %l, 5, 31", func(int) (int, bool) { return 5, true }},
		{"up.b32 %r1|%p1, %l, 3, 0", func(l int) (int, bool) { return l - 3, l >= 3 }},
		{"down.b32 %r1|%p1, %l, 3, 31", func(l int) (int, bool) { return l + 3, l < 29 }},
		{"bfly.b32 %r1|%p1, %l, 9, 31", func(l int) (int, bool) { return l ^ 9, true }},
		// segments of 8: c = (32-8)<<8 | 7 for down and idx, 0 for up
		{"down.b32 %r1|%p1, %l, 3, 0x1807", func(l int) (int, bool) { return l + 3, l&7 < 5 }},
		{"up.b32 %r1|%p1, %l, 3, 0x1800", func(l int) (int, bool) { return l - 3, l&7 >= 3 }},
		{"idx.b32 %r1|%p1, %l, 9, 0x1807", func(l int) (int, bool) { return l&^7 | 1, true }},
	} {
		got, _, err := launchWords(t, begin+"shfl.sync."+c.text+`, -1;
	selp.b32 %r2, 256, 0, %p1; or.b32 %r1, %r1, %r2; st.global.u32 [%o], %r1; ret;`, 32,
			Launch{Block: [3]int{32}})
		require.NoError(t, err)
		for l, v := range got {
			from, ok := c.want(l)
			if ok {
				from |= 256
			} else {
				from = l
			}
			require.Equal(t, from, int(v), "%s of lane %d", c.text, l)
		}
	}
}

func TestVotes(t *testing.T) {
	got, _, err := launchWords(t, begin+`
	setp.lt.u32 %p1, %l, 5;
	vote.sync.any.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;
	vote.sync.all.pred %p2, %p1, -1; selp.b32 %r2, 2, 0, %p2; or.b32 %r1, %r1, %r2;
	vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r2, 4, 0, %p2; or.b32 %r1, %r1, %r2;
	setp.lt.u32 %p1, %l, 99;
	vote.sync.uni.pred %p2, %p1, -1; selp.b32 %r2, 8, 0, %p2; or.b32 %r1, %r1, %r2;
	redux.sync.add.u32 %r2, %l, -1; shl.b32 %r2, %r2, 8; or.b32 %r1, %r1, %r2;
	and.b32 %r3, %l, 3; match.sync.any.b32 %r4, %r3, -1; popc.b32 %r4, %r4;
	shl.b32 %r4, %r4, 20; or.b32 %r1, %r1, %r4;
	match.sync.all.b32 %r4|%p3, %r3, -1; selp.b32 %r2, 16, 0, %p3; or.b32 %r1, %r1, %r2;
	elect.sync %r4|%p3, -1; selp.b32 %r2, 32, 0, %p3; or.b32 %r1, %r1, %r2;
	st.global.u32 [%o], %r1; ret;`, 32, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	for l, v := range got {
		want := uint32(1 | 8 | 496<<8 | 8<<20)
		if l == 0 {
			want |= 32
		}
		require.Equal(t, want, v, "lane %d", l)
	}
}

// A tree of sums in shared memory needs every barrier; generic addresses reach it, too.
func TestBarrierAndSharedMemory(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block, l.Grid = [3]int{256}, [3]int{5}
		got, _, err := launchWords(t, `.shared .align 4 .b8 sum[1024];
	`+begin+`
	mov.u64 %rd1, sum; cvta.shared.u64 %rd2, %rd1; mul.wide.u32 %rd3, %l, 4; add.s64 %rd3, %rd2, %rd3;
	st.u32 [%rd3], %l;
	mov.u32 %r1, 128;
LOOP: bar.sync 0;
	setp.ge.u32 %p1, %l, %r1;
	@%p1 bra NEXT;
	mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd3, %rd4;
	ld.u32 %r2, [%rd4]; ld.u32 %r3, [%rd3]; add.s32 %r2, %r2, %r3; st.u32 [%rd3], %r2;
NEXT: shr.u32 %r1, %r1, 1; setp.ne.u32 %p2, %r1, 0;
	@%p2 bra LOOP;
	setp.ne.u32 %p3, %l, 0;
	@%p3 ret;
	ld.shared.u32 %r4, [sum];
	mov.u32 %r5, %ctaid.x; mul.wide.u32 %rd5, %r5, 4; add.s64 %rd5, %rd0, %rd5;
	st.global.u32 [%rd5], %r4; ret;`, 5, l)
		require.NoError(t, err)
		require.Equal(t, []uint32{32640, 32640, 32640, 32640, 32640}, got)
	})
}

// Named barriers with counts: producers arrive and go on, consumers wait.
func TestNamedBarriers(t *testing.T) {
	got, _, err := launchWords(t, `.shared .b32 word; `+begin+`
	setp.ge.u32 %p1, %l, 32;
	@%p1 bra CONSUME;
	st.shared.u32 [word], 7;
	bar.arrive 1, 64;
	ret;
CONSUME: bar.sync 1, 64;
	ld.shared.u32 %r1, [word]; st.global.u32 [%o], %r1; ret;`, 64, Launch{Block: [3]int{64}})
	require.NoError(t, err)
	require.Equal(t, uint32(7), got[40])
}

func TestLocalMemoryAndVectors(t *testing.T) {
	got, _, err := launchWords(t, `.local .align 16 .b8 depot[32]; .reg .b64 %SP, %SPL; `+begin+`
	mov.u64 %SPL, depot; cvta.local.u64 %SP, %SPL;
	add.s32 %r1, %l, 1; add.s32 %r2, %l, 2; add.s32 %r3, %l, 3;
	st.local.v4.u32 [%SPL+16], {%l, %r1, %r2, %r3};
	ld.u64 %rd1, [%SP+24];
	mov.b64 {%r4, %r5}, %rd1;
	ld.local.v2.u16 {%r6, %r7}, [depot+28];
	add.s32 %r4, %r4, %r5; add.s32 %r4, %r4, %r6; add.s32 %r4, %r4, %r7;
	st.global.u32 [%o], %r4; ret;`, 32, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	for l, v := range got {
		require.Equal(t, uint32(3*l+8), v)
	}
}

func TestSubwordAccesses(t *testing.T) {
	got, _, err := launchWords(t, begin+`
	.reg .b16 %rs<4>;
	mov.u32 %r1, 0x8182fff1; st.global.u32 [%o], %r1;
	ld.global.s8 %r2, [%o]; ld.global.u8 %r3, [%o]; ld.global.s16 %r4, [%o+2];
	ld.global.u16 %rs1, [%o+2]; ld.global.s8 %rs2, [%o+3]; cvt.u32.u16 %r5, %rs2;
	xor.b32 %r2, %r2, %r3; xor.b32 %r2, %r2, %r4; xor.b32 %r2, %r2, %r5;
	st.global.u32 [%o], %r2; st.global.u8 [%o], %rs1; ret;`, 1, Launch{})
	require.NoError(t, err)
	want := uint32(0xfffffff1) ^ 0xf1 ^ 0xffff8182 ^ 0xff81
	require.Equal(t, want&^0xff|0x82, got[0])
}

func TestAtomics(t *testing.T) {
	everyWay(t, func(t *testing.T, l Launch) {
		l.Block, l.Grid = [3]int{64}, [3]int{4}
		got, _, err := launchWords(t, `.shared .b32 count; `+begin+`
	atom.relaxed.gpu.global.add.u32 %r1, [%rd0], 1;
	atom.relaxed.sys.global.max.s64 %rd1, [%rd0+8], -5;
	cvt.u64.u32 %rd2, %l; atom.relaxed.gpu.global.min.u64 %rd1, [%rd0+16], %rd2;
	red.relaxed.gpu.global.or.b32 [%rd0+24], %l;
	atom.global.inc.u32 %r2, [%rd0+28], 6;
	red.global.add.f32 [%rd0+32], 0f3F800000;
	atom.global.xor.b32 %r2, [%rd0+36], 1;
	atom.global.dec.u32 %r2, [%rd0+40], 100;
	st.shared.u32 [count], 0; bar.sync 0;
	red.relaxed.cta.shared.add.u32 [count], 2; bar.sync 0;
	ld.shared.u32 %r3, [count];
	atom.global.exch.b32 %r2, [%rd0+44], %r3; ret;`, 12, l)
		require.NoError(t, err)
		// 256 turns of inc with 6 count modulo 7; dec from 0 goes to 100 and down
		require.Equal(t, []uint32{256, 0, 0, 0, 0, 0, 63, 256 % 7, math.Float32bits(256), 0,
			100 - (256-1)%101, 128}, got)
	})
}

// A copy is there after the wait for its group, and with seeds maybe before, but never without.
func TestAsyncCopy(t *testing.T) {
	body := func(wait string) string {
		return `.shared .align 16 .b8 buf[512]; ` + begin + `
	mul.lo.s32 %r1, %l, 16; mul.wide.u32 %rd1, %l, 4; and.b64 %rd1, %rd1, 112; add.s64 %rd1, %rd0, %rd1;
	mov.u32 %r9, 0; st.shared.u32 [%r1], %r9; st.shared.u32 [%r1+12], 9;
	cp.async.cg.shared.global [%r1], [%rd1], 16, 12;
	cp.async.commit_group;
	cp.async.ca.shared.global [%r1+4], [%rd0], 4;
	cp.async.commit_group;
	` + wait + `
	ld.shared.u32 %r2, [%r1]; ld.shared.u32 %r3, [%r1+12];
	shl.b32 %r3, %r3, 16; or.b32 %r2, %r2, %r3;
	bar.sync 0;
	st.global.u32 [%o], %r2; ret;`
	}
	run := func(wait string, seed uint64) []uint32 {
		k := mustKernel(t, head+".entry f(.param .u64 out) {\n"+body(wait)+"\n}")
		store, _ := words[uint64](20)
		out := alignedWords(store)
		for i := range out {
			out[i] = uint32(i + 1)
		}
		_, err := k.Run(context.Background(), Launch{Block: [3]int{32}, Seed: seed,
			Params: pack(address(out))})
		require.NoError(t, err)
		return out
	}
	for _, wait := range []string{"cp.async.wait_group 1;", "cp.async.wait_group 0;", "cp.async.wait_all;"} {
		for seed := range uint64(4) {
			for l, v := range run(wait, seed) {
				require.Equal(t, uint32(l/4*4+1), v, "%s seed %d lane %d", wait, seed, l)
			}
		}
	}
	require.Equal(t, uint32(9<<16), run("", 0)[5], "nothing is there without a wait")
	require.Equal(t, uint32(9<<16), run("cp.async.wait_group 2;", 0)[5])
}

// Tiles against a plain product, by the layouts of the PTX ISA written down once more.
func TestTensorTiles(t *testing.T) {
	for _, c := range []struct {
		op      string
		k, each int
		encode  func(v int) uint32
	}{
		{"m16n8k8.row.col.f32.tf32.tf32.f32", 8, 1,
			func(v int) uint32 { return math.Float32bits(float32(v)) }},
		{"m16n8k16.row.col.f32.bf16.bf16.f32", 16, 2,
			func(v int) uint32 { return math.Float32bits(float32(v)) >> 16 }},
		{"m16n8k16.row.col.f32.f16.f16.f32", 16, 2,
			func(v int) uint32 { return toF16(math.Float32bits(float32(v))) }},
		{"m16n8k8.row.col.f32.bf16.bf16.f32", 8, 2,
			func(v int) uint32 { return math.Float32bits(float32(v)) >> 16 }},
	} {
		a := func(i, k int) int { return (i*7+k*3)%11 - 5 }
		b := func(k, j int) int { return (k*5+j*2)%7 - 3 }
		na, nb := 16*c.k/32/c.each, 8*c.k/32/c.each
		in, inAt := words[uint32](32 * 10)
		for l := range 32 {
			g, q := l>>2, l&3
			for r := range na {
				row, half := g, r>>1
				if r&1 == 1 {
					row += 8
				}
				for e := range c.each {
					in[l*10+r] |= c.encode(a(row, q*c.each+e+half*4*c.each)) << (16 * e)
				}
			}
			for r := range nb {
				for e := range c.each {
					in[l*10+4+r] |= c.encode(b(q*c.each+e+r*4*c.each, g)) << (16 * e)
				}
			}
			in[l*10+6] = math.Float32bits(100)
		}
		out, outAt := words[float32](128)
		list := func(prefix string, n, from int) string {
			var s []string
			for i := range n {
				s = append(s, fmt.Sprintf("%s%d", prefix, from+i))
			}
			return "{" + strings.Join(s, ", ") + "}"
		}
		k := mustKernel(t, head+`.entry f(.param .u64 in, .param .u64 out) {
	.reg .b32 %r<10>, %l; .reg .f32 %f<4>; .reg .b64 %rd<4>;
	mov.u32 %l, %laneid; ld.param.u64 %rd0, [in]; mul.wide.u32 %rd1, %l, 40; add.s64 %rd0, %rd0, %rd1;
	ld.global.v2.u32 {%r0, %r1}, [%rd0]; ld.global.v2.u32 {%r2, %r3}, [%rd0+8];
	ld.global.v2.u32 {%r4, %r5}, [%rd0+16];
	ld.global.f32 %f0, [%rd0+24]; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
	mma.sync.aligned.`+c.op+" {%f0, %f1, %f2, %f3}, "+list("%r", na, 0)+", "+list("%r", nb, 4)+`, {%f0, %f1, %f2, %f3};
	ld.param.u64 %rd2, [out]; mul.wide.u32 %rd1, %l, 16; add.s64 %rd2, %rd2, %rd1;
	st.global.f32 [%rd2], %f0; st.global.f32 [%rd2+4], %f1; st.global.f32 [%rd2+8], %f2; st.global.f32 [%rd2+12], %f3;
	ret; }`)
		_, err := k.Run(context.Background(), Launch{Block: [3]int{32}, Params: pack(inAt, outAt)})
		require.NoError(t, err)
		for i := range 16 {
			for j := range 8 {
				want := 100
				for x := range c.k {
					want += a(i, x) * b(x, j)
				}
				lane, reg := i%8*4+j/2, i/8*2+j%2
				require.Equal(t, float32(want), out[lane*4+reg], "%s D[%d][%d]", c.op, i, j)
			}
		}
	}
	_, _, err := launchWords(t, begin+`.reg .f32 %f<4>; setp.lt.u32 %p1, %l, 4;
	@%p1 mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3};
	ret;`, 1, Launch{Block: [3]int{32}})
	require.ErrorContains(t, err, "by a part of a warp")
}

func TestLoadMatrix(t *testing.T) {
	got, _, err := launchWords(t, `.shared .align 16 .b8 m[512]; `+begin+`
	.reg .b16 %rs<2>;
	mov.u32 %r1, 0;
FILL: shl.b32 %r2, %l, 4; mad.lo.s32 %r2, %r1, 2, %r2; mad.lo.s32 %r3, %l, 8, %r1;
	st.shared.u16 [%r2], %r3; add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 8;
	@%p1 bra FILL;
	bar.sync 0;
	shl.b32 %r4, %l, 4;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r4];
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r4];
	mul.lo.s32 %r10, %l, 8; add.s64 %rd1, %o, 0; mul.wide.u32 %rd2, %r10, 1; add.s64 %rd1, %o, %rd2;
	st.global.u32 [%o], %r7; st.global.u32 [%o+128], %r9; ret;`, 64, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	for l := range 32 {
		row, col := l/4, l%4*2
		pos := (16+row)*8 + col // matrix 2
		require.Equal(t, uint32(pos|(pos+1)<<16), got[l])
		require.Equal(t, uint32(col*8+row|((col+1)*8+row)<<16), got[32+l])
	}
}

func TestBranchTable(t *testing.T) {
	body := begin + `
	and.b32 %r1, %l, 3; add.s32 %r1, %r1, BASE;
T:	.branchtargets A, B, A, C;
	brx.idx %r1, T;
A:	mov.u32 %r2, 1; bra.uni E;
B:	mov.u32 %r2, 2; bra.uni E;
C:	mov.u32 %r2, 3;
E:	activemask.b32 %r3; popc.b32 %r3, %r3; shl.b32 %r3, %r3, 8; or.b32 %r2, %r2, %r3;
	st.global.u32 [%o], %r2; ret;`
	got, _, err := launchWords(t, strings.Replace(body, "BASE", "0", 1), 32, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	for l, v := range got {
		require.Equal(t, 32<<8|[]uint32{1, 2, 1, 3}[l&3], v)
	}
	_, _, err = launchWords(t, strings.Replace(body, "BASE", "1", 1), 32, Launch{Block: [3]int{32}})
	require.ErrorContains(t, err, "index 4 of 4 targets")
}

func TestSpecialRegisters(t *testing.T) {
	k := mustKernel(t, head+`.entry f(.param .u64 out) {
	.reg .b32 %r<20>; .reg .b64 %rd<6>; .reg .pred %p;
	mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
	mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ntid.y; mov.u32 %r7, %nctaid.y;
	mad.lo.s32 %r8, %r3, %r6, %r2; mov.u32 %r9, %ntid.x; mad.lo.s32 %r8, %r8, %r9, %r1;
	mad.lo.s32 %r10, %r4, %r7, %r5; mov.u32 %r11, %laneid; mov.u32 %r12, %lanemask_lt;
	mov.u64 %rd3, %globaltimer; mov.u64 %rd4, %clock64; setp.ge.u64 %p, %rd3, 1000;
	selp.b32 %r13, 1, 0, %p; shl.b32 %r13, %r13, 30; xor.b32 %r12, %r12, %r13;
	mad.lo.s32 %r10, %r10, 24, %r8; ld.param.u64 %rd0, [out]; mul.wide.u32 %rd1, %r10, 4;
	add.s64 %rd0, %rd0, %rd1; popc.b32 %r12, %r12; st.global.u32 [%rd0], %r12; ret; }`)
	out, pos := words[uint32](24 * 6)
	_, err := k.Run(context.Background(), Launch{Block: [3]int{2, 3, 4}, Grid: [3]int{3, 2},
		Params: pack(pos), Clock: func() uint64 { return 1000 }})
	require.NoError(t, err)
	for i, v := range out {
		require.Equal(t, uint32(i%24+1), v, "thread %d", i)
	}
}

// Module variables, with values at the start, and dynamic shared memory.
func TestModuleVariables(t *testing.T) {
	m, err := Parse([]byte(head + `.global .align 8 .u32 table[3] = {10, -20, 30}; .const .u64 wide = 5;
	.extern .shared .align 16 .b8 dyn[]; .shared .b32 fixed;
	.visible .entry f(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %rd<5>;
	mov.u64 %rd1, table; ld.global.u32 %r1, [%rd1+4]; ld.global.u32 %r2, [table+8]; ld.const.u64 %rd2, [wide];
	cvt.u32.u64 %r3, %rd2; add.s32 %r1, %r1, %r2; add.s32 %r1, %r1, %r3;
	st.shared.u32 [fixed], 1; st.shared.u32 [dyn+12], %r1; ld.shared.u32 %r4, [dyn+12];
	mov.u32 %r5, dyn; mad.lo.s32 %r4, %r5, 1000, %r4;
	ld.param.u64 %rd3, [out]; st.global.u32 [%rd3], %r4; ret; }`))
	require.NoError(t, err)
	k, _ := m.Kernel("f")
	out, pos := words[uint32](1)
	_, err = k.Run(context.Background(), Launch{Params: pack(pos), SharedBytes: 16,
		Memory: Memory{{Base: pos, Size: 4}}})
	require.NoError(t, err)
	require.Equal(t, uint32(16015), out[0])
	_, err = k.Run(context.Background(), Launch{Params: pack(pos), SharedBytes: 8})
	require.ErrorContains(t, err, "outside the 24 bytes of shared memory")
}

func TestFaults(t *testing.T) {
	for name, c := range map[string]struct{ body, want string }{
		"stray":      {"st.global.u32 [%rd0+64], %l;", "is outside the memory of the launch"},
		"below":      {"st.global.u32 [%rd0+-4], %l;", "is outside the memory of the launch"},
		"misaligned": {"ld.global.u32 %r1, [%rd0+2];", "is not aligned to 4 bytes"},
		"vector":     {"ld.global.v2.u32 {%r1, %r2}, [%rd0+4];", "is not aligned to 8 bytes"},
		"null":       {"ld.global.u32 %r1, [0];", "address 0x0+4 is outside"},
		"generic":    {"mov.u64 %rd1, 0x5000000000000000; ld.u32 %r1, [%rd1];", "is outside the memory"},
		"shared":     {"mov.u32 %r1, 4; ld.shared.u32 %r1, [%r1];", "outside the 4 bytes of shared memory"},
		"local":      {"ld.local.u32 %r1, [0];", "outside the 0 bytes of local memory"},
		"parameter":  {"ld.param.u32 %r1, [out+8];", "outside the 8 bytes of parameter memory"},
		"trap":       {"trap;", ": trap"},
		"mask":       {"setp.eq.u32 %p1, %l, 3; @%p1 bar.warp.sync 1;", "lane 3, ptx line"},
		"barrier":    {"bar.sync 16;", "barrier 16"},
		"count":      {"bar.sync 1, 33;", "multiple of 32"},
		"counts": {"setp.lt.u32 %p1, %l, 8; @%p1 bra A; bar.sync 0, 32; A: bar.sync 0, 64;",
			"others came to one of"},
		"two barriers": {"setp.lt.u32 %p1, %l, 8; @%p1 bra A; bar.sync 0; bra E; A: bar.sync 0; E:",
			"another barrier instruction"},
		"deadlock": {"setp.lt.u32 %p1, %l, 8; @%p1 bra A; bar.sync 0; bra E; A: bar.sync 1; E:",
			"no thread can go on"},
		"missing": {"setp.lt.u32 %p1, %l, 8; @%p1 bra A; bar.warp.sync -1; bra E; A: shfl.sync.idx.b32 %r1, %l, 0, 31, -1; E:",
			"wait for lanes 0xffffffff"},
		"endless": {"L: bra L;", "more than MaxInstructions, 100000"},
	} {
		k := mustKernel(t, head+".entry f(.param .u64 out) { .shared .b32 x; "+begin+
			"@%p9 st.shared.u32 [x], 0;\n"+c.body+"\nret; }")
		_, pos := words[uint64](8)
		for _, seed := range []uint64{0, 5} {
			_, err := k.Run(context.Background(), Launch{Block: [3]int{32}, Params: pack(pos),
				Seed: seed, Memory: Memory{{Base: pos, Size: 64}}, MaxInstructions: 100000})
			require.ErrorContains(t, err, c.want, name)
			require.ErrorContains(t, err, "kernel f", name)
		}
	}
	// without a list, what is not mapped is an error and no crash
	k := mustKernel(t, head+`.entry f() { .reg .b64 %r; mov.u64 %r, 0x100000; st.global.u64 [%r+8], 1; ret; }`)
	_, err := k.Run(context.Background(), Launch{})
	require.ErrorContains(t, err, "address 0x100008 is not mapped")
	// read-only memory
	k = mustKernel(t, head+`.entry f(.param .u64 out) { .reg .b64 %r; ld.param.u64 %r, [out]; st.global.u64 [%r], 1; ret; }`)
	_, pos := words[uint64](1)
	_, err = k.Run(context.Background(), Launch{Params: pack(pos),
		Memory: Memory{{Base: pos, Size: 8, ReadOnly: true}}})
	require.ErrorContains(t, err, "outside the memory")
	_, err = k.Run(context.Background(), Launch{Params: pack(pos),
		Memory: Memory{{Base: pos, Size: 8, ReadOnly: true}, {Base: pos - 16, Size: 64}}})
	require.NoError(t, err, "another region allows it")
}

func TestLaunchErrors(t *testing.T) {
	k := mustKernel(t, head+".entry f(.param .u64 out) .maxntid 64, 1, 1 { ret; }")
	for want, l := range map[string]Launch{
		"65 threads to a block, and the kernel takes up to 64": {Block: [3]int{65}, Params: pack(0)},
		"0 bytes of parameters, not 8":                         {},
		"grid: dimensions":                                     {Grid: [3]int{-1}, Params: pack(0)},
		"-1 bytes of shared memory":                            {SharedBytes: -1, Params: pack(0)},
	} {
		_, err := k.Run(context.Background(), l)
		require.ErrorContains(t, err, want)
	}
}

func TestContextEndsALaunch(t *testing.T) {
	k := mustKernel(t, head+".entry f() { L: nanosleep.u32 1000; bra L; }")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := k.Run(ctx, Launch{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "kernel f: after")
}

// With one worker a seed gives the same run again; seeds differ.
func TestSeedRepeats(t *testing.T) {
	run := func(seed uint64) []uint32 {
		got, _, err := launchWords(t, begin+`
	mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r2, %r2, %r3, %l;
	atom.relaxed.gpu.global.add.u32 %r1, [%rd0], 1;
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd0, %rd1;
	st.global.u32 [%rd1+4], %r2; ret;`, 513, Launch{Grid: [3]int{4}, Block: [3]int{128}, Seed: seed})
		require.NoError(t, err)
		return got
	}
	require.Equal(t, run(7), run(7))
	require.NotEqual(t, run(7), run(8))
	for i, v := range run(0)[1:33] {
		require.Equal(t, uint32(i), v)
	}
}

// Registers that share a row hold what they should: many values alive over a loop, with divergence.
func TestManyRegisters(t *testing.T) {
	var b strings.Builder
	b.WriteString(begin + ".reg .b32 %x<200>;\n")
	for i := range 200 {
		fmt.Fprintf(&b, "mul.lo.s32 %%x%d, %%l, %d;\n", i, i+1)
	}
	b.WriteString("and.b32 %r1, %l, 7;\nL: ")
	for i := range 100 {
		fmt.Fprintf(&b, "add.s32 %%x%d, %%x%d, %%x%d;\n", i, i, 199-i)
	}
	b.WriteString("sub.s32 %r1, %r1, 1; setp.ge.s32 %p1, %r1, 0; @%p1 bra L;\nmov.u32 %r2, 0;\n")
	for i := range 200 {
		fmt.Fprintf(&b, "mad.lo.s32 %%r2, %%x%d, %d, %%r2;\n", i, i%5)
	}
	b.WriteString("st.global.u32 [%o], %r2; ret;")
	got, _, err := launchWords(t, b.String(), 32, Launch{Block: [3]int{32}})
	require.NoError(t, err)
	for l, v := range got {
		want := uint32(0)
		for i := range 200 {
			x := l * (i + 1)
			if i < 100 {
				x += (l&7 + 1) * l * (200 - i)
			}
			want += uint32(x * (i % 5))
		}
		require.Equal(t, want, v, "lane %d", l)
	}
	b.Reset()
	b.WriteString(begin + ".reg .b32 %x<1001>; mov.u32 %x0, %l;\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "add.s32 %%x%d, %%x%d, 1;\n", i+1, i)
	}
	k := mustKernel(t, head+".entry f(.param .u64 out) {\n"+b.String()+
		"st.global.u32 [%o], %x1000; ret; }")
	require.Less(t, int(k.prog.slots), 20)
}

func TestCoverage(t *testing.T) {
	_, s, err := launchWords(t, begin+`setp.gt.u32 %p1, %l, 100;
	@%p1 bra NEVER;
	ret;
NEVER: st.global.u32 [%o], 1; ret;`, 32, Launch{Block: [3]int{64}, Grid: [3]int{2}})
	require.NoError(t, err)
	n := len(s.Executed)
	require.Equal(t, int64(4), s.Executed[0])
	require.Equal(t, int64(4), s.Executed[n-3])
	require.Zero(t, s.Executed[n-2])
	require.Zero(t, s.Executed[n-1])
	var sum int64
	for _, v := range s.Executed {
		sum += v
	}
	require.Equal(t, sum*32, s.Lanes)
}

// BenchmarkRun measures a kernel of float arithmetic and loads: lanes/s is instructions of lanes.
func BenchmarkRun(b *testing.B) {
	k := mustKernel(b, head+`.entry f(.param .u64 out) { .reg .f32 %f<4>;
	`+begin+`
	mov.u32 %r1, 0; mov.f32 %f1, 0f3F800000;
L:	ld.global.f32 %f2, [%o]; fma.rn.f32 %f1, %f1, %f2, %f2; add.s32 %r1, %r1, 1; xor.b32 %r2, %r1, %l;
	setp.lt.u32 %p1, %r1, 1000;
	@%p1 bra L;
	st.global.f32 [%o], %f1; ret; }`)
	_, pos := words[uint32](256)
	var lanes int64
	for b.Loop() {
		s, err := k.Run(context.Background(), Launch{Block: [3]int{256}, Params: pack(pos),
			Memory: Memory{{Base: pos, Size: 1024}}})
		require.NoError(b, err)
		lanes += s.Lanes
	}
	b.ReportMetric(float64(lanes)/b.Elapsed().Seconds(), "lanes/s")
}
