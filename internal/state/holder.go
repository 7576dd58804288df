package state

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"helios/internal/durable"
)

// The holder of a lease writes its work into the file. Anybody who may use the SSD can write there,
// without the lock, so that text is only believed as far as the kernel bears it out.

// noteBytes of a lease's text are read.
const noteBytes = 256

// leaseNote is the text of a lease: "heliosctl train (process 4711, started 123456)".
var leaseNote = regexp.MustCompile(
	`^(heliosctl(?: [a-z][a-z0-9-]{0,20}){0,2}) \(process (\d{1,10})(?:, started (\d{1,20}))?\)$`)

// note is the text that this process writes into its leases.
func note(what string) string {
	pid := os.Getpid()
	p, ok := durable.Look(pid)
	if !ok {
		return fmt.Sprintf("%s (process %d)\n", what, pid)
	}
	return fmt.Sprintf("%s (process %d, started %s)\n", what, pid, p.Start)
}

// holder names the process that holds a lease whose file says text. kernel is the process that
// holds the lock by the kernel's word, or 0.
func holder(text string, kernel int, look func(pid int) (durable.Process, bool)) string {
	text = strings.TrimSpace(text)
	m := leaseNote.FindStringSubmatch(text)
	if m != nil {
		pid, _ := strconv.Atoi(m[2])
		p, there := look(pid)
		self, _ := look(os.Getpid())
		// A process that has the lock may say what it does. Where the kernel does not tell, the
		// process must be the one that wrote the text, and one of ours.
		ours := there && p.Start == m[3] && (strings.HasPrefix(p.Comm, "heliosctl") ||
			p.Comm == self.Comm)
		if kernel == pid || kernel == 0 && ours {
			return fmt.Sprintf("%s (process %d)", m[1], pid)
		}
	}
	by := "another process"
	if kernel != 0 {
		by = fmt.Sprintf("process %d", kernel)
		if p, there := look(kernel); there {
			by += fmt.Sprintf(" (%q)", p.Comm)
		}
	}
	if text == "" {
		return by
	}
	return fmt.Sprintf("%s; the lease file claims %.80q, which is not borne out", by, text)
}
