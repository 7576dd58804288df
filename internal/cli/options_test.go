package cli

import (
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/internal/options"
	"helios/sched/plan"
)

func runOptions(names ...string) Options[plan.Config] {
	return Tagged[plan.Config](func(o options.Option) bool {
		return slices.Contains(names,
			o.Name)
	})
}

// Help says what the library takes, by mode where the modes differ.
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

// Options of a verb's own struct: a Value is the default, parts nest, and a field tells whether its
// option was given.
func TestOptionsOfAVerb(t *testing.T) {
	type part struct{ seconds float64 }
	type verb struct {
		part
		rows  int64
		sizes []string
		names string
		each  time.Duration
		fresh bool
		force bool
	}
	o := slices.Concat(Options[verb]{
		Int64(&cli.Int64Flag{Name: "rows", Value: 7}, func(v *verb) *int64 { return &v.rows }),
		List(&cli.StringFlag{Name: "sizes", Value: "1%,2%"},
			func(v *verb) *[]string { return &v.sizes }),
		Text(&cli.StringFlag{Name: "names"}, func(v *verb) *string { return &v.names }),
		Duration(&cli.DurationFlag{Name: "each"}, func(v *verb) *time.Duration { return &v.each }),
		Bool(&cli.BoolFlag{Name: "fresh", Value: true}, func(v *verb) *bool { return &v.fresh }),
		Bool(&cli.BoolFlag{Name: "force"}, func(v *verb) *bool { return &v.force }),
	}, In(func(v *verb) *part { return &v.part }, Options[part]{
		Float(&cli.Float64Flag{Name: "seconds", Value: 0.5},
			func(p *part) *float64 { return &p.seconds }),
	}))
	read := func(args ...string) (*verb, *cli.Context, error) {
		set := flag.NewFlagSet("x", flag.ContinueOnError)
		for _, f := range o.Flags() {
			require.NoError(t, f.Apply(set))
		}
		require.NoError(t, set.Parse(args))
		c, v := cli.NewContext(cli.NewApp(), set, nil), &verb{names: "kept"}
		return v, c, o.Read(c, v)
	}
	v, c, err := read()
	require.NoError(t, err)
	require.Equal(t, &verb{part: part{0.5}, rows: 7, sizes: []string{"1%", "2%"}, names: "kept",
		fresh: true}, v)
	require.Empty(t, o.Given(c, v, &v.rows, &v.seconds, &v.force))

	v, c, err = read("--seconds", "2", "--fresh=false", "--sizes", "3%", "--names", "", "--each",
		"5s")
	require.NoError(t, err)
	require.Equal(t, &verb{part: part{2}, rows: 7, sizes: []string{"3%"}, each: 5 * time.Second}, v)
	require.Equal(t, "seconds", o.Given(c, v, &v.rows, &v.seconds, &v.sizes))
	require.Equal(t, "names", o.Given(c, v, &v.names))
	require.Empty(t, o.Given(c, v, &v.rows))
	require.Panics(t, func() { o.Given(c, v, new(int)) }, "a field that no option sets")

	_, _, err = read("--sizes", "1%,,2%")
	require.ErrorContains(t, err, "--sizes \"1%,,2%\" has an empty part")
}
