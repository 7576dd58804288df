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

	"helios/cuda"
	"helios/dataset/stripe"
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
	// share of the bytes read from that hold data; null where only the controller knows
	Written float64 `json:"written"`
	// The CPU threads that play SSDs in RAM, and what they reach with nothing beside them; 0 where
	// none do.
	ServeThreads int     `json:"serve_threads"`
	ServeIOPS    float64 `json:"serve_iops"`
	LatencyUS    float64 `json:"ssd_latency_us"` // modelled
}

// benchOutput shows rows of results as they come, and all together.
type benchOutput struct {
	*ioBench
	out    *results
	tl     *timelineFile
	total  int
	rows   []iobench.Row
	table  [][]string
	failed int
	class  errs.Class // of the failed rows, if they have the same
	from   int64      // where the next row's virtual times begin in the timeline
}

// config returns what the flags say for one point, but for the SSDs.
func (o *benchOutput) config(at point) iobench.Config {
	label := fmt.Sprintf("%s, %d SSDs, row %d, depth %d", at.stack, at.ssds, at.rowBytes, at.depth)
	if at.blocks > 0 {
		label = fmt.Sprintf("%s, %d SSDs, %d blocks, row %d, depth %d", at.stack, at.ssds, at.blocks,
			at.rowBytes, at.depth)
	}
	if at.coalesce != 0 {
		label += ", coalesce " + coalesceText(at.coalesce)
	}
	return iobench.Config{
		RowBytes: at.rowBytes, Stack: at.stack, Blocks: at.blocks, PerBlock: o.threads,
		Depth: at.depth, Threads: o.workers, Coalesce: at.coalesce,
		Duration: time.Duration(o.seconds * float64(time.Second)),
		Seed:     1,
		Timeline: o.tl.rec, Track: label, TimelineFrom: o.from,
	}
}

func (o *benchOutput) add(r benchRow) {
	o.out.event("row", r)
	o.rows = append(o.rows, r.Row)
	o.from += r.VirtualNS + int64(time.Millisecond)
	if r.BlocksWhy != "" && !r.AsTrained {
		o.plainNote(fmt.Sprintf("of %d I/O blocks %d run at once, as %s", r.Blocks, r.BlocksRun,
			r.BlocksWhy))
	}
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
	o.table = append(o.table, ioCells(&r, audit))
}

// ioCells are a row of ioColumns.
func ioCells(r *benchRow, audit string) []string {
	only := func(measured bool, s string) string {
		if !measured {
			s = ""
		}
		return dash(s)
	}
	wall := !r.Modelled
	model := "-"
	if r.SSDsModelled {
		model = r.SSDModel + " (modelled)"
	}
	us := func(v float64) string { return units.FormatSeconds(v / 1e6) }
	return []string{
		strconv.Itoa(r.SSDs), model, strconv.Itoa(r.Blocks), strconv.Itoa(r.Threads),
		units.FormatBytes(int64(r.RowBytes)), r.Stack, strconv.Itoa(r.QueuePairs),
		strconv.Itoa(r.Depth), coalesceText(r.CoalesceBytes),
		units.FormatCount(r.RowsPerSecond), units.FormatCount(r.IOPS),
		fmt.Sprintf("%.3g", r.BytesPerSecond/float64(units.GiB)),
		fmt.Sprintf("%.3g", r.CommandsPerRow), fmt.Sprintf("%.3g", r.ReadAmplification),
		only(wall, us(r.CPUPerIO)),
		us(r.P50), us(r.P95), us(r.P99), us(r.P999), us(r.Max),
		fmt.Sprintf("%.2f-%.2f", r.LeastShare, r.MostShare),
		only(wall, strconv.FormatInt(r.Errors, 10)), only(wall, strconv.FormatInt(r.Retries, 10)),
		only(wall && !math.IsNaN(r.Written), share100(r.Written)), count0(r.ServeThreads),
		count0(int(r.ServeIOPS)), audit,
	}
}

// show prints the table and what follows from it, and ends the verb.
func (o *benchOutput) show() error {
	e := o.env
	e.ui.Columns(ioColumns, o.table)
	alike := false
	for i := range o.rows {
		r := &o.rows[i]
		if !r.Modelled && r.Audited && !r.ContentVaries && !alike {
			alike = true
			e.ui.Printf(
				"the SSDs hold the same bytes wherever they were sampled (were they never written?): reads from a wrong place would not be noticed")
		}
	}
	for _, s := range iobench.Summarise(o.rows) {
		o.out.event("summary", s)
		e.ui.Printf("%s", s)
	}
	if o.failed > 0 {
		class := errs.Device
		if o.class == errs.Capability {
			class = o.class
		}
		return errs.New(class, "%d of %d rows failed their audit; the list has the reasons", o.failed,
			o.total)
	}
	return nil
}

// coalesceText writes what plan.ParseCoalesce reads.
func coalesceText(n int) string {
	switch {
	case n < 0:
		return "off"
	case n == 0:
		return "auto"
	}
	return strconv.Itoa(n)
}

// openOutput opens what rows are shown in.
func (b *ioBench) openOutput(clock string) (*benchOutput, error) {
	out, err := b.openResults(b.env)
	if err != nil {
		return nil, err
	}
	tl, err := openTimeline(&b.outputs, b.timeline, clock)
	if err != nil {
		out.end(&err)
		return nil, err
	}
	return &benchOutput{ioBench: b, out: out, tl: tl}, nil
}

// end ends both files; err is what the run returns.
func (o *benchOutput) end(err *error) {
	closing(err, o.tl.close)
	o.out.end(err)
}

// sized refuses sweeps that nobody waits for.
func (o *benchOutput) sized(points []point) error {
	if o.total = len(points); o.total > maxPoints {
		return errs.New(errs.Usage, "%d combinations, at most %d: shorten a list", o.total,
			maxPoints)
	}
	return nil
}

// play plays the sweep on the virtual clock.
func (b *ioBench) play(ctx context.Context) (err error) {
	o, err := b.openOutput(timeline.Virtual)
	if err != nil {
		return err
	}
	defer o.end(&err)
	points := b.points()
	if err := o.sized(points); err != nil {
		return err
	}
	b.ui.Printf(
		"virtual clock, hardware profile %s (%s): every figure is modelled, none is measured",
		b.hardware.Name, b.hardware.About)
	for i, point := range points {
		b.ui.Progress("bench io", int64(i), int64(o.total))
		cfg := o.config(point)
		cfg.Hardware, cfg.SSDCount, cfg.Model = b.hardware, point.ssds, b.opener.playModel
		row, err := iobench.Run(ctx, cfg)
		if err != nil {
			return err
		}
		o.add(benchRow{Row: row})
	}
	return o.show()
}

// measure measures the sweep.
func (b *ioBench) measure(ctx context.Context) (err error) {
	o, err := b.openOutput(timeline.Wall)
	if err != nil {
		return err
	}
	defer o.end(&err)
	dev, err := b.deviceArgs.open(b.env, b.workers, "")
	if err != nil {
		return err
	}
	defer closing(&err, dev.Close)
	b.opener.pollDoorbells = ringsDoorbells(dev)
	set, err := b.opener.open(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, set.Close)
	loaded, err := b.attach(ctx, set)
	if err != nil {
		return err
	}
	if err := b.checkCounts(loaded.ssds); err != nil {
		return err
	}
	points := b.points()
	if err := o.sized(points); err != nil {
		return err
	}
	b.showModels(set.Bound)
	m := &ioMeasurer{ioBench: b, benchLoaded: loaded, dev: dev, set: set, out: o,
		limits: map[string]iobench.ServeLimit{}}
	if m.memory, err = b.chooseMemory(dev, loaded.ssds); err != nil {
		return err
	}
	for i, p := range points {
		b.ui.Progress("bench io", int64(i), int64(o.total))
		row, err := m.measure(ctx, p)
		if err != nil {
			return err
		}
		o.add(row)
	}
	err = o.show()
	showFaults(b.env, set, &results{e: b.env})
	return err
}

// checkCounts refuses numbers of SSDs that are not there, and SSDs of several block sizes, which
// without a dataset nobody has looked at.
func (b *ioBench) checkCounts(ssds []*gpuio.SSD) error {
	if len(b.counts) == 0 {
		b.counts = []int{len(ssds)}
	}
	for _, n := range b.counts {
		if n > len(ssds) {
			return errs.New(errs.Usage,
				"{ssd-count} %d: only %d are bound; bind more with \"heliosctl bind-ssds\"", n,
				len(ssds))
		}
		for _, d := range ssds[:n] {
			if a, b := ssds[0].Ctrl.Namespace().LBABytes, d.Ctrl.Namespace().LBABytes; a != b {
				return errs.New(errs.Usage,
					"SSD %s has LBAs of %d bytes and %s of %d; choose SSDs of one size with {ssds}",
					ssds[0].Name, a, d.Name, b)
			}
		}
	}
	return nil
}

// showModels shows which SSDs play a model, and which stacks do not notice.
func (b *ioBench) showModels(ssds []state.SSD) {
	if b.opener.playModel != nil {
		return
	}
	reads := func(s *gpuio.Stack) bool { return !s.Queued }
	for _, l := range modelLines(ssds) {
		b.ui.Printf("%s", l)
		if gpuio.AnyStack(b.stacks, reads) {
			b.ui.Printf("the stacks %s read past it: their rows are those of the backing",
				strings.Join(gpuio.StackNames(reads), " and "))
		}
	}
}

// chooseMemory chooses the memory rung of a GPU, or the one that was asked for; nil: none matters.
func (b *ioBench) chooseMemory(dev cuda.Device, ssds []*gpuio.SSD) (*gpuio.Memory, error) {
	onHost := dev.Info().Backend == "host"
	if !b.queues() || onHost && b.given(&b.rung) == "" {
		return nil, nil
	}
	memory, err := gpuio.ChooseRung(dev, ssds[:slices.Max(b.counts)], b.rung)
	if err != nil || onHost {
		return memory, err
	}
	report := memory.Report()
	b.ui.Printf("memory rung %s", report.Rung)
	for _, t := range gpuio.Together(report.Tried) {
		b.ui.Printf("  not %s: %s", t.Rung, t.Why)
	}
	return memory, nil
}

// ioMeasurer measures points of a sweep on SSDs that are open.
type ioMeasurer struct {
	*ioBench
	benchLoaded
	dev    cuda.Device
	set    *ssdSet
	memory *gpuio.Memory
	out    *benchOutput
	limits map[string]iobench.ServeLimit // what software SSDs serve, by SSDs, bytes and depth
}

func (m *ioMeasurer) measure(ctx context.Context, p point) (row benchRow, err error) {
	ssds := m.ssds[:p.ssds]
	if m.given(&m.depths) == "" {
		p.depth = gpuio.FitDepth(ssds, 0, p.depth)
	}
	limit, err := m.serveLimit(ctx, ssds, p)
	if err != nil {
		return row, err
	}
	cfg := m.out.config(p)
	cfg.Dev, cfg.SSDs, cfg.Layout, cfg.Sums, cfg.Memory = m.dev, ssds, m.layout, m.sums, m.memory
	got, err := iobench.Run(ctx, cfg)
	if err != nil {
		return row, err
	}
	share := 1.0
	if m.layout.Rows == 0 {
		share = written(ssds)
	}
	if gpuio.AnyStack([]string{p.stack}, queued) {
		got.SSDModel = m.played(m.set.Bound, ssds)
		got.SSDsModelled = got.SSDModel != ""
		if err := m.limit(&got, m.set.Bound, ssds); err != nil {
			return row, err
		}
	}
	return benchRow{got, share, limit.Threads, limit.IOPS, m.latency.Seconds() * 1e6}, nil
}

// serveLimit measures what software SSDs can serve, once for each combination.
func (m *ioMeasurer) serveLimit(ctx context.Context, ssds []*gpuio.SSD,
	p point) (limit iobench.ServeLimit, err error) {
	key := fmt.Sprint(len(ssds), p.rowBytes, p.depth)
	if limit, ok := m.limits[key]; ok {
		return limit, nil
	}
	// On the host device the waiting threads play the SSDs; for a GPU each SSD has one thread.
	serving := 1
	if dev := m.dev.Info(); dev.Backend == "host" {
		serving = dev.SMs
	}
	m.limits[key], err = iobench.MeasureServe(ctx, ssds, p.rowBytes, p.depth, serving,
		time.Duration(max(m.seconds/4, 0.02)*float64(time.Second)))
	return m.limits[key], err
}

// played names the models that software SSDs play, "" for none.
func (b *ioBench) played(bound []state.SSD, ssds []*gpuio.SSD) string {
	if b.opener.playModel != nil {
		return b.opener.playModel.Name
	}
	var names []string
	for _, s := range ssds {
		for _, d := range bound {
			if d.Name == s.Name && d.Model != "" &&
				!slices.Contains(names, filepath.Base(d.Model)) {
				names = append(names, filepath.Base(d.Model))
			}
		}
	}
	return strings.Join(names, "+")
}

// benchLoaded holds what is read: a dataset's rows, or with no layout raw SSDs.
type benchLoaded struct {
	ssds   []*gpuio.SSD
	layout gpuio.Layout
	sums   []uint32
}

// attach finds the dataset on the SSDs, where one is asked for.
func (b *ioBench) attach(ctx context.Context, set *ssdSet) (l benchLoaded,
	err error) {
	if !b.named(b.env) {
		if b.checkReads {
			return l, errs.New(errs.Usage,
				"{check-reads} is for a dataset, whose rows have checksums; give one, or leave it out: a sample of the rows is always compared")
		}
		l.ssds = set.SSDs
		return l, nil
	}
	d, err := b.datasetArgs.open(b.env)
	if err != nil {
		return l, err
	}
	defer closing(&err, d.Close)
	if l.layout, l.ssds, err = stripe.Attach(ctx, d, set.SSDs); err != nil {
		return l, err
	}
	if b.given(&b.rowBytes) != "" || len(b.counts) > 0 {
		return l, errs.New(errs.Usage,
			"{row-bytes} and {ssd-count} are for SSDs read raw; dataset %s lies on %d SSDs with rows of %d bytes, leave them out",
			d.Meta.Name, len(l.ssds), l.layout.RowBytes)
	}
	b.rowBytes = []int{int(l.layout.RowBytes)}
	if b.checkReads {
		if err := stripe.RoomForSums(l.layout.Rows); err != nil {
			return l, err
		}
		l.sums = make([]uint32, l.layout.Rows)
		err = stripe.RowSums(ctx, d, l.ssds, l.sums)
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
