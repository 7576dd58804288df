package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/signatures"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
)

// slowSSD plays an SSD on which a load lasts long enough to be killed in.
const slowSSD = `name: slow
title: a slow one for tests
read: {latency: {quantiles: [{q: 0, us: 10}, {q: 1, us: 10}], source: "assumed: a test"}}
write: {latency: {quantiles: [{q: 0, us: 50}, {q: 1, us: 50}], source: "assumed: a test"}, bandwidth: {mb_s: %d, source: "assumed: a test"}}
flush: {latency: {quantiles: [{q: 0, us: 50}, {q: 1, us: 50}], source: "assumed: a test"}}
`

// slowly binds two SSDs that play slowSSD, with something in every byte but the first and last MiB,
// and makes a dataset of 40 MB. force names them to a load. They are in shared memory, where a
// flush costs nothing.
func slowly(t *testing.T, mbs int) (pattern []byte, force string) {
	t.Helper()
	isolate(t)
	t.Chdir(testrig.MemoryDir(t))
	require.NoError(t, os.WriteFile("slow.yaml", fmt.Appendf(nil, slowSSD, mbs), 0o644))
	pattern = bytes.Repeat([]byte("what was there before. "), 24<<20/23+1)[:24<<20]
	clear(pattern[:signatures.BlankBytes])
	clear(pattern[len(pattern)-signatures.BlankBytes:])
	for i := range 2 {
		require.NoError(t, os.WriteFile(fmt.Sprintf("ssd%d.img", i), pattern, 0o644))
	}
	ok(t, "generate", "--nodes", "20000", "--dim", "500", "--avg-degree", "2", "--seed", "5",
		"--out", "g", "--quiet")
	bound := lines(t, ok(t, "bind-ssds", "--proxy", "ssd0.img,ssd1.img", "--ssd-model", "slow.yaml",
		"--buffered", "--json"))
	return pattern, fmt.Sprintf("%s,%s", bound[0]["serial"], bound[1]["serial"])
}

// requireOutside: nothing but the extents that a load's result names has changed.
func requireOutside(t *testing.T, pattern []byte, result map[string]any) {
	t.Helper()
	for i, s := range result["extents"].([]any) {
		b, err := os.ReadFile(fmt.Sprintf("ssd%d.img", i))
		require.NoError(t, err)
		require.Len(t, b, len(pattern))
		ssd := s.(map[string]any)
		lba := ssd["lba_bytes"].(float64)
		inside := 0
		for _, e := range ssd["extents"].([]any) {
			offset, n := int(e.(map[string]any)["lba"].(float64)*lba),
				int(e.(map[string]any)["blocks"].(float64)*lba)
			copy(b[offset:offset+n], pattern[offset:])
			inside += n
		}
		require.True(t, bytes.Equal(pattern, b),
			"SSD %d: bytes outside the extents of the load have changed", i)
		require.Less(t, inside, len(b)*19/20, "there is an outside")
	}
}

// marked returns how many chunks of ssd0.img a load has said are there.
func marked(t *testing.T) uint64 {
	t.Helper()
	f, err := os.Open("ssd0.img")
	require.NoError(t, err)
	defer f.Close()
	b := make([]byte, 8)
	_, err = f.ReadAt(b, 272) // dataset/stripe/superblock.go: MarkChunks
	require.NoError(t, err)
	return binary.LittleEndian.Uint64(b)
}

// torn takes the notes away that come first where a load was killed between the two copies of an
// SSD's superblock.
func torn(r outcome) outcome {
	lines := slices.DeleteFunc(strings.SplitAfter(r.errOut, "\n"), func(l string) bool {
		return strings.HasPrefix(l, "ssd ssd") &&
			strings.Contains(l, "the two superblocks differ: a load was interrupted")
	})
	r.errOut = strings.Join(lines, "")
	return r
}

// A load that is killed again and again at random moments goes on each time, and ends as one that
// was left alone.
func TestKilledLoadGoesOn(t *testing.T) {
	pattern, force := slowly(t, 4)
	kills := 3
	if wide.Lean() {
		kills = 1
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for range kills {
		c := child(t, "load", "g", "--quiet", "--mark-every", "400ms", "--force", force)
		require.NoError(t, c.Start())
		before := marked(t)
		require.Eventually(t, func() bool { return marked(t) > before }, 20*time.Second,
			5*time.Millisecond)
		// the random moment, after a mark
		time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		require.NoError(t, c.Process.Kill())
		require.Error(t, c.Wait(), "it was done before it was killed: make slowSSD slower")
		fails(t, torn(hc(t, "verify", "g")), 5, "verify", "did not finish",
			"% of its stripe is there", "heliosctl load")
		fails(t, torn(hc(t, trainArgs("--epochs", "1")...)), 5, "train", "did not finish")
	}
	out := hc(t, "load", "g", "--json")
	require.Equal(t, 0, out.code, out.errOut)
	r := last(t, out.out)
	require.Contains(t, out.errOut,
		"are on the SSDs from a load that was interrupted; going on there")
	require.GreaterOrEqual(t, r["resumed_bytes"], float64(kills)*1e6)
	require.Contains(t, ok(t, "verify", "g", "--source"), "20000 rows equal to the source")
	requireOutside(t, pattern, r)
	require.Equal(t, r["extents"], last(t, ok(t, "verify", "g", "--json"))["extents"])
}

// Ctrl-C ends a load with 130, a mark and the next command; --restart starts over.
func TestInterruptedLoad(t *testing.T) {
	pattern, force := slowly(t, 16)
	fails(t, hc(t, "load", "g", "--mark-every", "0s"), 2, "load",
		"--mark-every 0s is not a positive number")
	stop := func(after time.Duration, args ...string) outcome {
		c := child(t, args...)
		var errOut strings.Builder
		c.Stderr = &errOut
		require.NoError(t, c.Start())
		time.Sleep(after)
		require.NoError(t, c.Process.Signal(syscall.SIGINT))
		require.Error(t, c.Wait())
		return outcome{c.ProcessState.ExitCode(), "", errOut.String()}
	}
	// A load whose rows are under way when it is stopped, however slow the machine is to begin:
	// sooner than a first mark is due.
	begun := func(args ...string) outcome {
		for after := 700 * time.Millisecond; ; after *= 2 {
			o := stop(after, args...)
			if strings.Contains(o.errOut, "% of it are on the SSDs") || after > 5*time.Second {
				return o
			}
			require.Contains(t, []int{130, -1}, o.code, o.errOut)
		}
	}
	fails(t, begun("load", "g", "--quiet", "--row-dtype", "float32", "--force", force), 130, "load", "interrupted",
		"% of it are on the SSDs",
		"the next \"heliosctl load --dataset g --row-dtype float32\" goes on there")
	require.Contains(t, ok(t, "load", "g"), ", resumed at ")
	// A signal that comes before the process waits for it kills it: then it comes later.
	var verify outcome
	for after := 300 * time.Millisecond; after < 20*time.Second; after *= 2 {
		verify = stop(after, "verify", "g", "--quiet", "--source", "--fault", "late(op=read,ms=3000)")
		if verify.code != -1 {
			break
		}
	}
	fails(t, verify, 130, "verify", "interrupted", "run it again")

	fails(t, begun("load", "g", "--quiet"), 130, "load", "interrupted")
	out := hc(t, "load", "g", "--restart", "--json")
	require.Equal(t, 0, out.code, out.errOut)
	require.Contains(t, out.errOut, "starting over, not where the interrupted load was: a restart was asked for")
	r := last(t, out.out)
	require.Equal(t, "a restart was asked for", r["started_over"])
	require.Zero(t, r["resumed_bytes"])
	require.Contains(t, ok(t, "verify", "g", "--source"), "20000 rows equal")
	requireOutside(t, pattern, r)
}
