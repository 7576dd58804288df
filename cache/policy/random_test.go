package policy

import "slices"

func init() {
	twins[Random] = twin{
		pin:   leaveArray,
		unpin: func(n *naive, line int64) { n.list = append(n.list, line) },
		drop:  leaveArray,
		evict: func(n *naive) int64 {
			n.state += 0x9e3779b97f4a7c15
			x := n.state
			x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
			x = (x ^ x>>27) * 0x94d049bb133111eb
			x ^= x >> 31
			// The upper word of x · len without a wide product: len is small here.
			i := (x>>32*uint64(len(n.list)) + (x&0xffffffff*uint64(len(n.list)))>>32) >> 32
			line := n.list[i]
			leaveArray(n, line)
			return line
		},
	}
}

// leaveArray takes a line out of random's array: the last line takes the place of one that leaves.
func leaveArray(n *naive, line int64) {
	i := slices.Index(n.list, line)
	if i < 0 {
		return
	}
	n.list[i] = n.list[len(n.list)-1]
	n.list = n.list[:len(n.list)-1]
}
