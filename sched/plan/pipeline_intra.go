package plan

// PipelineIntra overlaps within a mini-batch only.
const PipelineIntra = "intra"

var intraPipeline = &Pipeline{
	Name:    PipelineIntra,
	Summary: "reads of a hop with the sampling of the next",
	PerHop:  true,
}
