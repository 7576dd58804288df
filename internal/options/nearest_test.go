package options

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNearest(t *testing.T) {
	require.Equal(t, "train", Nearest("trian", []string{"eval", "train"}))
	require.Equal(t, "", Nearest("xyz", []string{"eval", "train"}))
	require.Equal(t, 1, distance("ab", "ba"))
	require.Equal(t, 3, distance("kitten", "sitting"))
	require.Equal(t, 4, distance("", "four"))
}
