package partition

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/metis"
)

// library is METIS; tests skip where there is none.
func library(t *testing.T) *metis.Library {
	t.Helper()
	l, err := metis.Open("")
	if err != nil {
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		if os.Getenv("HELIOS_NEED_METIS") != "" { // make test-metis
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return l
}

func TestMETIS(t *testing.T) {
	library(t)
	e, group := planted(generator(1), 8, 500, 12, 2)
	x := e.topology(t, false)
	p := made(t, x, Options{Parts: 8, Method: METIS, Seed: 1})
	require.Greater(t, agreement(p.Of, group, 8), 0.99)
	require.Equal(t, METIS, p.Info.Method)
	require.NotEmpty(t, p.Info.Library)
	require.Equal(t, p.Of, made(t, x, Options{Parts: 8, Method: METIS, Seed: 1}).Of)
	require.Equal(t, p.Of, made(t, e.onStorage(t), Options{Parts: 8, Seed: 1}).Of) // by auto
	for _, balance := range []float64{1, 1.5} {
		made(t, x, Options{Parts: 3, Method: METIS, Balance: balance})
	}
	for _, e := range []*edges{{nodes: 1}, {nodes: 10}, anyEdges(generator(4), 300, 2000)} {
		made(t, e.topology(t, false), Options{Parts: int(min(e.nodes, 4)), Method: METIS})
	}
}

// undirectedBy compares what METIS gets with the edges: each in the lists of both its ends and
// once, in order.
func undirectedBy[T metis.Number](t *testing.T, e *edges, want [][]T, l *metis.Library) {
	t.Helper()
	u, err := undirected[T](t.Context(), l, e.topology(t, l.Wide))
	require.NoError(t, err)
	require.Len(t, u.start, int(e.nodes)+1)
	for v, list := range want {
		slices.Sort(list)
		require.Equal(t, slices.Compact(list),
			append([]T(nil), u.adj[u.start[v]:u.start[v+1]]...), "node %d", v)
	}
	require.Equal(t, len(u.adj), int(u.start[e.nodes]))
	require.NoError(t, u.free())
}

func TestUndirected(t *testing.T) {
	for seed := range uint64(10) {
		r := generator(seed)
		e := anyEdges(r, 1+r.IntN(60), r.IntN(800))
		narrow, wide := make([][]int32, e.nodes), make([][]int64, e.nodes)
		for i := range e.src {
			if a, b := e.src[i], e.dst[i]; a != b {
				narrow[a], narrow[b] = append(narrow[a], int32(b)), append(narrow[b], int32(a))
				wide[a], wide[b] = append(wide[a], b), append(wide[b], a)
			}
		}
		undirectedBy(t, e, narrow, &metis.Library{})
		undirectedBy(t, e, wide, &metis.Library{Wide: true})
	}
}

// SIGTERM is Go's again after METIS, which takes it for its own: without that the runtime ends the
// process here.
func TestSignalsAfterMETIS(t *testing.T) {
	library(t)
	got := make(chan os.Signal, 1)
	signal.Notify(got, syscall.SIGTERM)
	defer signal.Stop(got)
	e, _ := planted(generator(1), 16, 500, 16, 6)
	made(t, e.topology(t, false), Options{Parts: 16, Method: METIS})
	for range 10 { // any thread may get it
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
		select {
		case <-got:
		case <-time.After(10 * time.Second):
			t.Fatal("SIGTERM did not come")
		}
	}
}

// Where METIS is not, it is asked for in vain, and auto streams and gives the reason.
func TestWithoutMETIS(t *testing.T) {
	x := anyEdges(generator(1), 100, 500).topology(t, false)
	o := Options{Parts: 4, Method: METIS, Library: "/none/libmetis.so.5"}
	_, err := Make(t.Context(), x, o)
	require.ErrorContains(t, err, "/none/libmetis.so.5")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	o.Method = Auto
	p := made(t, x, o)
	require.Equal(t, Stream, p.Info.Method)
	require.Empty(t, p.Info.Library)
	require.Len(t, p.Notes, 1)
	require.Contains(t, p.Notes[0], "METIS")
}

// Nobody waits for METIS after a stop; its memory is given back when it is done.
func TestMETISIsNotWaitedFor(t *testing.T) {
	library(t)
	e, _ := planted(generator(1), 16, 2000, 16, 6)
	x := e.topology(t, false)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := Make(ctx, x, Options{Parts: 16, Method: METIS,
		Progress: func(stage string, _, _ int64) {
			if stage == "METIS" {
				cancel()
			}
		}})
	if err == nil { // it was faster
		require.NoError(t, p.Close())
	} else {
		require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	}
	require.Eventually(t, func() bool { return hostmem.Usage()["parts by METIS"] == 0 },
		30*time.Second, time.Millisecond)
}
