package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset/pages"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// onExtents is onPacked with the pages on the SSDs.
func onExtents(t testing.TB) plan.Config {
	cfg := onPacked(t)
	cfg.PagesOn = plan.PagesSSDs
	return cfg
}

// packsIn reads the packs of a folder's manifest.
func packsIn(t testing.TB, dir string) []packs.Entry {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "packs.json"))
	require.NoError(t, err)
	var m struct {
		Packs []packs.Entry `json:"packs"`
	}
	require.NoError(t, json.NewDecoder(bytes.NewReader(b)).Decode(&m))
	return m.Packs
}

// requireExtents: the SSDs hold the pages of a folder's packs, all finished, and no others.
func requireExtents(t testing.TB, dir string, s *ssdSet) {
	t.Helper()
	var want []uuid.UUID
	for _, e := range packsIn(t, dir) {
		require.True(t, e.Whole)
		want = append(want, e.ID)
	}
	require.NotEmpty(t, want)
	for _, x := range s.ssds {
		c, _, err := stripe.Contents(context.Background(), x)
		require.NoError(t, err)
		var got []uuid.UUID
		for _, e := range c[0].Pages.All() {
			require.Equal(t, stripe.StateComplete, e.State)
			got = append(got, e.ID)
		}
		require.ElementsMatch(t, want, got)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", pages.PagesName))
	require.NoError(t, err)
	require.Empty(t, files)
}

// Pages on the SSDs give what those in a folder give, through every stack, and are used again.
func TestPackedOnSSDs(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense, padded} {
		d, feat := g.open(t)
		inMem := small()
		inMem.Mode = static.ModeInmem
		want := train(t, context.Background(), inMem, d, feat, bind(t, d, 1, ""), 2,
			report.Observer{})
		require.NoError(t, want.err)
		for i, v := range packedWays {
			if i == len(packedWays)-1 || n > 0 && i%3 != n-1 || wide.Lean() && (i > 1 || n == 1) {
				continue
			}
			s := bindIn(t, d, v.ssds, t.TempDir(), i%2 == 0, "")
			cfg := onExtents(t)
			v.set(&cfg)
			folder := cfg
			folder.PagesOn, folder.PackedDir = plan.PagesFolder, filepath.Join(t.TempDir(), "f")
			f := train(t, context.Background(), folder, d, feat, s, v.workers, report.Observer{})
			require.NoError(t, f.err, v.name)
			require.Equal(t, plan.PagesFolder, f.res.Packed.PagesOn)
			for _, again := range []bool{false, true} {
				r := train(t, context.Background(), cfg, d, feat, s, v.workers, report.Observer{})
				require.NoError(t, r.err, v.name)
				require.Equal(t, want.blocks, r.blocks, v.name)
				require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
				require.Equal(t, f.seen, r.seen, v.name)
				p, q := r.res.Packed, f.res.Packed
				require.Equal(t, plan.PagesSSDs, p.PagesOn)
				require.Equal(t, again, p.Reused, v.name)
				require.Equal(t, []int64{q.AccessesMemory, q.AccessesDiskCache, q.AccessesChunks,
					q.PagesBytes}, []int64{p.AccessesMemory, p.AccessesDiskCache,
					p.AccessesChunks, p.PagesBytes}, v.name)
				requireExtents(t, cfg.PackedDir, s)
			}
			_, err := stripe.Verify(context.Background(), d, s.ssds, stripe.VerifyOptions{})
			require.NoError(t, err)
		}
	}
}

// A refresh's pack is written to the SSDs while kernels read others of them, and takes the room of
// what no epoch needs any more.
func TestPackedRefreshOnSSDs(t *testing.T) {
	d, feat := tiny.open(t)
	for _, stack := range []string{gpuio.StackAsync, gpuio.StackCPU} {
		for _, pairs := range []int{0, 1} { // 1: none is left for who writes
			if wide.Lean() && (pairs == 1) != (stack == gpuio.StackCPU) {
				continue
			}
			s := bindIn(t, d, 2, t.TempDir(), true, "")
			if pairs > 0 {
				s.off(t)
				for _, p := range s.paths {
					bus, err := proxy.Open(proxy.Config{Path: p})
					require.NoError(t, err)
					c, err := nvme.Open(context.Background(), bus, nvme.Options{QueuePairs: pairs})
					require.NoError(t, err)
					s.ssds = append(s.ssds, &gpuio.SSD{Ctrl: c, Name: filepath.Base(p),
						BackingPath: p})
				}
			}
			set := func(c *plan.Config) {
				c.Epochs, c.SampleEpochs, c.Refresh, c.RefreshEvery, c.IOStack = 4, 1, 1, 1, stack
			}
			cfg := small()
			set(&cfg)
			want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, want.err)
			cfg = onExtents(t)
			set(&cfg)
			made := 0
			cfg.OnBatch = func(epoch, index int, _ *graph.MiniBatch) {
				if epoch == 3 || index != 1 || pairs == 1 {
					return
				}
				// The pack of the next epoch becomes whole while this one is half way.
				require.Eventually(t, func() bool {
					for _, e := range packsIn(t, cfg.PackedDir) {
						if e.First == epoch+1 {
							return e.Whole
						}
					}
					return false
				}, 30*time.Second, time.Millisecond, "epoch %d", epoch)
				made++
			}
			notes := ""
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{
				Note: func(s errs.Text) { notes += s.String() + "\n" }})
			require.NoError(t, r.err)
			require.NotContains(t, notes, "beside training")
			require.Equal(t, want.blocks, r.blocks)
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			if pairs == 0 {
				require.Equal(t, 3, made)
			}
			requireExtents(t, cfg.PackedDir, s)
			have := packsIn(t, cfg.PackedDir)
			require.Len(t, have, 2, "the first, for later runs, and the last")
			require.Equal(t, []int{0, 3}, []int{have[0].First, have[1].First})
		}
	}
}

// onceFull is a place whose second store of pages cannot be made at once.
type onceFull struct {
	pages.InFolder
	asked *atomic.Int32
}

func (p onceFull) Create(ctx context.Context, dir string, s pages.Spec) (pages.Writer, error) {
	if p.asked.Add(1) == 2 {
		return nil, errs.New(errs.Capability, "no queue pair is left")
	}
	return p.InFolder.Create(ctx, dir, s)
}

// A pack that cannot be made while others train is made in its turn.
func TestPacksAreMadeInTheirTurn(t *testing.T) {
	d := tiny.generate(t)
	cfg := small()
	cfg.Epochs, cfg.SampleEpochs, cfg.Refresh = 3, 1, 1
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	notes := ""
	note := func(s errs.Text) { notes += s.String() }
	s := openSampling(t, dev, d, cfg, report.Observer{Note: note})
	asked := new(atomic.Int32)
	r, err := packs.Start(s, packs.Options{Dir: filepath.Join(t.TempDir(), "p"), Hot: 100,
		Pages: onceFull{asked: asked}})
	require.NoError(t, err)
	requireSampled(t, s, r, d)
	require.NoError(t, r.Close())
	require.EqualValues(t, 4, asked.Load())
	require.Contains(t, notes, "no queue pair is left")
}

// Pages that are gone, that have changed, and those that are looked for elsewhere are told with
// what helps.
func TestPackedOnSSDsRefuses(t *testing.T) {
	ctx := context.Background()
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := onExtents(t)
	cfg.CheckReads = plan.ChecksOn
	run := func(c plan.Config) error {
		return train(t, ctx, c, d, feat, s, 2, report.Observer{}).err
	}
	require.NoError(t, run(cfg))
	folder := cfg
	folder.PagesOn = plan.PagesFolder
	require.ErrorContains(t, run(folder),
		"prepared with option pages-on ssds, and this run has folder")
	none := cfg
	none.PagesOn = "tape"
	require.Equal(t, errs.Usage, errs.ClassOf(run(none)))

	e := packsIn(t, cfg.PackedDir)[0]
	spec := pages.Spec{ID: e.ID, PageBytes: 4096, Pages: e.PagesBytes / 4096}
	o, err := stripe.OpenPages(ctx, d, s.ssds, spec)
	require.NoError(t, err)
	lba := int64(s.ssds[1].Ctrl.Namespace().LBABytes)
	pos := int64(o.SSDs[1].DataStart)*lba + 4096 + 700 // a page that opening does not look at
	flip := func() {
		s.off(t)
		f, err := os.OpenFile(s.paths[1], os.O_RDWR, 0)
		require.NoError(t, err)
		b := make([]byte, 1)
		_, err = f.ReadAt(b, pos)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte{b[0] ^ 8}, pos)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		s.power(t, "")
	}
	flip()
	err = run(cfg)
	require.Error(t, err)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, e.ID.String())
	flip()
	require.NoError(t, run(cfg))

	for i, gone := range []func(){
		func() {
			_, err := stripe.RemovePages(ctx, s.ssds, e.ID)
			require.NoError(t, err)
		},
		func() { // the features are loaded again
			_, err := stripe.Load(ctx, d, s.ssds, stripe.LoadOptions{})
			require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
			force := s.ssds[0].Ctrl.Serial() + "," + s.ssds[1].Ctrl.Serial()
			_, err = stripe.Load(ctx, d, s.ssds, stripe.LoadOptions{Force: force})
			require.NoError(t, err)
		},
	} {
		gone()
		err = run(cfg)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%d: %v", i, err)
		require.ErrorContains(t, err, "are not there")
		require.ErrorContains(t, err, "remove the folder "+cfg.PackedDir)
		require.NoError(t, os.RemoveAll(cfg.PackedDir))
		require.NoError(t, run(cfg))
		requireExtents(t, cfg.PackedDir, s)
	}
}

// extentRun is the run that the next tests train, again and again.
func extentRun(cfg *plan.Config) {
	cfg.SampleEpochs, cfg.Refresh, cfg.RefreshEvery, cfg.IOStack = 2, 1, 1, gpuio.StackAsync
}

// Interrupted at any moment of preparing and training, a run goes on to the same parameters.
func TestPackedOnSSDsGoesOn(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs = 4
	extentRun(&cfg)
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg = onExtents(t)
	cfg.Epochs, cfg.CheckpointDir, cfg.Resume = 4, t.TempDir(), true
	extentRun(&cfg)
	step := 7
	if wide.Lean() {
		step = 23
	}
	r, runs := trainInPieces(t, 3, step, cfg, d, feat, s)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
	require.Greater(t, runs, 2)
	requireExtents(t, cfg.PackedDir, s)
}

// Killed with SIGKILL while it samples, packs to the SSDs, refreshes and trains, a run goes on to
// the same parameters, and leaves the SSDs with the pages of its packs alone.
func TestPackedOnSSDsKilled(t *testing.T) {
	kills := 16
	if wide.Lean() {
		kills = 4
	}
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := childConfig()
	extentRun(&cfg)
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	s.off(t)
	run := childRun{Dataset: d.Dir(), SSDs: s.paths, Checkpoint: t.TempDir(),
		Packed: filepath.Join(t.TempDir(), "p")}
	env, err := json.Marshal(run)
	require.NoError(t, err)
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 5))
	for killed := 0; ; killed++ {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+string(env))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdout := killer{cmd: cmd}
		if killed < kills {
			stdout.after = 1 + rng.IntN(40+10*killed)
			stdout.delay = time.Duration(rng.IntN(3000)) * time.Microsecond
		}
		cmd.Stdout = &stdout
		err := cmd.Run()
		cancel()
		require.Empty(t, stderr.String(), "seed %d, after %d kills", seed, killed)
		if err == nil {
			fields := strings.Fields(stdout.out.String())
			require.Equal(t, want.res.ParamsSHA256, fields[len(fields)-1], "seed %d, %d kills",
				seed, killed)
			t.Log(fmt.Sprint(killed, " kills"))
			require.Positive(t, killed)
			break
		}
	}
	s.power(t, "")
	requireExtents(t, run.Packed, s)
	_, err = stripe.Verify(context.Background(), d, s.ssds, stripe.VerifyOptions{})
	require.NoError(t, err)
}
