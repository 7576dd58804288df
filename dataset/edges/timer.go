package edges

import "time"

// MarkTimer spaces marks so that waiting for the disk stays a small part of the time.
type MarkTimer struct {
	last  time.Time
	every time.Duration
}

// SyncEvery is the least time between two marks within a file; tests shorten it.
var SyncEvery = 10 * time.Second

// NewMarkTimer starts one: its first mark is due after SyncEvery.
func NewMarkTimer() *MarkTimer { return &MarkTimer{last: time.Now(), every: SyncEvery} }

// Due reports whether it is time for a mark.
func (t *MarkTimer) Due() bool { return time.Since(t.last) >= t.every }

// Mark calls fn, which makes a mark, and puts the next one off by ten times as long as that took.
func (t *MarkTimer) Mark(fn func() error) error {
	from := time.Now()
	err := fn()
	t.last = time.Now()
	if SyncEvery > 0 {
		t.every = max(SyncEvery, 10*t.last.Sub(from))
	}
	return err
}
