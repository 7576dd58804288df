package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// memoryConfig chooses the measurement.
type memoryConfig struct {
	tier   int64 // bytes of rows in each tier
	set    int64 // bytes of rows that a gather takes
	length time.Duration
}

// benchMemory gathers random rows of both tiers of the cache with the kernel that training uses,
// and copies as many bytes in one piece from the same memory: from the device's own memory (both
// move each byte twice, in and out, and both are counted), and from registered CPU memory, which
// the kernel reads in place (UVA). Lookups are rows a second that the index finds, the wait for the
// answer included.
func benchMemory(ctx context.Context, b *bench) error {
	var c memoryConfig
	var sizes []int
	b.intsVar(&sizes, "row-bytes", "4096", "`SIZE[,SIZE…]` of a row, multiples of 4")
	b.sizeVar(&c.tier, "tier", "1GiB", "rows of each tier, in `SIZE`; well above what caches hold")
	b.sizeVar(&c.set, "set", "256MiB", "rows of a gather, in `SIZE`")
	if err := b.parse(); err != nil {
		return err
	}
	c.length = b.length
	return b.each(func(dev cuda.Device) error {
		for _, size := range sizes {
			rows, err := measureMemory(ctx, dev, c, int64(size))
			if err != nil {
				return err
			}
			for i := range rows {
				if err := b.row(&rows[i], rows[i].Why); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// memoryRow is a row of results.
type memoryRow struct {
	Device   string `json:"device"`
	From     string `json:"from"` // "device" or "cpu", the tier
	RowBytes int64  `json:"row_bytes"`
	Rows     int64  `json:"rows"` // of a gather
	TierRows int64  `json:"tier_rows"`
	Turns    int    `json:"turns"`
	Gather   spread `json:"gather_bytes_per_second"`
	Copy     spread `json:"copy_bytes_per_second"`
	Ratio    spread `json:"ratio"` // gather by copy
	Lookups  spread `json:"lookups_per_second"`
	Checked  int64  `json:"checked_rows"`
	Audited  bool   `json:"audited"`
	Why      string `json:"audit_error,omitempty"`
}

func (r *memoryRow) String() string {
	return fmt.Sprintf("%s rows from %s memory, %s: gathers %s GB/s, copies %s, ratio %s; %s lookups/s",
		units.FormatBytes(r.RowBytes), r.From, r.Device, r.Gather.by(1e9), r.Copy.by(1e9),
		r.Ratio.by(1), units.FormatCount(r.Lookups.Median))
}

// measureMemory gathers rows of a size from both tiers of a cache on a device and copies as many
// bytes. A failed audit is no error: the row tells it.
func measureMemory(ctx context.Context, dev cuda.Device, c memoryConfig, rowBytes int64) (
	out []memoryRow, err error) {
	if rowBytes%4 != 0 || c.set < rowBytes || c.set > c.tier {
		return nil, fmt.Errorf(
			"rows of %d bytes, %d in a gather, %d in a tier: rows of a multiple of 4, at most the gather's, at most the tier's",
			rowBytes, c.set, c.tier)
	}
	r, err := openMemoryRig(ctx, dev, &c, rowBytes)
	if err != nil {
		return nil, err
	}
	defer errs.Closing(&err, r.close)
	tiers := []struct {
		tier  cache.Tier
		name  string
		moved float64 // bytes of the memory measured, by byte gathered
	}{{cache.GPU, "device", 2}, {cache.CPU, "cpu", 1}}
	for _, t := range tiers {
		row, err := r.measure(ctx, &c, t.tier, t.moved)
		if err != nil {
			return nil, err
		}
		row.Device, row.From = dev.Info().Name, t.name
		out = append(out, row)
	}
	return out, nil
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
		errs.Closing(&err, f)
	}
	r.closures = nil
	return err
}

// workTimeout bounds what is enqueued at once.
const workTimeout = 5 * time.Minute

// sync waits for the stream; an interrupt does not end it, for what runs still uses the memory.
func (r *memoryRig) sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), workTimeout)
	defer cancel()
	return r.stream.Synchronize(ctx)
}

// wordOf is word w of a row: no two rows are alike, nor a row shifted.
func wordOf(row, w int64) uint32 {
	x := uint64(row)*0x9E3779B97F4A7C15 + uint64(w)*0xD6E8FEB86659FD93
	x ^= x >> 32
	x *= 0xD6E8FEB86659FD93
	return uint32(x >> 32)
}

// fillRows writes rows first… to mem, on all CPUs.
func fillRows(mem []byte, first, rowBytes int64) {
	words := hostmem.View[uint32](mem)
	per := rowBytes / 4
	n, workers := int64(len(words))/per, int64(hostcpu.Count())
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := n * w / workers; i < n*(w+1)/workers; i++ {
				for j := range per {
					words[i*per+j] = wordOf(first+i, j)
				}
			}
		})
	}
	wg.Wait()
}

// stageBytes bounds the bytes of a destination that are compared.
const stageBytes = 16 << 20

// openMemoryRig makes and fills two tiers. Rows 0… are in the GPU tier, as many more in the CPU
// tier.
func openMemoryRig(ctx context.Context, dev cuda.Device, p *memoryConfig, rowBytes int64) (
	_ *memoryRig, err error) {
	r := &memoryRig{dev: dev, rowBytes: rowBytes, rows: p.set / rowBytes}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	n := p.tier / rowBytes
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
	if r.stage, err = dev.Alloc(cuda.MemPinned,
		max(min(stageBytes, r.rows*rowBytes)/rowBytes*rowBytes, rowBytes), "audit"); err != nil {
		return nil, err
	}
	r.closures = append(r.closures, r.stage.Free)
	if r.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench"}); err != nil {
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

// tierRun gathers rows of a tier, and copies as many bytes of it.
type tierRun struct {
	*memoryRig
	tier        cache.Tier
	rows, order []int64 // of the tier, and those that are gathered
	nodes       cuda.Buffer
	buckets     *cache.Buckets
}

// measure lets gathers from a tier and copies of it take turns, and audits both.
func (r *memoryRig) measure(ctx context.Context, p *memoryConfig, tier cache.Tier, moved float64) (
	row memoryRow, err error) {
	t := &tierRun{memoryRig: r, tier: tier, rows: r.hetero.TierRows(tier)}
	t.order = make([]int64, len(t.rows))
	graph.Shuffle(t.order, t.rows, benchSeed, int(tier))
	t.order = t.order[:r.rows]
	if t.nodes, err = r.dev.Alloc(cuda.MemPinned, r.rows*8, "rows asked for"); err != nil {
		return row, err
	}
	defer errs.Closing(&err, t.nodes.Free)
	copy(hostmem.View[int64](t.nodes.Bytes()), t.order)
	if t.buckets, err = r.hetero.NewBuckets(); err != nil {
		return row, err
	}
	defer errs.Closing(&err, t.buckets.Close)
	if err := t.lookup(ctx); err != nil {
		return row, err
	}
	row = memoryRow{RowBytes: r.rowBytes, Rows: r.rows, TierRows: int64(len(t.rows))}
	if err := t.takeTurns(ctx, p.length, moved, &row); err != nil {
		return row, err
	}
	if err := t.audit(ctx, &row); err != nil {
		return row, err
	}
	row.Audited = row.Why == ""
	return row, nil
}

func (t *tierRun) lookup(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), workTimeout)
	defer cancel()
	return t.hetero.Lookup(ctx, t.stream, t.nodes.Ptr(), 0, t.memoryRig.rows, t.buckets)
}

func (t *tierRun) gather() error {
	return t.hetero.Gather(t.stream, t.buckets, t.dst.Ptr(), t.rowBytes)
}

// copyWhole copies as many bytes as gather, in one piece.
func (t *tierRun) copyWhole() error {
	from := t.hetero.TierBuffer(t.tier).Ptr()
	return t.stream.Copy(t.dst.Ptr(), from, t.memoryRig.rows*t.rowBytes)
}

// timed returns the seconds of one of n runs.
func (t *tierRun) timed(ctx context.Context, n int, do func() error) (float64, error) {
	start := time.Now()
	for range n {
		if err := do(); err != nil {
			return 0, err
		}
	}
	err := t.sync(ctx)
	return time.Since(start).Seconds() / float64(n), err
}

// takeTurns measures gathers, copies and lookups.
func (t *tierRun) takeTurns(ctx context.Context, length time.Duration, moved float64,
	row *memoryRow) error {
	both := []func() error{t.gather, t.copyWhole}
	slowest := 0.0
	for range 2 { // the first makes pages and panels warm
		slowest = 0
		for _, do := range both {
			took, err := t.timed(ctx, 1, do)
			if err != nil {
				return err
			}
			slowest = max(slowest, took)
		}
	}
	runs := max(1, int(length.Seconds()/40/max(slowest, 1e-9)))
	bytes := float64(t.memoryRig.rows * t.rowBytes)
	var gathers, copies, ratios, lookups []float64
	for end := time.Now().Add(length); row.Turns < leastTurns ||
		time.Now().Before(end); row.Turns++ {
		var took [2]float64
		for i := range took {
			// The first in one turn is the second in the next.
			k := (i + row.Turns) % 2
			var err error
			if took[k], err = t.timed(ctx, runs, both[k]); err != nil {
				return err
			}
		}
		start := time.Now()
		if err := t.lookup(ctx); err != nil {
			return err
		}
		lookups = append(lookups, float64(t.memoryRig.rows)/time.Since(start).Seconds())
		gathers, copies = append(gathers, moved*bytes/took[0]), append(copies, moved*bytes/took[1])
		ratios = append(ratios, took[1]/took[0])
	}
	row.Gather, row.Copy, row.Ratio, row.Lookups = spreadOf(gathers), spreadOf(copies),
		spreadOf(ratios), spreadOf(lookups)
	return nil
}

// audit gathers and copies once more, over other bytes, and compares.
func (t *tierRun) audit(ctx context.Context, row *memoryRow) error {
	for _, c := range []struct {
		what string
		do   func() error
		want []int64
	}{{"gather", t.gather, t.order}, {"copy", t.copyWhole, t.rows[:t.memoryRig.rows]}} {
		if err := t.stream.Fill(t.dst.Ptr(), 0xA5, t.memoryRig.rows*t.rowBytes); err != nil {
			return err
		}
		if _, err := t.timed(ctx, 1, c.do); err != nil {
			return err
		}
		n, wrong, err := t.compare(ctx, c.want)
		if err != nil {
			return err
		}
		row.Checked += n
		if wrong != "" && row.Why == "" {
			row.Why = c.what + ": " + wrong
		}
	}
	return nil
}

// compare holds the destination against the rows that should be there: all, or runs of rows all
// over it.
func (r *memoryRig) compare(ctx context.Context, want []int64) (checked int64, wrong string,
	err error) {
	room := r.stage.Size() / r.rowBytes
	pieces := int64(1)
	if room < r.rows {
		pieces = min(64, room)
	}
	each := room / pieces
	first := make([]int64, pieces)
	for i := range first {
		if pieces > 1 {
			first[i] = int64(math.Round(float64(i) / float64(pieces-1) * float64(r.rows-each)))
		}
		if err := r.stream.Copy(r.stage.Ptr()+cuda.DevicePtr(int64(i)*each*r.rowBytes),
			r.dst.Ptr()+cuda.DevicePtr(first[i]*r.rowBytes), each*r.rowBytes); err != nil {
			return 0, "", err
		}
	}
	if err := r.sync(ctx); err != nil {
		return 0, "", err
	}
	words := hostmem.View[uint32](r.stage.Bytes())
	per := r.rowBytes / 4
	for i, from := range first {
		for k := range each {
			for w := range per {
				got := words[(int64(i)*each+k)*per+w]
				if should := wordOf(want[from+k], w); got != should && wrong == "" {
					wrong = fmt.Sprintf("row %d, byte %d is %#x, not %#x", from+k, 4*w, got, should)
				}
			}
			checked++
		}
	}
	return checked, wrong, nil
}
