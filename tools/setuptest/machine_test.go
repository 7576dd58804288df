package setuptest

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/state"
	"helios/internal/testing/wide"
)

// shell is one interpreter, and the folders that its commands come from.
type shell struct {
	name string
	argv []string
	path string
}

const hostPath = "/usr/sbin:/usr/bin:/sbin:/bin"

var busyboxDir string // applets; made on first use, removed by TestMain

func TestMain(m *testing.M) {
	code := m.Run()
	if busyboxDir != "" {
		os.RemoveAll(busyboxDir)
	}
	os.Exit(code)
}

// shells are dash, or /bin/sh where that is something else, and busybox. HELIOS_BUSYBOX names a
// busybox that is not in PATH. With busybox all commands are its own ones, as on a machine that has
// nothing else.
var shells = sync.OnceValues(func() ([]shell, error) {
	var out []shell
	if p, err := exec.LookPath("dash"); err == nil {
		out = append(out, shell{"dash", []string{p}, hostPath})
	} else {
		out = append(out, shell{"sh", []string{"/bin/sh"}, hostPath})
	}
	bb := os.Getenv("HELIOS_BUSYBOX")
	if bb == "" {
		bb, _ = exec.LookPath("busybox")
	}
	if bb != "" {
		dir, err := os.MkdirTemp("", "setuptest-busybox-")
		if err != nil {
			return nil, err
		}
		busyboxDir = dir
		list, err := exec.Command(bb, "--list").Output()
		if err != nil {
			return nil, fmt.Errorf("%s --list: %w", bb, err)
		}
		for a := range strings.FieldsSeq(string(list)) {
			if err := os.Symlink(bb, filepath.Join(dir, a)); err != nil {
				return nil, err
			}
		}
		out = append(out, shell{"busybox", []string{bb, "sh"}, dir})
	}
	return out, nil
})

// eachShell runs a test under every shell, or under the first.
func eachShell(t *testing.T, f func(t *testing.T, sh shell)) {
	if testing.Short() {
		t.Skip(
			"-short: the code under test is a shell script; the race detector sees nothing of it")
	}
	all, err := shells()
	require.NoError(t, err)
	if wide.Lean() {
		all = all[:1]
	}
	for _, sh := range all {
		t.Run(sh.name, func(t *testing.T) {
			t.Parallel()
			f(t, sh)
		})
	}
}

// machine is a folder that plays a machine with two NVMe SSDs (0000:01:00.0 in IOMMU group 11 and
// 0000:02:00.0 in 12) and a GPU (0000:03:00.0 in 13). Its user is alice.
type machine struct {
	t      *testing.T
	sh     shell
	root   string // what HELIOS_SYSROOT names
	script string // a copy of vfio-setup.sh, alone in its folder
	env    []string
	before []string // shell code in front of the script, such as ulimit
	uid    string
	me     string
}

// newMachine is as a distribution leaves it: the IOMMU on, nothing of ours, and the commands named.
func newMachine(t *testing.T, sh shell, commands ...string) *machine {
	t.Helper()
	base := t.TempDir()
	m := &machine{t: t, sh: sh, root: filepath.Join(base, "a root"),
		script: filepath.Join(base, "the script", "vfio-setup.sh"), uid: "0", me: "root"}
	text, err := os.ReadFile("../../vfio-setup.sh")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Dir(m.script), 0o755))
	require.NoError(t, os.WriteFile(m.script, text, 0o755))
	for name, text := range map[string]string{
		"proc/sys/kernel/osrelease":                   "6.1.0-99-test\n",
		"proc/sys/vm/nr_hugepages":                    "0\n",
		"proc/sys/vm/compact_memory":                  "",
		"proc/cmdline":                                "BOOT_IMAGE=/vmlinuz root=/dev/sda1 intel_iommu=on iommu=pt quiet\n",
		"proc/cpuinfo":                                "processor\t: 0\nvendor_id\t: GenuineIntel\n",
		"proc/meminfo":                                meminfo(512),
		"proc/1/limits":                               "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         8388608              8388608              bytes     \n",
		"sys/firmware/acpi/tables/DMAR":               "",
		"sys/class/iommu/dmar0/name":                  "",
		"sys/kernel/iommu_groups/1/type":              "DMA-FQ\n",
		"sys/module/nvme/initstate":                   "live\n",
		"sys/devices/system/node/node0/hugepages/x":   "",
		"lib/modules/6.1.0-99-test/modules.builtin":   "kernel/drivers/nvme/host/nvme.ko\n",
		"etc/passwd":                                  "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/srv/alice:/bin/sh\nbob:x:1001:1001::/srv/bob:/bin/sh\n",
		"etc/group":                                   "root:x:0:\ndaemon:x:999:\nalice:x:1000:\nbob:x:1001:\n",
		"etc/gshadow":                                 "root:*::\ndaemon:*::\nalice:!::\nbob:!::\n",
		"etc/security/limits.conf":                    "# a comment * - memlock 1\n*  soft  nofile  1024\n",
		"etc/pam.d/common-session":                    "session required pam_limits.so\n",
		"etc/modules-load.d/other.conf":               "loop\n",
		"etc/udev/rules.d/10-other.rules":             "# another rule\n",
		"dev/null":                                    "",
		"sys/class/nvme/none":                         "",
		"sys/bus/pci/drivers/nvme/bind":               "",
		"sys/bus/pci/drivers/vfio-pci/bind":           "",
		"sys/bus/pci/devices/0000:00:00.0/class":      "0x060000\n",
		"sys/bus/pci/devices/0000:00:1f.0/class":      "0x060100\n",
		"sys/devices/system/node/node0/meminfo-dummy": "",
	} {
		m.write(name, text)
	}
	m.pci("0000:01:00.0", "0x010802", 11, "nvme")
	m.pci("0000:00:01.0", "0x060400", 11, "pcieport") // the bridge above it
	m.pci("0000:02:00.0", "0x010802", 12, "nvme")
	m.pci("0000:03:00.0", "0x030000", 13, "nouveau")
	m.write("sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/model", "A Model                 \n")
	m.write("sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/serial", "SERIAL1     \n")
	m.write("sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1/size", "1024\n")
	for _, c := range append([]string{"id", "stat", "chgrp"}, commands...) {
		m.command(c, stubs[c])
	}
	return m
}

func meminfo(hugePages int) string {
	return fmt.Sprintf(
		"MemTotal:       16384000 kB\nMemAvailable:   12000000 kB\nHugePages_Total:   %5d\nHugePages_Free:    %5d\nHugepagesize:       2048 kB\n",
		hugePages, hugePages)
}

// stubs are the commands that change a machine, for the folder. gids notes the groups of nodes, so
// that the tests need no root.
var stubs = map[string]string{
	"id": `case $1 in -u) echo "$FAKE_UID" ;; -un) echo "$FAKE_NAME" ;; -G) echo $FAKE_GROUPS ;; *) exit 9 ;; esac`,
	"stat": `g=$(awk -v f="${3#"$root"}" '$2 == f { g = $1 } END { print g + 0 }' "$root/gids" 2>/dev/null)
[ -e "$3" ] || exit 1
m=$(stat -c %a "$3") || exit 1
case $2 in '%g %a') echo "${g:-0} $m" ;; %g) echo "${g:-0}" ;; %a) echo "$m" ;; *) exit 9 ;; esac`,
	"chgrp": `touch "$root/gids"; grep -v " ${2#"$root"}$" "$root/gids" >"$root/gids.new"
if [ "$1" != 0 ]; then echo "$1 ${2#"$root"}" >>"$root/gids.new"; fi
mv "$root/gids.new" "$root/gids"; [ -s "$root/gids" ] || rm "$root/gids"`,
	"modprobe": `if [ "$1" = -r ]; then
	rm -r "$root/sys/module/$2" || exit 1
	if [ "$2" = vfio_pci ]; then rm -f -r "$root/dev/vfio" "$root/sys/module/vfio"; fi
else
	m=$(echo "$1" | tr - _)
	for m in vfio $m; do mkdir -p "$root/sys/module/$m" && echo live >"$root/sys/module/$m/initstate"; done
	mkdir -p "$root/dev/vfio"; [ -e "$root/dev/vfio/vfio" ] || { : >"$root/dev/vfio/vfio"; chmod 666 "$root/dev/vfio/vfio"; }
fi`,
	"groupadd": `[ "$1" = -r ] && echo "$2:x:998:" >>"$root/etc/group" && echo "$2:!::" >>"$root/etc/gshadow"`,
	"groupdel": `sed -i "/^$1:/d" "$root/etc/group" "$root/etc/gshadow"`,
	"gpasswd": `echo "chatter of gpasswd"; case $1 in
-a) sed -i "/^$3:/{s/:\$/:$2/;t;s/\$/,$2/}" "$root/etc/group" ;;
-d) sed -i "/^$3:/{s/\([:,]\)$2\$/\1/;s/,\$//;s/\([:,]\)$2,/\1/}" "$root/etc/group" ;;
esac`,
	"addgroup": `if [ "$1" = -S ]; then echo "$2:x:101:" >>"$root/etc/group"; echo "$2:!::" >>"$root/etc/gshadow"
else sed -i "/^$2:/{s/:\$/:$1/;t;s/\$/,$1/}" "$root/etc/group"; fi`,
	"delgroup": `if [ $# = 1 ]; then sed -i "/^$1:/d" "$root/etc/group" "$root/etc/gshadow"
else sed -i "/^$2:/{s/\([:,]\)$1\$/\1/;s/,\$//}" "$root/etc/group"; fi`,
	"udevadm": `[ "$*" = "control --reload" ]`,
}

// command puts a command into the machine's bin; each call of it is noted.
func (m *machine) command(name, body string) {
	m.t.Helper()
	text := fmt.Sprintf("#!/bin/sh\nPATH=%s\nroot='%s'\nlog='%s'\necho \"%s $*\" >>\"$log\"\n%s\n",
		hostPath, m.root, m.log(), name, body)
	m.write("bin/"+name, text)
	if err := os.Chmod(filepath.Join(m.root, "bin", name), 0o755); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) log() string { return filepath.Join(filepath.Dir(m.root), "log") }

// calls are the commands that ran so far and change a machine.
func (m *machine) calls() []string {
	text, err := os.ReadFile(m.log())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.t.Fatal(err)
	}
	var out []string
	for l := range strings.Lines(string(text)) {
		if l = strings.TrimSpace(l); !strings.HasPrefix(l, "id ") &&
			!strings.HasPrefix(l, "stat ") {
			out = append(out, l)
		}
	}
	return out
}

func (m *machine) write(name, text string) {
	m.t.Helper()
	p := filepath.Join(m.root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) read(name string) string {
	m.t.Helper()
	b, err := os.ReadFile(filepath.Join(m.root, name))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(b)
}

func (m *machine) remove(names ...string) {
	m.t.Helper()
	for _, n := range names {
		if _, err := os.Lstat(filepath.Join(m.root, n)); err != nil {
			m.t.Fatal(err) // a test that removes nothing would show nothing
		}
		if err := os.RemoveAll(filepath.Join(m.root, n)); err != nil {
			m.t.Fatal(err)
		}
	}
}

func (m *machine) exists(name string) bool {
	_, err := os.Lstat(filepath.Join(m.root, name))
	return err == nil
}

func (m *machine) link(name, to string) {
	m.t.Helper()
	p := filepath.Join(m.root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		m.t.Fatal(err)
	}
	os.Remove(p)
	if err := os.Symlink(to, p); err != nil {
		m.t.Fatal(err)
	}
}

// pci adds a function. Links lead where sysfs's do, by other ways.
func (m *machine) pci(addr, class string, group int, driver string) {
	m.write("sys/bus/pci/devices/"+addr+"/class", class+"\n")
	m.link(fmt.Sprintf("sys/kernel/iommu_groups/%d/devices/%s", group, addr),
		"../../../../bus/pci/devices/"+addr)
	m.link("sys/bus/pci/devices/"+addr+"/iommu_group",
		fmt.Sprintf("../../../../kernel/iommu_groups/%d", group))
	m.driver(addr, driver)
}

func (m *machine) driver(addr, driver string) {
	m.write("sys/bus/pci/drivers/"+driver+"/unbind", "")
	m.link("sys/bus/pci/devices/"+addr+"/driver", "../../drivers/"+driver)
	for _, d := range []string{"nvme", "vfio-pci"} {
		os.Remove(filepath.Join(m.root, "sys/bus/pci/drivers", d, addr))
	}
	m.link("sys/bus/pci/drivers/"+driver+"/"+addr, "../../devices/"+addr)
}

// bound gives a device to vfio-pci: its group's node appears, root's.
func (m *machine) bound(addr string, group int) {
	m.driver(addr, "vfio-pci")
	m.write(fmt.Sprintf("dev/vfio/%d", group), "")
	m.mode(fmt.Sprintf("dev/vfio/%d", group), 0o600)
}

// ours is bound by heliosctl, which has a record of it.
func (m *machine) ours(addr string, group int) {
	m.record(addr, group, state.Bound)
	m.bound(addr, group)
}

// record returns what heliosctl writes of vfioN.
func (m *machine) record(addr string, n int, phase state.Phase) {
	m.t.Helper()
	dir := filepath.Join(m.root, "run/heliosctl")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		m.t.Fatal(err)
	}
	err := state.OpenMachine(dir).Put(&state.Record{Phase: phase, SSD: state.SSD{
		Name: fmt.Sprintf("vfio%d", n), Kind: state.KindVFIO, Path: "/sys/bus/pci/devices/" + addr,
		PCI: addr,
	}})
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) mode(name string, mode fs.FileMode) {
	m.t.Helper()
	if err := os.Chmod(filepath.Join(m.root, name), mode); err != nil {
		m.t.Fatal(err)
	}
}

// result is one run of the script.
type result struct {
	m    *machine
	args []string
	code int
	out  string
	err  string
}

// run runs the script.
func (m *machine) run(args ...string) result {
	m.t.Helper()
	argv := append(slices.Clone(m.sh.argv), "-c",
		strings.Join(append(slices.Clone(m.before), `. "$0"`), "\n"), m.script)
	if len(m.before) == 0 {
		argv = append(slices.Clone(m.sh.argv), m.script)
	}
	argv = append(argv, args...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = m.t.TempDir()
	cmd.Env = append([]string{"PATH=" + m.sh.path, "HELIOS_SYSROOT=" + m.root, "FAKE_UID=" + m.uid,
		"FAKE_NAME=" + m.me, "FAKE_GROUPS=" + m.uid}, m.env...)
	cmd.WaitDelay = 20 * time.Second
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	if e := cmd.Run(); e != nil {
		var x *exec.ExitError
		if !errors.As(e, &x) {
			m.t.Fatalf("%v: %v", args, e)
		}
	}
	r := result{m, args, cmd.ProcessState.ExitCode(), out.String(), err.String()}
	for _, w := range []string{"not found", "syntax error", "unexpected operator", "bad number",
		"Illegal number", "integer expression", "unbound", "parameter not set", "No such file"} {
		if strings.Contains(r.err, w) && !strings.Contains(r.err, "unbound: ") {
			m.t.Fatalf("%v: the script itself failed:\n%s", args, r.err)
		}
	}
	// The script must never advise these, whatever lacks.
	for _, w := range []string{"intel_iommu=off iommu", "add intel_iommu=off", "add iommu=off",
		"add amd_iommu=off", "add enable_unsafe"} {
		if strings.Contains(r.out+r.err, w) {
			m.t.Fatalf("%v: advises %q:\n%s", args, w, r.out+r.err)
		}
	}
	return r
}

// want checks the exit code and that all words are said.
func (r result) want(code int, words ...string) result {
	r.m.t.Helper()
	if r.code != code {
		r.m.t.Fatalf("%q: exit code %d, not %d:\n%s%s", r.args, r.code, code, r.out, r.err)
	}
	for _, w := range words {
		if !strings.Contains(r.out+r.err, w) {
			r.m.t.Fatalf("%q: does not say %q:\n%s%s", r.args, w, r.out, r.err)
		}
	}
	return r
}

// not checks that words are not said.
func (r result) not(words ...string) result {
	r.m.t.Helper()
	for _, w := range words {
		if strings.Contains(r.out+r.err, w) {
			r.m.t.Fatalf("%q: says %q:\n%s%s", r.args, w, r.out, r.err)
		}
	}
	return r
}

// lacks checks that status found just these lacks.
func (r result) lacks(words ...string) {
	r.m.t.Helper()
	r.want(3)
	_, list, ok := strings.Cut(r.out, "\nlacking\n")
	if !ok {
		r.m.t.Fatalf("exit code 3 without a list of lacks:\n%s", r.out)
	}
	if n, next := strings.Count(list, "\n"),
		strings.Count(list, "     next: "); n != 2*len(words) || next != len(words) {
		r.m.t.Fatalf("%d lines of lacks with %d next steps, not %d lacks with a step each:\n%s", n,
			next, len(words), list)
	}
	for i, w := range words {
		if !strings.Contains(list, fmt.Sprintf("  %d. %s", i+1, w)) {
			r.m.t.Fatalf("lack %d is not %q:\n%s", i+1, w, list)
		}
	}
}

// tree is the machine's every file: mode, and content or target.
func (m *machine) tree() map[string]string {
	m.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(m.root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(m.root, p)
		i, err := d.Info()
		if err != nil {
			return err
		}
		text := ""
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			text, err = os.Readlink(p)
		case d.Type().IsRegular():
			var b []byte
			b, err = os.ReadFile(p)
			text = string(b)
		}
		out[rel] = i.Mode().String() + " " + text
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return out
}

// same checks that the machine is as it was, apart from the files named.
func (m *machine) same(before map[string]string, what string, but ...string) {
	m.t.Helper()
	now := m.tree()
	for p, v := range before {
		if n, ok := now[p]; !ok {
			m.t.Errorf("%s: %s is gone", what, p)
		} else if n != v && !slices.Contains(but, p) {
			m.t.Errorf("%s: %s is now %q, was %q", what, p, n, v)
		}
	}
	for p := range now {
		if _, ok := before[p]; !ok && !slices.Contains(but, p) {
			m.t.Errorf("%s: %s is new", what, p)
		}
	}
	if m.t.Failed() {
		m.t.FailNow()
	}
}
