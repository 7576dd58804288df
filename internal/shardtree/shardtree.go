// Package shardtree orders the sum over the shards of an optimiser step. Floating-point sums depend
// on their order, so there is one: a binary tree over the shards' numbers, in which a sum over 1,
// 2, 4, … shards is joined with its right neighbour. The same numbers are added, with the same
// bits, on any devices and in any processes.
package shardtree

import (
	"math/bits"
	"slices"
)

// Node is the sum over shards First to First+Count-1 of a step: a subtree.
type Node struct{ First, Count int }

// End is the first shard behind a node.
func (a Node) End() int { return a.First + a.Count }

// Join returns the node that two neighbours are the halves of in a step of n shards; ok is false
// where they are not. The tree is that of a stride which doubles, g[s] += g[s+stride]: a right half
// may be shorter at the step's end.
func Join(left, right Node, n int) (sum Node, ok bool) {
	size := left.Count
	ok = bits.OnesCount(uint(size)) == 1 && left.First%(2*size) == 0 &&
		right.First == left.End() && right.Count > 0 && right.End() == min(left.First+2*size, n)
	return Node{left.First, size + right.Count}, ok
}

// Joins returns the number of times that the last two of some neighbouring nodes join.
func Joins(nodes []Node, n int) (times int) {
	if len(nodes) == 0 {
		return 0
	}
	last := nodes[len(nodes)-1]
	for _, left := range slices.Backward(nodes[:len(nodes)-1]) {
		sum, ok := Join(left, last, n)
		if !ok {
			break
		}
		last = sum
		times++
	}
	return times
}

// Push adds a node behind its neighbours and joins as many as possible. It returns the new list.
func Push(nodes []Node, last Node, n int) []Node {
	nodes = append(nodes, last)
	for range Joins(nodes, n) {
		k := len(nodes)
		nodes[k-2].Count += nodes[k-1].Count
		nodes = nodes[:k-1]
	}
	return nodes
}

// Roots returns the fewest nodes that shards first to end-1 of a step of n make among themselves.
func Roots(n, first, end int) (nodes []Node) {
	for s := first; s < end; s++ {
		nodes = Push(nodes, Node{s, 1}, n)
	}
	return nodes
}

// Room returns the largest number of nodes while shards first to end-1 of a step of n arrive in
// order, the one that has just arrived included.
func Room(n, first, end int) (room int) {
	var nodes []Node
	for s := first; s < end; s++ {
		room = max(room, len(nodes)+1)
		nodes = Push(nodes, Node{s, 1}, n)
	}
	return room
}

// PartRoom returns the largest number of nodes in one of several parts, in any step of up to limit
// shards: that of a whole step, for a shorter one ends earlier and joins no later. There is always
// room for the sum of all parts.
func PartRoom(limit, part, parts int) int {
	first, end := Share(limit, limit, part, parts)
	return max(Room(limit, first, end), 1)
}

// Share returns the shards of one of several parts in a step of n: neighbours, and the parts are in
// the shards' order. Whole steps have limit shards; shard s of any step is in part s·parts/limit.
func Share(limit, n, part, parts int) (first, end int) {
	bound := func(p int) int { return min((p*limit+parts-1)/parts, n) }
	return bound(part), bound(part + 1)
}
