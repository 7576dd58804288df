package policy

import "slices"

func init() {
	twins[Sieve] = twin{
		back: func(n *naive, line int64) {
			n.list = slices.Insert(slices.Clone(n.list), n.hand, line)
			n.hand++
			if n.drained { // the hand stays at the start when it is there
				n.hand = len(n.list)
			}
		},
		insert: func(n *naive, line int64) {
			n.list = append(n.list, line)
			if n.drained {
				n.hand = len(n.list)
			}
		},
		drop: func(n *naive, line int64) {
			if i := slices.Index(n.list, line); i >= 0 && i < n.hand {
				n.hand--
			}
			n.list = without(n.list, line)
			n.drained = n.drained || n.hand >= len(n.list)
		},
		evict: func(n *naive) int64 {
			for {
				if n.hand >= len(n.list) {
					n.hand = 0
				}
				n.drained = false
				l := n.list[n.hand]
				e := n.cached[l]
				was := e.visited
				e.visited = false
				switch {
				case n.pinned(l):
					n.list = without(n.list, l)
					n.parkedSmall = append(n.parkedSmall, l)
				case was:
					n.hand++
				default:
					n.list = without(n.list, l)
					n.drained = n.hand >= len(n.list)
					return l
				}
				n.drained = n.hand >= len(n.list)
			}
		},
	}
}
