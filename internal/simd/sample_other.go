//go:build !amd64

package simd

func sampleDrawAVX512(*int64, *uint32, uint64, *[20]uint64, uint64, uint64, *uint32) {
	panic("no assembly")
}
func sampleDrawAVX2(*int64, *uint32, uint64, *[20]uint64, uint64, uint64, *uint32) {
	panic("no assembly")
}
func sampleRowsAsm(*int64, uint64, uint64, *int64, uint64, uint64, uint64, *int64, *uint32,
	*uint32) uint64 {
	panic("no assembly")
}
func sampleGather32Asm(*int64, *uint32, uint64, uint64, *uint32, *byte, uint64, *uint32) uint64 {
	panic("no assembly")
}
func sampleGather64Asm(*int64, *uint32, uint64, uint64, *uint32, *byte, uint64, *uint32) uint64 {
	panic("no assembly")
}
func sampleEnterAsm(*uint32, uint64, *uint32, uint32, uint32, *int64, uint64, *uint32) uint64 {
	panic("no assembly")
}
func sampleEnterHashAsm(*uint32, uint64, *uint64, uint64, uint64, uint64, uint64, uint64, uint64,
	*int64, uint64, *uint32) uint64 {
	panic("no assembly")
}
func sampleWarmAsm(*uint32, uint64, *uint32) {
	panic("no assembly")
}
func samplePrefetchAsm(*int64, uint64, uint64, *uint32, *byte, uint64) {
	panic("no assembly")
}
func laborTake32AVX512(*byte, uint64, *[4]uint64, uint64, *[16]uint32, *uint32, uint64) (uint64,
	uint64) {
	panic("no assembly")
}
func laborTake64AVX512(*byte, uint64, *[4]uint64, uint64, *[16]uint32, *uint32, uint64) (uint64,
	uint64) {
	panic("no assembly")
}
func laborTake32AVX2(*byte, uint64, *[4]uint64, uint64, *[16]uint32, *uint32, uint64) (uint64,
	uint64) {
	panic("no assembly")
}
func laborTake64AVX2(*byte, uint64, *[4]uint64, uint64, *[16]uint32, *uint32, uint64) (uint64,
	uint64) {
	panic("no assembly")
}
