package stripe

import (
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// sized are SSDs with so many bytes of room.
func sized(lba int, rooms ...int64) (s []*simSSD) {
	for _, n := range rooms {
		s = append(s, newSim((headBytes+tailBytes+n)/int64(lba), lba))
	}
	return s
}

// spreadOf counts the stripes of d on each SSD.
func spreadOf(t testing.TB, d *dataset.Dataset, s ...*simSSD) (got spread) {
	t.Helper()
	for _, x := range targetsOf(s...) {
		all, err := x.contents(bg)
		require.NoError(t, err)
		n := 0
		for _, h := range all {
			if h.there() && h.sb.UUID == d.UUID() {
				n++
			}
		}
		got = append(got, n)
	}
	return got
}

func grown(t testing.TB, nodes int64, dim int) *dataset.Dataset {
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: nodes, Dim: dim,
		Classes: 3, AvgDegree: 3, Seed: 1, FeatureFn: "hash:7", Out: out}))
	return datasettest.Open(t, out)
}

func noteTo(notes *[]string) func(string) {
	return func(n string) { *notes = append(*notes, n) }
}

func TestDealt(t *testing.T) {
	require.Equal(t, []int{0, 1, 1}, spread{1, 2}.dealt())
	require.Equal(t, []int{0, 1, 2, 0, 2, 0}, spread{3, 1, 2}.dealt())
}

// TestChooseSpread: all SSDs get the same while that fits; else the busiest as little as can be.
func TestChooseSpread(t *testing.T) {
	const kib = 1 << 10
	d := small(t, 6000, 100, 1) // 3000 KiB of rows
	for _, c := range []struct {
		rooms []int64
		want  spread
	}{
		{[]int64{4000 * kib}, spread{1}},
		{[]int64{1600 * kib, 1600 * kib}, spread{1, 1}},
		{[]int64{1600 * kib, 9000 * kib}, spread{1, 1}},
		{[]int64{1100 * kib, 2400 * kib}, spread{1, 2}},
		{[]int64{2400 * kib, 1100 * kib}, spread{2, 1}},
		{[]int64{1300 * kib, 2400 * kib}, spread{2, 3}},
		{[]int64{1400 * kib, 2400 * kib}, spread{3, 4}},
		{[]int64{700 * kib, 2500 * kib}, spread{1, 4}},
		{[]int64{450 * kib, 4000 * kib}, spread{1, 6}},
		{[]int64{700 * kib, 1200 * kib, 1800 * kib}, spread{1, 2, 3}},
		{[]int64{300 * kib, 4000 * kib}, nil},
		{[]int64{1000 * kib, 1900 * kib}, nil},
	} {
		s := sized(512, c.rooms...)
		var notes []string
		r, err := load(bg, d, targetsOf(s...), LoadOptions{Note: noteTo(&notes)})
		if c.want == nil {
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v: %v", c.rooms, err)
			require.ErrorContains(t, err, "ssd sim0 is too small for its share (stripe 0 of 2)")
			require.ErrorContains(t, err, "leave small ones out with option ssds")
			continue
		}
		require.NoError(t, err, c.rooms)
		require.Equal(t, c.want, spreadOf(t, d, s...), c.rooms)
		require.Equal(t, c.want.stripes(), r.Stripes)
		require.Equal(t, !c.want.even(), len(notes) > 0, notes)
		requireWhole(t, d, s...)
	}
}

// TestSpreadQueuePairs: no SSD takes more stripes than it has queue pairs for.
func TestSpreadQueuePairs(t *testing.T) {
	d := small(t, 6000, 100, 1)
	for pairs, want := range map[int]spread{4: {3, 4}, 3: {2, 3}, 2: {1, 2}, 1: nil} {
		s := sized(512, 1400<<10, 2400<<10)
		ts := targetsOf(s...)
		for _, x := range ts {
			x.pairs = pairs
		}
		_, err := load(bg, d, ts, LoadOptions{})
		if want == nil {
			require.ErrorContains(t, err, "smaller stripes have no room or queue pairs")
			continue
		}
		require.NoError(t, err)
		require.Equal(t, want, spreadOf(t, d, s...))
	}
}

// TestUneven: a dataset that lies unevenly is found in any order of the SSDs, missed where one of
// them is, stays as it is when it is loaded again, has pages, and leaves room for others.
func TestUneven(t *testing.T) {
	d, other := small(t, 6000, 100, 1), small(t, 900, 100, 2)
	for _, lba := range []int{512, 4096} {
		rooms := []int64{1100 << 10, 2600 << 10}
		if lba == 4096 { // ten rows to a block
			rooms = []int64{900 << 10, 2200 << 10}
		}
		s := sized(lba, rooms...)
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
		require.Equal(t, spread{1, 2}, spreadOf(t, d, s...))
		requireWhole(t, d, s[1], s[0])
		stripes, err := attach(bg, d, targetsOf(s[1], s[0]), AttachOptions{})
		require.NoError(t, err)
		require.Equal(t, []string{"sim1", "sim0"}, namesOf(targetsIn(stripes)))
		require.Len(t, stripes, 3)
		require.Equal(t, stripes[1].t.name, stripes[2].t.name)
		_, err = attach(bg, d, targetsOf(s[0]), AttachOptions{})
		require.ErrorContains(t, err, "has 3 stripes, stripe 1, 2 is missing")
		require.Equal(t, errs.Device, errs.ClassOf(err))
		_, err = attach(bg, d, targetsOf(s[1]), AttachOptions{})
		require.ErrorContains(t, err, "has 3 stripes, stripe 0 is missing")
		r, err := verify(bg, d, targetsOf(s...), VerifyOptions{})
		require.NoError(t, err)
		require.Equal(t, 2, r.SSDs)

		// Another beside it, and pages of both.
		must(load(bg, other, targetsOf(s[1]), LoadOptions{}))
		spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 7}
		require.NoError(t, putPages(d, spec, s...))
		requireWhole(t, d, s...)
		requireWhole(t, other, s...)
		requirePages(t, d, spec, s...)
		from, err := removePages(bg, targetsOf(s...), spec.ID)
		require.NoError(t, err)
		require.Equal(t, []string{"sim0", "sim1"}, from)

		// It stays as it is, though rows of half the bytes could lie evenly; or they shall.
		must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "float16"}))
		require.Equal(t, spread{1, 2}, spreadOf(t, d, s...))
		requireWhole(t, d, s...)
		must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "float16", Restart: true}))
		require.Equal(t, spread{1, 1}, spreadOf(t, d, s...))
		requireWhole(t, d, s...)
		requireWhole(t, other, s...)
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
		require.Equal(t, spread{1, 2}, spreadOf(t, d, s...))
		requireWhole(t, d, s...)
		requireWhole(t, other, s...)
		for _, x := range targetsOf(s...) {
			all, err := x.contents(bg)
			require.NoError(t, err)
			for _, h := range all {
				if h.err == nil && h.sb.UUID == d.UUID() {
					require.NoError(t, h.t.unload(bg, d.UUID()))
				}
			}
		}
		require.Equal(t, spread{0, 0}, spreadOf(t, d, s...))
		_, free, err := targetsOf(s...)[0].listed(bg, false)
		require.NoError(t, err)
		require.Equal(t, rooms[0], free)
		requireWhole(t, other, s...)
	}
}

// TestUnevenPieces: room in pieces is used, also of one SSD.
func TestUnevenPieces(t *testing.T) {
	a, b, c := small(t, 900, 100, 1), small(t, 900, 100, 2), small(t, 1500, 100, 3)
	s := sized(512, 1400<<10)
	must(load(bg, a, targetsOf(s...), LoadOptions{}))
	must(load(bg, b, targetsOf(s...), LoadOptions{}))
	_, err := load(bg, c, targetsOf(s...), LoadOptions{})
	require.ErrorContains(t, err, "free in one piece")
	require.NoError(t, targetsOf(s...)[0].unload(bg, a.UUID()))
	must(load(bg, c, targetsOf(s...), LoadOptions{}))
	require.Greater(t, spreadOf(t, c, s...)[0], 1)
	requireWhole(t, b, s...)
	requireWhole(t, c, s...)
}

// TestUnevenPacks: stripes that have grown move where staying would leave them no room.
func TestUnevenPacks(t *testing.T) {
	first, old, more := small(t, 1400, 100, 1), grown(t, 6000, 100), grown(t, 9000, 100)
	more.Meta.Source.Appended = []dataset.Addition{{UUID: old.UUID().String()}}
	s := sized(512, 1700<<10, 3400<<10)
	must(load(bg, first, targetsOf(s[1]), LoadOptions{}))
	must(load(bg, small(t, 1150, 100, 2), targetsOf(s[0]), LoadOptions{}))
	must(load(bg, old, targetsOf(s...), LoadOptions{}))
	require.Equal(t, spread{1, 2}, spreadOf(t, old, s...))
	requireWhole(t, old, s...)
	for _, x := range targetsOf(s...) {
		all, err := x.contents(bg)
		require.NoError(t, err)
		for _, h := range all {
			if h.there() && h.sb.UUID != old.UUID() {
				require.NoError(t, h.t.unload(bg, h.sb.UUID))
			}
		}
	}
	must(load(bg, more, targetsOf(s...), LoadOptions{}))
	require.Equal(t, spread{1, 2}, spreadOf(t, more, s...))
	requireWhole(t, more, s...)
}

// TestUnevenGrows: an import has added rows; the first stripe of each SSD keeps its chunks, the
// second one moves, and no cut of the power does any harm.
func TestUnevenGrows(t *testing.T) {
	old, more := grown(t, 9000, 100), grown(t, 9400, 100)
	more.Meta.Source.Appended = []dataset.Addition{{UUID: old.UUID().String()}}
	before := sized(512, 1650<<10, 3600<<10)
	must(load(bg, old, targetsOf(before...), LoadOptions{}))
	require.Equal(t, spread{1, 2}, spreadOf(t, old, before...))
	before = clones(before)
	s := clones(before)
	r, err := load(bg, more, targetsOf(s...), LoadOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 2*chunkBytes, r.ResumedBytes)
	require.Equal(t, spread{1, 2}, spreadOf(t, more, s...))
	requireWhole(t, more, s...)
	for ops := 0; ; ops++ {
		s, budget := clones(before), ops
		for _, x := range s {
			x.budget = &budget
		}
		_, lerr := load(bg, more, targetsOf(s...), often(LoadOptions{}).unforced())
		rng := rand.New(rand.NewPCG(uint64(ops), 7))
		for i := range s {
			s[i] = s[i].restart(rng)
		}
		_, err := load(bg, more, targetsOf(s...), LoadOptions{})
		require.NoError(t, err, "%d operations", ops)
		requireWhole(t, more, s...)
		if scrap(s...); lerr == nil {
			require.Greater(t, ops, 30)
			break
		}
		require.ErrorIs(t, lerr, errPowerLoss)
	}
}

// TestUnevenResumes: a load that was interrupted goes on in the spread that it has begun.
func TestUnevenResumes(t *testing.T) {
	d := small(t, 18000, 100, 1)
	start := sized(512, 3300<<10, 7800<<10)
	resumed := 0
	for ops := 0; ; ops += 5 {
		s, budget := clones(start), ops
		for _, x := range s {
			x.budget = &budget
		}
		_, lerr := load(bg, d, targetsOf(s...), often(LoadOptions{}).unforced())
		s = clones(s)
		if _, err := attach(bg, d, targetsOf(s...), AttachOptions{}); err == nil {
			requireWhole(t, d, s...)
		}
		var notes []string
		r, err := load(bg, d, targetsOf(s...), LoadOptions{Note: noteTo(&notes)})
		require.NoError(t, err)
		require.Empty(t, r.StartedOver)
		if strings.Contains(strings.Join(notes, "\n"), "going on there") {
			resumed++
		}
		require.Equal(t, spread{1, 2}, spreadOf(t, d, s...))
		requireWhole(t, d, s...)
		if scrap(s...); lerr == nil {
			break
		}
	}
	require.Greater(t, resumed, 5)
}

// TestUnevenLeases: an SSD with two stripes has one record of who uses it, and two loads, or a load
// and a run, of one dataset are never at once.
func TestUnevenLeases(t *testing.T) {
	lively(t)
	d := small(t, 6000, 100, 1)
	s := sized(512, 1100<<10, 2600<<10)
	on(1)
	must(load(bg, d, targetsOf(s...), shared(LoadOptions{})))
	stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	w, err := holdToWrite(bg, targetsIn(stripes), d.UUID(), nil)
	require.NoError(t, err)
	for _, x := range targetsOf(s...) {
		all, err := x.leases(bg)
		require.NoError(t, err)
		n := 0
		for _, l := range all {
			if l != nil {
				n++
			}
		}
		require.Equal(t, 1, n)
	}
	on(2)
	_, err = load(bg, d, targetsOf(s...), shared(LoadOptions{}))
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	_, err = reads(d, s, nil)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.NoError(t, w.Close())
	l, err := reads(d, s, nil)
	require.NoError(t, err)
	on(3)
	_, err = load(bg, d, targetsOf(s...), shared(LoadOptions{}))
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.NoError(t, l.Close())
	must(load(bg, d, targetsOf(s...), shared(LoadOptions{})))
	requireWhole(t, d, s...)
}
