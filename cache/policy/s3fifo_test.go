package policy

import "slices"

func init() {
	twins[S3FIFO] = twin{
		back: func(n *naive, line int64) { n.small = append([]int64{line}, n.small...) },
		insert: func(n *naive, line int64) {
			if slices.Contains(n.ghost, line) {
				n.ghost[slices.Index(n.ghost, line)] = -1
				n.main = append(n.main, line)
			} else {
				n.small = append(n.small, line)
			}
		},
		evict: func(n *naive) int64 {
			for {
				tenth := max(1, n.slots/10)
				if len(n.small) > 0 && (len(n.small)+len(n.parkedSmall) >= tenth ||
					len(n.main) == 0) {
					l := n.small[0]
					n.small = n.small[1:]
					e := n.cached[l]
					if e.freq > 1 {
						e.freq = 0
						n.main = append(n.main, l)
					} else if n.pinned(l) {
						n.parkedSmall = append(n.parkedSmall, l)
					} else {
						n.ghost = append(n.ghost, l)
						if over := len(n.ghost) - (n.slots - tenth); over > 0 {
							n.ghost = n.ghost[over:]
						}
						return l
					}
					continue
				}
				l := n.main[0]
				n.main = n.main[1:]
				e := n.cached[l]
				if e.freq > 0 {
					e.freq--
					n.main = append(n.main, l)
				} else if n.pinned(l) {
					n.parkedMain = append(n.parkedMain, l)
				} else {
					return l
				}
			}
		},
	}
}
