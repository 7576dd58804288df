//go:build !amd64

package simd

// No level above Generic is to be had here, so none of these is called.

func dotAVX2(*byte)        {}
func addHeadsAVX2(*byte)   {}
func addHeadsAVX512(*byte) {}
