package build

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/edges"
)

// TestJournalWhere: a user hears what is done.
func TestJournalWhere(t *testing.T) {
	j := newJournal(nil, "g")
	require.False(t, j.worth())
	j.take(journalLine{Array: "features", Partial: &ArrayMark{Bytes: 2e9}})
	require.Equal(t, "2.0 GB of the features", j.where())
	j.take(journalLine{Array: "features", Done: &arrayDone{}})
	require.Equal(t, "the features", j.where())
	j.take(journalLine{Topology: &edges.Counts{}, Arrays: make([]arrayDone, 2)})
	require.Equal(t, "the edges and the features", j.where())
	j.take(journalLine{Array: "features"})
	require.Equal(t, "the edges", j.where())
	require.True(t, j.worth())
}
