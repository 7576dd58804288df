package main

// job is a part of the differential tests: what it runs, a mutant of a kernel that it runs may
// change.
type job struct {
	pkg string // below the module
	run string // for -test.run
	env []string
}

func (j job) String() string { return j.pkg + " " + j.run }

// few has the tests that draw batches draw the same few.
var few = []string{"DIFF_SEED=1", "DIFF_BATCHES=40"}

// deeper has tests of gpuio run that make test leaves to the shim's tier, with few batches.
var deeper = []string{"DIFF_BATCHES=20"}

// jobs together run each kernel of the registry. They are small, since each mutant takes a process.
var jobs = []job{
	{"internal/testing/difftest", "^TestConvertEveryType$", nil},
	{"internal/testing/difftest", "^TestGatherFromLinesEveryAlignment$", nil},
	{"internal/testing/difftest", "^TestGatherEveryAlignment$", nil},
	{"internal/testing/difftest", "^TestFailuresHaveTheSameWords$", nil},
	{"internal/testing/difftest", "^TestTrace$", few},
	{"cache", "^TestDriver$/^alone$/^(Dynamic|EmptyBudgets|Hotness)$", nil},
	{"cache", "^TestDriver$/^alone$/^(Sets|Abandon)$", few},
	{"cache", "^TestDriver$/^alone$/^Rank$", nil},
	{"cache", "^TestDriver$/^compared$", nil},
	{"graph", "^TestDriver$/^alone$/^(RepeatedSeedsAndSelfLoops|ManyRepeatedSeeds|NoEdges|" +
		"StampsWrap|Layerwise)$", nil},
	{"graph", "^TestDriver$/^compared$", nil},
	{"gnn", "^TestGPUAggregation$", nil},
	{"gnn", "^TestGPUTranspose$", nil},
	{"gnn", "^TestGPUColumnSums$", nil},
	{"gnn", "^TestGPULoss$", nil},
	{"gnn", "^TestGPUDenseLoss$", nil},
	{"gnn", "^TestGPUPredictionsOfNaN$", nil},
	{"gnn", "^TestGPUAdam$", nil},
	{"gnn", "^TestGPUShardSum$", nil},
	{"gnn", "^TestGPUDropout$", nil},
	{"gnn", "^TestGPUFaults$", nil},
	{"gnn", "^TestGPUBetween$", nil},
	{"gnn", "^TestGPUAttention$", nil},
	{"gnn", "^TestDriverSteps$", nil},
	{"gnn", "^TestGemmGPUIsTheHosts$", nil},
	{"gnn", "^TestGemmGPUTensorCores$", nil},
	{"gnn", "^TestGemmGPUSplit$", nil},
	{"gpuio", "^TestDriverCheckRows(Faults)?$", nil},
	{"gpuio", "^TestDriverCheckedReads$", nil},
	{"gpuio", "^TestGPUDifferential$", nil},
	{"gpuio", "^TestGPUReads$/^(packed|one_command|PRP_lists|rows_in_parts)$", nil},
	{"gpuio", "^TestGPUReads$/^rows_that_share_commands", nil},
	{"gpuio", "^TestGPUAsHost$/^(faults_surface|reset|foreign|bad_sets)$", nil},
	{"gpuio", "^TestGPUAsHost$/^sync_random$", deeper},
	{"gpuio", "^TestGPUAsHost$/^(sync_faults_surface|sync_limit)$", deeper},
	{"gpuio", "^TestGPUAsHost$/^sync_chaos$", deeper},
	{"cuda/driver", "^TestConformance$/^SMs=6$/^(Steps|Grid|Parameters|ErrorsAreIsolated|" +
		"StreamOrder|Concurrency|CrossStreamEvents|Budgets|Clock|Prices|Priorities)$", nil},
}
