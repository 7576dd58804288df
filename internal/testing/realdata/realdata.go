// Package realdata finds the published data sets that tests read: too large for the repository, and
// not ours to give away. Only tests use it.
package realdata

import (
	"os"
	"path/filepath"
)

// Env names the folder with the data sets.
const Env = "HELIOS_TESTDATA"

// source is the place where a data set can be had, by its folder.
var source = map[string]string{
	"aifb":     "triples.tsv (src, relation, dst) and labels.tsv (node, label, split) of AIFB (github.com/tkipf/relational-gcn)",
	"citeseer": "ind.citeseer.* of Planetoid (github.com/kimiyoung/planetoid, data/)",
	"webgraph": "cnr-2000.graph, .properties and .offsets (law.di.unimi.it/webdata/cnr-2000)",
}

// TB is the part of testing.TB that Dir takes, so that its own test can stand in.
type TB interface {
	Helper()
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Dir returns the folder of a data set that holds all of the named files. The test is skipped where
// HELIOS_TESTDATA is not set. It fails where the variable is set and a file lacks: whoever sets it
// wants the test to run.
func Dir(t TB, name string, files ...string) string {
	t.Helper()
	from, known := source[name]
	if !known {
		t.Fatalf("realdata does not know %q; say in internal/testing/realdata where it comes from", name)
	}
	root := os.Getenv(Env)
	if root == "" {
		t.Skipf("%s is not there: put %s into DIR/%s and set %s=DIR", name, from, name, Env)
	}
	if !filepath.IsAbs(root) {
		t.Fatalf("%s=%s: a test runs in its package's folder; give an absolute path", Env, root)
	}
	dir := filepath.Join(root, name)
	for _, f := range files {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Fatalf("%s=%s: %v; put %s into %s, or unset %s to leave the test out", Env, root, err,
				from, dir, Env)
		}
	}
	return dir
}
