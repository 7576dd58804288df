package proxy

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/nvme"
)

// ramp is content whose 4-byte words are their own offsets; it fails at bad.
type ramp struct {
	bad   atomic.Int64
	calls atomic.Int64
}

var errRamp = errors.New("cannot be computed")

func (r *ramp) ReadAt(p []byte, off int64) (int, error) {
	r.calls.Add(1)
	if b := r.bad.Load(); b != 0 && off <= b && b < off+int64(len(p)) {
		return 0, errRamp
	}
	var w [8]byte
	for i := 0; i < len(p); {
		pos := off + int64(i)
		binary.LittleEndian.PutUint64(w[:], uint64(pos/8))
		i += copy(p[i:], w[pos%8:])
	}
	return len(p), nil
}

// TestComputedContent reads far beyond 32 bits and with any PRPs, and finds what may fail to fail.
func TestComputedContent(t *testing.T) {
	const size = 5 << 40
	for _, lba := range []int{512, 4096} {
		c := &ramp{}
		g := newRig(t, Config{Path: "dataset", Name: "computed", Serial: "C0", Content: c,
			Bytes: size + 100, LBABytes: lba})
		q := g.pair(1, 64)
		for i, at := range []int64{0, 3 * 4096, 7<<32 + 4096*77, size - 64<<10} {
			for _, n := range []int{lba, 4096, 64 << 10} {
				for _, off := range []int{0, 4, 2048 + 12} { // into a page
					if off != 0 && lba == 4096 && n == 64<<10 {
						off = 0
					}
					p1, p2 := g.prps(1<<20+off, n, 4<<20)
					q.must(nvme.ReadCommand(uint16(i), 1, nvme.LBA(at/int64(lba)), uint32(n/lba),
						p1, p2))
					want := make([]byte, n)
					_, _ = c.ReadAt(want, at)
					require.Equal(t, want, g.mem[1<<20+off:][:n], "%d bytes at %d", n, at)
				}
			}
		}
		blocks := nvme.LBA(size / int64(lba))
		p1 := uint64(g.iova)
		q.want(nvme.StatusLBAOutOfRange, nvme.ReadCommand(1, 1, blocks, 1, p1, 0))
		q.want(nvme.StatusLBAOutOfRange, nvme.ReadCommand(1, 1, blocks-1, 2, p1, p1+4096))
		calls := c.calls.Load()
		q.want(nvme.StatusNamespaceReadOnly, nvme.WriteCommand(1, 1, 0, 1, p1, 0))
		require.Equal(t, calls, c.calls.Load())
		q.must(nvme.FlushCommand(1, 1))
		assert.EqualValues(t, nvme.WarnReadOnly, g.smart().CriticalWarning)

		c.bad.Store(1 << 20)
		e := q.Do(q.g.t, nvme.ReadCommand(2, 1, nvme.LBA(1<<20/lba), 1, p1, 0))
		assert.True(t, e.Status().Is(nvme.StatusUnrecoveredRead), e.Status())
		q.must(nvme.ReadCommand(2, 1, 0, 1, p1, 0))
		assert.EqualValues(t, 1, g.smart().MediaErrors.Lo)
	}
}

// Host memory that goes away under a read is an error of that read.
func TestComputedFault(t *testing.T) {
	c := &ramp{}
	g := newRig(t, Config{Path: "dataset", Name: "computed", Serial: "C0", Content: c,
		Bytes: 1 << 40})
	q := g.pair(1, 64)
	q.Put(nvme.ReadCommand(1, 1, 0, 1, 1<<50, 0)) // nobody has mapped that
	e, ok := q.Get(5 * time.Second)
	require.True(t, ok)
	assert.True(t, e.Status().Is(nvme.StatusDataTransferError), e.Status())
	require.Zero(t, c.calls.Load())
}

func TestComputedConfig(t *testing.T) {
	for _, cfg := range []Config{
		{Content: &ramp{}, Bytes: 1 << 20, Name: "x"},
		{Content: &ramp{}, Bytes: 1 << 20, Serial: "x"},
		{Content: &ramp{}, Bytes: 100, Name: "x", Serial: "x"},
		{Content: &ramp{}, Bytes: 1 << 20, Name: "x", Serial: "x", RAM: true},
		{Content: &ramp{}, Bytes: 1 << 20, Name: "x", Serial: "x", Buffered: true},
	} {
		_, err := Open(cfg)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	}
}
