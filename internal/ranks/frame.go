package ranks

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"helios/internal/errs"
)

// A message on a connection goes in frames: a header and up to frameBytes of the message. Numbers
// are little-endian.
//
//	0  magic    "HRK" and protocol
//	4  kind     uint8, then 3 bytes of zero
//	8  number   uint32, of the message on this connection
//	12 length   uint32, of this frame's bytes
//	16 total    uint64, of the message's bytes
//	24 crc      uint32, CRC-32C of the 24 bytes before and the frame's bytes
//	28 bytes
const (
	headerBytes = 28
	frameBytes  = 1 << 20
	// The longest message; a checkpoint is one.
	mostMessage = 1 << 40
	protocol    = 2
)

const (
	kindHello uint8 = iota + 1
	kindData
	kindAlive
	kindAbort
	kindBye
	kindNonce
	kindProof
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type header struct {
	kind           uint8
	number, length uint32
	total          uint64
}

func (h header) encode(part []byte) (b [headerBytes]byte) {
	copy(b[:], "HRK")
	b[3], b[4] = protocol, h.kind
	binary.LittleEndian.PutUint32(b[8:], h.number)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(part)))
	binary.LittleEndian.PutUint64(b[16:], h.total)
	crc := crc32.Update(crc32.Checksum(b[:24], castagnoli), castagnoli, part)
	binary.LittleEndian.PutUint32(b[24:], crc)
	return b
}

// readFrame reads a frame of up to most bytes into buf, which it may replace by a larger one.
func readFrame(r io.Reader, buf []byte, limit int) (header, []byte, error) {
	var b [headerBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, buf, err
	}
	if string(b[:3]) != "HRK" {
		return header{}, buf, fmt.Errorf("it does not speak heliosctl's protocol (%q)", b[:4])
	}
	if b[3] != protocol {
		return header{}, buf, fmt.Errorf(
			"it speaks version %d of heliosctl's protocol, this rank version %d; give all ranks the same heliosctl",
			b[3], protocol)
	}
	h := header{b[4], binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:]),
		binary.LittleEndian.Uint64(b[16:])}
	if int64(h.length) > int64(limit) || h.total > mostMessage || uint64(h.length) > h.total {
		return h, buf, fmt.Errorf("a frame of %d bytes of %d", h.length, h.total)
	}
	if cap(buf) < int(h.length) {
		buf = make([]byte, h.length)
	}
	buf = buf[:h.length]
	if _, err := io.ReadFull(r, buf); err != nil {
		return h, buf, err
	}
	crc := crc32.Update(crc32.Checksum(b[:24], castagnoli), castagnoli, buf)
	if crc != binary.LittleEndian.Uint32(b[24:]) {
		return h, buf, errs.New(errs.Device, "a frame of %d bytes was damaged on its way",
			h.length)
	}
	return h, buf, nil
}

func tooLong(rank int, host string, n uint64) error {
	return errs.New(errs.Failed, "rank %d on %s sends %d bytes at a time, %d is the most", rank,
		host, n, uint64(mostMessage))
}

// cut shortens the text of an error to what an abort carries.
func cut(s string) string {
	const limit = 2000
	if len(s) > limit {
		return s[:limit] + "…"
	}
	return s
}
