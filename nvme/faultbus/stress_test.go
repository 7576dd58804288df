package faultbus_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// Without a fault everything goes through, in time: several queues over every kind of controller,
// rings that wrap, waited for alone, in a group or by nobody.
func TestTransparent(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 50
	}
	for _, ram := range []bool{true, false} {
		for _, wait := range []string{"alone", "group", "nobody"} {
			t.Run(fmt.Sprintf("ram=%v/%s", ram, wait), func(t *testing.T) {
				g := newRig(t, rigOptions{proxy: func(c *proxy.Config) { c.RAM = ram },
					opt: faultbus.Options{PollDoorbells: wait == "nobody"}})
				rng := rand.New(rand.NewPCG(1, 2))
				var qs []*queue
				var refs []nvme.CQRef
				for _, entries := range []int{2, 3, 8, 33} {
					q := g.queue(entries)
					qs, refs = append(qs, q), append(refs, nvme.CQRef{Bus: g.bus, QID: q.qp.ID})
				}
				var group nvme.CQGroup
				if wait == "group" {
					var err error
					group, err = g.bus.GroupCQs(refs)
					require.NoError(t, err)
					defer func() { require.NoError(t, group.Close()) }()
				}
				worst := time.Duration(0)
				for range rounds {
					out := map[[2]int]int{} // queue and CID: LBA
					for i, q := range qs {
						var cmds []nvme.Command
						for cid := range 1 + rng.IntN(q.qp.Entries-1) {
							lba := rng.IntN(8000)
							out[[2]int{i, cid}] = lba
							cmds = append(cmds, g.read(uint16(cid), lba, 1, (i*64+cid)*512))
						}
						q.Put(cmds...)
					}
					start := time.Now()
					for len(out) > 0 {
						require.Less(t, time.Since(start), patience)
						for i, q := range qs {
							for e, ok := q.Poll(); ok; e, ok = q.Poll() {
								k := [2]int{i, int(e.CID)}
								lba, ours := out[k]
								require.True(t, ours && e.Status().OK(), "%+v", e)
								g.holds(lba, 1, (i*64+int(e.CID))*512)
								delete(out, k)
							}
						}
						switch {
						case len(out) == 0:
						case wait == "group":
							group.Wait(patience)
						case wait == "alone":
							for k := range out {
								g.bus.WaitCQ(qs[k[0]].qp.ID, patience)
								break
							}
						default:
							time.Sleep(20 * time.Microsecond)
						}
					}
					worst = max(worst, time.Since(start))
				}
				t.Log("longest round:", worst)
			})
		}
	}
}
