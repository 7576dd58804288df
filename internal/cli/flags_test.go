package cli

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/internal/errs"
)

// A library names options by key; a person sees the flags of the verb, and other text unchanged.
func TestNameFlags(t *testing.T) {
	flags := []cli.Flag{&cli.StringFlag{Name: "cpu-cache", Aliases: []string{"host-cache"}},
		&cli.IntFlag{Name: "hot2"}}
	err := errs.New(errs.Usage, "%v 10%% needs %v, not %v", errs.Key("cpu-cache"), errs.Key("hot2"),
		errs.Key("far"))
	require.Equal(t, "option cpu-cache 10% needs option hot2, not option far", err.Error())
	require.Equal(t, "--cpu-cache 10% needs --hot2, not option far", NameFlags(err.Error(), flags))
	require.Equal(t, "--cpu-cache 10% needs --hot2, not train's --far", NameAllFlags(err.Error(),
		flags, func(name string) string { return "train's --" + name }))
	require.Equal(t, "--host-cache: adoption cpu-cache, option cpu-cache-not",
		NameFlags("option host-cache: adoption cpu-cache, option cpu-cache-not", flags))
	require.Equal(t, "(--cpu-cache)", NameFlags("(option cpu-cache)", flags))
	// The user's own words and paths stay.
	require.Equal(t, "cannot open my option hot2: give --hot2", NameFlags(
		"cannot open my option hot2: give option hot2", flags, "g", "my option hot2"))
	require.Equal(t, "/data/option hot2/x, option hot2/y, --hot2", NameFlags(
		"/data/option hot2/x, option hot2/y, option hot2", flags))
	require.Equal(t, "a option hot2 and a option hot2 b, --hot2", NameFlags(
		"a option hot2 and a option hot2 b, option hot2", flags, "a option hot2",
		"a option hot2 b"))
}
