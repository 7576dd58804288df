package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// qmp is QEMU's control channel (docs/interop/qmp-spec.txt): one JSON object a line.
type qmp struct {
	conn net.Conn
	dec  *json.Decoder
	mu   sync.Mutex
	id   int64
	err  error
	// events seen so far, and a channel that closes when another comes
	em     sync.Mutex
	events []qmpEvent // not yet taken
	more   chan struct{}
	answer chan qmpAnswer
}

type qmpEvent struct {
	Event string
	Data  json.RawMessage
}

type qmpAnswer struct {
	ID     *int64          `json:"id"`
	Event  string          `json:"event"`
	Data   json.RawMessage `json:"data"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

// qmpLimit bounds the wait for an answer.
const qmpLimit = 20 * time.Second

// newQMP takes the greeting and enters command mode.
func newQMP(conn net.Conn) (*qmp, error) {
	q := &qmp{conn: conn, dec: json.NewDecoder(conn), more: make(chan struct{}),
		answer: make(chan qmpAnswer, 16)}
	var hello struct {
		QMP json.RawMessage `json:"QMP"`
	}
	if err := conn.SetReadDeadline(time.Now().Add(qmpLimit)); err != nil {
		return nil, err
	}
	if err := q.dec.Decode(&hello); err != nil {
		return nil, fmt.Errorf("qmp: %w", err)
	}
	if hello.QMP == nil {
		return nil, errors.New("qmp: no greeting")
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, err
	}
	go q.read()
	_, err := q.do("qmp_capabilities", nil)
	return q, err
}

func (q *qmp) read() {
	for {
		var a qmpAnswer
		if err := q.dec.Decode(&a); err != nil {
			q.em.Lock()
			close(q.more)
			q.more = nil
			q.em.Unlock()
			close(q.answer)
			return
		}
		if a.Event == "" {
			q.answer <- a
			continue
		}
		q.em.Lock()
		q.events = append(q.events, qmpEvent{a.Event, a.Data})
		close(q.more)
		q.more = make(chan struct{})
		q.em.Unlock()
	}
}

// do runs one command.
func (q *qmp) do(cmd string, args map[string]any) (json.RawMessage, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return nil, q.err
	}
	q.id++
	m := map[string]any{"execute": cmd, "id": q.id}
	if len(args) > 0 {
		m["arguments"] = args
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if _, err := q.conn.Write(append(b, '\n')); err != nil {
		q.err = fmt.Errorf("qmp %s: %w", cmd, err)
		return nil, q.err
	}
	limit := time.After(qmpLimit)
	for {
		select {
		case a, ok := <-q.answer:
			switch {
			case !ok:
				q.err = fmt.Errorf("qmp %s: %w: QEMU has ended", cmd, io.ErrUnexpectedEOF)
				return nil, q.err
			case a.ID != nil && *a.ID != q.id:
				continue
			case a.Error != nil:
				return nil, fmt.Errorf("qmp %s: %s: %s", cmd, a.Error.Class, a.Error.Desc)
			}
			return a.Return, nil
		case <-limit:
			q.err = fmt.Errorf("qmp %s: no answer from QEMU in %v", cmd, qmpLimit)
			return nil, q.err
		}
	}
}

// event takes the first event of that name, waiting for it.
func (q *qmp) event(name string, limit time.Duration) (json.RawMessage, error) {
	end := time.After(limit)
	for {
		q.em.Lock()
		for i, e := range q.events {
			if e.Event == name {
				q.events = append(q.events[:i:i], q.events[i+1:]...)
				q.em.Unlock()
				return e.Data, nil
			}
		}
		more := q.more
		q.em.Unlock()
		if more == nil {
			return nil, fmt.Errorf("qmp: QEMU ended before event %s", name)
		}
		select {
		case <-more:
		case <-end:
			return nil, fmt.Errorf("qmp: no event %s in %v", name, limit)
		}
	}
}
