package faultinject

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The faults that the documents tell people to type parse.
func TestDocumentedFaultsParse(t *testing.T) {
	example := regexp.MustCompile(`--fault '([^']*)'`)
	found := 0
	for _, doc := range []string{"../../docs/guide/ssds.md"} {
		text, err := os.ReadFile(doc)
		require.NoError(t, err)
		for _, m := range example.FindAllSubmatch(text, -1) {
			_, err := Parse(string(m[1]))
			require.NoError(t, err, "%s: %s", doc, m[1])
			found++
		}
	}
	require.NotZero(t, found, "no example found: has its spelling changed?")
}
