package testrig

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/hostmem"
)

// errorsOf is a test that counts what is reported to it.
type errorsOf struct {
	testing.TB
	found []string
}

func (e *errorsOf) Helper() {}
func (e *errorsOf) Errorf(f string,
	args ...any) {
	e.found = append(e.found, fmt.Sprintf(f, args...))
}

// Each kind of resource that is still held is one error; once it is given back there is none.
func TestLeaked(t *testing.T) {
	before := Held(t)
	patience = 0
	path := filepath.Join(MemoryDir(t), "ssd.img")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(4096))
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	mem, err := hostmem.Alloc(4096, "leak test")
	require.NoError(t, err)
	stop, gone := make(chan bool), make(chan bool)
	go func() { <-stop; close(gone) }()
	e := &errorsOf{TB: t}
	before.Leaked(e)
	require.Len(t, e.found, 4)
	e.found = nil
	before.Leaked(e, "leak test")
	require.Len(t, e.found, 3, "memory that may stay")
	close(stop)
	<-gone
	require.NoError(t, unix.Munmap(m))
	require.NoError(t, f.Close())
	require.NoError(t, hostmem.Free(mem))
	patience = defaultPatience
	before.Leaked(t)
}
