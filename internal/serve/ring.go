package serve

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

const (
	alignment = 64
	firstSlot = 256 << 10 // bytes of a slot until a batch needs more
)

// memory bounds the bytes of rings, lists of nodes and requests together.
type memory struct {
	limit int64
	used  atomic.Int64
}

func (m *memory) take(n int64) error {
	if now := m.used.Add(n); now > m.limit {
		m.used.Add(-n)
		return errs.New(errs.Capability,
			"the rings of this daemon's clients and what they ask for may take %s together, and another %s is too much; use fewer slots or smaller batches, or run \"heliosctl serve\" with a larger %v",
			units.FormatBytes(m.limit), units.FormatBytes(n), errs.Key("memory"))
	}
	return nil
}

// ring is shared memory of slots, in a file without a name that can't shrink: a client that
// truncated it would kill us.
type ring struct {
	of        *memory
	fd        int
	bytes     int64 // of the file
	data      []byte
	device    DeviceMemory // in place of data
	placer    Placer       // that makes places; nil: nobody does
	places    []Place      // by slot, once one was claimed
	claims    int          // slots that batches have which are being made: they hold the mapping
	slots     int
	slotBytes int64
	held      int  // slots that the client has in it
	old       bool // another one has taken its place
}

// newRing makes a ring in the CPU's memory, or in that of the device of on, where that is not nil.
// Batches are made in it by placer; nil: they are copied to it.
func newRing(of *memory, slots int, slotBytes int64, on DeviceLoader, placer Placer) (r *ring,
	err error) {
	size := int64(slots) * slotBytes
	if err := of.take(size); err != nil {
		return nil, err
	}
	r = &ring{of: of, fd: -1, slots: slots, slotBytes: slotBytes, placer: placer,
		places: make([]Place, slots)}
	defer func() {
		if err != nil {
			_ = r.unmap() // there is an error already
			of.used.Add(-size)
		}
	}()
	if on != nil {
		if r.device, err = on.DeviceMemory(size); err != nil {
			return nil, err
		}
		r.fd, r.bytes = r.device.File()
		return r, nil
	}
	r.bytes = size
	if r.fd, err = unix.MemfdCreate("helios-ring",
		unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	if err := unix.Ftruncate(r.fd, size); err != nil {
		return nil, fmt.Errorf("ring of %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(r.fd), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	r.data, err = hostmem.MapFile(r.fd, 0, size, size, "a client's ring")
	return r, err
}

// unmap releases our side.
func (r *ring) unmap() error {
	if r.device != nil {
		err := r.device.Close() // the file, too
		r.device, r.fd = nil, -1
		return err
	}
	err := r.closePlaces()
	if r.data != nil {
		err = errors.Join(err, hostmem.Free(r.data))
		r.data = nil
	}
	if r.fd >= 0 {
		_ = unix.Close(r.fd)
		r.fd = -1
	}
	return err
}

// closePlaces ends those of a loader that is closed, with no batch being made in them.
func (r *ring) closePlaces() (err error) {
	for i, p := range r.places {
		if p != nil {
			err = errors.Join(err, p.Close())
			r.places[i] = nil
		}
	}
	return err
}

// place returns the place of a slot.
func (r *ring) place(slot int) (Place, error) {
	if r.places[slot] == nil {
		p, err := r.placer.Place(r.fd, int64(slot)*r.slotBytes, r.slotBytes)
		if err != nil {
			return nil, err
		}
		r.places[slot] = p
	}
	return r.places[slot], nil
}

// close ends the ring; it counts as taken until the client has given its slots back, and batches
// that are being made in it have ended.
func (r *ring) close() error {
	r.old = true
	var err error
	if r.claims == 0 {
		err = r.unmap()
	}
	r.settle()
	return err
}

// drop ends a claim.
func (r *ring) drop() error {
	if r.claims--; r.old {
		return r.close()
	}
	return nil
}

func (r *ring) settle() {
	if r.old && r.held == 0 && r.claims == 0 {
		r.of.used.Add(-int64(r.slots) * r.slotBytes)
		r.held = -1
	}
}

// tensor describes one in a slot.
type tensor struct {
	Name   string  `json:"name"`
	DType  string  `json:"dtype"`
	Shape  []int64 `json:"shape"`
	Offset int64   `json:"offset"`
}

// layout places tensors in a slot and returns how many bytes it needs.
func layout(of []Tensor) (described []tensor, bytes int64) {
	for _, t := range of {
		described = append(described, tensor{t.Name, t.DType, t.Shape, bytes})
		bytes += (t.Bytes + alignment - 1) &^ (alignment - 1)
	}
	return described, bytes
}

// slotFor returns the size of slots that hold so many bytes, with room for larger batches. Large
// slots are of whole huge pages.
func slotFor(bytes int64) int64 {
	page := int64(hostmem.PageBytes)
	if bytes += bytes / 2; bytes > 4*hostmem.HugePageBytes {
		page = hostmem.HugePageBytes
	}
	return (bytes + page - 1) &^ (page - 1)
}

// put writes tensors into a slot, but for the first one where that is there.
func (r *ring) put(slot int, of []Tensor, described []tensor, there bool) error {
	if r.device != nil {
		offsets := make([]int64, len(described))
		for i := range described {
			offsets[i] = described[i].Offset
		}
		return r.device.Put(int64(slot)*r.slotBytes, of, offsets)
	}
	base := r.data[int64(slot)*r.slotBytes:][:r.slotBytes]
	for i, t := range of {
		if i == 0 && there {
			continue
		}
		t.Put(base[described[i].Offset:][:t.Bytes])
	}
	return nil
}
