package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// OutputLimit bounds each of a command's two outputs: more keeps the beginning and the end.
const OutputLimit = 512 << 10

// FileLimit bounds one read of a file.
const FileLimit = 2 << 20

// defaultTimeout is that of a request without one: nothing waits for ever.
const defaultTimeout = 60 * time.Second

// Server carries requests out.
type Server struct {
	// As wraps Argv for a user that is not root; nil refuses other users.
	As func(user string, argv []string) ([]string, error)
	// Env holds what every command gets before the request's own.
	Env []string
	// Terminal gives a terminal's two ends; nil refuses TTY.
	Terminal func() (master, slave *os.File, err error)
	// Log reads the kernel's log.
	Log func() ([]byte, error)
	// PowerOff ends the machine after its answer was sent.
	PowerOff func()

	wm sync.Mutex

	mu    sync.Mutex
	procs map[int]*process
}

type process struct {
	cmd      *exec.Cmd
	out, err *tail
	tty      *os.File
	mu       sync.Mutex
	timedOut bool
	code     int
	done     chan struct{}
}

// Serve says hello and answers requests until the channel ends. Requests run beside each other.
func (s *Server) Serve(rw io.ReadWriter) error {
	s.procs = map[int]*process{}
	if err := s.send(rw, Response{Op: OpHello}); err != nil {
		return err
	}
	in := scanner(rw)
	for in.Scan() {
		var q Request
		if err := ParseLine(in.Text(), &q); err != nil {
			return err
		}
		if q.Op == OpPowerOff {
			err := s.send(rw, Response{ID: q.ID, Op: q.Op})
			s.PowerOff()
			return err
		}
		go func() {
			a, err := s.do(q)
			a.ID, a.Op = q.ID, q.Op
			if err != nil {
				a.Error = err.Error()
			}
			_ = s.send(rw, a) // a channel that broke ends Serve's own reading too
		}()
	}
	if err := in.Err(); err != nil {
		return err
	}
	return io.EOF
}

func (s *Server) send(w io.Writer, a Response) error {
	s.wm.Lock()
	defer s.wm.Unlock()
	return WriteLine(w, a)
}

func (s *Server) do(q Request) (Response, error) {
	switch q.Op {
	case OpExec:
		p, err := s.start(q)
		if err != nil {
			return Response{}, err
		}
		return p.wait(), nil
	case OpStart:
		p, err := s.start(q)
		if err != nil {
			return Response{}, err
		}
		s.mu.Lock()
		s.procs[p.cmd.Process.Pid] = p
		s.mu.Unlock()
		return Response{Proc: p.cmd.Process.Pid}, nil
	case OpKill:
		p, err := s.proc(q.Proc)
		if err != nil {
			return Response{}, err
		}
		select {
		case <-p.done:
			return Response{}, fmt.Errorf("process %d has ended already with code %d",
				q.Proc, p.code)
		default:
		}
		return Response{}, syscall.Kill(-q.Proc, syscall.Signal(q.Signal))
	case OpWait:
		p, err := s.proc(q.Proc)
		if err != nil {
			return Response{}, err
		}
		return p.wait(), nil
	case OpRead:
		return readFile(q)
	case OpWrite:
		if err := os.MkdirAll(filepath.Dir(q.Path), 0o755); err != nil {
			return Response{}, err
		}
		if err := os.WriteFile(q.Path, q.Data, os.FileMode(q.Mode)); err != nil {
			return Response{}, err
		}
		return Response{}, os.Chmod(q.Path, os.FileMode(q.Mode))
	case OpLog:
		if s.Log == nil {
			return Response{}, errors.New("this agent has no kernel log")
		}
		b, err := s.Log()
		return Response{Data: b}, err
	}
	return Response{}, fmt.Errorf("unknown operation %q", q.Op)
}

func (s *Server) proc(pid int) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.procs[pid]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("no process %d was started here", pid)
}

func (s *Server) start(q Request) (*process, error) {
	argv := q.Argv
	if len(argv) == 0 {
		return nil, errors.New("no command")
	}
	if q.User != "" && q.User != "root" {
		if s.As == nil {
			return nil, fmt.Errorf("this agent cannot become user %q", q.User)
		}
		var err error
		if argv, err = s.As(q.User, argv); err != nil {
			return nil, err
		}
	}
	p := &process{out: &tail{}, err: &tail{}, done: make(chan struct{})}
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Env = append(append([]string{}, s.Env...), q.Env...)
	p.cmd.Dir = q.Dir
	// A group of its own, so that a time-out ends children too; what outlives it may hold the pipes
	// for two seconds more.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = 2 * time.Second
	var slave *os.File
	if q.TTY {
		if s.Terminal == nil {
			return nil, errors.New("this agent has no terminals")
		}
		var err error
		if p.tty, slave, err = s.Terminal(); err != nil {
			return nil, err
		}
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	} else {
		p.cmd.Stdin = bytes.NewReader(q.Stdin)
		p.cmd.Stdout, p.cmd.Stderr = p.out, p.err
	}
	if err := p.cmd.Start(); err != nil {
		if slave != nil {
			slave.Close()
			p.tty.Close()
		}
		return nil, err
	}
	copied := make(chan struct{})
	if q.TTY {
		slave.Close()
		go func() {
			defer close(copied)
			io.Copy(p.out, p.tty) // ends with EIO when the last slave end closes
		}()
		go p.tty.Write(q.Stdin)
	} else {
		close(copied)
	}
	limit := time.Duration(q.TimeoutMS) * time.Millisecond
	if limit <= 0 {
		limit = defaultTimeout
	}
	timer := time.AfterFunc(limit, func() {
		p.mu.Lock()
		p.timedOut = true
		p.mu.Unlock()
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may have just ended
	})
	go func() {
		err := p.cmd.Wait()
		timer.Stop()
		if q.TTY {
			select {
			case <-copied:
			case <-time.After(p.cmd.WaitDelay):
			}
			p.tty.Close()
		}
		p.code = code(p.cmd, err)
		close(p.done)
	}()
	return p, nil
}

func code(cmd *exec.Cmd, err error) int {
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		if st.Signaled() {
			return 128 + int(st.Signal())
		}
		return st.ExitStatus()
	}
	return -1
}

func (p *process) wait() Response {
	<-p.done
	p.mu.Lock()
	defer p.mu.Unlock()
	return Response{Code: p.code, Out: p.out.bytes(), Err: p.err.bytes(), TimedOut: p.timedOut}
}

func readFile(q Request) (Response, error) {
	f, err := os.Open(q.Path)
	if err != nil {
		return Response{}, err
	}
	defer f.Close()
	n := q.Max
	if n <= 0 || n > FileLimit {
		n = FileLimit
	}
	if q.Offset > 0 {
		if _, err := f.Seek(q.Offset, io.SeekStart); err != nil {
			return Response{}, err
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, n))
	return Response{Data: b}, err
}

// tail keeps the first and the last half of OutputLimit.
type tail struct {
	mu   sync.Mutex
	head []byte
	ring []byte
	cut  int64
}

// Write takes everything.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(b)
	if room := OutputLimit/2 - len(t.head); room > 0 {
		k := min(room, len(b))
		t.head = append(t.head, b[:k]...)
		b = b[k:]
	}
	t.ring = append(t.ring, b...)
	if over := len(t.ring) - OutputLimit/2; over > OutputLimit/2 {
		t.cut += int64(over)
		t.ring = append(t.ring[:0], t.ring[over:]...)
	}
	return n, nil
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	ring, cut := t.ring, t.cut
	if over := len(ring) - OutputLimit/2; over > 0 {
		ring, cut = ring[over:], cut+int64(over)
	}
	out := append([]byte{}, t.head...)
	if cut > 0 {
		out = fmt.Appendf(out, "\n[... %d bytes left out ...]\n", cut)
	}
	return append(out, ring...)
}
