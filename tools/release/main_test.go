package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/rpm"
	"github.com/stretchr/testify/require"
)

// tree is a release of a small tree whose files have times of their own.
func tree(t *testing.T, text string, changed time.Time) *release {
	t.Helper()
	r := &release{version: "1.2.3", arch: "arm64", root: t.TempDir(), out: t.TempDir(),
		made: time.Unix(1577836800, 0).UTC()}
	for name, mode := range map[string]os.FileMode{"usr/bin/heliosctl": 0o755, "usr/share/doc/x": 0o644} {
		path := filepath.Join(r.root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		require.NoError(t, os.Chtimes(path, changed, changed))
	}
	return r
}

// Packages depend on the contents of the tree and on nothing else.
func TestPackagesAreReproducible(t *testing.T) {
	pack := func(r *release) (all [][]byte) {
		var tgz, d, p bytes.Buffer
		require.NoError(t, r.tarball(&tgz))
		require.NoError(t, r.packer("deb", deb.Default)(&d))
		require.NoError(t, r.packer("rpm", rpm.DefaultRPM)(&p))
		return [][]byte{tgz.Bytes(), d.Bytes(), p.Bytes()}
	}
	a, b := pack(tree(t, "one", time.Unix(1, 0))), pack(tree(t, "one", time.Now()))
	other := pack(tree(t, "two", time.Unix(1, 0)))
	for i := range a {
		require.Equal(t, a[i], b[i])
		require.NotEqual(t, a[i], other[i])
	}
	require.True(t, bytes.HasPrefix(a[1], []byte("!<arch>\n")))
	require.True(t, bytes.HasPrefix(a[2], []byte{0xed, 0xab, 0xee, 0xdb}))
}

func TestPackagesRefuse(t *testing.T) {
	r := tree(t, "one", time.Now())
	require.Error(t, writeSBOM(&bytes.Buffer{}, r), "no Go program")
	require.NoError(t, os.Symlink("x", filepath.Join(r.root, "usr/share/doc/y")))
	require.ErrorContains(t, r.tarball(&bytes.Buffer{}), "y is no file")

	// This test has modules that heliosctl has not.
	self, err := os.Executable()
	require.NoError(t, err)
	program := filepath.Join(r.root, "usr/bin/heliosctl")
	require.NoError(t, os.Remove(program))
	require.NoError(t, os.Symlink(self, program))
	require.ErrorContains(t, writeSBOM(&bytes.Buffer{}, r), "no licence of ")
}
