package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/urfave/cli/v2"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/simd"
	"helios/internal/units"
)

// staticTier is the name of the static index among the policies.
const staticTier = "static"

func benchCacheCommand() *cli.Command {
	return &cli.Command{
		Name:  "cache",
		Usage: "lookups in the static index and in dynamic tiers, audited",
		Description: "Looks sets of distinct, uniformly random rows up: in the static index, bucketing, slots and the wait for the\n" +
			"answer included, and in a dynamic GPU tier under each policy (--gpu-share of the rows, filled before it is\n" +
			"measured), the plan of the reads included. No row is read from an SSD.\n" +
			"\"limit\" is what memory allows the static lookup: as many random 64-byte lines of the same index, loaded by as\n" +
			"many workers, and nothing done with them; \"latency\" is one such load that waits for the one before. Lookups and limit\n" +
			"take turns, each with sets of its own; the ratio is the median over the turns, with its range.\n" +
			"\"build\" is the most memory that was taken while the index was made, the index included.\n" +
			"The audit holds every answer of a set against where the row should be, and every row that a dynamic tier\n" +
			"delivers, in each set, against what it should hold.",
		Flags: []cli.Flag{
			devicesFlag(),
			&cli.StringFlag{Name: "nodes", Value: "100M", Usage: "rows of the dataset `N[,N…]`; K, M and G are thousands, millions and billions"},
			&cli.StringFlag{Name: "policies", Value: strings.Join(append([]string{staticTier}, policy.Online()...), ","), Usage: "what is measured `NAME[,NAME…]`"},
			&cli.StringFlag{Name: "rows", Value: "1M", Usage: "rows of a lookup"},
			&cli.Float64Flag{Name: "gpu-share", Value: 0.1, Usage: "of the rows are in the GPU tier"},
			&cli.Float64Flag{Name: "cpu-share", Value: 0.2, Usage: "of the rows are in the static CPU tier"},
			&cli.IntFlag{Name: "line-rows", Value: 1, Usage: "rows of a line of a dynamic tier"},
			&cli.IntFlag{Name: "window", Value: 0, Usage: "announce so many sets ahead to dynamic tiers"},
			&cli.IntFlag{Name: "ssds", Value: 12, Usage: "SSDs that misses are bucketed by"},
			&cli.Float64Flag{Name: "seconds", Value: 1, Usage: "length of a row's measurement"},
			&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of tiers, rows and random eviction"},
			kernelsFlag(), resultsFlag(), overwriteFlag(),
		},
		Action: action(0, runBenchCache),
	}
}

// cacheRow is a line of results.
type cacheRow struct {
	Device      string      `json:"device"`
	Policy      string      `json:"policy"`
	Nodes       int64       `json:"nodes"`
	Rows        int64       `json:"rows"` // of a lookup
	Workers     int         `json:"workers"`
	Turns       int         `json:"turns"`
	Lookups     gnn.Spread  `json:"lookups_per_second"`
	Limit       *gnn.Spread `json:"limit_per_second,omitempty"` // static index on the host device
	Ratio       *gnn.Spread `json:"ratio,omitempty"`            // lookups by limit
	LatencyNS   float64     `json:"latency_ns,omitempty"`
	IndexBytes  int64       `json:"index_bytes,omitempty"` // of the static index
	BuildTime   float64     `json:"build_seconds"`
	BuildBytes  int64       `json:"build_bytes"` // the most memory while it was made, what was made included
	LineRows    int64       `json:"line_rows,omitempty"`
	Slots       int64       `json:"slots,omitempty"` // lines
	Window      int         `json:"window,omitempty"`
	Metadata    int64       `json:"metadata_bytes,omitempty"` // of the directory
	HitRatio    float64     `json:"hit_ratio"`                // rows in the GPU tier
	CPURatio    float64     `json:"cpu_ratio"`
	Checked     int64       `json:"checked_rows"`
	Audited     bool        `json:"audited"`
	Why         string      `json:"audit_error,omitempty"`
	metadataPer float64
}

// cachePlan is what "bench cache" is asked for.
type cachePlan struct {
	devices  []string
	nodes    []int64
	rows     int64
	policies []string
	gpu, cpu float64
	lineRows int64
	window   int
	ssds     int
	length   time.Duration
	seed     uint64
}

// parseCount reads a number of things, such as 100M.
func parseCount(flag, s string) (int64, error) {
	digits, scale := s, 1.0
	for suffix, by := range map[string]float64{"K": 1e3, "M": 1e6, "G": 1e9} {
		if d, found := strings.CutSuffix(strings.ToUpper(s), suffix); found {
			digits, scale = d, by
		}
	}
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil || !(v*scale >= 1 && v*scale <= 1<<40) || v*scale != math.Trunc(v*scale) {
		return 0, errs.New(errs.Usage, "--%s %s: give a whole number from 1 to 2^40, such as 1000000 or 100M", flag, s)
	}
	return int64(v * scale), nil
}

func (e *env) cachePlan() (*cachePlan, error) {
	c := e.c
	p := &cachePlan{seed: c.Uint64("seed"), window: c.Int("window"), ssds: c.Int("ssds"), lineRows: int64(c.Int("line-rows")),
		gpu: c.Float64("gpu-share"), cpu: c.Float64("cpu-share")}
	var err error
	if p.devices, err = e.devices(); err != nil {
		return nil, err
	}
	if gpuOnly(p.devices) && (c.IsSet("workers") || c.IsSet("kernels")) {
		return nil, errs.New(errs.Usage, "--workers and --kernels are for the host device; add host to --device, or leave them out")
	}
	nodes, err := list("nodes", c.String("nodes"))
	if err != nil {
		return nil, err
	}
	if p.rows, err = parseCount("rows", c.String("rows")); err != nil {
		return nil, err
	}
	for _, s := range nodes {
		n, err := parseCount("nodes", s)
		if err != nil {
			return nil, err
		}
		if n < p.rows {
			return nil, errs.New(errs.Usage, "--rows %s are more than --nodes %s; a lookup has each row at most once", c.String("rows"), s)
		}
		p.nodes = append(p.nodes, n)
	}
	if len(p.nodes) == 0 {
		return nil, errs.New(errs.Usage, "--nodes is empty; give a number such as 100M")
	}
	if p.policies, err = list("policies", c.String("policies")); err != nil {
		return nil, err
	}
	for _, name := range p.policies {
		if name == staticTier {
			continue
		}
		if _, err := policy.New(policy.Config{Policy: name}); err != nil {
			return nil, errs.New(errs.Usage, "--policies: %w (or %s)", err, staticTier)
		}
	}
	if len(p.policies) == 0 {
		return nil, errs.New(errs.Usage, "--policies is empty; give %s or one of %s", staticTier, strings.Join(policy.Online(), ", "))
	}
	switch seconds := c.Float64("seconds"); {
	case !(p.gpu >= 0 && p.cpu >= 0 && p.gpu+p.cpu <= 1):
		return nil, errs.New(errs.Usage, "--gpu-share %v and --cpu-share %v: give shares from 0 that are at most 1 together", p.gpu, p.cpu)
	case p.lineRows < 1 || p.lineRows > 1<<12:
		return nil, errs.New(errs.Usage, "--line-rows %d is not between 1 and %d", p.lineRows, 1<<12)
	case p.window < 0 || p.window > 64:
		return nil, errs.New(errs.Usage, "--window %d is not between 0 and 64", p.window)
	case p.ssds < 1 || p.ssds > 256:
		return nil, errs.New(errs.Usage, "--ssds %d is not between 1 and 256", p.ssds)
	case !(seconds > 0 && seconds <= 3600):
		return nil, errs.New(errs.Usage, "--seconds %v: give a length above 0, up to 3600", seconds)
	default:
		p.length = time.Duration(seconds * float64(time.Second))
	}
	if w := c.Int("workers"); w < 0 || w > 4096 {
		return nil, errs.New(errs.Usage, "--workers %d is not between 1 and 4096", w)
	}
	return p, nil
}

func runBenchCache(ctx context.Context, e *env) (err error) {
	p, err := e.cachePlan()
	if err != nil {
		return err
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	var rows []cacheRow
	failed := 0
	total := len(p.devices) * len(p.nodes) * len(p.policies)
	for _, device := range p.devices {
		for _, nodes := range p.nodes {
			for _, name := range p.policies {
				e.ui.Progress("bench cache", int64(len(rows)), int64(total))
				r, err := e.cacheRow(ctx, p, device, nodes, name)
				if err != nil {
					return whenStopped(err, "the rows are incomplete: run it again, with fewer --seconds")
				}
				if !r.Audited {
					failed++
				}
				out.object(r)
				rows = append(rows, r)
			}
		}
	}
	e.showCache(rows)
	if failed > 0 {
		return errs.New(errs.Device, "%d of %d rows failed their audit; the list says why", failed, len(rows))
	}
	return nil
}

func (e *env) showCache(rows []cacheRow) {
	mega := func(s *gnn.Spread) string {
		if s == nil {
			return "-"
		}
		return fmt.Sprintf("%.4g (%.4g-%.4g)", s.Median/1e6, s.Min/1e6, s.Max/1e6)
	}
	var table [][]string
	for _, r := range rows {
		check := "passed"
		if !r.Audited {
			check = "FAILED: " + r.Why
		}
		ratio, latency := "-", "-"
		if r.Ratio != nil {
			ratio, latency = r.Ratio.String(), fmt.Sprintf("%.0f", r.LatencyNS)
		}
		metadata := fmt.Sprintf("%s (%.3f B/node)", units.FormatBytes(r.IndexBytes), float64(r.IndexBytes)/float64(r.Nodes))
		if r.Policy != staticTier {
			metadata = fmt.Sprintf("%s (%.1f B/line)", units.FormatBytes(r.Metadata), r.metadataPer)
		}
		table = append(table, []string{r.Device, units.FormatCount(float64(r.Nodes)), r.Policy, strconv.Itoa(r.Workers), mega(&r.Lookups), mega(r.Limit), ratio, latency,
			metadata, units.FormatBytes(r.BuildBytes), fmt.Sprintf("%.2f", r.BuildTime), fmt.Sprintf("%.1f", 100*r.HitRatio), units.FormatCount(float64(r.Checked)), check})
	}
	e.ui.Table([]string{"device", "nodes", "policy", "workers", "M lookups/s", "limit M/s", "ratio", "latency ns", "index", "build", "build s", "hits %", "checked", "audit"}, table)
}

// cacheRow measures one policy on a device of its own.
func (e *env) cacheRow(ctx context.Context, p *cachePlan, device string, nodes int64, name string) (row cacheRow, err error) {
	var dev cuda.Device
	if device == "host" {
		level, perr := simd.Parse(e.c.String("kernels"))
		if perr != nil {
			return row, perr
		}
		dev, err = openHost(e.c.Int("workers"), level)
	} else {
		dev, err = openGPU(device)
	}
	if err != nil {
		return row, err
	}
	defer closing(&err, dev.Close)
	b := &cacheBench{cachePlan: p, dev: dev, host: device == "host", total: nodes}
	if err := b.fits(name); err != nil {
		return row, err
	}
	if b.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench cache"}); err != nil {
		return row, err
	}
	defer closing(&err, b.stream.Close)
	if b.buf, err = dev.Alloc(cuda.MemPinned, p.rows*8, "rows asked for"); err != nil {
		return row, err
	}
	defer closing(&err, b.buf.Free)
	b.asked = hostmem.View[int64](b.buf.Bytes())
	b.row = cacheRow{Device: dev.Info().Name, Policy: name, Nodes: nodes, Rows: p.rows, Workers: dev.Info().SMs}
	if name == staticTier {
		err = b.static(ctx)
	} else {
		err = b.dynamic(ctx, name)
	}
	b.row.Audited = b.row.Why == ""
	return b.row, err
}

// cacheBench is one row's measurement.
type cacheBench struct {
	*cachePlan
	dev    cuda.Device
	host   bool
	stream cuda.Stream
	total  int64 // rows of the dataset
	buf    cuda.Buffer
	asked  []int64 // in buf
	row    cacheRow
}

// fits refuses what is more than CPU memory has: Go's own allocations cannot fail.
func (b *cacheBench) fits(name string) error {
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	need := cache.IndexBytes(b.total) + b.rows*100
	if name != staticTier {
		slots := b.slots()
		need = slots*(64+8*b.lineRows) + b.rows*(100+8*b.lineRows)*int64(1+b.window)
	}
	if need > avail {
		return errs.New(errs.Capability, "--nodes %d with policy %s takes %s of CPU memory, and %s are available; give fewer, or a smaller --gpu-share, --rows or --window",
			b.total, name, units.FormatBytes(need), units.FormatBytes(avail))
	}
	return nil
}

// slots is the lines of a dynamic tier: at least one.
func (b *cacheBench) slots() int64 { return max(int64(float64(b.total)*b.gpu)/b.lineRows, 1) }

// mixed is a hash of x.
func mixed(x, seed uint64) uint64 {
	x += seed * 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// set writes the k-th set of distinct rows to to: a permutation of the numbers of as many bits, made of four rounds that
// each change one half by a hash of the other (Feistel), is walked until it comes to a row of the dataset.
func (b *cacheBench) set(k uint64, to []int64) {
	half := max((bits.Len64(uint64(b.total-1))+1)/2, 1)
	mask := uint64(1)<<half - 1
	seed := mixed(k, b.seed+1)
	for i := range to {
		x := uint64(i)
		for {
			l, r := x>>half, x&mask
			for round := range uint64(4) {
				l, r = r, l^mixed(r, seed+round)&mask
			}
			if x = l<<half | r; x < uint64(b.total) {
				break
			}
		}
		to[i] = int64(x)
	}
}

// tierOf is where the static placement has a row.
func (b *cacheBench) tierOf(row int64) cache.Tier {
	switch x := float64(mixed(uint64(row), b.seed)>>11) / (1 << 53); {
	case x < b.gpu:
		return cache.GPU
	case x < b.gpu+b.cpu:
		return cache.CPU
	}
	return cache.SSD
}

// built measures what making a cache takes.
func (b *cacheBench) built(do func() error) error {
	debug.FreeOSMemory()
	before, err := hostmem.ReadRSS()
	if err != nil {
		return err
	}
	m := hostmem.StartPeakMeter(time.Millisecond)
	start := time.Now()
	err = do()
	b.row.BuildTime = time.Since(start).Seconds()
	m.Stop()
	b.row.BuildBytes = max(m.Peak()-before.Counted(), 0)
	return err
}

// cacheTurns is how many turns there are at least.
const cacheTurns = 5

// auditSet is the number of the set whose answers are compared: whatever was measured before, the same.
const auditSet = 1 << 40

// rankEvery is after how many rows the audit of the static index notes how many of each tier came before.
const rankEvery = 1 << 14

func (b *cacheBench) static(ctx context.Context) (err error) {
	var ranks [][2]int64
	var index *cache.Index
	err = b.built(func() error {
		var before [2]int64
		index, err = cache.BuildIndexOf(b.dev, b.total, func(yield func(int64, cache.Tier) bool) {
			for row := range b.total {
				if row%rankEvery == 0 {
					ranks = append(ranks, before)
				}
				if t := b.tierOf(row); t != cache.SSD {
					before[t-cache.GPU]++
					if !yield(row, t) {
						return
					}
				}
			}
		})
		return err
	})
	if err != nil {
		return err
	}
	h, err := cache.NewLookup(b.dev, index, b.ssds)
	if err != nil {
		return errors.Join(err, index.Close())
	}
	defer closing(&err, h.Close)
	b.row.IndexBytes = index.Bytes()
	buckets, err := h.NewBuckets()
	if err != nil {
		return err
	}
	defer closing(&err, buckets.Close)
	if err := buckets.Reserve(b.rows); err != nil {
		return err
	}
	lookup := func() error {
		op, cancel := context.WithTimeout(context.WithoutCancel(ctx), memoryTimeout)
		defer cancel()
		return h.Lookup(op, b.stream, b.buf.Ptr(), 0, b.rows, buckets)
	}
	var lookups, limits, ratios []float64
	probe := func(chained bool) (float64, error) {
		workers := b.row.Workers
		if chained {
			workers = 1
		}
		start := time.Now()
		_, err := index.Probe(b.asked, workers, chained)
		return time.Since(start).Seconds(), err
	}
	sets := uint64(0)
	next := func() {
		b.set(sets, b.asked)
		sets++
	}
	for end := time.Now().Add(b.length); b.row.Turns < cacheTurns+1 || time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		var took [2]float64
		for i := range took { // the first in one turn is the second in the next
			next()
			if (i+b.row.Turns)%2 == 0 {
				start := time.Now()
				if err := lookup(); err != nil {
					return err
				}
				took[0] = time.Since(start).Seconds()
			} else if b.host {
				if took[1], err = probe(false); err != nil {
					return err
				}
			}
		}
		if b.row.Turns == 0 {
			continue // pages and memory of the answer
		}
		lookups = append(lookups, float64(b.rows)/took[0])
		if b.host {
			limits, ratios = append(limits, float64(b.rows)/took[1]), append(ratios, took[1]/took[0])
		}
	}
	b.row.Turns--
	b.row.Lookups = gnn.SpreadOf(lookups)
	if b.host {
		limit, ratio := gnn.SpreadOf(limits), gnn.SpreadOf(ratios)
		b.row.Limit, b.row.Ratio = &limit, &ratio
		next()
		took, err := probe(true)
		if err != nil {
			return err
		}
		b.row.LatencyNS = took / float64(b.rows) * 1e9
	}
	b.set(auditSet, b.asked)
	if err := lookup(); err != nil {
		return err
	}
	b.row.HitRatio, b.row.CPURatio = float64(buckets.NGPU)/float64(b.rows), float64(buckets.NCPU)/float64(b.rows)
	return b.auditStatic(ctx, buckets, ranks)
}

// auditStatic compares every answer about b.asked.
func (b *cacheBench) auditStatic(ctx context.Context, k *cache.Buckets, ranks [][2]int64) error {
	wrong := func(format string, a ...any) {
		if b.row.Why == "" {
			b.row.Why = fmt.Sprintf(format, a...)
		}
	}
	seen := make([]bool, b.rows)
	take := func(pos uint32) bool {
		if int64(pos) >= b.rows || seen[pos] {
			wrong("position %d is not there, or twice", pos)
			return false
		}
		seen[pos] = true
		b.row.Checked++
		return true
	}
	type hit struct{ row, slot int64 }
	for t, l := range map[cache.Tier]struct {
		pos, slot cuda.Buffer
		n         int64
	}{cache.GPU: {k.GPUPos, k.GPUSlot, k.NGPU}, cache.CPU: {k.CPUPos, k.CPUSlot, k.NCPU}} {
		pos, err := fetch[uint32](ctx, b, l.pos, l.n)
		if err != nil {
			return err
		}
		slot, err := fetch[uint32](ctx, b, l.slot, l.n)
		if err != nil {
			return err
		}
		var hits []hit
		for i, at := range pos {
			if i > 0 && at <= pos[i-1] {
				wrong("%v hits: position %d after %d", t, at, pos[i-1])
			}
			if take(at) {
				hits = append(hits, hit{b.asked[at], int64(slot[i])})
				if got := b.tierOf(b.asked[at]); got != t {
					wrong("row %d is in the %v tier, not in %v", b.asked[at], got, t)
				}
			}
		}
		// Slots ascend with the rows; some are counted from the nearest note on.
		slices.SortFunc(hits, func(x, y hit) int { return int(x.row - y.row) })
		every := max(len(hits)/2000, 1)
		for i, h := range hits {
			if i > 0 && h.slot-hits[i-1].slot < 1 {
				wrong("row %d has slot %d of the %v tier, row %d slot %d", hits[i-1].row, hits[i-1].slot, t, h.row, h.slot)
			}
			if i%every == 0 {
				want := ranks[h.row/rankEvery][t-cache.GPU]
				for r := h.row / rankEvery * rankEvery; r < h.row; r++ {
					if b.tierOf(r) == t {
						want++
					}
				}
				if h.slot != want {
					wrong("row %d has slot %d of the %v tier, not %d", h.row, h.slot, t, want)
				}
			}
		}
	}
	pos, err := fetch[uint32](ctx, b, k.MissPos, k.NMiss)
	if err != nil {
		return err
	}
	rows, err := fetch[int64](ctx, b, k.MissRow, k.NMiss)
	if err != nil {
		return err
	}
	for s := range b.ssds {
		for i := k.SSDOffset[s]; i < k.SSDOffset[s+1]; i++ {
			at := pos[i]
			if i > k.SSDOffset[s] && at <= pos[i-1] {
				wrong("misses of SSD %d: position %d after %d", s, at, pos[i-1])
			}
			if !take(at) {
				continue
			}
			if row := b.asked[at]; rows[i] != row || row%int64(b.ssds) != int64(s) || b.tierOf(row) != cache.SSD {
				wrong("row %d at position %d is a miss of SSD %d with row %d", row, at, s, rows[i])
			}
		}
	}
	if b.row.Checked != b.rows {
		wrong("%d of %d positions have an answer", b.row.Checked, b.rows)
	}
	return nil
}

// fetch copies device memory to the CPU.
func fetch[T any](ctx context.Context, b *cacheBench, from cuda.Buffer, n int64) (list []T, err error) {
	list = make([]T, n)
	if n == 0 {
		return list, nil
	}
	var one T
	bytes := n * int64(unsafe.Sizeof(one))
	stage, err := b.dev.Alloc(cuda.MemPinned, bytes, "audit")
	if err != nil {
		return nil, err
	}
	defer closing(&err, stage.Free)
	if err := b.stream.Copy(stage.Ptr(), from.Ptr(), bytes); err != nil {
		return nil, err
	}
	op, cancel := context.WithTimeout(context.WithoutCancel(ctx), memoryTimeout)
	defer cancel()
	if err := b.stream.Synchronize(op); err != nil {
		return nil, err
	}
	copy(list, hostmem.View[T](stage.Bytes()))
	return list, nil
}

// dynamic measures a dynamic tier. A row of it is 8 bytes that say which row it is, plus one: so every row that it
// delivers can be checked.
func (b *cacheBench) dynamic(ctx context.Context, name string) (err error) {
	const rowBytes = 8
	c := cache.DynamicConfig{
		Rows: b.total, RowBytes: rowBytes, Slots: b.slots(), Policy: name, Seed: b.seed,
		Lines: cache.Lines{SSDs: int64(b.ssds), RowsPerLine: b.lineRows, LineBytes: b.lineRows * rowBytes, RowStride: rowBytes},
	}
	b.row.LineRows, b.row.Slots, b.row.Window = b.lineRows, c.Slots, b.window
	b.row.Workers = 1 // the policy decides in order
	var d *cache.Dynamic
	if err := b.built(func() (err error) {
		d, err = cache.NewDynamic(b.dev, c)
		return err
	}); err != nil {
		return err
	}
	defer closing(&err, d.Close)
	t, err := d.NewTicket()
	if err != nil {
		return err
	}
	defer closing(&err, t.Close)
	plan, err := d.NewReadPlan()
	if err != nil {
		return err
	}
	defer closing(&err, plan.Close)
	staging, err := b.dev.Alloc(cuda.MemPinned, b.rows*c.Lines.LineBytes, "staging")
	if err != nil {
		return err
	}
	defer closing(&err, staging.Free)
	x, err := b.dev.Alloc(cuda.MemPinned, b.rows*rowBytes, "rows delivered")
	if err != nil {
		return err
	}
	defer closing(&err, x.Free)
	// The ring holds the current set and those that are announced.
	ring := make([][]int64, 1+b.window)
	for k := range ring {
		ring[k] = make([]int64, b.rows)
	}
	announced := uint64(0)
	made := uint64(0)
	turn := func(k uint64) (took time.Duration, err error) {
		for ; made <= k+uint64(b.window); made++ {
			b.set(made, ring[made%uint64(len(ring))])
		}
		copy(b.asked, ring[k%uint64(len(ring))])
		op, cancel := context.WithTimeout(context.WithoutCancel(ctx), memoryTimeout)
		defer cancel()
		start := time.Now()
		for ; b.window > 0 && announced < made; announced++ {
			if err := d.Announce(ring[announced%uint64(len(ring))]); err != nil {
				return 0, err
			}
		}
		d.NextBatch()
		if err := d.Admit(op, b.stream, b.buf.Ptr(), 0, b.rows, t); err != nil {
			return 0, err
		}
		if err := d.Plan(plan, t); err != nil {
			return 0, err
		}
		took = time.Since(start)
		b.row.HitRatio = float64(t.NGPU) / float64(b.rows)
		b.serve(c.Lines, plan, staging)
		if err := d.Finish(b.stream, t, staging, x.Ptr(), rowBytes); err != nil {
			return 0, err
		}
		if err := b.stream.Synchronize(op); err != nil {
			return 0, err
		}
		for i, got := range hostmem.View[int64](x.Bytes()) {
			if got != b.asked[i]+1 && b.row.Why == "" {
				b.row.Why = fmt.Sprintf("set %d: row %d at position %d is that of row %d", k, b.asked[i], i, got-1)
			}
		}
		b.row.Checked += b.rows
		return took, d.Release(t)
	}
	// Full is what has evicted. Sets that pin all of a small tier never come to that.
	k := uint64(0)
	for most := uint64(8*c.Slots/b.rows + 8); d.Stats().Evicted == 0 && k < most; k++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := turn(k); err != nil {
			return err
		}
	}
	var lookups, hits []float64
	for end := time.Now().Add(b.length); b.row.Turns < cacheTurns || time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		took, err := turn(k)
		if err != nil {
			return err
		}
		k++
		lookups, hits = append(lookups, float64(b.rows)/took.Seconds()), append(hits, b.row.HitRatio)
	}
	b.row.Lookups, b.row.HitRatio = gnn.SpreadOf(lookups), gnn.SpreadOf(hits).Median
	b.row.Metadata = d.MetadataBytes()
	b.row.metadataPer = float64(b.row.Metadata) / float64(c.Slots)
	if s := d.Stats(); b.row.Why == "" && (s.Inserted-s.Evicted < 0 || s.Inserted-s.Evicted > c.Slots || s.Hits+s.Inserted+s.Bypassed != s.Accesses) {
		b.row.Why = fmt.Sprintf("the counters do not add up: %+v with %d slots", s, c.Slots)
	}
	return nil
}

// serve does what reads would.
func (b *cacheBench) serve(l cache.Lines, plan *cache.ReadPlan, staging cuda.Buffer) {
	if plan.Lines == 0 {
		return
	}
	to := hostmem.View[int64](staging.Bytes())
	rows, pos := hostmem.View[int64](plan.Rows.Bytes()), hostmem.View[uint32](plan.Pos.Bytes())
	for i := range plan.Lines {
		at := int64(pos[i]) * l.RowsPerLine
		first := rows[i]/l.SSDs*l.RowsPerLine*l.SSDs + rows[i]%l.SSDs
		for k := range l.RowsPerLine {
			to[at+k] = first + k*l.SSDs + 1
		}
	}
}
