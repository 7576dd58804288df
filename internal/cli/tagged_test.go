package cli

import (
	"flag"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/internal/options"
)

type tagged struct {
	In     []string `option:"in" there:"dataset" usage:"PATH of files" arg:"PATH" shown:"all"`
	Loops  string   `option:"loops" usage:"loops, unless {on}" oneof:"keep,drop" default:"keep"`
	On     bool     `option:"on" usage:"on" also:"enable"`
	Dim    int      `option:"dim" usage:"dim"`
	Nodes  int64    `option:"nodes" usage:"nodes"`
	Seed   uint64   `option:"seed" usage:"seed" default:"1"`
	Share  float64  `option:"share" usage:"share" default:"0.5"`
	Memory int64    `option:"memory" usage:"memory" size:"1KiB"`
}

// A tagged struct is flags with its names, help and defaults, and takes what is given and no more.
func TestTaggedFlags(t *testing.T) {
	o := &tagged{}
	options.Defaults(o)
	flags := TaggedFlags(o)
	require.Equal(t, &TextFlag{cli.StringFlag{Name: "in", Usage: "`PATH` of files", DefaultText: "all"},
		nil, true, "dataset"}, flags[0])
	require.Equal(t, &TextFlag{cli.StringFlag{Name: "loops", Value: "keep",
		Usage: "loops, unless --on: keep, drop"}, []string{"keep", "drop"}, false, ""}, flags[1])
	require.Equal(t, []string{"on", "enable"}, flags[2].Names())
	require.Equal(t, uint64(1), flags[5].(*cli.Uint64Flag).Value)

	read := func(args ...string) (*tagged, error) {
		set := flag.NewFlagSet("x", flag.ContinueOnError)
		for _, f := range flags {
			require.NoError(t, f.Apply(set))
		}
		require.NoError(t, set.Parse(args))
		out := &tagged{}
		options.Defaults(out)
		return out, ReadTagged(cli.NewContext(cli.NewApp(), set, nil), out)
	}
	got, err := read()
	require.NoError(t, err)
	require.Equal(t, o, got)
	got, err = read("--in", "a,b", "--loops", "drop", "--on", "--dim", "3", "--nodes", "4", "--seed",
		"5", "--share", "0.25", "--memory", "2KiB")
	require.NoError(t, err)
	require.Equal(t, &tagged{[]string{"a", "b"}, "drop", true, 3, 4, 5, 0.25, 2048}, got)
	set := flag.NewFlagSet("x", flag.ContinueOnError)
	set.SetOutput(io.Discard)
	require.NoError(t, flags[0].Apply(set))
	require.ErrorContains(t, set.Parse([]string{"--in", "a", "--in", "b"}), `one list, "a,b"`)
	_, err = read("--loops", "some")
	require.EqualError(t, err, `unknown option loops "some"; choose one of keep, drop`)
}

func TestTaggedFlagsRefuse(t *testing.T) {
	require.Panics(t, func() {
		TaggedFlags(&struct {
			C complex128 `option:"c" usage:"c"`
		}{})
	})
}
