package simd

// haveAssembly says that this build has assembly.
const haveAssembly = true
