package errs

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTextSpellsOptions(t *testing.T) {
	inner := New(Usage, "{hot2} %d%% is below %v", 10, Key("cpu-cache"))
	require.Equal(t, "option hot2 10% is below option cpu-cache", inner.Error())
	flag := Key.Flag
	require.Equal(t, "--hot2 10% is below --cpu-cache", Spell(inner, flag))

	// Keys pass through wrapping with and without errs, joins and texts within texts.
	wrapped := fmt.Errorf("layer 2: %w", Errorf("layer 1: %w; %v", inner, Textf("raise {far}")))
	joined := errors.Join(fs.ErrNotExist, wrapped)
	require.Equal(t, Usage, ClassOf(wrapped))
	require.Equal(t, fs.ErrNotExist.Error()+
		"\nlayer 2: layer 1: --hot2 10% is below --cpu-cache; raise --far", Spell(joined, flag))
	require.Equal(t, joined.Error(), Spell(joined, Key.String))
	require.ErrorIs(t, New(Device, "x: %w", joined), fs.ErrNotExist)
	require.True(t, Names(joined, "far"))
	require.False(t, Names(joined, "fa"))
	require.Equal(t, "x --hot2 10% is below --cpu-cache", Textf("x %w", inner).Spell(flag))

	// The user's own words stay, whatever they look like; so does what is no name.
	own := New(Usage, "cannot open %s: give {hot2} a,{} {A}", "my option hot2/{far}")
	require.Equal(t, "cannot open my option hot2/{far}: give --hot2 a,{} {A}", Spell(own, flag))
	require.Equal(t, "cannot open my option hot2/{far}: give hot2 a,{} {A}", Spell(own, Key.Keyword))
	require.Equal(t, "plain", Spell(errors.New("plain"), flag))
}
