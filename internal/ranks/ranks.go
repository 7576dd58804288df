// Package ranks joins the processes, the ranks, of one run: over TCP where a launcher such as
// torchrun names the address of the first rank, or over MPI under mpirun. It moves bytes between
// them and gives all of them the reason why one ended.
package ranks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"helios/internal/errs"
)

// Group is this process among the ranks of a run. All ranks make the same calls in the same order,
// one at a time. Each call has a deadline; what it fails with is of the group, and no call succeeds
// after it.
type Group interface {
	Rank() int
	Size() int
	// Name names the carrier of the bytes.
	Name() string
	// AllGather sends mine to all and returns everybody's, by rank. Lengths may differ.
	AllGather(ctx context.Context, mine []byte) ([][]byte, error)
	// Exchange sends out[r] to each rank r. Element r of the result came from rank r.
	Exchange(ctx context.Context, out [][]byte) ([][]byte, error)
	// Failed is closed when the group has failed; Err has the reason.
	Failed() <-chan struct{}
	Err() error
	// SentBytes returns the bytes of messages that this rank has sent to others.
	SentBytes() int64
	// Abort tells the others why this rank ends: their calls fail with the cause and its class. It
	// may be called at any time, and Close comes after it.
	Abort(cause error)
	Close() error
}

// MaxSize is the most ranks.
const MaxSize = 1024

// Options of a group.
type Options struct {
	// Join bounds the wait for all ranks to come (5 minutes), Wait a call's for the slowest rank
	// (10 minutes), and Silence the time in which nothing comes from a rank (20 seconds).
	Join, Wait, Silence time.Duration
	Library             string // of MPI; "": by its usual name
	// Secret is known to the ranks of a run over TCP, and to nobody else. Without one they meet on
	// this machine only, unless Insecure lets them meet anywhere.
	Secret   []byte
	Insecure bool
	// Listen is the address of the first rank, host or host:port; "": at the launcher's address.
	Listen string
	// Patience is the time that a rank waits for the others before it says so (2 seconds).
	Patience time.Duration
	// Note, where given, hears of the wait for all ranks.
	Note func(text string)
}

func (o Options) note(text string) {
	if o.Note != nil {
		o.Note(text)
	}
}

// Join brings the ranks of a run together.
func Join(ctx context.Context, l Launch, o Options) (Group, error) {
	o.Join = cmp.Or(o.Join, 5*time.Minute)
	o.Wait = cmp.Or(o.Wait, 10*time.Minute)
	o.Silence = cmp.Or(o.Silence, 20*time.Second)
	o.Patience = cmp.Or(o.Patience, 2*time.Second)
	if l.MPI != "" {
		return joinMPI(ctx, l, o)
	}
	return joinTCP(ctx, l, o)
}

// failure is why a group ended: what the first rank that failed says of it.
type failure struct {
	Rank  int    `json:"rank"`
	Host  string `json:"host"`
	Text  string `json:"text"`
	Class int    `json:"class"`
}

func (f *failure) err() error {
	return errs.New(errs.Class(f.Class), "rank %d on %s: %s", f.Rank, f.Host, f.Text)
}

// readFailure takes what another rank sent; a class that no error has becomes errs.Failed.
func readFailure(b []byte) (*failure, error) {
	f := new(failure)
	if err := json.Unmarshal(b, f); err != nil {
		return nil, err
	}
	switch errs.Class(f.Class) {
	case errs.Usage, errs.Capability, errs.Refused, errs.Device, errs.Interrupted:
	default:
		f.Class = int(errs.Failed)
	}
	return f, nil
}

// ended is the end of a group, which has one.
type ended struct {
	mu   sync.Mutex
	done chan struct{}
	why  error
}

func newEnded() ended { return ended{done: make(chan struct{})} }

// end sets the reason; it reports whether this was the first one.
func (e *ended) end(why error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.why != nil {
		return false
	}
	e.why = why
	close(e.done)
	return true
}

// Failed is closed when the group has failed.
func (e *ended) Failed() <-chan struct{} { return e.done }

// Err returns the reason why the group has failed; nil while it has not.
func (e *ended) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.why
}

var (
	errAborted = errors.New("this rank has told the others that it ends")
	errClosed  = errors.New("this rank has left the others")
)

// hostname is the name of this machine in errors.
func hostname() string {
	if h, err := os.Hostname(); err == nil && h != "" {
		return h
	}
	return "a machine without a name"
}

// same is an AllGather's element for each rank.
func same(b []byte, n int) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

// wrong refuses an Exchange of another number of messages than there are ranks.
func wrong(out [][]byte, n int) error {
	if len(out) != n {
		return fmt.Errorf("%d messages for %d ranks", len(out), n)
	}
	return nil
}
