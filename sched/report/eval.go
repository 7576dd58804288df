package report

import "helios/internal/metrics"

// EvalResult is the line that "eval --json" prints.
type EvalResult struct {
	Mode       string `json:"mode"`
	Model      string `json:"model"`
	Dataset    string `json:"dataset"`
	Checkpoint string `json:"checkpoint"`
	Epoch      int    `json:"epoch"` // whose parameters were used, from 1
	Split      string `json:"split"`
	Fanouts    []int  `json:"fanout"`
	Nodes      int64  `json:"nodes"`
	// Accuracy is null where the task is of numbers.
	Accuracy *float64 `json:"accuracy"`
	Loss     float64  `json:"loss"`
	// Metrics are absent where no node has a label.
	Metrics         *metrics.Report `json:"metrics,omitempty"`
	Seconds         float64         `json:"seconds"`
	Device          string          `json:"device"`
	Kernels         string          `json:"kernels"`
	IOStack         string          `json:"io_stack"`
	RowDType        string          `json:"row_dtype"`
	RowsVerified    *int64          `json:"rows_verified,omitempty"`
	RowBytes        int64           `json:"row_bytes"`
	RowsGPU         int64           `json:"rows_gpu"`
	RowsCPU         int64           `json:"rows_cpu"`
	RowsSSD         int64           `json:"rows_ssd"`
	BytesSSD        int64           `json:"bytes_ssd"`
	SSDCommands     int64           `json:"ssd_commands"`
	StageSeconds    StageSeconds    `json:"stage_seconds"`
	PeakMemoryBytes int64           `json:"peak_memory_bytes"`
	ParamsSHA256    string          `json:"params_sha256"`
	RunInfo
	IO IOResult `json:"io"`
}

// PredictResult holds what Predict leaves beside the predictions.
type PredictResult struct {
	RunInfo
	IO IOResult `json:"io"`
}

// Outputs are those that Predict hands on beside classes: activations of the last hidden layer, and
// the last layer's before the softmax.
type Outputs struct{ Embeddings, Logits bool }

// Prediction is one batch of Predict's output. The slices are valid during the call.
type Prediction struct {
	Nodes   []int64
	Classes []int32 // the most likely class of each node; nil where the task is of no class
	// len(Nodes) × Dim: activations of the last hidden layer (logits, if there is none)
	Embeddings []float32
	Dim        int
	// len(Nodes) × outputs: before the softmax or sigmoid, or numbers in the unit of the targets
	Logits []float32
}
