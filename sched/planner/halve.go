package planner

import (
	"context"
	"math"
	"slices"

	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/plan"
)

// Halving names the resource that would shorten an epoch most, and the change that would halve it.
type Halving struct {
	// Doubled has each resource doubled alone, what gains most first.
	Doubled []Doubled `json:"doubled"`
	// Steps double one resource after the other (or two at once, where one alone gains nothing),
	// each time what gains most, until the epoch takes half as long. Halved reports whether it
	// does.
	Steps  []Doubled `json:"steps"`
	Halved bool      `json:"halved"`
}

// Doubled is a plan with more of some resources.
type Doubled struct {
	What       []string           `json:"what"`    // that was doubled
	Factors    map[string]float64 `json:"factors"` // of all that was doubled so far
	Seconds    float64            `json:"seconds"`
	Gain       float64            `json:"gain"` // the epoch's seconds before over these
	Bottleneck string             `json:"bottleneck"`
}

// levers are the resources that a buyer can add.
var levers = []struct {
	name string
	has  func(p *Plan) bool
	grow func(o *Options, p *Plan, by float64)
}{
	{"ssds", func(p *Plan) bool { return p.SSDCommands > 0 },
		func(o *Options, p *Plan, by float64) {
			o.Hardware.SSDs = min(int(math.Round(float64(p.SSDs)*by)), hardware.MaxSSDs)
		}},
	{"link", nil, func(o *Options, _ *Plan, by float64) {
		l := &o.Hardware.Profile.PCIe
		for _, f := range []*hardware.Figure{&l.GPU.RawGBs, &l.GPU.CeilingGBs, &l.UVAGBs,
			&l.CopyGBs, &l.PeerGBs} {
			f.Value *= by
		}
	}},
	{"gpu", nil, func(o *Options, _ *Plan, by float64) {
		g := &o.Hardware.Profile.GPU
		for _, f := range []*hardware.Figure{&g.SMs, &g.HBMGBs, &g.HBMSMs, &g.AtomicGS,
			&g.TensorTFLOPS} {
			f.Value *= by
		}
	}},
	{"cpu", nil, func(o *Options, _ *Plan, by float64) {
		c := &o.Hardware.Profile.CPU
		for _, f := range []*hardware.Figure{&c.Cores, &c.MemoryGBs, &c.GatherGBs} {
			f.Value *= by
		}
		for _, f := range []*hardware.Figure{&c.DirectoryNS, &c.SetsNS, &c.AnnounceNS,
			&c.InspectScanNS, &c.ChangeNS, &c.StoredNS} {
			f.Value /= by
		}
	}},
	{"gpu-cache", func(p *Plan) bool { return p.GPUCacheBytes > 0 },
		func(o *Options, p *Plan, by float64) {
			o.Hardware.Profile.GPU.MemoryGiB.Value *= by
			o.Config.GPUCacheAuto = false
			o.Config.GPUCache = grown(p.GPUCacheBytes, by, p)
		}},
	{"cpu-cache", func(p *Plan) bool { return p.CPUCacheBytes > 0 },
		func(o *Options, p *Plan, by float64) {
			o.Config.CPUCache = grown(p.CPUCacheBytes, by, p)
		}},
}

// grown is a tier of so many times its bytes, and never more than all rows.
func grown(bytes int64, by float64, p *Plan) units.Budget {
	return units.Budget{Bytes: min(int64(float64(bytes)*by), p.Graph.Nodes*p.RowBytes)}
}

const (
	// worthwhile is the least gain that counts as one.
	worthwhile = 1.02
	// mostSteps bounds how often something is doubled.
	mostSteps = 6
)

// Halve finds out for a plan of p's own options.
func (p *Planner) Halve(ctx context.Context, base *Plan) (*Halving, error) {
	factors := map[string]float64{}
	try := func(what ...int) (Doubled, error) {
		d := Doubled{Factors: map[string]float64{}}
		for k, v := range factors {
			d.Factors[k] = v
		}
		for _, i := range what {
			name := levers[i].name
			d.What = append(d.What, name)
			d.Factors[name] = 2 * max(d.Factors[name], 1)
		}
		x, err := p.Plan(ctx, func(o *Options) {
			own := *o.Hardware.Profile
			o.Hardware.Profile, o.Budget = &own, units.Budget{}
			// The tiers stay what they are in bytes, whoever sized them.
			o.Config.GPUCacheAuto = false
			o.Config.GPUCache = kept(base.GPUCacheBytes)
			o.Config.CPUCache = kept(base.CPUCacheBytes)
			for i := range levers {
				if by := d.Factors[levers[i].name]; by > 1 {
					levers[i].grow(o, base, by)
				}
			}
		})
		if err != nil {
			return d, err
		}
		d.Seconds, d.Gain, d.Bottleneck = x.Seconds, base.Seconds/x.Seconds, x.Bottleneck
		return d, nil
	}
	var use []int
	for i, l := range levers {
		if l.has == nil || l.has(base) {
			use = append(use, i)
		}
	}
	h := &Halving{}
	now := base.Seconds
	for step := 0; step < mostSteps; step++ {
		all, order, err := tryEach(use, try)
		if err != nil {
			return nil, err
		}
		if step == 0 {
			h.Doubled = all
		}
		best := all[0]
		if now/best.Seconds < worthwhile && len(order) > 1 {
			// Two that bound it alike have to grow together.
			pairs := [][]int{{order[0], order[1]}}
			if len(order) > 2 {
				pairs = append(pairs, []int{order[0], order[2]}, []int{order[1], order[2]})
			}
			for _, pair := range pairs {
				d, err := try(pair...)
				if err != nil {
					return nil, err
				}
				if d.Seconds < best.Seconds {
					best = d
				}
			}
		}
		if now/best.Seconds < worthwhile {
			break
		}
		factors, now = best.Factors, best.Seconds
		h.Steps = append(h.Steps, best)
		if h.Halved = now <= base.Seconds/2; h.Halved {
			break
		}
	}
	return h, nil
}

// tryEach doubles each lever alone, and sorts them by what they gain.
func tryEach(use []int, try func(what ...int) (Doubled, error)) (all []Doubled, order []int,
	err error) {
	type tried struct {
		lever int
		d     Doubled
	}
	var list []tried
	for _, i := range use {
		d, err := try(i)
		if err != nil {
			return nil, nil, err
		}
		list = append(list, tried{i, d})
	}
	slices.SortStableFunc(list, func(a, b tried) int {
		switch {
		case a.d.Seconds < b.d.Seconds:
			return -1
		case a.d.Seconds > b.d.Seconds:
			return 1
		}
		return 0
	})
	for _, x := range list {
		all, order = append(all, x.d), append(order, x.lever)
	}
	return all, order, nil
}

// kept is a tier of so many bytes, none for 0.
func kept(bytes int64) units.Budget {
	if bytes == 0 {
		return plan.NoCache()
	}
	return units.Budget{Bytes: bytes}
}
