package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sync/errgroup"

	"helios/cuda/kernels"
	"helios/internal/dl"
	"helios/tools/internal/ptxas"
)

// compileOne is the child process of a compilation: it opens a driver's compiler, which exports the
// calls of nvPTXCompiler.h, and writes the machine code to out. It prints the information log.
func compileOne(lib, file, arch, out string) error {
	h, err := dl.Open(lib)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text = append(text, 0)
	call := func(name string, args ...uintptr) error {
		fn, err := dl.Symbol(h, "nvPTXCompiler"+name)
		if err != nil {
			return err
		}
		if r, _, _ := purego.SyscallN(fn, args...); int32(r) != 0 {
			return fmt.Errorf("nvPTXCompiler%s: result %d", name, int32(r))
		}
		return nil
	}
	// The compiler keeps the texts: they lie in memory that does not move.
	var pins runtime.Pinner
	defer pins.Unpin()
	pin := func(b []byte) uintptr {
		pins.Pin(&b[0])
		return uintptr(unsafe.Pointer(&b[0]))
	}
	words := make([]uintptr, 4) // a handle, a size, two options
	pins.Pin(&words[0])
	pos := func(i int) uintptr { return uintptr(unsafe.Pointer(&words[i])) }
	get := func(what string) ([]byte, error) {
		if err := call("Get"+what+"Size", words[0], pos(1)); err != nil {
			return nil, err
		}
		b := make([]byte, words[1]+1)
		err := call("Get"+what, words[0], pin(b))
		return b[:words[1]], err
	}
	if err := call("Create", pos(0), uintptr(len(text)), pin(text)); err != nil {
		return err
	}
	words[2] = pin(append([]byte("--gpu-name="+arch), 0))
	words[3] = pin(append([]byte("--verbose"), 0))
	if err := call("Compile", words[0], 2, pos(2)); err != nil {
		said, _ := get("ErrorLog")
		return fmt.Errorf("%w: %s", err, bytes.Trim(said, "\x00"))
	}
	log, err := get("InfoLog")
	if err != nil {
		return err
	}
	image, err := get("CompiledProgram")
	if err != nil {
		return err
	}
	if err := os.WriteFile(out, image, 0o600); err != nil {
		return err
	}
	_, err = os.Stdout.Write(bytes.TrimRight(log, "\x00"))
	return err
}

// compiled is one module by one driver's compiler.
type compiled struct {
	driver, arch, module string
	usage                []ptxas.Usage
	cpu                  time.Duration
	err                  error
}

func (c *compiled) file(dir string) string {
	return filepath.Join(dir, c.driver+"-"+c.arch+"-"+c.module+".cubin")
}

// jitArchs are the architectures that the drivers compile for, in this order.
var jitArchs = []string{"sm_70", "sm_80", "sm_90"}

// jit compiles every module with each driver's compiler for sm_90, and for the others the modules
// of sassKernels, or all of them with -all.
func (r *run) jit(ctx context.Context) error {
	modules, err := kernels.Modules()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var jobs []*compiled
	late, left := 0, 0
	for _, l := range r.drivers {
		for _, arch := range jitArchs {
			for _, m := range modules {
				switch {
				case arch == "sm_70" && m.SM > 70:
					late++ // tensor cores that this GPU lacks
				case !r.all && arch != "sm_90" && !slices.Contains(sassKernels, m.Name):
					left++
				default:
					jobs = append(jobs, &compiled{driver: l.version, arch: arch, module: m.Name})
				}
			}
		}
	}
	if late > 0 {
		r.skip("jit", late, "modules for tensor cores of sm_80 do not compile for sm_70")
	}
	if left > 0 {
		r.skip("jit", left, "modules off the data path for sm_70 and sm_80; -all compiles them too")
	}
	for _, m := range modules {
		if err := os.WriteFile(filepath.Join(r.work, m.Name+".ptx"), []byte(m.PTX),
			0o600); err != nil {
			return err
		}
	}
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, j := range jobs {
		i := slices.IndexFunc(r.drivers, func(l driverLibs) bool { return l.version == j.driver })
		g.Go(func() error {
			var out, errs bytes.Buffer
			c := exec.CommandContext(ctx, self, compileVerb, r.drivers[i].jit,
				filepath.Join(r.work, j.module+".ptx"), j.arch, j.file(r.work))
			c.Stdout, c.Stderr = &out, &errs
			if j.err = c.Run(); j.err != nil {
				j.err = fmt.Errorf("%w: %s", j.err, strings.TrimSpace(errs.String()))
			} else {
				j.usage, j.err = ptxas.ParseReport(out.String())
			}
			if c.ProcessState != nil {
				j.cpu = c.ProcessState.UserTime() + c.ProcessState.SystemTime()
			}
			return ctx.Err()
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	want := map[string]int{}
	for _, m := range modules {
		want[m.Name] = len(m.Kernels)
	}
	type sum struct {
		modules, kernels, most int
		cpu                    time.Duration
		spills                 []string
	}
	sums := map[[2]string]*sum{}
	for _, j := range jobs {
		s := sums[[2]string{j.driver, j.arch}]
		if s == nil {
			s = &sum{}
			sums[[2]string{j.driver, j.arch}] = s
		}
		s.cpu += j.cpu
		r.check("jit", j.err == nil && len(j.usage) == want[j.module],
			"driver %s, %s, module %s: %d of %d kernels: %v", j.driver, j.arch, j.module,
			len(j.usage), want[j.module], j.err)
		if j.err != nil {
			continue
		}
		s.modules++
		for _, u := range j.usage {
			s.kernels++
			s.most = max(s.most, u.Registers)
			if u.SpillStores+u.SpillLoads > 0 {
				s.spills = append(s.spills, fmt.Sprintf("%s %d/%d", u.Kernel, u.SpillStores,
					u.SpillLoads))
			}
		}
	}
	t := r.table("jit", "driver", "architecture", "modules", "kernels", "most registers", "CPU s",
		"spills, bytes stored/loaded")
	for _, l := range r.drivers {
		for _, arch := range jitArchs {
			if s := sums[[2]string{l.version, arch}]; s != nil {
				t.row(l.version, arch, s.modules, s.kernels, s.most,
					fmt.Sprintf("%.1f", s.cpu.Seconds()), dash(strings.Join(s.spills, ", ")))
			}
		}
	}
	r.jobs = jobs
	return nil
}
