package gpuio

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGenerations: identifiers go round without FFFFh, and only the last attempt's is the
// command's.
func TestGenerations(t *testing.T) {
	for _, cid := range []uint32{0, 7, maxCommands - 1} {
		seen := map[uint16]bool{}
		state := uint32(cmdFree)
		for n := range 2 * generations {
			before := wireCID(cid, state)
			state = issued(state)
			wire := wireCID(cid, state)
			require.NotEqual(t, before, wire)
			require.NotEqual(t, uint16(0xffff), wire)
			require.EqualValues(t, cid, wire&cidMask)
			require.Equal(t, n >= generations, seen[wire], "%d", n)
			seen[wire] = true
			require.EqualValues(t, 1, state/cmdAttempt)
			for _, tag := range []uint32{0, 1 << 16, 0xffff << 16} { // phase and status
				require.True(t, answers(state, uint32(wire)|tag))
				require.True(t, answers(state|cmdAborted, uint32(wire)|tag))
				require.False(t, answers(state, uint32(before)|tag))
				for _, other := range []uint32{cmdFree, cmdRetry, cmdDone} {
					require.False(t, answers(state&^cmdState|other, uint32(wire)|tag))
				}
			}
			again := issued(state&^cmdState | cmdAborted | cmdRetry) // a retry
			require.EqualValues(t, 2*cmdAttempt|cmdInFlight, again&^cmdGen)
			require.NotEqual(t, wire, wireCID(cid, again))
			state = state&cmdGen | cmdFree
		}
		require.Len(t, seen, generations)
	}
}

// TestLateDuplicate: a completion comes again when its CID is in use by a command that has no data
// yet. Rows go through staging slots, from which they would be copied too early, and for good.
func TestLateDuplicate(t *testing.T) {
	const faults = "dup(op=read,n=1000,times=1);late(ms=5,op=read)"
	for _, stack := range []string{"async", "sync"} {
		t.Run(stack, func(t *testing.T) {
			onClock(t, "virtual", func(t *testing.T) {
				r, err := openFaultRig(t, faultShape{ssds: 1, lba: 512, rowBytes: 100, rows: 400,
					sms: 2, mdts: 5}, faults)
				require.NoError(t, err)
				c := faultCase{stack: stack}
				rd := c.mustReader(r, false)
				s := r.newSet(rand.New(rand.NewPCG(3, 4)), 200, 100, 0)
				s.read(rd)
				require.Positive(t, rd.Stats().Staged)
				require.EqualValues(t, 1, rd.Stats().Foreign)
				require.EqualValues(t, 1, rd.Stats().Recreated)
				r.set.Disarm()
				s.read(rd)
				s.drop(rd)
			})
		})
	}
}

// TestLateDuplicateBulk: what load and verify go through gets a new queue pair, too, as long as
// attempts are left.
func TestLateDuplicateBulk(t *testing.T) {
	for _, c := range []struct {
		faults string
		retries,
		recreated int
		err string
	}{
		{"dup(op=read,n=1000,times=1);late(ms=5,op=read)", 3, 1, ""},
		{"dup(op=read,n=1000,times=1);late(ms=5,op=read)", 0, 1, "which is not in flight"},
		{"dup(op=read,times=1)", 3, 1, ""},
		{"foreign(op=read,times=1)", 3, 1, ""},
	} {
		onClock(t, "virtual", func(t *testing.T) {
			r, err := openFaultRig(t, faultShape{ssds: 1, lba: 512, rowBytes: 512, rows: 2000,
				sms: 1, mdts: 1}, c.faults)
			require.NoError(t, err)
			ctx := t.Context()
			b, err := NewBulk(ctx, r.ssds[0].Ctrl, 3, BulkRetries(c.retries))
			require.NoError(t, err)
			defer func() { require.NoError(t, b.Close(ctx)) }()
			// the last command has the CID of the one whose completion comes again
			want := r.image(0, false)[:4*b.chunk]
			got := make([]byte, len(want))
			if err = b.ReadAt(ctx, 0, got); c.err == "" {
				require.NoError(t, err, c.faults)
				require.True(t, bytes.Equal(want, got), c.faults)
			} else {
				require.ErrorContains(t, err, c.err, c.faults)
			}
			require.EqualValues(t, c.recreated, b.tried.recreated.Load(), c.faults)
			r.set.Disarm()
			require.NoError(t, b.ReadAt(ctx, 0, got))
			require.True(t, bytes.Equal(want, got))
		})
	}
}
