//go:build !amd64

package simd

// No level above Generic is to be had here, so none of these is called.

func eluAVX2(*byte)       {}
func eluSlopeAVX2(*byte)  {}
func geluAVX2(*byte)      {}
func geluSlopeAVX2(*byte) {}
