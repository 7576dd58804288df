// Package policy decides which lines a cache of a fixed number of slots holds: the online policies
// behind one interface, the offline optimum, and the directory that finds a line's slot. It knows no
// memory and no clock: equal accesses give equal answers, so a run and the replay of its trace agree
// to the last hit.
package policy

import "helios/internal/errs"

// The policies of a dynamic cache.
const (
	Random = "random" // BaM, GIDS
	LRU    = "lru"
	Clock  = "clock"
	Sieve  = "sieve"
	S3FIFO = "s3fifo"
	Belady = "belady" // MIN with bypass (Ginex): needs the future, so it is for replays
)

// Online lists the policies that need no knowledge of the future.
func Online() []string { return []string{Random, LRU, Clock, Sieve, S3FIFO} }

// Config is a directory's.
type Config struct {
	Policy string // one of Online
	Slots  int64  // lines that the cache holds, below 2^31
	Seed   uint64 // of Random's draws
}

// Answer says where an accessed line is.
type Answer struct {
	Slot int32 // of the line, or -1: it is not cached and stays so (bypass)
	Hit  bool  // the line was in the cache; false with a slot: the caller fills the slot
}

// Stats are totals of a directory.
type Stats struct{ Accesses, Hits, Inserted, Evicted, Bypassed int64 }

// Directory is what a cache of lines knows of them. Accesses come in batches: a line that the current
// batch has accessed is not evicted until NextBatch, nor is one that an announced batch will access
// (the window buffer of GIDS). What finds no slot then bypasses the cache.
type Directory struct{}

// New makes the directory of an empty cache.
func New(c Config) (*Directory, error) {
	return nil, errs.New(errs.Capability, "cache policy %q", c.Policy)
}

// Announce tells the lines, each once, of the next batch that was not announced yet. A batch that was
// announced must access exactly these lines, and its announcement ends line by line as it does.
func (d *Directory) Announce(lines []int64) {}

// NextBatch begins a batch: what the last one accessed may be evicted again.
func (d *Directory) NextBatch() {}

// Access answers for the lines of a part of the current batch, in order; no line stands twice in a
// batch's part. out has room for them.
func (d *Directory) Access(lines []int64, out []Answer) {}

// Drop empties a slot whose filling failed.
func (d *Directory) Drop(slot int32) {}

// Find is a line's slot without an access, -1 for none.
func (d *Directory) Find(line int64) int32 { return -1 }

// Stats are the totals since New.
func (d *Directory) Stats() Stats { return Stats{} }

// Bytes is the directory's memory: per cached line, never per row of the dataset.
func (d *Directory) Bytes() int64 { return 0 }
