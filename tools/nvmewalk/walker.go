package nvmewalk

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"helios/internal/hostmem"
	"helios/nvme"
)

// walker holds a controller, and a queue pair that it drives itself: no driver sends what the steps
// do.
type walker struct {
	t   Target
	c   *nvme.Controller
	ns  nvme.Namespace
	id  nvme.IdentifyController
	nsd nvme.IdentifyNamespace

	mem  []byte // data, then a page for PRP lists
	iova nvme.IOVA
	qp   *nvme.QueuePair
	tail int
	head int
	pass bool // the phase of new completions
	out  map[uint16]bool
}

const (
	page      = 4096
	dataBytes = 64 * page
	guardByte = 0xa7
	queueSize = 16
)

// Queue IDs and command IDs that nobody has.
const (
	noQueue = 0xfffe
	noCID   = 0xfffe
)

// prepare maps memory, reads the namespace's structure, and makes a queue pair.
func (w *walker) prepare(ctx context.Context, queues bool) error {
	mem, err := hostmem.Alloc(dataBytes+page, "nvme walk")
	if err != nil {
		return err
	}
	iova, err := w.c.MapDMA(mem)
	if err != nil {
		return errors.Join(err, hostmem.Free(mem))
	}
	w.mem, w.iova = mem, iova
	b := make([]byte, nvme.IdentifyBytes)
	if _, err := w.c.Admin(ctx, "identify namespace", nvme.IdentifyCommand(0, nvme.CNSNamespace,
		w.ns.ID, 0, 0), b); err != nil {
		return err
	}
	if w.nsd, err = nvme.DecodeIdentifyNamespace(b); err != nil {
		return err
	}
	if queues {
		return w.queue(ctx)
	}
	return nil
}

// queue makes the queue pair anew.
func (w *walker) queue(ctx context.Context) error {
	if w.qp != nil {
		if err := w.c.DeleteQueuePair(ctx, w.qp); err != nil {
			return err
		}
	}
	qp, err := w.c.CreateQueuePair(ctx, queueSize)
	if err != nil {
		return err
	}
	w.qp, w.tail, w.head, w.pass, w.out = qp, 0, 0, true, map[uint16]bool{}
	return nil
}

// close ends everything. Memory goes when nothing can be moved to it any more: its queue is
// deleted, or the controller disabled.
func (w *walker) close(ctx context.Context) error {
	var err error
	if w.qp != nil {
		if err = w.c.DeleteQueuePair(ctx, w.qp); err != nil {
			err = errors.Join(err, w.c.Disable(ctx))
		}
	}
	if w.mem != nil {
		if uerr := w.c.UnmapDMA(w.iova, int64(len(w.mem))); uerr != nil {
			err = errors.Join(err, uerr)
		} else {
			err = errors.Join(err, hostmem.Free(w.mem))
		}
	}
	return errors.Join(err, w.c.Close(ctx))
}

// guard fills the memory so that a byte that is moved shows.
func (w *walker) guard() {
	for i := range w.mem {
		w.mem[i] = guardByte
	}
}

// touched is the first data byte that changed since guard, or -1.
func (w *walker) touched() int {
	for i, b := range w.mem[:dataBytes] {
		if b != guardByte {
			return i
		}
	}
	return -1
}

// admin sends an admin command without data.
func (w *walker) admin(ctx context.Context, cmd nvme.Command) error {
	_, err := w.c.Admin(ctx, adminName(cmd.Opcode), cmd, nil)
	return err
}

// submit puts commands on the queue and rings once.
func (w *walker) submit(cmds ...nvme.Command) {
	for _, cmd := range cmds {
		// The queue may be memory of the controller: Go assigns 64 bytes in stores of 16 at most.
		type words = [nvme.CommandBytes / 8]uint64
		slot := (*words)(unsafe.Pointer(&w.qp.SQ[w.tail*nvme.CommandBytes]))
		*slot = *(*words)(unsafe.Pointer(&cmd))
		w.out[cmd.CID] = true
		w.tail = (w.tail + 1) % w.qp.Entries
	}
	nvme.StoreDoorbell(w.qp.SQDoorbell, uint32(w.tail))
	w.kick(w.qp.ID)
}

func (w *walker) kick(qid uint16) {
	if k, ok := w.c.Bus().(nvme.Kicker); ok {
		k.Kick(qid)
	}
}

// poll takes the next completion. It fails when none comes in time or when it is for no command.
func (w *walker) poll(ctx context.Context, wait time.Duration) (nvme.Completion, error) {
	deadline := time.Now().Add(wait)
	for {
		e, ok := nvme.LoadCompletion(
			(*nvme.Completion)(unsafe.Pointer(&w.qp.CQ[w.head*nvme.CompletionBytes])), w.pass)
		if ok {
			if w.head++; w.head == w.qp.Entries {
				w.head, w.pass = 0, !w.pass
			}
			nvme.StoreDoorbell(w.qp.CQDoorbell, uint32(w.head))
			if e.SQID != w.qp.ID || !w.out[e.CID] || int(e.SQHead) >= w.qp.Entries {
				return e, &nvme.ProtocolError{Bus: w.c.Name(), QID: w.qp.ID,
					What: fmt.Sprintf("completion %+v", e)}
			}
			return e, nil
		}
		left := time.Until(deadline)
		if err := ctx.Err(); err != nil {
			return e, err
		}
		if left <= 0 {
			return e, &nvme.TimeoutError{Bus: w.c.Name(), QID: w.qp.ID, Op: "a command of the walk",
				After: wait, Next: "reset the controller"}
		}
		if b, ok := w.c.Bus().(nvme.Waiter); ok {
			b.WaitCQ(w.qp.ID, min(left, 20*time.Millisecond))
		} else {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// patience bounds a command of the walk.
const patience = 10 * time.Second

// io sends one command and gives its status as the I/O stacks do.
func (w *walker) io(ctx context.Context, cmd nvme.Command) error {
	w.submit(cmd)
	e, err := w.poll(ctx, patience)
	if err != nil {
		return err
	}
	delete(w.out, e.CID)
	if e.CID != cmd.CID {
		return &nvme.ProtocolError{Bus: w.c.Name(), QID: w.qp.ID,
			What: fmt.Sprintf("command %d was completed in place of %d", e.CID, cmd.CID)}
	}
	return w.statusError(cmd, e.Status())
}

// statusError is nil for success.
func (w *walker) statusError(cmd nvme.Command, st nvme.Status) error {
	if st.OK() {
		return nil
	}
	e := &nvme.StatusError{Bus: w.c.Name(), QID: w.qp.ID, CID: cmd.CID, Op: ioName(cmd.Opcode),
		Status: st}
	if cmd.Opcode == nvme.OpRead || cmd.Opcode == nvme.OpWrite {
		e.LBA, e.Blocks = cmd.LBARange()
	}
	return e
}

// readCommand is a read to the start of the memory, with a list where it needs one.
func (w *walker) readCommand(cid uint16, lba nvme.LBA, blocks uint32) nvme.Command {
	p1, p2 := uint64(w.iova), uint64(0)
	switch n := int(blocks) * w.ns.LBABytes; {
	case n <= page:
	case n <= 2*page:
		p2 = p1 + page
	default:
		p2 = uint64(w.iova) + dataBytes
		list := w.list()
		for i := range list { // pages that are there, whatever the length
			list[i] = uint64(w.iova) + uint64((i+1)%(dataBytes/page))*page
		}
	}
	return nvme.ReadCommand(cid, w.ns.ID, lba, blocks, p1, p2)
}

func (w *walker) list() []uint64 { return hostmem.View[uint64](w.mem[dataBytes:]) }

func (w *walker) read(ctx context.Context, lba nvme.LBA, blocks uint32) error {
	return w.io(ctx, w.readCommand(1, lba, blocks))
}

// blocksOf returns how many blocks these bytes are.
func (w *walker) blocksOf(bytes int) uint32 { return uint32(bytes / w.ns.LBABytes) }

// adminName is the name of an admin opcode in words.
func adminName(op uint8) string {
	switch op {
	case nvme.AdminDeleteSQ:
		return "delete I/O submission queue"
	case nvme.AdminCreateSQ:
		return "create I/O submission queue"
	case nvme.AdminGetLogPage:
		return "get log page"
	case nvme.AdminDeleteCQ:
		return "delete I/O completion queue"
	case nvme.AdminCreateCQ:
		return "create I/O completion queue"
	case nvme.AdminIdentify:
		return "identify"
	case nvme.AdminAbort:
		return "abort"
	case nvme.AdminSetFeatures:
		return "set features"
	case nvme.AdminGetFeatures:
		return "get features"
	}
	return fmt.Sprintf("admin opcode %02Xh", op)
}

// ioName is the name of an NVM command set opcode in words.
func ioName(op uint8) string {
	switch op {
	case nvme.OpFlush:
		return "flush"
	case nvme.OpWrite:
		return "write"
	case nvme.OpRead:
		return "read"
	}
	return fmt.Sprintf("I/O opcode %02Xh", op)
}
