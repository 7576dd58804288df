package iobench

import (
	"context"
	"fmt"
	"math"
	"time"

	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/ssdmodel"
)

// simulation is one measurement on the virtual clock: the same rows and loops as on the wall clock,
// planned into commands by the stacks' own rules, and played by iosim.
type simulation struct {
	draw
	cfg   Config
	l     gpuio.Layout
	row   *Row
	m     *iosim.Machine
	stack *iosim.Stack
	plan  *gpuio.Planner
	rows  []int64
	offs  []int64
	per   []gpuio.Planned
	cmds  []int64
	last  int64

	ended                            int   // sets
	leastSets                        int   // that a measurement takes
	totalRows, totalCmds, totalBytes int64 // handed over
	came                             int64 // rows that are there
	bad                              error
}

// Blocks of an SSD whose model has no size: 1 TiB.
const anyCapacity = 1 << 40

// autoSets is the least number of sets of a measurement, where its length is not given.
const autoSets = 8

// chunkNS is the simulated time between looks for a stop.
const chunkNS = int64(time.Millisecond)

func runVirtual(ctx context.Context, cfg Config) (Row, error) {
	row := cfg.row()
	sim := des.New()
	m, err := iosim.NewMachine(sim, cfg.Hardware, cfg.SSDCount)
	if err != nil {
		return row, err
	}
	if cfg.Model != nil {
		m.UseModel(cfg.Model)
	}
	v := &simulation{cfg: cfg, row: &row, m: m,
		draw: draw{key: philox.Key(cfg.Seed, philox.StreamBench)}}
	row.SSDs, row.Device, row.Clock, row.Modelled, row.SSDsModelled = cfg.SSDCount,
		"modelled "+cfg.Hardware.GPU.Name, ClockVirtual, true, true
	row.Hardware, row.SSDModel = cfg.Hardware.Name, m.Model().Name
	if v.l, err = virtualLayout(&cfg, m.Model()); err != nil {
		return row, err
	}
	speed, err := m.Speed(cfg.kind, v.l)
	if err != nil {
		return row, err
	}
	if v.plan, err = gpuio.NewPlanner(v.l, gpuio.PlanOptions{Stack: cfg.Stack,
		CoalesceBytes: cfg.Coalesce, Depth: cfg.Depth, Speed: speed}); err != nil {
		return row, err
	}
	sc := iosim.Config{Stack: cfg.Stack, Blocks: cfg.Blocks, Threads: cfg.PerBlock,
		Depth: cfg.Depth, CommandBytes: int64(v.l.ReadBytes()),
		Seed: cfg.Seed}
	if !cfg.kind.Queued {
		sc.Threads = cfg.Threads
	} else if cfg.RowBytes%int(v.l.LBABytes) != 0 {
		// the row does not fill its LBAs: complete copies it
		sc.StagedBytes = int64(cfg.RowBytes)
	}
	if v.stack, err = iosim.New(m, sc); err != nil {
		return row, err
	}
	row.QueuePairs = v.stack.Config().QueuePairs
	if cfg.kind.Queued {
		row.Blocks = v.stack.Config().Blocks
	}
	bytes := int64(v.l.ReadBytes())
	row.BoundIOPS = m.Bound(bytes)
	row.SSDBoundIOPS = m.SSDBound(bytes) * float64(cfg.SSDCount)
	if row.LinkBoundIOPS = m.IngressBound(bytes); !cfg.kind.Queued { // copied from the CPU's memory
		row.LinkBoundIOPS = cfg.Hardware.PCIe.CopyGBs.Value * 1e9 / float64(cfg.RowBytes)
	}
	idle := m.Model().MeanLatency(ssdmodel.Read) - time.Duration(cfg.Hardware.PCIe.IncludedNS.NS())
	row.limitDepth(idle, row.SSDs)
	gpu := &cfg.Hardware.GPU
	row.LaunchUS, row.TeardownUS = gpu.LaunchNS.Value/1e3, gpu.TeardownNS.Value/1e3
	v.rows, v.offs = make([]int64, 0, cfg.setRows), make([]int64, cfg.SSDCount+1)
	v.per, v.cmds = make([]gpuio.Planned, cfg.SSDCount), make([]int64, cfg.SSDCount)
	if v.cfg.Duration == 0 {
		v.cfg.Duration = v.enough()
		v.cfg.WarmUp = v.cfg.Duration / 4
		v.leastSets = autoSets
	}
	if err := v.keepInFlight(ctx); err != nil {
		return row, err
	}
	v.end()
	return row, nil
}

// limitDepth is the rate that the reads in flight allow, each of which takes idle or more on
// average: on so many stripes.
func (r *Row) limitDepth(idle time.Duration, stripes int) {
	if idle > 0 {
		r.DepthBoundIOPS = float64(r.Depth*stripes) / idle.Seconds()
	}
}

// Stripe has the bounds on the reads of one stripe. All stripes have as many reads.
type Stripe struct {
	Model *ssdmodel.Model // that its SSD plays; nil: none
	Link  float64         // of its SSD, in bytes a second; 0: not known
	On    int             // stripes that its SSD has
}

// Limit sets the rates that modelled SSDs and their links allow, for commands of so many bytes. The
// slowest stripe bounds all. A rate is 0 where a stripe has no model or no link.
func (r *Row) Limit(stripes []Stripe, bytes int64) {
	var idle time.Duration
	ssds, links, models := math.Inf(1), math.Inf(1), true
	for _, s := range stripes {
		n := float64(len(stripes)) / float64(s.On)
		links = min(links, s.Link/float64(bytes)*n)
		if s.Model == nil {
			ssds, models = 0, false
			continue
		}
		ssds = min(ssds, s.Model.Peak(ssdmodel.Read, bytes)*n)
		idle += s.Model.MeanLatency(ssdmodel.Read) / time.Duration(len(stripes))
	}
	if !math.IsInf(ssds, 0) {
		r.SSDBoundIOPS = ssds
	}
	r.LinkBoundIOPS = links
	if models {
		r.limitDepth(idle, len(stripes))
	}
}

// virtualLayout fills the SSDs of a model with rows.
func virtualLayout(cfg *Config, m *ssdmodel.Model) (gpuio.Layout, error) {
	lba := cfg.LBABytes
	if lba == 0 {
		if lba = 4096; m.LBAOK(512) {
			lba = 512
		}
	}
	if lba != 512 && lba != 4096 || !m.LBAOK(lba) {
		return gpuio.Layout{}, errs.New(errs.Usage, "blocks of %d bytes: SSD model %s has %v", lba,
			m.Name, m.LBAs.Bytes)
	}
	bytes := m.Capacity.Bytes
	if bytes == 0 {
		bytes = anyCapacity
	}
	return rawLayout(cfg.SSDCount, cfg.RowBytes, lba, bytes/int64(lba))
}

// enough is a time in which some 200,000 reads happen, where nothing but the SSDs and the link
// bounds them: at least that of many latencies.
func (v *simulation) enough() time.Duration {
	d := time.Duration(200e3 / v.row.BoundIOPS * 1e9)
	return min(max(d, 20*time.Millisecond, 50*v.m.Model().MeanLatency(ssdmodel.Read)),
		4*time.Second).Round(time.Microsecond)
}

// submit hands the rows over as one set.
func (v *simulation) submit(rows []int64, done func()) {
	clear(v.per)
	v.plan.Set(rows, v.offs, v.per)
	var cmds, bytes int64
	for s, p := range v.per {
		v.cmds[s] = p.Commands
		cmds += p.Commands
		bytes += p.Bytes
	}
	n := int64(len(rows))
	v.totalRows += n
	v.totalCmds += cmds
	v.totalBytes += bytes
	v.stack.SubmitSized(v.cmds, (bytes+cmds-1)/max(cmds, 1), func(t iosim.Times) {
		v.came += n
		v.ended++
		if tl := v.cfg.Timeline; tl.On() {
			tl.Span(v.cfg.Track, "set", v.cfg.TimelineFrom+t.SubmitNS, t.DoneNS-t.SubmitNS,
				map[string]any{"rows": n, "commands": cmds, "submitted_ns": t.SubmitEndNS -
					t.SubmitNS})
			if t.DoneNS > v.last {
				tl.Counter(v.cfg.Track+": rows/s", "rows/s", v.cfg.TimelineFrom+t.DoneNS,
					float64(n)/(float64(t.DoneNS-v.last)/1e9))
			}
			v.last = t.DoneNS
		}
		done()
	})
}

// keepInFlight keeps sets in flight. As on the wall clock the measured time begins and ends where a
// set does, so that no part of one counts more than another.
func (v *simulation) keepInFlight(ctx context.Context) error {
	var from, to *iosim.Stats
	var fromNS int64
	sets := 0 // since the measurement began
	var next func()
	next = func() {
		now := v.m.Sim.Now()
		switch {
		case to != nil:
			return
		case from == nil && now >= v.cfg.WarmUp.Nanoseconds() && v.ended >= setsInFlight:
			st := v.stack.Stats()
			from, fromNS = &st, now
		case from != nil:
			if sets++; now-fromNS >= v.cfg.Duration.Nanoseconds() && sets >= v.leastSets {
				st := v.stack.Stats()
				to = &st
				v.row.Seconds = float64(now-fromNS) / 1e9
				return
			}
		}
		v.rows = v.rows[:v.cfg.setRows]
		v.spread(&v.l, v.rows, v.offs)
		v.submit(v.rows, next)
	}
	for range setsInFlight {
		next()
	}
	limit := v.cfg.WarmUp + v.cfg.Duration + stall
	for off := chunkNS; to == nil && off < limit.Nanoseconds(); off += chunkNS {
		if err := ctx.Err(); err != nil {
			return err
		}
		v.m.Sim.RunUntil(off)
	}
	if to == nil {
		v.bad = fmt.Errorf("modelled: no set of %d rows was read within %v", v.cfg.setRows, stall)
		return nil
	}
	lat := v.between(from, to)
	v.row.latency(&lat)
	return v.drain(ctx)
}

// drain lets what is in flight end.
func (v *simulation) drain(ctx context.Context) error {
	for v.stack.InFlight() > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		if v.m.Sim.Now() > v.cfg.WarmUp.Nanoseconds()+v.cfg.Duration.Nanoseconds()+
			stall.Nanoseconds() {
			v.bad = fmt.Errorf("modelled: %d sets were not read within %v",
				v.stack.InFlight(), stall)
			return nil
		}
		v.m.Sim.RunUntil(v.m.Sim.Now() + chunkNS)
	}
	return nil
}

// between enters what happened from one moment to another into the row.
func (v *simulation) between(from, to *iosim.Stats) gpuio.Histogram {
	v.row.IOPS = float64(to.Commands-from.Commands) / v.row.Seconds
	return to.Latency.Since(&from.Latency)
}

// end is the audit of a simulation: each command that was handed over has come, once.
func (v *simulation) end() {
	st := v.stack.Stats()
	row := v.row
	row.VirtualNS = v.m.Sim.Now()
	row.Commands = st.Commands
	for i, s := range st.PerSSD {
		row.PerSSD = append(row.PerSSD, SSDRow{Name: fmt.Sprintf("modelled %d", i),
			Commands: s.Commands, Bytes: s.Bytes})
	}
	row.shares()
	row.perRow(st.Commands, v.totalBytes, v.totalRows)
	err := v.bad
	switch {
	case err != nil:
	case st.Commands != v.totalCmds || v.came != v.totalRows || v.stack.Outstanding() != 0:
		err = fmt.Errorf("modelled: %d of %d commands, %d of %d rows, %d outstanding", st.Commands,
			v.totalCmds, v.came, v.totalRows, v.stack.Outstanding())
	case row.IOPS == 0:
		err = fmt.Errorf("modelled: no read ended in %v", v.cfg.Duration)
	}
	row.Audited = err == nil
	if err != nil {
		row.AuditError, row.Class = err.Error(), errs.Failed
	}
}
