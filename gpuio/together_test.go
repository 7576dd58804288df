package gpuio

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTogether(t *testing.T) {
	require.Empty(t, Together(nil))
	tried := []RungTried{{"p2p", "a"}, {"pinned", "b"}, {"pinned-cpubell", "a"}, {"proxy", "a"}}
	require.Equal(t, []RungTried{{"p2p, pinned-cpubell or proxy", "a"}, {"pinned", "b"}},
		Together(tried))
	require.Equal(t, "p2p", tried[0].Rung, "what was tried stays")
}
