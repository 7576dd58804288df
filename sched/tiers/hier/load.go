package hier

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/graph"
	"helios/graph/induced"
	"helios/internal/hostmem"
	"helios/sched/engine"
	"helios/sched/prepare"
	"helios/sched/report"
)

// slab is room for a mega-batch, and the one that is in it.
type slab struct {
	rows   cuda.Buffer
	hetero *cache.Hetero // over the static rows and these
	// at has the parts whose rows are in place, and the page of the slab where they begin.
	at map[int]int64

	parts   []int // of the mega-batch; nil: none is there
	places  *induced.Places
	topo    *graph.Topology
	dtopo   *graph.DeviceTopology
	sampler *graph.Sampler
	old     []uint32    // by row, the node in the dataset; nil: nobody asks
	scales  cuda.Buffer // pinned, by row; nil: rows have none, or are looked up by node
}

// holds reports whether the mega-batch of these parts is there.
func (m *slab) holds(parts []int) bool { return m.parts != nil && slices.Equal(m.parts, parts) }

// close releases the mega-batch, its rows aside.
func (m *slab) close() error {
	var all []error
	if m.sampler != nil {
		all = append(all, m.sampler.Close())
	}
	if m.dtopo != nil {
		all = append(all, m.dtopo.Close())
	}
	if m.topo != nil {
		all = append(all, m.topo.Close())
	}
	m.parts, m.places, m.sampler, m.dtopo, m.topo, m.old = nil, nil, nil, nil, nil, nil
	return errors.Join(all...)
}

// takeScales puts the scales of nodes, by their numbers in the dataset, where those of rows from
// first on are looked up.
func (m *slab) takeScales(t *Tiers, first int64, nodes []uint32) {
	if m.scales == nil {
		return
	}
	to := hostmem.View[float32](m.scales.Bytes())[first:]
	all := t.Engine.Store.Scales()
	for i, v := range nodes {
		if int64(v) < t.Engine.Rows { // pages end in room for rows
			to[i] = all[v]
		}
	}
}

// load brings a mega-batch into a slab that nothing uses: its rows, the graph that its parts induce
// and a sampler over it.
func (t *Tiers) load(ctx context.Context, n *coming, reports bool) (err error) {
	e, p, m := t.Engine, t.parts, n.slab
	if err := m.close(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			clear(m.at)
			err = errors.Join(err, m.close())
		}
	}()
	places := p.Place(n.parts, m.at)
	m.at = places.At
	for i, r := range []struct {
		runs []prepare.PageRun
		to   cuda.Buffer
		name string
	}{{places.Features, m.rows, "load rows"}, {places.Edges, t.raw, "load edges"}} {
		took, err := e.Store.ReadPages(ctx, r.runs, r.to, r.name, reports)
		n.took = report.AddReadStats(n.took, took)
		n.bytes[i] += took.Bytes
		if err != nil {
			return err
		}
	}
	hooked := engine.NamesNodes(e)
	if hooked {
		m.old = make([]uint32, t.room.Rows)
		for i := range m.old {
			m.old[i] = math.MaxUint32
		}
		copy(m.old, t.staticOld)
	}
	m.takeScales(t, 0, t.staticOld)
	parts, raw := places.Parts, t.raw.Bytes()
	for i := range parts {
		q := &parts[i]
		var old []uint32
		if q.Lists, old, err = lists(p.Section(q.Part, places.Section(i, raw))); err != nil {
			return err
		}
		if hooked {
			copy(m.old[q.First:], old)
		}
		m.takeScales(t, q.First, old)
	}
	if m.places, err = induced.NewPlaces(p.Numbering, t.room.Rows, parts); err != nil {
		return err
	}
	begin := time.Now()
	workers := 0
	if !e.OnGPU() {
		workers = e.Device.Info().SMs
	}
	if m.topo, err = induced.Build(ctx, m.places, t.lists, parts, workers); err != nil {
		return fmt.Errorf("mega-batch of parts %v: %w", n.parts, err)
	}
	n.induce = time.Since(begin)
	e.Trace.Beside(report.TrackInspect, "induce topology", begin)
	if m.dtopo, err = graph.Attach(e.Device, m.topo); err != nil {
		return err
	}
	if m.sampler, err = e.SamplerOver(m.dtopo); err != nil {
		return err
	}
	m.parts = n.parts
	return nil
}
