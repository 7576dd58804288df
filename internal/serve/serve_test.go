package serve

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/hostmem"
	"helios/internal/testing/wide"
)

// Epochs come whole and in order, slots grow, and errors have their class.
func TestProtocol(t *testing.T) {
	r := start(t, nil)
	r.b.rows = func(i int) int { return 100 << (2 * i) } // the last has 800 KiB
	c := r.client(t)
	l := c.loader("a", map[string]any{"slots": 2})
	require.Equal(t, 6, l.Batches)
	require.Equal(t, []int{2, 2}, []int{l.Slots, l.Credits})
	for epoch, first := range []int{0, 4, 6} {
		c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch, "first": first})
		for i := first; i < 6; i++ {
			a := c.next()
			if a.Type == "ring" {
				require.Greater(t, a.SlotBytes, l.SlotBytes)
				a = c.want("batch")
			}
			require.Equal(t, []int{epoch, i}, []int{a.Epoch, a.Index})
			c.check(a, "a", 100<<(2*i))
			c.release(a)
		}
		require.Equal(t, epoch, c.want("epoch_end").Epoch)
	}
	c.send(map[string]any{"type": "open", "dataset": "none"})
	a := c.want("error")
	require.Equal(t, []any{"usage", 2, "no dataset none", 0}, []any{a.Class, a.Code, a.Message, a.ID})
	for _, q := range []struct {
		more map[string]any
		want string
	}{
		{map[string]any{"options": map[string]any{"do": "fail"}}, "the SSD is gone"},
		{map[string]any{"options": map[string]any{"do": []int{1}}}, "do is no text"},
		{map[string]any{"split": nil}, "neither a split nor nodes"},
		{map[string]any{"slots": 65}, "65 slots are not between"},
		{map[string]any{"rank": 3, "world": 3}, "rank 3 of world 3"},
	} {
		m := map[string]any{"type": "loader", "handle": 1, "split": "train"}
		for k, v := range q.more {
			m[k] = v
		}
		c.send(m)
		require.Contains(t, c.want("error").Message, q.want)
	}
	c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": badEpoch, "first": 4})
	c.release(c.want("batch"))
	a = c.want("error")
	require.Equal(t, []any{l.ID, "device", 5}, []any{a.ID, a.Class, a.Code})
	c.send(map[string]any{"type": "close", "id": l.ID})
	c.want("closed")
	c.send(map[string]any{"type": "epoch", "id": l.ID})
	require.Equal(t, l.ID, c.want("error").ID)
	c.send(map[string]any{"type": "stop", "id": l.ID})
	c.want("stopped")
}

// Serve ends a while after its last client, and not before the first one had time to come.
func TestLinger(t *testing.T) {
	r := start(t, func(c *Config) { c.Linger = 300 * time.Millisecond })
	one, other := r.client(t), r.client(t)
	one.close()
	select {
	case <-r.ended:
		t.Fatal("it ended beside a client")
	case <-time.After(2 * r.s.Linger):
	}
	other.close()
	select {
	case err := <-r.ended:
		r.ended <- err
	case <-time.After(20 * time.Second):
		t.Fatal("it did not end")
	}
}

// A client that keeps its slots gets no other batch, can stop, and has them still.
func TestSlowClient(t *testing.T) {
	r := start(t, nil)
	c := r.client(t)
	l := c.loader("a", map[string]any{"slots": 2})
	c.send(map[string]any{"type": "epoch", "id": l.ID})
	one, two := c.want("batch"), c.want("batch")
	require.NotEqual(t, one.Slot, two.Slot)
	c.send(map[string]any{"type": "epoch", "id": l.ID})
	require.Contains(t, c.want("error").Message, "an epoch is under way")
	c.send(map[string]any{"type": "stop", "id": l.ID})
	c.want("stopped")
	c.check(one, "a", 100)
	c.check(two, "a", 100)
	c.release(two)
	c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": 1})
	for i := range 6 {
		a := c.want("batch")
		require.Equal(t, []int{i, two.Slot}, []int{a.Index, a.Slot})
		c.check(a, "a", 100)
		c.check(one, "a", 100)
		c.release(a)
	}
	c.want("epoch_end")
}

// Two clients have datasets of their own, and one's end is nothing to the other.
func TestTwoClients(t *testing.T) {
	r := start(t, nil)
	a, b := r.client(t), r.client(t)
	la, lb := a.loader("a", nil), b.loader("b", nil)
	for i := range 3 {
		a.send(map[string]any{"type": "epoch", "id": la.ID, "epoch": i})
		b.send(map[string]any{"type": "epoch", "id": lb.ID, "epoch": i})
		for range 6 {
			x, y := a.want("batch"), b.want("batch")
			a.check(x, "a", 100)
			b.check(y, "b", 100)
			a.release(x)
			b.release(y)
		}
		a.want("epoch_end")
		b.want("epoch_end")
	}
	a.close()
	settles(t, func() bool { return r.b.open.Load() == 2 }, "the client's dataset stays open")
	b.send(map[string]any{"type": "epoch", "id": lb.ID})
	b.check(b.want("batch"), "b", 100)
}

const childEnv = "HELIOS_SERVE_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		childClient(path)
	}
	os.Exit(m.Run())
}

// childClient holds batches until it is killed.
func childClient(path string) {
	t := &testing.T{}
	r := &rig{path: path}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.path, Net: "unix"})
	if err != nil {
		os.Exit(1)
	}
	x := &client{t: t, w: &wire{c: c, timeout: 10 * time.Second}, rings: map[int][]byte{},
		bytes: map[int]int64{}}
	x.hello()
	l := x.loader("a", nil)
	x.send(map[string]any{"type": "epoch", "id": l.ID})
	x.want("batch")
	fmt.Println("holding")
	time.Sleep(time.Minute)
	os.Exit(1)
}

// A client that is killed in the middle of an epoch leaves nothing behind.
func TestKilledClient(t *testing.T) {
	r := start(t, nil)
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+r.path)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := make([]byte, 7)
	_, err = out.Read(said)
	require.NoError(t, err)
	require.Equal(t, "holding", string(said))
	require.EqualValues(t, 2, r.b.open.Load())
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	settles(t, func() bool { return r.b.open.Load() == 0 && r.s.memory.used.Load() == 0 },
		"the killed client's loader stays")
	c := r.client(t)
	c.loader("b", nil)
}

// A client that dies while its request is worked on ends that work.
func TestGoneInARequest(t *testing.T) {
	r := start(t, nil)
	c := r.client(t)
	c.send(map[string]any{"type": "open", "dataset": "a"})
	c.want("opened")
	c.send(map[string]any{"type": "loader", "handle": 1, "split": "train",
		"options": map[string]any{"do": "hang"}})
	c.close()
	settles(t, func() bool { return r.b.open.Load() == 0 }, "the dataset stays open")
}

// Whatever a client sends that the protocol does not allow ends its session, with the reason.
func TestHostileClients(t *testing.T) {
	r := start(t, func(c *Config) { c.Timeout = time.Second })
	for _, q := range []struct{ send, want string }{
		{string(frameOf("{}")), "has no type"},
		{string(frameOf("[1]")), "is no message"},
		{string(frameOf("\xff\xfe")), "is no message"},
		{string(frameOf(strings.Repeat("[", 100000))), "is no message"},
		{string(frameOf(`{"type":"stop","id":1}{"type":"stop"}`)), "more than one message"},
		{string(frameOf(`{"type":"no"}`)), `unknown message "no"`},
		{string(frameOf(`{"type":"hello","protocol":1}`)), "speaks protocol 1"},
		{string(frameOf(`{"type":"release","id":1,"slot":0}`)), "was never made"},
		{string(frameOf(`{"type":"epoch","id":-1}`)), "was never made"},
		{string(frameOf(`{"type":"loader","handle":7,"split":"train"}`)), "no dataset has handle 7"},
		{string(frameOf(`{"type":"epoch","id":"x"}`)), "is no message"},
		{"\xff\xff\xff\xff", "frame of 4294967295 bytes"},
		{"\x10\x00\x00\x00{", "did not come whole in time"},
	} {
		c := r.client(t)
		c.raw([]byte(q.send))
		require.Contains(t, c.gone().Message, q.want)
	}
	c := r.dial(t)
	c.raw(frameOf(`{"type":"open","dataset":"a"}`))
	require.Contains(t, c.gone().Message, "before hello")
	c = r.client(t)
	l := c.loader("a", nil)
	c.raw(frameOf(fmt.Sprintf(`{"type":"release","id":%d,"slot":0}`, l.ID)))
	require.Contains(t, c.gone().Message, "slot 0, which the client does not have")
	c = r.client(t)
	c.send(map[string]any{"type": "open", "dataset": "a"})
	c.want("opened")
	c.raw(frameOf(`{"type":"loader","handle":1,"split":"train","options":{"do":"hang"}}`))
	for range maxWaiting + 2 {
		c.raw(frameOf(`{"type":"stop","id":1}`))
	}
	require.Contains(t, c.gone().Message, "requests wait for an answer")
}

// Nodes come in a file in memory, and any other file is refused.
func TestNodes(t *testing.T) {
	r := start(t, nil)
	send := func(c *client, fd int) {
		c.send(map[string]any{"type": "open", "dataset": "a"})
		c.want("opened")
		require.NoError(t, c.w.write(map[string]any{"type": "loader", "handle": 1}, fd))
		require.NoError(t, unix.Close(fd))
	}
	file := func(b []byte) int {
		fd, err := unix.MemfdCreate("nodes", unix.MFD_CLOEXEC)
		require.NoError(t, err)
		_, err = unix.Write(fd, b)
		require.NoError(t, err)
		return fd
	}
	c := r.client(t)
	send(c, file(hostmem.Bytes([]int64{3, 1, 2})))
	c.want("loader")
	c = r.client(t)
	send(c, file([]byte("seven b")))
	require.Contains(t, c.gone().Message, "file of nodes of 7 bytes")
	for _, path := range []string{"/dev/zero", os.Args[0]} {
		c = r.client(t)
		fd, err := unix.Open(path, unix.O_RDONLY, 0)
		require.NoError(t, err)
		send(c, fd)
		require.Contains(t, c.gone().Message, "not of memfd_create")
	}
}

// An epoch may bring other nodes, which the job holds in place of those before. Nobody joins it
// then.
func TestOtherNodes(t *testing.T) {
	r := start(t, nil)
	file := func(nodes ...int64) int {
		fd, err := unix.MemfdCreate("nodes", unix.MFD_CLOEXEC)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		_, err = unix.Write(fd, hostmem.Bytes(nodes))
		require.NoError(t, err)
		return fd
	}
	c, d := r.client(t), r.client(t)
	made := func(c *client, split any, fd int) answer {
		c.send(map[string]any{"type": "open", "dataset": "a"})
		h := c.want("opened").Handle
		require.NoError(t, c.w.write(map[string]any{"type": "loader", "handle": h, "split": split}, fd))
		return c.want("loader")
	}
	l := made(c, nil, file(1, 2, 3))
	base := r.s.Stats().RingBytes
	next := func(l answer, epoch, first int, nodes ...int64) {
		require.NoError(t, c.w.write(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch,
			"first": first}, file(nodes...)))
	}
	for epoch, n := range []int{5, 1, 9} {
		next(l, epoch, 0, make([]int64, n)...)
		c.rest(epoch, 0, 0, 1, n, 100)
		require.EqualValues(t, 8*(n-3), r.s.Stats().RingBytes-base, "what the job holds")
	}
	c.epoch(l, 3, 7) // of the nodes that it has
	c.rest(3, 7, 0, 1, 9, 100)
	next(l, 4, 0, -1)
	require.Contains(t, c.want("error").Message, "node -1")
	next(l, 5, 1, 1, 2)
	require.Contains(t, c.want("error").Message, "first is 0")
	jobs := r.s.Stats().Jobs
	made(d, nil, file(1, 2, 3))
	require.EqualValues(t, jobs+1, r.s.Stats().Jobs, "another job")
	next(made(c, "train", -1), 0, 0, 1)
	require.Contains(t, c.want("error").Message, "was opened with some")
}

// A job that rests closes its loader while nobody asks for an epoch, whatever the client holds, and
// opens another one for the next. Nobody joins it.
func TestRests(t *testing.T) {
	for _, ahead := range []int{0, 2} {
		r := start(t, func(c *Config) { c.rest = time.Millisecond })
		r.b.ahead = ahead
		c := r.client(t)
		c.send(map[string]any{"type": "open", "dataset": "a"})
		h := c.want("opened").Handle
		file := func(nodes ...int64) int {
			fd, err := unix.MemfdCreate("nodes", unix.MFD_CLOEXEC)
			require.NoError(t, err)
			t.Cleanup(func() { _ = unix.Close(fd) })
			_, err = unix.Write(fd, hostmem.Bytes(nodes))
			require.NoError(t, err)
			return fd
		}
		q := map[string]any{"type": "loader", "handle": h, "split": nil, "rests": true}
		require.NoError(t, c.w.write(q, file(1, 2, 3, 4, 5)))
		l := c.want("loader")
		rested := func() bool { return r.b.open.Load() == 1 } // the dataset
		var kept answer
		for epoch, n := range []int{5, 5, 3, 3, 1} {
			fd := -1 // of the nodes before
			if epoch%2 == 0 {
				fd = file(make([]int64, n)...)
			}
			require.NoError(t, c.w.write(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch},
				fd))
			if epoch == 0 {
				kept = c.want("batch")
				c.rest(epoch, 1, 0, 1, n, 100)
			} else {
				c.rest(epoch, 0, 0, 1, n, 100)
			}
			require.Eventually(t, rested, 10*time.Second, time.Millisecond)
		}
		c.check(kept, "a", 100)
		require.NoError(t, c.w.write(q, file(1, 2)))
		c.want("loader")
		require.EqualValues(t, 2, r.s.Stats().Jobs)
		require.NoError(t, c.w.write(map[string]any{"type": "loader", "handle": h, "split": "train",
			"rests": true}, -1))
		require.Contains(t, c.want("error").Message, "is of nodes and of one rank")
		require.NoError(t, c.w.c.Close())
		require.Eventually(t, func() bool { return r.b.open.Load() == 0 }, 10*time.Second,
			time.Millisecond)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	for _, q := range []struct {
		uid, gid uint32
		group    bool
		in       bool
	}{{uint32(os.Geteuid()), 0, false, true}, {0, 0, false, true}, {4242, 4242, true, false},
		{4242, uint32(os.Getegid()), true, true}, {4242, uint32(os.Getegid()), false, false}} {
		r := start(t, func(c *Config) {
			c.Group = q.group
			c.credentials = func(*net.UnixConn) (*unix.Ucred, error) {
				return &unix.Ucred{Uid: q.uid, Gid: q.gid}, nil
			}
		})
		c := r.dial(t)
		if q.in {
			c.hello()
			continue
		}
		a := c.gone()
		require.Equal(t, "refused", a.Class)
		require.Contains(t, a.Message, "user 4242 may not use this daemon")
	}
}

// The kernel says who a client is: of two threads of this process, one of another user's.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user for a moment")
	}
	r := &rig{s: New(Config{Backend: &fakeBackend{}, Timeout: 5 * time.Second})}
	// without a file, which the other user could not reach
	r.path = fmt.Sprintf("@helios-test-%d", os.Getpid())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.path, Net: "unix"})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.s.Serve(ctx, l) }()
	mine := r.client(t)
	theirs := make(chan *net.UnixConn, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread ends with the goroutine
		const nobody = 65534
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); e != 0 {
			t.Error(e)
		}
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.path, Net: "unix"})
		if err != nil {
			t.Error(err)
		}
		theirs <- c
	}()
	c := &client{t: t, w: &wire{c: <-theirs, timeout: 10 * time.Second}}
	require.Equal(t, "refused", c.gone().Class)
	c.close()
	mine.send(map[string]any{"type": "open", "dataset": "a"})
	mine.want("opened")
	mine.close()
	cancel()
	require.NoError(t, <-done)
	require.NoError(t, l.Close())
}

// Bounds hold: of clients, of memory, of loaders and datasets.
func TestBounds(t *testing.T) {
	r := start(t, func(c *Config) { c.MaxClients, c.Memory = 2, 16<<20 })
	a, b := r.client(t), r.client(t)
	c := r.dial(t)
	require.Contains(t, c.gone().Message, "has 2 clients")
	l := a.loader("a", map[string]any{"slots": 40}) // 10 MiB
	b.send(map[string]any{"type": "open", "dataset": "b"})
	b.want("opened")
	big := map[string]any{"type": "loader", "handle": 1, "split": "train", "slots": 40}
	b.send(big)
	require.Contains(t, b.want("error").Message, "a larger memory")
	a.send(map[string]any{"type": "close", "id": l.ID})
	a.want("closed")
	b.send(big)
	b.want("loader")
	for range maxDatasets - 1 {
		b.send(map[string]any{"type": "open", "dataset": "b"})
		b.want("opened")
	}
	b.send(map[string]any{"type": "open", "dataset": "b"})
	require.Contains(t, b.want("error").Message, "may open 16 datasets")
	a.close()
	settles(t, func() bool { return r.b.open.Load() == maxDatasets+1 }, "the client stays")
	require.NotNil(t, r.client(t))
}

// Batches by the thousand leave neither descriptors nor memory behind.
func TestNothingLeaks(t *testing.T) {
	r := start(t, nil)
	r.b.batches = 100
	epochs := 20
	if !wide.Lean() {
		epochs = 100
	}
	c := r.client(t)
	l := c.loader("a", nil)
	epoch := func(i int) {
		r.b.rows = func(k int) int { return 1000 + k }
		c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": i})
		for range r.b.batches {
			a := c.want("batch")
			c.release(a)
		}
		c.want("epoch_end")
	}
	epoch(0)
	fds, went, taken := openFDs(t), goroutines(), r.s.memory.used.Load()
	for i := range epochs {
		epoch(1 + i)
		other := r.client(t) // clients come and go
		other.loader("b", nil)
		other.close()
		settles(t, func() bool { return r.b.open.Load() == 2 }, "a client stays")
	}
	settles(t, func() bool { return openFDs(t) <= fds && goroutines() <= went },
		"descriptors or goroutines stay")
	require.Equal(t, taken, r.s.memory.used.Load())
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"type":"hello","protocol":3}`))
	f.Add([]byte(`{"type":"loader","handle":1,"options":{"a":1.5,"b":true,"c":"x"},"split":null}`))
	f.Add([]byte(`{"type":"epoch","id":1e99}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := decode(body)
		if err != nil {
			require.Nil(t, q)
			return
		}
		require.NotEmpty(t, q.Type)
		if o, err := texts(q.Options); err == nil {
			require.Len(t, o, len(q.Options))
		}
	})
}

// FuzzConnection sends any bytes behind a hello: the server goes on.
func FuzzConnection(f *testing.F) {
	f.Add(frameOf(`{"type":"open","dataset":"a"}`))
	f.Add(append(frameOf(`{"type":"open","dataset":"a"}`),
		frameOf(`{"type":"loader","handle":1,"split":"train"}`)...))
	f.Add(slices.Concat(frameOf(`{"type":"open","dataset":"a"}`),
		frameOf(`{"type":"loader","handle":1,"split":"train","rank":1,"world":3,"job":"j"}`),
		frameOf(`{"type":"epoch","id":1,"epoch":2,"first":1}`),
		frameOf(`{"type":"release","id":1,"slot":0}`), frameOf(`{"type":"stop","id":1}`),
		frameOf(`{"type":"close","id":1}`)))
	f.Add(append(frameOf(`{"type":"open","dataset":"a"}`),
		frameOf(`{"type":"loader","handle":1,"split":"train","device":"cuda","slots":64}`)...))
	f.Add([]byte{1, 0, 0, 0, '{', 255, 255, 255, 255})
	r := start(f, func(c *Config) { c.Timeout = 200 * time.Millisecond })
	f.Fuzz(func(t *testing.T, b []byte) {
		c := r.client(t)
		c.raw(b)
		c.close()
		settles(t, func() bool { return r.b.open.Load() == 0 }, "the client stays")
	})
}
