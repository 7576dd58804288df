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

// Config says what is measured.
type Config struct {
	// of a lookup
	Rows int64 `option:"rows" shown:"1M" default:"1000000" usage:"rows of a lookup"`
	// of the rows of the dataset are in the GPU tier
	GPUShare float64 `option:"gpu-cache" share:"yes" was:"gpu-share" default:"10%" arg:"SHARE" usage:"SHARE of the rows that are in the GPU tier"`
	// are in the static CPU tier
	CPUShare float64 `option:"cpu-cache" share:"yes" was:"cpu-share" default:"20%" arg:"SHARE" usage:"SHARE of the rows that are in the static CPU tier"`
	// rows of a line of a dynamic tier
	LineRows int64 `option:"line-rows" default:"1" usage:"rows of a line of a dynamic tier"`
	// Directory of a dynamic tier, of policy.Kinds; empty: the first
	Directory string `option:"directory" use:"setting" oneof:"@directories" default:"sets" usage:"what knows where a dynamic tier's lines are"`
	// sets that are announced ahead to dynamic tiers
	Window int `option:"window" usage:"announce so many sets ahead to dynamic tiers"`
	// that misses are bucketed by
	SSDs   int `option:"ssd-count" was:"ssds" default:"12" usage:"SSDs that misses are bucketed by"`
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

// tierOf tells where the static placement has a row.
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

func (b *measurement) static(ctx context.Context) (err error) {
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
	for end := time.Now().Add(b.Length); b.row.Turns < leastTurns+1 ||
		time.Now().Before(end); b.row.Turns++ {
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
		lookups = append(lookups, float64(b.Rows)/took[0])
		if b.host {
			limits, ratios = append(limits, float64(b.Rows)/took[1]),
				append(ratios, took[1]/took[0])
		}
	}
	b.row.Turns--
	b.row.Lookups = bench.SpreadOf(lookups)
	if b.host {
		limit, ratio := bench.SpreadOf(limits), bench.SpreadOf(ratios)
		b.row.Limit, b.row.Ratio = &limit, &ratio
		next()
		took, err := probe(true)
		if err != nil {
			return err
		}
		b.row.LatencyNS = took / float64(b.Rows) * 1e9
	}
	b.set(auditSet, b.asked)
	if err := lookup(); err != nil {
		return err
	}
	b.row.HitRatio, b.row.CPURatio = float64(buckets.NGPU)/float64(b.Rows),
		float64(buckets.NCPU)/float64(b.Rows)
	return b.auditStatic(ctx, buckets, ranks)
}

// auditStatic compares every answer about b.asked.
func (b *measurement) auditStatic(ctx context.Context, k *cache.Buckets, ranks [][2]int64) error {
	wrong := func(format string, a ...any) {
		if b.row.Why == "" {
			b.row.Why = fmt.Sprintf(format, a...)
		}
	}
	seen := make([]bool, b.Rows)
	take := func(pos uint32) bool {
		if int64(pos) >= b.Rows || seen[pos] {
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
				wrong("row %d has slot %d of the %v tier, row %d slot %d", hits[i-1].row,
					hits[i-1].slot, t, h.row, h.slot)
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
	for s := range b.SSDs {
		for i := k.SSDOffset[s]; i < k.SSDOffset[s+1]; i++ {
			at := pos[i]
			if i > k.SSDOffset[s] && at <= pos[i-1] {
				wrong("misses of SSD %d: position %d after %d", s, at, pos[i-1])
			}
			if !take(at) {
				continue
			}
			if row := b.asked[at]; rows[i] != row || row%int64(b.SSDs) != int64(s) ||
				b.tierOf(row) != cache.SSD {
				wrong("row %d at position %d is a miss of SSD %d with row %d", row, at, s, rows[i])
			}
		}
	}
	if b.row.Checked != b.Rows {
		wrong("%d of %d positions have an answer", b.row.Checked, b.Rows)
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

// dynamic measures a dynamic tier. A row of it is 8 bytes that say which row it is, plus one: so
// every row that it delivers can be checked.
func (b *measurement) dynamic(ctx context.Context, name string) (err error) {
	const rowBytes = 8
	c := cache.DynamicConfig{
		Rows: b.total, RowBytes: rowBytes, Slots: b.slots(), Policy: name, Seed: b.Seed,
		Directory: b.Directory, Lines: cache.Lines{SSDs: int64(b.SSDs), RowsPerLine: b.LineRows,
			LineBytes: b.LineRows * rowBytes, RowStride: rowBytes},
	}
	b.row.LineRows, b.row.Slots, b.row.Window = b.LineRows, c.Slots, b.Window
	if b.Directory != policy.InSets {
		b.row.Workers = 1 // the policy decides in order
	}
	b.row.Directory = cmp.Or(b.Directory, policy.InQueues)
	var d *cache.Dynamic
	if err := b.built(func() (err error) {
		d, err = cache.NewDynamic(b.dev, c)
		return err
	}); err != nil {
		return err
	}
	defer errs.Closing(&err, d.Close)
	t, err := d.NewTicket()
	if err != nil {
		return err
	}
	defer errs.Closing(&err, t.Close)
	plan, err := d.NewReadPlan()
	if err != nil {
		return err
	}
	defer errs.Closing(&err, plan.Close)
	staging, err := b.dev.Alloc(cuda.MemPinned, b.Rows*c.Lines.LineBytes, "staging")
	if err != nil {
		return err
	}
	defer errs.Closing(&err, staging.Free)
	x, err := b.dev.Alloc(cuda.MemPinned, b.Rows*rowBytes, "rows delivered")
	if err != nil {
		return err
	}
	defer errs.Closing(&err, x.Free)
	// The ring holds the current set and those that are announced.
	ring := make([][]int64, 1+b.Window)
	all, err := b.dev.Alloc(cuda.MemPinned, int64(len(ring))*b.Rows*8, "rows asked for")
	if err != nil {
		return err
	}
	defer errs.Closing(&err, all.Free)
	for k := range ring {
		ring[k] = hostmem.View[int64](all.Bytes())[int64(k)*b.Rows:][:b.Rows]
	}
	announced := uint64(0)
	made := uint64(0)
	turn := func(k uint64) (took time.Duration, err error) {
		for ; made <= k+uint64(b.Window); made++ {
			b.set(made, ring[made%uint64(len(ring))])
		}
		copy(b.asked, ring[k%uint64(len(ring))])
		op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
		defer cancel()
		start := time.Now()
		for ; b.Window > 0 && announced < made; announced++ {
			at := cuda.DevicePtr(announced % uint64(len(ring)) * uint64(b.Rows) * 8)
			if err := d.Announce(op, b.stream, all.Ptr()+at, b.Rows); err != nil {
				return 0, err
			}
		}
		d.NextBatch()
		if err := d.Admit(op, b.stream, b.buf.Ptr(), 0, b.Rows, t); err != nil {
			return 0, err
		}
		if err := d.Plan(plan, t); err != nil {
			return 0, err
		}
		took = time.Since(start)
		b.row.HitRatio = float64(t.NGPU) / float64(b.Rows)
		b.serve(c.Lines, plan, staging)
		if err := d.Finish(b.stream, t, staging, x.Ptr(), rowBytes); err != nil {
			return 0, err
		}
		if err := b.stream.Synchronize(op); err != nil {
			return 0, err
		}
		for i, got := range hostmem.View[int64](x.Bytes()) {
			if got != b.asked[i]+1 && b.row.Why == "" {
				b.row.Why = fmt.Sprintf("set %d: row %d at position %d is that of row %d", k,
					b.asked[i], i, got-1)
			}
		}
		b.row.Checked += b.Rows
		return took, d.Release(t)
	}
	// Full is what has evicted and has no room for a hundredth more. Windows that pin all of a
	// small tier never come to that.
	k := uint64(0)
	full := func() bool {
		s := d.Stats()
		return s.Evicted > 0 && s.Inserted-s.Evicted >= c.Slots-c.Slots/100
	}
	for most := uint64(8*c.Slots/b.Rows + 8); !full() && k < most; k++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := turn(k); err != nil {
			return err
		}
	}
	var lookups, hits []float64
	for end := time.Now().Add(b.Length); b.row.Turns < leastTurns ||
		time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		took, err := turn(k)
		if err != nil {
			return err
		}
		k++
		lookups, hits = append(lookups, float64(b.Rows)/took.Seconds()),
			append(hits, b.row.HitRatio)
	}
	b.row.Lookups, b.row.HitRatio = bench.SpreadOf(lookups), bench.SpreadOf(hits).Median
	b.row.Metadata = d.MetadataBytes()
	if s := d.Stats(); b.row.Why == "" &&
		(s.Inserted-s.Evicted < 0 || s.Inserted-s.Evicted > c.Slots || s.Hits+s.Inserted+
			s.Bypassed != s.Accesses) {
		b.row.Why = fmt.Sprintf("the counters do not add up: %+v with %d slots", s, c.Slots)
	}
	return nil
}

// serve does what reads would.
func (b *measurement) serve(l cache.Lines, plan *cache.ReadPlan, staging cuda.Buffer) {
	if plan.Lines == 0 {
		return
	}
	to := hostmem.View[int64](staging.Bytes())
	rows, pos := cuda.View[int64](plan.Rows, plan.Lines), cuda.View[uint32](plan.Pos, plan.Lines)
	for i := range plan.Lines {
		at := int64(pos[i]) * l.RowsPerLine
		first := rows[i]/l.SSDs*l.RowsPerLine*l.SSDs + rows[i]%l.SSDs
		for k := range l.RowsPerLine {
			to[at+k] = first + k*l.SSDs + 1
		}
	}
}
