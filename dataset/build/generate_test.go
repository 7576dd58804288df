package build

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

func TestGenerateSameSeedSameBytes(t *testing.T) {
	for _, kind := range Kinds {
		t.Run(kind, func(t *testing.T) {
			root := t.TempDir()
			gen := func(name string, seed uint64, memory int64) map[string]string {
				out := filepath.Join(root, name)
				require.NoError(t, Generate(bg, GenerateOptions{Kind: kind, Name: "g", Nodes: 9001,
					Dim: 24, Classes: 7, AvgDegree: 6.5, Seed: seed, Memory: memory, Out: out}))
				return datasettest.Digest(t, out)
			}
			a := gen("a", 1, 0)
			files := 9
			if kind == kindTyped {
				files = 24
			}
			require.Len(t, a, files)
			// Another number of cores, and a sort that spills, change nothing.
			old := runtime.GOMAXPROCS(1)
			b := gen("b", 1, 1)
			runtime.GOMAXPROCS(7)
			c := gen("c", 1, 200_000)
			runtime.GOMAXPROCS(old)
			require.Equal(t, a, b)
			require.Equal(t, a, c)
			other := gen("d", 2, 0)
			for name := range a {
				require.NotEqual(t, a[name], other[name], "%s is the same under another seed", name)
			}
		})
	}
}

// TestGenerateGolden pins the bytes: a dataset made by one version, or on another machine, is
// the one that this version makes.
func TestGenerateGolden(t *testing.T) {
	for kind, want := range map[string]string{"sbm": goldenSBM, "rmat": goldenRMAT,
		"communities": goldenCommunities, "typed": goldenTyped} {
		out := filepath.Join(t.TempDir(), "g")
		require.NoError(t, Generate(bg, GenerateOptions{Kind: kind, Nodes: 1000, Dim: 9, Seed: 42,
			Out: out}))
		require.Equal(t, want, datasettest.Open(t, out).Meta.UUID, kind)
	}
}

const (
	goldenSBM         = "a021901e-1744-80d7-b8d3-a6996d570457"
	goldenCommunities = "da9d3d32-5d2a-85c6-b2a4-0d92628de09b"
	goldenTyped       = "9afbfb19-048d-8464-9f15-289339c25db7"
	goldenRMAT        = "29c6dbe5-54d0-8b93-8a31-654783ff8d46"
)

func TestSBMIsWhatItSays(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	const nodes, dim, classes = 12_000, 64, 16
	require.NoError(t, Generate(bg, GenerateOptions{Kind: "sbm", Nodes: nodes, Dim: dim,
		Classes: classes, AvgDegree: 12, Seed: 3, Out: out}))
	d := datasettest.Open(t, out)
	tp, err := d.Topology()
	require.NoError(t, err)
	require.NoError(t, tp.Validate())
	again, err := d.Topology()
	require.NoError(t, err)
	require.Same(t, tp, again)
	labels, err := d.Labels()
	require.NoError(t, err)

	require.InDelta(t, 12, float64(tp.NumEdges)/nodes, 0.3)
	same := 0
	popularity := make([]int, nodes)
	for v := range tp.NumNodes {
		last := int64(-1)
		for i := range tp.InDegree(v) {
			u := tp.Neighbor(v, i)
			require.Greater(t, u, last, "in-neighbours ascend and are distinct")
			require.NotEqual(t, v, u)
			last = u
			popularity[u]++
			if labels[u] == labels[v] {
				same++
			}
		}
	}
	require.InDelta(t, 0.8, float64(same)/float64(tp.NumEdges), 0.03)
	slices.Sort(popularity)
	top := 0
	for _, p := range popularity[nodes*9/10:] {
		top += p
	}
	require.InDelta(t, 0.40, float64(top)/float64(tp.NumEdges), 0.06,
		"a tenth of the nodes is in 10^-0.4 of the edges")
	count := make([]int, classes)
	for _, l := range labels {
		count[l]++
	}
	require.InDelta(t, nodes/classes, slices.Min(count), 1)
	require.InDelta(t, nodes/classes, slices.Max(count), 1)
	require.Equal(t, int64(nodes), d.Meta.Train+d.Meta.Val+d.Meta.Test)
	require.InDelta(t, 0.6, float64(d.Meta.Train)/nodes, 0.02)
	require.InDelta(t, 0.2, float64(d.Meta.Val)/nodes, 0.02)
	owner := make([]int, nodes)
	for _, s := range dataset.Splits {
		ids, err := d.Split(s)
		require.NoError(t, err)
		require.True(t, slices.IsSorted(ids))
		for _, v := range ids {
			owner[v]++
		}
	}
	require.Equal(t, slices.Repeat([]int{1}, nodes), owner)

	x := datasettest.RowsOf(t, d)
	alone := datasettest.CentroidAccuracy(t, d, x, dim)
	one := datasettest.Smooth(tp, x, dim)
	with := datasettest.CentroidAccuracy(t, d, one, dim)
	two := datasettest.CentroidAccuracy(t, d, datasettest.Smooth(tp, one, dim), dim)
	t.Logf("nearest class mean: own features %.3f, one hop %.3f, two hops %.3f", alone, with, two)
	require.InDelta(t, 0.3, alone, 0.12)
	require.Greater(t, with, alone+0.2)
	require.Greater(t, two, 0.9)

	none := d.WithoutEdges()
	defer none.Close()
	tn, err := none.Topology()
	require.NoError(t, err)
	require.NoError(t, tn.Validate())
	require.Zero(t, tn.NumEdges)
	require.Equal(t, d.UUID(), none.UUID())
}

func TestRMAT(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	const nodes = 5000 // not a power of two: positions outside are drawn again
	require.NoError(t, Generate(bg, GenerateOptions{Kind: "rmat", Nodes: nodes, Dim: 4, Classes: 4,
		AvgDegree: 10, Seed: 3, Out: out}))
	d := datasettest.Open(t, out)
	tp, err := d.Topology()
	require.NoError(t, err)
	require.NoError(t, tp.Validate())
	out64 := make([]int, nodes)
	for v := range tp.NumNodes {
		last := int64(-1)
		for i := range tp.InDegree(v) {
			u := tp.Neighbor(v, i)
			require.Greater(t, u, last)
			require.NotEqual(t, u, v)
			last = u
			out64[u]++
		}
	}
	c := d.Meta.Source.Counts
	require.EqualValues(t, 50_000, c["drawn"])
	require.Equal(t, d.Meta.Edges, c["drawn"]-c["duplicates"]-c["self-loops"])
	require.Greater(t, d.Meta.Edges, int64(35_000))
	slices.Sort(out64)
	require.Greater(t, out64[nodes-1], 20*10, "the degrees of R-MAT are heavy-tailed")
}

// TestPermutation: id and rank are inverse to each other and onto, for sizes around powers of
// four, where the Feistel network's domain changes.
func TestPermutation(t *testing.T) {
	for _, n := range []int64{1, 2, 3, 4, 5, 15, 16, 17, 1000, 4096, 4097} {
		g := newGenerator(GenerateOptions{Kind: "sbm", Nodes: n, Classes: 1, Dim: 1,
			Seed: uint64(n)})
		seen := make([]bool, n)
		for r := range n {
			id := g.id(r)
			require.False(t, seen[id])
			seen[id] = true
			require.Equal(t, r, g.rank(id))
		}
	}
	g := newGenerator(GenerateOptions{Kind: "sbm", Nodes: 1 << 40, Classes: 1, Dim: 1})
	for range 1000 {
		r := rand.Int64N(1 << 40)
		require.Equal(t, r, g.rank(g.id(r)))
	}
}

func TestNoiseMoments(t *testing.T) {
	g := newGenerator(GenerateOptions{Kind: "sbm", Nodes: 10, Classes: 1, Dim: 1})
	row := make([]float32, 100_001)
	g.noise(row, 5, genNoise)
	var sum, square float64
	for _, x := range row {
		sum += float64(x)
		square += float64(x) * float64(x)
	}
	n := float64(len(row))
	require.InDelta(t, 0, sum/n, 0.02)
	require.InDelta(t, 1, square/n, 0.02)
}

func TestGenerateBadOptions(t *testing.T) {
	ok := GenerateOptions{Kind: "sbm", Nodes: 100, Classes: 4, Dim: 8}
	for want, change := range map[string]func(*GenerateOptions){
		"option kind":           func(o *GenerateOptions) { o.Kind = "tree" },
		"option nodes 0":        func(o *GenerateOptions) { o.Nodes = 0 },
		"option nodes -5":       func(o *GenerateOptions) { o.Nodes = -5 },
		"option classes 101":    func(o *GenerateOptions) { o.Classes = 101 },
		"option classes -1":     func(o *GenerateOptions) { o.Classes = -1 },
		"option dim":            func(o *GenerateOptions) { o.Dim = 1 << 30 },
		"option avg-degree":     func(o *GenerateOptions) { o.AvgDegree = -1 },
		"homophily":             func(o *GenerateOptions) { o.Homophily = 2 },
		"signal":                func(o *GenerateOptions) { o.Signal = -1 },
		"option train-fraction": func(o *GenerateOptions) { o.TrainFraction, o.ValFraction = 0.9, 0.2 },
		"option test-fraction": func(
			o *GenerateOptions) {
			o.TrainFraction, o.ValFraction, o.TestFraction = 0.5, 0.2, 0.4
		},
		"option target \"x\" is": func(o *GenerateOptions) { o.Target = "x" },
		"option target regression: option kind typed": func(o *GenerateOptions) {
			o.Target, o.Kind = dataset.TargetRegression, kindTyped
		},
		"option classes 1 is outside 2..": func(o *GenerateOptions) {
			o.Target, o.Classes = dataset.TargetMultiLabel, 1
		},
		"option out":             func(o *GenerateOptions) { o.Out = "" },
		"already exists":         func(o *GenerateOptions) { o.Out = os.TempDir() },
		"option out x.partial-1": func(o *GenerateOptions) { o.Out = "x.partial-1" },
	} {
		o := ok
		root := t.TempDir()
		o.Out = filepath.Join(root, "g")
		change(&o)
		err := Generate(bg, o)
		require.ErrorContains(t, err, want)
		require.Contains(t, []errs.Class{errs.Usage, errs.Refused}, errs.ClassOf(err))
		datasettest.RequireEmpty(t, root)
	}
}

// TestGenerateTargets: labels and numbers follow the classes that the same flags plant, and nothing
// else of the dataset changes.
func TestGenerateTargets(t *testing.T) {
	made := func(kind, target string, classes int) *dataset.Dataset {
		out := filepath.Join(t.TempDir(), "g")
		require.NoError(t, Generate(bg, GenerateOptions{Kind: kind, Name: "g", Nodes: 5000, Dim: 5,
			Classes: classes, Target: target, Out: out}))
		return datasettest.Open(t, out)
	}
	for _, kind := range []string{kindSBM, kindRMAT, kindCommunities} {
		for _, classes := range []int{2, 5} {
			plain := made(kind, "", classes)
			class, err := plain.Labels()
			require.NoError(t, err)
			same := func(d *dataset.Dataset) {
				files, others := datasettest.Digest(t, plain.Dir()), datasettest.Digest(t, d.Dir())
				for theirs, ours := range map[string]string{"features": "nodes/000/features",
					"indptr": "edges/000/indptr", "indices": "edges/000/indices",
					"train": "tasks/000/train", "test": "tasks/000/test"} {
					require.NotEmpty(t, files[theirs+".npy"])
					require.Equal(t, files[theirs+".npy"], others[ours+".npy"], theirs)
				}
			}
			d := made(kind, dataset.TargetMultiLabel, classes)
			same(d)
			labels, err := d.TaskMultiLabels(0)
			require.NoError(t, err)
			for i, y := range labels {
				k, own := i%classes, int(class[i/classes])
				has := k == own || classes > 2 && k == (own+1)%classes
				require.Equal(t, has, y == 1, "label %d of node %d", k, i/classes)
			}
			d = made(kind, dataset.TargetRegression, classes)
			same(d)
			values, err := d.TaskValues(0)
			require.NoError(t, err)
			sum, squares := 0.0, 0.0
			for i, x := range values {
				far := float64(x) - 10*float64(class[i])
				sum, squares = sum+far, squares+far*far
			}
			require.InDelta(t, 0, sum/5000, 0.05)
			require.InDelta(t, 1, squares/5000, 0.1)
		}
	}
}

// TestTinyGraphs: sizes at which something is empty or single.
func TestTinyGraphs(t *testing.T) {
	for _, kind := range Kinds {
		for _, n := range []int64{1, 2, 3} {
			out := filepath.Join(t.TempDir(), "g")
			require.NoError(t, Generate(bg, GenerateOptions{Kind: kind, Nodes: n, Classes: 1,
				Dim: 1, AvgDegree: 50, Out: out}))
			d := datasettest.Open(t, out)
			for i := range d.Meta.Graph().Relations {
				tp, err := d.Relation(i)
				require.NoError(t, err)
				require.NoError(t, tp.ValidateOffsets())
				require.LessOrEqual(t, tp.NumEdges, n*n)
			}
		}
	}
}

// TestFailedWriteLeavesNothing fills the disk at each file in turn.
func TestFailedWriteLeavesNothing(t *testing.T) {
	defer func() { WriteFault = nil }()
	for _, kind := range Kinds {
		files := []string{dataset.IndptrName, dataset.IndicesName, dataset.FeaturesName,
			dataset.LabelsName, "train.npy", "val.npy", "test.npy", dataset.MetaName}
		if kind == kindRMAT || kind == kindTyped {
			files = append(files, "sort-1.tmp")
		}
		for _, name := range files {
			t.Run(kind+"/"+name, func(t *testing.T) {
				root := t.TempDir()
				out := filepath.Join(root, "g")
				WriteFault = func(path string) error {
					if filepath.Base(path) == name {
						return &os.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
					}
					return nil
				}
				err := Generate(bg, GenerateOptions{Kind: kind, Nodes: 3000, Dim: 4, Memory: 1,
					Out: out})
				require.ErrorIs(t, err, syscall.ENOSPC)
				require.ErrorContains(t, err, out)
				require.ErrorContains(t, err, "/"+name)
				require.ErrorContains(t, err, "free some space")
				require.NotContains(t, err.Error(), "\n")
				datasettest.RequireEmpty(t, root)
				datasettest.RequireNoFDs(t, root)
			})
		}
	}
}

func TestFullDiskForReal(t *testing.T) {
	// A file system of 1 MiB, where we may mount one; the injected errors above cover the rest.
	root := t.TempDir()
	if err := syscall.Mount("tmpfs", root, "tmpfs", 0, "size=1m"); err != nil {
		if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
			t.Skip("mounting needs root")
		}
		t.Fatal(err)
	}
	defer func() { require.NoError(t, syscall.Unmount(root, 0)) }()
	err := Generate(bg, GenerateOptions{Nodes: 20_000, Dim: 64, Out: filepath.Join(root, "g")})
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ErrorContains(t, err, root)
	datasettest.RequireEmpty(t, root)

	require.NoError(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	err = Generate(bg, GenerateOptions{Nodes: 20, Out: filepath.Join(root, "g")})
	require.ErrorIs(t, err, syscall.EROFS)
	require.ErrorContains(t, err, "choose a writable option out")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

func TestReadOnlyFolder(t *testing.T) {
	// sysfs takes no directories from anyone, root included.
	err := Generate(bg, GenerateOptions{Nodes: 100, Out: "/sys/helios-test"})
	require.ErrorContains(t, err, "cannot create /sys/helios-test")
	require.ErrorContains(t, err, "choose a writable option out")
	err = Generate(bg, GenerateOptions{Nodes: 100, Out: filepath.Join(t.TempDir(), "no", "such",
		"parent")})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestCancelLeavesNothing(t *testing.T) {
	for _, kind := range Kinds {
		for _, stage := range []string{"topology", "features", "labels"} {
			root := t.TempDir()
			ctx, cancel := context.WithCancel(bg)
			err := Generate(ctx, GenerateOptions{Kind: kind, Nodes: 20_000, Dim: 32,
				Out: filepath.Join(root, "g"), Progress: func(s string, _, _ int64) {
					if s == stage {
						cancel()
					}
				}})
			require.ErrorIs(t, err, context.Canceled, "%s/%s", kind, stage)
			datasettest.RequireEmpty(t, root)
			cancel()
		}
	}
}

const killChild = "HELIOS_TEST_GENERATE_OUT"

func TestMain(m *testing.M) {
	if out := os.Getenv(killChild); out != "" {
		for i := 0; ; i++ { // until killed
			if err := Generate(bg, GenerateOptions{Kind: "rmat", Nodes: 20_000, Dim: 32,
				Out: fmt.Sprintf("%s-%d", out, i)}); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
	}
	os.Exit(datasettest.Main(m))
}

// TestKillLeavesNothingThatOpens kills a generating process at random moments. Afterwards
// every directory is a whole dataset or is refused, and the next run cleans up.
func TestKillLeavesNothingThatOpens(t *testing.T) {
	root := t.TempDir()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	whole, refused := 0, 0
	for round := range 6 {
		out := filepath.Join(root, fmt.Sprintf("r%d", round))
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), killChild+"="+out)
		require.NoError(t, cmd.Start())
		// the moment of death, not a synchronisation
		time.Sleep(time.Duration(50+rng.IntN(350)) * time.Millisecond)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
	}
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	for _, e := range entries {
		d, err := dataset.Open(filepath.Join(root, e.Name()))
		if err != nil {
			refused++
			require.ErrorContains(t, err, "unfinished output")
			require.Contains(t, e.Name(), dataset.PartialMark)
			continue
		}
		whole++
		require.NotContains(t, e.Name(), dataset.PartialMark)
		tp, err := d.Topology()
		require.NoError(t, err)
		require.NoError(t, tp.Validate())
		require.NoError(t, d.Close())
	}
	t.Logf("%d whole, %d refused", whole, refused)
	require.Positive(t, refused)
	for _, e := range entries {
		if base, _, partial := cutPartial(e.Name()); partial {
			_ = os.RemoveAll(filepath.Join(root, base))
			require.NoError(t,
				Generate(bg, GenerateOptions{Nodes: 10, Classes: 1,
					Out: filepath.Join(root, base)}))
			_, err := os.Stat(filepath.Join(root, e.Name()))
			require.ErrorIs(t, err, os.ErrNotExist, "left-overs of the killed run stay")
		}
	}
}

func cutPartial(name string) (base, rest string, ok bool) {
	for i := range name {
		if len(name)-i >= len(dataset.PartialMark) &&
			name[i:i+len(dataset.PartialMark)] == dataset.PartialMark {
			return name[:i], name[i:], true
		}
	}
	return name, "", false
}

// TestRunningPartialIsLeftAlone: the clean-up must not remove what another process writes.
func TestRunningPartialIsLeftAlone(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	s, err := NewStaging(out)
	require.NoError(t, err)
	s2, err := NewStaging(out)
	require.NoError(t, err)
	_, err = os.Stat(s.dir)
	require.NoError(t, err)
	require.NoError(t, s.Abort())
	_, err = os.Stat(s2.dir)
	require.NoError(t, err)
	require.NoError(t, s2.Abort())

	// Two finish at once: the second must not replace the first.
	s, err = NewStaging(out)
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(out, 0o755))
	err = s.Commit(dataset.Meta{})
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.NoError(t, s.Abort())
}

// TestSplitFractions: a test split of its own leaves nodes in no split.
func TestSplitFractions(t *testing.T) {
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 20000, Dim: 1, FeatureFn: "hash",
		TrainFraction: 0.1, ValFraction: 0.05, TestFraction: 0.01, Out: out}))
	d, err := dataset.Open(out)
	require.NoError(t, err)
	require.InDelta(t, 2000, d.Meta.Train, 200)
	require.InDelta(t, 1000, d.Meta.Val, 150)
	require.InDelta(t, 200, d.Meta.Test, 70)
	require.NoError(t, d.Close())
}

var bg = context.Background()
