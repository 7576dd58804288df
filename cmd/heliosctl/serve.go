package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/graph"
	hcli "helios/internal/cli"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/options"
	"helios/internal/rowtype"
	"helios/internal/serve"
	"helios/internal/simd"
	"helios/internal/state"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// serveArgs holds the options of serve.
type serveArgs struct {
	socket     string `option:"socket" shown:"heliosctl.sock in $XDG_RUNTIME_DIR, else heliosctl-HOST.sock in the state folder" arg:"PATH" usage:"PATH of the Unix socket to make"`
	group      bool   `option:"group" usage:"let members of this process's group in, beside this user and root"`
	maxClients int    `option:"max-clients" positive:"yes" shown:"128" usage:"clients at once"`
	memory     int64  `option:"memory" positive:"yes" size:"" shown:"a quarter of what is free" arg:"SIZE" usage:"most memory that mini-batches in shared memory may take, SIZE"`
	// A client starts it so, and others find it.
	linger  time.Duration `option:"linger" positive:"yes" range:"1ms.." shown:"until Ctrl-C" arg:"TIME" usage:"run in the background: messages go to the file PATH.log, and the end comes TIME after the last client has left"`
	metrics string        `option:"metrics" use:"aside" shown:"none" arg:"ADDR" usage:"serve metrics for Prometheus on ADDR while it runs, such as :9100; without a host on this machine only"`
}

func serveCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "serve",
		Usage: "hand mini-batches to PyTorch and other programs through shared memory",
		Description: "The Python package helios is a client; docs/reference/protocol.md is for writers of others.\n" +
			"Ends with Ctrl-C. Takes its socket from systemd where LISTEN_FDS says that there is one.",
	}, 0, hcli.Of[serveArgs](), runServe)
}

func runServe(ctx context.Context, e *env, a *serveArgs) (err error) {
	if a.memory == 0 {
		free, err := hostmem.AvailableBytes()
		if err != nil {
			return err
		}
		a.memory = max(free/4, 64<<20)
	}
	b := &serveBackend{env: e, sets: map[string]*sharedSSDs{},
		gpus: map[string]*sharedGPU{}}
	s := serve.New(serve.Config{Backend: b, Version: programVersion(), MaxClients: a.maxClients,
		Memory: a.memory, Group: a.group, Linger: a.linger, Environment: e.daemonEnvironment(),
		Note: func(text string) { b.note(errs.Text(text)) }})
	if a.metrics != "" {
		m, err := serveMetrics("metrics", a.metrics, nil)
		if err != nil {
			return err
		}
		defer closing(&err, m.close)
		m.about(map[string]string{"verb": "serve"})
		m.daemon(s)
		e.say("metrics at http://%s/metrics", m.addr)
	}
	l, path, log, err := a.listen(e)
	if err != nil {
		return err
	}
	defer closing(&err, func() error {
		all := []error{l.Close()}
		if path == a.socket { // made here; systemd's stays
			all = append(all, os.Remove(path))
		}
		if log != nil {
			all = append(all, os.Remove(path+".log"))
		}
		return errors.Join(slices.DeleteFunc(all, func(err error) bool {
			return errors.Is(err, fs.ErrNotExist) // the folder may have gone before us
		})...)
	})
	e.say("listening on %s", path)
	if err := e.ui.Event("listening", listeningLine{path, os.Getpid()}); err != nil {
		return err
	}
	if log != nil { // who started it heard all until now, and may be gone from now on
		if err := errors.Join(unix.Dup3(int(log.Fd()), 1, 0), unix.Dup3(int(log.Fd()), 2, 0),
			log.Close()); err != nil {
			return err
		}
		if e.ui.LogJSON {
			e.ui.Note(daemonFormat, programVersion(), os.Getpid())
		}
	}
	return s.Serve(ctx, l)
}

// say writes a line of a daemon, which has no other output, into its log where that is a format.
func (e *env) say(format string, args ...any) {
	if e.ui.LogJSON {
		e.ui.Note(format, args...)
		return
	}
	e.ui.Printf(format, args...)
}

// daemonVars are the variables that say what a daemon opens, beside the state folder.
var daemonVars = []string{state.EnvRun, "HELIOS_LIBCUDA", visibleVar, "CUDA_DEVICE_ORDER"}

// daemonEnvironment returns variables and the program, which a client compares with its own: a
// daemon that one shell has started does not work for another one in that one's way.
func (e *env) daemonEnvironment() map[string]string {
	all := map[string]string{state.EnvDir: e.store.Dir(), "program": ""}
	for _, name := range daemonVars {
		if value, ok := os.LookupEnv(name); ok { // an empty CUDA_VISIBLE_DEVICES hides all GPUs
			all[name] = value
		}
	}
	var st unix.Stat_t // of the file that runs, though another one may have its place by now
	if unix.Stat("/proc/self/exe", &st) == nil {
		all["program"] = fmt.Sprintf("%d-%d-%d", st.Ino, st.Size, st.Mtim.Nano())
	}
	return all
}

// daemonFormat is the first line of the log, which clients read.
const daemonFormat = "heliosctl %s, process %d"

// openLog opens the file that a daemon in the background writes to, and locks it: nobody else has
// the socket then.
func (a *serveArgs) openLog(e *env) (*os.File, error) {
	dir, name := filepath.Split(a.socket + ".log")
	f, err := durable.Lock(dir, name)
	var held *durable.HeldError
	var st unix.Stat_t
	if err == nil && unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink == 0 {
		held = &durable.HeldError{Holder: "a process that ends"} // it has removed the file
		err = errors.Join(held, f.Close())
	}
	if errors.As(err, &held) {
		return nil, errs.New(errs.Refused,
			"{socket} %s: a daemon listens there, or is about to: %s holds %s", a.socket,
			held.Holder, name)
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "{socket} %s: %w; name another", a.socket, err)
	}
	if err := errors.Join(f.Chmod(0o600), f.Truncate(0)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if e.ui.LogJSON { // a note, later
		return f, nil
	}
	_, err = fmt.Fprintf(f, daemonFormat+"\n", programVersion(), os.Getpid())
	return f, err
}

// listeningLine has the address of the daemon.
type listeningLine struct {
	Socket string `json:"socket"`
	PID    int    `json:"pid"`
}

// listen makes the socket, or takes it over from systemd, and returns its path too, and the log of
// a daemon in the background.
func (a *serveArgs) listen(e *env) (l *net.UnixListener, path string, log *os.File, err error) {
	l, err = activated(e.given(&a.socket) != "")
	if err != nil {
		return nil, "", nil, err
	}
	if l != nil {
		return l, l.Addr().String(), nil, nil
	}
	if a.socket == "" {
		if a.socket, err = userSocket(e.store.Dir()); err != nil {
			return nil, "", nil, err
		}
	}
	if a.linger > 0 {
		if log, err = a.openLog(e); err != nil {
			return nil, "", nil, err
		}
	}
	l, err = a.makeSocket()
	return l, a.socket, log, err
}

// userSocket returns the path at which this user's clients look for a daemon. $XDG_RUNTIME_DIR is
// this machine's; several machines may share a home folder.
func userSocket(stateDir string) (string, error) {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	var st unix.Stat_t
	if filepath.IsAbs(dir) && unix.Stat(dir, &st) == nil && int(st.Uid) == os.Geteuid() {
		return filepath.Join(dir, "heliosctl.sock"), nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", err
	}
	return filepath.Join(stateDir, "heliosctl-"+host+".sock"), os.MkdirAll(stateDir, 0o700)
}

// makeSocket listens at the path of --socket. A socket is at its path before it listens, and
// refuses a client that comes in between, so it listens under another name first.
func (a *serveArgs) makeSocket() (*net.UnixListener, error) {
	if err := clearSocket(a.socket); err != nil {
		return nil, err
	}
	mode := 0o177
	if a.group {
		mode = 0o117
	}
	name := "." + strconv.Itoa(os.Getpid())
	first := filepath.Join(filepath.Dir(a.socket), name)
	dir, err := os.Open(filepath.Dir(a.socket))
	if err != nil {
		return nil, errs.New(errs.Usage, "{socket} %s: %w", a.socket, err)
	}
	defer dir.Close()       //nolint:errcheck // a folder
	old := unix.Umask(mode) // from its beginning: nobody else gets in
	// an address has 107 bytes, fewer than a path may need
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix",
		Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)})
	unix.Umask(old)
	if err != nil {
		return nil, errs.New(errs.Usage, "{socket} %s: %w", a.socket, err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(unix.Link(first, a.socket), os.Remove(first)); err != nil {
		return nil, errors.Join(errs.New(errs.Usage, "{socket} %s: %w", a.socket, err),
			l.Close())
	}
	return l, nil
}

// clearSocket removes the socket of a daemon that died, and refuses everything else that is there.
func clearSocket(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.New(errs.Usage, "{socket} %s: %w", path, err)
	}
	if st.Mode().Type() != fs.ModeSocket {
		return errs.New(errs.Refused, "{socket} %s: a file that is no socket is there; name another",
			path)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return errs.New(errs.Usage, "{socket} %s: %w", path, err)
	}
	defer dir.Close() //nolint:errcheck // a folder
	c, err := net.DialTimeout("unix",
		fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), 5*time.Second)
	if err == nil {
		return errors.Join(errs.New(errs.Refused,
			"{socket} %s: a daemon listens there; end it, or name another", path), c.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return errs.New(errs.Refused, "{socket} %s: %w; name another", path, err)
	}
	return os.Remove(path)
}

// activated returns the socket that systemd listens on for us; nil where there is none
// (sd_listen_fds(3)).
func activated(named bool) (*net.UnixListener, error) {
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil || n != 1 || named {
		return nil, errs.New(errs.Usage,
			"LISTEN_FDS is %q; a socket unit has one ListenStream, and then there is no {socket}",
			os.Getenv("LISTEN_FDS"))
	}
	const firstFD = 3
	f := os.NewFile(firstFD, "socket of systemd")
	defer f.Close() //nolint:errcheck // FileListener has a copy
	unix.CloseOnExec(firstFD)
	l, err := net.FileListener(f)
	if err != nil {
		return nil, errs.New(errs.Usage, "the socket of LISTEN_FDS: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errs.New(errs.Usage,
			"the socket of LISTEN_FDS is no Unix stream socket; write ListenStream=/a/path"),
			l.Close())
	}
	u.SetUnlinkOnClose(false) // it is systemd's
	return u, nil
}

// serveBackend opens datasets and SSDs for clients. SSDs are opened once, whoever uses them.
type serveBackend struct {
	*env
	said sync.Mutex // notes come one at a time

	mu   sync.Mutex
	sets map[string]*sharedSSDs
	gpus map[string]*sharedGPU
}

// sharedGPU is that of all loaders whose options name it: the memory of a set of SSDs is registered
// with a GPU once.
type sharedGPU struct {
	dev   cuda.Device
	users int
}

// device opens the device of a loader, or counts one more user of its GPU. A loader on the host has
// its own. The second value releases it.
func (b *serveBackend) device(e *env, a *runArgs) (cuda.Device, func() error, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := fmt.Sprint(cmp.Or(a.device, "auto"), a.auto)
	g := b.gpus[key]
	if g == nil {
		dev, err := a.deviceArgs.open(e, a.cfg.Workers, "")
		if err != nil {
			return nil, nil, err
		}
		if !ringsDoorbells(dev) {
			return dev, dev.Close, nil
		}
		g = &sharedGPU{dev: dev}
		b.gpus[key] = g
	}
	g.users++
	return g.dev, func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if g.users--; g.users > 0 {
			return nil
		}
		delete(b.gpus, key)
		return g.dev.Close()
	}, nil
}

// note says something on standard error.
func (b *serveBackend) note(text errs.Text) {
	b.said.Lock()
	defer b.said.Unlock()
	b.env.note(text)
}

// sharedSSDs are those of all loaders that name the same ones.
type sharedSSDs struct {
	ssds  []*gpuio.SSD
	polls bool // their controllers look at their doorbells, as those of a GPU need
	users int
	end   func() error
}

// own returns the SSDs for one loader, which finds its dataset on them and writes down where.
func (s *sharedSSDs) own() []*gpuio.SSD {
	own := make([]*gpuio.SSD, len(s.ssds))
	for i, ssd := range s.ssds {
		one := *ssd
		own[i] = &one
	}
	return own
}

// Open opens a dataset.
func (b *serveBackend) Open(_ context.Context, q serve.OpenRequest) (serve.Dataset, error) {
	if len(q.SSD) > 0 && len(q.SSDFile) > 0 {
		return nil, errs.New(errs.Usage, "ssd and ssd_file together; give one")
	}
	if !filepath.IsAbs(q.Dataset) {
		return nil, errs.New(errs.Usage,
			"dataset %q is no absolute path, which it has to be for a daemon", q.Dataset)
	}
	if q.Foreign {
		if len(q.SSDFile) > 0 {
			return nil, errs.New(errs.Refused,
				"ssd_file: a client of another user names no files; name bound SSDs with ssd")
		}
		var err error
		if q.Dataset, err = lentToGroup(q.Dataset); err != nil {
			return nil, err
		}
	}
	d, err := dataset.Open(q.Dataset)
	if err != nil {
		return nil, err
	}
	if !q.Typed && !d.Meta.Homogeneous() {
		return nil, errors.Join(errs.New(errs.Usage,
			"dataset %s is a typed graph, which this client does not know; install the package helios of this heliosctl",
			d.Meta.Name), d.Close())
	}
	return &servedDataset{b: b, d: d, q: q}, nil
}

// lentToGroup refuses a folder that the group of this process, or everybody, could not read without
// us, and one that others than our user and root could change: a link put there after this check
// would have us read a file of ours to them. The answer is the same for a folder that is not there.
// It returns the folder's path without links.
func lentToGroup(dir string) (string, error) {
	no := errs.New(errs.Refused,
		"%s is no dataset that this daemon's group may read, and that only the daemon's user may change; give it the rights (chmod -R g+rX,go-w), or start a daemon of your own",
		dir)
	may := func(path string, others uint32) bool {
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil || st.Uid != 0 && int(st.Uid) != os.Geteuid() {
			return false
		}
		way := others == 0o001 // where the sticky bit keeps what is ours
		if st.Mode&0o022 != 0 && !(way && st.Mode&unix.S_ISVTX != 0) {
			return false
		}
		return st.Mode&others == others ||
			int(st.Gid) == os.Getegid() && st.Mode&(others<<3) == others<<3
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil || !may(real, 0o005) {
		return "", no
	}
	for path := real; path != "/"; {
		if path = filepath.Dir(path); !may(path, 0o001) {
			return "", no
		}
	}
	if err := filepath.WalkDir(real, func(path string, f fs.DirEntry, err error) error {
		lent := err == nil
		switch {
		case !lent || path == real:
		case f.IsDir() && !dataset.IsPart(path[len(real)+1:]):
			return fs.SkipDir // of what runs keep
		case f.IsDir():
			lent = may(path, 0o005)
		default:
			lent = f.Type().IsRegular() && may(path, 0o004)
		}
		if !lent {
			return no
		}
		return nil
	}); err != nil {
		return "", no
	}
	return real, nil
}

// ssds opens the SSDs that a client named, or counts one more user of them.
func (b *serveBackend) ssds(ctx context.Context, d *servedDataset, a *runArgs,
	polls bool) (*sharedSSDs, string, error) {
	q := &d.q
	key := strings.Join(slices.Concat([]string{"ssd"}, q.SSD, []string{"", "file"}, q.SSDFile), "\x00")
	st, err := b.env.store.Load()
	if err != nil {
		return nil, "", err
	}
	files, absent := fmt.Sprintf("%p", d), false // its own
	named := len(q.SSD)+len(q.SSDFile) > 0
	if !named && len(st.SSDs) == 0 {
		key = files
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.sets[key]; s != nil && !named && key != files {
		if absent, err = stripe.Absent(ctx, d.d, s.own()); err != nil {
			return nil, "", err
		}
	}
	if absent || !named && b.sets[files] != nil {
		key = files
	}
	if s := b.sets[key]; s != nil {
		if polls && !s.polls {
			return nil, "", errs.New(errs.Capability,
				"the SSDs serve a loader on the host device, which a GPU can't share; close that one, or give {device} host")
		}
		s.users++
		return s, key, nil
	}
	e := *b.env // a verb writes down there what it opened, and loaders are opened side by side
	o := &ssdOpener{env: &e, ssdArgs: a.ssdArgs, stackFlag: "mode", stacks: []string{a.cfg.Mode},
		pollDoorbells: polls, data: d.d}
	if a.cfg.IOStack != "" {
		o.stackFlag, o.stacks = "io-stack", []string{a.cfg.IOStack}
	}
	o.names = q.SSD
	var set *ssdSet
	switch {
	case len(q.SSDFile) > 0:
		set, err = o.opened(o.opener().OpenFiles(ctx, q.SSDFile))
	case absent:
		set, err = o.openData(ctx, "the bound SSDs do not hold it")
	default:
		set, err = o.open(ctx)
	}
	if err != nil {
		return nil, "", err
	}
	if !named && len(set.Bound) == 0 {
		key = files
	}
	s := &sharedSSDs{ssds: set.SSDs, polls: polls, users: 1, end: set.Close}
	b.sets[key] = s
	return s, key, nil
}

// letGo counts one user of SSDs less.
func (b *serveBackend) letGo(key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.sets[key]
	if s.users--; s.users > 0 {
		return nil
	}
	delete(b.sets, key)
	return s.end()
}

// servedDataset is a dataset of a client.
type servedDataset struct {
	b  *serveBackend
	d  *dataset.Dataset
	q  serve.OpenRequest
	mu sync.Mutex // one loader is opened at a time
}

// Close closes the dataset.
func (d *servedDataset) Close() error { return d.d.Close() }

// Info describes it.
func (d *servedDataset) Info() serve.DatasetInfo {
	m := d.d.Meta
	info := serve.DatasetInfo{Name: m.Name, UUID: m.UUID, Nodes: m.Nodes, Edges: m.Edges,
		Dim: m.Dim, Classes: m.Classes, RowDType: m.RowType().String(),
		Splits: map[string]int64{"train": m.Train, "val": m.Val, "test": m.Test}}
	g := m.Graph()
	task := g.Tasks[0].Dir
	info.LabelDims = g.Tasks[0].Dims()
	info.Arrays = map[string]string{"labels": path.Join(task, dataset.LabelsName)}
	for _, name := range dataset.Splits {
		info.Arrays[name] = path.Join(task, name+".npy")
	}
	if m.Homogeneous() {
		edges := g.Relations[0].Dir
		info.Arrays["features"] = path.Join(g.NodeTypes[0].Dir, dataset.FeaturesName)
		info.Arrays["indptr"] = path.Join(edges, dataset.IndptrName)
		info.Arrays["indices"] = path.Join(edges, dataset.IndicesName)
		return info
	}
	describeTypes(&info, &g, m.FeatureFn == "")
	return info
}

// loaderOptions are those of train that a loader heeds.
func loaderOptions() hcli.Options[runArgs] {
	return hcli.Of[runArgs]().WithoutGroups("Replicas", "Run").WithoutFrom("Model", "fanout",
		"relation-fanout", "batch-size", "epochs", "seed", "sampler", "batch-dependency",
		"sample-epochs", "refresh", "refresh-every", "no-edges").Without("precision", "blas", "dataset", "timeline", "results",
		"overwrite", "ssds", "fault")
}

// read sets what a client's options say. One of another user may give settings, but name nothing
// that this process would open, make or load.
func (a *runArgs) read(options map[string]string, foreign bool) (map[string]bool, error) {
	known := loaderOptions()
	given := map[string]bool{}
	for _, key := range slices.Sorted(maps.Keys(options)) {
		i := slices.IndexFunc(known, func(o hcli.Option[runArgs]) bool { return o.Key() == key })
		if i < 0 {
			if hcli.HasFlag(trainOptions().Flags(), key) {
				return nil, errs.New(errs.Usage,
					"%v belongs to training, which is the client's; leave it out", errs.Key(key))
			}
			return nil, unknownKeyword(key, flagNames(known.Flags()))
		}
		if foreign && known[i].UseOf(options[key]) != hcli.Setting {
			return nil, errs.New(errs.Refused,
				"%v: a client of another user names no file, folder or library; leave it out, or start a daemon of your own",
				errs.Key(key))
		}
		value, err := plainValue(known[i].Flag, key, options[key])
		if err != nil {
			return nil, err
		}
		if err := known.Set(a, key, value); err != nil {
			return nil, err
		}
		given[key] = true
	}
	return given, a.cfg.Check()
}

// unknownKeyword refuses an option that no loader has.
func unknownKeyword(key string, known []string) error {
	if near := options.Nearest(key, known); near != "" {
		return errs.New(errs.Usage, "unknown %v; did you mean %v?", errs.Key(key), errs.Key(near))
	}
	return errs.New(errs.Usage, "unknown %v; options are flags of \"heliosctl train\"", errs.Key(key))
}

// Loader opens a loader, with a device of its own.
func (d *servedDataset) Loader(ctx context.Context, q serve.LoaderRequest) (_ serve.Loader,
	err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := &runArgs{}
	given, err := a.read(q.Options, q.Foreign)
	if err != nil {
		return nil, err
	}
	if q.Foreign {
		if err := a.writeNothing(); err != nil {
			return nil, err
		}
	}
	e := *d.b.env
	e.given = func(fields ...any) string {
		if slices.Contains(fields, any(&a.kernels)) && given["kernels"] {
			return "kernels"
		}
		return ""
	}
	if err := a.countAs(q.Visible, d.b.note); err != nil {
		return nil, err
	}
	l := &servedLoader{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	in := prepare.Inputs{Dataset: d.d}
	if a.noEdges {
		in.Dataset = d.d.WithoutEdges()
		l.closers = append(l.closers, in.Dataset.Close)
	}
	if err := d.openInputs(ctx, l, &in, &session{env: &e, runArgs: a}); err != nil {
		return nil, err
	}
	l.l, err = sched.OpenLoader(ctx, a.cfg, in, sched.LoaderOptions{Nodes: q.Nodes, Type: q.Type,
		Split: q.Split, Shuffle: q.Shuffle, Anew: q.Anew, AllLabels: q.AllLabels,
		Positions: q.Positions, Any: q.World > 1}, report.Observer{Note: d.b.note})
	if err != nil {
		return nil, err
	}
	l.closers = append(l.closers, l.l.Close)
	l.dim, l.blocks = int64(in.Dataset.Meta.Dim), !q.NoBlocks
	l.labelDims = in.Dataset.Meta.Graph().Tasks[0].Dims()
	l.schema = prepare.SchemaOf(&in.Dataset.Meta)
	if l.t, err = rowtype.Parse(l.l.RowType()); err != nil || q.Device == "" || q.Device == "cpu" {
		return l, err
	}
	l.gpu, err = openGPURings(in.Dev, l.l.Stream())
	if err != nil && q.Device == "auto" {
		return l, nil
	}
	if err == nil && l.rowsGoAsTheyAre() && l.equallyWide() {
		l.l.LeaveRows()
	}
	return l, err
}

// writeNothing keeps a client of another user from files in the dataset's folder.
func (a *runArgs) writeNothing() error {
	a.cfg.HotnessDir = plan.NoFolder
	c := a.cfg.WithDefaults()
	if c.Traits().Writes {
		return errs.New(errs.Refused,
			"mode %s with policy %s keeps mini-batches in the dataset's folder, which a client of another user may not; choose another mode or policy",
			c.Mode, c.Policy)
	}
	return nil
}

// openInputs opens a loader's device and SSDs, in the order that a session has.
func (d *servedDataset) openInputs(ctx context.Context, l *servedLoader, in *prepare.Inputs,
	s *session) error {
	ssds := func(polls bool) error {
		set, key, err := d.b.ssds(ctx, d, s.runArgs, polls)
		if err != nil {
			return err
		}
		in.SSDs = set.own()
		l.closers = append(l.closers, func() error { return d.b.letGo(key) })
		return nil
	}
	first, err := s.ssdsFirst()
	if err != nil {
		return err
	}
	if first {
		if err := ssds(true); err != nil {
			return err
		}
	}
	var closeDevice func() error
	if in.Dev, closeDevice, err = d.b.device(s.env, s.runArgs); err != nil {
		return err
	}
	if first { // their end comes before the device's
		l.closers = slices.Insert(l.closers, len(l.closers)-1, closeDevice)
		return nil
	}
	l.closers = append(l.closers, closeDevice)
	return ssds(ringsDoorbells(in.Dev))
}

// servedLoader is a loader of a client.
type servedLoader struct {
	l      *sched.Loader
	dim    int64
	blocks bool
	schema *graph.Schema // nil: one type, one relation
	places []int64       // of typed mini-batches
	// labelDims is the number of dimensions of y.
	labelDims int
	t         rowtype.Type
	gpu       *gpuRings // nil: batches go to the CPU
	closers   []func() error
}

// Close ends the loader and what was opened for it.
func (l *servedLoader) Close() error {
	err := prepare.CloseAll(l.closers)
	l.closers = nil
	return err
}

// BytesRead returns how much came from SSDs.
func (l *servedLoader) BytesRead() int64 { return l.l.BytesRead() }

// Batches returns how many mini-batches an epoch has.
func (l *servedLoader) Batches() int { return l.l.Batches() }

// Seed sets the nodes of later epochs.
func (l *servedLoader) Seed(nodes []int64) error { return l.l.Seed(nodes) }

// Epoch hands mini-batches of an epoch to emit.
func (l *servedLoader) Epoch(ctx context.Context, epoch int, batches []int,
	claim func(index int) serve.Place, emit func(*serve.Batch) error) error {
	place := func(index int) *sched.Place {
		p, _ := claim(index).(*sched.Place)
		return p
	}
	return l.l.EpochInto(ctx, epoch, batches, place, func(b *sched.Loaded) error {
		served := &serve.Batch{Epoch: b.Epoch, Index: b.Index, Seeds: b.Seeds, HopEnd: b.HopEnd}
		if l.schema != nil {
			l.fillTyped(served, b)
		} else {
			served.HopEdges, served.Tensors = hopEdges(b), l.tensors(b)
		}
		if b.At != nil {
			served.At = b.At
		}
		return emit(served)
	})
}

// Ahead implements serve.Placer: rows that go to clients as they are can be made in their slots.
func (l *servedLoader) Ahead() int {
	if l.gpu != nil || l.schema != nil || !l.rowsGoAsTheyAre() {
		return 0
	}
	return l.l.Ahead()
}

// Place implements serve.Placer.
func (l *servedLoader) Place(fd int, at, bytes int64) (serve.Place, error) {
	return l.l.NewPlace(fd, at, bytes)
}

// firstOf is the first node of those that the hop before h added; hop 0 has the seeds'.
func firstOf(b *sched.Loaded, h int) int64 {
	if h == 0 {
		return 0
	}
	return b.HopEnd[h-1]
}

// hopEdges counts the edges of edge_index by hop: of each block those of nodes that the hop before
// added.
func hopEdges(b *sched.Loaded) []int64 {
	out := make([]int64, len(b.Blocks))
	for h := range b.Blocks {
		k := &b.Blocks[h]
		out[h] = k.Indptr[k.NumDst] - k.Indptr[firstOf(b, h)]
	}
	return out
}

// tensors are those of docs/reference/protocol.md.
func (l *servedLoader) tensors(b *sched.Loaded) []serve.Tensor {
	rows := int64(len(b.Nodes))
	all := []serve.Tensor{l.rows(b, rows), serve.Of("n_id", "int64", b.Nodes), l.targets(b)}
	edges := int64(0) // that edge_index has
	for _, n := range hopEdges(b) {
		edges += n
	}
	for h := range b.Blocks {
		if !l.blocks {
			break
		}
		k := &b.Blocks[h]
		n := strconv.Itoa(h)
		all = append(all, serve.Of("indptr."+n, "int64", k.Indptr), serve.Tensor{Name: "src." + n,
			DType: "int64", Shape: []int64{int64(len(k.Src))}, Bytes: int64(len(k.Src)) * 8,
			Put: func(to []byte) { simd.Auto.FromUint32(hostmem.View[int64](to), k.Src) }})
		if k.Weights != nil {
			all = append(all, serve.Of("weights."+n, "float32", k.Weights))
		}
	}
	if b.Degrees != nil {
		all = append(all, serve.Of("degrees", "uint32", b.Degrees))
	}
	if b.Positions != nil {
		all = append(all, serve.Of("input_id", "int64", b.Positions))
	}
	return append(all, serve.Tensor{Name: "edge_index", DType: "int64", Shape: []int64{2, edges},
		Bytes: 2 * edges * 8, Put: func(to []byte) {
			pairs, edge := hostmem.View[int64](to), int64(0)
			for h := range b.Blocks {
				k := &b.Blocks[h]
				first := firstOf(b, h)
				lists := k.Indptr[first : k.NumDst+1]
				drawn := k.Src[lists[0]:lists[len(lists)-1]]
				n := int64(len(drawn))
				simd.Auto.FromUint32(pairs[edge:][:n], drawn)
				simd.Auto.Repeat(pairs[edges+edge:][:n], lists, first)
				edge += n
			}
		}})
}

// targets are those of the seeds, or of all nodes.
func (l *servedLoader) targets(b *sched.Loaded) serve.Tensor {
	n, columns := int64(len(b.Labels)), int64(1)
	y := serve.Tensor{Name: "y", DType: "int64", Bytes: n * 8,
		Put: func(to []byte) {
			y := hostmem.View[int64](to)
			for i, v := range b.Labels {
				y[i] = int64(v)
			}
		}}
	if b.Targets != nil {
		y, columns = serve.Of("y", "float32", b.Targets), int64(b.Columns)
		n = int64(len(b.Targets)) / columns
	}
	y.Shape = []int64{n, columns}[:l.labelDims]
	return y
}

// rows are the features: numbers as the SSDs have them, without the padding of a row; float32 where
// a row is stored with a scale.
func (l *servedLoader) rows(b *sched.Loaded, n int64) serve.Tensor {
	from, t, stored := b.Rows, l.t, int64(l.t.RowBytes(int(l.dim)))
	x := serve.Tensor{Name: "x", DType: t.String(), Shape: []int64{n, l.dim}, Bytes: 4 * n * l.dim}
	switch t {
	case rowtype.Int8:
		x.DType = rowtype.Float32.String()
		scales := l.l.Scales()
		x.Put = func(to []byte) {
			for i := range n {
				t.Decode(simd.Generic, hostmem.View[float32](to[4*i*l.dim:][:4*l.dim]),
					from[i*stored:][:stored], scales[b.Nodes[i]])
			}
		}
		return x
	case rowtype.Float16, rowtype.BFloat16:
		x.Bytes /= 2
	}
	if l.gpu != nil && l.rowsGoAsTheyAre() {
		x.CopyTo = func(to uint64) error {
			return l.gpu.stream.Copy(cuda.DevicePtr(to), b.RowsAt, x.Bytes)
		}
		return x
	}
	row := x.Bytes / max(n, 1)
	x.Put = func(to []byte) {
		if row == stored {
			copy(to, from)
			return
		}
		for i := range n {
			copy(to[i*row:][:row], from[i*stored:])
		}
	}
	return x
}

// rowsGoAsTheyAre reports whether a tensor has the rows' bytes as the SSDs have them.
func (l *servedLoader) rowsGoAsTheyAre() bool {
	element := int64(4)
	switch l.t {
	case rowtype.Int8:
		return false
	case rowtype.Float16, rowtype.BFloat16:
		element = 2
	}
	return int64(l.t.RowBytes(int(l.dim))) == element*l.dim
}
