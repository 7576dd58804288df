//go:build !amd64

package simd

// No level above Generic is to be had here, so none of these is called.

func findWaysAVX2(*byte)   {}
func prefetchSets(*byte)   {}
func drawTaggedAVX2(*byte) {}
