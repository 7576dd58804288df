// Package kernels holds the CUDA C++ kernels of Helios and the PTX that they compile to, so that
// one binary without a CUDA toolkit carries all device code.
//
// A module is one .cu file. Its PTX is committed under ptx and made anew by tools/kernels; a test
// compares. A kernel's parameters are read from the PTX itself: parameter 0 is the caller's block
// of plain data, parameter 1 the hx_launch of device.h.
package kernels

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// LaunchBytes is the size of hx_launch (device.h), the second parameter of every kernel.
const LaunchBytes = 16

// Kernel is one entry point of a module.
type Kernel struct {
	Name       string
	Module     string // the .cu file without its ending
	ParamBytes int    // of the caller's block, the first parameter
}

// Module is one compiled .cu file.
type Module struct {
	Name    string
	PTX     string   // text, without a final NUL
	ISA     int      // the PTX version times 10: 83 is 8.3
	SM      int      // the lowest compute capability that loads it, times 10: 70 is sm_70
	Kernels []Kernel // in the order of the file
}

// catalogue is all that the binary carries.
type catalogue struct {
	modules []Module // by name
	kernels []Kernel // by name
}

var load = sync.OnceValues(func() (catalogue, error) {
	var c catalogue
	files, err := ptx.ReadDir("ptx")
	if err != nil {
		return c, fmt.Errorf("embedded PTX: %w", err)
	}
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".ptx")
		if !ok {
			continue
		}
		text, err := ptx.ReadFile("ptx/" + f.Name())
		if err != nil {
			return c, fmt.Errorf("embedded PTX: %w", err)
		}
		m, err := ParsePTX(name, string(text))
		if err != nil {
			return c, err
		}
		c.modules = append(c.modules, m)
		c.kernels = append(c.kernels, m.Kernels...)
	}
	slices.SortFunc(c.kernels, func(a, b Kernel) int { return strings.Compare(a.Name, b.Name) })
	for i := 1; i < len(c.kernels); i++ {
		if c.kernels[i].Name == c.kernels[i-1].Name {
			return c, fmt.Errorf("kernel %s is in modules %s and %s", c.kernels[i].Name,
				c.kernels[i-1].Module, c.kernels[i].Module)
		}
	}
	return c, nil
})

// Modules returns every module, by name.
func Modules() ([]Module, error) {
	c, err := load()
	return slices.Clone(c.modules), err
}

// List returns every kernel, by name.
func List() ([]Kernel, error) {
	c, err := load()
	return slices.Clone(c.kernels), err
}

// ParsePTX reads what the driver needs to know of a module: version, target and, for each .entry,
// the size of its parameters. Every kernel must take one block and hx_launch.
func ParsePTX(module, text string) (Module, error) {
	m := Module{Name: module, PTX: text}
	bad := func(format string, a ...any) (Module, error) {
		return Module{}, fmt.Errorf("PTX of module "+module+": "+format, a...)
	}
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); i++ {
		line, _, _ := strings.Cut(lines[i], "//")
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, ".version "):
			major, minor, _ := strings.Cut(strings.TrimPrefix(line, ".version "), ".")
			a, err1 := strconv.Atoi(major)
			b, err2 := strconv.Atoi(minor)
			if err1 != nil || err2 != nil {
				return bad("line %d: %q is no version", i+1, line)
			}
			m.ISA = 10*a + b
		case strings.HasPrefix(line, ".target "):
			arch, _, _ := strings.Cut(strings.TrimPrefix(line, ".target "), ",")
			n, err := strconv.Atoi(strings.TrimPrefix(arch, "sm_"))
			if err != nil {
				return bad("line %d: %q is no plain target", i+1, line)
			}
			m.SM = n
		case strings.Contains(line, ".entry "):
			_, head, _ := strings.Cut(line, ".entry ")
			for !strings.Contains(head, ")") && i+1 < len(lines) {
				i++
				l, _, _ := strings.Cut(lines[i], "//")
				head += " " + strings.TrimSpace(l)
			}
			name, bytes, err := parseEntry(head)
			if err != nil {
				return bad("line %d: %w", i+1, err)
			}
			m.Kernels = append(m.Kernels, Kernel{name, module, bytes})
		}
	}
	if m.ISA == 0 || m.SM == 0 {
		return bad("no .version or no .target")
	}
	if len(m.Kernels) == 0 {
		return bad("no .entry")
	}
	return m, nil
}

// parseEntry returns the name of an .entry and the size of its block of parameters.
func parseEntry(head string) (name string, bytes int, err error) {
	name, rest, ok1 := strings.Cut(head, "(")
	list, _, ok2 := strings.Cut(rest, ")")
	if !ok1 || !ok2 {
		return "", 0, errors.New("no parameter list after .entry")
	}
	name = strings.TrimSpace(name)
	var sizes []int
	for p := range strings.SplitSeq(list, ",") {
		n, err := paramBytes(strings.Fields(p))
		if err != nil {
			return "", 0, fmt.Errorf("entry %s: %w", name, err)
		}
		sizes = append(sizes, n)
	}
	if len(sizes) != 2 || sizes[1] != LaunchBytes {
		return "", 0, fmt.Errorf(
			"entry %s takes parameters of %v bytes, not one block and hx_launch (%d)", name, sizes,
			LaunchBytes)
	}
	return name, sizes[0], nil
}

// paramBytes is the size of ".param .align 8 .b8 name[40]" or ".param .u64 name".
func paramBytes(words []string) (int, error) {
	if len(words) < 3 || words[0] != ".param" {
		return 0, fmt.Errorf("%q is no parameter", strings.Join(words, " "))
	}
	unit, count := 0, 1
	for i := 1; i < len(words)-1; i++ {
		w := words[i]
		if w == ".align" {
			i++
			continue
		}
		if len(w) > 2 && strings.Contains("busf", w[1:2]) {
			bits, err := strconv.Atoi(w[2:])
			if err == nil {
				unit = bits / 8
			}
		}
	}
	last := words[len(words)-1]
	if _, n, ok := strings.Cut(last, "["); ok {
		var err error
		if count, err = strconv.Atoi(strings.TrimSuffix(n, "]")); err != nil {
			return 0, fmt.Errorf("%q has no plain size", last)
		}
	}
	if unit*count == 0 {
		return 0, fmt.Errorf("%q has no size", strings.Join(words, " "))
	}
	return unit * count, nil
}
