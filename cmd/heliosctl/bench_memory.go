package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/urfave/cli/v2"

	"helios/cache"
	"helios/cuda"
	"helios/gnn"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/simd"
	"helios/internal/units"
)

func benchMemoryCommand() *cli.Command {
	return &cli.Command{
		Name:  "memory",
		Usage: "gathers of cached rows beside plain copies of as many bytes, audited",
		Description: "Gathers random rows of both tiers of the cache with the kernel that training uses, and copies as many bytes\n" +
			"in one piece from the same memory: from the device's own memory (gather and copy move each byte twice,\n" +
			"in and out, and both are counted), and from registered CPU memory, which the kernel reads in place (UVA).\n" +
			"Gather and copy take turns; the ratio is the gather's rate by the copy's, the median over the turns and its\n" +
			"range. After each row of results the destination is overwritten, gathered or copied into once more, and its\n" +
			"bytes are compared: all of them, or where they are many a sample of rows.\n" +
			"\"lookups\" are rows a second that the index finds, the wait for the answer included.",
		Flags: []cli.Flag{
			devicesFlag(),
			&cli.StringFlag{Name: "row-bytes", Value: "4096", Usage: "sizes of a row `SIZE[,SIZE…]`, multiples of 4"},
			&cli.StringFlag{Name: "tier", Value: "1GiB", Usage: "rows of each tier, in `SIZE`; well above what caches hold"},
			&cli.StringFlag{Name: "set", Value: "256MiB", Usage: "rows of a gather, in `SIZE`"},
			&cli.Float64Flag{Name: "seconds", Value: 1, Usage: "length of a row's measurement"},
			&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the order of rows"},
			kernelsFlag(), resultsFlag(), overwriteFlag(),
		},
		Action: action(0, runBenchMemory),
	}
}

// memoryRow is a line of results.
type memoryRow struct {
	Device   string     `json:"device"`
	From     string     `json:"from"` // "device" or "cpu", the tier
	RowBytes int64      `json:"row_bytes"`
	Rows     int64      `json:"rows"` // of a gather
	TierRows int64      `json:"tier_rows"`
	Turns    int        `json:"turns"`
	Gather   gnn.Spread `json:"gather_bytes_per_second"`
	Copy     gnn.Spread `json:"copy_bytes_per_second"`
	Ratio    gnn.Spread `json:"ratio"` // gather by copy
	Lookups  gnn.Spread `json:"lookups_per_second"`
	Checked  int64      `json:"checked_rows"`
	Audited  bool       `json:"audited"`
	Why      string     `json:"audit_error,omitempty"`
}

// memoryPlan is what "bench memory" is asked for.
type memoryPlan struct {
	devices   []string
	rowBytes  []int
	tier, set int64
	length    time.Duration
	seed      uint64
}

func (e *env) memoryPlan() (*memoryPlan, error) {
	c := e.c
	p := &memoryPlan{seed: c.Uint64("seed")}
	var err error
	if p.devices, err = e.devices(); err != nil {
		return nil, err
	}
	if gpuOnly(p.devices) && (c.IsSet("workers") || c.IsSet("kernels")) {
		return nil, errs.New(errs.Usage, "--workers and --kernels are for the host device; add host to --device, or leave them out")
	}
	if w := c.Int("workers"); w < 0 || w > 4096 {
		return nil, errs.New(errs.Usage, "--workers %d is not between 1 and 4096", w)
	}
	sizes, err := list("row-bytes", c.String("row-bytes"))
	if err != nil {
		return nil, err
	}
	for _, s := range sizes {
		n, err := units.ParseBytes(s)
		if err != nil || n < 4 || n%4 != 0 || n > 1<<20 {
			return nil, errs.New(errs.Usage, "--row-bytes %s: give a multiple of 4 up to 1 MiB, such as 4096", s)
		}
		p.rowBytes = append(p.rowBytes, int(n))
	}
	if len(p.rowBytes) == 0 {
		return nil, errs.New(errs.Usage, "--row-bytes is empty; give a size such as 4096")
	}
	for _, f := range []struct {
		flag string
		to   *int64
	}{{"tier", &p.tier}, {"set", &p.set}} {
		if *f.to, err = units.ParseBytes(c.String(f.flag)); err != nil {
			return nil, errs.New(errs.Usage, "--%s: %w", f.flag, err)
		}
		if least := int64(slices.Max(p.rowBytes)); *f.to < least || *f.to > 1<<40 {
			return nil, errs.New(errs.Usage, "--%s %s is not between a row (%d) and 1 TiB", f.flag, c.String(f.flag), least)
		}
	}
	if p.set > p.tier {
		return nil, errs.New(errs.Usage, "--set %s is larger than --tier %s; a gather takes each row at most once", c.String("set"), c.String("tier"))
	}
	seconds := c.Float64("seconds")
	if !(seconds > 0 && seconds <= 3600) {
		return nil, errs.New(errs.Usage, "--seconds %v: give a length above 0, up to 3600", seconds)
	}
	p.length = time.Duration(seconds * float64(time.Second))
	return p, nil
}

func runBenchMemory(ctx context.Context, e *env) (err error) {
	p, err := e.memoryPlan()
	if err != nil {
		return err
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	var rows []memoryRow
	failed := 0
	total := len(p.devices) * len(p.rowBytes)
	for _, d := range p.devices {
		for _, n := range p.rowBytes {
			e.ui.Progress("bench memory", int64(len(rows)/2), int64(total))
			got, err := e.memoryRows(ctx, p, d, int64(n))
			if err != nil {
				return whenStopped(err, "the rows are incomplete: run it again, with fewer --seconds")
			}
			for _, r := range got {
				if !r.Audited {
					failed++
				}
				out.object(r)
				rows = append(rows, r)
			}
		}
	}
	e.showMemory(rows)
	if failed > 0 {
		return errs.New(errs.Device, "%d of %d rows failed their audit; the list says why", failed, len(rows))
	}
	return nil
}

func (e *env) showMemory(rows []memoryRow) {
	giga := func(s gnn.Spread) string { return fmt.Sprintf("%.4g (%.4g-%.4g)", s.Median/1e9, s.Min/1e9, s.Max/1e9) }
	var table [][]string
	for _, r := range rows {
		check := "passed"
		if !r.Audited {
			check = "FAILED: " + r.Why
		}
		table = append(table, []string{r.Device, r.From, strconv.FormatInt(r.RowBytes, 10), units.FormatCount(float64(r.Rows)), strconv.Itoa(r.Turns),
			giga(r.Gather), giga(r.Copy), r.Ratio.String(), units.FormatCount(r.Lookups.Median), units.FormatCount(float64(r.Checked)), check})
	}
	e.ui.Table([]string{"device", "from", "row", "rows", "turns", "gather GB/s", "copy GB/s", "ratio", "lookups/s", "checked", "audit"}, table)
}

// memoryRig is two full tiers and what is gathered of them.
type memoryRig struct {
	dev      cuda.Device
	stream   cuda.Stream
	hetero   *cache.Hetero
	dst      cuda.Buffer
	stage    cuda.Buffer // pinned
	rowBytes int64
	rows     int64 // of a gather
	closures []func() error
}

func (r *memoryRig) close() (err error) {
	for _, f := range slices.Backward(r.closures) {
		closing(&err, f)
	}
	r.closures = nil
	return err
}

// memoryTimeout bounds what is enqueued at once.
const memoryTimeout = 5 * time.Minute

// sync waits for the stream; an interrupt does not end it, for what runs still uses the memory.
func (r *memoryRig) sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), memoryTimeout)
	defer cancel()
	return r.stream.Synchronize(ctx)
}

// memoryWord is word w of a row: no two rows are alike, nor a row shifted.
func memoryWord(row, w int64) uint32 {
	x := uint64(row)*0x9E3779B97F4A7C15 + uint64(w)*0xD6E8FEB86659FD93
	x ^= x >> 32
	x *= 0xD6E8FEB86659FD93
	return uint32(x >> 32)
}

// fillRows writes rows first… to mem, on all CPUs.
func fillRows(mem []byte, first, rowBytes int64) {
	words := hostmem.View[uint32](mem)
	per := rowBytes / 4
	n, workers := int64(len(words))/per, int64(runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := n * w / workers; i < n*(w+1)/workers; i++ {
				for j := range per {
					words[i*per+j] = memoryWord(first+i, j)
				}
			}
		})
	}
	wg.Wait()
}

// memoryStage is how many bytes of a destination are compared at a time, and in all of a large one.
const memoryStage = 16 << 20

// fits refuses tiers of n rows that are more than CPU memory has: Go's own allocations cannot fail.
func (p *memoryPlan) fits(dev cuda.Device, n int64) error {
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	need := p.tier + n*48 // the rows' numbers, shuffled once more, and where they are
	if dev.Info().Backend == "host" {
		need += p.tier + p.set
	}
	if need > avail {
		return errs.New(errs.Capability, "--tier %s takes %s of CPU memory, and %s are available; give a smaller one", units.FormatBytes(p.tier), units.FormatBytes(need), units.FormatBytes(avail))
	}
	return nil
}

// openMemoryRig takes the device over, also when it fails. Rows 0… are in the GPU tier, as many more in the CPU tier.
func openMemoryRig(ctx context.Context, dev cuda.Device, p *memoryPlan, rowBytes int64) (_ *memoryRig, err error) {
	r := &memoryRig{dev: dev, rowBytes: rowBytes, rows: p.set / rowBytes, closures: []func() error{dev.Close}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	n := p.tier / rowBytes
	if err := p.fits(dev, n); err != nil {
		return nil, err
	}
	place := cache.Placement{GPU: make([]int64, n), CPU: make([]int64, n)}
	for i := range n {
		place.GPU[i], place.CPU[i] = i, n+i
	}
	if r.hetero, err = cache.NewHetero(dev, 2*n, rowBytes, 1, place); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.hetero.Close)
	if r.dst, err = dev.Alloc(cuda.MemDevice, r.rows*rowBytes, "gathered rows"); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.dst.Free)
	if r.stage, err = dev.Alloc(cuda.MemPinned, max(min(memoryStage, r.rows*rowBytes)/rowBytes*rowBytes, rowBytes), "audit"); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.stage.Free)
	if r.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench memory"}); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.stream.Close)
	// The GPU's rows pass through the CPU tier, which then gets its own.
	gpu, cpu := r.hetero.TierBuffer(cache.GPU), r.hetero.TierBuffer(cache.CPU)
	fillRows(cpu.Bytes(), 0, rowBytes)
	if err = r.stream.Copy(gpu.Ptr(), cpu.Ptr(), gpu.Size()); err == nil {
		err = r.sync(ctx)
	}
	if err != nil {
		return nil, err
	}
	fillRows(cpu.Bytes(), n, rowBytes)
	return r, nil
}

// memoryTurns is how often gather and copy take turns at least.
const memoryTurns = 5

// memoryRows measures both tiers of a device with one size of row.
func (e *env) memoryRows(ctx context.Context, p *memoryPlan, device string, rowBytes int64) (out []memoryRow, err error) {
	var dev cuda.Device
	if device == "host" {
		level, perr := simd.Parse(e.c.String("kernels"))
		if perr != nil {
			return nil, perr
		}
		dev, err = openHost(e.c.Int("workers"), level)
	} else {
		dev, err = openGPU(device)
	}
	if err != nil {
		return nil, err
	}
	r, err := openMemoryRig(ctx, dev, p, rowBytes)
	var full *cuda.OutOfMemoryError
	if errors.As(err, &full) {
		err = fmt.Errorf("%w; give smaller sizes (--tier, --set)", err)
	}
	if err != nil {
		return nil, err
	}
	defer closing(&err, r.close)
	tiers := []struct {
		tier  cache.Tier
		name  string
		moved float64 // bytes of the memory measured, by byte gathered
	}{{cache.GPU, "device", 2}, {cache.CPU, "cpu", 1}}
	for _, t := range tiers {
		row, err := r.measure(ctx, p, t.tier, t.moved)
		if err != nil {
			return nil, err
		}
		row.Device, row.From = dev.Info().Name, t.name
		out = append(out, row)
	}
	return out, nil
}

// measure lets gathers from a tier and copies of it take turns, and audits both.
func (r *memoryRig) measure(ctx context.Context, p *memoryPlan, tier cache.Tier, moved float64) (row memoryRow, err error) {
	all := r.hetero.TierRows(tier)
	order := make([]int64, len(all))
	graph.Shuffle(order, all, p.seed, int(tier))
	order = order[:r.rows]
	nodes, err := r.dev.Alloc(cuda.MemPinned, r.rows*8, "rows asked for")
	if err != nil {
		return row, err
	}
	defer closing(&err, nodes.Free)
	copy(hostmem.View[int64](nodes.Bytes()), order)
	buckets, err := r.hetero.NewBuckets()
	if err != nil {
		return row, err
	}
	defer closing(&err, buckets.Close)
	lookup := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), memoryTimeout)
		defer cancel()
		return r.hetero.Lookup(ctx, r.stream, nodes.Ptr(), 0, r.rows, buckets)
	}
	bytes := r.rows * r.rowBytes
	gather := func() error { return r.hetero.Gather(r.stream, buckets, r.dst.Ptr(), r.rowBytes) }
	whole := func() error { return r.stream.Copy(r.dst.Ptr(), r.hetero.TierBuffer(tier).Ptr(), bytes) }
	timed := func(n int, do func() error) (float64, error) {
		start := time.Now()
		for range n {
			if err := do(); err != nil {
				return 0, err
			}
		}
		err := r.sync(ctx)
		return time.Since(start).Seconds() / float64(n), err
	}
	if err := lookup(); err != nil {
		return row, err
	}
	slowest := 0.0
	for range 2 { // the first makes pages and panels warm
		slowest = 0
		for _, do := range []func() error{gather, whole} {
			took, err := timed(1, do)
			if err != nil {
				return row, err
			}
			slowest = max(slowest, took)
		}
	}
	row = memoryRow{RowBytes: r.rowBytes, Rows: r.rows, TierRows: int64(len(all))}
	runs := max(1, int(p.length.Seconds()/40/max(slowest, 1e-9)))
	var gathers, copies, ratios, lookups []float64
	for end := time.Now().Add(p.length); row.Turns < memoryTurns || time.Now().Before(end); row.Turns++ {
		var took [2]float64
		for i := range took {
			// The first in one turn is the second in the next.
			at := (i + row.Turns) % 2
			if took[at], err = timed(runs, []func() error{gather, whole}[at]); err != nil {
				return row, err
			}
		}
		start := time.Now()
		if err := lookup(); err != nil {
			return row, err
		}
		lookups = append(lookups, float64(r.rows)/time.Since(start).Seconds())
		gathers, copies = append(gathers, moved*float64(bytes)/took[0]), append(copies, moved*float64(bytes)/took[1])
		ratios = append(ratios, took[1]/took[0])
	}
	row.Gather, row.Copy, row.Ratio, row.Lookups = gnn.SpreadOf(gathers), gnn.SpreadOf(copies), gnn.SpreadOf(ratios), gnn.SpreadOf(lookups)
	for _, c := range []struct {
		what string
		do   func() error
		want []int64
	}{{"gather", gather, order}, {"copy", whole, all[:r.rows]}} {
		if err := r.stream.Fill(r.dst.Ptr(), 0xA5, bytes); err != nil {
			return row, err
		}
		if _, err := timed(1, c.do); err != nil {
			return row, err
		}
		n, wrong, err := r.compare(ctx, c.want)
		if err != nil {
			return row, err
		}
		row.Checked += n
		if wrong != "" && row.Why == "" {
			row.Why = c.what + ": " + wrong
		}
	}
	row.Audited = row.Why == ""
	return row, nil
}

// compare holds the destination against the rows that should be there: all, or runs of rows all over it.
func (r *memoryRig) compare(ctx context.Context, want []int64) (checked int64, wrong string, err error) {
	room := r.stage.Size() / r.rowBytes
	pieces := int64(1)
	if room < r.rows {
		pieces = min(64, room)
	}
	each := room / pieces
	at := make([]int64, pieces)
	for i := range at {
		if pieces > 1 {
			at[i] = int64(math.Round(float64(i) / float64(pieces-1) * float64(r.rows-each)))
		}
		if err := r.stream.Copy(r.stage.Ptr()+cuda.DevicePtr(int64(i)*each*r.rowBytes), r.dst.Ptr()+cuda.DevicePtr(at[i]*r.rowBytes), each*r.rowBytes); err != nil {
			return 0, "", err
		}
	}
	if err := r.sync(ctx); err != nil {
		return 0, "", err
	}
	words := hostmem.View[uint32](r.stage.Bytes())
	per := r.rowBytes / 4
	for i, from := range at {
		for k := range each {
			for w := range per {
				got := words[(int64(i)*each+k)*per+w]
				if should := memoryWord(want[from+k], w); got != should && wrong == "" {
					wrong = fmt.Sprintf("row %d, byte %d is %#x, not %#x", from+k, 4*w, got, should)
				}
			}
			checked++
		}
	}
	return checked, wrong, nil
}
