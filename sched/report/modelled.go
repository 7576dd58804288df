package report

import (
	"encoding/json"

	"helios/internal/ui"
	"helios/sched/plan"
)

// ModelledResult is a run on the virtual clock: every figure in it is modelled, except the counts
// of rows, batches and commands, which a real run of the same seed has, too. Results of arithmetic
// (parameters, loss, accuracy) are not there, in JSON neither.
type ModelledResult struct {
	Result
	Hardware string // profile
	SSDModel string
	SSDs     int
}

// modelledJSON is the JSON of a ModelledResult.
type modelledJSON struct {
	Modelled bool   `json:"modelled"`
	Clock    string `json:"clock"`
	Hardware string `json:"hardware"`
	SSDModel string `json:"ssd_model"`
	SSDs     int    `json:"ssd_count"`
	Result
	Epochs     []ModelledEpoch `json:"epochs"`
	BestEpoch  *ui.Absent      `json:"best_epoch,omitempty"`
	TestAcc    *ui.Absent      `json:"test_acc,omitempty"`
	Params     *ui.Absent      `json:"params_sha256,omitempty"`
	PeakMemory *ui.Absent      `json:"peak_memory_bytes,omitempty"`
}

// JSONShape is for its schema.
func (ModelledResult) JSONShape() any { return modelledJSON{} }

// MarshalJSON writes the fields of a Result without those that only arithmetic, or this machine,
// could fill.
func (r ModelledResult) MarshalJSON() ([]byte, error) {
	epochs := make([]ModelledEpoch, len(r.Epochs))
	for i, e := range r.Epochs {
		epochs[i] = ModelledEpoch{e}
	}
	return json.Marshal(modelledJSON{Modelled: true, Clock: plan.ClockVirtual, Hardware: r.Hardware,
		SSDModel: r.SSDModel, SSDs: r.SSDs, Result: r.Result, Epochs: epochs})
}

// ModelledEpoch is an EpochResult of the virtual clock.
type ModelledEpoch struct{ EpochResult }

// modelledEpochJSON is the JSON of a ModelledEpoch.
type modelledEpochJSON struct {
	Modelled bool `json:"modelled"`
	EpochResult
	Loss     *ui.Absent `json:"loss,omitempty"`
	TrainAcc *ui.Absent `json:"train_acc,omitempty"`
	ValAcc   *ui.Absent `json:"val_acc,omitempty"`
}

// JSONShape is for its schema.
func (ModelledEpoch) JSONShape() any { return modelledEpochJSON{} }

// MarshalJSON leaves out what only arithmetic could fill.
func (e ModelledEpoch) MarshalJSON() ([]byte, error) {
	return json.Marshal(modelledEpochJSON{Modelled: true, EpochResult: e.EpochResult})
}
