package importer

import (
	"errors"
	"os"
	"strings"

	"helios/dataset/npy"
	"helios/internal/container"
)

// isFile reports whether a path leads to a file, a device or the like, and not a folder.
func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && !st.IsDir()
}

// eachInt calls fn with the integers of an array of one dimension, in order.
func eachInt(a *npy.Array, fn func(pos, x int64) error) error {
	return eachInts(a, func(first int64, xs []int64) error {
		for i, x := range xs {
			if err := fn(first+int64(i), x); err != nil {
				return err
			}
		}
		return nil
	})
}

// eachInts calls fn with some integers at a time, of which it names the first.
func eachInts(a *npy.Array, fn func(first int64, xs []int64) error) error {
	r, err := a.Reader(0)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]int64, 32<<10)
	for pos := int64(0); pos < a.Header.Elements(); {
		n, err := r.Ints(buf)
		if err != nil {
			return err
		}
		if err := fn(pos, buf[:n]); err != nil {
			return err
		}
		pos += int64(n)
	}
	return nil
}

// closing closes an archive and joins what that says to err.
func closing(err error, a *npy.Archive) error { return errors.Join(err, a.Close()) }

// isArray reports whether a file is, or is called, an array of NumPy.
func isArray(path string) bool {
	return strings.HasSuffix(path, ".npy") || container.Is(path, container.NPY)
}
