package main

import (
	"fmt"
	"strings"

	"helios/internal/dl"
)

// decorations are put by builds around the names of functions: plain, with 64-bit integers, and
// those of the wheels of NumPy and SciPy.
var decorations = [][2]string{{"", ""}, {"", "64_"}, {"scipy_", ""}, {"scipy_", "64_"}}

// openBLAS is an OpenBLAS that is opened at run time, to compare products of matrices with it. Its
// threads are a setting of the whole process.
type openBLAS struct {
	config string // the library's own description: version, options and core

	sgemm func(order, transA, transB int, m, n, k int, alpha float32, a *float32, lda int,
		b *float32, ldb int, beta float32, c *float32, ldc int)
	setThreads func(n int)
	threads    func() int32
}

// openOpenBLAS opens the library at path, or of a name in the loader's places.
func openOpenBLAS(path string) (*openBLAS, error) {
	h, err := dl.Open(path)
	if err != nil {
		return nil, err
	}
	for _, d := range decorations {
		l := &openBLAS{}
		var text func() string
		if dl.Bind(h, map[string]any{
			d[0] + "cblas_sgemm" + d[1]:              &l.sgemm,
			d[0] + "openblas_set_num_threads" + d[1]: &l.setThreads,
			d[0] + "openblas_get_num_threads" + d[1]: &l.threads,
			d[0] + "openblas_get_config" + d[1]:      &text,
		}) == nil {
			l.config = strings.TrimSpace(text())
			return l, nil
		}
	}
	return nil, fmt.Errorf("%s has no cblas_sgemm and openblas_set_num_threads: it is no OpenBLAS",
		path)
}

// useThreads sets the number of threads that products use, and returns the library's answer.
func (l *openBLAS) useThreads(n int) int {
	l.setThreads(n)
	return int(l.threads())
}

// blasMatrix is a row-major matrix, used as its transpose where trans is set; rows are ld elements
// apart.
type blasMatrix struct {
	data  []float32
	ld    int
	trans bool
}

// multiply sets C[m,n] to A[m,k]·B[k,n].
func (l *openBLAS) multiply(m, n, k int, a, b, c blasMatrix) {
	const rowMajor, plain, transposed = 101, 111, 112
	trans := func(x blasMatrix) int {
		if x.trans {
			return transposed
		}
		return plain
	}
	l.sgemm(rowMajor, trans(a), trans(b), m, n, k, 1, &a.data[0], a.ld, &b.data[0], b.ld, 0,
		&c.data[0], c.ld)
}
