package build

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/edges"
)

// TestJournalWhere: what a user hears of what is done is never nothing, and never more than all.
func TestJournalWhere(t *testing.T) {
	j := newJournal(nil, "g")
	j.take(journalLine{Source: &sourceMark{Total: 1000, Parts: 2}})
	piece := edges.Piece{Part: 1, Span: edges.Span{From: 0, To: 70}}
	j.take(journalLine{Run: &edges.Run{ID: 1, Keys: 70, Pieces: []edges.Piece{piece}}})
	require.Equal(t, "70 of the edges", j.where(), "no part is at its end")
	piece.Span, piece.End, piece.Units = edges.Span{From: 70, To: 90}, true, 500
	j.take(journalLine{Run: &edges.Run{ID: 2, Keys: 20, Pieces: []edges.Piece{piece}}})
	require.Equal(t, "50 % of the edges", j.where())
	j.take(journalLine{Merged: &edges.Merged{Done: 110, Total: 120}})
	require.Equal(t, "92 % of the merge of edges", j.where(), "with 30 self loops that were added")
	j.take(journalLine{Merged: &edges.Merged{Done: 130, Total: 120}})
	require.Equal(t, "100 % of the merge of edges", j.where())
}

// TestCoveredIsACopy: readers of a source look parts up while runs are noted.
func TestCoveredIsACopy(t *testing.T) {
	j := newJournal(nil, "g")
	run := func(part int) journalLine {
		piece := edges.Piece{Part: part, Span: edges.Span{From: 0, To: 70}}
		return journalLine{Run: &edges.Run{ID: part, Keys: 70, Pieces: []edges.Piece{piece}}}
	}
	j.take(run(1))
	covered := sorterLog{journal: j}.Covered(0)
	j.take(run(2))
	require.Len(t, covered, 1)
	require.Len(t, sorterLog{journal: j}.Covered(0), 2)
}
