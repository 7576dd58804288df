package policy

// queue runs from the oldest slot to the newest. A slot is in one queue at a time.
type queue struct {
	slots          []slot
	oldest, newest int32
	n              int64
}

func newQueue(d *Queues) queue { return queue{slots: d.slots, oldest: -1, newest: -1} }

// after puts a slot behind another on the newer side; -1: as the oldest.
func (q *queue) after(slot, other int32) {
	newer := q.oldest
	if other >= 0 {
		newer = q.slots[other].newer
		q.slots[other].newer = slot
	} else {
		q.oldest = slot
	}
	if newer >= 0 {
		q.slots[newer].older = slot
	} else {
		q.newest = slot
	}
	q.slots[slot].older, q.slots[slot].newer = other, newer
	q.n++
}

func (q *queue) add(slot int32) { q.after(slot, q.newest) }

func (q *queue) take(slot int32) {
	older, newer := q.slots[slot].older, q.slots[slot].newer
	if older >= 0 {
		q.slots[older].newer = newer
	} else {
		q.oldest = newer
	}
	if newer >= 0 {
		q.slots[newer].older = older
	} else {
		q.newest = older
	}
	q.n--
}

// likely walks from a slot to newer ones.
func (q *queue) likely(from int32, into []int32) int {
	for i := range into {
		if from < 0 {
			return i
		}
		into[i] = from
		from = q.slots[from].newer
	}
	return len(into)
}
