package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// lackError says that this machine has no way to what is tested.
type lackError struct{ why string }

func (e *lackError) Error() string { return e.why }

func lacks(format string, a ...any) error { return &lackError{fmt.Sprintf(format, a...)} }

// series are the drivers that are tested and the CUDA version of each.
var series = []struct {
	major string
	cuda  int
}{{"535", 12020}, {"550", 12040}, {"555", 12050}}

// suites are the distributions of the archive that hold them.
var suites = []string{"bookworm", "trixie", "sid", "experimental"}

// packages of a driver, with the library that each is for.
var packages = []struct{ name, library string }{
	{"libcuda1", "libcuda.so.1"},
	{"libnvidia-ptxjitcompiler1", "libnvidia-ptxjitcompiler.so.1"},
}

// driverLibs are the libraries of one driver.
type driverLibs struct {
	version   string // 535.261.03
	cuda      int
	dir       string // with both libraries
	libcuda   string
	jit       string
	exported  map[string]bool // of libcuda
	exportErr error
}

func command(ctx context.Context, dir string, env []string, name string,
	args ...string) ([]byte, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir, c.Env = dir, append(os.Environ(), env...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return nil, err
		}
		return out.Bytes(), fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err,
			strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

// apt is an apt with lists and a cache of its own, so that the machine's own configuration stays as
// it is. Its archive is the machine's.
type apt struct{ dir string }

// archive is the address that the machine's apt has for Debian.
func archive(ctx context.Context) (string, error) {
	out, err := command(ctx, "", nil, "apt-get", "indextargets", "--format",
		"$(SITE) $(ORIGIN) $(COMPONENT)")
	if errors.Is(err, exec.ErrNotFound) {
		return "", lacks("there is no apt-get on this machine")
	}
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(out)) {
		site, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(rest, "Debian main") && strings.HasSuffix(site, "/debian") {
			return site, nil
		}
	}
	return "", lacks("apt knows no archive of Debian (apt-get indextargets)")
}

// newApt writes the configuration for components of the archive.
func newApt(dir, site string, suites []string, component string) (*apt, error) {
	var list strings.Builder
	for _, s := range suites {
		fmt.Fprintf(&list, "deb %s %s %s\n", site, s, component)
	}
	for _, d := range []string{"state/lists/partial", "cache/archives/partial", "parts"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, err
		}
	}
	conf := fmt.Sprintf("Dir::Etc::SourceList %q;\nDir::Etc::SourceParts %q;\nDir::State %q;\n"+
		"Dir::State::status %q;\nDir::Cache %q;\nAPT::Architecture \"amd64\";\n"+
		"APT::Architectures { \"amd64\"; };\nAPT::Sandbox::User \"root\";\n"+
		"Acquire::Languages \"none\";\nAPT::Update::Error-Mode \"any\";\n"+
		"Acquire::Retries \"2\";\n",
		filepath.Join(dir, "sources.list"), filepath.Join(dir, "parts"),
		filepath.Join(dir, "state"), filepath.Join(dir, "status"), filepath.Join(dir, "cache"))
	for name, text := range map[string]string{"sources.list": list.String(), "apt.conf": conf,
		"status": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return &apt{dir}, nil
}

func (a *apt) run(ctx context.Context, dir, tool string, args ...string) ([]byte, error) {
	return command(ctx, dir, []string{"APT_CONFIG=" + filepath.Join(a.dir, "apt.conf"), "LC_ALL=C"},
		tool, args...)
}

var madisonLine = regexp.MustCompile(`(?m)^\s*libcuda1 \| (\S+) \|`)

// newest picks the version of a driver's series out of what "apt-cache madison libcuda1" prints,
// from the oldest distribution that has one; "" for none.
func newest(madison, major string) string {
	var found []string
	for _, m := range madisonLine.FindAllStringSubmatch(madison, -1) {
		if strings.HasPrefix(m[1], major+".") && !slices.Contains(found, m[1]) {
			found = append(found, m[1])
		}
	}
	if len(found) == 0 {
		return ""
	}
	return slices.Min(found)
}

// fetchDrivers unpacks the libraries of each driver into dir. Those of an earlier run are taken
// as they are. missing names the drivers that the archive does not have.
func fetchDrivers(ctx context.Context, dir string) (libs []driverLibs, missing []string,
	err error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return nil, nil, lacks("the libraries are for Linux on x86-64, and this is %s/%s",
			runtime.GOOS, runtime.GOARCH)
	}
	var todo []int
	for i, s := range series {
		if l, ok := unpacked(dir, s.major); ok {
			l.cuda = s.cuda
			libs = append(libs, l)
		} else {
			todo = append(todo, i)
		}
	}
	if len(todo) == 0 {
		return libs, nil, nil
	}
	site, err := archive(ctx)
	if err != nil {
		return nil, nil, err
	}
	a, err := newApt(filepath.Join(dir, "apt"), site, suites, "non-free")
	if err != nil {
		return nil, nil, err
	}
	if _, err := a.run(ctx, "", "apt-get", "-q", "update"); err != nil {
		return nil, nil, probeArchive(ctx, dir, site, err)
	}
	madison, err := a.run(ctx, "", "apt-cache", "madison", "libcuda1")
	if err != nil {
		return nil, nil, err
	}
	for _, i := range todo {
		version := newest(string(madison), series[i].major)
		if version == "" {
			missing = append(missing, series[i].major)
			continue
		}
		l, err := a.fetch(ctx, dir, version)
		if err != nil {
			return nil, nil, err
		}
		l.cuda = series[i].cuda
		libs = append(libs, l)
	}
	if len(libs) == 0 {
		return nil, missing, lacks("the archive has none of NVIDIA's drivers %s",
			strings.Join(missing, ", "))
	}
	slices.SortFunc(libs,
		func(a, b driverLibs) int { return strings.Compare(a.version, b.version) })
	return libs, missing, nil
}

// probeArchive tells a machine without a way to the archive from a failure: the machine's own
// distribution has to be out of reach too.
func probeArchive(ctx context.Context, dir, site string, failure error) error {
	a, err := newApt(filepath.Join(dir, "probe"), site, suites[:1], "main")
	if err != nil {
		return err
	}
	if _, err := a.run(ctx, "", "apt-get", "-q", "update"); err != nil {
		return lacks("the archive is out of reach, its main component too: %v", err)
	}
	return fmt.Errorf("the archive's main component can be had and non-free cannot: %w", failure)
}

// fetch downloads and unpacks a version's packages. Nothing is installed.
func (a *apt) fetch(ctx context.Context, dir, version string) (driverLibs, error) {
	tmp, err := os.MkdirTemp(dir, "new-")
	if err != nil {
		return driverLibs{}, err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, "libs")
	if err := os.Mkdir(out, 0o700); err != nil {
		return driverLibs{}, err
	}
	for _, p := range packages {
		if _, err := a.run(ctx, tmp, "apt-get", "-q", "download", p.name+"="+version); err != nil {
			return driverLibs{}, err
		}
		debs, err := filepath.Glob(filepath.Join(tmp, p.name+"_*.deb"))
		if err != nil || len(debs) != 1 {
			return driverLibs{}, fmt.Errorf("apt-get download %s left %d packages: %w", p.name,
				len(debs), err)
		}
		tree := filepath.Join(tmp, p.name)
		if _, err := command(ctx, "", nil, "dpkg-deb", "-x", debs[0], tree); err != nil {
			return driverLibs{}, err
		}
		files, err := filepath.Glob(filepath.Join(tree, "usr/lib/x86_64-linux-gnu/nvidia/current",
			strings.TrimSuffix(p.library, ".1")+".[0-9][0-9]*"))
		if err != nil || len(files) != 1 {
			return driverLibs{}, fmt.Errorf("package %s=%s has %d files %s.…: %w", p.name, version,
				len(files), p.library, err)
		}
		if err := os.Rename(files[0], filepath.Join(out, p.library)); err != nil {
			return driverLibs{}, err
		}
	}
	upstream, _, _ := strings.Cut(version, "-")
	// Linkers look for the name without a number.
	if err := os.Symlink("libcuda.so.1", filepath.Join(out, "libcuda.so")); err != nil {
		return driverLibs{}, err
	}
	if err := os.Rename(out, filepath.Join(dir, upstream)); err != nil {
		return driverLibs{}, err
	}
	l, ok := unpacked(dir, upstream)
	if !ok {
		return l, fmt.Errorf("%s lacks a library of driver %s", dir, upstream)
	}
	return l, nil
}

// unpacked finds a driver by the beginning of its version.
func unpacked(dir, version string) (l driverLibs, ok bool) {
	found, _ := filepath.Glob(filepath.Join(dir, version+"*", packages[1].library))
	if len(found) == 0 {
		return l, false
	}
	slices.Sort(found)
	l.dir = filepath.Dir(found[0])
	l.version = filepath.Base(l.dir)
	l.libcuda, l.jit = filepath.Join(l.dir, packages[0].library), found[0]
	l.exported, l.exportErr = exports(l.libcuda)
	return l, true
}

// wheels are fetched too: a disassembler that is never shipped, and the headers of CUDA 13.
const wheels = `nvidia-cuda-nvdisasm==13.5.37 --hash=sha256:d3fdbdd49fa53e2e4aacd3db8259d052bd2b049ececdcb69e92e083c6728e7ca
nvidia-cuda-runtime==13.5.37 --hash=sha256:df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d
`

// fetchWheels unpacks the wheels and returns the folder with bin/nvdisasm and include/cuda.h.
func fetchWheels(ctx context.Context, dir string) (string, error) {
	sum := sha256.Sum256([]byte(wheels))
	to := filepath.Join(dir, fmt.Sprintf("wheels-%x", sum[:4]))
	root := filepath.Join(to, "nvidia", "cu13")
	if _, err := os.Stat(to); err == nil {
		return root, nil
	}
	tmp, err := os.MkdirTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	list := filepath.Join(tmp, "requirements")
	if err := os.WriteFile(list, []byte(wheels), 0o600); err != nil {
		return "", err
	}
	_, err = command(ctx, tmp, nil, "python3", "-m", "pip", "download", "-q",
		"--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--require-hashes",
		"-d", filepath.Join(tmp, "wheels"), "-r", list)
	if err != nil {
		return "", fmt.Errorf("pip cannot fetch the wheels of nvdisasm and of CUDA's headers: %w",
			err)
	}
	files, err := filepath.Glob(filepath.Join(tmp, "wheels", "*.whl"))
	if err != nil {
		return "", err
	}
	out := filepath.Join(tmp, "out")
	for _, f := range files {
		if _, err := command(ctx, tmp, nil, "python3", "-m", "zipfile", "-e", f, out); err != nil {
			return "", err
		}
	}
	if err := os.Chmod(filepath.Join(out, "nvidia/cu13/bin/nvdisasm"), 0o700); err != nil {
		return "", err
	}
	return root, os.Rename(out, to)
}
