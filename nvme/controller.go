package nvme

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"helios/internal/errs"
	"helios/internal/nsid"
)

// Options tune a Controller. The zero value is good.
type Options struct {
	AdminDepth int           // admin queue entries, 2 to 256; 0 = 32
	Timeout    time.Duration // of one admin command; 0 = 5 s
	QueuePairs int           // I/O queue pairs to ask for, up to 65,535; 0 = 128
	Namespace  uint32        // 0 = the first active one
	// bound on MaxTransferBytes, also where MDTS sets none; 0 = 1 MiB
	MaxTransferBytes int
	ShutdownTimeout  time.Duration // of Close, where the controller's RTD3E is not longer; 0 = 5 s
}

func (o *Options) defaults() error {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.AdminDepth, 32)
	set(&o.QueuePairs, 128)
	set(&o.MaxTransferBytes, 1<<20)
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	if o.ShutdownTimeout == 0 {
		o.ShutdownTimeout = 5 * time.Second
	}
	switch {
	case o.AdminDepth < 2 || o.AdminDepth > maxAdminSlots+1:
		return errs.New(errs.Usage, "nvme: admin queue depth %d; use 2 to %d", o.AdminDepth,
			maxAdminSlots+1)
	case o.QueuePairs < 1 || o.QueuePairs > 65535:
		return errs.New(errs.Usage, "nvme: %d queue pairs; use 1 to 65535", o.QueuePairs)
	case o.MaxTransferBytes < 4096:
		return errs.New(errs.Usage, "nvme: largest transfer of %d bytes; use at least 4096",
			o.MaxTransferBytes)
	case o.Timeout < 0 || o.ShutdownTimeout < 0:
		return errs.New(errs.Usage, "nvme: negative timeout; leave it 0 for the default")
	}
	return nil
}

// Counters count what happened on the admin queue since Open.
type Counters struct {
	AdminCommands      int64 // sent
	StatusErrors       int64 // completed with an error status
	Timeouts           int64 // given up at their deadline
	LateCompletions    int64 // came after their command was given up
	ForeignCompletions int64 // were for no command in flight, or malformed
	Resets             int64
	HardResets         int64 // through the bus, where CC.EN = 0 did not do; bring-ups included
}

// Controller is one NVMe controller that was brought up. Its methods are safe for
// concurrent use.
type Controller struct {
	bus    Bus
	kicker Kicker // nil when the bus has none
	waiter Waiter // nil when the bus has none
	leaver Leaver // nil when the bus has none
	opt    Options

	cap       CAP
	version   Version
	pageBytes int

	// held for writing by Reset and Close, for reading by queue creation and deletion
	life    sync.RWMutex
	enabled bool // CC.EN may be 1 with our memory behind it; guarded by life
	up      bool // the last bring-up succeeded; guarded by life
	failed  bool // the last bring-up did not; guarded by life

	mu     sync.Mutex // guards all below; held for short times only, never over a wait
	adm    adminQueue
	guards []*func() error // asked before a reset
	// why commands are refused (reset going on, closed), except set-up's own
	gate error
	// the controller died or broke the protocol: everything is refused until Reset
	fatal      error
	id         IdentifyController
	ns         Namespace
	who        nsid.ID // of ns
	nsids      []uint32
	granted    int
	generation uint64                // of queue pairs: they do not outlive a reset
	queues     map[uint16]*QueuePair // by queue ID; kept while the controller may have the queue
	pairs      map[*QueuePair]dmaBuf // the memory of those not deleted yet, older generations too
	orphans    []dmaBuf              // memory that the controller may still write to
	aborts     chan struct{}
	count      Counters
	closed     bool
}

// Reasons to turn commands away.
var (
	errStarting = errors.New("the controller is being initialised; wait for it")
	errDisabled = deviceClass(
		errors.New("the controller was disabled, since it was given up; reset it or bind it again"))
	errClosed = deviceClass(ErrClosed)
)

// Open brings the controller behind bus up: disable, admin queue, enable, Identify, number
// of queues (section 3.5.1). Every wait is bounded: those for
// CSTS.RDY by the controller's own CAP.TO. On error the controller is disabled when that is
// possible; bus stays open and is the caller's to close.
func Open(ctx context.Context, bus Bus, opt Options) (*Controller, error) {
	if err := opt.defaults(); err != nil {
		return nil, err
	}
	c := &Controller{bus: bus, opt: opt, pageBytes: 4096, gate: errStarting,
		queues: map[uint16]*QueuePair{}, pairs: map[*QueuePair]dmaBuf{}}
	c.kicker, _ = bus.(Kicker)
	c.waiter, _ = bus.(Waiter)
	c.leaver, _ = As[Leaver](bus)
	if err := c.probe(); err != nil {
		return nil, err
	}
	if err := c.allocAdmin(opt.AdminDepth); err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		return nil, errs.Also(err, c.release(ctx, false))
	}
	return c, nil
}

// probe reads what never changes and refuses what this package cannot drive.
func (c *Controller) probe() error {
	v, err := Read64(c.bus, RegCAP)
	if err != nil {
		return fmt.Errorf("nvme %s: read CAP: %w", c.bus.Name(), deviceClass(err))
	}
	if v == 0 || v == 1<<64-1 {
		s, _ := c.bus.Read32(RegCSTS) // only for the message
		return &FatalError{c.bus.Name(), fmt.Sprintf("CAP reads %#x", v), CSTS(s), ErrGone}
	}
	c.cap = CAP(v)
	vs, err := c.bus.Read32(RegVS)
	if err != nil {
		return fmt.Errorf("nvme %s: read VS: %w", c.bus.Name(), deviceClass(err))
	}
	c.version = Version(vs)
	if c.cap.CSS()&(1<<0|1<<6) == 0 {
		return errs.New(errs.Capability,
			"nvme %s: no NVM command set (CAP.CSS %02Xh); use an SSD with block storage",
			c.bus.Name(), c.cap.CSS())
	}
	if c.cap.MPSMIN() > 0 {
		return errs.New(errs.Capability,
			"nvme %s: needs memory pages of %d bytes, here they have 4096; use another SSD",
			c.bus.Name(), 4096<<c.cap.MPSMIN())
	}
	return nil
}

// readyTimeout is the longest that CSTS.RDY may take (CAP.TO, or CRTO where it is there),
// with one unit of 500 ms for rounding.
func (c *Controller) readyTimeout() time.Duration {
	units := c.cap.TO()
	if c.cap.CRMS() != 0 {
		if v, err := c.bus.Read32(RegCRTO); err == nil && v != 0xffffffff {
			units = max(units, int(v&0xffff)) // CRWMT: ready with media
		}
	}
	return time.Duration(units+1) * 500 * time.Millisecond
}

// waitCSTS waits until CSTS & mask == want. failFatal ends the wait when CFS comes up.
func (c *Controller) waitCSTS(ctx context.Context, op string, mask, want CSTS, failFatal bool,
	timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	var p pauser
	for {
		s, err := c.readCSTS(op)
		if err != nil {
			return err
		}
		if s&mask == want {
			return nil
		}
		if failFatal && s.CFS() {
			return &FatalError{c.bus.Name(), op, s, ErrFatal}
		}
		if err := p.pause(ctx, nil, deadline); errors.Is(err, ErrTimeout) {
			return &TimeoutError{Bus: c.bus.Name(), Op: fmt.Sprintf("%s (CSTS %08Xh)", op,
				uint32(s)), After: timeout,
				Next: "power-cycle the SSD, and check its firmware"}
		} else if err != nil {
			return fmt.Errorf("nvme %s: %s: %w", c.bus.Name(), op, err)
		}
	}
}

// disable brings CC.EN to 0 and waits for CSTS.RDY to follow; then nothing is in flight and
// no queue exists any more. A controller that does not is reset through its bus, where that can.
// settle waits for an enable that somebody else began.
func (c *Controller) disable(ctx context.Context, settle bool) error {
	err := c.clearEnable(ctx, settle)
	if err == nil {
		s, serr := c.readCSTS("disable")
		if serr == nil && !s.CFS() {
			return nil
		}
		if err = serr; err == nil {
			err = &FatalError{c.bus.Name(), "disable: CSTS.CFS stays 1", s, ErrFatal}
		}
	} else if ctx.Err() != nil {
		return err
	}
	switch herr := c.hardReset(ctx); {
	case herr == nil:
		return nil
	case !errors.Is(herr, errors.ErrUnsupported):
		return errs.Also(err, herr)
	case errors.Is(err, ErrFatal):
		return nil // disabled all the same; enabling it will tell
	}
	return err
}

// hardReset resets the controller through its bus. When it returns nil CC.EN is 0.
func (c *Controller) hardReset(ctx context.Context) error {
	h, ok := As[HardResetter](c.bus)
	if !ok {
		return errors.ErrUnsupported
	}
	if err := h.HardReset(); err != nil {
		if errors.Is(err, errors.ErrUnsupported) {
			return err
		}
		return fmt.Errorf("nvme %s: reset through its bus: %w", c.bus.Name(), deviceClass(err))
	}
	c.mu.Lock()
	c.count.HardResets++
	c.mu.Unlock()
	if err := c.prepare(); err != nil {
		return err
	}
	return c.waitCSTS(ctx, "reset through its bus: CSTS.RDY stays 1", CSTSReady, 0, false,
		c.readyTimeout())
}

// prepare does what the bus needs before each bring-up.
func (c *Controller) prepare() error {
	if p, ok := As[Preparer](c.bus); ok {
		if err := p.Prepare(); err != nil {
			return fmt.Errorf("nvme %s: prepare its bus: %w", c.bus.Name(), deviceClass(err))
		}
	}
	return nil
}

func (c *Controller) clearEnable(ctx context.Context, settle bool) error {
	cc, err := c.bus.Read32(RegCC)
	if err != nil {
		return fmt.Errorf("nvme %s: read CC: %w", c.bus.Name(), deviceClass(err))
	}
	s, err := c.readCSTS("disable")
	if err != nil {
		return err
	}
	if CC(cc).EN() {
		// EN may go to 0 only after RDY followed its last change (section 3.1.3.5).
		if settle && !s.RDY() && !s.CFS() && s.SHST() == 0 {
			err := c.waitCSTS(ctx, "disable: wait for an earlier enable", CSTSReady, CSTSReady,
				true, c.readyTimeout())
			// A controller that never got ready, or died, can only be disabled as it is.
			if err != nil && (ctx.Err() != nil || errors.Is(err, ErrGone)) {
				return err
			}
		}
		cc = cc &^ uint32(CCEnable) &^ uint32(CCShutdownMask)
		if err := c.bus.Write32(RegCC, cc); err != nil {
			return fmt.Errorf("nvme %s: write CC: %w", c.bus.Name(), deviceClass(err))
		}
	}
	// CFS may stay up until the reset is done, so it does not end this wait.
	return c.waitCSTS(ctx, "disable: CSTS.RDY stays 1", CSTSReady, 0, false, c.readyTimeout())
}

// enable programs the admin queue and brings CC.EN to 1.
func (c *Controller) enable(ctx context.Context) error {
	q := &c.adm
	cc := MakeCC(12, 6, 4) | CCEnable
	if c.cap.CSS()&1 == 0 {
		cc |= CCSetIO
	}
	err := c.bus.Write32(RegAQA, MakeAQA(q.entries, q.entries))
	if err == nil {
		err = Write64(c.bus, RegASQ, uint64(q.sqIOVA))
	}
	if err == nil {
		err = Write64(c.bus, RegACQ, uint64(q.cqIOVA))
	}
	if err == nil {
		err = c.bus.Write32(RegCC, uint32(cc))
	}
	if err != nil {
		return fmt.Errorf("nvme %s: enable: %w", c.bus.Name(), deviceClass(err))
	}
	return c.waitCSTS(ctx, "enable: CSTS.RDY stays 0", CSTSReady, CSTSReady, true, c.readyTimeout())
}

// start runs the bring-up from any state of the controller. Commands of others are turned
// away by gate meanwhile. After one that failed the next begins with a reset through the bus.
func (c *Controller) start(ctx context.Context) error {
	c.up = false
	if err := c.Leaving(); err != nil {
		return err
	}
	again := c.failed
	c.failed = true
	before := c.Counters().HardResets
	if err := c.prepare(); err != nil {
		return err
	}
	if again {
		if err := c.hardReset(ctx); err != nil && !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
	if err := c.disable(ctx, true); err != nil {
		return err
	}
	err := c.startDisabled(ctx)
	if err != nil && ctx.Err() == nil && (errors.Is(err, ErrTimeout) || errors.Is(err, ErrFatal)) &&
		c.Counters().HardResets == before {
		switch herr := c.hardReset(ctx); {
		case errors.Is(herr, errors.ErrUnsupported):
		case herr != nil:
			err = errs.Also(err, herr)
		default:
			err = c.startDisabled(ctx)
		}
	}
	if err != nil {
		return err
	}
	if err := c.identify(ctx); err != nil {
		return err
	}
	if err := c.features(ctx); err != nil {
		return err
	}
	c.failed = false
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gate = nil
	c.up = true
	return nil
}

// startDisabled enables a controller that was disabled.
func (c *Controller) startDisabled(ctx context.Context) error {
	if err := c.disabled(); err != nil {
		return err
	}
	if err := c.keepCMBAway(); err != nil {
		return err
	}
	// Doorbells sit behind registers that a reset may have remapped.
	sq, err := c.bus.Doorbell(0)
	if err != nil {
		return fmt.Errorf("nvme %s: admin queue doorbell: %w", c.bus.Name(), deviceClass(err))
	}
	cq, err := c.bus.Doorbell(1)
	if err != nil {
		return fmt.Errorf("nvme %s: admin queue doorbell: %w", c.bus.Name(), deviceClass(err))
	}
	c.mu.Lock()
	c.adm.sqDoorbell, c.adm.cqDoorbell = sq, cq
	c.mu.Unlock()
	c.enabled = true
	return c.enable(ctx)
}

// disabled notes that CC.EN = 0 has completed.
func (c *Controller) disabled() error {
	c.enabled = false
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fatal = nil
	c.generation++
	clear(c.queues)
	return c.clearAdmin()
}

func (c *Controller) identify(ctx context.Context) error {
	page := make([]byte, IdentifyBytes)
	if _, err := c.exec(ctx, true, "identify controller", IdentifyCommand(0, CNSController, 0, 0,
		0), page); err != nil {
		return err
	}
	id, err := DecodeIdentifyController(page)
	if err != nil {
		return err
	}
	if id.SQES&0xf > 6 || id.SQES>>4 < 6 || id.CQES&0xf > 4 || id.CQES>>4 < 4 {
		return errs.New(errs.Capability,
			"nvme %s: queue entry sizes SQES %02Xh, CQES %02Xh exclude 64 and 16 bytes; use another SSD",
			c.bus.Name(), id.SQES, id.CQES)
	}
	if id.CNTRLTYPE > 1 {
		return errs.New(errs.Capability,
			"nvme %s: controller of type %d does no I/O; bind the SSD's I/O controller",
			c.bus.Name(), id.CNTRLTYPE)
	}
	nsids, err := c.activeNamespaces(ctx, &id)
	if err != nil {
		return err
	}
	want := c.opt.Namespace
	if want == 0 {
		if len(nsids) == 0 {
			return errs.New(errs.Capability,
				"nvme %s: no active namespace; create and attach one with \"nvme create-ns\"",
				c.bus.Name())
		}
		want = nsids[0]
	}
	desc, err := c.descriptors(ctx, want)
	if err != nil {
		return err
	}
	if _, err := c.exec(ctx, true, fmt.Sprintf("identify namespace %d", want),
		IdentifyCommand(0, CNSNamespace, want, 0, 0), page); err != nil {
		return err
	}
	in, err := DecodeIdentifyNamespace(page)
	if err != nil {
		return err
	}
	ns, err := MakeNamespace(want, &in)
	if err != nil {
		return fmt.Errorf("nvme %s: %w", c.bus.Name(), err)
	}
	who := identityOf(&id, want, &in, desc)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.generation > 1 && (ns != c.ns || id.SN != c.id.SN) {
		return errs.New(errs.Device,
			"nvme %s: another SSD or namespace format after the reset (%s, %d blocks; was %s, %d): unbind and bind it again",
			c.bus.Name(), id.Serial(), ns.Blocks, c.id.Serial(), c.ns.Blocks)
	}
	c.id, c.ns, c.nsids, c.who = id, ns, nsids, who
	if c.aborts == nil {
		c.aborts = make(chan struct{}, int(id.ACL)+1)
	}
	return nil
}

// descriptors asks for a namespace's identification descriptors, and refuses a namespace of another
// command set than NVM. Its Identify data (CNS 00h) may look like any other's, and its reads and
// writes fail, or worse. Only controllers that say so in CAP have such namespaces (CAP.CSS bit 6);
// those from before NVMe 1.3 have no descriptors.
func (c *Controller) descriptors(ctx context.Context, ns uint32) (d NamespaceDescriptors,
	err error) {
	sets := c.cap.CSS()&(1<<6) != 0
	if !sets && c.version < 1<<16|3<<8 {
		return d, nil
	}
	page := make([]byte, IdentifyBytes)
	_, err = c.exec(ctx, true, fmt.Sprintf("identify descriptors of namespace %d", ns),
		IdentifyCommand(0, CNSNSDescriptors, ns, 0, 0), page)
	var se *StatusError
	if !sets && errors.As(err, &se) {
		return d, nil
	}
	if err != nil {
		return d, err
	}
	if d, err = DecodeNamespaceDescriptors(page); err != nil && sets {
		return d, &ProtocolError{Bus: c.bus.Name(), What: err.Error()}
	}
	if d.Set != CommandSetNVM {
		return d, errs.New(errs.Capability,
			"nvme %s: namespace %d has the %s command set and is no ordinary block storage; use another SSD, or make a namespace of the NVM command set with \"nvme create-ns\"",
			c.bus.Name(), ns, d.Set)
	}
	return d, nil
}

// identityOf puts together what a controller says of who its namespace is.
func identityOf(id *IdentifyController, ns uint32, in *IdentifyNamespace,
	d NamespaceDescriptors) nsid.ID {
	who := nsid.ID{NQN: asciiField(id.SUBNQN[:]), Serial: id.Serial(), Model: id.Model(), NSID: ns,
		Private: in.NMIC&SharedNamespace == 0}
	for _, b := range append(d.IDs, in.NGUID[:], in.EUI64[:]) {
		who.Add(b)
	}
	return who
}

func (c *Controller) activeNamespaces(ctx context.Context, id *IdentifyController) ([]uint32,
	error) {
	page := make([]byte, IdentifyBytes)
	var all []uint32
	for after := uint32(0); ; {
		_, err := c.exec(ctx, true, "identify active namespaces",
			IdentifyCommand(0, CNSActiveNSList, after, 0, 0), page)
		var se *StatusError
		if after == 0 && errors.As(err, &se) && se.Status.SCT() == SCTGeneric && id.NN > 0 {
			// NVMe 1.0 has no list; its namespaces are 1 to NN.
			return []uint32{1}, nil
		}
		if err != nil {
			return nil, err
		}
		ids, err := DecodeActiveNamespaces(page)
		if err == nil && len(ids) > 0 && ids[0] <= after {
			err = fmt.Errorf("nvme: active namespace list: ID %d does not come after %d",
				ids[0], after)
		}
		if err != nil {
			return nil, &ProtocolError{Bus: c.bus.Name(), What: err.Error()}
		}
		all = append(all, ids...)
		// One more list only where it can matter: the first namespace is the default.
		if len(ids) < MaxActiveNSPerList || len(all) >= 16*MaxActiveNSPerList {
			return all, nil
		}
		after = ids[len(ids)-1]
	}
}

func (c *Controller) features(ctx context.Context) error {
	var se *StatusError
	n := uint32(c.opt.QueuePairs - 1) // 0's based, both halves (section 5.27.1.5)
	dw0, err := c.exec(ctx, true, "set features: number of queues",
		SetFeaturesCommand(0, FeatureNumberOfQueues, n|n<<16), nil)
	if err != nil {
		return err
	}
	// What Get Features says counts: it is what the controller holds itself to.
	if v, err := c.exec(ctx, true, "get features: number of queues",
		GetFeaturesCommand(0, FeatureNumberOfQueues), nil); err == nil {
		dw0 = v
	} else if !errors.As(err, &se) {
		return err
	}
	c.mu.Lock()
	// More may be granted than asked for; MaxQueuePairs keeps to the request.
	c.granted = min(int(dw0&0xffff)+1, int(dw0>>16)+1, c.opt.QueuePairs)
	c.mu.Unlock()
	return nil
}

// Name is the bus's name.
func (c *Controller) Name() string { return c.bus.Name() }

// Bus is the bus of Open.
func (c *Controller) Bus() Bus { return c.bus }

// Namespace is the namespace that I/O goes to.
func (c *Controller) Namespace() Namespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ns
}

// NamespaceID is the identity of the namespace that I/O goes to, the same through every controller
// that reaches it.
func (c *Controller) NamespaceID() nsid.ID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.who
}

// Namespaces are the IDs of the controller's active namespaces.
func (c *Controller) Namespaces() []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]uint32(nil), c.nsids...)
}

// Identity is the controller's Identify data structure.
func (c *Controller) Identity() IdentifyController {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.id
}

// Model is the controller's model number.
func (c *Controller) Model() string { id := c.Identity(); return id.Model() }

// Serial is the controller's serial number.
func (c *Controller) Serial() string { id := c.Identity(); return id.Serial() }

// Firmware is the controller's firmware revision.
func (c *Controller) Firmware() string { id := c.Identity(); return id.Firmware() }

// Version is the version of the specification that the controller complies with.
func (c *Controller) Version() Version { return c.version }

// MaxTransferBytes is the most that one Read or Write may move: a multiple of the block
// size within MDTS and Options.MaxTransferBytes.
func (c *Controller) MaxTransferBytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return transferLimit(c.id.MDTS, c.cap.MPSMIN(), c.ns.LBABytes, c.opt.MaxTransferBytes)
}

// MaxQueuePairs is the number of I/O queue pairs that the controller granted.
func (c *Controller) MaxQueuePairs() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.granted
}

// MaxQueueEntries is the longest I/O queue, in entries; it holds one command less.
func (c *Controller) MaxQueueEntries() int { return c.cap.MQES() }

// PageBytes is the memory page size of PRPs.
func (c *Controller) PageBytes() int { return c.pageBytes }

// Counters are the admin queue's counters.
func (c *Controller) Counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

// MapDMA makes memory outside Go's heap reachable for the controller.
func (c *Controller) MapDMA(mem []byte) (IOVA, error) { return c.bus.MapDMA(mem) }

// MapWindow is MapDMA for memory of which perhaps only the beginning is used: where mapping pins
// memory none of it is reachable before ExtendWindow. UnmapDMA of all of it takes it back.
func (c *Controller) MapWindow(mem []byte) (IOVA, error) {
	if w, ok := c.bus.(WindowMapper); ok {
		if iova, err := w.MapWindow(mem); !errors.Is(err, ErrNoWindows) {
			return iova, err
		}
	}
	return c.bus.MapDMA(mem)
}

// ExtendWindow makes at least the first bytes of a window of MapWindow reachable.
func (c *Controller) ExtendWindow(iova IOVA, bytes int64) error {
	if w, ok := c.bus.(WindowMapper); ok {
		if err := w.ExtendWindow(iova, bytes); !errors.Is(err, ErrNoWindows) {
			return err
		}
	}
	return nil
}

// MapPeer is MapDMA of another device's memory: mem is its mapping for the CPU, and dmabuf, when it
// is not -1, an export of it that starts at offset.
func (c *Controller) MapPeer(mem []byte, dmabuf int, offset int64) (IOVA, error) {
	if p, ok := c.bus.(PeerDMA); ok {
		return p.MapPeerDMA(mem, dmabuf, offset)
	}
	return c.bus.MapDMA(mem)
}

// MapPeerWindow is MapWindow of another device's memory whose mapping for the CPU grows:
// ExtendWindow never goes beyond the bytes that it is asked for. Call it when the mapping has them.
func (c *Controller) MapPeerWindow(mem []byte) (IOVA, error) {
	if p, ok := c.bus.(PeerDMA); ok {
		if iova, err := p.MapPeerWindow(mem); !errors.Is(err, ErrNoWindows) {
			return iova, err
		}
	}
	return c.MapWindow(mem)
}

// UnmapDMA takes back a mapping of MapDMA.
func (c *Controller) UnmapDMA(iova IOVA, bytes int64) error { return c.bus.UnmapDMA(iova, bytes) }

// SMART reads the SMART / Health Information log page of the controller.
func (c *Controller) SMART(ctx context.Context) (SMARTLog, error) {
	b := make([]byte, SMARTLogBytes)
	if _, err := c.exec(ctx, false, "get log page: SMART", GetLogPageCommand(0, LogSMART, NSIDAll,
		len(b), false, 0, 0), b); err != nil {
		return SMARTLog{}, err
	}
	return DecodeSMARTLog(b)
}

// Abort asks the controller to abort command cid of submission queue sqid. aborted is
// whether it did; either way the command's own completion tells its end, if one comes. At
// most ACL+1 aborts are out at once, others wait for their turn.
func (c *Controller) Abort(ctx context.Context, sqid, cid uint16) (aborted bool, err error) {
	t := time.NewTimer(c.opt.Timeout)
	defer t.Stop()
	select {
	case c.aborts <- struct{}{}:
	case <-ctx.Done():
		return false, c.waitErr("abort", 0, ctx.Err())
	case <-t.C:
		return false, c.waitErr("abort: wait for other aborts", 0, ErrTimeout)
	}
	defer func() { <-c.aborts }()
	dw0, err := c.exec(ctx, false, fmt.Sprintf("abort command %d of queue %d", cid, sqid),
		AbortCommand(0, sqid, cid), nil)
	return err == nil && dw0&1 == 0, err
}

// GuardResets has Reset ask whether the SSD is still this process's, to reset and to send commands
// to again, until remove is called. An error of ask refuses the reset. Several may guard a
// controller at once.
func (c *Controller) GuardResets(ask func() error) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.guards = append(c.guards, &ask)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.guards = slices.DeleteFunc(c.guards, func(g *func() error) bool { return g == &ask })
	}
}

// Reset takes the controller through CC.EN = 0 and brings it up again. Commands in flight
// are lost: when Reset has disabled the controller no DMA comes any more. Queue pairs are
// gone, but their memory stays until DeleteQueuePair, since others may look at it. After an
// error the controller can be reset again or closed.
func (c *Controller) Reset(ctx context.Context) error {
	c.mu.Lock()
	guards := slices.Clone(c.guards)
	c.mu.Unlock()
	for _, ask := range guards {
		if err := (*ask)(); err != nil {
			return fmt.Errorf("nvme %s: reset: %w: %w", c.bus.Name(), ErrTaken, err)
		}
	}
	c.life.Lock()
	defer c.life.Unlock()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("nvme %s: reset: %w", c.bus.Name(), errClosed)
	}
	c.gate = fmt.Errorf("nvme %s: %w", c.bus.Name(), deviceClass(errStarting))
	c.count.Resets++
	c.mu.Unlock()
	if err := c.start(ctx); err != nil {
		c.mu.Lock()
		c.gate = fmt.Errorf("nvme %s: the last reset failed (%w); reset it again",
			c.bus.Name(), err)
		c.mu.Unlock()
		return err
	}
	return nil
}

// ResetTimeout bounds a Reset: two changes of CSTS.RDY and one left over from before, each as long
// as the controller claims for it, and the admin commands of the bring-up.
func (c *Controller) ResetTimeout() time.Duration {
	d := 3*c.readyTimeout() + 2*c.opt.Timeout
	if _, ok := As[HardResetter](c.bus); ok {
		d += 2*c.readyTimeout() + hardResetTime
	}
	return d
}

// hardResetTime is the longest that a function level reset takes with patience: 100 ms by the PCI
// Express specification, and what slow devices need until they answer.
const hardResetTime = 5 * time.Second

// Leaving explains why the SSD must be given up although it still answers: an error with ErrGone,
// or nil. No queue pair is created any more, and no reset brings it up again; what is there can be
// ended in order.
func (c *Controller) Leaving() error {
	if c.leaver == nil {
		return nil
	}
	if err := c.leaver.Leaving(); err != nil {
		return fmt.Errorf("nvme %s: %w", c.bus.Name(), deviceClass(err))
	}
	return nil
}

// Disable brings CC.EN to 0: when it returns nil no DMA comes any more, and commands are refused
// until a Reset. It is for controllers that are given up.
func (c *Controller) Disable(ctx context.Context) error {
	c.life.Lock()
	defer c.life.Unlock()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("nvme %s: disable: %w", c.bus.Name(), errClosed)
	}
	c.gate = fmt.Errorf("nvme %s: %w", c.bus.Name(), errDisabled)
	c.mu.Unlock()
	c.up = false
	if err := c.disable(ctx, false); err != nil {
		return err
	}
	return c.disabled()
}

// Generation counts how often the controller went through CC.EN = 0. When it has grown, the queue
// pairs from before are gone, and no command of theirs moves data any more.
func (c *Controller) Generation() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.generation
}

// Health looks at CSTS. The error is a *FatalError: ErrFatal when the controller has stopped and a
// Reset may help, ErrGone when nothing answers at its registers.
func (c *Controller) Health() error {
	const op = "health"
	if err := c.Leaving(); err != nil {
		return &FatalError{c.bus.Name(), op, 0, err}
	}
	s, err := c.readCSTS(op)
	var fatal *FatalError
	switch {
	case errors.As(err, &fatal):
		return err
	case err != nil:
		return &FatalError{c.bus.Name(), op, 0, fmt.Errorf("%w: %w", ErrGone, err)}
	case s.CFS():
		return &FatalError{c.bus.Name(), op, s, ErrFatal}
	}
	if s.RDY() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gate != nil { // a reset is under way, or has failed
		return nil
	}
	return &FatalError{c.bus.Name(), op + ": the controller left the ready state", s, ErrFatal}
}

// Close shuts the controller down in order (section 3.6.1): deletes the queues, notifies
// with CC.SHN, waits for CSTS.SHST, disables it, and closes the bus. Queue pairs and their
// memory are gone afterwards: nobody may use them any more. Closing again does nothing.
func (c *Controller) Close(ctx context.Context) error {
	c.life.Lock()
	defer c.life.Unlock()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.gate = fmt.Errorf("nvme %s: %w", c.bus.Name(), errClosed)
	dead := c.fatal
	queues := make([]*QueuePair, 0, len(c.queues))
	for _, q := range c.queues {
		queues = append(queues, q)
	}
	c.mu.Unlock()
	var err error
	if dead == nil && c.up { // else it takes no commands and knows no shutdown
		for _, q := range queues {
			if err = errs.Also(err, c.deleteQueues(ctx, true, q)); err != nil {
				break
			}
		}
		err = errs.Also(err, c.shutdown(ctx))
	}
	return errs.Also(err, c.release(ctx, true))
}
