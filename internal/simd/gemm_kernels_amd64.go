package simd

import "github.com/klauspost/cpuid/v2"

var (
	microZ, microY, microB micro
	halfZ, halfY, halfB    bf16Way
)

func init() {
	microZ = micro{lanes: 16, rows: 12, sizes: []int{12, 8, 6, 4, 3, 2, 1},
		transpose: gemmTransposeZ, panels: gemmPanelsZ, columns: gemmColumnsZ,
		finish: gemmFinishZ, dropout: gemmDropoutZ, peak: gemmPeakZ}
	microY = micro{lanes: 8, rows: 6, sizes: []int{6, 4, 3, 2, 1}, transpose: gemmTransposeY,
		panels: gemmPanelsY, columns: gemmColumnsY,
		finish: gemmFinishY, dropout: gemmDropoutY, peak: gemmPeakY}
	type tile = func(k int, x *float32, xs int, y *float32, ys int, c *float32, ldc, n, load int,
		far *float32, fs int)
	for rows, t := range map[int][2]tile{
		1: {gemmZ1x1, gemmZ1x2}, 2: {gemmZ2x1, gemmZ2x2}, 3: {gemmZ3x1, gemmZ3x2},
		4: {gemmZ4x1, gemmZ4x2},
		6: {gemmZ6x1, gemmZ6x2}, 8: {gemmZ8x1, gemmZ8x2}, 12: {gemmZ12x1, gemmZ12x2},
	} {
		microZ.tile[rows] = [9]tile{1: t[0], 2: t[1]}
	}
	microZ.tile[1][8], microZ.tile[2][8] = gemmZ1x8, gemmZ2x8
	for rows, t := range map[int][2]tile{
		1: {gemmY1x1, gemmY1x2}, 2: {gemmY2x1, gemmY2x2}, 3: {gemmY3x1, gemmY3x2},
		4: {gemmY4x1, gemmY4x2}, 6: {gemmY6x1, gemmY6x2},
	} {
		microY.tile[rows] = [9]tile{1: t[0], 2: t[1]}
	}
	microY.tile[1][8] = gemmY1x8

	microB = micro{lanes: 16, rows: 12, sizes: microZ.sizes, transpose: gemmTransposeZ,
		peak: gemmPeakB}
	for rows, t := range map[int][2]tile{
		1: {gemmB1x1, gemmB1x2}, 2: {gemmB2x1, gemmB2x2}, 3: {gemmB3x1, gemmB3x2},
		4: {gemmB4x1, gemmB4x2},
		6: {gemmB6x1, gemmB6x2}, 8: {gemmB8x1, gemmB8x2}, 12: {gemmB12x1, gemmB12x2},
	} {
		microB.tile[rows] = [9]tile{1: t[0], 2: t[1]}
	}
	halfZ = bf16Way{"avx512 fma", &microZ, 1, gemmRoundZ, gemmZipYZ, gemmZipXZ}
	halfY = bf16Way{"avx2 fma", &microY, 1, gemmRoundY, gemmZipYY, gemmZipXY}
	halfB = bf16Way{"avx512_bf16", &microB, 2, gemmRoundB, gemmZipYB, gemmZipXB}
}

// bf16Ways are the ways of this machine at level l, the best last.
func bf16Ways(l Level) []*bf16Way {
	switch {
	case l == AVX512 && cpuid.CPU.Supports(cpuid.AVX512BF16):
		return []*bf16Way{&halfZ, &halfB}
	case l == AVX512:
		return []*bf16Way{&halfZ}
	}
	return []*bf16Way{&halfY}
}

func microOf(l Level) *micro {
	if l == AVX512 {
		return &microZ
	}
	return &microY
}
