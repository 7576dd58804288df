package main

import (
	"fmt"
	"slices"

	"helios/gnn"
	"helios/graph"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/static"
)

// experiment is one claim of a paper.
type experiment struct {
	name, title, setting, paper string
	remark                      string  // why ours is another
	least                       float64 // that a factor is at any size
	play                        func(*lab, *table) error
}

func names() (out []string) {
	for _, x := range experiments {
		out = append(out, x.name)
	}
	return out
}

// The papers are Helios's and GIDS's; paper is a figure as they report it.
var experiments = []experiment{
	{
		name: "cpu-cache-ssds", title: "Helios: CPU cache on and off, by number of SSDs.",
		setting: "Rows of 4 KiB (dim 1024), GPU cache 1 %, CPU cache 0 or 10 %; ms a batch.",
		paper:   "10 % of the rows serve some 70 % of the bytes; up to 1.73× over the numbers of SSDs",
		remark:  "The gain is 1/(1 − share of the rows that the CPU tier has) where SSDs bound and nothing where the GPU's link does, since the CPU's rows cross it too: with 4 KiB rows from 7.5 SSDs on. The paper's figure is that of some number of SSDs between; one or two gain more.",
		least:   0.9, play: cpuCacheSSDs,
	},
	{
		name: "cpu-cache-dim", title: "Helios: CPU cache on and off, by dim.",
		setting: "GPU cache 1 %, CPU cache 0 or 10 %; ms a batch.",
		paper:   "up to 2.91× over the dims",
		remark:  "Below 4 KiB an SSD reads 4 KiB whatever is asked for, while the link carries what is asked for: so the shorter the rows, the longer SSDs stay the bound, as in the paper. R-MAT's hottest 10 % have a little more of the accesses than CL's.",
		least:   0.7, play: cpuCacheDim,
	},
	{
		name: "gpu-cache", title: "Helios: GPU cache on and off.",
		setting: "12 SSDs, CPU cache 10 %; ms a batch.",
		paper:   "1.09–1.48×",
		remark:  "The gain is 1/(1 − share of the rows that the GPU tier has), as the link is the bound: what a percent of the rows has depends on the graph. R-MAT is more skewed than the paper's graphs; 0.25 to 1 % of the rows, which is what an A100 has room for beside 4 to 23 TB, gives the paper's range.",
		least:   0.9, play: gpuCache,
	},
	{
		name: "pipeline", title: "Helios: deep pipeline against every operator alone with all SMs.",
		setting: "12 SSDs, CPU cache 10 %, hidden 256; ms a batch.",
		paper:   "1.49× SAGE, 1.29× GCN; where the GPU cache has 99 % the pipeline loses slightly",
		remark:  "A pipeline can gain the time of everything but the bottleneck, over the bottleneck's. Here the link has most of the time at 5 %, as our modelled sampling and training are faster than the paper's software; with more rows on the GPU the two come nearer. The model has no interference between kernels that run at once, and sampling reads the topology over the link: so the pipeline does not lose where all rows are on the GPU.",
		least:   0.5, play: pipeline,
	},
	{
		name: "modes", title: "Helios against the others.",
		setting: "SAGE, dim 1024, GPU cache 1 %, CPU cache 10 % (bam: none; cpu: no GPU cache; mmap: neither).",
		paper:   "up to 6.43× GIDS, 91–99 % of in memory; GIDS 1.3–3.1× BaM",
		remark:  "GIDS looks its constant buffer up first, so the hottest rows, which a GPU cache would keep, cross the link: that helps where SSDs bound (2) and hurts where the link does (12). Out of core is as fast as in memory once the link is the bound, as in the paper. The rivals are modelled without their software's costs (DGL's sampler and data loader, BaM's page-table contention), so helios gains less over them than in the paper.",
		least:   0.2, play: modes,
	},
	{
		name: "window", title: "GIDS: window depth and cache size.",
		setting: "Batch 4,096 and caches of 4, 8 and 16 GB scaled by nodes over 269 M, fanout 10,5,5, lines of 4 KiB, random policy, no CPU buffer; hit ratio of the GPU tier.",
		paper:   "depth 8 raises the hit ratio 2.19×",
		remark:  "The smaller the cache beside a batch, the more a window gives: without it a random policy evicts what the next batches need. R-MAT's hot rows are hit without a window too, so the ratio starts higher than IGB's.",
		least:   0.8, play: window,
	},
	{
		name: "accumulator", title: "GIDS: accumulator on and off.",
		setting: "Fanout 5,5, one SSD (Optane, 980 Pro), GPU cache 8 GB scaled, CPU buffer 10 % and window 8 for gids; GB/s into the GPU while rows are looked up, read and gathered.",
		paper:   "at batch 32 1.25× (BaM) and 1.95× (GIDS) the ingress",
		remark:  "GIDS's batches need fewer reads of the SSD (the CPU buffer has the hottest rows), so more of them fit into one launch and the gain is larger, as in the paper; a group is at most 32 batches.",
		least:   0.9, play: accumulator,
	},
	{
		name: "cpu-buffer", title: "GIDS: constant CPU buffer.",
		setting: "One Optane SSD, scaled batch, fanout 10,5,5, GPU cache 8 GB scaled, window and accumulator off; ms a batch, and GB/s of rows, from wherever, while they are looked up, read and gathered.",
		paper:   "a buffer of 20 % by reverse PageRank 3.53× (of the bandwidth without)",
		remark:  "The buffer's bandwidth comes on top of one SSD's. By PageRank it takes nearly all accesses here, after which the link and the launches are the bound; the paper's graph is less skewed.",
		least:   0.8, play: cpuBuffer,
	},
	{
		name: "ladies", title: "GIDS: LADIES sampling.",
		setting: "Scaled batch, 512 nodes a layer, 3 layers, one Optane SSD, GPU cache 8 GB scaled; ms a batch.",
		paper:   "the whole step 1.92× BaM (412× DGL-mmap)",
		remark:  "Layer-wise sampling reads whole neighbour lists over the link, and R-MAT's hubs have long ones: it is most of the step here, of which GIDS changes nothing.",
		least:   0.8, play: ladies,
	},
}

func (l *lab) helios(set func(*plan.Config)) plan.Config {
	c := plan.Config{
		ModelSettings: gnn.ModelSettings{Model: "sage", Hidden: 256},
		Mode:          static.ModeHelios,
		Fanouts:       []int{25, 10},
		Batch:         l.size.batch,
		GPUCache:      share(1),
		CPUCache:      plan.NoCache(),
	}
	if set != nil {
		set(&c)
	}
	return c
}

// onOff plays two setups and notes how many times as long the first one takes.
func (l *lab) onOff(t *table, off, on setup) (a, b report.EpochResult, err error) {
	if a, err = l.play(off); err != nil {
		return a, b, err
	}
	if b, err = l.play(on); err != nil {
		return a, b, err
	}
	t.factor(ms(a) / ms(b))
	return a, b, nil
}

func spread(f []float64) string {
	return fmt.Sprintf("%.2f–%.2f×", slices.Min(f), slices.Max(f))
}

func cpuCacheSSDs(l *lab, t *table) error {
	t.Columns = []string{"SSDs", "without", "with", "factor",
		"rows from the CPU tier, of those that the GPU tier lacks"}
	for _, n := range []int{1, 2, 4, 6, 8, 12} {
		off, on := l.helios(nil), l.helios(func(c *plan.Config) { c.CPUCache = share(10) })
		a, b, err := l.onOff(t, setup{cfg: off, ssds: n}, setup{cfg: on, ssds: n})
		if err != nil {
			return err
		}
		t.add(n, ms(a), ms(b), ms(a)/ms(b), float64(b.RowsCPU)/float64(max(b.RowsCPU+b.RowsSSD, 1)))
	}
	t.Ours = spread(t.Factors)
	return nil
}

func cpuCacheDim(l *lab, t *table) error {
	t.Columns = []string{"dim", "SSDs", "without", "with", "factor"}
	for _, n := range []int{1, 12} {
		for _, dim := range []int{128, 256, 512, 1024} {
			off, on := l.helios(nil), l.helios(func(c *plan.Config) { c.CPUCache = share(10) })
			a, b, err := l.onOff(t, setup{cfg: off, ssds: n, dim: dim},
				setup{cfg: on, ssds: n, dim: dim})
			if err != nil {
				return err
			}
			t.add(dim, n, ms(a), ms(b), ms(a)/ms(b))
		}
	}
	t.Ours = spread(t.Factors)
	return nil
}

func gpuCache(l *lab, t *table) error {
	t.Columns = []string{"dim", "GPU cache", "without", "with", "factor", "rows from the GPU tier"}
	for _, dim := range []int{128, 1024} {
		for _, p := range []float64{0.25, 1, 5} {
			with := func(p float64) setup {
				return setup{dim: dim,
					cfg: l.helios(
						func(c *plan.Config) { c.CPUCache, c.GPUCache = share(10), share(p) })}
			}
			a, b, err := l.onOff(t, with(0), with(p))
			if err != nil {
				return err
			}
			t.add(dim, fmt.Sprintf("%g %%", p), ms(a), ms(b), ms(a)/ms(b),
				float64(b.RowsGPU)/float64(b.RowsGPU+b.RowsCPU+b.RowsSSD))
		}
	}
	t.Ours = spread(t.Factors)
	return nil
}

func pipeline(l *lab, t *table) error {
	t.Columns = []string{"model", "dim", "GPU cache", "series", "deep", "factor", "overlap of deep"}
	for _, x := range []struct {
		model    string
		dim      int
		gpu, cpu float64
	}{{"sage", 1024, 5, 10}, {"gcn", 1024, 5, 10}, {"sage", 1024, 20, 10}, {"gcn", 1024, 20, 10},
		{"sage", 128, 100, 0}} {
		with := func(pipe string) setup {
			return setup{dim: x.dim, cfg: l.helios(func(c *plan.Config) {
				c.Model, c.Pipeline, c.GPUCache, c.CPUCache = x.model, pipe, share(x.gpu),
					share(x.cpu)
			})}
		}
		a, b, err := l.onOff(t, with(plan.PipelineSeries), with(plan.DefaultPipeline))
		if err != nil {
			return err
		}
		t.add(x.model, x.dim, fmt.Sprintf("%g %%", x.gpu), ms(a), ms(b), ms(a)/ms(b), b.Overlap)
	}
	f := t.Factors
	t.Ours = fmt.Sprintf(
		"%.2f× and %.2f× SAGE, %.2f× and %.2f× GCN, %.2f× with all rows in the GPU tier", f[0],
		f[2], f[1], f[3], f[4])
	return nil
}

func modes(l *lab, t *table) error {
	t.Columns = []string{"SSDs", "mode", "ms a batch", "times helios", "GB/s into the GPU",
		"share of rows from GPU, CPU, SSD", "stall"}
	pos := map[string]float64{}
	for _, n := range []int{2, 12} {
		first := 0.0
		for _, mode := range []string{static.ModeHelios, static.ModeInmem, dynamic.ModeGIDS,
			dynamic.ModeBaM,
			static.ModeCPU, static.ModeMmap} {
			s := setup{ssds: n,
				cfg: l.helios(func(c *plan.Config) { c.Mode, c.CPUCache = mode, share(10) })}
			switch mode {
			case static.ModeInmem:
				s.cfg.CPUCache = plan.NoCache()
			case dynamic.ModeBaM:
				s.cfg.CPUCache = plan.NoCache()
				s.warm = 4
			case dynamic.ModeGIDS:
				s.warm = 4
			case static.ModeMmap:
				s.cfg.GPUCache, s.cfg.CPUCache, s.cfg.Workers = plan.NoCache(), plan.NoCache(), 32
				s.batches = 2
			case static.ModeCPU:
				s.cfg.GPUCache, s.cfg.Workers = plan.NoCache(), 32
			}
			e, err := l.play(s)
			if err != nil {
				return fmt.Errorf("%s: %w", mode, err)
			}
			if first == 0 {
				first = ms(e)
			}
			pos[fmt.Sprint(mode, n)] = t.factor(ms(e) / first)
			all := float64(e.RowsGPU + e.RowsCPU + e.RowsSSD)
			t.add(n, mode, ms(e), ms(e)/first, ingress(e, 4096), fmt.Sprintf("%.2f, %.2f, %.2f",
				float64(e.RowsGPU)/all, float64(e.RowsCPU)/all, float64(e.RowsSSD)/all), e.Stall)
		}
	}
	say := func(n int) string {
		f := func(mode string) float64 { return pos[fmt.Sprint(mode, n)] }
		return fmt.Sprintf(
			"with %d SSDs %.2f× GIDS, %.0f %% of in memory, GIDS %.2f× BaM, cpu %.1f×, mmap %.0f×",
			n, f(dynamic.ModeGIDS), 100*f(static.ModeInmem), f(dynamic.ModeBaM)/f(dynamic.ModeGIDS),
			f(static.ModeCPU), f(static.ModeMmap))
	}
	t.Ours = say(2) + "; " + say(12)
	return nil
}

// gb is so many GB of a cache beside IGB-full's features, as bytes beside this graph's.
func (l *lab) gb(n float64) units.Budget {
	return units.Budget{Bytes: max(int64(n*1e9*float64(l.size.nodes)/paperNodes), 1<<20)}
}

func (l *lab) gids(mode string, set func(*plan.Config)) plan.Config {
	c := plan.Config{
		ModelSettings:   gnn.ModelSettings{Model: "sage", Hidden: 128},
		DynamicSettings: dynamicspec.DynamicSettings{Window: plan.Off, Accumulate: plan.Off},
		Mode:            mode,
		Fanouts:         []int{10, 5, 5},
		Batch:           l.size.gids,
		GPUCache:        l.gb(8),
		CPUCache:        plan.NoCache(),
	}
	if set != nil {
		set(&c)
	}
	return c
}

func window(l *lab, t *table) error {
	t.Columns = []string{"cache, GB", "depth 0", "4", "8", "16", "depth 8 over 0",
		"ms a batch, depth 0", "depth 8"}
	for _, gb := range []float64{4, 8, 16} {
		cells := []any{gb}
		var hit, time [4]float64
		for i, depth := range []int{0, 4, 8, 16} {
			e, err := l.play(setup{warm: l.size.warm, batches: 2 * l.size.batches,
				cfg: l.gids(dynamic.ModeBaM, func(c *plan.Config) {
					if c.GPUCache = l.gb(gb); depth > 0 {
						c.Window = depth
					}
				})})
			if err != nil {
				return err
			}
			hit[i], time[i] = hits(e), ms(e)
			cells = append(cells, hit[i])
		}
		t.add(append(cells, t.factor(hit[2]/hit[0]), time[0], time[2])...)
	}
	t.Ours = spread(t.Factors) + " the hit ratio"
	return nil
}

func accumulator(l *lab, t *table) error {
	t.Columns = []string{"mode", "SSD", "batch", "off", "on", "factor",
		"factor of the whole batch's time", "batches a group"}
	for _, hw := range []string{"a100-optane", "a100-980pro"} {
		for _, mode := range []string{dynamic.ModeBaM, dynamic.ModeGIDS} {
			for _, batch := range []int{32, 64, 128} {
				with := func(a float64) setup {
					return setup{hardware: hw, ssds: 1, warm: l.size.warm,
						batches: 19 * l.size.batches, cfg: l.gids(mode, func(c *plan.Config) {
							c.Fanouts, c.Batch, c.Accumulate = []int{5, 5}, batch, a
							if mode == dynamic.ModeGIDS {
								c.CPUCache, c.Window = share(10), dynamic.GIDSWindow
							} else if a > 0 {
								c.Pipeline = plan.PipelineRunAhead
							}
						})}
				}
				a, err := l.play(with(plan.Off))
				if err != nil {
					return err
				}
				b, err := l.play(with(dynamic.GIDSAccumulate))
				if err != nil {
					return err
				}
				x, y := ingress(a, 4096)*a.Seconds/fetching(a),
					ingress(b, 4096)*b.Seconds/fetching(b)
				t.add(mode, hw[len("a100-"):], batch, x, y, t.factor(y/x), ms(a)/ms(b),
					b.GroupBatches)
			}
		}
	}
	t.Ours = fmt.Sprintf(
		"at batch 32 %.2f× (BaM) and %.2f× (GIDS) with Optane, %.2f× and %.2f× with 980 Pro",
		t.Factors[0], t.Factors[3], t.Factors[6], t.Factors[9])
	return nil
}

func cpuBuffer(l *lab, t *table) error {
	t.Columns = []string{"buffer", "hottest by", "ms a batch", "share of rows from the buffer",
		"GB/s of rows", "factor"}
	base := 0.0
	for _, x := range []struct {
		percent float64
		by      string
	}{{0, "–"}, {10, "random"}, {20, "random"}, {10, plan.HotnessPageRank},
		{20, plan.HotnessPageRank}} {
		s := setup{hardware: "a100-optane", ssds: 1, warm: l.size.warm, batches: 2 * l.size.batches,
			cfg: l.gids(dynamic.ModeGIDS, func(c *plan.Config) {
				c.CPUCache, c.Hotness = share(x.percent), x.by
			})}
		switch x.by {
		case "–":
			s.cfg.Hotness = ""
		case "random":
			f, err := l.randomRows()
			if err != nil {
				return err
			}
			s.cfg.Hotness = f
		}
		e, err := l.play(s)
		if err != nil {
			return err
		}
		all := float64(e.RowsGPU + e.RowsCPU + e.RowsSSD)
		rate := all * 4096 / fetching(e) / 1e9
		if base == 0 {
			base = rate
		}
		t.add(fmt.Sprintf("%g %%", x.percent), x.by, ms(e), float64(e.RowsCPU)/all, rate,
			t.factor(rate/base))
	}
	t.Ours = fmt.Sprintf("20 %% by reverse PageRank %.2f×, random %.2f×; 10 %% %.2f× and %.2f×",
		t.Factors[4], t.Factors[2], t.Factors[3], t.Factors[1])
	return nil
}

func ladies(l *lab, t *table) error {
	t.Columns = []string{"mode", "ms a batch", "of it sampling",
		"looking up, reading and gathering", "factor over bam of the latter", "rows a batch",
		"share from GPU, CPU, SSD"}
	base := 0.0
	for _, mode := range []string{dynamic.ModeBaM, dynamic.ModeGIDS} {
		e, err := l.play(setup{hardware: "a100-optane", ssds: 1, warm: min(l.size.warm, 20),
			cfg: l.gids(mode, func(c *plan.Config) {
				c.Sampler, c.Fanouts = graph.Ladies, []int{512, 512, 512}
				if mode == dynamic.ModeGIDS {
					c.CPUCache, c.Window, c.Accumulate = share(10), 0, 0
				}
			})})
		if err != nil {
			return err
		}
		n, all := float64(e.Batches), float64(e.RowsGPU+e.RowsCPU+e.RowsSSD)
		fetch := fetching(e) / n * 1e3
		if base == 0 {
			base = fetch
		}
		t.add(mode, ms(e), e.StageSeconds.Sample/n*1e3, fetch, t.factor(base/fetch), all/n,
			fmt.Sprintf("%.2f, %.2f, %.2f", float64(e.RowsGPU)/all, float64(e.RowsCPU)/all,
				float64(e.RowsSSD)/all))
	}
	t.Ours = fmt.Sprintf("GIDS fetches rows %.2f× as fast as BaM", t.Factors[1])
	return nil
}
