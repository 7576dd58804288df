package dataset

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

// errPowerLoss is what a simulated SSD answers once its power is gone.
var errPowerLoss = errors.New("simulated power loss")

// simSSD is an SSD with a volatile write cache. Written LBAs are durable after Flush; a power
// cut keeps each of the others, or not, by chance, so that writes are torn and reordered as
// the NVMe base specification allows.
type simSSD struct {
	mu       sync.Mutex
	lba      int
	durable  []byte
	cache    map[int64][]byte // LBA to content not yet durable
	budget   *int             // operations until the power fails, shared by SSDs; nil = never
	dead     bool
	readFail func(lba int64) error
}

func newSim(lbas int64, lba int) *simSSD {
	return &simSSD{lba: lba, durable: make([]byte, lbas*int64(lba)), cache: map[int64][]byte{}}
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
	for i := 0; i < len(dst); i += s.lba {
		at := int64(lba) + int64(i/s.lba)
		if s.readFail != nil {
			if err := s.readFail(at); err != nil {
				return err
			}
		}
		if b, ok := s.cache[at]; ok {
			copy(dst[i:], b)
		} else {
			copy(dst[i:i+s.lba], s.durable[at*int64(s.lba):])
		}
	}
	return nil
}

func (s *simSSD) WriteAt(_ context.Context, lba nvme.LBA, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(lba, len(data)); err != nil {
		return err
	}
	// A write that meets the power cut may still have landed in part: it enters the cache.
	err := s.spend()
	for i := 0; i < len(data); i += s.lba {
		s.cache[int64(lba)+int64(i/s.lba)] = bytes.Clone(data[i : i+s.lba])
	}
	return err
}

func (s *simSSD) Flush(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.spend(); err != nil {
		return err
	}
	for at, b := range s.cache {
		copy(s.durable[at*int64(s.lba):], b)
	}
	clear(s.cache)
	return nil
}

func (s *simSSD) Close(context.Context) error { return nil }

// restart is what is found after the power cut.
func (s *simSSD) restart(rng *rand.Rand) *simSSD {
	n := newSim(int64(len(s.durable)/s.lba), s.lba)
	copy(n.durable, s.durable)
	mode := rng.IntN(3)
	for at, b := range s.cache {
		if mode == 1 || mode == 2 && rng.IntN(2) == 0 {
			copy(n.durable[at*int64(s.lba):], b)
		}
	}
	return n
}

func (s *simSSD) clone() *simSSD {
	n := newSim(int64(len(s.durable)/s.lba), s.lba)
	copy(n.durable, s.durable)
	for at, b := range s.cache {
		copy(n.durable[at*int64(s.lba):], b)
	}
	return n
}

// targetsOf puts SSDs where openTargets would.
func targetsOf(sims ...*simSSD) []*target {
	var ts []*target
	for i, s := range sims {
		ts = append(ts, &target{dev: s, ssd: &gpuio.SSD{}, name: fmt.Sprintf("sim%d", i), serial: fmt.Sprintf("SER%d", i),
			lbaBytes: s.lba, lbas: uint64(len(s.durable) / s.lba)})
	}
	return ts
}
