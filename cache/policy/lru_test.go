package policy

func init() {
	twins[LRU] = twin{
		evict: func(n *naive) int64 {
			line, best := int64(-1), 0
			for l, e := range n.cached {
				if !n.pinned(l) && (line < 0 || e.last < best) {
					line, best = l, e.last
				}
			}
			return line
		},
	}
}
