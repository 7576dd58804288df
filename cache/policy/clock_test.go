package policy

func init() {
	twins[Clock] = twin{
		back:   func(n *naive, line int64) { n.list = append(n.list, line) },
		insert: func(n *naive, line int64) { n.list = append(n.list, line) },
		drop:   func(n *naive, line int64) { n.list = without(n.list, line) },
		evict: func(n *naive) int64 {
			for {
				l := n.list[0]
				n.list = n.list[1:]
				e := n.cached[l]
				was := e.visited
				e.visited = false
				if n.pinned(l) {
					n.parkedSmall = append(n.parkedSmall, l)
				} else if was {
					n.list = append(n.list, l)
				} else {
					return l
				}
			}
		},
	}
}
