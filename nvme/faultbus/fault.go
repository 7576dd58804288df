package faultbus

import (
	"helios/internal/faultinject"
	"helios/nvme"
)

// match asks the fault set about a command.
func (b *Bus) match(q *squeue, cmd *nvme.Command) (faultinject.Action, bool) {
	if b.set.Empty() {
		return faultinject.Action{}, false
	}
	if q.id != 0 {
		switch cmd.Opcode {
		case nvme.OpRead, nvme.OpWrite:
			op := faultinject.Read
			if cmd.Opcode == nvme.OpWrite {
				op = faultinject.Write
			}
			lba, blocks := cmd.LBARange()
			return b.set.Match(op, uint64(lba), blocks)
		case nvme.OpFlush:
			return b.set.Match(faultinject.Flush, 0, 0)
		}
		return faultinject.Action{}, false
	}
	switch cmd.Opcode {
	case nvme.AdminAbort:
		return b.set.Match(faultinject.Abort, 0, 0)
	case nvme.AdminCreateCQ, nvme.AdminCreateSQ:
		return b.set.Match(faultinject.CreateQ, 0, 0)
	case nvme.AdminDeleteCQ, nvme.AdminDeleteSQ:
		return b.set.Match(faultinject.DeleteQ, 0, 0)
	case nvme.AdminIdentify:
		return b.set.Match(faultinject.Identify, 0, 0)
	case nvme.AdminSetFeatures, nvme.AdminGetFeatures:
		return b.set.Match(faultinject.Features, 0, 0)
	case nvme.AdminGetLogPage:
		return b.set.Match(faultinject.Log, 0, 0)
	}
	return b.set.Match(faultinject.Admin, 0, 0)
}

// transfers reports whether an I/O command moves data, and how many bytes.
func (b *Bus) transfers(cmd *nvme.Command) (uint64, bool) {
	if cmd.Opcode != nvme.OpRead && cmd.Opcode != nvme.OpWrite {
		return 0, false
	}
	_, blocks := cmd.LBARange()
	return uint64(blocks) * b.lbaBytes, true
}

// divert changes where the data of an I/O command goes and how much of it, before the controller
// gets sqe; false when that leaves nothing to do.
func (b *Bus) divert(m *cmd, sqe *nvme.Command) bool {
	n, moves := b.transfers(sqe)
	if !moves {
		return true
	}
	act := m.act
	if act.Shift != 0 {
		lba, _ := sqe.LBARange()
		if s := nvme.LBA(act.Shift); lba >= s {
			lba -= s
		} else {
			lba += s
		}
		sqe.CDW10, sqe.CDW11 = uint32(lba), uint32(lba>>32)
	}
	if act.Torn && sqe.Opcode == nvme.OpWrite {
		_, blocks := sqe.LBARange()
		if blocks /= 2; blocks == 0 {
			return false
		}
		sqe.CDW12 = sqe.CDW12&^0xffff | (blocks - 1)
	}
	if act.Short && uint64(act.ShortBytes) < n {
		// The controller writes all of it: the rest is put back afterwards.
		if segs, ok := b.data(sqe, n); ok {
			off := uint64(0)
			for _, s := range segs {
				if end := off + uint64(len(s)); end > uint64(act.ShortBytes) {
					m.kept = append(m.kept, s[max(off, uint64(act.ShortBytes))-off:]...)
				}
				off += uint64(len(s))
			}
		}
	}
	return true
}

// spoil changes the data that a read brought.
func (b *Bus) spoil(m *cmd) {
	if !m.act.Flip && m.kept == nil {
		return
	}
	n, moves := b.transfers(&m.sqe)
	if !moves {
		return
	}
	segs, ok := b.data(&m.sqe, n)
	if !ok {
		return
	}
	if m.act.Flip {
		off := (uint64(m.act.FlipBlock)*b.lbaBytes + uint64(m.act.FlipByte)) % n
		for _, s := range segs {
			if off < uint64(len(s)) {
				s[off] ^= 1 << m.act.FlipBit
				break
			}
			off -= uint64(len(s))
		}
	}
	off := uint64(0)
	for _, s := range segs {
		if end := off + uint64(len(s)); m.kept != nil && end > uint64(m.act.ShortBytes) {
			m.kept = m.kept[copy(s[max(off, uint64(m.act.ShortBytes))-off:], m.kept):]
		}
		off += uint64(len(s))
	}
	m.kept = nil
}
