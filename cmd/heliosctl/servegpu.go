package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/serve"
)

// gpuRings puts mini-batches into memory of the GPU that clients import. The daemon waits for its
// copies before it tells a client of the batch, so no event has to cross between processes: one
// that the daemon records anew for the slot's next batch would be what an earlier wait of the
// client's stands for (cuIpcOpenEventHandle), and the wait is of a daemon that is ahead anyway.
type gpuRings struct {
	dev    cuda.Device
	shares cuda.ProcessSharer
	stream cuda.Stream
}

// gpuPatience bounds the wait for copies into a ring.
const gpuPatience = time.Minute

// openGPURings finds out whether a device can give memory to clients.
func openGPURings(dev cuda.Device, stream cuda.Stream) (*gpuRings, error) {
	s, ok := dev.(cuda.ProcessSharer)
	if !ok {
		return nil, errs.New(errs.Capability,
			"device cuda: this loader runs on %s, whose memory is the CPU's; give device cpu, or {device} cuda",
			dev.Info().Name)
	}
	b, err := s.AllocShared(1, "trial of a ring")
	if err != nil {
		return nil, err
	}
	return &gpuRings{dev: dev, shares: s, stream: stream}, b.Free()
}

// DeviceName is the name by which a client finds the GPU.
func (l *servedLoader) DeviceName() string {
	if l.gpu == nil {
		return ""
	}
	return "cuda:" + l.gpu.shares.PCIBusID()
}

// DeviceMemory makes a ring on the GPU.
func (l *servedLoader) DeviceMemory(bytes int64) (serve.DeviceMemory, error) {
	b, err := l.gpu.shares.AllocShared(bytes, "ring of a client")
	if err != nil {
		return nil, err
	}
	return &gpuRing{SharedBuffer: b, of: l.gpu}, nil
}

// gpuRing is one client's ring.
type gpuRing struct {
	cuda.SharedBuffer
	of    *gpuRings
	stage cuda.Buffer // pinned: what the CPU makes of a batch
}

// Put implements serve.DeviceMemory.
func (r *gpuRing) Put(offset int64, tensors []serve.Tensor, offsets []int64) error {
	need := int64(0)
	for _, t := range tensors {
		if t.CopyTo == nil {
			need += t.Bytes
		}
	}
	if err := r.room(need); err != nil {
		return err
	}
	staged := int64(0)
	for i, t := range tensors {
		to := r.Ptr() + cuda.DevicePtr(offset+offsets[i])
		if t.Bytes == 0 {
			continue
		}
		if t.CopyTo != nil {
			if err := t.CopyTo(uint64(to)); err != nil {
				return err
			}
			continue
		}
		t.Put(r.stage.Bytes()[staged:][:t.Bytes])
		if err := r.of.stream.Copy(to, r.stage.Ptr()+cuda.DevicePtr(staged), t.Bytes); err != nil {
			return err
		}
		staged += t.Bytes
	}
	ctx, cancel := context.WithTimeout(context.Background(), gpuPatience)
	defer cancel()
	if err := r.of.stream.Synchronize(ctx); err != nil {
		return errs.With(errs.Device, fmt.Errorf("a batch on its way to a client: %w", err))
	}
	return nil
}

// room sees to it that so many bytes can be staged.
func (r *gpuRing) room(bytes int64) (err error) {
	if r.stage != nil && r.stage.Size() >= bytes {
		return nil
	}
	if r.stage != nil {
		err = r.stage.Free()
		r.stage = nil
	}
	if err == nil {
		r.stage, err = r.of.dev.Alloc(cuda.MemPinned, max(bytes+bytes/2, 1), "staging for clients")
	}
	return err
}

// Close implements serve.DeviceMemory.
func (r *gpuRing) Close() error {
	var err error
	if r.stage != nil {
		err = r.stage.Free()
		r.stage = nil
	}
	return errors.Join(err, r.Free())
}

// visibleVar names the GPUs that a process sees, in the order of the numbers that it has for them.
const visibleVar = "CUDA_VISIBLE_DEVICES"

// countAs gives the device this process's number of a GPU in place of that of a client, whose
// CUDA_VISIBLE_DEVICES is theirs; nil: it is unset.
func (a *deviceArgs) countAs(theirs *string, note func(errs.Text)) error {
	var ours *string
	if v, ok := os.LookupEnv(visibleVar); ok {
		ours = &v
	}
	named := cmp.Or(a.device, "auto")
	kind, n, err := parseDevice(named)
	byNumber := theirs != nil || strings.Contains(named, ":") // else any of ours will do
	same := theirs != nil && ours != nil && *theirs == *ours || theirs == nil && ours == nil
	if err != nil || kind == "host" || !byNumber || same {
		return err
	}
	uuids, err := driver.UUIDs(driver.Options{})
	if err != nil {
		return nil //nolint:nilerr // opening the device says so, or takes the host's
	}
	number := gpuSeenAs(n, theirs, ours, uuids)
	said := func(v *string) string {
		if v == nil {
			return "unset"
		}
		return strconv.Quote(*v)
	}
	switch {
	case number < 0 && kind == "auto":
		a.device = "host"
		note(errs.Textf("device: host (a client's %s is %s, and the daemon's %s: no GPU is of both)",
			visibleVar, said(theirs), said(ours)))
	case number < 0:
		return errs.New(errs.Capability,
			"{device} %s: with %s %s that is no GPU of the daemon's, which has it %s; name one of both, or give {device} host",
			named, visibleVar, said(theirs), said(ours))
	case kind == "auto":
		a.auto = number
	default:
		a.device = fmt.Sprintf("cuda:%d", number)
	}
	return nil
}

// gpuSeenAs returns our number of the GPU that a process with another CUDA_VISIBLE_DEVICES sees as
// its n-th; -1: it sees no such, or we do not. Those that are unset are nil; uuids are of all GPUs
// that we see.
func gpuSeenAs(n int, theirs, ours *string, uuids []string) int {
	find := func(name string) int {
		if strings.HasPrefix(name, uuidPrefix) {
			return slices.IndexFunc(uuids, func(id string) bool {
				return strings.HasPrefix(id, name)
			})
		}
		if ours != nil {
			return slices.Index(visibleGPUs(*ours), name)
		}
		if i, err := strconv.Atoi(name); err == nil && i < len(uuids) {
			return i
		}
		return -1
	}
	if theirs == nil {
		return find(strconv.Itoa(n))
	}
	names := visibleGPUs(*theirs)
	if n >= len(names) {
		return -1
	}
	number := -1
	for _, name := range names[:n+1] {
		if number = find(name); number < 0 && ours == nil {
			break // there is none of that name, and CUDA looks no further
		}
	}
	return number
}

const uuidPrefix = "GPU-"

// visibleGPUs returns the GPUs that CUDA takes from a CUDA_VISIBLE_DEVICES: numbers, or beginnings
// of UUIDs. The list ends before the first other word. A list that names a GPU twice has none.
func visibleGPUs(list string) (names []string) {
	ids := strings.HasPrefix(list, uuidPrefix)
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if !ids {
			n, err := strconv.ParseUint(name, 10, 16)
			if err != nil {
				break
			}
			name = strconv.FormatUint(n, 10)
		} else if !strings.HasPrefix(name, uuidPrefix) {
			break
		}
		if slices.Contains(names, name) {
			return nil
		}
		names = append(names, name)
	}
	return names
}
