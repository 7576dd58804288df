// Package replay plays the accesses of a recorded run (cache/trace) on other policies, sizes, lines
// and windows, beside the offline optimum of each: what a run would have hit, and how far that is
// from the best that any policy could. It also plays the run's own configuration and holds it
// against the run's counters.
//
// A trace is streamed: what is in memory at once is a few mini-batches, the directories of the
// caches that are played, and for the optimum four bytes a line that is met; the next accesses of
// all lines lie in a file. So traces may be much larger than memory. Policies that know a
// superbatch keep one in memory, twenty bytes an access.
package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"helios/cache"
	"helios/cache/policy"
	"helios/cache/trace"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/units"
)

// The offline policies, which only a replay can play.
const (
	// Belady is MIN with bypass by part: of what is cached and what the part brings, the lines stay
	// whose next accesses are the nearest. No policy of demand fetches reads fewer lines.
	Belady = policy.Belady
	// Static places rows once by the hotness that the trace holds, as the run would.
	Static = "static"
	// Oracle is Static by each pass's own counts: what perfect foresight of the pass would place.
	Oracle = "oracle"
	// Superbatch is MIN with bypass by mini-batch that knows a superbatch at a time (Ginex): those
	// are sampled beforehand. The cache keeps its rows from one superbatch to the next. Where there
	// is a CPU tier, it moves rows between both.
	Superbatch = "superbatch"
)

// Policies lists what can be played.
func Policies() []string {
	return append(policy.Online(), Static, Superbatch, Belady, Oracle)
}

// DefaultSuperbatch is the default number of mini-batches of a superbatch. A pass that has fewer is
// one superbatch.
const DefaultSuperbatch = 1000

// LineRow as a line size: a line is a row.
const LineRow = cache.LineRow

// Size is a GPU tier's: a share or bytes of the features, or a number of lines.
type Size struct {
	Budget units.Budget
	Lines  int64 // where it was given so
}

// ParseSize reads 5%, 256MiB or "1000lines".
func ParseSize(s string) (Size, error) {
	if n, ok := strings.CutSuffix(strings.TrimSpace(s), "lines"); ok {
		v, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
		if err != nil || v < 0 {
			return Size{}, errs.New(errs.Usage,
				"%q is not a number of lines; write it like 5000lines", s)
		}
		return Size{Lines: v}, nil
	}
	b, err := units.ParseBudget(s)
	if err != nil {
		return Size{}, errs.New(errs.Usage, "%w, or 5000lines", err)
	}
	return Size{Budget: b}, nil
}

// of is the size in lines of a geometry.
func (s Size) of(h trace.Header, l cache.Lines) int64 {
	n := s.Lines
	if n == 0 && s.Budget.Percent != 0 {
		n = int64(s.Budget.Percent / 100 * float64(h.Rows) / float64(l.RowsPerLine))
	} else if n == 0 {
		n = s.Budget.Bytes / l.LineBytes
	}
	return min(n, l.Count(h.Rows))
}

// Config lists the caches to play: every policy with every size, line and window that applies to
// it.
type Config struct {
	Policies []string
	Sizes    []Size
	Lines    []int64 // bytes of a line, or LineRow
	Windows  []int   // of the online policies
	// Directories of the online policies, of policy.Kinds; empty: the run's.
	Directories []string
	// Superbatches are numbers of mini-batches that Superbatch knows at once; empty:
	// DefaultSuperbatch. They lie in memory until they are played.
	Superbatches []int
	// of the CPU tier: a constant buffer of the hottest rows; static: of those after the GPU
	// tier's; superbatch: of any, as it moves them between the tiers. -1: as the run
	CPURows int64
	Workers int    // 0: as many as there are CPUs
	TempDir string // for the next accesses; empty: the system's
	// Progress hears how many batches of all have been played.
	Progress func(stage string, done, total int64)
}

// Counts hold what caches came to.
type Counts struct {
	Batches  int64 `json:"batches"`
	Rows     int64 `json:"rows"`
	RowsGPU  int64 `json:"rows_gpu"` // on lines that were cached before their lookup
	RowsCPU  int64 `json:"rows_cpu"`
	RowsSSD  int64 `json:"rows_ssd"`  // on lines that had to be read
	Accesses int64 `json:"accesses"`  // of lines, once for each lookup; constant buffer not counted
	Reads    int64 `json:"reads"`     // lines read
	BytesSSD int64 `json:"bytes_ssd"` // of a command for each line read
	Inserted int64 `json:"inserted"`
	Evicted  int64 `json:"evicted"`
	Bypassed int64 `json:"bypassed"`
	Promoted int64 `json:"promoted"` // lines that moved from the CPU tier to the GPU tier
	Demoted  int64 `json:"demoted"`  // and from the GPU tier to the CPU tier
}

func (c *Counts) add(o Counts, sign int64) {
	c.Batches += sign * o.Batches
	c.Rows += sign * o.Rows
	c.RowsGPU += sign * o.RowsGPU
	c.RowsCPU += sign * o.RowsCPU
	c.RowsSSD += sign * o.RowsSSD
	c.Accesses += sign * o.Accesses
	c.Reads += sign * o.Reads
	c.BytesSSD += sign * o.BytesSSD
	c.Inserted += sign * o.Inserted
	c.Evicted += sign * o.Evicted
	c.Bypassed += sign * o.Bypassed
	c.Promoted += sign * o.Promoted
	c.Demoted += sign * o.Demoted
}

// Pass is a pass's counts, or those of all.
type Pass struct {
	Kind  string `json:"kind"`
	Epoch int    `json:"epoch"` // as the run counts, from 0; of a total -1
	Counts
	HitRatio    float64 `json:"hit_ratio"`     // rows that did not come from SSDs, of all
	GPUHitRatio float64 `json:"gpu_hit_ratio"` // rows found in the GPU tier, of all
	// The optimum: Belady of the same size, and for static tiers the pass's own hottest rows.
	OptimumHitRatio float64 `json:"optimum_hit_ratio"`
	// GapPoints are percentage points of hits below the optimum. Where lines hold several rows
	// Belady reads the fewest lines, and others may find a few more rows: the gap is then below 0.
	GapPoints float64 `json:"gap_points"`
	// ReadsOverOptimum is lines read over those that the optimum reads; below 1 is possible within
	// a pass, as the optimum is the best for the whole trace.
	ReadsOverOptimum float64 `json:"reads_over_optimum"`
}

// Play is one cache that was played.
type Play struct {
	Policy        string  `json:"policy"`
	Directory     string  `json:"directory,omitempty"` // of an online policy
	Window        int     `json:"window"`
	Superbatch    int     `json:"superbatch"` // of the policies that know one, else 0
	LineBytes     int64   `json:"line_bytes"`
	RowsPerLine   int64   `json:"rows_per_line"`
	Lines         int64   `json:"lines"`       // slots
	CacheBytes    int64   `json:"cache_bytes"` // Lines · LineBytes
	Share         float64 `json:"share"`       // of all lines of the features
	CPURows       int64   `json:"cpu_rows"`
	MetadataBytes int64   `json:"metadata_bytes"` // of an online policy's directory, at its end
	Passes        []Pass  `json:"passes"`
	Total         Pass    `json:"total"`
}

// Result is a replay.
type Result struct {
	Trace   string       `json:"trace"`
	Header  trace.Header `json:"header"`
	Totals  trace.Totals `json:"totals"`
	CPURows int64        `json:"cpu_rows"`
	Plays   []Play       `json:"plays"`
}

// linesOf maps rows to lines of about lineBytes, as a run does.
func linesOf(h trace.Header, lineBytes int64) cache.Lines {
	slot, lba := max(h.SlotBytes, 1), max(h.LBABytes, 1)
	return cache.LayLines(cache.RowPlaces{SSDs: h.SSDs, RowBytes: h.RowBytes, SlotBytes: slot,
		LBABytes: lba, PerLBA: max(lba/slot, 1)}, lineBytes)
}

// commandBytes counts the bytes that a command for a line moves.
func commandBytes(h trace.Header, l cache.Lines) int64 {
	if l.RowsPerLine > 1 {
		return l.LineBytes
	}
	return max(h.SlotBytes, h.LBABytes)
}

// Run plays a trace. It needs no more memory than a few batches, a directory for each cache, a
// score for each row, and a bit for each row in static tiers.
func Run(ctx context.Context, r *trace.Reader, c Config) (*Result, error) {
	p, err := newPlan(ctx, r, c)
	if err != nil {
		return nil, err
	}
	defer p.close()
	if err := p.future(ctx); err != nil {
		return nil, err
	}
	if err := p.play(ctx); err != nil {
		return nil, err
	}
	return p.result(), nil
}

// simulator plays one cache. Calls come in order, from one goroutine.
type simulator interface {
	batch(b *batch)
	passEnds()
	// passes are the counts of the passes played, in order.
	passes() []Counts
}

// job is a simulator and what it plays.
type job struct {
	sim  simulator
	play Play
	best *job // whose counts are the optimum; nil: its own
	show bool
}

type plan struct {
	r       *trace.Reader
	h       trace.Header
	c       Config
	views   []*view
	jobs    []*job
	counter *counter
	kinds   []Pass // kind and epoch of the passes
}

func newPlan(ctx context.Context, r *trace.Reader, c Config) (*plan, error) {
	p := &plan{r: r, h: r.Header(), c: c}
	if err := p.c.complete(p.h); err != nil {
		return nil, err
	}
	// Superbatches have a CPU tier of their own; other policies of lines have a constant buffer.
	planned := slices.DeleteFunc(slices.Clone(c.Policies), func(s string) bool {
		return s != Superbatch
	})
	online := slices.DeleteFunc(slices.Clone(c.Policies), func(s string) bool {
		return s == Static || s == Oracle || slices.Contains(planned, s)
	})
	hot, err := r.Hotness()
	if err != nil {
		return nil, err
	}
	if hot == nil && (slices.Contains(c.Policies, Static) ||
		len(online) > 0 && p.c.CPURows > 0 && p.c.CPURows != p.h.CPURows) {
		return nil, errs.New(errs.Usage,
			"the trace %s has no hotness of rows, so static tiers can't be played: leave static out (oracle needs none), or record a run with a static tier for some of the rows",
			r.Path())
	}
	p.addStatic(hot)
	var cpu bitset
	if len(online) > 0 {
		if cpu, err = p.constant(hot); err != nil {
			return nil, err
		}
	}
	if len(online)+len(planned) == 0 {
		return p, nil
	}
	for _, bytes := range c.Lines {
		l := linesOf(p.h, bytes)
		if slices.ContainsFunc(p.views, func(v *view) bool { return v.lines == l }) {
			continue
		}
		if p.c.CPURows == 0 {
			err = p.addLines(ctx, l, nil, online, planned)
		} else {
			err = errors.Join(p.addLines(ctx, l, cpu, online, nil),
				p.addLines(ctx, l, nil, nil, planned))
		}
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// complete checks a configuration and fills in defaults.
func (c *Config) complete(h trace.Header) error {
	if len(c.Policies) == 0 || len(c.Sizes) == 0 || len(c.Lines) == 0 {
		return errs.New(errs.Usage,
			"nothing to play: name at least one policy, one size and one line")
	}
	if len(c.Windows) == 0 {
		c.Windows = []int{0}
	}
	if len(c.Directories) == 0 {
		c.Directories = []string{cmp.Or(h.Directory, policy.InQueues)}
	}
	if len(c.Superbatches) == 0 {
		c.Superbatches = []int{DefaultSuperbatch}
	}
	if c.Workers <= 0 {
		c.Workers = hostcpu.Count()
	}
	if c.CPURows < 0 {
		c.CPURows = h.CPURows
	}
	c.CPURows = min(c.CPURows, h.Rows)
	return c.checkLists()
}

// checkLists refuses values that nothing plays.
func (c *Config) checkLists() error {
	for _, kind := range c.Directories {
		if !slices.Contains(policy.Kinds(), kind) {
			return errs.New(errs.Usage, "cache directory %q is not known; choose of %s", kind,
				strings.Join(policy.Kinds(), ", "))
		}
	}
	for _, name := range c.Policies {
		if !slices.Contains(Policies(), name) {
			return errs.New(errs.Usage, "policy %q is not known; choose of %s", name,
				strings.Join(Policies(), ", "))
		}
	}
	for _, w := range c.Windows {
		if w < 0 || w > 1<<12 {
			return errs.New(errs.Usage, "a window of %d batches: choose 0 to %d", w, 1<<12)
		}
	}
	for _, n := range c.Superbatches {
		if n < 1 || n > 1<<20 {
			return errs.New(errs.Usage, "a superbatch of %d mini-batches: choose 1 to %d", n, 1<<20)
		}
	}
	for _, bytes := range c.Lines {
		if bytes != LineRow && bytes < 1 {
			return errs.New(errs.Usage, "a line of %d bytes: give a size such as 4096, or row",
				bytes)
		}
	}
	return nil
}

// addStatic adds the tiers that are placed once, by hotness and by a pass's own counts, in every
// size.
func (p *plan) addStatic(hot []uint32) {
	byHotness := slices.Contains(p.c.Policies, Static)
	byCounts := slices.Contains(p.c.Policies, Oracle)
	if !byHotness && !byCounts {
		return
	}
	p.counter = &counter{again: p.r.Totals().Resets > 0}
	seen := map[int64]bool{}
	rows := cache.Lines{SSDs: p.h.SSDs, RowsPerLine: 1, LineBytes: p.h.RowBytes,
		RowStride: p.h.RowBytes}
	for _, s := range p.c.Sizes {
		n := s.of(p.h, rows)
		if seen[n] {
			continue
		}
		seen[n] = true
		cpu := min(p.c.CPURows, p.h.Rows-n)
		play := Play{LineBytes: p.h.RowBytes, RowsPerLine: 1, Lines: n, CPURows: cpu}
		best := &job{sim: p.counter.want(n, cpu, commandBytes(p.h, rows)), play: play,
			show: byCounts}
		best.play.Policy = Oracle
		p.jobs = append(p.jobs, best)
		if byHotness {
			place := cache.Place(hot, n, cpu)
			j := &job{sim: &static{gpu: newBits(place.GPU), cpu: newBits(place.CPU),
				bytes: commandBytes(p.h, rows)}, play: play, best: best, show: true}
			j.play.Policy = Static
			p.jobs = append(p.jobs, j)
		}
	}
}

// addLines adds the caches of lines in every size: policies that meet accesses as they come, behind
// a constant buffer, and those that know a superbatch.
func (p *plan) addLines(ctx context.Context, l cache.Lines, cpu bitset,
	online, planned []string) error {
	if len(online)+len(planned) == 0 {
		return nil
	}
	h := p.h
	v := &view{lines: l, cpu: cpu, bytes: commandBytes(h, l), union: len(planned) > 0}
	p.views = append(p.views, v)
	number := len(p.views) - 1
	seen := map[int64]bool{}
	for _, s := range p.c.Sizes {
		n := s.of(h, l)
		if seen[n] {
			continue
		}
		seen[n] = true
		slots := n
		if len(planned) > 0 {
			slots += min(p.c.CPURows/l.RowsPerLine, l.Count(h.Rows)-n)
		}
		play := Play{LineBytes: l.LineBytes, RowsPerLine: l.RowsPerLine, Lines: n,
			CPURows: p.c.CPURows}
		best := &job{sim: newBelady(number, v, slots), play: play,
			show: slices.Contains(online, Belady)}
		best.play.Policy = Belady
		p.jobs = append(p.jobs, best)
		for _, name := range p.c.Policies {
			if slices.Contains(planned, name) {
				for _, size := range distinctInts(p.c.Superbatches) {
					j := &job{sim: &superbatches{ctx: ctx, view: number, v: v, gpu: n,
						slots: slots, size: size},
						play: play, best: best, show: true}
					j.play.Policy, j.play.Superbatch = name, size
					p.jobs = append(p.jobs, j)
				}
			}
			if name == Belady || !slices.Contains(online, name) {
				continue
			}
			if err := p.addOnline(name, number, n, play, best); err != nil {
				return err
			}
		}
	}
	return nil
}

// addOnline adds an online policy's caches of n lines: every directory and window.
func (p *plan) addOnline(name string, number int, n int64, play Play, best *job) error {
	v := p.views[number]
	for _, kind := range p.c.Directories {
		for _, w := range distinctInts(p.c.Windows) {
			d, err := policy.New(policy.Config{Policy: name, Kind: kind, Slots: n,
				Lines: v.lines.Count(p.h.Rows), Seed: p.h.Seed, Workers: 1})
			if err != nil {
				return err
			}
			v.union = v.union || w > 0
			j := &job{sim: &dynamic{d: d, view: number, v: v, window: w,
				again: p.r.Totals().Resets > 0}, play: play, best: best, show: true}
			j.play.Policy, j.play.Directory, j.play.Window = name, kind, w
			p.jobs = append(p.jobs, j)
		}
	}
	return nil
}

// distinctInts returns numbers in order, each once.
func distinctInts(n []int) []int { return slices.Compact(slices.Sorted(slices.Values(n))) }

// constant is the constant CPU buffer of the dynamic caches: the hottest rows, as a run takes them.
func (p *plan) constant(hot []uint32) (bitset, error) {
	if p.c.CPURows == 0 {
		return nil, nil
	}
	if hot != nil {
		return newBits(cache.Place(hot, 0, p.c.CPURows).CPU), nil
	}
	var cpu bitset
	err := p.r.Play(trace.Visitor{Place: func(tier int, rows []int64) error {
		if tier == 1 {
			cpu = newBits(rows)
			return errFound
		}
		return nil
	}, Batch: func(*trace.Batch) error { return errFound }})
	if err != nil && !errors.Is(err, errFound) {
		return nil, err
	}
	if cpu == nil {
		return nil, errs.New(errs.Usage,
			"the trace %s does not say which %d rows were in CPU memory; give {cpu-cache} 0",
			p.r.Path(), p.c.CPURows)
	}
	return cpu, nil
}

var errFound = errors.New("found")

func (p *plan) close() {
	for _, v := range p.views {
		v.future.close()
	}
}

// future finds each line's next accesses, for the optimum.
func (p *plan) future(ctx context.Context) error {
	if len(p.views) == 0 {
		return nil
	}
	all := make([]*nextWriter, len(p.views))
	for i, v := range p.views {
		w, err := newNextWriter(p.c.TempDir, v, p.r.Totals().Parts)
		if err != nil {
			return err
		}
		v.future = w.file
		all[i] = w
	}
	done := int64(0)
	err := p.r.Backwards(func(rows []int64) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		for _, w := range all {
			if err := w.part(rows); err != nil {
				return err
			}
		}
		if done++; p.c.Progress != nil && done%64 == 0 {
			p.c.Progress("next accesses", done, p.r.Totals().Parts)
		}
		return nil
	})
	for _, w := range all {
		if err == nil {
			err = w.end()
		}
	}
	return err
}

// players are goroutines, each of which has some of the simulators. All of them hear all batches.
type players struct {
	queues []chan played
	wg     sync.WaitGroup
}

// played is a batch, or the end of a pass.
type played struct {
	b    *batch
	ends bool
}

func startPlayers(jobs []*job, workers int) *players {
	x := &players{queues: make([]chan played, workers)}
	for w := range x.queues {
		x.queues[w] = make(chan played, 4)
		var mine []simulator
		for i := w; i < len(jobs); i += workers {
			mine = append(mine, jobs[i].sim)
		}
		x.wg.Go(func() {
			for m := range x.queues[w] {
				for _, s := range mine {
					if m.ends {
						s.passEnds()
					} else {
						s.batch(m.b)
					}
				}
			}
		})
	}
	return x
}

func (x *players) send(m played) {
	for _, q := range x.queues {
		q <- m
	}
}

// wait ends the goroutines after they have played all.
func (x *players) wait() {
	for _, q := range x.queues {
		close(q)
	}
	x.wg.Wait()
}

// play streams the trace to the players.
func (p *plan) play(ctx context.Context) error {
	all := startPlayers(p.jobs, min(p.c.Workers, max(len(p.jobs), 1)))
	open, reset := false, false
	ends := func() {
		if !open {
			return
		}
		open = false
		if p.counter != nil {
			p.counter.ends()
		}
		all.send(played{ends: true})
	}
	done := int64(0)
	err := p.r.Play(trace.Visitor{
		Batch: func(b *trace.Batch) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			pass := Pass{Kind: trace.KindName(b.Kind), Epoch: b.Epoch}
			if open && p.kinds[len(p.kinds)-1] != pass {
				ends()
			}
			if !open {
				open, reset = true, false
				p.kinds = append(p.kinds, pass)
			}
			x, err := p.see(b, reset)
			if err != nil {
				return err
			}
			reset = false
			all.send(played{b: x})
			if done++; p.c.Progress != nil && done%16 == 0 {
				p.c.Progress("replay", done, p.r.Totals().Batches)
			}
			return nil
		},
		// The caches that are played keep what they have: only the run's own lost it. But batches
		// come again.
		Reset: func(int64) error { reset = true; return nil },
		Live:  func(trace.Live) error { ends(); return nil },
	})
	if err == nil {
		ends()
	}
	all.wait()
	for _, j := range p.jobs {
		if s, ok := j.sim.(*superbatches); ok && err == nil {
			err = s.err
		}
	}
	return err
}

// see is a batch as the simulators take it; again: it is the first after a Reset.
func (p *plan) see(b *trace.Batch, again bool) (*batch, error) {
	x := &batch{index: b.Index, again: again, parts: b.Parts, seen: make([]seen, len(p.views))}
	for i, v := range p.views {
		if err := v.see(b.Parts, &x.seen[i]); err != nil {
			return nil, err
		}
	}
	if p.counter != nil {
		p.counter.count(x)
	}
	return x, nil
}

func (p *plan) result() *Result {
	r := &Result{Trace: p.r.Path(), Header: p.h, Totals: p.r.Totals(), CPURows: p.c.CPURows,
		Plays: []Play{}}
	for _, j := range p.jobs {
		if !j.show {
			continue
		}
		best := j.best
		if best == nil {
			best = j
		}
		mine, optimum := j.sim.passes(), best.sim.passes()
		play := j.play
		play.CacheBytes = play.Lines * play.LineBytes
		lines := cache.Lines{SSDs: p.h.SSDs, RowsPerLine: play.RowsPerLine,
			LineBytes: play.LineBytes, RowStride: 1}
		play.Share = ratio(play.Lines, lines.Count(p.h.Rows))
		if d, ok := j.sim.(*dynamic); ok {
			play.MetadataBytes = d.d.Bytes()
		}
		var sum, sumBest Counts
		for i, c := range mine {
			sum.add(c, 1)
			sumBest.add(optimum[i], 1)
			play.Passes = append(play.Passes, compare(p.kinds[i], c, optimum[i]))
		}
		play.Total = compare(Pass{Kind: "all", Epoch: -1}, sum, sumBest)
		r.Plays = append(r.Plays, play)
	}
	return r
}

func compare(p Pass, c, best Counts) Pass {
	p.Counts = c
	p.HitRatio = ratio(c.RowsGPU+c.RowsCPU, c.Rows)
	p.GPUHitRatio = ratio(c.RowsGPU, c.Rows)
	p.OptimumHitRatio = ratio(best.RowsGPU+best.RowsCPU, best.Rows)
	p.GapPoints = 100 * (p.OptimumHitRatio - p.HitRatio)
	p.ReadsOverOptimum = ratio(c.Reads, best.Reads)
	if best.Reads == 0 && c.Reads == 0 {
		p.ReadsOverOptimum = 1
	}
	return p
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func (c Counts) String() string {
	return fmt.Sprintf(
		"%d batches, rows gpu %d cpu %d ssd %d, bytes %d, lines inserted %d evicted %d bypassed %d",
		c.Batches, c.RowsGPU, c.RowsCPU, c.RowsSSD, c.BytesSSD, c.Inserted, c.Evicted, c.Bypassed)
}
