package simd

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/philox"
)

// Every level draws, gathers and numbers like Go's loops.
func TestSampleLevels(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	key := philox.Key(7, philox.StreamSample)
	keys := SampleKeys(key)
	for _, l := range Levels()[1:] {
		for _, k := range []int{1, 2, 3, 5, 10, 15, 25, 63, 64} {
			t.Run(fmt.Sprintf("%v/%d", l, k), func(t *testing.T) {
				for range 40 {
					var nodes [SampleGroup]int64
					var deg [SampleGroup]uint32
					for i := range nodes {
						nodes[i] = r.Int64N(1 << (1 + r.IntN(40)))
						switch r.IntN(4) {
						case 0:
							deg[i] = r.Uint32N(uint32(k) + 2) // 0 to k+1
						case 1:
							deg[i] = uint32(k) + 1 + r.Uint32N(20) // many duplicates
						case 2:
							deg[i] = r.Uint32N(1 << 20)
						default:
							deg[i] = 1<<32 - 1 - r.Uint32N(3)
						}
					}
					rows := (k + 1) &^ 1
					want, got := make([]uint32, rows*SampleGroup), make([]uint32, rows*SampleGroup)
					epoch, hop := r.Uint32(), r.Uint32N(200)<<24
					Generic.SampleDraw(&nodes, &deg, k, &keys, epoch, hop, want)
					l.SampleDraw(&nodes, &deg, k, &keys, epoch, hop, got)
					require.Equal(t, want[:k*SampleGroup], got[:k*SampleGroup])
				}
			})
		}
	}
}

func TestSampleTileLevels(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const numNodes = 500
	indptr := []int64{0}
	for v := range int64(numNodes) {
		d := int64(r.IntN(30))
		if v%7 == 0 || v == numNodes-1 {
			d = 0
		}
		indptr = append(indptr, indptr[v]+d)
	}
	edges := indptr[numNodes]
	narrow, wide := make([]uint32, edges), make([]int64, edges)
	for i := range narrow {
		narrow[i] = r.Uint32N(numNodes)
		wide[i] = int64(narrow[i])
	}
	type result struct {
		rows       int
		first      []int64
		deg, local []uint32
		bad        []int
		ids        []uint32
		nodes      []int64
		src        []uint32
		next       int
	}
	keys := SampleKeys([2]uint32{1, 2})
	run := func(l Level, is64, hashed bool, n, k int, seeds []int64) (o result) {
		o.first, o.deg, o.local = make([]int64, n), make([]uint32, n+SampleGroup),
			make([]uint32, n+1)
		base := unsafe.Pointer(&narrow[0])
		if is64 {
			base = unsafe.Pointer(&wide[0])
		}
		o.rows = l.SampleRows(seeds, n, indptr, edges, uint32(k), o.first, o.deg, o.local)
		ids := make([]uint32, n*k+k+SampleAhead)
		for g := 0; g < n; g += SampleGroup {
			var nodes [SampleGroup]int64
			draws := make([]uint32, (k+1)*SampleGroup)
			m := min(SampleGroup, n-g)
			copy(nodes[:], seeds[g:g+m])
			l.SampleDraw(&nodes, (*[SampleGroup]uint32)(o.deg[g:]), k, &keys, 3, 1<<24, draws)
			l.SamplePrefetch(o.first[g:], m, k, draws, base, is64)
			if is64 {
				o.bad = append(o.bad, l.SampleGather64(o.first[g:], o.deg[g:], m, k, draws, wide,
					numNodes, ids[o.local[g]:]))
			} else {
				o.bad = append(o.bad, l.SampleGather32(o.first[g:], o.deg[g:], m, k, draws, narrow,
					numNodes, ids[o.local[g]:]))
			}
		}
		e := int(o.local[n])
		clear(ids[e:])
		o.nodes, o.src = make([]int64, 20+e+1), make([]uint32, e)
		if hashed {
			h := SampleHash{Table: make([]uint64, 1024), Shift: 54, PosBits: 10, Mask: 1<<10 - 1,
				Low: 1<<42 - 1, Stamp: 5 << 42}
			for i := range h.Table {
				h.Table[i] = uint64(i) | 4<<42 // worn
			}
			h.Put(17, 3)
			h.Put(17, 4)
			o.next = l.SampleEnterHash(ids, e, &h, o.nodes, 20, o.src)
		} else {
			table := make([]uint32, numNodes)
			for i := range table {
				table[i] = 4<<10 | uint32(i)
			}
			table[17] = 5<<10 | 3
			SampleWarm(l, ids[:e], table)
			o.next = l.SampleEnter(ids, e, table, 5<<10, 1<<10-1, o.nodes, 20, o.src)
		}
		o.ids, o.nodes, o.deg = ids[:e], o.nodes[:o.next], o.deg[:n]
		return o
	}
	for _, n := range []int{0, 1, 16, 45, 90} {
		seeds := make([]int64, n+5)
		for i := range seeds {
			seeds[i] = r.Int64N(numNodes)
		}
		for _, k := range []int{1, 5, 10} {
			for _, is64 := range []bool{false, true} {
				want := run(Generic, is64, false, n, k, seeds)
				require.Equal(t, n, want.rows)
				for i, id := range want.ids { // numbers name their ids
					if want.src[i] >= 20 {
						require.Equal(t, int64(id), want.nodes[want.src[i]])
					} else {
						require.Equal(t, [2]uint32{17, 3}, [2]uint32{id, want.src[i]})
					}
				}
				for _, l := range Levels() {
					require.Equal(t, want, run(l, is64, false, n, k, seeds), "%v", l)
					require.Equal(t, want, run(l, is64, true, n, k, seeds), "%v hashed", l)
				}
			}
		}
	}
	// Damage is found at every level.
	for _, l := range Levels() {
		first, deg, local := make([]int64, 4), make([]uint32, 4), make([]uint32, 5)
		require.Equal(t, 2, l.SampleRows([]int64{1, 2, numNodes, 3}, 4, indptr, edges, 5, first,
			deg, local))
		require.Equal(t, 1, l.SampleRows([]int64{1, -1, 2, 3}, 4, indptr, edges, 5, first,
			deg, local))
		for _, broken := range [][]int64{{0, 5, -1}, {0, 5, 3}, {0, 3, edges + 1}} {
			require.Equal(t, 1, l.SampleRows([]int64{0, 1}, 2, broken, edges, 5, first, deg, local))
		}
		ids := make([]uint32, 64)
		require.Equal(t, 3, l.SampleGather32([]int64{0}, []uint32{3}, 1, 3, make([]uint32, 64),
			[]uint32{numNodes, 0, 0}, numNodes, ids))
		require.Equal(t, 3, l.SampleGather64([]int64{0}, []uint32{3}, 1, 3, make([]uint32, 64),
			[]int64{-1, 0, 0}, numNodes, ids))
	}
}
