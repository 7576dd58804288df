package metis

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A handler that changes while the keeper watches is set back, as often as it changes, and both are
// as before in the end.
func TestKeepSignals(t *testing.T) {
	var abort, term action
	require.NoError(t, sigaction(unix.SIGABRT, nil, &abort))
	require.NoError(t, sigaction(unix.SIGTERM, nil, &term))
	k, err := keepSignals()
	require.NoError(t, err)
	other := term
	other[1] ^= 0x10000000 // SA_RESTART, one of the flags
	for range 3 {
		require.NoError(t, sigaction(unix.SIGTERM, &other, nil))
		require.Eventually(t, func() bool {
			var now action
			require.NoError(t, sigaction(unix.SIGTERM, nil, &now))
			return now == term
		}, 10*time.Second, 100*time.Microsecond)
	}
	require.NoError(t, sigaction(unix.SIGABRT, &other, nil))
	require.NoError(t, k.restore())
	for sig, want := range map[unix.Signal]action{unix.SIGABRT: abort, unix.SIGTERM: term} {
		var now action
		require.NoError(t, sigaction(sig, nil, &now))
		require.Equal(t, want, now)
	}
}
