package gpuio

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/ssdmodel"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// wantUnit is a command that a set must take.
type wantUnit struct {
	ssd         int
	lba, blocks int64
	rows        []int // indices
}

// wantRuns computes a set's commands in another way than the kernels do: it marks what is read on a
// map of each SSD, and takes the stretches of marks within windows.
func wantRuns(l Layout, ids, offs []int64, window int64, reach uint32) []wantUnit {
	var out []wantUnit
	for s := range int(l.SSDs) {
		marked := map[int64][]int{}
		for i := offs[s]; i < offs[s+1]; i++ {
			_, lba, _, _ := l.Locate(ids[i])
			g := int64(lba) / int64(l.LBAsPerRow)
			marked[g] = append(marked[g], int(i))
		}
		groups := make([]int64, 0, len(marked))
		for g := range marked {
			groups = append(groups, g)
		}
		slices.Sort(groups)
		perWindow := window / int64(l.LBAsPerRow)
		for _, g := range groups {
			lba := g * int64(l.LBAsPerRow)
			before := g - 1
			for before >= 0 && (g-before)*int64(l.LBAsPerRow) <= int64(reach)-int64(l.LBAsPerRow) &&
				marked[before] == nil {
				before--
			}
			if marked[before] != nil &&
				before/perWindow == g/perWindow {
				u := &out[len(out)-1]
				u.blocks += (g - before) * int64(l.LBAsPerRow)
				u.rows = append(u.rows, marked[g]...)
			} else {
				out = append(out, wantUnit{s, lba, int64(l.LBAsPerRow), marked[g]})
			}
		}
	}
	return out
}

// wantOf is the same for a set of any form of an engine.
func wantOf(e *async, coalesced bool, s *testSet) (units []wantUnit) {
	l := e.layout
	if coalesced {
		return wantRuns(l, s.ids, s.rs.SSDOffset, int64(e.window), e.reach)
	}
	m := l.ReadBytes()
	if lim := smallestTransfer(e.ssds); m > lim {
		m = lim / max(int(l.LBABytes), 4096) * max(int(l.LBABytes), 4096)
	}
	for i, id := range s.ids {
		ssd, lba, blocks, _ := l.Locate(id)
		for blocks > 0 {
			n := min(int(blocks), m/int(l.LBABytes))
			units = append(units, wantUnit{ssd, int64(lba), int64(n), []int{i}})
			lba += nvme.LBA(n)
			blocks -= uint32(n)
		}
	}
	return units
}

func smallestTransfer(ssds []*SSD) int {
	m := 2 << 20 // one page of PRP list
	for _, d := range ssds {
		if t := d.Ctrl.MaxTransferBytes(); t > 0 {
			m = min(m, t)
		}
	}
	return m
}

func totals(units []wantUnit) (blocks, shared int64) {
	for _, u := range units {
		blocks += u.blocks
		if len(u.rows) > 1 {
			shared += int64(len(u.rows))
		}
	}
	return blocks, shared
}

// drawRows draws rows of a layout in one of several ways.
func drawRows(rng *rand.Rand, rows int64, n int, how string) []int64 {
	ids := make([]int64, n)
	switch how {
	case "again": // few rows, each many times
		for i := range ids {
			ids[i] = rng.Int64N(min(rows, 7))
		}
	case "stretch": // neighbours, in any order
		off := rng.Int64N(rows)
		for i := range ids {
			ids[i] = (off + int64(i)) % rows
		}
		rng.Shuffle(n, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	case "distinct":
		perm := rng.Perm(int(rows))
		ids = ids[:min(n, len(perm))]
		for i := range ids {
			ids[i] = int64(perm[i])
		}
	default: // random
		for i := range ids {
			ids[i] = rng.Int64N(rows)
		}
	}
	return ids
}

var unitRowBytes = []int{16, 64, 100, 128, 400, 512, 602 * 4, 768 * 4, 1024, 2408, 3072, 4096, 4100,
	8192, 12288, 65536}

// TestUnits is metamorphic: sets of rows of all sizes, with and without coalescing, on SSDs that
// move much or little per command, by async and sync, give the rows' bytes and write nothing else;
// commands and blocks are those of an independent count, and the SSDs have counted the same
// commands.
func TestUnits(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 4 * len(unitRowBytes)
	if wide.Lean() || raceEnabled {
		rounds = len(unitRowBytes)
	}
	var saved, parts int64
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		o := rigOptions{
			ssds: pick(1, 1, 2, 3), lba: pick(512, 4096),
			rowBytes: unitRowBytes[round%len(unitRowBytes)],
			rows:     int64(pick(1, 7, 100, 700)), ram: true, sms: pick(1, 2, 3),
		}
		mdts, ooo := 1+rng.IntN(8), rng.IntN(3) == 0
		if o.rowBytes > 8192 && round < len(unitRowBytes) {
			mdts = 1 // some rows take several commands in each run
		}
		o.proxy = func(c *proxy.Config) { c.MDTS, c.OutOfOrder = mdts, ooo }
		ao := AsyncOptions{Depth: pick(1, 3, 31, 32, 33, 200), QueuePairs: pick(0, 0, 1, 3),
			Blocks:        pick(1, 2, 8, 32),
			CoalesceBytes: pick(-1, 0, 0, 1, 4096, 16384, 100_000, 1<<20),
			Speed:         Speed{Commands: 1, Bytes: float64(pick(0, 500, 1500, 2300))}}
		ao.QueuePairs = min(ao.QueuePairs, ao.Depth)
		sync := rng.IntN(5) == 0
		n, sets := pick(1, 5, 31, 64, 300, 900), pick(1, 3, 6)
		if o.rowBytes > 16384 {
			n = min(n, 64)
			o.rows = min(o.rows, 100)
		}
		how := []string{"random", "random", "again", "stretch", "distinct"}[rng.IntN(5)]
		stride := int64(o.rowBytes + pick(0, 0, 4, 3, 512))
		if o.rowBytes%4096 == 0 && rng.IntN(2) == 0 {
			stride = int64(o.rowBytes + pick(0, 4096))
		}
		offset := int64(pick(0, 0, 4, 8192, 2))
		name := fmt.Sprintf(
			"seed=%d/%d ssds=%d lba=%d row=%d rows=%d mdts=%d sync=%v n=%d sets=%d %s stride=%d+%d %+v",
			seed, round, o.ssds, o.lba, o.rowBytes, o.rows, mdts, sync, n, sets, how, offset,
			stride, ao)
		t.Run(name, func(t *testing.T) {
			r := newRig(t, o)
			var rd Reader
			if sync {
				rd = r.sync(AsyncOptions{Depth: ao.Depth, QueuePairs: ao.QueuePairs,
					CoalesceBytes: ao.CoalesceBytes})
			} else {
				rd = r.reader(NewAsync(r.dev, r.ssds, r.layout, ao))
			}
			e := rd.(*async)
			before := int64(0)
			for _, s := range r.ssds {
				before += smartReads(t, s)
			}
			ctx := testCtx(t)
			var all []*testSet
			var pend []Pending
			for range sets {
				s := r.setOf(rng, drawRows(rng, r.layout.Rows, n, how), stride, offset)
				p, err := rd.Submit(ctx, s.rs)
				require.NoError(t, err)
				all, pend = append(all, s), append(pend, p)
			}
			var commands, bytes, shared int64
			reached := true // by the SSDs
			for _, i := range rng.Perm(sets) {
				s := all[i]
				reached = reached && s.rs.Dst.Bytes() != nil
				st, err := pend[i].Wait(ctx)
				require.NoError(t, err)
				require.EqualValues(t, len(s.ids), st.Rows)
				coalesced := !sync && e.coalesces(s.rs)
				require.Equal(t, coalesced, coalesced && e.partBlocks == 0)
				units := wantOf(e, coalesced, s)
				blocks, joined := totals(units)
				if ao.CoalesceBytes < 0 || sync {
					require.False(t, coalesced)
				}
				require.EqualValues(t, len(units), st.Commands)
				require.Equal(t, blocks*int64(o.lba), st.Bytes)
				commands, bytes = commands+st.Commands, bytes+st.Bytes
				if coalesced {
					shared += joined
					saved += int64(len(s.ids) - len(units))
				} else {
					parts += int64(len(units) - len(s.ids))
				}
				s.check(nil)
				s.free(rd)
			}
			st := rd.Stats()
			require.Equal(t, commands, st.Commands)
			require.Equal(t, bytes, st.Bytes)
			require.Equal(t, shared, st.Coalesced)
			require.Equal(t, commands, st.Direct+st.Staged)
			require.Equal(t, commands, st.Latency.Count())
			after, ssdBytes := int64(0), int64(0)
			for i, s := range r.ssds {
				after += smartReads(t, s)
				ssdBytes += st.PerSSD[i].Bytes
			}
			require.Equal(t, commands, after-before)
			require.Equal(t, bytes, ssdBytes)
			if reached && shared > 0 && how == "distinct" && o.rowBytes%4096 == 0 &&
				stride%4096 == 0 && offset%4096 == 0 {
				require.Zero(t, st.Staged, "rows of whole pages need no copy")
			}
			idle(t, rd)
		})
	}
	t.Logf("%d commands saved, %d more for parts", saved, parts)
	if rounds > len(unitRowBytes) && !t.Failed() {
		require.Positive(t, saved)
		require.Positive(t, parts)
	}
}

// TestUnitsOnCPU is the same for the stack whose reads the CPU makes.
func TestUnitsOnCPU(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 3 * len(unitRowBytes)
	if wide.Lean() || raceEnabled {
		rounds = len(unitRowBytes)
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		o := rigOptions{ssds: pick(1, 2, 3), lba: pick(512, 4096),
			rowBytes: unitRowBytes[round%len(unitRowBytes)], rows: int64(pick(1, 7, 100, 700)),
			ram: rng.IntN(2) == 0, sms: 2}
		co := CPUOptions{Depth: pick(1, 3, 64, 256), Threads: pick(0, 1, 3),
			Engine: []string{"", "pread"}[rng.IntN(2)], CoalesceBytes: pick(-1, 0, 0, 1, 4096,
				100_000, 1<<20),
			Speed: Speed{1, float64(pick(0, 500, 10_000, 100_000)), true}}
		n, sets := pick(1, 5, 31, 300, 900), pick(1, 3)
		if o.rowBytes > 16384 {
			n, o.rows = min(n, 64), min(o.rows, 100)
		}
		how := []string{"random", "again", "stretch", "distinct"}[rng.IntN(4)]
		t.Run(fmt.Sprintf("seed=%d/%d %+v %+v n=%d %s", seed, round, o, co, n, how),
			func(t *testing.T) {
				r := newRig(t, o)
				rd := r.reader(NewCPU(r.dev, r.ssds, r.layout, co))
				e := rd.(*hostReader)
				if e.units.window != 0 {
					require.EqualValues(t, max(r.layout.ReadBytes(),
						co.Speed.reachBytes(r.layout.ReadBytes()))/o.lba, e.units.reach)
				}
				ctx := testCtx(t)
				var commands, shared int64
				var all []*testSet
				var pend []Pending
				for range sets {
					s := r.setOf(rng, drawRows(rng, r.layout.Rows, n, how),
						int64(o.rowBytes+pick(0, 3, 4096)), int64(pick(0, 2, 4096)))
					p, err := rd.Submit(ctx, s.rs)
					require.NoError(t, err)
					all, pend = append(all, s), append(pend, p)
				}
				for i, s := range all {
					st, err := pend[i].Wait(ctx)
					require.NoError(t, err)
					require.EqualValues(t, len(s.ids), st.Rows)
					want := int64(len(s.ids))
					if e.units.pays(r.layout, s.rs.SSDOffset, co.CoalesceBytes) {
						units := wantRuns(r.layout, s.ids, s.rs.SSDOffset, int64(e.units.window),
							e.units.reach)
						_, joined := totals(units)
						want, shared = int64(len(units)), shared+joined
					}
					require.Equal(t, want, st.Commands)
					commands += want
					s.check(nil)
					s.free(rd)
				}
				st := rd.Stats()
				require.Equal(t, commands, st.Commands)
				require.Equal(t, shared, st.Coalesced)
				perSSD := int64(0)
				for _, x := range st.PerSSD {
					perSSD += x.Bytes
				}
				require.Equal(t, st.Bytes, perSSD)
			})
	}
}

// TestUnitFailuresOnCPU: a backing that has become too short fails the rows of the reads that end
// behind it; rows that do not exist fail alone.
func TestUnitFailuresOnCPU(t *testing.T) {
	for _, engine := range []string{"", "pread"} {
		for _, bytes := range []int{-1, 4096, 65536} {
			const rows, rowBytes = 256, 256
			r := newRig(t, rigOptions{ssds: 1, lba: 4096, rowBytes: rowBytes, rows: rows})
			rd := r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Engine: engine, Depth: 8,
				CoalesceBytes: bytes, Retries: -1}))
			rng := rand.New(rand.NewPCG(7, 7))
			s := r.setOf(rng, drawRows(rng, rows, 200, "distinct"), rowBytes, 0)
			half := int64(rigDataStart + rows*rowBytes/4096/2)
			require.NoError(t, os.Truncate(r.ssds[0].BackingPath, half*4096))
			gone := map[int64]bool{}
			hostmem.View[int64](s.rowBuf.Bytes())[3] = rows
			s.ids[3] = rows
			gone[rows] = true
			good := &testSet{ids: append(append([]int64(nil), s.ids[:3]...), s.ids[4:]...),
				rs: &ReadSet{SSDOffset: []int64{0, 199}}}
			if bytes > 0 {
				for _, u := range wantRuns(r.layout, good.ids, good.rs.SSDOffset,
					int64(rd.(*hostReader).units.window), rd.(*hostReader).units.reach) {
					if u.lba+u.blocks+rigDataStart > half {
						for _, i := range u.rows {
							gone[good.ids[i]] = true
						}
					}
				}
			} else {
				for _, id := range good.ids {
					if _, lba, _, _ := r.layout.Locate(id); int64(lba)+rigDataStart >= half {
						gone[id] = true
					}
				}
			}
			ctx := testCtx(t)
			p, err := rd.Submit(ctx, s.rs)
			require.NoError(t, err)
			st, err := p.Wait(ctx)
			var set *SetError
			require.ErrorAs(t, err, &set)
			require.EqualValues(t, len(gone), set.Failed)
			require.EqualValues(t, 200-len(gone), st.Rows)
			for _, f := range set.First {
				require.True(t, gone[f.Row], "%v", f)
			}
			s.check(gone)
			s.free(rd)
		}
	}
}

// TestScatter: neighbours that are whole pages go straight to their places, whatever these are, as
// long as the places are pages too and no row is wanted twice.
func TestScatter(t *testing.T) {
	for _, rowBytes := range []int{4096, 8192, 12288, 65536} {
		for _, lba := range []int{512, 4096} {
			for _, limit := range []int{2 * rowBytes, 128 << 10, 1 << 20} {
				r := newRig(t, rigOptions{ssds: 2, lba: lba, rowBytes: rowBytes, rows: 120,
					ram: true, proxy: func(c *proxy.Config) { c.MDTS = 8 }})
				rd := r.reader(NewAsync(r.dev, r.ssds, r.layout,
					AsyncOptions{Depth: 9, CoalesceBytes: limit}))
				rng := rand.New(rand.NewPCG(4, uint64(limit)))
				for _, c := range []struct {
					how            string
					stride, offset int64
					direct         bool
				}{
					{"distinct", 0, 0, true}, {"distinct", 4096, 8192, true},
					{"stretch", 0, 4096, true},
					{"distinct", 0, 512, false}, {"distinct", 4, 0, false}, {"again", 0, 0, false},
				} {
					before := rd.Stats()
					s := r.setOf(rng, drawRows(rng, 120, 80, c.how), int64(rowBytes)+c.stride,
						c.offset)
					s.read(rd)
					st := rd.Stats()
					require.Greater(t, st.Coalesced, before.Coalesced)
					require.Equal(t, c.direct && s.rs.Dst.Bytes() != nil,
						st.Staged == before.Staged, "%d-byte rows, %+v: %d commands with a copy",
						rowBytes, c, st.Staged-before.Staged)
					s.free(rd)
				}
			}
		}
	}
}

// TestCoalesceAuto: rows share commands where that saves some, and not where it does not.
func TestCoalesceAuto(t *testing.T) {
	for _, c := range []struct {
		rowBytes int
		density  float64
		want     bool
	}{
		{512, 0.5, true}, {512, 0.05, true}, {512, 0.003, false}, // 8 rows of 128 floats to an LBA
		{4096, 0.2, true}, {4096, 0.07, true}, {4096, 0.04, false},
		{64, 0.002, true}, {8192, 0.1, true}, {8192, 0.03, false},
	} {
		t.Run(fmt.Sprintf("row=%d/density=%v", c.rowBytes, c.density), func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 2, lba: 4096, rowBytes: c.rowBytes, rows: 8000,
				ram: true})
			rd := r.reader(NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{}))
			e := rd.(*async)
			rng := rand.New(rand.NewPCG(5, 6))
			s := r.setOf(rng, drawRows(rng, 8000, int(8000*c.density), "distinct"),
				int64(c.rowBytes), 0)
			defer s.free(rd)
			st := s.read(rd)
			units := wantRuns(r.layout, s.ids, s.rs.SSDOffset, int64(e.window), e.reach)
			if !c.want {
				require.EqualValues(t, len(s.ids), st.Commands)
				require.Zero(t, rd.Stats().Coalesced)
				return
			}
			require.EqualValues(t, len(units), st.Commands)
			require.Less(t, float64(st.Commands), 0.97*float64(len(s.ids)))
			// The expected commands came.
			want := expectedCommands(r.layout, s.rs.SSDOffset, e.window, e.reach)
			require.InDelta(t, want, float64(st.Commands), 5+0.1*want)
		})
	}
}

// TestUnitFailures: a command that fails takes all rows of its unit with it and no other, each with
// its number, index and the command's blocks; rows that cannot be read do not disturb their
// neighbours.
func TestUnitFailures(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	for round := range 24 {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		rowBytes := []int{64, 512, 700, 4096, 8192, 20480}[round%6]
		t.Run(fmt.Sprintf("seed=%d/%d/row=%d", seed, round, rowBytes), func(t *testing.T) {
			const ssds, rows = 2, 300
			lba := pick(512, 4096)
			l, err := NewLayout(rows, rowBytes, ssds, lba)
			require.NoError(t, err)
			first := rng.Int64N(l.LBAsOn(0))
			last := min(first+int64(rng.IntN(6)), l.LBAsOn(0)-1)
			retried := rng.IntN(2) == 0
			fault := fmt.Sprintf("error(op=read,lba=%d-%d,sct=2,sc=0x81,dnr=%d)",
				rigDataStart+first, rigDataStart+last, map[bool]int{true: 0, false: 1}[retried])
			r := newRig(t, rigOptions{ssds: ssds, lba: lba, rowBytes: rowBytes, rows: rows,
				ram: true, sms: 2, faults: fault,
				proxy: func(c *proxy.Config) { c.MDTS = pick(1, 2, 5) }})
			stack := rng.IntN(4)
			var rd Reader
			if stack == 0 {
				rd = r.sync(AsyncOptions{Depth: 16, Retries: 1})
			} else {
				rd = r.reader(NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: pick(1, 8, 64),
					Retries: 1, CoalesceBytes: pick(-1, 4096, 16384, 1<<20)}))
			}
			e := rd.(*async)
			ids := drawRows(rng, rows, pick(20, 100, 500), "random")
			s := r.setOf(rng, ids, int64(rowBytes), 0)
			defer s.free(rd)
			// Some rows and positions that do not exist.
			bad := map[int]bool{}
			rowsMem, posMem := hostmem.View[int64](s.rowBuf.Bytes()), make([]byte, s.posBuf.Size())
			for i, p := range s.pos {
				binary.LittleEndian.PutUint32(posMem[4*i:], p)
			}
			for range rng.IntN(4) {
				i := rng.IntN(len(s.ids))
				if bad[i] {
					continue // another change could make it good again
				}
				bad[i] = true
				if rng.IntN(2) == 0 {
					binary.LittleEndian.PutUint32(posMem[4*i:], 1<<30)
				} else {
					// the last: of the other SSD
					s.ids[i] = []int64{-1, rows, 1 << 60, s.ids[i] ^ 1}[rng.IntN(4)]
					rowsMem[i] = s.ids[i]
				}
			}
			r.move(s.posBuf, posMem, true)
			coalesced := stack != 0 && e.coalesces(s.rs)
			good := *s
			good.ids, good.rs = nil, &ReadSet{SSDOffset: []int64{0}}
			var index []int // of good rows
			for ssd := range ssds {
				for i := s.rs.SSDOffset[ssd]; i < s.rs.SSDOffset[ssd+1]; i++ {
					if !bad[int(i)] {
						good.ids = append(good.ids, s.ids[i])
						index = append(index, int(i))
					}
				}
				good.rs.SSDOffset = append(good.rs.SSDOffset, int64(len(good.ids)))
			}
			lost := map[int]bool{}
			for _, u := range wantOf(e, coalesced, &good) {
				if u.ssd == 0 && u.lba <= last && u.lba+u.blocks > first {
					for _, i := range u.rows {
						lost[index[i]] = true
					}
				}
			}
			ctx := testCtx(t)
			p, err := rd.Submit(ctx, s.rs)
			require.NoError(t, err)
			st, err := p.Wait(ctx)
			require.NoError(t, ctx.Err())
			require.EqualValues(t, len(s.ids)-len(lost)-len(bad), st.Rows)
			if len(lost)+len(bad) == 0 {
				require.NoError(t, err)
			} else {
				var set *SetError
				require.ErrorAs(t, err, &set)
				require.EqualValues(t, len(lost)+len(bad), set.Failed)
				require.Len(t, set.First, min(len(lost)+len(bad), maxFails))
				numbers := map[int64]int{}
				for i := range lost {
					numbers[s.ids[i]]++
				}
				for i := range bad {
					numbers[s.ids[i]]++
				}
				for _, f := range set.First {
					numbers[f.Row]--
					require.GreaterOrEqual(t, numbers[f.Row], 0, "row %d failed too often: %v",
						f.Row, err)
					var status *nvme.StatusError
					if errors.As(f, &status) {
						_, off, n, _ := l.Locate(f.Row)
						lo, hi := int64(status.LBA)-rigDataStart, int64(status.LBA)-rigDataStart+
							int64(status.Blocks)
						require.True(t, lo <= last && hi > first,
							"%v: blocks %d-%d, faults in %d-%d", f, lo, hi, first, last)
						require.True(t, lo < int64(off)+int64(n) && hi > int64(off),
							"%v: not the row's", f)
					}
				}
			}
			// Rows that are not lost are right, and other bytes are as they were.
			gone := map[int64]bool{}
			for i := range lost {
				gone[s.ids[i]] = true
			}
			for i := range bad {
				gone[s.ids[i]] = true
			}
			s.check(gone)
			idle(t, rd)
		})
	}
}

// TestCoalesceKernel compares the kernel with its rule, applied to a stable sort.
func TestCoalesceKernel(t *testing.T) {
	slab, err := hostmem.Alloc(1<<20, "coalesce test")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(slab)) }()
	for round := range 400 {
		rng := rand.New(rand.NewPCG(11, uint64(round)))
		ssds, per := 1+rng.IntN(4), 1+rng.IntN(4)
		l, err := NewLayout(1+rng.Int64N([]int64{5, 300, 70_000, 1 << 40}[rng.IntN(4)]),
			[]int{16, 100, 512, 1024, 4096, 4100, 12288}[rng.IntN(7)], ssds,
			[]int{512, 4096}[rng.IntN(2)])
		require.NoError(t, err)
		used := 0
		take := func(n int) cuda.DevicePtr {
			p := addr(slab) + cuda.DevicePtr(used)
			used += (n + 63) &^ 63
			return p
		}
		clear(slab)
		offs := []int64{rng.Int64N(3)}
		for range ssds {
			offs = append(offs, offs[len(offs)-1]+rng.Int64N([]int64{1, 10, 300}[rng.IntN(3)]))
		}
		n := int(offs[ssds])
		sets := take(setStateBytes)
		set := at[setState](sets, 0)
		*set = setState{Rows: take(n * 8), Pos: take(n * 4), Offsets: take((ssds + 1) * 8),
			DstLimit: 1 << 40, DstStride: 1 << 20,
			Remaining: take(ssds * per * 4), Units: take(2 * ssds * 8), Runs: take((n + ssds) * 4),
			Layout: l, Rotate: rng.Uint32N(9)}
		copy(view[int64](set.Offsets, 0, int64(ssds+1)), offs)
		rows, pos := view[int64](set.Rows, 0, int64(n)), view[uint32](set.Pos, 0, int64(n))
		bad := make([]bool, n)
		slots := make([]int64, n)
		for s := range ssds {
			area := l.RowsOn(s)
			if rng.IntN(2) == 0 {
				area = min(area, offs[s+1]-offs[s]+1)
			}
			for i := offs[s]; i < offs[s+1]; i++ {
				if area > 0 {
					slots[i] = rng.Int64N(area)
				}
				rows[i] = slots[i]*int64(ssds) + int64(s)
				switch {
				case area == 0 || rng.IntN(50) == 0:
					rows[i], bad[i] = []int64{-1, l.Rows, rows[i] - 1<<60}[rng.IntN(3)], true
				case rng.IntN(50) == 0:
					pos[i], bad[i] = 1<<31, true
				}
			}
		}
		p := &coalesceParams{Sets: sets, KeysA: take(n * 8), KeysB: take(n * 8), IdxA: take(n * 4),
			IdxB:         take(n * 4),
			QueuesPerSSD: uint32(per), Window: uint32((1 + rng.IntN(9)) * int(l.LBAsPerRow)),
			Passes: l.passes(), Reach: uint32((1 + rng.IntN(9)) * int(l.LBAsPerRow))}
		set.Order = []cuda.DevicePtr{p.IdxA, p.IdxB, take(n * 4)}[rng.IntN(3)]
		require.Less(t, used, len(slab))
		for b := range 2 {
			require.NoError(t, coalesceKernel(&cuda.Block{Index: b, Blocks: 2, Threads: 32}, p))
		}
		for s := range ssds {
			var want []uint32
			for i := offs[s]; i < offs[s+1]; i++ {
				want = append(want, uint32(i))
			}
			slices.SortStableFunc(want, func(a, b uint32) int {
				if bad[a] || bad[b] {
					return cmp.Compare(map[bool]int{true: 1}[bad[a]], map[bool]int{true: 1}[bad[b]])
				}
				return cmp.Compare(slots[a], slots[b])
			})
			require.Equal(t, want,
				append([]uint32(nil), view[uint32](set.Order, offs[s], offs[s+1])...),
				"round %d SSD %d", round, s)
			lba := func(i uint32) int64 {
				_, off, _, _ := l.Locate(rows[i])
				return int64(off)
			}
			var heads []uint32
			for k, i := range want {
				head := k == 0 || bad[i] || bad[want[k-1]]
				if !head {
					a, b := lba(want[k-1]), lba(i)
					head = a/int64(p.Window) != b/int64(p.Window) ||
						b > a+int64(p.Reach)
				}
				if head {
					heads = append(heads, uint32(offs[s])+uint32(k))
				}
			}
			from, to := *at[int64](set.Units, 2*s), *at[int64](set.Units, 2*s+1)
			require.Equal(t, offs[s]+int64(s), from)
			require.Equal(t, heads, append([]uint32(nil), view[uint32](set.Runs, from, to)...),
				"round %d SSD %d", round, s)
			require.EqualValues(t, offs[s+1], *at[uint32](set.Runs, int(to)))
			left := uint32(0)
			for q := range per {
				left += *at[uint32](set.Remaining, s*per+q)
			}
			require.EqualValues(t, len(heads), left)
		}
	}
	set := at[setState](addr(slab), 0)
	*set = setState{Layout: Layout{LBAsPerRow: 2}}
	for want, p := range map[string]coalesceParams{"9 passes": {Passes: 9, Window: 2},
		"window of 0": {}, "window of 3": {Window: 3}} {
		p.Sets = addr(slab)
		require.ErrorContains(t, coalesceKernel(&cuda.Block{Blocks: 1, Threads: 32}, &p), want)
	}
}

// TestCoalesceConcurrent has goroutines read sets of very different sizes at the same time,
// coalesced and not, so that slots change form and their memory grows while others read.
func TestCoalesceConcurrent(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 4096, rowBytes: 512, rows: 4000, ram: true, sms: 2})
	rd := r.reader(NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 16}))
	ctx := testCtx(t)
	var wg sync.WaitGroup
	var sets []*testSet
	rounds := 12
	if wide.Lean() || raceEnabled {
		rounds = 5
	}
	for g := range 4 {
		rng := rand.New(rand.NewPCG(8, uint64(g)))
		var mine []*testSet
		for _, n := range []int{3, 900, 20, 2500} {
			mine = append(mine, r.newSet(rng, n, 512, 0))
		}
		sets = append(sets, mine...)
		wg.Go(func() {
			for i := range rounds {
				s := mine[(i+g)%len(mine)]
				s.poison()
				p, err := rd.Submit(ctx, s.rs)
				if err == nil {
					_, err = p.Wait(ctx)
				}
				if err != nil {
					t.Error(err)
					return
				}
				s.check(nil)
			}
		})
	}
	wg.Wait()
	st := rd.Stats()
	require.Positive(t, st.Coalesced)
	require.Less(t, st.Commands, st.Rows)
	idle(t, rd)
	freeSets(rd, sets)
}

// TestUnitChaos has random faults hit commands of several rows, and rows of several commands: after
// aborts, new queue pairs and resets every row is right or named.
func TestUnitChaos(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 12
	if wide.Lean() || raceEnabled {
		rounds = 5
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		faults := chaosFaults(rng)
		rowBytes := []int{512, 200, 4096, 20480, 9000}[round%5]
		t.Run(fmt.Sprintf("seed=%d/%d row=%d %s", seed, round, rowBytes, faults),
			func(t *testing.T) {
				r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: rowBytes, rows: 300,
					ram: rng.IntN(2) == 0, sms: 1 + rng.IntN(3), faults: faults,
					proxy: func(c *proxy.Config) { c.MDTS = 1 + rng.IntN(2)*rng.IntN(6) }})
				var rd Reader
				if rng.IntN(4) == 0 {
					rd = r.sync(AsyncOptions{Depth: 2 + rng.IntN(30), QueuePairs: 1 + rng.IntN(2),
						Timeout: 50 * time.Millisecond, Retries: 5})
				} else {
					rd = r.async(AsyncOptions{Depth: 2 + rng.IntN(30), QueuePairs: 1 + rng.IntN(2),
						Timeout: 50 * time.Millisecond, Retries: 5,
						CoalesceBytes: []int{4096, 1 << 20}[rng.IntN(2)]})
				}
				chaos(t, r, rd, seed)
			})
	}
}

// BenchmarkCoalesce compares rows with and without coalescing, on LBAs of 4096 bytes: rows of 128
// floats and rows that fill an LBA, on an SSD in memory, where a command costs next to nothing, and
// on one of 50,000 commands and 400 MB a second.
func BenchmarkCoalesce(b *testing.B) {
	const n = 4096
	slow, err := ssdmodel.Load("slow")
	require.NoError(b, err)
	for _, model := range []*ssdmodel.Model{nil, slow} {
		for _, rowBytes := range []int{512, 4096} {
			for _, density := range []float64{0.01, 0.05, 0.25, 0.9} {
				for _, bytes := range []int{-1, 0} {
					b.Run(fmt.Sprintf("ssd=%s/row=%d/density=%v/coalesce=%v",
						map[bool]string{true: "ram", false: "slow"}[model == nil], rowBytes,
						density, bytes == 0), func(b *testing.B) {
						r := newRig(b, rigOptions{ssds: 1, lba: 4096, rowBytes: rowBytes,
							rows: int64(n / density), ram: true,
							proxy: func(c *proxy.Config) { c.Model = model }})
						rd := r.reader(NewAsync(r.dev, r.ssds, r.layout,
							AsyncOptions{CoalesceBytes: bytes}))
						rng := rand.New(rand.NewPCG(1, 2))
						s := r.setOf(rng, drawRows(rng, r.layout.Rows, n, "distinct"),
							int64(rowBytes), 0)
						defer s.free(rd)
						ctx := testCtx(b)
						var st ReadStats
						for b.Loop() {
							p, err := rd.Submit(ctx, s.rs)
							if err == nil {
								st, err = p.Wait(ctx)
							}
							if err != nil {
								b.Fatal(err)
							}
						}
						b.ReportMetric(float64(st.Commands)/float64(st.Rows), "cmds/row")
						b.ReportMetric(float64(st.Bytes)/float64(st.Rows), "bytes/row")
						b.ReportMetric(float64(st.Rows)*float64(b.N)/b.Elapsed().Seconds(),
							"rows/s")
					})
				}
			}
		}
	}
}

// BenchmarkCoalesceKernel is the sort of one SSD's bucket alone.
func BenchmarkCoalesceKernel(b *testing.B) {
	for _, n := range []int{1 << 12, 1 << 20} {
		b.Run(fmt.Sprintf("rows=%d", n), func(b *testing.B) {
			l, err := NewLayout(1<<24, 512, 1, 4096)
			require.NoError(b, err)
			slab, err := hostmem.Alloc(int64(n)*48+1<<16, "coalesce benchmark")
			require.NoError(b, err)
			defer func() { require.NoError(b, hostmem.Free(slab)) }()
			used := 0
			take := func(n int) cuda.DevicePtr {
				p := addr(slab) + cuda.DevicePtr(used)
				used += (n + 63) &^ 63
				return p
			}
			sets := take(setStateBytes)
			*at[setState](sets, 0) = setState{Rows: take(n * 8), Pos: take(n * 4),
				Offsets: take(16), DstLimit: 1 << 40, DstStride: 512,
				Remaining: take(4), Units: take(16), Runs: take((n + 1) * 4), Layout: l}
			set := at[setState](sets, 0)
			*at[int64](set.Offsets, 1) = int64(n)
			rng := rand.New(rand.NewPCG(1, 2))
			for i := range n {
				*at[int64](set.Rows, i) = rng.Int64N(l.Rows)
			}
			p := &coalesceParams{Sets: sets, KeysA: take(n * 8), KeysB: take(n * 8),
				IdxA: take(n * 4), IdxB: take(n * 4), QueuesPerSSD: 1, Window: 32,
				Passes: l.passes(), Reach: 8}
			set.Order = p.IdxB
			for b.Loop() {
				if err := coalesceKernel(&cuda.Block{Blocks: 1, Threads: sortThreads},
					p); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/row")
		})
	}
}

// TestTooManyUnits: units have 32 bits, and a set that needs more is refused before anything is
// done.
func TestTooManyUnits(t *testing.T) {
	for _, c := range []struct {
		rowBytes int
		rows     int64
		want     string
	}{
		{20480, 1<<32/3 + 1, "in 3 commands each"},
		{512, 1<<32 - 1, "at most 4294967294 where rows share commands"},
		{512, 1 << 32, "at most 4294967295"},
	} {
		t.Run(c.want, func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: c.rowBytes, rows: 20, ram: true,
				proxy: func(c *proxy.Config) { c.MDTS = 1 }})
			rd := r.async(AsyncOptions{Depth: 4, CoalesceBytes: 4096})
			s := r.newSet(rand.New(rand.NewPCG(1, 1)), 10, int64(c.rowBytes), 0)
			rs := *s.rs
			rs.SSDOffset = []int64{0, c.rows}
			_, err := rd.Submit(testCtx(t), &rs)
			require.Equal(t, errs.Usage, errs.ClassOf(err))
			require.ErrorContains(t, err, c.want)
			s.read(rd) // and the reader is as it was
			s.free(rd)
		})
	}
}

// TestChooseUnits: how rows become commands, by what one command may move.
func TestChooseUnits(t *testing.T) {
	const k = 1024
	for _, c := range []struct {
		rowBytes, lba, limit, coalesce, depth int
		want                                  unitRule
	}{
		{512, 4096, 128 * k, 0, 256, unitRule{1, 0, 32, 1}},
		{512, 512, 128 * k, 0, 256, unitRule{1, 0, 256, 8}},
		// less staging for each of more commands
		{512, 512, 128 * k, 0, 1024, unitRule{1, 0, 64, 8}},
		{512, 512, 128 * k, 0, 1 << 16, unitRule{1, 0, 1, 8}},    // rows of one LBA still share
		{512, 512, 8 * k, 1 << 20, 256, unitRule{1, 0, 16, 8}},   // no more than a command moves
		{512, 512, 128 * k, 1, 256, unitRule{1, 0, 1, 8}},        // no less than a row
		{512, 512, 128 * k, -1, 256, unitRule{1, 0, 0, 0}},       // never
		{12288, 4096, 128 * k, 0, 256, unitRule{1, 0, 30, 3}},    // whole rows: ten
		{128 * k, 4096, 128 * k, 0, 256, unitRule{1, 0, 32, 32}}, // the same row twice
		{65536, 512, 8 * k, 0, 256, unitRule{8, 16, 0, 0}},
		{65537, 512, 8 * k, 0, 256, unitRule{9, 16, 0, 0}},
		{20000, 512, 10 * k, 0, 256, unitRule{3, 16, 0, 0}}, // parts of whole pages
		{4 << 20, 4096, 2 << 20, 0, 256, unitRule{2, 512, 0, 0}},
	} {
		l, err := NewLayout(1000, c.rowBytes, 2, c.lba)
		require.NoError(t, err)
		got, err := chooseUnits(l, c.limit, true, c.coalesce, c.depth, Speed{})
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%+v", c)
		if c.want.window > 0 { // a stack that does not share
			got, err = chooseUnits(l, c.limit, false, c.coalesce, c.depth, Speed{})
			require.NoError(t, err)
			require.Equal(t, unitRule{parts: 1}, got)
		}
	}
	l, err := NewLayout(10, 65536, 1, 65536)
	require.NoError(t, err)
	_, err = chooseUnits(l, 32*k, true, 0, 256, Speed{})
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "use the cpu stack")
}

// TestReach: how far a command reaches, by what SSDs do: of 12 SSDs on one link, and of one.
func TestReach(t *testing.T) {
	for _, c := range []struct {
		name              string
		commands, bytes   float64
		lba, row, reaches int
	}{
		{"files of a virtual disk", 100e3, 1.9e9, 512, 1024, 24 << 10},
		{"files whose bytes are dear", 10e3, 20e6, 512, 512, 4096},
		{"files whose bytes cost nothing", 100e3, 1e12, 512, 512, 64 << 10},
		{"unknown", 0, 0, 512, 512, 4096},
		{"half known", 1e6, 0, 512, 512, 4096},
		{"not a number", math.NaN(), 1e9, 512, 512, 4096},
		{"flash", 700e3, 6.5e9, 512, 512, 4096},
		{"12 of flash on a link", 8.4e6, 24.8e9, 512, 512, 4096},
		{"3D XPoint", 4.9e6, 7.2e9, 512, 512, 2048},
		{"12 of 3D XPoint on a link", 44e6, 24.8e9, 512, 512, 512},
		{"slower than a row a command", 1e6, 1e6, 512, 512, 512},
		{"larger rows", 1.5e6, 7.2e9, 512, 2048, 4096},
		{"rows beyond it", 1.5e6, 1e9, 512, 8192, 8192},
		{"large blocks", 44e6, 24.8e9, 4096, 512, 4096},
	} {
		l, err := NewLayout(1000, c.row, 2, c.lba)
		require.NoError(t, err)
		u, err := chooseUnits(l, 128<<10, true, 0, 256,
			Speed{c.commands, c.bytes, strings.HasPrefix(c.name, "files")})
		require.NoError(t, err)
		require.Equal(t, c.reaches, int(u.reach)*c.lba, c.name)
	}
}
