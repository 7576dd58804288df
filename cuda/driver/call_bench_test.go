package driver

import (
	"os"
	"testing"

	"helios/internal/testing/fakecuda"
)

// BenchmarkCall is the way into libcuda and back on this binding: one call that does next to
// nothing there (the fake's cuDriverGetVersion).
func BenchmarkCall(b *testing.B) {
	lib := os.Getenv("HELIOS_LINKED_LIBCUDA") // see tools/gorgonia.sh
	if lib == "" && os.Getenv("HELIOS_GPU") != "1" {
		lib = fakecuda.Build(b)
	}
	a, err := openLibrary(lib)
	if err != nil {
		b.Fatal(err)
	}
	if r := a.Init(0); r != success {
		b.Fatal(callError(a, "cuInit", r))
	}
	b.ReportAllocs()
	for b.Loop() {
		if v, r := a.DriverGetVersion(); r != success || v == 0 {
			b.Fatal(v, r)
		}
	}
}
