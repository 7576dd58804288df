// Package mpi opens an MPI library at run time, without cgo, and sends bytes between the processes
// that mpirun started. It knows the binary interfaces of Open MPI 4 and of MPICH 3 and 4, which
// Intel MPI and MVAPICH share with MPICH.
package mpi

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"helios/internal/dl"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Kind is whose library it is.
type Kind string

// The kinds, by their own names.
const (
	OpenMPI Kind = "Open MPI"
	MPICH   Kind = "MPICH"
)

// The names that Debian and the builds of both install.
var names = map[Kind][]string{
	OpenMPI: {"libmpi.so.40", "libmpi.so"},
	MPICH:   {"libmpich.so.12", "libmpi.so.12", "libmpich.so"},
}

var packages = map[Kind]string{OpenMPI: "libopenmpi3", MPICH: "libmpich12"}

// MPICH's handles are numbers, of its mpi.h; Open MPI's are addresses of symbols.
const (
	mpichWorld = 0x44000000
	mpichByte  = 0x4c00010d
)

const (
	success        = 0
	threadFunneled = 1 // one thread makes all calls; the same number in both
	tagData        = 1
	tagAbort       = 2
	// The most bytes of one message: counts are 32-bit numbers.
	mostBytes = 1 << 30
	// An abort's message has this length, so that its receive can stand from the beginning.
	abortBytes = 4096
)

// library is an open libmpi.
type library struct {
	path                     string
	kind                     Kind
	world, byteType, noState uintptr

	initThread func(argc, argv unsafe.Pointer, required int32, provided unsafe.Pointer) int32
	rank, size func(comm uintptr, to unsafe.Pointer) int32
	isend      func(buf unsafe.Pointer, n int32, typ uintptr, to, tag int32, comm uintptr,
		req unsafe.Pointer) int32
	irecv func(buf unsafe.Pointer, n int32, typ uintptr, from, tag int32, comm uintptr,
		req unsafe.Pointer) int32
	test     func(req, done unsafe.Pointer, status uintptr) int32
	finalize func() int32
}

// open opens the library at path, or for "" one of the launcher's kind.
func open(path string, launcher Kind) (*library, error) {
	if !dl.Have {
		return nil, errs.New(errs.Capability,
			"MPI: this build of heliosctl opens no libraries (-tags nocuda, or a platform without it); start the ranks with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which need none")
	}
	tried := []string{path}
	if path == "" {
		tried = names[launcher]
	}
	var l *library
	// Plugins of Open MPI look for its symbols.
	err := dl.First(tried, dl.OpenGlobal, func(h uintptr, name string) (err error) {
		if l, err = bind(h, name); err == nil && launcher != "" && l.kind != launcher {
			err = fmt.Errorf("%s is %s, and the mpirun that started this process is of %s: every rank would be alone",
				name, l.kind, launcher)
		}
		return err
	})
	if err == nil {
		return l, nil
	}
	return nil, errs.New(errs.Capability,
		"MPI: no library of %s (%w); install it (Debian: %s), name it with {mpi} FILE, or start the ranks by torchrun, or by srun without MPI, which need none",
		launcher, err, packages[launcher])
}

func bind(h uintptr, name string) (*library, error) {
	l := &library{path: name, kind: MPICH, world: mpichWorld, byteType: mpichByte, noState: 1}
	if world, err := dl.Symbol(h, "ompi_mpi_comm_world"); err == nil {
		b, err := dl.Symbol(h, "ompi_mpi_byte")
		if err != nil {
			return nil, err
		}
		l.kind, l.world, l.byteType, l.noState = OpenMPI, world, b, 0
	}
	err := dl.Bind(h, map[string]any{
		"MPI_Init_thread": &l.initThread, "MPI_Comm_rank": &l.rank, "MPI_Comm_size": &l.size,
		"MPI_Isend": &l.isend, "MPI_Irecv": &l.irecv, "MPI_Test": &l.test,
		"MPI_Finalize": &l.finalize,
	})
	if err != nil {
		return nil, fmt.Errorf("%s %w: it is no MPI library", name, err)
	}
	return l, nil
}

// World is this process among those that mpirun started. One thread makes all calls; the methods
// hand their work to it.
type World struct {
	Rank, Size int

	lib    *library
	jobs   chan func()
	done   chan struct{} // the thread has ended
	notice func(from int, text []byte)

	// The thread's own.
	mem    []byte // for requests and flags
	areas  [2]area
	aborts []byte
	heard  []bool
	posted bool
	last   error
}

// area is memory that MPI reads or writes, grown as it is needed.
type area struct{ mem []byte }

func (a *area) room(n int) ([]byte, error) {
	if len(a.mem) < n {
		if a.mem != nil {
			if err := hostmem.Free(a.mem); err != nil {
				return nil, err
			}
			a.mem = nil
		}
		var err error
		if a.mem, err = hostmem.Alloc(int64(n+n/4), "MPI messages"); err != nil {
			return nil, err
		}
	}
	return a.mem[:n], nil
}

// Start opens the library and joins the others. notice is called, on MPI's thread, with the text of
// an Abort of another rank. Close leaves the group. It ends with ctx where a rank is not
// there: MPI_Init_thread then goes on, and mpirun finds that the process has ended.
func Start(ctx context.Context, path string, launcher Kind,
	notice func(from int, text []byte)) (*World, error) {
	l, err := open(path, launcher)
	if err != nil {
		return nil, err
	}
	w := &World{lib: l, jobs: make(chan func()), done: make(chan struct{}), notice: notice}
	began := make(chan error, 1)
	go w.serve(began)
	if err := w.await(ctx, began); err != nil {
		return nil, err
	}
	return w, nil
}

// await returns how the thread began.
func (w *World) await(ctx context.Context, began <-chan error) error {
	select {
	case err := <-began:
		if err != nil {
			<-w.done
		}
		return err
	case <-ctx.Done():
		cause := context.Cause(ctx)
		return errs.With(errs.ClassOf(cause), fmt.Errorf("MPI: joining the other ranks: %w", cause))
	}
}

// Name returns the name of the library.
func (w *World) Name() string { return fmt.Sprintf("%s (%s)", w.lib.kind, w.lib.path) }

func check(what string, code int32) error {
	if code != success {
		return errs.New(errs.Device, "MPI: %s returned %d", what, code)
	}
	return nil
}

// idle is the interval at which the thread looks for aborts while it has nothing else to do.
const idle = 20 * time.Millisecond

func (w *World) serve(began chan<- error) {
	runtime.LockOSThread() // and never back: the thread ends with the goroutine
	defer close(w.done)
	if err := w.begin(); err != nil {
		began <- err
		return
	}
	began <- nil
	tick := time.NewTicker(idle)
	defer tick.Stop()
	for {
		select {
		case f, ok := <-w.jobs:
			if !ok {
				return
			}
			f()
		case <-tick.C:
			w.listen()
		}
	}
}

func (w *World) begin() (err error) {
	if w.mem, err = hostmem.Alloc(hostmem.PageBytes, "MPI requests"); err != nil {
		return err
	}
	keep, err := keepSignals()
	if err != nil {
		return err
	}
	cell := unsafe.Pointer(&w.mem[0])
	err = check("MPI_Init_thread", w.lib.initThread(nil, nil, threadFunneled, cell))
	if err := errors.Join(err, keep.restore()); err != nil {
		return err
	}
	n := (*int32)(cell)
	if err := check("MPI_Comm_rank", w.lib.rank(w.lib.world, cell)); err != nil {
		return err
	}
	w.Rank = int(*n)
	if err := check("MPI_Comm_size", w.lib.size(w.lib.world, cell)); err != nil {
		return err
	}
	w.Size = int(*n)
	// a request for each other rank's abort, and then one for each message under way
	if err := hostmem.Free(w.mem); err != nil {
		return err
	}
	if w.mem, err = hostmem.Alloc(int64(3*w.Size+1)*8, "MPI requests"); err != nil {
		return err
	}
	if w.aborts, err = hostmem.Alloc(int64(w.Size+1)*abortBytes, "MPI messages"); err != nil {
		return err
	}
	w.heard = make([]bool, w.Size)
	for r := range w.Size {
		if r == w.Rank {
			w.heard[r] = true
			continue
		}
		err := check("MPI_Irecv", w.lib.irecv(unsafe.Pointer(&w.aborts[r*abortBytes]), abortBytes,
			w.lib.byteType, int32(r), tagAbort, w.lib.world, w.request(r)))
		if err != nil {
			return err
		}
	}
	return nil
}

// request is the place of request i; a handle is a number of 4 or 8 bytes.
func (w *World) request(i int) unsafe.Pointer { return unsafe.Pointer(&w.mem[8+i*8]) }

// ended tests request i.
func (w *World) ended(i int) (bool, error) {
	flag := (*int32)(unsafe.Pointer(&w.mem[0]))
	*flag = 0
	err := check("MPI_Test", w.lib.test(w.request(i), unsafe.Pointer(flag), w.lib.noState))
	return *flag != 0, err
}

// listen looks for other ranks' aborts.
func (w *World) listen() {
	for r := range w.Size {
		if w.heard[r] {
			continue
		}
		if ok, err := w.ended(r); ok && err == nil {
			w.heard[r] = true
			text := strings.TrimRight(string(w.aborts[r*abortBytes:][:abortBytes]), "\x00")
			if text != "" { // else a farewell
				w.notice(r, []byte(text))
			}
		}
	}
}

// do runs f on MPI's thread.
func (w *World) do(f func() error) error {
	result := make(chan error, 1)
	select {
	case w.jobs <- func() { result <- f() }:
		return <-result
	case <-w.done:
		return errs.New(errs.Failed, "MPI: the group is closed")
	}
}

// Exchange sends out[r] to each rank r and returns what each sent to this one; sizes are those that
// arrive, which both sides know. It ends early with ctx's cause; then no other Exchange may follow,
// for its messages may still be under way.
func (w *World) Exchange(ctx context.Context, out [][]byte, sizes []int) (in [][]byte, err error) {
	err = w.do(func() error { in, err = w.exchange(ctx, out, sizes); return err })
	return in, err
}

func (w *World) exchange(ctx context.Context, out [][]byte, sizes []int) ([][]byte, error) {
	if w.last != nil {
		return nil, w.last
	}
	sum := [2]int{}
	longest := 0
	for r := range w.Size {
		if r != w.Rank {
			sum[0], sum[1] = sum[0]+len(out[r]), sum[1]+sizes[r]
			longest = max(longest, len(out[r]), sizes[r])
		}
	}
	from, err := w.areas[0].room(max(sum[0], 1))
	if err != nil {
		return nil, err
	}
	to, err := w.areas[1].room(max(sum[1], 1))
	if err != nil {
		return nil, err
	}
	sends, receives := make([][]byte, w.Size), make([][]byte, w.Size)
	for r := range w.Size {
		if r != w.Rank {
			n := copy(from, out[r])
			sends[r], from = from[:n], from[n:]
			receives[r], to = to[:sizes[r]], to[sizes[r]:]
		}
	}
	for pos := 0; pos < longest; pos += mostBytes {
		if err := w.part(ctx, sends, receives, pos); err != nil {
			w.last = err
			return nil, err
		}
	}
	in := make([][]byte, w.Size)
	for r := range w.Size {
		in[r] = append([]byte(nil), receives[r]...)
	}
	in[w.Rank] = append([]byte(nil), out[w.Rank]...)
	return in, nil
}

// part sends and receives the bytes of all messages from at on, as far as one message goes.
func (w *World) part(ctx context.Context, sends, receives [][]byte, pos int) error {
	piece := func(b []byte) []byte {
		return b[min(pos, len(b)):min(pos+mostBytes, len(b))]
	}
	var open []int
	for r := range w.Size {
		if b := piece(receives[r]); len(b) > 0 {
			i := w.Size + r
			if err := check("MPI_Irecv", w.lib.irecv(unsafe.Pointer(&b[0]), int32(len(b)),
				w.lib.byteType, int32(r), tagData, w.lib.world, w.request(i))); err != nil {
				return err
			}
			open = append(open, i)
		}
		if b := piece(sends[r]); len(b) > 0 {
			i := 2*w.Size + r
			if err := check("MPI_Isend", w.lib.isend(unsafe.Pointer(&b[0]), int32(len(b)),
				w.lib.byteType, int32(r), tagData, w.lib.world, w.request(i))); err != nil {
				return err
			}
			open = append(open, i)
		}
	}
	return w.wait(ctx, open)
}

// wait tests requests until all have ended. It spins a little, for a message that is nearly there,
// and then sleeps between the tests: the cores are for training.
func (w *World) wait(ctx context.Context, open []int) error {
	for round := 0; len(open) > 0; round++ {
		var still []int
		for _, i := range open {
			ok, err := w.ended(i)
			if err != nil {
				return err
			}
			if !ok {
				still = append(still, i)
			}
		}
		open = still
		if len(open) == 0 {
			break
		}
		w.listen()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if round < 50 {
			runtime.Gosched()
		} else {
			time.Sleep(min(time.Duration(round)*time.Microsecond, time.Millisecond))
		}
	}
	return nil
}

// Abort sends a text to all other ranks, which their notice gets; it waits until it has left, as
// long as ctx lets it.
func (w *World) Abort(ctx context.Context, text []byte) error {
	return w.do(func() error {
		w.last = errs.New(errs.Failed, "MPI: the group was aborted")
		if w.posted {
			return nil
		}
		w.posted = true
		b := w.aborts[w.Size*abortBytes:][:abortBytes]
		copy(b[:abortBytes-1], text)
		var open []int
		for r := range w.Size {
			if r == w.Rank || w.heard[r] {
				continue // it has ended itself
			}
			i := w.Size + r
			if err := check("MPI_Isend", w.lib.isend(unsafe.Pointer(&b[0]), abortBytes,
				w.lib.byteType, int32(r), tagAbort, w.lib.world, w.request(i))); err != nil {
				return err
			}
			open = append(open, i)
		}
		return w.wait(ctx, open)
	})
}

// Close leaves the others. All must do it, after their last Exchange. It ends with ctx where it was
// aborted or an exchange did not end: then MPI is left as it is, and mpirun finds that the process
// has ended.
func (w *World) Close(ctx context.Context) error {
	ended := make(chan error, 1)
	job := func() {
		if w.last != nil || w.posted {
			ended <- nil // its memory may still be written to
			return
		}
		// Finalizing would wait for the aborts' receives in some libraries: an empty one is sent.
		err := w.farewell(ctx)
		if err == nil {
			err = check("MPI_Finalize", w.lib.finalize())
		}
		if err == nil {
			err = errors.Join(hostmem.Free(w.mem), hostmem.Free(w.aborts))
			for i := range w.areas {
				if m := w.areas[i].mem; m != nil {
					err = errors.Join(err, hostmem.Free(m))
				}
			}
		}
		ended <- err
	}
	select {
	case w.jobs <- job:
	case <-ctx.Done(): // its thread is in a call that does not end
		return errs.New(errs.Failed, "MPI: leaving the other ranks: %w", context.Cause(ctx))
	}
	close(w.jobs)
	select {
	case err := <-ended:
		<-w.done
		return err
	case <-ctx.Done():
		return errs.New(errs.Failed, "MPI: leaving the other ranks: %w", context.Cause(ctx))
	}
}

// farewell ends the receives that stand for aborts.
func (w *World) farewell(ctx context.Context) error {
	b := w.aborts[w.Size*abortBytes:][:abortBytes]
	clear(b)
	var open []int
	for r := range w.Size {
		if r == w.Rank {
			continue
		}
		i := w.Size + r
		if err := check("MPI_Isend", w.lib.isend(unsafe.Pointer(&b[0]), abortBytes, w.lib.byteType,
			int32(r), tagAbort, w.lib.world, w.request(i))); err != nil {
			return err
		}
		open = append(open, i)
		if !w.heard[r] {
			w.heard[r] = true
			open = append(open, r)
		}
	}
	return w.wait(ctx, open)
}
