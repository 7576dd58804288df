package nvme

import (
	"fmt"
	"strconv"
)

func itoa(i int) string { return strconv.Itoa(i) }

// MaxBlocksPerCommand is the most that the 16-bit, 0's based NLB field of Read and Write
// can say; MDTS usually allows less.
const MaxBlocksPerCommand = 1 << 16

func rw(op uint8, cid uint16, nsid uint32, lba LBA, blocks uint32, prp1, prp2 uint64) Command {
	// NLB is 0's based, so 0 blocks would silently become 65,536 and overrun the buffer.
	if blocks-1 >= MaxBlocksPerCommand {
		panic(fmt.Sprintf("nvme: a command of %d blocks; 1 to %d are possible", blocks,
			MaxBlocksPerCommand))
	}
	return Command{Opcode: op, CID: cid, NSID: nsid, PRP1: prp1, PRP2: prp2,
		CDW10: uint32(lba), CDW11: uint32(lba >> 32), CDW12: blocks - 1}
}

// ReadCommand reads blocks (1 to MaxBlocksPerCommand) blocks from lba on. It panics on
// another number of blocks. PRPs are BuildPRP's.
func ReadCommand(cid uint16, nsid uint32, lba LBA, blocks uint32, prp1, prp2 uint64) Command {
	return rw(OpRead, cid, nsid, lba, blocks, prp1, prp2)
}

// WriteCommand writes blocks (1 to MaxBlocksPerCommand) blocks from lba on. It panics on
// another number of blocks.
func WriteCommand(cid uint16, nsid uint32, lba LBA, blocks uint32, prp1, prp2 uint64) Command {
	return rw(OpWrite, cid, nsid, lba, blocks, prp1, prp2)
}

// FlushCommand makes all completed writes to the namespace durable.
func FlushCommand(cid uint16, nsid uint32) Command {
	return Command{Opcode: OpFlush, CID: cid, NSID: nsid}
}

// LBARange is the first block and the number of blocks of a Read or Write.
func (c *Command) LBARange() (LBA, uint32) {
	return LBA(c.CDW10) | LBA(c.CDW11)<<32, c.CDW12&0xffff + 1
}

// IdentifyCommand asks for one of the Identify data structures.
func IdentifyCommand(cid uint16, cns uint8, nsid uint32, prp1, prp2 uint64) Command {
	return Command{Opcode: AdminIdentify, CID: cid, NSID: nsid, PRP1: prp1, PRP2: prp2,
		CDW10: uint32(cns)}
}

// CreateCQCommand creates a physically contiguous completion queue without interrupts.
func CreateCQCommand(cid, qid uint16, entries int, base IOVA) Command {
	return Command{Opcode: AdminCreateCQ, CID: cid, PRP1: uint64(base),
		CDW10: uint32(qid) | uint32(entries-1)<<16, CDW11: 1}
}

// CreateSQCommand creates a physically contiguous submission queue that completes to cqid.
func CreateSQCommand(cid, qid uint16, entries int, base IOVA, cqid uint16) Command {
	return Command{Opcode: AdminCreateSQ, CID: cid, PRP1: uint64(base),
		CDW10: uint32(qid) | uint32(entries-1)<<16, CDW11: 1 | uint32(cqid)<<16}
}

// DeleteSQCommand deletes a submission queue; its commands in flight are completed or
// dropped before this command completes (section 5.6).
func DeleteSQCommand(cid, qid uint16) Command {
	return Command{Opcode: AdminDeleteSQ, CID: cid, CDW10: uint32(qid)}
}

// DeleteCQCommand deletes a completion queue that no submission queue uses any more.
func DeleteCQCommand(cid, qid uint16) Command {
	return Command{Opcode: AdminDeleteCQ, CID: cid, CDW10: uint32(qid)}
}

// GetLogPageCommand reads the first bytes (a multiple of 4) of a log page.
func GetLogPageCommand(cid uint16, page uint8, nsid uint32, bytes int, retain bool, prp1,
	prp2 uint64) Command {
	numd := uint32(bytes/4 - 1)
	c := Command{Opcode: AdminGetLogPage, CID: cid, NSID: nsid, PRP1: prp1, PRP2: prp2,
		CDW10: uint32(page) | numd<<16, CDW11: numd >> 16}
	if retain { // RAE: do not clear the asynchronous event that this page belongs to
		c.CDW10 |= 1 << 15
	}
	return c
}

// LogPageBytes is the transfer length that a Get Log Page command asks for.
func (c *Command) LogPageBytes() int64 {
	return (int64(c.CDW10>>16|c.CDW11<<16) + 1) * 4
}

// AbortCommand asks for command target of submission queue sqid to be aborted.
func AbortCommand(cid, sqid, target uint16) Command {
	return Command{Opcode: AdminAbort, CID: cid, CDW10: uint32(sqid) | uint32(target)<<16}
}

// SetFeaturesCommand sets a feature to a 32-bit value.
func SetFeaturesCommand(cid uint16, feature uint8, value uint32) Command {
	return Command{Opcode: AdminSetFeatures, CID: cid, CDW10: uint32(feature), CDW11: value}
}

// GetFeaturesCommand reads the current value of a feature; it comes in DW0.
func GetFeaturesCommand(cid uint16, feature uint8) Command {
	return Command{Opcode: AdminGetFeatures, CID: cid, CDW10: uint32(feature)}
}
