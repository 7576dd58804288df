package simd

// haveAssembly is set in builds with assembly.
const haveAssembly = true
