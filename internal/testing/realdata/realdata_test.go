package realdata

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorder is a test whose end is kept instead of reported.
type recorder struct{ how, why string }

func (r *recorder) Helper()                   {}
func (r *recorder) Skipf(f string, a ...any)  { r.end("skipped", f, a) }
func (r *recorder) Fatalf(f string, a ...any) { r.end("failed", f, a) }
func (r *recorder) end(how, format string, args []any) {
	r.how, r.why = how, fmt.Sprintf(format, args...)
	panic(r)
}

func dir(name string, files ...string) (got string, r *recorder) {
	r = &recorder{}
	defer func() {
		if x := recover(); x != nil && x != any(r) {
			panic(x)
		}
	}()
	return Dir(r, name, files...), r
}

// Only a variable that is not set skips; a folder that lacks what it was named for is an error.
func TestDir(t *testing.T) {
	root := t.TempDir()
	t.Setenv(Env, "")
	_, r := dir("citeseer", "ind.citeseer.x")
	require.Equal(t, "skipped", r.how)
	require.Contains(t, r.why, "citeseer is not there: put ind.citeseer.* of Planetoid")
	require.Contains(t, r.why, "set HELIOS_TESTDATA=DIR")

	t.Setenv(Env, filepath.Join(root, "nowhere"))
	_, r = dir("citeseer", "ind.citeseer.x")
	require.Equal(t, "failed", r.how)
	require.Contains(t, r.why, "no such file or directory")

	t.Setenv(Env, root)
	require.NoError(t, os.Mkdir(filepath.Join(root, "citeseer"), 0o755))
	_, r = dir("citeseer", "ind.citeseer.x")
	require.Equal(t, "failed", r.how)
	require.Contains(t, r.why, "ind.citeseer.x: no such file")
	require.Contains(t, r.why, "unset HELIOS_TESTDATA")

	require.NoError(t, os.WriteFile(filepath.Join(root, "citeseer", "ind.citeseer.x"), nil, 0o644))
	got, r := dir("citeseer", "ind.citeseer.x")
	require.Equal(t, recorder{}, *r)
	require.Equal(t, filepath.Join(root, "citeseer"), got)

	t.Setenv(Env, "data")
	_, r = dir("citeseer")
	require.Equal(t, "failed", r.how)
	require.Contains(t, r.why, "absolute path")

	_, r = dir("papers100M")
	require.Equal(t, "failed", r.how)
}
