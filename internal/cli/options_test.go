package cli

import (
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/sched/plan"
)

// Help says what the library takes, by mode where the modes differ.
func TestOptionDefaults(t *testing.T) {
	text := func(o Option[plan.Config]) string {
		return o.Flag.(cli.DocGenerationFlag).GetDefaultText()
	}
	require.Equal(t, "1024",
		text(Int(&cli.IntFlag{Name: "n"}, func(c *plan.Config) *int { return &c.Batch })))
	require.Equal(t, "8 in gids, else 0",
		text(Int(&cli.IntFlag{Name: "w"}, func(c *plan.Config) *int { return &c.Window })))
	require.Contains(t, // of modes that come later too
		text(Text(&cli.StringFlag{Name: "s"}, func(c *plan.Config) *string { return &c.IOStack })),
		"sync in gids and bam, ")
	require.Contains(t, text(GPUBudget(&cli.StringFlag{Name: "g"})), "auto")
	require.Equal(t, "some",
		text(Int(&cli.IntFlag{Name: "d", DefaultText: "some"},
			func(c *plan.Config) *int { return &c.Batch })))
}

// An option that is not given leaves its field alone; one that is given sets it.
func TestOptionsRead(t *testing.T) {
	o := Options[plan.Config]{
		Int(&cli.IntFlag{Name: "batch"}, func(c *plan.Config) *int { return &c.Batch }).Positive(),
		Seed(&cli.Uint64Flag{Name: "seed"}),
		GPUBudget(&cli.StringFlag{Name: "gpu"}),
		Float(&cli.Float64Flag{Name: "lr"}, func(c *plan.Config) *float64 { return &c.LR }),
	}
	read := func(args ...string) (c plan.Config, err error) {
		set := flag.NewFlagSet("x", flag.ContinueOnError)
		for _, f := range o.Group("Group").Flags() {
			require.NoError(t, f.Apply(set))
			require.Equal(t, "Group", f.(cli.CategorizableFlag).GetCategory())
		}
		require.NoError(t, set.Parse(args))
		err = o.Read(cli.NewContext(cli.NewApp(), set, nil), &c)
		return c, err
	}
	c, err := read()
	require.NoError(t, err)
	require.Equal(t, plan.Config{}, c)
	c, err = read("--seed", "0", "--gpu", "0", "--lr", "0.1")
	require.NoError(t, err)
	require.Equal(t, plan.Config{SeedZero: true, GPUCache: plan.NoCache(), LR: 0.1}, c)
	c, err = read("--gpu", "auto", "--batch", "7")
	require.NoError(t, err)
	require.Equal(t, plan.Config{GPUCacheAuto: true, Batch: 7}, c)
	_, err = read("--batch", "0")
	require.ErrorContains(t, err, "--batch 0 is not a positive number")
	_, err = read("--gpu", "x")
	require.ErrorContains(t, err, "--gpu: ")
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
