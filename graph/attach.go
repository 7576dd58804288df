package graph

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"helios/cuda"
	"helios/internal/errs"
)

// DeviceTopology is a topology that kernels can read in place: its slices are registered with
// the device as pinned memory (read over UVA) and never copied.
type DeviceTopology struct {
	Host            *Topology
	indptr, indices cuda.Buffer
	relations       []*DeviceTopology // of a typed graph

	// Of a topology on storage: its cache's lines, starts and lists where they are not empty.
	cache [3]cuda.Buffer
	host  cuda.Device // that they are registered with
	// On a GPU, of a topology on storage: the host device that samples in its place (hop_relay.go).
	inner *innerHost

	mu       sync.Mutex
	looked   bool        // for edges of a node to itself
	loopless cuda.Buffer // see looplessDegrees
}

// Attach registers the slices of t, which must be outside Go's heap and stay until Close.
func Attach(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	switch {
	case dev.Info().Backend != "host" && t.OnStorage():
		return attachInner(t)
	case t.Schema != nil:
		return attachRelations(dev, t)
	case t.OnStorage():
		return attachStorage(dev, t)
	}
	if int64(len(t.Indptr)) != t.NumNodes+1 ||
		int64(len(t.Indices32)+len(t.Indices64)) != t.NumEdges {
		return nil, errs.New(errs.Usage,
			"topology: %d offsets and %d ids for %d nodes and %d edges; run Validate on it first",
			len(t.Indptr), len(t.Indices32)+len(t.Indices64), t.NumNodes, t.NumEdges)
	}
	d := &DeviceTopology{Host: t}
	var err error
	if d.indptr, err = dev.Register(bytesOf(t.Indptr), "topology offsets"); err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	ids := bytesOf(t.Indices32)
	if t.Wide() {
		ids = bytesOf(t.Indices64)
	}
	if len(ids) > 0 {
		if d.indices, err = dev.Register(ids, "topology ids"); err != nil {
			_ = d.indptr.Free()
			return nil, fmt.Errorf("attach topology: %w", err)
		}
	}
	return d, nil
}

// Close ends the registrations; the topology's memory stays.
func (d *DeviceTopology) Close() error {
	err := free(&d.indptr, &d.indices, &d.loopless, &d.cache[0], &d.cache[1], &d.cache[2])
	for _, r := range d.relations {
		err = errors.Join(err, r.Close())
	}
	if d.inner != nil {
		err = errors.Join(err, d.inner.close())
	}
	return err
}

// innerHost is the host device beside a GPU.
type innerHost struct {
	dev  *cuda.Host
	topo *DeviceTopology
}

func (h *innerHost) close() error {
	var err error
	if h.topo != nil {
		err = h.topo.Close()
	}
	return errors.Join(err, h.dev.Close())
}

// attachInner attaches a topology to a host device beside a GPU.
func attachInner(t *Topology) (*DeviceTopology, error) {
	h, err := cuda.NewHost(cuda.HostOptions{})
	if err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	d := &DeviceTopology{Host: t, inner: &innerHost{dev: h}}
	if d.inner.topo, err = Attach(h, t); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return d, nil
}

// attachRelations attaches the relations of a typed graph.
func attachRelations(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	d := &DeviceTopology{Host: t}
	for r, lists := range t.Relations {
		x, err := Attach(dev, lists)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("relation %s: %w", t.Schema.RelationName(r), err),
				d.Close())
		}
		d.relations = append(d.relations, x)
	}
	return d, nil
}

// attachStorage is Attach for a topology on storage, to a host device.
func attachStorage(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	d := &DeviceTopology{Host: t}
	var err error
	if d.indptr, err = dev.Register(bytesOf(t.Indptr), "topology offsets"); err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	d.host = dev
	if err := d.registerLists(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// registerLists registers what there is of the neighbour cache and is not registered yet.
func (d *DeviceTopology) registerLists() (err error) {
	for i, m := range d.Host.far.cache.mem {
		if len(m) == 0 || d.cache[i] != nil {
			continue
		}
		if d.cache[i], err = d.host.Register(m, cachePurpose); err != nil {
			return fmt.Errorf("attach topology: %w", err)
		}
	}
	return nil
}

// ReleaseLists frees the memory of the neighbour cache's lists, and FillLists brings the same lists
// back: a run may have another use for the memory while nothing is sampled. Between the two,
// sampling reads every list from storage and gives the same blocks. The bits that name these lists
// stay: 64 bytes for 384 nodes. Nothing may be sampled during a call. Without a neighbour cache, or
// with one that is as it is to be, they do nothing.
func (d *DeviceTopology) ReleaseLists() error {
	if d.inner != nil {
		return d.inner.topo.ReleaseLists()
	}
	var err error
	for _, r := range d.relations {
		err = errors.Join(err, r.ReleaseLists())
	}
	if d.Host.far != nil {
		err = errors.Join(err, free(&d.cache[1], &d.cache[2]), d.Host.far.cache.release())
	}
	return err
}

// FillLists reads the lists that ReleaseLists has freed: front to back, the pages that hold them,
// as many at a time as a hop's. They go into mem, of ListBytes, until ReleaseLists; nil: into
// memory of their own. It returns the bytes that were read. After an error there are none.
func (d *DeviceTopology) FillLists(ctx context.Context, mem []byte) (bytes int64, err error) {
	if d.inner != nil {
		return d.inner.topo.FillLists(ctx, mem)
	}
	for i, r := range d.relations {
		n := r.ListBytes()
		var part []byte // nil: of its own
		if mem != nil {
			part, mem = mem[:n:n], mem[n:]
		}
		more, err := r.FillLists(ctx, part)
		if err != nil {
			return 0, errors.Join(fmt.Errorf("relation %s: %w", d.Host.Schema.RelationName(i), err),
				d.ReleaseLists())
		}
		bytes += more
	}
	s := d.Host.far
	if s == nil || s.cache.ids == 0 || s.cache.lists != nil {
		return bytes, nil
	}
	if err := s.cache.reserve(d.Host, mem); err != nil {
		return 0, err
	}
	if bytes, err = s.refill(ctx); err == nil {
		err = d.registerLists()
	}
	if err != nil {
		err = errors.Join(err, d.ReleaseLists())
	}
	return bytes, err
}

// ListBytes is the memory of the neighbour cache's lists.
func (d *DeviceTopology) ListBytes() (n int64) {
	for _, r := range d.Host.Relations {
		if r.far != nil {
			n += r.far.cache.listBytes()
		}
	}
	if d.Host.far != nil {
		n += d.Host.far.cache.listBytes()
	}
	return n
}

func free(bufs ...*cuda.Buffer) error {
	var err error
	for _, b := range bufs {
		if *b != nil {
			if e := (*b).Free(); err == nil {
				err = e
			}
			*b = nil
		}
	}
	return err
}
