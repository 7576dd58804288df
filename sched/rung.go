package sched

import (
	"fmt"

	"helios/cuda"
	"helios/dataset"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/nvme"
)

// Memory rungs: where queues and data are, as results name them.
const (
	rungPinned = "pinned" // in locked host memory that the SSDs reach by the IOMMU
	rungProxy  = "proxy"  // software controllers, or reads through the kernel
	rungMixed  = "mixed"  // some of each
)

// RunInfo says how a run got at its rows and computed.
type RunInfo struct {
	MemoryRung string `json:"memory_rung"`
	// MemoryRungTried is why no better rung was taken, the best first.
	MemoryRungTried []gpuio.RungTried `json:"memory_rung_tried,omitempty"`
	Precision       string            `json:"precision"` // of products
	BLAS            string            `json:"blas"`      // the library that computed them; "off": our kernels
	// GPUCacheShrunkBytes is what the GPU tier gave back because the device's memory ran out.
	GPUCacheShrunkBytes int64 `json:"gpu_cache_shrunk_bytes"`
	// Policy of the GPU tier; with another than "static" its lines are CacheLineBytes long, PolicyBytes is what the policy
	// keeps of them in the CPU's memory, and Window how many coming batches' lines stay.
	Policy         string `json:"policy"`
	CacheLineBytes int64  `json:"cache_line_bytes,omitempty"`
	PolicyBytes    int64  `json:"policy_bytes,omitempty"`
	Window         int    `json:"window"`
	// Accumulator is absent where reads are not merged.
	Accumulator *AccumulatorInfo `json:"accumulator,omitempty"`
	Sampler     string           `json:"sampler"`
	Topology    string           `json:"topology"`
	// TopologyStorage says how a topology on storage is held; absent for one in memory.
	TopologyStorage *graph.StorageInfo `json:"topology_storage,omitempty"`
	// Seal says what was checked of the dataset's files; absent in a modelled run.
	Seal *dataset.SealInfo `json:"seal,omitempty"`
	// Hotness is what placed the static tiers; absent where nothing had to.
	Hotness *HotnessInfo `json:"hotness,omitempty"`
	// Tuned is what the tuner measured and chose; absent without it.
	Tuned *TuneResult `json:"tuned,omitempty"`
}

// openMemory chooses where the I/O kernels' queues and data are.
func (e *engine) openMemory() (err error) {
	want := e.cfg.MemoryRung
	if !e.cfg.queued() || !e.onGPU() && (want == "" || want == gpuio.RungAuto) {
		return nil
	}
	if e.memory, err = gpuio.ChooseRung(e.dev, e.ssds, want); err != nil {
		return err
	}
	if e.onGPU() {
		r := e.memory.Report()
		s := "I/O memory: rung " + r.Rung
		if r.How != "" {
			s += " (" + r.How + ")"
		}
		for _, t := range gpuio.Together(r.Tried) {
			s += "; not " + t.Rung + ": " + t.Why
		}
		e.obs.note(s)
	}
	return nil
}

// openBLAS opens the library of Config.BLAS.
func (e *engine) openBLAS() error {
	want := e.cfg.BLAS
	if want == "" || want == BLASOff {
		return nil
	}
	if !e.onGPU() { // auto: hostOnly has refused the rest
		e.obs.note("products by our own kernels: --blas is for a GPU, and this is the host device")
		return nil
	}
	library := want
	if want == BLASAuto {
		library = ""
	}
	var err error
	if o, ok := e.dev.(cuda.BLASOpener); ok {
		e.blas, err = o.OpenBLAS(library)
	} else {
		err = errs.New(errs.Capability, "device %s knows of none", e.dev.Info().Name)
	}
	switch {
	case err == nil:
		e.onClose(e.blas.Close)
		return nil
	case want == BLASAuto && errs.ClassOf(err) == errs.Capability:
		e.blas = nil
		e.obs.note(fmt.Sprintf("products by our own kernels, for no BLAS can be used: %v", err))
		return nil
	}
	return fmt.Errorf("--blas %s: %w", want, err)
}

// info is what the run says of itself.
func (e *engine) info() RunInfo {
	r := RunInfo{MemoryRung: memoryRung(e.ssds), Precision: e.cfg.precision().String(), BLAS: BLASOff, GPUCacheShrunkBytes: e.gpuShrunk, Hotness: e.hotness}
	r.Policy, r.Window, r.Sampler, r.Topology = e.cfg.Policy, e.cfg.Window, e.cfg.Sampler, e.cfg.Topology
	if e.cfg.dynamic() {
		r.CacheLineBytes = e.dyn.lines.LineBytes
		if e.dyn.Dynamic != nil {
			r.PolicyBytes = e.dyn.MetadataBytes()
		}
	}
	if e.acc.MaxBatches > 0 {
		a := e.acc
		r.Accumulator = &a
	}
	r.TopologyStorage, r.Tuned = e.topologyInfo(), e.tuned
	if e.in.Dataset != nil {
		s := e.in.Dataset.SealInfo()
		r.Seal = &s
	}
	if e.memory != nil {
		m := e.memory.Report()
		r.MemoryRung, r.MemoryRungTried = m.Rung, m.Tried
	}
	if e.blas != nil {
		r.BLAS = e.blas.Name()
	}
	return r
}

// arithmetic names what computes and rounds: the host's kernels by their level, a GPU's by precision and BLAS.
func (e *engine) arithmetic() string {
	k := e.dev.Info().Kernels
	if p := e.cfg.precision(); p != cuda.FP32 {
		k += " " + p.String()
	}
	if e.blas != nil {
		k += " " + e.blas.Name()
	}
	return k
}

func memoryRung(ssds []*gpuio.SSD) string {
	var buses []nvme.Bus
	for _, d := range ssds {
		if d != nil && d.Ctrl != nil {
			buses = append(buses, d.Ctrl.Bus())
		}
	}
	return rungOf(buses)
}

// rungOf tells software controllers, which are kicked after a doorbell, from real ones.
func rungOf(buses []nvme.Bus) string {
	soft := 0
	for _, b := range buses {
		for {
			u, ok := b.(nvme.Unwrapper)
			if !ok {
				break
			}
			b = u.Unwrap()
		}
		if _, ok := b.(nvme.Kicker); ok {
			soft++
		}
	}
	switch {
	case soft == len(buses):
		return rungProxy
	case soft == 0:
		return rungPinned
	}
	return rungMixed
}
