package packed

import (
	"math"

	"helios/internal/errs"
)

// Config sets the limits of a packing plan.
type Config struct {
	Rows     int64 // of the graph: rows are 0 to Rows-1
	RowBytes int64
	LBABytes int64 // of the SSDs that pages are kept on; 0: 4096
	// Hot counts the rows that stay in memory: those of the most accesses, below 2^31. Rows that no
	// mini-batch needs are not among them, so the plan may have fewer.
	Hot int64
	// HotRows, where not nil, are the rows that stay, in their order of rank, in place of Hot: for
	// a plan of new mini-batches under tiers that are filled already.
	HotRows []int64
	// Budget bounds the bytes of pages; 0: those that Segment leads to. Room that it leaves takes
	// copies of rows: where a mini-batch needs few rows of a page of the disk cache, its chunk has
	// them too, and the page is not read. The paper makes no copies.
	Budget int64
	// Segment is the most consecutive mini-batches that share a disk cache: the segments are as few
	// as that leads to, and of one length, give or take one. 0: the length with the fewest bytes
	// read under Budget is searched for.
	Segment int
	// Hashes chooses the order of a disk cache. 0: by the first four mini-batches of the segment
	// that need a row, which come in random order: a MinHash of one function's four least values. 1
	// to 4: by the least values of so many MinHash functions; the paper takes 2. Below 0: by the
	// rows' numbers.
	Hashes  int
	Seed    uint64 // of the hash functions, and of what the search samples
	Workers int    // goroutines; below 1: one. The plan does not depend on it.
	// Progress, where not nil, hears what is under way and how many of its mini-batches are done.
	Progress func(step string, done, of int)
}

const (
	mostHashes  = 4
	mostFirsts  = 1<<16 - 1 // mini-batches of a segment that an order by firsts distinguishes
	mostBatches = 1 << 28
	mostRows    = 1 << 40
	mostHot     = 1<<31 - 1
)

// check fills in defaults, for so many mini-batches.
func (c *Config) check(batches int) (Shape, error) {
	if c.LBABytes == 0 {
		c.LBABytes = pageUnit
	}
	c.Hashes = max(c.Hashes, -1)
	c.Workers = max(c.Workers, 1)
	if c.HotRows != nil {
		c.Hot = int64(len(c.HotRows))
	}
	if c.Segment == 0 && c.Budget == 0 {
		c.Segment = 1 // the fewest bytes read: each mini-batch has all of its rows in its chunk
	}
	if err := c.checkLimits(batches); err != nil {
		return Shape{}, err
	}
	s, err := NewShape(c.RowBytes, c.LBABytes)
	if err != nil {
		return s, err
	}
	if s.RowsPerPage > math.MaxUint16 {
		return s, errs.New(errs.Usage, "packing rows of %d bytes: %d would be in a page",
			c.RowBytes, s.RowsPerPage)
	}
	c.Segment = min(c.Segment, batches)
	return s, nil
}

// checkLimits refuses numbers that can't be.
func (c *Config) checkLimits(batches int) error {
	switch {
	case batches < 1 || batches > mostBatches:
		return errs.New(errs.Usage,
			"packing %d mini-batches: 1 to %d are possible", batches, mostBatches)
	case c.Rows < 1 || c.Rows > mostRows:
		return errs.New(errs.Usage, "packing the rows of a graph with %d: 1 to %d are possible",
			c.Rows, int64(mostRows))
	case c.Hot < 0 || c.Hot > mostHot:
		return errs.New(errs.Usage,
			"packing beside %d rows that stay in memory: at least 0 and below 2^31 are possible; lower %v or %v",
			c.Hot, errs.Key("gpu-cache"), errs.Key("cpu-cache"))
	case c.Budget < 0:
		return errs.New(errs.Usage, "%v of %d bytes: it cannot be negative",
			errs.Key("disk-budget"), c.Budget)
	case c.Segment < 0:
		return errs.New(errs.Usage,
			"segments of %d mini-batches: give at least one, or 0 to have them searched for",
			c.Segment)
	case c.Hashes > mostHashes:
		return errs.New(errs.Usage, "MinHash with %d functions: 1 to %d are possible",
			c.Hashes, mostHashes)
	case c.Hashes > 2 && batches > 1<<(64/c.Hashes):
		return errs.New(errs.Usage,
			"MinHash with %d functions of %d mini-batches: %d are possible; use 2 functions",
			c.Hashes, batches, 1<<(64/c.Hashes))
	}
	return nil
}

// budgetPages returns the most pages that a plan may take; without a bound more than there can be.
func (c *Config) budgetPages(s Shape) int64 {
	if c.Budget == 0 {
		return math.MaxInt64 / 4
	}
	return c.Budget / s.PageBytes
}
