package stripe

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/nvme"
)

// lively makes leases live fast.
func lively(t *testing.T) {
	testrig.CheckLeaks(t)
	every, dead, look, who := leaseEvery, leaseDead, leaseLook, thisProcess
	leaseEvery, leaseDead, leaseLook = 10*time.Millisecond, 300*time.Millisecond, 5*time.Millisecond
	t.Cleanup(func() { leaseEvery, leaseDead, leaseLook, thisProcess = every, dead, look, who })
}

var realProcess = thisProcess

// on makes what follows the work of a machine of that number; 0 is this one.
func on(n byte) {
	thisProcess = func() process {
		p := realProcess()
		if n > 0 {
			p.Boot, p.Host = [16]byte{n}, [64]byte{'h', 'o', 's', 't', '0' + n}
		}
		return p
	}
}

// reads is Attached.Hold on simulated SSDs.
func reads(d *dataset.Dataset, s []*simSSD, note func(string)) (*Lease, error) {
	stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	if err != nil {
		return nil, err
	}
	var out []*leased
	for _, x := range stripes {
		out = append(out, &leased{name: x.t.name, loads: x.sb.LoadID, place: x.t.slot,
			mine: wireLease{Dataset: d.UUID()},
			open: func(context.Context) (*target, error) {
				open := *x.t
				open.dev = staysOpen{open.dev}
				return &open, nil
			}})
	}
	return hold(bg, out, thisProcess(), false, note)
}

func shared(o LoadOptions) LoadOptions { o.shared = true; return o }

// TestLeaseRefusesLoads: while one machine reads, no other loads, makes pages or removes some;
// several read at once; when all have ended everything goes, and nothing is left on the SSDs.
func TestLeaseRefusesLoads(t *testing.T) {
	lively(t)
	d := small(t, 300, 64, 1)
	for _, lba := range []int{512, 4096} {
		s := sims(2, lba)
		on(1)
		must(load(bg, d, targetsOf(s...), shared(LoadOptions{})))
		before := slices.Clone(s[0].durable)
		var held []*Lease
		for n := range byte(5) {
			on(n)
			l, err := reads(d, s, nil)
			require.NoError(t, err)
			held = append(held, l)
		}
		on(7)
		var notes []string
		_, err := load(bg, d, targetsOf(s...), shared(LoadOptions{Force: "SER0,SER1",
			Note: func(s string) { notes = append(notes, s) }}))
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "reads it; wait until that has ended")
		for i, l := range held {
			on(7)
			_, err := holdToWrite(bg, targetsOf(s[1]), uuid.Nil, nil)
			require.Equal(t, errs.Refused, errs.ClassOf(err), "%d readers: %v", 5-i, err)
			require.NoError(t, l.Err())
			require.NoError(t, l.Close())
		}
		require.Equal(t, before, s[0].durable, "nothing is left of a lease")
		must(load(bg, d, targetsOf(s...), shared(LoadOptions{})))
	}
}

// TestLeaseOfTheDead: a record that does not move any more is no reason to refuse: at once where
// its process is known to be gone, and else after a while, which a note tells.
func TestLeaseOfTheDead(t *testing.T) {
	lively(t)
	d := small(t, 300, 64, 1)
	s := sims(1, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	leave := func(p process) {
		w := wireLease{Version: leaseVersion, Owner: uuid.New(), Count: 7, process: p}
		copy(w.Magic[:], leaseMagic)
		require.NoError(t, targetsOf(s[0])[0].putLease(bg, 3, &w))
	}
	for name, c := range map[string]struct {
		change func(p *process)
		waits  bool
	}{
		"no such process":          {func(p *process) { p.PID = 1 << 30 }, false},
		"a number used again":      {func(p *process) { p.Started++ }, false},
		"another host":             {func(p *process) { p.Boot[3]++ }, true},
		"another container":        {func(p *process) { p.Space++ }, true},
		"a host that says nothing": {func(p *process) { *p = process{PID: 9} }, true},
	} {
		t.Run(name, func(t *testing.T) {
			on(0)
			p := realProcess()
			c.change(&p)
			leave(p)
			var notes []string
			began := time.Now()
			l, err := holdToWrite(bg, targetsOf(s...), uuid.Nil,
				func(s string) { notes = append(notes, s) })
			require.NoError(t, err)
			if c.waits {
				require.GreaterOrEqual(t, time.Since(began), leaseDead)
			}
			require.Equal(t, c.waits, len(notes) == 1, notes)
			all, err := targetsOf(s[0])[0].leases(bg)
			require.NoError(t, err)
			require.True(t, all[3] == nil || all[3].Owner == l.ssds[0].mine.Owner)
			require.NoError(t, l.Close())
		})
	}
	// A record that is torn, or nobody's, is none; a full house reads with a note, and writes
	// nothing.
	copy(s[0].durable[leaseAt:], "HeliosLs and something else")
	l, err := holdToWrite(bg, targetsOf(s...), uuid.Nil, nil)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	p := realProcess()
	p.Boot[0]++
	for i := range leaseSlots {
		w := wireLease{Version: leaseVersion, Owner: uuid.New(), process: p}
		copy(w.Magic[:], leaseMagic)
		require.NoError(t, targetsOf(s[0])[0].putLease(bg, i, &w))
	}
	var notes []string
	l, err = reads(d, s, func(s string) { notes = append(notes, s) })
	require.NoError(t, err)
	require.Contains(t, notes[0], "no room for more")
	require.NoError(t, l.Close())
}

// TestLeaseBeforeTheSuperblock: a load that is killed between its lease and its superblock leaves
// an SSD that is as free as before; what only resembles a lease is somebody's.
func TestLeaseBeforeTheSuperblock(t *testing.T) {
	lively(t)
	d := small(t, 300, 64, 1)
	for lba, named := range map[int]string{512: "byte 806912", 4096: "byte 811007"} {
		s := sims(1, lba)
		p := realProcess()
		p.PID = 1 << 30
		w := wireLease{Version: leaseVersion, Owner: uuid.New(), process: p}
		copy(w.Magic[:], leaseMagic)
		copy(s[0].durable[leaseAt+5*leaseSlot:], w.encode(lba))
		s[0].durable[leaseAt+5*leaseSlot+lba-1] ^= 1
		_, err := load(bg, d, targetsOf(s...), LoadOptions{})
		require.ErrorContains(t, err, "something unknown, not empty: "+named)
		s[0].durable[leaseAt+5*leaseSlot+lba-1] ^= 1
		must(load(bg, d, targetsOf(s...), LoadOptions{}))
	}
}

// TestLeaseRace: of a reader and a writer that begin at once, and of two writers, at most one goes
// on.
func TestLeaseRace(t *testing.T) {
	lively(t)
	d := small(t, 300, 64, 1)
	s := sims(1, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	for range 10 {
		var wg sync.WaitGroup
		var got [2]*Lease
		for i := range got {
			wg.Go(func() {
				x := &leased{open: func(context.Context) (*target, error) {
					y := targetsOf(s[0])[0]
					y.dev = staysOpen{y.dev}
					return y, nil
				}}
				got[i], _ = hold(bg, []*leased{x}, process{Boot: [16]byte{byte(i + 1)}}, true, nil)
			})
		}
		wg.Wait()
		require.False(t, got[0] != nil && got[1] != nil)
		for _, l := range got {
			if l != nil {
				require.NoError(t, l.Close())
			}
		}
	}
}

// TestLeaseLost: a reader whose stripe was written by somebody who did not look hears of it, while
// it reads and when it ends.
func TestLeaseLost(t *testing.T) {
	lively(t)
	d := small(t, 300, 64, 1)
	s := sims(1, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	l, err := reads(d, s, nil)
	require.NoError(t, err)
	require.NoError(t, l.Err())
	why := errors.New("the loss is NaN")
	require.Equal(t, why, l.Blame(bg, why))
	must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "float16"})) // an older version's
	select {
	case <-l.Lost():
	case <-time.After(20 * time.Second):
		t.Fatal("nobody noticed")
	}
	require.Equal(t, errs.Device, errs.ClassOf(l.Err()))
	require.ErrorContains(t, l.Blame(bg, why), "was written anew while this run read it")
	require.NoError(t, l.Close(), "that was told")
	leaseEvery = time.Hour
	l, err = reads(d, s, nil)
	require.NoError(t, err)
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	require.ErrorContains(t, l.Close(), "was written anew", "it looks when it ends, too")
}

// loopDevice makes another path to a file.
func loopDevice(t *testing.T, file string) string {
	out, err := exec.Command("losetup", "--find", "--show", file).CombinedOutput()
	if err != nil {
		t.Skipf("no loop devices here: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "--detach", dev).Run()) })
	return dev
}

// TestLeaseOfTwoViews: two machines reach one disk, each by a path of its own, which no lock joins.
// While one reads it, the other's load is refused, whatever its options; verify is not.
func TestLeaseOfTwoViews(t *testing.T) {
	lively(t)
	leaseDead = time.Minute // a busy disk takes its time
	d := small(t, 300, 64, 1)
	disk := backing(t, 1, false, 16<<20)[0]
	views := []string{loopDevice(t, disk), loopDevice(t, disk)}
	on(1)
	here, closeHere := openProxies(t, views[:1], false, 512, "")
	defer closeHere()
	_, err := Load(bg, d, here, LoadOptions{})
	require.NoError(t, err)
	a, err := Find(bg, d, here, AttachOptions{})
	require.NoError(t, err)
	held, err := a.Hold(bg, nil)
	require.NoError(t, err)

	on(2)
	there, closeThere := openProxies(t, views[1:], false, 512, "")
	defer closeThere()
	for _, o := range []LoadOptions{{}, {Restart: true}, {RowType: "float16"},
		{Force: there[0].Ctrl.Serial(), Restart: true}} {
		_, err = Load(bg, d, there, o)
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%+v: %v", o, err)
		require.Regexp(t, `^load of .*: ssd loop\d+: ".*" \(process \d+ on host1.*, last seen .* by its clock\) `+
			`reads it; wait until that has ended, stop it, or choose other SSDs$`, err.Error())
	}
	_, err = Verify(bg, d, there, VerifyOptions{})
	require.NoError(t, err)
	require.Equal(t, errs.Refused, errs.ClassOf(Unused(bg, there, nil)))
	require.NoError(t, here[0].Ctrl.Reset(bg))
	held.err = errs.New(errs.Device, "it was written anew")
	require.ErrorIs(t, here[0].Ctrl.Reset(bg), nvme.ErrTaken, "another's by now")
	held.err = nil
	require.NoError(t, held.Close(), "the load is the one that the run began with")
	require.NoError(t, Unused(bg, there, nil))
	_, err = Load(bg, d, there, LoadOptions{Restart: true})
	require.NoError(t, err)
}
