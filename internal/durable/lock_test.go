package durable

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	const file = "fe:00:5678"
	require.Equal(t, 1234, parse("1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF", file))
	for _, l := range []string{
		"", "1: FLOCK ADVISORY WRITE 1234", "1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF",
		"1: FLOCK  ADVISORY  WRITE 1234 fe:00:56 0 EOF",
		"1: FLOCK  ADVISORY  WRITE x fe:00:5678 0 EOF",
		"1: FLOCK  ADVISORY  WRITE -1 fe:00:5678 0 EOF",
		"1: FLOCK  ADVISORY  WRITE 0 fe:00:5678 0 EOF",
		"1: -> FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF",
	} {
		require.Zero(t, parse(l, file), l)
	}
}

func TestLook(t *testing.T) {
	p, ok := Look(os.Getpid())
	require.True(t, ok)
	require.NotEmpty(t, p.Comm)
	require.Regexp(t, `^\d+$`, p.Start)
	_, ok = Look(1 << 30)
	require.False(t, ok)
}
