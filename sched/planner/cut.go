package planner

import (
	"helios/internal/errs"
	"helios/internal/units"
)

// Mega describes the mega-batches of an epoch.
type Mega struct {
	Parts  int    `json:"parts"`
	Loaded int    `json:"parts_in_memory"`
	Order  string `json:"part_order"`
	Passes int    `json:"passes"`
	// Cut is the share of the edges that lead from part to part, and CutSource where it is from;
	// of a dataset, which is partitioned, neither is there. Kept is the share of the edges whose
	// other end is in the same mega-batch or static.
	Cut       float64 `json:"cut,omitempty"`
	CutSource string  `json:"cut_source,omitempty"`
	Kept      float64 `json:"edges_kept,omitempty"`

	MegaBatches  int     `json:"megabatches"` // that are played
	StaticRows   int64   `json:"static_rows"`
	StaticOnGPU  bool    `json:"static_on_gpu"`
	PageBytes    int64   `json:"page_bytes"`
	FeatureBytes int64   `json:"feature_bytes"` // that an epoch reads, by section
	EdgeBytes    int64   `json:"edge_bytes"`
	EpochBytes   int64   `json:"epoch_bytes"` // by the formula, without the padding of pages
	RequestBytes float64 `json:"mean_request_bytes"`
	LoadSeconds  float64 `json:"load_seconds"` // of a mega-batch, in the mean
	WaitSeconds  float64 `json:"wait_seconds"` // of training, in an epoch
}

// ParseCut reads the share of the edges that lead from part to part.
func ParseCut(text string) (*float64, error) {
	x, err := units.ParseShare(text)
	if err != nil {
		return nil, errs.New(errs.Usage, "%v %w, of the edges", errs.Key("cut"), err)
	}
	return &x, nil
}
