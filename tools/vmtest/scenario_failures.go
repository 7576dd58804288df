package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// badRow is the row that disk 2 of scenario failures cannot read: alone on an SSD of 512-byte
// blocks, rows of 512 bytes begin at LBA 2048.
const (
	badRow    = 1000
	badRowLBA = 2048 + badRow
)

// failures is heliosctl, as an ordinary user, on SSDs that fail under it: exit codes, words, and
// results that do not change where the SSD comes back.
func init() {
	bad := fmt.Sprintf(
		"[inject-error]\nevent = \"read_aio\"\niotype = \"read\"\nerrno = \"5\"\nsector = \"%d\"\nonce = \"off\"\n",
		badRowLBA)
	scenarios = append(scenarios, Scenario{
		Name:   "failures",
		Limit:  4 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{{}, {}, {BlkDebug: bad}}},
		Run:    runFailures,
	})
}

func runFailures(t *T) {
	t.OK("root", "SUDO_USER=user vfio-setup.sh setup")
	t.OK("root", "heliosctl bind-ssds --quiet "+t.Addr(0)+" "+t.Addr(1)+" "+t.Addr(2))
	t.OK("user", "heliosctl "+jobGenerate)
	// for the SSD with the bad block
	t.OK("user", "heliosctl "+strings.Replace(jobGenerate, "--seed 7 --out graph",
		"--seed 8 --out graph2", 1))
	t.OK("user", "heliosctl "+jobLoad+" --ssds vfio0,vfio1")
	t.OK("user", "heliosctl load graph2 --quiet --json --ssds vfio2")

	train := strings.Replace(jobTrain, "--epochs 2", "--epochs 4", 1)
	want, err := lastTrained(t.run("user", 2*time.Minute, "heliosctl "+train))
	if err != nil {
		t.Fatalf("train: %v", err)
	}

	// The controller dies (CSTS.CFS) after each epoch, since it may not reach memory any more: it
	// is reset, and nothing changes.
	out, code := failingTrain(t, train+" --on-ssd-failure retry=9", 3)
	if code != 0 {
		t.Fatalf("train --on-ssd-failure retry=9: exit code %d:\n%s", code, out)
	}
	got, err := lastTrained(out)
	if err != nil {
		t.Fatalf("train --on-ssd-failure retry=9: %v", err)
	}
	if d := got.same(want); d != "" {
		t.Errorf("training over an SSD that was reset differs: %s", d)
	}
	resets := ssdResets(t, out)
	if resets == 0 {
		t.Errorf("no reset was counted:\n%s", out)
	}
	t.Notef(
		"train: bus mastering taken 3 times, %d controller resets, params_sha256 %.16s… as without",
		resets, got.SHA)

	// Or the user wants it to stop: exit code 5, and words.
	out, code = failingTrain(t, train+" --on-ssd-failure stop", 1)
	said(t, "train --on-ssd-failure stop", out, code, 5, "vfio0", "given up",
		"controller fatal status", "CSTS")
	// The next one starts clean.
	t.OK("user", "heliosctl "+jobVerify)

	// A block that cannot be read: each verb names it; verify the command of 512 blocks that it is
	// in.
	for _, c := range []struct{ line, lba string }{
		{"verify graph2 --quiet", "LBA 2560+512"},
		{strings.Replace(train, "graph ", "graph2 ", 1), fmt.Sprintf("LBA %d", badRowLBA)},
		{"bench io graph2 --seconds 1 --quiet", fmt.Sprintf("LBA %d", badRowLBA)},
	} {
		r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", "heliosctl " + c.line}, User: "user",
			Timeout: 2 * time.Minute})
		said(t, c.line, r.Out+r.Err, r.Code, 5, c.lba, "unrecovered read error (SCT 2h, SC 81h)")
	}
	t.OK("root", "heliosctl unbind-ssds --quiet")
}

// said checks an exit code and words.
func said(t *T, what, text string, code, want int, words ...string) {
	if code != want {
		t.Errorf("%s: exit code %d, not %d:\n%s", what, code, want, text)
	}
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q:\n%s", what, w, text)
		}
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	t.Notef("%s: exit code %d: %.300s", what, code, lines[len(lines)-1])
}

// failingTrain trains as a user and takes bus mastering from the first SSD after each of the first
// n epochs. It returns what was said, with the results last, and the exit code.
func failingTrain(t *T, line string, n int) (string, int) {
	const log = "/tmp/failing"
	t.OK("user", "rm -f "+log)
	p := t.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec heliosctl " + line + " >" + log},
		User: "user", Timeout: 2 * time.Minute})
	clear := fmt.Sprintf(
		`printf '\002\004' | dd of=/sys/bus/pci/devices/%s/config bs=1 seek=4 conv=notrunc 2>/dev/null`,
		t.Addr(0))
	for i := 1; i <= n; i++ {
		t.OK("root",
			fmt.Sprintf(
				`n=0; until [ "$(grep -c '"event":"epoch"' %s)" -ge %d ]; do sleep 0.02; n=$((n+1)); [ $n -lt 2000 ] || exit 1; done; %s`,
				log, i, clear))
	}
	r := p.Wait()
	return r.Err + string(t.ReadFile(log)), r.Code
}

// ssdResets adds up the resets of a train result.
func ssdResets(t *T, out string) int {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	n := 0
	for _, m := range resetsField.FindAllStringSubmatch(lines[len(lines)-1], -1) {
		v, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatalf("%v", err)
		}
		n += v
	}
	return n
}

var resetsField = regexp.MustCompile(`"resets":(\d+)`)
