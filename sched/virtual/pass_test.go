package virtual

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUnionOfReads(t *testing.T) {
	require.Zero(t, union(nil))
	require.EqualValues(t, 24, union([][2]int64{{21, 31}, {1, 11}, {10, 15}, {3, 8}}))
}
