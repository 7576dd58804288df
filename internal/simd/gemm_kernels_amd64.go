package simd

var microZ, microY micro

func init() {
	microZ = micro{lanes: 16, rows: 12, sizes: []int{12, 8, 6, 4, 3, 2, 1},
		transpose: gemmTransposeZ, panels: gemmPanelsZ, columns: gemmColumnsZ,
		finish: gemmFinishZ, dropout: gemmDropoutZ, peak: gemmPeakZ}
	microY = micro{lanes: 8, rows: 6, sizes: []int{6, 4, 3, 2, 1}, transpose: gemmTransposeY,
		panels: gemmPanelsY, columns: gemmColumnsY,
		finish: gemmFinishY, dropout: gemmDropoutY, peak: gemmPeakY}
	type tile = func(k int, x *float32, xs int, y *float32, ys int, c *float32, ldc, n, load int)
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
}

func microOf(l Level) *micro {
	if l == AVX512 {
		return &microZ
	}
	return &microY
}
