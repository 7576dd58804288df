package sched

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
)

// shelf is a file of slots, and who has them.
type shelf struct {
	mu     sync.Mutex
	free   []*Place
	has    map[int]*Place // by batch
	at     map[*Place][]byte
	lacked bool
}

func newShelf(t *testing.T, l *Loader, slots int, bytes int64) *shelf {
	fd, err := unix.MemfdCreate("shelf", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd) //nolint:errcheck // mapped
	require.NoError(t, unix.Ftruncate(fd, int64(slots)*bytes))
	s := &shelf{has: map[int]*Place{}, at: map[*Place][]byte{}}
	for i := range slots {
		p, err := l.NewPlace(fd, int64(i)*bytes, bytes)
		require.NoError(t, err)
		s.free = append(s.free, p)
		s.at[p], err = unix.Mmap(fd, int64(i)*bytes, int(bytes), unix.PROT_READ, unix.MAP_SHARED)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, unix.Munmap(s.at[p])) })
	}
	return s
}

func (s *shelf) place(index int) *Place {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.has[index]; p != nil || len(s.free) == 0 || s.lacked && index%3 == 0 {
		return p
	}
	p := s.free[0]
	s.free, s.has[index] = s.free[1:], p
	return p
}

func (s *shelf) of(index int) *Place {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.has[index]
}

func (s *shelf) giveBack(index int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.has[index]; p != nil {
		s.free = append(s.free, p)
		delete(s.has, index)
	}
}

// Rows that go to a consumer's places are those that come without, in every mode. An epoch may be
// broken off, a batch be larger than its place, and some batches have none.
func TestLoaderFillsPlaces(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	rb := int64(d.Meta.RowBytes())
	for _, mode := range tiers.Catalog.Names() {
		t.Run(mode, func(t *testing.T) {
			cfg := small()
			cfg.Mode, cfg.NoEval = mode, true
			if runsOn(cfg, &hier.System) {
				return
			}
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
			require.NoError(t, err)
			before := hostmem.Usage()["rows in a consumer's memory"]
			l, err := OpenLoader(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d,
				SSDs: s.ssds}, LoaderOptions{Split: "train", Shuffle: true, Any: true},
				report.Observer{})
			require.NoError(t, err)
			for i, bytes := range []int64{1 << 20, 2 * hostmem.PageBytes} {
				slots := l.Ahead() + 1
				if runsOn(cfg, &ginex.System) {
					require.Equal(t, 1, slots, "tiers take rows in from there")
				}
				q := newShelf(t, l, slots, bytes)
				q.lacked = i == 1
				placed := 0
				take := func(b *Loaded) error {
					require.Same(t, q.of(b.Index), b.At)
					for k, v := range b.Nodes {
						require.True(t, slices.Equal(b.Rows[int64(k)*rb:][:rb], feat[v*rb:][:rb]),
							"row %d of batch %d", k, b.Index)
					}
					if b.At != nil {
						placed++
						n := min(int64(len(b.Rows)), bytes)
						require.True(t, slices.Equal(b.Rows[:n], q.at[b.At][:n]))
					}
					q.giveBack(b.Index)
					return nil
				}
				enough := errors.New("enough")
				err = l.EpochInto(context.Background(), 0, from(l, 0), q.place,
					func(b *Loaded) error { return errors.Join(take(b), enough) })
				require.ErrorIs(t, err, enough)
				for index := range q.has {
					q.giveBack(index)
				}
				require.NoError(t, l.EpochInto(context.Background(), 1, from(l, 0), q.place, take))
				require.Equal(t, slots > 1, placed > 0)
				// one place ends in the middle of an epoch
				n := 0
				require.NoError(t, l.EpochInto(context.Background(), 2, from(l, 0), nil,
					func(b *Loaded) error {
						if n++; n == 2 {
							require.NoError(t, q.free[0].Close())
							q.free = q.free[1:]
						}
						return nil
					}))
				for _, p := range q.free {
					require.NoError(t, p.Close())
				}
			}
			require.NoError(t, l.Close())
			require.NoError(t, dev.Close(), "streams or buffers were left open")
			require.Equal(t, before, hostmem.Usage()["rows in a consumer's memory"])
		})
	}
}
