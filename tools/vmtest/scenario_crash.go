package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

// crash ends processes that own controllers, by kill -9 and by Ctrl-C, in every verb that reads or
// writes SSDs: the kernel leaves the controllers quiet, the next process has them at once, a load
// and a training go on where they were, and nothing outside the extents of the dataset ever
// changes.
func init() {
	scenarios = append(scenarios, Scenario{
		Name:   "crash",
		Limit:  4 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{{}, {MDTS: 1}, {CMBMB: 16}}},
		Run:    crash,
	})
}

const (
	crashMB       = 64 // Disk.MB's default
	crashGenerate = "generate --kind sbm --nodes 4500 --avg-degree 4 --classes 6 --dim 2000 --seed 11 --out graph --quiet"
	crashTrain    = "train graph --kernels generic --model sage --fanout 3,3 --batch-size 128 --hidden 8 --epochs 2 --seed 5 --lr 0.003" +
		" --gpu-cache 0 --cpu-cache 5% --workers 2 --no-eval --quiet --json"
	crashSlow = 2 << 20 // bytes a second and SSD, so that there is a middle to kill in
)

// throttle slows reads and writes of all disks down, or ends that (0).
func (t *T) throttle(readBytes, writeBytes int) {
	for i := range t.VM.cfg.Disks {
		if out := t.HMP(fmt.Sprintf("block_set_io_throttle d%d 0 %d %d 0 0 0", i, readBytes,
			writeBytes)); strings.TrimSpace(out) != "" {
			t.Fatalf("block_set_io_throttle d%d: %s", i, out)
		}
	}
}

// image opens the image of disk i on the host. QEMU works on it through the page cache, as this
// does.
func (t *T) image(i, flags int) *os.File {
	f, err := os.OpenFile(t.DiskPath(i), flags, 0)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return f
}

// mark returns what the superblocks of disk i say: the state of its load, and how many chunks are
// there, by that which says less (dataset/stripe/superblock.go).
func (t *T) mark(i int) (state uint32, chunks uint64) {
	f := t.image(i, os.O_RDONLY)
	defer f.Close()
	b := make([]byte, 512)
	for n, at := range []int64{0, crashMB<<20 - 4096} {
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatalf("%v", err)
		}
		if string(b[:8]) != "HeliosSB" {
			return 0, 0
		}
		if c := binary.LittleEndian.Uint64(b[272:]); n == 0 || c < chunks {
			state, chunks = binary.LittleEndian.Uint32(b[112:]), c
		}
	}
	return state, chunks
}

// until polls what the host sees.
func (t *T) until(what string, limit time.Duration, ok func() bool) {
	for end := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if t.Err() != nil || time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// crashPattern fills the middle of an image, at its offset, with what must not change.
func crashPattern(i int) []byte {
	b := make([]byte, crashMB<<20)
	for pos := 1 << 20; pos < len(b)-1<<20; pos += 16 {
		binary.LittleEndian.PutUint64(b[pos:], uint64(pos)*0x9e3779b97f4a7c15+uint64(i))
		binary.LittleEndian.PutUint64(b[pos+8:], ^uint64(pos))
	}
	return b
}

// begin starts heliosctl as an ordinary user.
func (t *T) begin(line string) *Proc {
	return t.Start(Cmd{Argv: append([]string{"/bin/heliosctl"}, strings.Fields(line)...),
		User: "user", Timeout: 2 * time.Minute})
}

// stopped ends a process that must still be running.
func (t *T) stopped(p *Proc, sig syscall.Signal, words ...string) {
	p.Kill(sig)
	began := time.Now()
	r := p.Wait()
	want := 128 + int(syscall.SIGKILL)
	if sig == syscall.SIGINT {
		want = 130
	}
	if r.Code != want {
		t.Fatalf("%s, after signal %d: exit code %d, not %d:\n%s%s", p.what, sig, r.Code, want,
			r.Out, r.Err)
	}
	for _, w := range words {
		if !strings.Contains(r.Err, w) {
			t.Fatalf("%s, after signal %d: does not say %q:\n%s", p.what, sig, w, r.Err)
		}
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("%s took %.0f s to end after signal %d", p.what, took.Seconds(), sig)
	}
}

// loadResult holds what the scenario reads of "load --json".
type loadResult struct {
	ResumedBytes int64   `json:"resumed_bytes"`
	DataBytes    int64   `json:"data_bytes"`
	StartedOver  string  `json:"started_over"`
	Marks        int     `json:"marks"`
	MarkSeconds  float64 `json:"mark_seconds"`
	Seconds      float64 `json:"seconds"`
	Extents      []struct {
		Serial   string `json:"serial"`
		LBABytes int64  `json:"lba_bytes"`
		Extents  []struct {
			LBA    int64 `json:"lba"`
			Blocks int64 `json:"blocks"`
		} `json:"extents"`
	} `json:"extents"`
}

func (t *T) load(flags string) loadResult {
	out := strings.Split(strings.TrimSpace(t.run("user", 90*time.Second,
		"heliosctl load graph --json "+flags)), "\n")
	var r loadResult
	if err := json.Unmarshal([]byte(out[len(out)-1]), &r); err != nil || len(r.Extents) == 0 {
		t.Fatalf("load: %v in %.300q", err, out[len(out)-1])
	}
	return r
}

// untouched compares the images with the pattern, outside the extents of a load.
func (t *T) untouched(r loadResult) (outside int64) {
	for _, s := range r.Extents {
		var i int
		if _, err := fmt.Sscanf(s.Serial, "HELIOS%d", &i); err != nil {
			t.Fatalf("serial %q: %v", s.Serial, err)
		}
		got, err := os.ReadFile(t.DiskPath(i))
		if err != nil {
			t.Fatalf("%v", err)
		}
		want := crashPattern(i)
		outside += int64(len(want))
		for _, e := range s.Extents {
			copy(got[e.LBA*s.LBABytes:(e.LBA+e.Blocks)*s.LBABytes], want[e.LBA*s.LBABytes:])
			outside -= e.Blocks * s.LBABytes
		}
		if !bytes.Equal(got, want) {
			pos := 0
			for got[pos] == want[pos] {
				pos++
			}
			t.Errorf("disk %d: byte %d changed, which is in no extent of the dataset (%+v)", i, pos,
				s.Extents)
		}
	}
	return outside
}

func crash(t *T) {
	disks := len(t.VM.cfg.Disks)
	host := t.HostDir()
	t.onHost(host, crashGenerate)
	t.onHost(host, "bind-ssds --proxy a.img,b.img,c.img --size 64MiB --quiet")
	t.onHost(host, "load graph --quiet")
	want, err := lastTrained(t.onHost(host, crashTrain))
	if err != nil {
		t.Fatalf("on the host: %v", err)
	}

	for i := range disks {
		f := t.image(i, os.O_WRONLY)
		_, err := f.Write(crashPattern(i))
		if err := f.Close(); err != nil {
			t.Fatalf("%v", err)
		}
		if err != nil {
			t.Fatalf("%v", err)
		}
	}
	var addrs []string
	for i := range disks {
		addrs = append(addrs, t.Addr(i))
	}
	all := strings.Join(addrs, " ")
	drivers := func(want string) {
		got := strings.TrimSpace(t.OK("root",
			"for a in "+all+
				"; do basename $(readlink /sys/bus/pci/devices/$a/driver); done | uniq -c"))
		if got != fmt.Sprintf("%d %s", disks, want) {
			t.Fatalf("drivers: %s, not %s", got, want)
		}
	}
	t.OK("root", "SUDO_USER=user vfio-setup.sh setup")
	t.OK("root", "heliosctl bind-ssds --quiet "+all)
	drivers("vfio-pci")
	t.OK("user", "heliosctl "+crashGenerate)

	// quiet: after a death the next process has the controllers at once, and so has the kernel.
	slowest := time.Duration(0)
	quiet := func(code int, line string, words ...string) {
		began := time.Now()
		t.Exit(code, words, "user", "heliosctl "+line)
		slowest = max(slowest, time.Since(began))
	}
	rebound := func() {
		t.OK("root", "heliosctl unbind-ssds --quiet")
		drivers("nvme")
		for i := range disks {
			f := t.image(i, os.O_RDONLY)
			b := make([]byte, 4096)
			_, err := f.ReadAt(b, 0)
			f.Close()
			if err != nil {
				t.Fatalf("%v", err)
			}
			if seen := t.ReadFileAt(t.Dev(i), 0, 4096); !bytes.Equal(seen, b) {
				t.Errorf("disk %d: the kernel reads another superblock than the image has", i)
			}
		}
		t.OK("root", "heliosctl bind-ssds --quiet "+all)
		drivers("vfio-pci")
	}

	// The pattern is data that load does not know: without --force it stays.
	t.Exit(4, []string{"holds something unknown", "--force HELIOS0,HELIOS1,HELIOS2"}, "user",
		"heliosctl load graph --quiet")
	// A load, killed: before it could leave a mark, and after marks of its own.
	t.throttle(0, crashSlow)
	p := t.begin("load graph --quiet --mark-every 500ms --force HELIOS0,HELIOS1,HELIOS2")
	t.until("the load has begun", 30*time.Second,
		func() bool {
			for i := range disks {
				if s, _ := t.mark(i); s != 1 {
					return false
				}
			}
			return true
		})
	t.stopped(p, syscall.SIGKILL)
	quiet(5, "verify graph", "did not finish")
	rebound()
	kills := 1
	for range 2 {
		_, before := t.mark(0)
		p := t.begin("load graph --quiet --mark-every 500ms")
		t.until("the load has left a mark", 60*time.Second,
			func() bool { _, c := t.mark(0); return c > before })
		t.stopped(p, syscall.SIGKILL)
		kills++
		quiet(5, "verify graph", "did not finish (", "% of its stripe is there")
	}
	rebound()
	quiet(5, "train graph --kernels generic --epochs 1 --quiet", "did not finish")
	marked := uint64(0)
	for i := range disks {
		_, c := t.mark(i)
		marked += c
	}
	// Ctrl-C, and then to the end.
	_, before := t.mark(0)
	p = t.begin("load graph --quiet --mark-every 500ms")
	t.until("the load has left a mark", 60*time.Second,
		func() bool { _, c := t.mark(0); return c > before })
	t.stopped(p, syscall.SIGINT, "interrupted",
		"% of it are on the SSDs: the next \"heliosctl load --dataset graph\" goes on there")
	t.throttle(0, 0)
	r := t.load("--quiet")
	if r.ResumedBytes < int64(marked)<<20 || r.StartedOver != "" {
		t.Errorf(
			"the load went on at %d of %d bytes, with %d chunks marked before the last interrupt (%s)",
			r.ResumedBytes, r.DataBytes, marked, r.StartedOver)
	}
	said := t.OK("user", "heliosctl verify graph --source")
	if !strings.Contains(said, "4500 rows equal to the source") {
		t.Errorf("verify: %s", said)
	}
	outside := t.untouched(r)
	t.Notef(
		"load killed %d times and interrupted once: went on at %.0f %%, verified row by row; %d MiB outside the extents unchanged",
		kills, 100*float64(r.ResumedBytes)/float64(r.DataBytes), outside>>20)

	// verify and bench, interrupted.
	t.throttle(crashSlow, 0)
	p = t.begin("verify graph --quiet")
	time.Sleep(3 * time.Second)
	t.stopped(p, syscall.SIGINT, "interrupted", "run it again")
	t.throttle(0, 0)
	p = t.begin("bench io --seconds 100 --device host --quiet")
	time.Sleep(3 * time.Second)
	t.stopped(p, syscall.SIGINT, "interrupted")
	p = t.begin("bench io --seconds 100 --device host --quiet")
	time.Sleep(3 * time.Second)
	t.stopped(p, syscall.SIGKILL)
	quiet(0, "verify graph --quiet")

	// A training, killed and interrupted with reads in flight.
	resumed := crashTrain + " --checkpoint ck --checkpoint-every 4 --resume"
	newest := "ls -i ck 2>/dev/null | tr -d '\\n'" // replaced atomically: another inode
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGKILL, syscall.SIGINT} {
		before := t.OK("user", newest)
		p := t.begin(resumed)
		t.OK("user",
			fmt.Sprintf("until now=$(%s); [ \"$now\" -a \"$now\" != '%s' ]; do sleep 0.1; done",
				newest, before))
		if sig == syscall.SIGINT {
			t.stopped(p, sig, "interrupted", "--resume")
			continue
		}
		t.stopped(p, sig)
		quiet(0, "verify graph --quiet")
	}
	rebound()
	got, err := lastTrained(t.run("user", 2*time.Minute, "heliosctl "+resumed))
	if err != nil {
		t.Fatalf("train: %v", err)
	}
	a, b := got.Epochs[len(got.Epochs)-1], want.Epochs[len(want.Epochs)-1]
	if got.SHA != want.SHA || a.Loss != b.Loss {
		t.Errorf(
			"killed twice and interrupted, train ends with loss %v and parameters %s; never interrupted, with %v and %s",
			a.Loss, got.SHA, b.Loss, want.SHA)
	}
	t.OK("user", "heliosctl verify graph --quiet")
	t.untouched(r)
	t.Notef(
		"train killed twice and interrupted once: last loss %.6f, params_sha256 %.16s…, as never interrupted on proxied SSDs; after each death the next verb, start to end, took at most %.1f s",
		a.Loss, got.SHA, slowest.Seconds())
	t.OK("root", "heliosctl unbind-ssds --quiet")
	drivers("nvme")
}
