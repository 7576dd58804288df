package main

import (
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
)

// commonFlags are taken by every verb, before or after its name.
func commonFlags() []cli.Flag {
	return append(commonOptions().Flags(), &cli.StringFlag{Name: "config", // arrange reads it
		Category: hcli.EveryVerb,
		Usage:    "read flags from `FILE.yaml`, with their names as keys; flags given here win"})
}

// commonArgs hold the options of every verb.
type commonArgs struct {
	stateDir string `option:"state" group:"Every verb" use:"aside" arg:"DIR" usage:"DIR with the list of bound SSDs (default: $HELIOS_STATE, else heliosctl in the user's state folder)"`
	json     bool   `option:"json" group:"Every verb" use:"aside" usage:"write results as JSON, one object per line"`
	quiet    bool   `option:"quiet" group:"Every verb" use:"aside" usage:"show no progress"`
	log      string `option:"log-format" group:"Every verb" use:"aside" oneof:"text,json" default:"text" usage:"progress, notes and errors on standard error: for people, or as JSON lines with time, level and msg"`
}

func commonOptions() hcli.Options[commonArgs] { return hcli.Of[commonArgs]() }

// newApp builds the command line. urfave/cli parses and documents it; arrange has put the
// arguments in an order that it can parse.
func newApp(stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:            "heliosctl",
		Usage:           "train graph neural networks whose features live on NVMe SSDs",
		UsageText:       examples[""],
		Description:     "Exit codes: 0 done, 1 failed, 2 usage, 3 capability missing, 4 refused for safety,\n5 device or data error, 130 interrupted (state saved).",
		Writer:          stdout,
		ErrWriter:       stderr,
		HideVersion:     true,
		HideHelpCommand: true,
		// A library must not end the process or print errors of its own.
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return usageError(err) },
	}
	for _, g := range verbGroups() {
		for _, c := range g.verbs {
			c.Category = g.name
			finish(c, "")
			app.Commands = append(app.Commands, c)
		}
	}
	return app
}

func init() {
	cli.HelpPrinter = hcli.PrintHelp
	cli.HelpFlag.(*cli.BoolFlag).Category = hcli.EveryVerb
}

// verbGroup has verbs that stand together in help.
type verbGroup struct {
	name  string
	verbs []*cli.Command
}

// verbGroups are all verbs.
func verbGroups() []verbGroup {
	return []verbGroup{
		{"Data", []*cli.Command{generateCommand(), importCommand(), namesCommand(),
			partitionCommand(), verifyCommand()}},
		{"Training", []*cli.Command{trainCommand(), evalCommand(), predictCommand(), prepareCommand(),
			serveCommand()}},
		{"Measuring", []*cli.Command{compareCommand(), planCommand(), reportCommand(), rerunCommand(),
			benchCommand(), cacheCommand()}},
		{"SSD", []*cli.Command{bindCommand(), loadCommand(), ssdsCommand(), unloadCommand(),
			unbindCommand(), vfioSetupCommand()}},
		{"More", []*cli.Command{demoCommand(), doctorCommand(), versionCommand(), completionCommand(),
			manCommand()}},
	}
}

// examples are calls of verbs, the first that help shows.
var examples = map[string]string{
	"":               "heliosctl demo",
	"bench":          "heliosctl bench io g --io-stack async,cpu",
	"bench io":       "heliosctl bench io g --io-stack async,cpu",
	"bind-ssds":      "heliosctl bind-ssds --proxy a.img,b.img --size 2GiB",
	"cache":          "heliosctl cache hotness g --sizes 5%,10%",
	"cache hotness":  "heliosctl cache hotness g --sizes 5%,10%",
	"compare":        "heliosctl compare g --modes helios,cpu,mmap --results compare.jsonl",
	"completion":     "source <(heliosctl completion bash)",
	"demo":           "heliosctl demo",
	"doctor":         "heliosctl doctor",
	"eval":           "heliosctl eval g --checkpoint run --split test",
	"generate":       "heliosctl generate --nodes 50000 --dim 128 --out g",
	"import":         "heliosctl import tables --nodes n.csv --id id --label y --edges e.csv --src a --dst b --out g",
	"import debian":  "heliosctl import debian --out g",
	"import tables":  "heliosctl import tables --nodes n.csv --id id --label y --edges e.csv --src a --dst b --out g",
	"import triples": "heliosctl import triples --in aifb --feature-fn hash --dim 64 --out g",
	"load":           "heliosctl load g",
	"names":          "heliosctl names g --id \"P. Curie\"",
	"partition":      "heliosctl partition g --parts 64 --out g/64.partition",
	"plan":           "heliosctl plan --graph pa --hardware a100-p5510x12 --mode helios",
	"predict":        "heliosctl predict g --checkpoint run --csv classes.csv",
	"prepare":        "heliosctl prepare g --mode diskgnn --sample-epochs 4 --packed runs/packed --cpu-cache 10%",
	"report":         "heliosctl report run.jsonl --out run.html",
	"rerun":          "heliosctl rerun run.jsonl",
	"serve":          "heliosctl serve --socket /tmp/helios.sock",
	"ssds":           "heliosctl ssds",
	"train":          "heliosctl train g --epochs 5 --checkpoint run --results run.jsonl",
	"unbind-ssds":    "heliosctl unbind-ssds --delete",
	"unload":         "heliosctl unload g",
	"verify":         "heliosctl verify g",
	"version":        "heliosctl version",
	"vfio-setup":     "heliosctl vfio-setup status",
}

// exampleOf returns the example of a verb; formats of import that have none of their own share one.
func exampleOf(path string) string {
	if e := examples[path]; e != "" || !strings.HasPrefix(path, "import ") {
		return e
	}
	return "heliosctl " + path + " --in data --out g"
}

// finish gives a verb, or each verb of a group, what all verbs have.
func finish(c *cli.Command, parent string) {
	path := strings.TrimPrefix(parent+" "+c.Name, " ")
	c.HideHelpCommand = true
	c.UsageText = exampleOf(path)
	c.OnUsageError = func(_ *cli.Context, err error, _ bool) error { return usageError(err) }
	for _, s := range c.Subcommands {
		finish(s, path)
	}
	if len(c.Subcommands) == 0 {
		explainColumns(c, path)
		c.Flags = slices.Concat(c.Flags, commonFlags(), []cli.Flag{cli.HelpFlag})
	}
}
