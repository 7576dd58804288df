package faultbus

import (
	"bytes"
	"encoding/binary"
	"unsafe"

	"helios/nvme"
)

// admin prepares an admin command for the controller: queues get rings of the bus's own, and Abort
// finds commands that only the bus has. done: it is answered with dw0 and st here.
func (b *Bus) admin(m *cmd, sqe *nvme.Command) (done bool, dw0 uint32, st nvme.Status) {
	switch sqe.Opcode {
	case nvme.AdminCreateCQ, nvme.AdminCreateSQ:
		if b.giveRing(m, sqe) != nil { // no memory for the ring, or no doorbell
			return true, 0, nvme.StatusInvalidQueueID.WithDNR()
		}
	case nvme.AdminDeleteSQ:
		if q := b.sqs[uint16(sqe.CDW10)]; q != nil && q.id != 0 {
			q.closing = true // from here on nothing of it reaches the controller
		}
	case nvme.AdminAbort:
		return b.abort(sqe)
	}
	return false, 0, 0
}

// giveRing gives a queue that is to be created a ring of the bus's own. A wrong command goes
// through as it is: the controller refuses it.
func (b *Bus) giveRing(m *cmd, sqe *nvme.Command) (err error) {
	qid, entries := uint16(sqe.CDW10), sqe.CDW10>>16+1
	if qid == 0 || entries < 2 || sqe.CDW11&1 == 0 || sqe.PRP1&(b.pageBytes-1) != 0 {
		return nil
	}
	if sqe.Opcode == nvme.AdminCreateCQ {
		mem, ok := b.find(sqe.PRP1, uint64(entries)*nvme.CompletionBytes)
		if !ok || b.cqs[qid] != nil {
			return nil
		}
		if m.newCQ, err = b.newCQ(qid, mem, entries); err == nil {
			sqe.PRP1 = uint64(m.newCQ.ring.iova)
		}
		return err
	}
	mem, ok := b.find(sqe.PRP1, uint64(entries)*nvme.CommandBytes)
	c := b.cqs[uint16(sqe.CDW11>>16)]
	if !ok || b.sqs[qid] != nil || c == nil || c.id == 0 {
		return nil
	}
	if m.newSQ, err = b.newSQ(qid, mem, entries, c); err == nil {
		sqe.PRP1 = uint64(m.newSQ.ring.iova)
	}
	return err
}

// abort answers an Abort of a command that only the bus has.
func (b *Bus) abort(sqe *nvme.Command) (done bool, dw0 uint32, st nvme.Status) {
	q := b.sqs[uint16(sqe.CDW10)]
	if q == nil {
		return false, 0, 0
	}
	switch o := q.cmds[uint16(sqe.CDW10>>16)]; {
	case o == nil || o.at == sent:
		return false, 0, 0
	case o.at == complete: // too late
		return true, 1, nvme.StatusSuccess
	default:
		q.forget(o)
		q.c.postUnreserved(entry{q: q, cid: o.sqe.CID, st: nvme.StatusAbortRequested})
		return true, 0, nvme.StatusSuccess
	}
}

// adminDone follows what an admin command has changed.
func (b *Bus) adminDone(m *cmd) {
	ok := m.cqe.Status().OK()
	sqe := &m.sqe
	switch sqe.Opcode {
	case nvme.AdminCreateCQ, nvme.AdminCreateSQ, nvme.AdminDeleteSQ, nvme.AdminDeleteCQ:
		b.queueDone(m, ok)
	case nvme.AdminGetLogPage:
		if ok && sqe.CDW10&0xff == nvme.LogSMART && sqe.CDW12|sqe.CDW13 == 0 {
			b.addFailed(sqe)
		}
	case nvme.AdminIdentify:
		if ok && sqe.CDW10&0xff == nvme.CNSNamespace {
			b.learnFormat(sqe)
		}
	}
}

// queueDone adds a queue that was created, ends one that was deleted, and gives rings back.
func (b *Bus) queueDone(m *cmd, ok bool) {
	qid := uint16(m.sqe.CDW10)
	switch m.sqe.Opcode {
	case nvme.AdminCreateCQ:
		if c := m.newCQ; c != nil && ok {
			m.newCQ = nil
			b.addCQ(c)
		}
	case nvme.AdminCreateSQ:
		if q := m.newSQ; q != nil && ok && !q.c.dead {
			m.newSQ = nil
			b.addSQ(q)
		}
	case nvme.AdminDeleteSQ:
		q := b.sqs[qid]
		if q == nil || qid == 0 {
			return
		}
		if q.closing = false; ok {
			q.c.collect() // the controller has posted what there was to post
			b.endSQ(q)
		}
	case nvme.AdminDeleteCQ:
		if c := b.cqs[qid]; c != nil && qid != 0 && ok {
			b.endCQ(c)
		}
	}
	b.dropRings(m)
	_ = b.clear() // those still mapped stay until the reset
}

// dropRings gives up the rings of queues that were refused, or that nobody waits for.
func (b *Bus) dropRings(m *cmd) {
	if m.newCQ != nil {
		b.remains = append(b.remains, m.newCQ.ring)
		m.newCQ = nil
	}
	if m.newSQ != nil {
		b.remains = append(b.remains, m.newSQ.ring)
		m.newSQ = nil
	}
}

// learnFormat takes the size of a block, which sets the length of a command's data, from what the
// client has just been told.
func (b *Bus) learnFormat(sqe *nvme.Command) {
	segs, ok := b.data(sqe, nvme.IdentifyBytes)
	if !ok {
		return
	}
	id, err := nvme.DecodeIdentifyNamespace(bytes.Join(segs, nil))
	if err != nil {
		return
	}
	if ns, err := nvme.MakeNamespace(sqe.NSID, &id); err == nil {
		b.lbaBytes = uint64(ns.LBABytes)
	}
}

// failed counts the commands that failed here, which the controller has not seen.
type failed struct{ reads, writes, media uint64 }

func (f *failed) count(op uint8, st nvme.Status) {
	switch op {
	case nvme.OpRead:
		f.reads++
	case nvme.OpWrite:
		f.writes++
	}
	if st.SCT() == nvme.SCTMedia {
		f.media++
	}
}

// addFailed adds them to the SMART log that the client has just been told: a controller counts the
// commands that it fails.
func (b *Bus) addFailed(sqe *nvme.Command) {
	n := sqe.LogPageBytes()
	segs, ok := b.data(sqe, uint64(n))
	if !ok || n < nvme.SMARTLogBytes {
		return
	}
	page := bytes.Join(segs, nil)
	var l nvme.SMARTLog
	for at, more := range map[uintptr]uint64{unsafe.Offsetof(l.HostReads): b.failed.reads,
		unsafe.Offsetof(l.HostWrites):  b.failed.writes,
		unsafe.Offsetof(l.MediaErrors): b.failed.media} {
		binary.LittleEndian.PutUint64(page[at:], binary.LittleEndian.Uint64(page[at:])+more)
	}
	for _, s := range segs {
		page = page[copy(s, page):]
	}
}
