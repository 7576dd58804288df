package edges

import (
	"context"
)

// Source is the edges of an input, cut into parts that can be read in any order, several at a time,
// and again: an import that goes on where it was interrupted reads only the parts that it has not
// sorted.
type Source struct {
	Name  string // the file, for progress and errors
	Unit  string // of Total and of done: "edges" or "bytes"
	Total int64  // 0 = not known
	Parts int    // 1 where the input can only be read from its start
	// Read emits the edges src[i] → dst[i] of one part in batches of any size. It has checked every
	// id, with an error that names file and position, and emits the same edges each time. Calls
	// with different parts may run at the same time. emit has copied the slices when it returns;
	// done hears how many more Units were read.
	Read func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(n int64)) error
}
