// Package cache measures lookups in the static index and in dynamic tiers of the cache, without
// SSDs, and audits the answers.
package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime/debug"
	"slices"
	"time"
	"unsafe"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/bench"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// Static is the name of the static index among the policies.
const Static = "static"

// Config chooses the measurement.
type Config struct {
	// of a lookup
	Rows int64 `option:"rows" shown:"1M" default:"1000000" usage:"rows of a lookup"`
	// of the rows of the dataset are in the GPU tier
	GPUShare float64 `option:"gpu-cache" share:"yes" default:"10%" arg:"SHARE" usage:"SHARE of the rows that are in the GPU tier"`
	// are in the static CPU tier
	CPUShare float64 `option:"cpu-cache" share:"yes" default:"20%" arg:"SHARE" usage:"SHARE of the rows that are in the static CPU tier"`
	// rows of a line of a dynamic tier
	LineRows int64 `option:"line-rows" default:"1" usage:"rows of a line of a dynamic tier"`
	// Directory of a dynamic tier, of policy.Kinds; empty: the first
	Directory string `option:"directory" use:"setting" oneof:"@directories" default:"sets" usage:"what knows where a dynamic tier's lines are"`
	// sets that are announced ahead to dynamic tiers
	Window int `option:"window" usage:"announce so many sets ahead to dynamic tiers"`
	// that misses are bucketed by
	SSDs   int `option:"ssd-count" default:"12" usage:"SSDs that misses are bucketed by"`
	Length time.Duration
	Seed   uint64 // of tiers, rows and random eviction
}

// Check refuses what cannot be measured.
func (c *Config) Check() error {
	switch {
	case c.Rows < 1:
		return errs.New(errs.Usage, "%v %d: a lookup has at least one row",
			errs.Key("rows"), c.Rows)
	case !(c.GPUShare >= 0 && c.CPUShare >= 0 && c.GPUShare+c.CPUShare <= 1):
		return errs.New(errs.Usage,
			"%v %g%% and %v %g%%: give shares that are at most 100%% together",
			errs.Key("gpu-cache"), 100*c.GPUShare, errs.Key("cpu-cache"), 100*c.CPUShare)
	case c.LineRows < 1 || c.LineRows > 1<<12:
		return errs.New(errs.Usage, "%v %d is not between 1 and %d", errs.Key("line-rows"),
			c.LineRows, 1<<12)
	case c.Window < 0 || c.Window > 64:
		return errs.New(errs.Usage, "%v %d is not between 0 and 64", errs.Key("window"), c.Window)
	case c.SSDs < 1 || c.SSDs > 256:
		return errs.New(errs.Usage, "%v %d is not between 1 and 256", errs.Key("ssd-count"), c.SSDs)
	}
	return nil
}

// Row is a line of results.
type Row struct {
	Device     string        `json:"device"`
	Policy     string        `json:"policy"`
	Directory  string        `json:"directory,omitempty"` // of a dynamic tier
	Nodes      int64         `json:"nodes"`
	Rows       int64         `json:"rows"` // of a lookup
	Workers    int           `json:"workers"`
	Turns      int           `json:"turns"`
	Lookups    bench.Spread  `json:"lookups_per_second"`
	Limit      *bench.Spread `json:"limit_per_second,omitempty"` // static index on the host device
	Ratio      *bench.Spread `json:"ratio,omitempty"`            // lookups by limit
	LatencyNS  float64       `json:"latency_ns,omitempty"`
	IndexBytes int64         `json:"index_bytes,omitempty"` // of the static index
	BuildTime  float64       `json:"build_seconds"`
	// the most memory while it was made, what was made included
	BuildBytes int64   `json:"build_bytes"`
	LineRows   int64   `json:"line_rows,omitempty"`
	Slots      int64   `json:"slots,omitempty"` // lines
	Window     int     `json:"window,omitempty"`
	Metadata   int64   `json:"metadata_bytes,omitempty"` // of the directory
	HitRatio   float64 `json:"hit_ratio"`                // rows in the GPU tier
	CPURatio   float64 `json:"cpu_ratio"`
	Checked    int64   `json:"checked_rows"`
	Audited    bool    `json:"audited"`
	Why        string  `json:"audit_error,omitempty"`
}

// lookupTimeout bounds what is enqueued at once.
const lookupTimeout = 5 * time.Minute

// Measure looks rows of a dataset of so many nodes up on a device under one policy, or in the
// static index, and audits the answers. A failed audit is no error: the row tells it.
func Measure(ctx context.Context, dev cuda.Device, c Config, nodes int64, policy string) (row Row,
	err error) {
	if err := c.Check(); err != nil {
		return row, err
	}
	if nodes < c.Rows {
		return row, errs.New(errs.Usage,
			"%v %d are more than %v %d; a lookup has each row at most once", errs.Key("rows"),
			c.Rows, errs.Key("nodes"), nodes)
	}
	b := &measurement{Config: c, dev: dev, host: dev.Info().Backend == "host", total: nodes}
	if err := b.fits(policy); err != nil {
		return row, err
	}
	if b.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench cache"}); err != nil {
		return row, err
	}
	defer errs.Closing(&err, b.stream.Close)
	if b.buf, err = dev.Alloc(cuda.MemPinned, c.Rows*8, "rows asked for"); err != nil {
		return row, err
	}
	defer errs.Closing(&err, b.buf.Free)
	b.asked = hostmem.View[int64](b.buf.Bytes())
	b.row = Row{Device: dev.Info().Name, Policy: policy, Nodes: nodes, Rows: c.Rows,
		Workers: dev.Info().SMs}
	if policy == Static {
		err = b.static(ctx)
	} else {
		err = b.dynamic(ctx, policy)
	}
	b.row.Audited = b.row.Why == ""
	return b.row, err
}

// measurement makes one row.
type measurement struct {
	Config
	dev    cuda.Device
	host   bool
	stream cuda.Stream
	total  int64 // rows of the dataset
	buf    cuda.Buffer
	asked  []int64 // in buf
	row    Row
}

// fits refuses what is more than CPU memory has: Go's own allocations cannot fail.
func (b *measurement) fits(name string) error {
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	need := cache.IndexBytes(b.total) + b.Rows*100
	if name != Static {
		slots := b.slots()
		need = slots*(64+8*b.LineRows) + b.Rows*(100+8*b.LineRows)*int64(1+b.Window)
	}
	if need > avail {
		return errs.New(errs.Capability,
			"%v %d with policy %s takes %s of CPU memory, and %s are available; give fewer, or a smaller %v, %v or %v",
			errs.Key("nodes"), b.total, name, units.FormatBytes(need), units.FormatBytes(avail),
			errs.Key("gpu-cache"), errs.Key("rows"), errs.Key("window"))
	}
	return nil
}

// slots is the lines of a dynamic tier: at least one.
func (b *measurement) slots() int64 { return max(int64(float64(b.total)*b.GPUShare)/b.LineRows, 1) }

// mixed is a hash of x.
func mixed(x, seed uint64) uint64 {
	x += seed * 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// set writes the k-th set of distinct rows to to: a permutation of the numbers of as many bits,
// made of four rounds that each change one half by a hash of the other (Feistel), is walked until
// it comes to a row of the dataset.
func (b *measurement) set(k uint64, to []int64) {
	half := max((bits.Len64(uint64(b.total-1))+1)/2, 1)
	mask := uint64(1)<<half - 1
	seed := mixed(k, b.Seed+1)
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

// tierOf returns the tier of a row in the static placement.
func (b *measurement) tierOf(row int64) cache.Tier {
	switch x := float64(mixed(uint64(row), b.Seed)>>11) / (1 << 53); {
	case x < b.GPUShare:
		return cache.GPU
	case x < b.GPUShare+b.CPUShare:
		return cache.CPU
	}
	return cache.SSD
}

// built measures what making a cache takes.
func (b *measurement) built(do func() error) error {
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

// leastTurns is the least number of turns.
const leastTurns = 5

// auditSet is the number of the set whose answers are compared: whatever was measured before, the
// same.
const auditSet = 1 << 40

// rankEvery is after how many rows the audit of the static index notes how many of each tier came
// before.
const rankEvery = 1 << 14

// static measures the static index.
func (b *measurement) static(ctx context.Context) (err error) {
	index, ranks, err := b.buildIndex()
	if err != nil {
		return err
	}
	h, err := cache.NewLookup(b.dev, index, b.SSDs)
	if err != nil {
		return errors.Join(err, index.Close())
	}
	defer errs.Closing(&err, h.Close)
	b.row.IndexBytes = index.Bytes()
	buckets, err := h.NewBuckets()
	if err != nil {
		return err
	}
	defer errs.Closing(&err, buckets.Close)
	if err := buckets.Reserve(b.Rows); err != nil {
		return err
	}
	lookup := func() error {
		op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
		defer cancel()
		return h.Lookup(op, b.stream, b.buf.Ptr(), 0, b.Rows, buckets)
	}
	if err := b.timeLookups(ctx, index, lookup); err != nil {
		return err
	}
	b.set(auditSet, b.asked)
	if err := lookup(); err != nil {
		return err
	}
	b.row.HitRatio, b.row.CPURatio = float64(buckets.NGPU)/float64(b.Rows),
		float64(buckets.NCPU)/float64(b.Rows)
	return b.auditStatic(ctx, buckets, ranks)
}

// buildIndex builds the static index, and counts the rows of each tier before every rankEvery-th
// one.
func (b *measurement) buildIndex() (index *cache.Index, ranks [][2]int64, err error) {
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
	return index, ranks, err
}

// timeLookups lets lookups and, on the host, probes of memory take turns, each with sets of its
// own.
func (b *measurement) timeLookups(ctx context.Context, index *cache.Index,
	lookup func() error) error {
	sets := uint64(0)
	timed := func(do func() error) (float64, error) {
		b.set(sets, b.asked)
		sets++
		start := time.Now()
		err := do()
		return time.Since(start).Seconds(), err
	}
	probe := func() error {
		_, err := index.Probe(b.asked, b.row.Workers, false)
		return err
	}
	do := []func() error{lookup}
	if b.host {
		do = append(do, probe)
	}
	var lookups, limits, ratios []float64
	for end := time.Now().Add(b.Length); b.row.Turns < leastTurns+1 ||
		time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		var took [2]float64
		for i := range do { // the first in one turn is the second in the next
			kind := (i + b.row.Turns) % len(do)
			var err error
			if took[kind], err = timed(do[kind]); err != nil {
				return err
			}
		}
		if b.row.Turns == 0 {
			continue // pages and memory of the answer
		}
		lookups = append(lookups, float64(b.Rows)/took[0])
		if b.host {
			limits, ratios = append(limits, float64(b.Rows)/took[1]),
				append(ratios, took[1]/took[0])
		}
	}
	b.row.Turns--
	b.row.Lookups = bench.SpreadOf(lookups)
	if !b.host {
		return nil
	}
	limit, ratio := bench.SpreadOf(limits), bench.SpreadOf(ratios)
	b.row.Limit, b.row.Ratio = &limit, &ratio
	took, err := timed(func() error {
		_, err := index.Probe(b.asked, 1, true)
		return err
	})
	b.row.LatencyNS = took / float64(b.Rows) * 1e9
	return err
}

// wrong keeps the first finding of an audit.
func (b *measurement) wrong(format string, a ...any) {
	if b.row.Why == "" {
		b.row.Why = fmt.Sprintf(format, a...)
	}
}

// staticAudit compares every answer about asked rows. Each position has one.
type staticAudit struct {
	*measurement
	ranks [][2]int64
	seen  []bool
}

// auditStatic compares every answer about b.asked.
func (b *measurement) auditStatic(ctx context.Context, k *cache.Buckets, ranks [][2]int64) error {
	a := &staticAudit{b, ranks, make([]bool, b.Rows)}
	if err := a.hits(ctx, cache.GPU, k.GPUPos, k.GPUSlot, k.NGPU); err != nil {
		return err
	}
	if err := a.hits(ctx, cache.CPU, k.CPUPos, k.CPUSlot, k.NCPU); err != nil {
		return err
	}
	if err := a.misses(ctx, k); err != nil {
		return err
	}
	if b.row.Checked != b.Rows {
		b.wrong("%d of %d positions have an answer", b.row.Checked, b.Rows)
	}
	return nil
}

// take counts the answer of a position.
func (a *staticAudit) take(pos uint32) bool {
	if int64(pos) >= a.Rows || a.seen[pos] {
		a.wrong("position %d is not there, or twice", pos)
		return false
	}
	a.seen[pos] = true
	a.row.Checked++
	return true
}

type slotOfRow struct{ row, slot int64 }

// hits compares the hits of a tier.
func (a *staticAudit) hits(ctx context.Context, t cache.Tier, posBuf, slotBuf cuda.Buffer,
	n int64) error {
	pos, err := fetch[uint32](ctx, a.measurement, posBuf, n)
	if err != nil {
		return err
	}
	slot, err := fetch[uint32](ctx, a.measurement, slotBuf, n)
	if err != nil {
		return err
	}
	var hits []slotOfRow
	for i, p := range pos {
		if i > 0 && p <= pos[i-1] {
			a.wrong("%v hits: position %d after %d", t, p, pos[i-1])
		}
		if a.take(p) {
			hits = append(hits, slotOfRow{a.asked[p], int64(slot[i])})
			if got := a.tierOf(a.asked[p]); got != t {
				a.wrong("row %d is in the %v tier, not in %v", a.asked[p], got, t)
			}
		}
	}
	a.slots(t, hits)
	return nil
}

// slots checks that slots ascend with the rows; some are counted from the nearest note on.
func (a *staticAudit) slots(t cache.Tier, hits []slotOfRow) {
	slices.SortFunc(hits, func(x, y slotOfRow) int { return int(x.row - y.row) })
	every := max(len(hits)/2000, 1)
	for i, h := range hits {
		if i > 0 && h.slot-hits[i-1].slot < 1 {
			a.wrong("row %d has slot %d of the %v tier, row %d slot %d", hits[i-1].row,
				hits[i-1].slot, t, h.row, h.slot)
		}
		if i%every != 0 {
			continue
		}
		want := a.ranks[h.row/rankEvery][t-cache.GPU]
		for r := h.row / rankEvery * rankEvery; r < h.row; r++ {
			if a.tierOf(r) == t {
				want++
			}
		}
		if h.slot != want {
			a.wrong("row %d has slot %d of the %v tier, not %d", h.row, h.slot, t, want)
		}
	}
}

// misses compares the misses of each SSD.
func (a *staticAudit) misses(ctx context.Context, k *cache.Buckets) error {
	pos, err := fetch[uint32](ctx, a.measurement, k.MissPos, k.NMiss)
	if err != nil {
		return err
	}
	rows, err := fetch[int64](ctx, a.measurement, k.MissRow, k.NMiss)
	if err != nil {
		return err
	}
	for s := range a.SSDs {
		for i := k.SSDOffset[s]; i < k.SSDOffset[s+1]; i++ {
			p := pos[i]
			if i > k.SSDOffset[s] && p <= pos[i-1] {
				a.wrong("misses of SSD %d: position %d after %d", s, p, pos[i-1])
			}
			if !a.take(p) {
				continue
			}
			if row := a.asked[p]; rows[i] != row || row%int64(a.SSDs) != int64(s) ||
				a.tierOf(row) != cache.SSD {
				a.wrong("row %d at position %d is a miss of SSD %d with row %d", row, p, s, rows[i])
			}
		}
	}
	return nil
}

// fetch copies device memory to the CPU.
func fetch[T any](ctx context.Context, b *measurement, from cuda.Buffer, n int64) (list []T,
	err error) {
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
	defer errs.Closing(&err, stage.Free)
	if err := b.stream.Copy(stage.Ptr(), from.Ptr(), bytes); err != nil {
		return nil, err
	}
	op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
	defer cancel()
	if err := b.stream.Synchronize(op); err != nil {
		return nil, err
	}
	copy(list, hostmem.View[T](stage.Bytes()))
	return list, nil
}

// dynamicRun has a dynamic tier and sets of rows to look up in it. A row is 8 bytes that say which
// row it is, plus one: so every row that the tier delivers can be checked.
type dynamicRun struct {
	*measurement
	cache.DynamicConfig
	tier    *cache.Dynamic
	ticket  *cache.Ticket
	plan    *cache.ReadPlan
	staging cuda.Buffer // lines that reads bring
	x       cuda.Buffer // rows delivered
	all     cuda.Buffer // the rings' rows
	ring    [][]int64   // the current set and those that are announced
	// sets that were made, and announced
	made, announced uint64
	closers         []func() error
}

const dynamicRowBytes = 8

// dynamic measures a dynamic tier.
func (b *measurement) dynamic(ctx context.Context, name string) (err error) {
	r := &dynamicRun{measurement: b, DynamicConfig: cache.DynamicConfig{
		Rows: b.total, RowBytes: dynamicRowBytes, Slots: b.slots(), Policy: name, Seed: b.Seed,
		Directory: b.Directory, Lines: cache.Lines{SSDs: int64(b.SSDs), RowsPerLine: b.LineRows,
			LineBytes: b.LineRows * dynamicRowBytes, RowStride: dynamicRowBytes},
	}}
	defer errs.Closing(&err, r.close)
	if err := r.open(); err != nil {
		return err
	}
	b.row.LineRows, b.row.Slots, b.row.Window = b.LineRows, r.Slots, b.Window
	if b.Directory != policy.InSets {
		b.row.Workers = 1 // the policy decides in order
	}
	b.row.Directory = cmp.Or(b.Directory, policy.InQueues)
	next, err := r.fill(ctx)
	if err != nil {
		return err
	}
	var lookups, hits []float64
	for end := time.Now().Add(b.Length); b.row.Turns < leastTurns ||
		time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		took, err := r.turn(ctx, next)
		if err != nil {
			return err
		}
		next++
		lookups, hits = append(lookups, float64(b.Rows)/took.Seconds()),
			append(hits, b.row.HitRatio)
	}
	b.row.Lookups, b.row.HitRatio = bench.SpreadOf(lookups), bench.SpreadOf(hits).Median
	b.row.Metadata = r.tier.MetadataBytes()
	if s := r.tier.Stats(); s.Inserted-s.Evicted < 0 || s.Inserted-s.Evicted > r.Slots ||
		s.Hits+s.Inserted+s.Bypassed != s.Accesses {
		b.wrong("the counters do not add up: %+v with %d slots", s, r.Slots)
	}
	return nil
}

func (r *dynamicRun) close() (err error) {
	for _, f := range slices.Backward(r.closers) {
		err = errors.Join(err, f())
	}
	return err
}

func (r *dynamicRun) open() (err error) {
	if err := r.built(func() (err error) {
		r.tier, err = cache.NewDynamic(r.dev, r.DynamicConfig)
		return err
	}); err != nil {
		return err
	}
	r.closers = append(r.closers, r.tier.Close)
	if r.ticket, err = r.tier.NewTicket(); err != nil {
		return err
	}
	r.closers = append(r.closers, r.ticket.Close)
	if r.plan, err = r.tier.NewReadPlan(); err != nil {
		return err
	}
	r.closers = append(r.closers, r.plan.Close)
	n := r.measurement.Rows
	r.ring = make([][]int64, 1+r.Window)
	for _, m := range []struct {
		to    *cuda.Buffer
		bytes int64
		what  string
	}{{&r.staging, n * r.Lines.LineBytes, "staging"},
		{&r.x, n * dynamicRowBytes, "rows delivered"},
		{&r.all, int64(len(r.ring)) * n * 8, "rows asked for"}} {
		if *m.to, err = r.dev.Alloc(cuda.MemPinned, m.bytes, m.what); err != nil {
			return err
		}
		r.closers = append(r.closers, (*m.to).Free)
	}
	for k := range r.ring {
		r.ring[k] = hostmem.View[int64](r.all.Bytes())[int64(k)*n:][:n]
	}
	return nil
}

// fill takes turns until the tier has evicted and has no room for a hundredth more, and returns
// their number. Windows that pin all of a small tier never come to that.
func (r *dynamicRun) fill(ctx context.Context) (turns uint64, err error) {
	full := func() bool {
		s := r.tier.Stats()
		return s.Evicted > 0 && s.Inserted-s.Evicted >= r.Slots-r.Slots/100
	}
	for limit := uint64(8*r.Slots/r.measurement.Rows + 8); !full() && turns < limit; turns++ {
		if err := ctx.Err(); err != nil {
			return turns, err
		}
		if _, err := r.turn(ctx, turns); err != nil {
			return turns, err
		}
	}
	return turns, nil
}

// turn looks set k up and delivers its rows, and returns what the lookup took.
func (r *dynamicRun) turn(ctx context.Context, k uint64) (took time.Duration, err error) {
	n, sets := r.measurement.Rows, uint64(len(r.ring))
	for ; r.made <= k+uint64(r.Window); r.made++ {
		r.set(r.made, r.ring[r.made%sets])
	}
	copy(r.asked, r.ring[k%sets])
	op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
	defer cancel()
	start := time.Now()
	for ; r.Window > 0 && r.announced < r.made; r.announced++ {
		offset := cuda.DevicePtr(r.announced % sets * uint64(n) * 8)
		if err := r.tier.Announce(op, r.stream, r.all.Ptr()+offset, n); err != nil {
			return 0, err
		}
	}
	r.tier.NextBatch()
	if err := r.tier.Admit(op, r.stream, r.buf.Ptr(), 0, n, r.ticket); err != nil {
		return 0, err
	}
	if err := r.tier.Plan(r.plan, r.ticket); err != nil {
		return 0, err
	}
	took = time.Since(start)
	r.row.HitRatio = float64(r.ticket.NGPU) / float64(n)
	r.serve(r.Lines, r.plan, r.staging)
	if err := r.tier.Finish(r.stream, r.ticket, r.staging, r.x.Ptr(), dynamicRowBytes); err != nil {
		return 0, err
	}
	if err := r.stream.Synchronize(op); err != nil {
		return 0, err
	}
	for i, got := range hostmem.View[int64](r.x.Bytes()) {
		if got != r.asked[i]+1 {
			r.wrong("set %d: row %d at position %d is that of row %d", k, r.asked[i], i, got-1)
		}
	}
	r.row.Checked += n
	return took, r.tier.Release(r.ticket)
}

// serve delivers the lines of a plan, in place of reads.
func (b *measurement) serve(l cache.Lines, plan *cache.ReadPlan, staging cuda.Buffer) {
	if plan.Lines == 0 {
		return
	}
	to := hostmem.View[int64](staging.Bytes())
	rows, pos := cuda.View[int64](plan.Rows, plan.Lines), cuda.View[uint32](plan.Pos, plan.Lines)
	for i := range plan.Lines {
		place := int64(pos[i]) * l.RowsPerLine
		first := rows[i]/l.SSDs*l.RowsPerLine*l.SSDs + rows[i]%l.SSDs
		for k := range l.RowsPerLine {
			to[place+k] = first + k*l.SSDs + 1
		}
	}
}
