package nvmewalk_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/faultinject"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
	walk "helios/tools/nvmewalk"
)

// must takes a walk and fails on everything that is wrong.
func must(t *testing.T, target walk.Target) []walk.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	all, err := walk.Walk(ctx, target)
	if err != nil || testing.Verbose() || len(walk.Failed(all)) > 0 {
		t.Logf("\n%s", walk.Table(all))
	}
	require.NoError(t, err)
	for _, r := range walk.Failed(all) {
		t.Errorf("%s: want %s, got %s: %s\n%s", r.Step, r.Want, r.Got, r.Why, r.Text)
	}
	return all
}

// unmapped is an address that the proxy never gives out.
const unmapped = 0x10

// The proxy answers as the specification has it.
func TestProxy(t *testing.T) {
	for _, cfg := range []proxy.Config{
		{LBABytes: 512, RAM: true},
		{LBABytes: 4096, RAM: true, MDTS: 2, OutOfOrder: true},
		{LBABytes: 512},
		{LBABytes: 4096, MaxQueuePairs: 1, MDTS: 1, MaxQueueEntries: 64},
		{LBABytes: 512, NoIOUring: true, ReadOnly: true},
	} {
		t.Run(fmt.Sprintf("lba=%d ram=%v mdts=%d pairs=%d ro=%v", cfg.LBABytes, cfg.RAM, cfg.MDTS,
			cfg.MaxQueuePairs, cfg.ReadOnly), func(t *testing.T) {
			testrig.CheckLeaks(t)
			cfg.Path = filepath.Join(t.TempDir(), "ssd.img")
			require.NoError(t, proxy.Create(cfg.Path, 16<<20))
			before, err := os.ReadFile(cfg.Path)
			require.NoError(t, err)
			all := must(t, walk.Target{
				Open:       func(context.Context) (nvme.Bus, error) { return proxy.Open(cfg) },
				BadAddress: unmapped,
			})
			verdicts := map[walk.Verdict]int{}
			for _, r := range all {
				verdicts[r.Verdict]++
			}
			require.Zero(t, verdicts[walk.Lenient], "the proxy reads no other way")
			require.Greater(t, verdicts[walk.Right], 55)
			after, err := os.ReadFile(cfg.Path)
			require.NoError(t, err)
			require.Equal(t, before, after, "the walk writes nothing")
		})
	}
}

// A controller that answers wrongly is found out.
func TestFindsWrongAnswers(t *testing.T) {
	testrig.CheckLeaks(t)
	path := filepath.Join(t.TempDir(), "ssd.img")
	require.NoError(t, proxy.Create(path, 16<<20))
	for _, c := range []struct{ fault, step string }{
		{"error(op=abort,sct=0,sc=0x06)", "abort with nothing to abort"},
		{"error(op=features,sct=0,sc=0x0b,after=2)", "set a reserved feature"},
		{"error(op=deleteq,sct=1,sc=0x00,after=1,times=1)", "delete an SQ that is not there"},
		{"error(op=read,lba=32767,sct=2,sc=0x81)", "read over the end"},
	} {
		set, err := faultinject.Parse(c.fault)
		require.NoError(t, err)
		all, _ := walk.Walk(t.Context(), walk.Target{Open: func(context.Context) (nvme.Bus, error) {
			b, err := proxy.Open(proxy.Config{Path: path, RAM: true})
			if err != nil {
				return nil, err
			}
			return faultbus.New(b, set, faultbus.Options{}), nil
		}})
		found := false
		for _, r := range walk.Failed(all) {
			found = found || r.Step == c.step
		}
		require.True(t, found, "%s\n%s", c.fault, walk.Table(all))
		require.Contains(t, walk.Table(all), "WRONG: no such answer is known")
	}
}
