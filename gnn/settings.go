package gnn

import (
	"helios/internal/options"
)

// ModelSettings say what a model is. They are options of a run, so that help, flags, checks and
// checkpoints read the tags (package options).
type ModelSettings struct {
	Model  string `option:"model" group:"Model" common:"yes" use:"setting" oneof:"@models" print:"yes" usage:"model"` // DefaultArch
	Hidden int    `option:"hidden" group:"Model" common:"yes" positive:"yes" range:"1..65536" print:"yes" usage:"width of the hidden layers"`

	Dropout        float64 `option:"dropout" group:"Model" share:"yes" below:"1" print:"yes" usage:"share of the hidden activations that training drops"`
	FeatureDropout float64 `option:"feature-dropout" group:"Model" share:"yes" below:"1" print:"yes" omit:"0" usage:"share of the input features that training drops"` // Train then changes x in place

	Activation string `option:"activation" group:"Model" use:"setting" oneof:"@activations" print:"yes" omit:"relu" usage:"function between layers"`
	Norm       string `option:"norm" group:"Model" use:"setting" oneof:"@norms" print:"yes" omit:"none" usage:"normalisation before it"`
	Residual   bool   `option:"residual" group:"Model" use:"setting" print:"yes" omit:"false" usage:"add a layer's input to its sums, through a matrix where the widths differ"`
	// It has Residual's place.
	ResidualLinear bool   `option:"residual-linear" group:"Model" use:"setting" print:"yes" omit:"false" usage:"add a layer's input to its sums, through a matrix and a bias in every layer"`
	Head           string `option:"head" group:"Model" use:"setting" oneof:"@heads" print:"yes" omit:"none" usage:"what makes outputs of the last layer, which then is as wide as the others: none, its own sums are they; linear, a matrix; mlp, two matrices with batch normalisation, ReLU and dropout between them, behind the norm and activation of a hidden layer"`
	// Of typed graphs.
	ShareTypes bool `option:"share-types" group:"Model" use:"setting" print:"yes" omit:"false" usage:"one normalisation, residual matrix and matrix of own features for all types of a typed graph"`

	// Only gcn and gat have SelfLoops: LoopsRemaining or LoopsAlways, which is all that there once
	// was; empty: the latter.
	SelfLoops string `option:"self-loops" group:"Model" use:"setting" oneof:"@model-loops" shown:"remaining" print:"yes" omit:"always" usage:"a node as its own neighbour (models gcn and gat): remaining, exactly once, as PyG's layers have it; always, once more than the graph's own edges to itself"`
	// LoopsGiven: SelfLoops was asked for, so a checkpoint with another is refused.
	LoopsGiven bool

	// Of gat; the last layer's are as many as Heads where OutHeads is 0.
	Heads            int     `option:"heads" group:"Model" positive:"yes" shown:"8" print:"yes" omit:"0" usage:"attention heads of each layer (models gat, rgat), which share {hidden}; the last layer takes their mean"`
	OutHeads         int     `option:"heads-out" group:"Model" positive:"yes" shown:"as {heads}" print:"yes" omit:"0" usage:"attention heads of the last layer (models gat, rgat)"`
	AttentionDropout float64 `option:"attention-dropout" group:"Model" share:"yes" below:"1" print:"yes" omit:"0" usage:"share of the attention that training drops (models gat, rgat)"`

	// Of rsage; "": the first of Roots, which other models take too.
	Root string `option:"root" group:"Model" use:"setting" oneof:"@roots" print:"yes" omit:"type" usage:"a node's own features in its sum (model rsage): a matrix for each type, or none"`

	// Of rgcn; 0: each relation has a matrix of its own.
	Bases int `option:"bases" group:"Model" range:"1..4096" shown:"none" print:"yes" omit:"0" usage:"matrices that those of all relations are combined of (model rgcn)"`

	// Of rgcn: rows are not read.
	Featureless bool `option:"featureless" group:"Model" use:"setting" print:"yes" omit:"false" usage:"nodes are known by their numbers alone, whatever rows they have: the first layer's matrices have a row for each (model rgcn)"`

	// Of models of typed graphs; "": no table.
	Embed string `option:"embed" group:"Model" use:"setting" print:"yes" omit:"" arg:"WIDTH" usage:"learn a table of WIDTH numbers for each node of a type without rows; TYPE=WIDTH;…: by type"`
	// EmbedMemory is 0 where nothing is refused.
	EmbedMemory int64 `option:"embed-memory" group:"Model" size:"1MiB" shown:"4GiB" arg:"SIZE" usage:"SIZE of device memory that tables of {embed} and {featureless} may take, with gradients and Adam's moments"`

	// Of gin: ε is learned, else 0.
	LearnEps bool `option:"learn-eps" group:"Model" use:"setting" print:"yes" omit:"false" usage:"learn the weight of a node in its own sum (model gin), else 1"`
}

// Values of ModelSettings.SelfLoops.
const (
	LoopsRemaining = "remaining"
	LoopsAlways    = "always"
)

// Loops lists them, the default first.
var Loops = []string{LoopsRemaining, LoopsAlways}

// SetOption notes whether self loops were asked for.
func (c *ModelSettings) SetOption(name, _ string) (done bool, err error) {
	c.LoopsGiven = c.LoopsGiven || name == "self-loops"
	return false, nil
}

// LossSettings are those of the figure that training makes small. They are options of a run, too.
type LossSettings struct {
	// Loss is empty for that of the dataset's targets (LossFor).
	Loss           string  `option:"loss" group:"Model" use:"setting" oneof:"@losses" shown:"softmax of classes, bce of labels, mse of numbers" print:"yes" omit:"" usage:"what training makes small ({@loss-summaries})"`
	LabelSmoothing float64 `option:"label-smoothing" group:"Model" share:"yes" below:"1" print:"yes" omit:"0" usage:"share of a label that goes to all classes alike; of several labels, so much nearer to one half"`
}

var _ = options.Define("models", Models) && options.Define("roots", Roots) && options.Define("heads", Heads) &&
	options.Define("activations", Activations) && options.Define("norms", Norms) &&
	options.Define("model-loops", func() []string { return Loops }) &&
	options.Define("optimizers", Optimizers) && options.Define("losses", Losses) &&
	options.Define("loss-summaries", lossSummaries)
