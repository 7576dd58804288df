package gpuio

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/nvme"
	"helios/nvme/faultbus"
)

// TestCheckedDataFaults: data that is wrong under a status of success is seen by nothing but its
// checksum: once, it is mended by the second read; always, it fails the row, by name.
func TestCheckedDataFaults(t *testing.T) {
	for _, stack := range []struct { // the others read the file behind the SSD
		name string
		make func(*rig) (Reader, error)
		runs bool // byte 9 of a command need not be of the row at the LBA that is named
	}{
		{"async", func(r *rig) (Reader, error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32, CoalesceBytes: -1})
		}, false},
		{"coalesced", func(r *rig) (Reader, error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32, CoalesceBytes: 8192})
		}, true},
		{"sync",
			func(r *rig) (Reader,
				error) {
				return NewSync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32})
			}, false},
	} {
		for _, c := range []struct {
			fault string
			heals bool
		}{
			{"flip(op=read,byte=9,bit=3,after=10,times=1)", true},
			{"flip(op=read,byte=300,bit=7,times=3)", true},
			{"short(op=read,bytes=16,after=7,times=1)", true},
			{"misdirect(op=read,shift=8,after=2,times=2)", true},
			{"flip(op=read,lba=25,byte=9,bit=3)", false},
			{"short(op=read,lba=25,bytes=4)", false},
			{"misdirect(op=read,lba=25,shift=8)", false},
		} {
			if stack.runs && !c.heals {
				continue
			}
			t.Run(stack.name+"/"+c.fault, func(t *testing.T) {
				var set *faultinject.Set
				r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 400, ram: true,
					wrap: func(b nvme.Bus) nvme.Bus {
						if set != nil { // faults of the first SSD only
							return faultbus.New(b, nil, faultbus.Options{})
						}
						var err error
						set, err = faultinject.Parse(c.fault)
						require.NoError(t, err)
						return faultbus.New(b, set, faultbus.Options{})
					}})
				inner, err := stack.make(r)
				rd := r.checked(inner, err)
				s := r.newSet(rand.New(rand.NewPCG(1, 1)), 300, 512, 0)
				row := int64(25-rigDataStart) * 2
				in := false
				for _, id := range s.ids {
					in = in || id == row
				}
				require.True(t, in, "row %d is in the set", row)
				if c.heals {
					s.read(rd)
				} else {
					p, err := rd.Submit(testCtx(t), s.rs)
					require.NoError(t, err)
					_, err = p.Wait(testCtx(t))
					var sum *ChecksumError
					require.ErrorAs(t, err, &sum)
					require.Equal(t, errs.Device, errs.ClassOf(err))
					require.ErrorContains(t, err, "run \"heliosctl verify --ssds ssd0\"")
					require.Equal(t, row, sum.Row)
					require.EqualValues(t, 25, sum.LBA)
					s.check(map[int64]bool{row: true})
				}
				for f, n := range set.Counts() {
					require.Positive(t, n, f)
				}
				st := rd.Stats()
				require.Positive(t, st.Mismatch)
				require.Equal(t, c.heals, st.Failed == 0)
				s.free(rd)
			})
		}
	}
}
