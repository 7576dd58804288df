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
		for _, x := range buf[:n] {
			if err := fn(pos, x); err != nil {
				return err
			}
			pos++
		}
	}
	return nil
}

// closing closes an archive and joins what that says to err.
func closing(err error, a *npy.Archive) error { return errors.Join(err, a.Close()) }

// isArray reports whether a file is, or is called, an array of NumPy.
func isArray(path string) bool {
	return strings.HasSuffix(path, ".npy") || container.Is(path, container.NPY)
}
