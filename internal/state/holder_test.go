package state

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/durable"
)

func TestHolder(t *testing.T) {
	look := func(pid int) (durable.Process, bool) {
		p, ok := map[int]durable.Process{
			1: {Comm: "systemd", Start: "1"}, 4711: {Comm: "heliosctl", Start: "500"},
			99: {Comm: "\x1b[2Jsh", Start: "7"},
		}[pid]
		return p, ok
	}
	for _, c := range []struct {
		text   string
		kernel int
		want   string
	}{
		{"heliosctl train (process 4711, started 500)\n", 0, "heliosctl train (process 4711)"},
		{"heliosctl bench io (process 4711, started 500)\n", 4711,
			"heliosctl bench io (process 4711)"},
		// of an older heliosctl
		{"heliosctl train (process 4711)\n", 4711, "heliosctl train (process 4711)"},
		{"heliosctl train (process 4711)\n", 0,
			`another process; the lease file claims "heliosctl train (process 4711)", which is not borne out`},
		{"heliosctl train (process 4711, started 400)\n", 0,
			`another process; the lease file claims "heliosctl train (process 4711, started 400)", which is not borne out`},
		{"heliosctl train (process 4712, started 500)\n", 0,
			`another process; the lease file claims "heliosctl train (process 4712, started 500)", which is not borne out`},
		{"heliosctl train (process 1, started 1)\n", 0,
			`another process; the lease file claims "heliosctl train (process 1, started 1)", which is not borne out`},
		{"systemd (process 1)\n", 0,
			`another process; the lease file claims "systemd (process 1)", which is not borne out`},
		{"systemd (process 1)\n", 4711,
			`process 4711 ("heliosctl"); the lease file claims "systemd (process 1)", which is not borne out`},
		{"heliosctl train (process 4711, started 500)", 99,
			`process 99 ("\x1b[2Jsh"); the lease file claims "heliosctl train (process 4711, started 500)", which is not borne out`},
		{"", 0, "another process"},
		{"", 12345, "process 12345"},
	} {
		require.Equal(t, c.want, holder(c.text, c.kernel, look), "%q, kernel %d", c.text, c.kernel)
	}
	long := holder("\x1b]0;x\x07"+strings.Repeat("\x1b", 500), 0, look)
	require.NotContains(t, long, "\x1b")
	require.Less(t, len(long), 600)
}

// The text of a lease file that somebody else has written is no answer to the question who uses
// the SSD.
func TestForgedLease(t *testing.T) {
	s, err := Open(t.TempDir())
	require.NoError(t, err)
	for _, text := range []string{"systemd (process 1)\n", "heliosctl train (process 1)\n",
		"\x1b[2J\x1b[31mformat the disk\n"} {
		require.NoError(t, os.MkdirAll(s.Dir(), 0o755))
		f, err := os.OpenFile(filepath.Join(s.Dir(), "ssd0.lock"),
			os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
		require.NoError(t, err)
		_, err = f.WriteString(text)
		require.NoError(t, err)
		require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB))
		_, err = s.Acquire("heliosctl train", "ssd0")
		require.ErrorContains(t, err, fmt.Sprintf("the lease file claims %q",
			strings.TrimSpace(text)))
		require.NotContains(t, err.Error(), "\x1b")
		require.NotContains(t, err.Error(), "in use by "+strings.TrimSpace(text))
		require.NoError(t, f.Close())
	}
}
