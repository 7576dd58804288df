package importer

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/work"
)

// RandomFeatures is the FeatureFn that stores noise, with the logarithm of the in-degree in front.
const RandomFeatures = "random"

// Output are the options of every format: the dataset to make.
type Output struct {
	Out  string `option:"out" common:"yes" arg:"DIR" usage:"DIR to create"`
	Name string `option:"name" usage:"name of the dataset (default: last part of {out})"`
	Seed uint64 `option:"seed" default:"1" usage:"seed of the splits, and of features that are made up"`
	// TrainFraction and ValFraction count where no splits are given; 0 and 0 mean 0.6 and 0.2.
	TrainFraction float64 `option:"train-fraction" share:"of the nodes" shown:"0.6" default:"0.6" usage:"share of the labelled nodes to train on, where no splits are given"`
	ValFraction   float64 `option:"val-fraction" share:"of the nodes" shown:"0.2" default:"0.2" usage:"share of them to validate on; the rest is for the test"`
	Memory        int64   `option:"memory" size:"64MiB" shown:"half of what is available, at most 2GiB" arg:"SIZE" usage:"SIZE that the import may take; sorted parts of the edges lie beside {out} meanwhile"`

	Progress work.Progress
	Note     func(errs.Text) // hears of what is chosen or odd; may be nil
	// Given reports whether an option was chosen; nil: one that is not its default was.
	Given func(option string) bool
}

// Input are the options of formats whose input is files that an interrupted import can resume.
type Input struct {
	In           string `option:"in" common:"yes" arg:"PATH" usage:"PATH to read: a folder, archive or file"`
	MakeSplits   bool   `option:"make-splits" common:"yes" usage:"deal new splits in place of the input's own"`
	UnlabelledOK bool   `option:"unlabelled-ok" common:"yes" usage:"take nodes without a label (NaN or -1; in tables, an empty cell) as unlabelled, out of the splits"`
	Restart      bool   `option:"restart" usage:"start over, not where an interrupted import was"`
}

// Options are those of formats whose graph, features, labels and splits may come from several
// places. A format with more options embeds them.
type Options struct {
	Input
	SelfLoops  string  `option:"self-loops" oneof:"keep,drop,add" default:"keep" usage:"edges from a node to itself: keep those that are there, drop them, or add one to each node, in place of what is there"`
	Features   string  `option:"features" common:"yes" arg:"FILE" usage:"FILE of features, where it is not found in {in}"`
	Labels     string  `option:"labels" common:"yes" arg:"FILE" usage:"FILE of labels, where it is not found in {in}"`
	SplitDir   string  `option:"splits" common:"yes" arg:"DIR" usage:"DIR with train, val (or valid) and test, where it is not found in {in}"`
	Target     string  `option:"target" common:"yes" oneof:"class,multi-label,regression" default:"class" usage:"what the labels are: one class a node; several labels (a column each of 0 and 1, and 255, -1 or NaN where it is unknown); or numbers to predict (NaN: none)"`
	Header     PerFile `option:"header" shown:"found out" arg:"yes|no" usage:"yes|no: the first line of text files names columns; for one kind, as in labels=yes (edges, features, labels, splits)"`
	IDColumn   PerFile `option:"id-column" shown:"found out" arg:"NAME" usage:"NAME or number, from 1, of the column of node ids in text files; none: rows are in the order of the nodes; for one kind, as in features=none"`
	SplitIndex string  `option:"split-index" shown:"the only one" arg:"NUMBER" usage:"NUMBER of the split, from 0, where masks hold several"`
	Nodes      int64   `option:"nodes" common:"yes" positive:"yes" shown:"found in the input" usage:"number of nodes"`
	Undirected bool    `option:"undirected" common:"yes" also:"reverse" usage:"store each edge both ways, and drop repeated edges"`
	AddReverse bool    `option:"add-reverse" usage:"add the opposite of each edge that is no self loop; repeated edges stay, unless {dedup}"`
	Dedup      bool    `option:"dedup" usage:"drop repeated edges"`
	NumClasses int64   `option:"num-classes" common:"yes" positive:"yes" arg:"N" shown:"the largest label, plus 1" usage:"N classes, where the labels leave some out or look like something else"`
	FeatureFn  string  `option:"feature-fn" common:"yes" also:"features-fn" arg:"FN" usage:"FN makes the features ({dim} many) of a graph that has none: \"hash\" or \"hash:SEED\" computes them from the node's number and stores none, \"random\" stores noise and the node's degree"`
	Dim        int     `option:"dim" positive:"yes" shown:"64" usage:"features per node, where {feature-fn} makes them"`
	Output
}

func (o *Output) output() *Output { return o }

func (o *Output) note(format string, args ...any) {
	if o.Note != nil {
		o.Note(errs.Textf(format, args...))
	}
}

func (o *Output) given(x options.Option) bool {
	if o.Given == nil {
		return fmt.Sprint(x.Value()) != x.Default
	}
	return o.Given(x.Name)
}

// usualShares are those of train and val where none are given; a dataset's source notes others
// under shareKeys.
var (
	usualShares = [2]float64{0.6, 0.2}
	shareKeys   = [2]string{"train-fraction", "val-fraction"}
)

func (o *Output) fill() error {
	o.Name = cmp.Or(o.Name, filepath.Base(filepath.Clean(o.Out)))
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		o.TrainFraction, o.ValFraction = usualShares[0], usualShares[1]
	}
	if !(o.TrainFraction >= 0 && o.ValFraction >= 0 && o.TrainFraction+o.ValFraction <= 1) {
		return errs.New(errs.Usage,
			"%v %g and %v %g are not parts of a whole; give numbers from 0 that make at most 1 together",
			errs.Key("train-fraction"), o.TrainFraction, errs.Key("val-fraction"), o.ValFraction)
	}
	if o.Memory < 0 {
		return errs.New(errs.Usage, "%v %d: a memory budget cannot be negative",
			errs.Key("memory"), o.Memory)
	}
	return nil
}

func (o *Input) fill() error {
	if o.In == "" {
		return errs.New(errs.Usage, "%v is missing: name the file or directory to import",
			errs.Key("in"))
	}
	return readable("in", o.In)
}

// inFolder checks that o.In is a folder and that it has the files, and otherwise describes a folder
// of the format.
func (o *Input) inFolder(must string, files ...string) error {
	st, err := os.Stat(o.In)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	if !st.IsDir() {
		return errs.New(errs.Usage, "%s is a file; %v must be a folder with %s", o.In,
			errs.Key("in"), must)
	}
	for _, f := range files {
		if !isFile(filepath.Join(o.In, f)) {
			return errs.New(errs.Usage, "%s has no %s; %v must be a folder with %s", o.In, f,
				errs.Key("in"), must)
		}
	}
	return nil
}

// fillOwn is fill of a format whose input has features.
func (o *Options) fillOwn() error {
	if o.Dim != 0 && o.FeatureFn == "" {
		return errs.New(errs.Usage, "%v %d is for %v; the input has features", errs.Key("dim"),
			o.Dim, errs.Key("feature-fn"))
	}
	return o.fill()
}

// fillMadeUp is fill of a format whose features are in a file of their own, or made.
func (o *Options) fillMadeUp() error {
	if err := o.dimUsed(o.Dim); err != nil {
		return err
	}
	return o.fill()
}

// ownFeatures reports whether the features are those of the input.
func (o *Options) ownFeatures() bool { return o.Features == "" && o.FeatureFn == "" }

// dimUsed refuses a Dim, as it was given, beside a file of features.
func (o *Options) dimUsed(dim int) error {
	if dim != 0 && o.Features != "" {
		return errs.New(errs.Usage,
			"%v %d is for features that %v makes; %s has features",
			errs.Key("dim"), dim, errs.Key("feature-fn"), o.Features)
	}
	return nil
}

// needFeaturesSoon is needFeatures before the edges are read, where that takes long. A fault
// of a small file is reported first.
func (o *Options) needFeaturesSoon(edges string) error {
	if st, err := os.Stat(edges); err != nil || st.Size() <= textPart {
		return nil //nolint:nilerr // its reader says so
	}
	return o.needFeatures(o.In)
}

// needFeatures refuses a graph that comes without features where the options give none: a model
// learns little from noise, so nobody gets it unasked.
func (o *Options) needFeatures(file string) error {
	if o.Features != "" || o.FeatureFn != "" {
		return nil
	}
	return errs.New(errs.Usage,
		"%s comes without features: give them with %v FILE, or make some with %v hash (computed from the node's number) or %v %s (noise)",
		file, errs.Key("features"), errs.Key("feature-fn"), errs.Key("feature-fn"), RandomFeatures)
}

// fillFor is fillMadeUp for an In that is the common part of the names of several files, one of
// which is file.
func (o *Options) fillFor(file string) error {
	in := o.In
	if _, err := os.Stat(in); in != "" && err != nil {
		o.In = file
	}
	err := o.fillMadeUp()
	o.In = in
	return err
}

func (o *Options) fill() error {
	if err := o.Output.fill(); err != nil {
		return err
	}
	o.Dim = cmp.Or(o.Dim, 64)
	if o.Dim < 1 || o.Dim > dataset.MaxDim {
		return errs.New(errs.Usage, "%v %d is outside 1..%d", errs.Key("dim"), o.Dim,
			dataset.MaxDim)
	}
	if err := o.checkNumbers(); err != nil {
		return err
	}
	if err := o.checkTexts(); err != nil {
		return err
	}
	if err := o.Input.fill(); err != nil {
		return err
	}
	for _, p := range [][2]string{{"features", o.Features}, {"labels", o.Labels},
		{"splits", o.SplitDir}} {
		if err := readable(p[0], p[1]); err != nil {
			return err
		}
	}
	return nil
}

// checkNumbers refuses numbers outside their bounds.
func (o *Options) checkNumbers() error {
	if o.Nodes < 0 {
		return errs.New(errs.Usage, "%v %d: a number of nodes cannot be negative",
			errs.Key("nodes"), o.Nodes)
	}
	if o.NumClasses < 0 || o.NumClasses >= math.MaxInt32 {
		return errs.New(errs.Usage, "%v %d: give a number of classes", errs.Key("num-classes"),
			o.NumClasses)
	}
	if o.Nodes > maxTextNodes {
		return errs.New(errs.Usage, "%v %d: at most %d nodes can be imported", errs.Key("nodes"),
			o.Nodes, int64(maxTextNodes))
	}
	return nil
}

// checkTexts refuses options that contradict each other or cannot be read.
func (o *Options) checkTexts() error {
	if o.Target != "" && o.Target != dataset.TargetClass && o.NumClasses != 0 {
		return errs.New(errs.Usage, "%v %d is for classes, and %v is %s; leave one out",
			errs.Key("num-classes"), o.NumClasses, errs.Key("target"), o.Target)
	}
	if o.FeatureFn != "" && o.Features != "" {
		return errs.New(errs.Usage, "%v %s and %v %s: give one of them", errs.Key("feature-fn"),
			o.FeatureFn, errs.Key("features"), o.Features)
	}
	if o.MakeSplits && o.SplitDir != "" {
		return errs.New(errs.Usage, "%v and %v %s: give one of them", errs.Key("make-splits"),
			errs.Key("splits"), o.SplitDir)
	}
	for kind, v := range o.Header {
		if v != "yes" && v != "no" {
			return errs.New(errs.Usage, "%v %s: give yes or no, or as in labels=yes",
				errs.Key("header"), brief(kind+" "+v))
		}
	}
	if o.SplitIndex != "" {
		if n, err := strconv.Atoi(o.SplitIndex); err != nil || n < 0 {
			return errs.New(errs.Usage, "%v %q: give the number of a split, from 0",
				errs.Key("split-index"), brief(o.SplitIndex))
		}
	}
	return nil
}

// readable checks the path of an option before any work is done for it.
func readable(option, path string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Stat(path); err != nil {
		return errs.New(errs.Usage, "%v: %w; name what is there and can be read",
			errs.Key(option), err)
	}
	return nil
}

func (o *Options) rules() edges.Rules {
	return edges.Rules{Dedup: o.Dedup || o.Undirected, Opposite: o.Undirected || o.AddReverse,
		NoSelf: o.SelfLoops == "drop", AddSelf: o.SelfLoops == "add"}
}

func (o *Options) source(kind string, files ...string) dataset.Source {
	s := dataset.Source{Kind: kind, Options: map[string]string{}, Counts: map[string]int64{}}
	for _, f := range files {
		if f != "" {
			s.From = append(s.From, filepath.Base(f))
		}
	}
	for name, set := range map[string]bool{"unlabelled-ok": o.UnlabelledOK,
		"undirected": o.Undirected, "add-reverse": o.AddReverse, "dedup": o.Dedup} {
		if set {
			s.Options[name] = "true"
		}
	}
	if o.Target != "" && o.Target != dataset.TargetClass {
		s.Options["target"] = o.Target
	}
	if o.SelfLoops != "" && o.SelfLoops != "keep" {
		s.Options["self-loops"] = o.SelfLoops
	}
	s.Options["seed"] = strconv.FormatUint(o.Seed, 10)
	return s
}
