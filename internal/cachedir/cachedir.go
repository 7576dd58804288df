// Package cachedir gives a program a cache folder that no other user can put anything into: what
// lies there is loaded and run.
package cachedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Private returns the folder of that name in the user's cache, and makes it where it is not there.
// Where the user has no cache folder, or may not write to it, it is one of the temporary folder. It
// refuses a folder that belongs to another user, or that another may write to.
func Private(name string) (string, error) {
	if base, err := os.UserCacheDir(); err == nil {
		dir := filepath.Join(base, name)
		if err := os.MkdirAll(dir, 0o700); err == nil && writable(dir) {
			return dir, check(dir)
		}
	}
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("%s-%d", name, os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("cache folder %s: %w", name, err)
	}
	return dir, check(dir)
}

func writable(dir string) bool {
	const wOK = 2
	return syscall.Access(dir, wOK) == nil
}

func check(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("cache folder: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf(
			"cache folder %s (%v) is not this user's alone: others can put programs there that we would run; remove it",
			dir, info.Mode())
	}
	return nil
}
