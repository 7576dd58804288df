package suite

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/bench"
)

func raw(lines ...string) (all []json.RawMessage) {
	for _, l := range lines {
		all = append(all, json.RawMessage(l))
	}
	return all
}

func only(t *testing.T, steps ...Step) []Figure {
	t.Helper()
	f, err := Figures(steps)
	require.NoError(t, err)
	return f
}

// A row's floor is its lowest limit, in the row's own unit; what has none has no share.
func TestFloorsOfReads(t *testing.T) {
	f := only(t, Step{Name: "ssds", Verb: "bench io", Rows: raw(
		`{"ssds":2,"stack":"async","row_bytes":4096,"depth":8,"iops":100000,"bytes_per_second":409600000,"audited":true,"ssd_bound_iops":200000,"link_bound_iops":125000,"depth_bound_iops":400000}`,
		`{"ssds":2,"stack":"async","row_bytes":4096,"depth":8,"iops":50000,"bytes_per_second":204800000,"audited":true,"ssd_bound_iops":200000,"link_bound_iops":125000,"depth_bound_iops":400000}`,
		`{"ssds":1,"stack":"async","row_bytes":4096,"depth":8,"iops":50000,"bytes_per_second":204800000,"audited":false,"serve_iops":200000}`,
		`{"ssds":4,"stack":"async","row_bytes":4096,"depth":8,"iops":50000,"bytes_per_second":204800000,"audited":true}`,
		`{"kind":"summary","ssds":2}`)})
	require.Len(t, f, 3)
	require.Equal(t, "2 SSDs", f[0].What)
	require.Equal(t, 2, f[0].Rounds)
	require.True(t, f[0].Audited)
	g := 4096.0 / (1 << 30)
	require.Equal(t, bench.Spread{Median: 75000 * g, Min: 50000 * g, Max: 100000 * g}, f[0].Value)
	require.InDelta(t, 125000*g, f[0].Floor, 1e-9)
	require.InDelta(t, 0.6, f[0].Share, 1e-9)
	require.Equal(t, "bandwidth of the link, in reads of 4 KiB: 125 k/s", f[0].Why)
	require.False(t, f[1].Audited)
	require.InDelta(t, 0.25, f[1].Share, 1e-9)
	require.Contains(t, f[1].Why, "CPUs that play the SSDs")
	require.Zero(t, f[2].Floor)
	require.Zero(t, f[2].Share)
}

// Floors that come from other steps: a copy's bandwidth, random reads of memory, and for an epoch
// its reads or its training, whichever is longer.
func TestFloorsFromOtherSteps(t *testing.T) {
	f := only(t,
		Step{Name: "modes", Verb: "compare", Rows: raw(
			`{"event":"run","variant":"a","io_stack":"async","epoch_seconds":2,"ssd_commands":50000,"bytes_ssd":25600000,"stage_seconds":{"train":0.5},"losses":[1]}`,
			`{"event":"run","variant":"b","io_stack":"async","epoch_seconds":4,"ssd_commands":1000,"bytes_ssd":512000,"stage_seconds":{"train":1},"losses":[1]}`,
			`{"event":"run","variant":"file","io_stack":"mmap","epoch_seconds":1,"ssd_commands":50000,"bytes_ssd":25600000,"stage_seconds":{"train":1},"losses":[1]}`,
			`{"event":"compare"}`)},
		Step{Name: "sample", Verb: "bench sample", Rows: raw(
			`{"graph":"even","workers":2,"edges_per_second":1e8,"audited":true}`)},
		Step{Name: "cache", Verb: "bench cache", Rows: raw(
			`{"policy":"lru","nodes":10,"device":"host","workers":1,"lookups_per_second":{"median":1e6},"audited":true}`,
			`{"policy":"static","nodes":10,"device":"host","workers":2,"lookups_per_second":{"median":2e7},"limit_per_second":{"median":4e7},"audited":true}`)},
		Step{Name: "memory", Verb: "bench memory", Rows: raw(
			`{"from":"cpu","row_bytes":512,"device":"host","gather_bytes_per_second":{"median":4e9},"copy_bytes_per_second":{"median":8e9},"audited":true}`)},
		Step{Name: "rows", Verb: "bench io", Rows: raw(
			`{"ssds":2,"stack":"async","row_bytes":512,"iops":40000,"bytes_per_second":2e7,"ssd_bound_iops":50000}`,
			`{"ssds":2,"stack":"async","row_bytes":4096,"iops":9000,"bytes_per_second":4e7,"ssd_bound_iops":10000}`)},
		Step{Name: "stacks", Verb: "bench io", Apart: true, Rows: raw(
			`{"ssds":1,"stack":"cpu","row_bytes":512,"iops":1e6,"bytes_per_second":4e9}`)})
	shares := map[string]float64{}
	for _, x := range f {
		shares[x.Step+" "+x.What] = x.Share
	}
	for what, share := range map[string]float64{
		"modes a":    0.5,   // 50,000 reads by 50,000 IOPS take 1 s of 2
		"modes b":    0.125, // training: 0.5 s of 4
		"modes file": 0.5,   // its reads pass the SSDs by
		"sample even graph, topology in , 2 workers, ":      1e8 / 1e9, // 8 bytes an edge
		"cache lru, 10 nodes, 1 workers":                    1e6 / 4e7,
		"cache static, 10 nodes, 2 workers":                 0.5,
		"memory gather of 512 B rows from cpu memory, host": 0.5,
		"rows 2 SSDs, 512 B rows":                           0.8,
		"rows 2 SSDs, 4 KiB rows":                           0.9,
		"stacks 1 SSD":                                      0.5, // SSDs of memory
	} {
		require.Contains(t, shares, what)
		require.InDelta(t, share, shares[what], 1e-9, what)
	}
	require.Len(t, shares, 10)
	require.Equal(t, "modes", f[0].Step, "in the order of the steps")
	require.Contains(t, f[0].Why, "50 k reads by the 50 k/s that SSDs and link allow")
}

// Operations by the peak, or bytes by a copy's bandwidth where that takes longer.
func TestFloorsOfKernels(t *testing.T) {
	f := only(t, Step{Name: "compute", Verb: "bench compute", Rows: raw(
		`{"case":"nn","precision":"fp32","workers":2,"flops_per_second":5e10,"peak_flops_per_second":1e11,"floor_seconds":0.5,"seconds_per_run":{"median":1},"ok":true}`,
		`{"case":"agg","precision":"fp32","workers":2,"flops_per_second":1e9,"peak_flops_per_second":1e11,"floor_seconds":0.25,"seconds_per_run":{"median":1},"ok":false}`,
		`{"case":"copy","precision":"fp32","workers":2,"seconds_per_run":{"median":1},"ok":true}`)})
	require.Len(t, f, 2)
	require.InDelta(t, 100, f[0].Floor, 1e-9)
	require.InDelta(t, 0.5, f[0].Share, 1e-9)
	require.Equal(t, "operations by the peak", f[0].Why)
	require.InDelta(t, 0.25, f[1].Share, 1e-9)
	require.Equal(t, "bytes by the bandwidth of a copy", f[1].Why)
	require.False(t, f[1].Audited)
	_, err := Figures([]Step{{Name: "x", Verb: "bench io", Rows: raw(`{"ssds":"two"}`)}})
	require.ErrorContains(t, err, "step x")
}
