package stripe

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

var errWrite = errors.New("simulated write fault")

// faultSims are SSDs with old junk in every byte, so that what a write leaves out shows.
func faultSims() []*simSSD {
	s := sims(2, 512)
	for _, x := range s {
		for i := range x.durable {
			x.durable[i] = byte(0xa5 ^ i>>9)
		}
	}
	return s
}

// covered reports whether checksums cover an extent of a simulated SSD: all but the zeros at both
// ends.
func covered(x *simSSD, start, n int64) bool {
	size := int64(len(x.durable))
	return start == 0 || start >= size-superblockBytes ||
		(start >= headBytes && start+n <= size-tailBytes)
}

// requireHonest: what attach accepts holds every row, byte for byte, and all that verify can check.
func requireHonest(t *testing.T, d *dataset.Dataset, s []*simSSD, why string) (accepted bool) {
	t.Helper()
	ts := targetsOf(s...)
	if _, err := attach(bg, d, ts, AttachOptions{}); err != nil {
		require.Equal(t, errs.Device, errs.ClassOf(err), "%s: %v", why, err)
		return false
	}
	r, err := verify(bg, d, ts, VerifyOptions{Source: true})
	for _, b := range r.Bad {
		require.Contains(t, b.What, "superblock", "%s: looks whole, but %v", why, err)
	}
	require.EqualValues(t, d.Meta.Nodes, r.RowsChecked, why)
	return true
}

// TestFailedWriteOrFlush: each single write and each flush of a load fails once, with the SSD well
// otherwise: the load fails, with the cause, and what it leaves is refused or is whole.
func TestFailedWriteOrFlush(t *testing.T) {
	d := small(t, 900, 700, 1)
	for _, what := range []string{"write", "flush"} {
		for ssd := range 2 {
			for k := 0; ; k++ {
				s := faultSims()
				hit := false
				if what == "write" {
					s[ssd].onWrite = func(n int, _ int64, _, data []byte) ([]byte, error) {
						if n == k {
							hit = true
							return nil, &nvme.StatusError{Bus: "sim", Op: "write",
								Status: nvme.NewStatus(0, 0x81, true)}
						}
						return data, nil
					}
				} else {
					s[ssd].onFlush = func(n int) (bool, error) {
						if n == k {
							hit = true
							return false, errWrite
						}
						return true, nil
					}
				}
				_, err := load(bg, d, targetsOf(s...), LoadOptions{Force: "SER0,SER1"})
				if !hit {
					require.NoError(t, err)
					require.GreaterOrEqual(t, k, 5, "few %ss were tried", what)
					require.True(t, requireHonest(t, d, s, "no fault"))
					break
				}
				why := fmt.Sprintf("%s %d of SSD %d failed", what, k, ssd)
				require.ErrorContains(t, err, fmt.Sprintf("ssd sim%d: ", ssd), why)
				requireHonest(t, d, s, why)
				scrap(s...)
			}
		}
	}
}

// TestTornAndLostWrites: each single write of a load lands in part, or not at all, and the SSD says
// that all is well. The load cannot know; attach or verify tell, or nothing that counts is missing.
func TestTornAndLostWrites(t *testing.T) {
	d := small(t, 2600, 256, 1) // two chunks and 5200 bytes of row sums an SSD
	for _, part := range []string{"first half", "nothing", "first LBA"} {
		t.Run(part, func(t *testing.T) {
			found := 0
			for k := 0; ; k++ {
				s := faultSims()
				hit, matters := false, false
				s[0].onWrite = func(n int, start int64, old, data []byte) ([]byte, error) {
					if n != k {
						return data, nil
					}
					keep := map[string]int{"first half": len(data) / 2 / 512 * 512, "nothing": 0,
						"first LBA": 512}[part]
					hit = true
					matters = covered(s[0], start, int64(len(data))) &&
						!bytes.Equal(old[keep:], data[keep:])
					return data[:keep], nil
				}
				_, err := load(bg, d, targetsOf(s...), LoadOptions{Force: "SER0,SER1"})
				require.NoError(t, err)
				if !hit {
					break
				}
				ts := targetsOf(s...)
				r, err := verify(bg, d, ts, VerifyOptions{})
				// Superblocks are written twice, loading and complete: a lost first one is made
				// good. And the rest of a table's last LBAs is padding that nobody reads.
				if matters && err == nil {
					st, err := attach(bg, d, ts, AttachOptions{})
					require.NoError(t, err)
					requireRows(t, d, st[0].sb.layout(),
						func(i int) blockDev { return st[i].t.dev },
						func(i int) nvme.LBA { return st[i].sb.DataLBA })
					_, err = verify(bg, d, ts, VerifyOptions{Source: true})
					require.NoError(t, err, "write %d", k)
					sums, err := rowSums(bg, d, st)
					require.NoError(t, err)
					require.Equal(t, wantSums(t, d), sums, "write %d", k)
				} else if matters {
					found++
					require.Equal(t, errs.Device, errs.ClassOf(err))
				} else {
					require.NoError(t, err, "write %d: %+v", k, r.Bad)
				}
				scrap(s...)
			}
			// The chunks and the row table; nothing of a write also shows in the chunk table and in
			// the superblocks, whose first LBA holds all that they say.
			require.GreaterOrEqual(t, found, map[string]int{"first half": 3, "nothing": 6,
				"first LBA": 3}[part])
		})
	}
}

// TestLyingFlush: an SSD that says flushed and is not loses power: what attach and verify then
// accept is right in every row.
func TestLyingFlush(t *testing.T) {
	d := small(t, 900, 700, 1)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	refused, found := 0, 0
	for range 60 {
		s := faultSims()
		for _, x := range s { // which flush at once
			own := rand.New(rand.NewPCG(rng.Uint64(), 1))
			x.onFlush = func(int) (bool, error) { return own.IntN(4) == 0, nil }
		}
		must(load(bg, d, targetsOf(s...), LoadOptions{Force: "SER0,SER1"}))
		after := []*simSSD{s[0].restart(rng), s[1].restart(rng)}
		ts := targetsOf(after...)
		st, err := attach(bg, d, ts, AttachOptions{})
		if err != nil {
			refused++
		} else if _, err := verify(bg, d, ts, VerifyOptions{}); err != nil {
			found++
		} else {
			requireRows(t, d, st[0].sb.layout(), func(i int) blockDev { return st[i].t.dev },
				func(i int) nvme.LBA { return st[i].sb.DataLBA })
		}
		scrap(append(s, after...)...)
	}
	t.Logf("%d refused, %d found by verify", refused, found)
	require.Positive(t, refused+found)
}

// TestLoadFaultsThroughTheNVMeStack: a full SSD, failing flushes and lost completions, as NVMe has
// them. Transient faults are made good; others end the load and leave nothing whole.
func TestLoadFaultsThroughTheNVMeStack(t *testing.T) {
	d := small(t, 1500, 256, 1)
	for _, c := range []struct {
		name, fault, want string // want "": the load succeeds
		times             int64
	}{
		{"full", "error(op=write,after=6,sct=0,sc=0x81,dnr=1,times=1)", "capacity", 1},
		{"full from the data on", "error(op=write,lba=2500-4000,sct=0,sc=0x81,dnr=1)",
			"capacity", 1},
		{"media", "error(op=write,lba=2100,sct=2,sc=0x80,dnr=1)", "write fault", 1},
		{"namespace gone read-only", "error(op=write,after=3,sct=0,sc=0x20,dnr=1)",
			"write protected", 1},
		{"first flush", "error(op=flush,sct=0,sc=6,dnr=1,times=1)", "flush", 1},
		{"flush of the data", "error(op=flush,after=2,sct=0,sc=6,dnr=1,times=1)", "flush", 1},
		{"last flush", "error(op=flush,after=4,sct=0,sc=6,dnr=1,times=1)", "flush", 1},
		{"transient write", "error(op=write,after=2,sct=0,sc=6,dnr=0,times=3)", "", 3},
		{"transient flush", "error(op=flush,sct=0,sc=6,dnr=0,times=2)", "", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			paths := backing(t, 2, true, 8<<20)
			ssds, done := openProxies(t, paths, true, 512, c.fault)
			_, err := Load(bg, d, ssds, LoadOptions{})
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				require.ErrorContains(t, err, c.want)
				require.Regexp(t, `ssd ssd[01]\.img: `, err.Error())
			}
			done()
			ssds, done = openProxies(t, paths, true, 512, "")
			defer done()
			_, err = Find(bg, d, ssds, AttachOptions{})
			if err == nil {
				r, err := Verify(bg, d, ssds, VerifyOptions{Source: true})
				require.NoError(t, err)
				require.EqualValues(t, 1500, r.RowsChecked)
			} else {
				require.NotEmpty(t, c.want, "%v", err)
				// The next load makes it good.
				_, err = Load(bg, d, ssds, LoadOptions{})
				require.NoError(t, err)
				_, err = Verify(bg, d, ssds, VerifyOptions{Source: true})
				require.NoError(t, err)
			}
		})
	}
}

// TestSilentWriteFaults: writes that land in part or elsewhere, with a status of success. The load
// cannot know; attach, verify or the row sums tell, or every row is right all the same.
func TestSilentWriteFaults(t *testing.T) {
	d := small(t, 1500, 256, 1)
	for _, fault := range []string{"torn(op=write,lba=2048-9000,after=%d,times=1)",
		"misdirect(op=write,shift=8,lba=2048-9000,after=%d,times=1)",
		"misdirect(op=write,shift=64,lba=2048-9000,after=%d,times=1)"} {
		t.Run(fault, func(t *testing.T) {
			found := 0
			for after := range 5 { // three commands of data, the row table, the chunk table
				paths := backing(t, 2, true, 8<<20)
				ssds, done := openProxies(t, paths, true, 512, fmt.Sprintf(fault, after))
				_, err := Load(bg, d, ssds, LoadOptions{})
				require.NoError(t, err)
				done()
				ssds, done = openProxies(t, paths, true, 512, "")
				r, err := Verify(bg, d, ssds, VerifyOptions{})
				switch {
				case err != nil:
					require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
					found++
					for _, b := range r.Bad {
						if b.Chunk >= 0 {
							require.NotEmpty(t, b.Rows, "after %d: %+v", after, b)
						}
					}
				default:
					r, err = Verify(bg, d, ssds, VerifyOptions{Source: true})
					require.NoError(t, err, "after %d", after)
					require.EqualValues(t, 1500, r.RowsCompared)
				}
				done()
			}
			t.Logf("%d of 5 writes were found to be missed", found)
			require.GreaterOrEqual(t, found, 4)
		})
	}
}

// quick opens SSDs for loads as openTargets does, with commands that time out soon.
func quick(t *testing.T, ssds []*gpuio.SSD) ([]*target, func()) {
	var ts []*target
	for _, s := range ssds {
		ns := s.Ctrl.Namespace()
		b, err := gpuio.NewBulk(bg, s.Ctrl, bulkDepth, gpuio.BulkTimeout(100*time.Millisecond))
		require.NoError(t, err)
		ts = append(ts, &target{dev: b, ssd: s, name: s.Name, serial: s.Ctrl.Serial(),
			lbaBytes: ns.LBABytes, lbas: ns.Blocks})
	}
	return ts, func() { _ = closeTargets(bg, ts) } // of an SSD that is gone
}

// TestLoadOverSilence: commands and completions that get lost cost time and nothing else; an SSD
// that leaves its bus ends the load, and nothing that looks whole is left.
func TestLoadOverSilence(t *testing.T) {
	d := small(t, 1500, 256, 1)
	for _, c := range []struct {
		fault string
		heals bool
	}{
		{"lost(op=write,after=3,times=1)", true},
		{"lost(op=flush,times=1)", true},
		{"drop(op=write,lba=2048-6000,times=2)", true},
		{"drop(op=flush,after=1,times=1)", true},
		{"lost(op=write,lba=2048-6000)", false},
		{"gone(op=write,after=11)", false},
	} {
		t.Run(c.fault, func(t *testing.T) {
			paths := backing(t, 2, true, 8<<20)
			var faulty []*gpuio.SSD
			for _, p := range paths {
				f, err := faultinject.Parse(c.fault)
				require.NoError(t, err)
				bus, err := proxy.Open(proxy.Config{Path: p, RAM: true, LBABytes: 512})
				require.NoError(t, err)
				ctrl, err := nvme.Open(bg, faultbus.New(bus, f, faultbus.Options{}), nvme.Options{})
				require.NoError(t, err)
				faulty = append(faulty, &gpuio.SSD{Ctrl: ctrl, Name: filepath.Base(p),
					BackingPath: p})
			}
			ts, done := quick(t, faulty)
			_, err := load(bg, d, ts, LoadOptions{})
			done()
			for _, s := range faulty {
				if cerr := s.Ctrl.Close(bg); c.heals {
					require.NoError(t, cerr)
				}
			}
			ssds, end := openProxies(t, paths, true, 512, "")
			defer end()
			_, aerr := Find(bg, d, ssds, AttachOptions{})
			if c.heals {
				require.NoError(t, err)
				require.NoError(t, aerr)
				r, err := Verify(bg, d, ssds, VerifyOptions{Source: true})
				require.NoError(t, err)
				require.EqualValues(t, 1500, r.RowsChecked)
			} else {
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				require.ErrorContains(t, aerr, "did not finish")
			}
		})
	}
}
