package main

import (
	"archive/tar"
	"archive/zip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"helios/tools/internal/repo"
)

// maxPack bounds the packed folder: the copying of files to a GPU machine is limited.
const maxPack = 40 << 20

// testBinaries are the packages whose tests travel, by the name of the binary.
var testBinaries = []struct{ name, pkg string }{
	{"driver.test", "./cuda/driver"},
	{"difftest.test", "./internal/testing/difftest"},
	{"graph.test", "./graph"},
	{"cache.test", "./cache"},
	{"gpuio.test", "./gpuio"},
	{"gnn.test", "./gnn"},
	{"sched.test", "./sched"},
}

// manifest lists the packed files.
type manifest struct {
	Commit string   `json:"commit"`
	Go     string   `json:"go"`
	OS     string   `json:"os"`
	Arch   string   `json:"arch"`
	Files  []string `json:"files"`
}

// script is the file that a person starts. Everything else is in the gputier binary, which is
// static but for the C library.
const script = `#!/bin/sh
# The gpu tier of heliosctl: tests and measures on this machine's NVIDIA GPU, prints a table and
# leaves results.json. Needs an NVIDIA driver; no Go, no CUDA toolkit. Arguments: see run.sh -h.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
want=$(cat "$here/arch") || exit 1
have=$(uname -m)
if [ "$have" != "$want" ]; then
	echo "run.sh: packed for $want, and this machine is $have: run \"make test-gpu-pack\" with GOARCH set" >&2
	exit 3
fi
exec "$here/bin/gputier" run -pack "$here" "$@"
`

func packVerb(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("gputier pack", flag.ContinueOnError)
	out := f.String("o", "",
		"`DIR` to make, and DIR.tar.xz beside it; must not exist or hold an older pack")
	wheel := f.String("sanitizer", "",
		"`WHEEL` of nvidia-cuda-sanitizer-api, for machines without compute-sanitizer")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *out == "" || f.NArg() > 0 {
		f.Usage()
		return flag.ErrHelp
	}
	return pack(ctx, *out, *wheel)
}

func pack(ctx context.Context, dir, wheel string) error {
	if _, err := os.Stat(filepath.Join(dir, "manifest.json")); err == nil {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o777); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o777); err != nil {
		return fmt.Errorf("pack: %w (an older pack is replaced, other folders are not)", err)
	}
	bin, err := filepath.Abs(filepath.Join(dir, "bin"))
	if err != nil {
		return err
	}
	if err := os.Mkdir(bin, 0o777); err != nil {
		return err
	}
	root, err := repo.Root()
	if err != nil {
		return err
	}
	build := func(folder string, args ...string) error {
		c := exec.CommandContext(ctx, "go", args...)
		c.Dir = filepath.Join(root, folder)
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Run(); err != nil {
			return fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
		}
		return nil
	}
	commit := version(ctx)
	for pkg, folder := range map[string]string{"./cmd/heliosctl": ".", "./gputier": "tools",
		"./bench": "tools"} {
		if err := build(folder, "build", "-o", filepath.Join(bin, path.Base(pkg)), "-trimpath",
			"-ldflags", "-s -w -X main.version="+commit, pkg); err != nil {
			return err
		}
	}
	for _, t := range testBinaries { // stripped: symbols are half of a test binary
		if err := build(".", "test", "-c", "-o", filepath.Join(bin, t.name), "-trimpath", "-ldflags",
			"-s -w", t.pkg); err != nil {
			return err
		}
	}
	goarch := os.Getenv("GOARCH")
	if goarch == "" {
		goarch = runtime.GOARCH
	}
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[goarch]
	if arch == "" {
		return fmt.Errorf(
			"pack: no GPU machines of architecture %s are known; set GOARCH to amd64 or arm64",
			goarch)
	}
	for name, text := range map[string]string{"run.sh": script, "arch": arch + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o777); err != nil {
			return err
		}
	}
	if wheel != "" {
		if err := unpackWheel(wheel, filepath.Join(dir, "sanitizer")); err != nil {
			return err
		}
	}
	m := manifest{Commit: commit, Go: runtime.Version(), OS: "linux", Arch: goarch}
	total := int64(0)
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		total += fi.Size()
		rel, err := filepath.Rel(dir, p)
		m.Files = append(m.Files, fmt.Sprintf("%s %d", rel, fi.Size()))
		return err
	})
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), append(b, '\n'),
		0o666); err != nil {
		return err
	}
	packed, err := archive(ctx, dir)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %d files, %.1f MiB; %s.tar.xz: %.1f MiB\n", dir, len(m.Files)+1,
		float64(total)/(1<<20), dir, float64(packed)/(1<<20))
	if packed > maxPack {
		return fmt.Errorf("%s.tar.xz has %d bytes, more than %d: leave the sanitizer out", dir,
			packed, maxPack)
	}
	return nil
}

func version(ctx context.Context) string {
	b, err := exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// unpackWheel takes a wheel's files out; those without an ending may be programs.
func unpackWheel(wheel, dir string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("%s: %w", wheel, err)
	}
	defer z.Close() //nolint:errcheck // only read
	for _, f := range z.File {
		if f.FileInfo().IsDir() || !filepath.IsLocal(f.Name) || !f.Mode().IsRegular() {
			continue
		}
		to := filepath.Join(dir, f.Name)
		if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
			return err
		}
		if err := func() error {
			in, err := f.Open()
			if err != nil {
				return err
			}
			defer in.Close() //nolint:errcheck // only read
			out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o777)
			if err != nil {
				return err
			}
			if _, err := io.Copy(out, in); err != nil {
				_ = out.Close()
				return err
			}
			return out.Close()
		}(); err != nil {
			return fmt.Errorf("%s: %s: %w", wheel, f.Name, err)
		}
	}
	return nil
}

// archive writes dir.tar.xz, by the program xz, and returns its size.
func archive(ctx context.Context, dir string) (n int64, err error) {
	out, err := os.Create(dir + ".tar.xz")
	if err != nil {
		return 0, err
	}
	defer func() {
		if cerr := out.Close(); err == nil {
			err = cerr
		}
	}()
	// The binaries have most of their code in common, so the dictionary holds several of them.
	xz := exec.CommandContext(ctx, "xz", "-T1", "--lzma2=preset=3,dict=192MiB", "-c")
	xz.Stdout, xz.Stderr = out, os.Stderr
	z, err := xz.StdinPipe()
	if err != nil {
		return 0, err
	}
	if err := xz.Start(); err != nil {
		return 0, fmt.Errorf("pack: %w; install xz-utils", err)
	}
	if err := errors.Join(writeTar(z, dir), z.Close(), xz.Wait()); err != nil {
		return 0, fmt.Errorf("pack: %s.tar.xz: %w", dir, err)
	}
	fi, err := out.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// writeTar writes a folder as a tar of one folder.
func writeTar(to io.Writer, dir string) error {
	w := tar.NewWriter(to)
	base := filepath.Base(dir)
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		h, err := tar.FileInfoHeader(fi, "")
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		h.Name = filepath.ToSlash(filepath.Join(base, rel))
		h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
		if err := w.WriteHeader(h); err != nil || d.IsDir() {
			return err
		}
		in, err := os.Open(p)
		if err != nil {
			return err
		}
		defer in.Close() //nolint:errcheck // only read
		_, err = io.Copy(w, in)
		return err
	})
	return errors.Join(err, w.Close())
}
