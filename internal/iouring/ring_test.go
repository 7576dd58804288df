package iouring

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// newRing makes a ring, or skips where the machine refuses io_uring altogether.
func newRing(t *testing.T, opt Options) *Ring {
	t.Helper()
	r, err := New(opt)
	if errs.ClassOf(err) == errs.Capability {
		t.Skipf("no io_uring here: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, r.Close()) })
	return r
}

func mem(t *testing.T, n int) []byte {
	t.Helper()
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Munmap(m)) })
	return m
}

// run submits what prep fills in and returns its result.
func run(t *testing.T, r *Ring, prep func(*SQE)) int32 {
	t.Helper()
	s := r.SQE()
	require.NotNil(t, s)
	prep(s)
	s.Data = 42
	r.Flush()
	var w Wait
	var c [1]CQE
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		require.NoError(t, r.SubmitAndWait(&w, 1, time.Second, 0))
		if r.Reap(c[:]) == 1 {
			assert.EqualValues(t, 42, c[0].Data)
			return c[0].Res
		}
	}
	t.Fatal("no completion")
	return 0
}

func TestReadAndWrite(t *testing.T) {
	r := newRing(t, Options{Entries: 8})
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	m := mem(t, 64<<10)
	off := func(i int) unsafe.Pointer { return unsafe.Pointer(&m[i]) }
	for i := range 8192 {
		m[i] = byte(i * 7)
	}
	fd := int32(f.Fd())
	assert.EqualValues(t, 8192, run(t, r, func(s *SQE) { s.PrepWrite(fd, off(0), 8192, 100, 0) }))
	assert.EqualValues(t, 8192, run(t, r, func(s *SQE) { s.PrepRead(fd, off(16384), 8192, 100) }))
	assert.True(t, bytes.Equal(m[:8192], m[16384:16384+8192]))
	assert.EqualValues(t, 4, run(t, r, func(s *SQE) { s.PrepRead(fd, off(0), 100, 8288) }),
		"short at the end of the file")
	assert.EqualValues(t, 0, run(t, r, func(s *SQE) { s.PrepFsync(fd, true) }))
	assert.EqualValues(t, 0, run(t, r, func(s *SQE) { s.PrepFsync(fd, false) }))

	iov := []Iovec{{off(32768), 1000}, {off(40000), 7192}}
	assert.EqualValues(t, 8192, run(t, r, func(s *SQE) { s.PrepReadv(fd, iov, 100) }))
	assert.True(t, bytes.Equal(m[16384:17384], m[32768:33768]))
	assert.True(t, bytes.Equal(m[17384:16384+8192], m[40000:47192]))
	assert.EqualValues(t, 8192,
		run(t, r, func(s *SQE) { s.PrepWritev(fd, iov, 20000, unix.RWF_DSYNC) }))

}

func TestFullQueue(t *testing.T) {
	r := newRing(t, Options{Entries: 4, CQEntries: 64})
	assert.Equal(t, 64, r.CQEntries())
	n := 0
	for round := range 10 {
		for range 4 {
			s := r.SQE()
			require.NotNil(t, s)
			s.PrepNop()
			s.Data = uint64(n)
			n++
		}
		require.Nil(t, r.SQE(), "round %d: a fifth entry of four", round)
		assert.Zero(t, r.Unsubmitted(), "not flushed yet")
		r.Flush()
		assert.EqualValues(t, 4, r.Unsubmitted())
		require.NoError(t, r.Submit())
		assert.Zero(t, r.Unsubmitted())
	}
	assert.EqualValues(t, 40, r.Ready())
	var c [64]CQE
	require.Equal(t, 40, r.Reap(c[:]))
	for i := range 40 {
		assert.EqualValues(t, i, c[i].Data)
	}
	assert.Zero(t, r.Reap(c[:]))
}

func TestWaiting(t *testing.T) {
	r := newRing(t, Options{Entries: 8})
	var w Wait
	start := time.Now()
	require.NoError(t, r.SubmitAndWait(&w, 1, 30*time.Millisecond, 0))
	assert.GreaterOrEqual(t, time.Since(start), 20*time.Millisecond,
		"came back early, with nothing")
	require.NoError(t, r.SubmitAndWait(&w, 1, -time.Second, 0), "no time at all")

	// A read that ends wakes a waiter in the kernel; a batch of two comes back with one.
	var p [2]int
	require.NoError(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
	defer func() { assert.NoError(t, errors.Join(unix.Close(p[0]), unix.Close(p[1]))) }()
	s := r.SQE()
	s.PrepRead(int32(p[0]), unsafe.Pointer(&mem(t, 4096)[0]), 1, 0)
	r.Flush()
	require.NoError(t, r.Submit())
	assert.Zero(t, r.Ready())
	go func() { _, _ = unix.Write(p[1], []byte{1}) }()
	for deadline := time.Now().Add(10 * time.Second); r.Ready() == 0 &&
		time.Now().Before(deadline); {
		require.NoError(t, r.SubmitAndWait(&w, 2, 5*time.Second, 10*time.Millisecond))
	}
	var c [1]CQE
	require.Equal(t, 1, r.Reap(c[:]))
	assert.EqualValues(t, 1, c[0].Res)
}

func TestOptions(t *testing.T) {
	_, err := New(Options{Entries: -1})
	assert.Error(t, err)
	_, err = New(Options{Entries: 64, CQEntries: 8})
	assert.Error(t, err)
	r := newRing(t, Options{})
	assert.EqualValues(t, 0, run(t, r, func(s *SQE) { s.PrepNop() }))
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "twice")
}

func TestNoLeaks(t *testing.T) {
	count := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(d)
	}
	before := count()
	for range 20 {
		newRing(t, Options{Entries: 8}).release(t)
	}
	assert.Equal(t, before, count())
}

func (r *Ring) release(t *testing.T) { require.NoError(t, r.Close()) }
