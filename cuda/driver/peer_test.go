package driver

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/cuda/fakecuda"
)

// exchange shows that a mapping and the GPU see one memory: what either stores the other loads.
func exchange(t *testing.T, d *Device, b cuda.Buffer, m cuda.PeerMapping) {
	t.Helper()
	s := streamOf(t, d, cuda.StreamOptions{Name: "peer"})
	pinned, err := d.Alloc(cuda.MemPinned, b.Size(), "pattern")
	require.NoError(t, err)
	mem := m.Bytes()
	require.Len(t, mem, int(b.Size()))
	for i := range mem {
		mem[i] = byte(i*7 + i>>8)
	}
	require.NoError(t, s.Copy(pinned.Ptr(), b.Ptr(), b.Size()))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.True(t, bytes.Equal(mem, pinned.Bytes()), "stores of the CPU's side reach the GPU")
	require.NoError(t, s.Fill(b.Ptr(), 0x5a, b.Size()))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.Equal(t, bytes.Repeat([]byte{0x5a}, len(mem)), mem, "stores of the GPU are seen")
	require.NoError(t, errors.Join(pinned.Free(), s.Close()))
}

func TestPeerByDMABuf(t *testing.T) {
	d, _ := device(t, "", Options{})
	require.NoError(t, d.PeerMethods()[0].Err)
	b, err := d.Alloc(cuda.MemDevice, 3<<20+5000, "queues")
	require.NoError(t, err)
	m, err := d.MapPeer(b, "dma-buf")
	require.NoError(t, err)
	exchange(t, d, b, m)
	fd, off := m.DMABuf()
	require.Zero(t, off)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.ErrorContains(t, b.Free(), "queues is mapped for the DMA of other devices")
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.Nil(t, m.Bytes())
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.Error(t, err, "the dma-buf is closed")
	require.NoError(t, b.Free())
	_, err = d.MapPeer(b, "dma-buf")
	require.ErrorContains(t, err, "not a live buffer")
	require.NoError(t, d.Close())
}

// A device that is closed under a mapping keeps the memory: an SSD may be writing to it.
func TestPeerOutlivesClose(t *testing.T) {
	lib := fake(t, "")
	d, err := Open(Options{Library: lib})
	require.NoError(t, err)
	b, err := d.Alloc(cuda.MemDevice, 8192, "queues")
	require.NoError(t, err)
	m, err := d.MapPeer(b, "dma-buf")
	require.NoError(t, err)
	err = d.Close()
	require.ErrorContains(t, err, `peer mapping of "queues" (8192 bytes)`)
	m.Bytes()[8191] = 3
	require.Contains(t, fakecuda.Control(t, lib, "live"), "device=1 ")
	require.NoError(t, m.Close())
}
