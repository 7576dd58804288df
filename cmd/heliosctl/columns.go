package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/ui"
	"helios/sched/plan"
)

// tableColumns are the tables of verbs, whose help explains them.
var tableColumns = map[string][]ui.Column{
	"bench io":      ioColumns,
	"cache hotness": hotnessColumns,
	"compare":       compareColumns(""),
	"ssds":          ssdColumns,
	"train":         slices.Concat(planColumns, cpuColumns),
}

const wideFlag = "wide"

// explainColumns has a verb's help explain its table, and gives it --wide where some columns are
// not always shown.
func explainColumns(c *cli.Command, path string) {
	columns, has := tableColumns[path]
	if !has {
		return
	}
	c.Description = strings.TrimPrefix(c.Description+"\n\nColumns:\n"+
		ui.Explain(columns, "(--"+wideFlag+")"), "\n\n")
	if ui.HasWide(columns) {
		c.Flags = append(c.Flags, &cli.BoolFlag{Name: wideFlag, Usage: "show all columns of tables"})
	}
}

// ioColumns are those of "bench io".
var ioColumns = []ui.Column{
	{Name: "SSDs", About: "SSDs that are read at once"},
	{Name: "model", About: "model that software SSDs play; its figures are modelled", Shown: ui.IfAny},
	{Name: "blocks", About: "thread blocks of the I/O kernels"},
	{Name: "threads", About: "threads of a block", Shown: ui.OnlyWide},
	{Name: "row", About: "size of a row", Shown: ui.IfVaries},
	{Name: "stack", About: "who reads: see --io-stack"},
	{Name: "QPs", About: "queue pairs per SSD", Shown: ui.OnlyWide},
	{Name: "depth", About: "reads in flight per SSD", Shown: ui.IfVaries},
	{Name: "coalesce", About: "most bytes that a command reads for several rows", Shown: ui.IfVaries},
	{Name: "rows/s", About: "rows a second that were read", Shown: ui.OnlyWide},
	{Name: "IOPS", About: "read commands a second, of all SSDs"},
	{Name: "GiB/s", About: "rows read in a second, of all SSDs"},
	{Name: "cmds/row", About: "commands by rows: below 1 where rows share one", Shown: ui.OnlyWide},
	{Name: "read amp", About: "bytes that commands moved, by bytes of rows", Shown: ui.OnlyWide},
	{Name: "CPU/IO", About: "CPU time of the process by commands", Shown: ui.OnlyWide},
	{Name: "p50", About: "median latency of a command"},
	{Name: "p95", About: "95 % were faster", Shown: ui.OnlyWide},
	{Name: "p99", About: "99 % were faster"},
	{Name: "p99.9", About: "99.9 % were faster", Shown: ui.OnlyWide},
	{Name: "max", About: "the slowest", Shown: ui.OnlyWide},
	{Name: "balance", About: "least and most that an SSD read, over the mean", Shown: ui.OnlyWide},
	{Name: "errors", About: "completions with an error", Shown: ui.IfAny},
	{Name: "retries", About: "commands that were issued again", Shown: ui.IfAny},
	{Name: "written", About: "share of the SSDs that was ever written", Shown: ui.OnlyWide},
	{Name: "serving CPUs", About: "threads that play SSDs in RAM", Shown: ui.OnlyWide},
	{Name: "their limit", About: "commands a second that these reach with nothing beside them",
		Shown: ui.OnlyWide},
	{Name: "audit", About: "counts of launches, data and SSDs agree; modelled: nothing was read"},
}

// hotnessColumns are those of "cache hotness".
var hotnessColumns = []ui.Column{
	{Name: "hotness", About: "source by which rows are placed"},
	{Name: "tier", About: "size of the tier"},
	{Name: "hits", About: "share of the epoch's accesses that it serves"},
	{Name: "optimum", About: "the most that any placement could serve"},
	{Name: "points below", About: "optimum less hits"},
	{Name: "of 100", About: "hits by optimum, in percent"},
	{Name: "time", About: "time that finding the hotness took"},
}

// compareColumns are those of compare; base is the data path that others are held against.
func compareColumns(base string) []ui.Column {
	against := "beside the first"
	if base != "" {
		against = "beside " + base
	}
	return []ui.Column{
		{Name: "", About: "data path"},
		{Name: "epoch", About: "time of an epoch, median over the repeats"},
		{Name: "range", About: "least and most over the repeats", Shown: ui.OnlyWide},
		{Name: against, About: "which is faster, and how many times, by the ratios of the repeats"},
		{Name: "caches", About: "bytes that the GPU tier and the CPU tier may hold"},
		{Name: "from SSDs", About: "share of the rows that no tier had"},
		{Name: "GPU / CPU / SSD rows", About: "where rows came from", Shown: ui.OnlyWide},
		{Name: "read", About: "bytes that the SSDs gave in an epoch"},
		{Name: "disk read", About: "bytes that the disks below gave", Shown: ui.OnlyWide},
		{Name: "waits", About: "share of the time in which training waited"},
		{Name: "overlap", About: "share of the stages' time that ran beside others", Shown: ui.OnlyWide},
		{Name: "CPU time", About: "of the process, in an epoch"},
		{Name: "software SSDs' CPU", About: "of it, to play SSDs", Shown: ui.OnlyWide},
		{Name: "first epoch", About: "the first epoch's time", Shown: ui.OnlyWide},
		{Name: "set-up", About: "time before the first epoch", Shown: ui.OnlyWide},
		{Name: "memory", About: "most memory that the process had"},
		{Name: "prepared in", About: "time that laying mini-batches out took, once", Shown: ui.IfAny},
		{Name: "epoch with it", About: "epoch's time with its part of that", Shown: ui.IfAny},
	}
}

// ssdColumns are those of bound SSDs in "ssds".
var ssdColumns = []ui.Column{
	{Name: "SSD", About: "name by which verbs know it"},
	{Name: "kind", About: "vfio: a controller of its own; others: software over files, disks or memory"},
	{Name: "serial", About: "serial number", Shown: ui.OnlyWide},
	{Name: "size", About: "size of its namespace"},
	{Name: "LBA", About: "bytes of a logical block", Shown: ui.IfVaries},
	{Name: "modelled", About: "model whose times it plays", Shown: ui.IfAny},
	{Name: "health", About: "what its SMART log says"},
	{Name: "dataset", About: "what is on it"},
	{Name: "path", About: "where it is"},
}

// cpuColumns are those of the processor time that "train --explain" prints at the end.
var cpuColumns = []ui.Column{
	{Name: "stage", About: "stream of the device, or what else takes processor time"},
	{Name: "operator", About: "kernel, or piece of work"},
	{Name: "us", About: "microseconds of processor time for a mini-batch"},
	{Name: "share", About: "of all that the process took"},
}

// planColumns are those of "train --explain".
var planColumns = []ui.Column{
	{Name: plan.TableColumns[0], About: "its name, as in timelines: letter and hop"},
	{Name: plan.TableColumns[1], About: "what it does for a mini-batch"},
	{Name: plan.TableColumns[2], About: "steps of the same mini-batch that have to be done"},
	{Name: plan.TableColumns[3], About: "most nodes that it meets"},
	{Name: plan.TableColumns[4], About: "layer of the model that needs it", Shown: ui.OnlyWide},
	{Name: plan.TableColumns[5], About: "stream of the device, or the CPU"},
	{Name: plan.TableColumns[6], About: "of the stream: higher goes first", Shown: ui.OnlyWide},
	{Name: plan.TableColumns[7], About: "most SMs, or worker slots, at once", Shown: ui.OnlyWide},
}
