package graph

import (
	"errors"
	"fmt"

	"helios/cuda"
	"helios/internal/errs"
)

// DeviceTopology is a topology that kernels can read in place: its slices are registered with
// the device as pinned memory (read over UVA) and never copied.
type DeviceTopology struct {
	Host            *Topology
	indptr, indices cuda.Buffer

	// Of a topology on storage: its cache's lines, starts and lists where they are not empty, and
	// on a GPU the host device that samples in its place (hop_relay.go).
	cache [3]cuda.Buffer
	inner *innerHost
}

// Attach registers the slices of t, which must be outside Go's heap and stay until Close.
func Attach(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	if t.OnStorage() {
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
	err := free(&d.indptr, &d.indices, &d.cache[0], &d.cache[1], &d.cache[2])
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

// attachStorage is Attach for a topology on storage.
func attachStorage(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	d := &DeviceTopology{Host: t}
	if dev.Info().Backend != "host" {
		h, err := cuda.NewHost(cuda.HostOptions{})
		if err != nil {
			return nil, fmt.Errorf("attach topology: %w", err)
		}
		d.inner = &innerHost{dev: h}
		if d.inner.topo, err = attachStorage(h, t); err != nil {
			return nil, errors.Join(err, h.Close())
		}
		return d, nil
	}
	var err error
	if d.indptr, err = dev.Register(bytesOf(t.Indptr), "topology offsets"); err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	for i, m := range t.far.cache.mem {
		if len(m) == 0 {
			continue
		}
		if d.cache[i], err = dev.Register(m, cachePurpose); err != nil {
			return nil, errors.Join(fmt.Errorf("attach topology: %w", err), d.Close())
		}
	}
	return d, nil
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
