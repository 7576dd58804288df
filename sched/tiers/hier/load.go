package hier

import (
	"context"
	"errors"
	"math"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/graph/induced"
	"helios/internal/hostmem"
	"helios/sched/engine"
	"helios/sched/prepare"
	"helios/sched/report"
)

// slab is room for a mega-batch, and the one that is in it.
type slab struct {
	megaBatch
	rows   cuda.Buffer
	hetero *cache.Hetero // over the static rows and these
	old    []uint32      // by row, the node in the dataset; nil: nobody asks
	scales cuda.Buffer   // pinned, by row; nil: rows have none, or are looked up by node
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
	m.old = nil
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
	if err = m.induce(ctx, e.Sampling, t.lists, parts, workers); err != nil {
		return err
	}
	n.induce = time.Since(begin)
	e.Trace.Beside(report.TrackInspect, "induce topology", begin)
	m.parts = n.parts
	return nil
}
