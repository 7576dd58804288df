package sched

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/simd"
	"helios/sched/checkpoint"
)

// checkpointName is the file in a checkpoint folder.
const checkpointName = "checkpoint.safetensors"

// Versions of what a checkpoint's metadata means. The second is of runs with a setting that a program of the
// first does not know, and would drop without a word when it goes on.
const (
	stateFormat         = 1
	stateFormatSettings = 2
)

// fingerprint is every setting that decides the parameters. A run resumes only under an equal
// one, Kernels aside. Mode, caches, pipeline, stack, workers and the number of epochs may differ: they do not
// change what batch n computes.
type fingerprint struct {
	Dataset        string  `json:"dataset"` // UUID
	Edges          int64   `json:"edges"`   // 0 for the same nodes without their edges
	InDim          int     `json:"in_dim"`
	Classes        int     `json:"classes"`
	Model          string  `json:"model"`
	Fanouts        []int   `json:"fanout"`
	Batch          int     `json:"batch-size"`
	Hidden         int     `json:"hidden"`
	LR             float64 `json:"lr"`
	Dropout        float64 `json:"dropout"`
	FeatureDropout float64 `json:"feature-dropout,omitempty"`
	WeightDecay    float64 `json:"weight-decay"`
	Seed           uint64  `json:"seed"`
	Sampler        string  `json:"sampler,omitempty"` // empty: by neighbours
	// Draws is how a node's neighbours are drawn: drawsByBatch; empty: of older programs, the same in all batches of an epoch.
	Draws string `json:"draws,omitempty"`
	// RowDType is the type of the rows that were read; empty: float32. The SSDs tell it, when they are opened.
	RowDType string `json:"row-dtype,omitempty"`
	// Kernels is the level of the host kernels, or what computed on a GPU (engine.arithmetic); empty: generic, the only
	// one there once was. A machine may lack the level of another, or a GPU, so a run may go on at any; where the bits will
	// differ it is told.
	Kernels string `json:"kernels,omitempty"`
}

// format is the version that a checkpoint with these settings needs.
func (f *fingerprint) format() string {
	if f.Draws != "" || f.FeatureDropout != 0 || f.RowDType != "" || f.Sampler != "" {
		return strconv.Itoa(stateFormatSettings)
	}
	return strconv.Itoa(stateFormat)
}

// rounding is what is to be said where kernels of another level than the checkpoint's go on, or another device; empty where
// both give the same bits.
func (f *fingerprint) rounding(now string) string {
	was, generic := f.Kernels, simd.Generic.String()
	if was == "" {
		was = generic
	}
	// The vector levels of the host give the same bits.
	bits := func(k string) string {
		if k != generic && slices.Contains(simd.Names(), k) {
			return "vector"
		}
		return k
	}
	if bits(was) == bits(now) {
		return ""
	}
	name := func(k string) string {
		if slices.Contains(simd.Names(), k) {
			return "--kernels " + k
		}
		return "a GPU's kernels (" + k + ")"
	}
	with := now
	if bits(now) == now && now != generic || bits(was) == was && was != generic {
		with = name(now) // another device
	}
	return fmt.Sprintf("was made with %s and goes on with %s, which rounds otherwise: the parameters will not be to the bit those of a run that was never stopped", name(was), with)
}

func (f *fingerprint) setRowType(t rowtype.Type) {
	f.RowDType = ""
	if t != rowtype.Float32 {
		f.RowDType = t.String()
	}
}

// drawsByBatch is fingerprint.Draws of this program: each batch draws for itself.
const drawsByBatch = "batch"

func (f *fingerprint) draws() string {
	if f.Draws == "" {
		return "epoch"
	}
	return f.Draws
}

// setSampler takes over a Config's sampler.
func (f *fingerprint) setSampler(s string) {
	f.Sampler = ""
	if s != SamplerNeighbor {
		f.Sampler = s
	}
}

// sampler is Sampler, SamplerNeighbor where it is empty.
func (f *fingerprint) sampler() string {
	if f.Sampler == "" {
		return SamplerNeighbor
	}
	return f.Sampler
}

// rowType is RowDType, float32 where it is empty.
func (f *fingerprint) rowType() string {
	if f.RowDType == "" {
		return rowtype.Float32.String()
	}
	return f.RowDType
}

// differs names the first field in which a resumed run would be another one.
func (f fingerprint) differs(was fingerprint) (field string, is, old any, ok bool) {
	for _, x := range []struct {
		name    string
		is, old any
	}{
		{"dataset", f.Dataset, was.Dataset},
		{"edges", f.Edges, was.Edges},
		{"in_dim", f.InDim, was.InDim},
		{"classes", f.Classes, was.Classes},
		{"model", f.Model, was.Model},
		{"batch-size", f.Batch, was.Batch},
		{"hidden", f.Hidden, was.Hidden},
		{"lr", f.LR, was.LR},
		{"dropout", f.Dropout, was.Dropout},
		{"feature-dropout", f.FeatureDropout, was.FeatureDropout},
		{"weight-decay", f.WeightDecay, was.WeightDecay},
		{"seed", f.Seed, was.Seed},
		{"sampler", f.sampler(), was.sampler()},
		{"draws", f.draws(), was.draws()},
	} {
		if x.is != x.old {
			return x.name, x.is, x.old, true
		}
	}
	if !slices.Equal(f.Fanouts, was.Fanouts) {
		return "fanout", f.Fanouts, was.Fanouts, true
	}
	return "", nil, nil, false
}

// state is a run's position and history: everything beside the tensors.
type state struct {
	Print     fingerprint
	Epoch     int // the epoch in work, from 0
	Batch     int // its first batch that has not been trained
	AdamStep  int64
	Partial   partial // of Epoch
	Epochs    []EpochResult
	BestEpoch int // from 0; -1 = none yet
	BestAcc   float64
}

// tensors is parameters by name, as float32 bytes.
type tensors map[string][]byte

// paramCopier moves parameters between the device and the CPU through one pinned buffer, since
// a device's own memory need not be addressable.
type paramCopier struct {
	dev    cuda.Device
	stream cuda.Stream
	buf    cuda.Buffer
}

func newParamCopier(dev cuda.Device, s cuda.Stream, m *gnn.Model) (*paramCopier, error) {
	size := int64(4096)
	for _, p := range m.Params() {
		size = max(size, paramBytes(p))
	}
	b, err := dev.Alloc(cuda.MemPinned, size, "checkpoint staging")
	if err != nil {
		return nil, err
	}
	return &paramCopier{dev, s, b}, nil
}

func (c *paramCopier) close() error { return c.buf.Free() }

func paramBytes(p gnn.Param) int64 { return int64(p.Rows) * int64(p.Cols) * 4 }

func (c *paramCopier) get(ctx context.Context, b cuda.Buffer, n int64) ([]byte, error) {
	if err := c.stream.Copy(c.buf.Ptr(), b.Ptr(), n); err != nil {
		return nil, err
	}
	if err := c.stream.Synchronize(ctx); err != nil {
		return nil, err
	}
	return slices.Clone(c.buf.Bytes()[:n]), nil
}

func (c *paramCopier) put(ctx context.Context, b cuda.Buffer, data []byte) error {
	copy(c.buf.Bytes(), data)
	if err := c.stream.Copy(b.Ptr(), c.buf.Ptr(), int64(len(data))); err != nil {
		return err
	}
	return c.stream.Synchronize(ctx)
}

// values copies the parameters out.
func (c *paramCopier) values(ctx context.Context, m *gnn.Model) (tensors, error) {
	t := tensors{}
	for _, p := range m.Params() {
		b, err := c.get(ctx, p.Value, paramBytes(p))
		if err != nil {
			return nil, fmt.Errorf("copying parameter %s: %w", p.Name, err)
		}
		t[p.Name] = b
	}
	return t, nil
}

// setValues copies parameters in; t must hold all of them.
func (c *paramCopier) setValues(ctx context.Context, m *gnn.Model, t tensors) error {
	for _, p := range m.Params() {
		b, ok := t[p.Name]
		if !ok || int64(len(b)) != paramBytes(p) {
			return fmt.Errorf("parameter %s of %d×%d has %d bytes", p.Name, p.Rows, p.Cols, len(b))
		}
		if err := c.put(ctx, p.Value, b); err != nil {
			return fmt.Errorf("copying parameter %s: %w", p.Name, err)
		}
	}
	return nil
}

// The groups of tensors in a checkpoint.
const (
	groupModel = "model."
	groupM     = "adam.m."
	groupV     = "adam.v."
	groupBest  = "best."
)

// encodeState builds a checkpoint's content from the model as it is on the device.
func encodeState(ctx context.Context, c *paramCopier, m *gnn.Model, st state, best tensors) (*checkpoint.File, error) {
	f := &checkpoint.File{Metadata: map[string]string{"helios.format": st.Print.format()}}
	for key, v := range map[string]any{
		"helios.config": st.Print, "helios.position": position{st.Epoch, st.Batch, st.AdamStep},
		"helios.partial": st.Partial, "helios.epochs": st.Epochs,
		"helios.best": bestMark{st.BestEpoch, st.BestAcc},
	} {
		b, err := json.Marshal(v) // float64 survives: Go prints the shortest text that reads back equal
		if err != nil {
			return nil, err
		}
		f.Metadata[key] = string(b)
	}
	for _, p := range m.Params() {
		for _, g := range []struct {
			prefix string
			b      cuda.Buffer
		}{{groupModel, p.Value}, {groupM, p.M}, {groupV, p.V}} {
			b, err := c.get(ctx, g.b, paramBytes(p))
			if err != nil {
				return nil, fmt.Errorf("copying parameter %s%s: %w", g.prefix, p.Name, err)
			}
			f.Tensors = append(f.Tensors, f32(g.prefix+p.Name, p, b))
		}
		if b, ok := best[p.Name]; ok {
			f.Tensors = append(f.Tensors, f32(groupBest+p.Name, p, b))
		}
	}
	return f, nil
}

type position struct {
	Epoch    int   `json:"epoch"`
	Batch    int   `json:"batch"`
	AdamStep int64 `json:"adam_step"`
}

type bestMark struct {
	Epoch int     `json:"epoch"`
	Acc   float64 `json:"acc"`
}

func f32(name string, p gnn.Param, b []byte) checkpoint.Tensor {
	return checkpoint.Tensor{Name: name, DType: "F32", Shape: []int64{int64(p.Rows), int64(p.Cols)}, Data: b}
}

// decodeState reads the metadata; the tensors stay in f.
func decodeState(path string, f *checkpoint.File) (state, error) {
	var st state
	if v := f.Metadata["helios.format"]; v != strconv.Itoa(stateFormat) && v != strconv.Itoa(stateFormatSettings) {
		return st, errs.New(errs.Usage, "checkpoint %s: format %q is neither %d nor %d; it was written by another program or version", path, v, stateFormat, stateFormatSettings)
	}
	var pos position
	var best bestMark
	for key, dst := range map[string]any{
		"helios.config": &st.Print, "helios.position": &pos, "helios.partial": &st.Partial,
		"helios.epochs": &st.Epochs, "helios.best": &best,
	} {
		if err := json.Unmarshal([]byte(f.Metadata[key]), dst); err != nil {
			return st, errs.New(errs.Device, "checkpoint %s: %s: %w", path, key, err)
		}
	}
	st.Epoch, st.Batch, st.AdamStep, st.BestEpoch, st.BestAcc = pos.Epoch, pos.Batch, pos.AdamStep, best.Epoch, best.Acc
	if st.Epoch < 0 || st.Batch < 0 || st.AdamStep < 0 || len(st.Epochs) != st.Epoch || st.BestEpoch < -1 || st.BestEpoch >= max(st.Epoch, 1) {
		return st, errs.New(errs.Device, "checkpoint %s: position epoch %d batch %d does not agree with its history; train anew", path, st.Epoch, st.Batch)
	}
	return st, nil
}

// group returns the tensors of one group, checked against the model's shapes.
func group(path string, f *checkpoint.File, m *gnn.Model, prefix string) (tensors, error) {
	t := tensors{}
	for _, p := range m.Params() {
		x, ok := f.Tensor(prefix + p.Name)
		if !ok {
			return nil, errs.New(errs.Device, "checkpoint %s: tensor %s%s is missing", path, prefix, p.Name)
		}
		if x.DType != "F32" || !slices.Equal(x.Shape, []int64{int64(p.Rows), int64(p.Cols)}) {
			return nil, errs.New(errs.Device, "checkpoint %s: tensor %s is %s%v, the model needs F32[%d %d]", path, x.Name, x.DType, x.Shape, p.Rows, p.Cols)
		}
		t[p.Name] = x.Data
	}
	return t, nil
}

// restore puts a checkpoint's model and optimiser onto the device and returns the best
// epoch's parameters, nil when there are none yet.
func restore(ctx context.Context, path string, f *checkpoint.File, st state, c *paramCopier, m *gnn.Model) (best tensors, err error) {
	for _, g := range []struct {
		prefix string
		buf    func(gnn.Param) cuda.Buffer
	}{
		{groupModel, func(p gnn.Param) cuda.Buffer { return p.Value }},
		{groupM, func(p gnn.Param) cuda.Buffer { return p.M }},
		{groupV, func(p gnn.Param) cuda.Buffer { return p.V }},
	} {
		t, err := group(path, f, m, g.prefix)
		if err != nil {
			return nil, err
		}
		for _, p := range m.Params() {
			if err := c.put(ctx, g.buf(p), t[p.Name]); err != nil {
				return nil, err
			}
		}
	}
	m.SetAdamStep(st.AdamStep)
	if st.BestEpoch < 0 {
		return nil, nil
	}
	return group(path, f, m, groupBest)
}

// findCheckpoint takes a checkpoint's file or its folder; ok is false where there is none.
func findCheckpoint(path string) (file string, ok bool, err error) {
	st, err := os.Stat(path)
	if err == nil && st.IsDir() {
		path = filepath.Join(path, checkpointName)
		_, err = os.Stat(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return path, false, nil
	}
	if err != nil {
		return path, false, errs.New(errs.Usage, "checkpoint: %w", err)
	}
	return path, true, nil
}
