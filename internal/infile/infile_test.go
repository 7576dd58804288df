package infile

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// TestOpen: pipes, sockets, devices, folders and pointers of Git LFS are refused at once, by name.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	pipe, sock, lfs, good := filepath.Join(dir, "pipe"), filepath.Join(dir, "sock"),
		filepath.Join(dir, "lfs"), filepath.Join(dir, "good")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	l, err := net.Listen("unix", sock)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t,
		os.WriteFile(lfs, []byte("version https://git-lfs.github.com/spec/v1\noid sha256:"+
			strings.Repeat("a", 64)+"\nsize 12345\n"), 0o600))
	require.NoError(t, os.WriteFile(good, []byte("version 1"), 0o600))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(pipe, link))
	for path, want := range map[string]string{
		pipe: "is a pipe", link: "is a pipe", sock: "is a socket", "/dev/zero": "is a device",
		dir: "is a folder", "/proc/self/mem": "is a file of the kernel",
		"/proc/kmsg": "is a file of the kernel",
		lfs:          "is a pointer of Git LFS", filepath.Join(dir, "none"): "no such file",
	} {
		_, err := Open(path)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, path)
		require.Equal(t, errs.Usage, errs.ClassOf(err), path)
	}
	_, err = Open(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	b, err := Read(good, 9)
	require.NoError(t, err)
	require.Equal(t, "version 1", string(b))
	_, err = Read(good, 8)
	require.ErrorContains(t, err, "more than 8 bytes")
}
