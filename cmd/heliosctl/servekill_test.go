package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// killedClient says in the environment which client TestServeClientChild is.
const killedClient = "HELIOS_SERVE_CLIENT"

// clientSpec is a client: a rank of a loader, and the sums that its batches have to have.
type clientSpec struct {
	Socket      string
	Rank, World int
	Options     map[string]any
	Sums        [][]uint32 // by epoch and batch
}

// run takes epochs until stop is closed, and connects anew whenever the daemon dies.
func (c *clientSpec) run(stop <-chan struct{}) error {
	for {
		err := c.session(stop)
		if err != nil && !lostDaemon(err) {
			return err
		}
		select {
		case <-stop: // perhaps just behind a kill of the daemon
			return nil
		default:
		}
	}
}

// lostDaemon reports whether an error is a daemon's death.
func lostDaemon(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func (c *clientSpec) session(stop <-chan struct{}) error {
	var conn *net.UnixConn
	var err error
	for range 4000 {
		conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: c.Socket, Net: "unix"})
		if err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	d := &door{conn: conn, sums: true}
	defer d.close()
	if err := d.hello(); err != nil {
		return err
	}
	if _, err := d.loader(map[string]any{"options": c.Options, "rank": c.Rank, "world": c.World,
		"slots": 2}); err != nil {
		return err
	}
	for i := 0; ; i++ {
		epoch := i % len(c.Sums)
		got, err := d.epoch(epoch, 0)
		for k, sum := range got.sums {
			index := c.Rank + k*c.World
			if got.batches[k] != index || sum != c.Sums[epoch][index] {
				return fmt.Errorf("epoch %d: batch %d is %d with another content", epoch, index,
					got.batches[k])
			}
		}
		if err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		default:
		}
	}
}

// TestServeClientChild is a client in a process of its own. It ends with its standard input.
func TestServeClientChild(t *testing.T) {
	spec := os.Getenv(killedClient)
	if spec == "" {
		t.Log("a child of TestServeSurvivesKills alone has work here")
		return
	}
	var c clientSpec
	require.NoError(t, json.Unmarshal([]byte(spec), &c))
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	require.NoError(t, c.run(stop))
}

// doorProcess is a daemon or a client of these tests.
type doorProcess struct {
	cmd  *exec.Cmd
	said bytes.Buffer
	in   io.WriteCloser
}

func startChild(t *testing.T, test string, env ...string) *doorProcess {
	c := &doorProcess{cmd: exec.Command(os.Args[0], "-test.run=^"+test+"$")}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.said, &c.said
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	c.in, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() { _ = c.cmd.Process.Kill() }) // it may have ended
	return c
}

// kill kills it, and wants it to have been at work until then.
func (c *doorProcess) kill(t *testing.T) {
	require.NoError(t, c.cmd.Process.Kill())
	_ = c.cmd.Wait() // with the signal
	require.Equal(t, syscall.SIGKILL, c.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(),
		c.said.String())
}

// socketBesideSSD prepares a folder with a dataset on an SSD, and returns the path for a daemon's
// socket there.
func socketBesideSSD(t *testing.T) string {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HELIOS_STATE", filepath.Join(dir, "state"))
	ok(t, "generate", "--nodes", "3000", "--dim", "16", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	return filepath.Join(dir, "s")
}

// settledFDs waits until a daemon has at most so many descriptors, and returns how many it has.
func settledFDs(t *testing.T, pid, limit int) (fds int) {
	for range 2000 {
		if fds = daemonFDs(t, pid); fds <= limit {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	return fds
}

// Clients and the daemon are killed at random, over and over: what lives gets the batches that it
// should, and the daemon keeps nothing of the dead.
func TestServeSurvivesKills(t *testing.T) {
	kills := 4
	if !wide.Lean() {
		kills = 100
	}
	socket := socketBesideSSD(t)
	options := map[string]any{"mode": "helios", "device": "host", "gpu-cache": "16KiB",
		"cpu-cache": "0", "fanout": "4,4", "batch-size": 50, "hotness": "degree"}
	daemon := func() *doorProcess {
		return startChild(t, "TestServeChild", serveChildEnv+"="+socket)
	}
	dm := daemon()
	specs := []*clientSpec{{Rank: 0, World: 2}, {Rank: 1, World: 2}, {World: 1}}
	sums := [][]uint32{}
	for _, c := range specs {
		c.Socket, c.Options = socket, options
	}
	// A client of its own has the right bytes (sched.TestLoaderIsTraining).
	ref := specs[2].dial(t)
	for epoch := range 3 {
		got, err := ref.epoch(epoch, 0)
		require.NoError(t, err)
		sums = append(sums, got.sums)
	}
	ref.close()
	clients := make([]*doorProcess, len(specs))
	begin := func(i int) {
		specs[i].Sums = sums
		text, err := json.Marshal(specs[i])
		require.NoError(t, err)
		clients[i] = startChild(t, "TestServeClientChild", killedClient+"="+string(text))
	}
	for i := range clients {
		begin(i)
	}
	rng := rand.New(rand.NewPCG(22, 0))
	ofDaemon := 0
	for k := range kills {
		time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond) // anywhere in their work
		if victim := rng.IntN(5); victim < len(clients) && k != 1 {
			clients[victim].kill(t)
			begin(victim)
		} else {
			dm.kill(t)
			dm = daemon()
			ofDaemon++
		}
	}
	for i, c := range clients {
		require.NoError(t, c.in.Close())
		require.NoError(t, c.cmd.Wait(), "client %d: %s", i, &c.said)
	}
	ref = specs[2].dial(t) // the daemon is there, and has but one client
	pid := dm.cmd.Process.Pid
	fds := settledFDs(t, pid, 39)
	require.Less(t, fds, 40, "descriptors of dead clients stay")
	ref.close()
	require.NoError(t, dm.cmd.Process.Signal(os.Interrupt))
	require.NoError(t, dm.cmd.Wait(), dm.said.String())
	t.Logf("%d kills, %d of the daemon; it had %d descriptors at the end", kills, ofDaemon, fds)
}

// dial connects a client and opens its loader.
func (c *clientSpec) dial(t *testing.T) *door {
	var conn *net.UnixConn
	var err error
	for range 4000 {
		conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: c.Socket, Net: "unix"})
		if err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	require.NoError(t, err)
	d := &door{conn: conn, sums: true}
	require.NoError(t, d.hello())
	_, err = d.loader(map[string]any{"options": c.Options, "rank": c.Rank, "world": c.World})
	require.NoError(t, err)
	return d
}

// Batches by the thousand, through loaders that come and go, leave the daemon as it was.
func TestServeLeaks(t *testing.T) {
	batches := 300
	if !wide.Lean() {
		batches = 10_000
	}
	c := &clientSpec{Socket: socketBesideSSD(t), World: 1, Options: map[string]any{"mode": "helios",
		"device": "host", "gpu-cache": "16KiB", "cpu-cache": "0", "fanout": "4,4", "batch-size": 20,
		"hotness": "degree"}}
	dm := startChild(t, "TestServeChild", serveChildEnv+"="+c.Socket)
	pid := dm.cmd.Process.Pid
	// run takes so many batches, with a new client every second epoch.
	run := func(n int) {
		for got := 0; got < n; {
			d := c.dial(t)
			for epoch := range 2 {
				e, err := d.epoch(epoch, 0)
				require.NoError(t, err)
				got += len(e.batches)
			}
			d.close()
		}
	}
	last := c.dial(t)
	fds := daemonFDs(t, pid)
	run(batches / 5)
	require.LessOrEqual(t, settledFDs(t, pid, fds), fds)
	rss := rssOf(t, pid)
	run(batches)
	after := settledFDs(t, pid, fds)
	grown := rssOf(t, pid) - rss
	t.Logf("%d batches: %d descriptors, then %d; %d KiB resident, %+d", batches, fds, after,
		rss>>10, grown>>10)
	require.LessOrEqual(t, after, fds)
	require.Less(t, grown, int64(48<<20))
	last.close()
	require.NoError(t, dm.cmd.Process.Signal(os.Interrupt))
	require.NoError(t, dm.cmd.Wait(), dm.said.String())
}

// rssOf returns the resident bytes of a process.
func rssOf(t testing.TB, pid int) int64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	require.NoError(t, err)
	pages, err := strconv.ParseInt(strings.Fields(string(raw))[1], 10, 64)
	require.NoError(t, err)
	return pages * int64(os.Getpagesize())
}
