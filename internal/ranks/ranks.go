// Package ranks joins the processes, the ranks, of one run: over TCP where a launcher such as
// torchrun says where the first rank listens, or over MPI under mpirun. It moves bytes between them
// and tells all of them why one ended.
package ranks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"helios/internal/errs"
	"helios/internal/mpi"
)

// Group is this process among the ranks of a run. All ranks make the same calls in the same order,
// one at a time. Each call has a deadline; what it fails with is of the group, and no call succeeds
// after it.
type Group interface {
	Rank() int
	Size() int
	// Name says what carries the bytes.
	Name() string
	// AllGather sends mine to all and returns everybody's, by rank. Lengths may differ.
	AllGather(ctx context.Context, mine []byte) ([][]byte, error)
	// Exchange sends out[r] to each rank r. Element r of the result came from rank r.
	Exchange(ctx context.Context, out [][]byte) ([][]byte, error)
	// Failed is closed when the group has failed; Err says why.
	Failed() <-chan struct{}
	Err() error
	// SentBytes is how many bytes of messages this rank has sent to others.
	SentBytes() int64
	// Abort tells the others why this rank ends: their calls fail with the cause and its class. It
	// may be called at any time, and Close comes after it.
	Abort(cause error)
	Close() error
}

// Launch is what a launcher says of this process.
type Launch struct {
	Rank, Size int
	Local      int      // rank on this machine; -1: not said
	MPI        mpi.Kind // of mpirun; "": TCP
	Master     string   // host:port at which the first rank listens
}

// FromEnv reads the variables of a launcher; nil where there is none.
func FromEnv(get func(string) (string, bool)) (*Launch, error) {
	for _, m := range []struct {
		kind              mpi.Kind
		rank, size, local string
	}{
		{mpi.OpenMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
		{mpi.MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
	} {
		if _, ok := get(m.size); ok {
			l := &Launch{MPI: m.kind}
			return l, l.read(get, m.rank, m.size, m.local)
		}
	}
	_, haveRank := get("RANK")
	_, haveSize := get("WORLD_SIZE")
	if !haveRank && !haveSize {
		return nil, nil
	}
	l := &Launch{}
	if err := l.read(get, "RANK", "WORLD_SIZE", "LOCAL_RANK"); err != nil {
		return nil, err
	}
	if l.Size == 1 {
		return l, nil
	}
	host, ok := get("MASTER_ADDR")
	if !ok || host == "" {
		return nil, missing("MASTER_ADDR")
	}
	text, ok := get("MASTER_PORT")
	if !ok {
		return nil, missing("MASTER_PORT")
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return nil, errs.New(errs.Usage, "MASTER_PORT=%q is no port; give one of 1 to 65535", text)
	}
	// torchrun may listen there itself.
	if v, _ := get("TORCHELASTIC_USE_AGENT_STORE"); v == "True" {
		if port++; port > 65535 {
			return nil, errs.New(errs.Usage,
				"MASTER_PORT=%s is torchrun's own, and there is none behind it; give torchrun a lower one",
				text)
		}
	}
	l.Master = net.JoinHostPort(host, strconv.FormatUint(port, 10))
	return l, nil
}

func missing(name string) error {
	return errs.New(errs.Usage,
		"environment: %s is not set, others of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are; set all four for a run of several ranks, or unset RANK and WORLD_SIZE for a run of one",
		name)
}

func (l *Launch) read(get func(string) (string, bool), rank, size, local string) error {
	l.Local = -1
	for _, x := range []struct {
		name string
		to   *int
		must bool
		low  int
		high int
	}{
		{size, &l.Size, true, 1, MaxSize}, {rank, &l.Rank, true, 0, MaxSize - 1},
		{local, &l.Local, false, 0, MaxSize - 1},
	} {
		text, ok := get(x.name)
		if !ok && !x.must {
			continue
		}
		if !ok {
			return missing(x.name)
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < x.low || n > x.high {
			return errs.New(errs.Usage, "environment: %s=%q is not a number of %d to %d", x.name,
				text, x.low, x.high)
		}
		*x.to = n
	}
	if l.Rank >= l.Size {
		return errs.New(errs.Usage, "environment: %s=%d, and %s=%d: ranks count from 0", rank,
			l.Rank, size, l.Size)
	}
	return nil
}

// MaxSize is the most ranks.
const MaxSize = 1024

// Options of a group.
type Options struct {
	// Job tells this run from others that use the same port.
	Job string
	// Join bounds the wait for all ranks to come (5 minutes), Wait a call's for the slowest rank
	// (10 minutes), and Silence the time in which nothing comes from a rank (20 seconds).
	Join, Wait, Silence time.Duration
	Library             string // of MPI; "": by its usual name
	// Note, where given, is told what people may want to know of the wait for all ranks.
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

// end sets the reason; it tells whether this was the first one.
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

// Err says why the group has failed; nil while it has not.
func (e *ended) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.why
}

var (
	errAborted = errors.New("this rank has told the others that it ends")
	errClosed  = errors.New("this rank has left the others")
)

// hostname is how errors name this machine.
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
