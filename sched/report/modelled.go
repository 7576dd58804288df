package report

import (
	"encoding/json"

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

// Absent is the type of a field that takes the place of one of an embedded struct and is never
// written.
type Absent struct{}

// modelledJSON is the JSON of a ModelledResult.
type modelledJSON struct {
	Modelled bool   `json:"modelled"`
	Clock    string `json:"clock"`
	Hardware string `json:"hardware"`
	SSDModel string `json:"ssd_model"`
	SSDs     int    `json:"ssd_count"`
	Result
	Epochs      []ModelledEpoch `json:"epochs"`
	BestEpoch   *Absent         `json:"best_epoch,omitempty"`
	Metric      *Absent         `json:"metric,omitempty"`
	TestAcc     *Absent         `json:"test_acc,omitempty"`
	TestMetrics *Absent         `json:"test_metrics,omitempty"`
	Params      *Absent         `json:"params_sha256,omitempty"`
	PeakMemory  *Absent         `json:"peak_memory_bytes,omitempty"`
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
	Loss       *Absent `json:"loss,omitempty"`
	TrainAcc   *Absent `json:"train_acc,omitempty"`
	ValAcc     *Absent `json:"val_acc,omitempty"`
	ValMetrics *Absent `json:"val_metrics,omitempty"`
}

// JSONShape is for its schema.
func (ModelledEpoch) JSONShape() any { return modelledEpochJSON{} }

// MarshalJSON leaves out what only arithmetic could fill.
func (e ModelledEpoch) MarshalJSON() ([]byte, error) {
	return json.Marshal(modelledEpochJSON{Modelled: true, EpochResult: e.EpochResult})
}
