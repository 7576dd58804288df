package sched

import (
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/nvme"
	"helios/sched/plan"
	"helios/sched/report"
)

// Memory rungs: where queues and data are, as results name them.
const (
	rungPinned = "pinned" // in locked host memory that the SSDs reach by the IOMMU
	rungProxy  = "proxy"  // software controllers, or reads through the kernel
	rungMixed  = "mixed"  // some of each
)

// openBLAS opens the library of Config.BLAS.
func (e *runner) openBLAS() error {
	want := e.Config.BLAS
	if want == "" || want == plan.BLASOff {
		return nil
	}
	if !e.OnGPU() { // auto: hostOnly has refused the rest
		e.Observer.TellNote("products by our own kernels: {blas} is for a GPU, and this is the host device")
		return nil
	}
	var err error
	if o, ok := e.Device.(cuda.BLASOpener); ok {
		e.blas, err = o.OpenBLAS(e.blasLibrary())
	} else {
		err = errs.New(errs.Capability, "device %s knows of none", e.Device.Info().Name)
	}
	switch {
	case err == nil:
		e.OnClose(e.blas.Close)
		return nil
	case want == plan.BLASAuto && errs.ClassOf(err) == errs.Capability:
		e.blas = nil
		e.Observer.TellNote("products by our own kernels, for no BLAS can be used: %v",
			err)
		return nil
	}
	return errs.Errorf("{blas} %s: %w", want, err)
}

// blasLibrary returns the library of Config.BLAS, "" for the usual one.
func (e *runner) blasLibrary() string {
	if e.Config.BLAS == plan.BLASAuto {
		return ""
	}
	return e.Config.BLAS
}

// info describes the run in results.
func (e *runner) info() report.RunInfo {
	r := report.RunInfo{MemoryRung: memoryRung(e.Store.SSDs),
		Precision: e.Config.ProductPrecision().String(), BLAS: plan.BLASOff,
		GPUCacheShrunkBytes: e.GPUShrunk, Hotness: e.Hotness}
	r.Policy, r.Window, r.Sampler, r.Topology = e.Config.Policy, e.Config.Window, e.Config.Sampler,
		e.Config.Topology
	r.Shards, r.Replicas = e.Config.Shards, e.Config.Replicas
	if r.Replicas > 1 {
		r.Reduce = plan.ReduceTree
	}
	if e.collective != nil {
		r.Reduce = e.collective.Name() + ", not bit-exact"
	}
	for _, d := range e.In.More {
		r.MoreDevices = append(r.MoreDevices, d.Info().Name)
	}
	r.BatchDependency, r.SampleEpochs = e.Config.BatchDependency, e.Config.SampleEpochs
	r.Refresh, r.RefreshEvery = e.Config.Refresh, e.Config.RefreshEvery
	e.Tiers.Describe(&r)
	r.TopologyStorage, r.Tuned, r.Choice = e.TopologyInfo(), e.tuned, e.Config.Chosen
	r.Checks, r.SSDNotes = &e.Store.Checked, e.Store.Notes
	if e.In.Dataset != nil {
		s := e.In.Dataset.SealInfo()
		r.Seal = &s
	}
	if e.Store.Memory != nil {
		m := e.Store.Memory.Report()
		r.MemoryRung, r.MemoryRungTried = m.Rung, m.Tried
	}
	if e.blas != nil {
		r.BLAS = e.blas.Name()
	}
	return r
}

// arithmetic names what computes and rounds: the host's kernels by their level, a GPU's by
// precision and BLAS.
func (e *runner) arithmetic() string {
	k := e.Device.Info().Kernels
	if p := e.Config.ProductPrecision(); p != cuda.FP32 {
		k += " " + p.String()
	}
	if e.blas != nil {
		k += " " + e.blas.Name()
	}
	if e.collective != nil {
		k += " " + e.collective.Name()
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
