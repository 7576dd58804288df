package main

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// staticIndex is the name of the static index among the policies.
const staticIndex = "static"

// cacheConfig chooses the measurement.
type cacheConfig struct {
	rows      int64  // of a lookup
	directory string // of a dynamic tier, of policy.Kinds
	length    time.Duration
}

// Shares of the rows in the tiers, and SSDs that misses are bucketed by.
const (
	gpuShare  = 0.1
	cpuShare  = 0.2
	cacheSSDs = 12
)

// benchCache looks sets of distinct, uniformly random rows up: in the static index, bucketing,
// slots and the wait for the answer included, and in a dynamic GPU tier under each policy, filled
// before it is measured, the plan of the reads included. No row is read from an SSD. The limit of
// the static lookup is the memory's: as many workers load as many random 64-byte lines of as much
// memory, and do nothing with them.
func benchCache(ctx context.Context, b *bench) error {
	var c cacheConfig
	var policies []string
	count := b.String("nodes", "100M", "rows of the dataset")
	b.Int64Var(&c.rows, "rows", 1_000_000, "rows of a lookup")
	b.StringVar(&c.directory, "directory", policy.InSets,
		"what knows where a dynamic tier's lines are: "+strings.Join(policy.Kinds(), ", "))
	b.listVar(&policies, "policy", staticIndex+","+strings.Join(policy.Online(), ","),
		"`NAME[,NAME…]` of what is measured")
	if err := b.parse(); err != nil {
		return err
	}
	nodes, err := units.ParseCount(*count)
	if err != nil {
		return err
	}
	if c.rows < 1 || c.rows > nodes {
		return fmt.Errorf("-rows %d is not between 1 and the %d -nodes: a lookup has each at most once",
			c.rows, nodes)
	}
	c.length = b.length
	return b.each(func(dev cuda.Device) error {
		for _, name := range policies {
			r, err := measureCache(ctx, dev, c, nodes, name)
			if err != nil {
				return err
			}
			if err := b.row(&r, r.Why); err != nil {
				return err
			}
		}
		return nil
	})
}

// cacheRow is a row of results.
type cacheRow struct {
	Device     string  `json:"device"`
	Policy     string  `json:"policy"`
	Directory  string  `json:"directory,omitempty"` // of a dynamic tier
	Nodes      int64   `json:"nodes"`
	Rows       int64   `json:"rows"` // of a lookup
	Workers    int     `json:"workers"`
	Turns      int     `json:"turns"`
	Lookups    spread  `json:"lookups_per_second"`
	Limit      *spread `json:"limit_per_second,omitempty"` // static index on the host device
	Ratio      *spread `json:"ratio,omitempty"`            // lookups by limit
	IndexBytes int64   `json:"index_bytes,omitempty"`      // of the static index
	BuildTime  float64 `json:"build_seconds"`
	Slots      int64   `json:"slots,omitempty"`
	Metadata   int64   `json:"metadata_bytes,omitempty"` // of the directory
	HitRatio   float64 `json:"hit_ratio"`                // rows in the GPU tier
	CPURatio   float64 `json:"cpu_ratio"`
	Checked    int64   `json:"checked_rows"`
	Audited    bool    `json:"audited"`
	Why        string  `json:"audit_error,omitempty"`
}

// lookupTimeout bounds what is enqueued at once.
const lookupTimeout = 5 * time.Minute

func (r *cacheRow) String() string {
	words := fmt.Sprintf("%s, %d nodes, %s, %d workers: %s million lookups/s", r.Policy, r.Nodes,
		r.Device, r.Workers, r.Lookups.by(1e6))
	if r.Ratio != nil {
		words += fmt.Sprintf(", %s of random reads of memory", r.Ratio.by(1))
	}
	return words + fmt.Sprintf(", %.3f bytes of index a node, %.1f %% hits",
		float64(r.IndexBytes+r.Metadata)/float64(r.Nodes), 100*r.HitRatio)
}

// measureCache looks rows of a dataset of so many nodes up on a device under one policy, or in the
// static index, and audits the answers. A failed audit is no error: the row tells it.
func measureCache(ctx context.Context, dev cuda.Device, c cacheConfig, nodes int64,
	policy string) (row cacheRow, err error) {
	b := &cacheRun{cacheConfig: c, dev: dev, total: nodes, seed: benchSeed}
	if b.stream, err = dev.NewStream(cuda.StreamOptions{Name: "bench"}); err != nil {
		return row, err
	}
	defer errs.Closing(&err, b.stream.Close)
	if b.buf, err = dev.Alloc(cuda.MemPinned, c.rows*8, "rows asked for"); err != nil {
		return row, err
	}
	defer errs.Closing(&err, b.buf.Free)
	b.asked = hostmem.View[int64](b.buf.Bytes())
	b.row = cacheRow{Device: dev.Info().Name, Policy: policy, Nodes: nodes, Rows: c.rows,
		Workers: dev.Info().SMs}
	if policy == staticIndex {
		err = b.static(ctx)
	} else {
		err = b.dynamic(ctx, policy)
	}
	b.row.Audited = b.row.Why == ""
	return b.row, err
}

// cacheRun makes one row.
type cacheRun struct {
	cacheConfig
	dev    cuda.Device
	stream cuda.Stream
	total  int64  // rows of the dataset
	seed   uint64 // of tiers, rows and random eviction
	buf    cuda.Buffer
	asked  []int64 // in buf
	row    cacheRow
}

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
func (b *cacheRun) set(k uint64, to []int64) {
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

// tierOf returns the tier of a row in the static placement.
func (b *cacheRun) tierOf(row int64) cache.Tier {
	switch x := float64(mixed(uint64(row), b.seed)>>11) / (1 << 53); {
	case x < gpuShare:
		return cache.GPU
	case x < gpuShare+cpuShare:
		return cache.CPU
	}
	return cache.SSD
}

// auditSet is the number of the set whose answers are compared: whatever was measured before, the
// same.
const auditSet = 1 << 40

// rankEvery is after how many rows the audit of the static index notes how many of each tier came
// before.
const rankEvery = 1 << 14

// static measures the static index.
func (b *cacheRun) static(ctx context.Context) (err error) {
	index, ranks, err := b.buildIndex()
	if err != nil {
		return err
	}
	h, err := cache.NewLookup(b.dev, index, cacheSSDs)
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
	if err := buckets.Reserve(b.rows); err != nil {
		return err
	}
	lookup := func() error {
		op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
		defer cancel()
		return h.Lookup(op, b.stream, b.buf.Ptr(), 0, b.rows, buckets)
	}
	if err := b.timeLookups(ctx, lookup); err != nil {
		return err
	}
	b.set(auditSet, b.asked)
	if err := lookup(); err != nil {
		return err
	}
	b.row.HitRatio, b.row.CPURatio = float64(buckets.NGPU)/float64(b.rows),
		float64(buckets.NCPU)/float64(b.rows)
	return b.auditStatic(ctx, buckets, ranks)
}

// buildIndex builds the static index, and counts the rows of each tier before every rankEvery-th
// one.
func (b *cacheRun) buildIndex() (index *cache.Index, ranks [][2]int64, err error) {
	start := time.Now()
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
	b.row.BuildTime = time.Since(start).Seconds()
	return index, ranks, err
}

// indexLine is as large as a line of the static index.
type indexLine [8]uint64

// probe loads a line for each row asked for, as many as a lookup at the same places, and does
// nothing else with them. The loads do not depend on each other.
func (b *cacheRun) probe(lines []indexLine) (sum uint64) {
	var all sync.WaitGroup
	sums := make([]uint64, b.row.Workers)
	for w := range sums {
		part := b.asked[len(b.asked)*w/len(sums) : len(b.asked)*(w+1)/len(sums)]
		all.Go(func() {
			own := uint64(0)
			for _, row := range part {
				own += lines[uint64(row)/cache.RowsPerLine][0]
			}
			sums[w] = own
		})
	}
	all.Wait()
	for _, v := range sums {
		sum += v
	}
	return sum
}

// timeLookups lets lookups and, on the host, probes of as much memory take turns, each with sets of
// its own.
func (b *cacheRun) timeLookups(ctx context.Context, lookup func() error) (err error) {
	do := []func() error{lookup}
	if onHost(b.dev) {
		n := b.total/cache.RowsPerLine + 1
		mem, err := b.dev.Alloc(cuda.MemDevice, n*int64(unsafe.Sizeof(indexLine{})), "probes")
		if err != nil {
			return err
		}
		defer errs.Closing(&err, mem.Free)
		lines := hostmem.View[indexLine](mem.Bytes())
		for i := range lines {
			lines[i][0] = uint64(i) // pages that are never written are one page
		}
		var sums uint64
		do = append(do, func() error { sums += b.probe(lines); return nil })
	}
	sets := uint64(0)
	var lookups, limits, ratios []float64
	for end := time.Now().Add(b.length); b.row.Turns < leastTurns+1 ||
		time.Now().Before(end); b.row.Turns++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		var took [2]float64
		for i := range do { // the first in one turn is the second in the next
			kind := (i + b.row.Turns) % len(do)
			b.set(sets, b.asked)
			sets++
			start := time.Now()
			if err := do[kind](); err != nil {
				return err
			}
			took[kind] = time.Since(start).Seconds()
		}
		if b.row.Turns == 0 {
			continue // pages and memory of the answer
		}
		lookups = append(lookups, float64(b.rows)/took[0])
		limits, ratios = append(limits, float64(b.rows)/took[1]), append(ratios, took[1]/took[0])
	}
	b.row.Turns--
	b.row.Lookups = spreadOf(lookups)
	if len(do) > 1 {
		limit, ratio := spreadOf(limits), spreadOf(ratios)
		b.row.Limit, b.row.Ratio = &limit, &ratio
	}
	return nil
}

// wrong keeps the first finding of an audit.
func (b *cacheRun) wrong(format string, a ...any) {
	if b.row.Why == "" {
		b.row.Why = fmt.Sprintf(format, a...)
	}
}

// staticAudit compares every answer about asked rows. Each position has one.
type staticAudit struct {
	*cacheRun
	ranks [][2]int64
	seen  []bool
}

// auditStatic compares every answer about b.asked.
func (b *cacheRun) auditStatic(ctx context.Context, k *cache.Buckets, ranks [][2]int64) error {
	a := &staticAudit{b, ranks, make([]bool, b.rows)}
	if err := a.hits(ctx, cache.GPU, k.GPUPos, k.GPUSlot, k.NGPU); err != nil {
		return err
	}
	if err := a.hits(ctx, cache.CPU, k.CPUPos, k.CPUSlot, k.NCPU); err != nil {
		return err
	}
	if err := a.misses(ctx, k); err != nil {
		return err
	}
	if b.row.Checked != b.rows {
		b.wrong("%d of %d positions have an answer", b.row.Checked, b.rows)
	}
	return nil
}

// take counts the answer of a position.
func (a *staticAudit) take(pos uint32) bool {
	if int64(pos) >= a.rows || a.seen[pos] {
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
	pos, err := fetch[uint32](ctx, a.cacheRun, posBuf, n)
	if err != nil {
		return err
	}
	slot, err := fetch[uint32](ctx, a.cacheRun, slotBuf, n)
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
	pos, err := fetch[uint32](ctx, a.cacheRun, k.MissPos, k.NMiss)
	if err != nil {
		return err
	}
	rows, err := fetch[int64](ctx, a.cacheRun, k.MissRow, k.NMiss)
	if err != nil {
		return err
	}
	for s := range cacheSSDs {
		for i := k.SSDOffset[s]; i < k.SSDOffset[s+1]; i++ {
			p := pos[i]
			if i > k.SSDOffset[s] && p <= pos[i-1] {
				a.wrong("misses of SSD %d: position %d after %d", s, p, pos[i-1])
			}
			if !a.take(p) {
				continue
			}
			if row := a.asked[p]; rows[i] != row || row%cacheSSDs != int64(s) ||
				a.tierOf(row) != cache.SSD {
				a.wrong("row %d at position %d is a miss of SSD %d with row %d", row, p, s, rows[i])
			}
		}
	}
	return nil
}

// fetch copies device memory to the CPU.
func fetch[T any](ctx context.Context, b *cacheRun, from cuda.Buffer, n int64) (list []T,
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

// dynamicRun has a dynamic tier and looks sets of rows up in it. A row is 8 bytes that say which
// row it is, plus one: so every row that the tier delivers can be checked.
type dynamicRun struct {
	*cacheRun
	tier    *cache.Dynamic
	ticket  *cache.Ticket
	plan    *cache.ReadPlan
	staging cuda.Buffer // rows that reads bring
	x       cuda.Buffer // rows delivered
	closers []func() error
}

const dynamicRowBytes = 8

// dynamic measures a dynamic tier.
func (b *cacheRun) dynamic(ctx context.Context, name string) (err error) {
	b.row.Slots = max(int64(float64(b.total)*gpuShare), 1)
	r := &dynamicRun{cacheRun: b}
	defer errs.Closing(&err, r.close)
	if err := r.open(name); err != nil {
		return err
	}
	if b.directory != policy.InSets {
		b.row.Workers = 1 // the policy decides in order
	}
	b.row.Directory = b.directory
	next, err := r.fill(ctx)
	if err != nil {
		return err
	}
	var lookups, hits []float64
	for end := time.Now().Add(b.length); b.row.Turns < leastTurns ||
		time.Now().Before(end); b.row.Turns++ {
		took, err := r.turn(ctx, next)
		if err != nil {
			return err
		}
		next++
		lookups, hits = append(lookups, float64(b.rows)/took.Seconds()),
			append(hits, b.row.HitRatio)
	}
	b.row.Lookups, b.row.HitRatio = spreadOf(lookups), spreadOf(hits).Median
	b.row.Metadata = r.tier.MetadataBytes()
	if s := r.tier.Stats(); s.Inserted-s.Evicted < 0 || s.Inserted-s.Evicted > b.row.Slots ||
		s.Hits+s.Inserted+s.Bypassed != s.Accesses {
		b.wrong("the counters do not add up: %+v with %d slots", s, b.row.Slots)
	}
	return nil
}

func (r *dynamicRun) close() (err error) {
	for _, f := range slices.Backward(r.closers) {
		err = errors.Join(err, f())
	}
	return err
}

func (r *dynamicRun) open(name string) (err error) {
	start := time.Now()
	if r.tier, err = cache.NewDynamic(r.dev, cache.DynamicConfig{Rows: r.total,
		RowBytes: dynamicRowBytes, Slots: r.row.Slots, Policy: name, Seed: r.seed,
		Directory: r.directory, Lines: cache.Lines{SSDs: cacheSSDs, RowsPerLine: 1,
			LineBytes: dynamicRowBytes, RowStride: dynamicRowBytes}}); err != nil {
		return err
	}
	r.closers = append(r.closers, r.tier.Close)
	r.row.BuildTime = time.Since(start).Seconds()
	if r.ticket, err = r.tier.NewTicket(); err != nil {
		return err
	}
	r.closers = append(r.closers, r.ticket.Close)
	if r.plan, err = r.tier.NewReadPlan(); err != nil {
		return err
	}
	r.closers = append(r.closers, r.plan.Close)
	for _, to := range []*cuda.Buffer{&r.staging, &r.x} {
		if *to, err = r.dev.Alloc(cuda.MemPinned, r.rows*dynamicRowBytes, "rows"); err != nil {
			return err
		}
		r.closers = append(r.closers, (*to).Free)
	}
	return nil
}

// fill takes turns until the tier has evicted and has no room for a hundredth more, and returns
// their number.
func (r *dynamicRun) fill(ctx context.Context) (turns uint64, err error) {
	full := func() bool {
		s := r.tier.Stats()
		return s.Evicted > 0 && s.Inserted-s.Evicted >= r.row.Slots-r.row.Slots/100
	}
	for limit := uint64(8*r.row.Slots/r.rows + 8); !full() && turns < limit; turns++ {
		if _, err := r.turn(ctx, turns); err != nil {
			return turns, err
		}
	}
	return turns, nil
}

// turn looks set k up and delivers its rows, and returns what the lookup took.
func (r *dynamicRun) turn(ctx context.Context, k uint64) (took time.Duration, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	r.set(k, r.asked)
	op, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
	defer cancel()
	start := time.Now()
	r.tier.NextBatch()
	if err := r.tier.Admit(op, r.stream, r.buf.Ptr(), 0, r.rows, r.ticket); err != nil {
		return 0, err
	}
	if err := r.tier.Plan(r.plan, r.ticket); err != nil {
		return 0, err
	}
	took = time.Since(start)
	r.row.HitRatio = float64(r.ticket.NGPU) / float64(r.rows)
	if n := r.plan.Lines; n > 0 { // in place of reads
		to := hostmem.View[int64](r.staging.Bytes())
		pos := cuda.View[uint32](r.plan.Pos, n)
		for i, row := range cuda.View[int64](r.plan.Rows, n) {
			to[pos[i]] = row + 1
		}
	}
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
	r.row.Checked += r.rows
	return took, r.tier.Release(r.ticket)
}
