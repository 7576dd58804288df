package webgraph

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/realdata"
	"helios/internal/testing/wide"
)

// bitWriter is the reverse of bitReader.
type bitWriter struct {
	b []byte
	n int
}

func (w *bitWriter) write(v uint64, n uint) {
	for i := int(n) - 1; i >= 0; i-- {
		if w.n%8 == 0 {
			w.b = append(w.b, 0)
		}
		w.b[w.n/8] |= byte(v>>uint(i)&1) << (7 - w.n%8)
		w.n++
	}
}

func (w *bitWriter) number(c code, k uint, v uint64) {
	switch c {
	case unary:
		for range v {
			w.write(0, 1)
		}
		w.write(1, 1)
	case gamma, delta:
		msb := uint(bits.Len64(v+1)) - 1
		if c == gamma {
			w.number(unary, 0, uint64(msb))
		} else {
			w.number(gamma, 0, uint64(msb))
		}
		w.write((v+1)&(1<<msb-1), msb)
	case zeta:
		h := (uint(bits.Len64(v+1)) - 1) / k
		w.number(unary, 0, uint64(h))
		left := uint64(1) << (h * k)
		if v+1-left < left {
			w.write(v+1-left, h*k+k-1)
		} else {
			w.write(v+1, h*k+k)
		}
	default:
		groups := max((bits.Len64(v)+2)/3, 1)
		for i := groups - 1; i >= 0; i-- {
			w.write(map[bool]uint64{true: 1}[i == 0], 1)
			w.write(v>>(3*i)&7, 3)
		}
	}
}

func TestCodes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for c, name := range []string{gamma: "gamma", delta: "delta", zeta: "zeta", unary: "unary",
		nibble: "nibble"} {
		if name == "" {
			continue
		}
		for _, k := range []uint{1, 2, 3, 5, 7} {
			w := &bitWriter{}
			var want []uint64
			var starts []int
			for i := range 2000 {
				v := r.Uint64() >> (r.UintN(44) + 20)
				if i < 200 {
					v = uint64(i)
				}
				if code(c) == unary {
					v %= 300
				}
				starts = append(starts, w.n)
				want = append(want, v)
				w.number(code(c), k, v)
			}
			b := newBitReader(bytes.NewReader(w.b), int64(len(w.b)))
			b.buf = make([]byte, 0, 64) // often refilled
			for i, v := range want {
				require.Equal(t, int64(starts[i]), b.pos())
				require.Equal(t, v, b.number(code(c), k), "%s, k=%d, number %d", name, k, i)
			}
			for range 200 {
				i := r.IntN(len(want))
				b.seek(int64(starts[i]))
				require.Equal(t, int64(starts[i]), b.pos())
				require.Equal(t, want[i], b.number(code(c), k))
			}
			require.NoError(t, b.err)
			b.seek(int64(w.n))
			for range 70 {
				b.number(code(c), k)
			}
			require.ErrorIs(t, b.err, errEnd)
		}
	}
	// The published examples (BV format, ζ_3): 1 is 0b100 less one.
	w := &bitWriter{}
	w.number(zeta, 3, 0)
	w.number(gamma, 0, 3)
	require.Equal(t, "100"+"00100", fmt.Sprintf("%08b", w.b[0]))
}

// encode writes lists as BV: references are chosen at random among those that the chain length
// allows.
func encode(lists [][]int64, g *Graph, r *rand.Rand) (graph, offsets []byte) {
	w, off := &bitWriter{}, &bitWriter{}
	depth := make([]int64, len(lists))
	last := 0
	for v, l := range lists {
		off.number(g.offset, g.zetaK, uint64(w.n-last))
		last = w.n
		w.number(g.outdegree, g.zetaK, uint64(len(l)))
		if len(l) == 0 {
			continue
		}
		rest := l
		if g.window > 0 {
			ref := r.Int64N(min(g.window, int64(v)) + 1)
			if ref > 0 && (len(lists[v-int(ref)]) == 0 || g.maxRef >= 0 &&
				depth[v-int(ref)] >= g.maxRef) {
				ref = 0
			}
			w.number(g.reference, g.zetaK, uint64(ref))
			if ref > 0 {
				depth[v] = depth[v-int(ref)] + 1
				var runs []uint64
				copied := map[int64]bool{}
				on := true
				n := uint64(0)
				for _, x := range lists[v-int(ref)] {
					in := slices.Contains(l, x)
					if in {
						copied[x] = true
					}
					if in != on {
						runs, n, on = append(runs, n), 0, in
					}
					n++
				}
				w.number(g.blockCount, g.zetaK, uint64(len(runs)))
				for i, b := range runs {
					if i > 0 {
						b--
					}
					w.number(g.block, g.zetaK, b)
				}
				rest = nil
				for _, x := range l {
					if !copied[x] {
						rest = append(rest, x)
					}
				}
			}
		}
		if len(rest) == 0 {
			continue
		}
		fold := func(x int64) uint64 {
			if x < 0 {
				return uint64(-2*x - 1)
			}
			return uint64(2 * x)
		}
		if g.minInterval > 0 {
			var ivals [][2]int64
			var res []int64
			for i := 0; i < len(rest); {
				j := i + 1
				for j < len(rest) && rest[j] == rest[j-1]+1 {
					j++
				}
				if int64(j-i) >= g.minInterval {
					ivals = append(ivals, [2]int64{rest[i], int64(j - i)})
				} else {
					res = append(res, rest[i:j]...)
				}
				i = j
			}
			w.number(gamma, 0, uint64(len(ivals)))
			next := int64(0)
			for i, iv := range ivals {
				if i == 0 {
					w.number(gamma, 0, fold(iv[0]-int64(v)))
				} else {
					w.number(gamma, 0, uint64(iv[0]-next-1))
				}
				w.number(gamma, 0, uint64(iv[1]-g.minInterval))
				next = iv[0] + iv[1]
			}
			rest = res
		}
		for i, x := range rest {
			if i == 0 {
				w.number(g.residual, g.zetaK, fold(x-int64(v)))
			} else {
				w.number(g.residual, g.zetaK, uint64(x-rest[i-1]-1))
			}
		}
	}
	off.number(g.offset, g.zetaK, uint64(w.n-last))
	return w.b, off.b
}

// randomLists makes lists with runs and with likeness to the lists before.
func randomLists(nodes int, r *rand.Rand) (lists [][]int64, arcs int64) {
	for v := range nodes {
		set := map[int64]bool{}
		if r.IntN(4) > 0 {
			for range r.IntN(6) {
				set[r.Int64N(int64(nodes))] = true
			}
			if r.IntN(3) == 0 {
				node := r.Int64N(int64(nodes))
				for x := node; x < min(node+r.Int64N(20), int64(nodes)); x++ {
					set[x] = true
				}
			}
			if v > 0 && r.IntN(2) == 0 {
				for _, x := range lists[v-1-r.IntN(min(v, 5))] {
					if r.IntN(5) > 0 {
						set[x] = true
					}
				}
			}
		}
		var l []int64
		for x := range set {
			l = append(l, x)
		}
		slices.Sort(l)
		arcs += int64(len(l))
		lists = append(lists, l)
	}
	return lists, arcs
}

func propertiesOf(g *Graph, flags string) string {
	return fmt.Sprintf(
		"#BVGraph properties\nversion=0\nnodes=%d\narcs=%d\nwindowsize=%d\nmaxrefcount=%d\nminintervallength=%d\nzetak=%d\ncompressionflags=%s\ngraphclass=it.unimi.dsi.webgraph.BVGraph\n",
		g.Nodes, g.Arcs, g.window, g.maxRef, g.minInterval, g.zetaK, flags)
}

func write(t testing.TB, graph, offsets []byte, props string) string {
	base := filepath.Join(t.TempDir(), "g")
	require.NoError(t, os.WriteFile(base+".graph", graph, 0o644))
	require.NoError(t, os.WriteFile(base+".properties", []byte(props), 0o644))
	if offsets != nil {
		require.NoError(t, os.WriteFile(base+".offsets", offsets, 0o644))
	}
	return base
}

// all reads a graph, its parts from the last to the first.
func all(base string) (lists map[int64][]int64, parts int, err error) {
	g, err := Open(context.Background(), base)
	if err != nil {
		return nil, 0, err
	}
	defer g.Close()
	lists = map[int64][]int64{}
	for p := g.Parts() - 1; p >= 0 && err == nil; p-- {
		err = g.Read(context.Background(), p, func(v int64, succ []int64) error {
			lists[v] = slices.Clone(succ)
			return nil
		})
	}
	return lists, g.Parts(), err
}

// Every code in every place, windows, chains and intervals of all kinds, in parts and in one piece.
func TestRoundTrip(t *testing.T) {
	seed := uint64(7)
	r := rand.New(rand.NewPCG(seed, 0))
	names := []string{gamma: "GAMMA", delta: "DELTA", zeta: "ZETA", unary: "UNARY",
		nibble: "NIBBLE"}
	pick := func(cs ...code) code { return cs[r.IntN(len(cs))] }
	for round := range 40 {
		lists, arcs := randomLists(400, r)
		g := &Graph{
			Nodes: 400, Arcs: arcs, window: []int64{0, 1, 3, 7}[r.IntN(4)],
			maxRef:      []int64{-1, 0, 1, 3}[r.IntN(4)],
			minInterval: []int64{0, 2, 4}[r.IntN(3)], zetaK: 1 + r.UintN(6),
			outdegree: pick(gamma, delta), reference: pick(unary, gamma, delta),
			blockCount: pick(gamma, unary, delta), block: pick(gamma, unary, delta),
			residual: pick(gamma, delta, zeta, nibble), offset: pick(gamma, delta),
		}
		flags := fmt.Sprintf(
			"OUTDEGREES_%s | REFERENCES_%s | BLOCK_COUNT_%s | BLOCKS_%s | RESIDUALS_%s | OFFSETS_%s",
			names[g.outdegree], names[g.reference], names[g.blockCount], names[g.block],
			names[g.residual], names[g.offset])
		graph, offsets := encode(lists, g, r)
		for _, off := range [][]byte{nil, offsets} {
			got, _, err := all(write(t, graph, off, propertiesOf(g, flags)))
			require.NoError(t, err, "seed %d, round %d: %s", seed, round, propertiesOf(g, flags))
			for v, l := range lists {
				require.Equal(t, l, got[int64(v)], "seed %d, round %d, node %d", seed, round, v)
			}
		}
	}
}

// small is a graph of 60,000 nodes in the default codes.
func small(t testing.TB, nodes int) (lists [][]int64, g *Graph, graph, offsets []byte) {
	r := rand.New(rand.NewPCG(3, 0))
	lists, arcs := randomLists(nodes, r)
	g = &Graph{Nodes: int64(nodes), Arcs: arcs, window: 7, maxRef: 3, minInterval: 4, zetaK: 3,
		outdegree: gamma, reference: unary, blockCount: gamma, block: gamma, residual: zeta,
		offset: gamma}
	graph, offsets = encode(lists, g, r)
	return lists, g, graph, offsets
}

func TestParts(t *testing.T) {
	nodes := 250_000
	if wide.Lean() {
		nodes = 100_000
	}
	lists, g, graph, offsets := small(t, nodes)
	got, parts, err := all(write(t, graph, offsets, propertiesOf(g, "")))
	require.NoError(t, err)
	require.Greater(t, parts, 1, "%d bytes", len(graph))
	for v, l := range lists {
		if len(l) > 0 {
			require.Equal(t, l, got[int64(v)], "node %d", v)
		}
	}
}

func TestDamaged(t *testing.T) {
	_, g, graph, offsets := small(t, 500)
	props := propertiesOf(g, "")
	swap := func(from, to string) string {
		require.Contains(t, props, from)
		return strings.Replace(props, from, to, 1)
	}
	for name, c := range map[string]struct {
		props          string
		graph, offsets []byte
		want           string
	}{
		"other class": {swap("webgraph.BVGraph", "webgraph.EFGraph"), graph, offsets,
			`.properties: graphclass "it.unimi.dsi.webgraph.EFGraph" is not BVGraph`},
		"version": {swap("version=0", "version=1"), graph, offsets,
			`.properties: version "1"`},
		"no nodes": {swap("nodes=500\n", ""), graph, offsets,
			`.properties: nodes="" is not a number`},
		"golomb": {swap("compressionflags=", "compressionflags=RESIDUALS_GOLOMB"), graph,
			offsets, `"RESIDUALS_GOLOMB"`},
		"too many arcs": {swap(fmt.Sprintf("arcs=%d", g.Arcs), fmt.Sprintf("arcs=%d", g.Arcs+1)),
			graph, offsets, fmt.Sprintf("make %d arcs", g.Arcs)},
		"the same alone": {swap(fmt.Sprintf("arcs=%d", g.Arcs), fmt.Sprintf("arcs=%d", g.Arcs+1)),
			graph, nil, fmt.Sprintf("with %d arcs", g.Arcs)},
		"too few arcs": {swap(fmt.Sprintf("arcs=%d", g.Arcs), fmt.Sprintf("arcs=%d", g.Arcs-1)),
			graph, offsets, "arcs; "},
		"truncated": {props, graph[:len(graph)/2], offsets, "would begin at bit"},
		"cut alone": {props, graph[:len(graph)/2], nil, "truncated"},
		"more bytes": {props, append(slices.Clone(graph), make([]byte, 9)...), offsets,
			"the last record ends at bit"},
		"offsets cut": {props, graph, offsets[:len(offsets)-9], ".offsets: entry "},
		"fewer nodes": {swap("nodes=500", "nodes=499"), graph, nil, ""},
		"flags": {swap("compressionflags=", "compressionflags=RESIDUALS_GAMMA"), graph,
			offsets, ".graph: node "},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := all(write(t, c.graph, c.offsets, c.props))
			require.Error(t, err)
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.want)
		})
	}
	// No flipped bit gives lists that are not lists of the graph.
	for i := 0; i < len(graph)*8; i += 61 {
		bad := slices.Clone(graph)
		bad[i/8] ^= 1 << (7 - i%8)
		d := &Graph{}
		*d = *g
		d.Name, d.r, d.size = "g.graph", bytes.NewReader(bad), int64(len(bad))
		if err := d.split(t.Context(), "g.offsets", bytes.NewReader(offsets),
			int64(len(offsets))); err != nil {
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
			continue
		}
		checked(t, d)
	}
}

// checked reads all parts; what is emitted must be rising and in range.
func checked(t testing.TB, g *Graph) {
	for p := range g.parts {
		last := int64(-1)
		err := g.Read(context.Background(), p, func(v int64, succ []int64) error {
			if v <= last {
				t.Fatalf("node %d after %d", v, last)
			}
			last = v
			prev := int64(-1)
			for _, x := range succ {
				if x <= prev || x >= g.Nodes {
					t.Fatalf("node %d: %v", v, succ)
				}
				prev = x
			}
			return nil
		})
		if err != nil {
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		}
	}
}

func FuzzGraph(f *testing.F) {
	_, g, graph, offsets := small(f, 60)
	f.Add([]byte(propertiesOf(g, "")), graph, offsets)
	f.Add([]byte(propertiesOf(g, "RESIDUALS_NIBBLE | BLOCKS_DELTA")), graph, []byte(nil))
	f.Fuzz(func(t *testing.T, props, graph, offsets []byte) {
		g := &Graph{Name: "g.graph", props: "g.properties", r: bytes.NewReader(graph),
			size: int64(len(graph))}
		if g.properties(string(props)) != nil || g.Nodes > 1<<12 || g.Arcs > 1<<16 {
			return
		}
		g.parts = []part{{0, g.Nodes, -1, 0, []int64{0}}}
		if len(offsets) > 0 {
			if err := g.split(context.Background(), "g.offsets", bytes.NewReader(offsets),
				int64(len(offsets))); err != nil {
				require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
				return
			}
		}
		checked(t, g)
	})
}

// The edge list of cnr-2000, source and destination as little-endian uint32, by source and
// destination.
const cnrSHA256 = "7856e31dcb1db3a792f66b82e8bb34f0a952db829013eea7434b3f9c3c832220"

func TestCNR2000(t *testing.T) {
	base := filepath.Join(realdata.Dir(t, "webgraph", "cnr-2000.graph", "cnr-2000.properties"),
		"cnr-2000")
	lists, parts, err := all(base)
	require.NoError(t, err)
	require.Greater(t, parts, 1)
	const nodes, arcs = 325_557, 3_216_152
	h := sha256.New()
	n, largest := 0, 0
	exp := make([]int, 32)
	for v := range int64(nodes) {
		l := lists[v]
		n += len(l)
		largest = max(largest, len(l))
		for i, x := range l {
			h.Write(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil,
				uint32(v)), uint32(x)))
			gap := uint64(0)
			if i > 0 {
				gap = uint64(x - l[i-1])
			} else if gap = uint64(2 * (x - v)); x < v {
				gap = uint64(2*(v-x) - 1)
			}
			if gap > 0 {
				exp[bits.Len64(gap)-1]++
			}
		}
	}
	require.Equal(t, arcs, n)
	require.Equal(t, 2716, largest, "as the graph's publishers state")
	require.Equal(t, 78056, nodes-len(lists), "nodes without arcs, 23.98 % as published")
	require.Equal(t, cnrSHA256, hex.EncodeToString(h.Sum(nil)))

	// The encoder's own counts (.properties) against the lists: gaps between
	// successors by their logarithm.
	props, err := os.ReadFile(base + ".properties")
	require.NoError(t, err)
	property := func(key string) (v []int) {
		_, s, ok := strings.Cut(string(props), "\n"+key+"=")
		require.True(t, ok, key)
		s, _, _ = strings.Cut(s, "\n")
		for _, f := range strings.Split(strings.TrimSpace(s), ",") {
			x, err := strconv.Atoi(f)
			require.NoError(t, err)
			v = append(v, x)
		}
		return v
	}
	want := property("successorexpstats")
	require.Equal(t, want, exp[:len(want)])

	if wide.Lean() {
		return
	}
	graph, err := os.ReadFile(base + ".graph")
	require.NoError(t, err)
	again, copied, interval, residual := simpleDecode(graph, nodes)
	require.Equal(t, property("copiedarcs"), []int{copied})
	require.Equal(t, property("intervalisedarcs"), []int{interval})
	require.Equal(t, property("residualarcs"), []int{residual})
	for v, l := range again {
		require.True(t, slices.Equal(l, lists[int64(v)]), "node %d", v)
	}
}

// simpleDecode is a second decoder that shares nothing with the first: one bit at a time, from the
// first node to the last with all lists in memory, sets instead of merges; for the default codes.
func simpleDecode(graph []byte, nodes int) (lists [][]int64, copied, interval, residual int) {
	pos := 0
	bit := func() int {
		b := int(graph[pos/8]) >> (7 - pos%8) & 1
		pos++
		return b
	}
	ones := func() (n int) {
		for bit() == 0 {
			n++
		}
		return n
	}
	num := func(n int) (v int) {
		for range n {
			v = 2*v + bit()
		}
		return v
	}
	gammaOf := func() int {
		n := ones()
		return 1<<n + num(n) - 1
	}
	zeta3 := func() int {
		h := ones()
		v := num(3*h + 2)
		if v < 1<<(3*h) {
			return v + 1<<(3*h) - 1
		}
		return 2*v + bit() - 1
	}
	fold := func(n int) int {
		if n%2 == 1 {
			return -(n + 1) / 2
		}
		return n / 2
	}
	for v := range nodes {
		degree := gammaOf()
		var l []int64
		if degree > 0 {
			if ref := ones(); ref > 0 {
				blocks := make([]int, gammaOf())
				for i := range blocks {
					if blocks[i] = gammaOf(); i > 0 {
						blocks[i]++
					}
				}
				take, rest := true, lists[v-ref]
				for _, n := range blocks {
					if take {
						l = append(l, rest[:n]...)
					}
					rest, take = rest[n:], !take
				}
				if take {
					l = append(l, rest...)
				}
				copied += len(l)
			}
			if len(l) < degree {
				end := 0
				for i := range gammaOf() {
					from := 0
					if i == 0 {
						from = v + fold(gammaOf())
					} else {
						from = end + 1 + gammaOf()
					}
					n := gammaOf() + 4
					for x := from; x < from+n; x++ {
						l = append(l, int64(x))
					}
					end = from + n
					interval += n
				}
				for i, x := 0, 0; len(l) < degree; i++ {
					if i == 0 {
						x = v + fold(zeta3())
					} else {
						x += zeta3() + 1
					}
					l = append(l, int64(x))
					residual++
				}
			}
		}
		slices.Sort(l)
		lists = append(lists, l)
	}
	return lists, copied, interval, residual
}
