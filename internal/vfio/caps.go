package vfio

import "encoding/binary"

// capability finds a member of an info capability chain by its number and returns its bytes after
// the header, to the end of the buffer. Offsets are from the buffer's start; a chain that leaves it
// or runs in a circle ends there.
func capability(buf []byte, first uint32, id uint16) ([]byte, bool) {
	le := binary.LittleEndian
	for off, hops := uint64(first), 0; off != 0 && off+8 <= uint64(len(buf)) && hops < 64; hops++ {
		if le.Uint16(buf[off:]) == id {
			return buf[off+8:], true
		}
		off = uint64(le.Uint32(buf[off+4:]))
	}
	return nil, false
}

// pairs reads the body that both the sparse mmap and the IOVA range capability have: a count, four
// bytes of padding, and as many pairs of 64-bit numbers.
func pairs(body []byte) [][2]uint64 {
	if len(body) < 8 {
		return nil
	}
	le := binary.LittleEndian
	n := min(uint64(le.Uint32(body)), uint64(len(body)-8)/16)
	out := make([][2]uint64, n)
	for i := range out {
		out[i] = [2]uint64{le.Uint64(body[8+16*i:]), le.Uint64(body[16+16*i:])}
	}
	return out
}
