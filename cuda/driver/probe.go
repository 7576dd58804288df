package driver

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"helios/cuda/kernels"
	"helios/internal/errs"
	"helios/internal/probe"
)

// Capabilities holds what a GPU and its driver can do beyond what every device does.
type Capabilities struct {
	GreenContexts bool // SM budgets are kept by the hardware
	// budgets come in steps of so many SMs; 0 without green contexts, and in a Report
	SMGranularity int
	Priorities    int  // levels of stream priority; 0 in a Report
	DMABuf        bool // device memory can be exported to other drivers
	DirectRDMA    bool // other devices can reach its memory
	WritesOrdered bool // and their writes are seen in order by kernels of this GPU at least
	GrowingMemory bool // addresses can be reserved without memory (virtual memory management)
	SharedMemory  bool // memory of that kind goes to other processes as a file descriptor
	Graphs        bool // many launches can be one

	ComputeCapability int // times 10: 80 is 8.0
	// The factors of peaks; 0 where the driver has none (CUDA 13 has no clock rates).
	ClockKHz int
}

// GPU is one device of a Report.
type GPU struct {
	Index             int
	Name              string
	PCI               string // bus address
	SMs               int
	MemTotal          int64
	ComputeCapability int // times 10: 80 is 8.0
	Capabilities      Capabilities
	Findings          []probe.Finding
}

// Report holds what Probe found.
type Report struct {
	Library string // path
	CUDA    string // version that the driver supports
	GPUs    []GPU
	Symbols []string // optional calls that the library lacks
}

// Probe looks at the driver and its devices and makes no context. Its error names the part that is
// missing for any of them to be used, and the next step.
func Probe(opt Options) (Report, error) {
	a, err := openLibrary(libraryPath(opt.Library))
	if err != nil {
		return Report{}, err
	}
	rep := Report{Library: a.describe()}
	for _, s := range optionalSymbols {
		if !a.has(s) {
			rep.Symbols = append(rep.Symbols, s)
		}
	}
	version, count, err := start(a)
	if err != nil {
		return rep, err
	}
	rep.CUDA = versionText(version)
	list, err := kernels.Modules()
	if err != nil {
		return rep, err
	}
	for i := range count {
		d, r := a.DeviceGet(i)
		if r != success {
			return rep, fmt.Errorf("CUDA device %d: %w", i, callError(a, "cuDeviceGet", r))
		}
		g, err := describe(a, i, d, version)
		if err != nil {
			return rep, err
		}
		g.Findings = findings(a, g, usable(a, g, version, list))
		rep.GPUs = append(rep.GPUs, g)
	}
	return rep, nil
}

// UUIDs returns the names that NVIDIA's tools and CUDA_VISIBLE_DEVICES have for the devices, by
// number; an empty one where the driver has none.
func UUIDs(opt Options) ([]string, error) {
	a, err := openLibrary(libraryPath(opt.Library))
	if err != nil {
		return nil, err
	}
	_, count, err := start(a)
	if err != nil {
		return nil, err
	}
	all := make([]string, count)
	for i := range all {
		d, r := a.DeviceGet(i)
		if r != success {
			return nil, fmt.Errorf("CUDA device %d: %w", i, callError(a, "cuDeviceGet", r))
		}
		if !a.has("cuDeviceGetUuid") {
			continue
		}
		if id, r := a.DeviceGetUuid(d); r == success {
			all[i] = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
		}
	}
	return all, nil
}

// The driver's variables that cuInit reads and we set, where the user has not.
const (
	// When kernels are loaded. With lazy loading, the default since CUDA 12.2, a first launch may
	// wait for all kernels of the context; ours wait for each other (CUDA programming guide, Lazy
	// Loading).
	envLoading, ourLoading = "CUDA_MODULE_LOADING", "EAGER"
	// How many hardware queues the streams are spread over, 1 to 32; the default is 8 (CUDA
	// programming guide, CUDA Environment Variables). A run has a stream for each operator and
	// slot, and work that shares a queue with a complete kernel may start when that ends.
	envConnections, ourConnections = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
)

// setDriverEnv sets them. Go's cgo runtime, and purego's in its place, hand a variable on to C. It
// fails for bad names only.
func setDriverEnv() {
	for _, v := range [][2]string{{envLoading, ourLoading}, {envConnections, ourConnections}} {
		if os.Getenv(v[0]) == "" {
			_ = os.Setenv(v[0], v[1])
		}
	}
}

// connections is the finding about hardware queues, after cuInit.
func connections() probe.Finding {
	f := probe.Finding{Name: "hardware queues", Answer: probe.There,
		Detail: fmt.Sprintf("%s=%s", envConnections, os.Getenv(envConnections))}
	n, err := strconv.Atoi(os.Getenv(envConnections))
	limit, _ := strconv.Atoi(ourConnections)
	if err != nil || n < limit {
		f.Answer = probe.NotThere
		f.Detail = fmt.Sprintf("%s: streams beyond so many share a queue, and work may wait there for another stream's kernel", f.Detail)
		f.Next = fmt.Sprintf("unset %s in the environment, or set it to %s", envConnections, ourConnections)
	}
	return f
}

// start initialises the library and counts its devices; none is an error.
func start(a api) (version, count int, err error) {
	setDriverEnv()
	if r := a.Init(0); r != success {
		e := callError(a, "cuInit", r)
		next := "see \"nvidia-smi\" and \"dmesg\""
		switch r {
		case errNoDevice:
			return 0, 0, errs.With(errs.Capability,
				fmt.Errorf(
					"no CUDA device: the driver %s is there and finds no GPU (%w); check CUDA_VISIBLE_DEVICES and \"nvidia-smi\"",
					a.describe(), e))
		case errDriverMismatch:
			next = "libcuda and the kernel module are of different versions: reboot, or load the new module"
		case errSystemNotReady:
			next = "start nvidia-fabricmanager, which GPUs with NVSwitch need"
		}
		return 0, 0, errs.With(errs.Capability,
			fmt.Errorf("the CUDA driver %s does not start: %w; %s", a.describe(), e, next))
	}
	version, r := a.DriverGetVersion()
	if r != success {
		return 0, 0, errs.With(errs.Capability, callError(a, "cuDriverGetVersion", r))
	}
	count, r = a.DeviceGetCount()
	if r != success {
		return 0, 0, errs.With(errs.Capability, callError(a, "cuDeviceGetCount", r))
	}
	if count == 0 {
		return 0, 0, errs.New(errs.Capability,
			"no CUDA device: the driver %s is there and finds no GPU; check CUDA_VISIBLE_DEVICES and \"nvidia-smi\"",
			a.describe())
	}
	return version, count, nil
}

func howMany(n int) string {
	if n == 1 {
		return "this machine has one, cuda:0"
	}
	return fmt.Sprintf("this machine has %d, cuda:0 to cuda:%d", n, n-1)
}

// describe reads what a device is. It needs no context.
func describe(a api, index int, d ordinal, version int) (GPU, error) {
	g := GPU{Index: index}
	var err error
	fail := func(call string, r result) {
		if r != success && err == nil {
			err = errs.With(errs.Capability, fmt.Errorf("CUDA device %d: %w", index,
				callError(a, call, r)))
		}
	}
	var r result
	g.Name, r = a.DeviceGetName(d)
	fail("cuDeviceGetName", r)
	g.PCI, r = a.DeviceGetPCIBusId(d)
	fail("cuDeviceGetPCIBusId", r)
	g.MemTotal, r = a.DeviceTotalMem(d)
	fail("cuDeviceTotalMem_v2", r)
	get := func(attr attribute) int {
		v, r := a.DeviceGetAttribute(attr, d)
		fail("cuDeviceGetAttribute", r)
		return v
	}
	// A driver that does not know an attribute does not have what it is about.
	may := func(attr attribute) int {
		v, r := a.DeviceGetAttribute(attr, d)
		if r != success {
			return 0
		}
		return v
	}
	g.SMs = get(attrMultiprocessors)
	g.ComputeCapability = 10*get(attrMajor) + get(attrMinor)
	green := version >= 12050
	for _, s := range optionalSymbols {
		if strings.Contains(s, "Green") || strings.Contains(s, "DevResource") ||
			strings.Contains(s, "SmResource") || strings.Contains(s, "Library") {
			green = green && a.has(s)
		}
	}
	g.Capabilities = Capabilities{
		GreenContexts: green,
		DMABuf:        a.has("cuMemGetHandleForAddressRange") && may(attrDMABuf) == 1,
		DirectRDMA:    may(attrDirectRDMA) == 1,
		WritesOrdered: may(attrRDMAOrdering) >= 100, // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
		GrowingMemory: all(a, "cuMemGetAllocationGranularity", "cuMemAddressReserve",
			"cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap",
			"cuMemSetAccess") && may(attrVMM) == 1,
		SharedMemory: a.has("cuMemExportToShareableHandle") && may(attrHandleFD) == 1,
		Graphs: all(a, "cuGraphCreate", "cuGraphDestroy", "cuGraphAddKernelNode_v2",
			"cuGraphInstantiateWithFlags",
			"cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuGraphExecDestroy"),
		ComputeCapability: g.ComputeCapability,
		ClockKHz:          may(attrClockRate),
	}
	return g, err
}

func all(a api, symbols ...string) bool {
	for _, s := range symbols {
		if !a.has(s) {
			return false
		}
	}
	return true
}

// usable is the reason for which a device cannot run the kernels of this binary, or nil.
func usable(a api, g GPU, version int, list []kernels.Module) error {
	name := fmt.Sprintf("device cuda:%d (%s)", g.Index, g.Name)
	d, r := a.DeviceGet(g.Index)
	if r != success {
		return errs.With(errs.Capability,
			fmt.Errorf("%s: %w", name, callError(a, "cuDeviceGet", r)))
	}
	for _, need := range []struct {
		attr attribute
		what string
	}{{attrUnifiedAddressing, "one address space for CPU and GPU"},
		{attrCanMapHost, "mapped CPU memory"}, {attrHostRegister, "registered CPU memory"},
		{attrHostPointer, "CPU addresses for registered memory"}} {
		v, r := a.DeviceGetAttribute(need.attr, d)
		if r != success {
			return errs.With(errs.Capability,
				fmt.Errorf("%s: %w", name, callError(a, "cuDeviceGetAttribute", r)))
		}
		if v == 0 && need.attr == attrHostRegister {
			return errConfidential(name)
		}
		if v == 0 {
			return errs.New(errs.Capability, "%s lacks %s, which Helios needs; use {device} host",
				name, need.what)
		}
	}
	const prohibited = 2 // CU_COMPUTEMODE_PROHIBITED
	if v, r := a.DeviceGetAttribute(attrComputeMode, d); r == success && v == prohibited {
		return errs.New(errs.Capability,
			"%s is closed to all processes (compute mode \"prohibited\"); open it with \"nvidia-smi -c 0\"",
			name)
	}
	// Modules for newer GPUs (tensor cores) have kernels that others do the work of; Kernel refuses
	// those.
	least := math.MaxInt
	for _, m := range list {
		least = min(least, m.SM)
	}
	for _, m := range list {
		if m.SM == least && g.ComputeCapability < m.SM {
			return errs.New(errs.Capability,
				"%s is too old: it has compute capability %d.%d, and kernel module %s needs %d.%d; use a newer GPU or {device} host",
				name, g.ComputeCapability/10, g.ComputeCapability%10, m.Name, m.SM/10, m.SM%10)
		}
		for _, v := range cudaFor {
			if v.isa == m.ISA && version < v.cuda {
				return errs.New(errs.Capability,
					"%s: its driver is too old: it supports CUDA %s, and kernel module %s is in PTX %d.%d; update NVIDIA's driver to %s, or use {device} host",
					name, versionText(version), m.Name, m.ISA/10, m.ISA%10, driverFor(m.ISA))
			}
		}
	}
	return nil
}

// errConfidential is the refusal of a GPU that cannot use memory of ours: queues, doorbells and
// rows are such. "malloc + cudaHostRegister() is a forbidden API because the GPU DMAs cannot
// directly access VM memory when the CPUs have isolated it" (NVIDIA's forum, 261009).
func errConfidential(name string) error {
	return errs.New(errs.Capability,
		"%s cannot use registered CPU memory: confidential computing is on, which \"nvidia-smi conf-compute -f\" shows, or a hypervisor forbids it; set the GPU's mode to off (\"set-cc-mode\" of NVIDIA's nvidia_gpu_tools.py), or use {device} host",
		name)
}

// findings are the report's lines for one device.
func findings(a api, g GPU, unusable error) []probe.Finding {
	yes := func(name string, there bool, detail, missing, next string) probe.Finding {
		if there {
			return probe.Finding{Name: name, Answer: probe.There, Detail: detail}
		}
		return probe.Finding{Name: name, Answer: probe.NotThere, Detail: missing, Next: next}
	}
	c := g.Capabilities
	out := []probe.Finding{
		yes("runs the kernels", unusable == nil, "",
			errs.Textf("%v", unusable).Spell(errs.Key.Keyword), ""),
		yes("SM budgets", c.GreenContexts, "green contexts",
			"no green contexts with streams: budgets only choose grid sizes",
			"NVIDIA's driver 555 (CUDA 12.5) or later"),
		codeFinding(g.ComputeCapability),
		connections(),
		yes("growing memory", c.GrowingMemory, "virtual memory management",
			"buffers that grow take all of their memory at once", "a driver of CUDA 10.2 or later"),
		yes("shared memory", c.GrowingMemory && c.SharedMemory, "files of cuMemExportToShareableHandle",
			"clients of the daemon get mini-batches through CPU memory", "a driver of CUDA 10.2 or later"),
		yes("graphs", c.Graphs, "", "each kernel of a step is a launch of its own",
			"a driver of CUDA 12.0 or later"),
		yes("dma-buf export", c.DMABuf, "", "its memory cannot be mapped for an SSD's DMA",
			"the open kernel modules of driver 515 or later on Linux 5.12 or later"),
		yes("GPUDirect RDMA", c.DirectRDMA, "", "other devices cannot reach its memory",
			"a data-centre or workstation GPU"),
	}
	if c.DirectRDMA {
		out = append(out, yes("ordered peer writes", c.WritesOrdered, "",
			"writes of SSDs need a flush before kernels read", ""))
	}
	// Registering I/O memory depends on rights and mapping; only a real try shows it.
	return append(out, probe.Finding{Name: "doorbells from kernels", Answer: probe.Unknown,
		Detail: "only registering an SSD's registers tells: a run does that with SSDs bound by VFIO (memory-rung pinned)"})
}
