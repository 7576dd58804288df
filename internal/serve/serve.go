// Package serve hands mini-batches to other processes: a daemon on a Unix socket, and shared memory
// that batches lie in (docs/reference/protocol.md). A Backend makes the batches.
package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Backend opens datasets. Its methods, and those of what it opens, may be called for several
// clients at once.
type Backend interface {
	Open(ctx context.Context, q OpenRequest) (Dataset, error)
}

// OpenRequest names a dataset and its SSDs: files that play some, names of bound ones, or none for
// all that are bound.
type OpenRequest struct {
	Dataset      string
	SSDFile, SSD []string
	Typed        bool // the client knows typed graphs
	// Foreign: the client is of another user, to whom the daemon lends none of its rights.
	Foreign bool
}

// Dataset makes loaders, of which none is open any more when it is closed.
type Dataset interface {
	Info() DatasetInfo
	Loader(ctx context.Context, q LoaderRequest) (Loader, error)
	Close() error
}

// DatasetInfo describes a dataset to clients.
type DatasetInfo struct {
	Name     string           `json:"name"`
	UUID     string           `json:"uuid"`
	Nodes    int64            `json:"nodes"`
	Edges    int64            `json:"edges"`
	Dim      int              `json:"dim"`
	Classes  int              `json:"classes"`
	RowDType string           `json:"row_dtype"`
	Splits   map[string]int64 `json:"splits"`
	// LabelDims is the number of dimensions of y: 1, or 2 of columns.
	LabelDims int `json:"label_dims"`
	// Arrays has the .npy files of features, labels, indptr, indices and the splits, relative to
	// the dataset's folder. Those of a typed graph have labels and splits alone, of nodes of type
	// Target.
	Arrays    map[string]string `json:"arrays"`
	Types     []NodeType        `json:"node_types,omitempty"`
	Relations []Relation        `json:"relations,omitempty"`
	Target    string            `json:"target_type,omitempty"`
}

// NodeType is a type of nodes of a typed graph.
type NodeType struct {
	Name     string `json:"name"`
	Nodes    int64  `json:"nodes"`
	Dim      int    `json:"dim"`
	Features string `json:"features,omitempty"` // its file in the folder
}

// Relation is a type of edges of a typed graph, by destination.
type Relation struct {
	Src     string `json:"src"`
	Name    string `json:"name"`
	Dst     string `json:"dst"`
	Edges   int64  `json:"edges"`
	Indptr  string `json:"indptr"` // files in the folder
	Indices string `json:"indices"`
}

// LoaderRequest describes the mini-batches of a loader. Nodes, where not nil, replace Split.
type LoaderRequest struct {
	Options map[string]string
	Split   string
	Nodes   []int64
	Type    string // of Nodes in a typed graph; empty: the one that has targets
	Shuffle bool
	// Anew: neighbours are drawn anew in each epoch, whether Shuffle or not. AllLabels: labels
	// come of all nodes, not of the seeds alone. Positions: those of the seeds come, too.
	Anew, AllLabels, Positions bool
	NoBlocks                   bool // of the edges edge_index alone comes
	// Device is the place of batches: "cpu", "cuda", or "auto", which is cuda where that
	// goes.
	Device string
	// Visible is the client's CUDA_VISIBLE_DEVICES, by which Options number GPUs; nil: it is unset.
	Visible *string
	// Rests: while no epoch is asked for, what the loader holds is given back. It has Nodes.
	Rests bool
	// World is the number of ranks that share the batches of an epoch. Of several, any batches may
	// be asked for; of one, always the last so many.
	World   int
	Foreign bool // as in OpenRequest
}

// Loader makes mini-batches, one epoch at a time. Batches counts those of an epoch. Epoch makes
// some of them, by their numbers, in the order given. It ends with emit's first error, and soon
// when ctx ends. BytesRead, which emit may call, returns the bytes from SSDs so far.
//
// claim gives a place for the first tensor of a batch that is being made, for a Placer; nil: there
// is none. It may be called beside emit, and again for a batch that is made anew.
//
// Seed sets the nodes of later epochs, between epochs, where the request has Nodes.
type Loader interface {
	Batches() int
	Seed(nodes []int64) error
	BytesRead() int64
	Epoch(ctx context.Context, epoch int, batches []int, claim func(index int) Place,
		emit func(*Batch) error) error
	Close() error
}

// Placer is a loader that can make the first tensor of a batch where its client finds it.
type Placer interface {
	Loader
	// Ahead is the number of batches that may have a place before they are emitted; 0: none ever
	// has.
	Ahead() int
	// Place makes a place at an offset of a file that has room for so many bytes, both multiples
	// of 4096. A batch may turn out larger; its place is then valid all the same, and only its
	// first bytes are in the file.
	Place(fd int, offset, bytes int64) (Place, error)
}

// Place is the memory of the first tensor of a batch.
type Place interface{ Close() error }

// DeviceLoader is a loader that can put batches into the memory of the device that makes them.
type DeviceLoader interface {
	Loader
	// DeviceName identifies the device to a client; empty: batches go to the CPU's memory.
	DeviceName() string
	// DeviceMemory makes memory that other processes can use.
	DeviceMemory(bytes int64) (DeviceMemory, error)
}

// DeviceMemory is memory of a device that comes to clients as a file.
type DeviceMemory interface {
	File() (fd int, bytes int64)
	// Put writes tensors of the batch that is being emitted to their offsets behind at. When it
	// returns they are there, for all processes.
	Put(offset int64, tensors []Tensor, offsets []int64) error
	// Close releases our side. Clients keep theirs.
	Close() error
}

// Batch is a mini-batch, valid until emit returns.
type Batch struct {
	Epoch, Index, Seeds int
	HopEnd              []int64
	HopEdges            []int64 // of edge_index
	// Of a typed graph: of each type the nodes after each hop, and of each relation the edges of
	// edge_index by hop.
	TypeEnd, RelationEdges [][]int64
	Tensors                []Tensor
	At                     Place // that the first tensor is in; nil: none
}

// Tensor has Bytes bytes, which Put writes.
type Tensor struct {
	Name, DType string
	Shape       []int64
	Bytes       int64
	Put         func(to []byte)
	// CopyTo begins to copy it to an address of the device's, for DeviceMemory; nil: Put does.
	CopyTo func(address uint64) error
}

// Config holds a server's backend and bounds. Zero values of the bounds are the defaults.
type Config struct {
	Backend    Backend
	Version    string
	MaxClients int   // at once; default 128
	Memory     int64 // of all rings, lists of nodes and requests
	Group      bool  // members of the daemon's group are let in, too
	Timeout    time.Duration
	Note       func(string)
	// Linger: Serve returns so long after the last client has left; 0: never.
	Linger time.Duration
	// Environment is told to clients of the daemon's own user, who may want another one.
	Environment map[string]string

	// patience is the time that ranks of a job that want batches wait with one whose slots are all
	// full.
	patience    time.Duration
	rest        time.Duration                            // until a job rests
	credentials func(*net.UnixConn) (*unix.Ucred, error) // of tests
}

// Bounds of one client.
const (
	maxDatasets = 16
	maxLoaders  = 64
	maxSlots    = 64
	maxWorld    = 4096
	maxWaiting  = 64 // requests that wait for the one before
	maxSilent   = 64 // clients that have not said hello
)

// Server serves clients.
type Server struct {
	Config
	memory memory

	clients, batches atomic.Int64
	read             atomic.Int64 // of jobs that are closed

	mu     sync.Mutex
	jobs   []*job
	silent []*session // that have not said hello, the longest first
}

// Stats counts the work of a server.
type Stats struct {
	Clients, Jobs, Ranks int64
	RingBytes            int64 // of all rings
	Batches              int64 // handed to clients so far
	BytesSSD             int64 // read from SSDs so far
}

// Stats returns the figures of now.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := Stats{Clients: s.clients.Load(), Jobs: int64(len(s.jobs)), RingBytes: s.memory.used.Load(),
		Batches: s.batches.Load(), BytesSSD: s.read.Load()}
	for _, j := range s.jobs {
		j.mu.Lock()
		t.Ranks += int64(len(j.ranks))
		j.mu.Unlock()
		t.BytesSSD += j.read.Load()
	}
	return t
}

// New returns a server.
func New(c Config) *Server {
	if c.MaxClients == 0 {
		c.MaxClients = 128
	}
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	if c.patience == 0 {
		c.patience = 2 * time.Second
	}
	if c.rest == 0 {
		c.rest = time.Second
	}
	if c.Note == nil {
		c.Note = func(string) {}
	}
	if c.credentials == nil {
		c.credentials = credentials
	}
	return &Server{Config: c, memory: memory{limit: c.Memory}}
}

// Serve accepts clients until ctx ends, or nobody has come for Config.Linger, ends their sessions,
// and returns nil.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	var mu sync.Mutex // of connected, and of the deadline that it sets
	connected := 0
	count := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		var until time.Time
		if connected += n; connected == 0 && s.Linger > 0 {
			until = time.Now().Add(s.Linger)
		}
		if ctx.Err() == nil {
			_ = l.SetDeadline(until)
		}
	}
	count(0)
	stop := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		_ = l.SetDeadline(time.Unix(1, 0))
	})
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				err = c.Close()
				return err
			}
			return nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
				s.Note(fmt.Sprintf("a client must wait: %v", err))
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
				}
				continue
			}
			return err
		}
		if s.clients.Load() >= int64(s.MaxClients) {
			w := &wire{c: c, timeout: time.Second}
			_ = w.write(failure(0, s.full()), -1) // it is being sent away
			_ = c.Close()
			continue
		}
		count(1)
		wg.Go(func() {
			defer count(-1)
			if err := s.ServeConn(ctx, c); err != nil {
				s.Note(fmt.Sprintf("a client's session ended: %v", err))
			}
		})
	}
}

func (s *Server) full() error {
	return errs.New(errs.Capability,
		"the daemon has %d clients, and no more at once; end one, or run \"heliosctl serve\" with a larger %v",
		s.MaxClients, errs.Key("max-clients"))
}

// await notes a client that has not said hello. It takes nobody's place: of too many such the
// longest one goes.
func (s *Server) await(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.silent) == maxSilent {
		s.silent[0].cancel(errs.New(errs.Capability,
			"protocol: no hello came, and %d other clients wait to say theirs", maxSilent))
		s.silent = s.silent[1:]
	}
	s.silent = append(s.silent, x)
}

// admit gives a client that says hello its place. The last one is for the daemon's own user.
func (s *Server) admit(x *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.silent, x)
	if i < 0 { // it has its place, or is being sent away
		return nil
	}
	limit := int64(s.MaxClients)
	if x.foreign && limit > 1 {
		limit--
	}
	if s.clients.Load() >= limit {
		return s.full()
	}
	s.silent = slices.Delete(s.silent, i, i+1)
	x.admitted = true
	s.clients.Add(1)
	return nil
}

// forget frees the place of a client that is gone.
func (s *Server) forget(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = slices.DeleteFunc(s.silent, func(o *session) bool { return o == x })
	if x.admitted {
		s.clients.Add(-1)
	}
}

// credentials returns whose process is at the other end.
func credentials(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(err, cerr)
}

// permit refuses users that are not let in, and says of others whether they are foreign.
func (s *Server) permit(c *net.UnixConn) (foreign bool, err error) {
	cred, err := s.credentials(c)
	if err != nil {
		return true, errs.New(errs.Refused, "the client's user is not known: %w", err)
	}
	if cred.Uid == 0 || int(cred.Uid) == os.Geteuid() {
		return false, nil
	}
	if s.Group {
		if int(cred.Gid) == os.Getegid() {
			return true, nil
		}
		if u, err := user.LookupId(strconv.Itoa(int(cred.Uid))); err == nil {
			of, err := u.GroupIds()
			for _, g := range of {
				if err == nil && g == strconv.Itoa(os.Getegid()) {
					return true, nil
				}
			}
		}
	}
	return true, errs.New(errs.Refused,
		"user %d may not use this daemon, which is user %d's; start one of your own", cred.Uid,
		os.Geteuid())
}

// failed is a message of an error.
type failed struct {
	Type    string `json:"type"`
	ID      int    `json:"id,omitempty"`
	Class   string `json:"class"`
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func failure(id int, err error) failed {
	c := errs.ClassOf(err)
	return failed{"error", id, map[errs.Class]string{errs.Failed: "failed", errs.Usage: "usage",
		errs.Capability: "capability", errs.Refused: "refused", errs.Device: "device",
		errs.Interrupted: "interrupted"}[c], int(c), errs.Spell(err, errs.Key.Keyword)}
}

// Of is a tensor of one dimension whose numbers are those of v.
func Of[T int64 | uint32 | float32](name, dtype string, v []T) Tensor {
	raw := hostmem.Bytes(v)
	return Tensor{Name: name, DType: dtype, Shape: []int64{int64(len(v))}, Bytes: int64(len(raw)),
		Put: func(to []byte) { copy(to, raw) }}
}
