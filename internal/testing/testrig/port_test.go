package testrig_test

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/testrig"
)

func TestFreePort(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	require.NoError(t, err)
	lowest, err := strconv.Atoi(strings.Fields(string(b))[0])
	require.NoError(t, err)
	var open []net.Listener
	for range 20 {
		port := testrig.FreePort(t)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		require.Less(t, n, max(lowest, 32000), "not one that the kernel gives")
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		require.NoError(t, err)
		open = append(open, listener)
	}
	for _, listener := range open {
		require.NoError(t, listener.Close())
	}
}
