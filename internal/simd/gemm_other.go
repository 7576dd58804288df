//go:build !amd64

package simd

func microOf(Level) *micro { panic("simd: products of matrices above generic need amd64") }
