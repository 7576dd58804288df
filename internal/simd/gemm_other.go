//go:build !amd64

package simd

func microOf(Level) *micro { panic("simd: products of matrices above generic need amd64") }

func bf16Ways(Level) []*bf16Way { panic("simd: products of matrices above generic need amd64") }
