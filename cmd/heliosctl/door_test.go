package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/serve"
)

// door is a client of a daemon.
type door struct {
	conn  *net.UnixConn
	ring  []byte // of the only loader
	slots int64
	bytes int64 // of a slot
	sums  bool  // epoch sums batches up

	device string // that the ring lies on

	ended func() // waits for the session in this process; nil: there is none
}

type doorMessage struct {
	Type, Message string
	Device        string
	ID, Slot      int
	Epoch, Index  int
	Batches       int
	Slots         int64
	SlotBytes     int64 `json:"slot_bytes"`
	BytesSSD      int64 `json:"bytes_ssd"`
	Tensors       []struct {
		Shape  []int64
		Offset int64
	}
}

// openDoor connects a client to a server in this process; its session ends well with the test.
func openDoor(t testing.TB, s *serve.Server) *door {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	var ends [2]*net.UnixConn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		require.NoError(t, errors.Join(err, f.Close()))
		ends[i] = c.(*net.UnixConn)
	}
	theirs := ends[0]
	d := &door{conn: ends[1]}
	done := make(chan error, 1)
	go func() { done <- s.ServeConn(context.Background(), theirs) }()
	d.ended = sync.OnceFunc(func() { require.NoError(t, <-done) })
	t.Cleanup(d.close)
	require.NoError(t, d.hello())
	return d
}

func (d *door) close() {
	_ = d.conn.Close() // it may be closed
	if d.ring != nil {
		_ = unix.Munmap(d.ring)
		d.ring = nil
	}
	if d.ended != nil {
		d.ended()
	}
}

func (d *door) send(m map[string]any) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = d.conn.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...))
	return err
}

// next waits for a message, and maps the ring that comes with it.
func (d *door) next() (m doorMessage, err error) {
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := d.conn.ReadMsgUnix(head, oob)
	if err != nil {
		return m, err
	}
	if n == 0 {
		return m, io.EOF
	}
	if _, err := io.ReadFull(d.conn, head[n:]); err != nil {
		return m, err
	}
	body := make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(d.conn, body); err != nil {
		return m, err
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return m, err
	}
	if m.Type == "error" {
		return m, fmt.Errorf("the daemon says: %s", m.Message)
	}
	if oobn > 0 {
		return m, d.mapRing(oob[:oobn], m)
	}
	return m, nil
}

func (d *door) mapRing(oob []byte, m doorMessage) error {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	fds, err := unix.ParseUnixRights(&all[0])
	if err != nil {
		return err
	}
	defer unix.Close(fds[0]) //nolint:errcheck // mapped
	if d.ring != nil {
		if err := unix.Munmap(d.ring); err != nil {
			return err
		}
	}
	d.slots, d.bytes, d.device = m.Slots, m.SlotBytes, m.Device
	d.ring, err = unix.Mmap(fds[0], 0, int(d.slots*d.bytes), unix.PROT_READ, unix.MAP_SHARED)
	return err
}

func (d *door) hello() error {
	err := d.send(map[string]any{"type": "hello", "protocol": 3})
	if err == nil {
		_, err = d.next()
	}
	return err
}

// loader opens dataset g and a loader of split train, and returns how many batches it has.
func (d *door) loader(more map[string]any) (batches int, err error) {
	folder, err := filepath.Abs("g")
	if err != nil {
		return 0, err
	}
	if err := d.send(map[string]any{"type": "open", "dataset": folder}); err != nil {
		return 0, err
	}
	if _, err := d.next(); err != nil {
		return 0, err
	}
	q := map[string]any{"type": "loader", "handle": 1, "split": "train", "shuffle": true}
	maps.Copy(q, more)
	if err := d.send(q); err != nil {
		return 0, err
	}
	m, err := d.next()
	return m.Batches, err
}

// doorEpoch has the mini-batches of an epoch.
type doorEpoch struct {
	batches []int
	sums    []uint32 // of features and nodes of each
	read    int64    // by the job from SSDs, so far
}

// epoch takes the batches of an epoch from the first-th on.
func (d *door) epoch(epoch, first int) (got doorEpoch, err error) {
	if err := d.send(map[string]any{"type": "epoch", "id": 1, "epoch": epoch,
		"first": first}); err != nil {
		return got, err
	}
	for {
		m, err := d.next()
		if err != nil {
			return got, err
		}
		switch m.Type {
		case "epoch_end":
			got.read = m.BytesSSD
			return got, nil
		case "batch":
			got.batches = append(got.batches, m.Index)
			if d.sums {
				got.sums = append(got.sums, d.sum(m))
			}
			err := d.send(map[string]any{"type": "release", "id": 1, "slot": m.Slot})
			if err != nil {
				return got, err
			}
		}
	}
}

// sum is a checksum of a batch's float32 features and its nodes.
func (d *door) sum(m doorMessage) uint32 {
	slot := d.ring[int64(m.Slot)*d.bytes:][:d.bytes]
	x, nodes := m.Tensors[0], m.Tensors[1]
	c := crc32.ChecksumIEEE(slot[x.Offset:][:4*x.Shape[0]*x.Shape[1]])
	return crc32.Update(c, crc32.IEEETable, slot[nodes.Offset:][:8*nodes.Shape[0]])
}

// daemonFDs counts the descriptors of a process.
func daemonFDs(t testing.TB, pid int) int {
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	return len(all)
}
