package dataset

// RawOptions say what headerless arrays cannot: which files they are and how they are laid out. Empty
// fields are taken from the folder's own configuration, its file names and the files' lengths.
type RawOptions struct {
	Layout                   string // ginex, diskgnn, legion, gnnlab or plain
	Indptr, Indices          string // files, where they are not found by name
	Lists                    string // "in" (CSC: a node's list holds its in-neighbours) or "out" (CSR)
	Edges                    int64
	Dim                      int
	IndexDType, FeatureDType string
	LabelDType               string
}
