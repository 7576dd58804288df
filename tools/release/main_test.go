package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/rpm"
	"github.com/stretchr/testify/require"
)

// tree is a release of a small tree whose files have times of their own.
func tree(t *testing.T, text string, changed time.Time) *release {
	t.Helper()
	r := &release{version: "1.2.3", arch: "arm64", root: t.TempDir(), base: t.TempDir(),
		out: t.TempDir(), made: time.Unix(1577836800, 0).UTC()}
	require.NoError(t, os.Symlink("usr/lib", filepath.Join(r.base, "lib")))
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
		var tgz, d, p, image bytes.Buffer
		require.NoError(t, r.tarball(&tgz))
		require.NoError(t, r.packer("deb", deb.Default)(&d))
		require.NoError(t, r.packer("rpm", rpm.DefaultRPM)(&p))
		require.NoError(t, r.image(&image))
		return [][]byte{tgz.Bytes(), d.Bytes(), p.Bytes(), image.Bytes()}
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

// The library's own reader of what "docker save" writes finds the same image: it checks each layer.
func TestImage(t *testing.T) {
	r := tree(t, "one", time.Now())
	file := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(file)
	require.NoError(t, err)
	require.NoError(t, errors.Join(r.image(f), f.Close()))
	img, err := tarball.ImageFromPath(file, nil)
	require.NoError(t, err)
	c, err := img.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "linux/arm64", c.OS+"/"+c.Architecture)
	require.Equal(t, "65532", c.Config.User)
	require.Equal(t, "1.2.3", c.Config.Labels["org.opencontainers.image.version"])
	layers, err := img.Layers()
	require.NoError(t, err)
	var found []string
	for _, l := range layers {
		from, err := l.Uncompressed()
		require.NoError(t, err)
		for all := tar.NewReader(from); ; {
			h, err := all.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			found = append(found, fmt.Sprintf("%s %o %d %s", h.Name, h.Mode, h.Uid, h.Linkname))
		}
		require.NoError(t, from.Close())
	}
	require.Equal(t, []string{"lib 777 0 usr/lib", "usr/ 755 0 ", "usr/bin/ 755 0 ",
		"usr/bin/heliosctl 755 0 ", "usr/share/ 755 0 ", "usr/share/doc/ 755 0 ",
		"usr/share/doc/x 644 0 ", "data/ 755 65532 "}, found)
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
