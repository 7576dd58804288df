package nvmewalk

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"helios/nvme"
)

// Answers, in the words of the specification: figures 95 to 98 of the base specification, and 13
// and 14 of the NVM Command Set Specification 1.0.
var (
	success           = answer{nvme.StatusSuccess, ""}
	invalidOpcode     = answer{nvme.NewStatus(0, 0x01, false), "invalid command opcode"}
	invalidField      = answer{nvme.NewStatus(0, 0x02, false), "invalid field in command"}
	cidConflict       = answer{nvme.NewStatus(0, 0x03, false), "command ID conflict"}
	transferError     = answer{nvme.NewStatus(0, 0x04, false), "data transfer error"}
	internalError     = answer{nvme.NewStatus(0, 0x06, false), "internal error"}
	abortRequested    = answer{nvme.NewStatus(0, 0x07, false), "command abort requested"}
	abortedSQDeletion = answer{nvme.NewStatus(0, 0x08, false),
		"command aborted due to SQ deletion"}
	invalidNamespace  = answer{nvme.NewStatus(0, 0x0b, false), "invalid namespace or format"}
	sequenceError     = answer{nvme.NewStatus(0, 0x0c, false), "command sequence error"}
	invalidSGLSegment = answer{nvme.NewStatus(0, 0x0d, false), "invalid SGL segment descriptor"}
	sglLengthInvalid  = answer{nvme.NewStatus(0, 0x0f, false), "data SGL length invalid"}
	sglTypeInvalid    = answer{nvme.NewStatus(0, 0x11, false), "SGL descriptor type invalid"}
	prpOffset         = answer{nvme.NewStatus(0, 0x13, false), "PRP offset invalid"}
	writeProtected    = answer{nvme.NewStatus(0, 0x20, false), "namespace is write protected"}
	lbaRange          = answer{nvme.NewStatus(0, 0x80, false), "LBA out of range"}
	namespaceNotReady = answer{nvme.NewStatus(0, 0x82, false), "namespace not ready"}
	cqInvalid         = answer{nvme.NewStatus(1, 0x00, false), "completion queue invalid"}
	invalidQueueID    = answer{nvme.NewStatus(1, 0x01, false), "invalid queue identifier"}
	invalidQueueSize  = answer{nvme.NewStatus(1, 0x02, false), "invalid queue size"}
	abortLimit        = answer{nvme.NewStatus(1, 0x03, false), "abort command limit exceeded"}
	invalidVector     = answer{nvme.NewStatus(1, 0x08, false), "invalid interrupt vector"}
	invalidLogPage    = answer{nvme.NewStatus(1, 0x09, false), "invalid log page"}
	queueDeletion     = answer{nvme.NewStatus(1, 0x0c, false), "invalid queue deletion"}
	notSaveable       = answer{nvme.NewStatus(1, 0x0d, false), "feature identifier not saveable"}
	notChangeable     = answer{nvme.NewStatus(1, 0x0e, false), "feature not changeable"}
	notPerNamespace   = answer{nvme.NewStatus(1, 0x0f, false), "feature not namespace specific"}
	writeFault        = answer{nvme.NewStatus(2, 0x80, false), "write fault"}
	unrecoveredRead   = answer{nvme.NewStatus(2, 0x81, false), "unrecovered read error"}
	guardCheck        = answer{nvme.NewStatus(2, 0x82, false), "end-to-end guard check error"}
	compareFailure    = answer{nvme.NewStatus(2, 0x85, false), "compare failure"}
	accessDenied      = answer{nvme.NewStatus(2, 0x86, false), "access denied"}
	deallocated       = answer{nvme.NewStatus(2, 0x87, false),
		"deallocated or unwritten logical block"}
	controllerPathing  = answer{nvme.NewStatus(3, 0x60, false), "controller pathing error"}
	hostPathing        = answer{nvme.NewStatus(3, 0x70, false), "host pathing error"}
	vendorSpecific     = answer{nvme.NewStatus(7, 0x01, false), "vendor specific status"}
	reservedType       = answer{nvme.NewStatus(5, 0x01, false), "status of a reserved type"}
	commandInterrupted = answer{nvme.NewStatus(0, 0x21, false), "command interrupted"}
)

// is gives a step answers that do not depend on the controller.
func is(a ...answer) func(*walker) []answer { return func(*walker) []answer { return a } }

// adminCase is a step of one admin command without data.
func adminCase(cmd func(w *walker) nvme.Command) func(context.Context, *walker) error {
	return func(ctx context.Context, w *walker) error { return w.admin(ctx, cmd(w)) }
}

// ioCase is a step of one I/O command.
func ioCase(cmd func(w *walker) nvme.Command) func(context.Context, *walker) error {
	return func(ctx context.Context, w *walker) error { return w.io(ctx, cmd(w)) }
}

// noNamespace is the first namespace ID that cannot be valid (section 3.2.1: they are 1 to NN).
func (w *walker) noNamespace() uint32 { return w.id.NN + 1 }

// readAt returns what errors of a read say.
func readAt(lba func(w *walker) nvme.LBA, blocks func(w *walker) uint32) func(*walker) string {
	return func(w *walker) string {
		return fmt.Sprintf(" q%d: read LBA %d+%d: ", w.qp.ID, uint64(lba(w)), blocks(w))
	}
}

func atLBA(lba nvme.LBA) func(*walker) nvme.LBA { return func(*walker) nvme.LBA { return lba } }
func blocks(n uint32) func(*walker) uint32      { return func(*walker) uint32 { return n } }
func pastEnd(w *walker) nvme.LBA                { return nvme.LBA(w.ns.Blocks) }
func lastBlock(w *walker) nvme.LBA              { return nvme.LBA(w.ns.Blocks - 1) }

// pages returns how many blocks whole memory pages are.
func pages(n int) func(*walker) uint32 {
	return func(w *walker) uint32 { return w.blocksOf(n * page) }
}

// overMDTS is one block more than the controller takes.
func overMDTS(w *walker) uint32 { return w.blocksOf(page<<w.id.MDTS) + 1 }

// capability bits of a feature, as Get Features tells them (figure 196, SEL 011b).
const (
	featureSaveable   = 1 << 0
	featurePerNS      = 1 << 1
	featureChangeable = 1 << 2
)

func (w *walker) featureBits(ctx context.Context, id uint8) (uint32, error) {
	cmd := nvme.GetFeaturesCommand(0, id)
	cmd.CDW10 |= 3 << 8
	return w.c.Admin(ctx, "get features: what the controller supports", cmd, nil)
}

// adminSteps need no I/O queue; those that create queues rely on there being none.
var adminSteps = []step{
	{name: "identify namespace NN+1", cite: "5.17.2.1", want: is(invalidNamespace),
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.IdentifyCommand(0, nvme.CNSNamespace, w.noNamespace(), uint64(w.iova), 0)
		})},
	{name: "active namespaces after FFFFFFFEh", cite: "5.17.2.2", want: is(invalidNamespace),
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.IdentifyCommand(0, nvme.CNSActiveNSList, 0xfffffffe, uint64(w.iova), 0)
		})},
	{name: "identify with a reserved CNS", cite: "5.17, figure 273", want: is(invalidField),
		run: adminCase(
			func(
				w *walker) nvme.Command {
				return nvme.IdentifyCommand(0, 0xbf, w.ns.ID, uint64(w.iova), 0)
			})},
	{name: "identify to an odd PRP1", cite: "4.1.1", want: is(prpOffset, success), moves: true,
		// "The controller is not required to check that bits 1:0 are cleared to 00b": success is
		// right, too.
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.IdentifyCommand(0, nvme.CNSController, 0, uint64(w.iova)+1,
				uint64(w.iova)+page)
		})},
	{name: "identify to a PRP2 with an offset", cite: "4.1.1", want: is(prpOffset),
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.IdentifyCommand(0, nvme.CNSController, 0, uint64(w.iova)+page/2,
				uint64(w.iova)+page+8)
		})},
	{name: "reserved admin opcode", cite: "5, figure 138", want: is(invalidOpcode),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.Command{Opcode: 0x5f, NSID: w.ns.ID} }),
		says: func(*walker) string { return "admin opcode 5Fh" }},
	{name: "reserved log page", cite: "5.16, figure 203", want: is(invalidLogPage),
		let: []lenience{{invalidField, QEMU,
			"QEMU says invalid field of all log pages that it has not"}},
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.GetLogPageCommand(0, 0x6f, nvme.NSIDAll, 512, true, uint64(w.iova), 0)
		})},
	{name: "log page from behind its end", cite: "5.16, LPOU", want: is(invalidField),
		need: func(w *walker) string {
			if w.id.LPA&(1<<2) == 0 {
				return "no extended data for Get Log Page (LPA bit 2)"
			}
			return ""
		},
		run: adminCase(func(w *walker) nvme.Command {
			cmd := nvme.GetLogPageCommand(0, nvme.LogSMART, nvme.NSIDAll, 512, true,
				uint64(w.iova), 0)
			cmd.CDW12 = 1 << 20
			return cmd
		})},
	{name: "log page from an odd offset", cite: "5.16, LPOL", want: is(invalidField),
		need: func(w *walker) string {
			if w.id.LPA&(1<<2) == 0 {
				return "no extended data for Get Log Page (LPA bit 2)"
			}
			return ""
		},
		run: adminCase(func(w *walker) nvme.Command {
			cmd := nvme.GetLogPageCommand(0, nvme.LogSMART, nvme.NSIDAll, 256, true,
				uint64(w.iova), 0)
			cmd.CDW12 = 2
			return cmd
		})},
	{name: "log page longer than MDTS", cite: "figure 275, MDTS", want: is(invalidField),
		need: func(w *walker) string {
			if w.id.MDTS == 0 || w.id.MDTS > 16 {
				return "no limit that a log page could pass"
			}
			return ""
		},
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.GetLogPageCommand(0, nvme.LogErrorInformation, nvme.NSIDAll,
				page<<w.id.MDTS+4, true, uint64(w.iova), uint64(w.iova)+dataBytes)
		})},
	{name: "SMART log of one namespace", cite: "5.16.1.3", want: is(invalidField, invalidNamespace),
		need: func(w *walker) string {
			if w.id.LPA&1 != 0 {
				return "the controller keeps one (LPA bit 0)"
			}
			return ""
		},
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.GetLogPageCommand(0, nvme.LogSMART, w.ns.ID, 512, true, uint64(w.iova), 0)
		})},
	{name: "get a reserved feature", cite: "5.15", want: is(invalidField),
		run: adminCase(func(*walker) nvme.Command { return nvme.GetFeaturesCommand(0, 0) })},
	{name: "get features with a reserved SEL", cite: "5.15, figure 194", want: is(invalidField),
		let: []lenience{{success, QEMU, "QEMU takes reserved values of SEL for the current value"}},
		run: adminCase(func(*walker) nvme.Command {
			cmd := nvme.GetFeaturesCommand(0, nvme.FeatureTemperature)
			cmd.CDW10 |= 5 << 8
			return cmd
		})},
	{name: "set a reserved feature", cite: "5.27", want: is(invalidField),
		run: adminCase(func(*walker) nvme.Command { return nvme.SetFeaturesCommand(0, 0, 0) })},
	{name: "save a feature", cite: "5.27.1", want: is(notSaveable),
		need: func(
			w *walker) string {
			return w.lacks(nvme.FeatureTemperature, 0, featureSaveable)
		},
		run: adminCase(func(*walker) nvme.Command {
			cmd := nvme.SetFeaturesCommand(0, nvme.FeatureTemperature, 0)
			cmd.CDW10 |= 1 << 31
			return cmd
		})},
	{name: "change a feature that is fixed", cite: "5.27", want: is(notChangeable),
		need: func(
			w *walker) string {
			return w.lacks(nvme.FeatureArbitration, 0, featureChangeable)
		},
		run: adminCase(
			func(
				*walker) nvme.Command {
				return nvme.SetFeaturesCommand(0, nvme.FeatureArbitration, 7)
			})},
	{name: "set a controller's feature for one namespace", cite: "5.27", want: is(notPerNamespace),
		need: func(
			w *walker) string {
			return w.lacks(nvme.FeatureTemperature, featureChangeable, featurePerNS)
		},
		run: adminCase(func(w *walker) nvme.Command {
			cmd := nvme.SetFeaturesCommand(0, nvme.FeatureTemperature, 0)
			cmd.NSID = w.ns.ID
			return cmd
		})},
	{name: "ask for FFFFh+1 queues", cite: "5.27.1.5", want: is(invalidField),
		run: adminCase(
			func(
				*walker) nvme.Command {
				return nvme.SetFeaturesCommand(0, nvme.FeatureNumberOfQueues, 0xffffffff)
			})},

	{name: "abort with nothing to abort", cite: "5.1", want: is(success),
		run: func(ctx context.Context, w *walker) error {
			aborted, err := w.c.Abort(ctx, 0, noCID)
			if err == nil && aborted {
				return errors.New(
					"the controller claims to have aborted a command that nobody sent")
			}
			return err
		}},
	{name: "abort in a queue that is not there", cite: "5.1", want: is(success, invalidField),
		// The specification leaves an invalid queue in Abort open; controllers refuse it or abort
		// nothing.
		run: func(ctx context.Context, w *walker) error {
			aborted, err := w.c.Abort(ctx, noQueue, 1)
			if err == nil && aborted {
				return errors.New(
					"the controller claims to have aborted a command of a queue that is not there")
			}
			return err
		}},
	{name: "more aborts at once than ACL, through the driver", cite: "5.1, ACL", want: is(success),
		// The driver lets others wait: the limit is never passed.
		run: func(ctx context.Context, w *walker) error {
			return together(4*(int(w.id.ACL)+1),
				func() error { _, err := w.c.Abort(ctx, 0, noCID); return err })
		}},
	{name: "more aborts at once than ACL", cite: "5.1, ACL", want: is(success, abortLimit),
		// A controller that carries one out as it fetches it never holds more than one.
		need: func(w *walker) string {
			if w.id.ACL > 14 {
				return "the admin queue does not hold more than ACL+1 aborts"
			}
			return ""
		},
		run: func(ctx context.Context, w *walker) error {
			return together(2*(int(w.id.ACL)+1),
				func() error { return w.admin(ctx, nvme.AbortCommand(0, 0, noCID)) })
		}},

	{name: "create CQ 0", cite: "5.3", want: is(invalidQueueID),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateCQCommand(0, 0, 8, w.iova) })},
	{name: "create a CQ beyond what was granted", cite: "5.3", want: is(invalidQueueID),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateCQCommand(0, noQueue, 8, w.iova) })},
	{name: "create a CQ of one entry", cite: "5.3, QSIZE", want: is(invalidQueueSize),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateCQCommand(0, 1, 1, w.iova) })},
	{name: "create a CQ deeper than MQES", cite: "5.3, QSIZE", want: is(invalidQueueSize),
		need: roomOverMQES,
		run: adminCase(
			func(
				w *walker) nvme.Command {
				return nvme.CreateCQCommand(0, 1, w.c.MaxQueueEntries()+1, w.iova)
			})},
	{name: "create a CQ that does not start a page", cite: "5.3, PRP1", want: is(prpOffset),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateCQCommand(0, 1, 8, w.iova+64) })},
	{name: "create a CQ in pieces, with CAP.CQR", cite: "5.3, PC", want: is(invalidField),
		need: contiguous,
		run: adminCase(func(w *walker) nvme.Command {
			cmd := nvme.CreateCQCommand(0, 1, 8, w.iova)
			cmd.CDW11 &^= 1
			return cmd
		})},
	{name: "create a CQ with a vector that is not there", cite: "5.3, IV", want: is(invalidVector),
		run: adminCase(func(w *walker) nvme.Command {
			cmd := nvme.CreateCQCommand(0, 1, 8, w.iova)
			cmd.CDW11 |= 0xfff0<<16 | 1<<1
			return cmd
		})},
	{name: "create an SQ for CQ 0", cite: "5.4, CQID", want: is(cqInvalid),
		let: []lenience{{invalidQueueID, Any, "another reading of an identifier of 0"}},
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateSQCommand(0, 1, 8, w.iova, 0) })},
	{name: "create an SQ for a CQ that is not there", cite: "5.4, CQID", want: is(cqInvalid),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateSQCommand(0, 1, 8, w.iova, 1) })},
	{name: "delete SQ 0", cite: "5.6", want: is(invalidQueueID),
		run: adminCase(func(*walker) nvme.Command { return nvme.DeleteSQCommand(0, 0) })},
	{name: "delete an SQ that is not there", cite: "5.6", want: is(invalidQueueID),
		run: adminCase(func(*walker) nvme.Command { return nvme.DeleteSQCommand(0, 1) })},
	{name: "delete CQ 0", cite: "5.5", want: is(invalidQueueID),
		let: []lenience{{cqInvalid, QEMU, "QEMU has one status for all CQs that it does not know"}},
		run: adminCase(func(*walker) nvme.Command { return nvme.DeleteCQCommand(0, 0) })},
	{name: "delete a CQ that is not there", cite: "5.5", want: is(invalidQueueID),
		let: []lenience{{cqInvalid, QEMU, "QEMU has one status for all CQs that it does not know"}},
		run: adminCase(func(*walker) nvme.Command { return nvme.DeleteCQCommand(0, 1) })},
}

// lacks returns the reason why a feature is not one that has the bits of has and not those of not.
func (w *walker) lacks(id uint8, has, not uint32) string {
	ctx, cancel := context.WithTimeout(context.Background(), stepTime)
	defer cancel()
	bits, err := w.featureBits(ctx, id)
	switch {
	case err != nil:
		return "the controller does not report the feature's capabilities"
	case bits&not != 0 || bits&has != has:
		return fmt.Sprintf("the controller's feature %02Xh has capabilities %03bb", id, bits&7)
	}
	return ""
}

func roomOverMQES(w *walker) string {
	if w.c.MaxQueueEntries() > math.MaxUint16 {
		return "no queue is too deep for the controller"
	}
	return ""
}

func contiguous(w *walker) string {
	v, err := nvme.Read64(w.c.Bus(), nvme.RegCAP)
	if err != nil || !nvme.CAP(v).CQR() {
		return "the controller takes queues in pieces"
	}
	return ""
}

// together calls f n times at once and joins what comes; a status of one is the step's.
func together(n int, f func() error) error {
	var wg sync.WaitGroup
	all := make([]error, n)
	for i := range all {
		wg.Go(func() { all[i] = f() })
	}
	wg.Wait()
	var other, status error
	for _, err := range all {
		var se *nvme.StatusError
		switch {
		case errors.As(err, &se):
			status = err
		case err != nil:
			other = err
		}
	}
	if other != nil {
		return other
	}
	return status
}

// ioSteps have a queue pair.
var ioSteps = []step{
	{name: "create a CQ with an ID in use", cite: "5.3, QID", want: is(invalidQueueID),
		run: adminCase(
			func(w *walker) nvme.Command { return nvme.CreateCQCommand(0, w.qp.ID, 8, w.iova) })},
	{name: "create an SQ with an ID in use", cite: "5.4, QID", want: is(invalidQueueID),
		run: adminCase(
			func(
				w *walker) nvme.Command {
				return nvme.CreateSQCommand(0, w.qp.ID, 8, w.iova, w.qp.ID)
			})},
	{name: "create an SQ beyond what was granted", cite: "5.4, QID", want: is(invalidQueueID),
		run: adminCase(
			func(
				w *walker) nvme.Command {
				return nvme.CreateSQCommand(0, noQueue, 8, w.iova, w.qp.ID)
			})},
	{name: "create an SQ deeper than MQES", cite: "5.4, QSIZE", want: is(invalidQueueSize),
		need: spareQueueID(roomOverMQES),
		run: adminCase(func(w *walker) nvme.Command {
			return nvme.CreateSQCommand(0, w.qp.ID+1, w.c.MaxQueueEntries()+1, w.iova, w.qp.ID)
		})},
	{name: "create an SQ that does not start a page", cite: "5.4, PRP1", want: is(prpOffset),
		need: spareQueueID(nil),
		run: adminCase(
			func(
				w *walker) nvme.Command {
				return nvme.CreateSQCommand(0, w.qp.ID+1, 8, w.iova+64, w.qp.ID)
			})},
	{name: "delete a CQ before its SQ", cite: "5.5", want: is(queueDeletion),
		run: adminCase(func(w *walker) nvme.Command { return nvme.DeleteCQCommand(0, w.qp.ID) })},
	{name: "number of queues after queues were made", cite: "5.27.1.5", want: is(sequenceError),
		run: adminCase(
			func(
				*walker) nvme.Command {
				return nvme.SetFeaturesCommand(0, nvme.FeatureNumberOfQueues, 0)
			})},

	{name: "read past the end", cite: "NVM 3.2.4", want: is(lbaRange),
		says: readAt(pastEnd, blocks(1)),
		run:  ioCase(func(w *walker) nvme.Command { return w.readCommand(2, pastEnd(w), 1) })},
	{name: "read over the end", cite: "NVM 3.2.4", want: is(lbaRange),
		says: readAt(lastBlock, blocks(2)),
		run:  ioCase(func(w *walker) nvme.Command { return w.readCommand(3, lastBlock(w), 2) })},
	{name: "read where LBA + blocks wraps to 0", cite: "NVM 3.2.4", want: is(lbaRange),
		says: readAt(atLBA(math.MaxUint64), blocks(2)),
		run:  ioCase(func(w *walker) nvme.Command { return w.readCommand(4, math.MaxUint64, 2) })},
	{name: "read more than MDTS", cite: "figure 275, MDTS", want: is(invalidField),
		says: readAt(atLBA(0), overMDTS),
		need: func(w *walker) string {
			switch {
			case w.id.MDTS == 0 || w.id.MDTS > 20 || overMDTS(w) > nvme.MaxBlocksPerCommand:
				return "no command can ask for more than the controller takes"
			case uint64(overMDTS(w)) > w.ns.Blocks:
				return "the namespace is smaller than the largest transfer"
			}
			return ""
		},
		run: ioCase(func(w *walker) nvme.Command { return w.readCommand(5, 0, overMDTS(w)) })},
	{name: "reserved I/O opcode", cite: "NVM figure 17", want: is(invalidOpcode),
		says: func(w *walker) string { return fmt.Sprintf(" q%d: I/O opcode 7Fh: ", w.qp.ID) },
		run: ioCase(
			func(
				w *walker) nvme.Command {
				return nvme.Command{Opcode: 0x7f, CID: 6, NSID: w.ns.ID}
			})},
	{name: "read namespace NN+1", cite: "3.2.1", want: is(invalidNamespace),
		says: readAt(atLBA(0), blocks(1)),
		run:  ioCase(func(w *walker) nvme.Command { return w.inNamespace(7, w.noNamespace()) })},
	{name: "read namespace 0", cite: "3.2.1", want: is(invalidNamespace),
		says: readAt(atLBA(0), blocks(1)),
		run:  ioCase(func(w *walker) nvme.Command { return w.inNamespace(8, 0) })},
	{name: "read all namespaces", cite: "3.2.1", want: is(invalidNamespace, invalidField),
		says: readAt(atLBA(0), blocks(1)),
		run:  ioCase(func(w *walker) nvme.Command { return w.inNamespace(9, nvme.NSIDAll) })},
	{name: "read an inactive namespace", cite: "3.2.1.3", want: is(invalidField),
		says: readAt(atLBA(0), blocks(1)),
		need: func(w *walker) string {
			if w.inactive() == 0 {
				return "all namespaces are active"
			}
			return ""
		},
		run: ioCase(func(w *walker) nvme.Command { return w.inNamespace(10, w.inactive()) })},

	{name: "read to an odd PRP1", cite: "4.1.1", want: is(prpOffset, success),
		says: readAt(atLBA(0), blocks(1)), moves: true,
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(11, 0, 1)
			cmd.PRP1++
			cmd.PRP2 = uint64(w.iova) + page // where a block of a page ends
			return cmd
		})},
	{name: "read to a PRP2 with an offset", cite: "4.1.1", want: is(prpOffset),
		says: readAt(atLBA(0), pages(2)), moves: true, need: twoPages(2),
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(12, 0, pages(2)(w))
			cmd.PRP2 += 8
			return cmd
		})},
	{name: "read to a PRP list entry with an offset", cite: "4.1.1", want: is(prpOffset),
		says: readAt(atLBA(0), pages(4)), moves: true, need: twoPages(4),
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(13, 0, pages(4)(w))
			w.list()[1] += 4
			return cmd
		})},
	{name: "read to an address that is none", cite: "figure 95", want: is(transferError),
		says: readAt(atLBA(0), blocks(1)),
		need: func(w *walker) string {
			if w.t.BadAddress == 0 {
				return "no address is known that may be tried"
			}
			return ""
		},
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(14, 0, 1)
			cmd.PRP1 = uint64(w.t.BadAddress)
			return cmd
		})},
	{name: "half of a fused operation", cite: "6.2", want: is(invalidField),
		says: readAt(atLBA(0), blocks(1)),
		need: func(w *walker) string {
			if w.id.FUSES != 0 {
				return "the controller has fused operations"
			}
			return ""
		},
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(15, 0, 1)
			cmd.Flags = 1
			return cmd
		})},
	{name: "read with SGLs where there are none", cite: "4.1.2, SGLS", want: is(invalidField),
		says: readAt(atLBA(0), blocks(1)),
		need: func(w *walker) string { return w.sgls(false) },
		run:  ioCase(func(w *walker) nvme.Command { return w.sgl(16, w.ns.LBABytes, 0) })},
	{name: "read with an SGL of a reserved type", cite: "4.1.2",
		want: is(sglTypeInvalid, invalidSGLSegment), says: readAt(atLBA(0), blocks(1)),
		need: func(w *walker) string { return w.sgls(true) },
		run:  ioCase(func(w *walker) nvme.Command { return w.sgl(17, w.ns.LBABytes, 6) })},
	{name: "read with an SGL that is too short", cite: "4.1.2", want: is(sglLengthInvalid),
		says: readAt(atLBA(0), blocks(1)), moves: true,
		need: func(w *walker) string { return w.sgls(true) },
		run:  ioCase(func(w *walker) nvme.Command { return w.sgl(18, w.ns.LBABytes/2, 0) })},
	{name: "compare with something else", cite: "NVM 3.2.1, ONCS", moves: true,
		want: func(w *walker) []answer {
			if w.id.ONCS&1 != 0 {
				return []answer{compareFailure}
			}
			return []answer{invalidOpcode}
		},
		says: func(w *walker) string { return fmt.Sprintf(" q%d: I/O opcode 05h: ", w.qp.ID) },
		run: func(ctx context.Context, w *walker) error {
			if err := w.read(ctx, 0, 1); err != nil {
				return fmt.Errorf("read what is to be compared: %v", err)
			}
			w.mem[w.ns.LBABytes/3] ^= 4
			cmd := w.readCommand(19, 0, 1)
			cmd.Opcode = opCompare
			return w.io(ctx, cmd)
		}},
	{name: "read of a block that was never written", cite: "NVM 3.2.3.2.1, DULBE",
		want: is(deallocated, success), says: readAt(lastBlock, blocks(1)), moves: true,
		need: func(w *walker) string {
			if w.nsd.NSFEAT&(1<<2) == 0 {
				return "the namespace has no such error (NSFEAT bit 2)"
			}
			return ""
		},
		run: func(ctx context.Context, w *walker) error {
			set := func(v uint32) error {
				cmd := nvme.SetFeaturesCommand(0, nvme.FeatureErrorRecovery, v)
				cmd.NSID = w.ns.ID
				if err := w.admin(ctx, cmd); err != nil {
					return fmt.Errorf("switch the error on or off: %v", err)
				}
				return nil
			}
			if err := set(1 << 16); err != nil {
				return err
			}
			err := w.io(ctx, w.readCommand(20, lastBlock(w), 1))
			if serr := set(0); serr != nil {
				return serr
			}
			return err
		}},
	{name: "write to a protected namespace", cite: "figure 95", want: is(writeProtected),
		need: func(w *walker) string {
			if w.nsd.NSATTR&1 == 0 {
				return "the namespace can be written, and the walk writes nothing"
			}
			return ""
		},
		says: func(w *walker) string { return fmt.Sprintf(" q%d: write LBA 0+1: ", w.qp.ID) },
		run: ioCase(func(w *walker) nvme.Command {
			cmd := w.readCommand(21, 0, 1)
			cmd.Opcode = nvme.OpWrite
			return cmd
		})},
	{name: "two commands of one ID", cite: "figure 95", want: is(success, cidConflict), moves: true,
		// It is an error only when the first is still out as the second is fetched, and controllers
		// need not look.
		says: readAt(atLBA(0), blocks(1)),
		run: func(ctx context.Context, w *walker) error {
			cmd := w.readCommand(22, 0, 1)
			w.submit(cmd, cmd)
			var err error
			for range 2 {
				e, perr := w.poll(ctx, patience)
				if perr != nil {
					return perr
				}
				if serr := w.statusError(cmd, e.Status()); serr != nil {
					err = serr
				}
			}
			return err
		}},
	{name: "read a bad block", cite: "figure 98", want: is(unrecoveredRead), moves: true,
		says: func(w *walker) string {
			if w.t.BadBlock == nil {
				return ""
			}
			return readAt(atLBA(*w.t.BadBlock), blocks(1))(w) +
				"unrecovered read error (SCT 2h, SC 81h)"
		},
		need: func(w *walker) string {
			if w.t.BadBlock == nil {
				return "no block is bad; see the injected ones"
			}
			return ""
		},
		run: ioCase(func(w *walker) nvme.Command { return w.readCommand(23, *w.t.BadBlock, 1) })},

	{name: "abort of a read that hangs", cite: "5.1", want: is(success, abortRequested),
		moves: true, says: readAt(atLBA(8), blocks(1)),
		// A controller may say that it did not abort: then the read completes whenever it does, and
		// until then its memory is its own.
		need: func(w *walker) string {
			if w.t.Hold == nil {
				return "nobody can make a read hang"
			}
			return ""
		},
		run: func(ctx context.Context, w *walker) error {
			release, err := w.t.Hold()
			if err != nil {
				return err
			}
			cmd := w.readCommand(25, 8, 1)
			w.submit(cmd)
			var late *nvme.TimeoutError
			e, err := w.poll(ctx, 100*time.Millisecond)
			if !errors.As(err, &late) {
				return errors.Join(fmt.Errorf("the read was not held: %+v, %v", e, err), release())
			}
			aborted, err := w.c.Abort(ctx, w.qp.ID, cmd.CID)
			if pos := w.touched(); pos >= 0 {
				err = errors.Join(err,
					fmt.Errorf("byte %d was written before the read completed", pos))
			}
			if rerr := release(); err != nil || rerr != nil {
				return errors.Join(err, rerr)
			}
			if e, err = w.poll(ctx, patience); err != nil {
				return fmt.Errorf("the completion that was late (aborted %v): %w", aborted, err)
			}
			delete(w.out, cmd.CID)
			if aborted && e.Status().OK() {
				return errors.New("the controller said that it had aborted what it carried out")
			}
			if pos := w.touched(); e.Status().OK() && pos != 0 {
				return fmt.Errorf("the read succeeded in the end, and the first byte written is %d",
					pos)
			}
			return w.statusError(cmd, e.Status())
		}},
	{name: "delete an SQ with commands in it", cite: "5.6", want: is(success, abortedSQDeletion),
		moves: true,
		// They are completed as carried out or as aborted, or not at all, and then no byte comes
		// any more.
		says: readAt(atLBA(0), pages(1)),
		run: func(ctx context.Context, w *walker) error {
			var cmds []nvme.Command
			for i := range queueSize - 1 {
				cmds = append(cmds, w.readCommand(uint16(100+i), 0, pages(1)(w)))
			}
			w.submit(cmds...)
			if err := w.admin(ctx, nvme.DeleteSQCommand(0, w.qp.ID)); err != nil {
				return fmt.Errorf("delete the queue: %v", err)
			}
			var aborted error
			for {
				e, err := w.poll(ctx, 50*time.Millisecond)
				var late *nvme.TimeoutError
				if errors.As(err, &late) {
					break // what was dropped
				}
				if err != nil {
					return err
				}
				if serr := w.statusError(cmds[e.CID-100], e.Status()); serr != nil {
					aborted = serr
				}
			}
			w.guard()
			time.Sleep(20 * time.Millisecond)
			if pos := w.touched(); pos >= 0 {
				return fmt.Errorf("byte %d was written after its queue was deleted", pos)
			}
			if err := w.queue(ctx); err != nil {
				return fmt.Errorf("make the queue again: %v", err)
			}
			return aborted
		}},
}

// opCompare is an opcode that the driver has no use for.
const opCompare = 0x05

func spareQueueID(also func(*walker) string) func(*walker) string {
	return func(w *walker) string {
		if int(w.qp.ID) >= w.c.MaxQueuePairs() {
			return "the controller granted one queue pair"
		}
		if also != nil {
			return also(w)
		}
		return ""
	}
}

func twoPages(n int) func(*walker) string {
	return func(w *walker) string {
		if w.c.MaxTransferBytes() < n*page {
			return fmt.Sprintf("the controller moves less than %d pages at once", n)
		}
		return ""
	}
}

func (w *walker) inNamespace(cid uint16, ns uint32) nvme.Command {
	cmd := w.readCommand(cid, 0, 1)
	cmd.NSID = ns
	return cmd
}

// inactive is a namespace ID that is valid and not active, or 0.
func (w *walker) inactive() uint32 {
	active := map[uint32]bool{}
	for _, id := range w.c.Namespaces() {
		active[id] = true
	}
	for id := uint32(1); id <= min(w.id.NN, 4096); id++ {
		if !active[id] {
			return id
		}
	}
	return 0
}

// sgls returns the reason why the controller's SGLs are not as wanted.
func (w *walker) sgls(want bool) string {
	if has := w.id.SGLS&3 != 0; has != want {
		if has {
			return "the controller takes SGLs"
		}
		return "the controller takes no SGLs"
	}
	return ""
}

// sgl is a read of one block by one SGL descriptor in the command: address, length, type.
func (w *walker) sgl(cid uint16, bytes int, kind uint8) nvme.Command {
	cmd := w.readCommand(cid, 0, 1)
	cmd.Flags = 1 << 6
	cmd.PRP2 = uint64(uint32(bytes)) | uint64(kind)<<60
	return cmd
}
