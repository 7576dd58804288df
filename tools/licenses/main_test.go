package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/licenses"
)

// The binary carries the licences of exactly what is linked into it, as the modules have them.
func TestLicensesAreThoseOfTheBinary(t *testing.T) {
	want, err := collect()
	require.NoError(t, err)
	got, err := licenses.All()
	require.NoError(t, err)
	require.Equal(t, want, got, "run \"make generate\"")
	names := map[string]string{}
	for _, m := range got {
		for _, f := range m.Files {
			names[m.Path+" "+f.Name] = f.Text
		}
	}
	require.Contains(t, names["go.yaml.in/yaml/v3 NOTICE"], "Canonical")
	require.Contains(t, names["std LICENSE"], "The Go Authors")
	require.Contains(t, names["github.com/ebitengine/purego LICENSE"], "Apache License")
}

func TestModuleNeedsALicence(t *testing.T) {
	dir := t.TempDir()
	put := func(name string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("text of "+name), 0o600))
	}
	for _, name := range []string{"README.md", "licenses.go", "NOTICE", "PATENTS"} {
		put(name)
	}
	_, err := module("example.org/m", "v1", dir)
	require.ErrorContains(t, err, "no licence file")
	for _, name := range []string{"LICENSE-APACHE", "COPYING", "licence.txt"} {
		put(name)
	}
	m, err := module("example.org/m", "v1", dir)
	require.NoError(t, err)
	var all []string
	for _, f := range m.Files {
		all = append(all, f.Name)
	}
	require.Equal(t, "COPYING LICENSE-APACHE NOTICE PATENTS licence.txt", strings.Join(all, " "))
}
