// Package durable writes files that survive a crash, and locks their folder against other
// processes.
package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Sync makes the names in a folder durable.
func Sync(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Replace gives a file of dir the content that write writes, under the name part first: whenever
// the process or the machine stops, the old content or the new one is there. renamed, where it is
// not nil, is called before and after the file gets its name.
func Replace(dir, part, name string, write func(*os.File) error, renamed func(done bool) error) (
	err error) {
	path := filepath.Join(dir, part)
	to, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return err
	}
	if renamed == nil {
		renamed = func(bool) error { return nil }
	}
	if err = write(to); err == nil {
		err = to.Sync()
	}
	err = errors.Join(err, to.Close())
	if err == nil {
		err = renamed(false)
	}
	if err == nil {
		err = os.Rename(path, filepath.Join(dir, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(path))
	}
	if err = Sync(dir); err == nil {
		err = renamed(true)
	}
	return err
}

// RenameNew renames where nothing is.
func RenameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // file systems that can't
		if _, serr := os.Lstat(to); serr == nil {
			return &os.LinkError{Op: "rename", Old: from, New: to, Err: unix.EEXIST}
		}
		return os.Rename(from, to)
	}
	return err
}

// Holds reports whether dir has a file of the name ours. Where it has not, other is one of its
// entries, those of begun aside, which an interrupted writer leaves; a dir that is not there has
// none.
func Holds(dir, ours string, begun ...string) (holds bool, other string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, "", nil
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == ours:
			return true, "", nil
		case !slices.Contains(begun, name):
			other = name
		}
	}
	return false, other, err
}

// Full reports whether an error says that a disk or a quota is full.
func Full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SumLine returns the last line of lines of JSON.
func SumLine(b []byte) string { return fmt.Sprintf("crc32c %08x\n", crc32.Checksum(b, castagnoli)) }

// Encode returns v as lines of JSON, and a last line with their checksum.
func Encode(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return nil, err
	}
	b = append(b, '\n')
	return append(b, SumLine(b)...), nil
}

// Decode reads what Encode returned. Its error describes the damage.
func Decode(b []byte, v any) error {
	end := len(b) - len(SumLine(nil))
	if end < 0 || string(b[end:]) != SumLine(b[:end]) {
		return errors.New("its checksum is wrong")
	}
	return json.Unmarshal(b[:end], v)
}
