package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/csv"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	figures "helios/internal/metrics"
	"helios/internal/outfile"
	"helios/internal/ui"
	"helios/sched"
	"helios/sched/report"
)

func predictCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "predict",
		Usage:     "classify nodes with a checkpoint",
		ArgsUsage: "[DATASET]",
		Description: "Writes node, class and, where the dataset has them, the names of both: to standard output,\n" +
			"or as CSV to --csv. --embeddings writes the activations of the last hidden layer, before the layer that classifies, a row\n" +
			"for each node; a model of one layer has no hidden one, and gives its outputs, a column for each class.\n" +
			"--scores writes the outputs of the last layer and --proba their softmax, a column for each class.\n" +
			"The class of a node depends on its draws, not on --batch-size; but with --sampler ladies the nodes of a\n" +
			"batch share what is drawn: --sampler neighbor --fanout -1,-1 (one for each layer) takes all neighbours instead.",
	}, 1, inferOptions[predictArgs]().Without("results"), runPredict)
}

// predictArgs holds the options of predict.
type predictArgs struct {
	inferArgs
	split      string  `option:"split" common:"yes" use:"setting" oneof:"all,@splits" default:"all" usage:"nodes to classify"`
	nodes      []int64 `option:"nodes" common:"yes" arg:"ID,ID…" usage:"classify these instead ID,ID…"`
	csv        string  `option:"csv" common:"yes" arg:"FILE" usage:"CSV FILE to write"`
	embeddings string  `option:"embeddings" common:"yes" arg:"FILE" usage:".npy FILE to write (float32, nodes × width of the last hidden layer: {hidden} of train)"`
	scores     string  `option:"scores" common:"yes" arg:"FILE" usage:".npy FILE to write the model's outputs to (float32, nodes × classes)"`
	proba      string  `option:"proba" common:"yes" arg:"FILE" usage:".npy FILE to write the probabilities of the classes to (float32, nodes × classes)"`
}

// SetOption reads numbers of nodes.
func (a *predictArgs) SetOption(name, text string) (done bool, err error) {
	if name != "nodes" {
		return false, nil
	}
	a.nodes, err = parseNodes(text)
	return true, err
}

func parseNodes(text string) ([]int64, error) {
	parts, err := list("nodes", text)
	if err != nil {
		return nil, err
	}
	out := make([]int64, len(parts))
	for i, p := range parts {
		if out[i], err = strconv.ParseInt(p, 10, 64); err != nil {
			return nil, errs.New(errs.Usage, "{nodes}: %q is not a node number", p)
		}
	}
	return out, nil
}

// classified returns the nodes that predict was asked for.
func (a *predictArgs) classified(e *env, d *dataset.Dataset) ([]int64, error) {
	if len(a.nodes) > 0 {
		if e.given(&a.split) != "" {
			return nil, errs.New(errs.Usage, "{nodes} and {split} together; give one")
		}
		return a.nodes, nil
	}
	if a.split != "all" {
		return d.Split(a.split)
	}
	out := make([]int64, d.Meta.Nodes)
	for i := range out {
		out[i] = int64(i)
	}
	return out, nil
}

func runPredict(ctx context.Context, e *env, a *predictArgs) (err error) {
	if err := e.oneProcess(); err != nil {
		return err
	}
	if err := a.check(); err != nil {
		return err
	}
	csvOut, err := a.create("csv", a.csv)
	if err != nil {
		return err
	}
	defer closing(&err, csvOut.Discard)
	var matrices [3]*outfile.File
	for i, f := range [3][2]string{{"embeddings", a.embeddings}, {"scores", a.scores},
		{"proba", a.proba}} {
		if matrices[i], err = a.create(f[0], f[1]); err != nil {
			return err
		}
		defer closing(&err, matrices[i].Discard)
	}
	s, err := openSession(ctx, e, &a.runArgs)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	nodes, err := a.classified(e, s.Dataset)
	if err != nil {
		return err
	}
	names, err := s.Dataset.Names()
	if err != nil {
		return err
	}
	to := &predictions{env: e, names: names, classNames: s.Dataset.Meta.ClassNames}
	if csvOut != nil {
		to.rows = &csvFile{f: csvOut, w: csv.NewWriter(csvOut)}
		to.writeHead()
	}
	for i, to := range []**npyFile{&to.emb, &to.scores, &to.proba} {
		if f := matrices[i]; f != nil {
			*to = &npyFile{f: f, w: bufio.NewWriterSize(f, 1<<20), rows: int64(len(nodes))}
		}
	}
	res, err := sched.Predict(ctx, a.cfg, s.Inputs, a.checkpoint, nodes,
		report.Outputs{Embeddings: to.emb != nil, Logits: to.scores != nil || to.proba != nil},
		to.add, e.observer())
	err = orOtherDataset(err)
	s.ended(&results{e: e}, &res.IO, err)
	if err != nil {
		return err
	}
	if err := to.commit(); err != nil {
		return err
	}
	return e.ui.Event("result", predictLine{Nodes: to.n, Checkpoint: a.checkpoint, CSV: a.csv,
		Embeddings: a.embeddings, Scores: a.scores, Proba: a.proba, PredictResult: &res})
}

// predictions shows the class of each node, or writes it into files.
type predictions struct {
	*env
	names      []string // of nodes; may be empty, as the next
	classNames []string
	rows       *csvFile // nil: nodes are shown
	// nil: none are asked for
	emb, scores, proba *npyFile
	n                  int64
}

func (p *predictions) writeHead() {
	head := []string{"node", "class"}
	if len(p.names) > 0 {
		head = append(head, "name")
	}
	if len(p.classNames) > 0 {
		head = append(head, "class_name")
	}
	p.rows.write(head)
}

// add takes a batch.
func (p *predictions) add(b report.Prediction) error {
	for i, v := range b.Nodes {
		if err := p.addNode(v, b.Classes[i]); err != nil {
			return err
		}
	}
	p.n += int64(len(b.Nodes))
	if p.emb != nil {
		if err := p.emb.write(b.Embeddings, b.Dim); err != nil {
			return err
		}
	}
	classes := len(b.Logits) / max(len(b.Nodes), 1)
	if p.scores != nil {
		if err := p.scores.write(b.Logits, classes); err != nil {
			return err
		}
	}
	if p.proba == nil {
		return nil
	}
	for i := range b.Nodes {
		row := b.Logits[i*classes : (i+1)*classes]
		figures.Softmax(row, row)
	}
	return p.proba.write(b.Logits, classes)
}

func (p *predictions) addNode(v int64, c int32) error {
	rec := []string{strconv.FormatInt(v, 10), strconv.Itoa(int(c))}
	line := nodeLine{Node: v, Class: c}
	if int(v) < len(p.names) {
		rec, line.Name = append(rec, p.names[v]), p.names[v]
	}
	if int(c) < len(p.classNames) {
		rec, line.ClassName = append(rec, p.classNames[c]), p.classNames[c]
	}
	if p.rows != nil {
		p.rows.write(rec)
		return nil
	}
	for j := range rec {
		rec[j] = ui.Text(rec[j]) // a name may hold a tab
	}
	p.ui.Printf("%s", strings.Join(rec, "\t"))
	return p.ui.Event("node", line)
}

// commit keeps the files.
func (p *predictions) commit() error {
	if p.rows != nil {
		p.rows.w.Flush()
		if err := p.rows.f.Commit(p.rows.w.Error()); err != nil {
			return err
		}
		p.ui.Printf("%d nodes classified in %s", p.n, p.rows.f.Path())
	}
	for _, m := range []struct {
		name string
		f    *npyFile
	}{{"embeddings", p.emb}, {"scores", p.scores}, {"probabilities", p.proba}} {
		if m.f == nil {
			continue
		}
		if m.f.dim == 0 { // no node was there to classify
			if err := m.f.write(nil, 0); err != nil {
				return err
			}
		}
		if err := m.f.f.Commit(m.f.w.Flush()); err != nil {
			return err
		}
		p.ui.Printf("%s in %s: %d nodes × %d", m.name, m.f.f.Path(), m.f.rows, m.f.dim)
	}
	return nil
}

// csvFile keeps its first error for commit, as csv.Writer does.
type csvFile struct {
	f *outfile.File
	w *csv.Writer
}

func (c *csvFile) write(rec []string) { _ = c.w.Write(rec) } // the error comes again from w.Error

// npyFile writes rows × dim float32; dim is known with the first rows.
type npyFile struct {
	f    *outfile.File
	w    *bufio.Writer
	rows int64
	dim  int // 0: nothing is written yet
}

func (f *npyFile) write(v []float32, dim int) error {
	if f.dim == 0 {
		h, err := npy.EncodeHeader(npy.Header{DType: npy.Float32,
			Shape: []int64{f.rows, int64(dim)}})
		if err != nil {
			return err
		}
		if _, err := f.w.Write(h); err != nil {
			return errs.Errorf("%s: %w", f.f.Path(), err)
		}
		f.dim = dim
	}
	return writeFloats(f.w, v)
}

func writeFloats(w io.Writer, v []float32) error {
	var b [4]byte
	for _, x := range v {
		binary.LittleEndian.PutUint32(b[:], math.Float32bits(x))
		if _, err := w.Write(b[:]); err != nil {
			return err
		}
	}
	return nil
}

// nodeLine is a node's class.
type nodeLine struct {
	Node      int64  `json:"node"`
	Class     int32  `json:"class"`
	Name      string `json:"name,omitempty"`
	ClassName string `json:"class_name,omitempty"`
}

// predictLine is the result of predict.
type predictLine struct {
	Nodes      int64  `json:"nodes"`
	Checkpoint string `json:"checkpoint"`
	CSV        string `json:"csv"`
	Embeddings string `json:"embeddings"`
	Scores     string `json:"scores,omitempty"`
	Proba      string `json:"proba,omitempty"`
	*report.PredictResult
}
