//go:build linux && (amd64 || arm64) && !nocuda

package driver_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/testing/fakecuda"
)

// fakePair opens two devices of the fake libcuda and builds the fake libnccl.
func fakePair(t *testing.T) (devices []cuda.Device, path string, fake func(string) string) {
	if gpu() {
		t.Skip("needs the fake libcuda")
	}
	lib, path := fakecuda.Build(t), fakecuda.BuildNCCL(t)
	fakecuda.Control(t, lib, "reset,sms=2,devices=2")
	fakecuda.Control(t, path, "reset,libcuda="+lib)
	for i := range 2 {
		d, err := driver.Open(driver.Options{Library: lib, Index: i})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		devices = append(devices, d)
	}
	return devices, path, func(command string) string { return fakecuda.Control(t, path, command) }
}

// Sums over two devices, in both of them, in the order of their streams.
func TestNCCL(t *testing.T) {
	devices, path, fake := fakePair(t)
	c, err := devices[0].(cuda.CollectiveOpener).OpenCollective(devices[1:], path)
	require.NoError(t, err)
	require.Equal(t, "NCCL 2.23.4", c.Name())
	var streams []cuda.Stream
	var sums []cuda.DevicePtr
	var mems []cuda.Buffer
	for i, d := range devices {
		s, err := d.NewStream(cuda.StreamOptions{Name: "sum"})
		require.NoError(t, err)
		b, err := d.Alloc(cuda.MemPinned, 400, "sums")
		require.NoError(t, err)
		for k := range floatsOf(b) {
			floatsOf(b)[k] = float32(k + 1000*i)
		}
		streams, mems, sums = append(streams, s), append(mems, b), append(sums, b.Ptr())
	}
	require.NoError(t, c.AllReduce(streams, sums, 99))
	for i, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
		got := floatsOf(mems[i])
		for k := range 99 {
			require.Equal(t, float32(2*k+1000), got[k])
		}
		require.Equal(t, float32(99+1000*i), got[99], "no more than was asked for")
	}
	require.ErrorContains(t, c.AllReduce(streams[:1], sums, 1), "1 streams and 2 places")
	require.ErrorContains(t, c.AllReduce([]cuda.Stream{streams[1], streams[0]}, sums, 1),
		"is not of device")
	require.ErrorContains(t, c.AllReduce(streams, sums, 1000), "memory")
	whole, err := devices[0].(cuda.CollectiveOpener).OpenCollective(devices[1:], path)
	require.NoError(t, err)
	require.NoError(t, whole.AllReduce(streams, sums, 4))
	for _, s := range streams {
		require.NoError(t, s.Synchronize(t.Context()))
	}
	require.NoError(t, whole.Close())
	require.Equal(t, "2", fake("calls=ncclCommDestroy"))
	require.Equal(t, "0", fake("calls=ncclCommAbort"))
	for _, call := range []string{"ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"} {
		fake("fail=" + call + ":1")
		err := c.AllReduce(streams, sums, 4)
		require.ErrorContains(t, err, call+": unhandled system error")
		require.Equal(t, errs.Device, errs.ClassOf(err))
	}
	require.NoError(t, c.AllReduce(streams, sums, 4), "a group that failed is over")
	require.Equal(t, "2", fake("comms"))
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	require.Equal(t, "0", fake("comms"))
	require.Equal(t, "2", fake("calls=ncclCommAbort"), "no wait for what failed")
	require.Equal(t, "2", fake("calls=ncclCommDestroy"), "as before")
	require.ErrorIs(t, c.AllReduce(streams, sums, 4), cuda.ErrClosed)
	for i, s := range streams {
		require.NoError(t, s.Close())
		require.NoError(t, mems[i].Free())
	}
}

// A library that is not there, is another one, is too old or refuses names itself and what to do.
func TestNCCLRefused(t *testing.T) {
	devices, path, fake := fakePair(t)
	open := func(path, command string) error {
		fake("reset," + command)
		_, err := devices[0].(cuda.CollectiveOpener).OpenCollective(devices[1:], path)
		require.Equal(t, errs.Capability, errs.ClassOf(err), "%v", err)
		return err
	}
	require.ErrorContains(t, open("/no/such/libnccl.so", ""), "/no/such/libnccl.so")
	require.ErrorContains(t, open("/no/such/libnccl.so", ""), "option reduce tree")
	blas := fakecuda.BuildBLAS(t)
	require.ErrorContains(t, open(blas, ""), "lacks ncclAllReduce")
	require.ErrorContains(t, open(path, "version=1300"), "no NCCL 2")
	require.ErrorContains(t, open(path, "fail=ncclGetVersion:1"), "ncclGetVersion: unhandled")
	require.ErrorContains(t, open(path, "fail=ncclCommInitAll:1"), "NCCL_DEBUG=INFO")
	host, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	_, err = devices[0].(cuda.CollectiveOpener).OpenCollective([]cuda.Device{host}, path)
	require.ErrorContains(t, err, "is no GPU")
	require.NoError(t, host.Close())
}
