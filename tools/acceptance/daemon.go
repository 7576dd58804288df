package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// soakEpochs are the epochs that clients of a daemon take.
const soakEpochs = 3

// daemon is "heliosctl serve" in a work folder.
type daemon struct {
	*runner
	work   string
	want   [][]uint32 // the sums of the batches of each epoch
	cmd    *exec.Cmd
	stderr *bytes.Buffer
}

func socketOf(work string) string { return filepath.Join(work, "s") }

// start starts it and waits until it lets a client in.
func (d *daemon) start() error {
	d.cmd, d.stderr = d.command(d.work, "serve", "--socket", socketOf(d.work), "--quiet")
	if err := d.cmd.Start(); err != nil {
		return err
	}
	for range 2000 {
		c, err := net.Dial("unix", socketOf(d.work))
		if err == nil {
			return c.Close()
		}
		time.Sleep(5 * time.Millisecond)
	}
	return errors.Join(fmt.Errorf("the daemon lets nobody in: %s", d.stderr), d.kill())
}

func (d *daemon) kill() error {
	err := d.cmd.Process.Kill()
	_ = d.cmd.Wait() // with the signal
	if d.cmd.ProcessState.ExitCode() >= 0 {
		return fmt.Errorf("the daemon had ended by itself: %s: %s", d.cmd.ProcessState, d.stderr)
	}
	return err
}

// end has it end as Ctrl-C does.
func (d *daemon) end() error {
	if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	if err := d.cmd.Wait(); err != nil {
		return fmt.Errorf("the daemon's end: %w: %s", err, d.stderr)
	}
	if _, err := os.Stat(socketOf(d.work)); err == nil {
		return errors.New("the daemon has left its socket")
	}
	return nil
}

// client takes epochs until ctx ends or the daemon dies.
func (d *daemon) client(ctx context.Context, first int) error {
	for i := first; ctx.Err() == nil; i++ {
		epoch := i % soakEpochs
		sums, err := takeEpoch(ctx, d.work, epoch, -1)
		if !isPrefix(sums, d.want[epoch]) {
			return fmt.Errorf("epoch %d came with other batches", epoch)
		}
		if lost(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func isPrefix(part, all []uint32) bool {
	return len(part) <= len(all) && slices.Equal(part, all[:len(part)])
}

// lost reports whether an error is a daemon's death.
func lost(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, net.ErrClosed)
}

// calm has clients break off in the middle of an epoch, and holds what the daemon has after that
// against what it had after its first client.
func (d *daemon) calm(rng *rand.Rand) error {
	if err := d.start(); err != nil {
		return err
	}
	err := func() error {
		if _, err := takeEpoch(d.ctx, d.work, 0, -1); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
		before, err := heldBy(d.cmd.Process.Pid)
		if err != nil {
			return err
		}
		for range 5 {
			epoch := rng.IntN(soakEpochs)
			sums, err := takeEpoch(d.ctx, d.work, epoch, 1+rng.IntN(len(d.want[epoch])))
			if err != nil || !isPrefix(sums, d.want[epoch]) {
				return fmt.Errorf("epoch %d came with other batches, or %w", epoch, err)
			}
		}
		var now [2]int
		for range 500 {
			if now, err = heldBy(d.cmd.Process.Pid); err != nil || now[0] <= before[0] &&
				now[1] <= before[1] {
				return err
			}
			time.Sleep(10 * time.Millisecond)
		}
		return fmt.Errorf("the daemon has %d descriptors and %d mappings of memory files, %d and %d "+
			"before its last clients", now[0], now[1], before[0], before[1])
	}()
	if err != nil {
		return errors.Join(err, d.kill())
	}
	return d.end()
}

// heldBy counts the descriptors of a process and its mappings of files that have no name.
func heldBy(pid int) (held [2]int, err error) {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return held, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return [2]int{len(fds), strings.Count(string(b), "(deleted)")}, err
}

// takeEpoch connects to the daemon of a work folder (docs/reference/protocol.md) and takes n
// batches of an epoch, all where n is -1. It gives their checksums.
func takeEpoch(ctx context.Context, work string, epoch, n int) (sums []uint32, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socketOf(work), Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })() // it is closed once more
	s := &session{conn: conn}
	defer s.close()
	ask := func(m map[string]any) error {
		if err := s.send(m); err != nil {
			return err
		}
		_, err := s.next()
		return err
	}
	for _, m := range []map[string]any{
		{"type": "hello", "protocol": 3},
		{"type": "open", "dataset": filepath.Join(work, "g")},
		{"type": "loader", "handle": 1, "split": "train", "shuffle": true, "slots": 2,
			"options": map[string]any{"mode": "helios", "device": "host", "gpu-cache": "16KiB",
				"cpu-cache": "0", "fanout": "4,4", "batch-size": 50, "hotness": "degree"}},
	} {
		if err := ask(m); err != nil {
			return nil, err
		}
	}
	if err := s.send(map[string]any{"type": "epoch", "id": 1, "epoch": epoch}); err != nil {
		return nil, err
	}
	for len(sums) != n {
		m, err := s.next()
		if err != nil || m.Type == "epoch_end" {
			return sums, err
		}
		if m.Type != "batch" {
			continue
		}
		if m.Index != len(sums) {
			return sums, fmt.Errorf("batch %d comes after %d others", m.Index, len(sums))
		}
		sums = append(sums, s.sum(m))
		if err := s.send(map[string]any{"type": "release", "id": 1, "slot": m.Slot}); err != nil {
			return sums, err
		}
	}
	return sums, nil
}

// session is a client's connection, with the memory that batches come in.
type session struct {
	conn  *net.UnixConn
	ring  []byte
	bytes int64 // of a slot
}

type message struct {
	Type, Message string
	Slot, Index   int
	Slots         int64
	SlotBytes     int64 `json:"slot_bytes"`
	Tensors       []struct {
		Shape  []int64
		Offset int64
	}
}

func (s *session) close() {
	_ = s.conn.Close() // it may be closed
	if s.ring != nil {
		_ = unix.Munmap(s.ring) // it is mapped
	}
}

func (s *session) send(m map[string]any) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = s.conn.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...))
	return err
}

func (s *session) next() (m message, err error) {
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := s.conn.ReadMsgUnix(head, oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return m, err
	}
	if _, err := io.ReadFull(s.conn, head[n:]); err != nil {
		return m, err
	}
	body := make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(s.conn, body); err != nil {
		return m, err
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return m, err
	}
	if m.Type == "error" {
		return m, fmt.Errorf("the daemon says: %s", m.Message)
	}
	if oobn > 0 {
		err = s.mapRing(oob[:oobn], m)
	}
	return m, err
}

func (s *session) mapRing(oob []byte, m message) error {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	fds, err := unix.ParseUnixRights(&all[0])
	if err != nil {
		return err
	}
	s.bytes = m.SlotBytes
	s.ring, err = unix.Mmap(fds[0], 0, int(m.Slots*m.SlotBytes), unix.PROT_READ, unix.MAP_SHARED)
	return errors.Join(err, unix.Close(fds[0]))
}

// sum is a checksum of a batch's features and nodes.
func (s *session) sum(m message) uint32 {
	slot := s.ring[int64(m.Slot)*s.bytes:][:s.bytes]
	x, nodes := m.Tensors[0], m.Tensors[1]
	c := crc32.ChecksumIEEE(slot[x.Offset:][:4*x.Shape[0]*x.Shape[1]])
	return crc32.Update(c, crc32.IEEETable, slot[nodes.Offset:][:8*nodes.Shape[0]])
}
