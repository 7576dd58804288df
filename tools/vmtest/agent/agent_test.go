package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLineRoundTrip(t *testing.T) {
	var buf bytes.Buffer
	want := Request{ID: 7, Op: OpExec, Argv: []string{"sh", "-c", "printf 'a\nb\x00'"},
		Stdin: []byte{0, 10, 13, 255}}
	require.NoError(t, WriteLine(&buf, want))
	line, ok := strings.CutSuffix(buf.String(), "\n")
	if !ok || strings.Contains(line, "\n") {
		t.Fatalf("not one line: %q", buf.String())
	}
	var got Request
	require.NoError(t, ParseLine(line, &got))
	if got.ID != 7 || got.Argv[2] != want.Argv[2] || !bytes.Equal(got.Stdin, want.Stdin) {
		t.Fatalf("got %+v", got)
	}
	// a carriage return that a terminal added is no damage
	if err := ParseLine(line+"\r", &got); err != nil {
		t.Error(err)
	}
}

func TestLineFindsEveryChangedByte(t *testing.T) {
	var buf bytes.Buffer
	if err := WriteLine(&buf, Response{ID: 3, Op: OpExec, Code: 1,
		Out: []byte("out")}); err != nil {
		t.Fatal(err)
	}
	line := strings.TrimSuffix(buf.String(), "\n")
	var a Response
	for i := range line {
		changed := line[:i] + string(line[i]^1) + line[i+1:]
		if ParseLine(changed, &a) == nil && !strings.EqualFold(changed[:8], line[:8]) {
			t.Errorf("byte %d changed unseen: %q", i, changed)
		}
		if err := ParseLine(line[:i]+line[i+1:], &a); err == nil {
			t.Errorf("byte %d lost unseen", i)
		}
	}
	for _, l := range []string{"", "x", "[    0.0] boot text", strings.Repeat("0", 9) + " {}"} {
		if ParseLine(l, &a) == nil {
			t.Errorf("%q is taken for a message", l)
		}
	}
}

// pair connects a client to a server over a pipe.
func pair(t *testing.T, s *Server) (*Client, net.Conn) {
	t.Helper()
	host, guest := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(guest) }()
	c := NewClient(host)
	t.Cleanup(func() {
		host.Close()
		guest.Close()
		<-ended
		<-c.Ended()
	})
	select {
	case <-c.Hello():
	case <-time.After(10 * time.Second):
		t.Fatal("no hello")
	}
	return c, guest
}

func do(t *testing.T, c *Client, q Request) Response {
	t.Helper()
	limit := make(chan struct{})
	defer time.AfterFunc(20*time.Second, func() { close(limit) }).Stop()
	a, err := c.Do(limit, q)
	require.NoError(t, err)
	return a
}

func sh(line string) Request { return Request{Op: OpExec, Argv: []string{"/bin/sh", "-c", line}} }

func TestExec(t *testing.T) {
	c, _ := pair(t, &Server{Env: []string{"BASE=base", "PATH=/bin:/usr/bin"}})
	q := sh(`cat; echo "$BASE $OWN"; echo problem >&2; exit 7`)
	q.Stdin, q.Env = []byte("in\n"), []string{"OWN=own"}
	a := do(t, c, q)
	if a.Code != 7 || string(a.Out) != "in\nbase own\n" || string(a.Err) != "problem\n" ||
		a.TimedOut {
		t.Errorf("got %+v, out %q, err %q", a, a.Out, a.Err)
	}
	if a := do(t, c, sh("kill -9 $$")); a.Code != 137 {
		t.Errorf("a killed command has code %d, not 137", a.Code)
	}
	if _, err := c.Do(nil, Request{Op: OpExec, Argv: []string{"/no/such/file"}}); err == nil ||
		!strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("a command that is not there: %v", err)
	}
	if _, err := c.Do(nil, Request{Op: OpExec, Argv: []string{"true"}, User: "user"}); err == nil {
		t.Error("became a user without a way to")
	}
	if _, err := c.Do(nil, Request{Op: "dance"}); err == nil || !strings.Contains(err.Error(),
		"dance") {
		t.Errorf("an unknown operation: %v", err)
	}
}

func TestExecAsUserWrapsArgv(t *testing.T) {
	c, _ := pair(t, &Server{As: func(user string, argv []string) ([]string, error) {
		return append([]string{"/bin/echo", user}, argv...), nil
	}})
	if a := do(t, c, Request{Op: OpExec, User: "user",
		Argv: []string{"id", "-u"}}); string(a.Out) != "user id -u\n" {
		t.Errorf("got %q", a.Out)
	}
	if a := do(t, c, Request{Op: OpExec, User: "root",
		Argv: []string{"/bin/echo", "x"}}); string(a.Out) != "x\n" {
		t.Errorf("root was wrapped: %q", a.Out)
	}
}

func TestExecTimeoutKillsTheGroup(t *testing.T) {
	c, _ := pair(t, &Server{})
	file := filepath.Join(t.TempDir(), "pid")
	q := sh("sleep 60 & echo $! >" + file + "; echo before; wait")
	q.TimeoutMS = 300
	began := time.Now()
	a := do(t, c, q)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	if !a.TimedOut || a.Code != 137 || string(a.Out) != "before\n" {
		t.Errorf("got %+v, out %q", a, a.Out)
	}
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		st, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if errors.Is(err, os.ErrNotExist) || strings.Contains(string(st), ") Z ") {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("the child %d still runs", pid)
}

func TestStartKillWait(t *testing.T) {
	c, _ := pair(t, &Server{})
	q := sh("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done")
	q.Op = OpStart
	p := do(t, c, q).Proc
	// other requests run beside it
	if a := do(t, c, sh("echo beside")); string(a.Out) != "beside\n" {
		t.Errorf("got %q", a.Out)
	}
	time.Sleep(200 * time.Millisecond)
	do(t, c, Request{Op: OpKill, Proc: p, Signal: int(syscall.SIGTERM)})
	a := do(t, c, Request{Op: OpWait, Proc: p})
	if a.Code != 3 || string(a.Out) != "up\nbye\n" {
		t.Errorf("code %d, out %q", a.Code, a.Out)
	}
	if _, err := c.Do(nil, Request{Op: OpKill, Proc: p, Signal: 9}); err == nil {
		t.Error("killed a process that has ended")
	}
	if _, err := c.Do(nil, Request{Op: OpWait, Proc: 1}); err == nil {
		t.Error("waited for a process that was not started here")
	}
}

func TestOutputIsBounded(t *testing.T) {
	c, _ := pair(t, &Server{})
	a := do(t, c, sh("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last"))
	if len(a.Out) > OutputLimit+100 || !bytes.HasPrefix(a.Out, []byte("first\n")) ||
		!bytes.HasSuffix(a.Out, []byte("xlast\n")) {
		t.Fatalf("%d bytes from %q to %q", len(a.Out), a.Out[:10], a.Out[len(a.Out)-10:])
	}
	if want := fmt.Sprintf("%d bytes left out", 3000011-OutputLimit); !bytes.Contains(a.Out,
		[]byte(want)) {
		t.Errorf("does not say %q", want)
	}
}

func TestFiles(t *testing.T) {
	c, _ := pair(t, &Server{Log: func() ([]byte, error) { return []byte("line\n"), nil }})
	path := filepath.Join(t.TempDir(), "new", "file")
	data := []byte("0123\x00456789\n")
	do(t, c, Request{Op: OpWrite, Path: path, Data: data, Mode: 0o640})
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("%v %v", st, err)
	}
	if a := do(t, c, Request{Op: OpRead, Path: path}); !bytes.Equal(a.Data, data) {
		t.Errorf("got %q", a.Data)
	}
	if a := do(t, c, Request{Op: OpRead, Path: path, Offset: 3, Max: 4}); !bytes.Equal(a.Data,
		data[3:7]) {
		t.Errorf("got %q", a.Data)
	}
	if a := do(t, c, Request{Op: OpLog}); string(a.Data) != "line\n" {
		t.Errorf("log %q", a.Data)
	}
}

func TestConcurrentRequestsGetTheirOwnAnswers(t *testing.T) {
	c, _ := pair(t, &Server{})
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			a, err := c.Do(nil, sh(fmt.Sprintf("sleep 0.%d; echo %d", i%3, i)))
			if err != nil || string(a.Out) != fmt.Sprintf("%d\n", i) {
				t.Errorf("request %d: %q %v", i, a.Out, err)
			}
		})
	}
	wg.Wait()
}

func TestClientEndsWithTheChannel(t *testing.T) {
	for name, say := range map[string]func(io.WriteCloser){
		"closed":         func(w io.WriteCloser) { w.Close() },
		"damaged":        func(w io.WriteCloser) { fmt.Fprintf(w, "00000000 {\"id\":1}\n") },
		"started again":  func(w io.WriteCloser) { _ = WriteLine(w, Response{Op: OpHello}) },
		"something else": func(w io.WriteCloser) { fmt.Fprintf(w, "Kernel panic\n") },
	} {
		host, guest := net.Pipe()
		c := NewClient(host)
		go func() { _ = WriteLine(guest, Response{Op: OpHello}) }()
		<-c.Hello()
		go io.Copy(io.Discard, guest)
		got := make(chan error, 1)
		go func() { _, err := c.Do(nil, Request{Op: OpExec}); got <- err }()
		time.Sleep(10 * time.Millisecond)
		go say(guest)
		select {
		case err := <-got:
			if err == nil {
				t.Errorf("%s: no error", name)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: Do waits for ever", name)
		}
		host.Close()
		guest.Close()
	}
	// and a guest that says nothing
	host, guest := net.Pipe()
	defer host.Close()
	defer guest.Close()
	go io.Copy(io.Discard, guest)
	limit := make(chan struct{})
	time.AfterFunc(20*time.Millisecond, func() { close(limit) })
	if _, err := NewClient(host).Do(limit, Request{Op: OpExec}); err == nil ||
		!strings.Contains(err.Error(), "no answer") {
		t.Errorf("silent guest: %v", err)
	}
}

func TestPowerOffAnswersFirst(t *testing.T) {
	off := make(chan struct{})
	c, _ := pair(t, &Server{PowerOff: func() { close(off) }})
	do(t, c, Request{Op: OpPowerOff})
	select {
	case <-off:
	case <-time.After(5 * time.Second):
		t.Fatal("not powered off")
	}
}
