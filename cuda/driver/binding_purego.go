//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver

// Binding names this build's way to call libcuda: "purego", "gorgonia", or "" for none.
const Binding = "purego"

func openLibrary(path string) (api, error) { return loadLibrary(path) }
