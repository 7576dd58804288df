package sched

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/internal/options"
	"helios/internal/rowtype"
	"helios/internal/simd"
	"helios/sched/checkpoint"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// checkpointName is the file in a checkpoint folder.
const checkpointName = "checkpoint.safetensors"

// bestName is the file with the best epoch's parameters alone, for other programs and for "eval". A
// run goes on without it: the checkpoint holds them as well, so that one rename moves all of a
// run's state.
const bestName = "best.safetensors"

// stateFormat is the version of what a checkpoint's metadata means. The first two had no checksum
// over their header; the second was of runs with a setting that a program of the first does not
// know. A later one is of runs whose settings a program of the version before would ignore: 4 has
// layers between a model's own and samples that train again, 5 steps of several mini-batches, 6
// another metric than accuracy, 7 remaining self loops, learning rates that change, gradients that
// are clipped, and another loss than plain softmax, 8 heads, linear residual connections, types
// that share parameters, and parameters for each node. All other runs are written as plainFormat.
const (
	stateFormat      = 8
	lossFormat       = 7
	metricFormat     = 6
	stepsFormat      = 5
	extendedFormat   = 4
	plainFormat      = 3
	oldestFormat     = 1
	lastUnsealedHead = 2
)

// fingerprint is all that decides the parameters: the settings whose tags say so, and what is no
// setting. A run resumes only under an equal one, Kernels aside. Mode (mega-batches aside), caches,
// pipeline, stack, workers and the number of epochs may differ: they do not change what batch n
// computes.
type fingerprint struct {
	plan.Config // but for what a checkpoint keeps of it, zero
	printedFacts
}

// printedFacts are the facts of a fingerprint beside settings.
type printedFacts struct {
	Dataset string `json:"dataset"` // UUID
	Edges   int64  `json:"edges"`   // 0 for the same nodes without their edges
	InDim   int    `json:"in_dim"`
	Classes int    `json:"classes"`
	// Fit is the target, and what the training nodes decide of its loss.
	prepare.Fit
	// Horizon is the number of epochs at whose end the learning rate is 0; 0: it does not matter.
	Horizon int `json:"lr_epochs,omitempty"`
	// Mega has the parts of runs over mega-batches; nil: none.
	Mega *engine.PartPrint `json:"megabatches,omitempty"`
	// Draws names the way to draw neighbours: drawsByBatch; empty: that of older programs, the same
	// in all batches of an epoch.
	Draws string `json:"draws,omitempty"`
	// RowDType is the type of the rows that were read; empty: float32. The SSDs tell it, when they
	// are opened.
	RowDType string `json:"row-dtype,omitempty"`
	// Kernels is the level of the host kernels, or what computed on a GPU (engine.arithmetic);
	// empty: generic, the only one there once was. A machine may lack the level of another, or a
	// GPU, so a run may resume at any; a note tells of bits that will differ.
	Kernels string `json:"kernels,omitempty"`
	// Rounding is gnn.Rounding of the program that wrote the checkpoint.
	Rounding string `json:"rounding,omitempty"`
}

// MarshalJSON writes facts and settings side by side.
func (f fingerprint) MarshalJSON() ([]byte, error) {
	all, err := options.EncodePrinted(&f.Config)
	if err != nil {
		return nil, err
	}
	facts, err := json.Marshal(f.printedFacts)
	if err == nil {
		err = json.Unmarshal(facts, &all)
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(all)
}

// UnmarshalJSON reads what MarshalJSON has written, or an older program.
func (f *fingerprint) UnmarshalJSON(text []byte) error {
	var all map[string]json.RawMessage
	f.printedFacts = printedFacts{}
	if err := errors.Join(json.Unmarshal(text, &all), json.Unmarshal(text,
		&f.printedFacts)); err != nil {
		return err
	}
	return options.DecodePrinted(&f.Config, all)
}

// format is the version that a run's checkpoints are written as.
func (f *fingerprint) format() int {
	plain := plan.Config{}.WithDefaults()
	switch {
	case f.Head != plain.Head || f.ResidualLinear || f.ShareTypes || f.Embed != "" || f.Featureless:
		return stateFormat
	case f.SelfLoops == gnn.LoopsRemaining, f.ScheduleSettings != plain.ScheduleSettings,
		!f.Fit.Equal(prepare.Fit{}) || f.LossSettings != plain.LossSettings:
		return lossFormat
	case f.Metric != metrics.All[0].Name:
		return metricFormat
	case f.Shards > 1 || f.Mega != nil:
		return stepsFormat
	case f.Activation != plain.Activation || f.Norm != plain.Norm || f.Residual ||
		f.OutHeads != 0 || f.Optimizer != plain.Optimizer || f.SampleEpochs != 0:
		return extendedFormat
	}
	return plainFormat
}

// rounding returns what is to be said where kernels of another level than the checkpoint's go on,
// another device, or a program whose kernels of the model round otherwise; empty where both give
// the same bits.
func (f *fingerprint) rounding(now string) errs.Text {
	if f.Rounding != gnn.Rounding(f.Model) {
		return errs.Textf(
			"was made by a heliosctl whose model %s rounds otherwise: the parameters will not be to the bit those of a run that was never stopped",
			f.Model)
	}
	was, generic := f.Kernels, simd.Generic.String()
	if was == "" {
		was = generic
	}
	// The vector levels of the host give the same bits; in bf16 all levels do.
	host := func(k string) (level, precision string, ok bool) {
		level, precision, _ = strings.Cut(k, " ")
		return level, precision, slices.Contains(simd.Names(), level)
	}
	bits := func(k string) string {
		level, precision, ok := host(k)
		switch {
		case ok && precision != "":
			return "host " + precision
		case ok && level != generic:
			return "vector"
		}
		return k
	}
	if bits(was) == bits(now) {
		return ""
	}
	name := func(k string) errs.Text {
		level, precision, ok := host(k)
		switch {
		case !ok:
			return errs.Textf("a GPU's kernels (%s)", k)
		case precision != "":
			return errs.Textf("{kernels} %s and {precision} %s", level, precision)
		}
		return errs.Textf("{kernels} %s", level)
	}
	with := errs.Text(now)
	if slices.ContainsFunc([]string{was, now}, func(k string) bool {
		_, precision, ok := host(k)
		return !ok || precision != ""
	}) {
		with = name(now) // another device or precision
	}
	return errs.Textf(
		"was made with %s and resumes with %s, which rounds otherwise: the parameters will not be to the bit those of a run that was never stopped",
		name(was), with)
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

// target returns the kind that the model learns.
func (f *fingerprint) target() metrics.Target { return cmp.Or(f.Target, metrics.Classes) }

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
		{"dataset", f.Dataset, was.Dataset}, {"edges", f.Edges, was.Edges},
		{"in_dim", f.InDim, was.InDim}, {"classes", f.Classes, was.Classes},
		{"target", f.target(), was.target()},
	} {
		if x.is != x.old {
			return x.name, x.is, x.old, true
		}
	}
	if !f.Fit.Equal(was.Fit) { // numbers are the dataset's own, and so are their scales
		return "weights of the loss", weightsText(f.Weights), weightsText(was.Weights), true
	}
	if field, is, old, ok = options.DifferPrinted(&f.Config, &was.Config); ok {
		return field, is, old, true
	}
	if f.Horizon != was.Horizon {
		return "epochs", f.Horizon, was.Horizon, true
	}
	return "draws", f.draws(), was.draws(), f.draws() != was.draws()
}

// weightsText writes the first weights of a loss.
func weightsText(w []float32) string {
	switch {
	case len(w) == 0:
		return "none"
	case len(w) > 10:
		return fmt.Sprintf("%v and %d more", w[:10], len(w)-10)
	}
	return fmt.Sprint(w)
}

// state is a run's position and history: everything beside the tensors.
type state struct {
	Print     fingerprint
	Epoch     int // the epoch in work, from 0
	Batch     int // its first batch that has not been trained
	AdamStep  int64
	Partial   report.Partial // of Epoch
	Epochs    []report.EpochResult
	BestEpoch int // from 0; -1 = none yet
	BestAcc   float64

	// Of version 3 on.
	Run     string // the run's identity, which it keeps when it goes on; may be empty
	Name    string // the dataset's
	Written string // when, RFC 3339
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
func encodeState(ctx context.Context, c *paramCopier, m *gnn.Model, st state,
	best tensors) (*checkpoint.File, error) {
	f, err := describeState(st)
	if err != nil {
		return nil, err
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

// describeState makes a file that holds a state and no tensors yet.
func describeState(st state) (*checkpoint.File, error) {
	f := &checkpoint.File{Metadata: map[string]string{
		"helios.format": strconv.Itoa(st.Print.format()), "helios.run": st.Run,
		"helios.dataset_name": st.Name, "helios.written": st.Written,
	}}
	for key, v := range map[string]any{
		"helios.config": st.Print, "helios.position": position{st.Epoch, st.Batch, st.AdamStep},
		"helios.partial": st.Partial, "helios.epochs": st.Epochs,
		"helios.best": bestMark{st.BestEpoch, st.BestAcc},
	} {
		// float64 survives: Go prints the shortest text that reads back equal
		b, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		f.Metadata[key] = string(b)
	}
	return f, nil
}

// encodeBest builds the content of bestName: the best epoch's parameters, as those of a run that
// has just ended it.
func encodeBest(m *gnn.Model, st state, best tensors) (*checkpoint.File, error) {
	st.Epoch, st.Batch, st.AdamStep, st.Partial = st.BestEpoch+1, 0, 0, report.Partial{}
	st.Epochs = st.Epochs[:st.Epoch]
	f, err := describeState(st)
	if err != nil {
		return nil, err
	}
	for _, p := range m.Params() {
		f.Tensors = append(f.Tensors, f32(groupBest+p.Name, p, best[p.Name]))
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
	return checkpoint.Tensor{Name: name, DType: "F32", Shape: []int64{int64(p.Rows), int64(p.Cols)},
		Data: b}
}

// decodeState reads the metadata; the tensors stay in f.
func decodeState(path string, f *checkpoint.File) (state, error) {
	var st state
	v, err := strconv.Atoi(f.Metadata["helios.format"])
	if err != nil || v < oldestFormat || v > stateFormat {
		return st, errs.New(errs.Usage,
			"checkpoint %s: format %q is none of %d to %d; it was written by another program or version",
			path, f.Metadata["helios.format"], oldestFormat, stateFormat)
	}
	if v > lastUnsealedHead && !f.Sealed {
		return st, errs.New(errs.Device,
			"checkpoint %s: the checksum of format %d is missing: it is damaged; give an intact one, or train anew",
			path, v)
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
	st.Epoch, st.Batch, st.AdamStep, st.BestEpoch, st.BestAcc = pos.Epoch, pos.Batch, pos.AdamStep,
		best.Epoch, best.Acc
	st.Run, st.Name, st.Written = f.Metadata["helios.run"], f.Metadata["helios.dataset_name"],
		f.Metadata["helios.written"]
	if why := st.contradiction(); why != "" {
		return st, errs.New(errs.Device, "checkpoint %s: %s; give an intact one, or train anew",
			path, why)
	}
	return st, nil
}

// contradiction returns what is impossible in a state, whatever the dataset; empty: nothing.
func (st *state) contradiction() string {
	for _, check := range []func() string{st.Print.contradiction, st.misplacedEpoch,
		st.contradictoryHistory} {
		if why := check(); why != "" {
			return why
		}
	}
	return ""
}

// contradiction returns what is impossible in settings; empty: nothing.
func (p *fingerprint) contradiction() string {
	if p.InDim < 0 || p.InDim == 0 && p.Embed == "" && !p.Featureless || p.Classes < 1 || p.Hidden < 1 || p.Batch < 1 || len(p.Fanouts) == 0 ||
		p.Edges < 0 || p.Shards < 0 {
		return fmt.Sprintf(
			"no model has %d features, %d classes, width %d, batch size %d, fanout %v and %d edges",
			p.InDim, p.Classes, p.Hidden, p.Batch, p.Fanouts, p.Edges)
	}
	return p.Fit.Contradiction(p.Classes)
}

// misplacedEpoch returns why no run of any dataset stands at a position; empty: one can.
func (st *state) misplacedEpoch() string {
	switch {
	case st.Epoch < 0 || st.Epoch > plan.MaxEpochs || st.Batch < 0 || st.AdamStep < 0:
		return fmt.Sprintf("no position is epoch %d, batch %d, Adam step %d", st.Epoch, st.Batch,
			st.AdamStep)
	case len(st.Epochs) != st.Epoch:
		return fmt.Sprintf("position epoch %d does not agree with a history of %d epochs", st.Epoch,
			len(st.Epochs))
	case st.Partial.Batches != st.Batch:
		return fmt.Sprintf("batch %d does not agree with the figures of %d batches", st.Batch,
			st.Partial.Batches)
	}
	return ""
}

// contradictoryHistory returns what is impossible in what a run says of its epochs; empty: nothing.
func (st *state) contradictoryHistory() string {
	switch {
	case st.BestEpoch < -1 || st.BestEpoch >= st.Epoch || st.BestEpoch < 0 && st.Epoch > 0:
		return fmt.Sprintf("best epoch %d is none of the %d behind it", st.BestEpoch+1, st.Epoch)
	case math.IsNaN(st.BestAcc) || st.BestAcc < 0 && st.Print.target() != metrics.Numbers ||
		st.BestAcc > 1 && !metrics.Find(st.Print.Metric).Lower:
		return fmt.Sprintf("best %s %v is none", metrics.Find(st.Print.Metric).Name, st.BestAcc)
	}
	for i, e := range st.Epochs {
		if e.Epoch != i+1 || e.Batches < 0 ||
			i > 0 && e.Batches != st.Epochs[0].Batches && st.Print.Mega == nil {
			return fmt.Sprintf("its history names epoch %d of %d batches where epoch %d was",
				e.Epoch, e.Batches, i+1)
		}
	}
	return ""
}

// misplaced returns why a state is none of a run with so many training nodes; empty: it can be.
func (st *state) misplaced(nodes int) string {
	n, of := prepare.Batches(nodes, st.Print.Batch), max(st.Print.Shards, 1)
	if st.Print.Mega != nil {
		return st.misplacedMega(of)
	}
	switch steps := int64(st.Epoch)*int64((n+of-1)/of) + int64((st.Batch+of-1)/of); {
	case st.Batch > n:
		return fmt.Sprintf("batch %d is beyond the %d of an epoch", st.Batch, n)
	case st.Batch%of != 0 && st.Batch != n:
		return fmt.Sprintf("batch %d is within a step of %d", st.Batch, of)
	case st.Epoch > 0 && st.Epochs[0].Batches != n:
		return fmt.Sprintf("its epochs had %d batches, this dataset makes %d",
			st.Epochs[0].Batches, n)
	case st.AdamStep != steps:
		return fmt.Sprintf("Adam step %d does not agree with %d steps of trained batches",
			st.AdamStep, steps)
	}
	return ""
}

// group returns the tensors of one group, checked against the model's shapes.
func group(path string, f *checkpoint.File, m *gnn.Model, prefix string) (tensors, error) {
	t := tensors{}
	for _, p := range m.Params() {
		x, ok := f.Tensor(prefix + p.Name)
		if !ok {
			return nil, errs.New(errs.Device,
				"checkpoint %s: tensor %s%s is missing; give the dataset that it was trained on",
				path, prefix, p.Name)
		}
		if x.DType != "F32" || !slices.Equal(x.Shape, []int64{int64(p.Rows), int64(p.Cols)}) {
			return nil, errs.New(errs.Device,
				"checkpoint %s: tensor %s is %s%v, the model needs F32[%d %d]", path, x.Name,
				x.DType, x.Shape, p.Rows, p.Cols)
		}
		t[p.Name] = x.Data
	}
	for i := range f.Tensors {
		name, in := strings.CutPrefix(f.Tensors[i].Name, prefix)
		if _, used := t[name]; in && !used {
			return nil, errs.New(errs.Device,
				"checkpoint %s: tensor %s%s is none of the model's: the dataset has other types or relations; give the one that it was trained on",
				path, prefix, name)
		}
	}
	return t, nil
}

// restore puts a checkpoint's model and optimiser onto the device and returns the best
// epoch's parameters, nil when there are none yet.
func restore(ctx context.Context, path string, f *checkpoint.File, st state, c *paramCopier,
	m *gnn.Model) (best tensors, err error) {
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
