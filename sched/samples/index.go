package samples

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
	"math"
)

// A store's index, little-endian: a header of headBytes, then for each mini-batch, in their order,
// a record of recordBytes.
//
//	header: magic 8, version 4, bytes of a node number 4, nodes 8, mini-batches 8, key 32, CRC32C 4
//	record: rows 8, bytes of the rest 8, CRC32C of each 4 + 4, CRC32C of the records so far 4
//
// While a store is written the index has another name, and records come to it when what they are
// of is durable. The last rename makes it whole.
const (
	indexMagic  = "HelSmpl\n"
	version     = 1
	headBytes   = 8 + 4 + 4 + 8 + 8 + sha256.Size + 4
	recordBytes = 8 + 8 + 4 + 4 + 4
	mostBatches = 1 << 31
)

// head is the beginning of an index.
type head struct {
	version uint32
	idBytes uint32
	nodes   uint64
	batches uint64
	key     [sha256.Size]byte
}

func (h *head) append(b []byte) []byte {
	le, from := binary.LittleEndian, len(b)
	b = append(b, indexMagic...)
	b = le.AppendUint32(b, h.version)
	b = le.AppendUint32(b, h.idBytes)
	b = le.AppendUint64(b, h.nodes)
	b = le.AppendUint64(b, h.batches)
	b = append(b, h.key[:]...)
	return le.AppendUint32(b, crc32.Checksum(b[from:], castagnoli))
}

// readHead takes a header from the front of an index; ok is false where none is whole there.
func readHead(b []byte) (h head, ok bool) {
	le := binary.LittleEndian
	if len(b) < headBytes || !bytes.HasPrefix(b, []byte(indexMagic)) ||
		crc32.Checksum(b[:headBytes-4], castagnoli) != le.Uint32(b[headBytes-4:]) {
		return h, false
	}
	b = b[len(indexMagic):]
	h.version, h.idBytes = le.Uint32(b), le.Uint32(b[4:])
	h.nodes, h.batches = le.Uint64(b[8:]), le.Uint64(b[16:])
	copy(h.key[:], b[24:])
	return h, true
}

// appendRecord appends a mini-batch's record; sum is that of the one before, 0 for the first.
func appendRecord(b []byte, x *batch, sum uint32) ([]byte, uint32) {
	le, from := binary.LittleEndian, len(b)
	b = le.AppendUint64(b, uint64(x.rows))
	b = le.AppendUint64(b, uint64(x.bytes))
	b = le.AppendUint32(b, x.idsSum)
	b = le.AppendUint32(b, x.adjSum)
	sum = crc32.Update(sum, castagnoli, b[from:])
	return le.AppendUint32(b, sum), sum
}

// readRecords takes the records that are whole, of up to limit mini-batches whose node numbers take
// idBytes, and the last one's checksum. The rest was cut or changed.
func readRecords(b []byte, idBytes, limit int64) (all []batch, sum uint32) {
	le := binary.LittleEndian
	var ids, adj int64
	for ; len(b) >= recordBytes && int64(len(all)) < limit; b = b[recordBytes:] {
		next := crc32.Update(sum, castagnoli, b[:recordBytes-4])
		rows, bytes := le.Uint64(b), le.Uint64(b[8:])
		if next != le.Uint32(b[recordBytes-4:]) ||
			rows > uint64(math.MaxInt64-ids)/uint64(idBytes) || bytes > uint64(math.MaxInt64-adj) {
			break
		}
		x := batch{ids: ids, adj: adj, rows: int64(rows), bytes: int64(bytes),
			idsSum: le.Uint32(b[16:]), adjSum: le.Uint32(b[20:])}
		ids, adj, sum = ids+x.rows*idBytes, adj+x.bytes, next
		all = append(all, x)
	}
	return all, sum
}
