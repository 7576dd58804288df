package plan

// PipelineNone overlaps nothing; operators keep their SM budgets.
const PipelineNone = "none"

var _ = registerPipeline(Pipeline{
	Name:    PipelineNone,
	Summary: "nothing: one operator at a time",
	Rank:    30,
})
