//go:build !amd64

package simd

// No level above Generic is to be had here, so none of these is called.

func dotHeadsAVX2(*byte) bool   { return false }
func dotHeadsAVX512(*byte) bool { return false }
func sumHeadsAVX2(*byte) bool   { return false }
func sumHeadsAVX512(*byte) bool { return false }

func softmaxAVX2(*byte) bool          { return false }
func softmaxPartAVX2(*byte) bool      { return false }
func softmaxSlopeAVX2(*byte) bool     { return false }
func softmaxSlopePartAVX2(*byte) bool { return false }
