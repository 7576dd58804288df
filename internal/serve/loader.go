package serve

// loader is one of a session's: a rank of a job, with a ring and credits of its own.
type loader struct {
	of   *session
	id   int
	job  *job
	rank int
	free chan int      // slots
	ring *ring         // changed by the job alone, and under of.mu
	held map[int]*ring // slots that the client has; of.mu guards it

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
	Type    string   `json:"type"`
	ID      int      `json:"id"`
	Epoch   int      `json:"epoch"`
	Index   int      `json:"index"`
	Slot    int      `json:"slot"`
	Seeds   int      `json:"num_seeds"`
	HopEnd  []int64  `json:"hop_end"`
	Tensors []tensor `json:"tensors"`
}

// put writes a batch into a slot, which is then the client's.
func (l *loader) put(slot int, b *Batch) error {
	described, bytes := layout(b.Tensors)
	if bytes > l.ring.slotBytes {
		if err := l.grow(slotFor(bytes)); err != nil {
			l.free <- slot
			return err
		}
	}
	l.ring.put(slot, b.Tensors, described)
	l.of.mu.Lock()
	l.held[slot] = l.ring // before the client knows of it, which may be quick
	l.ring.held++
	l.of.mu.Unlock()
	return l.of.wrote(l.of.out.post(batch{"batch", l.id, b.Epoch, b.Index, slot, b.Seeds, b.HopEnd,
		described}, -1))
}

// grow makes a ring of larger slots. The client has the former one's slots until it releases them.
func (l *loader) grow(slotBytes int64) error {
	r, err := newRing(l.ring.of, l.ring.slots, slotBytes)
	if err != nil {
		return err
	}
	l.of.mu.Lock()
	l.ring.close()
	l.ring = r
	l.of.mu.Unlock()
	return l.of.wrote(l.of.out.post(map[string]any{"type": "ring", "id": l.id, "slots": r.slots,
		"slot_bytes": r.slotBytes}, r.fd))
}

// close frees what the loader has. It is no longer among the session's.
func (l *loader) close() error {
	err := l.of.s.leave(l)
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	for slot, r := range l.held {
		delete(l.held, slot)
		r.held--
		r.settle()
	}
	l.ring.close()
	return err
}
