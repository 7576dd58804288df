package nvmewalk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/nvme"
)

// injected are the statuses that controllers say only when something breaks. Blocks 0 to 9 of any
// SSD are there.
const injected = "error(op=read,lba=0,sct=2,sc=0x81,times=1);" +
	"error(op=read,lba=1,sct=2,sc=0x81,dnr=1,times=1);" +
	"error(op=read,lba=2,sct=2,sc=0x82,times=1);" +
	"error(op=read,lba=3,sct=2,sc=0x86,dnr=1,times=1);" +
	"error(op=read,lba=4,sct=0,sc=0x82,times=1);" +
	"error(op=read,lba=5,sct=3,sc=0x60,times=1);" +
	"error(op=read,lba=6,sct=3,sc=0x70,times=1);" +
	"error(op=read,lba=7,sct=7,sc=0x01,times=1);" +
	"error(op=read,lba=8,sct=5,sc=0x01,times=1);" +
	"error(op=read,lba=9,sct=0,sc=0x21,times=1);" +
	"error(op=flush,sct=2,sc=0x80,times=1);" +
	"error(op=abort,sct=1,sc=0x03,times=1);" +
	"error(op=log,sct=0,sc=0x06,times=1);" +
	"lost(op=read,lba=10,times=1)"

// injectedRead is a read that comes back with a status once and then succeeds.
func injectedRead(name string, lba nvme.LBA, a answer) step {
	return step{name: name, cite: "injected", want: is(a), says: readAt(atLBA(lba), blocks(1)),
		moves: true,
		run: func(ctx context.Context, w *walker) error {
			err := w.io(ctx, w.readCommand(uint16(30+lba), lba, 1))
			if again := w.io(ctx, w.readCommand(uint16(60+lba), lba, 1)); again != nil {
				return fmt.Errorf("the second read: %v", again)
			}
			return err
		}}
}

var injectedSteps = []step{
	injectedRead("read fails in the medium", 0, unrecoveredRead),
	injectedRead("read fails in the medium for good", 1, unrecoveredRead),
	injectedRead("read with a wrong guard", 2, guardCheck),
	injectedRead("read of a locked range", 3, accessDenied),
	injectedRead("namespace becomes ready", 4, namespaceNotReady),
	injectedRead("path within the SSD fails", 5, controllerPathing),
	injectedRead("path to the SSD fails", 6, hostPathing),
	injectedRead("something of the vendor's", 7, vendorSpecific),
	injectedRead("status of a reserved type", 8, reservedType),
	injectedRead("SSD is busy with itself", 9, commandInterrupted),
	{name: "flush fails", cite: "injected", want: is(writeFault),
		says: func(w *walker) string { return fmt.Sprintf(" q%d: flush: ", w.qp.ID) },
		run:  ioCase(func(w *walker) nvme.Command { return nvme.FlushCommand(40, w.ns.ID) })},
	{name: "too many aborts", cite: "injected", want: is(abortLimit),
		run: func(ctx context.Context,
			w *walker) error {
			_, err := w.c.Abort(ctx, 0, noCID)
			return err
		},
		says: func(
			*walker) string {
			return fmt.Sprintf(" q0: abort command %d of queue 0: ", noCID)
		}},
	{name: "SSD fails at a log page", cite: "injected", want: is(internalError),
		run:  func(ctx context.Context, w *walker) error { _, err := w.c.SMART(ctx); return err },
		says: func(*walker) string { return " q0: get log page: SMART: " }},
	{name: "abort of a command that is lost", cite: "5.1, injected", want: is(abortRequested),
		says: readAt(atLBA(10), blocks(1)), moves: true,
		run: func(ctx context.Context, w *walker) error {
			cmd := w.readCommand(41, 10, 1)
			w.submit(cmd)
			var late *nvme.TimeoutError
			if e, err := w.poll(ctx, 50*time.Millisecond); !errors.As(err, &late) {
				return fmt.Errorf("what was to be lost came: %+v, %v", e, err)
			}
			aborted, err := w.c.Abort(ctx, w.qp.ID, cmd.CID)
			if err != nil || !aborted {
				return fmt.Errorf("not aborted: %v", err)
			}
			e, err := w.poll(ctx, patience)
			if err != nil {
				return err
			}
			return w.statusError(cmd, e.Status())
		}},
}
