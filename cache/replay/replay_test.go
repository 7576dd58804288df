package replay

import (
	"context"
	"math/bits"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cache/policy"
	"helios/cache/trace"
	"helios/internal/errs"
	"helios/internal/testing/wide"
)

// run is a recorded run: passes of batches of parts.
type run struct {
	h       trace.Header
	hot     []uint32
	batches []trace.Batch
}

func randomRun(seed uint64, rows int64, batches, parts, per int) run {
	r := rand.New(rand.NewPCG(seed, 3))
	x := run{h: trace.Header{
		Name: "test", Rows: rows, RowBytes: 512, SSDs: 1 + r.Int64N(3), SlotBytes: 512,
		LBABytes: 512, Seed: seed,
		Policy: policy.LRU, GPULines: rows / 10, LineBytes: 512, RowsPerLine: 1,
	}}
	x.hot = make([]uint32, rows)
	for i := range x.hot {
		x.hot[i] = uint32(r.IntN(5))
	}
	for i := range batches {
		b := trace.Batch{Kind: trace.Train, Epoch: i * 3 / batches, Index: i % max(batches/3, 1)}
		if b.Epoch == 1 {
			b.Kind = trace.Validate
		}
		for range 1 + r.IntN(parts) {
			part := []int64{}
			for range r.IntN(per) {
				row := int64(float64(rows) * r.Float64() * r.Float64())
				if !slices.Contains(part, row) {
					part = append(part, row)
				}
			}
			b.Parts = append(b.Parts, part)
		}
		x.batches = append(x.batches, b)
	}
	return x
}

func (x run) open(t testing.TB) *trace.Reader {
	path := filepath.Join(t.TempDir(), "trace")
	w, err := trace.Create(path, x.h, false)
	require.NoError(t, err)
	require.NoError(t, w.Hotness(x.hot))
	for _, b := range x.batches {
		require.NoError(t, w.Begin(b.Kind, b.Epoch, b.Index))
		for _, p := range b.Parts {
			require.NoError(t, w.Part(p))
		}
	}
	require.NoError(t, w.Close())
	r, err := trace.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

// lines of a part that are not in cpu, each once, in order.
func distinct(l cache.Lines, rows []int64, cpu []int64) (out []int64) {
	for _, r := range rows {
		line, _ := l.Of(r)
		if !slices.Contains(cpu, r) && !slices.Contains(out, line) {
			out = append(out, line)
		}
	}
	return out
}

// passesOf gives the batches by pass.
func (x run) passesOf() (out [][]trace.Batch) {
	for i, b := range x.batches {
		if i == 0 || b.Kind != x.batches[i-1].Kind || b.Epoch != x.batches[i-1].Epoch {
			out = append(out, nil)
		}
		out[len(out)-1] = append(out[len(out)-1], b)
	}
	return out
}

// direct plays a directory the plain way: the whole trace in memory.
func (x run) direct(t testing.TB, name string, l cache.Lines, slots int64, window int,
	cpu []int64) (out []Counts) {
	d, err := policy.New(policy.Config{Policy: name, Slots: slots, Seed: x.h.Seed})
	require.NoError(t, err)
	for _, pass := range x.passesOf() {
		announced := 0
		var c Counts
		for i, b := range pass {
			for window > 0 && announced < len(pass) && announced <= i+window {
				var all []int64
				for _, p := range pass[announced].Parts {
					for _, line := range distinct(l, p, cpu) {
						if !slices.Contains(all, line) {
							all = append(all, line)
						}
					}
				}
				d.Announce(all)
				announced++
			}
			d.NextBatch()
			before := d.Stats()
			for _, p := range b.Parts {
				lines := distinct(l, p, cpu)
				answers := make([]policy.Answer, len(lines))
				d.Access(lines, answers)
				for _, r := range p {
					c.Rows++
					line, _ := l.Of(r)
					switch {
					case slices.Contains(cpu, r):
						c.RowsCPU++
					case answers[slices.Index(lines, line)].Hit:
						c.RowsGPU++
					default:
						c.RowsSSD++
					}
				}
				for _, a := range answers {
					c.Accesses++
					if !a.Hit {
						c.Reads++
					}
				}
			}
			after := d.Stats()
			c.Batches++
			c.Inserted += after.Inserted - before.Inserted
			c.Evicted += after.Evicted - before.Evicted
			c.Bypassed += after.Bypassed - before.Bypassed
		}
		c.BytesSSD = c.Reads * commandBytes(x.h, l)
		out = append(out, c)
	}
	return out
}

// hottest are the rows from rank from to below to.
func hottest(counts []uint32, from, to int64) []int64 {
	order := make([]int64, len(counts))
	for i := range order {
		order[i] = int64(i)
	}
	slices.SortStableFunc(order, func(a, b int64) int { return int(counts[b]) - int(counts[a]) })
	return order[from:to]
}

func TestRunAgainstDirect(t *testing.T) {
	for seed := range uint64(6) {
		x := randomRun(seed, 300, 24, 3, 60)
		if seed%2 == 1 { // several rows to an LBA, with padding at its end
			x.h.RowBytes, x.h.SlotBytes, x.h.LBABytes = 1300, 1365, 4096
		}
		cpuRows := int64(seed%3) * 15
		res, err := Run(context.Background(), x.open(t), Config{
			Policies: Policies(), Sizes: []Size{{Lines: 7}, {Lines: 40}},
			Lines: []int64{LineRow, 4096}, Windows: []int{0, 3},
			Superbatches: []int{4, 100},
			CPURows:      cpuRows, Workers: 3, TempDir: t.TempDir(),
		})
		require.NoError(t, err)
		cpu := hottest(x.hot, 0, cpuRows)
		kinds := map[string]int{}
		type superbatches struct{ lines, line, size int64 }
		warm := map[superbatches]int64{} // reads
		for _, p := range res.Plays {
			kinds[p.Policy]++
			got := []Counts{}
			for _, pass := range p.Passes {
				got = append(got, pass.Counts)
			}
			l := cache.Lines{SSDs: x.h.SSDs, RowsPerLine: p.RowsPerLine, LineBytes: p.LineBytes,
				RowStride: 1}
			switch p.Policy {
			case Static, Oracle:
				var want []Counts
				for _, pass := range x.passesOf() {
					counts := x.hot
					if p.Policy == Oracle {
						counts = make([]uint32, x.h.Rows)
						for _, b := range pass {
							for _, part := range b.Parts {
								for _, r := range part {
									counts[r]++
								}
							}
						}
					}
					g, c := hottest(counts, 0, p.Lines), hottest(counts, p.Lines, p.Lines+cpuRows)
					sum := Counts{Batches: int64(len(pass))}
					for _, b := range pass {
						for _, part := range b.Parts {
							for _, r := range part {
								sum.Rows++
								switch {
								case slices.Contains(g, r):
									sum.RowsGPU++
								case slices.Contains(c, r):
									sum.RowsCPU++
								default:
									sum.RowsSSD++
								}
							}
						}
					}
					sum.Accesses, sum.Reads = sum.Rows-sum.RowsCPU, sum.RowsSSD
					sum.BytesSSD = sum.Reads * commandBytes(x.h, l)
					want = append(want, sum)
				}
				require.Equal(t, want, got, "seed %d %s %d", seed, p.Policy, p.Lines)
				require.GreaterOrEqual(t, p.Total.GapPoints, -1e-9)
			case Belady:
				var want, accesses int64
				want, accesses = x.naiveMin(l, p.Lines, cpu)
				require.Equal(t, want, p.Total.Reads, "seed %d belady %d lines of %d", seed,
					p.Lines, p.LineBytes)
				require.Equal(t, accesses, p.Total.Accesses)
				require.Equal(t, p.Total.Rows, p.Total.RowsGPU+p.Total.RowsCPU+p.Total.RowsSSD)
				require.Zero(t, p.Total.GapPoints)
			case Superbatch:
				require.Equal(t, p.Total.Rows, p.Total.RowsGPU+p.Total.RowsCPU+p.Total.RowsSSD)
				require.Equal(t, p.Total.Reads, p.Total.Inserted+p.Total.Bypassed)
				kept := p.Total.Inserted - p.Total.Evicted
				require.True(t, kept >= 0 && kept <= p.Lines+cpuRows, "%d of %+v", kept, p)
				require.True(t, cpuRows > 0 || p.Total.Demoted == 0, "%+v", p)
				warm[superbatches{p.Lines, p.LineBytes, int64(p.Superbatch)}] = p.Total.Reads
			default:
				require.Equal(t, x.direct(t, p.Policy, l, p.Lines, p.Window, cpu), got,
					"seed %d %s %d lines of %d, window %d", seed, p.Policy, p.Lines, p.LineBytes,
					p.Window)
				require.GreaterOrEqual(t, p.Total.ReadsOverOptimum, 1.0, "%s beats the optimum",
					p.Policy)
				require.Positive(t, p.MetadataBytes)
			}
		}
		require.Len(t, warm, 8)
		require.Equal(t, 8, kinds[policy.LRU])
		require.Equal(t, 4, kinds[Belady])
		require.Equal(t, 2, kinds[Static])
	}
}

// TestSuperbatchOptimum: a superbatch that is the whole trace, of mini-batches of one part, reads
// what the optimum reads; smaller ones do not read less.
func TestSuperbatchOptimum(t *testing.T) {
	for seed := range uint64(20) {
		x := randomRun(seed, 400, 30, 1, 60)
		for i := range x.batches {
			x.batches[i].Kind, x.batches[i].Epoch, x.batches[i].Index = trace.Train, 0, i
		}
		res, err := Run(context.Background(), x.open(t), Config{
			Policies: []string{Belady, Superbatch},
			Sizes:    []Size{{Lines: 40}}, Lines: []int64{LineRow},
			Superbatches: []int{1, 3, 30, 1000}, CPURows: 0, TempDir: t.TempDir(),
		})
		require.NoError(t, err)
		require.Len(t, res.Plays, 5)
		best := res.Plays[slices.IndexFunc(res.Plays,
			func(p Play) bool { return p.Policy == Belady })].Total.Reads
		require.Positive(t, best)
		for _, p := range res.Plays {
			require.GreaterOrEqual(t, p.Total.Reads, best, "%s %d", p.Policy, p.Superbatch)
			if p.Superbatch >= 30 {
				require.Equal(t, best, p.Total.Reads, "%s %d", p.Policy, p.Superbatch)
			}
		}
	}
}

// naiveMin is MIN with bypass by part with lists that are sorted anew for each part.
func (x run) naiveMin(l cache.Lines, slots int64, cpu []int64) (reads, accesses int64) {
	var parts [][]int64
	for _, b := range x.batches {
		for _, p := range b.Parts {
			parts = append(parts, distinct(l, p, cpu))
		}
	}
	next := func(line int64, after int) int {
		for i := after + 1; i < len(parts); i++ {
			if slices.Contains(parts[i], line) {
				return i
			}
		}
		return len(parts)
	}
	var cached []int64
	for i, p := range parts {
		for _, line := range p {
			accesses++
			if !slices.Contains(cached, line) {
				reads++
				cached = append(cached, line)
			}
		}
		cached = slices.DeleteFunc(cached,
			func(line int64) bool { return next(line, i) == len(parts) })
		slices.SortStableFunc(cached, func(a, b int64) int { return next(a, i) - next(b, i) })
		cached = cached[:min(int64(len(cached)), slots)]
	}
	return reads, accesses
}

// On small traces the optimum is what trying every choice of every lookup finds.
func TestBeladyIsOptimal(t *testing.T) {
	seeds := uint64(60)
	if wide.Lean() {
		seeds = 20
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 4))
		rows, slots := 2+r.Int64N(6), r.Int64N(4)
		x := randomRun(seed, rows, 2+r.IntN(8), 2, 6)
		x.h.SSDs = 1
		res, err := Run(context.Background(), x.open(t), Config{Policies: []string{Belady},
			Sizes: []Size{{Lines: slots}}, Lines: []int64{LineRow}, TempDir: t.TempDir()})
		require.NoError(t, err)
		// cost[set]: the fewest reads so far with that set cached.
		cost := map[uint]int64{0: 0}
		for _, b := range x.batches {
			for _, p := range b.Parts {
				part := uint(0)
				for _, row := range p {
					part |= 1 << row
				}
				after := map[uint]int64{}
				for set, c := range cost {
					c += int64(bits.OnesCount(part &^ set))
					all := set | part
					for keep := all; ; keep = (keep - 1) & all {
						if int64(bits.OnesCount(keep)) <= res.Plays[0].Lines {
							if old, is := after[keep]; !is || c < old {
								after[keep] = c
							}
						}
						if keep == 0 {
							break
						}
					}
				}
				cost = after
			}
		}
		best := int64(1 << 40)
		for _, c := range cost {
			best = min(best, c)
		}
		require.Equal(t, best, res.Plays[0].Total.Reads, "seed %d", seed)
	}
}

// live does as a run: it looks batches up with a window, loses the tiers in the middle of a pass,
// looks up again what was not trained, and counts what was.
func TestCheck(t *testing.T) {
	for seed := range uint64(24) {
		x := randomRun(seed, 200, 18, 3, 40)
		r := rand.New(rand.NewPCG(seed, 5))
		name := policy.Online()[seed%5]
		window := []int{0, 2, 5}[seed%3]
		l := cache.Lines{SSDs: x.h.SSDs, RowsPerLine: 1, LineBytes: 512, RowStride: 512}
		if seed%2 == 1 {
			l = linesOf(x.h, 4096)
		}
		cpu := hottest(x.hot, 0, 10)
		slices.Sort(cpu)
		slots := int64(20)
		x.h.Policy, x.h.GPULines, x.h.Window, x.h.CPURows = name, slots, int64(window), 10
		x.h.LineBytes, x.h.RowsPerLine = l.LineBytes, l.RowsPerLine
		x.h.Directory = []string{"", policy.InSets, policy.InQueues}[r.IntN(3)]
		path := filepath.Join(t.TempDir(), "trace")
		w, err := trace.Create(path, x.h, false)
		require.NoError(t, err)
		require.NoError(t, w.Hotness(x.hot))
		require.NoError(t, w.Place(nil, cpu))
		d, err := policy.New(policy.Config{Policy: name, Kind: x.h.Directory, Slots: slots,
			Seed: x.h.Seed})
		require.NoError(t, err)
		wrong := seed == 23
		for _, pass := range x.passesOf() {
			counts := make([]Counts, len(pass))
			announced := 0
			look := func(i int) {
				b := pass[i]
				for window > 0 && announced < len(pass) && announced <= i+window {
					var all []int64
					for _, p := range pass[announced].Parts {
						for _, line := range distinct(l, p, cpu) {
							if !slices.Contains(all, line) {
								all = append(all, line)
							}
						}
					}
					d.Announce(all)
					announced++
				}
				d.NextBatch()
				require.NoError(t, w.Begin(b.Kind, b.Epoch, b.Index))
				before := d.Stats()
				c := Counts{Batches: 1}
				for _, p := range b.Parts {
					require.NoError(t, w.Part(p))
					lines := distinct(l, p, cpu)
					answers := make([]policy.Answer, len(lines))
					d.Access(lines, answers)
					for _, row := range p {
						line, _ := l.Of(row)
						switch {
						case slices.Contains(cpu, row):
							c.RowsCPU++
						case answers[slices.Index(lines, line)].Hit:
							c.RowsGPU++
						default:
							c.RowsSSD++
						}
					}
					for _, a := range answers {
						if !a.Hit {
							c.BytesSSD += l.LineBytes
						}
					}
				}
				after := d.Stats()
				c.Inserted, c.Evicted, c.Bypassed = after.Inserted-before.Inserted,
					after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
				counts[i] = c
			}
			breaks := r.IntN(len(pass))
			for i := 0; i <= breaks; i++ {
				look(i)
			}
			from := breaks + 1
			if seed%4 != 0 {
				from = r.IntN(breaks + 1)
				slots--
				require.NoError(t, w.Reset(slots))
				if seed%4 == 1 {
					require.NoError(t, w.Place(nil, cpu))
				}
				d, err = policy.New(policy.Config{Policy: name, Kind: x.h.Directory, Slots: slots,
					Seed: x.h.Seed})
				require.NoError(t, err)
				announced = from
			}
			for i := from; i < len(pass); i++ {
				look(i)
			}
			var sum Counts
			for _, c := range counts {
				sum.add(c, 1)
			}
			if wrong {
				sum.Evicted++
			}
			require.NoError(t, w.Live(trace.Live{Kind: pass[0].Kind, Epoch: pass[0].Epoch,
				Batches: sum.Batches, RowsGPU: sum.RowsGPU, RowsCPU: sum.RowsCPU,
				RowsSSD: sum.RowsSSD, BytesSSD: sum.BytesSSD, Inserted: sum.Inserted,
				Evicted: sum.Evicted, Bypassed: sum.Bypassed}))
		}
		require.NoError(t, w.Close())
		rd, err := trace.Open(path)
		require.NoError(t, err)
		all, err := Check(context.Background(), rd, false, nil)
		require.NoError(t, err)
		require.Len(t, all, len(x.passesOf()))
		for _, c := range all {
			require.True(t, c.Compared)
			require.Equal(t, !wrong, c.Equal, "seed %d %s window %d:\nlive     %v\nreplayed %v",
				seed, name, window, c.Live, c.Replayed)
		}
		require.NoError(t, rd.Close())
	}
}

func TestCheckStatic(t *testing.T) {
	x := randomRun(5, 200, 12, 2, 40)
	x.h.Policy, x.h.GPULines, x.h.CPURows, x.h.LineBytes, x.h.RowsPerLine = Static, 20, 30, 0, 1
	path := filepath.Join(t.TempDir(), "trace")
	w, err := trace.Create(path, x.h, false)
	require.NoError(t, err)
	require.NoError(t, w.Hotness(x.hot))
	g, c := hottest(x.hot, 0, 20), hottest(x.hot, 20, 50)
	for _, pass := range x.passesOf() {
		l := trace.Live{Kind: pass[0].Kind, Epoch: pass[0].Epoch, Batches: int64(len(pass))}
		for _, b := range pass {
			require.NoError(t, w.Begin(b.Kind, b.Epoch, b.Index))
			for _, p := range b.Parts {
				require.NoError(t, w.Part(p))
				for _, r := range p {
					switch {
					case slices.Contains(g, r):
						l.RowsGPU++
					case slices.Contains(c, r):
						l.RowsCPU++
					default:
						l.RowsSSD++
						l.BytesSSD += 512
					}
				}
			}
		}
		require.NoError(t, w.Live(l))
	}
	require.NoError(t, w.Begin(trace.Test, 0, 0)) // a pass that did not end
	require.NoError(t, w.Close())
	rd, err := trace.Open(path)
	require.NoError(t, err)
	all, err := Check(context.Background(), rd, false, nil)
	require.NoError(t, err)
	require.Len(t, all, 4)
	for _, c := range all[:3] {
		require.True(t, c.Equal && c.Bytes, "%+v", c)
	}
	require.False(t, all[3].Compared)
	require.NoError(t, rd.Close())
}

func TestConfigErrors(t *testing.T) {
	x := randomRun(1, 100, 3, 1, 10)
	x.hot = nil
	x.h.CPURows = 10
	r := x.open(t)
	good := Config{Policies: []string{policy.LRU}, Sizes: []Size{{Lines: 5}},
		Lines: []int64{LineRow}}
	for _, change := range []func(*Config){
		func(c *Config) { c.Policies = []string{"best"} },
		func(c *Config) { c.Policies = []string{Static} }, // no hotness
		func(c *Config) { c.CPURows = 10 },                // nor who is in the CPU tier
		func(c *Config) { c.Sizes = nil },
		func(c *Config) { c.Lines = []int64{0} },
		func(c *Config) { c.Windows = []int{-1} },
		func(c *Config) { c.Superbatches = []int{0} },
	} {
		c := good
		change(&c)
		_, err := Run(context.Background(), r, c)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	}
	_, err := Run(context.Background(), r, good)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = Run(ctx, r, good)
	require.ErrorIs(t, err, context.Canceled)
	for _, s := range []string{"", "x", "-3lines", "101%", "50"} {
		_, err := ParseSize(s)
		require.Error(t, err, s)
	}
}

func BenchmarkReplay(b *testing.B) {
	x := randomRun(1, 200_000, 60, 1, 4000)
	r := x.open(b)
	b.ResetTimer()
	for b.Loop() {
		_, err := Run(context.Background(), r, Config{Policies: []string{policy.LRU, policy.Sieve},
			Sizes: []Size{{Lines: 20_000}}, Lines: []int64{LineRow}, CPURows: 0,
			TempDir: b.TempDir()})
		require.NoError(b, err)
	}
}

// A replay keeps a window of batches, and no more of a trace in which none stands twice.
func TestMemoryOfLongPasses(t *testing.T) {
	for _, again := range []bool{false, true} {
		v := &view{lines: cache.Lines{SSDs: 1, RowsPerLine: 1, LineBytes: 512, RowStride: 512},
			bytes: 512, union: true}
		d, err := policy.New(policy.Config{Policy: policy.LRU, Slots: 10})
		require.NoError(t, err)
		s := &dynamic{d: d, v: v, window: 4, again: again}
		c := &counter{again: again}
		for i := range 3 * maxAgain {
			b := &batch{index: i, parts: [][]int64{{int64(i % 7)}}, seen: make([]seen, 1)}
			require.NoError(t, v.see(b.parts, &b.seen[0]))
			s.batch(b)
			c.count(b)
		}
		limit, kept := s.window, 0
		if again {
			limit, kept = maxAgain+s.window, maxAgain
		}
		require.LessOrEqual(t, len(s.known), limit+1)
		require.Len(t, c.recent, kept)
	}
}
