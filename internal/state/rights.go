package state

import (
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"syscall"
)

// NotPermitted says in words why this user may not open a file that belongs to a group, and what
// changes that.
func NotPermitted(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	s, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return path + ": permission denied"
	}
	me, name := strconv.Itoa(os.Getuid()), "USER"
	if u, err := user.LookupId(me); err == nil {
		me, name = u.Username, u.Username
	}
	if s.Gid == 0 || fi.Mode().Perm()&0o060 != 0o060 {
		return "only root may use it; use sudo, or let a group use it: run \"sudo heliosctl vfio-setup setup\" once, then bind it again (or \"heliosctl bind-ssds --group NAME\")"
	}
	gid := strconv.Itoa(int(s.Gid))
	group := gid
	if g, err := user.LookupGroupId(gid); err == nil {
		group = g.Name
	}
	if u, err := user.Lookup(me); err == nil {
		if ids, err := u.GroupIds(); err == nil && slices.Contains(ids, gid) {
			return fmt.Sprintf("user %s is in group %s, but not yet in this session; log in again",
				me, group)
		}
	}
	return fmt.Sprintf(
		"user %s is not in group %s; run \"sudo usermod -aG %s %s\" and log in again", me, group,
		group, name)
}
