package report

// The tracks of a run's timeline, from the top: one for each operator, and what bounds them.
const (
	TrackRun      = "run"        // presampling, filling, passes, checkpoints
	TrackSuper    = "superbatch" // sampling one
	TrackInspect  = "inspect"    // and finding the cache's changes
	TrackSample   = "sample"
	TrackLookup   = "lookup"
	TrackSubmit   = "submit"
	TrackComplete = "complete" // the SSDs: from a read's submission to its end
	TrackGather   = "gather"
	TrackTrain    = "train"
	TrackCredits  = "credits"
	TrackReads    = "reads in flight"
)

// Tracks lists them from the top.
var Tracks = []string{TrackRun, TrackSuper, TrackInspect, TrackSample, TrackLookup, TrackSubmit,
	TrackComplete, TrackGather, TrackTrain}

// SetArgs describes an operator on a timeline that works for a set of batches, of which the first
// is named.
func SetArgs(pass string, batch, batches int, rows int64) map[string]any {
	args := map[string]any{"pass": pass, "batch": batch, "rows": rows}
	if batches > 1 {
		args["batches"] = batches
	}
	return args
}
