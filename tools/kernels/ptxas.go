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
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"helios/cuda/kernels"
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

// usage is what one kernel takes on one architecture.
type usage struct {
	kernel, arch                              string
	registers, spillStores, spillLoads, stack int
	shared, barriers                          int
}

// assembleAll runs ptxas over all modules and architectures and returns the table and the cubins.
func assembleAll(o options, modules []module) ([]byte, *machineCode, error) {
	ptxas, err := findPtxas(o.ptxas)
	if err != nil {
		return nil, nil, err
	}
	version, err := execute("", ptxas, "--version")
	if err != nil {
		return nil, nil, err
	}
	v := regexp.MustCompile(`V(\d+\.\d+\.\d+)`).FindSubmatch(version)
	if v == nil {
		return nil, nil, fmt.Errorf("%s --version names no version: %s", ptxas, version)
	}
	dir, err := os.MkdirTemp("", "helios-ptxas-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	reports := make([][]usage, len(modules)*len(kernels.CubinArchs))
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for i, m := range modules {
		if err := os.WriteFile(filepath.Join(dir, m.name+".ptx"), m.ptx, 0o666); err != nil {
			return nil, nil, err
		}
		for j, arch := range kernels.CubinArchs {
			work.Go(func() (err error) {
				reports[i*len(kernels.CubinArchs)+j], err = assemble(ptxas, dir, m.name, arch)
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
		var rows []usage
		for j, arch := range kernels.CubinArchs {
			rows = append(rows, reports[i*len(kernels.CubinArchs)+j]...)
			image, err := os.ReadFile(filepath.Join(dir, m.name+"."+arch+".cubin"))
			if err != nil {
				return nil, nil, err
			}
			code.cubins[kernels.CubinPath(arch, m.name)] = image
		}
		slices.SortStableFunc(rows,
			func(a, b usage) int { return strings.Compare(a.kernel, b.kernel) })
		for _, u := range rows {
			fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %d | %d | %d |\n",
				m.name, u.kernel, u.arch, u.registers, u.shared, u.stack, u.spillStores,
				u.spillLoads, u.barriers)
		}
	}
	b.WriteString(checksums(modules))
	return b.Bytes(), code, nil
}

// checksums say what the table is of.
func checksums(modules []module) string {
	s := "\nThe table is of this PTX:\n\n"
	for _, m := range modules {
		s += fmt.Sprintf("- %s.ptx sha256 %x\n", m.name, sha256.Sum256(m.ptx))
	}
	return s
}

// assemble runs ptxas once. Its report goes to standard error or output by version; warnings fail.
func assemble(ptxas, dir, name, arch string) ([]usage, error) {
	cmd := exec.Command(ptxas, "-v", "--warning-as-error", "-arch="+arch, name+".ptx", "-o",
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

var (
	compiling = regexp.MustCompile(`Compiling entry function '([^']+)' for '([^']+)'`)
	stackLine = regexp.MustCompile(
		`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers`)
	sharedUse = regexp.MustCompile(`(\d+) bytes smem`)
	barrier   = regexp.MustCompile(`used (\d+) barriers`)
)

// parseReport reads what ptxas -v prints.
func parseReport(text string) ([]usage, error) {
	var out []usage
	number := func(re *regexp.Regexp, line string, group int) int {
		m := re.FindStringSubmatch(line)
		if m == nil {
			return 0
		}
		n, _ := strconv.Atoi(m[group])
		return n
	}
	complete := true
	for line := range strings.SplitSeq(text, "\n") {
		if strings.Contains(strings.ToLower(line), "warning") {
			return nil, fmt.Errorf("%s", strings.TrimSpace(line))
		}
		if m := compiling.FindStringSubmatch(line); m != nil {
			if !complete {
				return nil, fmt.Errorf("no registers reported for %s", out[len(out)-1].kernel)
			}
			out = append(out, usage{kernel: m[1], arch: m[2]})
			complete = false
			continue
		}
		if len(out) == 0 || complete {
			continue
		}
		u := &out[len(out)-1]
		if stackLine.MatchString(line) {
			u.stack, u.spillStores, u.spillLoads = number(stackLine, line, 1),
				number(stackLine, line, 2), number(stackLine, line, 3)
		}
		if usedLine.MatchString(line) {
			u.registers, u.shared, u.barriers = number(usedLine, line, 1),
				number(sharedUse, line, 1), number(barrier, line, 1)
			complete = true
		}
	}
	if len(out) == 0 || !complete {
		return nil, fmt.Errorf("the report names no kernel, or none completely:\n%s", text)
	}
	for _, u := range out {
		if slices.Contains(noSpills, u.kernel) && u.spillStores+u.spillLoads > 0 {
			return nil,
				fmt.Errorf("kernel %s spills registers (%d bytes stored, %d loaded); it may not",
					u.kernel, u.spillStores, u.spillLoads)
		}
	}
	return out, nil
}
