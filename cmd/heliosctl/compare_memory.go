package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/tiers"
	"helios/sched/virtual"
)

// How the cache memory of the variants relates.
const (
	// memoryTogether: both tiers are the CPU's memory, and each mode has the same sum.
	memoryTogether = "together"
	// memoryApart: GPU and CPU memory are two kinds, and each mode has those that it uses.
	memoryApart = "apart"
)

// sameBytes bounds the share by which caches that count as equal differ: tiers hold whole rows and
// whole lines.
const sameBytes = 0.01

// tierSizes are the flags that size tiers.
var tierSizes = []string{"gpu-cache", "cpu-cache"}

// ownsTiers reports whether a variant sizes a tier itself, so that it stays as it was typed.
func ownsTiers(own flagValues) bool {
	for _, key := range tierSizes {
		if _, is := own.get(key); is {
			return true
		}
	}
	return false
}

// sharedTiers are the budgets that all variants divide: those of the flags for all, or their
// defaults, for the tiers that one of vs has.
func (c *comparer) sharedTiers(vs []variant) (gpu, cpu units.Budget, err error) {
	var base plan.Config
	for _, key := range tierSizes {
		if !c.c.IsSet(key) {
			continue
		}
		if err := hcli.Of[plan.Config]().Set(&base, key, fmt.Sprint(c.c.Value(key))); err != nil {
			return gpu, cpu, err
		}
	}
	if base, err = base.WithDefaults().OnDevice(c.in.Dev.Info()); err != nil {
		return gpu, cpu, err
	}
	for _, v := range vs {
		if _, err := tiers.Catalog.Mode(cmp.Or(v.cfg.Mode, plan.DefaultMode)); err != nil {
			return gpu, cpu, err
		}
		if v.ownTiers {
			continue
		}
		onGPU, onCPU := v.cfg.BudgetTiers()
		if onGPU {
			gpu = base.GPUCache
		}
		if onCPU {
			cpu = base.CPUCache
		}
	}
	return gpu, cpu, nil
}

// shareMemory gives the variants equal memory where the GPU tier is the CPU's memory, and notes
// the rule that holds.
func (c *comparer) shareMemory(vs []variant) error {
	oneMemory := c.in.Dev.Info().Backend == "host"
	if c.played != nil {
		oneMemory = c.played.Profile.OneMemory()
	}
	if !oneMemory {
		c.memory = memoryApart
		c.tell(c.env, fmt.Sprintf(
			"memory: the GPU's and the CPU's are apart on %s, so each mode has of --gpu-cache and --cpu-cache those that it uses; see the bytes of both",
			c.device))
		return nil
	}
	gpu, cpu, err := c.sharedTiers(vs)
	if err != nil {
		return err
	}
	c.memory = memoryTogether
	for i := range vs {
		if v := &vs[i]; !v.ownTiers {
			v.cfg = v.cfg.Together(gpu, cpu)
		}
	}
	both := gpu.Plus(cpu)
	if both == (units.Budget{}) {
		return nil
	}
	m := c.in.Dataset.Meta
	c.tell(c.env, fmt.Sprintf(
		"equal memory: GPU tier and CPU tier are the same memory here, so the tiers of each mode have %s together (%s): GPU %s and CPU %s, or all of it in the one that a mode has",
		budgetWords(both), units.FormatBytes(both.Of(m.Nodes*int64(m.RowType().RowBytes(m.Dim)))),
		budgetWords(gpu), budgetWords(cpu)))
	return nil
}

func budgetWords(b units.Budget) string {
	if b.Percent == 0 {
		return units.FormatBytes(b.Bytes)
	}
	return b.String()
}

// packApart gives variants that lay mini-batches out a folder of their own in the dataset's, where
// none is named: what is laid out depends on the tiers, and an earlier run's were others. The
// folders go with remove.
func packApart(vs []variant, dataset string) (remove func() error, err error) {
	var made []string
	remove = func() (err error) {
		for _, dir := range made {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return err
	}
	for i := range vs {
		c := &vs[i].cfg
		f := c.WithDefaults()
		apart := f.System().Apart
		if apart == nil {
			continue
		}
		dir := apart(c)
		if dir == nil {
			continue
		}
		if *dir, err = os.MkdirTemp(dataset, "compare-packed-"); err != nil {
			return remove, err
		}
		made = append(made, *dir)
	}
	return remove, nil
}

// tell keeps a note, and shows it at once.
func (r *comparison) tell(e *env, note string) {
	r.notes = append(r.notes, note)
	e.ui.Note("%s", note)
}

// checkVariants refuses what cannot run before the first variant does; it returns the others.
func (c *comparer) checkVariants(vs []variant) ([]variant, error) {
	var can []variant
	for _, v := range vs {
		err := checkVariant(v.cfg, c.in, c.played)
		class := errs.ClassOf(err)
		switch {
		case err == nil:
			can = append(can, v)
		case v.optional && (class == errs.Usage || class == errs.Capability):
			c.leave(c.env, v.name, err)
		default:
			return nil, fmt.Errorf("variant %s: %w", v.name, err)
		}
	}
	return can, nil
}

func checkVariant(cfg plan.Config, in prepare.Inputs, hw *cost.Hardware) (err error) {
	onGPU, memory := int64(-1), int64(math.MaxInt64/2)
	if hw != nil {
		cfg, err = virtual.Check(tiers.Simulation, cfg)
		onGPU = int64(hw.Profile.GPU.MemoryGiB.Value * (1 << 30))
	} else {
		cfg, err = cfg.Filled()
	}
	if err != nil {
		return err
	}
	info := in.Dev.Info()
	if cfg, err = cfg.OnDevice(info); err != nil || hw == nil && info.Backend != "host" {
		return err // a GPU's free memory is known when its run begins
	}
	if hw == nil {
		if memory, err = hostmem.AvailableBytes(); err != nil {
			return err
		}
	}
	rows := in.Dataset.Meta.RowType()
	if cfg.RowType != "" {
		if rows, err = rowtype.Parse(cfg.RowType); err != nil {
			return err
		}
	}
	_, err = cfg.TierRows(in.Dataset.Meta.Nodes, int64(rows.RowBytes(in.Dataset.Meta.Dim)), memory,
		onGPU)
	return err
}

// bounded reports whether the variant's memory is what its tiers hold: not every row, and not the
// kernel's page cache.
func (v comparedVariant) bounded() bool {
	m, err := tiers.Catalog.Mode(v.Mode)
	return err == nil && !m.InMemory && !plan.Config{IOStack: v.IOStack}.Stack().PageCache
}

// caches are the bytes of both tiers.
func (v comparedVariant) caches() string {
	if !v.bounded() && v.CacheBytes == 0 {
		return "page cache"
	}
	return units.FormatBytes(v.GPUCache) + " + " + units.FormatBytes(v.CPUCache)
}

// sameCaches reports whether two variants hold as much in memory.
func sameCaches(a, b comparedVariant) bool {
	return a.bounded() && b.bounded() && nearly(a.CacheBytes, b.CacheBytes)
}

func nearly(smallest, largest int64) bool {
	return math.Abs(float64(largest-smallest)) <= sameBytes*float64(max(smallest, largest))
}

// holdMemory compares the caches of all variants and notes those that differ. Where GPU and CPU
// memory are apart, each kind counts for itself.
func (s *comparisonSummary) holdMemory() {
	var parts, bounds, lists []string
	alike := func(of func(comparedVariant) int64) bool {
		smallest, largest := int64(math.MaxInt64), int64(0)
		for _, v := range s.Variants {
			if v.bounded() {
				smallest, largest = min(smallest, of(v)), max(largest, of(v))
			}
		}
		return largest == 0 || nearly(smallest, largest)
	}
	topologies := map[int64]bool{}
	for _, v := range s.Variants {
		if v.bounded() {
			parts = append(parts, v.Name+" "+v.caches())
		} else {
			bounds = append(bounds, v.Name)
		}
		lists = append(lists, v.Name+" "+units.FormatBytes(v.Topology))
		topologies[v.Topology] = true
	}
	if s.MemoryRule == memoryApart {
		s.EqualMemory = alike(func(v comparedVariant) int64 { return v.GPUCache }) &&
			alike(func(v comparedVariant) int64 { return v.CPUCache })
	} else {
		s.EqualMemory = alike(func(v comparedVariant) int64 { return v.CacheBytes })
	}
	if !s.EqualMemory {
		s.Notes = append(s.Notes, "UNEQUAL MEMORY, GPU + CPU tier: "+strings.Join(parts, "; ")+
			"; a ratio of their times is not one of their data paths alone")
	}
	s.EqualMemory = s.EqualMemory && len(bounds) == 0
	if n := len(bounds); n > 0 && n < len(s.Variants) {
		s.Notes = append(s.Notes, "NOT AT EQUAL MEMORY: "+strings.Join(bounds, ", ")+
			", which may hold every row in memory, in tiers or in the kernel's page cache")
	}
	if len(topologies) > 1 {
		s.Notes = append(s.Notes, "beside the caches, memory for neighbour lists: "+
			strings.Join(lists, ", "))
	}
}
