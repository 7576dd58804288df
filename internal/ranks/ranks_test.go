package ranks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/mpi"
	"helios/internal/testing/testrig"
)

// The suite of a group runs as real processes of this test's binary: each takes part in one case.
const (
	caseVar    = "HELIOS_RANKS_CASE"
	waitVar    = "HELIOS_RANKS_WAIT"
	silenceVar = "HELIOS_RANKS_SILENCE"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(caseVar); name != "" {
		os.Exit(child(name))
	}
	os.Exit(m.Run())
}

func child(name string) int {
	err := takePart(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, "case failed:", err)
	}
	return int(errs.ClassOf(err))
}

func takePart(name string) error {
	l, err := FromEnv(os.LookupEnv)
	if err != nil {
		return err
	}
	o := Options{Join: 30 * time.Second}
	for v, to := range map[string]*time.Duration{waitVar: &o.Wait, silenceVar: &o.Silence} {
		if text := os.Getenv(v); text != "" {
			if *to, err = time.ParseDuration(text); err != nil {
				return err
			}
		}
	}
	g, err := Join(context.Background(), *l, o)
	if err != nil {
		return err
	}
	err = cases[name](g)
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, g.Close())
}

// text is the message of rank from to rank to in a round, of a length that tells them apart.
func text(from, to, round int) []byte {
	n := (from*37 + to*11 + round*5) % 90
	if round == 3 {
		n = (from*3 + to) * 700_001 // frames and pieces
	}
	if from == 0 && round%2 == 1 && round != 3 {
		n = 0
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(from*31 + to*7 + round + i)
	}
	return b
}

var cases = map[string]func(g Group) error{
	"messages": func(g Group) error {
		for round := range 12 {
			out := make([][]byte, g.Size())
			for r := range out {
				out[r] = text(g.Rank(), r, round)
			}
			in, err := g.Exchange(context.Background(), out)
			if err != nil {
				return err
			}
			for r := range in {
				if !bytes.Equal(in[r], text(r, g.Rank(), round)) {
					return fmt.Errorf("round %d: rank %d sent other bytes", round, r)
				}
			}
			if in, err = g.AllGather(context.Background(), text(g.Rank(), 0, round)); err != nil {
				return err
			}
			for r := range in {
				if !bytes.Equal(in[r], text(r, 0, round)) {
					return fmt.Errorf("round %d: rank %d gave other bytes", round, r)
				}
			}
		}
		if g.SentBytes() == 0 {
			return errors.New("no bytes were counted")
		}
		return nil
	},
	"killed": func(g Group) error {
		for round := range 40 {
			if round == 20 && g.Rank() == g.Size()-1 {
				return unix.Kill(os.Getpid(), unix.SIGKILL)
			}
			if _, err := g.AllGather(context.Background(), make([]byte, 100_000)); err != nil {
				return err
			}
		}
		return errors.New("nobody was missed")
	},
	"killed while others compute": func(g Group) error {
		if g.Rank() == g.Size()-1 {
			return unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		select {
		case <-g.Failed():
			return g.Err()
		case <-time.After(20 * time.Second):
			return errors.New("nobody was missed")
		}
	},
	"aborted": func(g Group) error {
		if g.Rank() == g.Size()-1 {
			return errs.New(errs.Device, "its SSD is on fire")
		}
		_, err := g.AllGather(context.Background(), nil)
		return err
	},
	"slow": func(g Group) error {
		if g.Rank() == 1 {
			time.Sleep(2 * time.Second) // several times the silence
		}
		_, err := g.AllGather(context.Background(), []byte("here"))
		return err
	},
	"too slow": func(g Group) error {
		if g.Rank() == 1 {
			<-g.Failed()
			return g.Err()
		}
		_, err := g.AllGather(context.Background(), []byte("here"))
		return err
	},
	"asleep": func(g Group) error {
		if g.Rank() == 1 {
			err := unix.Kill(os.Getpid(), unix.SIGSTOP)
			time.Sleep(time.Minute) // other threads may go on for a while
			return err
		}
		_, err := g.AllGather(context.Background(), []byte("here"))
		return err
	},
	"left": func(g Group) error {
		if g.Rank() == 1 {
			return nil
		}
		_, err := g.AllGather(context.Background(), []byte("here"))
		return err
	},
}

// outcome is the end of a process.
type outcome struct {
	code int
	text string
}

// overTCPs runs a case in n processes. Its deadline kills what hangs.
func overTCPs(t *testing.T, name string, n int, env ...string) []outcome {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	port := testrig.FreePort(t)
	out := make([]outcome, n)
	var wg sync.WaitGroup
	for r := range n {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(append(os.Environ(), caseVar+"="+name, "RANK="+strconv.Itoa(r),
			"WORLD_SIZE="+strconv.Itoa(n), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port), env...)
		var said bytes.Buffer
		cmd.Stdout, cmd.Stderr = &said, &said
		require.NoError(t, cmd.Start())
		wg.Go(func() {
			_ = cmd.Wait() // its code says it
			out[r] = outcome{cmd.ProcessState.ExitCode(), said.String()}
		})
		if name == "asleep" && r == 1 {
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			wg.Go(func() {
				time.Sleep(8 * time.Second)
				_ = cmd.Process.Kill()
			})
		}
	}
	wg.Wait()
	require.NoError(t, ctx.Err(), "the ranks hang: %v", out)
	return out
}

// overMPIs runs a case in n processes under an mpirun.
func overMPIs(t *testing.T, kind mpi.Kind, name string, n int, env ...string) outcome {
	run, args := "mpirun.mpich", []string{"-n", strconv.Itoa(n), os.Args[0]}
	if kind == mpi.OpenMPI {
		run = "mpirun.openmpi"
		args = append([]string{"--allow-run-as-root", "--oversubscribe"}, args...)
	}
	path, err := exec.LookPath(run)
	if err != nil {
		t.Skipf("%s is not on this machine (apt-get install openmpi-bin mpich)", run)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(append(os.Environ(), caseVar+"="+name), env...)
	cmd.WaitDelay = time.Second
	b, _ := cmd.CombinedOutput() // its code says it
	require.NoError(t, ctx.Err(), "the ranks hang: %s", b)
	return outcome{cmd.ProcessState.ExitCode(), string(b)}
}

var kinds = []mpi.Kind{mpi.OpenMPI, mpi.MPICH}

func TestMessages(t *testing.T) {
	for _, n := range []int{2, 3, 4} {
		t.Run(fmt.Sprintf("TCP %d", n), func(t *testing.T) {
			for r, o := range overTCPs(t, "messages", n) {
				require.Zero(t, o.code, "rank %d: %s", r, o.text)
			}
		})
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s %d", k, n), func(t *testing.T) {
				o := overMPIs(t, k, "messages", n)
				require.Zero(t, o.code, o.text)
			})
		}
	}
}

// However a rank ends, the others do within seconds, and say which one it was and why.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		name    string
		n, rank int
		class   errs.Class
		says    string
		env     []string
		mpi     bool
	}{
		{"killed", 3, 2, errs.Failed, "was killed", nil, true},
		{"killed while others compute", 3, 2, errs.Failed, "was killed", nil, true},
		{"aborted", 3, 2, errs.Device, "its SSD is on fire", nil, true},
		{"too slow", 2, 1, errs.Failed, "no answer within 1s", []string{waitVar + "=1s"}, false},
		{"asleep", 3, 1, errs.Failed, "no sign of life", []string{silenceVar + "=1s"}, false},
		{"left", 2, 1, errs.Failed, "it has left", nil, false},
	} {
		t.Run("TCP "+c.name, func(t *testing.T) {
			out := overTCPs(t, c.name, c.n, c.env...)
			for r, o := range out {
				if r == c.rank {
					continue
				}
				require.Equal(t, int(c.class), o.code, "rank %d: %s", r, o.text)
				require.Contains(t, o.text, c.says)
				require.Contains(t, o.text, fmt.Sprintf("rank %d on ", c.rank))
			}
		})
		for _, k := range kinds {
			if !c.mpi {
				continue
			}
			t.Run(string(k)+" "+c.name, func(t *testing.T) {
				o := overMPIs(t, k, c.name, c.n, c.env...)
				require.NotZero(t, o.code, o.text)
				if c.class != errs.Failed {
					require.Contains(t, o.text, fmt.Sprintf("rank %d on ", c.rank))
					require.Contains(t, o.text, c.says)
				}
			})
		}
	}
}

// A rank that is slow, and lives, is waited for.
func TestSlowRank(t *testing.T) {
	for r, o := range overTCPs(t, "slow", 3, silenceVar+"=500ms") {
		require.Zero(t, o.code, "rank %d: %s", r, o.text)
	}
	for _, k := range kinds {
		t.Run(string(k), func(t *testing.T) {
			o := overMPIs(t, k, "slow", 3)
			require.Zero(t, o.code, o.text)
		})
	}
	t.Run("MPI too slow", func(t *testing.T) {
		o := overMPIs(t, mpi.OpenMPI, "too slow", 2, waitVar+"=1s")
		require.NotZero(t, o.code, o.text)
		require.Contains(t, o.text, "did not answer within 1s")
	})
}

// join brings groups together within this process, each with its options and of job "a" unless jobs
// says another.
func join(t *testing.T, port string, o []Options, jobs ...string) ([]Group, []error) {
	groups, failed := make([]Group, len(o)), make([]error, len(o))
	var wg sync.WaitGroup
	for r := range o {
		wg.Go(func() {
			l := Launch{Rank: r, Size: len(o), Local: -1, Master: "127.0.0.1:" + port, Job: "a"}
			if r < len(jobs) {
				l.Job = jobs[r]
			}
			groups[r], failed[r] = Join(t.Context(), l, o[r])
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, g := range groups {
			if g != nil {
				wg.Go(func() { _ = g.Close() }) // each waits for the others to leave
			}
		}
		wg.Wait()
	})
	return groups, failed
}

// Whatever strangers say to the port before the ranks come, these meet.
func TestStrangersAreSentAway(t *testing.T) {
	port := testrig.FreePort(t)
	good := header{kind: kindHello, total: 2}.encode([]byte("{]"))
	long := header{kind: kindHello, total: 1 << 60, length: 1 << 31}.encode(nil)
	damaged := header{kind: kindHello, total: 2}.encode([]byte("{}"))
	other := header{kind: kindHello}.encode(nil)
	other[3] = 77
	stop := make(chan struct{})
	var wg sync.WaitGroup
	come := func(greet func(c net.Conn)) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				c, err := net.Dial("tcp", "127.0.0.1:"+port)
				if err != nil {
					continue
				}
				greet(c)
				_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}
		})
	}
	for _, say := range [][]byte{nil, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		append(good[:], "{]"...), long[:], append(damaged[:], "{!"...), other[:],
		bytes.Repeat([]byte{0xff}, 1<<16), []byte("HRK")} {
		come(func(c net.Conn) { _, _ = c.Write(say) })
	}
	for _, h := range []hello{{Rank: -5, Size: 2, Job: "b", Host: "x"},
		{Rank: -5, Size: 2, Job: "a", Host: "x"},
		{Rank: 0, Size: 2, Job: "a", Host: strings.Repeat("\n\x1b[2J", 1000)},
		{Rank: 1, Size: 3, Job: "a", Host: "x"}} {
		come(func(c net.Conn) {
			p, err := (&overTCP{}).prove(t.Context(), c, true, time.Now().Add(time.Second))
			if err == nil {
				_ = p.sendHello(h)
			}
		})
	}
	var mu sync.Mutex
	var notes []string
	o := Options{Join: 20 * time.Second, Note: func(text string) {
		mu.Lock()
		defer mu.Unlock()
		notes = append(notes, text)
	}}
	late := make(chan error, 1)
	var first Group
	go func() {
		var err error
		first, err = Join(t.Context(), Launch{Size: 2, Master: "127.0.0.1:" + port, Job: "a"}, o)
		late <- err
	}()
	time.Sleep(300 * time.Millisecond) // strangers alone
	second, err := Join(t.Context(), Launch{Rank: 1, Size: 2, Master: "127.0.0.1:" + port, Job: "a"}, o)
	require.NoError(t, err)
	require.NoError(t, <-late)
	close(stop)
	wg.Wait()
	said := strings.Join(notes, "\n")
	require.Contains(t, said, "rank -5 on x belongs to another run")
	require.Contains(t, said, "or it is none: the other is on x")
	require.Contains(t, said, "WORLD_SIZE=3, rank 0 has 2")
	require.Contains(t, said, `the other is on "\n\x1b[2J`)
	require.NotContains(t, said, "\x1b")
	for _, n := range notes {
		require.Less(t, len(n), 400)
	}
	closed := make(chan error)
	go func() { closed <- first.Close() }()
	require.NoError(t, second.Close())
	require.NoError(t, <-closed)
}

// A rank of another run hears why it is refused; the first one waits on, for it may be a stranger,
// and names it when time is up.
func TestOtherRunsAreRefused(t *testing.T) {
	o := Options{Join: time.Second}
	_, failed := join(t, testrig.FreePort(t), []Options{o, o}, "a", "b")
	for r, err := range failed {
		require.ErrorContains(t, err, "to another run", "rank %d", r)
	}
	require.ErrorContains(t, failed[0], "rank 1 on ")
	require.ErrorContains(t, failed[1], "refuses this rank")
	require.ErrorContains(t, failed[0], "ranks [1] did not come, and the last that was refused")
	require.ErrorContains(t, failed[0], "not all 2 ranks came")
	require.Equal(t, errs.Failed, errs.ClassOf(failed[0]))
	require.Equal(t, errs.Usage, errs.ClassOf(failed[1]))
}

func TestNamesOfMachines(t *testing.T) {
	for host, want := range map[string]string{"node-7.local": "node-7.local", "a b": `"a b"`,
		"a\x00": `"a\x00"`, strings.Repeat("ü", 40): strings.Repeat("ü", 32) + "…",
		"a" + strings.Repeat("ü", 40): "a" + strings.Repeat("ü", 31) + "…", "": ""} {
		require.Equal(t, want, named(host))
	}
}

func TestAbsentRanksAreNamed(t *testing.T) {
	_, err := Join(t.Context(), Launch{Size: 3, Master: "127.0.0.1:" + testrig.FreePort(t)},
		Options{Join: 200 * time.Millisecond})
	require.ErrorContains(t, err, "ranks [1 2] did not come; MASTER_ADDR is 127.0.0.1:")
	require.ErrorContains(t, err, "which no other machine reaches")
	_, err = Join(t.Context(), Launch{Rank: 1, Size: 3, Master: "127.0.0.1:" + testrig.FreePort(t)},
		Options{Join: 200 * time.Millisecond})
	require.ErrorContains(t, err, "not all 3 ranks came")
}

// TestKilledBetweenMeetings: rank 2 goes when it has met the first rank and not yet rank 1, which
// then hears of it from the first one's end, not from its own limit of five minutes.
func TestKilledBetweenMeetings(t *testing.T) {
	port := testrig.FreePort(t)
	launch := func(rank int) Launch {
		return Launch{Rank: rank, Size: 3, Local: -1, Master: "127.0.0.1:" + port, Job: "a"}
	}
	failed := make(chan error, 1)
	go func() {
		g, err := Join(t.Context(), launch(1), Options{})
		if err == nil {
			err = errors.Join(errors.New("joined"), g.Close())
		}
		failed <- err
	}()
	go func() {
		g := &overTCP{ended: newEnded(), l: launch(2), o: Options{}, peers: make([]*peer, 3)}
		g.waits = g.startWaiting()
		defer g.waits.end()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		link, err := g.dial(ctx, 0, launch(2).Master)
		if err == nil {
			h := g.me()
			h.Listen = "1"
			_, _ = g.introduce(ctx, link, h)
			_ = link.Close()
		}
	}()
	first, err := Join(t.Context(), launch(0), Options{})
	require.NoError(t, err)
	defer func() { _ = first.Close() }()
	err = <-failed
	require.ErrorContains(t, err, "rank 0 on")
	require.ErrorContains(t, err, "left before all ranks had met")
	require.ErrorContains(t, err, "ranks [2] did not come")
	require.Equal(t, errs.Failed, errs.ClassOf(err))
}

// A frame that is damaged on its way between ranks ends the group; so does one out of turn.
func TestDamagedFrames(t *testing.T) {
	for name, say := range map[string]func() []byte{
		"was damaged": func() []byte {
			h := header{kind: kindData, total: 3}.encode([]byte("abc"))
			return append(h[:], "abd"...)
		},
		"comes where": func() []byte {
			h := header{kind: kindData, number: 7, total: 3}.encode([]byte("abc"))
			return append(h[:], "abc"...)
		},
		"of kind 99":     func() []byte { h := header{kind: 99}.encode(nil); return h[:] },
		"does not speak": func() []byte { return make([]byte, 2*headerBytes) },
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Join: 10 * time.Second}
			groups, failed := join(t, testrig.FreePort(t), []Options{o, o})
			require.NoError(t, errors.Join(failed...))
			_, err := groups[1].(*overTCP).peers[0].conn.Write(say())
			require.NoError(t, err)
			_, err = groups[0].AllGather(t.Context(), nil)
			require.ErrorContains(t, err, "rank 1 on ")
			require.ErrorContains(t, err, name)
		})
	}
}

// limited is a connection that keeps its last deadline of writing.
type limited struct {
	net.Conn
	deadline time.Time
}

func (l *limited) SetWriteDeadline(t time.Time) error { l.deadline = t; return nil }
func (l *limited) Write(b []byte) (int, error)        { return len(b), nil }

// After the end of a group no writer gives itself more time than the last word has.
func TestDeadlinesOfWriting(t *testing.T) {
	c := &limited{}
	p := newPeer(1, "x", c)
	now := time.Now()
	require.NoError(t, p.write(kindAlive, nil, now.Add(time.Hour)))
	require.Equal(t, now.Add(time.Hour), c.deadline)
	p.lastUntil(now.Add(time.Second))
	require.Equal(t, now.Add(time.Second), c.deadline, "also of what is under way")
	require.NoError(t, p.write(kindData, []byte("late"), now.Add(time.Hour)))
	require.Equal(t, now.Add(time.Second), c.deadline)
	require.NoError(t, p.write(kindAlive, nil, now))
	require.Equal(t, now, c.deadline, "an earlier one stays")
}
