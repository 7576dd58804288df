package parted

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"helios/dataset/pages"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Key identifies the inputs of a layout. A folder serves runs with its own key only.
type Key struct {
	Dataset string `json:"dataset"` // UUID
	Nodes   int64  `json:"nodes"`
	Edges   int64  `json:"edges"`
	Parts   int    `json:"parts"`
	// Asked holds the options of the partition; nil: it was given, and its Sum identifies it.
	Asked *Asked `json:"asked,omitempty"`
	// Sum is the SHA-256 of the parts by node; "" until there is a partition.
	Sum         string  `json:"partition_sha256"`
	StaticShare float64 `json:"static_share"` // of all nodes
	RowType     string  `json:"row_type"`
	RowBytes    int64   `json:"row_bytes"`
	PageBytes   int64   `json:"page_bytes"`
	InFolder    bool    `json:"pages_in_folder"` // else on the dataset's SSDs
	LBABytes    int64   `json:"lba_bytes"`       // of where the pages are
}

// Asked are the options of a partition that decide its parts.
type Asked struct {
	Method  string  `json:"method"`
	Seed    uint64  `json:"seed"`
	Balance float64 `json:"balance"`
	Passes  int     `json:"passes"`
}

// sumOf is Key.Sum.
func sumOf(p *partition.Partition) string {
	s := sha256.Sum256(hostmem.Bytes(p.Of))
	return hex.EncodeToString(s[:])
}

// same refuses a key that differs, and names what does. k is of the run, was of the folder.
func (k *Key) same(was *Key, dir string) error {
	other := func(what string, was, is any) error {
		return errs.New(errs.Usage,
			"the layout in %s was made with %s %v, and this run has %v; give the same, or name another folder",
			dir, what, was, is)
	}
	switch {
	case k.Dataset != was.Dataset, k.Nodes != was.Nodes, k.Edges != was.Edges:
		return other("dataset", fmt.Sprintf("%s (%d nodes, %d edges)", was.Dataset, was.Nodes,
			was.Edges), fmt.Sprintf("%s (%d nodes, %d edges)", k.Dataset, k.Nodes, k.Edges))
	case k.Parts != was.Parts:
		return other("number of parts", was.Parts, k.Parts)
	case k.Asked != nil && was.Asked == nil:
		return other("partition", "given by a file", fmt.Sprintf("one to be made (%v)", *k.Asked))
	case k.Asked == nil && was.Asked != nil && was.Sum == "":
		// The folder would say that the given one is what was asked for.
		return other("partition", fmt.Sprintf("one to be made (%v)", *was.Asked), "one given by a file")
	case k.Asked != nil && *k.Asked != *was.Asked:
		return other("partition", *was.Asked, *k.Asked)
	case k.Sum != "" && was.Sum != "" && k.Sum != was.Sum:
		return other("partition", was.Sum, k.Sum)
	case k.StaticShare != was.StaticShare:
		return other("share of static nodes", was.StaticShare, k.StaticShare)
	case k.RowType != was.RowType || k.RowBytes != was.RowBytes:
		return other("rows", fmt.Sprintf("of %s, %d bytes", was.RowType, was.RowBytes),
			fmt.Sprintf("of %s, %d bytes", k.RowType, k.RowBytes))
	case k.PageBytes != was.PageBytes:
		return other("pages of bytes", was.PageBytes, k.PageBytes)
	case k.InFolder != was.InFolder:
		return otherPlace(dir, was.InFolder)
	case k.LBABytes != was.LBABytes:
		return other("LBAs of bytes", was.LBABytes, k.LBABytes)
	}
	return nil
}

func (a Asked) String() string {
	return fmt.Sprintf("method %s, seed %d, balance %g, %d passes", a.Method, a.Seed, a.Balance,
		a.Passes)
}

func inFolder(place pages.Place) bool {
	_, ok := place.(pages.InFolder)
	return ok
}

// samePlace refuses another place than the pages were made in.
func (k *Key) samePlace(place pages.Place, dir string) error {
	if inFolder(place) != k.InFolder {
		return otherPlace(dir, k.InFolder)
	}
	return nil
}

func otherPlace(dir string, folder bool) error {
	where := map[bool]string{true: "in the folder", false: "on the dataset's SSDs"}
	return errs.New(errs.Usage,
		"the layout in %s has its pages %s, and this run looks for them %s; give the same %v, or name another folder",
		dir, where[folder], where[!folder], errs.Key("pages-on"))
}
