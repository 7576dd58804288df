package serve

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// Protocol is the version of the protocol that this package speaks.
const Protocol = 3

const (
	maxFrame = 16 << 20
	maxSmall = 4 << 10 // of a frame before hello, and of one that need not be counted
	maxFDs   = 4
	decoded  = 8 // bytes that a byte of a frame takes until it is answered
)

// request is any message of a client. Only the fields of its type count.
type request struct {
	Type     string         `json:"type"`
	Protocol int            `json:"protocol"`
	Dataset  string         `json:"dataset"`
	SSDFile  []string       `json:"ssd_file"`
	SSD      []string       `json:"ssd"`
	Handle   int            `json:"handle"`
	Options  map[string]any `json:"options"`
	Split    *string        `json:"split"`
	Shuffle  bool           `json:"shuffle"`
	Anew     bool           `json:"anew"`
	Labels   bool           `json:"all_labels"`
	Position bool           `json:"positions"`
	NoBlocks bool           `json:"no_blocks"`
	Of       string         `json:"node_type"`
	Typed    bool           `json:"typed"`
	Rank     int            `json:"rank"`
	World    *int           `json:"world"`
	Job      string         `json:"job"`
	Device   string         `json:"device"`
	Visible  *string        `json:"visible"`
	Rests    bool           `json:"rests"`
	Slots    *int           `json:"slots"`
	ID       int            `json:"id"`
	Epoch    int            `json:"epoch"`
	First    int            `json:"first"`
	Slot     int            `json:"slot"`

	nodes []int64 // of the descriptor that came with it; nil: none came
	taken int64   // of the memory that clients share, until it is answered
}

// decode reads the body of a frame.
func decode(body []byte) (*request, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	r := &request{}
	if err := d.Decode(r); err != nil {
		return nil, errs.New(errs.Usage, "protocol: a frame is no message: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errs.New(errs.Usage, "protocol: a frame has more than one message")
	}
	if r.Type == "" {
		return nil, errs.New(errs.Usage, "protocol: a message has no type")
	}
	return r, nil
}

// texts returns options as a command line has them.
func texts(options map[string]any) (map[string]string, error) {
	out := map[string]string{}
	for k, v := range options {
		switch v := v.(type) {
		case string:
			out[k] = v
		case json.Number:
			out[k] = v.String()
		case bool:
			out[k] = fmt.Sprint(v)
		default:
			return nil, errs.New(errs.Usage, "%v is no text, number or boolean", errs.Key(k))
		}
	}
	return out, nil
}

// wire is a connection that carries frames. One goroutine reads, another one may write.
type wire struct {
	c       *net.UnixConn
	timeout time.Duration           // of a frame
	room    func(bytes int64) error // agrees to a frame before there is memory for it; nil: always
}

// read waits for a frame, which may come late but not slowly. The descriptors are the caller's to
// close, also with an error.
func (w *wire) read(first time.Duration) (body []byte, fds []int, err error) {
	var until time.Time
	if first > 0 {
		until = time.Now().Add(first)
	}
	if err := w.c.SetReadDeadline(until); err != nil {
		return nil, nil, err
	}
	var head [4]byte
	for n := 0; n < len(head); {
		oob := make([]byte, unix.CmsgSpace(4*maxFDs))
		got, oobn, flags, _, err := w.c.ReadMsgUnix(head[n:], oob)
		fds = append(fds, descriptors(oob[:oobn])...)
		if flags&unix.MSG_CTRUNC != 0 {
			return nil, fds, errs.New(errs.Usage,
				"protocol: more than %d descriptors came at once", maxFDs)
		}
		if err != nil {
			return nil, fds, err
		}
		if got == 0 {
			return nil, fds, io.EOF
		}
		if n == 0 {
			if err := w.c.SetReadDeadline(time.Now().Add(w.timeout)); err != nil {
				return nil, fds, err
			}
		}
		n += got
	}
	n := binary.LittleEndian.Uint32(head[:])
	if w.room != nil {
		if err := w.room(int64(n)); err != nil {
			return nil, fds, err
		}
	}
	body = make([]byte, n)
	_, err = io.ReadFull(w.c, body)
	return body, fds, err
}

// descriptors returns those in a control message.
func descriptors(oob []byte) (fds []int) {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range all {
		if some, err := unix.ParseUnixRights(&all[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	return fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // another process's file
	}
}

// write sends a message, and a descriptor with it where fd is not negative.
func (w *wire) write(m any, fd int) error {
	f, err := frame(m)
	if err != nil {
		return err
	}
	return w.send(f, fd)
}

// sendNow sends as much of a frame as the socket takes without a wait, which may be nothing. Unlike
// send it sets no deadline, and heeds none.
func (w *wire) sendNow(frame []byte) (n int, err error) {
	raw, err := w.c.SyscallConn()
	if err != nil {
		return 0, err
	}
	closed := raw.Control(func(fd uintptr) {
		n, err = syscall.Write(int(fd), frame) // package net has sockets that do not block
	})
	if err == unix.EAGAIN || err == unix.EINTR {
		return 0, nil
	}
	return n, errors.Join(closed, err)
}

// send sends a frame, and a descriptor with it where fd is not negative.
func (w *wire) send(frame []byte, fd int) (err error) {
	if err := w.c.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil {
		return err
	}
	n := 0
	if fd >= 0 {
		if n, _, err = w.c.WriteMsgUnix(frame, unix.UnixRights(fd), nil); err != nil {
			return err
		}
	}
	if n < len(frame) {
		_, err = w.c.Write(frame[n:])
	}
	return err
}
