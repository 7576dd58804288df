//go:build !amd64

package simd

func fromFloat16AVX2(*float32, *byte, uint64)         { panic("no assembly") }
func fromFloat16AVX512(*float32, *byte, uint64)       { panic("no assembly") }
func fromBFloat16AVX2(*float32, *byte, uint64)        { panic("no assembly") }
func fromBFloat16AVX512(*float32, *byte, uint64)      { panic("no assembly") }
func fromInt8AVX2(*float32, *byte, uint64, float32)   { panic("no assembly") }
func fromInt8AVX512(*float32, *byte, uint64, float32) { panic("no assembly") }
func fromUint32AVX2(*int64, *uint32, uint64)          { panic("no assembly") }
func fromUint32AVX512(*int64, *uint32, uint64)        { panic("no assembly") }
func repeatAVX2(_ *int64, _ int64, _ *int64, _, _ int64) int64 {
	panic("no assembly")
}
func repeatAVX512(_ *int64, _ int64, _ *int64, _, _ int64) int64 {
	panic("no assembly")
}
