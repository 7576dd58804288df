package stripe

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/internal/errs"
)

// requireWhole verifies a dataset on SSDs, with its source.
func requireWhole(t testing.TB, d *dataset.Dataset, s ...*simSSD) {
	t.Helper()
	r, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.NoError(t, err)
	require.Equal(t, d.Meta.Nodes, r.RowsCompared)
}

// TestSeveralDatasets: datasets lie beside each other, with pages, on some of the same SSDs, each
// whole; a second load of one leaves the others; what is unloaded leaves room that is used again.
func TestSeveralDatasets(t *testing.T) {
	a, b, c := small(t, 900, 100, 1), small(t, 700, 150, 2), small(t, 1000, 40, 3)
	for _, lba := range []int{512, 4096} {
		s := sims(3, lba)
		must(load(bg, a, targetsOf(s[0], s[1]), LoadOptions{}))
		alone := clones(s)
		must(load(bg, b, targetsOf(s[1], s[2], s[0]), LoadOptions{RowType: "float16"}))
		must(load(bg, c, targetsOf(s[2], s[1]), LoadOptions{RowType: "int8"}))
		whole := func(all ...*dataset.Dataset) {
			t.Helper()
			for _, d := range all {
				requireWhole(t, d, s...)
			}
			r, err := verifyEach(bg, targetsOf(s...), VerifyOptions{})
			require.NoError(t, err)
			require.Zero(t, r.BadCount)
		}
		whole(a, b, c)
		sb, _, err := targetsOf(alone[0])[0].listed(bg, false)
		require.NoError(t, err)
		own, err := sb[0].runs()
		require.NoError(t, err)
		from, to := own[0].from*int64(lba), own[0].to*int64(lba)
		s = clones(s)
		require.True(t, bytes.Equal(alone[0].durable[from:to], s[0].durable[from:to]))
		for i, x := range s { // a heliosctl that knows one dataset an SSD refuses it
			require.EqualValues(t, versionShared, binary.LittleEndian.Uint32(x.durable[8:]), i)
		}
		spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 20}
		require.NoError(t, putPages(a, spec, s...))
		other := pages.Spec{ID: packs[1], PageBytes: 8192, Pages: 31}
		require.NoError(t, putPages(b, other, s...))
		whole(a, b, c)
		requirePages(t, a, spec, s...)
		requirePages(t, b, other, s...)

		// Loading one again, in another form, too.
		must(load(bg, c, targetsOf(s[2], s[1]), LoadOptions{}))
		must(load(bg, c, targetsOf(s[2], s[1]), LoadOptions{RowType: "bfloat16"}))
		whole(a, b, c)
		_, err = load(bg, b, targetsOf(s[1], s[2], s[0]), LoadOptions{})
		require.Equal(t, errs.Refused, errs.ClassOf(err))
		require.ErrorContains(t, err, "pages of pack")

		// The first goes, its pages too; the others stay, and its room is used.
		for _, x := range targetsOf(s[0], s[1]) {
			require.NoError(t, x.unload(bg, a.UUID()))
		}
		whole(b, c)
		_, err = attach(bg, a, targetsOf(s...), AttachOptions{})
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		must(load(bg, a, targetsOf(s[1], s[2]), LoadOptions{}))
		whole(a, b, c)
		requirePages(t, b, other, s...)
		found, err := attach(bg, a, targetsOf(s...), AttachOptions{})
		require.NoError(t, err)
		require.EqualValues(t, headBytes/lba, found[0].sb.DataLBA)

		// All but the last.
		for _, d := range []*dataset.Dataset{a, b} {
			for _, x := range targetsOf(s...) {
				all, err := x.contents(bg)
				require.NoError(t, err)
				for _, h := range all {
					if h.there() && h.sb.UUID == d.UUID() {
						require.NoError(t, h.t.unload(bg, d.UUID()))
					}
				}
			}
		}
		whole(c)
		must(load(bg, c, targetsOf(s[2], s[1]), LoadOptions{}))
		whole(c)

		// By force the whole SSD is the new one's.
		must(load(bg, b, targetsOf(s...), LoadOptions{Force: "SER0,SER1,SER2"}))
		fresh := sims(3, lba)
		must(load(bg, b, targetsOf(fresh...), LoadOptions{}))
		for i := range s {
			x, y := s[i].clone().durable, fresh[i].clone().durable
			require.True(t, bytes.Equal(x[superblockBytes:headBytes], y[superblockBytes:headBytes]))
			require.EqualValues(t, 1, binary.LittleEndian.Uint32(x[8:]))
		}
	}
}

// TestUnloadAndRoom: where room lacks, the error has the owners and what is free; 32 datasets have
// superblocks.
func TestUnloadAndRoom(t *testing.T) {
	a, b := small(t, 5500, 100, 1), small(t, 900, 100, 2)
	s := sims(1, 512)
	must(load(bg, a, targetsOf(s...), LoadOptions{}))
	_, err := load(bg, b, targetsOf(s...), LoadOptions{})
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.ErrorContains(t, err, fmt.Sprintf("holds %q (%s, ", a.Meta.Name, a.UUID()))
	require.ErrorContains(t, err, "KiB are free in one piece, and ")
	require.NoError(t, targetsOf(s...)[0].unload(bg, a.UUID()))
	_, err = attach(bg, a, targetsOf(s...), AttachOptions{})
	require.ErrorContains(t, err, "its dataset was unloaded")
	list, free, err := targetsOf(s...)[0].listed(bg, true)
	require.NoError(t, err)
	require.Empty(t, list)
	require.EqualValues(t, simBytes-headBytes-tailBytes, free)
	must(load(bg, b, targetsOf(s...), LoadOptions{}))
	require.EqualValues(t, 1, binary.LittleEndian.Uint32(s[0].clone().durable[8:]))

	s = sims(1, 512)
	for i := range uint64(maxDatasets) {
		must(load(bg, small(t, 20, 4, 3+i), targetsOf(s...), LoadOptions{}))
	}
	list, _, err = targetsOf(s...)[0].listed(bg, true)
	require.NoError(t, err)
	require.Len(t, list, maxDatasets)
	_, err = load(bg, b, targetsOf(s...), LoadOptions{})
	require.ErrorContains(t, err, "has room for no more")
}

// TestPowerCutBesideOthers cuts the power at every operation of a load beside another dataset and
// of an unloading: the other stays whole, and the load and the unloading end well the next time.
func TestPowerCutBesideOthers(t *testing.T) {
	a, b := small(t, 300, 100, 1), small(t, 200, 150, 2)
	before := sims(2, 512)
	must(load(bg, a, targetsOf(before...), LoadOptions{}))
	before = clones(before)
	want := clones(before)
	must(load(bg, b, targetsOf(want...), LoadOptions{}))
	want = clones(want)
	u := small(t, 900, 700, 3)
	beforeU := sized(512, 1<<20+96<<10, 5<<19)
	must(load(bg, a, targetsOf(beforeU...), LoadOptions{}))
	withU := clones(beforeU)
	must(load(bg, u, targetsOf(withU...), LoadOptions{}))
	require.Equal(t, spread{1, 2}, spreadOf(t, u, withU...))
	unloadAll := func(d *dataset.Dataset, s ...*simSSD) error {
		for _, x := range targetsOf(s...) {
			all, err := x.contents(bg)
			if err != nil {
				return err
			}
			for _, h := range all {
				if h.err == nil && h.sb.UUID == d.UUID() {
					if err := h.t.unload(bg, d.UUID()); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}
	for name, c := range map[string]struct {
		from  []*simSSD
		do    func(s ...*simSSD) error
		whole []*dataset.Dataset // throughout
		after []*dataset.Dataset
	}{
		"load beside": {before, func(s ...*simSSD) error {
			_, err := load(bg, b, targetsOf(s...), often(LoadOptions{}).unforced())
			return err
		}, []*dataset.Dataset{a}, []*dataset.Dataset{a, b}},
		"load again": {want, func(s ...*simSSD) error {
			_, err := load(bg, a, targetsOf(s...), often(LoadOptions{}).unforced())
			return err
		}, []*dataset.Dataset{b}, []*dataset.Dataset{a, b}},
		"unload the first": {want, func(s ...*simSSD) error { return unloadAll(a, s...) },
			[]*dataset.Dataset{b}, []*dataset.Dataset{b}},
		"unload the second": {want, func(s ...*simSSD) error { return unloadAll(b, s...) },
			[]*dataset.Dataset{a}, []*dataset.Dataset{a}},
		"load unevenly beside": {beforeU, func(s ...*simSSD) error {
			_, err := load(bg, u, targetsOf(s...), LoadOptions{})
			return err
		}, []*dataset.Dataset{a}, []*dataset.Dataset{a, u}},
		"load evenly again": {withU, func(s ...*simSSD) error {
			_, err := load(bg, u, targetsOf(s...), LoadOptions{RowType: "float16", Restart: true})
			return err
		}, []*dataset.Dataset{a}, []*dataset.Dataset{a, u}},
		"unload unevenly": {withU, func(s ...*simSSD) error { return unloadAll(u, s...) },
			[]*dataset.Dataset{a}, []*dataset.Dataset{a}},
	} {
		t.Run(name, func(t *testing.T) {
			for ops := 0; ; ops++ {
				s, budget := clones(c.from), ops
				for _, x := range s {
					x.budget = &budget
				}
				err := c.do(s...)
				if err != nil {
					require.ErrorIs(t, err, errPowerLoss)
				}
				rng := rand.New(rand.NewPCG(uint64(ops), 7))
				for i := range s {
					s[i] = s[i].restart(rng)
				}
				for _, d := range c.whole {
					requireWhole(t, d, s...)
				}
				require.NoError(t, c.do(s...), "%d operations", ops)
				for _, d := range c.after {
					requireWhole(t, d, s...)
				}
				scrap(s...)
				if err == nil {
					require.GreaterOrEqual(t, ops, 8)
					return
				}
			}
		})
	}
}

// unforced takes Force back.
func (o LoadOptions) unforced() LoadOptions { o.Force = ""; return o }

// TestLeasesByDataset: who reads one dataset is not disturbed by a load of another, and two loads
// are never at once.
func TestLeasesByDataset(t *testing.T) {
	lively(t)
	a, b := small(t, 300, 64, 1), small(t, 300, 64, 2)
	s := sims(2, 512)
	on(1)
	must(load(bg, a, targetsOf(s...), shared(LoadOptions{})))
	l, err := reads(a, s, nil)
	require.NoError(t, err)
	on(2)
	must(load(bg, b, targetsOf(s...), shared(LoadOptions{})))
	_, err = load(bg, a, targetsOf(s...), shared(LoadOptions{}))
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	w, err := holdToWrite(bg, targetsOf(s...), a.UUID(), nil)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.Nil(t, w)
	w, err = holdToWrite(bg, targetsOf(s...), b.UUID(), nil)
	require.NoError(t, err)
	on(3)
	_, err = reads(b, s, nil)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	_, err = holdToWrite(bg, targetsOf(s...), a.UUID(), nil)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.NoError(t, w.Close())
	l.renew(context.Background())
	require.NoError(t, l.Err())
	require.NoError(t, l.Close())
}

// TestDamageBeside damages superblocks of one dataset among three, with pages: each dataset that is
// found is whole, one good copy is enough, and no load takes the room of what is lost.
func TestDamageBeside(t *testing.T) {
	all := []*dataset.Dataset{small(t, 300, 100, 1), small(t, 200, 150, 2), small(t, 400, 40, 3)}
	more := small(t, 100, 30, 4)
	rng := rand.New(rand.NewPCG(5, 6))
	for _, lba := range []int{512, 4096} {
		good := sims(2, lba)
		for _, d := range all {
			must(load(bg, d, targetsOf(good...), LoadOptions{}))
		}
		require.NoError(t, putPages(all[1], pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 20},
			good...))
		for trial := range 60 {
			s := clones(good)
			slot, both := trial%3, trial/3%2 == 1
			ends := []int{trial / 6 % 2}
			if both {
				ends = []int{0, 1}
			}
			for _, c := range ends {
				place := int(targetsOf(s...)[1].inSlot(slot).copyLBA(c)) * lba
				place += rng.IntN(superblockBytes)
				if trial/12%2 == 1 {
					place = place/superblockBytes*superblockBytes + rng.IntN(8) // in the magic
				}
				s[1].durable[place] ^= 1 << rng.IntN(8)
			}
			for k, d := range all {
				_, err := attach(bg, d, targetsOf(s...), AttachOptions{})
				if err == nil {
					_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
					require.Equal(t, k == slot, err != nil, "trial %d: %v", trial, err)
				} else {
					require.True(t, both && (k == slot || slot == 0), "trial %d: %v", trial, err)
				}
			}
			_, err := verifyEach(bg, targetsOf(s...), VerifyOptions{})
			require.Equal(t, errs.Device, errs.ClassOf(err), "trial %d: %v", trial, err)
			if !both {
				continue
			}
			for _, d := range append(all, more) {
				before := clones(s)
				_, err = load(bg, d, targetsOf(s...), LoadOptions{})
				require.Equal(t, errs.Refused, errs.ClassOf(err), "trial %d: %v", trial, err)
				for i := range s {
					require.True(t, bytes.Equal(before[i].clone().durable, s[i].clone().durable))
				}
				scrap(before...)
			}
			scrap(s...)
		}
	}
}

// TestRoomIsLookedAtAgain: room that somebody has taken, or left, since a load looked for it is
// refused; what was unloaded meanwhile is not unloaded again.
func TestRoomIsLookedAtAgain(t *testing.T) {
	a, b, c := small(t, 300, 100, 1), small(t, 200, 150, 2), small(t, 400, 40, 3)
	s := sims(1, 512)
	for _, d := range []*dataset.Dataset{a, b, c} {
		r, err := targetsOf(s...)[0].checkFree(bg, d, "")
		require.NoError(t, err)
		require.NoError(t, r.same(bg))
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
		require.Equal(t, errs.Refused, errs.ClassOf(r.same(bg)))
	}
	r, err := targetsOf(s...)[0].checkFree(bg, c, "")
	require.NoError(t, err)
	second := targetsOf(s...)[0].inSlot(1)
	require.NoError(t, second.unload(bg, c.UUID()))
	requireWhole(t, b, s...)
	require.NoError(t, r.same(bg))
	require.NoError(t, second.unload(bg, b.UUID()))
	require.Equal(t, errs.Refused, errs.ClassOf(r.same(bg)))
	requireWhole(t, a, s...)
	requireWhole(t, c, s...)
}

// TestListBesideDamage: a dataset whose two superblocks are lost is named, and its neighbours are
// still listed and unloaded.
func TestListBesideDamage(t *testing.T) {
	a, b := small(t, 300, 64, 1), small(t, 300, 64, 2)
	s := sims(1, 512)
	must(load(bg, a, targetsOf(s...), LoadOptions{}))
	must(load(bg, b, targetsOf(s...), LoadOptions{}))
	s = clones(s)
	slot := targetsOf(s...)[0].inSlot(1)
	for c := range 2 {
		s[0].durable[int(slot.copyLBA(c))*512+100] ^= 1
	}
	list, _, err := targetsOf(s...)[0].listed(bg, true)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, a.UUID(), list[0].UUID)
	require.Len(t, list[0].Lost, 1)
	require.Contains(t, list[0].Lost[0], "the dataset in slot 1: damaged Helios superblock")
	whole := clones(s)
	require.NoError(t, targetsOf(s...)[0].unload(bg, a.UUID()))
	_, _, err = targetsOf(s...)[0].listed(bg, true)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, "heliosctl unload SER0:1")

	slot = targetsOf(whole...)[0].inSlot(1)
	require.NoError(t, slot.unloadLost(bg))
	require.Equal(t, errs.Usage, errs.ClassOf(slot.unloadLost(bg)))
	list, _, err = targetsOf(whole...)[0].listed(bg, true)
	require.NoError(t, err)
	require.Empty(t, list[0].Lost)
	must(load(bg, b, targetsOf(whole...), LoadOptions{}))
	requireWhole(t, a, whole...)
	requireWhole(t, b, whole...)
}
