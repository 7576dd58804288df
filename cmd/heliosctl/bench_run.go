package main

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/dataset"
	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/timeline"
	"helios/internal/units"
)

// benchRow is a line of "bench io --json".
type benchRow struct {
	iobench.Row
	Written float64 `json:"written"` // share of the bytes read from that hold data; null where only the controller knows
	// The CPU threads that play SSDs in RAM, and what they reach with nothing beside them; 0 where
	// none do.
	ServeThreads int     `json:"serve_threads"`
	ServeIOPS    float64 `json:"serve_iops"`
	LatencyUS    float64 `json:"ssd_latency_us"` // modelled
}

// benchOutput shows rows of results as they come, and all together.
type benchOutput struct {
	e      *env
	out    *results
	tl     *timelineFile
	total  int
	rows   []iobench.Row
	table  [][]string
	failed int
	class  errs.Class // of the failed rows, if they have the same
	from   int64      // where the next row's virtual times begin in the timeline
}

// config is what the flags say for one point, but for the SSDs.
func (o *benchOutput) config(p *benchPlan, at point) iobench.Config {
	c := o.e.c
	label := fmt.Sprintf("%s, %d SSDs, %d blocks, row %d, depth %d", at.stack, at.ssds, at.blocks, at.rowBytes, at.depth)
	if at.setRows > 0 {
		label += fmt.Sprintf(", sets of %d", at.setRows)
	}
	if at.rate > 0 {
		label += fmt.Sprintf(", %g rows/s", at.rate)
	}
	if at.coalesce != 0 {
		label += ", coalesce " + coalesceText(at.coalesce)
	}
	return iobench.Config{
		RowBytes: at.rowBytes, Stack: at.stack, Blocks: at.blocks, PerBlock: p.threads, Pairs: c.Int("queue-pairs"), Depth: at.depth,
		Threads: c.Int("workers"), Engine: c.String("cpu-engine"), Coalesce: at.coalesce, Duration: time.Duration(p.seconds * float64(time.Second)),
		Seed: c.Uint64("seed"), Timeout: c.Duration("read-timeout"), SetRows: at.setRows, Sets: p.sets, Rate: at.rate,
		Timeline: o.tl.rec, Track: label, TimelineFrom: o.from,
	}
}

func (o *benchOutput) add(r benchRow) {
	o.out.object(r)
	o.rows = append(o.rows, r.Row)
	o.from += r.VirtualNS + int64(time.Millisecond)
	audit := "passed"
	if r.Modelled {
		audit = "modelled"
	}
	if !r.Audited {
		if o.failed++; o.failed == 1 {
			o.class = r.Class
		}
		if o.class != r.Class {
			o.class = errs.Device
		}
		audit = "FAILED: " + strings.ReplaceAll(r.AuditError, "\n", "; ")
	}
	only := func(measured bool, s string) string {
		if !measured {
			s = ""
		}
		return dash(s)
	}
	wall := !r.Modelled
	rate := "-"
	if r.Open != nil {
		rate = units.FormatCount(r.Open.Offered)
	}
	model := "-"
	if r.SSDsModelled {
		model = r.SSDModel + " (modelled)"
	}
	us := func(v float64) string { return fmt.Sprintf("%.0f", v) }
	o.table = append(o.table, []string{
		strconv.Itoa(r.SSDs), model, strconv.Itoa(r.Blocks), strconv.Itoa(r.Threads), strconv.Itoa(r.RowBytes), r.Stack, strconv.Itoa(r.QueuePairs), strconv.Itoa(r.Depth),
		coalesceText(r.CoalesceBytes), strconv.Itoa(r.SetRows), rate, units.FormatCount(r.RowsPerSecond), units.FormatCount(r.IOPS), units.FormatBytes(int64(r.BytesPerSecond)) + "/s",
		fmt.Sprintf("%.3g", r.CommandsPerRow), fmt.Sprintf("%.3g", r.ReadAmplification), only(wall, fmt.Sprintf("%.2f", r.CPUPerIO)),
		us(r.P50), us(r.P95), us(r.P99), us(r.P999), us(r.Max), fmt.Sprintf("%.2f-%.2f", r.LeastShare, r.MostShare),
		only(wall, strconv.FormatInt(r.Errors, 10)), only(wall, strconv.FormatInt(r.Retries, 10)), only(wall && !math.IsNaN(r.Written), share100(r.Written)), count0(r.ServeThreads), count0(int(r.ServeIOPS)), audit,
	})
}

// show prints the table and what follows from it, and ends the verb.
func (o *benchOutput) show() error {
	e := o.e
	e.ui.Table([]string{"SSDs", "SSD model", "blocks", "threads", "row", "stack", "QPs", "depth", "coalesce", "set", "offered/s", "rows/s", "IOPS", "rate", "cmds/row", "read amp", "CPU us/IO",
		"p50 us", "p95 us", "p99 us", "p99.9 us", "max us", "balance", "errors", "retries", "written", "serving CPUs", "their limit", "audit"}, o.table)
	alike := false
	for i := range o.rows {
		r := &o.rows[i]
		if !r.Modelled && r.Audited && !r.ContentVaries && !alike {
			alike = true
			e.ui.Printf("the SSDs hold the same bytes wherever they were sampled (were they never written?): reads from a wrong place would not be noticed")
		}
		if r.Open != nil && !r.Open.KeptUp {
			e.ui.Printf("%sasked for %s rows/s, got %s: %s had arrived and waited for their turn at the end; latencies count from the arrival", modelledWord(r), units.FormatCount(r.Open.Rate), units.FormatCount(r.Open.Achieved), units.FormatCount(float64(r.Open.Unserved)))
		}
		if e.c.Bool("histogram") {
			e.ui.Printf("%slatency of %s, %d SSDs, %d blocks, rows of %d bytes, depth %d:", modelledWord(r), r.Stack, r.SSDs, r.Blocks, r.RowBytes, r.Depth)
			for _, l := range r.HistogramText() {
				e.ui.Printf("%s", l)
			}
		}
	}
	for _, s := range iobench.Summarise(o.rows) {
		o.out.object(s)
		e.ui.Printf("%s", s)
	}
	for _, s := range iobench.Overlaps(o.rows) {
		o.out.object(s)
		e.ui.Printf("%s", s)
	}
	if o.failed > 0 {
		class := errs.Device
		if o.class == errs.Capability {
			class = o.class
		}
		return errs.New(class, "%d of %d rows failed their audit; the list says why", o.failed, o.total)
	}
	return nil
}

// coalesceText is what coalesceFlag reads.
func coalesceText(n int) string {
	switch {
	case n < 0:
		return "off"
	case n == 0:
		return "auto"
	}
	return strconv.Itoa(n)
}

func modelledWord(r *iobench.Row) string {
	if r.Modelled {
		return "modelled: "
	}
	return ""
}

// openBench opens what rows are shown in.
func (e *env) openBench(clock string) (*benchOutput, error) {
	out, err := e.openResults()
	if err != nil {
		return nil, err
	}
	tl, err := e.openTimeline(clock)
	if err != nil {
		out.end(&err)
		return nil, err
	}
	return &benchOutput{e: e, out: out, tl: tl}, nil
}

// end ends both files; err is what the run returns.
func (o *benchOutput) end(err *error) {
	closing(err, o.tl.close)
	o.out.end(err)
}

// sized refuses sweeps that nobody waits for.
func (o *benchOutput) sized(points []point) error {
	if o.total = len(points); o.total > maxPoints {
		return errs.New(errs.Usage, "%d combinations, at most %d: shorten a list", o.total, maxPoints)
	}
	return nil
}

// benchVirtual plays the sweep on the virtual clock.
func (e *env) benchVirtual(ctx context.Context, p *benchPlan) (err error) {
	o, err := e.openBench(timeline.Virtual)
	if err != nil {
		return err
	}
	defer o.end(&err)
	points := p.points()
	if err := o.sized(points); err != nil {
		return err
	}
	e.ui.Printf("virtual clock, hardware profile %s (%s): every figure is modelled, none is measured", p.hardware.Name, p.hardware.About)
	for i, at := range points {
		e.ui.Progress("bench io", int64(i), int64(o.total))
		cfg := o.config(p, at)
		cfg.Hardware, cfg.SSDCount, cfg.Model, cfg.LBABytes = p.hardware, at.ssds, e.playModel, p.lba
		row, err := iobench.Run(ctx, cfg)
		if err != nil {
			return err
		}
		o.add(benchRow{Row: row})
	}
	return o.show()
}

// benchWall measures the sweep.
func (e *env) benchWall(ctx context.Context, p *benchPlan) (err error) {
	o, err := e.openBench(timeline.Wall)
	if err != nil {
		return err
	}
	defer o.end(&err)
	dev, err := e.openDevice("")
	if err != nil {
		return err
	}
	defer closing(&err, dev.Close)
	set, err := e.openSSDs(ctx, "only")
	if err != nil {
		return err
	}
	defer closing(&err, set.close)
	loaded, err := e.benchDataset(ctx, p, set)
	if err != nil {
		return err
	}
	ssds := loaded.ssds
	if p.ssds == nil {
		p.ssds = []int{len(ssds)}
	}
	for _, n := range p.ssds {
		if n > len(ssds) {
			return errs.New(errs.Usage, "--ssds %d: only %d are bound; bind more with \"heliosctl bind-ssds\"", n, len(ssds))
		}
		for _, d := range ssds[:n] { // without a dataset nobody has checked that
			if a, b := ssds[0].Ctrl.Namespace().LBABytes, d.Ctrl.Namespace().LBABytes; a != b {
				return errs.New(errs.Usage, "SSD %s has LBAs of %d bytes and %s of %d; choose SSDs of one size with --only", ssds[0].Name, a, d.Name, b)
			}
		}
	}
	points := p.points()
	if err := o.sized(points); err != nil {
		return err
	}
	if e.playModel == nil {
		for _, l := range modelLines(set.bound) {
			e.ui.Printf("%s", l)
			if slices.Contains(p.stacks, "cpu") || slices.Contains(p.stacks, "mmap") {
				e.ui.Printf("the stacks cpu and mmap read past it: their rows are those of the backing")
			}
		}
	}
	var memory *gpuio.Memory
	if p.queues() && (dev.Info().Backend != "host" || e.c.IsSet("memory-rung")) {
		if memory, err = gpuio.ChooseRung(dev, ssds[:slices.Max(p.ssds)], e.c.String("memory-rung")); err != nil {
			return err
		}
		if rep := memory.Report(); dev.Info().Backend != "host" {
			e.ui.Printf("memory rung %s", rep.Rung)
			for _, t := range gpuio.Together(rep.Tried) {
				e.ui.Printf("  not %s: %s", t.Rung, t.Why)
			}
		}
	}
	limits := map[string]iobench.ServeLimit{}
	// Who waits on the host device plays the SSDs; for a GPU each SSD has one thread that does.
	serving := 1
	if dev.Info().Backend == "host" {
		serving = dev.Info().SMs
	}
	for i, at := range points {
		n := at.ssds
		key := fmt.Sprint(n, at.rowBytes, at.depth)
		if _, ok := limits[key]; !ok {
			limits[key], err = iobench.MeasureServe(ctx, ssds[:n], at.rowBytes, at.depth, serving, time.Duration(max(p.seconds/4, 0.02)*float64(time.Second)))
			if err != nil {
				return err
			}
		}
		e.ui.Progress("bench io", int64(i), int64(o.total))
		cfg := o.config(p, at)
		cfg.Dev, cfg.SSDs, cfg.Layout, cfg.Sums, cfg.Memory = dev, ssds[:n], loaded.layout, loaded.sums, memory
		row, err := iobench.Run(ctx, cfg)
		if err != nil {
			return err
		}
		share := 1.0
		if loaded.layout.Rows == 0 {
			share = written(ssds[:n])
		}
		if at.stack == "async" || at.stack == "sync" {
			row.SSDModel = e.played(set.bound, ssds[:n])
			row.SSDsModelled = row.SSDModel != ""
		}
		limit := limits[key]
		o.add(benchRow{row, share, limit.Threads, limit.IOPS, e.c.Duration("ssd-latency").Seconds() * 1e6})
	}
	err = o.show()
	e.showFaults(set, &results{e: e})
	return err
}

// played names the models that software SSDs play, "" for none.
func (e *env) played(bound []state.SSD, ssds []*gpuio.SSD) string {
	if e.playModel != nil {
		return e.playModel.Name
	}
	var names []string
	for _, s := range ssds {
		for _, d := range bound {
			if d.Name == s.Name && d.Model != "" && !slices.Contains(names, filepath.Base(d.Model)) {
				names = append(names, filepath.Base(d.Model))
			}
		}
	}
	return strings.Join(names, "+")
}

// benchLoaded is what is read: a dataset's rows, or with no layout raw SSDs.
type benchLoaded struct {
	ssds   []*gpuio.SSD
	layout gpuio.Layout
	sums   []uint32
}

// benchDataset finds the dataset on the SSDs, where one is asked for.
func (e *env) benchDataset(ctx context.Context, p *benchPlan, set *ssdSet) (l benchLoaded, err error) {
	c := e.c
	if !c.IsSet("dataset") && c.NArg() == 0 {
		if c.Bool("check-reads") {
			return l, errs.New(errs.Usage, "--check-reads is for a dataset, whose rows have checksums; give one, or leave it out: a sample of the rows is always compared")
		}
		l.ssds = set.ssds
		return l, nil
	}
	d, err := e.openDataset()
	if err != nil {
		return l, err
	}
	defer closing(&err, d.Close)
	if l.layout, l.ssds, err = dataset.Attach(ctx, d, set.ssds); err != nil {
		return l, err
	}
	if c.IsSet("row-bytes") || c.IsSet("ssds") {
		return l, errs.New(errs.Usage, "--row-bytes and --ssds are for SSDs read raw; dataset %s lies on %d SSDs with rows of %d bytes, leave them out", d.Meta.Name, len(l.ssds), l.layout.RowBytes)
	}
	p.rowBytes = []int{int(l.layout.RowBytes)}
	if c.Bool("check-reads") {
		l.sums, err = dataset.RowSums(ctx, d, l.ssds)
	}
	return l, err
}

// count0 is a number that may not apply.
func count0(n int) string {
	if n == 0 {
		return "-"
	}
	return units.FormatCount(float64(n))
}

func share100(v float64) string { return strconv.FormatFloat(100*v, 'f', 0, 64) + "%" }
