// Command release packs the tree that "make install" made, as .tar.gz, .deb, .rpm and an OCI image,
// and writes what its program is made of (CycloneDX). Equal trees give equal bytes.
// tools/release.sh calls it.
package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	"github.com/goreleaser/nfpm/v2/rpm"
)

// The owner's to name: who answers mail about the packages, and the address of the sources, which
// packages and image leave out while there is none.
const (
	maintainer = "The maintainers of heliosctl <maintainers@heliosctl.invalid>"
	source     = ""
)

const (
	description = "trains graph neural networks whose features live on NVMe SSDs"
	spdx        = "Apache-2.0"
)

// release is one architecture of a version.
type release struct {
	version, arch string
	root          string    // the tree, as it is to lie below /
	base          string    // the root of a Debian that the image stands on (debianroot.sh)
	out           string    // the folder of the packages
	made          time.Time // of all files
}

func main() {
	var r release
	flag.StringVar(&r.version, "version", "", "version, without v")
	flag.StringVar(&r.arch, "arch", "", "architecture, as Go names it")
	flag.StringVar(&r.root, "root", "", "tree to pack")
	flag.StringVar(&r.base, "base", "", "root of a Debian for the image")
	flag.StringVar(&r.out, "o", "", "folder to write to")
	flag.Parse()
	epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil || r.version == "" || r.arch == "" || r.root == "" || r.base == "" || r.out == "" {
		fmt.Fprintln(os.Stderr, "release: give all flags (-h), and SOURCE_DATE_EPOCH in the environment")
		os.Exit(2)
	}
	r.made = time.Unix(epoch, 0).UTC()
	if err := r.run(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r *release) run() error {
	name := fmt.Sprintf("heliosctl_%s_linux_%s", r.version, r.arch)
	return errors.Join(
		r.write(name+".tar.gz", r.tarball),
		r.write(name+".deb", r.packer("deb", deb.Default)),
		r.write(name+".rpm", r.packer("rpm", rpm.DefaultRPM)),
		r.write(name+".oci.tar", r.image),
		r.write(name+".cdx.json", func(w io.Writer) error { return writeSBOM(w, r) }))
}

func (r *release) write(name string, what func(w io.Writer) error) error {
	f, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	return errors.Join(what(f), f.Close())
}

// walk calls f for each file of the tree, in order; name begins with usr/.
func (r *release) walk(f func(name string, info fs.FileInfo) error) error {
	return filepath.WalkDir(r.root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is no file", path)
		}
		name, err := filepath.Rel(r.root, path)
		if err != nil {
			return err
		}
		return f(name, info)
	})
}

// tarball writes the tree without usr/ below a folder of its own, to be unpacked into a PREFIX.
func (r *release) tarball(w io.Writer) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	t := tar.NewWriter(z)
	err = r.walk(func(name string, info fs.FileInfo) error {
		short, err := filepath.Rel("usr", name)
		if err != nil {
			return err
		}
		if err := t.WriteHeader(&tar.Header{Name: fmt.Sprintf("heliosctl-%s/%s", r.version, short),
			Size: info.Size(), Mode: int64(info.Mode().Perm()), ModTime: r.made,
			Format: tar.FormatUSTAR}); err != nil {
			return err
		}
		return copyFile(t, filepath.Join(r.root, name))
	})
	return errors.Join(err, t.Close(), z.Close())
}

func copyFile(w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return errors.Join(err, f.Close())
}

// libc names the C library in each format.
var libc = map[string]string{"deb": "libc6", "rpm": "glibc"}

// packer returns a function that writes the tree as a package of a format.
func (r *release) packer(format string, p nfpm.Packager) func(w io.Writer) error {
	return func(w io.Writer) error {
		info := nfpm.WithDefaults(&nfpm.Info{Name: "heliosctl", Arch: r.arch, Platform: "linux",
			Version: r.version, Section: "science", Priority: "optional", License: spdx,
			Maintainer: maintainer, Homepage: source, Description: description, MTime: r.made,
			// The program opens libcuda where it is, so by libc's loader; "demo" is a script of bash.
			Overridables: nfpm.Overridables{Depends: []string{"bash", libc[format]},
				RPM: nfpm.RPM{BuildHost: "localhost", Summary: "trains graph neural networks from NVMe SSDs"}}})
		if err := r.walk(func(name string, at fs.FileInfo) error {
			info.Contents = append(info.Contents, &files.Content{Destination: "/" + name,
				Source: filepath.Join(r.root, name), FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root",
					Mode: at.Mode().Perm(), MTime: r.made}})
			return nil
		}); err != nil {
			return err
		}
		if err := nfpm.PrepareForPackager(info, format); err != nil {
			return err
		}
		return p.Package(info, w)
	}
}
