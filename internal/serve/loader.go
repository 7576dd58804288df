package serve

import "errors"

// loader is one of a session's: a rank of a job, with a ring and credits of its own.
type loader struct {
	of   *session
	id   int
	job  *job
	rank int
	free chan struct{} // credits: batches that the client may yet get
	ring *ring         // changed by the job alone, and under of.mu

	// of.mu guards these.
	held  map[int]*ring // slots that the client has
	spare []int         // slots that nobody has: more than credits, for batches that are being made

	// job.mu guards these.
	count   int  // batches of an epoch
	want    bool // an epoch is under way
	epoch   int
	next    int  // of its batches
	out     bool // not served: its slots were full while others waited
	lagging bool // nobody waits for it in this epoch any more
}

// end tells the client that the epoch under way is over, with err or whole. job.mu is held, so
// that a message of the next one comes later.
func (l *loader) end(err error) {
	l.want = false
	if err != nil {
		err = l.of.out.post(failure(l.id, err), -1)
	} else {
		err = l.of.out.post(map[string]any{"type": "epoch_end", "id": l.id, "epoch": l.epoch,
			"bytes_ssd": l.job.read.Load()}, -1)
	}
	_ = l.of.wrote(err) // it ends the session
}

// batch is the message of one.
type batch struct {
	Type   string  `json:"type"`
	ID     int     `json:"id"`
	Epoch  int     `json:"epoch"`
	Index  int     `json:"index"`
	Slot   int     `json:"slot"`
	Seeds  int     `json:"num_seeds"`
	HopEnd []int64 `json:"hop_end"`
	// Clients whose tensors lie on a GPU would have to fetch indptr for them.
	HopEdges []int64 `json:"hop_edges,omitempty"`
	// Of a typed graph, for each type and for each relation.
	TypeEnd       [][]int64 `json:"type_end,omitempty"`
	RelationEdges [][]int64 `json:"relation_edges,omitempty"`
	Tensors       []tensor  `json:"tensors"`
}

// put writes a batch into a slot, which is then the client's: that of its claim, if it has one.
func (l *loader) put(b *Batch, c *claim) error {
	described, bytes := layout(b.Tensors)
	if bytes > l.ring.slotBytes {
		if err := l.grow(slotFor(bytes)); err != nil {
			l.free <- struct{}{}
			return errors.Join(err, c.giveBack())
		}
	}
	slot := c.slotOf(l)
	there := c != nil && c.ring == l.ring && b.At == c.place
	if err := l.ring.put(slot, b.Tensors, described, there); err != nil {
		l.of.mu.Lock()
		l.spare = append(l.spare, slot)
		l.of.mu.Unlock()
		l.free <- struct{}{}
		return errors.Join(err, c.drop())
	}
	l.of.mu.Lock()
	l.held[slot] = l.ring // before the client knows of it, which may be quick
	l.ring.held++
	l.of.mu.Unlock()
	if err := c.drop(); err != nil {
		return err
	}
	l.of.s.batches.Add(1)
	return l.of.wrote(l.of.out.post(batch{"batch", l.id, b.Epoch, b.Index, slot, b.Seeds, b.HopEnd,
		b.HopEdges, b.TypeEnd, b.RelationEdges, described}, -1))
}

// grow makes a ring of larger slots. The client has the former one's slots until it releases them.
func (l *loader) grow(slotBytes int64) error {
	r, err := newRing(l.ring.of, l.ring.slots, slotBytes, l.job.device(), l.job.placer())
	if err != nil {
		return err
	}
	l.of.mu.Lock()
	err = l.ring.close()
	l.ring = r
	l.of.mu.Unlock()
	if err != nil {
		return err
	}
	return l.of.wrote(l.of.out.post(l.describe("ring"), r.fd))
}

// describe is a message that a ring comes with.
func (l *loader) describe(kind string) map[string]any {
	r := l.ring
	m := map[string]any{"type": kind, "id": l.id, "slots": r.slots, "slot_bytes": r.slotBytes}
	if on := l.job.device(); on != nil {
		m["device"], m["file_bytes"] = on.DeviceName(), r.bytes
	}
	return m
}

// close frees what the loader has. It is no longer among the session's.
func (l *loader) close() error {
	l.job.stop(l) // so nothing is put into the ring any more
	l.of.mu.Lock()
	for slot, r := range l.held {
		delete(l.held, slot)
		r.held--
		r.settle()
	}
	var err error
	if l.ring != nil {
		err = l.ring.close() // before the device that it may lie on
	}
	l.of.mu.Unlock()
	return errors.Join(err, l.of.s.leave(l))
}
