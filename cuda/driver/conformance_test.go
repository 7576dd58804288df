//go:build linux && (amd64 || arm64) && !nocuda

package driver_test

import (
	"os"
	"strings"
	"testing"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/conformance"
	"helios/internal/testing/fakecuda"
)

// gpu reports whether the tests shall use NVIDIA's library and the GPU behind it.
func gpu() bool { return os.Getenv("HELIOS_GPU") == "1" }

func openDevice(t *testing.T, lib string) *driver.Device {
	t.Helper()
	d, err := driver.Open(driver.Options{Library: lib})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func streamSMs(t *testing.T, st cuda.Stream) int {
	t.Helper()
	s, ok := st.(interface{ SMs() int })
	if !ok {
		t.Fatalf("%T does not say how many SMs it has", st)
	}
	return s.SMs()
}

// empty wants nothing left in the fake driver, and no rule broken that the real one does not check.
func empty(t *testing.T, lib string) {
	t.Helper()
	if live := fakecuda.Control(t, lib, "live"); !strings.HasPrefix(live,
		"contexts=0 streams=0 events=0 modules=0 device=0 device_bytes=0 host=0 host_bytes=0 registered=0 ") {
		t.Errorf("left in the driver: %s", live)
	}
	if live := fakecuda.Control(t, lib, "live"); !strings.HasSuffix(live,
		" reserved=0 physical=0 graphs=0") {
		t.Errorf("left in the driver: %s", live)
	}
	if v := fakecuda.Control(t, lib, "violations"); v != "" {
		t.Errorf("rules broken: %s", v)
	}
}

// kinds are the GPUs that the fake plays.
var kinds = []struct{ name, knobs string }{
	// No green contexts: too few SMs for a group of eight.
	{"SMs=1", "sms=1,cc=7.0,driver=12020,green=0,threads_per_sm=512"},
	// Groups of two SMs; weak stores that stay in the block's buffer, and seeded choices.
	{"SMs=6", "sms=6,cc=8.0,sm_min=2,sm_step=2,threads_per_sm=512,store_buffer=8,jitter=1"},
	// As an H100 deals its SMs out, in eights.
	{"SMs=16", "sms=16,cc=9.0,threads_per_sm=512"},
}

// TestConformance runs the suite on the driver backend: on the fake libcuda, as several kinds of
// GPU, or with HELIOS_GPU=1 on the machine's.
func TestConformance(t *testing.T) {
	if gpu() {
		b := backend(t, "")
		b.Lacks = append(b.Lacks, conformance.Loss) // which nobody can order
		b.Threads = 1024                            // no SM so far holds more than 2,048
		conformance.Run(t, b)
		return
	}
	lib := fakecuda.Build(t)
	for _, c := range kinds {
		t.Run(c.name, func(t *testing.T) {
			fakecuda.Control(t, lib, "reset,mem=67108864,"+c.knobs)
			b := backend(t, lib)
			b.Lose = func(t *testing.T) { fakecuda.Control(t, lib, "lose=719") }
			b.Ended = func(t *testing.T) { empty(t, lib) }
			conformance.Run(t, b)
		})
	}
}

// backend asks the driver what it can do.
func backend(t *testing.T, lib string) conformance.Backend {
	t.Helper()
	d := openDevice(t, lib)
	caps := d.Capabilities()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	b := conformance.Backend{
		Open:        func(t *testing.T) cuda.Device { return openDevice(t, lib) },
		Lacks:       []conformance.Feature{conformance.FaultIsolation},
		Threads:     256, // of 512 on a fake SM: a thread is a fiber with a stack
		BlocksPerSM: 2,
		StreamSMs: func(st cuda.Stream, want int) int {
			got := streamSMs(t, st)
			// As many whole groups as fit, and one at the least.
			if whole := max(want/caps.SMGranularity, 1) * caps.SMGranularity; got != whole {
				t.Errorf("a budget of %d in groups of %d came to %d SMs", want,
					caps.SMGranularity, got)
			}
			return got
		},
	}
	if !caps.GreenContexts {
		b.Lacks = append(b.Lacks, conformance.Budgets)
	}
	return b
}
