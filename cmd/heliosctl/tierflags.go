package main

import (
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cache/policy"
	"helios/graph"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
)

// offlinePolicies says of policies that no run can have where they belong.
func offlinePolicies() map[string]error {
	told := map[string]error{}
	for _, p := range policy.All() {
		if p.Offline != "" && !slices.Contains(plan.Policies, p.Name) {
			told[p.Name] = errs.New(errs.Usage, "--policy %s %s, or choose one of %s", p.Name,
				p.Offline, strings.Join(plan.Policies, ", "))
		}
	}
	return told
}

// policySummaries says for help what the policies of a run do.
func policySummaries() string {
	about := []string{plan.PolicyStatic + ": rows are placed once, by hotness",
		plan.PolicyBelady + ": both tiers keep what a superbatch needs next"}
	for _, p := range policy.All() {
		if p.Offline == "" {
			about = append(about, p.Name+": "+p.Summary)
		}
	}
	return strings.Join(about, "; ")
}

// pipelineSummaries says for help what overlaps in each pipeline.
func pipelineSummaries() string {
	var about []string
	for _, p := range plan.Pipelines() {
		about = append(about, p.Name+": "+p.Summary)
	}
	return strings.Join(about, "; ")
}

// samplerOption is of verbs that sample; text says what a run without it takes.
func samplerOption(text string) hcli.Option[plan.Config] {
	about := make([]string, 0, 4)
	for _, m := range graph.Methods() {
		about = append(about, m.Name+": "+m.Summary)
	}
	f := oneOf("sampler", "how mini-batches are drawn ("+strings.Join(about, "; ")+
		"; --fanout counts that)", "", plan.Samplers, nil)
	f.DefaultText = text
	return hcli.Text(f, func(c *plan.Config) *string { return &c.Sampler }).Setting()
}

// pagesOption is where mini-batches that are laid out have their pages.
func pagesOption() hcli.Option[plan.Config] {
	f := oneOf("pages-on", "where their pages are ("+plan.PagesFolder+
		": that of --packed or --parted; "+plan.PagesSSDs+": the bound SSDs, behind the features)", "", plan.PagePlaces, nil)
	f.DefaultText = plan.PagesFolder
	return hcli.Text(f, func(c *plan.Config) *string { return &c.PagesOn }).Setting()
}

// directoryOption is which directory a dynamic tier has.
func directoryOption() *cli.StringFlag {
	f := oneOf("directory", "what knows where a dynamic GPU tier's lines are ("+policy.InSets+
		": sets of 32 lines, each under --policy by itself, worked on by all cores; "+
		policy.InQueues+": any line in any place, on one core)", "", policy.Kinds(), nil)
	f.DefaultText = plan.DefaultDirectory
	return f
}

// dependencyOption is of verbs that sample for training.
func dependencyOption() hcli.Option[plan.Config] {
	return hcli.Int(&cli.IntFlag{Name: "batch-dependency", DefaultText: "1",
		Usage: "batches that keep a node's random number (--sampler " +
			strings.Join(graph.DependentNames(), ", ") +
			"): each next one has one number in so many anew, and needs fewer rows that the last did not; 1: each draws for itself; changes results"},
		func(c *plan.Config) *int { return &c.BatchDependency }).Positive()
}

// epochOptions are of verbs that sample for training.
func epochOptions() hcli.Options[plan.Config] {
	return hcli.Options[plan.Config]{
		hcli.Int(&cli.IntFlag{Name: "sample-epochs", DefaultText: "each epoch has its own",
			Usage: "train in turns on the samples of `E` epochs; changes results"},
			func(c *plan.Config) *int { return &c.SampleEpochs }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "refresh", DefaultText: "none",
			Usage: "the `K` oldest of --sample-epochs that are sampled anew each time; changes results"},
			func(c *plan.Config) *int { return &c.Refresh }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "refresh-every", DefaultText: "as --sample-epochs",
			Usage: "epochs of training `N` from one --refresh to the next; changes results"},
			func(c *plan.Config) *int { return &c.RefreshEvery }).Positive(),
	}
}

// tierOptions decide what the caches keep and how reads are merged. They never change a result.
func tierOptions() hcli.Options[plan.Config] {
	return hcli.Options[plan.Config]{
		hcli.GPUBudget(&cli.StringFlag{Name: "gpu-cache",
			Usage: "`BUDGET` of the device memory tier, as 256MiB or as a share of the features; auto: on a GPU what is free there less what the run needs, measured; 5% on the host device"}),
		hcli.Budget(&cli.StringFlag{Name: "cpu-cache", Usage: "`BUDGET` of the CPU memory tier"},
			func(c *plan.Config) *units.Budget { return &c.CPUCache }),
		hcli.Text(oneOf("policy", "what the GPU tier keeps ("+policySummaries()+")", "",
			plan.Policies, offlinePolicies()),
			func(c *plan.Config) *string { return &c.Policy }).Setting(),
		hcli.Parsed(&cli.StringFlag{Name: "superbatch", DefaultText: superbatchAuto,
			Usage: "mini-batches `N` that --policy belady samples and knows at once; auto: what memory and disk have room for"},
			func(c *plan.Config) *int { return &c.Superbatch }, superbatchSize),
		hcli.Bool(&cli.BoolFlag{Name: "superbatch-overlap",
			Usage: "sample the next superbatch while one trains"},
			func(c *plan.Config) *bool { return &c.SuperbatchOverlap }).Setting(),
		hcli.Text(&cli.StringFlag{Name: "superbatch-dir", DefaultText: "the dataset's folder",
			Usage: "`FOLDER` on whose file system the samples of superbatches are, in files without a name"},
			func(c *plan.Config) *string { return &c.SuperbatchDir }).Aside(),
		hcli.Parsed(&cli.StringFlag{Name: "superbatch-disk", DefaultText: "a quarter of what is free",
			Usage: "most `BYTES` that they take there"},
			func(c *plan.Config) *int64 { return &c.SuperbatchDisk }, superbatchDisk),
		hcli.Text(&cli.StringFlag{Name: "packed", DefaultText: "packed in the dataset's folder",
			Usage: "`FOLDER` of mini-batches that are laid out before training (--mode " +
				strings.Join(plan.PackedModes(), ", ") + "); what is not there yet is prepared"},
			func(c *plan.Config) *string { return &c.PackedDir }).Aside(),
		hcli.Parsed(&cli.StringFlag{Name: "disk-budget", DefaultText: "3x",
			Usage: "room that their pages may take: a `SIZE`, or a multiple of the features such as 5x"},
			func(c *plan.Config) *plan.DiskBudget { return &c.DiskBudget }, plan.ParseDiskBudget),
		hcli.Int(&cli.IntFlag{Name: "segment", DefaultText: "searched for",
			Usage: "mini-batches that share a disk cache"},
			func(c *plan.Config) *int { return &c.Segment }).Positive(),
		pagesOption(),
		hcli.Parsed(&cli.StringFlag{Name: "cache-line",
			DefaultText: "4096 in bam and gids, else row",
			Usage:       "what a dynamic GPU tier reads and keeps at once: lines of `BYTES`, or \"row\""},
			func(c *plan.Config) *int64 { return &c.CacheLine }, cacheLine),
		hcli.Text(directoryOption(),
			func(c *plan.Config) *string { return &c.Directory }).Setting(),
		hcli.Int(&cli.IntFlag{Name: "window",
			Usage: "coming mini-batches whose lines a dynamic GPU tier keeps (GIDS's window buffer), 0 for none"},
			func(c *plan.Config) *int { return &c.Window }).Checked(func(c *plan.Config,
			_ string) error {
			switch {
			case c.Window < 0:
				return errs.New(errs.Usage, "--window %d is below 0 (none)", c.Window)
			case c.Window == 0:
				c.Window = plan.Off // the library takes 0 for the mode's default; so for the next
			}
			return nil
		}),
		hcli.Share(&cli.StringFlag{Name: "accumulate",
			Usage: "merge the reads of coming mini-batches until they reach this `SHARE` of the SSDs' peak rate (GIDS's accumulator), 0 for never"},
			func(c *plan.Config) *float64 { return &c.Accumulate }).Checked(func(c *plan.Config,
			_ string) error {
			switch {
			case !(c.Accumulate >= 0 && c.Accumulate < 1):
				return errs.New(errs.Usage,
					"--accumulate %v is not in [0, 1): the whole of the peak would take infinitely many reads in flight; 0.95 is usual",
					c.Accumulate)
			case c.Accumulate == 0:
				c.Accumulate = plan.Off
			}
			return nil
		}),
		hotnessOption(),
		presampleOption("epochs sampled beforehand to find the hottest rows (--hotness presample)"),
		hotnessDirOption(),
		hcli.Text(oneOf("topology",
			"where the neighbour lists are: in memory, or read as they are needed, through a cache of lists",
			"", plan.Topologies, nil),
			func(c *plan.Config) *string { return &c.Topology }).Setting(),
		hcli.NeighborBudget(&cli.StringFlag{Name: "neighbor-cache",
			DefaultText: "with --topology ssd 10%, in ginex shared",
			Usage:       "`BUDGET` of CPU memory for the lists of hot nodes, a size or a share of the topology; shared: that of --cpu-cache, which the lists have while a superbatch is sampled and rows while one trains (with --superbatch-overlap each has half)"}),
	}
}

// megaOptions are of modes whose mega-batches train. Most of them change results.
func megaOptions() hcli.Options[plan.Config] {
	modes := " (--mode " + strings.Join(plan.MegaModes(), ", ") + ")"
	order := oneOf("part-order", "how parts come together ("+plan.PartsDispersed+
		": every epoch has all, in mega-batches that share none; "+plan.PartsSequential+
		": those with the training nodes stay, and an epoch is one mega-batch of them and others; --mode "+
		strings.Join(plan.PartOrderModes(plan.PartsSequential), ", ")+"); changes results", "",
		plan.PartOrders, nil)
	order.DefaultText = plan.PartsDispersed
	ahead := oneOf("load-ahead", "load the next mega-batch while one trains: off has room for more parts",
		"", plan.LoadAheads, nil)
	ahead.DefaultText = plan.LoadAheadOn
	return hcli.Options[plan.Config]{
		hcli.Int(&cli.IntFlag{Name: "parts", DefaultText: "4 to 64, by the size of the features",
			Usage: "`N` parts that the graph is divided into" + modes + "; changes results"},
			func(c *plan.Config) *int { return &c.Parts }).Positive(),
		hcli.Text(&cli.StringFlag{Name: "partition", DefaultText: "made where the parts are",
			Usage: "`FILE` that says which node is in which part (heliosctl partition)"},
			func(c *plan.Config) *string { return &c.PartitionFile }).Input(),
		hcli.Parsed(&cli.StringFlag{Name: "static-nodes",
			DefaultText: "2%, in marius none",
			Usage:       "`SHARE` of the nodes, those of the highest out-degree, that are in every mega-batch; changes results"},
			func(c *plan.Config) *plan.Share { return &c.StaticNodes }, plan.ParseShare),
		hcli.Parsed(&cli.StringFlag{Name: "megabatch", DefaultText: "what --cpu-cache has room for",
			Usage: "parts `N` that are in memory together, or a share of them such as 25%; changes results"},
			func(c *plan.Config) *plan.MegaSize { return &c.MegaBatch }, plan.ParseMegaSize),
		hcli.Parsed(&cli.StringFlag{Name: "passes", DefaultText: "1",
			Usage: "times `N` that a mega-batch trains before the next; auto: as often as loading one takes longer than training; changes results"},
			func(c *plan.Config) *int { return &c.Passes }, plan.ParsePasses),
		hcli.Text(order, func(c *plan.Config) *string { return &c.PartOrder }).Setting(),
		hcli.Text(ahead, func(c *plan.Config) *string { return &c.LoadAhead }).Setting(),
		hcli.Text(&cli.StringFlag{Name: "parted", DefaultText: "parted-MODE in the dataset's folder",
			Usage: "`FOLDER` of the parts" + modes + "; what is not there yet is made"},
			func(c *plan.Config) *string { return &c.PartedDir }).Aside(),
	}
}

// hotnessOption is of verbs that place rows.
func hotnessOption() hcli.Option[plan.Config] {
	return hcli.Text(&cli.StringFlag{Name: "hotness", Usage: "what rows are placed by: " +
		strings.Join(plan.Hotnesses, ", ") +
		", or a `FILE` of node numbers, hottest first (.npy or text)"},
		func(c *plan.Config) *string { return &c.Hotness }).Input(plan.Hotnesses...).Checked(func(
		c *plan.Config, _ string) error {
		if c.Hotness == "" {
			return nil
		}
		return hotnessSource("hotness", c.Hotness)
	})
}

func presampleOption(usage string) hcli.Option[plan.Config] {
	return hcli.Int(&cli.IntFlag{Name: "presample-epochs", Usage: usage},
		func(c *plan.Config) *int { return &c.Presample }).Positive()
}

func hotnessDirOption() hcli.Option[plan.Config] {
	return hcli.Text(&cli.StringFlag{Name: "hotness-dir",
		DefaultText: "the dataset's folder hotness",
		Usage:       "`DIR` that keeps hotness for later runs of the same graph and batches; off for none"},
		func(c *plan.Config) *string { return &c.HotnessDir }).
		Aside(plan.NoFolder).Checked(func(c *plan.Config, _ string) error {
		if c.HotnessDir == "" {
			return errs.New(errs.Usage, "--hotness-dir: empty; name a folder, or off")
		}
		return nil
	})
}

// hotnessSource is the error of a flag that names neither a source of hotness nor a file.
func hotnessSource(flag, name string) error {
	if slices.Contains(plan.Hotnesses, name) {
		return nil
	}
	if fi, err := os.Stat(name); err != nil || !fi.Mode().IsRegular() {
		return errs.New(errs.Usage, "--%s %q is neither one of %s nor a file that is there; %s",
			flag, name, strings.Join(plan.Hotnesses, ", "),
			meant(name, plan.Hotnesses, "name a .npy or text file of node numbers, hottest first"))
	}
	return nil
}

// cacheLine reads --cache-line.
func cacheLine(s string) (int64, error) {
	switch s {
	case "":
		return 0, nil
	case "row":
		return plan.LineRow, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		n, err = units.ParseBytes(s)
	}
	if err != nil || n < 1 {
		return 0, errs.New(errs.Usage,
			"--cache-line %q is neither \"row\" nor a number of bytes such as 4096", s)
	}
	return n, nil
}

// superbatchAuto lets a run choose.
const superbatchAuto = "auto"

// superbatchDisk reads --superbatch-disk. The library takes 0 for its default.
func superbatchDisk(text string) (int64, error) {
	n, err := units.ParseBytes(text)
	if err == nil && n == 0 {
		err = errs.New(errs.Usage,
			"--superbatch-disk %s leaves no room for a sample; give more, or leave it out", text)
	}
	return n, err
}

// superbatchSize reads --superbatch.
func superbatchSize(text string) (int, error) {
	if text == superbatchAuto {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, errs.New(errs.Usage, "--superbatch %s is not a number of mini-batches from 1 on, or %s",
			text, superbatchAuto)
	}
	return n, nil
}
