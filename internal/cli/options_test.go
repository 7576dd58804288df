package cli

import (
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/sched/plan"
	_ "helios/sched/tiers" // the modes
)

func runOptions(names ...string) Options[plan.Config] {
	return Of[plan.Config]().Only(names...)
}

// Help has the library's defaults, by mode where the modes differ.
func TestOptionDefaults(t *testing.T) {
	text := map[string]string{}
	for _, o := range runOptions("batch-size", "window", "io-stack", "gpu-cache", "sampler") {
		text[o.Key()] = o.Flag.(cli.DocGenerationFlag).GetDefaultText()
	}
	require.Equal(t, "1024", text["batch-size"])
	require.Equal(t, "8 in gids, else 0", text["window"])
	require.Contains(t, text["io-stack"], "sync in gids and bam, ") // of modes that come later too
	require.Contains(t, text["gpu-cache"], "auto")
	require.Equal(t, "neighbor", text["sampler"])
}

// An option that is not given leaves its field alone; one that is given sets it.
func TestOptionsRead(t *testing.T) {
	o := runOptions("batch-size", "seed", "gpu-cache", "lr")
	read := func(args ...string) (c plan.Config, err error) {
		set := flag.NewFlagSet("x", flag.ContinueOnError)
		for _, f := range o.Flags() {
			require.NoError(t, f.Apply(set))
			require.NotEmpty(t, f.(cli.CategorizableFlag).GetCategory())
		}
		require.NoError(t, set.Parse(args))
		err = o.Read(cli.NewContext(cli.NewApp(), set, nil), &c)
		return c, err
	}
	c, err := read()
	require.NoError(t, err)
	require.Equal(t, plan.Config{}, c)
	c, err = read("--seed", "0", "--gpu-cache", "0", "--lr", "0.1")
	require.NoError(t, err)
	require.Equal(t, plan.Config{SeedZero: true, GPUCache: plan.NoCache(), LR: 0.1}, c)
	c, err = read("--gpu-cache", "auto", "--batch-size", "7")
	require.NoError(t, err)
	require.Equal(t, plan.Config{GPUCacheAuto: true, Batch: 7}, c)
	_, err = read("--batch-size", "0")
	require.ErrorContains(t, err, "option batch-size 0 is not a positive number")
	_, err = read("--gpu-cache", "x")
	require.ErrorContains(t, err, "option gpu-cache ")
	require.NoError(t, o.Set(&c, "seed", "9"))
	require.Equal(t, uint64(9), c.Seed)
}

// Options of a verb's own struct: a tag has the default, parts nest, a verb may name an option
// otherwise, and a field shows that its option was given.
func TestOptionsOfAVerb(t *testing.T) {
	type part struct {
		seconds float64 `option:"seconds" default:"0.5" usage:"seconds" group:"Part"`
	}
	type verb struct {
		part
		rows  int64         `option:"rows" default:"7" usage:"rows"`
		sizes []string      `option:"sizes" default:"1%,2%" usage:"sizes"`
		names string        `option:"names" usage:"names"`
		each  time.Duration `option:"each" usage:"each"`
		fresh bool          `option:"fresh" default:"true" usage:"fresh"`
		force bool          `option:"force" usage:"force"`
		kept  string        `option:"kept" usage:"kept"`
	}
	o := Of[verb]().Without("kept").Says("force", "by `FORCE`")
	require.NotContains(t, o.Uses(), "kept")
	require.Empty(t, Of[verb]().WithoutGroups("", "Part"))
	require.Len(t, Of[verb]().WithoutFrom("", "rows"), 2)
	read := func(args ...string) (*verb, *cli.Context, error) {
		set := flag.NewFlagSet("x", flag.ContinueOnError)
		for _, f := range o.Flags() {
			require.NoError(t, f.Apply(set))
		}
		require.NoError(t, set.Parse(args))
		c, v := cli.NewContext(cli.NewApp(), set, nil), &verb{kept: "kept"}
		return v, c, o.Read(c, v)
	}
	v, c, err := read()
	require.NoError(t, err)
	require.Equal(t, &verb{part: part{0.5}, rows: 7, sizes: []string{"1%", "2%"}, fresh: true,
		kept: "kept"}, v)
	require.Empty(t, o.Given(c, v, &v.rows, &v.seconds, &v.force))

	v, c, err = read("--seconds", "2", "--fresh=false", "--sizes", "3%", "--names", "", "--each",
		"5s")
	require.NoError(t, err)
	require.Equal(t, &verb{part: part{2}, rows: 7, sizes: []string{"3%"}, each: 5 * time.Second,
		kept: "kept"}, v)
	require.Equal(t, "seconds", o.Given(c, v, &v.rows, &v.seconds, &v.sizes))
	require.Equal(t, "names", o.Given(c, v, &v.names))
	require.Empty(t, o.Given(c, v, &v.rows))
	require.Panics(t, func() { o.Given(c, v, new(int)) }, "a field that no option sets")
	require.Equal(t, map[string]any{"seconds": 2.0, "rows": int64(7), "sizes": []string{"3%"},
		"names": "", "each": "5s", "fresh": false, "force": false}, o.Values(v))

	_, _, err = read("--sizes", "1%,,2%")
	require.ErrorContains(t, err, "option sizes \"1%,,2%\" has an empty part")
}
