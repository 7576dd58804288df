package plan

// PipelineIntra overlaps within a mini-batch only.
const PipelineIntra = "intra"

var _ = registerPipeline(Pipeline{
	Name:    PipelineIntra,
	Summary: "reads of a hop with the sampling of the next",
	Rank:    20,
	PerHop:  true,
})
