package plan

import "helios/internal/errs"

// PipelineSeries is the NoPipe of Helios's evaluation: one operator at a time, each with all SMs.
const PipelineSeries = "series"

var seriesPipeline = &Pipeline{
	Name:        PipelineSeries,
	Summary:     "nothing: one operator at a time, each with all SMs",
	WholeDevice: true,
	Check: func(c Config) error {
		if c.SMs != (SMBudget{}) {
			return errs.New(errs.Usage,
				"{pipeline} %s gives each operator all SMs; leave the SM budgets out, or use {pipeline} %s",
				PipelineSeries, PipelineNone)
		}
		return nil
	},
}
