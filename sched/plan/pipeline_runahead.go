package plan

import "helios/internal/errs"

// PipelineRunAhead samples ahead for the window buffer and the accumulator of GIDS, which keep the
// lines and merge the reads of coming mini-batches; else one operator at a time.
const PipelineRunAhead = "run-ahead"

var runaheadPipeline = &Pipeline{
	Name:    PipelineRunAhead,
	Summary: "sampling of coming mini-batches, as far as window and accumulator look; else nothing",
	Check: func(c Config) error {
		if c.Accumulate == 0 && c.Window == 0 {
			return errs.New(errs.Usage,
				"{pipeline} %s samples ahead for {window} and {accumulate}, and neither is given; give one, or use {pipeline} %s",
				PipelineRunAhead, PipelineNone)
		}
		return nil
	},
}
