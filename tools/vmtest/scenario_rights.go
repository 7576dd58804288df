package main

import (
	"fmt"
	"strings"
	"syscall"
	"time"
)

// rights: who may bind, list and use bound SSDs, what an SSD in use is protected from, and what
// Ctrl-C in the middle of bind-ssds and unbind-ssds leaves.
func init() {
	scenarios = append(scenarios, Scenario{
		Name:   "rights",
		Config: Config{Disks: []Disk{{MB: 16}, {MB: 16}, {MB: 16}}},
		Run:    rights,
	})
}

func rights(t *T) {
	a0, a1, a2 := t.Addr(0), t.Addr(1), t.Addr(2)
	t.OK("root", "vfio-setup.sh setup")
	t.Exit(3, []string{"root", "sudo"}, "user", "heliosctl bind-ssds "+a0)
	t.Exit(0, []string{a0, "HELIOS0", "16 MiB", "needs root", "nothing was changed"}, "user",
		"heliosctl bind-ssds --dry-run "+a0)
	t.OK("root", "heliosctl bind-ssds "+a0+" "+a1)

	const words = "user user is not in group helios; run \"sudo usermod -aG helios user\" and log in again"
	t.Exit(0, []string{"not permitted", words, a2, "needs root"}, "user", "heliosctl ssds")
	const bench = "heliosctl bench io --device host --depth 32 --ssds vfio0 --quiet --seconds "
	t.Exit(3, []string{"vfio0", words}, "user", bench+"0.2")
	t.Exit(3, []string{"vfio0", "sudo"}, "user", "heliosctl unbind-ssds vfio0")
	t.Exit(0, []string{"vfio0, vfio1", "sudo heliosctl unbind-ssds"}, "user",
		"heliosctl unbind-ssds")
	t.OK("root", "vfio-setup.sh setup --user user")
	t.OK("user", bench+"0.2")

	// Nobody takes an SSD from under the user who drives it.
	p := t.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec " + bench + "300"}, User: "user",
		Timeout: time.Minute})
	for began := time.Now(); !strings.Contains(t.OK("root", "cat /run/heliosctl/vfio0.lock"),
		"bench io"); {
		if time.Since(began) > 30*time.Second {
			t.Fatalf("bench io does not begin")
		}
	}
	t.Exit(0, []string{"in use by another heliosctl"}, "root", "heliosctl ssds vfio0")
	t.Exit(4, []string{"vfio0", "in use by heliosctl bench io"}, "root", "heliosctl unbind-ssds")
	t.Exit(0, []string{"vfio1 (" + a1 + "): unbound"}, "root", "heliosctl unbind-ssds vfio1")
	p.Kill(syscall.SIGKILL)
	p.Wait()
	t.OK("root", "heliosctl unbind-ssds")

	// Ctrl-C, at moments that spread over the work, fast machine or slow.
	all := strings.Join([]string{a0, a1, a2}, " ")
	interrupted := 0
	for _, c := range []struct{ verb, before, next string }{
		{"bind-ssds " + all, "unbind-ssds", "run the same command again to bind"},
		{"unbind-ssds", "bind-ssds " + all, "run the same command again for the rest"},
	} {
		for _, after := range []string{"0.1", "0.25", "0.5", "1"} {
			t.OK("root", "heliosctl "+c.before)
			r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", "heliosctl " + c.verb + " & sleep " +
				after + "; kill -INT $! 2>/dev/null; wait $!"}})
			switch {
			case r.Code == 0: // it was faster
			case r.Code == 130 && strings.Contains(r.Err, "interrupted") &&
				strings.Contains(r.Err, c.next):
				interrupted++
			case r.Code == 130 && r.Out+r.Err == "": // it had not begun
			default:
				t.Errorf("heliosctl %s, Ctrl-C after %s s: exit code %d:\n%s%s", c.verb, after,
					r.Code, r.Out, r.Err)
			}
			if s := t.OK("root", "heliosctl ssds"); strings.Contains(s, "cut off") {
				t.Errorf("heliosctl %s, Ctrl-C after %s s, leaves something half done:\n%s", c.verb,
					after, s)
			}
			t.OK("root", "heliosctl "+c.verb)
		}
	}
	if interrupted == 0 {
		t.Errorf("no Ctrl-C struck while something was done")
	}
	t.OK("root", "heliosctl unbind-ssds")
	for i := range 3 {
		t.OK("root",
			fmt.Sprintf(
				"[ -b %s ] && [ $(cat /sys/bus/pci/devices/%s/driver_override) = '(null)' ]",
				t.Dev(i), t.Addr(i)))
	}
	t.Notef("interrupted %d of 8 times; nothing half done, every disk back", interrupted)
}
