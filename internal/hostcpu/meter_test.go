package hostcpu

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// compute takes so much of its thread's CPU time.
func compute(d time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for from := ThreadTime(); ThreadTime()-from < d; {
	}
}

func TestSection(t *testing.T) {
	by := Spender{"test", t.Name()}
	run := func() {
		s := Begin()
		compute(2 * time.Millisecond)
		time.Sleep(30 * time.Millisecond) // takes none
		s.End(by)
	}
	run()
	require.NotContains(t, Spent(), by, "nobody asked")
	stop := Meter()
	defer stop()
	was := Now()
	run()
	now := Now()
	spent, sum := now.Since(was)
	require.GreaterOrEqual(t, spent[by], 2*time.Millisecond)
	require.Less(t, spent[by], 20*time.Millisecond)
	require.LessOrEqual(t, spent[by], sum)
	require.LessOrEqual(t, spent[by], now.Process-was.Process+10*time.Millisecond)
	stop()
	stop() // has no effect
	require.False(t, Metering())
	require.Nil(t, Now().Spent)
}

func TestThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	x := Thread{By: Spender{"test", t.Name()}}
	x.Lap()
	compute(2 * time.Millisecond) // before anybody asks
	stop := Meter()
	x.Lap()
	require.NotContains(t, Spent(), x.By)
	compute(2 * time.Millisecond)
	x.Lap()
	stop()
	d := Spent()[x.By]
	require.GreaterOrEqual(t, d, 2*time.Millisecond)
	compute(2 * time.Millisecond)
	x.Lap() // it began while somebody asked
	require.GreaterOrEqual(t, Spent()[x.By], d+2*time.Millisecond)
	d = Spent()[x.By]
	compute(2 * time.Millisecond)
	x.Lap()
	require.Equal(t, d, Spent()[x.By])
}

func TestWorkers(t *testing.T) {
	dir := t.TempDir()
	for id, x := range map[string][2]string{"1": {"heliosctl", "70 1 1"},
		"2": {"iou-wrk-1", "30 5 9"}, "3": {"iou-sqp-1", "12 5 9"}} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, id), 0o700))
		for i, name := range []string{"comm", "schedstat"} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, id, name), []byte(x[i]+"\n"), 0o600))
		}
	}
	require.EqualValues(t, 42, workers(dir))
}

func TestIdle(t *testing.T) {
	file := filepath.Join(t.TempDir(), "stat")
	require.NoError(t, os.WriteFile(file, []byte("cpu  10 0 10 700 300 0 5 1 0 0\n"+
		"cpu0 5 0 5 400 100 0 5 0 0 0\ncpu1 5 0 5 300 200 0 0 1 0 0\nintr 12 0 0 0 0 0\n"), 0o600))
	sum, n := idle(file)
	require.Equal(t, 10*time.Second, sum)
	require.Equal(t, 2, n)
	sum, n = idle(file + "?")
	require.Zero(t, sum)
	require.Zero(t, n)
}
