package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/serve"
	"helios/internal/ui"
)

// loaderOf opens a loader as a client's session does.
func loaderOf(t testing.TB, b *serveBackend, q serve.LoaderRequest,
	open serve.OpenRequest) (serve.Loader, error) {
	t.Helper()
	open.Dataset, _ = filepath.Abs(cmp.Or(open.Dataset, "g"))
	d, err := b.Open(context.Background(), open)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, d.Close())
	})
	l, err := d.Loader(context.Background(), q)
	if err == nil {
		t.Cleanup(func() { require.NoError(t, l.Close()) })
	}
	return l, err
}

func TestServeOptions(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	for key, want := range map[string]string{"hidden": "option hidden belongs to training",
		"no-such": "unknown option no-such", "mode": "mode", "fanout": "fanout"} {
		_, err := loaderOf(t, serverBackend(t), serve.LoaderRequest{Split: "train", World: 1,
			Options: map[string]string{key: "x"}}, serve.OpenRequest{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	file, err := filepath.Abs("a.img")
	require.NoError(t, err)
	for _, open := range []serve.OpenRequest{{}, {SSDFile: []string{file}}} {
		l, err := loaderOf(t, serverBackend(t),
			serve.LoaderRequest{Split: "train", Shuffle: true, World: 1,
				Options: map[string]string{"batch-size": "100", "fanout": "3,2", "seed": "5"}}, open)
		require.NoError(t, err)
		n := 0
		require.NoError(t, l.Epoch(t.Context(), 0, allOf(l), nowhere, func(b *serve.Batch) error {
			require.Equal(t, n, b.Index)
			n++
			require.Equal(t, []string{"x", "n_id", "y"}, []string{b.Tensors[0].Name,
				b.Tensors[1].Name, b.Tensors[2].Name})
			require.Equal(t, []int64{b.HopEnd[2], 16}, b.Tensors[0].Shape)
			require.Len(t, b.HopEdges, 2)
			last := b.Tensors[len(b.Tensors)-1]
			require.Equal(t, "edge_index", last.Name)
			require.Equal(t, []int64{2, b.HopEdges[0] + b.HopEdges[1]}, last.Shape)
			requireEdges(t, b)
			return nil
		}))
		require.Equal(t, l.Batches(), n)
		require.NoError(t, l.Close())
	}
}

// requireEdges holds the edge_index of a batch against its blocks.
func requireEdges(t *testing.T, b *serve.Batch) {
	t.Helper()
	arrays := map[string][]int64{}
	for _, x := range b.Tensors {
		raw := make([]int64, (x.Bytes+7)/8)
		x.Put(hostmem.Bytes(raw)[:x.Bytes])
		arrays[x.Name] = raw
	}
	var sources, targets []int64
	first := int64(0)
	for h := range b.HopEdges {
		indptr, src := arrays[fmt.Sprintf("indptr.%d", h)], arrays[fmt.Sprintf("src.%d", h)]
		for v := first; v < b.HopEnd[h]; v++ {
			list := src[indptr[v]:indptr[v+1]]
			sources = append(sources, list...)
			targets = append(targets, slices.Repeat([]int64{v}, len(list))...)
		}
		first = b.HopEnd[h]
	}
	require.Equal(t, slices.Concat(sources, targets), arrays["edge_index"])
}

// A client that does not know types is refused a typed graph. To others tensors come by type and
// relation, whose sizes the batch says; without blocks the lists of hops do not come.
func TestServeTyped(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--kind", "typed", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	b := serverBackend(t)
	dir, err := filepath.Abs("g")
	require.NoError(t, err)
	_, err = b.Open(t.Context(), serve.OpenRequest{Dataset: dir})
	require.ErrorContains(t, err, "which this client does not know")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	for _, noBlocks := range []bool{false, true} {
		l, err := loaderOf(t, serverBackend(t), serve.LoaderRequest{Split: "train", Shuffle: true,
			World: 1, NoBlocks: noBlocks,
			Options: map[string]string{"batch-size": "50", "fanout": "3,2"}}, serve.OpenRequest{Typed: true})
		require.NoError(t, err)
		require.Zero(t, l.(serve.Placer).Ahead(), "rows come by type")
		require.NoError(t, l.Epoch(t.Context(), 0, allOf(l), nowhere, func(b *serve.Batch) error {
			shapes := map[string][]int64{}
			for _, x := range b.Tensors {
				require.NotContains(t, shapes, x.Name)
				shapes[x.Name] = x.Shape
				x.Put(make([]byte, x.Bytes))
			}
			require.Len(t, b.TypeEnd, 4)
			require.Len(t, b.RelationEdges, 7)
			total := int64(0)
			for i, end := range b.TypeEnd {
				total += end[2]
				require.Equal(t, []int64{end[2], 16}, shapes[fmt.Sprintf("x.%d", i)])
				require.Equal(t, []int64{end[2]}, shapes[fmt.Sprintf("n_id.%d", i)])
			}
			require.Equal(t, b.HopEnd[2], total)
			for i, n := range b.RelationEdges {
				require.Equal(t, []int64{2, n[0] + n[1]}, shapes[fmt.Sprintf("edge_index.%d", i)])
			}
			require.Equal(t, noBlocks, shapes["src.1.6"] == nil)
			return nil
		}))
	}
}

// Rows that are made in a client's slots are those that come without a door. Rows that tiers take
// in from where they are are copied.
func TestServeRowsInPlace(t *testing.T) {
	loaded(t, 2)
	for _, q := range []struct {
		mode    string
		more    map[string]any
		inPlace bool
	}{{"inmem", nil, true}, {"helios", nil, true}, {"cpu", nil, true}, {"gids", nil, true},
		{"ginex", nil, false}, {"cpu", map[string]any{"check-reads": false}, true}} {
		options := map[string]any{"mode": q.mode, "fanout": "3,2", "batch-size": 300,
			"device": "host"}
		maps.Copy(options, q.more)
		text := map[string]string{}
		for k, v := range options {
			text[k] = fmt.Sprint(v)
		}
		b := serverBackend(t)
		l, err := loaderOf(t, b, serve.LoaderRequest{Split: "train", Shuffle: true, World: 1,
			Options: text}, serve.OpenRequest{})
		require.NoError(t, err)
		require.Equal(t, q.inPlace, l.(serve.Placer).Ahead() > 0, q.mode)
		var want []uint32
		require.NoError(t, l.Epoch(t.Context(), 1, allOf(l), nowhere, func(b *serve.Batch) error {
			sum := uint32(0)
			for _, x := range b.Tensors[:2] {
				raw := make([]byte, x.Bytes)
				x.Put(raw)
				sum = crc32.Update(sum, crc32.IEEETable, raw)
			}
			want = append(want, sum)
			return nil
		}))
		d := openDoor(t, serve.New(serve.Config{Backend: b, Memory: 1 << 30}))
		d.sums = true
		_, err = d.loader(map[string]any{"options": options})
		require.NoError(t, err)
		for range 2 { // the second time no ring is replaced
			got, err := d.epoch(1, 0)
			require.NoError(t, err)
			require.Equal(t, want, got.sums, q.mode)
		}
		d.close()
		require.NoError(t, l.Close())
	}
}

// Loaders that are opened side by side share SSDs and nothing that either writes to: the race
// detector looks on.
func TestServeOpensLoadersAtOnce(t *testing.T) {
	loaded(t, 2)
	openAtOnce(t)
}

// openAtOnce has four loaders of g read an epoch.
func openAtOnce(t *testing.T) {
	t.Helper()
	b := serverBackend(t)
	open := serve.OpenRequest{}
	open.Dataset, _ = filepath.Abs("g")
	var g errgroup.Group
	for range 4 {
		g.Go(func() error {
			d, err := b.Open(t.Context(), open)
			if err != nil {
				return err
			}
			l, err := d.Loader(t.Context(), serve.LoaderRequest{Split: "train", World: 1,
				Options: map[string]string{"batch-size": "1000", "fanout": "2"}})
			if err != nil {
				return errors.Join(err, d.Close())
			}
			n := 0
			err = l.Epoch(t.Context(), 0, allOf(l), nowhere, func(*serve.Batch) error {
				n++
				return nil
			})
			if n != l.Batches() {
				err = errors.Join(err, fmt.Errorf("%d batches of %d", n, l.Batches()))
			}
			return errors.Join(err, l.Close(), d.Close())
		})
	}
	require.NoError(t, g.Wait())
	require.Empty(t, b.sets, "SSDs stay open")
}

// allOf returns the batches of an epoch.
func allOf(l serve.Loader) (batches []int) {
	for i := range l.Batches() {
		batches = append(batches, i)
	}
	return batches
}

func serverBackend(t testing.TB) *serveBackend {
	t.Helper()
	e := &env{ui: ui.New(os.Stderr, os.Stderr), machine: thisMachine()}
	var b *serveBackend
	app := newApp(os.Stderr, os.Stderr)
	app.Metadata = map[string]any{envKey: e}
	for _, c := range app.Commands {
		if c.Name == "serve" {
			c.Action = action(0, func(_ context.Context, e *env) error {
				b = &serveBackend{env: e, sets: map[string]*sharedSSDs{},
					gpus: map[string]*sharedGPU{}}
				return nil
			})
		}
	}
	require.NoError(t, app.Run([]string{"heliosctl", "serve"}))
	t.Cleanup(func() { require.Empty(t, b.sets, "SSDs stay open") })
	return b
}

// Of two datasets at once, the one that the bound SSDs lack comes from its files, whichever is
// first.
func TestServeBesideADatasetOnSSDs(t *testing.T) {
	loaded(t, 1)
	ok(t, "generate", "--nodes", "500", "--dim", "16", "--seed", "9", "--out", "h")
	for _, order := range [][]string{{"g", "h"}, {"h", "g", "h"}} {
		b := serverBackend(t)
		for i, name := range order {
			l, err := loaderOf(t, b, serve.LoaderRequest{Split: "train", World: 1,
				Options: map[string]string{"fanout": "2"}}, serve.OpenRequest{Dataset: name})
			require.NoError(t, err, "%v: %d", order, i)
			require.NoError(t, l.Epoch(t.Context(), 0, allOf(l), nowhere,
				func(*serve.Batch) error { return nil }))
		}
	}
}

func TestServeRefuses(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	f, err := os.Create("plain")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	fails(t, hc(t, "serve", "--socket", "plain"), 4, "serve", "no socket is there")
	l, err := net.Listen("unix", "live")
	require.NoError(t, err)
	fails(t, hc(t, "serve", "--socket", "live"), 4, "serve", "a daemon listens there")
	require.NoError(t, l.Close())
	fails(t, hc(t, "serve", "--socket", "no/such/folder"), 2, "serve", "no/such/folder")
	fails(t, hc(t, "serve", "--memory", "x"), 2, "serve", "--memory")
	fails(t, hc(t, "serve", "--memory", "0"), 2, "serve", "--memory 0 is not a positive number")
}

const serveChildEnv = "HELIOS_SERVE_TEST"

// TestServeChild is a daemon in a process of its own.
func TestServeChild(t *testing.T) {
	if os.Getenv(serveChildEnv) == "" {
		t.Log("a child of TestServeProcess alone has work here")
		return
	}
	ctx, stop := interruptible()
	defer stop()
	args := []string{"serve"}
	path := os.Getenv(serveChildEnv)
	if rest, lingers := strings.CutPrefix(path, "linger "); lingers {
		path, args = rest, append(args, "--json", "--linger", "1s")
	}
	if path != "activated" {
		args = append(args, "--socket", path)
	} else {
		require.NoError(t, os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid())))
	}
	os.Exit(run(ctx, args, os.Stdout, os.Stderr))
}

// A client that finds the socket at its path can connect at once.
func TestSocketListensWhenItIsThere(t *testing.T) {
	for range 200 {
		a := &serveArgs{socket: filepath.Join(t.TempDir(), "s")}
		refused := make(chan error, 1)
		go func() {
			for {
				if _, err := os.Lstat(a.socket); err == nil {
					break
				}
			}
			c, err := net.Dial("unix", a.socket)
			if err == nil {
				err = c.Close()
			}
			refused <- err
		}()
		l, err := a.makeSocket()
		require.NoError(t, err)
		require.NoError(t, <-refused)
		require.NoError(t, l.Close())
		left, err := os.ReadDir(filepath.Dir(a.socket))
		require.NoError(t, err)
		require.Len(t, left, 1, "the socket alone")
	}
}

// A daemon takes its socket from systemd, takes the place of a dead one, and ends with Ctrl-C.
func TestServeProcess(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	for _, how := range []string{"activated", path} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestServeChild$")
		cmd.Env = append(os.Environ(), serveChildEnv+"="+how, "LISTEN_FDS=1",
			"HELIOS_STATE="+filepath.Join(dir, "state"))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // of a test that fails
		if how == "activated" {
			f, err := l.File()
			require.NoError(t, err)
			cmd.ExtraFiles = []*os.File{f}
			defer f.Close() //nolint:errcheck // closed already
		} else {
			require.NoError(t, l.Close())
			_, err := os.Stat(path)
			require.NoError(t, err, "a dead daemon's socket is there")
		}
		require.NoError(t, cmd.Start())
		for _, f := range cmd.ExtraFiles {
			require.NoError(t, f.Close())
		}
		var c net.Conn
		for range 2000 {
			if c, err = net.Dial("unix", path); err == nil {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		require.NoError(t, err)
		body := `{"type":"hello","protocol":3}`
		_, err = c.Write(append([]byte{byte(len(body)), 0, 0, 0}, body...))
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		got := make([]byte, 4096)
		n, err := c.Read(got)
		require.NoError(t, err)
		require.Contains(t, string(got[4:n]), `"welcome"`)
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		require.NoError(t, cmd.Wait(), "it ends with 0")
		require.NoError(t, c.Close())
	}
	_, err = os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist, "the daemon removes its socket")
}

// A daemon in the background has its place to itself, writes messages to a file, and ends behind
// its last client, however long the path of its socket is.
func TestServeLingers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	require.NoError(t, os.Mkdir(dir, 0o700))
	t.Setenv("HELIOS_STATE", filepath.Join(dir, "state"))
	path := filepath.Join(dir, "s")
	cmd := exec.Command(os.Args[0], "-test.run=^TestServeChild$")
	cmd.Env = append(os.Environ(), serveChildEnv+"=linger "+path)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // of a test that fails
	said, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	heard, err := io.ReadAll(said) // it closes what it was started with
	require.NoError(t, err)
	require.Contains(t, string(heard), `"listening"`)
	fails(t, hc(t, "serve", "--socket", path, "--linger", "1s"), 4, "serve",
		fmt.Sprintf("process %d holds s.log", cmd.Process.Pid))
	t.Chdir(dir)
	c, err := net.Dial("unix", "s")
	require.NoError(t, err)
	_, err = c.Write([]byte{255, 255, 255, 255}) // a frame that is none: the client is sent away
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, err = io.ReadAll(c)
	require.NoError(t, err)
	log, err := os.ReadFile("s.log")
	require.NoError(t, err)
	require.Regexp(t, fmt.Sprintf("^heliosctl .*, process %d\n", cmd.Process.Pid), string(log))
	require.NoError(t, c.Close())
	require.NoError(t, cmd.Wait(), "it ends with 0")
	left, err := filepath.Glob("s*")
	require.NoError(t, err)
	require.Empty(t, left)
}

// readByRanks returns what epochs of a world of ranks read from SSDs: as one job, or as jobs of one
// rank each that have an equal part of the caches' bytes. cache names the options that have those.
func readByRanks(t testing.TB, s *serve.Server, world int, apart bool, options map[string]any,
	cache ...string) (sum int64) {
	options = maps.Clone(options)
	if apart {
		for _, key := range cache {
			options[key] = options[key].(int) / world
		}
	}
	var doors []*door
	for rank := range world {
		d := openDoor(t, s)
		job := "together"
		if apart {
			job = strconv.Itoa(rank)
		}
		_, err := d.loader(map[string]any{"options": options, "rank": rank, "world": world,
			"job": job})
		require.NoError(t, err)
		doors = append(doors, d)
	}
	all := make([]int64, world)
	seen := make([][]int, world)
	var wg sync.WaitGroup
	for rank, d := range doors {
		wg.Go(func() {
			for epoch := range 3 {
				got, err := d.epoch(epoch, 0)
				if err != nil {
					t.Error(err)
				}
				all[rank], seen[rank] = got.read, append(seen[rank], got.batches...)
			}
		})
	}
	wg.Wait()
	batches := slices.Concat(seen...)
	slices.Sort(batches)
	require.Len(t, batches, 3*(batches[len(batches)-1]+1), "each batch once an epoch")
	for _, d := range doors {
		d.close()
	}
	if !apart {
		return slices.Max(all)
	}
	for _, n := range all {
		sum += n
	}
	return sum
}

// rankCaches are options under which ranks are compared, with their caches' bytes.
var rankCaches = map[string]map[string]any{
	"static":  {"mode": "helios", "hotness": "degree", "device": "host"},
	"dynamic": {"mode": "gids", "hotness": "degree", "device": "host"},
}

// Ranks of a job read about what one loader does; jobs of one rank each with as much memory
// together read more.
func TestServeMergesReads(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--nodes", "4000", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	s := serve.New(serve.Config{Backend: serverBackend(t), Memory: 1 << 30})
	for name, o := range rankCaches {
		t.Run(name, func(t *testing.T) {
			o := maps.Clone(o)
			o["fanout"], o["batch-size"], o["gpu-cache"], o["cpu-cache"] = "5,5", 100, 1<<17, 0
			o["coalesce"] = "off" // else what lies between small rows counts, too
			one := readByRanks(t, s, 1, false, o)
			four := readByRanks(t, s, 4, false, o)
			apart := readByRanks(t, s, 4, true, o, "gpu-cache")
			t.Logf("one loader %d bytes, a job of four %d, four jobs %d", one, four, apart)
			// A pass that ends early reads some anew.
			require.Less(t, float64(four), 1.25*float64(one))
			require.Greater(t, float64(apart), 1.25*float64(one))
		})
	}
}

// BenchmarkRanks measures what 1, 2 and 4 ranks read from SSDs, as one job and as jobs of their own
// with as much memory for caches together: 10 % of the rows.
func BenchmarkRanks(b *testing.B) {
	b.Chdir(b.TempDir())
	b.Setenv("HELIOS_STATE", "state")
	for _, args := range [][]string{{"generate", "--nodes", "50000", "--dim", "128", "--out", "g"},
		{"bind-ssds", "--proxy", "a.img", "--size", "128MiB"}, {"load", "g"}} {
		require.Zero(b, run(context.Background(), append(args, "--quiet"), io.Discard, os.Stderr))
	}
	s := serve.New(serve.Config{Backend: serverBackend(b), Memory: 1 << 30})
	for _, name := range slices.Sorted(maps.Keys(rankCaches)) {
		o := maps.Clone(rankCaches[name])
		o["fanout"], o["batch-size"], o["gpu-cache"], o["cpu-cache"] = "10,10", 256, 5000*512, 0
		for _, world := range []int{1, 2, 4} {
			b.Run(fmt.Sprintf("%s/%d", name, world), func(b *testing.B) {
				var job, apart int64
				for b.Loop() {
					job += readByRanks(b, s, world, false, o)
					apart += readByRanks(b, s, world, true, o, "gpu-cache")
				}
				b.ReportMetric(float64(job)/float64(b.N)/(1<<20), "MiB-job")
				b.ReportMetric(float64(apart)/float64(b.N)/(1<<20), "MiB-apart")
			})
		}
	}
}

// BenchmarkDoor measures epochs through the daemon's socket and ring beside those of the same
// loader in this process, in turns: the time, and the processor's, of both sides of the socket. In
// mode inmem the door is the largest share.
func BenchmarkDoor(b *testing.B) {
	b.Chdir(b.TempDir())
	b.Setenv("HELIOS_STATE", "state")
	for _, args := range [][]string{{"generate", "--nodes", "50000", "--dim", "128", "--out", "g"},
		{"bind-ssds", "--proxy", "a.img", "--size", "128MiB"}, {"load", "g"}} {
		require.Zero(b, run(context.Background(), append(args, "--quiet"), io.Discard, os.Stderr))
	}
	for _, mode := range []string{"inmem", "helios", "cpu"} {
		b.Run(mode, func(b *testing.B) {
			options := map[string]string{"mode": mode, "fanout": "10,10", "batch-size": "1024",
				"device": "host"}
			if mode != "inmem" {
				options["cpu-cache"] = "25%"
			}
			backend := serverBackend(b)
			l, err := loaderOf(b, backend, serve.LoaderRequest{Split: "train", Shuffle: true,
				World: 1, Options: options}, serve.OpenRequest{})
			require.NoError(b, err)
			d := openDoor(b, serve.New(serve.Config{Backend: backend, Memory: 1 << 30}))
			_, err = d.loader(map[string]any{"options": options})
			require.NoError(b, err)
			_, err = d.epoch(0, 0) // the ring grows, and its pages come
			require.NoError(b, err)
			var here, formed, through took
			batches := 0
			var form []byte
			for epoch := 0; b.Loop(); epoch++ {
				here.add(func() {
					require.NoError(b, l.Epoch(context.Background(), epoch, allOf(l), nowhere,
						func(*serve.Batch) error {
							batches++
							return nil
						}))
				})
				formed.add(func() {
					require.NoError(b, l.Epoch(context.Background(), epoch, allOf(l), nowhere,
						func(served *serve.Batch) error {
							form = putAllButRows(form, served)
							return nil
						}))
				})
				through.add(func() {
					_, err := d.epoch(epoch, 0)
					require.NoError(b, err)
				})
			}
			for name, t := range map[string]took{"here": here, "formed": formed,
				"door": through} {
				b.ReportMetric(t.wall.Seconds()*1e6/float64(batches), "us-"+name+"/batch")
				b.ReportMetric(t.cpu.Seconds()*1e6/float64(batches), "cpu-us-"+name+"/batch")
			}
			b.ReportMetric(through.wall.Seconds()/here.wall.Seconds(), "door/here")
			b.ReportMetric(through.cpu.Seconds()/here.cpu.Seconds(), "cpu-door/here")
			b.ReportMetric(through.wall.Seconds()/formed.wall.Seconds(), "door/formed")
			b.ReportMetric(through.cpu.Seconds()/formed.cpu.Seconds(), "cpu-door/formed")
		})
	}
}

// putAllButRows makes the other tensors of a batch in memory of this process, as they go to
// clients: the types and the edge_index of PyG, which training in this process has no use for.
func putAllButRows(to []byte, b *serve.Batch) []byte {
	offset := int64(0)
	for _, t := range b.Tensors[1:] {
		end := offset + (t.Bytes+63)&^63
		if int64(len(to)) < end {
			to = append(to, make([]byte, end-int64(len(to)))...)
		}
		t.Put(to[offset:][:t.Bytes])
		offset = end
	}
	return to
}

// nowhere has batches come without a place.
func nowhere(int) serve.Place { return nil }

// took is the time of something in all: on the clock, and of this process's processor time.
type took struct{ wall, cpu time.Duration }

func (t *took) add(f func()) {
	busy := func() time.Duration {
		var u syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // it can't fail
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	begin, was := time.Now(), busy()
	f()
	t.wall += time.Since(begin)
	t.cpu += busy() - was
}

// A client of another user gives settings and names nothing that the daemon would open, make or
// load; nor does the daemon tell it of files.
func TestServeLendsNoRights(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HELIOS_STATE", "state")
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	require.NoError(t, os.WriteFile("secret", []byte("s3cr3t\n"), 0o600))
	for up := dir; up != "/"; up = filepath.Dir(up) { // a temporary folder is its maker's alone
		if st, err := os.Stat(up); err == nil && st.Mode().Perm() == 0o700 ||
			up == dir {
			require.NoError(t, os.Chmod(up, 0o711))
		}
	}
	require.NoError(t, os.Chmod("g", 0o755))
	files, err := os.ReadDir("g")
	require.NoError(t, err)
	for _, f := range files {
		require.NoError(t, os.Chmod("g/"+f.Name(), 0o644))
	}
	foreign := serve.OpenRequest{Foreign: true}
	loader := func(options map[string]string) error {
		_, err := loaderOf(t, serverBackend(t), serve.LoaderRequest{Split: "train", World: 1,
			Foreign: true, Options: options}, foreign)
		return err
	}
	secret, before := filepath.Join(dir, "secret"), tree(t, "g")
	for _, o := range []struct{ key, value string }{{"hotness", secret}, {"hotness", "secret"},
		{"hotness", "/dev/zero"}, {"hotness", "presample:" + secret}, {"hotness", "degree," + secret},
		{"hotness-dir", dir + "/made"}, {"packed", dir + "/made"}, {"parted", dir + "/made"},
		{"superbatch-dir", dir}, {"partition", secret}} {
		err := loader(map[string]string{o.key: o.value})
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%s: %v", o.key, err)
		require.ErrorContains(t, err, "option "+o.key)
		require.NotContains(t, err.Error(), "s3cr3t")
	}
	for _, o := range []map[string]string{{"mode": "diskgnn"}, {"mode": "ginex"}, {"policy": "belady"}} {
		require.Equal(t, errs.Refused, errs.ClassOf(loader(o)), o)
	}
	for key, value := range map[string]string{"mode": secret, "sampler": secret, "io-stack": secret,
		"topology": secret, "row-dtype": secret, "device": secret, "pages-on": secret} {
		err := loader(map[string]string{key: value})
		require.Error(t, err, key)
		require.NotContains(t, err.Error(), "s3cr3t")
	}
	require.NoError(t, loader(map[string]string{"batch-size": "100", "hotness": "degree", "mode": "cpu"}))
	require.Equal(t, before, tree(t, "g"), "a foreign client had something written")
	require.NoDirExists(t, "made")

	b := serverBackend(t)
	abs := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.Symlink("g", "link"))
	require.NoError(t, os.Mkdir("mine", 0o700))
	for _, q := range []serve.OpenRequest{{Dataset: abs("g"), SSDFile: []string{abs("a.img")}},
		{Dataset: abs("secret")}, {Dataset: abs("none")}, {Dataset: "/proc/self"}, {Dataset: abs("mine")}} {
		q.Foreign = true
		_, err := b.Open(t.Context(), q)
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v: %v", q, err)
	}
	d, err := b.Open(t.Context(), serve.OpenRequest{Dataset: abs("link"), Foreign: true})
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, os.Chmod("g/"+files[0].Name(), 0o600))
	_, err = b.Open(t.Context(), serve.OpenRequest{Dataset: abs("g"), Foreign: true})
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.NoError(t, os.Chmod("g/"+files[0].Name(), 0o644))
	for path, mode := range map[string]os.FileMode{"g": 0o775, dir: 0o733,
		"g/" + files[0].Name(): 0o664} {
		st, err := os.Stat(path)
		require.NoError(t, err)
		require.NoError(t, os.Chmod(path, mode)) // a member could put a link there
		_, err = b.Open(t.Context(), serve.OpenRequest{Dataset: abs("g"), Foreign: true})
		require.Equal(t, errs.Refused, errs.ClassOf(err), path)
		require.NoError(t, os.Chmod(path, st.Mode()))
	}
	require.NoError(t, os.Mkdir("g/hotness", 0o700)) // of runs
	require.NoError(t, os.MkdirAll("g/nodes/000", 0o755))
	require.NoError(t, os.WriteFile("g/nodes/000/features.npy", nil, 0o644))
	d, err = b.Open(t.Context(), serve.OpenRequest{Dataset: abs("g"), Foreign: true})
	require.NoError(t, err)
	require.NoError(t, d.Close())
	for _, path := range []string{"g/nodes/000/features.npy", "g/nodes/000", "g/nodes"} {
		require.NoError(t, os.Chmod(path, 0o700))
		_, err = b.Open(t.Context(), serve.OpenRequest{Dataset: abs("g"), Foreign: true})
		require.Equal(t, errs.Refused, errs.ClassOf(err), path)
		require.NoError(t, os.Chmod(path, 0o755))
	}
	require.NoError(t, os.Chmod(dir, 0o700))
	_, err = b.Open(t.Context(), serve.OpenRequest{Dataset: abs("g"), Foreign: true})
	require.Equal(t, errs.Refused, errs.ClassOf(err))
}
