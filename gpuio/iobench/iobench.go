// Package iobench measures the I/O stacks of gpuio with random row reads, some sets of which are
// always in flight, and audits what it measured: launches, a sample of the rows against an
// independent read of the backing, and the number of commands and of bytes against each SSD's own
// SMART counters. A row of results that fails its audit says so.
//
// The same measurements run on the virtual clock of gpuio/iosim, where every figure is modelled.
package iobench

import (
	"context"
	"errors"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/philox"
	"helios/internal/ssdmodel"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/nvme"
)

// The clocks.
const (
	ClockWall    = "wall"
	ClockVirtual = "virtual"
)

// Config is one measurement. Zero values choose defaults.
type Config struct {
	Dev      cuda.Device
	SSDs     []*gpuio.SSD
	RowBytes int           // 4096
	Stack    string        // name of a gpuio.Stack
	Blocks   int           // blocks of the I/O kernels; 0: as many as training has
	PerBlock int           // threads of a block (async 32, sync 128)
	Depth    int           // reads outstanding per SSD (256)
	Threads  int           // cpu
	Engine   string        // cpu: "io_uring" or "pread"
	Coalesce int           // as AsyncOptions.CoalesceBytes
	Duration time.Duration // of the measurement (2 s; virtual: what some 200,000 reads take)
	WarmUp   time.Duration // before it (a quarter of Duration)
	Seed     uint64
	Timeout  time.Duration // deadline of one read
	// Memory shows where queues and data of async and sync go, by gpuio.ChooseRung for Dev and at
	// least these SSDs; nil: as AsyncOptions.Memory.
	Memory *gpuio.Memory
	// Layout of loaded SSDs, read at their DataStart. Its zero value reads raw SSDs: rows all
	// over the namespaces, whatever they hold.
	Layout gpuio.Layout
	// Sums are the checksums of the layout's rows; with them every row is checked as it is read.
	Sums []uint32
	// Samples is the number of rows compared with the backing (512).
	Samples int

	// Hardware makes the clock virtual: a machine with SSDCount SSDs (0: the profile's) of the
	// model (nil: the profile's) with blocks of LBABytes. Dev and SSDs are not used.
	Hardware *hardware.Profile
	SSDCount int
	Model    *ssdmodel.Model
	LBABytes int

	// Timeline gets a span for each set, on the track of this name. Virtual times begin at
	// TimelineFrom.
	Timeline     *timeline.Recorder
	Track        string
	TimelineFrom int64

	// setRows is the number of rows of a set over all SSDs: several times what may be outstanding,
	// so that queues never run dry between sets.
	setRows   int
	kind      *gpuio.Stack  // of Stack
	asTrained bool          // Blocks was 0
	patience  time.Duration // with a set, and with the stack's end (stall)
	// smart reads an SSD's counters; tests put a controller there that cannot count.
	smart func(context.Context, *gpuio.SSD) (nvme.SMARTLog, error)
}

// SSDRow holds what one SSD did, warm-up included.
type SSDRow struct {
	Name       string `json:"name"`
	Commands   int64  `json:"commands"`
	Bytes      int64  `json:"bytes"`
	SMARTReads int64  `json:"smart_reads"`
	SMARTUnits int64  `json:"smart_units"` // of 512,000 bytes
	Errors     int64  `json:"errors"`
	Timeouts   int64  `json:"timeouts"`
	Retries    int64  `json:"retries"`
	Resets     int64  `json:"resets"`
	GivenUp    string `json:"given_up,omitempty"`
}

// Row is the result of one measurement, in the JSON contract of "bench io".
type Row struct {
	SSDs    int `json:"ssds"`
	Blocks  int `json:"blocks"`
	Threads int `json:"threads"` // per block
	// AsTrained: Blocks are those that training has where nobody says.
	AsTrained      bool    `json:"blocks_as_trained"`
	RowBytes       int     `json:"row_bytes"`
	Stack          string  `json:"stack"`
	Device         string  `json:"device"`
	QueuePairs     int     `json:"queue_pairs"`      // per SSD
	Depth          int     `json:"depth"`            // per SSD
	IOPS           float64 `json:"iops"`             // commands per second
	BytesPerSecond float64 `json:"bytes_per_second"` // of rows
	CPUPerIO       float64 `json:"cpu_us_per_io"`    // user and system time of the process
	// Latency of a command, from its making to its completion.
	P50     float64 `json:"p50_us"`
	P95     float64 `json:"p95_us"`
	P99     float64 `json:"p99_us"`
	P999    float64 `json:"p999_us"`
	Max     float64 `json:"max_us"`
	Errors  int64   `json:"errors"`
	Audited bool    `json:"audited"`
	// host read commands that the SSDs counted, warm-up included
	SMARTReads int64 `json:"smart_reads"`
	// Beyond the contract.
	BlocksRun  int    `json:"blocks_run,omitempty"`  // at once, where fewer than Blocks
	BlocksWhy  string `json:"blocks_why,omitempty"`  // they are fewer
	AuditError string `json:"audit_error,omitempty"` // why Audited is false
	Clock      string `json:"clock"`
	Modelled   bool   `json:"modelled"` // no figure is measured
	// The SSDs are software that plays a model's times; SSDModel names which.
	SSDsModelled bool    `json:"ssds_modelled"`
	Hardware     string  `json:"hardware,omitempty"`
	SSDModel     string  `json:"ssd_model,omitempty"`
	Seconds      float64 `json:"seconds"`
	Commands     int64   `json:"commands"` // that the stack issued, warm-up included
	Retries      int64   `json:"retries"`  // of these, again; the reads came right in the end
	Sampled      int     `json:"sampled_rows"`
	Checked      bool    `json:"all_rows_checked"` // against their checksums
	// As asked for: 0 where the stack decides, negative for a command for each row.
	CoalesceBytes int `json:"coalesce_bytes"`
	// The sampled rows are not all alike. Where they are, a read from a wrong place goes unnoticed.
	ContentVaries bool     `json:"content_varies"`
	PerSSD        []SSDRow `json:"per_ssd"`
	// The least and the most that an SSD read, over the mean.
	LeastShare        float64  `json:"least_share"`
	MostShare         float64  `json:"most_share"`
	RowsPerSecond     float64  `json:"rows_per_second"`
	SSDBytesPerSecond float64  `json:"ssd_bytes_per_second"` // that the commands moved
	CommandsPerRow    float64  `json:"commands_per_row"`
	ReadAmplification float64  `json:"read_amplification"` // bytes moved over bytes of rows
	SetRows           int      `json:"set_rows"`
	Sets              int      `json:"sets_in_flight"`
	Histogram         []Bucket `json:"latency_histogram"`
	// Where queues and data were, and why nowhere better; "" where nothing was chosen.
	MemoryRung      string            `json:"memory_rung,omitempty"`
	MemoryRungTried []gpuio.RungTried `json:"memory_rung_tried,omitempty"`
	NotInPlace      string            `json:"not_in_place,omitempty"` // gpuio.Stats.NotInPlace
	// Virtual clock: the most that SSDs or the GPU's link allow, and the times before and after a
	// set's reads.
	BoundIOPS  float64 `json:"bound_iops,omitempty"`
	LaunchUS   float64 `json:"launch_us,omitempty"`
	TeardownUS float64 `json:"teardown_us,omitempty"`
	// The most commands a second that the SSDs can serve, that the links can carry, and that those
	// in flight give, each of an idle SSD's mean latency. 0 where nobody knows.
	SSDBoundIOPS   float64 `json:"ssd_bound_iops,omitempty"`
	LinkBoundIOPS  float64 `json:"link_bound_iops,omitempty"`
	DepthBoundIOPS float64 `json:"depth_bound_iops,omitempty"`

	Class     errs.Class `json:"-"` // of AuditError
	VirtualNS int64      `json:"-"` // length of the simulation
}

// stall bounds the time in which a set has to end.
const stall = time.Minute

// Run measures once. The error is about a configuration that cannot be run, or ctx; what went wrong
// with the reads or the device, and audits that did not agree, are in the Row.
func Run(ctx context.Context, cfg Config) (Row, error) {
	if err := cfg.fill(); err != nil {
		return Row{}, err
	}
	if cfg.Hardware != nil {
		return runVirtual(ctx, cfg)
	}
	row := cfg.row()
	row.SSDs, row.Device, row.Clock = len(gpuio.Distinct(cfg.SSDs)), cfg.Dev.Info().Name, ClockWall
	l, err := cfg.layout()
	if err != nil {
		return row, err
	}
	if err := cfg.fits(); err != nil {
		return row, err
	}
	b := &bench{cfg: cfg, l: l, row: &row,
		draw: draw{key: philox.Key(cfg.Seed, philox.StreamBench)}}
	err = b.measure(ctx)
	if ctx.Err() != nil {
		if errors.Is(err, ctx.Err()) {
			return row, err
		}
		return row, errors.Join(err, ctx.Err())
	}
	if errs.ClassOf(err) == errs.Usage {
		return row, err
	}
	row.Audited = err == nil
	if err != nil {
		row.AuditError, row.Class = err.Error(), errs.ClassOf(err)
	}
	return row, nil
}

// measure is one measurement and its audit: its error fails the row.
func (b *bench) measure(ctx context.Context) error {
	cfg := &b.cfg
	if err := touch(ctx, cfg.SSDs, b.l); err != nil {
		return err
	}
	o, err := cfg.options(ctx, b.l)
	if err != nil {
		return err
	}
	before, err := b.counters(ctx)
	if err != nil {
		return err
	}
	inner, err := cfg.kind.Open(cfg.Dev, cfg.SSDs, b.l, o)
	if err != nil {
		return err
	}
	if b.r, err = cfg.checked(inner, b.l); err != nil {
		return err
	}
	err = b.keepInFlight(ctx)
	if q, ok := inner.(interface{ QueuePairs() int }); ok {
		b.row.QueuePairs = q.QueuePairs()
	}
	if q, ok := inner.(interface{ RunningBlocks() (int, string) }); ok {
		if n, why := q.RunningBlocks(); why != "" {
			b.row.BlocksRun, b.row.BlocksWhy = n, why
		}
	}
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.patience)
	defer cancel()
	err = errors.Join(err, b.r.Close(cctx))
	total := b.r.Stats()
	err = errors.Join(err, b.free())
	b.totals(&total)
	actx, acancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer acancel()
	after, cerr := b.counters(actx)
	if cerr == nil {
		b.count(&total, before, after)
	}
	if err = errors.Join(err, cerr); err != nil {
		return err
	}
	return b.audit(actx, &total)
}

func (c *Config) fill() error {
	virtual := c.Hardware != nil
	if !virtual && (len(c.SSDs) == 0 || c.Dev == nil) {
		return errs.New(errs.Usage, "bench io needs an SSD: run \"heliosctl bind-ssds\"")
	}
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	if c.Layout.Rows > 0 {
		set(&c.RowBytes, int(c.Layout.RowBytes))
		if c.RowBytes != int(c.Layout.RowBytes) {
			return errs.New(errs.Usage, "rows of %d bytes: the SSDs hold rows of %d", c.RowBytes,
				c.Layout.RowBytes)
		}
	}
	set(&c.RowBytes, 4096)
	set(&c.Depth, 256)
	set(&c.Samples, 512)
	var err error
	if c.kind, err = gpuio.FindStack(c.Stack); err != nil {
		return err
	}
	c.Stack = c.kind.Name
	set(&c.PerBlock, c.kind.Threads)
	switch c.asTrained = c.Blocks == 0; {
	case !c.kind.Queued:
		set(&c.Blocks, gpuio.DefaultBlocks)
	case !virtual: // the model knows its own
		set(&c.Blocks, c.kind.BlocksOn(c.Dev.Info(), c.PerBlock))
	}
	if !virtual && c.Duration == 0 {
		c.Duration = 2 * time.Second
	}
	if c.WarmUp == 0 {
		c.WarmUp = c.Duration / 4
	}
	if err := c.check(); err != nil {
		return err
	}
	if c.patience == 0 {
		c.patience = stall
	}
	if c.smart == nil {
		c.smart = func(ctx context.Context, s *gpuio.SSD) (nvme.SMARTLog,
			error) {
			return s.Ctrl.SMART(ctx)
		}
	}
	ssds := len(c.SSDs)
	if virtual {
		if set(&c.SSDCount, c.Hardware.SSDs.Count.Int()); c.SSDCount < 1 {
			return errs.New(errs.Usage, "%d SSDs: choose 1 or more", c.SSDCount)
		}
		ssds = c.SSDCount
	}
	if c.setRows = c.rowsPerSSD(c.Depth) * ssds; c.setRows > maxSetRows {
		return errs.New(errs.Usage, "sets of %d rows of %d SSDs: the most is %d; give fewer SSDs",
			c.setRows, ssds, maxSetRows)
	}
	return nil
}

// check refuses values that no measurement can have.
func (c *Config) check() error {
	if c.RowBytes < 1 || c.Depth < 1 || c.Blocks < 0 || c.Duration < 0 || c.WarmUp < 0 {
		return errs.New(errs.Usage,
			"bench io: rows of %d bytes, depth %d, %d blocks, duration %v: all must be positive",
			c.RowBytes, c.Depth, c.Blocks, c.Duration)
	}
	return nil
}

const (
	setsInFlight = 3
	maxSetRows   = 1 << 24
)

// row returns what the configuration says of its result.
func (c *Config) row() Row {
	row := Row{Blocks: c.Blocks, AsTrained: c.asTrained, RowBytes: c.RowBytes, Stack: c.Stack,
		Depth: c.Depth, Threads: c.PerBlock, SetRows: c.setRows,
		Sets: setsInFlight, Checked: c.Sums != nil,
		CoalesceBytes: c.Coalesce,
		Histogram:     []Bucket{}, PerSSD: []SSDRow{}}
	if c.Memory != nil && c.kind.Queued {
		rep := c.Memory.Report()
		row.MemoryRung, row.MemoryRungTried = rep.Rung, rep.Tried
	}
	return row
}

// layout is the loaded one, or as many rows as the smallest SSD holds on each.
func (c *Config) layout() (gpuio.Layout, error) {
	if c.Layout.Rows > 0 {
		return c.Layout, nil
	}
	lba := 0
	blocks := int64(1<<63 - 1)
	raw := make([]*gpuio.SSD, len(c.SSDs))
	for i, s := range c.SSDs {
		ns := s.Ctrl.Namespace()
		lba = ns.LBABytes
		blocks = min(blocks, int64(ns.Blocks))
		d := *s
		d.DataStart = 0
		raw[i] = &d
	}
	c.SSDs = raw
	return rawLayout(len(c.SSDs), c.RowBytes, lba, blocks)
}

// rawLayout has as many rows as so many blocks hold on each SSD.
func rawLayout(ssds, rowBytes, lba int, blocks int64) (gpuio.Layout, error) {
	one, err := gpuio.NewLayout(1, rowBytes, 1, lba)
	if err != nil {
		return one, err
	}
	slots := blocks / int64(one.LBAsPerRow) * int64(one.RowsPerLBA)
	if slots == 0 {
		return one, errs.New(errs.Usage, "bench io: no row of %d bytes fits the smallest SSD",
			rowBytes)
	}
	return gpuio.NewLayout(slots*int64(ssds), rowBytes, ssds, lba)
}

// checked puts the check of every row in front of a stack, where there are checksums.
func (c *Config) checked(r gpuio.Reader, l gpuio.Layout) (gpuio.Reader, error) {
	if c.Sums == nil {
		return r, nil
	}
	checked, err := gpuio.NewChecked(c.Dev, r, c.SSDs, l, c.Sums)
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), c.patience)
		defer cancel()
		return nil, errors.Join(err, r.Close(ctx))
	}
	return checked, nil
}

// options are those of the stack; SSDs are measured for them.
func (c *Config) options(ctx context.Context, l gpuio.Layout) (o gpuio.StackOptions, err error) {
	o = gpuio.StackOptions{
		AsyncOptions: gpuio.AsyncOptions{
			Blocks: c.Blocks, Threads: c.PerBlock, Depth: c.Depth,
			Timeout: c.Timeout, CoalesceBytes: c.Coalesce, Memory: c.Memory,
		},
		Workers: c.Threads, Engine: c.Engine,
	}
	o.Speed, err = c.kind.MeasureSpeed(ctx, c.Dev, c.SSDs, l, o)
	return o, err
}

// rowsPerSSD is the rows of a set for each SSD.
func (c *Config) rowsPerSSD(depth int) int {
	if c.kind.PageCache { // reads have no latency to hide there
		return 512
	}
	return min(max(4*depth, 256), 8192)
}

// fits reports whether the sets have room on the device, and what would have.
func (c *Config) fits() error {
	info := c.Dev.Info()
	if info.Backend == "host" || info.MemTotal == 0 {
		return nil
	}
	free := info.MemTotal
	for _, n := range c.Dev.MemUsage() {
		free -= n
	}
	stride := int64(c.RowBytes+3) &^ 3
	need := stride * setsInFlight * int64(c.setRows)
	if need <= free {
		return nil
	}
	perRow := stride * setsInFlight * int64(len(c.SSDs))
	limit := 0
	for d := c.Depth; d > 0; d /= 2 {
		if perRow*int64(c.rowsPerSSD(d)) <= free {
			limit = d
			break
		}
	}
	advice := errs.Textf("{depth} %d fits", limit)
	if limit == 0 {
		advice = errs.Textf("%d rows of %d bytes fit; use fewer SSDs or smaller rows",
			max(free, 0)/stride, c.RowBytes)
	}
	return errs.New(errs.Capability,
		"%s: bench io keeps %d sets of %d rows of %d SSDs, %s of device memory, and %s are there: %s",
		info.Name, setsInFlight, c.setRows, len(c.SSDs), units.FormatBytes(need),
		units.FormatBytes(max(free, 0)), advice)
}

// totals returns what the stack says about the whole run.
func (b *bench) totals(t *gpuio.Stats) {
	row := b.row
	row.Commands = t.Commands
	row.Retries = t.Retries
	row.NotInPlace = t.NotInPlace
	row.Errors = t.Errors + t.Timeouts + t.Failed
	for _, s := range t.PerSSD {
		row.PerSSD = append(row.PerSSD, SSDRow{Name: s.Name, Commands: s.Commands, Bytes: s.Bytes,
			Errors: s.Errors, Timeouts: s.Timeouts, Retries: s.Retries, Resets: s.Resets,
			GivenUp: s.GivenUp})
	}
	row.shares()
	row.perRow(t.Commands, t.Bytes, t.Rows+t.Failed)
}

// shares compares the SSDs.
func (r *Row) shares() {
	var most, sum int64
	least := int64(1<<63 - 1)
	for _, s := range r.PerSSD {
		sum += s.Bytes
		most, least = max(most, s.Bytes), min(least, s.Bytes)
	}
	if sum > 0 {
		mean := float64(sum) / float64(len(r.PerSSD))
		r.LeastShare, r.MostShare = float64(least)/mean, float64(most)/mean
	}
}

// perRow relates commands and bytes of the whole run to its rows. Where a row is read by several
// commands or shares one, rows a second follow from commands a second.
func (r *Row) perRow(commands, bytes, rows int64) {
	if rows == 0 || commands == 0 {
		return
	}
	r.CommandsPerRow = float64(commands) / float64(rows)
	r.ReadAmplification = float64(bytes) / float64(rows) / float64(r.RowBytes)
	r.RowsPerSecond = r.IOPS / r.CommandsPerRow
	r.BytesPerSecond = r.RowsPerSecond * float64(r.RowBytes)
	r.SSDBytesPerSecond = r.IOPS * float64(bytes) / float64(commands)
}
