package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func TestParseResets(t *testing.T) {
	for s, want := range map[string]int{"stop": -1, "retry=1": 1, "retry=3": 3} {
		n, err := parseResets(s)
		require.NoError(t, err)
		require.Equal(t, want, n, s)
	}
	for _, s := range []string{"", "retry", "retry=0", "retry=-1", "retry=x", "go on"} {
		_, err := parseResets(s)
		require.ErrorContains(t, err, "option on-ssd-failure")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}

func TestParseCoalesce(t *testing.T) {
	for s, want := range map[string]int{"auto": 0, "off": -1, "32KiB": 32 << 10, "512": 512} {
		n, err := ParseCoalesce(s)
		require.NoError(t, err)
		require.Equal(t, want, n, s)
	}
	for _, s := range []string{"", "on", "0", "-1", "100", "2GiB"} {
		_, err := ParseCoalesce(s)
		require.ErrorContains(t, err, "option coalesce", s)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}
