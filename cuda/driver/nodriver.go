//go:build nocuda || !linux || !(amd64 || arm64)

package driver

import (
	"runtime"

	"helios/internal/errs"
)

// Binding names this build's way to call libcuda: "purego", "gorgonia", or "" for none.
const Binding = ""

// openLibrary of a build that cannot call a shared library.
func openLibrary(string) (api, error) {
	return nil, errs.New(errs.Capability,
		"this build of %s/%s has no CUDA driver binding (it was made with -tags nocuda, or for a platform without one); use a build without the tag",
		runtime.GOOS, runtime.GOARCH)
}
