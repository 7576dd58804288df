package stripe

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A dataset with a feature function has no features.npy that a finding could point at.
func TestVerifySourceNamesTheFunction(t *testing.T) {
	d := hashed(t, 300, 100, 1, "hash:5")
	s := sealed(t, d, 1)
	s[0].durable[headBytes+10*512] ^= 1
	r, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.Error(t, err)
	require.Equal(t, "row 10 differs from hash:5", r.Bad[len(r.Bad)-1].What)
}
