//go:build !amd64

package simd

// haveAssembly is set in builds with assembly.
const haveAssembly = false
