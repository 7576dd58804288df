// Package iosim plays the I/O stacks of gpuio on a virtual clock: the same queue protocol, with the
// times of a hardware profile and the SSD models instead of a machine. It answers what a dozen SSDs
// and a GPU would do on a computer that has neither. All it says is modelled, never measured.
//
// What is played: for async, the submit and complete kernels with their warps, the queue pairs that
// each owns, CIDs, pending lists, sweeps of 32 completions, refills and doorbells; for sync,
// resident warps with one read each and the two locks of a queue pair; for cpu and mmap, threads
// and their time per read, and the copy to the GPU. Then the SSD model, the SSD's link and the
// GPU's, which all SSDs share. A run is a function of its configuration and seed.
//
// What is not: errors, retries and recovery; rows that share a command (the caller counts
// commands); arbitration between the queues of one SSD, which takes commands as their doorbells
// arrive; the traffic of warps that poll and find nothing.
package iosim

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"helios/gpuio"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
)

// Machine is the hardware that stacks and other work share.
type Machine struct {
	Sim     *des.Sim
	Profile *hardware.Profile
	// Ingress is the link into the GPU: raw bytes, packets included (hardware.Link.WireBytes).
	Ingress *des.Link
	HostMem *des.Link // the CPU's memory
	SMs     *des.Pool
	CPU     *des.Pool // cores

	models []*ssdmodel.Model // of each SSD
	links  []*des.Link       // out of each SSD
	slots  *des.Pool         // warps that run at once; nil: all that are resident
}

// MaxSSDs bounds a machine.
const MaxSSDs = hardware.MaxSSDs

// NewMachine makes a profile's machine with so many SSDs; 0: as many as the profile has.
func NewMachine(sim *des.Sim, p *hardware.Profile, ssds int) (*Machine, error) {
	if ssds < 0 || ssds > MaxSSDs {
		return nil, errs.New(errs.Usage, "a modelled machine with %d SSDs: choose 1 to %d", ssds,
			MaxSSDs)
	}
	m := &Machine{
		Sim: sim, Profile: p,
		Ingress: des.NewLink(sim, p.PCIe.GPU.RawGBs.Value*1e9, 0),
		HostMem: des.NewLink(sim, p.CPU.MemoryGBs.Value*1e9, 0),
		SMs:     des.NewPool(sim, p.GPU.SMs.Int()),
		CPU:     des.NewPool(sim, p.CPU.Cores.Int()),
	}
	loaded := map[string]*ssdmodel.Model{}
	for _, name := range p.SSDs.Models(ssds) {
		model := loaded[name]
		if model == nil && p.SSDs.Measured != nil {
			model = p.SSDs.Measured
		}
		if model == nil {
			var err error
			if model, err = ssdmodel.Load(name); err != nil {
				return nil, err
			}
			loaded[name] = model
		}
		m.models = append(m.models, model)
		m.links = append(m.links, des.NewLink(sim, p.PCIe.SSD.RawGBs.Value*1e9, 0))
	}
	if n := p.GPU.WarpSlots.Int(); n > 0 {
		m.slots = des.NewPool(sim, n)
	}
	return m, nil
}

// SSDs is the number of SSDs.
func (m *Machine) SSDs() int { return len(m.links) }

// Model is the first SSD's model.
func (m *Machine) Model() *ssdmodel.Model { return m.models[0] }

// Models are the models of the SSDs, one an SSD.
func (m *Machine) Models() []*ssdmodel.Model { return m.models }

// ModelName names the SSDs: their model, or the number of each.
func (m *Machine) ModelName() string {
	count := map[string]int{}
	var names []string
	for _, x := range m.models {
		if count[x.Name]++; count[x.Name] == 1 {
			names = append(names, x.Name)
		}
	}
	if len(names) == 1 {
		return names[0]
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", count[name], name)
	}
	return strings.Join(names, " + ")
}

// LBABytes is the block size that rows are laid out in: the smallest that all SSDs can be
// formatted with.
func (m *Machine) LBABytes() (int, error) {
	for _, lba := range []int{512, 4096} {
		if !slices.ContainsFunc(m.models,
			func(x *ssdmodel.Model) bool { return !x.LBAOK(lba) }) {
			return lba, nil
		}
	}
	return 0, errs.New(errs.Usage,
		"the SSDs of hardware profile %s (%s) have no block size in common; choose others",
		m.Profile.Name, m.ModelName())
}

// UseModel replaces the SSD models of the profile, before the first stack is made.
func (m *Machine) UseModel(model *ssdmodel.Model) {
	for i := range m.models {
		m.models[i] = model
	}
}

// Copy moves bytes from the CPU's memory to the GPU's with the copy engine and then calls done.
func (m *Machine) Copy(bytes int64, done func()) {
	p := &m.Profile.PCIe
	m.Sim.After(p.CopyNS.NS(), func() { m.stream(bytes, p.CopyGBs.Value, done) })
}

// piece is the bytes that a long transfer sends together. SSDs' data goes in between, as through a
// root complex that serves its ports in turn: with a dozen SSDs that have all the reads out that
// they may (some 11 MB behind the link), a transfer gets about a twelfth of the link.
const piece = 1 << 20

// stream moves bytes from the CPU's memory into the GPU, at gbs at most, piece by piece.
func (m *Machine) stream(bytes int64, gbs float64, done func()) {
	n := min(bytes, piece)
	m.HostMem.Send(n)
	wire := max(m.Profile.PCIe.GPU.WireBytes(n),
		int64(float64(n)*m.Profile.PCIe.GPU.RawGBs.Value/gbs))
	m.Sim.At(m.Ingress.Send(wire), func() {
		if bytes -= n; bytes > 0 {
			m.stream(bytes, gbs, done)
			return
		}
		done()
	})
}

// IngressBound is the most reads of so many bytes a second that the GPU's link takes, completion
// entries included.
func (m *Machine) IngressBound(bytes int64) float64 {
	l := &m.Profile.PCIe.GPU
	return l.RawGBs.Value * 1e9 / float64(l.WireBytes(bytes)+m.cqeWire())
}

// cqeWire is the traffic of a completion entry, which is written where the queue is.
func (m *Machine) cqeWire() int64 { return m.Profile.PCIe.GPU.WireBytes(16) }

// BoundOf is the most reads of so many bytes a second of SSD i.
func (m *Machine) BoundOf(i int, bytes int64) float64 {
	l := &m.Profile.PCIe.SSD
	return min(m.models[i].Peak(ssdmodel.Read, bytes),
		l.RawGBs.Value*1e9/float64(l.WireBytes(bytes)))
}

// Speed returns the modelled speed of all SSDs together, as gpuio.Stack.SpeedBy wants it. Software
// SSDs count as files where the profile has measurements of them, and else as played.
func (m *Machine) Speed(stack *gpuio.Stack, l gpuio.Layout) (gpuio.Speed, error) {
	kind := gpuio.Hardware
	if s := m.Profile.GPU.IO.Serve; m.Profile.SSDs.Measured != nil {
		kind = gpuio.Files
	} else if s.StateWays+s.MemoryWays+s.NS > 0 {
		kind = gpuio.Played
	}
	return stack.SpeedBy(l, kind, func(l gpuio.Layout, _ bool) (float64, error) {
		return m.Bound(int64(l.ReadBytes())), nil
	})
}

// SSDBound is the most reads of so many bytes a second of one SSD: of the slowest, as each gets as
// many rows as any other.
func (m *Machine) SSDBound(bytes int64) float64 {
	bound := math.Inf(1)
	for i := range m.models {
		bound = min(bound, m.BoundOf(i, bytes))
	}
	return bound
}

// Bound is the most reads of so many bytes a second of the machine: its SSDs, or the GPU's link.
func (m *Machine) Bound(bytes int64) float64 {
	return min(m.SSDBound(bytes)*float64(m.SSDs()), m.IngressBound(bytes))
}
