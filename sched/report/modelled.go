package report

import (
	"encoding/json"

	"helios/sched/plan"
)

// ModelledResult is a run on the virtual clock: every figure in it is modelled, except the counts
// of rows, batches and commands, which are what a real run of the same seed has. What arithmetic
// would tell (parameters, loss, accuracy) is not there, in JSON neither.
type ModelledResult struct {
	Result
	Hardware string // profile
	SSDModel string
	SSDs     int
}

// MarshalJSON writes the fields of a Result without those that only arithmetic, or this machine,
// could fill.
func (r ModelledResult) MarshalJSON() ([]byte, error) {
	epochs := make([]ModelledEpoch, len(r.Epochs))
	for i, e := range r.Epochs {
		epochs[i] = ModelledEpoch{e}
	}
	return json.Marshal(struct {
		Event    string `json:"event"`
		Modelled bool   `json:"modelled"`
		Clock    string `json:"clock"`
		Hardware string `json:"hardware"`
		SSDModel string `json:"ssd_model"`
		SSDs     int    `json:"ssd_count"`
		Result
		Epochs     []ModelledEpoch `json:"epochs"`
		BestEpoch  *absent         `json:"best_epoch,omitempty"`
		TestAcc    *absent         `json:"test_acc,omitempty"`
		Params     *absent         `json:"params_sha256,omitempty"`
		PeakMemory *absent         `json:"peak_memory_bytes,omitempty"`
	}{Event: r.Event, Modelled: true, Clock: plan.ClockVirtual, Hardware: r.Hardware,
		SSDModel: r.SSDModel, SSDs: r.SSDs, Result: r.Result, Epochs: epochs})
}

// absent takes the place of a field that is left out.
type absent struct{}

// ModelledEpoch is an EpochResult of the virtual clock.
type ModelledEpoch struct{ EpochResult }

// MarshalJSON leaves out what only arithmetic could fill.
func (e ModelledEpoch) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Modelled bool `json:"modelled"`
		EpochResult
		Loss     *absent `json:"loss,omitempty"`
		TrainAcc *absent `json:"train_acc,omitempty"`
		ValAcc   *absent `json:"val_acc,omitempty"`
	}{Modelled: true, EpochResult: e.EpochResult})
}
