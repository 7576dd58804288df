// Package difftest runs every kernel launch of a workload twice, as Go on the host device and as
// CUDA on a device of the driver (the fake one of the shim, or a GPU), and compares all memory that
// the launch could reach. So whatever runs on a cuda.Device is a differential test of its kernels.
//
// The two sides have memories of their own: the workload sees the driver's, and each buffer has a
// twin on the host device. The addresses in a parameter block are translated for Go's kernel, so
// kernels must find their memory by their parameters alone (those of cache and graph do; the queues
// of gpuio hold addresses themselves, and gpuio compares them its own way). Memory of Register is
// one memory for both, and must only be read.
//
// A kernel that only CUDA has (a part of what Go does in one launch) runs on the driver's side, and
// what it leaves is copied to the twins; Mirrored counts those launches. A workload's tests
// compare its final results.
package difftest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
	"unsafe"

	"helios/cuda"
)

// Options shape a device under test. The zero value compares everything and changes nothing.
type Options struct {
	Seed uint64 // of block sizes; part of every message
	SMs  int    // what Info says, which sizes grids; 0 = as the device has
	// RandomThreads launches the CUDA kernel with blocks of 1 to 8 warps, whatever was asked for.
	RandomThreads bool
	// Grain is the number of items that make another block worth its launch, where the caller asks
	// the device; small ones make many blocks of little work. 0 = as usual.
	Grain int64
	// Lazy names buffers (by purpose) that are large and only read: CheckAll compares them,
	// launches do not.
	Lazy []string
	// Normalise rewrites copies of what a kernel has left before they are compared, once for each
	// side: what the two may do differently becomes the same.
	Normalise map[string]func(params []byte, mem Memory)
	// Tolerance says by kernel how far the CUDA side's floats may be from Go's: where the order of
	// a sum is another, or a function of the host's is not the GPU's. Kernels that are not in it
	// must agree to the bit. The twins then get the CUDA side's memory, so that no later launch
	// starts from different inputs.
	Tolerance map[string]Tolerance
	// Spoil changes the CUDA side's copies before they are compared: tests of the test use it.
	// param is 8-byte word i of the parameter block.
	Spoil func(l Launch, param func(i int) cuda.DevicePtr, mem Memory)
}

// Tolerance accepts words that are float32, or float64 where Wide, and within Abs + Rel·|Go's| of
// Go's. The other words must be equal.
type Tolerance struct {
	Abs, Rel float64
	Wide     bool
}

// near reports whether got is near enough to want in each word, or the offset of the first that is
// not.
func (t Tolerance) near(want, got []byte) (at int64, ok bool) {
	// false for NaN
	close := func(a, b float64) bool { return math.Abs(a-b) <= t.Abs+t.Rel*math.Abs(a) }
	for i := 0; i < len(want); i += 8 {
		w, g := want[i:min(i+8, len(want))], got[i:min(i+8, len(got))]
		if bytes.Equal(w, g) {
			continue
		}
		wide := func(
			b []byte) float64 {
			return math.Float64frombits(binary.LittleEndian.Uint64(b))
		}
		if t.Wide && len(w) == 8 && close(wide(w), wide(g)) {
			continue
		}
		for k := 0; k < len(w); k += 4 {
			if k+4 > len(w) {
				return int64(i + k), false
			}
			narrow := func(
				b []byte) float64 {
				return float64(math.Float32frombits(binary.LittleEndian.Uint32(b[k:])))
			}
			if !bytes.Equal(w[k:k+4], g[k:k+4]) && !close(narrow(w), narrow(g)) {
				return int64(i + k), false
			}
		}
	}
	return 0, true
}

// Launch names a launch in messages.
type Launch struct {
	Number          int // from 1, over all streams
	Kernel          string
	Blocks, Threads int
}

// Memory is one side's buffers after a launch, as copies.
type Memory interface {
	// Bytes is n bytes from p, an address of that side's parameter block; nil where the launch
	// could not reach it.
	Bytes(p cuda.DevicePtr, n int64) []byte
	// Rest returns the content of a buffer of that purpose from p on; nil for another one.
	Rest(p cuda.DevicePtr, purpose string) []byte
}

// Mismatch is a difference between the two kernels.
type Mismatch struct {
	Launch
	Seed      uint64
	Buffer    string // purpose
	Offset    int64  // of the first byte that differs
	Size      int64  // of the buffer
	Go, CUDA  []byte // the 8 aligned bytes around it
	Different int64  // bytes that differ in this buffer
}

func (m *Mismatch) Error() string {
	return fmt.Sprintf(
		"launch %d, kernel %s with %d blocks of %d threads (seed %d): buffer %q differs at byte %d of %d: Go has % x there, CUDA % x; %d bytes differ",
		m.Number, m.Kernel, m.Blocks, m.Threads, m.Seed, m.Buffer, m.Offset, m.Size, m.Go, m.CUDA,
		m.Different)
}

// Device is a cuda.Device that compares.
type Device struct {
	gpu  cuda.Device
	host *cuda.Host
	opt  Options
	info cuda.Info

	mu       sync.Mutex // one launch, copy or fill at a time
	bufs     []*buffer  // by address
	rng      *rand.Rand
	launches map[string]int
	mirrored map[string]int
	number   int
	found    []error
	work     cuda.Stream // for the device's own copies
	stage    cuda.Buffer
}

// limit bounds each wait for one launch or copy.
const limit = time.Minute

// New makes a device that compares gpu's kernels with those of a host device. Close closes gpu.
func New(gpu cuda.Device, opt Options) (*Device, error) {
	info := gpu.Info()
	if opt.SMs > 0 {
		info.SMs = opt.SMs
	}
	host, err := cuda.NewHost(cuda.HostOptions{SMs: info.SMs})
	if err != nil {
		return nil, err
	}
	d := &Device{gpu: gpu, host: host, opt: opt, info: info,
		rng: rand.New(rand.NewPCG(opt.Seed, 0xd1ff)), launches: map[string]int{},
		mirrored: map[string]int{}}
	if d.work, err = gpu.NewStream(cuda.StreamOptions{Name: "difftest"}); err != nil {
		return nil, errors.Join(err, host.Close())
	}
	return d, nil
}

// Info implements cuda.Device.
func (d *Device) Info() cuda.Info { return d.info }

// Grain is asked by code that sizes grids.
func (d *Device) Grain(usual int64) int64 {
	if d.opt.Grain > 0 {
		return d.opt.Grain
	}
	return usual
}

// Launches is the number of compared launches of each kernel.
func (d *Device) Launches() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.launches)
}

// Mirrored is the number of launches of each kernel that only CUDA has.
func (d *Device) Mirrored() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.mirrored)
}

// Err is every difference found so far. A launch that finds one also returns it.
func (d *Device) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.found...)
}

// Close closes both sides.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	if d.stage != nil {
		errs = append(errs, d.stage.Free())
		d.stage = nil
	}
	if d.work != nil {
		errs = append(errs, d.work.Close())
		d.work = nil
	}
	return errors.Join(append(errs, d.host.Close(), d.gpu.Close())...)
}

// MemUsage implements cuda.Device.
func (d *Device) MemUsage() map[string]int64 {
	m := d.gpu.MemUsage()
	delete(m, stagePurpose)
	return m
}

// NewEvent implements cuda.Device.
func (d *Device) NewEvent() (cuda.Event, error) { return d.gpu.NewEvent() }

// NewTimer implements cuda.Device.
func (d *Device) NewTimer() (cuda.Event, error) { return d.gpu.NewTimer() }

type kernel struct {
	gpu  cuda.Kernel
	host cuda.Kernel // nil: only CUDA has it
}

func (k *kernel) Name() string       { return k.gpu.Name() }
func (k *kernel) ParamSize() uintptr { return k.gpu.ParamSize() }

// Kernel implements cuda.Device. Where both sides have the kernel, their parameter blocks must have
// one size.
func (d *Device) Kernel(name string) (cuda.Kernel, error) {
	g, err := d.gpu.Kernel(name)
	if err != nil {
		return nil, err
	}
	h, err := d.host.Kernel(name)
	if err != nil {
		return &kernel{gpu: g}, nil
	}
	if g.ParamSize() != h.ParamSize() {
		return nil, fmt.Errorf("kernel %q: the CUDA kernel takes %d bytes of parameters, Go's %d",
			name, g.ParamSize(), h.ParamSize())
	}
	return &kernel{g, h}, nil
}

// buffer is memory of the driver's device, and its twin.
type buffer struct {
	d         *Device
	gpu, host cuda.Buffer
	ptr       cuda.DevicePtr
	size      int64
	shared    bool // one memory for both
}

func (b *buffer) Ptr() cuda.DevicePtr { return b.gpu.Ptr() }
func (b *buffer) Size() int64         { return b.size }
func (b *buffer) Kind() cuda.MemKind  { return b.gpu.Kind() }
func (b *buffer) Bytes() []byte       { return b.gpu.Bytes() }
func (b *buffer) Purpose() string     { return b.gpu.Purpose() }

func (b *buffer) Free() error {
	b.d.mu.Lock()
	if i := slices.Index(b.d.bufs, b); i >= 0 {
		b.d.bufs = slices.Delete(b.d.bufs, i, i+1)
	}
	b.d.mu.Unlock()
	return errors.Join(b.gpu.Free(), b.host.Free())
}

func (d *Device) add(g, h cuda.Buffer, shared bool) *buffer {
	b := &buffer{d: d, gpu: g, host: h, ptr: g.Ptr(), size: g.Size(), shared: shared}
	d.mu.Lock()
	defer d.mu.Unlock()
	if b.size > 0 {
		i, _ := slices.BinarySearchFunc(d.bufs, b.ptr,
			func(x *buffer, p cuda.DevicePtr) int { return compare(x.ptr, p) })
		d.bufs = slices.Insert(d.bufs, i, b)
	}
	return b
}

func compare(a, b cuda.DevicePtr) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// find is the buffer that p lies in, or nil. d.mu is held.
func (d *Device) find(p cuda.DevicePtr) *buffer {
	i, exact := slices.BinarySearchFunc(d.bufs, p,
		func(x *buffer, p cuda.DevicePtr) int { return compare(x.ptr, p) })
	if exact {
		return d.bufs[i]
	}
	if i == 0 {
		return nil
	}
	if b := d.bufs[i-1]; p < b.ptr+cuda.DevicePtr(b.size) {
		return b
	}
	return nil
}

// Alloc implements cuda.Device.
func (d *Device) Alloc(kind cuda.MemKind, size int64, purpose string) (cuda.Buffer, error) {
	g, err := d.gpu.Alloc(kind, size, purpose)
	if err != nil {
		return nil, err
	}
	h, err := d.host.Alloc(kind, size, purpose)
	if err != nil {
		return nil, errors.Join(err, g.Free())
	}
	return d.add(g, h, false), nil
}

// Register implements cuda.Device.
func (d *Device) Register(mem []byte, purpose string) (cuda.Buffer, error) {
	g, err := d.gpu.Register(mem, purpose)
	if err != nil {
		return nil, err
	}
	h, err := d.host.Register(mem, purpose)
	if err != nil {
		return nil, errors.Join(err, g.Free())
	}
	return d.add(g, h, true), nil
}

type stream struct {
	cuda.Stream // the driver's
	d           *Device
	host        cuda.Stream
	err         error // sticky, as a device's
}

// NewStream implements cuda.Device.
func (d *Device) NewStream(opt cuda.StreamOptions) (cuda.Stream, error) {
	g, err := d.gpu.NewStream(opt)
	if err != nil {
		return nil, err
	}
	h, err := d.host.NewStream(cuda.StreamOptions{Name: opt.Name})
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return &stream{Stream: g, d: d, host: h}, nil
}

// Close closes both sides' streams.
func (s *stream) Close() error {
	err := s.Stream.Close()
	if s.err != nil { // told already
		_ = s.host.Close()
		return err
	}
	return errors.Join(err, s.host.Close())
}

// Synchronize implements cuda.Stream.
func (s *stream) Synchronize(ctx context.Context) error {
	if s.err != nil {
		return s.err
	}
	return s.Stream.Synchronize(ctx)
}

func (s *stream) settle() error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return errors.Join(s.Stream.Synchronize(ctx), s.host.Synchronize(ctx))
}

// twin translates an address for the host device.
func (d *Device) twin(p cuda.DevicePtr) cuda.DevicePtr {
	if b := d.find(p); b != nil {
		return b.host.Ptr() + (p - b.ptr)
	}
	return p
}

// Copy implements cuda.Stream on both sides.
func (s *stream) Copy(dst, src cuda.DevicePtr, n int64) error {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if err := s.Stream.Copy(dst, src, n); err != nil {
		return err
	}
	if b := s.d.find(src); b != nil {
		b.pull()
	}
	if err := s.host.Copy(s.d.twin(dst), s.d.twin(src), n); err != nil {
		return err
	}
	return s.settle()
}

// Fill implements cuda.Stream on both sides.
func (s *stream) Fill(dst cuda.DevicePtr, value byte, n int64) error {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if err := s.Stream.Fill(dst, value, n); err != nil {
		return err
	}
	if err := s.host.Fill(s.d.twin(dst), value, n); err != nil {
		return err
	}
	return s.settle()
}

// pull brings to the twin what the CPU has written: pinned memory is the workload's to write
// between launches.
func (b *buffer) pull() {
	if mem := b.gpu.Bytes(); mem != nil && !b.shared {
		copy(b.host.Bytes(), mem)
	}
}

// LaunchRaw runs Go's kernel and the CUDA kernel to their ends and compares.
func (s *stream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	pair, ok := k.(*kernel)
	if !ok {
		return fmt.Errorf("launch of %s: the kernel is of another device", k.Name())
	}
	d.number++
	if pair.host != nil {
		d.launches[k.Name()]++
	} else {
		d.mirrored[k.Name()]++
	}
	l := Launch{d.number, k.Name(), cfg.Blocks, cfg.Threads}
	if d.opt.RandomThreads {
		l.Threads = cuda.WarpSize * (1 + d.rng.IntN(8))
	}

	// 8-byte words, so that both blocks are aligned for any parameter struct.
	words := make([]uint64, (size+7)/8)
	forGPU := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), size)
	copy(forGPU, unsafe.Slice((*byte)(params), size))
	twins := slices.Clone(words)
	var reached []*buffer
	for i, w := range words {
		if b := d.find(cuda.DevicePtr(w)); b != nil {
			twins[i] = uint64(d.twin(cuda.DevicePtr(w)))
			if !slices.Contains(reached, b) {
				reached = append(reached, b)
			}
		}
	}
	for _, b := range reached {
		b.pull()
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var hostErr error
	if pair.host != nil {
		hostErr = s.host.LaunchRaw(pair.host, cfg, unsafe.Pointer(unsafe.SliceData(twins)), size)
		if hostErr == nil {
			hostErr = s.host.Synchronize(ctx)
		}
	}
	var bufs []*buffer
	for _, b := range reached {
		if !b.shared && !slices.Contains(d.opt.Lazy, b.Purpose()) {
			bufs = append(bufs, b)
		}
	}
	gpuErr := s.Stream.LaunchRaw(pair.gpu, cuda.LaunchConfig{Blocks: l.Blocks, Threads: l.Threads},
		unsafe.Pointer(unsafe.SliceData(words)), size)
	if gpuErr == nil {
		gpuErr = d.fetch(s.Stream, bufs)
	}
	if gpuErr == nil {
		gpuErr = s.Stream.Synchronize(ctx)
	}
	if pair.host == nil {
		if gpuErr != nil {
			s.err = gpuErr
			return nil // Synchronize says it, as on any device
		}
		for i, mem := range d.fetched(bufs) {
			copy(bufs[i].host.Bytes(), mem)
		}
		return nil
	}
	if hostErr != nil || gpuErr != nil {
		same := false
		if same, s.err = d.sameFailure(l, hostErr, gpuErr); same {
			return nil // Synchronize says it, as on any device
		}
		return s.err
	}
	if err := d.compareAll(l, bufs, forGPU,
		unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(twins))), size)); err != nil {
		s.err = err
		return err
	}
	return nil
}

// sameFailure demands that both kernels failed with the same words.
func (d *Device) sameFailure(l Launch, hostErr, gpuErr error) (same bool, err error) {
	var h, g *cuda.KernelError
	if errors.As(hostErr, &h) && errors.As(gpuErr, &g) && h.Kernel == g.Kernel &&
		h.Err.Error() == g.Err.Error() {
		return true, gpuErr
	}
	err = fmt.Errorf(
		"launch %d, kernel %s with %d blocks of %d threads (seed %d): Go: %v; CUDA: %v; want the same outcome",
		l.Number, l.Kernel, l.Blocks, l.Threads, d.opt.Seed, hostErr, gpuErr)
	d.found = append(d.found, err)
	return false, err
}

// side is one side's copies of some buffers.
type side struct {
	bufs   []*buffer
	copies [][]byte
	host   bool
}

func (m *side) Bytes(p cuda.DevicePtr, n int64) []byte {
	for i, b := range m.bufs {
		lo := b.ptr
		if m.host {
			lo = b.host.Ptr()
		}
		if p >= lo && p+cuda.DevicePtr(n) <= lo+cuda.DevicePtr(b.live()) {
			return m.copies[i][p-lo:][:n:n]
		}
	}
	return nil
}

func (m *side) Rest(p cuda.DevicePtr, purpose string) []byte {
	for i, b := range m.bufs {
		lo := b.ptr
		if m.host {
			lo = b.host.Ptr()
		}
		if p >= lo && p < lo+cuda.DevicePtr(b.live()) && b.Purpose() == purpose {
			return m.copies[i][p-lo:]
		}
	}
	return nil
}

func (d *Device) compareAll(l Launch, bufs []*buffer, gpuParams, hostParams []byte) error {
	gpu := &side{bufs: bufs, copies: d.fetched(bufs)}
	normalise := d.opt.Normalise[l.Kernel]
	host := &side{bufs: bufs, host: true}
	for _, b := range bufs {
		mem := b.host.Bytes()[:b.live()]
		if normalise != nil {
			mem = bytes.Clone(mem)
		}
		host.copies = append(host.copies, mem)
	}
	if d.opt.Spoil != nil {
		d.opt.Spoil(l,
			func(
				i int) cuda.DevicePtr {
				return cuda.DevicePtr(binary.LittleEndian.Uint64(gpuParams[8*i:]))
			}, gpu)
	}
	if normalise != nil {
		normalise(gpuParams, gpu)
		normalise(hostParams, host)
	}
	for i, b := range bufs {
		if m := d.differ(l, b, host.copies[i], gpu.copies[i]); m != nil {
			d.found = append(d.found, m)
			return m
		}
		if _, ok := d.opt.Tolerance[l.Kernel]; ok && normalise == nil {
			copy(b.host.Bytes()[:b.live()], gpu.copies[i])
		}
	}
	return nil
}

func (d *Device) differ(l Launch, b *buffer, want, got []byte) error {
	if bytes.Equal(want, got) {
		return nil
	}
	m := &Mismatch{Launch: l, Seed: d.opt.Seed, Buffer: b.Purpose(), Offset: -1, Size: b.live()}
	if t, ok := d.opt.Tolerance[l.Kernel]; ok {
		pos, near := t.near(want, got)
		if near {
			return nil
		}
		m.Offset = pos
	}
	for i := range want {
		if want[i] != got[i] {
			if m.Offset < 0 {
				m.Offset = int64(i)
			}
			m.Different++
		}
	}
	lo := m.Offset &^ 7
	hi := min(lo+8, b.live())
	m.Go, m.CUDA = slices.Clone(want[lo:hi]), slices.Clone(got[lo:hi])
	return m
}

const stagePurpose = "difftest staging"

// fetch enqueues copies of buffers that the CPU cannot see to pinned memory. d.mu is held, and the
// stage is nobody's.
func (d *Device) fetch(st cuda.Stream, bufs []*buffer) error {
	var room int64
	for _, b := range bufs {
		room += b.live()
	}
	if d.stage == nil || d.stage.Size() < room {
		if d.stage != nil {
			if err := d.stage.Free(); err != nil {
				return err
			}
			d.stage = nil
		}
		var err error
		if d.stage, err = d.gpu.Alloc(cuda.MemPinned, room+room/4+4096, stagePurpose); err != nil {
			return err
		}
	}
	pos := int64(0)
	for _, b := range bufs {
		if b.gpu.Bytes() == nil {
			if err := st.Copy(d.stage.Ptr()+cuda.DevicePtr(pos), b.ptr, b.live()); err != nil {
				return err
			}
		}
		pos += b.live()
	}
	return nil
}

// fetched returns what fetch has brought, as copies that may be changed until the next fetch.
func (d *Device) fetched(bufs []*buffer) [][]byte {
	var out [][]byte
	pos := int64(0)
	for _, b := range bufs {
		part := d.stage.Bytes()[pos:][:b.live():b.live()]
		if mem := b.gpu.Bytes(); mem != nil {
			copy(part, mem)
		}
		out = append(out, part)
		pos += b.live()
	}
	return out
}

// CheckAll compares the buffers that Options.Lazy leaves out of the launches.
func (d *Device) CheckAll() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var bufs []*buffer
	for _, b := range d.bufs {
		if !b.shared && slices.Contains(d.opt.Lazy, b.Purpose()) {
			b.pull()
			bufs = append(bufs, b)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := errors.Join(d.fetch(d.work, bufs), d.work.Synchronize(ctx)); err != nil {
		return err
	}
	got := d.fetched(bufs)
	for i, b := range bufs {
		if m := d.differ(Launch{Number: d.number, Kernel: "at the end"}, b,
			b.host.Bytes()[:b.live()], got[i]); m != nil {
			d.found = append(d.found, m)
			return m
		}
	}
	return nil
}

// Download reads n elements of device memory on any device, behind the work of st so far. T
// must hold no Go pointers.
func Download[T any](ctx context.Context, dev cuda.Device, st cuda.Stream, p cuda.DevicePtr,
	n int64) ([]T, error) {
	out := make([]T, n)
	var t T
	size := n * int64(unsafe.Sizeof(t))
	if size == 0 {
		return out, nil
	}
	stage, err := dev.Alloc(cuda.MemPinned, size, stagePurpose)
	if err != nil {
		return nil, err
	}
	if err = st.Copy(stage.Ptr(), p, size); err == nil {
		err = st.Synchronize(ctx)
	}
	if err == nil {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(out))), size), stage.Bytes())
	}
	return out, errors.Join(err, stage.Free())
}

// Upload writes values to device memory on any device, in order with the work of st.
func Upload[T any](ctx context.Context, dev cuda.Device, st cuda.Stream, p cuda.DevicePtr,
	v []T) error {
	var t T
	size := int64(len(v)) * int64(unsafe.Sizeof(t))
	if size == 0 {
		return nil
	}
	stage, err := dev.Alloc(cuda.MemPinned, size, stagePurpose)
	if err != nil {
		return err
	}
	copy(stage.Bytes(), unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), size))
	if err = st.Copy(p, stage.Ptr(), size); err == nil {
		err = st.Synchronize(ctx)
	}
	return errors.Join(err, stage.Free())
}

// NormaliseTables makes what the sampler's kernels leave in a hash table comparable. Which slot a
// node gets depends on which thread comes first, so the live entries are put in order of
// their nodes, stale ones go, and slots in the edge list become nodes.
func NormaliseTables() map[string]func([]byte, Memory) {
	m := map[string]func([]byte, Memory){}
	for _, k := range []string{"sample_begin", "sample_count", "sample_fill", "unique_count",
		"unique_assign"} {
		m[k] = func(params []byte, mem Memory) {
			normaliseTable(params, mem, k != "sample_begin" && k != "sample_count")
		}
	}
	m["unique_relabel"] = func(params []byte, mem Memory) { normaliseTable(params, mem, false) }
	for _, k := range []string{"labor_count", "labor_fill"} {
		m[k] = func(params []byte, mem Memory) {
			if len(params) == laborParamsSize {
				normaliseTable(params[:sampleParamsSize], mem, k == "labor_fill")
			}
		}
	}
	for _, k := range []string{"layer_weigh", "layer_rank", "layer_hist", "layer_pick",
		"layer_count", "layer_assign", "layer_relabel"} {
		m[k] = func(params []byte, mem Memory) {
			if len(params) != layerParamsSize {
				return
			}
			params = params[:sampleParamsSize]
			// From layer_assign on some slots of the edge list are indices; layer_relabel's result
			// has these.
			mixed := k == "layer_assign" || k == "layer_relabel"
			if mixed && hashedTable(params) {
				clear(edgeList(params, mem))
			}
			normaliseTable(params, mem, !mixed)
		}
	}
	return m
}

// Where the sampler's parameter block (graph.sampleParams, SampleParams of abi_data.h) has what
// normaliseTable needs.
const (
	offEdgeStart, offSrc, offVals, offKeys = 32, 40, 48, 56
	offSlots, offNumDst, offStamp          = 96, 120, 152
	sampleParamsSize                       = 208
	// graph.layerParams and graph.laborParams, which begin with the other
	layerParamsSize = sampleParamsSize + 128
	laborParamsSize = sampleParamsSize + 40
)

// layerScratch is the purpose of what layer-wise sampling works in (graph/ladies.go).
const layerScratch = "layer sampling"

func hashedTable(params []byte) bool { return binary.LittleEndian.Uint64(params[offKeys:]) != 0 }

// edgeList is the Src of a launch, by what its EdgeStart says; nil where it was not reached.
func edgeList(params []byte, mem Memory) []byte {
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(params[at:]) }
	numDst := int64(word(offNumDst))
	start := mem.Bytes(cuda.DevicePtr(word(offEdgeStart)), (numDst+1)*8)
	if start == nil {
		return nil
	}
	return mem.Bytes(cuda.DevicePtr(word(offSrc)),
		int64(binary.LittleEndian.Uint64(start[numDst*8:]))*4)
}

func normaliseTable(params []byte, mem Memory, slots bool) {
	if len(params) != sampleParamsSize {
		return // a block that this code does not know: its launches will be found different
	}
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(params[at:]) }
	if !hashedTable(params) {
		return // a direct table has its nodes for slots
	}
	n := int64(word(offSlots))
	keys, vals := mem.Bytes(cuda.DevicePtr(word(offKeys)), n*8),
		mem.Bytes(cuda.DevicePtr(word(offVals)), n*8)
	if keys == nil || vals == nil {
		return
	}
	const nodeMask = 1<<48 - 1
	stamp := uint64(binary.LittleEndian.Uint32(params[offStamp:])) & 0xffff
	key := func(s uint64) uint64 { return binary.LittleEndian.Uint64(keys[8*s:]) }
	src := edgeList(params, mem)
	// A layer's list is scratch: behind it are slots of the lists before it, which relabelling
	// leaves there.
	clear(mem.Rest(cuda.DevicePtr(word(offSrc)+uint64(len(src))), layerScratch))
	if slots {
		for e := range int64(len(src) / 4) {
			if s := uint64(binary.LittleEndian.Uint32(src[4*e:])); s < uint64(n) {
				binary.LittleEndian.PutUint32(src[4*e:], uint32(key(s)&nodeMask))
			}
		}
	}
	type entry struct{ node, val uint64 }
	var live []entry
	for s := range uint64(n) {
		if k := key(s); k>>48 == stamp {
			live = append(live, entry{k & nodeMask, binary.LittleEndian.Uint64(vals[8*s:])})
		}
	}
	slices.SortFunc(live, func(a, b entry) int { return int(int64(a.node) - int64(b.node)) })
	clear(keys)
	clear(vals)
	for i, e := range live {
		binary.LittleEndian.PutUint64(keys[8*i:], e.node)
		binary.LittleEndian.PutUint64(vals[8*i:], e.val)
	}
}
