package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// account holds what a login gives a process.
type account struct {
	name     string
	uid, gid int
	home     string
	groups   []int
	names    []string // of groups, in the same order
}

// become turns this process into user, with the groups and limits that a login through PAM gives,
// and runs argv.
func become(user string, argv []string) error {
	a, err := lookup("/etc/passwd", "/etc/group", user)
	if err != nil {
		return err
	}
	if err := limits("/etc/security/limits.d", a, func(which int, soft, hard uint64) error {
		return syscall.Setrlimit(which, &syscall.Rlimit{Cur: soft, Max: hard})
	}); err != nil {
		return err
	}
	if err := syscall.Setgroups(a.groups); err != nil {
		return fmt.Errorf("setgroups: %w", err)
	}
	if err := syscall.Setgid(a.gid); err != nil {
		return fmt.Errorf("setgid: %w", err)
	}
	if err := syscall.Setuid(a.uid); err != nil {
		return fmt.Errorf("setuid: %w", err)
	}
	env := os.Environ()
	for i, kv := range env {
		switch kv {
		case "HOME=/root":
			env[i] = "HOME=" + a.home
		case "USER=root", "LOGNAME=root":
			k, _, _ := strings.Cut(kv, "=")
			env[i] = k + "=" + a.name
		}
	}
	if err := os.Chdir(a.home); err != nil {
		return err
	}
	file, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return fmt.Errorf("exec %s: %w", file, syscall.Exec(file, argv, env))
}

func fields(file string, visit func(f []string)) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		visit(strings.Split(s.Text(), ":"))
	}
	return s.Err()
}

// lookup reads passwd and group anew, as a login does.
func lookup(passwd, group, user string) (account, error) {
	a := account{uid: -1}
	err := fields(passwd, func(f []string) {
		if len(f) < 7 || f[0] != user {
			return
		}
		uid, e1 := strconv.Atoi(f[2])
		gid, e2 := strconv.Atoi(f[3])
		if e1 == nil && e2 == nil {
			a = account{name: user, uid: uid, gid: gid, home: f[5]}
		}
	})
	if err != nil {
		return a, err
	}
	if a.uid < 0 {
		return a, fmt.Errorf("no user %q in %s", user, passwd)
	}
	err = fields(group, func(f []string) {
		if len(f) < 4 {
			return
		}
		gid, err := strconv.Atoi(f[2])
		if err != nil {
			return
		}
		if gid == a.gid || slices.Contains(strings.Split(f[3], ","), user) {
			a.groups = append(a.groups, gid)
			a.names = append(a.names, f[0])
		}
	})
	return a, err
}

const rlimitMemlock = 8

// limits applies what the files of dir say about locked memory, as pam_limits does: a line of the
// user beats one of a group beats "*".
func limits(dir string, a account, set func(which int, soft, hard uint64) error) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.conf"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	var soft, hard uint64
	softRank, hardRank := 0, 0
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for _, line := range strings.Split(string(b), "\n") {
			line, _, _ = strings.Cut(line, "#")
			f := strings.Fields(line)
			if len(f) != 4 || f[2] != "memlock" {
				continue
			}
			rank := 0
			switch {
			case f[0] == a.name:
				rank = 3
			case strings.HasPrefix(f[0], "@") && slices.Contains(a.names, f[0][1:]):
				rank = 2
			case f[0] == "*":
				rank = 1
			default:
				continue
			}
			v := uint64(math.MaxUint64)
			if f[3] != "unlimited" && f[3] != "infinity" && f[3] != "-1" {
				kib, err := strconv.ParseUint(f[3], 10, 50)
				if err != nil {
					return fmt.Errorf("%s: %q: %w", file, line, err)
				}
				v = kib << 10
			}
			if (f[1] == "soft" || f[1] == "-") && rank >= softRank {
				soft, softRank = v, rank
			}
			if (f[1] == "hard" || f[1] == "-") && rank >= hardRank {
				hard, hardRank = v, rank
			}
		}
	}
	if softRank == 0 && hardRank == 0 {
		return nil
	}
	var now syscall.Rlimit
	if err := syscall.Getrlimit(rlimitMemlock, &now); err != nil {
		return err
	}
	if softRank == 0 {
		soft = now.Cur
	}
	if hardRank == 0 {
		hard = now.Max
	}
	return set(rlimitMemlock, min(soft, hard), hard)
}
