package options

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

type pair struct{ a, b string }

func (p *pair) UnmarshalText(text []byte) error {
	if _, err := fmt.Sscanf(string(text), "%1s=%1s", &p.a, &p.b); err != nil {
		return fmt.Errorf("%q is no pair", text)
	}
	return nil
}

type base struct {
	Out  string `option:"out" usage:"DIR to create" arg:"DIR"`
	Seed uint64 `option:"seed" usage:"seed" default:"1"`
}

type all struct {
	Loops  string   `option:"loops" usage:"loops" oneof:"keep,drop" default:"keep" also:"l"`
	Nodes  int64    `option:"nodes" usage:"nodes" positive:"yes" shown:"found"`
	Dim    int      `option:"dim" usage:"dim"`
	Share  float64  `option:"share" usage:"share"`
	On     bool     `option:"on" usage:"on"`
	In     []string `option:"in" usage:"in"`
	Memory int64    `option:"memory" usage:"memory" size:"64MiB"`
	Pair   pair     `option:"pair" usage:"pair"`
	Line   int64    `option:"line" usage:"line" size:"1" range:"512.." named:"row=-1"`
	Hidden int
	base
}

func TestOptions(t *testing.T) {
	var x all
	Defaults(&x)
	require.Equal(t, all{Loops: "keep", base: base{Seed: 1}}, x)
	by := map[string]Option{}
	var names []string
	for _, o := range Of(&x) {
		by[o.Name] = o
		names = append(names, o.Name)
	}
	require.Equal(t, []string{"loops", "nodes", "dim", "share", "on", "in", "memory", "pair", "line",
		"out", "seed"}, names)
	require.Equal(t, []string{"l"}, by["loops"].Aliases)
	require.Equal(t, "found", by["nodes"].Shown)
	require.Equal(t, "DIR", by["out"].Arg)
	for _, n := range names {
		require.Equal(t, n == "loops" || n == "in" || n == "memory" || n == "pair" || n == "line" || n == "out",
			by[n].IsText(), n)
	}
	for _, set := range [][2]string{{"loops", "drop"}, {"nodes", "7"}, {"dim", "-3"},
		{"share", "0.5"}, {"on", "true"}, {"in", "a, b"}, {"memory", "2GiB"}, {"pair", "u=v"}, {"line", "row"},
		{"out", "d"}, {"seed", "0"}} {
		require.NoError(t, by[set[0]].Set(set[1]))
	}
	require.Equal(t, all{Loops: "drop", Nodes: 7, Dim: -3, Share: 0.5, On: true,
		In: []string{"a", "b"}, Memory: 2 << 30, Pair: pair{"u", "v"}, Line: -1,
		base: base{Out: "d"}}, x)
	require.Equal(t, int64(7), by["nodes"].Value())
}

func TestOptionsRefuse(t *testing.T) {
	var x all
	for _, o := range Of(&x) {
		for _, c := range map[string][][2]string{
			"loops": {{"some", `unknown option loops "some"; choose one of keep, drop`},
				{"", `unknown option loops ""`}},
			"nodes":  {{"0", "option nodes 0 is not a positive number"}, {"1.5", "option nodes"}},
			"dim":    {{"99999999999999999999", "is not a whole number in range"}},
			"share":  {{"x", "is not a number"}},
			"on":     {{"perhaps", "neither true nor false"}},
			"in":     {{"a,,b", "empty part"}},
			"memory": {{"1KiB", "option memory 1KiB is too little; give at least 64MiB"}, {"x", "option memory"}},
			"line":   {{"-1", "is negative"}, {"1", "option line 1 is below 512"}},
			"pair":   {{"u", `option pair "u" is no pair`}},
			"seed":   {{"-1", "is not a whole number from 0"}},
		}[o.Name] {
			err := o.Set(c[0])
			require.ErrorContains(t, err, c[1], o.Name)
			require.Equal(t, errs.Usage, errs.ClassOf(err))
		}
	}
}

// A struct that says nothing of an option, or twice, is a mistake of the program.
func TestOptionsPanic(t *testing.T) {
	require.Panics(t, func() { Of(all{}) })
	require.Panics(t, func() {
		Of(&struct {
			A int `option:"a"`
		}{})
	})
	require.Panics(t, func() {
		Of(&struct {
			A int `option:"a" usage:"a number" arg:"N"`
		}{})
	})
	require.Panics(t, func() {
		Of(&struct {
			A int `option:"seed" usage:"a"`
			B int `option:"seed" usage:"b"`
		}{})
	})
	require.Panics(t, func() {
		Defaults(&struct {
			A int `option:"a" usage:"a" default:"x"`
		}{})
	})
}

// An option of the outer struct hides one within.
func TestOuterOptionsHide(t *testing.T) {
	var x struct {
		base
		Text string `option:"seed" usage:"a text"`
	}
	seed, ok := Find(&x, "seed")
	require.True(t, ok)
	require.NoError(t, seed.Set("early"))
	require.Equal(t, "early", x.Text)
	require.Equal(t, []string{"out", "seed"}, Names(&x))
}
