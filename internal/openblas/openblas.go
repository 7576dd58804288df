// Package openblas opens an OpenBLAS library at run time, to compare products of matrices with it.
// Nothing is computed with it otherwise.
package openblas

import (
	"fmt"
	"strings"

	"helios/internal/dl"
	"helios/internal/errs"
)

// names are looked for in the loader's places, the plain library first.
var names = []string{"libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0",
	"libopenblas64.so.0", "libscipy_openblas.so"}

// decorations are put by builds around the names of functions: plain, with 64-bit integers, and
// those of the wheels of NumPy and SciPy.
var decorations = [][2]string{{"", ""}, {"", "64_"}, {"scipy_", ""}, {"scipy_", "64_"}}

// Library is an OpenBLAS. Its threads are a setting of the whole process.
type Library struct {
	Path   string // as it was asked for
	Config string // the library's own description: version, options and core

	sgemm func(order, transA, transB int, m, n, k int, alpha float32, a *float32, lda int,
		b *float32, ldb int, beta float32, c *float32, ldc int)
	setThreads func(n int)
	threads    func() int32
}

// Open opens the library at path, or for "auto" one with a usual name.
func Open(path string) (*Library, error) {
	if !dl.Have {
		return nil, errs.New(errs.Capability,
			"OpenBLAS: this build of heliosctl opens no libraries (-tags nocuda, or a platform without it); use a build without the tag, or {openblas} off")
	}
	if path == "" { // the loader would take it for this program
		return nil, errs.New(errs.Capability,
			"OpenBLAS: no library is named; give auto, off or a path")
	}
	tried := []string{path}
	if path == "auto" {
		tried = names
	}
	var l *Library
	err := dl.First(tried, dl.Open, func(h uintptr, name string) (err error) {
		l, err = bind(h, name)
		return err
	})
	if err == nil {
		return l, nil
	}
	if path == "auto" {
		return nil, errs.New(errs.Capability,
			"OpenBLAS: no %s in the loader's places; install it (Debian: libopenblas0-pthread), name a library with {openblas} PATH, or do without by {openblas} off",
			strings.Join(names, ", "))
	}
	return nil, errs.New(errs.Capability,
		"OpenBLAS: %w; name another library or use {openblas} off", err)
}

func bind(h uintptr, name string) (*Library, error) {
	l := &Library{Path: name}
	for _, d := range decorations {
		var text func() string
		err := dl.Bind(h, map[string]any{
			d[0] + "cblas_sgemm" + d[1]:              &l.sgemm,
			d[0] + "openblas_set_num_threads" + d[1]: &l.setThreads,
			d[0] + "openblas_get_num_threads" + d[1]: &l.threads,
			d[0] + "openblas_get_config" + d[1]:      &text,
		})
		if err != nil {
			continue
		}
		l.Config = strings.TrimSpace(text())
		return l, nil
	}
	return nil, fmt.Errorf("%s has no cblas_sgemm and openblas_set_num_threads: it is no OpenBLAS",
		name)
}

// SetThreads sets the number of threads that products use, and returns the library's answer.
func (l *Library) SetThreads(n int) int {
	l.setThreads(n)
	return int(l.threads())
}

// Matrix is a row-major matrix, used as its transpose where Trans is set; rows are LD elements
// apart.
type Matrix struct {
	Data  []float32
	LD    int
	Trans bool
}

// Multiply sets C[m,n] to A[m,k]·B[k,n].
func (l *Library) Multiply(m, n, k int, a, b, c Matrix) {
	const rowMajor, plain, transposed = 101, 111, 112
	trans := func(x Matrix) int {
		if x.Trans {
			return transposed
		}
		return plain
	}
	l.sgemm(rowMajor, trans(a), trans(b), m, n, k, 1, &a.Data[0], a.LD, &b.Data[0], b.LD, 0,
		&c.Data[0], c.LD)
}
