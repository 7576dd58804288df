package hostcpu

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAddWaiter(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	t.Cleanup(func() {
		waiters.Store(0)
		runtime.GOMAXPROCS(before)
	})
	require.Equal(t, before, Count())

	t.Setenv("GOMAXPROCS", "7")
	AddWaiter()
	require.Equal(t, before, runtime.GOMAXPROCS(0), "the environment's counts")

	t.Setenv("GOMAXPROCS", "")
	for range 2 {
		AddWaiter()
		require.Equal(t, before+1, runtime.GOMAXPROCS(0), "one place more, once")
		require.Equal(t, before, Count(), "as many that compute")
	}
}

func TestTakePlace(t *testing.T) {
	t.Cleanup(func() { waiters.Store(0) })
	waiters.Store(0)
	require.False(t, TakePlace(), "there is none")
	waiters.Store(1)
	require.True(t, TakePlace())
	require.False(t, TakePlace(), "it is taken")
	FreePlace()
	require.True(t, TakePlace())
	FreePlace()
}
