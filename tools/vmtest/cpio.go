package main

import (
	"fmt"
	"io"
)

// cpio writes an archive in the "newc" form, which the kernel unpacks as its first root file system
// (Documentation/driver-api/early-userspace/buffer-format.rst). Archives may follow each other.
type cpio struct {
	w    io.Writer
	off  int64
	ino  int
	dirs map[string]bool
	err  error
}

const (
	modeFile = 0o100000
	modeDir  = 0o040000
	modeLink = 0o120000
	modeChar = 0o020000
)

func newCPIO(w io.Writer) *cpio { return &cpio{w: w, dirs: map[string]bool{}} }

func (c *cpio) write(b []byte) {
	if c.err != nil {
		return
	}
	n, err := c.w.Write(b)
	c.off += int64(n)
	c.err = err
}

func (c *cpio) pad() {
	if n := c.off % 4; n != 0 {
		c.write(make([]byte, 4-n))
	}
}

func (c *cpio) entry(name string, mode uint32, uid, major, minor int, data []byte) {
	if c.err == nil && int64(len(data)) > 0xffffffff {
		c.err = fmt.Errorf("cpio: %s is over 4 GiB", name)
	}
	links := 1
	if mode&modeDir != 0 && mode&modeFile == 0 {
		links = 2
	}
	c.ino++
	// magic, ino, mode, uid, gid, nlink, mtime, filesize, major, minor, rmajor, rminor, namesize,
	// check
	c.write(fmt.Appendf(nil, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		c.ino, mode, uid, uid, links, 0, len(data), 0, 0, major, minor, len(name)+1, 0))
	c.write(append([]byte(name), 0))
	c.pad()
	c.write(data)
	c.pad()
}

// parents makes the folders above name that are not there yet.
func (c *cpio) parents(name string) {
	for i := 1; i < len(name); i++ {
		if name[i] == '/' && !c.dirs[name[:i]] {
			c.dir(name[:i], 0o755, 0)
		}
	}
}

// dir, file, link and char take names without a leading slash.
func (c *cpio) dir(name string, mode uint32, uid int) {
	if c.dirs[name] {
		return
	}
	c.parents(name)
	c.dirs[name] = true
	c.entry(name, modeDir|mode, uid, 0, 0, nil)
}

func (c *cpio) file(name string, mode uint32, uid int, data []byte) {
	c.parents(name)
	c.entry(name, modeFile|mode, uid, 0, 0, data)
}

func (c *cpio) link(name, to string) {
	c.parents(name)
	c.entry(name, modeLink|0o777, 0, 0, 0, []byte(to))
}

func (c *cpio) char(name string, mode uint32, major, minor int) {
	c.parents(name)
	c.entry(name, modeChar|mode, 0, major, minor, nil)
}

// close writes the trailer; the archive's length is a multiple of 512, so that another may follow.
func (c *cpio) close() error {
	c.entry("TRAILER!!!", 0, 0, 0, 0, nil)
	if n := c.off % 512; n != 0 {
		c.write(make([]byte, 512-n))
	}
	return c.err
}
