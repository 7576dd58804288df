package conformance_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/testing/conformance"
)

func TestHost(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, sms := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("SMs=%d", sms), func(t *testing.T) {
			conformance.Run(t, conformance.Backend{
				Open: func(t *testing.T) cuda.Device {
					h, err := cuda.NewHost(cuda.HostOptions{SMs: sms, MemLimit: 64 << 20})
					require.NoError(t, err)
					return h
				},
				Lacks: []conformance.Feature{conformance.Loss},
			})
		})
	}
	if t.Failed() {
		return
	}
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines before, %d after", before, runtime.NumGoroutine())
		}
		time.Sleep(time.Millisecond)
	}
	if u := hostmem.Usage(); len(u) != 0 {
		t.Errorf("memory left: %v", u)
	}
}
