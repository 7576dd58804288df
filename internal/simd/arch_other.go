//go:build !amd64

package simd

// haveAssembly says that this build has assembly.
const haveAssembly = false
