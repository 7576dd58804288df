package main

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/errs"
	figures "helios/internal/metrics"
	"helios/internal/outfile"
	"helios/internal/ui"
	"helios/sched"
	"helios/sched/prepare"
	"helios/sched/report"
)

func predictCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "predict",
		Usage:     "classify nodes with a checkpoint, or predict their labels or numbers",
		ArgsUsage: "[DATASET]",
		Description: "Writes node, class and, where the dataset has them, the names of both: to standard output,\n" +
			"or as a table to --csv. --embeddings writes the activations of the last hidden layer, before the layer that classifies, a\n" +
			"row for each node; a model of one layer has no hidden one, and gives its outputs, a column for each class.\n" +
			"--scores writes the outputs of the last layer and --proba their softmax, a column for each class.\n" +
			"Of several labels, a node has the probability of each (a sigmoid); of numbers these, in the unit of the dataset.\n" +
			"A FILE that ends in .csv or .parquet is a table: the node, its name, and columns with the names of the classes.\n" +
			"The class of a node depends on its draws, not on --batch-size; but with --sampler ladies the nodes of a\n" +
			"batch share what is drawn: --sampler neighbor --fanout -1,-1 (one for each layer) takes all neighbours instead.",
	}, 1, inferOptions[predictArgs]().Without("results"), runPredict)
}

// predictArgs holds the options of predict.
type predictArgs struct {
	inferArgs
	split      string   `option:"split" common:"yes" use:"setting" oneof:"all,@splits" default:"all" usage:"nodes to classify"`
	nodes      []int64  `option:"nodes" common:"yes" arg:"N,N…" usage:"classify these instead N,N…, from 0"`
	ids        []string `option:"id" common:"yes" arg:"NAME,NAME…" usage:"classify the nodes of these names instead NAME,NAME…"`
	csv        string   `option:"csv" common:"yes" arg:"FILE" usage:"table FILE of classes to write: CSV, or Parquet where the name ends in .parquet"`
	threshold  float64  `option:"threshold" common:"yes" use:"setting" positive:"yes" range:"0..1" shown:"the class with the larger probability" arg:"P" usage:"of two classes, predict the second where its probability is at least P; of several labels, those whose is"`
	topK       int      `option:"topk" common:"yes" use:"setting" positive:"yes" range:"1..65536" shown:"none" arg:"K" usage:"also give the K most probable classes of each node with their probabilities"`
	embeddings string   `option:"embeddings" common:"yes" arg:"FILE" usage:"FILE for the activations (float32, nodes × width of the last hidden layer: {hidden} of train): .npy, .csv or .parquet"`
	scores     string   `option:"scores" common:"yes" arg:"FILE" usage:"FILE for the model's outputs (float32, nodes × classes): .npy, .csv or .parquet"`
	proba      string   `option:"proba" common:"yes" arg:"FILE" usage:"FILE for the probabilities of the classes (float32, nodes × classes): .npy, .csv or .parquet"`
}

// SetOption reads numbers and names of nodes.
func (a *predictArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "nodes":
		a.nodes, err = parseNodes(text)
	case "id":
		a.ids, err = parseNames(text)
	default:
		return false, nil
	}
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
	if e.given(&a.nodes) != "" && e.given(&a.ids) != "" {
		return nil, errs.New(errs.Usage, "{nodes} and {id} together; give one")
	}
	if f := e.given(&a.nodes, &a.ids); f != "" && e.given(&a.split) != "" {
		return nil, errs.New(errs.Usage, "%v and {split} together; give one", errs.Key(f))
	}
	if len(a.ids) > 0 {
		return named(d, a.ids)
	}
	if len(a.nodes) > 0 {
		return a.nodes, nil
	}
	if a.split != "all" {
		return d.Split(a.split)
	}
	out := make([]int64, prepare.TargetNodes(&d.Meta))
	for i := range out {
		out[i] = int64(i)
	}
	return out, nil
}

// named returns the nodes with the labels that have names.
func named(d *dataset.Dataset, names []string) (nodes []int64, err error) {
	g := d.Meta.Graph()
	m, err := namesOf(d, g.TypeOf(g.Tasks[0].Type))
	if err != nil {
		return nil, err
	}
	defer closing(&err, m.Close)
	return nodesNamed(m, names)
}

func runPredict(ctx context.Context, e *env, a *predictArgs) (err error) {
	if err := e.oneProcess(); err != nil {
		return err
	}
	if err := a.check(); err != nil {
		return err
	}
	to := &predictions{env: e, predictArgs: a}
	for _, x := range to.outputs() {
		f, err := a.create(x.flag, x.path)
		if err != nil {
			return err
		}
		defer closing(&err, f.Discard)
		if f != nil {
			x.file = f
			to.files = append(to.files, x)
		}
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
	if err := to.begin(s.Dataset, int64(len(nodes))); err != nil {
		return err
	}
	res, err := sched.Predict(ctx, a.cfg, s.Inputs, a.checkpoint, nodes,
		report.Outputs{Embeddings: a.embeddings != "", Logits: a.scores != "" || to.shares},
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
	*predictArgs
	names      []string // of nodes; may be empty, as the next
	classNames []string
	target     figures.Target
	classes    int // or labels, or numbers
	files      []*predictionFile
	n, of      int64 // nodes that are done, of how many

	shares bool      // probabilities are asked for
	proba  []float32 // of the batch
	values []float32 // labels, their probabilities or numbers of the batch, where there is no class
}

// predictionFile is an output, whose table begins with its first rows.
type predictionFile struct {
	flag, path, what string
	file             *outfile.File
	table            table
	dim              int
	ofClasses        bool   // the figures are, or of labels or numbers
	before           string // the names of columns
	// values has the figures of a batch, so many of each node; nil: the file has classes.
	values func(b *report.Prediction) (v []float32, dim int)
}

// topClass is a class with its probability for a node.
type topClass struct {
	Class int32   `json:"class"`
	Name  string  `json:"name,omitempty"`
	Proba float32 `json:"proba"`
}

// outputs are the files that predict can write.
func (p *predictions) outputs() []*predictionFile {
	return []*predictionFile{
		{flag: "csv", path: p.csv},
		{flag: "embeddings", path: p.embeddings, what: "embeddings", values: func(
			b *report.Prediction) ([]float32, int) {
			return b.Embeddings, b.Dim
		}},
		{flag: "scores", path: p.scores, what: "scores", ofClasses: true, values: func(
			b *report.Prediction) ([]float32, int) {
			return b.Logits, p.classes
		}},
		{flag: "proba", path: p.predictArgs.proba, what: "probabilities", ofClasses: true,
			values: func(*report.Prediction) ([]float32, int) { return p.proba, p.classes }},
	}
}

// begin takes over what the dataset says of the nodes, and refuses what it has no classes for.
func (p *predictions) begin(d *dataset.Dataset, nodes int64) (err error) {
	p.of, p.classes, p.classNames = nodes, d.Meta.Classes, d.Meta.ClassNames
	p.target = prepare.TargetOf(d)
	p.shares = p.predictArgs.proba != "" || p.threshold > 0 || p.topK > 0 ||
		p.target == figures.Labels
	switch {
	case p.target == figures.Numbers && p.shares:
		return errs.New(errs.Usage,
			"dataset %s has numbers, which have no probabilities; leave {proba}, {threshold} and {topk} out ({scores} writes numbers)",
			d.Meta.Name)
	case p.target == figures.Labels && p.topK > 0:
		return errs.New(errs.Usage, "{topk} is for classes, and dataset %s has labels; leave it out",
			d.Meta.Name)
	case p.target == figures.Classes && p.threshold > 0 && p.classes != 2:
		return errs.New(errs.Usage, "{threshold} is for two classes, and dataset %s has %d; leave it out",
			d.Meta.Name, p.classes)
	case p.topK > p.classes:
		return errs.New(errs.Usage, "{topk} %d: dataset %s has %d classes; give at most so many", p.topK,
			d.Meta.Name, p.classes)
	}
	for _, f := range p.files {
		if f.values == nil && p.target != figures.Classes {
			f.before, f.ofClasses = map[bool]string{true: "number ", false: "probability "}[p.target ==
				figures.Numbers], true
			if p.threshold > 0 {
				f.before = "label "
			}
			f.values = func(*report.Prediction) ([]float32, int) { return p.values, p.classes }
		}
	}
	p.names, err = d.Names()
	return err
}

// share fills in the probabilities of a batch, and what is told of it where there is no class.
func (p *predictions) share(b *report.Prediction) {
	p.proba = slices.Grow(p.proba[:0], len(b.Logits))[:len(b.Logits)]
	for i := range b.Nodes {
		from, to := i*p.classes, (i+1)*p.classes
		if p.target == figures.Labels {
			figures.Sigmoid(p.proba[from:to], b.Logits[from:to])
		} else {
			figures.Softmax(p.proba[from:to], b.Logits[from:to])
		}
	}
	if p.values = p.proba; p.threshold == 0 {
		return
	}
	likely := func(x float32) (is int32) {
		if float64(x) >= p.threshold {
			is = 1
		}
		return is
	}
	if p.target == figures.Classes {
		for i := range b.Nodes {
			b.Classes[i] = likely(p.proba[2*i+1])
		}
		return
	}
	p.values = make([]float32, len(p.proba))
	for i, x := range p.proba {
		p.values[i] = float32(likely(x))
	}
}

// add takes a batch.
func (p *predictions) add(b report.Prediction) error {
	if p.values = b.Logits; p.shares {
		p.share(&b)
	}
	for _, f := range p.files {
		if err := p.write(f, &b); err != nil {
			return err
		}
	}
	p.n += int64(len(b.Nodes))
	if p.csv != "" {
		return nil
	}
	for i, v := range b.Nodes {
		var err error
		if p.target == figures.Classes {
			err = p.show(v, b.Classes[i], i)
		} else {
			err = p.showValues(v, p.values[i*p.classes:(i+1)*p.classes])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// write adds a batch to a file.
func (p *predictions) write(f *predictionFile, b *report.Prediction) error {
	var values []float32
	if f.values != nil {
		values, f.dim = f.values(b)
	}
	if err := p.open(f); err != nil {
		return err
	}
	for i, v := range b.Nodes {
		class := int32(0)
		if b.Classes != nil {
			class = b.Classes[i]
		}
		cells := p.cells(f, v, class, i)
		if err := f.table.row(cells, values[i*f.dim:(i+1)*f.dim]); err != nil {
			return errs.Errorf("%s: %w", f.path, err)
		}
	}
	return nil
}

// open begins a file's table, once.
func (p *predictions) open(f *predictionFile) (err error) {
	if f.table != nil {
		return nil
	}
	var columns []string
	for c := range f.dim {
		switch {
		case !f.ofClasses:
			columns = append(columns, fmt.Sprintf("dim_%d", c))
		case c < len(p.classNames):
			columns = append(columns, f.before+p.classNames[c])
		case p.target != figures.Classes:
			columns = append(columns, f.before+strconv.Itoa(c))
		default:
			columns = append(columns, fmt.Sprintf("class_%d", c))
		}
	}
	end := filepath.Ext(f.path)
	if f.flag == "csv" && end != parquetEnd {
		end = csvEnd
	}
	f.table, err = newTable(f.file, end, p.cells(f, 0, 0, -1), columns, p.of)
	return err
}

// cells are those of a row before its figures. place is the node's in the batch; below 0:
// none.
func (p *predictions) cells(f *predictionFile, node int64, class int32, place int) []cell {
	row := []cell{{"node", node}}
	if f.values == nil {
		row = append(row, cell{"class", class})
	}
	if len(p.names) > 0 {
		row = append(row, cell{"name", p.nameOf(node)})
	}
	if f.values != nil {
		return row
	}
	if len(p.classNames) > 0 {
		row = append(row, cell{"class_name", p.className(class)})
	}
	for i, c := range p.top(place) {
		var name any = c.Class
		if len(p.classNames) > 0 {
			name = c.Name
		}
		row = append(row, cell{fmt.Sprintf("top%d", i+1), name},
			cell{fmt.Sprintf("proba%d", i+1), c.Proba})
	}
	return row
}

func (p *predictions) nameOf(node int64) string {
	if int(node) >= len(p.names) {
		return ""
	}
	return p.names[node]
}

func (p *predictions) className(class int32) string {
	if int(class) >= len(p.classNames) {
		return ""
	}
	return p.classNames[class]
}

// top lists the most probable classes of a node of the batch, of equal ones the first.
func (p *predictions) top(place int) []topClass {
	if p.topK == 0 || place < 0 {
		return make([]topClass, p.topK)
	}
	all := make([]topClass, p.classes)
	for c, x := range p.proba[place*p.classes : (place+1)*p.classes] {
		all[c] = topClass{int32(c), p.className(int32(c)), x}
	}
	slices.SortStableFunc(all, func(a, b topClass) int { return cmp.Compare(b.Proba, a.Proba) })
	return all[:p.topK]
}

// show shows a node's class.
func (p *predictions) show(node int64, class int32, place int) error {
	line := nodeLine{Node: node, Class: class, Name: p.nameOf(node), ClassName: p.className(class)}
	text := fmt.Sprintf("%d\t%d", node, class)
	for _, name := range []string{line.Name, line.ClassName} {
		if name != "" {
			text += "\t" + ui.Text(name) // a name may hold a tab
		}
	}
	if p.topK > 0 {
		line.Top = p.top(place)
	}
	for _, c := range line.Top {
		text += fmt.Sprintf("\t%s\t%.4f", ui.Text(cmp.Or(c.Name, strconv.Itoa(int(c.Class)))), c.Proba)
	}
	p.ui.Printf("%s", text)
	return p.ui.Event("node", line)
}

// showValues shows a node's labels, their probabilities, or its numbers.
func (p *predictions) showValues(node int64, values []float32) error {
	text := strconv.FormatInt(node, 10)
	for _, x := range values {
		text += "\t" + textOf(x)
	}
	line := valuesLine{Node: node, Values: values, Name: p.nameOf(node)}
	if line.Name != "" {
		text += "\t" + ui.Text(line.Name)
	}
	p.ui.Printf("%s", text)
	return p.ui.Event("node", line)
}

// commit keeps the files.
func (p *predictions) commit() error {
	for _, f := range p.files {
		if err := p.open(f); err != nil { // no node was there to classify
			return err
		}
		if err := f.file.Commit(f.table.close()); err != nil {
			return err
		}
		if f.flag == "csv" {
			done := "classified"
			if p.target != figures.Classes {
				done = "predicted"
			}
			p.ui.Printf("%d nodes %s in %s", p.n, done, f.file.Path())
		} else {
			p.ui.Printf("%s in %s: %d nodes × %d", f.what, f.file.Path(), p.n, f.dim)
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
	// Top are the most probable classes, as many as were asked for.
	Top []topClass `json:"top,omitempty"`
}

// valuesLine has a node's labels, their probabilities, or its numbers.
type valuesLine struct {
	Node   int64     `json:"node"`
	Values []float32 `json:"values"`
	Name   string    `json:"name,omitempty"`
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
