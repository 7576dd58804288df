// Package proxy is an NVMe controller in software: registers, admin and I/O queues, PRPs and
// status codes as in the NVM Express specification, over a file or block device (io_uring,
// O_DIRECT), or over shared memory. It implements nvme.Bus, so the queue logic above it is
// the one that drives real SSDs.
//
// # Who does the work
//
// Nobody spins and no thread stands between host and medium. A completion queue with the
// submission queues that complete to it is the unit of work, under one lock, and whoever
// waits for that queue executes it ("caller runs"): WaitCQ or a group's Wait fetches new
// commands, copies (RAM) or submits to an io_uring (file), reaps, posts completions, and
// sleeps in the same system call that submits. Kick, after a doorbell store, does almost
// nothing while the waiting party is awake, wakes it when it sleeps, and submits for it when
// it sleeps in the kernel. A background goroutine, started by CC.EN = 1, serves queues that
// nobody waits for, and can poll doorbells for clients that cannot call Kick (a GPU).
//
// # Modelled SSDs
//
// With Config.Model a command is carried out when it is fetched, and its completion is held until
// the model's time for it, in a heap of its completion queue: completions overtake each other as
// they do on a real SSD. All queues of a controller share one server of the model. Only who waits
// for a completion that is due in less than 100 µs spins; see nap.go.
//
// # What counts
//
// The SMART log counts from Open, which is this controller's power-on. Host Reads and Host
// Writes count the commands that were carried out to the end, with or without error; commands
// refused for their fields do not count.
package proxy

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/bits"
	"path/filepath"

	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/internal/ssdmodel"
	"helios/nvme"
)

// Config describes an SSD in software. The zero value of a field is its default.
type Config struct {
	Name  string // in messages; default "proxy:" and the path
	Path  string // backing file or block device; see Create
	Bytes int64  // capacity; default all of the backing
	// File holds what the backing must be, whatever its name; default: what has the name. Another
	// file is an error of class Refused.
	File     fileid.ID
	LBABytes int    // logical block: 512 (default) or 4096
	RAM      bool   // serve from memory: Path is mapped, and lies in /dev/shm to stay in memory
	Buffered bool   // through the page cache instead of O_DIRECT
	ReadOnly bool   // write-protected namespace; several read-only users may share the backing
	Shared   bool   // others that share the backing may open it, too; leases on it part writers
	Serial   string // default from the path

	// Content computes what the SSD holds, in place of a backing that stores it: Bytes of it.
	// ReadAt is called from several goroutines, with any offset and length inside; an error of it
	// is an unrecovered read error. The namespace is write-protected. Path is then only a name, and
	// may be shared.
	Content io.ReaderAt

	MaxQueuePairs   int // I/O queue pairs; default 64
	MaxQueueEntries int // largest queue; default 1024
	MDTS            int // largest transfer is 4096 << MDTS bytes; default 5 (128 KiB), at most 12

	// Model is an SSD to play in wall time: a command that is sound completes when the model says,
	// or when the medium is done, if that is later. Nil: as fast as the medium. Waiters
	// sleep while the next completion is far away and spin for the rest; see nap.go.
	Model *ssdmodel.Model

	// CommandSet holds what the namespace says it speaks; it answers the NVM command set all the
	// same. Hosts that look are tested with it.
	CommandSet nvme.CommandSet

	OutOfOrder    bool // complete in an order other than that of submission
	PollDoorbells bool // serve clients that never call Kick
	// NoIOUring uses plain preadv and pwritev in the calling thread: the fallback that Open
	// takes by itself where io_uring is forbidden.
	NoIOUring bool
}

func (c *Config) defaults() error {
	bad := func(format string, a ...any) error {
		return errs.New(errs.Usage, "SSD %s: %s", c.Path, fmt.Sprintf(format, a...))
	}
	if c.Content != nil {
		c.ReadOnly = true
		switch {
		case c.RAM || c.Buffered:
			return bad("content that is computed has no file: drop RAM and Buffered")
		case c.Serial == "" || c.Name == "":
			return bad(
				"content that is computed has no path to be named after: give Name and Serial")
		}
	} else if c.Path == "" {
		return errs.New(errs.Usage, "SSD without a backing file: give a path")
	}
	path, err := filepath.Abs(c.Path)
	if err != nil {
		return fmt.Errorf("SSD %s: %w", c.Path, err)
	}
	if c.Name == "" {
		c.Name = "proxy:" + c.Path
	}
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&c.LBABytes, 512)
	set(&c.MaxQueuePairs, 64)
	set(&c.MaxQueueEntries, 1024)
	set(&c.MDTS, 5)
	if c.Serial == "" {
		h := fnv.New64a()
		_, _ = h.Write([]byte(path)) // never fails
		c.Serial = fmt.Sprintf("HP%016X", h.Sum64())
	}
	switch {
	case c.LBABytes != 512 && c.LBABytes != 4096:
		return bad("blocks of %d bytes; 512 and 4096 are possible", c.LBABytes)
	case c.Bytes < 0:
		return bad("capacity %d", c.Bytes)
	case c.MaxQueuePairs < 1 || c.MaxQueuePairs > 1024:
		return bad("%d queue pairs; 1 to 1024 are possible", c.MaxQueuePairs)
	case c.MaxQueueEntries < 2 || c.MaxQueueEntries > 1<<16:
		return bad("queues of %d entries; 2 to 65536 are possible", c.MaxQueueEntries)
	case c.MDTS < 1 || c.MDTS > 12:
		return bad("MDTS %d; 1 to 12 are possible", c.MDTS)
	case c.Model != nil && !c.Model.LBAOK(c.LBABytes):
		return bad("blocks of %d bytes; SSD model %s has %v", c.LBABytes, c.Model.Name,
			c.Model.LBAs.Bytes)
	case len(c.Serial) > 20:
		return bad("serial number %q has more than 20 characters", c.Serial)
	case c.RAM && c.Buffered:
		return bad("a RAM SSD has no page cache to buffer in; drop one of the two options")
	}
	return nil
}

func (c *Config) lbaShift() uint { return uint(bits.TrailingZeros(uint(c.LBABytes))) }
