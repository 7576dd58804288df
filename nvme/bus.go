package nvme

import (
	"errors"
	"fmt"
	"time"
)

// Bus is the way to one controller: registers, doorbells and DMA mappings. Implementations
// swap these and nothing else; queue logic stands above them. Methods are safe for
// concurrent use.
type Bus interface {
	// Name identifies the controller in messages: "proxy:/path/a.img" or a PCI address.
	Name() string
	// Read32 and Write32 access a 32-bit register at a byte offset.
	Read32(off uint32) (uint32, error)
	Write32(off, v uint32) error
	// Doorbell is the address of doorbell i: 0 = SQ0 tail, 1 = CQ0 head, 2 = SQ1 tail and so
	// on. The bus applies the controller's stride. Store to it with StoreDoorbell only.
	Doorbell(i uint32) (*uint32, error)
	// MapDMA makes memory reachable for the controller. mem is outside Go's heap and stays
	// mapped and allocated until UnmapDMA. mem[i] is at the returned address plus i.
	MapDMA(mem []byte) (IOVA, error)
	// UnmapDMA takes back exactly one mapping of MapDMA.
	UnmapDMA(iova IOVA, bytes int64) error
	// Close releases the bus; register accesses fail from then on. A controller should have
	// been shut down or disabled before.
	Close() error
}

// Unwrapper is a Bus that stands in front of another one.
type Unwrapper interface {
	Unwrap() Bus
}

// As finds a T in a bus or in one that it stands in front of, the outermost first.
func As[T any](b Bus) (T, bool) {
	for b != nil {
		if t, ok := b.(T); ok {
			return t, true
		}
		u, ok := b.(Unwrapper)
		if !ok {
			break
		}
		b = u.Unwrap()
	}
	var zero T
	return zero, false
}

// DoorbellMapper is a Bus whose doorbells another device, such as a GPU, can store to.
type DoorbellMapper interface {
	// DoorbellMemory is the whole pages that all doorbells lie in, and whether they are I/O
	// memory. It fails when the controller would not see a store that no Kick follows.
	DoorbellMemory() (mem []byte, io bool, err error)
}

// WindowMapper is a Bus whose mappings pin memory. A window reserves addresses for memory
// of which perhaps only the beginning will ever be used.
type WindowMapper interface {
	// MapWindow reserves addresses for mem and makes none of it reachable. UnmapDMA of all of it
	// takes the window back. ErrNoWindows means that this bus has none: use MapDMA.
	MapWindow(mem []byte) (IOVA, error)
	// ExtendWindow makes at least the first bytes of a window reachable; it never shrinks it.
	ExtendWindow(iova IOVA, bytes int64) error
}

// PeerDMA is a Bus that maps the memory of other devices by other ways than MapDMA.
type PeerDMA interface {
	// MapPeerDMA is MapDMA of another device's memory: mem is its mapping for the CPU, and dmabuf,
	// when it is not -1, an export of it that starts at offset. UnmapDMA takes it back.
	MapPeerDMA(mem []byte, dmabuf int, offset int64) (IOVA, error)
	// MapPeerWindow is WindowMapper's MapWindow of another device's memory whose mapping grows.
	// ExtendWindow maps no more of it than it is asked for. ErrNoWindows means that this bus has
	// none.
	MapPeerWindow(mem []byte) (IOVA, error)
}

// ErrNoWindows is the answer of a WindowMapper in front of a bus that is none.
var ErrNoWindows = errors.New("the bus maps memory only as a whole")

// Preparer is a Bus that needs work before each bring-up, the first one and those of
// Reset: a PCI function needs memory space and bus mastering, which resets take from it.
type Preparer interface {
	Prepare() error
}

// HardResetter is a Bus that can reset its controller without the controller's help (PCI
// function level reset). When it returns nil no DMA comes any more and CC.EN is 0. A bus that
// stands in front of one that cannot returns an error that is errors.ErrUnsupported.
type HardResetter interface {
	HardReset() error
}

// Leaver is a Bus whose device may have to be given up while it still answers: the kernel
// wants it back, or its PCI link reported an error that cannot be corrected.
type Leaver interface {
	// Leaving explains why, an ErrGone in words without the bus's name, or nil. It costs next to
	// nothing.
	Leaving() error
}

// BARReserver is a Bus whose controller may have memory of its own behind a BAR, and take its
// addresses on the PCI bus for that memory.
type BARReserver interface {
	// ReserveBAR keeps MapDMA from the addresses of a part of a BAR on the PCI bus.
	ReserveBAR(bir int, off, bytes int64) error
}

// Kicker adds to the Bus of a software controller: after a doorbell store, Kick
// wakes a controller that sleeps. It is cheap when the controller is awake.
type Kicker interface {
	Kick(qid uint16)
}

// Waiter is a Bus that can sleep until a completion queue may have a new entry, or
// until d has passed; it may do the controller's work in the caller. It may return early.
type Waiter interface {
	WaitCQ(qid uint16, d time.Duration)
}

// CQRef names a completion queue of a bus.
type CQRef struct {
	Bus Bus
	QID uint16
}

// GroupWaiter is a Bus that can wait for several completion queues at once, its own
// and those of other buses of its kind. The queues must be idle when they join a group, and a
// queue is in one group at most.
type GroupWaiter interface {
	GroupCQs(refs []CQRef) (CQGroup, error)
}

// CQGroup is a set of completion queues with one waiting party, which also does the work of
// their software controllers while it waits.
type CQGroup interface {
	// Wait works and then sleeps until one of the queues has entries that came since the last
	// Wait, or until d has passed. It may return early; Wait(0) works and never sleeps.
	Wait(d time.Duration)
	// Rejoin adds a queue, such as one that was deleted and created again; deleting a queue
	// drops it from the group. The other queues go on undisturbed.
	Rejoin(ref CQRef) error
	// Close dissolves the group; its queues go on by themselves.
	Close() error
}

// Read64 reads a 64-bit register as two dwords, the low one first.
func Read64(b Bus, off uint32) (uint64, error) {
	if off%8 != 0 {
		return 0, fmt.Errorf("%s: register %#x is no 64-bit register", b.Name(), off)
	}
	lo, err := b.Read32(off)
	if err != nil {
		return 0, err
	}
	hi, err := b.Read32(off + 4)
	return uint64(lo) | uint64(hi)<<32, err
}

// Write64 writes a 64-bit register as two dwords, the low one first.
func Write64(b Bus, off uint32, v uint64) error {
	if off%8 != 0 {
		return fmt.Errorf("%s: register %#x is no 64-bit register", b.Name(), off)
	}
	if err := b.Write32(off, uint32(v)); err != nil {
		return err
	}
	return b.Write32(off+4, uint32(v>>32))
}
