package plan

// DefaultPipeline overlaps whatever can overlap (the deep pipeline of Helios).
const DefaultPipeline = "deep"

var deepPipeline = &Pipeline{
	Name:    DefaultPipeline,
	Summary: "reads of a hop with the sampling of the next, and mini-batches with the training of others",
	PerHop:  true,
	Ahead:   true,
}
