package packs

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/samples"
)

const (
	testRows     = 3000
	testRowBytes = 48
	testBatches  = 12 // of an epoch
)

// rowSource makes rows of their number.
type rowSource struct{}

func (rowSource) ReadRows(_ context.Context, first, n int64, dst []byte) error {
	for i := range n {
		fillRow(first+i, dst[i*testRowBytes:(i+1)*testRowBytes])
	}
	return nil
}

func fillRow(row int64, dst []byte) {
	for k := 0; k < len(dst); k += 8 {
		binary.LittleEndian.PutUint64(dst[k:], uint64(row)*31+uint64(k))
	}
}

// frontier returns the rows of a mini-batch of a sample epoch.
func frontier(epoch, index int) []int64 {
	r := rand.New(rand.NewPCG(uint64(epoch), uint64(index)))
	seen := map[int64]bool{}
	var nodes []int64
	for len(nodes) < 150 {
		v := min(int64(r.ExpFloat64()*400), testRows-1)
		if !seen[v] {
			seen[v] = true
			nodes = append(nodes, v)
		}
	}
	return nodes
}

func testWork() Work {
	return Work{Nodes: testRows, Batches: testBatches, Hot: 60, Workers: 2, Memory: 64 << 20,
		Sample: func(ctx context.Context, first, end int, to *samples.Writer,
			report func(done, total int)) error {
			for index := to.Batches(); index < testBatches*(end-first); index++ {
				if ctx.Err() != nil {
					return errors.Join(ctx.Err(), to.Sync())
				}
				e := first + index/testBatches
				if err := to.Append(frontier(e, index%testBatches), []byte("blocks")); err != nil {
					return err
				}
				report(index+1, testBatches*(end-first))
			}
			return nil
		},
		Source: func() (packed.Source, func() error, error) {
			return rowSource{}, func() error { return nil }, nil
		},
	}
}

func testKey() Key {
	return Key{Dataset: "d", Seed: 5, Fanouts: []int{3}, Batch: 9, SampleEpochs: 2,
		RowBytes: testRowBytes, LBABytes: 4096, Segment: 4}
}

// holds compares all rows of a pack with the source.
func holds(t *testing.T, p *Pack) {
	t.Helper()
	mem, err := os.ReadFile(filepath.Join(p.Dir, "pages"))
	require.NoError(t, err)
	hot, err := p.Plan.Hot()
	require.NoError(t, err)
	var b packed.Batch
	want := make([]byte, testRowBytes)
	n := 0
	for i := range p.Samples.Batches() {
		nodes, err := p.Samples.Read(i, nil)
		require.NoError(t, err)
		require.Equal(t, frontier(p.Entry.First+i/testBatches, i%testBatches), nodes)
		require.NoError(t, p.Plan.Batch(i, &b))
		for k, index := range b.HotPos {
			require.Equal(t, nodes[index], hot[b.HotRank[k]])
		}
		var pages []int64
		for _, r := range b.Runs {
			for x := range r.Pages {
				pages = append(pages, r.Page+x)
			}
		}
		per := uint32(p.Plan.Shape().RowsPerPage)
		for k, index := range b.Pos {
			off := pages[b.Slot[k]/per]*p.Plan.Shape().PageBytes +
				int64(b.Slot[k]%per)*testRowBytes
			fillRow(nodes[index], want)
			require.Equal(t, want, mem[off:off+testRowBytes])
			n++
		}
		require.Len(t, nodes, len(b.Pos)+len(b.HotPos))
	}
	require.Positive(t, n)
}

// A pack that is cut off at every moment is resumed, by the same key; what is whole is used
// again; a pack of a refresh keeps the hot rows.
func TestMakeGoesOn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "p")
	cut, stages := 0, map[string]bool{}
	for stop := 1; ; stop += 3 {
		f, err := Open(dir, testKey(), pages.InFolder{})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		w, calls := testWork(), 0
		w.Progress = func(phase string, _, _ int64) {
			if calls++; calls == stop {
				stages[strings.SplitN(phase, ":", 2)[0]] = true
				cancel()
			}
		}
		p, err := f.Make(ctx, 0, 2, w)
		cancel()
		if err != nil {
			cut++
			require.ErrorIs(t, err, context.Canceled)
			require.False(t, f.Has(0, 2))
			require.NoError(t, f.Close())
			continue
		}
		require.False(t, p.Reused)
		holds(t, p)
		e := p.Entry
		require.True(t, e.Whole && e.SamplesBytes > 0 && e.PlanBytes > 0 && e.PagesBytes > 0)
		require.True(t, e.SampleSeconds > 0 && e.PlanSeconds > 0 && e.PackSeconds > 0)

		again := testWork()
		again.HotRows, err = p.Plan.Hot()
		require.NoError(t, err)
		require.NoError(t, p.Close())
		fresh, err := f.Make(context.Background(), 2, 3, again)
		require.NoError(t, err)
		holds(t, fresh)
		hot, err := fresh.Plan.Hot()
		require.NoError(t, err)
		require.Equal(t, again.HotRows, hot)
		require.NoError(t, fresh.Close())
		require.NoError(t, f.Close())
		break
	}
	require.Greater(t, cut, 3)
	require.True(t, stages[PhaseSample] && stages[PhasePlan], "%v", stages)

	f, err := Open(dir, testKey(), pages.InFolder{})
	require.NoError(t, err)
	p, err := f.Make(context.Background(), 0, 2, Work{Nodes: testRows, Batches: testBatches})
	require.NoError(t, err)
	require.True(t, p.Reused)
	holds(t, p)
	require.NoError(t, p.Close())
	require.NoError(t, f.Remove(context.Background(), 2))
	require.True(t, f.Has(2, 3), "of a sample epoch that is in use")
	require.NoError(t, f.Remove(context.Background(), 3))
	require.False(t, f.Has(2, 3))
	require.True(t, f.Has(0, 2), "the first ones stay")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "epochs-2-2"), 0o755)) // a Remove that was cut
	require.NoError(t, f.Close())
	f, err = Open(dir, testKey(), pages.InFolder{})
	require.NoError(t, err)
	require.NoError(t, f.Close())
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Join(dir, lockName), filepath.Join(dir, "epochs-0-1"),
		filepath.Join(dir, manifestName)},
		names)
}

// Another run's folder, another program's and one in use are left alone.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	made(t, dir, testKey())
	f, err := Open(dir, testKey(), pages.InFolder{})
	require.NoError(t, err)
	_, err = Open(dir, testKey(), pages.InFolder{})
	require.ErrorContains(t, err, "in use by process")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.NoError(t, f.Close())
	for want, set := range map[string]func(*Key){
		"option segment 4, and this run has 7":                func(k *Key) { k.Segment = 7 },
		"option fanout [3], and":                              func(k *Key) { k.Fanouts = []int{4} },
		"option sample-epochs 2":                              func(k *Key) { k.SampleEpochs = 3 },
		"dataset d, and this run has e":                       func(k *Key) { k.Dataset = "e" },
		"use of degrees (a model's) false":                    func(k *Key) { k.Degrees = true },
		"option disk-budget none, and this run has 9 B; give": func(k *Key) { k.Budget = 9 },
	} {
		k := testKey()
		set(&k)
		_, err := Open(dir, k, pages.InFolder{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	path := filepath.Join(dir, manifestName)
	was, err := os.ReadFile(path)
	require.NoError(t, err)
	for index := range was {
		b := append([]byte(nil), was...)
		b[index] ^= 1
		require.NoError(t, os.WriteFile(path, b, 0o644))
		_, err := Open(dir, testKey(), pages.InFolder{})
		require.Equal(t, errs.Device, errs.ClassOf(err), "byte %d: %v", index, err)
	}
	require.NoError(t, os.WriteFile(path, was[:9], 0o644))
	_, err = Open(dir, testKey(), pages.InFolder{})
	require.Equal(t, errs.Device, errs.ClassOf(err))

	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "thesis.tex"), nil, 0o644))
	_, err = Open(other, testKey(), pages.InFolder{})
	require.ErrorContains(t, err, "thesis.tex")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	left, err := os.ReadDir(other)
	require.NoError(t, err)
	require.Len(t, left, 1)
}

const childDir = "HELIOS_TEST_PACKS"

// TestChild is the process that TestKilled kills.
func TestChild(t *testing.T) {
	dir := os.Getenv(childDir)
	if dir == "" {
		t.Skip("a part of TestKilled")
	}
	f, err := Open(dir, testKey(), pages.InFolder{})
	require.NoError(t, err)
	w := testWork()
	w.Progress = func(phase string, done, _ int64) {
		_, _ = os.Stdout.WriteString(".\n")
	}
	p, err := f.Make(context.Background(), 0, 2, w)
	require.NoError(t, err)
	holds(t, p)
}

// Killed at a moment that nobody chose, the next one goes on or begins anew, and is right.
func TestKilled(t *testing.T) {
	times := 12
	if testing.Short() {
		times = 4
	}
	r := rand.New(rand.NewPCG(7, 7))
	dir := filepath.Join(t.TempDir(), "p")
	for range times {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestChild$")
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		b := make([]byte, 2)
		for range r.IntN(60) {
			if _, err := out.Read(b); err != nil {
				break
			}
		}
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestChild$")
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// FuzzManifest: no text is taken for a manifest but what was written as one.
func FuzzManifest(f *testing.F) {
	m := manifest{Format: format, Key: testKey(), Packs: []Entry{{First: 0, End: 2}}}
	b, err := durable.Encode(m)
	require.NoError(f, err)
	f.Add(b[:len(b)-len(durable.SumLine(nil))])
	f.Add([]byte(`{"format":2,"packs":[{"first":3,"end":2}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m manifest
		err := m.decode(append(b[:len(b):len(b)], durable.SumLine(b)...), func(why string) error {
			return errs.New(errs.Device, "%s", why)
		})
		if err != nil {
			require.NotEqual(t, errs.Failed, errs.ClassOf(err))
			return
		}
		for _, e := range m.Packs {
			require.True(t, 0 <= e.First && e.First < e.End)
		}
	})
}

// Verify reads all that is whole, and finds a changed byte in every file of a pack.
func TestVerify(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "p")
	r, err := Verify(ctx, dir, nil)
	require.NoError(t, err)
	require.Nil(t, r)
	f, err := Open(dir, testKeyIn(), pages.InFolder{})
	require.NoError(t, err)
	p, err := f.Make(ctx, 0, 2, testWork())
	require.NoError(t, err)
	w := testWork()
	w.Sample = func(context.Context, int, int, *samples.Writer, func(int, int)) error {
		return errs.New(errs.Device, "no")
	}
	_, err = f.Make(ctx, 2, 3, w)
	require.Error(t, err)
	r, err = Verify(ctx, dir, nil)
	require.NoError(t, err)
	require.Zero(t, r.Packs)
	require.Contains(t, r.Notes[0], "in use")
	require.NoError(t, p.Close())
	require.NoError(t, f.Close())
	calls := 0
	r, err = Verify(ctx, dir, func(string, int64, int64) { calls++ })
	require.NoError(t, err)
	require.Positive(t, calls)
	require.Equal(t, []int64{1, 2 * testBatches, p.Pages.Pages, p.Entry.DiskBytes()},
		[]int64{int64(r.Packs), r.Batches, r.Pages, r.Bytes})
	require.Contains(t, r.Notes[0], "epochs 2 to 2")
	files, err := os.ReadDir(p.Dir)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 1))
	for _, e := range append(files, nil) {
		path := filepath.Join(dir, manifestName)
		if e != nil {
			path = filepath.Join(p.Dir, e.Name())
		}
		was, err := os.ReadFile(path)
		require.NoError(t, err)
		found := 0
		for range 40 {
			b := append([]byte(nil), was...)
			b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
			require.NoError(t, os.WriteFile(path, b, 0o644))
			if _, err = Verify(ctx, dir, nil); err != nil {
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				found++
			}
		}
		require.Positive(t, found, path)
		require.NoError(t, os.WriteFile(path, was, 0o644))
	}
	_, err = Verify(ctx, dir, nil)
	require.NoError(t, err)
}

// testKeyIn is testKey of pages in the folder.
func testKeyIn() Key {
	k := testKey()
	k.PagesOn = plan.PagesFolder
	return k
}

// made makes a pack of the first sample epochs and closes all.
func made(t *testing.T, dir string, key Key) {
	t.Helper()
	f, err := Open(dir, key, pages.InFolder{})
	require.NoError(t, err)
	p, err := f.Make(context.Background(), 0, 2, testWork())
	require.NoError(t, err)
	require.NoError(t, errors.Join(p.Close(), f.Close()))
}

// A lost file of a whole pack is not made again behind its pages, which another plan filled.
func TestWholePacksAreNotMended(t *testing.T) {
	for _, name := range []string{"plan", "samples.index", "other"} {
		dir := filepath.Join(t.TempDir(), "p")
		made(t, dir, testKey())
		pack := filepath.Join(dir, "epochs-0-1")
		if name == "other" { // the plan of another number of hot rows
			other := filepath.Join(t.TempDir(), "o")
			f, err := Open(other, testKey(), pages.InFolder{})
			require.NoError(t, err)
			w := testWork()
			w.Hot--
			p, err := f.Make(context.Background(), 0, 2, w)
			require.NoError(t, err)
			require.NoError(t, errors.Join(p.Close(), f.Close()))
			require.NoError(t, os.Rename(filepath.Join(other, "epochs-0-1", "plan"),
				filepath.Join(pack, "plan")))
		} else {
			require.NoError(t, os.Remove(filepath.Join(pack, name)))
		}
		f, err := Open(dir, testKey(), pages.InFolder{})
		require.NoError(t, err)
		_, err = f.Make(context.Background(), 0, 2, testWork())
		require.Equal(t, errs.Device, errs.ClassOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, dir, name)
		require.NoError(t, f.Close())
	}
}

// Only files of packs are removed, whatever their folder is called.
func TestOthersFilesStay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "p")
	made(t, dir, testKey())
	theirs := filepath.Join(dir, "epochs-7-9")
	require.NoError(t, os.Mkdir(theirs, 0o755))
	for _, name := range []string{"notes.txt", "plan"} {
		require.NoError(t, os.WriteFile(filepath.Join(theirs, name), []byte("x"), 0o644))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "epochs-8-8"), 0o755))
	f, err := Open(dir, testKey(), pages.InFolder{})
	require.NoError(t, err)
	p, err := f.Make(context.Background(), 2, 3, testWork())
	require.NoError(t, err)
	mine := filepath.Join(p.Dir, "mine")
	require.NoError(t, os.WriteFile(mine, nil, 0o644))
	require.NoError(t, p.Close())
	before := f.disk.Load()
	require.NoError(t, f.Remove(context.Background(), 3))
	require.Less(t, f.disk.Load(), before)
	require.FileExists(t, filepath.Join(theirs, "notes.txt"))
	require.NoFileExists(t, filepath.Join(theirs, "plan"))
	require.NoDirExists(t, filepath.Join(dir, "epochs-8-8"))
	require.FileExists(t, mine)
	require.NoFileExists(t, filepath.Join(filepath.Dir(mine), "pages"))
	require.NoError(t, f.Close())
}

// Samples that no plan has laid out take another budget or segment; a plan does not.
func TestBudgetBeforeThePlan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "p")
	key := testKey()
	key.Segment, key.Budget = 0, 4096
	f, err := Open(dir, key, pages.InFolder{})
	require.NoError(t, err)
	_, err = f.Make(context.Background(), 0, 2, testWork())
	require.ErrorContains(t, err, "disk-budget")
	require.NoError(t, f.Close())
	key.Budget = 1 << 20
	made(t, dir, key)
	key.Budget = 2 << 20
	_, err = Open(dir, key, pages.InFolder{})
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, "1 MiB, and this run has 2 MiB")
}

// A refresh may take one copy of the rows, as far as the budget of all epochs goes.
func TestBudgetOfARefresh(t *testing.T) {
	require.EqualValues(t, 3000, Budget(3000, 8, 8, 1000))
	require.EqualValues(t, 1500, Budget(3000, 4, 8, 1000))
	require.EqualValues(t, 1062, Budget(3000, 1, 8, 1000))
	require.EqualValues(t, 700, Budget(700, 1, 8, 1000))
	require.Zero(t, Budget(0, 1, 8, 1000))
}
