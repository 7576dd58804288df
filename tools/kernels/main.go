// Command kernels makes the committed PTX and cubins of cuda/kernels and checks them.
//
//	bin/lab/kernels generate   compile each .cu; with ptxas, also cubins and the table of resources
//	bin/lab/kernels check      make everything anew and compare with what is committed
//	bin/lab/kernels ptxas      assemble the committed PTX and print the table
//
// The compiler is clang 19 (--clang, HELIOS_CLANG, or clang-19 in PATH); its output is the same
// bytes from any folder. Every opcode is looked up in ptx_opcodes.txt, since neither clang nor a
// machine without a GPU looks into inline assembly; order.go holds the PTX to rules of memory
// order. ptxas (--ptxas, HELIOS_PTXAS, or PATH) is optional unless --need-ptxas is given; the
// Python wheel of the CUDA compiler has it.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/cuda/kernels"
	"helios/tools/internal/repo"
)

// folder of the kernels, from the module's root.
const folder = "cuda/kernels"

// resources is the committed table, in folder.
const resources = "RESOURCES.md"

type options struct {
	root, clang, ptxas string
	needPtxas          bool
}

func main() {
	var o options
	fs := flag.NewFlagSet("kernels", flag.ExitOnError)
	fs.StringVar(&o.clang, "clang", os.Getenv("HELIOS_CLANG"), "clang++ or clang of version 19")
	fs.StringVar(&o.ptxas, "ptxas", os.Getenv("HELIOS_PTXAS"), "ptxas")
	fs.BoolVar(&o.needPtxas, "need-ptxas", false, "fail where ptxas is not there")
	fs.Usage = func() {
		fmt.Fprintln(fs.Output(), "usage: kernels generate|check|ptxas [flags]")
		fs.PrintDefaults()
	}
	if len(os.Args) < 2 || strings.HasPrefix(os.Args[1], "-") {
		fs.Usage()
		os.Exit(2)
	}
	verb := os.Args[1]
	_ = fs.Parse(os.Args[2:])
	if fs.NArg() > 0 {
		fs.Usage()
		os.Exit(2)
	}
	var err error
	if o.root, err = repo.Root(); err == nil {
		err = run(verb, o, os.Stdout)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "kernels %s: %v\n", verb, err)
		os.Exit(1)
	}
}

func run(verb string, o options, out io.Writer) error {
	dir := filepath.Join(o.root, folder)
	switch verb {
	case "generate":
		b, err := build(o, out)
		if err != nil {
			return err
		}
		return b.write(dir, out)
	case "check":
		b, err := build(o, out)
		if err != nil {
			return err
		}
		return b.compare(dir, out)
	case "ptxas":
		o.needPtxas = true
		modules, err := committed(dir)
		if err != nil {
			return err
		}
		table, _, err := assembleAll(o, modules)
		if err != nil {
			return err
		}
		_, err = out.Write(table)
		return err
	}
	return fmt.Errorf("no such verb; generate, check and ptxas are")
}

// module is one compiled .cu file.
type module struct {
	name string
	ptx  []byte
}

// built is everything that is committed.
type built struct {
	modules []module
	table   []byte       // of resources; nil without ptxas
	code    *machineCode // nil without ptxas
}

// build compiles, checks the opcodes and, where ptxas is there, assembles.
func build(o options, out io.Writer) (*built, error) {
	dir := filepath.Join(o.root, folder)
	clang, err := findClang(o.clang)
	if err != nil {
		return nil, err
	}
	t, err := readOpcodes()
	if err != nil {
		return nil, err
	}
	if err := checkAssembly(t, clang, dir); err != nil {
		return nil, err
	}
	sources, err := filepath.Glob(filepath.Join(dir, "*.cu"))
	if err != nil {
		return nil, err
	}
	slices.Sort(sources)
	b := &built{}
	for _, s := range sources {
		name := strings.TrimSuffix(filepath.Base(s), ".cu")
		ptx, err := compile(clang, dir, name)
		if err != nil {
			return nil, err
		}
		if err := t.checkModule(name, string(ptx)); err != nil {
			return nil, err
		}
		if err := checkOrder(name, string(ptx)); err != nil {
			return nil, err
		}
		b.modules = append(b.modules, module{name, ptx})
	}
	b.table, b.code, err = assembleAll(o, b.modules)
	if errors.Is(err, errNoPtxas) && !o.needPtxas {
		fmt.Fprintf(out, "%v; the cubins and the table of resources stay as they are\n", err)
		return b, nil
	}
	return b, err
}

// committed reads the PTX in the folder.
func committed(dir string) ([]module, error) {
	files, err := filepath.Glob(filepath.Join(dir, "ptx", "*.ptx"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var out []module
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		out = append(out, module{strings.TrimSuffix(filepath.Base(f), ".ptx"), text})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no PTX in %s; run \"make kernels\"", filepath.Join(dir, "ptx"))
	}
	return out, nil
}

// write puts changed files in place and removes PTX whose source is gone.
func (b *built) write(dir string, out io.Writer) error {
	changed := 0
	put := func(path string, text []byte) error {
		old, err := os.ReadFile(path)
		if err == nil && bytes.Equal(old, text) {
			return nil
		}
		changed++
		fmt.Fprintf(out, "wrote %s\n", filepath.Base(path))
		return os.WriteFile(path, text, 0o666)
	}
	if err := os.MkdirAll(filepath.Join(dir, "ptx"), 0o777); err != nil {
		return err
	}
	for _, m := range b.modules {
		if err := put(filepath.Join(dir, "ptx", m.name+".ptx"), m.ptx); err != nil {
			return err
		}
	}
	old, err := filepath.Glob(filepath.Join(dir, "ptx", "*.ptx"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if !b.has(strings.TrimSuffix(filepath.Base(f), ".ptx")) {
			changed++
			fmt.Fprintf(out, "removed %s\n", filepath.Base(f))
			if err := os.Remove(f); err != nil {
				return err
			}
		}
	}
	if b.table != nil {
		if err := put(filepath.Join(dir, resources), b.table); err != nil {
			return err
		}
		file, err := readArchive(dir)
		if err != nil {
			return err
		}
		if b.code.difference(file) != "" {
			if file, err = b.code.archive(); err != nil {
				return err
			}
			if err := put(filepath.Join(dir, kernels.CubinArchive), file); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(out, "%d modules; %d files changed\n", len(b.modules), changed)
	return nil
}

func (b *built) has(name string) bool {
	return slices.ContainsFunc(b.modules, func(m module) bool { return m.name == name })
}

// compare names the committed files that differ from what the sources give.
func (b *built) compare(dir string, out io.Writer) error {
	var bad []string
	same := func(path string, want []byte) error {
		got, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if !bytes.Equal(got, want) {
			bad = append(bad, fmt.Sprintf("%s/%s: %s", folder, path, firstDifference(got, want)))
		}
		return nil
	}
	for _, m := range b.modules {
		if err := same("ptx/"+m.name+".ptx", m.ptx); err != nil {
			return err
		}
	}
	old, err := filepath.Glob(filepath.Join(dir, "ptx", "*.ptx"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if !b.has(strings.TrimSuffix(filepath.Base(f), ".ptx")) {
			bad = append(bad, fmt.Sprintf("%s/ptx/%s: its .cu file is gone", folder,
				filepath.Base(f)))
		}
	}
	if b.table != nil {
		if err := same(resources, b.table); err != nil {
			return err
		}
		file, err := readArchive(dir)
		if err != nil {
			return err
		}
		if d := b.code.difference(file); d != "" {
			bad = append(bad, fmt.Sprintf("%s/%s: %s", folder, kernels.CubinArchive, d))
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf(
			"what is committed is not what the sources give; run \"make kernels\" and commit:\n  %s",
			strings.Join(bad, "\n  "))
	}
	with := ""
	if b.table != nil {
		with = fmt.Sprintf(", and the %d cubins and the table of resources are ptxas's",
			len(b.code.cubins))
	}
	fmt.Fprintf(out,
		"%d modules: the committed PTX is what the sources give, every opcode is known, every acquire has a use%s\n",
		len(b.modules), with)
	return nil
}

// firstDifference describes where two texts part.
func firstDifference(got, want []byte) string {
	if got == nil {
		return "is not there"
	}
	a, b := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("line %d is %q, should be %q", i+1, strings.TrimSpace(a[i]),
				strings.TrimSpace(b[i]))
		}
	}
	return fmt.Sprintf("has %d lines, should have %d", len(a), len(b))
}
