package cachedir

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCache(t *testing.T) {
	cache, temp := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("TMPDIR", temp)
	got, err := Private("x")
	require.NoError(t, err)
	require.Equal(t, filepath.Join(cache, "x"), got)
	info, err := os.Stat(got)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())

	require.NoError(t, os.Chmod(got, 0o770))
	_, err = Private("x")
	require.ErrorContains(t, err, "is not this user's alone")
}

// The temporary folder is for everyone, and the name in it known: what someone else left there is
// not ours.
func TestCacheWithoutHome(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	t.Setenv("TMPDIR", temp)
	want := filepath.Join(temp, fmt.Sprintf("x-%d", os.Getuid()))
	for range 2 { // the second time it is there
		got, err := Private("x")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	require.NoError(t, os.Remove(want))
	require.NoError(t, os.Symlink(t.TempDir(), want))
	_, err := Private("x")
	require.ErrorContains(t, err, "is not this user's alone")
	require.NoError(t, os.Remove(want))

	require.NoError(t, os.Mkdir(want, 0o700))
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(want, 65534, 65534))
		_, err = Private("x")
		require.ErrorContains(t, err, "is not this user's alone")
	}
}

func TestCacheThatCannotBeMade(t *testing.T) {
	temp := t.TempDir()
	file := filepath.Join(temp, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	t.Setenv("XDG_CACHE_HOME", filepath.Join(file, "below"))
	t.Setenv("TMPDIR", temp)
	got, err := Private("x")
	require.NoError(t, err)
	require.Equal(t, temp, filepath.Dir(got))
}
