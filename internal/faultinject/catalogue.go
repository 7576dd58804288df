package faultinject

// Class is the outcome of a fault for programs.
type Class string

// The classes of outcomes.
const (
	NoEffect Class = "no-effect" // nobody notices
	// the queue's recovery mends it: right data, counters tell
	Healed      Class = "healed"
	HealedReset Class = "healed-after-reset" // a reset of the controller mends it
	// the rows concerned fail with a typed error, all others arrive
	FailedRow Class = "failed-row"
	// the SSD is given up, its rows fail with a typed error
	GivenUp Class = "ssd-given-up"
	// wrong data, which --check-reads finds and reads again
	CaughtByRead Class = "caught-by-check-reads"
	// wrong data on the SSD, which verify and --check-reads find
	CaughtBySums Class = "caught-by-verify"
	OpenFails    Class = "open-fails" // the controller does not come up: a typed error
	LoadFails    Class = "load-fails" // the write ends with a typed error
)

// Workload names what a fault of the catalogue is for.
type Workload string

// The workloads that show a fault.
const (
	Opening Workload = "open"  // bring-up and queue creation
	Reading Workload = "read"  // gpuio's stacks: train, eval, predict, bench io
	Loading Workload = "load"  // writes and flushes: load
	Serving Workload = "admin" // an open controller's admin commands: ssds
)

// Entry is a fault with a documented outcome.
type Entry struct {
	Name    string
	During  Workload
	Fault   string // what --fault takes
	What    string // what happens
	Outcome string // what becomes of it, in a line
	Class   Class
}

const (
	retried    = "the command is sent again and succeeds; errors and retries count it"
	rowFails   = "the row fails with a *StatusError that names SSD, queue, LBA and status; the other rows arrive"
	exhausted  = "after the last retry the row fails with a *StatusError; the other rows arrive"
	recreated  = "timeout, Abort does not find it, the queue pair is deleted and created again, what was outstanding is read again"
	aborted    = "timeout, Abort ends the command, which is sent again"
	afterReset = "the controller is reset, its queue pairs are created again, what was outstanding is read again"
	givenUp    = "after the last reset the SSD is given up: its rows fail with an error that names SSD and cause, those of other SSDs arrive"
	wrongData  = "nothing shows it but a checksum: a checked read reads the row again, and fails it if it stays wrong"
)

var catalogue = []Entry{
	// Status codes, by type: with Do Not Retry and without.
	{"generic error", Reading, "error(op=read,sct=0,sc=0x06,times=3)",
		"internal error, three times", retried, Healed},
	{"generic error, not retryable", Reading, "error(op=read,lba=20,sct=0,sc=0x02,dnr=1)",
		"invalid field in command, DNR", rowFails, FailedRow},
	{"generic error that stays", Reading, "error(op=read,lba=20,sct=0,sc=0x06)",
		"internal error at each try", exhausted, FailedRow},
	{"data transfer error", Reading, "error(op=read,sct=0,sc=0x04,times=2)",
		"data transfer error, twice", retried, Healed},
	{"abort nobody asked for", Reading, "error(op=read,sct=0,sc=0x07,times=2)",
		"command abort requested, twice", retried, Healed},
	{"aborted by queue deletion", Reading, "error(op=read,sct=0,sc=0x08,times=2)",
		"command aborted due to SQ deletion, twice", retried, Healed},
	{"namespace not ready", Reading, "error(op=read,sct=0,sc=0x82,times=2)",
		"namespace not ready, twice", retried, Healed},
	{"LBA out of range", Reading, "error(op=read,lba=20,sct=0,sc=0x80,dnr=1)",
		"LBA out of range, DNR", rowFails, FailedRow},
	{"command specific error", Reading, "error(op=read,sct=1,sc=0x80,times=2)",
		"conflicting attributes, twice", retried, Healed},
	{"command specific error, not retryable", Reading, "error(op=read,lba=20,sct=1,sc=0x81,dnr=1)",
		"invalid protection information, DNR", rowFails, FailedRow},
	{"media error", Reading, "error(op=read,sct=2,sc=0x81,times=3)",
		"unrecovered read error, three times", retried, Healed},
	{"media error, not retryable", Reading, "error(op=read,lba=20,sct=2,sc=0x81,dnr=1)",
		"unrecovered read error, DNR", rowFails, FailedRow},
	{"media error that stays", Reading, "error(op=read,lba=20,sct=2,sc=0x81)",
		"unrecovered read error at each try", exhausted, FailedRow},
	{"guard check", Reading, "error(op=read,sct=2,sc=0x82,times=1)", "end-to-end guard check error",
		retried, Healed},
	{"path error", Reading, "error(op=read,sct=3,sc=0x00,times=2)", "internal path error, twice",
		retried, Healed},
	{"path error, not retryable", Reading, "error(op=read,lba=20,sct=3,sc=0x01,dnr=1)",
		"asymmetric access persistent loss, DNR", rowFails, FailedRow},
	{"vendor error", Reading, "error(op=read,sct=7,sc=0xc1,times=2)",
		"vendor specific status, twice", retried, Healed},
	{"vendor error, not retryable", Reading, "error(op=read,lba=20,sct=7,sc=0xc1,dnr=1)",
		"vendor specific status, DNR", rowFails, FailedRow},
	{"status of a reserved type", Reading, "error(op=read,sct=5,sc=0x01,times=2)",
		"a status code type that the specification reserves, twice", retried, Healed},

	// Completions that do not come, or not in time.
	{"lost completion", Reading, "lost(op=read,times=1)",
		"a read is carried out and never completes", aborted, Healed},
	{"lost completions of a block", Reading, "lost(op=read,lba=20)",
		"a block's reads never complete",
		"each try ends at its timeout; after the last the row fails with a *TimeoutError",
		FailedRow},
	{"dropped command", Reading, "drop(op=read,times=1)", "a read never reaches the controller",
		aborted, Healed},
	{"late within the timeout", Reading, "late(ms=2,op=read,times=5)",
		"five reads are carried out 2 ms late", "right data, 2 ms later", NoEffect},
	{"late beyond the timeout", Reading, "late(ms=400,op=read,times=1)",
		"a read comes after its timeout", aborted, Healed},
	{"slow", Reading, "slow(us=500,op=read)", "every read takes 500 µs at least",
		"right data, more slowly", NoEffect},
	{"reorder", Reading, "reorder(op=read,n=8)", "completions come eight at a time in reverse",
		"right data: completions are told apart by CID", NoEffect},

	// Completions that are wrong in themselves.
	{"duplicate completion", Reading, "dup(op=read,times=1)", "a completion is posted twice",
		"the second is for no command in flight: the queue is frozen, the foreign completion counted, the queue pair created again and the rest read again",
		Healed},
	{"late duplicate completion", Reading, "dup(op=read,n=1000,times=1);late(ms=5,op=read)",
		"reads take 5 ms, and 2 ms after a completion it is posted again: another command has its CID and no data yet",
		"its generation, in the upper bits of the CID, is not that of the command: as a duplicate completion",
		Healed},
	{"foreign completion", Reading, "foreign(op=read,times=1)",
		"a completion for a command that nobody sent",
		"the queue is frozen, the foreign completion counted, the queue pair created again and the rest read again",
		Healed},
	{"wrong phase", Reading, "phase(op=read,times=1)",
		"an entry has the wrong phase tag, so it is not seen, nor what follows it", recreated,
		Healed},
	{"wrong SQ head", Reading, "sqhead(op=read,times=2)", "a head outside the submission queue",
		"not used: commands in flight are bounded by their CIDs", NoEffect},
	{"wrong SQ ID", Reading, "sqid(op=read,times=2)", "another queue's ID in an entry",
		"not used: each completion queue has one submission queue", NoEffect},

	// Doorbells.
	{"stuck submission queue", Reading, "stuck(op=read,times=1)",
		"tail doorbell writes are ignored from a read on", recreated, Healed},
	{"torn doorbell", Reading, "torndb(op=read,times=1)",
		"a tail doorbell arrives as a value that is none",
		"the next doorbell of the queue mends it, or its timeout: the queue pair is created again and the rest read again",
		Healed},
	{"stuck completion queue", Reading, "cqstuck(op=read,times=1)",
		"head doorbell writes are ignored from a read on, until the queue is full", recreated,
		Healed},

	// Data.
	{"flipped bit", Reading, "flip(op=read,byte=9,bit=3,times=1)",
		"a bit of what was read is wrong", wrongData, CaughtByRead},
	{"short transfer", Reading, "short(op=read,bytes=16,times=1)",
		"only 16 bytes arrive, the status is good", wrongData, CaughtByRead},
	{"misdirected read", Reading, "misdirect(op=read,shift=8,times=1)",
		"the data of other blocks arrives", wrongData, CaughtByRead},
	{"data that stays wrong", Reading, "flip(op=read,lba=20,byte=9,bit=3)",
		"a block's data is wrong at each try",
		"a checked read fails the row with a *ChecksumError that names row, SSD and LBA; else nothing shows it",
		CaughtByRead},
	{"misdirected write", Loading, "misdirect(op=write,shift=8,times=1)",
		"a write goes to other blocks",
		"load says nothing; verify names the rows, checked reads fail them", CaughtBySums},
	{"torn write", Loading, "torn(op=write,after=1,times=1)",
		"half of a write lands and its status is good",
		"load says nothing; verify names the rows, checked reads fail them", CaughtBySums},

	// Writes and flushes.
	{"write error", Loading, "error(op=write,sct=2,sc=0x80,times=1)", "write fault, once",
		"the write is sent again and succeeds", Healed},
	{"write error, not retryable", Loading, "error(op=write,sct=2,sc=0x80,dnr=1,times=1)",
		"write fault, DNR", "load ends with a *StatusError, the dataset is not marked loaded",
		LoadFails},
	{"full disk", Loading, "error(op=write,sct=2,sc=0x80)",
		"write fault at each try, as when the disk under a software SSD's file is full",
		"after the last retry load ends with a *StatusError, the dataset is not marked loaded",
		LoadFails},
	{"lost write", Loading, "lost(op=write,times=1)", "a write is carried out and never completes",
		"timeout, recovery as for reads, the write is sent again: same blocks, same data", Healed},
	{"lost flush", Loading, "lost(op=flush,times=1)", "a flush never completes",
		"timeout, recovery as for reads, the flush is sent again", Healed},
	{"flush error, not retryable", Loading, "error(op=flush,sct=0,sc=0x06,dnr=1)",
		"a flush fails, DNR", "load ends with a *StatusError, the dataset is not marked loaded",
		LoadFails},

	// The controller.
	{"fatal status", Reading, "cfs(op=read,after=100,times=1)",
		"the controller stops with CSTS.CFS", afterReset, HealedReset},
	{"fatal status again and again", Reading, "cfs(op=read,after=100)",
		"the controller stops at each read after the hundredth", givenUp, GivenUp},
	{"fatal status at once", Opening, "cfs()", "CSTS.CFS comes up when the controller is enabled",
		"open fails with a *FatalError (nvme.ErrFatal)", OpenFails},
	{"controller gone", Reading, "gone(op=read,after=100)",
		"the SSD leaves its bus: registers read as all ones",
		"the SSD is given up at once (nvme.ErrGone): its rows fail, those of other SSDs arrive; buffers of its reads that were under way stay taken until the reader is closed",
		GivenUp},
	{"controller gone at once", Opening, "gone()", "nothing answers on the bus",
		"open fails with a *FatalError (nvme.ErrGone)", OpenFails},
	{"never ready", Opening, "notready()", "enabled, the controller stays not ready",
		"open fails with a *TimeoutError after CAP.TO", OpenFails},
	{"not ready once after a reset", Reading,
		"cfs(op=read,after=100,times=1);notready(after=1,times=1)",
		"the first reset's enable has no effect",
		"a second reset brings the controller back, and what was outstanding is read again",
		HealedReset},
	{"never ready after a reset", Reading, "cfs(op=read,after=100,times=1);notready(after=1)",
		"no reset brings the controller back", givenUp, GivenUp},
	{"stays ready once", Reading, "cfs(op=read,after=100,times=1);stayready(times=1)",
		"the first reset's disable has no effect",
		"a second reset brings the controller back, and what was outstanding is read again",
		HealedReset},

	// Admin commands.
	{"identify error", Opening, "error(op=identify,sct=0,sc=0x06,dnr=1)", "Identify fails",
		"open fails with a *StatusError", OpenFails},
	{"identify lost", Opening, "lost(op=identify,times=1)", "Identify never completes",
		"open fails with a *TimeoutError", OpenFails},
	{"identify late", Opening, "late(ms=10,op=identify,times=1)", "Identify completes 10 ms late",
		"open takes 10 ms longer", NoEffect},
	{"features refused", Opening, "error(op=features,sct=0,sc=0x02,dnr=1,times=1)",
		"Set Features (number of queues) fails", "open fails with a *StatusError", OpenFails},
	{"queue creation refused", Opening, "error(op=createq,sct=1,sc=0x01,dnr=1)",
		"Create I/O Completion Queue fails", "the stack does not open: a *StatusError", OpenFails},
	{"queue creation lost", Opening, "lost(op=createq,times=1)",
		"Create I/O Completion Queue never completes", "the stack does not open: a *TimeoutError",
		OpenFails},
	{"foreign admin completion", Opening, "foreign(op=identify,times=1)",
		"a completion for an admin command that nobody sent",
		"open fails with a *ProtocolError: nothing that the controller says can be trusted",
		OpenFails},
	{"abort refused", Reading, "lost(op=read,times=1);error(op=abort,sct=1,sc=0x03)",
		"abort command limit exceeded while a read is lost", recreated, Healed},
	{"abort lost", Reading, "lost(op=read,times=1);lost(op=abort,times=1)",
		"Abort itself never completes",
		"its own timeout, then the queue pair is deleted and created again, what was outstanding is read again",
		Healed},
	{"queue deletion refused", Reading,
		"stuck(op=read,times=1);error(op=deleteq,sct=0,sc=0x06,times=1)",
		"the queue cannot be deleted", afterReset, HealedReset},
	{"queue deletion lost", Reading, "stuck(op=read,times=1);lost(op=deleteq,times=1)",
		"Delete I/O Submission Queue never completes", afterReset, HealedReset},
	{"log page error", Serving, "error(op=log,sct=1,sc=0x09,dnr=1)", "Get Log Page fails",
		"the caller gets a *StatusError; reads are not concerned", NoEffect},
}

// Besides returns what no Fault can inject, for it happens outside of the SSD, with its outcome.
func Besides() []Entry { return append([]Entry(nil), besides...) }

var besides = []Entry{
	{"short backing file", Reading, "", "the file behind a software SSD loses its end",
		"rows beyond the end fail: with a *StatusError (unrecovered read) of async and sync, with a *BackingError (gpuio.ErrShort) of cpu and mmap; the other rows arrive",
		FailedRow},
}

// Catalogue is the faults with a documented outcome: at least one of each kind, and of the status
// codes one of each type.
func Catalogue() []Entry { return append([]Entry(nil), catalogue...) }
