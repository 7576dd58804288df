package faultinject

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCatalogue(t *testing.T) {
	list := Catalogue()
	require.GreaterOrEqual(t, len(list), 40)
	names, texts := map[string]bool{}, map[string]bool{}
	seenKinds, types := map[Kind]bool{}, map[uint8][2]bool{}
	seenOps := map[Op]bool{}
	for _, e := range list {
		assert.False(t, names[e.Name], "name %s twice", e.Name)
		assert.False(t, texts[e.Fault], "fault %s twice", e.Fault)
		names[e.Name], texts[e.Fault] = true, true
		for _, s := range []string{e.Name, e.What, e.Outcome, string(e.Class)} {
			assert.NotEmpty(t, s, e.Name)
			assert.NotContains(t, s, "\n", e.Name)
		}
		set, err := Parse(e.Fault)
		require.NoError(t, err, e.Name)
		assert.Equal(t, e.Fault, set.String(), "%s is not written as it prints", e.Name)
		for _, f := range set.faults {
			seenKinds[f.Kind], seenOps[f.Op] = true, true
			if f.Kind == Error {
				n := types[f.SCT]
				n[f.DNR] = true
				types[f.SCT] = n
			}
		}
	}
	for k := Error; k < kindEnd; k++ {
		assert.True(t, seenKinds[k], "no entry for %s", k)
	}
	for o := Read; o < opEnd; o++ {
		assert.True(t, seenOps[o] || o == Admin, "no entry for op=%s", o)
	}
	for _, sct := range []uint8{0, 1, 2, 3, 7} {
		assert.Equal(t, [2]bool{true, true}, types[sct], "status code type %d without and with DNR",
			sct)
	}
}
