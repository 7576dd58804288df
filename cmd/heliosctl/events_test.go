package main

import (
	"helios/dataset"
	"helios/dataset/importer"
	"helios/dataset/parted"
	"helios/dataset/stripe"
	"helios/gpuio/iobench"
	"helios/internal/licenses"
	"helios/internal/state"
	"helios/sched/cacheplan"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/report"
)

// verbEvents are the lines that verbs write with --json, by their names and their Go types. "make
// generate" makes docs/results.schema.json and the lists of docs/reference/verbs from them. A test
// of any verb fails where it writes another line. Verb "" is for all that have --results.
var verbEvents = []struct {
	verb, event string
	of          any
}{
	{"", "begin", runLine{}},
	{"", "resume", runLine{}},
	{"", "end", endLine{}},
	{"", "error", errorLine{}},
	{"", "faults", map[string]int64{}},
	{"", "fault", faultLine{}},
	{"", "io", report.IOResult{}},

	{"bench io", "row", benchRow{}},
	{"bench io", "summary", iobench.Summary{}},
	{"bind-ssds", "bound", state.SSD{}},
	{"bind-ssds", "bound", state.Record{}},
	{"bind-ssds", "candidate", candidateReport{}},
	{"cache hotness", "hotness", cacheplan.HotnessReport{}},
	{"compare", "compare", comparisonSummary{}},
	{"compare", "run", comparedRun{}},
	{"doctor", "finding", doctorFinding{}},
	{"eval", "result", report.EvalResult{}},
	{"generate", "generated", datasetLine{}},
	{"import", "found", importer.DebianReport{}},
	{"import", "import", importLine{}},
	{"import", "imported", datasetLine{}},
	{"load", "result", stripe.LoadReport{}},
	{"names", "name", nameLine{}},
	{"partition", "result", partitionResult{}},
	{"plan", "plan", planResult{}},
	{"plan", "point", sweepPoint{}},
	{"plan", "sweep", sweepResult{}},
	{"predict", "node", nodeLine{}},
	{"predict", "result", predictLine{}},
	{"prepare", "result", report.PrepareResult{}},
	{"report", "result", reportLine{}},
	{"rerun", "result", againLine{}},
	{"rerun", "result", rerunLine{}},
	{"serve", "listening", listeningLine{}},
	{"ssds", "result", removedPages{}},
	{"ssds", "ssd", ssdReport{}},
	{"train", "epoch", report.EpochResult{}},
	{"train", "epoch", report.ModelledEpoch{}},
	{"train", "plan", plan.OpGraph{}},
	{"train", "result", report.ModelledResult{}},
	{"train", "result", report.Result{}},
	{"train", "result", seedsResult{}},
	{"train", "seed", report.Result{}},
	{"unbind-ssds", "unbound", unboundReport{}},
	{"unbind-ssds", "unbound", unboundSoftware{}},
	{"unload", "result", unloaded{}},
	{"verify", "files", dataset.FilesReport{}},
	{"verify", "layout", parted.VerifyReport{}},
	{"verify", "packs", packs.VerifyReport{}},
	{"verify", "partition", partitionReport{}},
	{"verify", "result", stripe.VerifyReport{}},
	{"version", "license", licenses.Module{}},
	{"version", "version", versionLine{}},
}
