package main

import (
	"bytes"
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

	"golang.org/x/sync/errgroup"

	"helios/cuda/kernels"
	"helios/tools/internal/ptxas"
)

// noSpills are the kernels on the data path, whose registers must all fit.
var noSpills = []string{"submit", "coalesce", "complete", "read_sync", "lookup", "gather",
	"check_rows"}

var errNoPtxas = errors.New("ptxas is not there (pip download nvidia-cuda-nvcc-cu12, or --ptxas)")

func findPtxas(asked string) (string, error) {
	if asked == "" {
		asked = "ptxas"
	}
	p, err := exec.LookPath(asked)
	if err != nil {
		return "", errNoPtxas
	}
	return p, nil
}

// assembleAll runs ptxas over all modules and architectures and returns the table and the cubins.
func assembleAll(o options, modules []module) ([]byte, *machineCode, error) {
	tool, err := findPtxas(o.ptxas)
	if err != nil {
		return nil, nil, err
	}
	version, err := execute("", tool, "--version")
	if err != nil {
		return nil, nil, err
	}
	v := regexp.MustCompile(`V(\d+\.\d+\.\d+)`).FindSubmatch(version)
	if v == nil {
		return nil, nil, fmt.Errorf("%s --version names no version: %s", tool, version)
	}
	dir, err := os.MkdirTemp("", "helios-ptxas-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	reports := make([][]ptxas.Usage, len(modules)*len(kernels.CubinArchs))
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for i, m := range modules {
		if err := os.WriteFile(filepath.Join(dir, m.name+".ptx"), m.ptx, 0o666); err != nil {
			return nil, nil, err
		}
		for j, arch := range kernels.CubinArchs {
			work.Go(func() (err error) {
				reports[i*len(kernels.CubinArchs)+j], err = assemble(tool, dir, m.name, arch)
				return err
			})
		}
	}
	if err := work.Wait(); err != nil {
		return nil, nil, err
	}
	code := &machineCode{string(v[1]), modules, map[string][]byte{}}
	var b bytes.Buffer
	fmt.Fprintf(&b, `# What each kernel takes

Made by "make kernels" (ptxas %s from the PTX in this folder's ptx/; do not edit). Registers are for
each thread, shared memory (bytes) for each block, stack and spills (bytes) for each thread. The
data-path kernels %s may not spill.

| module | kernel | architecture | registers | shared | stack | spill stores | spill loads | barriers |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
`, v[1], strings.Join(noSpills, ", "))
	for i, m := range modules {
		var rows []ptxas.Usage
		for j, arch := range kernels.CubinArchs {
			rows = append(rows, reports[i*len(kernels.CubinArchs)+j]...)
			image, err := os.ReadFile(filepath.Join(dir, m.name+"."+arch+".cubin"))
			if err != nil {
				return nil, nil, err
			}
			code.cubins[kernels.CubinPath(arch, m.name)] = image
		}
		slices.SortStableFunc(rows,
			func(a, b ptxas.Usage) int { return strings.Compare(a.Kernel, b.Kernel) })
		for _, u := range rows {
			fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %d | %d | %d |\n",
				m.name, u.Kernel, u.Arch, u.Registers, u.Shared, u.Stack, u.SpillStores,
				u.SpillLoads, u.Barriers)
		}
	}
	b.WriteString(checksums(modules))
	return b.Bytes(), code, nil
}

// checksums say what the table is of.
func checksums(modules []module) string {
	s := "\nThis PTX gave the table:\n\n"
	for _, m := range modules {
		s += fmt.Sprintf("- %s.ptx sha256 %x\n", m.name, sha256.Sum256(m.ptx))
	}
	return s
}

// assemble runs ptxas once. Its report goes to standard error or output by version; warnings fail.
func assemble(tool, dir, name, arch string) ([]ptxas.Usage, error) {
	cmd := exec.Command(tool, "-v", "--warning-as-error", "-arch="+arch, name+".ptx", "-o",
		name+"."+arch+".cubin")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("ptxas -arch=%s %s.ptx: %w\n%s", arch, name, err, out)
	}
	us, err := parseReport(string(out))
	if err != nil {
		return nil, fmt.Errorf("ptxas -arch=%s %s.ptx: %w", arch, name, err)
	}
	return us, nil
}

// parseReport reads ptxas's report and holds the data-path kernels to their rule.
func parseReport(text string) ([]ptxas.Usage, error) {
	out, err := ptxas.ParseReport(text)
	if err != nil {
		return nil, err
	}
	for _, u := range out {
		if slices.Contains(noSpills, u.Kernel) && u.SpillStores+u.SpillLoads > 0 {
			return nil,
				fmt.Errorf("kernel %s spills registers (%d bytes stored, %d loaded); it may not",
					u.Kernel, u.SpillStores, u.SpillLoads)
		}
	}
	return out, nil
}
