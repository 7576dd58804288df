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
	"helios/internal/units"
	"helios/nvme"
)

// Config is one measurement. Zero values choose defaults.
type Config struct {
	Dev      cuda.Device
	SSDs     []*gpuio.SSD
	RowBytes int           // 4096
	Stack    string        // "async" (default), "sync", "cpu" or "mmap"
	Blocks   int           // blocks of the I/O kernels (32)
	PerBlock int           // threads of a block (async 32, sync 128)
	Pairs    int           // queue pairs per SSD; 0 = by blocks
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
	Threads        int     `json:"threads"` // per block
	RowBytes       int     `json:"row_bytes"`
	Stack          string  `json:"stack"`
	Device         string  `json:"device"`
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
	row := Row{SSDs: len(cfg.SSDs), Blocks: cfg.Blocks, RowBytes: cfg.RowBytes, Stack: cfg.Stack, Depth: cfg.Depth, Device: cfg.Dev.Info().Name, Threads: cfg.PerBlock}
	l, err := cfg.layout()
	if err != nil {
		return row, err
	}
	if err := cfg.fits(); err != nil {
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
	switch c.Stack {
	case "":
		c.Stack = "async"
		fallthrough
	case "async":
		set(&c.PerBlock, 32)
	case "sync":
		set(&c.PerBlock, 128)
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
		return gpuio.NewAsync(c.Dev, c.SSDs, l, gpuio.AsyncOptions{Blocks: c.Blocks, Threads: c.PerBlock, QueuePairs: c.Pairs, Depth: c.Depth, Timeout: c.Timeout})
	case "sync":
		return gpuio.NewSync(c.Dev, c.SSDs, l, gpuio.SyncOptions{Blocks: c.Blocks, Threads: c.PerBlock, QueuePairs: c.Pairs, Depth: c.Depth, Timeout: c.Timeout})
	case "cpu":
		return gpuio.NewCPU(c.Dev, c.SSDs, l, gpuio.CPUOptions{Threads: c.Threads, Depth: c.Depth, Engine: c.Engine, Timeout: c.Timeout})
	case "mmap":
		return gpuio.NewMmap(c.Dev, c.SSDs, l)
	}
	return nil, errs.New(errs.Usage, "I/O stack %q: choose async, sync, cpu or mmap", c.Stack)
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
	// Where the CPU cannot address the destination, sampled rows come here.
	copies cuda.Stream
	bounce cuda.Buffer
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
	b.perSSD = b.cfg.rowsPerSSD(b.cfg.Depth)
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
			// Sets that were done before the start can be all that was waited for so far.
			end, cpu1, stat1 = now, cpuTime(), b.r.Stats()
			if measured := stat1.Latency.Since(&stat0.Latency); measured.Count() > 0 {
				break
			}
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

// rowsPerSSD is the rows of a set for each SSD.
func (c *Config) rowsPerSSD(depth int) int {
	if c.Stack == "mmap" { // reads have no latency to hide there
		return 512
	}
	return min(max(4*depth, 256), 8192)
}

// fits tells whether the sets have room on the device, and what would have.
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
	perRow := stride * setsInFlight * int64(len(c.SSDs))
	need := perRow * int64(c.rowsPerSSD(c.Depth))
	if need <= free {
		return nil
	}
	most := 0
	for d := c.Depth; d > 0; d /= 2 {
		if perRow*int64(c.rowsPerSSD(d)) <= free {
			most = d
			break
		}
	}
	advice := fmt.Sprintf("--depth %d fits", most)
	if most == 0 {
		advice = fmt.Sprintf("%d rows of %d bytes fit; use fewer SSDs or smaller rows", max(free, 0)/stride, c.RowBytes)
	}
	return errs.New(errs.Capability, "%s: bench io keeps %d sets of %d rows for each of %d SSDs, %s of device memory, and %s are there: %s",
		info.Name, setsInFlight, c.rowsPerSSD(c.Depth), len(c.SSDs), units.FormatBytes(need), units.FormatBytes(max(free, 0)), advice)
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
		return s, errors.Join(fmt.Errorf("bench io keeps %d sets of %d rows; use fewer SSDs, less depth or smaller rows: %w", setsInFlight, n, err), s.rows.Free(), s.pos.Free())
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
	if b.copies != nil {
		err = b.copies.Close()
	}
	if b.bounce != nil {
		err = errors.Join(err, b.bounce.Free())
	}
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
	for range 4 { // of every set a few; when there are enough, new ones displace old ones
		i := b.randomBelow(int64(len(s.rowIDs)))
		data, err := b.look(ctx, s, i*s.rs.DstStride)
		if err != nil {
			return err
		}
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

// look gives the CPU's view of a row of the destination, good until the next.
func (b *bench) look(ctx context.Context, s *benchSet, at int64) ([]byte, error) {
	n := int64(b.cfg.RowBytes)
	if mem := s.dst.Bytes(); mem != nil {
		return mem[at:][:n], nil
	}
	var err error
	if b.copies == nil {
		if b.bounce, err = b.cfg.Dev.Alloc(cuda.MemPinned, n, "bench sample"); err != nil {
			return nil, err
		}
		if b.copies, err = b.cfg.Dev.NewStream(cuda.StreamOptions{Name: "bench sample"}); err != nil {
			return nil, err
		}
	}
	if err := b.copies.Copy(b.bounce.Ptr(), s.dst.Ptr()+cuda.DevicePtr(at), n); err != nil {
		return nil, err
	}
	if err := b.copies.Synchronize(ctx); err != nil {
		return nil, err
	}
	return b.bounce.Bytes(), nil
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
		if row.Stack == "async" || row.Stack == "sync" {
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
