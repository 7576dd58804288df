package stripe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/nvme"
)

var packs = []uuid.UUID{uuid.MustParse("11111111-1111-4111-8111-111111111111"),
	uuid.MustParse("22222222-2222-4222-8222-222222222222"),
	uuid.MustParse("33333333-3333-4333-8333-333333333333")}

// pageContent makes the content of page p of a pack of the tests.
func pageContent(s pages.Spec, p int64) []byte {
	b := make([]byte, s.PageBytes)
	rng := rand.New(rand.NewPCG(uint64(p), uint64(s.ID[0])))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b
}

// writePages writes runs of pages from page 0 to end, with a Sync now and then.
func writePages(p *PageStore, end int64) error {
	s := p.Spec()
	for start, run := int64(0), int64(1); start < end; run++ {
		n := min(run%7+1, end-start)
		var b []byte
		for k := start; k < start+n; k++ {
			b = append(b, pageContent(s, k)...)
		}
		if err := p.WriteAt(bg, start, b); err != nil {
			return err
		}
		if run%3 == 0 {
			if err := p.Sync(bg); err != nil {
				return err
			}
		}
		start += n
	}
	return nil
}

// putPages makes the pages of a pack.
func putPages(d *dataset.Dataset, s pages.Spec, sims ...*simSSD) error {
	p, err := createPages(bg, d, targetsOf(sims...), s)
	if err != nil {
		return err
	}
	if err := writePages(p, s.Pages); err != nil {
		return err
	}
	return p.Finish(bg)
}

// requirePages reads all pages of a pack where its layout says they are.
func requirePages(t testing.TB, d *dataset.Dataset, s pages.Spec, sims ...*simSSD) {
	t.Helper()
	ts := targetsOf(sims...)
	stripes, err := attach(bg, d, ts, AttachOptions{})
	require.NoError(t, err)
	o, err := openPages(bg, d, stripes, s)
	require.NoError(t, err)
	sums, err := pageSums(bg, stripes, s)
	require.NoError(t, err)
	for p := range s.Pages {
		ssd, lba, blocks, _ := o.Layout.Locate(p)
		b := make([]byte, int(blocks)*stripes[ssd].t.lbaBytes)
		require.NoError(t, stripes[ssd].t.dev.ReadAt(bg, o.SSDs[ssd].DataStart+lba, b))
		require.True(t, bytes.Equal(pageContent(s, p), b), "page %d", p)
		require.Equal(t, crc32.Checksum(b, castagnoli), sums[p], "page %d", p)
	}
}

func clones(s []*simSSD) (out []*simSSD) {
	for _, x := range s {
		out = append(out, x.clone())
	}
	return out
}

// TestPagesBesideRows: several packs, on one to four SSDs, are where their layout says, the rows
// stay as they were, and the superblock goes back to what it was when the last pack is removed.
func TestPagesBesideRows(t *testing.T) {
	d := small(t, 900, 128, 1)
	for _, lba := range []int{512, 4096} {
		for n := 1; n <= 4; n++ {
			t.Run(fmt.Sprintf("%d/%d", lba, n), func(t *testing.T) {
				s := sims(n, lba)
				must(load(bg, d, targetsOf(s...), LoadOptions{}))
				before := clones(s)
				specs := []pages.Spec{{ID: packs[0], PageBytes: 8192, Pages: 61},
					{ID: packs[1], PageBytes: 4096, Pages: 3}, // an SSD without a page
					{ID: packs[2], PageBytes: 20480, Pages: 17}}
				for _, spec := range specs {
					require.NoError(t, putPages(d, spec, s...))
				}
				s = clones(s)
				for _, spec := range specs {
					requirePages(t, d, spec, s...)
				}
				r, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
				require.NoError(t, err)
				require.EqualValues(t, 81, r.Pages)
				require.Empty(t, r.Notes)
				require.EqualValues(t, versionPages, binary.LittleEndian.Uint32(s[0].durable[8:]))
				// Finished ones are not begun again, and not taken for others.
				var done *pages.FinishedError
				err = putPages(d, specs[0], s...)
				require.ErrorAs(t, err, &done)
				other := specs[0]
				other.Pages++
				err = putPages(d, other, s...)
				require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)

				for i, k := range []int{1, 0, 2} {
					from, err := removePages(bg, targetsOf(s...), specs[k].ID)
					require.NoError(t, err)
					require.Len(t, from, n)
					if i < 2 {
						requirePages(t, d, specs[2], s...)
					}
				}
				_, err = removePages(bg, targetsOf(s...), specs[0].ID)
				require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
				s = clones(s)
				for i := range s {
					require.Equal(t, before[i].durable[:superblockBytes],
						s[i].durable[:superblockBytes])
				}
				_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
				require.NoError(t, err)
			})
		}
	}
}

// TestRoomForPages: the first room that is long enough is taken, also that of removed packs; too
// much is refused, and nothing is written then.
func TestRoomForPages(t *testing.T) {
	d := small(t, 300, 64, 1)
	s := sims(2, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	place := func(id uuid.UUID) nvme.LBA {
		c, err := targetsOf(s...)[0].readCopies(bg)
		require.NoError(t, err)
		require.Equal(t, c.sb[0], c.sb[1])
		return c.sb[0].Pages.e[c.sb[0].Pages.find(id)].LBA
	}
	spec := func(i int, n int64) pages.Spec {
		return pages.Spec{ID: packs[i], PageBytes: 4096, Pages: n}
	}
	require.NoError(t, putPages(d, spec(0, 100), s...))
	require.NoError(t, putPages(d, spec(1, 100), s...))
	first, second := place(packs[0]), place(packs[1])
	require.Less(t, first, second)
	_, err := removePages(bg, targetsOf(s...), packs[0])
	require.NoError(t, err)
	require.NoError(t, putPages(d, spec(2, 300), s...)) // longer than the gap
	require.Greater(t, place(packs[2]), second)
	require.NoError(t, putPages(d, spec(0, 100), s...)) // fits the gap
	require.Equal(t, first, place(packs[0]))
	for i, n := range []int64{100, 100, 300} {
		requirePages(t, d, spec(i, n), s...)
	}
	was := clones(s)
	huge := pages.Spec{ID: uuid.New(), PageBytes: 4096, Pages: 5000}
	err = putPages(d, huge, s...)
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "are free in one piece; it holds pages of pack")
	for i, x := range clones(s) {
		require.Equal(t, was[i].durable, x.durable)
	}
	for k := 3; k < maxPageExtents; k++ {
		require.NoError(t, putPages(d, pages.Spec{ID: uuid.New(), PageBytes: 4096, Pages: 1}, s...))
	}
	err = putPages(d, pages.Spec{ID: uuid.New(), PageBytes: 4096, Pages: 1}, s...)
	require.ErrorContains(t, err, "room for the pages of 32 packs")
	requirePages(t, d, spec(2, 300), s...)
}

// TestPagesNeedTheirDataset: only on SSDs that hold all of it, complete.
func TestPagesNeedTheirDataset(t *testing.T) {
	d, other := small(t, 300, 64, 1), small(t, 300, 64, 2)
	s := sims(2, 512)
	spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 9}
	err := putPages(d, spec, s...)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	err = putPages(d, spec, s[0])
	var missing *MissingError
	require.ErrorAs(t, err, &missing)
	err = putPages(other, spec, s...)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	reseal(t, s[1], func(w *wireSuperblock) { w.State = uint32(StateLoading) })
	err = putPages(d, spec, s...)
	require.ErrorContains(t, err, "did not finish")
}

// TestLoadAsksForPages: pages are not loaded over without consent, whatever their state.
func TestLoadAsksForPages(t *testing.T) {
	d := small(t, 300, 64, 1)
	for _, finished := range []bool{true, false} {
		s := sims(2, 512)
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
		spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 9}
		p, err := createPages(bg, d, targetsOf(s...), spec)
		require.NoError(t, err)
		require.NoError(t, writePages(p, 9))
		if finished {
			require.NoError(t, p.Finish(bg))
		}
		was := clones(s)
		_, err = load(bg, d, targetsOf(s...), LoadOptions{})
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "pages of pack "+packs[0].String())
		require.ErrorContains(t, err, "option force SER0,SER1")
		for i, x := range clones(s) {
			require.Equal(t, was[i].durable, x.durable)
		}
		must(load(bg, d, targetsOf(s...), LoadOptions{Force: "SER0,SER1"}))
		stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
		require.NoError(t, err)
		_, err = openPages(bg, d, stripes, spec)
		require.ErrorContains(t, err, "are not there")
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
	}
}

// TestVerifyFindsPages: verify names the page and the pack, for flips in pages and tables; the
// rows stay good.
func TestVerifyFindsPages(t *testing.T) {
	d := small(t, 300, 64, 1)
	s := sims(2, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 40}
	require.NoError(t, putPages(d, spec, s...))
	s = clones(s)
	c, _, err := targetsOf(s[1])[0].listed(bg, false)
	require.NoError(t, err)
	sb := c[0]
	e := sb.Pages.e[0]
	page := clones(s)
	page[1].durable[int64(e.LBA)*512+5*4096+9] ^= 4
	r, err := verify(bg, d, targetsOf(page...), VerifyOptions{Source: true})
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "page 11 of pack "+packs[0].String())
	require.ErrorContains(t, err, "--remove-pages "+packs[0].String())
	require.NotContains(t, err.Error(), "load it again")
	require.Len(t, r.Bad, 1)
	require.Equal(t, packs[0].String(), r.Bad[0].Pack)
	require.Equal(t, "sim1", r.Bad[0].SSD)
	require.EqualValues(t, 1, r.BadPages)
	r, err = verifyEach(bg, targetsOf(page[1]), VerifyOptions{})
	require.ErrorContains(t, err, "page 11 of pack")
	require.EqualValues(t, 20, r.Pages)

	table := clones(s)
	table[0].durable[int64(sb.Pages.e[0].TableLBA)*512+8] ^= 4
	_, err = verify(bg, d, targetsOf(table...), VerifyOptions{})
	require.ErrorContains(t, err, "page checksums of pack "+packs[0].String())
	stripes, err := attach(bg, d, targetsOf(table...), AttachOptions{})
	require.NoError(t, err)
	_, err = openPages(bg, d, stripes, spec)
	require.ErrorContains(t, err, "page checksums of pack")
	page[1].durable[int64(e.LBA)*512] ^= 4 // the first of the SSD is looked at
	stripes, err = attach(bg, d, targetsOf(page...), AttachOptions{})
	require.NoError(t, err)
	_, err = openPages(bg, d, stripes, spec)
	require.ErrorContains(t, err, "ssd sim1: page 1 of pack")
	require.Equal(t, errs.Device, errs.ClassOf(err))

	p, err := createPages(bg, d, targetsOf(s...), pages.Spec{ID: packs[1], PageBytes: 4096,
		Pages: 5})
	require.NoError(t, err)
	require.NoError(t, writePages(p, 2))
	r, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, r.Notes, 2)
	require.Contains(t, r.Notes[0], "are not finished and were not checked")
	stripes, err = attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	_, err = openPages(bg, d, stripes, p.Spec())
	require.ErrorContains(t, err, "not finished")
}

// TestUnwrittenPagesAreZeros: whatever was on the SSD before.
func TestUnwrittenPagesAreZeros(t *testing.T) {
	d := small(t, 300, 64, 1)
	s := sims(2, 512)
	for _, x := range s {
		copy(x.durable, bytes.Repeat([]byte{0xa5}, len(x.durable)))
	}
	must(load(bg, d, targetsOf(s...), LoadOptions{Force: "SER0,SER1"}))
	spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 9}
	p, err := createPages(bg, d, targetsOf(s...), spec)
	require.NoError(t, err)
	require.NoError(t, p.WriteAt(bg, 3, pageContent(spec, 3)))
	got := make([]byte, 3*4096)
	require.NoError(t, p.ReadAt(bg, 2, got))
	want := append(append(make([]byte, 4096), pageContent(spec, 3)...), make([]byte, 4096)...)
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, p.Finish(bg))
	stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	_, err = openPages(bg, d, stripes, spec)
	require.NoError(t, err)
	_, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
	require.NoError(t, err)
}

// TestPowerLossAndPages cuts the power at every operation of making pages and of removing them.
// Whenever that is: the rows attach and are good, the pages of another pack are whole, and those
// that were being made are either refused or whole, and can be resumed or removed.
func TestPowerLossAndPages(t *testing.T) {
	d := small(t, 900, 128, 1)
	start := sims(2, 512)
	must(load(bg, d, targetsOf(start...), LoadOptions{}))
	old := pages.Spec{ID: packs[1], PageBytes: 8192, Pages: 5}
	gone := pages.Spec{ID: packs[2], PageBytes: 4096, Pages: 30}
	require.NoError(t, putPages(d, gone, start...))
	require.NoError(t, putPages(d, old, start...))
	spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 23} // into the room of gone
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	whole, resumed, refused, torn, finished := 0, 0, 0, 0, false
	for ops := 0; !finished; ops++ {
		require.Less(t, ops, 1000)
		budget := ops
		s := clones(start)
		for _, x := range s {
			x.budget = &budget
		}
		_, err := removePages(bg, targetsOf(s...), gone.ID)
		if err == nil {
			err = putPages(d, spec, s...)
		}
		finished = err == nil
		if err != nil {
			require.ErrorIs(t, err, errPowerLoss)
		}
		for range 3 {
			found := []*simSSD{s[0].restart(rng), s[1].restart(rng)}
			why := fmt.Sprintf("after %d operations, seed %d", ops, seed)
			r, err := verify(bg, d, targetsOf(found...), VerifyOptions{Source: true})
			if err != nil { // one torn superblock of an SSD may be found, never data
				require.LessOrEqual(t, r.BadCount, int64(len(found)), "%s: %v", why, err)
				for _, b := range r.Bad {
					require.Contains(t, b.What, "superblock", why)
				}
				torn++
			}
			require.Equal(t, d.Meta.Nodes, r.RowsCompared, why)
			requirePages(t, d, old, found...)
			stripes, err := attach(bg, d, targetsOf(found...), AttachOptions{})
			require.NoError(t, err)
			if _, err := openPages(bg, d, stripes, spec); err == nil {
				requirePages(t, d, spec, found...)
				whole++
			} else {
				require.False(t, finished, "finished, but: %v", err)
				require.Contains(t, []errs.Class{errs.Device, errs.Usage}, errs.ClassOf(err),
					"%v", err)
				refused++
			}
			if ops%2 == 0 { // it goes on, or is made anew
				_, err := removePages(bg, targetsOf(found...), gone.ID)
				require.Contains(t, []errs.Class{0, errs.Usage}, errs.ClassOf(err), "%v", err)
				p, err := createPages(bg, d, targetsOf(found...), spec)
				var done *pages.FinishedError
				if !errors.As(err, &done) {
					require.NoError(t, err, why)
					if p.Resumed() {
						resumed++
					}
					require.NoError(t, writePages(p, spec.Pages))
					require.NoError(t, p.Finish(bg))
				}
				requirePages(t, d, spec, found...)
			} else {
				_, err := removePages(bg, targetsOf(found...), spec.ID)
				require.Contains(t, []errs.Class{0, errs.Usage}, errs.ClassOf(err), "%v", err)
			}
			for _, x := range targetsOf(found...) { // it is settled now
				c, err := x.readCopies(bg)
				require.NoError(t, errors.Join(err, c.err[0], c.err[1]), why)
				require.Equal(t, c.sb[0], c.sb[1], why)
			}
			requirePages(t, d, old, found...)
			_, err = verify(bg, d, targetsOf(found...), VerifyOptions{Source: true})
			require.NoError(t, err, why)
			scrap(found...)
		}
		scrap(s...)
	}
	require.Positive(t, whole)
	require.Positive(t, resumed)
	require.Positive(t, refused)
	require.Positive(t, torn)
}

// TestResumedPagesKeepWhatWasSynced: a writer whose power failed finds all that a Sync had made
// durable, with its checksums.
func TestResumedPagesKeepWhatWasSynced(t *testing.T) {
	d := small(t, 300, 64, 1)
	start := sims(3, 512)
	must(load(bg, d, targetsOf(start...), LoadOptions{}))
	spec := pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 40}
	rng := rand.New(rand.NewPCG(1, 2))
	kept := 0
	for ops := 10; ops < 120; ops++ {
		s := clones(start)
		p, err := createPages(bg, d, targetsOf(s...), spec)
		require.NoError(t, err)
		budget, synced := ops, int64(0)
		for _, x := range s {
			x.budget = &budget
		}
		for start := int64(0); start < spec.Pages && err == nil; start += 2 {
			b := append(pageContent(spec, start), pageContent(spec, start+1)...)
			if err = p.WriteAt(bg, start, b); err == nil && start%4 == 2 {
				if err = p.Sync(bg); err == nil {
					synced = start + 2
				}
			}
		}
		found := []*simSSD{s[0].restart(rng), s[1].restart(rng), s[2].restart(rng)}
		p, err = createPages(bg, d, targetsOf(found...), spec)
		require.NoError(t, err)
		require.True(t, p.Resumed())
		b := make([]byte, spec.PageBytes)
		for start := range synced {
			require.NoError(t, p.ReadAt(bg, start, b))
			require.True(t, bytes.Equal(pageContent(spec, start), b), "page %d of %d", start, synced)
			sum := binary.LittleEndian.Uint32(p.parts[start%3].table[4*(start/3):])
			require.Equal(t, crc32.Checksum(b, castagnoli), sum)
			kept++
		}
		scrap(s...)
		scrap(found...)
	}
	require.Positive(t, kept)
}
