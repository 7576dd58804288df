// Package region is the table of address ranges that a device's kernels may use. Both devices
// ask it before every copy.
package region

import (
	"fmt"
	"sort"
	"sync"
	"sync/atomic"
)

// Region is an address range that kernels may use.
type Region struct {
	Lo, Hi  uint64
	Purpose string
	refs    int           // registrations of it, or of a part of it, that are not freed yet
	missing atomic.Uint64 // bytes at its end that have addresses and no memory
}

// Back sets the number of bytes from the beginning that have memory. New regions have it all.
func (r *Region) Back(bytes uint64) { r.missing.Store(r.Hi - r.Lo - min(bytes, r.Hi-r.Lo)) }

// End is the address where the memory ends: Hi, or before it in a region that grows.
func (r *Region) End() uint64 { return r.Hi - r.missing.Load() }

// Table holds regions sorted by address; they do not overlap. Readers take a snapshot without a
// lock: every copy and every view asks.
type Table struct {
	mu   sync.Mutex
	live atomic.Pointer[[]*Region]
}

func (t *Table) snapshot() []*Region {
	if p := t.live.Load(); p != nil {
		return *p
	}
	return nil
}

// Find returns the region that holds address p, or nil.
func (t *Table) Find(p uint64) *Region {
	s := t.snapshot()
	i := sort.Search(len(s), func(i int) bool { return s[i].Hi > p })
	if i < len(s) && s[i].Lo <= p {
		return s[i]
	}
	return nil
}

// Add inserts [lo, hi), or takes one more reference to a region that holds all of it (fresh is
// then false).
func (t *Table) Add(lo, hi uint64, purpose string) (r *Region, fresh bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.snapshot()
	i := sort.Search(len(s), func(i int) bool { return s[i].Hi > lo })
	if i < len(s) && s[i].Lo < hi {
		if s[i].Lo <= lo && hi <= s[i].Hi {
			s[i].refs++
			return s[i], false, nil
		}
		return nil, false, fmt.Errorf("memory for %s overlaps that of %s", purpose, s[i].Purpose)
	}
	r = &Region{Lo: lo, Hi: hi, Purpose: purpose, refs: 1}
	n := make([]*Region, 0, len(s)+1)
	n = append(append(append(n, s[:i]...), r), s[i:]...)
	t.live.Store(&n)
	return r, true, nil
}

// Drop gives up a reference and reports whether the region is gone with it. owner ends the region
// whoever else holds it, for its memory goes.
func (t *Table) Drop(r *Region, owner bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.refs--; r.refs > 0 && !owner {
		return false
	}
	s := t.snapshot()
	n := make([]*Region, 0, len(s))
	for _, x := range s {
		if x != r {
			n = append(n, x)
		}
	}
	t.live.Store(&n)
	return len(n) < len(s)
}

// Check returns an error unless [p, p+n) is inside one live region. op and side name the use in the
// error.
func (t *Table) Check(op, side string, p uint64, n int64) error {
	if n < 0 {
		return fmt.Errorf("%s: negative size %d", op, n)
	}
	if n == 0 {
		return nil
	}
	r := t.Find(p)
	if r == nil {
		return fmt.Errorf("%s of %d bytes: %s address %#x is in no live buffer of the device", op,
			n, side, p)
	}
	if end := r.End(); end < r.Hi && p+uint64(n) > end && uint64(n) <= r.Hi-p {
		return fmt.Errorf(
			"%s of %d bytes: %s offset %d of %s: %d of its %d bytes have memory; grow it first",
			op, n, side, p-r.Lo, r.Purpose, end-r.Lo, r.Hi-r.Lo)
	}
	if left := r.Hi - p; uint64(n) > left {
		return fmt.Errorf(
			"%s of %d bytes: %s offset %d of %s (%d bytes): out of bounds by %d bytes",
			op, n, side, p-r.Lo, r.Purpose, r.Hi-r.Lo, uint64(n)-left)
	}
	return nil
}
