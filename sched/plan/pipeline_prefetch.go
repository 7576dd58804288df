package plan

// PipelinePrefetch overlaps between mini-batches only.
const PipelinePrefetch = "prefetch"

var prefetchPipeline = &Pipeline{
	Name:    PipelinePrefetch,
	Summary: "mini-batches with the training of others",
	Ahead:   true,
}
