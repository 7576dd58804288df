package sched

import "helios/graph"

// openTopology opens what sampling reads.
func (e *engine) openTopology(in Inputs) (err error) {
	topology := in.Dataset.Topology
	if e.onGPU() {
		topology = in.Dataset.TopologyInMemory
	}
	if e.topo, err = topology(); err != nil {
		return err
	}
	if e.dtopo, err = graph.Attach(e.dev, e.topo); err != nil {
		return err
	}
	e.onClose(e.dtopo.Close)
	return nil
}

// newSampler makes a sampler of the run's kind.
func (e *engine) newSampler(fanouts []int) (*graph.Sampler, error) {
	return graph.NewSampler(e.dev, e.dtopo, graph.SamplerConfig{
		Fanouts: fanouts, Seed: e.cfg.Seed, Degrees: e.cfg.Model == "gcn", Layerwise: e.cfg.Sampler == SamplerLadies,
	})
}
