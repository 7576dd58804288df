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
	return npy.Each(a, 0, func(first int64, xs []int64) error {
		for i, x := range xs {
			if err := fn(first+int64(i), x); err != nil {
				return err
			}
		}
		return nil
	})
}

// closing closes an archive and joins what that says to err.
func closing(err error, a *npy.Archive) error { return errors.Join(err, a.Close()) }

// nodeFile is a file with a row for each node: an array, or else a table in text.
type nodeFile struct {
	array *npy.Array
	path  string
	users bool // the user named the file, so its form is found out
}

// openData opens a file.
func openData(path string, users bool) (d nodeFile, err error) {
	d = nodeFile{path: path, users: users}
	if isArray(path) {
		d.array, err = openArray(path)
	}
	return d, err
}

// dataOf is an array of a format.
func dataOf(a *npy.Array) nodeFile { return nodeFile{array: a, path: a.Name} }

// isArray reports whether a file is, or is called, an array of NumPy, or is of PyTorch.
func isArray(path string) bool {
	return strings.HasSuffix(path, ".npy") || container.Is(path, container.NPY) ||
		container.Is(path, container.Torch)
}
