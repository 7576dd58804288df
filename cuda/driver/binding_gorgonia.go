//go:build gorgonia && !nocuda

package driver

// Binding is how this build calls libcuda: "purego", "gorgonia", or "" when it cannot.
const Binding = "gorgonia"
