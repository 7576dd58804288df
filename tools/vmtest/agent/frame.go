// Package agent is what tools/vmtest's host program and its guest say to each other: one request or
// answer a line over a serial port, and the server that carries requests out.
//
// A line is eight hex digits of CRC-32 (IEEE), a blank, JSON and a newline: a serial port that
// loses or adds a byte is found, not guessed at.
package agent

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"
	"sync"
)

// maxLine bounds a line in either direction; OutputLimit and FileLimit keep answers below it.
const maxLine = 8 << 20

// Operations of a Request.
const (
	OpHello    = "hello"    // only as an answer: the server is up
	OpExec     = "exec"     // Argv to its end; answers Code, Out, Err
	OpStart    = "start"    // Argv in the background; answers Proc
	OpKill     = "kill"     // Signal to Proc's process group
	OpWait     = "wait"     // Proc's end, as OpExec answers
	OpRead     = "read"     // Max bytes of Path from Offset
	OpWrite    = "write"    // Data into Path, with Mode
	OpLog      = "log"      // the kernel's log
	OpPowerOff = "poweroff" // answers, then the machine ends
)

// Request is one thing to do.
type Request struct {
	ID    int64    `json:"id"`
	Op    string   `json:"op"`
	Argv  []string `json:"argv,omitempty"`
	User  string   `json:"user,omitempty"` // "" and "root" stay root
	Env   []string `json:"env,omitempty"`
	Dir   string   `json:"dir,omitempty"`
	Stdin []byte   `json:"stdin,omitempty"`
	TTY   bool     `json:"tty,omitempty"` // standard streams are a terminal
	// of Argv; after it the process group is killed
	TimeoutMS int64  `json:"timeout_ms,omitempty"`
	Proc      int    `json:"proc,omitempty"`
	Signal    int    `json:"signal,omitempty"`
	Path      string `json:"path,omitempty"`
	Offset    int64  `json:"offset,omitempty"`
	Max       int64  `json:"max,omitempty"`
	Data      []byte `json:"data,omitempty"`
	Mode      uint32 `json:"mode,omitempty"`
}

// Response answers the request with its ID.
type Response struct {
	ID       int64  `json:"id"`
	Op       string `json:"op"`
	Error    string `json:"error,omitempty"` // the operation itself failed
	Code     int    `json:"code,omitempty"`  // exit code; 128 + signal of a killed process
	Out      []byte `json:"out,omitempty"`
	Err      []byte `json:"err,omitempty"`
	TimedOut bool   `json:"timed_out,omitempty"`
	Proc     int    `json:"proc,omitempty"`
	Data     []byte `json:"data,omitempty"`
}

// WriteLine sends v as one line.
func WriteLine(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > maxLine {
		return fmt.Errorf("a message of %d bytes is over the channel's limit of %d", len(b),
			maxLine)
	}
	line := make([]byte, 0, len(b)+10)
	line = fmt.Appendf(line, "%08x ", crc32.ChecksumIEEE(b))
	line = append(append(line, b...), '\n')
	_, err = w.Write(line)
	return err
}

// ParseLine takes a line of WriteLine apart, without its newline.
func ParseLine(line string, v any) error {
	sum, text, ok := strings.Cut(strings.TrimSuffix(line, "\r"), " ")
	want, err := strconv.ParseUint(sum, 16, 32)
	if !ok || err != nil || len(sum) != 8 {
		return fmt.Errorf("channel: not a message: %.80q", line)
	}
	if got := crc32.ChecksumIEEE([]byte(text)); got != uint32(want) {
		return fmt.Errorf(
			"channel: a message of %d bytes has CRC %08x, not %08x: bytes were lost or changed: %.80q",
			len(text), got, want, text)
	}
	if err := json.Unmarshal([]byte(text), v); err != nil {
		return fmt.Errorf("channel: %w in %.80q", err, text)
	}
	return nil
}

func scanner(r io.Reader) *bufio.Scanner {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 64<<10), maxLine+16)
	return s
}

// Client sends requests and hands answers to whoever waits for them. It is safe for concurrent use.
type Client struct {
	w  io.Writer
	wm sync.Mutex

	mu      sync.Mutex
	next    int64
	waiting map[int64]chan Response
	err     error

	hello chan struct{}
	ended chan struct{}
}

// NewClient reads answers from rw until it ends.
func NewClient(rw io.ReadWriter) *Client {
	c := &Client{w: rw, waiting: map[int64]chan Response{}, hello: make(chan struct{}),
		ended: make(chan struct{})}
	go c.read(rw)
	return c
}

func (c *Client) read(r io.Reader) {
	s := scanner(r)
	greeted := false
	var err error
	for s.Scan() {
		var a Response
		if err = ParseLine(s.Text(), &a); err != nil {
			break
		}
		if a.Op == OpHello {
			if greeted {
				err = fmt.Errorf("channel: the guest's agent started a second time")
				break
			}
			greeted = true
			close(c.hello)
			continue
		}
		c.mu.Lock()
		ch := c.waiting[a.ID]
		delete(c.waiting, a.ID)
		c.mu.Unlock()
		if ch != nil {
			ch <- a
		}
	}
	if err == nil {
		err = s.Err()
	}
	if err == nil {
		err = io.EOF
	}
	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	close(c.ended)
}

// Hello is closed when the server is up.
func (c *Client) Hello() <-chan struct{} { return c.hello }

// Ended is closed when no answer can come any more; Err has the reason.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Err returns the reason why the channel ended, or nil.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Do sends a request and returns its answer; done ends the waiting.
func (c *Client) Do(done <-chan struct{}, q Request) (Response, error) {
	ch := make(chan Response, 1)
	c.mu.Lock()
	c.next++
	q.ID = c.next
	c.waiting[q.ID] = ch
	c.mu.Unlock()
	c.wm.Lock()
	err := WriteLine(c.w, q)
	c.wm.Unlock()
	if err != nil {
		return Response{}, fmt.Errorf("%s: the channel to the guest ended: %w", q.Op, err)
	}
	select {
	case a := <-ch:
		if a.Error != "" {
			return a, fmt.Errorf("%s: %s", q.Op, a.Error)
		}
		return a, nil
	case <-c.ended:
		select {
		case a := <-ch:
			return a, nil
		default:
		}
		return Response{}, fmt.Errorf("%s: the channel to the guest ended: %w", q.Op, c.Err())
	case <-done:
		c.mu.Lock()
		delete(c.waiting, q.ID)
		c.mu.Unlock()
		return Response{}, fmt.Errorf("%s: no answer from the guest in time", q.Op)
	}
}

// EndLine is the line that the guest prints on its console as the last thing before it powers off:
// without it a machine did not end, it died.
const EndLine = "VMTEST END"
