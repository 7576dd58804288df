package main

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	p := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
	return p
}

func TestLookup(t *testing.T) {
	dir := t.TempDir()
	pw := write(t, dir, "passwd",
		"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1001:u:/people/user:/bin/sh\n")
	gr := write(t, dir, "group",
		"root:x:0:\nown:x:1001:\nhelios:x:990:root,user\nnothis:x:991:\nextra:x:7:root,user\nother:x:8:root\n")
	a, err := lookup(pw, gr, "user")
	require.NoError(t, err)
	if a.uid != 1000 || a.gid != 1001 || a.home != "/people/user" ||
		!slices.Equal(a.groups, []int{1001, 990, 7}) {
		t.Errorf("got %+v", a)
	}
	if _, err := lookup(pw, gr, "nobody"); err == nil {
		t.Error("found nobody")
	}
}

func TestLimits(t *testing.T) {
	user := account{name: "user", names: []string{"user", "helios"}}
	for _, c := range []struct {
		text       string
		set        bool
		soft, hard uint64
	}{
		{"", false, 0, 0},
		{"@other - memlock unlimited\nroot hard memlock 1\nuser - nofile 1\n", false, 0, 0},
		{"@helios - memlock unlimited # for VFIO\n", true, math.MaxUint64, math.MaxUint64},
		{"* - memlock 64\n@helios soft memlock 1024\n@helios hard memlock 2048\n", true, 1 << 20,
			2 << 20},
		{"@helios - memlock 2048\n* - memlock 64\n", true, 2 << 20, 2 << 20},
		{"@helios - memlock 2048\nuser - memlock 64\n", true, 64 << 10, 64 << 10},
	} {
		dir := t.TempDir()
		write(t, dir, "10-x.conf", c.text)
		write(t, dir, "ignored.txt", "* - memlock 1\n")
		called := false
		err := limits(dir, user, func(which int, soft, hard uint64) error {
			called = true
			if which != rlimitMemlock || soft != c.soft || hard != c.hard {
				t.Errorf("%q: got %d, %d", c.text, soft, hard)
			}
			return nil
		})
		if err != nil || called != c.set {
			t.Errorf("%q: set %v, error %v", c.text, called, err)
		}
	}
	dir := t.TempDir()
	write(t, dir, "x.conf", "user - memlock lots\n")
	if err := limits(dir, user, nil); err == nil {
		t.Error("took \"lots\"")
	}
}
