package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// The image's user, and its home: debianroot.sh has the same.
const (
	imageUser = 65532
	imageHome = "data"
)

// image writes an archive of an OCI image layout, which docker load takes, too: a layer of the
// Debian root and one of the tree.
func (r *release) image(w io.Writer) error {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1),
		types.OCIConfigJSON)
	var layers []v1.Layer
	for _, root := range []string{r.base, r.root} {
		l, err := r.layer(root)
		if err != nil {
			return err
		}
		layers = append(layers, l)
	}
	img, err := mutate.AppendLayers(img, layers...)
	if err != nil {
		return err
	}
	about := map[string]string{"org.opencontainers.image.title": "heliosctl",
		"org.opencontainers.image.description": description,
		"org.opencontainers.image.version":     r.version,
		"org.opencontainers.image.licenses":    spdx}
	if source != "" {
		about["org.opencontainers.image.source"] = source
	}
	c := &v1.ConfigFile{OS: "linux", Architecture: r.arch, Created: v1.Time{Time: r.made},
		Config: v1.Config{User: fmt.Sprint(imageUser), WorkingDir: "/" + imageHome,
			Labels:     about,
			Entrypoint: []string{"heliosctl"}, Cmd: []string{"--help"},
			Env: []string{"PATH=/usr/bin", "HOME=/" + imageHome,
				// NVIDIA's container toolkit mounts libcuda for "compute".
				"NVIDIA_DRIVER_CAPABILITIES=compute,utility"}}}
	for _, l := range layers {
		id, err := l.DiffID()
		if err != nil {
			return err
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, id)
	}
	c.RootFS.Type = "layers"
	if img, err = mutate.ConfigFile(img, c); err != nil {
		return err
	}
	return r.archive(w, mutate.Annotations(img, about).(v1.Image))
}

// layer packs a tree, and the user's home.
func (r *release) layer(root string) (v1.Layer, error) {
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		from, to := io.Pipe()
		go func() {
			t := tar.NewWriter(to)
			err := r.pack(t, root)
			if root == r.root {
				err = errors.Join(err, t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir,
					Uid: imageUser, Gid: imageUser, Name: imageHome + "/", Mode: 0o755, ModTime: r.made}))
			}
			to.CloseWithError(errors.Join(err, t.Close()))
		}()
		return from, nil
	}, tarball.WithMediaType(types.OCILayer))
}

// pack writes all that is below root, as root's.
func (r *release) pack(t *tar.Writer, root string) error {
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode().Type() == fs.ModeSymlink {
			if link, err = os.Readlink(path); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			name += "/"
		}
		if err := t.WriteHeader(&tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: link,
			Size: h.Size, Mode: h.Mode, ModTime: r.made}); err != nil || !info.Mode().IsRegular() {
			return err
		}
		return copyFile(t, path)
	})
}

// archive writes an image's layout, and the list of it that Docker reads.
func (r *release) archive(w io.Writer, img v1.Image) error {
	name := "heliosctl:" + r.version
	dir, err := os.MkdirTemp(r.out, ".image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // of the release's folder
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: r.arch}),
		layout.WithAnnotations(map[string]string{
			"org.opencontainers.image.ref.name": name})); err != nil {
		return err
	}
	m, err := img.Manifest()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	docker := struct {
		Config           string
		RepoTags, Layers []string
	}{Config: blob(m.Config.Digest), RepoTags: []string{name}}
	for _, l := range m.Layers {
		docker.Layers = append(docker.Layers, blob(l.Digest))
	}
	list, err := json.Marshal([]any{docker})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), list, 0o644); err != nil {
		return err
	}
	t := tar.NewWriter(w)
	return errors.Join(r.pack(t, dir), t.Close())
}
