package plan

// PipelineNone overlaps nothing; operators keep their SM budgets.
const PipelineNone = "none"

var nonePipeline = &Pipeline{
	Name:    PipelineNone,
	Summary: "nothing: one operator at a time",
}
