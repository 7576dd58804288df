package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// entry of a newc archive, read by the field widths of the kernel's documentation.
type cpioEntry struct {
	mode, uid, nlink, rmajor, rminor uint64
	data                             []byte
}

func readCPIO(t *testing.T, b []byte) map[string]cpioEntry {
	t.Helper()
	out := map[string]cpioEntry{}
	off := 0
	for {
		if string(b[off:off+6]) != "070701" {
			t.Fatalf("no magic at %d", off)
		}
		var f [13]uint64
		for i := range f {
			if _, err := fmt.Sscanf(string(b[off+6+8*i:off+14+8*i]), "%08x", &f[i]); err != nil {
				t.Fatal(err)
			}
		}
		name := string(b[off+110 : off+110+int(f[11])-1])
		data := (off + 110 + int(f[11]) + 3) &^ 3
		off = (data + int(f[6]) + 3) &^ 3
		if name == "TRAILER!!!" {
			return out
		}
		if _, twice := out[name]; twice {
			t.Errorf("%s is there twice", name)
		}
		out[name] = cpioEntry{f[1], f[2], f[4], f[9], f[10], b[data : data+int(f[6])]}
	}
}

func TestCPIO(t *testing.T) {
	var buf bytes.Buffer
	c := newCPIO(&buf)
	c.dir("tmp", 0o1777, 0)
	c.file("a/b/c.txt", 0o640, 1000, []byte("hello"))
	c.file("a/b/empty", 0o644, 0, nil)
	c.link("bin/sh", "/bin/busybox")
	c.char("dev/null", 0o666, 1, 3)
	require.NoError(t, c.close())
	if buf.Len()%512 != 0 {
		t.Errorf("%d bytes: another archive could not follow", buf.Len())
	}
	got := readCPIO(t, buf.Bytes())
	for name, want := range map[string]cpioEntry{
		"tmp":       {mode: 0o041777, nlink: 2},
		"a":         {mode: 0o040755, nlink: 2},
		"a/b":       {mode: 0o040755, nlink: 2},
		"bin":       {mode: 0o040755, nlink: 2},
		"dev":       {mode: 0o040755, nlink: 2},
		"a/b/c.txt": {mode: 0o100640, uid: 1000, nlink: 1, data: []byte("hello")},
		"a/b/empty": {mode: 0o100644, nlink: 1},
		"bin/sh":    {mode: 0o120777, nlink: 1, data: []byte("/bin/busybox")},
		"dev/null":  {mode: 0o020666, nlink: 1, rmajor: 1, rminor: 3},
	} {
		e, ok := got[name]
		if !ok || e.mode != want.mode || e.uid != want.uid || e.nlink != want.nlink ||
			e.rmajor != want.rmajor || e.rminor != want.rminor || !bytes.Equal(e.data, want.data) {
			t.Errorf("%s: got %+v, want %+v", name, e, want)
		}
	}
	if len(got) != 9 {
		t.Errorf("%d entries", len(got))
	}
}

// cpio(1), where it is, reads the same.
func TestCPIOByOthers(t *testing.T) {
	tool, err := exec.LookPath("cpio")
	if err != nil {
		t.Skip("no cpio here")
	}
	var buf bytes.Buffer
	c := newCPIO(&buf)
	c.file("x/y", 0o644, 0, []byte("text"))
	require.NoError(t, c.close())
	cmd := exec.Command(tool, "-i", "--to-stdout", "--quiet", "x/y")
	cmd.Stdin = &buf
	if out, err := cmd.Output(); err != nil || string(out) != "text" {
		t.Errorf("%q %v", out, err)
	}
}

func value(args []string, flag string) []string {
	var out []string
	for i, a := range args {
		if a == flag {
			out = append(out, args[i+1])
		}
	}
	return out
}

func TestQEMUArgs(t *testing.T) {
	c := Config{CPUs: 1, MemoryMB: 512, SharedGroup: true, Disks: []Disk{
		{}, {Serial: "SECOND", IOQPairs: 2}, {LBA: 4096, MDTS: 5, ThrottleIOPS: 100},
		{CMBMB: 16, LegacyCMB: true, BlkDebug: "-"}, {HotPlug: true}, {HotPlug: true, Absent: true},
	}}.withDefaults()
	require.NoError(t, c.check())
	args := qemuArgs(c, places{dir: "/d", kernel: "/k", initrd: "/i", aio: "threads"})
	for flag, want := range map[string][]string{
		"-accel":  {"tcg,thread=multi"},
		"-cpu":    {"max,-cx16"},
		"-smp":    {"1"},
		"-m":      {"512M"},
		"-serial": {"chardev:con", "chardev:ch"},
		"-drive": {
			"if=none,id=d0,driver=raw,file.driver=file,file.filename=/d/disk0,file.aio=threads",
			"if=none,id=d1,driver=raw,file.driver=file,file.filename=/d/disk1,file.aio=threads",
			"if=none,id=d2,driver=raw,file.driver=file,file.filename=/d/disk2,file.aio=threads,throttling.iops-total=100",
			"if=none,id=d3,driver=raw,file.driver=blkdebug,file.config=/d/blkdebug3,file.image.driver=file,file.image.filename=/d/disk3,file.image.aio=threads",
			"if=none,id=d4,driver=raw,file.driver=file,file.filename=/d/disk4,file.aio=threads",
			"if=none,id=d5,driver=raw,file.driver=file,file.filename=/d/disk5,file.aio=threads",
		},
		"-device": {
			"intel-iommu,intremap=on,caching-mode=on",
			"nvme,id=nvme0,serial=HELIOS0,drive=d0,addr=10.0,multifunction=on",
			"nvme,id=nvme1,serial=SECOND,drive=d1,addr=10.1,max_ioqpairs=2",
			"nvme,id=nvme2,serial=HELIOS2,addr=6,mdts=5",
			"nvme-ns,bus=nvme2,drive=d2,logical_block_size=4096,physical_block_size=4096",
			"nvme,id=nvme3,serial=HELIOS3,drive=d3,addr=7,cmb_size_mb=16,legacy-cmb=on",
			"pcie-root-port,id=port4,addr=8,chassis=5,slot=5",
			"nvme,id=nvme4,serial=HELIOS4,drive=d4,bus=port4",
			"pcie-root-port,id=port5,addr=9,chassis=6,slot=6",
		},
	} {
		if got := value(args, flag); !slices.Equal(got, want) {
			t.Errorf("%s:\n got %s\nwant %s", flag, strings.Join(got, "\n     "),
				strings.Join(want, "\n     "))
		}
	}
	for _, want := range []string{"-no-reboot", "-nodefaults", "-no-user-config"} {
		if !slices.Contains(args, want) {
			t.Errorf("no %s", want)
		}
	}
	if a := value(args, "-append")[0]; !strings.Contains(a, "intel_iommu=on") ||
		!strings.Contains(a, "panic=-1") {
		t.Errorf("kernel arguments %q", a)
	}
}

func TestConfigDefaultsAndChecks(t *testing.T) {
	c := Config{Disks: make([]Disk, 2)}.withDefaults()
	if c.CPUs != 2 || c.MemoryMB != 768 ||
		c.Disks[1] != (Disk{Serial: "HELIOS1", MB: 64, LBA: 512}) {
		t.Errorf("defaults %+v", c)
	}
	for want, c := range map[string]Config{
		"serial A":            {Disks: []Disk{{Serial: "A"}, {Serial: "A"}}},
		"20 characters":       {Disks: []Disk{{Serial: strings.Repeat("x", 21)}}},
		"power of two":        {Disks: []Disk{{LBA: 1000}}},
		"without a hot-plug":  {Disks: []Disk{{Absent: true}}},
		"512-byte blocks":     {Disks: []Disk{{HotPlug: true, LBA: 4096}}},
		"without a CMB":       {Disks: []Disk{{LegacyCMB: true}}},
		"needs two disks":     {SharedGroup: true, Disks: []Disk{{}}},
		"group has no hot pl": {SharedGroup: true, Disks: []Disk{{}, {HotPlug: true}}},
	} {
		if err := c.withDefaults().check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	for _, s := range scenarios {
		if err := s.Config.withDefaults().check(); err != nil {
			t.Errorf("scenario %s: %v", s.Name, err)
		}
	}
}

func TestLogCheckFindsEachPattern(t *testing.T) {
	for _, line := range []string{
		"DMAR: [DMA Read NO_PASID] Request device [00:04.0] fault addr 0x1000 [fault reason 0x06] PTE Read access is not set",
		"DMAR: DRHD: handling fault status reg 3",
		"DMAR: [INTR-REMAP] Request device [00:04.0] fault index 0x0",
		"dmar0: DMAR: Fault something",
		"nvme 0000:00:04.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000b address=0x1000 flags=0x0020]",
		"AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=0000:00:04.0 pasid=0x00000 address=0x1000 flags=0x0080]",
		"AMD-Vi: IO_PAGE_FAULT device=00:04.0 domain=0x000b",
		"BUG: kernel NULL pointer dereference, address: 0000000000000000",
		"watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [heliosctl:93]",
		"kernel BUG at mm/slub.c:379!",
		"Oops: 0000 [#1] PREEMPT SMP NOPTI",
		"general protection fault, probably for non-canonical address 0x1: 0000",
		"Kernel panic - not syncing: Attempted to kill init!",
		"INFO: task heliosctl:93 blocked for more than 120 seconds.",
		"vmtest: the kernel's log lost records",
	} {
		err := checkLog("nvme nvme0: 2/0/0 default/read/poll queues\n" + line + "\nlast")
		if err == nil || !strings.Contains(err.Error(), line) {
			t.Errorf("%q passes: %v", line, err)
		}
		if strings.Contains(fmt.Sprint(err), "poll queues") {
			t.Errorf("a good line is quoted: %v", err)
		}
	}
}

func TestLogCheckPassesAHealthyBoot(t *testing.T) {
	if err := checkLog(`DMAR: IOMMU enabled
DMAR: Host address width 39
DMAR: DRHD base: 0x000000fed90000 flags: 0x0
DMAR: No ATSR found
AMD-Vi: Interrupt remapping enabled
pci 0000:00:02.0: AMD-Vi: Found IOMMU cap 0x40
DMAR: Intel(R) Virtualization Technology for Directed I/O
DMAR-IR: Enabled IRQ remapping in x2apic mode
nvme nvme0: I/O 12 QID 1 timeout, aborting
debug: DEBUG: x
vfio-pci 0000:00:02.0: enabling device (0000 -> 0002)`); err != nil {
		t.Error(err)
	}
	many := strings.Repeat("Oops: 1\n", 20)
	if err := checkLog(many); err == nil || !strings.Contains(err.Error(), "and 12 more") {
		t.Errorf("%v", err)
	}
}

func TestModulesDep(t *testing.T) {
	got := string(modulesDep(
		map[string]string{"a": "k/a.ko", "b": "k/b.ko", "c": "k/c.ko"},
		map[string][]string{"a": {"b", "builtin"}, "b": {"c"}},
	))
	if want := "k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\n"; got != want {
		t.Errorf("got %q", got)
	}
}

func TestNewestByNumbers(t *testing.T) {
	names := []string{"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-56-cloud-amd64",
		"linux-image-6.1.0-10-cloud-amd64"}
	if got := slices.MaxFunc(names, byNumbers); got != names[1] {
		t.Errorf("newest is %s", got)
	}
	if byNumbers("a-6.12.9", "a-6.2.10") <= 0 || byNumbers("x1", "y1") != 0 ||
		byNumbers("a1.2", "a1") <= 0 {
		t.Error("order of numbers")
	}
}

func TestChoose(t *testing.T) {
	all := []Scenario{{Name: "a"}, {Name: "b", Long: true}, {Name: "c"}}
	names := func(s []Scenario) (out []string) {
		for _, x := range s {
			out = append(out, x.Name)
		}
		return out
	}
	for _, c := range []struct {
		ask   []string
		short bool
		want  []string
	}{{nil, false, []string{"a", "b", "c"}}, {nil, true, []string{"a", "c"}},
		{[]string{"b"}, true, []string{"b"}}, {[]string{"c", "a"}, false, []string{"a", "c"}}} {
		got, err := choose(all, c.ask, c.short)
		if err != nil || !slices.Equal(names(got), c.want) {
			t.Errorf("%v: %v %v", c.ask, names(got), err)
		}
	}
	if _, err := choose(all, []string{"z"}, false); err == nil || !strings.Contains(err.Error(),
		`"z"`) {
		t.Errorf("%v", err)
	}
	if _, err := choose(append(all, Scenario{Name: "a"}), nil, false); err == nil {
		t.Error("two scenarios of one name")
	}
	if _, err := choose(scenarios, nil, false); err != nil {
		t.Error(err)
	}
}

// fakeQEMU answers QMP as docs/interop/qmp-spec.txt says, with an event before the first answer.
func fakeQEMU(conn net.Conn) {
	enc, dec := json.NewEncoder(conn), json.NewDecoder(conn)
	_ = enc.Encode(map[string]any{"QMP": map[string]any{"version": map[string]any{}}})
	for {
		var m struct {
			Execute   string
			ID        int64
			Arguments map[string]any
		}
		if dec.Decode(&m) != nil {
			return
		}
		switch m.Execute {
		case "device_del":
			_ = enc.Encode(map[string]any{"event": "DEVICE_DELETED", "data": m.Arguments})
			_ = enc.Encode(map[string]any{"id": m.ID, "return": map[string]any{}})
		case "bad":
			_ = enc.Encode(map[string]any{"id": m.ID,
				"error": map[string]any{"class": "GenericError", "desc": "no such thing"}})
		case "quit":
			conn.Close()
			return
		default:
			_ = enc.Encode(map[string]any{"id": m.ID,
				"return": map[string]any{"echo": m.Arguments["x"]}})
		}
	}
}

func TestQMP(t *testing.T) {
	host, other := net.Pipe()
	go fakeQEMU(other)
	q, err := newQMP(host)
	require.NoError(t, err)
	if b, err := q.do("any", map[string]any{"x": 5}); err != nil || string(b) != `{"echo":5}` {
		t.Errorf("%s %v", b, err)
	}
	if _, err := q.do("bad", nil); err == nil || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("%v", err)
	}
	if _, err := q.do("device_del", map[string]any{"id": "nvme3"}); err != nil {
		t.Error(err)
	}
	if b, err := q.event("DEVICE_DELETED", time.Second); err != nil ||
		string(b) != `{"id":"nvme3"}` {
		t.Errorf("%s %v", b, err)
	}
	if _, err := q.event("DEVICE_DELETED", 20*time.Millisecond); err == nil {
		t.Error("one event was taken twice")
	}
	if _, err := q.do("quit", nil); err == nil {
		t.Error("no error when QEMU ends")
	}
	if _, err := q.do("any", nil); err == nil {
		t.Error("no error after QEMU's end")
	}
	if _, err := q.event("SHUTDOWN", time.Minute); err == nil {
		t.Error("no error for an event after QEMU's end")
	}
}

func TestOutcomeSetsTheExitCode(t *testing.T) {
	if c := summary([]outcome{{name: "a"}, {name: "b"}}, time.Second); c != 0 {
		t.Errorf("code %d", c)
	}
	if c := summary([]outcome{{name: "a"}, {name: "b", failure: "x\ny"}}, time.Second); c != 1 {
		t.Errorf("code %d", c)
	}
}

func TestWorkDirRemovesThoseOfTheDead(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	done := exec.Command("true")
	require.NoError(t, done.Run())
	dead := filepath.Join(tmp, fmt.Sprintf("hvm-%d-1", done.Process.Pid))
	alive := filepath.Join(tmp, fmt.Sprintf("hvm-%d-1", os.Getpid()))
	for _, d := range []string{dead, alive} {
		require.NoError(t, os.Mkdir(d, 0o755))
	}
	if _, err := workDir(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); err == nil {
		t.Error("the folder of a process that ended is still there")
	}
	if _, err := os.Stat(alive); err != nil {
		t.Error("the folder of a running process is gone")
	}
}

func TestFailuresOfAScenario(t *testing.T) {
	end := func(f func(*T)) []string {
		x := &T{Name: "x"}
		done := make(chan struct{})
		go func() { defer close(done); f(x) }()
		<-done
		return x.failures
	}
	if got := end(func(t *T) { t.Errorf("a %d", 1); t.Errorf("b") }); !slices.Equal(got,
		[]string{"a 1", "b"}) {
		t.Errorf("%q", got)
	}
	if got := end(func(t *T) { t.Fatalf("first"); t.Errorf("after") }); !slices.Equal(got,
		[]string{"first"}) {
		t.Errorf("%q", got)
	}
}

// Limits grow with the time that a machine takes to boot, up to a bound.
func TestLimitsScale(t *testing.T) {
	for boot, want := range map[time.Duration]time.Duration{
		0: time.Minute, idleBoot / 2: time.Minute, idleBoot: time.Minute,
		2 * idleBoot: 2 * time.Minute, idleBoot * 5 / 2: 150 * time.Second,
		time.Hour: mostSlow * time.Minute,
	} {
		if got := stretch(time.Minute, slowness(boot)); got != want {
			t.Errorf("boot of %v: %v, not %v", boot, got, want)
		}
	}
	if got := stretch(5*time.Minute, mostSlow); got != hardCap {
		t.Errorf("%v, not the hard cap", got)
	}
	if got := stretch(time.Hour, 2); got != time.Hour {
		t.Errorf("a limit above the cap: %v", got)
	}
	q, limit := Cmd{Timeout: time.Minute}.request("exec", 3)
	if q.TimeoutMS != 180_000 || limit != time.Minute+answerSlack {
		t.Errorf("a command's limits are %d ms and %v", q.TimeoutMS, limit)
	}
}
