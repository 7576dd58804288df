// Package iobench measures the I/O stacks of gpuio with random row reads in a closed loop, and
// audits what it measured (DESIGN section 13): a sample of the rows is compared with an
// independent read of the backing, and the number of commands with the SSDs' own SMART counters.
// A row of results that fails its audit says so.
package iobench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/nvme"
)

// Config is one measurement. Zero values choose defaults.
type Config struct {
	Dev      cuda.Device
	SSDs     []*gpuio.SSD
	RowBytes int           // 4096
	Stack    string        // "async" (default), "cpu" or "mmap"
	Blocks   int           // blocks of the I/O kernels (async)
	Pairs    int           // queue pairs per SSD (async); 0 = by blocks
	Depth    int           // reads outstanding per SSD (256)
	Threads  int           // cpu
	Engine   string        // cpu: "io_uring" or "pread"
	Duration time.Duration // of the measurement (2 s)
	WarmUp   time.Duration // before it (a quarter of Duration)
	Seed     uint64
	Timeout  time.Duration // deadline of one read
	// Layout of loaded SSDs, read at their DataStart. Its zero value reads raw SSDs: rows all
	// over the namespaces, whatever they hold.
	Layout gpuio.Layout
	// Samples is the number of rows compared with the backing (512).
	Samples int
}

// Row is the result of one measurement, in the JSON contract of "bench io".
type Row struct {
	SSDs           int     `json:"ssds"`
	Blocks         int     `json:"blocks"`
	RowBytes       int     `json:"row_bytes"`
	Stack          string  `json:"stack"`
	QueuePairs     int     `json:"queue_pairs"` // per SSD
	Depth          int     `json:"depth"`       // per SSD
	IOPS           float64 `json:"iops"`        // reads per second
	BytesPerSecond float64 `json:"bytes_per_second"`
	CPUPerIO       float64 `json:"cpu_us_per_io"` // user and system time of the process
	P50            float64 `json:"p50_us"`
	P99            float64 `json:"p99_us"`
	Errors         int64   `json:"errors"`
	Audited        bool    `json:"audited"`
	SMARTReads     int64   `json:"smart_reads"` // host read commands that the SSDs counted, warm-up included
	// Beyond the contract.
	AuditError string  `json:"audit_error,omitempty"` // why Audited is false
	Seconds    float64 `json:"seconds"`
	Commands   int64   `json:"commands"` // that the stack issued, warm-up included
	Sampled    int     `json:"sampled_rows"`
}

const setsInFlight = 3

// Run measures once. The error is about what could not be run at all; reads that failed and
// audits that did not agree are in the Row.
func Run(ctx context.Context, cfg Config) (Row, error) {
	if err := cfg.fill(); err != nil {
		return Row{}, err
	}
	row := Row{SSDs: len(cfg.SSDs), Blocks: cfg.Blocks, RowBytes: cfg.RowBytes, Stack: cfg.Stack, Depth: cfg.Depth}
	l, err := cfg.layout()
	if err != nil {
		return row, err
	}
	if err := touch(ctx, cfg.SSDs, l); err != nil {
		return row, err
	}
	before, err := smartReads(ctx, cfg.SSDs)
	if err != nil {
		return row, err
	}
	r, err := cfg.open(l)
	if err != nil {
		return row, err
	}
	b := &bench{cfg: cfg, l: l, r: r, row: &row, key: philox.Key(cfg.Seed, philox.StreamBench)}
	err = b.run(ctx)
	if q, ok := r.(interface{ QueuePairs() int }); ok {
		row.QueuePairs = q.QueuePairs()
	}
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err = errors.Join(err, r.Close(cctx))
	total := r.Stats()
	err = errors.Join(err, b.free())
	if err != nil {
		return row, err
	}
	row.Commands = total.Commands
	row.Errors = total.Errors + total.Timeouts + total.Failed
	after, err := smartReads(cctx, cfg.SSDs)
	if err != nil {
		return row, err
	}
	row.SMARTReads = after - before
	b.audit(cctx)
	return row, nil
}

func (c *Config) fill() error {
	if len(c.SSDs) == 0 || c.Dev == nil {
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
			return errs.New(errs.Usage, "rows of %d bytes: the SSDs hold rows of %d", c.RowBytes, c.Layout.RowBytes)
		}
	}
	set(&c.RowBytes, 4096)
	set(&c.Depth, 256)
	set(&c.Blocks, 32)
	set(&c.Samples, 512)
	if c.Stack == "" {
		c.Stack = "async"
	}
	if c.Duration == 0 {
		c.Duration = 2 * time.Second
	}
	if c.WarmUp == 0 {
		c.WarmUp = c.Duration / 4
	}
	if c.RowBytes < 1 || c.Depth < 1 || c.Blocks < 1 || c.Duration < 0 || c.WarmUp < 0 {
		return errs.New(errs.Usage, "bench io: rows of %d bytes, depth %d, %d blocks, duration %v: all must be positive", c.RowBytes, c.Depth, c.Blocks, c.Duration)
	}
	return nil
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
	one, err := gpuio.NewLayout(1, c.RowBytes, 1, lba)
	if err != nil {
		return one, err
	}
	slots := blocks / int64(one.LBAsPerRow) * int64(one.RowsPerLBA)
	if slots == 0 {
		return one, errs.New(errs.Usage, "bench io: no row of %d bytes fits the smallest SSD", c.RowBytes)
	}
	return gpuio.NewLayout(slots*int64(len(c.SSDs)), c.RowBytes, len(c.SSDs), lba)
}

func (c *Config) open(l gpuio.Layout) (gpuio.Reader, error) {
	switch c.Stack {
	case "async":
		return gpuio.NewAsync(c.Dev, c.SSDs, l, gpuio.AsyncOptions{Blocks: c.Blocks, QueuePairs: c.Pairs, Depth: c.Depth, Timeout: c.Timeout})
	case "cpu":
		return gpuio.NewCPU(c.Dev, c.SSDs, l, gpuio.CPUOptions{Threads: c.Threads, Depth: c.Depth, Engine: c.Engine, Timeout: c.Timeout})
	case "mmap":
		return gpuio.NewMmap(c.Dev, c.SSDs, l)
	}
	return nil, errs.New(errs.Usage, "I/O stack %q: choose async, cpu or mmap", c.Stack)
}

// touchLimit bounds what touch reads of one SSD.
const touchLimit = 4 << 30

// touch reads SSDs that are memory once from end to end. Their first read in a process takes a
// page fault, and where they were never written an allocation too, which would be all that a short
// measurement sees.
func touch(ctx context.Context, ssds []*gpuio.SSD, l gpuio.Layout) error {
	for i, s := range ssds {
		if b, ok := s.Ctrl.Bus().(interface{ Engine() string }); !ok || b.Engine() != "memory" {
			continue
		}
		bulk, err := gpuio.NewBulk(ctx, s.Ctrl, 4)
		if err != nil {
			return err
		}
		buf := make([]byte, 4<<20)
		end := min(l.LBAsOn(i), touchLimit/int64(l.LBABytes))
		for lba := int64(0); lba < end && err == nil; {
			n := min(int64(len(buf)/int(l.LBABytes)), end-lba)
			err = bulk.ReadAt(ctx, s.DataStart+nvme.LBA(lba), buf[:n*int64(l.LBABytes)])
			lba += n
		}
		// An SSD with errors is measured all the same: the row of results will tell.
		if err := bulk.Close(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// smartReads is the sum of the SSDs' host read commands.
func smartReads(ctx context.Context, ssds []*gpuio.SSD) (int64, error) {
	var n int64
	for _, s := range ssds {
		log, err := s.Ctrl.SMART(ctx)
		if err != nil {
			return 0, err
		}
		n += int64(log.HostReads.Lo)
	}
	return n, nil
}

type bench struct {
	cfg     Config
	l       gpuio.Layout
	r       gpuio.Reader
	row     *Row
	key     [2]uint32
	ctr     uint64
	rnd     [4]uint32
	rndLeft int
	perSSD  int
	sets    []*benchSet
	samples []sample
	sampled int64
	failed  error
}

type benchSet struct {
	rows, pos, dst cuda.Buffer
	rowIDs         []int64
	rs             gpuio.ReadSet
	pending        gpuio.Pending
}

// sample is a row as it was read.
type sample struct {
	row  int64
	data []byte
}

// run keeps setsInFlight sets going, each with several times the depth of rows for every SSD, so
// that every queue has rows in its pending list whenever a read completes: the depth is what is
// outstanding, all the time.
func (b *bench) run(ctx context.Context) error {
	b.perSSD = min(max(4*b.cfg.Depth, 256), 8192)
	if b.cfg.Stack == "mmap" { // reads have no latency to hide there
		b.perSSD = 512
	}
	for range setsInFlight {
		s, err := b.newSet()
		if err != nil {
			return err
		}
		b.sets = append(b.sets, s)
	}
	for _, s := range b.sets {
		if err := b.submit(ctx, s); err != nil {
			return err
		}
	}
	var start time.Time
	var cpu0, cpu1 time.Duration
	var stat0, stat1 gpuio.Stats
	var end time.Time
	warm := time.Now().Add(b.cfg.WarmUp)
	for i := 0; ; i++ {
		s := b.sets[i%len(b.sets)]
		if err := b.wait(ctx, s); err != nil {
			return err
		}
		now := time.Now()
		if start.IsZero() && !now.Before(warm) {
			start, cpu0, stat0 = now, cpuTime(), b.r.Stats()
		} else if !start.IsZero() && now.Sub(start) >= b.cfg.Duration {
			end, cpu1, stat1 = now, cpuTime(), b.r.Stats()
			break
		}
		if b.failed != nil {
			break
		}
		if err := b.submit(ctx, s); err != nil {
			return err
		}
	}
	for _, s := range b.sets {
		if err := b.wait(ctx, s); err != nil {
			return err
		}
	}
	lat := stat1.Latency.Since(&stat0.Latency)
	reads := float64(lat.Count())
	if reads == 0 || end.IsZero() {
		return nil
	}
	b.row.Seconds = end.Sub(start).Seconds()
	b.row.IOPS = reads / b.row.Seconds
	b.row.BytesPerSecond = b.row.IOPS * float64(b.cfg.RowBytes)
	b.row.CPUPerIO = (cpu1 - cpu0).Seconds() * 1e6 / reads
	b.row.P50 = float64(lat.Quantile(0.5)) / 1e3
	b.row.P99 = float64(lat.Quantile(0.99)) / 1e3
	return nil
}

func (b *bench) newSet() (*benchSet, error) {
	n := int64(b.perSSD) * int64(len(b.cfg.SSDs))
	s := &benchSet{}
	var err error
	if s.rows, err = b.cfg.Dev.Alloc(cuda.MemPinned, n*8, "bench rows"); err != nil {
		return s, err
	}
	if s.pos, err = b.cfg.Dev.Alloc(cuda.MemPinned, n*4, "bench positions"); err != nil {
		return s, errors.Join(err, s.rows.Free())
	}
	stride := int64(b.cfg.RowBytes+3) &^ 3
	if s.dst, err = b.cfg.Dev.Alloc(cuda.MemDevice, n*stride, "bench destination"); err != nil {
		return s, errors.Join(err, s.rows.Free(), s.pos.Free())
	}
	s.rowIDs = hostmem.View[int64](s.rows.Bytes())
	for i, pos := 0, hostmem.View[uint32](s.pos.Bytes()); i < int(n); i++ {
		pos[i] = uint32(i)
	}
	s.rs = gpuio.ReadSet{Rows: s.rows.Ptr(), Pos: s.pos.Ptr(), Dst: s.dst, DstStride: stride}
	for i := range len(b.cfg.SSDs) + 1 {
		s.rs.SSDOffset = append(s.rs.SSDOffset, int64(i*b.perSSD))
	}
	return s, nil
}

func (b *bench) free() error {
	var err error
	for _, s := range b.sets {
		err = errors.Join(err, gpuio.Forget(b.r, s.dst), s.rows.Free(), s.pos.Free(), s.dst.Free())
	}
	return err
}

// random is the next 32 random bits.
func (b *bench) random() uint32 {
	if b.rndLeft == 0 {
		b.rnd = philox.Block(b.key, [4]uint32{uint32(b.ctr), uint32(b.ctr >> 32)})
		b.ctr++
		b.rndLeft = 4
	}
	b.rndLeft--
	return b.rnd[b.rndLeft]
}

func (b *bench) randomBelow(n int64) int64 {
	if n <= 1<<24 {
		return int64(uint64(b.random()) * uint64(n) >> 32)
	}
	hi, _ := bits.Mul64(uint64(b.random())<<32|uint64(b.random()), uint64(n))
	return int64(hi)
}

func (b *bench) submit(ctx context.Context, s *benchSet) error {
	i := 0
	for ssd := range len(b.cfg.SSDs) {
		slots := b.l.RowsOn(ssd)
		for range b.perSSD {
			s.rowIDs[i] = b.randomBelow(slots)*int64(b.l.SSDs) + int64(ssd)
			i++
		}
	}
	p, err := b.r.Submit(ctx, &s.rs)
	s.pending = p
	return err
}

// wait ends a set and keeps some of its rows for the audit.
func (b *bench) wait(ctx context.Context, s *benchSet) error {
	if s.pending == nil {
		return nil
	}
	_, err := s.pending.Wait(ctx)
	s.pending = nil
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if b.failed == nil {
			b.failed = err
		}
		return nil
	}
	mem := s.dst.Bytes()
	for range 4 { // of every set a few; when there are enough, new ones displace old ones
		i := b.randomBelow(int64(len(s.rowIDs)))
		data := mem[i*s.rs.DstStride:][:b.cfg.RowBytes]
		b.sampled++
		if len(b.samples) < b.cfg.Samples {
			b.samples = append(b.samples, sample{s.rowIDs[i], bytes.Clone(data)})
			continue
		}
		if k := b.randomBelow(b.sampled); k < int64(len(b.samples)) {
			b.samples[k].row = s.rowIDs[i]
			copy(b.samples[k].data, data)
		}
	}
	return nil
}

// audit decides whether the row of results may be believed.
func (b *bench) audit(ctx context.Context) {
	row := b.row
	row.Sampled = len(b.samples)
	err := func() error {
		if b.failed != nil {
			return b.failed
		}
		if row.Errors != 0 {
			return fmt.Errorf("%d reads had errors", row.Errors)
		}
		if row.IOPS == 0 {
			return errors.New("no read was measured")
		}
		if len(b.samples) == 0 {
			return errors.New("no row was sampled")
		}
		want := int64(0) // the cpu and mmap stacks read the files beside the controllers
		if row.Stack == "async" {
			want = row.Commands
		}
		if row.SMARTReads != want {
			return fmt.Errorf("the SSDs counted %d read commands, the stack issued %d", row.SMARTReads, want)
		}
		return b.compare(ctx)
	}()
	row.Audited = err == nil
	if err != nil {
		row.AuditError = err.Error()
	}
}

// compare reads the sampled rows again by another way: the backing file with plain reads, or a
// queue pair of its own where there is no file.
func (b *bench) compare(ctx context.Context) error {
	read := make([]func(lba nvme.LBA, dst []byte) error, len(b.cfg.SSDs))
	for i, d := range b.cfg.SSDs {
		if d.BackingPath == "" {
			bulk, err := gpuio.NewBulk(ctx, d.Ctrl, 1)
			if err != nil {
				return err
			}
			defer bulk.Close(ctx)
			read[i] = func(lba nvme.LBA, dst []byte) error { return bulk.ReadAt(ctx, lba, dst) }
			continue
		}
		f, err := os.Open(d.BackingPath)
		if err != nil {
			return err
		}
		defer f.Close()
		read[i] = func(lba nvme.LBA, dst []byte) error {
			_, err := f.ReadAt(dst, int64(lba)*int64(b.l.LBABytes))
			return err
		}
	}
	buf := make([]byte, b.l.ReadBytes())
	for _, s := range b.samples {
		ssd, lba, _, off := b.l.Locate(s.row)
		d := b.cfg.SSDs[ssd]
		if err := read[ssd](d.DataStart+lba, buf); err != nil {
			return fmt.Errorf("row %d: independent read: %w", s.row, err)
		}
		if !bytes.Equal(s.data, buf[off:off+b.cfg.RowBytes]) {
			return fmt.Errorf("row %d on SSD %d (%s, LBA %d) is not what the SSD holds", s.row, ssd, d.Name, d.DataStart+lba)
		}
	}
	return nil
}

// cpuTime is what the process has used so far, in user and kernel mode.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
