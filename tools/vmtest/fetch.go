package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// wantedModules and what they depend on go into every guest; they are loaded only when somebody
// asks.
var wantedModules = []string{
	"vfio", "vfio_iommu_type1", "vfio_virqfd", "vfio-pci-core", "vfio-pci", "irqbypass",
	"md-mod", "raid0", "raid1", "dm-mod", "dm-crypt", "loop",
}

// kernel is an unpacked kernel package.
type kernel struct {
	release string // 6.1.0-56-cloud-amd64
	image   string // path of vmlinuz
	modules string // folder with lib/modules/RELEASE
}

func command(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return nil, err
		}
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err,
			strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

// kernelPackage asks apt which package holds the newest kernel of a series; "" is the
// distribution's own.
func kernelPackage(ctx context.Context, series string) (string, error) {
	if series == "" {
		out, err := command(ctx, "", "apt-cache", "show", "--no-all-versions",
			"linux-image-cloud-amd64")
		if err != nil {
			return "", err
		}
		m := regexp.MustCompile(
			`(?m)^Depends: .*?(linux-image-[0-9][^ ,(]*-cloud-amd64)`).FindSubmatch(out)
		if m == nil {
			return "", errors.New("linux-image-cloud-amd64 names no kernel package")
		}
		return string(m[1]), nil
	}
	out, err := command(ctx, "", "apt-cache", "pkgnames", "linux-image-"+series+".")
	if err != nil {
		return "", err
	}
	var names []string
	for _, n := range strings.Fields(string(out)) {
		if strings.HasSuffix(n, "-cloud-amd64") {
			names = append(names, n)
		}
	}
	if len(names) == 0 {
		return "", fmt.Errorf("apt knows no package linux-image-%s.*-cloud-amd64", series)
	}
	return slices.MaxFunc(names, byNumbers), nil
}

// byNumbers compares texts by the numbers in them: 6.1.0-56 is after 6.1.0-9.
func byNumbers(a, b string) int {
	num := regexp.MustCompile(`[0-9]+`)
	x, y := num.FindAllString(a, -1), num.FindAllString(b, -1)
	for i := range min(len(x), len(y)) {
		p, q := strings.TrimLeft(x[i], "0"), strings.TrimLeft(y[i], "0")
		if len(p) != len(q) {
			return len(p) - len(q)
		}
		if c := strings.Compare(p, q); c != 0 {
			return c
		}
	}
	return len(x) - len(y)
}

// deb gives the path of a package's file in the cache folder, which apt-get fills. Nothing is
// installed, and no root is needed.
func deb(ctx context.Context, cache, name string) (string, error) {
	find := func() (string, error) {
		got, err := filepath.Glob(filepath.Join(cache, name+"_*.deb"))
		if err != nil || len(got) == 0 {
			return "", err
		}
		return slices.MaxFunc(got, byNumbers), nil
	}
	if got, err := find(); err != nil || got != "" {
		return got, err
	}
	// A folder of its own and a rename: a download that was cut off is never taken for a package.
	tmp, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if _, err := command(ctx, tmp, "apt-get", "download", "-q", "-o", "APT::Sandbox::User=root",
		name); err != nil {
		return "", fmt.Errorf("cannot fetch package %s: %w", name, err)
	}
	files, err := filepath.Glob(filepath.Join(tmp, name+"_*.deb"))
	if err != nil {
		return "", err
	}
	for _, f := range files {
		if err := os.Rename(f, filepath.Join(cache, filepath.Base(f))); err != nil {
			return "", err
		}
	}
	got, err := find()
	if err == nil && got == "" {
		err = fmt.Errorf("apt-get download %s left no file", name)
	}
	return got, err
}

// unpack hands each regular file of a package to visit.
func unpack(ctx context.Context, file string, visit func(name string, r io.Reader) error) error {
	c := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", file)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return fmt.Errorf("dpkg-deb (package dpkg): %w", err)
	}
	err = func() error {
		t := tar.NewReader(out)
		for {
			h, err := t.Next()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			if h.Typeflag == tar.TypeReg {
				if err := visit(strings.TrimPrefix(path.Clean(h.Name), "/"), t); err != nil {
					return err
				}
			}
		}
	}()
	if err != nil {
		_ = c.Process.Kill()
		_ = c.Wait()
		return fmt.Errorf("%s: %w", file, err)
	}
	if _, err := io.Copy(io.Discard, out); err != nil {
		return err
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("dpkg-deb %s: %w: %s", file, err, strings.TrimSpace(errs.String()))
	}
	return nil
}

// kernelIn is a kernel's place in the cache folder: another list of modules is another place.
func kernelIn(cache, release string) *kernel {
	dir := filepath.Join(cache, fmt.Sprintf("%s-%08x", release,
		crc32.ChecksumIEEE([]byte(strings.Join(wantedModules, " ")))))
	return &kernel{release: release, image: filepath.Join(dir, "vmlinuz"),
		modules: filepath.Join(dir, "modules")}
}

// fetchKernel finds, fetches and unpacks a kernel. Where apt has no lists, or cannot fetch what
// they name, the newest that the cache folder holds will do.
func fetchKernel(ctx context.Context, cache, series string) (*kernel, error) {
	name, err := kernelPackage(ctx, series)
	var file string
	if err == nil {
		k := kernelIn(cache, strings.TrimPrefix(name, "linux-image-"))
		if _, err := os.Stat(k.image); err == nil {
			return k, nil
		}
		file, err = deb(ctx, cache, name)
	}
	if file == "" {
		got, _ := filepath.Glob(filepath.Join(cache, "linux-image-"+series+"*-cloud-amd64_*.deb"))
		if len(got) == 0 || ctx.Err() != nil {
			return nil,
				fmt.Errorf("no kernel for the guest: %w (\"apt-get update\" refreshes apt's lists)",
					err)
		}
		file = slices.MaxFunc(got, byNumbers)
		name, _, _ = strings.Cut(filepath.Base(file), "_")
	}
	k := kernelIn(cache, strings.TrimPrefix(name, "linux-image-"))
	if _, err := os.Stat(k.image); err == nil {
		return k, nil
	}
	dir := filepath.Dir(k.image)
	tmp, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	root := "lib/modules/" + k.release + "/"
	all := map[string][]byte{} // by path below root
	var image []byte
	err = unpack(ctx, file, func(name string, r io.Reader) (err error) {
		name = strings.TrimPrefix(name, "usr/")
		switch {
		case name == "boot/vmlinuz-"+k.release:
			image, err = io.ReadAll(r)
		case strings.HasPrefix(name, root) && (strings.Contains(name, ".ko") ||
			strings.Contains(name, "/modules.")):
			all[strings.TrimPrefix(name, root)], err = io.ReadAll(r)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if image == nil {
		return nil, fmt.Errorf("%s holds no boot/vmlinuz-%s", file, k.release)
	}
	files, err := chooseModules(ctx, all)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for p, b := range files {
		to := filepath.Join(tmp, "modules", p)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(to, b, 0o644); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, "vmlinuz"), image, 0o644); err != nil {
		return nil, err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return nil, err
	}
	return k, nil
}

func moduleName(p string) string {
	n, _, _ := strings.Cut(path.Base(p), ".ko")
	return strings.ReplaceAll(n, "-", "_")
}

// chooseModules picks wantedModules and their dependencies, unpacks what is compressed, and writes
// the lists that modprobe reads.
func chooseModules(ctx context.Context, all map[string][]byte) (map[string][]byte, error) {
	byName := map[string]string{}
	for p := range all {
		if strings.Contains(path.Base(p), ".ko") {
			byName[moduleName(p)] = p
		}
	}
	out := map[string][]byte{}
	paths, deps := map[string]string{}, map[string][]string{}
	var add func(name string) error
	add = func(name string) error {
		p, ok := byName[name]
		if _, done := paths[name]; done || !ok {
			return nil // built in, or not of this kernel: modprobe says so
		}
		b := all[p]
		if strings.HasSuffix(p, ".xz") {
			c := exec.CommandContext(ctx, "xz", "-dc")
			c.Stdin = bytes.NewReader(b)
			var err error
			if b, err = c.Output(); err != nil {
				return fmt.Errorf("%s: xz (package xz-utils): %w", p, err)
			}
			p = strings.TrimSuffix(p, ".xz")
		}
		out[p], paths[name] = b, p
		d, err := moduleDeps(b)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		deps[name] = d
		for _, n := range d {
			if err := add(n); err != nil {
				return err
			}
		}
		return nil
	}
	for _, n := range wantedModules {
		if err := add(strings.ReplaceAll(n, "-", "_")); err != nil {
			return nil, err
		}
	}
	for _, n := range []string{"vfio", "vfio_pci", "vfio_iommu_type1", "md_mod", "dm_mod"} {
		if paths[n] == "" {
			return nil, fmt.Errorf("no module %s", n)
		}
	}
	out["modules.dep"] = modulesDep(paths, deps)
	for _, n := range []string{"modules.builtin", "modules.order", "modules.builtin.modinfo"} {
		if b, ok := all[n]; ok {
			out[n] = b
		}
	}
	out["modules.alias"], out["modules.symbols"] = nil, nil
	return out, nil
}

// modulesDep lists, as depmod does, each module with everything that it needs, the nearest first.
func modulesDep(paths map[string]string, deps map[string][]string) []byte {
	var names []string
	for n := range paths {
		names = append(names, n)
	}
	slices.Sort(names)
	var out []byte
	for _, n := range names {
		out = append(out, paths[n]+":"...)
		seen := map[string]bool{n: true}
		for todo := deps[n]; len(todo) > 0; {
			d := todo[0]
			todo = append(slices.Clone(todo[1:]), deps[d]...)
			if p := paths[d]; p != "" && !seen[d] {
				seen[d] = true
				out = append(out, " "+p...)
			}
		}
		out = append(out, '\n')
	}
	return out
}

// moduleDeps reads "depends=a,b" of a module's .modinfo section.
func moduleDeps(b []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no .modinfo section")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	for _, kv := range strings.Split(string(info), "\x00") {
		if list, ok := strings.CutPrefix(kv, "depends="); ok && list != "" {
			return strings.Split(strings.ReplaceAll(list, "-", "_"), ","), nil
		}
	}
	return nil, nil
}

// fetchBusybox gives the path of a static busybox.
func fetchBusybox(ctx context.Context, cache string) (string, error) {
	to := filepath.Join(cache, "busybox")
	if _, err := os.Stat(to); err == nil {
		return to, nil
	}
	file, err := deb(ctx, cache, "busybox-static")
	if err != nil {
		return "", err
	}
	var b []byte
	err = unpack(ctx, file, func(name string, r io.Reader) (err error) {
		if strings.TrimPrefix(name, "usr/") == "bin/busybox" {
			b, err = io.ReadAll(r)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	if b == nil {
		return "", fmt.Errorf("%s holds no bin/busybox", file)
	}
	if err := os.WriteFile(to+".part", b, 0o755); err != nil {
		return "", err
	}
	return to, os.Rename(to+".part", to)
}
