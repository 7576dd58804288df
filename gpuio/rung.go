package gpuio

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// The memory ladder: where queues and data live, and who rings the doorbells, when kernels of a GPU
// drive the SSDs. The best rung that a proof on these very SSDs bears out is taken (rungprove.go):
//
//	p2p             SQ, CQ, PRP lists, staging slots and destinations are in the device's memory, which the SSDs reach
//	                through a mapping of it. Kernels ring.
//	pinned          all of it is in locked CPU memory that the SSDs reach by the IOMMU and kernels by UVA. Kernels ring, by
//	                a registration of the doorbells' BAR. Destinations in the device's memory are reached by a copy.
//	pinned-cpubell  as pinned, but kernels ring bells in locked memory and a CPU thread hands them on (rungbell.go).
//	proxy           as pinned, and the controllers are software, which looks at its doorbells.
//
// A CQ and the data that it announces are on the same side of PCIe on every rung: PCIe orders
// writes to one destination only. So on p2p a destination in CPU memory gets its rows by a copy,
// and on the others one in device memory does.

// Rung is a step of the ladder.
type Rung uint8

// The rungs, the best first; rungRules describes what each is.
const (
	RungP2P Rung = iota
	RungPinned
	RungPinnedCPUBell
	RungProxy
	rungMixed // host device: some SSDs are software
)

// rungRule holds what sets a rung apart: its name, the memory, the doorbells, and the SSDs that it
// is for.
type rungRule struct {
	name    string
	peer    bool // queues and data are in the device's memory, mapped for the SSDs
	cpuBell bool // kernels ring bells in locked memory, and a CPU thread hands them on
	// refuses explains why SSDs, so many of them software, cannot be on the rung; nil: they can.
	refuses func(ssds, soft int) error
}

// rungRules is the ladder. A new rung is a constant and an entry here; what has a mechanism of its
// own brings it in a file (rungmem.go, rungbell.go).
var rungRules = [...]rungRule{
	RungP2P: {name: "p2p", peer: true, refuses: func(ssds, soft int) error {
		if soft > 0 && soft < ssds {
			return fmt.Errorf(
				"%d of %d SSDs are software controllers, which work in the CPU's memory",
				soft, ssds)
		}
		return refuseSoftware(ssds, soft)
	}},
	RungPinned:        {name: "pinned", refuses: refuseSoftware},
	RungPinnedCPUBell: {name: "pinned-cpubell", cpuBell: true, refuses: refuseSoftware},
	RungProxy: {name: "proxy", refuses: func(ssds, soft int) error {
		if soft < ssds {
			return errors.New("the SSDs are no software controllers")
		}
		return nil
	}},
	rungMixed: {name: "mixed"},
}

// refuseSoftware is the rule of rungs that need an SSD of hardware.
func refuseSoftware(ssds, soft int) error {
	if soft == ssds {
		return errors.New(
			"the SSDs are software controllers, which work in the CPU's memory and look at their doorbells there")
	}
	return nil
}

func (r Rung) rule() *rungRule { return &rungRules[r] }

// String gives the name that users know.
func (r Rung) String() string {
	if int(r) < len(rungRules) {
		return rungRules[r].name
	}
	return "unknown"
}

// RungAuto asks ChooseRung for the best rung that works.
const RungAuto = "auto"

// Rungs are the names that ChooseRung takes besides RungAuto, the best rung first.
func Rungs() []string {
	var names []string
	for _, r := range rungRules[:rungMixed] {
		names = append(names, r.name)
	}
	return names
}

// ParseRung finds a rung by its name.
func ParseRung(name string) (Rung, error) {
	for i, n := range Rungs() {
		if n == name {
			return Rung(i), nil
		}
	}
	return 0, errs.New(errs.Usage, "memory rung %q: choose %s or %s", name, RungAuto,
		strings.Join(Rungs(), ", "))
}

// RungTried is a rung that was not taken.
type RungTried struct {
	Rung string `json:"rung"`
	Why  string `json:"why"`
}

// RungReport shows where queues and data are, and why nowhere better.
type RungReport struct {
	Rung string `json:"rung"`
	// how device memory is mapped: a name of cuda.PeerMethod
	How   string      `json:"how,omitempty"`
	Tried []RungTried `json:"tried,omitempty"` // better rungs, the best first
}

// Memory is a rung that was chosen for a device and SSDs. It holds nothing open, and any number of
// readers may use it at a time.
type Memory struct {
	rung   Rung
	method string // of cuda.PeerMapper, on p2p
	tried  []RungTried
}

// Rung is the rung.
func (m *Memory) Rung() Rung { return m.rung }

// Report is the choice and its reasons.
func (m *Memory) Report() RungReport {
	return RungReport{Rung: m.rung.String(), How: m.method, Tried: m.tried}
}

// ChooseRung takes the best rung that works for kernels of dev and these SSDs, or the one that is
// wanted by name: an error of class Capability explains why that cannot be had. On the host device,
// whose kernels are Go functions, there is nothing to choose and nothing is proved.
func ChooseRung(dev cuda.Device, ssds []*SSD, want string) (*Memory, error) {
	if want != "" && want != RungAuto {
		if _, err := ParseRung(want); err != nil {
			return nil, err
		}
	}
	if len(ssds) == 0 {
		return nil, errs.New(errs.Usage, "memory ladder: no SSDs: bind some first")
	}
	soft := 0
	for s, d := range ssds {
		if d == nil || d.Ctrl == nil {
			return nil, errs.New(errs.Usage, "SSD %d has no controller: bind it first", s)
		}
		if software(d) {
			soft++
		}
	}
	if dev.Info().Backend == "host" {
		return hostRung(soft, len(ssds), want)
	}
	ctx, cancel := context.WithTimeout(context.Background(), proveLimit)
	defer cancel()
	p, err := newProver(ctx, dev, Distinct(ssds))
	if err != nil {
		return nil, fmt.Errorf("memory ladder: what the SSDs hold: %w", err)
	}
	var tried []RungTried
	for r := range rungMixed {
		if want != "" && want != RungAuto && want != r.String() {
			continue
		}
		m, err := p.try(ctx, r, soft)
		if err == nil {
			m.tried = tried
			return m, nil
		}
		if gone := alive(dev); gone != nil { // no rung's fault, and no other will do
			return nil, fmt.Errorf("memory rung %s: %w", r, gone)
		}
		if want == r.String() {
			return nil, errs.New(errs.Capability,
				"memory rung %s: %w; use %v %s for the best that works", r, err,
				errs.Key("memory-rung"), RungAuto)
		}
		tried = append(tried, RungTried{r.String(), err.Error()})
	}
	var all []string
	for _, t := range Together(tried) {
		all = append(all, t.Rung+": "+t.Why)
	}
	return nil, errs.New(errs.Capability,
		"no memory rung works for device %s and these SSDs; %s; use %v host", dev.Info().Name,
		strings.Join(all, "; "), errs.Key("device"))
}

// alive explains why a device does nothing any more, as after a lost context; nil for one that
// still works.
func alive(dev cuda.Device) error {
	b, err := dev.Alloc(cuda.MemPinned, 4096, "gpuio proof")
	if err != nil {
		if errs.ClassOf(err) == errs.Device {
			return err
		}
		return nil // short of memory
	}
	return b.Free()
}

// try proves a rung, of which soft SSDs are software.
func (p *prover) try(ctx context.Context, r Rung, soft int) (*Memory, error) {
	m := &Memory{rung: r}
	if err := r.rule().refuses(len(p.ssds), soft); err != nil {
		return nil, err
	}
	if !r.rule().peer {
		if err := p.prove(ctx, m); err != nil {
			return nil, err
		}
		return m, nil
	}
	d, ok := p.dev.(cuda.PeerMapper)
	if !ok {
		return nil, fmt.Errorf("the memory of device %s cannot be mapped for other devices",
			p.dev.Info().Name)
	}
	var why []string
	for _, way := range d.PeerMethods() {
		err := way.Err
		if err == nil {
			m.method = way.Name
			if err = p.prove(ctx, m); err == nil {
				return m, nil
			}
		}
		why = append(why, fmt.Sprintf("by %s: %v", way.Name, err))
	}
	if why == nil {
		why = []string{"the device knows no way to map its memory"}
	}
	return nil, errors.New(strings.Join(why, "; "))
}

// software reports whether an SSD's controller is played by the CPU: it may be kicked after a
// doorbell.
func software(d *SSD) bool {
	_, ok := nvme.As[nvme.Kicker](d.Ctrl.Bus())
	return ok
}

// hostRung shows where memory is on the host device.
func hostRung(soft, all int, want string) (*Memory, error) {
	m := &Memory{rung: rungMixed}
	switch soft {
	case all:
		m.rung = RungProxy
	case 0:
		m.rung = RungPinned
	}
	if want == "" || want == RungAuto || want == m.rung.String() {
		return m, nil
	}
	return nil, errs.New(errs.Capability,
		"memory rung %s: the host device has no memory but the CPU's, and its kernels ring by themselves: with these SSDs its rung is %s; use %v %s",
		want, m.rung, errs.Key("memory-rung"), RungAuto)
}

// Together is tried with the rungs that were not taken for one reason in one entry, by all their
// names, for people to read.
func Together(tried []RungTried) []RungTried {
	var out []RungTried
	for _, t := range tried {
		if i := slices.IndexFunc(out, func(o RungTried) bool { return o.Why == t.Why }); i >= 0 {
			out[i].Rung += ", " + t.Rung
		} else {
			out = append(out, t)
		}
	}
	for i, t := range out {
		if off := strings.LastIndex(t.Rung, ", "); off >= 0 {
			out[i].Rung = t.Rung[:off] + " or " + t.Rung[off+2:]
		}
	}
	return out
}
