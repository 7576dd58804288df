package faultinject

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func TestParseAndPrint(t *testing.T) {
	for in, want := range map[string]string{
		"": "",
		"error(op=read,lba=100-199,sct=2,sc=0x81,dnr=1,times=3)": "error(op=read,lba=100-199,sct=2,sc=0x81,dnr=1,times=3)",
		" lost( times = 1 , op = write ) ; late(ms=50)":          "lost(op=write,times=1);late(ms=50)",
		"error(sc=4,sct=0)":                    "error(sct=0,sc=0x04)",
		"late(ms=5,lba=7-7,after=0x10,op=any)": "late(ms=5,lba=7,after=16)",
		"lost()":                               "lost()",
		"drop();dup(op=abort);phase(op=admin)": "drop();dup(op=abort);phase(op=admin)",
		"dup(n=24);dup(n=0,lba=1)":             "dup(n=24);dup(lba=1)",
		"foreign();foreign(cid=0)":             "foreign();foreign(cid=0x0000)",
		"flip(byte=3,bit=7);flip()":            "flip(byte=3,bit=7);flip(byte=0,bit=0)",
		"short();short(op=read,bytes=0x10)":    "short(bytes=0);short(op=read,bytes=16)",
		"misdirect();misdirect(shift=9)":       "misdirect(shift=1);misdirect(shift=9)",
		"torn(op=write);reorder();slow(us=7)":  "torn(op=write);reorder(n=8);slow(us=7)",
		"stuck(op=createq);torndb(op=deleteq);cqstuck(op=log);sqhead();sqid()":     "stuck(op=createq);torndb(op=deleteq);cqstuck(op=log);sqhead();sqid()",
		"cfs(op=identify);gone(op=features,after=3);notready(times=2);stayready()": "cfs(op=identify);gone(op=features,after=3);notready(times=2);stayready()",
		"error(sct=2,sc=0x81,lba=0-18446744073709551615,op=flush,dnr=0)":           "error(op=flush,lba=0-18446744073709551615,sct=2,sc=0x81)",
	} {
		s, err := Parse(in)
		require.NoError(t, err, in)
		assert.Equal(t, want, s.String(), in)
		assert.Equal(t, want == "", s.Empty())
	}
}

func TestParseErrors(t *testing.T) {
	for _, in := range []string{
		"lost", "lost(", "lost)", "boom()", "lost(op=erase)", "lost(op)", "lost(op=)", "lost(,)",
		"lost(a=1)",
		"lost(lba=5-3)", "lost(lba=-3)", "lost(lba=x)", "lost(times=-1)", "lost(times=1,times=2)",
		"lost(ms=5)",
		"late()", "late(ms=0)", "late(ms=99999999)", "error()", "error(sct=0,sc=0)",
		"error(sct=8,sc=1)", "error(sct=2,sc=0x181)",
		"lost(sct=2)", "error(sct=2,sc=1,dnr=2)", "lost();", ";", "lost(times=1_0)",
		"lost(times=+1)", "lost(times=0x)", "lost(times=99999999999999999999)",
		"flip(op=write)", "flip(bit=8)", "flip(bytes=1)", "torn(op=read)", "misdirect(op=flush)",
		"misdirect(shift=0)", "short(op=abort)",
		"reorder(n=1)", "reorder(n=1025)", "slow()", "slow(ms=1)", "slow(us=0)",
		"slow(us=60000001)", "late(us=5)", "drop(sct=1,sc=1)",
		"foreign(cid=0x10000)", "notready(op=read)", "stayready(lba=1)", "lost(op=abort,lba=1)",
		"cfs(ms=1)", "op=read",
	} {
		_, err := Parse(in)
		if assert.Error(t, err, in) {
			assert.Equal(t, errs.Usage, errs.ClassOf(err), in)
			assert.NotContains(t, err.Error(), "\n")
		}
	}
	for _, f := range []Fault{{Kind: kindEnd, AllLBAs: true},
		{Kind: Lost, AllLBAs: true, Last: 3}} {
		assert.Error(t, f.Validate())
	}
}

func TestMatch(t *testing.T) {
	s, err := Parse(
		"error(op=read,lba=10-19,sct=2,sc=0x81,after=1,times=2);late(ms=3,lba=19);late(ms=4,op=read,lba=19);lost(op=flush)")
	require.NoError(t, err)
	hit := func(op Op, lba uint64, n uint32) Action {
		a, ok := s.Match(op, lba, n)
		assert.Equal(t, a != Action{}, ok)
		return a
	}
	assert.Equal(t, Action{}, hit(Write, 12, 1))
	assert.Equal(t, Action{}, hit(Read, 9, 1), "before the range")
	assert.Equal(t, Action{}, hit(Read, 20, 1), "behind it")
	assert.Equal(t, Action{}, hit(Read, 0, 10))
	assert.Equal(t, Action{}, hit(Read, 9, 2), "the first match passes")
	assert.Equal(t, Action{Fail: true, SCT: 2, SC: 0x81}, hit(Read, 9, 2))
	assert.Equal(t, Action{Fail: true, SCT: 2, SC: 0x81, Delay: 7 * time.Millisecond},
		hit(Read, 19, 1), "all faults that match")
	assert.Equal(t, Action{Delay: 7 * time.Millisecond}, hit(Read, 15, 1<<20), "exhausted")
	assert.Equal(t, Action{Delay: 3 * time.Millisecond}, hit(Write, 0, 1<<31))
	assert.Equal(t, Action{Lost: true, Delay: 3 * time.Millisecond}, hit(Flush, 0, 0),
		"a flush touches every block")
	assert.Equal(t, map[string]int64{
		"error(op=read,lba=10-19,sct=2,sc=0x81,after=1,times=2)": 2,
		"late(ms=3,lba=19)":         4,
		"late(ms=4,op=read,lba=19)": 2,
		"lost(op=flush)":            1,
	}, s.Counts())

	// Ranges at the end of the number space do not wrap.
	s, err = Parse("lost(lba=18446744073709551615)")
	require.NoError(t, err)
	assert.Equal(t, Action{}, hit(Read, 0, 1<<32-1))
	assert.Equal(t, Action{Lost: true}, hit(Read, 1<<64-1, 9))

	var none *Set
	_, ok := none.Match(Read, 0, 1)
	assert.False(t, ok)
	assert.True(t, none.Empty())
	assert.Empty(t, none.Counts())
	assert.Empty(t, none.String())
}

// times is exact under concurrency, and every hit is counted.
func TestMatchConcurrently(t *testing.T) {
	s, err := Parse("lost(after=50,times=100)")
	require.NoError(t, err)
	var wg sync.WaitGroup
	hits := make(chan int, 8)
	for range 8 {
		wg.Go(func() {
			n := 0
			for range 1000 {
				if _, ok := s.Match(Read, 1, 1); ok {
					n++
				}
			}
			hits <- n
		})
	}
	wg.Wait()
	close(hits)
	total := 0
	for n := range hits {
		total += n
	}
	assert.Equal(t, 100, total)
	assert.Equal(t, map[string]int64{"lost(after=50,times=100)": 100}, s.Counts())
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "error(op=read,lba=1-2,sct=2,sc=0x81,dnr=1,times=3,after=1)",
		"lost();late(ms=7)", "lost(lba=0x10)", "late(ms=1,op=any)"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		s, err := Parse(in)
		if err != nil {
			return
		}
		out := s.String()
		again, err := Parse(out)
		if err != nil {
			t.Fatalf("%q prints as %q, which does not parse: %v", in, out, err)
		}
		if again.String() != out || len(again.faults) != len(s.faults) {
			t.Fatalf("%q prints as %q and then as %q", in, out, again)
		}
		for i := range s.faults {
			if s.faults[i].Fault != again.faults[i].Fault {
				t.Fatalf("%q: fault %d: %+v became %+v", in, i, s.faults[i].Fault,
					again.faults[i].Fault)
			}
			require.NoError(t, s.faults[i].Validate())
		}
		s.Match(Read, 5, 3)
	})
}

func TestMatchOperations(t *testing.T) {
	s, err := Parse("drop(op=admin);dup(op=abort);phase();cfs(op=read);stuck(op=any)")
	require.NoError(t, err)
	for op, want := range map[Op]Action{
		Read: {Phase: true, CFS: true, Stuck: true}, Write: {Phase: true, Stuck: true},
		Flush: {Phase: true, Stuck: true},
		Admin: {Drop: true}, Identify: {Drop: true}, Abort: {Drop: true, Dup: true},
	} {
		got, _ := s.Match(op, 5, 1)
		assert.Equal(t, want, got, op)
	}
	// Kinds of data look only at commands that have such data.
	s, err = Parse("flip(byte=3,bit=1);short(bytes=4);torn();misdirect(shift=2)")
	require.NoError(t, err)
	for op, want := range map[Op]Action{
		Read:  {Flip: true, FlipByte: 3, FlipBit: 1, Short: true, ShortBytes: 4, Shift: 2},
		Write: {Torn: true, Shift: 2}, Flush: {}, Identify: {},
	} {
		got, _ := s.Match(op, 5, 1)
		assert.Equal(t, want, got, op)
	}
	flip, err := Parse("flip(lba=7-9,byte=3)")
	require.NoError(t, err)
	for lba, block := range map[uint64]uint32{5: 2, 7: 0, 8: 0} {
		got, _ := flip.Match(Read, lba, 4)
		assert.Equal(t, Action{Flip: true, FlipByte: 3, FlipBlock: block}, got)
	}
	assert.Equal(t, map[string]int64{"flip(byte=3,bit=1)": 1, "short(bytes=4)": 1, "torn()": 1,
		"misdirect(shift=2)": 2}, s.Counts())
}

func TestMatchEvents(t *testing.T) {
	s, err := Parse(
		"cfs(times=1);gone();notready(after=1,times=2);stayready(times=1);cfs(op=read,after=1);gone(after=2)")
	require.NoError(t, err)
	event := func(e Event, want Action) {
		t.Helper()
		got, hit := s.MatchEvent(e)
		assert.Equal(t, want, got)
		assert.Equal(t, want != Action{}, hit)
	}
	event(Attach, Action{Gone: true})
	event(Enable, Action{CFS: true})
	event(Enable, Action{Hang: true})
	event(Disable, Action{Hang: true})
	event(Enable, Action{Hang: true})
	event(Enable, Action{})
	event(Disable, Action{})
	for i, want := range []Action{{}, {CFS: true}, {CFS: true, Gone: true}} {
		got, _ := s.Match(Read, 0, 1)
		assert.Equal(t, want, got, i)
	}
	s.Disarm()
	event(Enable, Action{})
	_, hit := s.Match(Read, 0, 1)
	assert.False(t, hit)
	assert.EqualValues(t, 2, s.Counts()["cfs(op=read,after=1)"])
	var none *Set
	_, hit = none.MatchEvent(Enable)
	assert.False(t, hit)
}
