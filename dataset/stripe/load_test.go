package stripe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/signatures"
	"helios/internal/testing/datasettest"
	"helios/nvme"
)

var bg = context.Background()

// small generates a dataset and opens it.
func small(t testing.TB, nodes int64, dim int, seed uint64) *dataset.Dataset {
	t.Helper()
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: nodes, Dim: dim, Classes: 3,
		AvgDegree: 3, Seed: seed, Out: out}))
	d, err := dataset.Open(out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

const simBytes = 5 << 20

func sims(n, lba int) []*simSSD {
	var s []*simSSD
	for range n {
		s = append(s, newSim(simBytes/int64(lba), lba))
	}
	return s
}

// requireRows reads every row where the layout says it is.
func requireRows(t *testing.T, d *dataset.Dataset, l gpuio.Layout, ssd func(i int) blockDev,
	start func(i int) nvme.LBA) {
	t.Helper()
	want := datasettest.AllRows(t, d)
	row := d.Meta.RowBytes()
	for r := range d.Meta.Nodes {
		s, lba, blocks, off := l.Locate(r)
		buf := make([]byte, int(blocks)*int(l.LBABytes))
		require.NoError(t, ssd(s).ReadAt(bg, start(s)+lba, buf))
		if !bytes.Equal(want[int(r)*row:int(r+1)*row], buf[off:off+row]) {
			t.Fatalf("row %d is not where the layout says", r)
		}
	}
}

func TestLoadAttachVerify(t *testing.T) {
	for _, c := range []struct {
		name       string
		nodes      int64
		dim        int
		packed     bool // at 4096
		extraChunk bool
	}{
		{"packed evenly", 3000, 128, true, false},
		{"packed with a gap", 3000, 100, true, false},
		{"one row an LBA", 300, 1024, false, false},
		{"padded", 300, 1100, false, false},
		{"padded rows across chunks", 600, 1300, false, true},
		{"fewer rows than SSDs", 3, 7, true, false},
	} {
		d := small(t, c.nodes, c.dim, 1)
		for _, lba := range []int{512, 4096} {
			for n := 1; n <= 4; n++ {
				t.Run(fmt.Sprintf("%s/%d/%d", c.name, lba, n), func(t *testing.T) {
					s := sims(n, lba)
					if c.extraChunk && n == 1 {
						s = []*simSSD{newSim(16<<20/int64(lba), lba)}
					}
					for _, x := range s { // what was there must not shine through padding
						copy(x.durable, bytes.Repeat([]byte{0xa5}, len(x.durable)))
					}
					ts := targetsOf(s...)
					var last, total int64
					r, err := load(bg, d, ts, LoadOptions{Force: "SER0,SER1,SER2,SER3",
						Progress: func(_ string, done, all int64) { last, total = done, all }})
					require.NoError(t, err)
					require.Equal(t, c.nodes, last)
					require.Equal(t, c.nodes, total)
					require.Equal(t, r.DataBytes-c.nodes*int64(c.dim)*4, r.PaddingBytes)
					if lba == 4096 {
						require.Equal(t, c.packed, r.RowsPerLBA > 1)
					}
					for i := range s {
						old := s[i]
						s[i] = old.clone()
						scrap(old)
					}
					defer scrap(s...)
					// Bound in another order, they are still found.
					ts = targetsOf(s...)
					rand.Shuffle(n, func(i, j int) { ts[i], ts[j] = ts[j], ts[i] })
					stripes, err := attach(bg, d, ts, AttachOptions{})
					require.NoError(t, err)
					require.Len(t, stripes, n)
					requireRows(t, d, stripes[0].sb.layout(),
						func(i int) blockDev { return stripes[i].t.dev },
						func(i int) nvme.LBA { return stripes[i].sb.DataLBA })
					v, err := verify(bg, d, ts, VerifyOptions{Source: true})
					require.NoError(t, err)
					require.Equal(t, c.nodes, v.RowsCompared)
					require.Equal(t, r.Chunks, v.Chunks)
					require.Equal(t, r.DataBytes, v.Bytes)
					require.Empty(t, v.Bad)
				})
			}
		}
	}
}

// TestReloadSameDataset: the same dataset may go over itself, striped otherwise.
func TestReloadSameDataset(t *testing.T) {
	d := small(t, 500, 128, 1)
	s := sims(2, 512)
	_, err := load(bg, d, targetsOf(s...), LoadOptions{})
	require.NoError(t, err)
	_, err = load(bg, d, targetsOf(s[1]), LoadOptions{})
	require.NoError(t, err)
	st, err := attach(bg, d, targetsOf(s[1]), AttachOptions{})
	require.NoError(t, err)
	require.Len(t, st, 1)
	// Together they are stripes of two loads, of which the later one is whole.
	var notes []string
	st, err = attach(bg, d, targetsOf(s...), AttachOptions{Note: func(s string) {
		notes = append(notes, s)
	}})
	require.NoError(t, err)
	require.Len(t, st, 1)
	require.Equal(t, []string{"not used: sim0 holds stripe 0 of 2 of another load of " + d.Dir()},
		notes)
}

// TestWholeSetWins: a complete set of stripes is used whatever else is on other SSDs, and a note
// names each SSD that is left out. Nobody is told to load onto those.
func TestWholeSetWins(t *testing.T) {
	d, other := small(t, 300, 16, 1), small(t, 300, 16, 2)
	begun := func(n, k int) *simSSD {
		ts := targetsOf(sims(n, 512)...)
		ctx, cancel := context.WithCancel(bg)
		_, err := load(ctx, d, ts, LoadOptions{read: 4096, due: func(_, _ time.Duration) bool {
			cancel()
			return false
		}})
		require.Error(t, err)
		return ts[k].dev.(*simSSD).clone()
	}
	good, old := sealed(t, d, 2), sealed(t, d, 2)
	torn := sealed(t, d, 2)[0]
	clear(torn.durable[:superblockBytes])
	clear(torn.durable[len(torn.durable)-superblockBytes:])
	for name, c := range map[string]struct {
		more []*simSSD
		note string // of the first SSD that is left out
	}{
		"stale":              {old[:1], "sim0 holds stripe 0 of 2 of another load"},
		"stale second":       {old[1:], "sim0 holds stripe 1 of 2 of another load"},
		"unfinished":         {[]*simSSD{begun(2, 1)}, "of another load of " + d.Dir() + ", which did not finish"},
		"unfinished of many": {[]*simSSD{begun(3, 0), begun(3, 0)}, "stripe 0 of 3 of another load"},
		"another's":          {sealed(t, other, 1), "of dataset"},
		"no superblock":      {[]*simSSD{torn}, "no Helios superblock"},
		"too small":          {[]*simSSD{newSim(100, 512)}, "too small for a dataset"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, all := range [][]*simSSD{
				append(slices.Clone(c.more), good...), append(slices.Clone(good), c.more...)} {
				var notes []string
				ts := targetsOf(all...)
				st, err := attach(bg, d, ts, AttachOptions{Note: func(s string) {
					notes = append(notes, s)
				}})
				require.NoError(t, err)
				require.Len(t, st, 2)
				for i, s := range st {
					require.Equal(t, good[i], s.t.dev)
				}
				require.Len(t, notes, len(c.more))
				require.NotContains(t, strings.Join(notes, " "), "run \"heliosctl load")
			}
		})
	}
	// Two whole sets: somebody has to choose. None: what is wrong is said as before, and the
	// advice names the SSDs of the load that it is about.
	_, err := attach(bg, d, targetsOf(append(slices.Clone(good), old...)...), AttachOptions{})
	require.ErrorContains(t, err, "choose those of one load with option ssds")
	_, err = attach(bg, d, targetsOf(begun(1, 0), sealed(t, other, 1)[0]), AttachOptions{})
	require.ErrorContains(t, err, "did not finish")
	require.ErrorContains(t, err, "load --dataset "+d.Dir()+" --ssds sim0")
}

func TestRefuses(t *testing.T) {
	d, other := small(t, 200, 16, 1), small(t, 200, 16, 2)
	large := small(t, 7500, 16, 3) // leaves no room for a stripe of d
	put := func(start int64, text string) func(*simSSD) {
		return func(s *simSSD) {
			if start < 0 {
				start += int64(len(s.durable))
			}
			copy(s.durable[start:], text)
		}
	}
	mbr := func(s *simSSD) {
		s.durable[446+4] = 0x83
		s.durable[510], s.durable[511] = 0x55, 0xaa
	}
	cases := map[string]struct {
		dirty func(*simSSD)
		want  string
	}{
		"MBR":       {mbr, "MBR partition table"},
		"empty MBR": {put(510, "\x55\xaa"), "boot sector"},
		"raid 1.0": {
			func(s *simSSD) { put((int64(len(s.durable))/512-16)&^7*512, "\xfc\x4e\x2b\xa9")(s) },
			"RAID"},
		"raid 0.90": {
			func(s *simSSD) { put(int64(len(s.durable))&^0xffff-0x10000, "\xfc\x4e\x2b\xa9")(s) },
			"RAID"},
		"zfs": {put(128<<10+3*1024, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "ZFS"},
		// Nothing that we know, and somebody's all the same.
		"text": {put(0, "Dear diary,\x1b[2J"),
			`not empty: byte 0 and the next look like "Dear diary,`},
		"SQLite":      {put(0, "SQLite format 3\x00\x10\x00"), `look like "SQLite format 3"`},
		"tar":         {put(0, "letters/\x00"), `look like "letters/"`},
		"tar's magic": {put(257, "ustar\x0000"), `byte 257 and the next look like "ustar"`},
		"zip":         {put(0, "PK\x03\x04\x14\x00"), "look like 50 4b 03 04"},
		"qcow2":       {put(0, "QFI\xfb\x00\x00\x00\x03"), `look like "QFI"`},
		"random data": {func(s *simSSD) { rand.NewChaCha8([32]byte{1}).Read(s.durable) },
			"byte 0 and the next look like"},
		"one byte": {func(s *simSSD) { s.durable[1<<20-1] = 1 },
			"byte 1048575 and the next look like 01"},
		"the end":       {put(-1<<20, "x"), "from 1048576 before its end look like 78 00"},
		"the last byte": {put(-1, "x"), "from 1 before its end look like 78"},
		"zeros and ones": {func(s *simSSD) {
			for i := range 4096 {
				s.durable[i] = 0xff
			}
		}, "byte 0 and the next look like ff ff"},
		"another dataset": {func(s *simSSD) { must(load(bg, large, targetsOf(s), LoadOptions{})) },
			"\"g\" (" + large.Meta.UUID},
		"another dataset, first superblock gone": {func(s *simSSD) {
			must(load(bg, large, targetsOf(s), LoadOptions{}))
			clear(s.durable[:4096])
		}, "free in one piece"},
		// Half of this dataset is there, and somebody wrote over the rest.
		"this dataset under a file system": {func(s *simSSD) {
			must(load(bg, d, targetsOf(newSim(5<<19/512, 512), s), LoadOptions{}))
			*s = *s.clone()
			clear(s.durable[:1<<20])
			put(1080, "\x53\xef")(s)
		}, "ext"},
		"this dataset under LUKS": {func(s *simSSD) {
			must(load(bg, d, targetsOf(newSim(5<<19/512, 512), s), LoadOptions{}))
			*s = *s.clone()
			put(0, "LUKS\xba\xbe\x00\x02")(s)
		}, "LUKS"},
		"this dataset under a partition table": {func(s *simSSD) {
			must(load(bg, d, targetsOf(newSim(5<<19/512, 512), s), LoadOptions{}))
			*s = *s.clone()
			mbr(s)
		}, "MBR partition table"},
		"this dataset under something unknown": {func(s *simSSD) {
			must(load(bg, d, targetsOf(newSim(5<<19/512, 512), s), LoadOptions{}))
			*s = *s.clone()
			put(-4096, "Dear diary")(s)
		}, `look like "Dear diary", where this dataset has a superblock`},
		// Both superblocks are whole: mdadm and bcache begin at 4 KiB.
		"this dataset under a RAID member": {func(s *simSSD) {
			must(load(bg, d, targetsOf(newSim(5<<19/512, 512), s), LoadOptions{}))
			*s = *s.clone()
			put(4096, "\xfc\x4e\x2b\xa9")(s)
		}, "RAID"},
		"damaged superblock": {func(s *simSSD) {
			must(load(bg, other, targetsOf(s), LoadOptions{}))
			*s = *s.clone()
			s.durable[100] ^= 1
			clear(s.durable[len(s.durable)-4096:])
		}, "damaged"},
	}
	for i, sig := range signatures.Table() {
		cases[fmt.Sprintf("%s #%d", sig.What, i)] = struct {
			dirty func(*simSSD)
			want  string
		}{put(sig.At, sig.Text), sig.What}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			const bytesAll = 5 << 19
			clean, dirty := newSim(bytesAll/512, 512), newSim(bytesAll/512, 512)
			c.dirty(dirty)
			before := dirty.clone()
			_, err := load(bg, d, targetsOf(clean, dirty), LoadOptions{})
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "ssd sim1 (serial SER1)")
			require.ErrorContains(t, err, "option force SER1")
			require.Equal(t, errs.Refused, errs.ClassOf(err))
			require.Equal(t, before.durable, dirty.clone().durable, "a refused SSD was written to")
			require.Equal(t, make([]byte, bytesAll), clean.clone().durable,
				"an SSD was written to before all were checked")

			_, err = load(bg, d, targetsOf(clean, dirty), LoadOptions{Force: "SER0"})
			require.Equal(t, errs.Refused, errs.ClassOf(err), "another SSD's serial must not do")

			_, err = load(bg, d, targetsOf(clean, dirty), LoadOptions{Force: "SER9, SER1"})
			require.NoError(t, err)
			_, err = verify(bg, d, targetsOf(clean, dirty), VerifyOptions{Source: true})
			require.NoError(t, err)
			image := dirty.clone().durable
			require.Empty(t, signatures.Find(image[:signatures.ProbeBytes],
				image[len(image)-signatures.ProbeBytes:], int64(len(image))),
				"the old signature survived")
		})
	}
}

// An SSD is blank where it is in the middle too: who wipes the ends of a disk leaves what was on
// it.
func TestLoadSamplesTheMiddle(t *testing.T) {
	d := small(t, 200, 16, 1)
	const bytesAll = 96 << 20
	load1 := func(dirty func(image []byte)) error {
		s := newSim(bytesAll/512, 512)
		dirty(s.durable)
		before := s.clone().durable
		_, err := load(bg, d, targetsOf(s), LoadOptions{})
		if err != nil {
			require.Equal(t, before, s.clone().durable, "a refused SSD was written to")
		}
		return err
	}
	require.NoError(t, load1(func([]byte) {}))
	noise := func(image []byte) {
		for i := range image {
			image[i] = byte(i>>3 | 1)
		}
	}
	for name, c := range map[string]struct {
		dirty func(image []byte)
		want  string
	}{
		"dd bs=1M count=1, and its end": {func(b []byte) { noise(b[1<<20 : len(b)-1<<20]) },
			"something unknown, not empty"},
		"a backup superblock": {func(b []byte) { copy(b[32<<20+0x38:], "\x53\xef") },
			"an ext2/3/4 file system (its copy at byte 33554432)"},
		"a partition's file system": {func(b []byte) { copy(b[1<<20:], "XFSB") },
			"an XFS file system (at byte 1048576)"},
		"one full MiB": {func(b []byte) { noise(b[57<<20+4096 : 58<<20+4096]) }, "between two blank ends"},
		"erased flash": {func(b []byte) { copy(b, bytes.Repeat([]byte{0xff}, len(b))) }, "look like ff ff"},
	} {
		err := load1(c.dirty)
		require.Equal(t, errs.Refused, errs.ClassOf(err), name)
		require.ErrorContains(t, err, c.want, name)
		require.ErrorContains(t, err, "option force SER0", name)
	}
}

// An SSD without a serial number is forced by its name, never by an empty word.
func TestForceWithoutSerial(t *testing.T) {
	d := small(t, 200, 16, 1)
	dirty := newSim(5<<19/512, 512)
	dirty.durable[0] = 'x'
	for _, serial := range []string{"", "  "} {
		for _, force := range []string{"", " ", ",", " , "} {
			ts := targetsOf(dirty)
			ts[0].serial = serial
			_, err := load(bg, d, ts, LoadOptions{Force: force})
			require.Equal(t, errs.Refused, errs.ClassOf(err), "serial %q, --force %q",
				serial, force)
			require.ErrorContains(t, err, "option force sim0")
		}
	}
	ts := targetsOf(dirty)
	ts[0].serial = ""
	_, err := load(bg, d, ts, LoadOptions{Force: "sim0"})
	require.NoError(t, err)
}

func must(_ LoadReport, err error) {
	if err != nil {
		panic(err)
	}
}

func TestLoadErrors(t *testing.T) {
	d := small(t, 3000, 128, 1) // 1.5 MB
	for name, c := range map[string]struct {
		sims []*simSSD
		want string
	}{
		"too small": {[]*simSSD{newSim(3<<20/512, 512)},
			"ssd sim0 is too small for its share (stripe 0 of 1): needs 3649536 bytes, has 3145728"},
		"much too small": {[]*simSSD{newSim(8, 512)}, "too small"},
		"mixed LBA sizes": {[]*simSSD{newSim(simBytes/512, 512), newSim(simBytes/4096, 4096)},
			"LBAs of 512 bytes and sim1 of 4096"},
		"unsupported LBAs": {[]*simSSD{newSim(simBytes/8192, 8192)}, "8192"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(bg, d, targetsOf(c.sims...), LoadOptions{})
			require.ErrorContains(t, err, c.want)
			for _, s := range c.sims {
				require.Empty(t, s.cache)
			}
		})
	}
	twice := newSim(simBytes/512, 512)
	ts := targetsOf(twice, twice)
	ts[1].name = ts[0].name
	_, err := load(bg, d, ts, LoadOptions{})
	require.ErrorContains(t, err, "given twice")
	_, err = Load(bg, d, nil, LoadOptions{})
	require.ErrorContains(t, err, "bind-ssds")

	ctx, cancel := context.WithCancel(bg)
	s := newSim(simBytes/512, 512)
	_, err = load(ctx, d, targetsOf(s),
		LoadOptions{Progress: func(string, int64, int64) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)
	_, err = attach(bg, d, targetsOf(s), AttachOptions{})
	require.ErrorContains(t, err, "did not finish")

	bad := newSim(simBytes/512, 512)
	bad.readFail = func(lba int64) error {
		if lba == 0 {
			return errors.New("unrecovered read error")
		}
		return nil
	}
	_, err = load(bg, d, targetsOf(bad), LoadOptions{})
	require.ErrorContains(t, err, "cannot read superblock 1 of 2")
	require.Equal(t, errs.Device, errs.ClassOf(err))
}

// TestPowerLoss cuts the power before each single write and flush of a load, throws part of
// the unflushed writes away, and looks: what Find accepts must verify, byte for byte.
func TestPowerLoss(t *testing.T) {
	d, other := small(t, 900, 700, 1), small(t, 700, 400, 2)
	fresh := sims(2, 512)
	reload := sims(2, 512) // the same dataset in another striping on one of them
	must(load(bg, d, targetsOf(reload...), LoadOptions{}))
	foreign := sims(2, 512)
	must(load(bg, other, targetsOf(foreign...), LoadOptions{}))
	uneven := sized(512, 1<<20, 5<<19)
	evenly, unevenly := clones(uneven), clones(uneven)
	must(load(bg, d, targetsOf(evenly...), LoadOptions{RowType: "float16"}))
	must(load(bg, d, targetsOf(unevenly...), LoadOptions{}))
	force := LoadOptions{Force: "SER0,SER1"}
	for name, c := range map[string]struct {
		start []*simSSD
		o     LoadOptions
	}{"fresh": {fresh, force}, "reload": {reload, force}, "foreign": {foreign, force},
		"uneven": {uneven, LoadOptions{}}, "forced uneven": {unevenly, force},
		"from even to uneven": {evenly, LoadOptions{}}, "uneven again": {unevenly, LoadOptions{}},
		"from uneven to even": {unevenly, LoadOptions{RowType: "float16", Restart: true}},
	} {
		start := c.start
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			accepted, finished := 0, false
			for ops := 0; !finished; ops++ {
				require.Less(t, ops, 1000)
				budget := ops
				s := []*simSSD{start[0].clone(), start[1].clone()}
				for _, x := range s {
					x.budget = &budget
				}
				_, err := load(bg, d, targetsOf(s...), c.o)
				finished = err == nil
				if err != nil {
					require.ErrorIs(t, err, errPowerLoss)
				}
				for range 3 {
					found := []*simSSD{s[0].restart(rng), s[1].restart(rng)}
					after := targetsOf(found...)
					_, err := attach(bg, d, after, AttachOptions{})
					if err != nil {
						require.False(t, finished, "finished, but: %v", err)
						require.Contains(t, []errs.Class{errs.Device, errs.Refused},
							errs.ClassOf(err))
						scrap(found...)
						continue
					}
					accepted++
					_, err = verify(bg, d, after, VerifyOptions{Source: true})
					var bad *BadChunk
					if err != nil { // one torn superblock may be found, never data
						r, _ := verify(bg, d, after, VerifyOptions{Source: true})
						for i := range r.Bad {
							if r.Bad[i].Chunk >= 0 {
								bad = &r.Bad[i]
							}
						}
					}
					require.Nil(t, bad, "after %d operations (seed %d): accepted with bad data",
						ops, seed)
					// The other dataset must never look whole beside ours.
					_, err = attach(bg, other, after, AttachOptions{})
					require.Error(t, err)
					scrap(found...)
				}
				if c.o.Force == "" { // what was cut off needs no force
					for i := range s {
						s[i] = s[i].restart(rng)
					}
					must(load(bg, d, targetsOf(s...), LoadOptions{}))
					requireWhole(t, d, s...)
				}
				scrap(s...)
			}
			require.Positive(t, accepted)
		})
	}
}

// sealed loads d onto n sims and returns them at rest.
func sealed(t *testing.T, d *dataset.Dataset, n int) []*simSSD {
	t.Helper()
	s := sims(n, 512)
	_, err := load(bg, d, targetsOf(s...), LoadOptions{})
	require.NoError(t, err)
	for i := range s {
		s[i] = s[i].clone()
	}
	return s
}

func TestAttachErrors(t *testing.T) {
	d, other := small(t, 300, 16, 1), small(t, 300, 16, 2)
	empty := func() *simSSD { return newSim(simBytes/512, 512) }
	reseal := func(s *simSSD, change func(*wireSuperblock)) {
		for _, start := range []int{0, len(s.durable) - superblockBytes} {
			b := s.durable[start : start+superblockBytes]
			var w wireSuperblock
			if _, err := binary.Decode(b, binary.LittleEndian, &w); err != nil {
				t.Fatal(err)
			}
			change(&w)
			w.CRC = 0
			if _, err := binary.Encode(b, binary.LittleEndian, &w); err != nil {
				t.Fatal(err)
			}
			binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
		}
	}
	for name, c := range map[string]struct {
		ssds  func() []*simSSD
		class errs.Class
		want  string
	}{
		"missing stripe": {
			func() []*simSSD { s := sealed(t, d, 3); return []*simSSD{s[2], s[0]} }, errs.Device,
			"3 stripes, stripe 1 is missing"},
		"empty SSDs": {func() []*simSSD { return []*simSSD{empty()} }, errs.Device,
			"on none of the SSDs"},
		"another dataset": {func() []*simSSD { return sealed(t, other, 2) }, errs.Refused,
			"another dataset"},
		"another's stripe": {
			func() []*simSSD { return []*simSSD{sealed(t, d, 2)[0], sealed(t, other, 2)[1]} },
			errs.Device, "stripe 1 is missing (sim1 holds stripe 1 of 2 of dataset"},
		"the same stripe": {
			func() []*simSSD { s := sealed(t, d, 2); return []*simSSD{s[0], s[0].clone(), s[1]} },
			errs.Device, "both hold stripe 0"},
		"stripes of two loads": {
			func() []*simSSD { return []*simSSD{sealed(t, d, 2)[0], sealed(t, d, 2)[1]} },
			errs.Device, "different loads"},
		"stripe counts": {func() []*simSSD {
			s := sealed(t, d, 2)
			reseal(s[1],
				func(w *wireSuperblock) { w.StripeCount, w.DataLBAs, w.TableLBA = 3, 13, 2064 })
			return s
		}, errs.Device, ""},
		"row bytes": {func() []*simSSD {
			// A file with the same UUID but other rows: damaged, or made by another program.
			e := datasettest.WithUUID(t, small(t, 300, 32, 3).Dir(), d.UUID())
			return sealed(t, e, 2)
		}, errs.Device, "holds 300 rows of 128 bytes, dataset " + d.Dir() + " has 300 of 64"},
		"mixed row bytes": {func() []*simSSD {
			e := datasettest.WithUUID(t, small(t, 300, 32, 3).Dir(), d.UUID())
			return []*simSSD{sealed(t, d, 2)[0], sealed(t, e, 2)[1]}
		}, errs.Device, "rows of 128 bytes"},
		"loading": {func() []*simSSD {
			s := sealed(t, d, 2)
			reseal(s[0], func(w *wireSuperblock) { w.State = uint32(StateLoading) })
			return s
		}, errs.Device, "did not finish"},
		"copies differ": {func() []*simSSD {
			s := sealed(t, d, 1)
			older := sealed(t, d, 1)[0]
			copy(s[0].durable[len(s[0].durable)-4096:], older.durable[len(older.durable)-4096:])
			return s
		}, errs.Device, "did not finish"},
		"both copies damaged": {func() []*simSSD {
			s := sealed(t, d, 1)
			s[0].durable[20] ^= 1
			s[0].durable[len(s[0].durable)-1] ^= 1
			return s
		}, errs.Device, "damaged Helios superblock: CRC32C"},
		"a later version": {func() []*simSSD {
			s := sealed(t, d, 1)
			reseal(s[0], func(w *wireSuperblock) { w.Version = 6 })
			return s
		}, errs.Device, "version 6 is unknown"},
		"an extent outside the SSD": {func() []*simSSD {
			s := sealed(t, d, 1)
			reseal(s[0], func(w *wireSuperblock) { w.DataLBA = 1 << 40 })
			return s
		}, errs.Device, "extents is impossible"},
		"a copy on a larger SSD": {func() []*simSSD {
			s := sealed(t, d, 1)[0]
			l := newSim(2*simBytes/512, 512)
			copy(l.durable, s.durable)
			return []*simSSD{l}
		}, errs.Device, "resized or copied"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := attach(bg, d, targetsOf(c.ssds()...), AttachOptions{})
			require.ErrorContains(t, err, c.want)
			require.Equal(t, c.class, errs.ClassOf(err), "%v", err)
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestAttachSecondCopyAndStrangers(t *testing.T) {
	d := small(t, 300, 16, 1)
	s := sealed(t, d, 2)
	clear(s[0].durable[:4096])
	s[1].durable[len(s[1].durable)-4000] ^= 1
	var notes []string
	ts := targetsOf(append(s, newSim(simBytes/512, 512))...)
	st, err := attach(bg, d, ts, AttachOptions{Note: func(n string) { notes = append(notes, n) }})
	require.NoError(t, err)
	require.Len(t, st, 2)
	require.Len(t, notes, 3)
	require.Contains(t, notes[0],
		"ssd sim0: first superblock unusable (no Helios superblock), using the second")
	require.Contains(t, notes[1], "ssd sim1: second superblock unusable")
	require.Contains(t, notes[2], "not used: sim2")

	r, err := verify(bg, d, ts, VerifyOptions{})
	require.ErrorContains(t, err, "superblock 1 of 2")
	require.EqualValues(t, 2, r.BadCount)
	require.Len(t, r.Notes, 3)
	// A reload mends it.
	_, err = load(bg, d, ts[:2], LoadOptions{})
	require.NoError(t, err)
	_, err = verify(bg, d, ts[:2], VerifyOptions{})
	require.NoError(t, err)
}

func TestVerifyFinds(t *testing.T) {
	d := small(t, 3000, 256, 1) // 3 MB on two SSDs: two chunks each
	s := sealed(t, d, 2)
	_, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.NoError(t, err)

	hit := s[1].clone()
	hit.durable[headBytes+chunkBytes+12345] ^= 0x10
	r, err := verify(bg, d, targetsOf(s[0], hit), VerifyOptions{})
	require.ErrorContains(t, err, "faults found: 1 in 4 chunks, the first on ssd sim1 at LBA 4096+")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Equal(t, []BadChunk{{SSD: "sim1", Stripe: 1, Chunk: 1, LBA: 4096,
		Blocks: r.Bad[0].Blocks, What: r.Bad[0].What,
		Rows: []int64{(chunkBytes+12345)/1024*2 + 1}}}, r.Bad)
	require.EqualValues(t, 4, r.Chunks, "verification must go on after a finding")

	r, err = verify(bg, d, targetsOf(s[0], hit), VerifyOptions{Source: true})
	require.Error(t, err)
	require.Len(t, r.Bad, 2) // the checksum and the row
	slot := int64(chunkBytes+12345) / 1024
	require.Contains(t, r.Bad[1].What, fmt.Sprintf("row %d differs", slot*2+1))

	bad := s[0].clone()
	bad.readFail = func(lba int64) error {
		if lba == 2048+7 {
			return &nvme.StatusError{Bus: "sim", Op: "read"}
		}
		return nil
	}
	r, err = verify(bg, d, targetsOf(bad, s[1]), VerifyOptions{Source: true})
	require.Error(t, err)
	require.Len(t, r.Bad, 1)
	require.EqualValues(t, 0, r.Bad[0].Chunk)

	tableHit := s[0].clone()
	st, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	tableHit.durable[int64(st[0].sb.TableLBA)*512] ^= 1
	r, err = verify(bg, d, targetsOf(tableHit, s[1]), VerifyOptions{})
	require.ErrorContains(t, err, "checksum table")
	require.EqualValues(t, -1, r.Bad[0].Chunk)

	// The source changed under the copy: only a comparison can tell.
	datasettest.Unseal(t, d.Dir()) // or the seal would
	d = datasettest.Open(t, d.Dir())
	f, err := os.OpenFile(d.Path(dataset.FeaturesName), os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{1, 2, 3}, 128+10*1024)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
	require.NoError(t, err)
	_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.ErrorContains(t, err, "row 10 differs from "+d.Path(dataset.FeaturesName))
}

// TestVerifySSDsAlone checks stripes without the dataset and without each other.
func TestVerifySSDsAlone(t *testing.T) {
	d, other := small(t, 3000, 256, 1), small(t, 300, 16, 2)
	s, alien := sealed(t, d, 3), sealed(t, other, 1)
	ts := targetsOf(s[1], alien[0])
	r, err := verifyEach(bg, ts, VerifyOptions{Source: true})
	require.NoError(t, err)
	require.Equal(t, 2, r.SSDs)
	require.Positive(t, r.Chunks)
	require.Zero(t, r.RowsCompared)

	clear(s[1].durable[:4096])
	r, err = verifyEach(bg, ts, VerifyOptions{})
	require.ErrorContains(t, err, "the SSDs: faults found: 1 in")
	require.ErrorContains(t, err, "superblock 1 of 2")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Len(t, r.Notes, 1)

	alien[0].durable[headBytes+5] ^= 1
	empty := newSim(simBytes/512, 512)
	r, err = verifyEach(bg, append(ts, targetsOf(empty, empty, empty)[2]), VerifyOptions{})
	require.Error(t, err)
	require.Len(t, r.Bad, 3)
	require.EqualValues(t, 0, r.Bad[1].Chunk)
	require.Equal(t, "sim2", r.Bad[2].SSD)
	require.Contains(t, r.Bad[2].What, "no Helios superblock")

	budget := 6
	half := newSim(simBytes/512, 512)
	half.budget = &budget
	_, err = load(bg, d, targetsOf(half), LoadOptions{})
	require.ErrorIs(t, err, errPowerLoss)
	_, err = verifyEach(bg, targetsOf(half.clone()), VerifyOptions{})
	require.ErrorContains(t, err, "did not finish")
}

func TestVerifyFindsDirtyPadding(t *testing.T) {
	d := small(t, 300, 100, 1) // one row of 400 bytes in an LBA of 512
	s := sealed(t, d, 1)
	buf := s[0].durable[headBytes : headBytes+300*512]
	buf[450] = 9
	binary.LittleEndian.PutUint32(s[0].durable[headBytes+(300*512+4095)/4096*4096:],
		crc32.Checksum(buf, castagnoli))
	r, _ := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.NotEmpty(t, r.Bad)
	require.Equal(t, "padding is not zero", r.Bad[len(r.Bad)-1].What)
}

func TestSuperblockRoundTrip(t *testing.T) {
	l, err := gpuio.NewLayout(1234, 400, 3, 512)
	require.NoError(t, err)
	g, err := newGeometry(l, 2, 512, 1<<20, 4)
	require.NoError(t, err)
	sb := Superblock{UUID: uuid.New(), LoadID: uuid.New(),
		Name:        "a name of 64 bytes " + string(bytes.Repeat([]byte{'x'}, 45)),
		State:       StateComplete,
		StripeIndex: 2, StripeCount: 3, Rows: 1234, RowBytes: 400, LBABytes: 512, RowsPerLBA: 1,
		LBAsPerRow: 1,
		DataLBA:    g.dataLBA, DataLBAs: g.dataLBAs, TableLBA: g.tableLBA, TableLBAs: g.tableLBAs,
		ChunkBytes: chunkBytes, TableCRC: 77, DeviceLBAs: 1 << 20,
		RowChecksum: checksumCRC32C, RowTableLBA: g.rowTableLBA, RowTableLBAs: g.rowTableLBAs,
		RowTableCRC: 78}
	for c := range 8 {
		switch c {
		case 2: // while it is being loaded
			sb.State, sb.Mark = StateLoading, Mark{Chunks: g.chunks, RowPieces: 1,
				Digest: [32]byte{1, 31: 2}}
		case 4, 5, 6:
			sb.RowType = rowtype.Type(c - 3)
		case 7: // a dataset of float16, as it is
			sb.DType, sb.RowType = rowtype.Float16, rowtype.Float16
		}
		b, err := sb.encode(c % 2)
		require.NoError(t, err)
		require.Len(t, b, superblockBytes)
		got, err := decodeSuperblock(b)
		require.NoError(t, err)
		require.Equal(t, sb, got)
		// the CRC covers all of it
		for _, start := range []int{8, 40, 130, 200, 275, 319, 330, 507, 508, 512, 4095} {
			b[start] ^= 1
			_, err := decodeSuperblock(b)
			require.ErrorIs(t, err, errBadSuperblock, "byte %d", start)
			b[start] ^= 1
		}
	}
	_, err = decodeSuperblock(make([]byte, superblockBytes))
	require.ErrorIs(t, err, ErrNoSuperblock)
	_, err = decodeSuperblock(nil)
	require.ErrorIs(t, err, ErrNoSuperblock)
}

// One checksum of 65,536 would make the first sector a boot sector to other programs, and to load.
func TestSuperblockIsNoBootSector(t *testing.T) {
	l, err := gpuio.NewLayout(1234, 400, 1, 512)
	require.NoError(t, err)
	g, err := newGeometry(l, 2, 512, 1<<20, 0)
	require.NoError(t, err)
	sb := Superblock{State: StateComplete, StripeCount: 1, Rows: 1234, RowBytes: 400, LBABytes: 512,
		RowsPerLBA: 1, LBAsPerRow: 1, DataLBA: g.dataLBA, DataLBAs: g.dataLBAs,
		TableLBA: g.tableLBA, TableLBAs: g.tableLBAs, ChunkBytes: chunkBytes, DeviceLBAs: 1 << 20}
	salted := 0
	for i := uint32(0); salted < 2; i++ {
		binary.LittleEndian.PutUint32(sb.LoadID[:], i)
		b, err := sb.encode(0)
		require.NoError(t, err)
		require.NotEqual(t, "\x55\xaa", string(b[510:512]))
		if b[crcOffset-1] == 0 {
			continue
		}
		salted++
		got, err := decodeSuperblock(b)
		require.NoError(t, err)
		require.Equal(t, sb, got)
	}
}

// FuzzSuperblock feeds fields with a right checksum: what passes must describe extents inside
// the SSD.
func FuzzSuperblock(f *testing.F) {
	l, _ := gpuio.NewLayout(1234, 400, 3, 512)
	g, _ := newGeometry(l, 2, 512, 1<<20, 0)
	sb := Superblock{State: StateComplete, StripeIndex: 2, StripeCount: 3, Rows: 1234,
		RowBytes: 400, LBABytes: 512, RowsPerLBA: 1, LBAsPerRow: 1,
		DataLBA: g.dataLBA, DataLBAs: g.dataLBAs, TableLBA: g.tableLBA, TableLBAs: g.tableLBAs,
		ChunkBytes: chunkBytes, DeviceLBAs: 1 << 20}
	b, err := sb.encode(0)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b[:wireBytes])
	if g, err = newGeometry(l, 2, 512, 1<<20, 4); err != nil {
		f.Fatal(err)
	}
	sb.RowChecksum, sb.RowTableLBA, sb.RowTableLBAs, sb.RowTableCRC = checksumCRC32C, g.rowTableLBA,
		g.rowTableLBAs, 1
	if b, err = sb.encode(0); err != nil {
		f.Fatal(err)
	}
	f.Add(b[:wireBytes])
	sb.State, sb.Mark = StateLoading, Mark{Chunks: 1, RowPieces: 1, Digest: [32]byte{3}}
	if b, err = sb.encode(1); err != nil {
		f.Fatal(err)
	}
	f.Add(b[:wireBytes])
	for _, rt := range rowtype.Types()[1:] {
		sb.DType, sb.RowType = rowtype.Type(len(rt.String())%2), rt
		if b, err = sb.encode(1); err != nil {
			f.Fatal(err)
		}
		f.Add(b[:wireBytes])
	}
	// With extents of pages, one of them without a slot here.
	sb.State, sb.Mark, sb.RowType, sb.DType = StateComplete, Mark{}, rowtype.Int8, rowtype.Float32
	if g, err = newGeometry(l, 2, 512, 1<<20, 8); err != nil {
		f.Fatal(err)
	}
	for i, spec := range []pages.Spec{{ID: uuid.New(), PageBytes: 8192, Pages: 40},
		{ID: uuid.New(), PageBytes: 4096, Pages: 2},
		{ID: uuid.New(), PageBytes: 4096, Pages: 300}} {
		share, err := sb.pageShare(spec)
		if err != nil {
			f.Fatal(err)
		}
		used, err := sb.runs()
		if err != nil {
			f.Fatal(err)
		}
		lba, _, _ := firstRoom(used, used[0].to, int64(g.tailLBA), share.all())
		start := nvme.LBA(lba)
		sb.Pages.e[i] = PageExtent{ID: spec.ID, State: StateLoading, PageBytes: spec.PageBytes,
			Pages: spec.Pages, LBA: start, LBAs: share.lbas, TableLBA: start + nvme.LBA(share.lbas),
			TableLBAs: share.tableLBAs}
		sb.Pages.n++
		if b, err = sb.encode(0); err != nil {
			f.Fatal(err)
		}
		if _, err := decodeSuperblock(b); err != nil {
			f.Fatal(err)
		}
		f.Add(b[:wireBytes+3*wirePagesBytes])
	}
	sb.Shared = true
	if b, err = sb.encode(0); err != nil {
		f.Fatal(err)
	}
	f.Add(b[:wireBytes+3*wirePagesBytes])
	f.Add([]byte(superblockMagic))
	f.Fuzz(func(t *testing.T, in []byte) {
		b := make([]byte, superblockBytes)
		copy(b, in)
		copy(b, superblockMagic)
		clear(b[crcOffset : crcOffset+4])
		binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
		s, err := decodeSuperblock(b)
		if err != nil {
			return
		}
		if s.StripeIndex >= s.StripeCount || s.DataLBAs < 0 || s.TableLBAs < 0 ||
			uint64(s.DataLBA)+uint64(s.DataLBAs) > s.DeviceLBAs || uint64(s.TableLBA)+
			uint64(s.TableLBAs) > s.DeviceLBAs ||
			uint64(s.RowTableLBA)+uint64(s.RowTableLBAs) > s.DeviceLBAs ||
			s.RowTableLBAs*int64(s.LBABytes) < s.layout().RowsOn(s.StripeIndex)*s.rowEntry() {
			t.Fatalf("accepted %+v", s)
		}
		if n, all := s.OnFlash(); n < 0 || n > all {
			t.Fatalf("%d of %d bytes on flash: %+v", n, all, s)
		}
		extents, err := s.Extents()
		require.NoError(t, err)
		end := nvme.LBA(0)
		for _, e := range extents {
			if e.LBA < end || e.Blocks < 0 || uint64(e.LBA)+uint64(e.Blocks) > s.DeviceLBAs {
				t.Fatalf("extents %+v of %+v", extents, s)
			}
			end = e.LBA + nvme.LBA(e.Blocks)
		}
		again, err := s.encode(0)
		require.NoError(t, err)
		if s2, err := decodeSuperblock(again); err != nil || s2 != s {
			t.Fatalf("%+v came back as %+v, %v", s, s2, err)
		}
	})
}

// features.npy that rots before a load gets no fresh checksums on the SSDs.
func TestLoadFindsRottenFeatures(t *testing.T) {
	dir := small(t, 3000, 40, 5).Dir()
	datasettest.FlipBit(t, filepath.Join(dir, dataset.FeaturesName), 200_000)
	d := datasettest.Open(t, dir)
	_, err := dataset.VerifyAllButRows(bg, d, nil)
	require.NoError(t, err)
	_, err = load(bg, d, targetsOf(junkSims()...), LoadOptions{Force: "SER0,SER1"})
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "features.npy: bytes 196608 to 262143 ")
}

func TestMain(m *testing.M) { os.Exit(datasettest.Main(m)) }
