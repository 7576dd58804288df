package plan

// PipelinePrefetch overlaps between mini-batches only.
const PipelinePrefetch = "prefetch"

var _ = registerPipeline(Pipeline{
	Name:    PipelinePrefetch,
	Summary: "mini-batches with the training of others",
	Rank:    40,
	Ahead:   true,
})
