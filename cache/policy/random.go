package policy

import "math/bits"

// Random is the policy of BaM and GIDS.
const Random = "random"

var randomPolicy = &Policy{
	Name: Random, Summary: "a line drawn at random leaves (BaM, GIDS)", set: setRandom,
	open: func(d *Queues, c Config) evictor { return newRandom(d, c.Slots, c.Seed) },
}

// random evicts a slot drawn uniformly from those that are not pinned: they stand in an array, each
// knowing its place.
type random struct {
	d     *Queues
	slots []int32 // that may be evicted
	state uint64
}

func newRandom(d *Queues, slots int64, seed uint64) *random {
	return &random{d: d, slots: make([]int32, 0, slots), state: seed}
}

func (r *random) insert(int32) {}
func (r *random) hit(int32)    {}

func (r *random) unpin(slot int32) {
	r.d.slots[slot].older = int32(len(r.slots))
	r.slots = append(r.slots, slot)
}

// pin moves the last one to the slot's place.
func (r *random) pin(slot int32) {
	i, last := r.d.slots[slot].older, r.slots[len(r.slots)-1]
	r.slots[i], r.d.slots[last].older = last, i
	r.slots = r.slots[:len(r.slots)-1]
}

func (r *random) remove(slot int32) {
	if r.d.slots[slot].flags()&pinned == 0 {
		r.pin(slot)
	}
}

// victim draws by splitmix64.
func (r *random) victim() int32 {
	r.state += 0x9e3779b97f4a7c15
	i, _ := bits.Mul64(mix(r.state), uint64(len(r.slots)))
	slot := r.slots[i]
	r.pin(slot)
	return slot
}

func (r *random) likely(into []int32) int {
	n := min(len(into), len(r.slots))
	for i := range n {
		j, _ := bits.Mul64(mix(r.state+uint64(i+1)*0x9e3779b97f4a7c15), uint64(len(r.slots)-i))
		into[i] = r.slots[j]
	}
	return n
}

func (r *random) bytes() int64 { return int64(cap(r.slots)) * 4 }
