package nvme

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"unsafe"

	"helios/internal/errs"
)

// decode copies a specification structure out of raw bytes, which may be shared memory.
func decode[T any](b []byte, what string) (T, error) {
	var v T
	n := int(unsafe.Sizeof(v))
	if len(b) < n {
		return v, fmt.Errorf("nvme: %s: %d bytes where %d are needed", what, len(b), n)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&v)), n), b)
	return v, nil
}

// DecodeIdentifyController reads an Identify Controller data structure.
func DecodeIdentifyController(b []byte) (IdentifyController, error) {
	return decode[IdentifyController](b, "identify controller")
}

// DecodeIdentifyNamespace reads an Identify Namespace data structure.
func DecodeIdentifyNamespace(b []byte) (IdentifyNamespace, error) {
	return decode[IdentifyNamespace](b, "identify namespace")
}

// DecodeSMARTLog reads a SMART / Health Information log page.
func DecodeSMARTLog(b []byte) (SMARTLog, error) { return decode[SMARTLog](b, "SMART log") }

// DecodeActiveNamespaces reads an active namespace ID list: ascending, ended by 0.
func DecodeActiveNamespaces(b []byte) ([]uint32, error) {
	if len(b) > IdentifyBytes {
		b = b[:IdentifyBytes]
	}
	var ids []uint32
	for ; len(b) >= 4; b = b[4:] {
		id := binary.LittleEndian.Uint32(b)
		if id == 0 {
			break
		}
		// Ascending order is what continuing the list after its last ID relies on.
		if len(ids) > 0 && id <= ids[len(ids)-1] || id >= NSIDAll-1 {
			return nil, fmt.Errorf("nvme: active namespace list: ID %d is out of order or invalid",
				id)
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// NamespaceDescriptors are the identification descriptors of a namespace.
type NamespaceDescriptors struct {
	Set CommandSet // CommandSetNVM where no descriptor says another
	IDs [][]byte   // EUI-64, NGUID and UUID, those that are there
}

// DecodeNamespaceDescriptors reads a namespace identification descriptor list (Identify, CNS 03h).
func DecodeNamespaceDescriptors(b []byte) (d NamespaceDescriptors, err error) {
	const header = 4 // type, length, two reserved bytes
	for len(b) >= header && b[0] != 0 {
		n := int(b[1])
		if n == 0 || header+n > len(b) {
			return d, fmt.Errorf(
				"nvme: namespace identification descriptor of type %d has length %d", b[0], n)
		}
		switch b[0] {
		case DescriptorEUI64, DescriptorNGUID, DescriptorUUID:
			d.IDs = append(d.IDs, b[header:header+n])
		case DescriptorCommandSet:
			d.Set = CommandSet(b[header])
		}
		b = b[header+n:]
	}
	return d, nil
}

// Namespace is the part of a namespace's identity that I/O needs.
type Namespace struct {
	ID       uint32
	LBABytes int    // 512 or 4096
	Blocks   uint64 // logical blocks
}

// Bytes is the namespace's size.
func (n Namespace) Bytes() int64 { return int64(n.Blocks) * int64(n.LBABytes) }

// lbaBytes writes 2^lbads: in full where a controller can mean it (512 bytes to 64 KiB), else as a
// power.
func lbaBytes(lbads uint8) string {
	if lbads < 9 || lbads > 16 {
		return fmt.Sprintf("2^%d", lbads)
	}
	return strconv.Itoa(1 << lbads)
}

// MakeNamespace checks that the namespace's format is one that this package can read and
// write, and returns its geometry.
func MakeNamespace(id uint32, n *IdentifyNamespace) (Namespace, error) {
	f := n.Format()
	i := n.FormatIndex()
	if i > int(n.NLBAF) {
		return Namespace{},
			fmt.Errorf("namespace %d: LBA format %d is in use, but the last one is %d", id, i,
				n.NLBAF)
	}
	if n.NSZE == 0 {
		return Namespace{}, errs.New(errs.Capability,
			"namespace %d has no blocks; create or attach a namespace with \"nvme create-ns\"", id)
	}
	if f.LBADS != 9 && f.LBADS != 12 {
		return Namespace{}, errs.New(errs.Capability,
			"namespace %d: LBAs of %s bytes are not supported, only 512 and 4096; format it to one of them with \"nvme format\"",
			id, lbaBytes(f.LBADS))
	}
	// Metadata would need a buffer of its own per command, or lies between the blocks.
	if f.MetadataBytes != 0 {
		with := ""
		if pi := n.DPS & 7; pi != 0 {
			with = fmt.Sprintf(" (protection information of type %d)", pi)
		}
		return Namespace{}, errs.New(errs.Capability,
			"namespace %d: %d bytes of metadata per block%s; format it to none with \"nvme format\"",
			id, f.MetadataBytes, with)
	}
	if n.NSZE > math.MaxInt64>>f.LBADS {
		return Namespace{}, errs.New(errs.Device,
			"namespace %d: size of %d blocks of %d bytes cannot be", id, n.NSZE, 1<<f.LBADS)
	}
	return Namespace{ID: id, LBABytes: 1 << f.LBADS, Blocks: n.NSZE}, nil
}

// transferLimit is the largest data transfer of one command in bytes: MDTS (in units of the
// smallest memory page), at most limit, and what NLB can say.
func transferLimit(mdts uint8, mpsmin, lbaBytes, limit int) int {
	n := limit
	if m := int(mdts) + 12 + mpsmin; mdts != 0 && m < 31 && 1<<m < n {
		n = 1 << m
	}
	if bound := MaxBlocksPerCommand * lbaBytes; n > bound {
		n = bound
	}
	return n / lbaBytes * lbaBytes
}
