// Package hardware describes machines for the virtual clock: what a GPU, its links, its SSDs and
// its CPU take for what we ask of them. Every figure has its source, or the reason of its
// assumption; none was fitted to a result that the simulation is to predict.
package hardware

import (
	"fmt"
	"math"
	"strings"

	"helios/internal/errs"
	"helios/internal/ssdmodel"
)

// Figure is a number and where it comes from: a paper, a data sheet, a measurement, an argument
// from our own kernels, or "assumed: …".
type Figure struct {
	Value  float64 `yaml:"value"`
	Source string  `yaml:"source"`
}

// Int is the value as a whole number.
func (f Figure) Int() int { return int(math.Round(f.Value)) }

// NS is the value of a figure in nanoseconds as a whole number.
func (f Figure) NS() int64 { return int64(math.Round(f.Value)) }

// Cost holds what a step of an I/O kernel takes a warp: dependent ways to the kernels' state (host
// memory, or GPU memory where the state lies there), dependent ways to GPU memory, and the rest.
type Cost struct {
	StateWays  float64 `yaml:"state_ways"`
	MemoryWays float64 `yaml:"memory_ways"`
	NS         float64 `yaml:"ns"`
	Source     string  `yaml:"source"`
}

// Profile is one machine.
type Profile struct {
	Base  string `yaml:"base"` // profile whose figures these replace in part; "": none
	Name  string `yaml:"name"`
	About string `yaml:"about"`
	GPU   GPU    `yaml:"gpu"`
	PCIe  PCIe   `yaml:"pcie"`
	CPU   CPU    `yaml:"cpu"`
	SSDs  SSDs   `yaml:"ssds"`
}

// OverFiles reports whether files play the SSDs, and the CPU the GPU.
func (p *Profile) OverFiles() bool { return p.OneMemory() && p.SSDs.Measured != nil }

// OneMemory reports whether the device has no memory of its own, so that both tiers are the CPU's.
func (p *Profile) OneMemory() bool { return p.PCIe.PeerGBs.Value == 0 }

// GPU is the device whose kernels drive the SSDs.
type GPU struct {
	Name       string `yaml:"name"`
	SMs        Figure `yaml:"sms"`
	WarpsPerSM Figure `yaml:"warps_per_sm"` // resident
	// WarpSlots is the number of warps that run at once; 0: all resident ones. The host device runs
	// one a worker.
	WarpSlots    Figure `yaml:"warp_slots"`
	MemoryGiB    Figure `yaml:"memory_gib"`
	HBMGBs       Figure `yaml:"hbm_gbs"`       // GB/s that a copy reaches
	HBMSMs       Figure `yaml:"hbm_sms"`       // SMs that are enough to reach it
	MemoryWayNS  Figure `yaml:"memory_way_ns"` // a dependent load or atomic in GPU memory
	HostWayNS    Figure `yaml:"host_way_ns"`   // the same in the CPU's memory
	AtomicGS     Figure `yaml:"atomic_gs"`     // atomics a ns on different words of GPU memory
	FP32TFLOPS   Figure `yaml:"fp32_tflops"`
	TensorTFLOPS Figure `yaml:"tensor_tflops"` // TF32
	// from the call until an I/O kernel's first access reaches an SSD, on an idle stream
	LaunchNS Figure `yaml:"launch_ns"`
	// from the call until any other kernel runs, on an idle stream
	OpLaunchNS Figure `yaml:"op_launch_ns"`
	GapNS      Figure `yaml:"gap_ns"` // from a kernel's end until what waits for it runs
	// from the last warp's end until the host or a stream knows
	TeardownNS Figure `yaml:"teardown_ns"`
	IO         IO     `yaml:"io"`
	Ops        Ops    `yaml:"ops"`
}

// IO are the I/O kernels' costs for a warp.
type IO struct {
	State string `yaml:"state"` // where queue state, commands and sets lie: host or gpu
	Push  Cost   `yaml:"push"`  // submit: one set's share goes to a queue's pending list
	// once for each time that a queue is refilled, before its SQEs
	Refill    Cost `yaml:"refill"`
	RefillEnd Cost `yaml:"refill_end"` // and after them
	Batch     Cost `yaml:"batch"`      // for each 32 SQEs of that, or part
	Each      Cost `yaml:"each"`       // for each SQE
	Ring      Cost `yaml:"ring"`       // fence and SQ doorbell
	Look      Cost `yaml:"look"`       // complete: up to the completion entries of a queue
	Check     Cost `yaml:"check"`      // whether rows of the set are left at the queue
	Idle      Cost `yaml:"idle"`       // deadlines of a queue, in a round that found nothing
	// once for each sweep that found something, beside the look
	Retire     Cost   `yaml:"retire"`
	RetireEach Cost   `yaml:"retire_each"` // for each CQE of that
	PauseMinNS Figure `yaml:"pause_min_ns"`
	PauseMaxNS Figure `yaml:"pause_max_ns"` // between looks at queues that have nothing
	// WakeNS is the time in which a warp that waits outside its slot comes back; 0: it polls.
	WakeNS     Figure `yaml:"wake_ns"`
	SyncTake   Cost   `yaml:"sync_take"`   // read_sync: a CID and a row
	SyncLock   Cost   `yaml:"sync_lock"`   // holding the submission side up to the doorbell
	SyncUnlock Cost   `yaml:"sync_unlock"` // and from there on
	SyncScan   Cost   `yaml:"sync_scan"`   // a sweep that finds nothing
	SyncReap   Cost   `yaml:"sync_reap"`   // holding the completion side for one that does
	SyncEnd    Cost   `yaml:"sync_end"`    // seeing the own completion and giving the CID back
	// Serve is a software controller's time for a command, in the warps' slots; ServeGBs is how
	// fast it moves the data. SSDs that are hardware take none.
	Serve    Cost   `yaml:"serve"`
	ServeGBs Figure `yaml:"serve_gbs"`
	CopyGBs  Figure `yaml:"copy_gbs"` // staged rows, one warp
}

// Ops are the other operators of a training step.
type Ops struct {
	Sample      Op `yaml:"sample"`      // item: a sampled edge
	Lookup      Op `yaml:"lookup"`      // item: a row looked up in the cache's index
	Gather      Op `yaml:"gather"`      // item: a row copied within GPU memory
	GEMM        Op `yaml:"gemm"`        // flops
	Elementwise Op `yaml:"elementwise"` // bytes
	// Directory is the cost of the kernels that keep a dynamic tier's directory in sets. Item: an
	// instruction of a warp; 0 ns: there are no such kernels, and the CPU keeps the directory.
	Directory Op `yaml:"directory"`
}

// Op is the cost of an operator on the GPU.
type Op struct {
	ItemNS Figure `yaml:"item_ns"` // time of one SM for an item, at full occupancy
	Memory Figure `yaml:"memory"`  // share of hbm_gbs that its accesses reach
	Flops  Figure `yaml:"flops"`   // share of tensor_tflops
}

// Link is one direction of a PCIe link.
type Link struct {
	RawGBs     Figure `yaml:"raw_gbs"`      // after line coding
	MaxPayload Figure `yaml:"max_payload"`  // bytes of data in a packet
	PacketOver Figure `yaml:"packet_bytes"` // bytes around them
	// data rate that the path on this platform does not pass; 0: none known
	CeilingGBs Figure `yaml:"ceiling_gbs"`
}

// PCIe are the links and what it takes to cross them.
type PCIe struct {
	GPU     Link   `yaml:"gpu"`      // into the GPU
	SSD     Link   `yaml:"ssd"`      // out of each SSD
	UVAGBs  Figure `yaml:"uva_gbs"`  // kernels reading the CPU's memory in lines
	CopyGBs Figure `yaml:"copy_gbs"` // copy engine, CPU memory to GPU memory
	CopyNS  Figure `yaml:"copy_ns"`  // to start one copy
	// PeerGBs is the rate of a long copy between two GPUs, through the CPU's memory; 0: devices
	// have one memory, and share their cores.
	PeerGBs    Figure `yaml:"peer_gbs"`
	DoorbellNS Figure `yaml:"doorbell_ns"` // from the kernel's store until the SSD sees it
	FetchNS    Figure `yaml:"fetch_ns"`    // the SSD's read of SQEs from where the queue is
	// IncludedNS holds what of doorbell and fetch the SSD models' latency already holds: data
	// sheets and fio measure at the host.
	IncludedNS Figure `yaml:"included_ns"`
}

// CPU is the host's side.
type CPU struct {
	Cores     Figure `yaml:"cores"`
	MemoryGBs Figure `yaml:"memory_gbs"`
	GatherGBs Figure `yaml:"gather_gbs"` // one core copying rows to their place
	UringNS   Figure `yaml:"uring_ns"`   // CPU time of one read through io_uring, O_DIRECT
	FaultNS   Figure `yaml:"fault_ns"`   // CPU time of one page fault that reads
	// DirectoryNS holds what a dynamic tier's directory in queues takes one core for a row that is
	// looked up, SetsNS what one in sets that the CPU keeps takes the cores, which divide it among
	// them. AnnounceNS is for a row that either hears of before.
	DirectoryNS Figure `yaml:"directory_ns"`
	SetsNS      Figure `yaml:"sets_ns"`
	AnnounceNS  Figure `yaml:"announce_ns"`
	// Planned tiers: InspectNS is what finding the next access of a row takes one core for an
	// access, which the cores divide among them, and InspectScanNS what each of them takes to read
	// it. ChangeNS is what finding the changes then takes one core for an access.
	InspectNS     Figure `yaml:"inspect_ns"`
	InspectScanNS Figure `yaml:"inspect_scan_ns"`
	ChangeNS      Figure `yaml:"change_ns"`
	// InduceNS is the time of one core to induce an edge of a mega-batch's topology, static nodes'
	// edges included; the cores divide the edges among them.
	InduceNS Figure `yaml:"induce_ns"`
	// StoredNS is the time of one core to sample an edge whose neighbour list is on storage, its
	// read aside; the cores divide the edges among them.
	StoredNS Figure `yaml:"stored_ns"`
	// what one such fault reads at random access (MADV_RANDOM: a page)
	ReadAheadKB Figure `yaml:"read_ahead_kb"`
}

// SSDs are the drives: Count of Model, and after them those of each group of More. Rows are striped
// over all of them evenly, so the slowest bounds what they read together.
type SSDs struct {
	Model string     `yaml:"model"` // of internal/ssdmodel, or a file
	Count Figure     `yaml:"count"`
	More  []SSDGroup `yaml:"more"`
	// Measured takes the place of all models; nil: they are as named.
	Measured *ssdmodel.Model `yaml:"-"`
}

// SSDGroup is SSDs of one model beside the first ones.
type SSDGroup struct {
	Model string `yaml:"model"`
	Count Figure `yaml:"count"`
}

// MaxSSDs bounds a machine.
const MaxSSDs = 1024

// Models returns the models of n SSDs (0: of all there are), those of the first group first. Where
// n is more than there are the list begins anew, so that a machine grows as it is.
func (s *SSDs) Models(n int) []string {
	var all []string
	for _, g := range append([]SSDGroup{{s.Model, s.Count}}, s.More...) {
		for range g.Count.Int() {
			all = append(all, g.Model)
		}
	}
	if n == 0 {
		return all
	}
	out := make([]string, n)
	for i := range out {
		out[i] = all[i%len(all)]
	}
	return out
}

// Rate is the data rate in bytes/s that a link moves in pieces of n bytes.
func (l *Link) Rate(n int64) float64 {
	if n <= 0 {
		return 0
	}
	return float64(n) / l.seconds(n)
}

func (l *Link) seconds(n int64) float64 {
	t := 0.0
	if l.RawGBs.Value > 0 {
		packets := math.Ceil(float64(n) / l.MaxPayload.Value)
		t = (float64(n) + packets*l.PacketOver.Value) / (l.RawGBs.Value * 1e9)
	}
	if l.CeilingGBs.Value > 0 {
		t = max(t, float64(n)/(l.CeilingGBs.Value*1e9))
	}
	return t
}

// WireBytes returns how many bytes at RawGBs take as long as n bytes of data do on the link.
func (l *Link) WireBytes(n int64) int64 {
	return int64(math.Ceil(l.seconds(n) * l.RawGBs.Value * 1e9))
}

// Time is a cost in ns, with the kernels' state where the profile has it.
func (g *GPU) Time(c Cost) float64 { return g.TimeAt(c, g.IO.State) }

// TimeAt is a cost in ns with the kernels' state in "host" or "gpu" memory.
func (g *GPU) TimeAt(c Cost, state string) float64 {
	way := g.HostWayNS.Value
	if state == StateGPU {
		way = g.MemoryWayNS.Value
	}
	return c.StateWays*way + c.MemoryWays*g.MemoryWayNS.Value + c.NS
}

// Where the I/O kernels keep their state.
const (
	StateHost = "host"
	StateGPU  = "gpu"
)

// Work holds what a kernel is given.
type Work struct {
	Items int64   // of its operator
	Bytes int64   // of GPU memory read and written
	Flops float64 // multiply-adds count twice
	// Warps that have so many trips to GPU memory one after the other; Resident of them are on an
	// SM at a time, 0: as many as it holds.
	Warps, Resident int64
	Trips           float64
	Atomics         float64
}

// KernelNS returns how long an operator runs on sms SMs (0: all), launch not included: the slowest
// of its items, its memory traffic, its arithmetic, its atomics and what its warps wait for one
// after the other.
func (g *GPU) KernelNS(op Op, w Work, sms int) int64 {
	all := g.SMs.Value
	n := all
	if sms > 0 {
		n = min(float64(sms), all)
	}
	t := float64(w.Items) * op.ItemNS.Value / n
	if w.Bytes > 0 && op.Memory.Value > 0 {
		share := min(n/max(g.HBMSMs.Value, 1), 1)
		t = max(t, float64(w.Bytes)/(g.HBMGBs.Value*op.Memory.Value*share))
	}
	if w.Flops > 0 && op.Flops.Value > 0 {
		t = max(t, w.Flops/(g.TensorTFLOPS.Value*1e3*op.Flops.Value*n/all))
	}
	if w.Atomics > 0 && g.AtomicGS.Value > 0 {
		t = max(t, w.Atomics/g.AtomicGS.Value)
	}
	if w.Trips > 0 {
		held := g.WarpsPerSM.Value
		if w.Resident > 0 {
			held = min(held, float64(w.Resident))
		}
		waves := math.Ceil(float64(max(w.Warps, 1)) / (n * held))
		t = max(t, waves*w.Trips*g.MemoryWayNS.Value)
	}
	return int64(math.Ceil(t))
}

// KeepsDirectory reports whether kernels keep a dynamic tier's directory in sets.
func (g *GPU) KeepsDirectory() bool { return g.Ops.Directory.ItemNS.Value > 0 }

// bounds are the least, but for 0, and the most of figures by the ends of their names: beyond any
// machine, and so that sums and products of them stay far inside 64 bits.
var bounds = []struct {
	end          string
	least, limit float64
}{
	{"_gbs", 1e-3, 1e6}, {"_tflops", 1e-6, 1e6}, {"_gib", 1e-3, 1e6}, {"atomic_gs", 1e-6, 1e6},
	{"sms", 1, 1e5}, {"warps_per_sm", 1, 1e4}, {"warp_slots", 1, 1e9}, {"cores", 1, 1e5},
	{"count", 1, MaxSSDs}, {"max_payload", 16, 1e6}, {"packet_bytes", 1, 1e4},
	{"read_ahead_kb", 1e-3, 1e6}, {".memory", 1e-6, 10}, {".flops", 1e-6, 10}, {"_ways", 1e-6, 1e6},
	{"ns", 1e-6, 1e9},
}

// bounded reports figures that are out of their bounds.
func bounded(say func(format string, args ...any), path string, v float64) {
	for _, b := range bounds {
		if strings.HasSuffix(path, b.end) {
			if v != 0 && !(v >= b.least && v <= b.limit) {
				say("%s is %v: give 0 or more, from %v to %v", path, v, b.least, b.limit)
			}
			return
		}
	}
	panic("hardware: " + path + " has no bounds")
}

// check reports missing and impossible figures.
func (p *Profile) check() error {
	if p.Name == "" {
		return errs.New(errs.Usage, "hardware profile without a name")
	}
	var bad []string
	say := func(format string, args ...any) { bad = append(bad, fmt.Sprintf(format, args...)) }
	p.checkFigures(say)
	p.checkSSDs(say)
	if s := p.GPU.IO.State; s != StateHost && s != StateGPU {
		say("gpu.io.state is %q: host or gpu", s)
	}
	if p.GPU.IO.PauseMaxNS.Value < p.GPU.IO.PauseMinNS.Value {
		say("gpu.io.pause_max_ns is below pause_min_ns")
	}
	if len(bad) == 0 {
		return nil
	}
	more := ""
	if len(bad) > 4 {
		bad, more = bad[:4], fmt.Sprintf("; and %d more", len(bad)-4)
	}
	return errs.New(errs.Usage, "hardware profile %s: %s%s", p.Name, strings.Join(bad, "; "), more)
}

// checkFigures reports figures without a source, out of bounds, or missing.
func (p *Profile) checkFigures(say func(format string, args ...any)) {
	each(p, func(path string, f *Figure, c *Cost) {
		source := ""
		if f != nil {
			source = f.Source
			bounded(say, path, f.Value)
		} else {
			source = c.Source
			if min(c.StateWays, c.MemoryWays, c.NS) < 0 {
				say("%s has a negative part", path)
			}
			bounded(say, path+".state_ways", c.StateWays)
			bounded(say, path+".memory_ways", c.MemoryWays)
			bounded(say, path+".ns", c.NS)
		}
		if strings.TrimSpace(source) == "" {
			say("%s has no source: say where it comes from, or \"assumed: why\"", path)
		}
	})
	for _, need := range []struct {
		path string
		f    Figure
		min  float64
	}{
		{"gpu.sms", p.GPU.SMs, 1}, {"gpu.warps_per_sm", p.GPU.WarpsPerSM, 1},
		{"gpu.hbm_gbs", p.GPU.HBMGBs, 0.001}, {"gpu.hbm_sms", p.GPU.HBMSMs, 1},
		{"gpu.tensor_tflops", p.GPU.TensorTFLOPS, 1e-6}, {"cpu.cores", p.CPU.Cores, 1},
		{"cpu.memory_gbs", p.CPU.MemoryGBs, 0.001}, {"cpu.gather_gbs", p.CPU.GatherGBs, 0.001},
		{"pcie.gpu.raw_gbs", p.PCIe.GPU.RawGBs, 0.001}, {"pcie.ssd.raw_gbs", p.PCIe.SSD.RawGBs,
			0.001}, {"pcie.gpu.max_payload", p.PCIe.GPU.MaxPayload, 16},
		{"pcie.ssd.max_payload", p.PCIe.SSD.MaxPayload, 16}, {"pcie.copy_gbs", p.PCIe.CopyGBs,
			0.001}, {"pcie.uva_gbs", p.PCIe.UVAGBs, 0.001}, {"gpu.io.copy_gbs",
			p.GPU.IO.CopyGBs, 0.001},
		{"ssds.count", p.SSDs.Count, 1}, {"cpu.directory_ns", p.CPU.DirectoryNS, 0.001},
		{"cpu.sets_ns", p.CPU.SetsNS, 0.001}, {"gpu.atomic_gs", p.GPU.AtomicGS, 1e-6},
	} {
		if need.f.Value < need.min {
			say("%s is %v: give at least %v", need.path, need.f.Value, need.min)
		}
	}
}

func (p *Profile) checkSSDs(say func(format string, args ...any)) {
	if p.SSDs.Model == "" {
		say("ssds.model is missing: name an SSD model")
	}
	ssds := p.SSDs.Count.Value
	for i, g := range p.SSDs.More {
		path := fmt.Sprintf("ssds.more[%d]", i)
		switch c := g.Count; {
		case g.Model == "":
			say("%s.model is missing: name an SSD model", path)
		case !(c.Value >= 1 && c.Value <= MaxSSDs):
			say("%s.count is %v: give 1 to %d", path, c.Value, MaxSSDs)
		case strings.TrimSpace(c.Source) == "":
			say("%s.count has no source: say where it comes from, or \"assumed: why\"", path)
		}
		ssds += g.Count.Value
	}
	if ssds > MaxSSDs {
		say("ssds has %v: give at most %d", ssds, MaxSSDs)
	}
}
