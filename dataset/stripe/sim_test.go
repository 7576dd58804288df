package stripe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"helios/gpuio"
	"helios/nvme"
)

// errPowerLoss is a simulated SSD's answer once its power is gone.
var errPowerLoss = errors.New("simulated power loss")

// simSSD is an SSD with a volatile write cache. Written LBAs are durable after Flush; a power
// cut keeps each of the others, or not, by chance, so that writes are torn and reordered as
// the NVMe base specification allows.
type simSSD struct {
	mu       sync.Mutex
	lba      int
	durable  []byte
	cache    []extent // written and not yet durable, in order
	budget   *int     // operations until the power fails, shared by SSDs; nil = never
	dead     bool
	readFail func(lba int64) error
	// onWrite decides what becomes of write number n, of data over old: what lands (whole LBAs,
	// from the start on) and the answer. onFlush likewise; false: the SSD says it is durable, and
	// lies.
	onWrite func(n int, start int64, old, data []byte) ([]byte, error)
	onFlush func(n int) (bool, error)
	writes  int
	flushes int
}

// images of SSDs are used again: the race detector makes fresh memory expensive.
var images sync.Pool

func copyImage(b []byte) []byte {
	if old, ok := images.Get().(*[]byte); ok && len(*old) == len(b) {
		copy(*old, b)
		return *old
	}
	return bytes.Clone(b)
}

// scrap gives the images of SSDs back; they must not be used any more.
func scrap(sims ...*simSSD) {
	for _, s := range sims {
		b := s.durable
		s.durable, s.cache = nil, nil
		images.Put(&b)
	}
}

// extent is a write.
type extent struct {
	start int64 // bytes
	data  []byte
}

func newSim(lbas int64, lba int) *simSSD {
	return &simSSD{lba: lba, durable: make([]byte, lbas*int64(lba))}
}

// powerMu guards budgets shared by several SSDs.
var powerMu sync.Mutex

func (s *simSSD) spend() error {
	powerMu.Lock()
	defer powerMu.Unlock()
	if s.budget != nil {
		if *s.budget <= 0 {
			s.dead = true
			return errPowerLoss
		}
		*s.budget--
	}
	return nil
}

func (s *simSSD) check(lba nvme.LBA, n int) error {
	if n%s.lba != 0 || (int64(lba)*int64(s.lba))+int64(n) > int64(len(s.durable)) {
		return fmt.Errorf("sim: LBA %d + %d bytes is outside or uneven", lba, n)
	}
	return nil
}

func (s *simSSD) ReadAt(_ context.Context, lba nvme.LBA, dst []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(lba, len(dst)); err != nil {
		return err
	}
	from := int64(lba) * int64(s.lba)
	if s.readFail != nil {
		for i := range len(dst) / s.lba {
			if err := s.readFail(int64(lba) + int64(i)); err != nil {
				return err
			}
		}
	}
	s.peek(from, dst)
	return nil
}

// peek returns what a read at byte from gives.
func (s *simSSD) peek(from int64, dst []byte) {
	copy(dst, s.durable[from:])
	for _, e := range s.cache {
		lo, hi := max(e.start, from), min(e.start+int64(len(e.data)), from+int64(len(dst)))
		if lo < hi {
			copy(dst[lo-from:hi-from], e.data[lo-e.start:])
		}
	}
}

func (s *simSSD) WriteAt(_ context.Context, lba nvme.LBA, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(lba, len(data)); err != nil {
		return err
	}
	if s.onWrite != nil {
		start := int64(lba) * int64(s.lba)
		old := make([]byte, len(data))
		s.peek(start, old)
		var err error
		data, err = s.onWrite(s.writes, start, old, data)
		s.writes++
		if err != nil {
			return err
		}
	}
	// A write that meets the power cut may still have landed in part: it enters the cache.
	err := s.spend()
	s.cache = append(s.cache, extent{int64(lba) * int64(s.lba), bytes.Clone(data)})
	return err
}

func (s *simSSD) Flush(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.spend(); err != nil {
		return err
	}
	if s.onFlush != nil {
		durable, err := s.onFlush(s.flushes)
		s.flushes++
		if err != nil || !durable {
			return err
		}
	}
	for _, e := range s.cache {
		copy(s.durable[e.start:], e.data)
	}
	s.cache = nil
	return nil
}

func (s *simSSD) Close(context.Context) error { return nil }

// restart returns what is found after the power cut.
func (s *simSSD) restart(rng *rand.Rand) *simSSD {
	n := &simSSD{lba: s.lba, durable: copyImage(s.durable)}
	mode := rng.IntN(3)
	for _, e := range s.cache {
		for i := 0; i < len(e.data); i += s.lba {
			if mode == 1 || mode == 2 && rng.IntN(2) == 0 {
				copy(n.durable[e.start+int64(i):], e.data[i:i+s.lba])
			}
		}
	}
	return n
}

// clone is an SSD with the same content, at rest.
func (s *simSSD) clone() *simSSD {
	n := &simSSD{lba: s.lba, durable: copyImage(s.durable)}
	for _, e := range s.cache {
		copy(n.durable[e.start:], e.data)
	}
	return n
}

// targetsOf puts SSDs where openTargets would.
func targetsOf(sims ...*simSSD) []*target {
	var ts []*target
	for i, s := range sims {
		ts = append(ts, &target{dev: s, ssd: &gpuio.SSD{}, name: fmt.Sprintf("sim%d", i),
			serial:   fmt.Sprintf("SER%d", i),
			lbaBytes: s.lba, lbas: uint64(len(s.durable) / s.lba), pairs: mostStripes})
	}
	return ts
}
