//go:build linux && (amd64 || arm64) && gorgonia && !nocuda

package driver

// Binding names this build's way to call libcuda: "purego", "gorgonia", or "" for none.
const Binding = "gorgonia"
