//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/testing/fakecuda"
)

// The file of shared memory has what the device writes there, and goes with the buffer. Each call
// that making it takes fails once, and leaves nothing behind.
func TestAllocShared(t *testing.T) {
	const granule = 64 << 10
	d, lib := device(t, "mem=268435456", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "s"})
	require.NotEmpty(t, d.PCIBusID())
	for _, call := range []string{"cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap",
		"cuMemRelease", "cuMemSetAccess", "cuMemsetD8Async"} {
		fakecuda.Control(t, lib, fmt.Sprintf("fail=%s:1:304", call))
		_, err := d.AllocShared(3*granule, "ring")
		require.ErrorContains(t, err, call)
		fakecuda.Control(t, lib, fmt.Sprintf("fail=%s:1:0:0", call))
		require.Contains(t, fakecuda.Control(t, lib, "live"), " reserved=0 physical=0 ", call)
	}
	const size = pieceBytes + granule + 100 // more than a piece of memory that grows
	b, err := d.AllocShared(size, "ring")
	require.NoError(t, err)
	fd, n := b.File()
	require.EqualValues(t, pieceBytes+2*granule, n)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC)
	m, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ, unix.MAP_SHARED) // the fake's is in memory
	require.NoError(t, err)
	require.Zero(t, bytes.TrimLeft(m, "\x00"), "it is clean")
	require.NoError(t, s.Fill(b.Ptr()+size-1, 7, 1))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.EqualValues(t, 7, m[size-1])
	require.NoError(t, errors.Join(b.Free(), s.Close()))
	require.EqualValues(t, 7, m[size-1], "who has it mapped keeps it")
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.ErrorIs(t, err, unix.EBADF)
	require.NoError(t, unix.Munmap(m))
	require.Contains(t, fakecuda.Control(t, lib, "live"), " reserved=0 physical=0 ")
	require.NoError(t, d.Close())
}

func TestAllocSharedNeedsTheDriver(t *testing.T) {
	d, _ := device(t, "vmm=0", Options{})
	_, err := d.AllocShared(1, "ring")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.NoError(t, d.Close())
}
