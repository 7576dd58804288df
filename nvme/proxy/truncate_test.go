package proxy

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/nvme"
)

// A backing that somebody truncates under a running SSD gives read errors, and does not take the
// process down: memory of a mapping beyond the file's end faults.
func TestTruncatedBacking(t *testing.T) {
	for name, cfg := range map[string]Config{"ram": {RAM: true}, "file": {},
		"buffered": {Buffered: true}, "pread": {NoIOUring: true}} {
		t.Run(name, func(t *testing.T) {
			cfg.Path = newFile(t, 1<<20, cfg.RAM)
			g := newRig(t, cfg)
			q := g.pair(1, 16)
			require.NoError(t, os.Truncate(cfg.Path, 256<<10))
			off := uint64(g.iova)
			q.must(nvme.ReadCommand(1, 1, 0, 8, off, 0))
			for _, c := range []nvme.Command{
				nvme.ReadCommand(2, 1, 1024, 8, off, 0),
				nvme.ReadCommand(3, 1, 1024, 16, off, off+4096),
				nvme.ReadCommand(4, 1, 1024, 8, off+2048, off+8192),
			} {
				e := q.Do(q.g.t, c)
				assert.True(t, e.Status().Is(nvme.StatusUnrecoveredRead), "%v", e.Status())
			}
			if cfg.RAM {
				e := q.Do(q.g.t, nvme.WriteCommand(5, 1, 1024, 16, off, off+4096))
				assert.True(t, e.Status().Is(nvme.StatusWriteFault), "%v", e.Status())
			}
			q.must(nvme.ReadCommand(6, 1, 8, 8, off, 0))
			log := g.bus.smart
			g.bus.mu.Lock()
			media := log().MediaErrors.Lo
			g.bus.mu.Unlock()
			assert.GreaterOrEqual(t, media, uint64(3))
		})
	}
}
