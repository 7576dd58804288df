package stripe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
	"helios/nvme"
)

// always marks whenever it can.
func always(_, _ time.Duration) bool { return true }

const resumeBytes = 8 << 20

// junk is an image with something in every byte, so that what a write leaves out shows.
var junk = sync.OnceValue(func() []byte {
	b := make([]byte, resumeBytes)
	for i := range b[:4096] {
		b[i] = byte(0xa5 ^ i>>4)
	}
	for n := 4096; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
	return b
})

// junkSims are two SSDs full of it.
func junkSims() []*simSSD {
	return []*simSSD{{lba: 512, durable: copyImage(junk())}, {lba: 512, durable: copyImage(junk())}}
}

// often are the options of a load that reads a little at a time and marks after each.
func often(o LoadOptions) LoadOptions {
	o.Force, o.due, o.read = "SER0,SER1", always, 200<<10
	return o
}

// reseal changes both superblocks of an SSD at rest.
func reseal(t testing.TB, s *simSSD, change func(w *wireSuperblock)) {
	t.Helper()
	for _, start := range []int{0, len(s.durable) - superblockBytes} {
		resealOne(t, s, start, change)
	}
}

func resealOne(t testing.TB, s *simSSD, start int, change func(w *wireSuperblock)) {
	t.Helper()
	b := s.durable[start : start+superblockBytes]
	var w wireSuperblock
	_, err := binary.Decode(b, binary.LittleEndian, &w)
	require.NoError(t, err)
	change(&w)
	w.CRC = 0
	_, err = binary.Encode(b, binary.LittleEndian, &w)
	require.NoError(t, err)
	binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
}

// sameLoad gives an SSD the identity that the load of another has, the only thing that is random in
// it.
func sameLoad(t testing.TB, s, as *simSSD) {
	t.Helper()
	sb, err := decodeSuperblock(as.durable[:superblockBytes])
	require.NoError(t, err)
	reseal(t, s, func(w *wireSuperblock) { w.LoadID = sb.LoadID })
}

// requireSameImages: a load that was interrupted has the same result as one that was not, in every
// byte.
func requireSameImages(t testing.TB, whole, got []*simSSD, why string) {
	t.Helper()
	for i := range got {
		a, b := whole[i].clone(), got[i].clone()
		sameLoad(t, a, b)
		if !bytes.Equal(a.durable, b.durable) {
			start := 0
			for a.durable[start] == b.durable[start] {
				start++
			}
			t.Fatalf("%s: image %d differs at byte %d (LBA %d)", why, i, start, start/512)
		}
		scrap(a, b)
	}
}

// watch counts what a load writes, and holds it to its extents.
type watch struct {
	t       testing.TB
	allowed [][]Extent
	wrote   [][]bool // by LBA
}

func watched(t testing.TB, d *dataset.Dataset, s []*simSSD, rowSums bool) *watch {
	w := &watch{t: t}
	ref := make([]*simSSD, len(s))
	for i := range s {
		ref[i] = s[i].clone()
	}
	r, err := load(bg, d, targetsOf(ref...), LoadOptions{Force: "SER0,SER1,SER2",
		NoRowChecksums: !rowSums})
	require.NoError(t, err)
	for i, x := range s {
		require.Equal(t, fmt.Sprintf("sim%d", i), r.Extents[i].SSD)
		require.Equal(t, x.lba, r.Extents[i].LBABytes)
		w.allowed = append(w.allowed, r.Extents[i].Extents)
		w.wrote = append(w.wrote, make([]bool, len(x.durable)/x.lba))
	}
	scrap(ref...)
	return w
}

// on makes SSDs report their writes.
func (w *watch) on(s []*simSSD) {
	for i, x := range s {
		x.onWrite = func(_ int, start int64, _, data []byte) ([]byte, error) {
			lba, n := start/int64(x.lba), int64(len(data)/x.lba)
			for k := range n {
				w.wrote[i][lba+k] = true
			}
			inside := slices.ContainsFunc(w.allowed[i],
				func(
					e Extent) bool {
					return lba >= int64(e.LBA) && lba+n <= int64(e.LBA)+e.Blocks
				})
			if !inside {
				return nil, fmt.Errorf("write to LBA %d+%d of SSD %d, outside %+v", lba, n, i,
					w.allowed[i])
			}
			return data, nil
		}
	}
}

// dataLBAs are those of the feature extent that were written.
func (w *watch) dataLBAs(i int) (n int64) {
	e := w.allowed[i][1]
	for _, wrote := range w.wrote[i][e.LBA:][:e.Blocks] {
		if wrote {
			n++
		}
	}
	return n
}

// TestPowerLossAndResume cuts the power before each single write and flush of a load that marks
// often, and again in the load that goes on; the last one runs to its end. The SSDs are then what
// they are after a load that nothing has interrupted, and nothing outside the extents was touched
// at any time.
func TestPowerLossAndResume(t *testing.T) {
	for _, c := range []struct {
		nodes int64
		dim   int
		row   bool
		step  int // operations
	}{{3600, 500, true, 1}, {3600, 500, false, 3}, {600_000, 1, true, 6}} {
		// two and a piece chunks an SSD; row tables of two pieces
		t.Run(fmt.Sprintf("%d rows of %d/%v", c.nodes, 4*c.dim, c.row), func(t *testing.T) {
			d := small(t, c.nodes, c.dim, 1)
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			start := junkSims()
			whole := []*simSSD{start[0].clone(), start[1].clone()}
			o := often(LoadOptions{NoRowChecksums: !c.row})
			must(load(bg, d, targetsOf(whole...),
				LoadOptions{Force: o.Force, NoRowChecksums: !c.row}))
			w := watched(t, d, start, c.row)
			step := c.step
			if wide.Lean() && step < 6 {
				step = 6
			}
			resumed, largest, before := 0, int64(0), 0
			trial := func(ops, cut int) (finished bool) {
				s := []*simSSD{start[0].clone(), start[1].clone()}
				// the second one in what the load that goes on does
				for cuts := 0; cuts < cut; cuts++ {
					budget := ops
					if cuts == 1 {
						budget = rng.IntN(30)
					}
					for _, x := range s {
						x.budget = &budget
					}
					w.on(s)
					_, err := load(bg, d, targetsOf(s...), o)
					if finished = err == nil && cuts == 0; err == nil {
						break
					}
					require.ErrorIs(t, err, errPowerLoss)
					next := []*simSSD{s[0].restart(rng), s[1].restart(rng)}
					scrap(s...)
					s = next
				}
				why := fmt.Sprintf("cut before operation %d, seed %d", ops, seed)
				s[0].budget, s[1].budget = nil, nil
				clear(w.wrote[0])
				clear(w.wrote[1])
				w.on(s)
				r, err := load(bg, d, targetsOf(s...), o)
				require.NoError(t, err, why)
				require.Empty(t, r.StartedOver, why)
				if r.ResumedBytes > 0 {
					resumed++
					largest = max(largest, r.ResumedBytes)
					require.Equal(t, r.DataBytes-r.ResumedBytes, (w.dataLBAs(0)+w.dataLBAs(1))*512,
						"%s: it must write what is missing, and nothing else", why)
				} else {
					before++
				}
				requireSameImages(t, whole, s, why)
				if rng.IntN(4) == 0 {
					v, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
					require.NoError(t, err, why)
					require.Equal(t, r.Extents, v.Extents)
				}
				scrap(s...)
				return finished
			}
			ops := 0
			for ; !trial(ops, 2); ops += step {
				require.Less(t, ops, 1000)
			}
			trial(ops-step, 1) // a late one alone always leaves something to go on with
			t.Logf("%d resumed, up to %d bytes; %d from the start", resumed, largest, before)
			require.Positive(t, resumed)
			require.Positive(t, before)
		})
	}
}

// TestExtents: a load writes all of its extents and nothing else.
func TestExtents(t *testing.T) {
	d := small(t, 1300, 700, 1)
	for _, lba := range []int{512, 4096} {
		for _, rows := range []bool{true, false} {
			s := sims(3, lba)
			// not a multiple of 4 KiB where that can be
			s[2] = newSim(simBytes/int64(lba)+1+4096/int64(lba)/2, lba)
			w := watched(t, d, s, rows)
			w.on(s)
			_, err := load(bg, d, targetsOf(s...), LoadOptions{NoRowChecksums: !rows})
			require.NoError(t, err)
			for i := range s {
				want := make([]bool, len(w.wrote[i]))
				last := int64(0)
				for _, e := range w.allowed[i] {
					require.GreaterOrEqual(t, int64(e.LBA), last, "in order, and apart")
					last = int64(e.LBA) + e.Blocks
					for k := int64(e.LBA); k < last; k++ {
						want[k] = true
					}
				}
				require.LessOrEqual(t, last, int64(len(s[i].durable)/lba))
				require.Equal(t, want, w.wrote[i], "SSD %d, rows %v", i, rows)
			}
		}
	}
}

// interrupted is a load of d that lost power after its marks said that much is there.
func interrupted(t *testing.T, d *dataset.Dataset, chunks int64, o LoadOptions) []*simSSD {
	t.Helper()
	s := junkSims()
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	o = often(o)
	o.due = func(_, _ time.Duration) bool {
		marked := 0
		for _, ssd := range s {
			b := make([]byte, superblockBytes)
			if err := ssd.ReadAt(bg, 0, b); err != nil {
				t.Error(err)
			}
			if sb, err := decodeSuperblock(b); err == nil && sb.Mark.Chunks >= chunks {
				marked++
			}
		}
		if marked == len(s) { // all: they are marked one after the other, or side by side
			cancel()
		}
		return true
	}
	r, err := load(ctx, d, targetsOf(s...), o)
	require.ErrorIs(t, err, context.Canceled)
	require.GreaterOrEqual(t, r.OnFlash, 2*chunks<<20)
	return []*simSSD{s[0].clone(), s[1].clone()}
}

// TestResumeInDoubt: a load resumes only with what is beyond doubt, gives the reason where it does
// not, and is right in the end either way.
func TestResumeInDoubt(t *testing.T) {
	// four chunks and a half an SSD
	small := func() *dataset.Dataset { return small(t, 4600, 500, 1) }
	d, other := small(), datasettest.WithUUID(t, small().Dir(), uuid.New())
	const mark = 2
	base := interrupted(t, d, mark, LoadOptions{})
	whole := junkSims()
	must(load(bg, d, targetsOf(whole...), LoadOptions{Force: "SER0,SER1"}))
	change := func(row int64) func(t *testing.T) *dataset.Dataset {
		return func(t *testing.T) *dataset.Dataset {
			e := small()
			f, err := os.OpenFile(e.Path(dataset.FeaturesName), os.O_RDWR, 0)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte{1, 2, 3}, 128+row*2000)
			require.NoError(t, err)
			require.NoError(t, errors.Join(f.Close(), e.Close()))
			datasettest.Unseal(t, e.Dir()) // another source, not a damaged one
			e, err = dataset.Open(e.Dir())
			require.NoError(t, err)
			return e
		}
	}
	for name, c := range map[string]struct {
		ssds func(t *testing.T, s []*simSSD) []*simSSD
		d    func(t *testing.T) *dataset.Dataset
		o    LoadOptions
		why  string // "": it goes on
	}{
		"nothing": {},
		"restart": {o: LoadOptions{Restart: true}, why: "a restart was asked for"},
		"other row sums": {o: LoadOptions{NoRowChecksums: true},
			why: "another choice of row checksums"},
		"order": {ssds: func(_ *testing.T,
			s []*simSSD) []*simSSD {
			return []*simSSD{s[1], s[0]}
		},
			why: "ssd sim0 holds stripe 1 and is given as number 0: the order of the SSDs has changed"},
		"fewer": {ssds: func(_ *testing.T,
			s []*simSSD) []*simSSD {
			return []*simSSD{newSim(32<<20/512, 512)}
		}},
		"replaced": {ssds: func(_ *testing.T,
			s []*simSSD) []*simSSD {
			return []*simSSD{s[0], newSim(resumeBytes/512, 512)}
		}, why: "ssd sim1: no superblock of that load: no Helios superblock; was it replaced?"},
		"of another load": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			return []*simSSD{s[0], interrupted(t, d, mark, LoadOptions{})[1]}
		}, why: "ssds sim0 and sim1 hold stripes of different loads"},
		"of another dataset": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			return []*simSSD{s[0], interrupted(t, other, mark, LoadOptions{})[1]}
		}, why: "ssd sim1 holds another dataset"},
		"one superblock torn": {ssds: func(_ *testing.T, s []*simSSD) []*simSSD {
			s[0].durable[100] ^= 1
			s[1].durable[len(s[1].durable)-1000] ^= 1
			return s
		}},
		"both superblocks torn": {ssds: func(_ *testing.T, s []*simSSD) []*simSSD {
			s[0].durable[100] ^= 1
			s[0].durable[len(s[0].durable)-1000] ^= 1
			return s
		}, why: "ssd sim0: no superblock of that load: damaged"},
		"marks disagree": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			resealOne(t, s[1], 0, func(w *wireSuperblock) { w.MarkDigest[3] ^= 1 })
			return s
		}, why: "ssd sim1: its two superblocks disagree"},
		"superblocks of two layouts": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			resealOne(t, s[1], 0, func(w *wireSuperblock) { w.LoadID[0] ^= 1 })
			return s
		}, why: "ssd sim1: its two superblocks disagree"},
		// as when it stopped between the copies
		"marks one after the other": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			early := interrupted(t, d, 1, LoadOptions{})
			for i := range s {
				sameLoad(t, early[i], s[i])
				from := len(s[i].durable) - superblockBytes
				copy(s[i].durable[from:], early[i].durable[from:])
			}
			return s
		}},
		"digest": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			reseal(t, s[1], func(w *wireSuperblock) { w.MarkDigest[31] ^= 1 })
			return s
		},
			why: "features.npy is not what ssd sim1 was loaded from up to here, or its progress mark is damaged"},
		"impossible mark": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			reseal(t, s[1], func(w *wireSuperblock) { w.MarkRowPieces = 1; w.MarkChunks = 1 })
			return s
		},
			why: "ssd sim1: its progress mark (1 chunks, 1 pieces of the row table) is none that a load makes"},
		"mark beyond the stripe": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			reseal(t, s[1], func(w *wireSuperblock) { w.MarkChunks = 7 })
			return s
		}, why: "its progress mark is impossible"},
		"lost chunk": {ssds: func(_ *testing.T, s []*simSSD) []*simSSD {
			clear(s[1].durable[headBytes+chunkBytes : headBytes+chunkBytes+512])
			return s
		}, why: "ssd sim1: chunk 1 is not what features.npy says, though it was durable"},
		"unreadable chunk": {ssds: func(_ *testing.T, s []*simSSD) []*simSSD {
			once := true
			s[0].readFail = func(lba int64) error {
				if once && lba == headBytes/512+9 {
					once = false
					return errors.New("unrecovered read error")
				}
				return nil
			}
			return s
		}, why: "ssd sim0: chunk 0 cannot be read back: unrecovered read error"},
		"features before the mark": {d: change(20), why: "is not what"},
		"features after the mark":  {d: change(4590)},
		// power failed between the last superblocks
		"one was finished": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			done := []*simSSD{s[0].clone(), s[1].clone()}
			must(load(bg, d, targetsOf(done...), LoadOptions{}))
			return []*simSSD{done[0].clone(), s[1]}
		}},
		"one was finished, of other features": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			done := []*simSSD{s[0].clone(), s[1].clone()}
			must(load(bg, d, targetsOf(done...), LoadOptions{}))
			return []*simSSD{done[0].clone(), s[1]}
		}, d: change(4590), why: "ssd sim0: chunk 4 is not what features.npy says"},
		"one was finished, of other checksums": {ssds: func(t *testing.T, s []*simSSD) []*simSSD {
			done := []*simSSD{s[0].clone(), s[1].clone()}
			must(load(bg, d, targetsOf(done...), LoadOptions{}))
			last := done[0].clone()
			reseal(t, last, func(w *wireSuperblock) { w.TableCRC ^= 1 })
			return []*simSSD{last, s[1]}
		}, why: "features.npy is not what ssd sim0 was loaded from: the checksums differ"},
		"both were finished but for a superblock": {ssds: func(t *testing.T,
			s []*simSSD) []*simSSD {
			done := []*simSSD{s[0].clone(), s[1].clone()}
			must(load(bg, d, targetsOf(done...), LoadOptions{}))
			done = []*simSSD{done[0].clone(), done[1].clone()}
			copy(done[1].durable[resumeBytes-superblockBytes:],
				s[1].durable[resumeBytes-superblockBytes:])
			return done
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := []*simSSD{base[0].clone(), base[1].clone()}
			if c.ssds != nil {
				s = c.ssds(t, s)
			}
			from, whole := d, whole
			if c.d != nil {
				from = c.d(t)
				defer from.Close()
				whole = junkSims()
				must(load(bg, from, targetsOf(whole...), LoadOptions{Force: "SER0,SER1"}))
			}
			var notes []string
			o := c.o
			o.Force, o.Note = "SER0,SER1", func(n string) { notes = append(notes, n) }
			r, err := load(bg, from, targetsOf(s...), o)
			require.NoError(t, err)
			switch {
			case len(s) == 1:
				require.Zero(t, r.ResumedBytes)
				require.Empty(t, notes, "those SSDs have no interrupted load")
			case c.why == "":
				require.Positive(t, r.ResumedBytes)
				require.Empty(t, r.StartedOver)
				require.Len(t, notes, 1)
				require.Contains(t, notes[0], "going on there")
				requireSameImages(t, whole, s, name)
			default:
				require.Zero(t, r.ResumedBytes)
				require.Contains(t, r.StartedOver, c.why)
				require.Contains(t, notes[len(notes)-1],
					"starting over, not where the interrupted load was: "+r.StartedOver)
			}
			v, err := verify(bg, from, targetsOf(s...), VerifyOptions{Source: true})
			require.NoError(t, err)
			require.Equal(t, d.Meta.Nodes, v.RowsCompared)
		})
	}
	// Over an SSD fewer than before.
	r, err := load(bg, d, targetsOf(newSim(16<<20/512, 512)), LoadOptions{})
	require.NoError(t, err)
	require.Empty(t, r.StartedOver)
	r, err = load(bg, d, targetsOf(append([]*simSSD{base[0].clone(), base[1].clone()},
		newSim(resumeBytes/512, 512))...), LoadOptions{})
	require.NoError(t, err)
	require.Contains(t, r.StartedOver, "ssd sim0 was loaded with one of 2 stripes, now there are 3")
}

// TestInterruptedIsNotWhole: what an interrupted load leaves is refused by all that reads datasets,
// in words that say how far it was; it is version 1, loading, to a heliosctl that does not know
// marks.
func TestInterruptedIsNotWhole(t *testing.T) {
	d := small(t, 4600, 500, 1)
	s := interrupted(t, d, 2, LoadOptions{})
	_, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.ErrorContains(t, err, "did not finish (")
	require.ErrorContains(t, err,
		"% of its stripe is there, and the next load goes on there); run \"heliosctl load --dataset "+d.Dir()+"\"")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	_, err = verifyEach(bg, targetsOf(s...), VerifyOptions{})
	require.ErrorContains(t, err, "% of its stripe is there")

	sb, err := decodeSuperblock(s[0].durable[:superblockBytes])
	require.NoError(t, err)
	require.Equal(t, StateLoading, sb.State)
	n, all := sb.OnFlash()
	require.Equal(t, min(sb.Mark.Chunks<<20, all), n)
	require.Equal(t, sb.DataLBAs*512, all)
	table := sha256.New() // as documented: of what is on the SSD
	for c := range sb.Mark.Chunks {
		sum := crc32.Checksum(s[0].durable[headBytes+c*chunkBytes:][:min(chunkBytes,
			all-c*chunkBytes)], castagnoli)
		table.Write(binary.LittleEndian.AppendUint32(nil, sum))
	}
	require.Zero(t, sb.Mark.RowPieces)
	require.Equal(t, table.Sum(nil), sb.Mark.Digest[:])
	wire := s[0].durable[:superblockBytes]
	require.EqualValues(t, 1, binary.LittleEndian.Uint32(wire[8:]), "the version")
	require.EqualValues(t, StateLoading, binary.LittleEndian.Uint32(wire[112:]))

	// A mark in a complete stripe is none that this heliosctl has written.
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	done := s[0].clone()
	sb, err = decodeSuperblock(done.durable[:superblockBytes])
	require.NoError(t, err)
	require.Zero(t, sb.Mark)
	reseal(t, done, func(w *wireSuperblock) { w.MarkChunks = 1 })
	_, err = decodeSuperblock(done.durable[:superblockBytes])
	require.ErrorContains(t, err, "progress mark is impossible")
}

// TestMarksAreCheap: marks come as seldom as their cost demands.
func TestMarksAreCheap(t *testing.T) {
	require.False(t, markDue(markEvery-1, 0))
	require.True(t, markDue(markEvery, 0))
	require.False(t, markDue(10*time.Second, 100*time.Millisecond))
	for _, cost := range []time.Duration{time.Microsecond, 20 * time.Millisecond, time.Second} {
		since := markEvery
		for !markDue(since, cost) {
			since += since / 100
		}
		require.Less(t, cost.Seconds()/since.Seconds(), 0.01)
	}

	// A load knows the cost of marks from the first on.
	d := small(t, 3600, 500, 1)
	s := junkSims()
	for _, x := range s {
		x.onFlush = func(int) (bool, error) { time.Sleep(2 * time.Millisecond); return true, nil }
	}
	o := often(LoadOptions{})
	o.due = func(_, cost time.Duration) bool {
		require.GreaterOrEqual(t, cost, 4*time.Millisecond)
		return true
	}
	r, err := load(bg, d, targetsOf(s...), o)
	require.NoError(t, err)
	require.Greater(t, r.Marks, 2)
	require.GreaterOrEqual(t, r.MarkSeconds, 0.012)
	r, err = load(bg, d, targetsOf(s...), LoadOptions{Force: o.Force})
	require.NoError(t, err)
	require.Zero(t, r.Marks, "a load of less than a second needs none")
	r, err = load(bg, d, targetsOf(s...), LoadOptions{MarkEvery: time.Millisecond, Force: o.Force,
		read: o.read})
	require.NoError(t, err)
	require.Positive(t, r.Marks)
}

// TestMarkThatWasNotCompared: a mark is not written anew, for other features, before its digest was
// compared; power could fail just then.
func TestMarkThatWasNotCompared(t *testing.T) {
	d := small(t, 4600, 500, 1)
	s := interrupted(t, d, 2, LoadOptions{})
	reseal(t, s[1], func(w *wireSuperblock) { w.MarkDigest[31] ^= 1 })
	was, err := decodeSuperblock(s[1].durable[:superblockBytes])
	require.NoError(t, err)
	s[1].onWrite = func(_ int, start int64, _, data []byte) ([]byte, error) {
		if start != 0 {
			return data, nil
		}
		if sb, err := decodeSuperblock(data); err == nil && sb.LoadID == was.LoadID {
			if sb.Mark != was.Mark {
				t.Errorf("the mark is %+v, and was %+v", sb.Mark, was.Mark)
			}
		}
		return data, nil
	}
	r, err := load(bg, d, targetsOf(s...), often(LoadOptions{}))
	require.NoError(t, err)
	require.Contains(t, r.StartedOver,
		"features.npy is not what ssd sim1 was loaded from up to here")
}

// TestFailedMark: a mark that cannot be written ends the load, as any other write does.
func TestFailedMark(t *testing.T) {
	d := small(t, 3600, 500, 1)
	for k := 2; k < 5; k++ { // flushes: two of the superblocks, three of a mark
		s := junkSims()
		s[1].onFlush = func(n int) (bool, error) {
			if n == k {
				return false, errWrite
			}
			return true, nil
		}
		_, err := load(bg, d, targetsOf(s...), often(LoadOptions{}))
		require.ErrorIs(t, err, errWrite)
		require.ErrorContains(t, err, "ssd sim1: ")
		s[1].onFlush = nil
		r, err := load(bg, d, targetsOf(s...), often(LoadOptions{}))
		require.NoError(t, err)
		require.Empty(t, r.StartedOver)
		_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
		require.NoError(t, err)
	}
}

// TestLyingFlushAndResume: an SSD that says flushed and is not, and then loses power in a load.
// A load that resumes from there finds the fault, or is right in every row.
func TestLyingFlushAndResume(t *testing.T) {
	d := small(t, 3600, 500, 1)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	over, n := 0, 0
	for ; n < 15 || over == 0; n++ {
		require.Less(t, n, 400)
		s := junkSims()
		budget := 10 + rng.IntN(40)
		for _, x := range s {
			own := rand.New(rand.NewPCG(rng.Uint64(), 1))
			x.onFlush = func(int) (bool, error) { return own.IntN(3) == 0, nil }
			x.budget = &budget
		}
		if _, err := load(bg, d, targetsOf(s...), often(LoadOptions{})); err != nil {
			require.ErrorIs(t, err, errPowerLoss)
		}
		after := []*simSSD{s[0].restart(rng), s[1].restart(rng)}
		r, err := load(bg, d, targetsOf(after...), often(LoadOptions{}))
		require.NoError(t, err)
		if r.StartedOver != "" {
			over++
		}
		_, err = verify(bg, d, targetsOf(after...), VerifyOptions{Source: true})
		require.NoError(t, err, "%+v", r)
		scrap(append(s, after...)...)
	}
	t.Logf("%d of %d started over", over, n)
}

// TestResumeThroughTheNVMeStack: an interrupt, and the next load, over software controllers.
func TestResumeThroughTheNVMeStack(t *testing.T) {
	d := small(t, 9000, 500, 1)
	paths := backing(t, 2, true, 16<<20)
	ssds, done := openProxies(t, paths, true, 512, "")
	ctx, cancel := context.WithCancel(bg)
	r, err := Load(ctx, d, ssds, LoadOptions{read: 1 << 20, Progress: func(_ string, n, all int64) {
		if n > all/2 {
			cancel()
		}
	}})
	done()
	require.ErrorIs(t, err, context.Canceled)
	require.Greater(t, r.OnFlash, r.DataBytes/10, "an interrupt leaves a mark")
	ssds, done = openProxies(t, paths, true, 512, "")
	defer done()
	_, err = Verify(bg, d, ssds, VerifyOptions{})
	require.ErrorContains(t, err, "did not finish")
	again, err := Load(bg, d, ssds, LoadOptions{})
	require.NoError(t, err)
	require.Equal(t, r.OnFlash, again.ResumedBytes)
	v, err := Verify(bg, d, ssds, VerifyOptions{Source: true})
	require.NoError(t, err)
	require.EqualValues(t, 9000, v.RowsCompared)
}

// TestContentsFrom reads what Contents reads, without an NVMe controller.
func TestContentsFrom(t *testing.T) {
	d := small(t, 300, 16, 1)
	s := sealed(t, d, 2)[1]
	want, err := decodeSuperblock(s.durable[:superblockBytes])
	require.NoError(t, err)
	for _, lost := range []int64{-1, 0, simBytes - superblockBytes} {
		b := bytes.Clone(s.durable)
		if lost >= 0 {
			clear(b[lost : lost+superblockBytes])
		}
		got, _, err := ContentsFrom(bg, "/dev/x", bytes.NewReader(b), 512, simBytes/512)
		require.NoError(t, err)
		require.Equal(t, []Content{{Superblock: want}}, got)
	}
	_, _, err = ContentsFrom(bg, "/dev/x", bytes.NewReader(make([]byte, simBytes)), 512,
		simBytes/512)
	require.ErrorIs(t, err, ErrNoSuperblock)
	require.ErrorContains(t, err, "ssd /dev/x: ")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	_, _, err = ContentsFrom(bg, "/dev/x", bytes.NewReader(s.durable[:100]), 512, simBytes/512)
	require.ErrorIs(t, err, io.EOF)
	require.ErrorContains(t, err, "read of /dev/x")
	_, _, err = ContentsFrom(bg, "/dev/x", bytes.NewReader(nil), 512, 8)
	require.ErrorContains(t, err, "too small")
	ro := readOnly{"/dev/x", bytes.NewReader(nil), 512}
	require.Equal(t, errs.Refused, errs.ClassOf(ro.WriteAt(bg, nvme.LBA(0), make([]byte, 512))))
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, _, err = ContentsFrom(ctx, "/dev/x", bytes.NewReader(s.durable), 512, simBytes/512)
	require.ErrorIs(t, err, context.Canceled)
}
