package graph

import (
	"context"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Layer-wise sampling weighs all in-neighbours of a hop's destinations, so over a topology on
// storage it reads their whole lists. They are put where they would stand in memory: at their
// edges' places in a stretch of addresses as long as all ids, which takes memory for the pages that
// are written only. So the kernels are the same. The next hop gives them back.

// farLists is that stretch.
type farLists struct {
	store *storage
	mem   []byte // 4 bytes an edge
	ids   []uint32
	nodes []int64 // scratch
}

func newFarLists(t *Topology) (*farLists, error) {
	l := &farLists{store: t.far}
	if t.NumEdges > 0 {
		var err error
		if l.mem, err = unix.Mmap(-1, 0, int(t.NumEdges)*4, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE); err != nil {
			return nil, errs.New(errs.Capability,
				"topology on storage: %d bytes of addresses for lists: %w; raise the limit (ulimit -v), or give %v %s",
				t.NumEdges*4, err, errs.Key("sampler"), Neighbor)
		}
		// A list must not bring two megabytes with it.
		_ = unix.Madvise(l.mem, unix.MADV_NOHUGEPAGE)
		l.ids = hostmem.View[uint32](l.mem)
	}
	return l, nil
}

func (l *farLists) close() error {
	if l.mem == nil {
		return nil
	}
	mem := l.mem
	l.mem, l.ids = nil, nil
	return unix.Munmap(mem)
}

func (l *farLists) ptr() cuda.DevicePtr {
	return cuda.DevicePtr(uintptr(unsafe.Pointer(unsafe.SliceData(l.mem))))
}

// drop lets the lists of the hop before go. No kernel may be reading them.
func (l *farLists) drop() error {
	if l.mem == nil {
		return nil
	}
	return unix.Madvise(l.mem, unix.MADV_DONTNEED)
}

// stage brings the lists of nodes in, after drop.
func (l *farLists) stage(ctx context.Context, nodes []int64) error {
	s, t := l.store, l.store.t
	if l.mem == nil {
		return nil
	}
	l.nodes = append(l.nodes[:0], nodes...)
	slices.Sort(l.nodes)
	l.nodes = slices.Compact(l.nodes)
	var edges, cached int64
	far := l.nodes[:0]
	for _, v := range l.nodes {
		d := t.InDegree(v)
		edges += d
		if first, ok := s.cache.find(v); ok {
			copy(l.ids[t.Indptr[v]:t.Indptr[v+1]], s.cache.lists[first:first+d])
			cached += d
		} else if d > 0 {
			far = append(far, v)
		}
	}
	s.reader.mu.Lock()
	defer s.reader.mu.Unlock()
	begin, pages := time.Now(), s.reader.pagesRead
	err := s.readLists(ctx, int64(len(far)), func(i int64) int64 { return far[i] },
		func(v int64) []uint32 { return l.ids[t.Indptr[v]:t.Indptr[v+1]] })
	s.count(edges, cached, s.reader.pagesRead-pages)
	if len(far) > 0 {
		s.stats.Wait += time.Since(begin)
	}
	return err
}
