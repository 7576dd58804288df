package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/kernels"
	"helios/internal/errs"
	"helios/internal/iouring"
	"helios/internal/pci"
	"helios/internal/probe"
	"helios/internal/state"
	"helios/internal/units"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/proxy"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:        "doctor",
		Usage:       "say what this machine can do for heliosctl, what is missing and how to get it",
		Description: "Changes nothing. Each line has one of three answers: there, not there, could not tell; two lines of\nverdict follow. The exit code is 0 whatever is missing.",
		Action:      action(0, runDoctor),
	}
}

// doctorFinding is one line of the report.
type doctorFinding struct {
	Part string `json:"part"`
	probe.Finding
}

func runDoctor(ctx context.Context, e *env) error {
	var all []doctorFinding
	add := func(part string, fs ...probe.Finding) {
		for _, f := range fs {
			all = append(all, doctorFinding{part, f})
		}
	}
	add("host", hostFindings(ctx)...)
	add("vfio", vfio.Probe()...)
	add("nvme", nvmeFindings(e)...)
	add("ssds", boundFindings(ctx, e)...)
	report, err := driver.Probe(driver.Options{})
	add("cuda", driverFinding(report, err))
	if err == nil {
		for _, g := range report.GPUs {
			part := fmt.Sprintf("cuda:%d", g.Index)
			add(part, probe.Finding{Name: "GPU", Answer: probe.There,
				Detail: fmt.Sprintf("%s at %s: %d SMs, %s, compute capability %d.%d",
					g.Name, g.PCI, g.SMs, units.FormatBytes(g.MemTotal), g.ComputeCapability/10,
					g.ComputeCapability%10)})
			add(part, g.Findings...)
			add(part, kernelFindings(g.Index)...)
			add(part, wayFindings(e, g.PCI)...)
		}
	}
	var rows [][]string
	for _, f := range all {
		text := f.Detail
		if f.Next != "" {
			text = strings.TrimPrefix(text+"; needs: "+f.Next, "; ")
		}
		rows = append(rows, []string{f.Part, f.Name, f.Answer.String(), text})
		if err := e.ui.Event("finding", f); err != nil {
			return err
		}
	}
	e.ui.Table([]string{"part", "what", "answer", "detail"}, rows)
	can, missing := verdictOf(all)
	e.ui.Printf("You can %s.", can)
	e.ui.Printf("%s.", missing)
	return nil
}

// verdictOf puts the findings into two sentences: what this machine can do, and what it takes for
// the rest.
func verdictOf(all doctorFindings) (can, missing string) {
	var lacks []string
	lack := func(of, do string) {
		if do != "" {
			lacks = append(lacks, "for "+of+": "+do)
		}
	}
	gpu, software := all.there("cuda:", "kernels load"), all.there("host", "software SSDs")
	needed := needsOfVFIO(all)
	ssds := all.there("nvme", "") && all.there("vfio", vfio.NeedIOMMU) && needed == ""
	on, from := "", ""
	switch {
	case gpu:
		on = "a GPU"
	case all.there("host", "host device"):
		on = "this machine's CPU"
	}
	switch {
	case ssds:
		from = "NVMe SSDs by VFIO"
	case software:
		from = "files, disks or memory that play SSDs (bind-ssds --proxy)"
	}
	if !gpu {
		lack("a GPU", all.needs("cuda", ""))
	}
	if !ssds {
		lack("SSDs by VFIO", needed)
		if !all.there("nvme", "") {
			lack("an SSD of its own", all.needs("nvme", ""))
		}
	}
	if !software {
		lack("software SSDs", all.needs("host", "software SSDs"))
	}
	can = "train on " + on + " with features from " + from
	if on == "" || from == "" {
		can = "not train here, but see how a run would go on other machines: train --clock virtual"
	}
	if len(lacks) == 0 {
		return can, "Nothing is missing"
	}
	missing = strings.Join(lacks, "; ")
	return can, "F" + missing[1:]
}

type doctorFindings []doctorFinding

// there reports whether a part, or what its name begins with, has what is named; "": anything.
func (all doctorFindings) there(part, name string) bool {
	return slices.ContainsFunc(all, func(f doctorFinding) bool {
		return strings.HasPrefix(f.Part, part) && (name == "" || f.Name == name) &&
			f.Answer == probe.There
	})
}

// needs returns the next step, or else the detail, of a part's first finding that is not there.
func (all doctorFindings) needs(part, name string) string {
	for _, f := range all {
		if strings.HasPrefix(f.Part, part) && f.Answer != probe.There &&
			(name == "" || f.Name == name) {
			return cmp.Or(f.Next, f.Detail)
		}
	}
	return ""
}

// needsOfVFIO returns the next step of the first requirement of SSDs by VFIO that is not met, ""
// where all are. Interrupt remapping shows on some machines only at the bind.
func needsOfVFIO(all []doctorFinding) string {
	for _, name := range vfio.Needs {
		i := slices.IndexFunc(all,
			func(f doctorFinding) bool { return f.Part == "vfio" && f.Name == name })
		switch {
		case i < 0 || all[i].Answer == probe.There:
		case all[i].Answer == probe.Unknown && name == vfio.NeedRemapping:
		case all[i].Next != "":
			return all[i].Next
		default:
			return all[i].Detail
		}
	}
	return ""
}

// answer turns the error of trying something into an answer: a lack of class Capability is
// conclusive, anything else is not.
func answer(name string, err error, detail string) probe.Finding {
	switch {
	case err == nil:
		return probe.Finding{Name: name, Answer: probe.There, Detail: detail}
	case errs.ClassOf(err) == errs.Capability:
		return probe.Finding{Name: name, Answer: probe.NotThere,
			Detail: errs.Spell(err, errs.Key.Flag)}
	}
	return probe.Finding{Name: name, Answer: probe.Unknown, Detail: errs.Spell(err, errs.Key.Flag)}
}

// hostFindings are about the machine without a GPU.
func hostFindings(ctx context.Context) []probe.Finding {
	var out []probe.Finding
	name := ""
	h, err := cuda.NewHost(cuda.HostOptions{})
	if err == nil {
		i := h.Info()
		name = fmt.Sprintf("%s: %d worker slots, %s", i.Name, i.SMs, units.FormatBytes(i.MemTotal))
		err = h.Close()
	}
	out = append(out, answer("host device", err, name))

	r, err := iouring.New(iouring.Options{Entries: 8})
	if err == nil {
		err = r.Close()
	}
	f := answer("io_uring", err, "")
	if f.Answer == probe.NotThere {
		f.Next = "software SSDs and the cpu stack read with pread meanwhile"
	}
	out = append(out, f)

	return append(out, answer("software SSDs", trySSD(ctx),
		"files, block devices and memory as NVMe controllers"))
}

// nvmeFindings are the NVMe controllers of the machine and what each is good for.
// boundFindings say how the bound SSDs are that software plays, and what is on them.
func boundFindings(ctx context.Context, e *env) (out []probe.Finding) {
	st, err := e.store.Load()
	if err != nil {
		return []probe.Finding{answer("bound", err, "")}
	}
	for _, d := range st.SSDs {
		if d.Kind == state.KindVFIO { // nvmeFindings have it; to look at it would reset it
			continue
		}
		r, err := (&inspector{e}).inspect(ctx, d)
		if err != nil {
			out = append(out, answer(d.Name, err, ""))
			continue
		}
		f := probe.Finding{Name: d.Name, Answer: probe.There, Detail: r.Health + ", " + r.Content,
			Next: r.Next}
		if len(r.Damage) > 0 {
			f.Answer = probe.NotThere
		}
		out = append(out, f)
	}
	return out
}

func nvmeFindings(e *env) []probe.Finding {
	records, err := e.store.Machine().Records()
	if err != nil {
		return []probe.Finding{answer("records", err, "")}
	}
	all, err := e.machine.controllers(records)
	if err != nil {
		return []probe.Finding{answer("controllers", err, "")}
	}
	if len(all) == 0 {
		return []probe.Finding{{Name: "controllers", Answer: probe.NotThere,
			Detail: "no NVMe controller on the PCI bus",
			Next:   "an NVMe SSD; files and block devices can play one: \"heliosctl bind-ssds --proxy\""}}
	}
	var out []probe.Finding
	for i := range all {
		out = append(out, nvmeFinding(e, &all[i]))
	}
	return out
}

func nvmeFinding(e *env, c *controller) probe.Finding {
	text := []string{strings.TrimSpace(c.model() + " " + c.serial())}
	if n := c.bytes(); n > 0 {
		text = append(text, units.FormatBytes(n))
	}
	if d := c.disks(); len(d) > 0 {
		text = append(text, "/dev/"+strings.Join(d, ", /dev/"))
	}
	if c.Driver != "" {
		text = append(text, "driver "+c.Driver)
	} else {
		text = append(text, "no driver")
	}
	f := probe.Finding{Name: c.Addr, Answer: probe.There}
	switch r := c.Record; {
	case r != nil && r.Phase == state.Bound && c.Driver == vfioDriver:
		text = append(text, "bound as "+r.Name)
		node := e.machine.Sys.Path(r.Node)
		if err := unix.Access(node, unix.R_OK|unix.W_OK); errors.Is(err, unix.EACCES) &&
			!e.machine.Root() {
			f.Answer, f.Next = probe.NotThere, state.NotPermitted(node)
		}
	case r != nil:
		f.Answer, f.Next = probe.NotThere, r.NextStep()
		text = append(text, fmt.Sprintf("half bound as %s: %s was cut off", r.Name, r.Phase))
	case c.NoIOMMU:
		f.Answer, f.Next = probe.NotThere, e.machine.noIOMMU()
		text = append(text, "in a group of VFIO's mode without an IOMMU, which is not used")
	case c.Group < 0:
		f.Answer, f.Next = probe.NotThere, e.machine.noIOMMU()
		text = append(text, "in no IOMMU group, so it cannot be bound")
	default:
		text = append(text, useOf(e, c, &f)...)
	}
	f.Detail = strings.TrimPrefix(strings.Join(text, "; "), "; ")
	return f
}

// useOf finds out whether a controller that we do not have could be bound.
func useOf(e *env, c *controller, f *probe.Finding) (text []string) {
	uses, err := e.machine.Seen(c.Addr)
	for _, u := range uses {
		text = append(text, u.String())
	}
	text = append(text, c.Others...)
	why := e.machine.unfit(c)
	switch {
	case why != "":
		f.Answer, f.Next = probe.NotThere, "an SSD that can be used"
		return append(text, why)
	case err != nil:
		f.Answer = probe.Unknown
		return append(text, "whether it is free needs root to see")
	case len(uses)+len(c.Others) > 0:
		f.Answer, f.Next = probe.NotThere, "an SSD that nobody uses"
		return text
	case c.Driver == vfioDriver:
		f.Answer, f.Next = probe.Unknown, strayNext(c.Addr)
		return append(text, strayText)
	}
	return append(text, fmt.Sprintf("free, IOMMU group %d: \"sudo heliosctl bind-ssds %s\" takes it",
		c.Group, c.Addr))
}

// trySSD brings a software controller up on a small file, which it removes again.
func trySSD(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "heliosctl-doctor-*")
	if err != nil {
		return err
	}
	defer closing(&err, func() error { return os.RemoveAll(dir) })
	const size = 1 << 20
	path := filepath.Join(dir, "ssd")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		return err
	}
	bus, err := proxy.Open(proxy.Config{Name: "doctor", Path: path, Bytes: size, LBABytes: 512,
		Buffered: true})
	if err != nil {
		return err
	}
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		return errors.Join(err, bus.Close())
	}
	return c.Close(ctx)
}

func driverFinding(r driver.Report, err error) probe.Finding {
	if err != nil {
		return answer("driver", err, "")
	}
	detail := fmt.Sprintf("%s, CUDA %s, %d devices", r.Library, r.CUDA, len(r.GPUs))
	if len(r.Symbols) > 0 {
		detail += "; it lacks " + strings.Join(r.Symbols, ", ")
	}
	return probe.Finding{Name: "driver", Answer: probe.There, Detail: detail}
}

// kernelFindings opens a GPU and loads every kernel of this binary.
func kernelFindings(index int) []probe.Finding {
	dev, err := driver.Open(driver.Options{Index: index})
	if err != nil {
		return []probe.Finding{answer("context", err, "")}
	}
	list, err := kernels.List()
	for _, k := range list {
		if err == nil {
			_, err = dev.Kernel(k.Name)
		}
	}
	c := dev.Capabilities()
	detail := fmt.Sprintf("%d kernels from %s; %d stream priorities", len(list), dev.Info().Code,
		c.Priorities)
	if c.SMGranularity > 0 {
		detail += fmt.Sprintf("; budgets in steps of %d SMs", c.SMGranularity)
	}
	peer := peerFinding(dev)
	f := answer("kernels load", err, detail)
	if cerr := dev.Close(); cerr != nil && err == nil {
		f = answer("kernels load", cerr, "")
	}
	return []probe.Finding{f, peer}
}

// peerFinding maps a little of a GPU's memory as rung p2p does for SSDs, and compares what the CPU
// stores there with what the GPU has.
func peerFinding(dev *driver.Device) (f probe.Finding) {
	f.Name, f.Next = "memory for SSDs' DMA", "without it SSDs read into pinned CPU memory"
	var why []string
	for _, m := range dev.PeerMethods() {
		err := m.Err
		if err == nil {
			err = tryPeer(dev, m.Name)
		}
		if err == nil {
			f.Answer, f.Next = probe.There, ""
			f.Detail = "mapped by " + m.Name +
				"; that an SSD reaches it a run proves (--memory-rung p2p)"
			return f
		}
		if errs.ClassOf(err) == errs.Capability {
			f.Answer = probe.NotThere
		}
		why = append(why, m.Name+": "+err.Error())
	}
	f.Detail = strings.Join(why, "; ")
	return f
}

// tryPeer maps memory of a GPU by one of its ways.
func tryPeer(dev *driver.Device, method string) (err error) {
	const size = 64 << 10
	b, err := dev.Alloc(cuda.MemDevice, size, "doctor")
	if err != nil {
		return err
	}
	defer closing(&err, b.Free)
	back, err := dev.Alloc(cuda.MemPinned, size, "doctor")
	if err != nil {
		return err
	}
	defer closing(&err, back.Free)
	m, err := dev.MapPeer(b, method)
	if err != nil {
		return err
	}
	defer closing(&err, m.Close)
	s, err := dev.NewStream(cuda.StreamOptions{Name: "doctor"})
	if err != nil {
		return err
	}
	defer closing(&err, s.Close)
	mem := m.Bytes()
	for i := range mem {
		mem[i] = byte(i*7 + i>>8)
	}
	if err := s.Copy(back.Ptr(), b.Ptr(), size); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	if !bytes.Equal(mem, back.Bytes()) {
		return errs.New(errs.Capability,
			"what the CPU stores in the mapping is not what the GPU has")
	}
	return nil
}

// wayFindings are about the ways between a GPU and the SSDs.
func wayFindings(e *env, gpu string) []probe.Finding {
	ssds, err := e.machine.Sys.Devices(pci.NVMeClass)
	if err != nil || len(ssds) == 0 {
		return nil
	}
	f := probe.Finding{Name: "way from SSDs"}
	best := pci.BetweenHostBridges
	var text []string
	for _, d := range ssds {
		w, err := e.machine.Sys.Way(gpu, d.Addr)
		if err != nil {
			f.Detail = err.Error()
			return []probe.Finding{f}
		}
		best = min(best, w)
		text = append(text, fmt.Sprintf("%s %s", d.Addr, w))
	}
	f.Detail = strings.Join(text, ", ")
	if best < pci.BetweenHostBridges {
		f.Answer = probe.There
	} else {
		f.Next = "direct reads into its memory may not pass, or slowly: an SSD at the GPU's own processor"
	}
	return []probe.Finding{f}
}
