package testrig

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// firstPort and lastPort are below those that the kernel chooses from by itself, so that none of
// its choices takes a port between FreePort and its use.
const firstPort, lastPort = 20000, 32000

// FreePort returns a TCP port of this machine that nobody listens at.
func FreePort(t testing.TB) string {
	t.Helper()
	var failed error
	for range 100 {
		port := strconv.Itoa(firstPort + rand.IntN(lastPort-firstPort))
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			failed = err
			continue
		}
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		return port
	}
	t.Fatal(failed)
	return ""
}
