package prepare

import (
	"bufio"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/metrics"
	"helios/sched/plan"
)

// Targets are the classes, labels or numbers of a dataset's nodes, and the form in which a model
// learns them.
type Targets struct {
	Kind    metrics.Target
	Columns int      // outputs of a model: one for each class, label or number
	Names   []string // theirs, as far as the dataset has them
	Fit

	classes []int32   // -1: none
	labels  []uint8   // metrics.UnknownLabel: none
	numbers []float32 // NaN: none
}

// Fit has the parts of a loss that the training nodes decide. A checkpoint keeps it.
type Fit struct {
	Target metrics.Target `json:"target,omitempty"` // empty: classes
	// Scale is that of each number: a model learns (number - Mean) / Deviation.
	Scale []Scale `json:"standard,omitempty"`
	// Weights are those of classes, or of labels that are there; nil: 1 each.
	Weights []float32 `json:"loss-weights,omitempty"`
}

// Scale is the mean and the standard deviation of the training nodes' numbers.
type Scale struct {
	Mean      float64 `json:"mean"`
	Deviation float64 `json:"deviation"`
}

// TargetOf returns the target of a dataset's task.
func TargetOf(d *dataset.Dataset) metrics.Target {
	g := d.Meta.Graph()
	return metrics.Target(g.Tasks[0].Target)
}

// ReadTargets reads the targets of a dataset's task.
func ReadTargets(d *dataset.Dataset) (t *Targets, err error) {
	t = &Targets{Kind: TargetOf(d), Columns: d.Meta.Classes, Names: d.Meta.ClassNames}
	switch t.Kind {
	case metrics.Labels:
		t.labels, err = d.TaskMultiLabels(0)
	case metrics.Numbers:
		t.numbers, err = d.TaskValues(0)
	default:
		var classes []int32
		classes, err = d.Labels()
		t = ClassTargets(d.Meta.Classes, classes)
	}
	return t, err
}

// ClassTargets are one class of each node; -1: none.
func ClassTargets(classes int, of []int32) *Targets {
	return &Targets{Kind: metrics.Classes, Columns: classes, classes: of}
}

// Equal reports whether two are the same.
func (f Fit) Equal(o Fit) bool {
	return f.Target == o.Target && slices.Equal(f.Scale, o.Scale) &&
		slices.Equal(f.Weights, o.Weights)
}

// Contradiction returns what is impossible for so many outputs; empty: nothing.
func (f Fit) Contradiction(outputs int) string {
	for _, s := range f.Scale {
		if !(s.Deviation > 0) || math.IsInf(s.Deviation, 0) || math.IsNaN(s.Mean-s.Mean) {
			return "its targets have an impossible mean or deviation"
		}
	}
	for _, w := range f.Weights {
		if !(w >= 0) || math.IsInf(float64(w), 0) {
			return "its loss has an impossible weight"
		}
	}
	scales := 0
	if f.Target == metrics.Numbers {
		scales = outputs
	}
	known := f.Target == "" || f.Target == metrics.Labels || f.Target == metrics.Numbers
	if !known || len(f.Scale) != scales || len(f.Weights) != 0 && len(f.Weights) != outputs {
		return "its targets do not agree with the model's outputs"
	}
	return ""
}

// FitOf finds the parts of a run's loss that the training nodes decide; tell hears notes on them.
// cfg is of plan.Config.ForTarget.
func FitOf(cfg plan.Config, d *dataset.Dataset, tell func(format string, args ...any)) (f Fit,
	err error) {
	target := TargetOf(d)
	if target != metrics.Classes {
		f.Target = target
	}
	asked := cfg.ClassWeights + cfg.PosWeight
	if target != metrics.Numbers && asked == "" {
		return f, nil
	}
	t, err := ReadTargets(d)
	if err != nil {
		return f, err
	}
	train, err := d.Split("train")
	if err != nil {
		return f, err
	}
	if target == metrics.Numbers {
		f.Scale, err = t.scales(d, train)
		return f, err
	}
	f.Weights, err = t.weights(cfg, d, train, tell)
	return f, err
}

// scales returns mean and deviation of each number over the training nodes.
func (t *Targets) scales(d *dataset.Dataset, train []int64) ([]Scale, error) {
	all := make([]Scale, t.Columns)
	for c := range all {
		n, sum := 0, 0.0
		each := func(f func(x float64)) {
			for _, v := range train {
				if x := float64(t.numbers[int(v)*t.Columns+c]); x == x {
					f(x)
				}
			}
		}
		each(func(x float64) { n, sum = n+1, sum+x })
		if n == 0 {
			return nil, errs.New(errs.Usage,
				"dataset %s: no training node has a number in column %d, so there is nothing to learn; import it without that column",
				d.Meta.Name, c)
		}
		mean, squares := sum/float64(n), 0.0
		each(func(x float64) { squares += float64((x - mean) * (x - mean)) })
		all[c] = Scale{mean, math.Sqrt(squares / float64(n))}
		if all[c].Deviation == 0 { // all the same
			all[c].Deviation = 1
		}
	}
	return all, nil
}

// counts returns how many training nodes have each class or label, and of labels how many have it
// not.
func (t *Targets) counts(train []int64) (have, not []int64) {
	have, not = make([]int64, t.Columns), make([]int64, t.Columns)
	for _, v := range train {
		if t.Kind == metrics.Classes {
			if y := t.classes[v]; y >= 0 {
				have[y]++
			}
			continue
		}
		for c, y := range t.labels[int(v)*t.Columns : (int(v)+1)*t.Columns] {
			switch y {
			case 0:
				not[c]++
			case 1:
				have[c]++
			}
		}
	}
	return have, not
}

// weights returns those that the settings ask for.
func (t *Targets) weights(cfg plan.Config, d *dataset.Dataset, train []int64,
	tell func(format string, args ...any)) ([]float32, error) {
	key, text := errs.Key("class-weights"), cfg.ClassWeights
	if cfg.PosWeight != "" {
		key, text = "pos-weight", cfg.PosWeight
	}
	if text != plan.Balanced {
		return readWeights(key, text, t.Columns)
	}
	have, not := t.counts(train)
	w := make([]float32, t.Columns)
	present, all := 0, int64(0)
	var without []string
	for c, n := range have {
		if all += n; n > 0 {
			present++
		} else {
			without = append(without, name(d, c))
		}
	}
	for c, n := range have {
		switch {
		case n == 0:
			w[c] = 1
		case t.Kind == metrics.Classes: // as scikit-learn's
			w[c] = float32(float64(all) / (float64(present) * float64(n)))
		default:
			w[c] = float32(float64(not[c]) / float64(n))
		}
	}
	if len(without) > 0 {
		tell("%v balanced: no training node has %s, which weigh 1", key,
			strings.Join(without[:min(len(without), 10)], ", "))
	}
	return w, nil
}

// name is that of a class or label for people.
func name(d *dataset.Dataset, c int) string {
	if c < len(d.Meta.ClassNames) {
		return d.Meta.ClassNames[c]
	}
	return strconv.Itoa(c)
}

// readWeights reads a number for all, or a file of one for each: .npy or text.
func readWeights(key errs.Key, text string, n int) (w []float32, err error) {
	if x, err := strconv.ParseFloat(text, 64); err == nil && key == "pos-weight" {
		w = slices.Repeat([]float32{float32(x)}, n)
	} else if w, err = weightFile(key, text, n); err != nil {
		return nil, err
	}
	if len(w) != n {
		return nil, errs.New(errs.Usage, "%v %s has %d weights; give %d, one for each in order", key,
			text, len(w), n)
	}
	for i, x := range w {
		if !(x >= 0) || math.IsInf(float64(x), 0) {
			return nil, errs.New(errs.Usage,
				"%v: weight %v at place %d; a weight is a number from 0 on", key, x, i)
		}
	}
	if key == "class-weights" && slices.Max(w) == 0 {
		return nil, errs.New(errs.Usage, "%v %s weighs every class 0: there is nothing to learn", key,
			text)
	}
	return w, nil
}

// mostWeights is more than any file of weights needs.
const mostWeights = 1 << 20

func weightFile(key errs.Key, path string, n int) (w []float32, err error) {
	if strings.HasSuffix(path, ".npy") {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		if s := a.Header.Shape; len(s) != 1 || s[0] > mostWeights {
			return nil, errs.New(errs.Usage, "%v %s has shape %s, must be (%d,)", key, path,
				a.Header.ShapeString(), n)
		}
		err = npy.Each(a, 0, func(_ int64, xs []float64) error {
			for _, x := range xs {
				w = append(w, float32(x))
			}
			return nil
		})
		return w, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.New(errs.Usage, "%v: %w; give %s, or a file with a weight for each", key, err,
			plan.Balanced)
	}
	defer func() { _ = f.Close() }() // read only
	for words := bufio.NewScanner(f); words.Scan() && len(w) <= mostWeights; {
		for _, word := range strings.FieldsFunc(words.Text(), func(r rune) bool {
			return r == ',' || r == ' ' || r == '\t' || r == '\r'
		}) {
			x, err := strconv.ParseFloat(word, 32)
			if err != nil {
				return nil, errs.New(errs.Usage, "%v %s: %.40q is no weight; give a number for each",
					key, path, word)
			}
			w = append(w, float32(x))
		}
	}
	return w, nil
}

// Bytes is the size of so many nodes' targets on the device.
func (t *Targets) Bytes(nodes int) int64 {
	if t.Kind == metrics.Classes {
		return 4 * int64(nodes)
	}
	return 4 * int64(nodes) * int64(t.Columns)
}

// Dense reports whether a model learns several labels or numbers, and no class.
func (t *Targets) Dense() bool { return t.Kind != metrics.Classes }

// Classes returns the classes of nodes, -1 where there is none; nil where targets are no classes.
func (t *Targets) Classes(nodes []int64) []int32 {
	if t.Dense() {
		return nil
	}
	of := make([]int32, len(nodes))
	for k, v := range nodes {
		of[k] = t.classes[v]
	}
	return of
}

// Write puts the targets of nodes into memory, as a model learns them: int32 classes, or float32
// rows.
func (t *Targets) Write(nodes []int64, to []byte) {
	if t.Kind == metrics.Classes {
		dst := hostmem.View[int32](to)
		for k, v := range nodes {
			dst[k] = t.classes[v]
		}
		return
	}
	dst, k := hostmem.View[float32](to), t.Columns
	for i, v := range nodes {
		row, from := dst[i*k:(i+1)*k], int(v)*k
		if t.Kind == metrics.Labels {
			for c, y := range t.labels[from : from+k] {
				row[c] = float32(y)
				if y == metrics.UnknownLabel {
					row[c] = float32(math.NaN())
				}
			}
			continue
		}
		copy(row, t.numbers[from:from+k])
		for c, s := range t.Scale {
			row[c] = float32((float64(row[c]) - s.Mean) / s.Deviation)
		}
	}
}

// InUnit turns a model's outputs for nodes into numbers in the unit of the targets, in place. Other
// outputs stay as they are.
func (t *Targets) InUnit(outputs []float32) {
	for i := range outputs {
		if t.Scale == nil {
			return
		}
		s := t.Scale[i%t.Columns]
		outputs[i] = float32(float64(float64(outputs[i])*s.Deviation) + s.Mean)
	}
}

// Weighs reports whether the mean of a loss is by something else than the number of nodes that have
// a target.
func (t *Targets) Weighs() bool { return t.Dense() || t.Weights != nil }

// Mass returns the number that the mean loss over nodes divides by.
func (t *Targets) Mass(nodes []int64) (sum float64) {
	for _, v := range nodes {
		switch t.Kind {
		case metrics.Labels:
			for _, y := range t.labels[int(v)*t.Columns : (int(v)+1)*t.Columns] {
				if y != metrics.UnknownLabel {
					sum++
				}
			}
		case metrics.Numbers:
			for _, x := range t.numbers[int(v)*t.Columns : (int(v)+1)*t.Columns] {
				if x == x {
					sum++
				}
			}
		default:
			switch y := t.classes[v]; {
			case y < 0:
			case t.Weights != nil:
				sum += float64(t.Weights[y])
			default:
				sum++
			}
		}
	}
	return sum
}

// Judge makes room for a model's outputs for nodes. keep is that of metrics.NewScores.
func (t *Targets) Judge(nodes []int64, keep bool) metrics.Judge {
	k := t.Columns
	switch t.Kind {
	case metrics.Labels:
		labels := make([]uint8, 0, len(nodes)*k)
		for _, v := range nodes {
			labels = append(labels, t.labels[int(v)*k:(int(v)+1)*k]...)
		}
		return metrics.NewLabelScores(k, labels, keep)
	case metrics.Numbers:
		numbers := make([]float32, 0, len(nodes)*k)
		for _, v := range nodes {
			numbers = append(numbers, t.numbers[int(v)*k:(int(v)+1)*k]...)
		}
		return metrics.NewNumberScores(k, numbers)
	}
	classes := make([]int32, len(nodes))
	for i, v := range nodes {
		classes[i] = t.classes[v]
	}
	return metrics.NewScores(k, classes, keep)
}

// Defines reports whether nodes define a metric. keep is that of Judge.
func (t *Targets) Defines(m metrics.Metric, nodes []int64, keep bool) bool {
	if t.Kind == metrics.Classes { // nodes of two classes define all that more nodes do
		var two []int64
		for _, v := range nodes {
			if y := t.classes[v]; y >= 0 && len(two) < 2 &&
				(len(two) == 0 || t.classes[two[0]] != y) {
				two = append(two, v)
			}
		}
		nodes = two
	}
	return m.Defined(t.Judge(nodes, keep))
}
