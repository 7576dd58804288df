package parted

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/graph"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
)

var errFault = errors.New("injected fault")

// cutter counts what is written, pages and files alike, and cuts it off: end is called from
// operation number left on.
type cutter struct {
	mu   sync.Mutex
	left int
	end  func() error
	peak int64 // bytes of a layout's memory when anything was written
}

func (c *cutter) spend() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peak = max(c.peak, hostmem.Usage()["layout by part"])
	if c.left--; c.left < 0 {
		return c.end()
	}
	return nil
}

// cut has all writes of files counted until the test ends.
func (c *cutter) cut(t *testing.T) {
	savedHook = func(string, bool) error { return c.spend() }
	t.Cleanup(func() { savedHook = nil })
}

// cutPlace has pages in a folder. Those that were written and not made durable are lost as it is
// closed: something else stands there then.
type cutPlace struct {
	pages.InFolder
	c *cutter
}

type cutWriter struct {
	pages.Writer
	s     pages.Spec
	c     *cutter
	mu    sync.Mutex
	dirty map[int64]bool
}

func (p *cutPlace) Create(ctx context.Context, dir string, s pages.Spec) (pages.Writer, error) {
	if err := p.c.spend(); err != nil {
		return nil, err
	}
	w, err := p.InFolder.Create(ctx, dir, s)
	if err != nil {
		return nil, err
	}
	return &cutWriter{Writer: w, s: s, c: p.c, dirty: map[int64]bool{}}, nil
}

func (w *cutWriter) WriteAt(ctx context.Context, page int64, data []byte) error {
	if err := w.c.spend(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dirty[page] = true
	return w.Writer.WriteAt(ctx, page, data)
}

func (w *cutWriter) Sync(ctx context.Context) error { return w.durable(ctx, w.Writer.Sync) }

func (w *cutWriter) Finish(ctx context.Context) error { return w.durable(ctx, w.Writer.Finish) }

func (w *cutWriter) durable(ctx context.Context, fn func(context.Context) error) error {
	if err := w.c.spend(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.dirty)
	return fn(ctx)
}

func (w *cutWriter) Close(ctx context.Context) error {
	var all []error
	for page := range w.dirty {
		all = append(all, w.Writer.WriteAt(ctx, page,
			slices.Repeat([]byte{0xa5}, int(w.s.PageBytes))))
	}
	return errors.Join(append(all, w.Writer.Close(ctx))...)
}

// cutOptions have several sweeps of several blocks, with a mark after each.
func cutOptions(dir string, c *cutter) Options {
	return Options{Dir: dir, PartitionOptions: partition.Options{Parts: 12,
		Method: partition.Random, Seed: 4}, StaticShare: 0.2, Place: &cutPlace{c: c},
		MemoryBytes: 7 << 20, MarkEvery: 1, Workers: 1}
}

// TestCutOff: wherever making a layout is cut off, the next Make goes on, and the result is the
// same. A second cut follows the first.
func TestCutOff(t *testing.T) {
	testrig.CheckLeaks(t)
	d, topo := generated(t, 20000, 25)
	never := &cutter{left: 1 << 30}
	never.cut(t)
	dir := filepath.Join(testrig.MemoryDir(t), "l")
	l, err := Make(bg, d, topo, cutOptions(dir, never))
	require.NoError(t, err)
	all := 1<<30 - never.left
	want := folderBytes(t, l)
	m, err := readManifest(dir)
	require.NoError(t, err)
	require.Greater(t, m.Stats.RowSweeps, 1)
	p, err := partition.Open(filepath.Join(dir, partitionName))
	require.NoError(t, err)
	holds(t, l, want, d, topo, p.Of, 0.2, rowtype.Float32)
	require.NoError(t, p.Close())
	require.LessOrEqual(t, never.peak, int64(7<<20), "memory of its own")
	require.Greater(t, never.peak, int64(1<<20))

	step := 1
	if wide.Lean() {
		step = all/25 + 1
	}
	for offset := 0; offset < all; offset += step {
		dir := filepath.Join(t.TempDir(), "l")
		c := &cutter{left: offset, end: func() error { return errFault }}
		c.cut(t)
		o := cutOptions(dir, c)
		_, err := Make(bg, d, topo, o)
		require.ErrorIs(t, err, errFault, "cut at %d of %d", offset, all)
		if offset%3 == 0 {
			c.left = offset / 2
			if _, err = Make(bg, d, topo, o); err != nil {
				require.ErrorIs(t, err, errFault)
			}
		}
		if offset%2 == 0 { // the next process may have more memory, or less
			o.MemoryBytes = int64(7+offset%7) << 20
		}
		c.left = 1 << 30
		l, err := Make(bg, d, topo, o)
		require.NoError(t, err, "cut at %d of %d", offset, all)
		require.True(t, slices.Equal(want, folderBytes(t, l)), "cut at %d of %d", offset, all)
		_, err = pages.VerifyFolder(bg, dir, &l.Spec, nil)
		require.NoError(t, err)
		require.NoFileExists(t, filepath.Join(dir, markName))
		require.NoError(t, os.RemoveAll(dir))
	}
}

// Going on reads less than all again.
func TestGoingOnReadsLess(t *testing.T) {
	d, topo := generated(t, 20000, 25)
	dir := filepath.Join(testrig.MemoryDir(t), "l")
	c := &cutter{left: 1 << 30}
	o := cutOptions(dir, c)
	read, stop := int64(0), int64(15000)
	o.Source = func() (Source, func() error, error) {
		return readRows(func(_ context.Context, first, n int64, dst []byte) error {
			read += n
			if first+n > stop {
				return errFault
			}
			return d.ReadRows(first, dst[:n*100])
		}), func() error { return nil }, nil
	}
	// Nodes and parts in one order: pages become whole one after the other.
	mem := make([]uint32, topo.NumNodes)
	for v := range mem {
		mem[v] = uint32(v * 12 / len(mem))
	}
	o.Partition = &partition.Partition{Of: mem, Info: partition.Info{Dataset: d.Meta.UUID,
		Nodes: topo.NumNodes, Edges: topo.NumEdges, Parts: 12}}
	o.StaticShare = 0
	_, err := Make(bg, d, topo, o)
	require.ErrorIs(t, err, errFault)
	require.Greater(t, read, int64(14000))
	read, stop = 0, 1<<40
	l, err := Make(bg, d, topo, o)
	require.NoError(t, err)
	require.Less(t, read, int64(12000))
	require.NotZero(t, l.Nodes)
}

const killedEnv = "HELIOS_PARTED_KILLED"

// makeUntilKilled is a child process that makes the layout DIR/l of DIR/g and kills itself at the
// operation that HELIOS_PARTED_AT says. It ends well where there are fewer.
func makeUntilKilled(dir string) {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	stop, err := strconv.Atoi(os.Getenv("HELIOS_PARTED_AT"))
	fail(err)
	c := &cutter{left: stop, end: func() error {
		return errors.Join(unix.Kill(os.Getpid(), unix.SIGKILL), errFault)
	}}
	savedHook = func(string, bool) error { return c.spend() }
	d, err := dataset.Open(filepath.Join(dir, "g"))
	fail(err)
	topo, err := d.TopologyOnSSD(bg, graph.OutOfCoreOptions{})
	fail(err)
	_, err = Make(bg, d, topo, cutOptions(filepath.Join(dir, "l"), c))
	fail(err)
	os.Exit(0)
}

// TestKilled: a process is killed (SIGKILL) again and again, each a little later, and the last one
// ends with a layout that is whole.
func TestKilled(t *testing.T) {
	d, topo := generated(t, 20000, 25)
	dir := filepath.Dir(d.Dir())
	step := 15
	if !wide.Lean() {
		step = 7
	}
	killed := 0
	for offset := 3; ; offset += step {
		c := exec.Command(os.Args[0], "-test.run=^$")
		c.Env = append(os.Environ(), killedEnv+"="+dir, "HELIOS_PARTED_AT="+strconv.Itoa(offset))
		out, err := c.CombinedOutput()
		if err == nil {
			break
		}
		require.ErrorContains(t, err, "killed", "%s", out)
		killed++
		require.Less(t, killed, 1000)
	}
	require.Greater(t, killed, 2)
	l, err := Open(filepath.Join(dir, "l"))
	require.NoError(t, err)
	p, err := partition.Open(filepath.Join(dir, "l", partitionName))
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	holds(t, l, folderBytes(t, l), d, topo, p.Of, 0.2, rowtype.Float32)
}

// Another thing, or another key, in the folder is refused and stays as it is.
func TestRefusals(t *testing.T) {
	d, topo := generated(t, 3000, 25)
	other, otherTopo := generated(t, 3100, 25)
	given := partsOf(t, d, topo, 9)
	base := Options{Dir: filepath.Join(testrig.MemoryDir(t), "l"), Place: pages.InFolder{},
		PartitionOptions: partition.Options{Parts: 9, Method: partition.Random, Seed: 1}}
	_, err := Make(bg, d, topo, base)
	require.NoError(t, err)
	before := datasettest.Digest(t, base.Dir)
	for name, c := range map[string]struct {
		change func(o *Options)
		d      *dataset.Dataset
		want   string
	}{
		"parts":     {func(o *Options) { o.PartitionOptions.Parts = 8 }, d, "number of parts 9"},
		"seed":      {func(o *Options) { o.PartitionOptions.Seed = 2 }, d, "seed 1"},
		"method":    {func(o *Options) { o.PartitionOptions.Method = partition.Stream }, d, "method"},
		"given":     {func(o *Options) { o.Partition = given }, d, "partition"},
		"share":     {func(o *Options) { o.StaticShare = 0.1 }, d, "share of static nodes 0"},
		"row type":  {func(o *Options) { o.RowType = rowtype.Int8 }, d, "float32"},
		"dataset":   {func(*Options) {}, other, d.Meta.UUID},
		"place":     {func(o *Options) { o.Place = &cutPlace{} }, d, "pages-on"},
		"no parts":  {func(o *Options) { o.PartitionOptions.Parts = 0 }, d, "parts"},
		"bad share": {func(o *Options) { o.StaticShare = 1.5 }, d, "from 0 to 1"},
	} {
		t.Run(name, func(t *testing.T) {
			o := base
			c.change(&o)
			from := topo
			if c.d == other {
				from = otherTopo
			}
			_, err := Make(bg, c.d, from, o)
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.want)
			require.Equal(t, before, datasettest.Digest(t, base.Dir))
		})
	}
	t.Run("others' files", func(t *testing.T) {
		o := base
		o.Dir = t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(o.Dir, "thesis.tex"), []byte("x"), 0o600))
		_, err := Make(bg, d, topo, o)
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "thesis.tex")
		left, err := os.ReadDir(o.Dir)
		require.NoError(t, err)
		require.Len(t, left, 1)
	})
	t.Run("in use", func(t *testing.T) {
		o := base
		o.Dir = t.TempDir()
		lock, err := takeLock(o.Dir)
		require.NoError(t, err)
		_, err = Make(bg, d, topo, o)
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, strconv.Itoa(os.Getpid()))
		require.NoError(t, lock.Close())
	})
	t.Run("none", func(t *testing.T) {
		_, err := Open(t.TempDir())
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	})
	t.Run("too little memory", func(t *testing.T) {
		o := base
		o.Dir = filepath.Join(t.TempDir(), "l")
		o.MemoryBytes = 1 << 20
		_, err := Make(bg, d, topo, o)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "it may take 1 MiB")
		_, err = Open(o.Dir)
		require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "not finished")
		r, err := Verify(bg, o.Dir, d.Meta.UUID, nil)
		require.NoError(t, err)
		require.False(t, r.Whole)
		require.Len(t, r.Notes, 1)
	})
	// Cut off before there was a partition, the folder is of the one to be made: of a given one it
	// would pass for that later.
	t.Run("given for one that was to be made", func(t *testing.T) {
		o := base
		o.Dir = filepath.Join(t.TempDir(), "l")
		ctx, cancel := context.WithCancel(bg)
		cancel()
		_, err := Make(ctx, d, topo, o)
		require.Equal(t, errs.Interrupted, errs.ClassOf(err), "%v", err)
		o.Partition = given
		_, err = Make(bg, d, topo, o)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "given by a file")
		o.Partition = nil
		_, err = Make(bg, d, topo, o)
		require.NoError(t, err)
		_, err = Verify(bg, o.Dir, d.Meta.UUID, nil)
		require.NoError(t, err)
	})
	t.Run("stopped", func(t *testing.T) {
		o := base
		o.Dir = filepath.Join(t.TempDir(), "l")
		ctx, cancel := context.WithCancel(bg)
		o.Progress = func(string, int64, int64) { cancel() }
		_, err := Make(ctx, d, topo, o)
		require.Equal(t, errs.Interrupted, errs.ClassOf(err), "%v", err)
		o.Progress = nil
		_, err = Make(bg, d, topo, o)
		require.NoError(t, err)
	})
}

// A changed byte of any file is found, and the folder named.
func TestDamage(t *testing.T) {
	d, topo := generated(t, 3000, 25)
	o := Options{Dir: filepath.Join(testrig.MemoryDir(t), "l"), Place: pages.InFolder{},
		StaticShare: 0.1, MarkEvery: time.Nanosecond,
		PartitionOptions: partition.Options{Parts: 9, Method: partition.Random, Seed: 1}}
	l, err := Make(bg, d, topo, o)
	require.NoError(t, err)
	verify := func() error {
		_, err := Verify(bg, o.Dir, d.Meta.UUID, nil)
		return err
	}
	_, err = Verify(bg, o.Dir, "another", nil)
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	for name, offsets := range map[string][]int64{manifestName: {3, 40}, tablesName: {2, 20, 200},
		partitionName: {4, 200, 5000}, pages.PagesName: {0, l.Spec.Bytes() / 2},
		pages.SumsName: {9, 4100}} {
		path := filepath.Join(o.Dir, name)
		for _, offset := range offsets {
			datasettest.FlipBit(t, path, offset)
			err := verify()
			require.Equal(t, errs.Device, errs.ClassOf(err), "%s at %d: %v", name, offset, err)
			require.ErrorContains(t, err, o.Dir)
			datasettest.FlipBit(t, path, offset)
		}
		was, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.Truncate(path, int64(len(was)-1)))
		require.Error(t, verify(), name)
		require.NoError(t, os.Remove(path))
		require.Error(t, verify(), name)
		require.NoError(t, os.WriteFile(path, was, 0o600))
		require.NoError(t, verify())
	}
	require.Equal(t, []string{o.Dir}, must(Folders(filepath.Dir(o.Dir))))

	// Pages whose checksums are right, of edges that are wrong: the folder's writer was.
	raw := slices.Clone(folderBytes(t, l))
	s, err := l.Section(2, raw[l.start(l.EdgePages[2]):])
	require.NoError(t, err)
	for want, change := range map[string]func(){
		"is 3000 of 3000": func() { s.Old[1] = 3000 },
		"same or an earlier one": func() {
			s.Old[l.statics(2)+1] = s.Old[l.statics(2)]
		},
		"not in order": func() {
			a := s.Old[l.statics(2):]
			a[0], a[1] = a[1], a[0]
		},
		"a neighbour in part 2 is 70000": func() { s.Neighbors[7] = 70000 },
		"in-edges, and should have":      func() { s.Degrees[3]++ },
	} {
		was := slices.Clone(raw)
		change()
		require.NoError(t, pages.RemoveFolder(o.Dir))
		w, err := pages.CreateFolder(o.Dir, l.Spec)
		require.NoError(t, err)
		require.NoError(t, w.WriteAt(bg, 0, raw))
		require.NoError(t, errors.Join(w.Finish(bg), w.Close()))
		err = verify()
		require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, want)
		copy(raw, was)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A mark that is damaged is refused: pages would be taken for whole that are not.
func TestDamagedMark(t *testing.T) {
	d, topo := generated(t, 3000, 25)
	c := &cutter{left: 30, end: func() error { return errFault }}
	o := cutOptions(filepath.Join(testrig.MemoryDir(t), "l"), c)
	c.cut(t)
	_, err := Make(bg, d, topo, o)
	require.ErrorIs(t, err, errFault)
	datasettest.FlipBit(t, filepath.Join(o.Dir, markName), 30)
	c.left = 1 << 30
	_, err = Make(bg, d, topo, o)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, o.Dir)
}
