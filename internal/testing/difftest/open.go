package difftest

import (
	"os"
	"testing"

	"helios/cuda/driver"
	"helios/internal/testing/fakecuda"
)

// Open makes a comparing device over the fake libcuda, or with HELIOS_GPU=1 over the machine's GPU.
// The test fails when a difference was found, and when memory or streams are left open, unless it
// spoils things itself (Options.Spoil). Without a C++ compiler it skips.
func Open(t testing.TB, opt Options) *Device {
	t.Helper()
	return OpenLibrary(t, Library(t), opt)
}

// OpenLibrary is Open with a libcuda of the caller's choice.
func OpenLibrary(t testing.TB, path string, opt Options) *Device {
	t.Helper()
	gpu, err := driver.Open(driver.Options{Library: path})
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(gpu, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		found, err := d.Err(), d.Close()
		if opt.Spoil != nil {
			return // differences, a lost device and what it leaves behind are wanted
		}
		if found != nil {
			t.Error(found)
		}
		if err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return d
}

// Library is the libcuda that tests use: the machine's with HELIOS_GPU=1, else the fake.
func Library(t testing.TB) string {
	t.Helper()
	if os.Getenv("HELIOS_GPU") == "1" {
		return ""
	}
	return fakecuda.Build(t)
}
