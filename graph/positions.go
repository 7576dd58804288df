package graph

import (
	"errors"
	"fmt"

	"helios/cuda"
)

// positions is the table that makes the ids of a frontier unique and numbers them: for graphs of up
// to directNodes nodes a table with an entry per node (8 bytes on a GPU, at most 32 MiB; 4 on the
// host), for larger ones a hash table. On a GPU that has 4/3 to 8/3 slots of 16 bytes per sampled
// edge of the largest hop, on the host 2 to 4 of 8 bytes per node of the largest mini-batch.
// MemUsage shows it as "sampler position table".
type positions struct {
	owner *MiniBatch // whose frontier the table holds
	// of that frontier; on a GPU it counts down, because the table keeps minima, on the host up
	stamp  uint32
	direct bool
	host   bool  // the host's entries (hop_host.go): stamp and index in one word, and no keys
	slots  int64 // a power of two when hashed
	// on a GPU uint64[slots]: stamp<<32 | position; on the host uint32[slots], or, hashed,
	// uint64[slots]
	vals cuda.Buffer
	keys cuda.Buffer // hashed, on a GPU: uint64[slots]: stamp<<48 | node
}

// directNodes is the largest graph whose position table has an entry for every node.
const directNodes = 4 << 20

const tablePurpose = "sampler position table"

// open takes the table where its size is known.
func (t *positions) open(c *sampling) error {
	t.direct = c.topo.Host.NumNodes <= c.directLimit
	if !t.direct {
		return nil
	}
	t.slots = max(c.topo.Host.NumNodes, 1)
	return t.alloc(c.dev)
}

// alloc replaces the table by an empty one of t.slots entries.
func (t *positions) alloc(dev cuda.Device) error {
	if err := t.close(); err != nil {
		return err
	}
	t.owner, t.stamp = nil, 0
	width := int64(8)
	if t.host && t.direct {
		width = 4
	}
	var err error
	if t.vals, err = dev.Alloc(cuda.MemDevice, t.slots*width, tablePurpose); err == nil &&
		!t.direct && !t.host {
		t.keys, err = dev.Alloc(cuda.MemDevice, t.slots*8, tablePurpose)
	}
	if err != nil {
		t.slots = 0 // there is no table: the next batch asks again
		return errors.Join(fmt.Errorf("sampler: %w", err), t.close())
	}
	return nil
}

func (t *positions) forget() { t.owner = nil }

func (t *positions) close() error { return free(&t.vals, &t.keys) }
