package edges

import (
	"io"

	"helios/dataset/npy"
)

// Store is the folder that a sorter keeps its runs in and writes the topology to.
type Store interface {
	// Path returns the path of a file of the folder.
	Path(name string) string
	// Create makes a file anew, as os.Create does.
	Create(name string) (File, error)
	// Array makes name.npy of one dimension.
	Array(name string, t npy.DType) (Array, error)
}

// File is a file that is being written.
type File interface {
	io.Writer
	Flush() error   // hands what is buffered to the kernel
	Discard() error // closes; the content does not matter
}

// Array is an array that is being written.
type Array interface {
	io.Writer
	Close() error // completes the file and makes it durable
	Discard() error
}
