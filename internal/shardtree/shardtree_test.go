package shardtree

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// strides is the tree as it is described: a stride that doubles. Each shard's sum is written out.
func strides(n int) string {
	g := make([]string, n)
	for s := range g {
		g[s] = fmt.Sprint(s)
	}
	for stride := 1; stride < n; stride *= 2 {
		for s := 0; s+stride < n; s += 2 * stride {
			g[s] = "(" + g[s] + "+" + g[s+stride] + ")"
		}
	}
	return g[0]
}

// However the shards are cut into contiguous parts, each of which adds what it can, and the parts'
// roots are added then, the sums are those of the doubling stride.
func TestPartsMakeTheTree(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for n := 1; n <= 40; n++ {
		for range 12 {
			text := map[Node]string{}
			join := func(nodes []Node, last Node, what string) []Node {
				text[last] = what
				nodes = append(nodes, last)
				for range Joins(nodes, n) {
					k := len(nodes)
					sum, ok := Join(nodes[k-2], nodes[k-1], n)
					require.True(t, ok)
					text[sum] = "(" + text[nodes[k-2]] + "+" + text[nodes[k-1]] + ")"
					nodes = append(nodes[:k-2], sum)
				}
				return nodes
			}
			var all []Node
			for first := 0; first < n; {
				end := first + 1 + rng.IntN(n-first)
				var part []Node
				room := 0
				for s := first; s < end; s++ {
					room = max(room, len(part)+1)
					part = join(part, Node{s, 1}, fmt.Sprint(s))
				}
				require.Equal(t, part, Roots(n, first, end))
				require.Equal(t, room, Room(n, first, end))
				for _, r := range part {
					all = join(all, r, text[r])
				}
				first = end
			}
			require.Equal(t, []Node{{0, n}}, all)
			require.Equal(t, strides(n), text[all[0]])
		}
	}
}

func TestJoinRefusesStrangers(t *testing.T) {
	for _, c := range []struct {
		left, right Node
		n           int
		ok          bool
	}{
		{Node{0, 1}, Node{1, 1}, 8, true}, {Node{1, 1}, Node{2, 1}, 8, false},
		{Node{0, 2}, Node{2, 1}, 8, false}, {Node{0, 2}, Node{2, 1}, 3, true},
		{Node{4, 1}, Node{5, 1}, 6, true}, {Node{0, 4}, Node{4, 2}, 6, true},
		{Node{0, 3}, Node{3, 1}, 4, false}, {Node{0, 1}, Node{2, 1}, 3, false},
	} {
		_, ok := Join(c.left, c.right, c.n)
		require.Equal(t, c.ok, ok, "%v %v of %d", c.left, c.right, c.n)
	}
	require.Zero(t, Joins(nil, 4))
}

// Shares are neighbours that differ by one shard at most in a whole step, and a shorter step's last
// parts have none.
func TestShares(t *testing.T) {
	for limit := 1; limit <= 17; limit++ {
		for parts := 1; parts <= limit; parts++ {
			for n := 1; n <= limit; n++ {
				next := 0
				for p := range parts {
					first, end := Share(limit, n, p, parts)
					require.Equal(t, next, first)
					require.LessOrEqual(t, first, end)
					if n == limit {
						require.GreaterOrEqual(t, end-first, limit/parts)
						require.LessOrEqual(t, end-first, limit/parts+1)
						for s := first; s < end; s++ { // by its number alone
							require.Equal(t, p, s*parts/limit)
						}
					}
					next = end
				}
				require.Equal(t, n, next)
			}
		}
	}
	first, end := Share(8, 3, 1, 2)
	require.Equal(t, [2]int{3, 3}, [2]int{first, end})
}

// The room of a part is enough in every step, also for one that does not begin at a power of two,
// and no larger than some step needs.
func TestPartRoom(t *testing.T) {
	for limit := 1; limit <= 64; limit++ {
		for parts := 1; parts <= min(8, limit); parts++ {
			for p := range parts {
				need := 1
				for n := 1; n <= limit; n++ {
					first, end := Share(limit, n, p, parts)
					need = max(need, Room(n, first, end))
				}
				require.Equal(t, need, PartRoom(limit, p, parts), "part %d of %d of %d", p, parts,
					limit)
			}
		}
	}
	require.Equal(t, 5, PartRoom(25, 0, 1))
	require.Equal(t, 6, PartRoom(25, 1, 2), "13, 14-15, 16-19, 20-21, 22, 23")
}
